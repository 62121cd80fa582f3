"""What vLLM's real scheduler carries to the metrics, and what the workers write down, are the handoffs' records: same counts, same bytes."""

import json
import random
import time
from collections import Counter

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry

from kvxfer.bench import model
from kvxfer.connector.connectors import KvxferPushConnector
from kvxfer.connector.stats import Stats
from kvxfer.transport.twin import TwinFabric
from tests.support.engine import SimEngine
from tests.support.prom import config, metric_types

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

LENGTHS = (40, 200, 77)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333{}-01"


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(model.build())


class Observed(SimEngine):
    """An engine whose scheduler's figures go to Prometheus, as the API server would have them, and whose requests are traced."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self.registry = CollectorRegistry()
        metrics = KvxferPushConnector.build_prom_metrics(config(), metric_types(self.registry), ["engine"], {0: ["0"]})
        made, added = self.scheduler.make_stats, self.scheduler.add_request

        def make_stats(*args, **kwargs):
            for one in (*args, *kwargs.values()):
                if isinstance(one, Stats):
                    metrics.observe(json.loads(json.dumps(one.data)))  # it crosses a process
            return made(*args, **kwargs)

        def add_request(request):
            request.trace_headers = {"traceparent": TRACE.format(request.request_id[-1])}
            return added(request)

        self.scheduler.make_stats, self.scheduler.add_request = make_stats, add_request

    def figures(self) -> Counter:
        """Every sample that is not zero: (name, its labels' values in the order of their names) → value."""
        return Counter(
            {
                (one.name, *(one.labels[label] for label in sorted(one.labels) if label != "engine")): one.value
                for family in self.registry.collect()
                for one in family.samples
                if one.value and not one.name.endswith("_created")
            }
        )

    def records(self):
        return [record for rank in self.ranks for record in rank.worker._worker._threads.mover.records.last(1000)]


def serve(p: Observed, d: Observed, mode: str, number: int, length: int, *, give_up: bool = False) -> None:
    rng = random.Random(number)
    prompt = [rng.randrange(1, 500) for _ in range(length)]
    leg = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": p.scheduler.connector._scheduler.control.port,
        "tp_size": 1,
        "transfer_id": f"t{number}",
    }
    if not give_up:
        p.add(f"p{number}", prompt, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"t{number}"})
    if mode == "pull":
        while not p.finish_reasons.get(f"p{number}") and not give_up:
            p.step()
    d.add(f"d{number}", prompt, leg)
    deadline, steps = time.monotonic() + 60.0, 0
    while p.busy or d.busy:
        assert time.monotonic() < deadline
        p.step()
        d.step()
        steps += 1
        if give_up and steps == 20:
            d.abort(f"d{number}")
        time.sleep(0.0005)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_metrics_and_lines_are_the_records(tiny, tmp_path, mode, runner) -> None:
    fabric = TwinFabric()
    settings = {"mode": mode, "runner": runner, "prefix_caching": False, "records_dir": str(tmp_path), "idle_wait": 0.0}
    p, d = Observed("p", fabric, tiny, **settings), Observed("d", fabric, tiny, **settings)
    try:
        for number, length in enumerate(LENGTHS):
            serve(p, d, mode, number, length)
        serve(p, d, mode, 9, 50, give_up=True)
        source, sink = p.records(), d.records()
        for engine, side, records in ((p, "source", source), (d, "sink", sink)):
            mine = [record for record in records if record.side == side and record.times.released is not None]
            found = engine.figures()
            for outcome, count in Counter(record.outcome for record in mine).items():
                if outcome == "done":  # what ended while nobody was owed anything is told with the next step
                    assert found["kvxfer_handoffs_total", mode, outcome, side] == count == len(LENGTHS)
            moved = sum(record.completed[-1][1] for record in mine if record.completed)
            assert found["kvxfer_transferred_bytes_total", mode, side] == moved
            assert found["kvxfer_descriptors_total", mode, side] == sum(record.descriptors for record in mine)
            assert (moved > 0) == (side == ("source" if mode == "push" else "sink"))
        assert d.figures()["kvxfer_handed_over_tokens_total", mode, "sink"] == sum(LENGTHS) - len(LENGTHS)
        assert d.figures()["kvxfer_reclaimable_tokens",] > 0
    finally:
        p.close()
        d.close()
    for engine, side, records in (("p", "source", source), ("d", "sink", sink)):
        lines = [json.loads(line) for line in (tmp_path / f"{engine}-rank0.jsonl").read_text().splitlines()]
        ended = [record for record in records if record.times.released is not None]
        told = [
            (one["handoff"], one["bytes"], one["outcome"]) for one in lines[: len(ended)]
        ]  # more may have ended since
        assert told == [(record.handoff, record.bytes, record.outcome) for record in ended]
        traces = {one["handoff"]: one["trace"] for one in lines if one["side"] == side and one["outcome"] == "done"}
        assert traces == {f"t{number}": TRACE.format(number) for number in range(len(LENGTHS))}
