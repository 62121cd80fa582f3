"""The loads of the sweeps: what is made of ``vllm bench serve``'s results, and conversations against servers that play engines."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from typer.testing import CliRunner

pytest.importorskip("aiohttp")

from kvxfer.bench import multiturn, results, served, vllm_serve
from kvxfer.errors import KvxferError, TransportError
from kvxfer.transport.query import EngineReport, RankReport
from kvxfer.transport.records import HandoffRecord, Times
from tests.support.played import Played, serving

RAW = {
    "ttfts": [0.1, 0.2, 0.0, 0.4], "itls": [[0.01, 0.03], [0.02, 0.02], [], [0.05]], "output_lens": [3, 3, 0, 2],
    "errors": ["", "", "lost", ""], "generated_texts": ["a"] * 4,
}  # fmt: skip


def measured(hits: int = 0):
    return vllm_serve.point(RAW, "push", qps=1.5, input_tokens=1000, output_tokens=3, requests=4, hits=hits)


def test_a_point_is_made_of_requests_that_did_not_fail() -> None:
    point = measured()
    arm = point["arms"]["push"]
    assert (point["name"], point["qps"], point["trace"]) == ("1000@1.5", 1.5, "uniform")
    assert (arm["requests"], arm["failed"], arm["errors"]) == (4, 1, ["lost"])
    assert arm["ttft_ms"] == results.spread([100.0, 200.0, 400.0])
    assert arm["tpot_ms"] == results.spread([20.0, 20.0, 50.0])
    assert arm["itl_ms"]["n"] == 5
    assert vllm_serve.complaints(point, "push") == ["1000@1.5: 1 requests of push failed: lost"]
    assert "prefix cache of push had 7 tokens" in vllm_serve.complaints(measured(7), "push")[1]


def test_every_option_reaches_vllm_and_its_results_are_kept(tmp_path) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do [ $1 != --result-dir ] || directory=$2; echo $1 >> " + str(tmp_path / "options") + "; shift; done\n"
        f"cp {tmp_path}/raw.json $directory/raw.json\n"
    )  # fmt: skip
    python.chmod(0o755)
    (tmp_path / "raw.json").write_text(json.dumps(RAW))
    options = {
        "qps": 1.5, "input_tokens": 10, "output_tokens": 3, "requests": 4, "seed": 77, "url": "http://x", "model": "/m",
        "served_model_name": "n", "warm_up": 1,
    }  # fmt: skip
    raw = vllm_serve.measure(str(python), **options)
    assert raw == {key: value for key, value in RAW.items() if key != "generated_texts"}
    said = (tmp_path / "options").read_text().splitlines()
    after = dict(pairwise(said))
    assert (after["--seed"], after["--request-rate"], after["--num-prompts"], after["--num-warmups"]) == (
        "77",
        "1.5",
        "4",
        "1",
    )
    assert (after["--random-input-len"], after["--random-output-len"]) == ("10", "3")
    python.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(KvxferError, match="status 3"):
        vllm_serve.measure(str(python), **options)


def test_conversations_grow_by_what_was_said_and_count_what_prefill_did(tmp_path) -> None:
    out = tmp_path / "m.json"
    router, prefill = Played(), Played()
    prefill.page = lambda: (
        f'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {100.0 * len(router.asked)}\n'
        f'vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {50.0 * len(router.asked)}\n'
        f'vllm:nixl_xfer_time_seconds_sum{{engine="0"}} {0.001 * len(router.asked)}\n'
    )
    with serving(router, prefill) as (url, prefill_url):
        done = CliRunner().invoke(
            multiturn.app,
            [str(out), "--leg", "on", "--url", url, "--prefill-url", prefill_url, "--conversations", "3", "--turns", "3", "--first",
             "20", "--more", "10", "--answer", "4"],
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = results.read(out, "multiturn")
    assert found["settings"]["leg"] == "on"
    assert [turn["prompt_tokens"]["median"] for turn in found["turns"]] == [20, 34, 48]
    assert [turn["tokens_computed"] for turn in found["turns"]] == [300, 300, 300]
    assert [turn["tokens_taken_back"] for turn in found["turns"]] == [150, 150, 150]
    assert [turn["prefill_ms"]["KV transfer"] for turn in found["turns"]] == pytest.approx([1.0, 1.0, 1.0], abs=0.01)
    talks: dict[str, list[dict]] = {}
    for body in router.asked:
        talks.setdefault(body["conversation_id"], []).append(body)
    assert sorted(map(len, talks.values())) == [1, 3, 3, 3], "one that connects everything is not counted"
    for said in talks.values():
        for before, after in pairwise(said):
            assert after["prompt"][: len(before["prompt"])] == before["prompt"]
            assert len(after["prompt"]) == len(before["prompt"]) + 4 + 10
    firsts = {tuple(said[0]["prompt"]) for said in talks.values()}
    assert len(firsts) == 4


@pytest.mark.parametrize(
    ("options", "why"), [(["--leg", "maybe"], "--leg"), (["--leg", "on", "--prefill-control", "x"], "HOST:PORT")]
)
def test_conversations_say_what_is_wrong(tmp_path, options, why) -> None:
    out = tmp_path / "m.json"
    done = CliRunner().invoke(
        multiturn.app, [str(out), "--url", "http://127.0.0.1:9", "--prefill-url", "http://127.0.0.1:9", *options]
    )
    assert done.exit_code == 1
    assert why in done.output
    assert not out.exists()


def test_a_leg_that_is_not_what_it_is_called_is_complained_of(tmp_path) -> None:
    turns = [{"tokens_taken_back": 0}, {"tokens_taken_back": 0}]
    assert multiturn.amiss("off", turns) == multiturn.amiss("on", turns[:1]) == []
    assert "took nothing back" in multiturn.amiss("on", turns)[0]
    turns[1]["tokens_taken_back"] = 1000
    assert multiturn.amiss("on", turns) == []
    assert "1,000 tokens back in the leg that is off" in multiturn.amiss("off", turns)[0]
    out = tmp_path / "m.json"
    with serving(Played(), Played()) as (url, prefill_url):
        done = CliRunner().invoke(
            multiturn.app,
            [
                str(out),
                "--leg",
                "on",
                "--url",
                url,
                "--prefill-url",
                prefill_url,
                "--conversations",
                "1",
                "--turns",
                "2",
            ],
        )
    assert done.exit_code == 1
    assert results.read(out, "multiturn")["complaints"] != []


# --- handoffs of a point --------------------------------------------------------------------------------------------


class Metrics:
    """A client of engines whose ``/metrics`` says who they are."""

    def __init__(self, url):
        self.port = {"http://10.0.0.1:1": 5600, "http://10.0.0.2:1": 5700}.get(url)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass

    async def metrics(self):
        info = 'kvxfer_info{engine_id="e",host="0.0.0.0",port="%s",mode="push"} 1.0\n'
        return "up 1\n" + (info % self.port if self.port else "")


def record(name, side, size, outcome="done"):
    return HandoffRecord(name, "r", side, 0, "push", bytes=size, backend="LIBFABRIC", outcome=outcome, times=Times(1.0))


def test_the_handoffs_of_a_point_are_those_since_it_began_from_both_engines(monkeypatch) -> None:
    kept = {("10.0.0.1", 5600): [record("old", "source", 7)], ("10.0.0.2", 5700): [record("old", "sink", 0)]}

    def fetch(host, port, **_):
        return EngineReport("e", [RankReport(0, None, "LIBFABRIC", {}, list(kept[host, port]))])

    monkeypatch.setattr(served, "fetch_records", fetch)
    monkeypatch.setattr("kvxfer.bench.client.Client", Metrics)
    began = asyncio.run(served.HandedOver.at(["http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1"]))
    for name, size in (("a", 100), ("b", 50)):
        kept["10.0.0.1", 5600].append(record(name, "source", size))
        kept["10.0.0.2", 5700].append(record(name, "sink", 0))
    found = began.since()
    assert (found["recorded"], found["bytes"], found["outcomes"]) == (2, 150, ["done"])
    kept["10.0.0.1", 5600].append(record("c", "source", 9, "open"))
    assert "open" in began.since(patience=0.0)["outcomes"], "what is still open after the wait is told"


def test_engines_of_others_and_engines_that_do_not_answer_have_none(monkeypatch, capsys) -> None:
    monkeypatch.setattr("kvxfer.bench.client.Client", Metrics)
    assert asyncio.run(served.HandedOver.at(["http://10.0.0.3:1"])).since() is None

    def fetch(*_, **__):
        raise TransportError("nothing at 10.0.0.1:5600 answered")

    monkeypatch.setattr(served, "fetch_records", fetch)
    assert asyncio.run(served.HandedOver.at(["http://10.0.0.1:1"])).since() is None
    assert "nothing at 10.0.0.1:5600" in capsys.readouterr().err


def seen(seconds: float, *, outcome: str = "ok", path: bool = True) -> dict:
    stages = [{"stage": "prefill", "seconds": seconds - 0.01}, {"stage": "the rest", "seconds": 0.01}]
    return {"first_token_s": seconds, "outcome": outcome, "path": stages if path else []}


def test_the_median_and_the_slowest_requests_stages_are_kept() -> None:
    found = served.chosen([seen(0.3), seen(0.1), seen(0.2)])
    assert found == {"median": {"prefill": 190.0, "the rest": 10.0}, "p99": {"prefill": 290.0, "the rest": 10.0}}
    assert served.chosen([]) == {}


def test_first_tokens_are_the_routers_last_that_ended_well_and_no_other_proxys() -> None:
    from aiohttp import web

    async def go(answer, status=200):
        async def waterfall(_request):
            return web.json_response(answer, status=status)

        app = web.Application()
        app.router.add_get("/status/waterfall", waterfall)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await served.first_tokens(f"http://127.0.0.1:{runner.addresses[0][1]}", 2)
        finally:
            await runner.cleanup()

    warm_up, failed, bare = seen(9.0), seen(8.0, outcome="failed"), seen(7.0, path=False)
    told = {"requests": [warm_up, seen(0.1), failed, bare, seen(0.2)]}
    assert asyncio.run(go(told))["p99"]["prefill"] == 190.0
    for other in ({"detail": "Not Found"}, []):
        assert asyncio.run(go(other, 404)) == {}
    assert asyncio.run(go({"status": "ok"})) == {}
    assert asyncio.run(served.first_tokens("http://127.0.0.1:1", 2)) == {}
