"""A running pair under vLLM's own load: what is scraped from it, what it wrote down and what it traced are what the results say."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent import futures
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvxfer.bench import engines, results
from kvxfer.bench.client import Client
from kvxfer.bench.engines import MODEL_NAME
from kvxfer.bench.process import running
from tests.e2e.conftest import PYTHON, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

_SAMPLE = re.compile(r"^(kvxfer_\w+)\{([^}]*)\} (\S+)", re.MULTILINE)


@contextmanager
def collector() -> Iterator[tuple[str, dict[str, list[object]]]]:
    """An OTLP collector: its address, and the spans that it gets, by trace."""
    grpc = pytest.importorskip("grpc")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    spans: dict[str, list[object]] = defaultdict(list)
    lock = threading.Lock()

    class Collector(service.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802 - the protocol's name
            with lock:
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans[span.trace_id.hex()].append(span)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", spans
    finally:
        server.stop(1)


@pytest.fixture(scope="module", params=["push", "pull"])
def observed(request, bench_model, tmp_path_factory):
    mode, where = request.param, tmp_path_factory.mktemp("observed")
    with collector() as (endpoint, spans):
        specs = engines.pair_specs(
            mode, bench_model, python=PYTHON, prefix_caching=False, num_blocks=260, max_model_len=4096,
            max_num_batched_tokens=512, connector_config={"records_dir": str(where / "lines"), "spans": True},
            args=["--otlp-traces-endpoint", endpoint],
        )  # fmt: skip
        first, second, router = engines.make_pair(mode, *specs, where)
        with running(first.server, second.server, router):
            yield Pair(mode, first, second, router), where, spans


def scraped(pair: Pair) -> dict[str, float]:
    """Every sample of kvxfer's of both engines: ``engine name{labels}`` → value, the engine's own index left out."""

    async def go() -> dict[str, float]:
        found = {}
        for side, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
            async with Client(engine.url) as client:
                for name, labels, value in _SAMPLE.findall(await client.metrics()):
                    kept = sorted(one for one in labels.split(",") if not one.startswith(("engine=", "model_name=")))
                    found[f"{side} {name}{{{','.join(kept)}}}"] = float(value)
        return found

    return asyncio.run(go())


def test_metrics_lines_and_spans_are_what_the_results_say(observed, bench_model) -> None:
    pair, where, spans = observed
    before, points = scraped(pair), []
    for number, (qps, length) in enumerate(((2, 300), (1, 900))):
        out = where / f"point{number}.json"
        command = [
            sys.executable, "-m", "kvxfer.bench.vllm_serve", str(out), "--mode", pair.mode, "--qps", str(qps), "--input", str(length),
            "--output", "8", "--requests", "6", "--seed", str(number), "--url", pair.router.url, "--model", str(bench_model),
            "--served-model-name", MODEL_NAME, "--engine", pair.prefill.url, "--engine", pair.decode.url, "--python", PYTHON,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        (point,) = results.read(out, "sweep")["points"]
        arm = point["arms"][pair.mode]
        points.append(arm["handoffs"])
        for stages in (arm["stages_ms"]["median"], arm["stages_ms"]["p99"]):
            assert abs(stages["the rest"]) <= 0.05 * sum(stages.values()), stages
            assert "wait for KV" in stages
    after = scraped(pair)
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    handoffs, size = sum(one["recorded"] for one in points), sum(one["bytes"] for one in points)
    assert handoffs >= 2 * 6
    assert all(one["outcomes"] == ["done"] for one in points)
    poster = ("prefill", "source") if pair.mode == "push" else ("decode", "sink")
    mode = f'mode="{pair.mode}"'
    assert grown[f'prefill kvxfer_handoffs_total{{{mode},outcome="done",side="source"}}'] == handoffs
    assert grown[f'decode kvxfer_handoffs_total{{{mode},outcome="done",side="sink"}}'] == handoffs
    assert grown[f'{poster[0]} kvxfer_transferred_bytes_total{{{mode},side="{poster[1]}"}}'] == size
    for side in ("prefill", "decode"):
        whole = [
            value
            for key, value in grown.items()
            if key.startswith(f"{side} kvxfer_handoff_stage_seconds_count") and 'stage="handoff"' in key
        ]
        assert whole == [handoffs]
    assert not [key for key, value in grown.items() if "outcome" in key and 'outcome="done"' not in key and value]

    lines = {
        side: read(where / "lines", engine.spec.name)
        for side, engine in (("prefill", pair.prefill), ("decode", pair.decode))
    }
    assert {side: len(found) for side, found in lines.items()} == {"prefill": handoffs, "decode": handoffs}
    assert sum(one["bytes"] for one in lines[poster[0]]) == size

    wanted = {one["trace"].split("-")[1]: one["handoff"] for one in lines["decode"]}
    assert len(wanted) == handoffs, "each request has a trace of its own, that the router began"
    deadline = 60
    while deadline and sum(len(named(spans[trace], "kvxfer.handoff")) for trace in wanted) < 2 * handoffs:
        threading.Event().wait(1.0)  # the SDK sends every five seconds
        deadline -= 1
    for trace in wanted:
        both = named(spans[trace], "kvxfer.handoff")
        assert len(both) == 2, "prefill's and decode's, in one trace"
        vllms = named(spans[trace], "llm_request")
        assert vllms, "vLLM's own spans are in the same trace"
        assert {span.parent_span_id for span in both} == {span.parent_span_id for span in vllms}
        assert len(named(spans[trace], "kvxfer.transfer")) == 1


def named(spans: list[object], name: str) -> list[object]:
    return [span for span in spans if span.name == name]


def read(directory: Path, engine: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / f"{engine}-rank0.jsonl").read_text().splitlines()]
