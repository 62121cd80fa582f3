"""``kvxfer bench pd`` without engines: what is sent, what is made of it, and a whole sitting against servers that play engines."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

pytest.importorskip("aiohttp")
from typer.testing import CliRunner

from kvxfer.bench import results, shapes
from kvxfer.bench.command import bench
from kvxfer.bench.pd import points, tables, verify
from kvxfer.bench.pd.arms import ALONE, Arm, Build, make_arms, parse_arm, parse_arms, running_arm
from kvxfer.bench.pd.sitting import Findings, Settings, Sitting, Window
from kvxfer.bench.pd.window import HITS, Line, Sample, counted, joined, layout, stages
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.transport.records import HandoffRecord, Times
from tests.support.played import Played, serving

# --- what is sent -----------------------------------------------------------------------------------------------------


def test_loads_are_read() -> None:
    assert points.loaded("4000@8x48, 16000@1.8x24,", 128, "uniform") == [
        points.Point(4000, 128, 48, 8.0),
        points.Point(16000, 128, 24, 1.8),
    ]
    assert [p.name for p in points.loaded("16000@1.8x24", 128, "mixed")] == ["mixed16000@1.8"]
    assert points.loaded("", 128, "uniform") == []


@pytest.mark.parametrize("text", ["4000", "4000@8", "4000@0x3", "0@1x3", "4000@1x0", "a@1x1", "4000@8x48;1@1x1"])
def test_loads_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="TOKENS@QPSxREQUESTS"):
        points.loaded(text, 1, "uniform")


def test_a_window_is_the_same_for_every_arm_and_no_prompt_is_ever_sent_twice() -> None:
    uniform, mixed = points.loaded("300@4x16,300@8x16", 32, "uniform"), points.loaded("300@4x16", 32, "mixed")
    seen = set()
    for seed in (0, 1):
        for point in (*uniform, *mixed):
            for number in (0, 1):
                window = points.window(point, number, seed=seed, vocab=1024)
                assert window == points.window(point, number, seed=seed, vocab=1024)
                assert [one.at for one in window] == sorted(one.at for one in window)
                assert window[0].at == 0.0
                seen |= {tuple(one.prompt) for one in window}
        for number in range(10):
            seen.add(tuple(points.one(points.Point(300, 32, 10), number, seed=seed, vocab=1024).prompt))
    assert len(seen) == 2 * (3 * 2 * 16 + 10)
    assert all(3 <= token < 1024 for prompt in seen for token in prompt)


def test_arrivals_have_the_rate_that_is_asked_for() -> None:
    point = points.Point(8, 2, 4000, 8.0)
    window = points.window(point, 0, seed=3, vocab=64)
    assert window[-1].at == pytest.approx(4000 / 8, rel=0.05)


def test_a_mixed_trace_has_all_lengths_up_to_the_points() -> None:
    point = points.Point(1600, 128, 400, 50.0, "mixed")
    window = points.window(point, 0, seed=0, vocab=64)
    lengths = sorted(len(one.prompt) for one in window)
    assert lengths[0] >= 100
    assert lengths[-1] <= 1600
    assert lengths[200] == pytest.approx(400, rel=0.25), "as many below the geometric mean as above"
    assert {one.output for one in window} <= set(range(32, 129))
    assert len({one.output for one in window}) > 50


def test_a_crowd_has_requests_of_all_lengths_that_end_one_by_one() -> None:
    crowd = points.crowd([400, 1600], 50, 0, 64)
    assert crowd == points.crowd([400, 1600], 50, 0, 64)
    assert len({tuple(one.prompt) for one in crowd}) == 50
    assert 25 <= min(len(one.prompt) for one in crowd) <= max(len(one.prompt) for one in crowd) <= 400
    assert len({one.output for one in crowd}) > 20


# --- arms -------------------------------------------------------------------------------------------------------------


def test_arms_are_read() -> None:
    arm = parse_arm("kvxfer-push:max_num_batched_tokens=4096:stream=false:rails=all")
    assert (arm.text, arm.connector, arm.budget) == (
        "push:max_num_batched_tokens=4096:stream=false:rails=all",
        "push",
        4096,
    )
    assert arm.settings == {"stream": False, "rails": "all"}
    assert [(a.mode, a.ours) for a in parse_arms("alone,push,pull,upstream-push,upstream-pull")] == [
        (None, False), ("push", True), ("pull", True), ("push", False), ("pull", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shove",
        "push,push",
        "push,kvxfer-push",
        "push:stream",
        "alone:stream=false",
        "push:max_num_batched_tokens=0",
    ],
)
def test_arms_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_arms(text)


def test_arms_differ_in_their_connector_alone(tmp_path) -> None:
    build = Build(
        tmp_path,
        {"on_cpu": False, "block_size": 16, "max_num_batched_tokens": 100, "args": ("--x",), "environment": {"A": "1"}},
        backend="UCX",
        ours={"pin_limit": 0.3},
        prefill={"GPU": "0"},
        decode={"GPU": "1"},
        decode_args=("--y",),
    )
    arms = make_arms(parse_arms("alone,push,upstream-pull,push:stream=false"), build, tmp_path)
    assert len({port for arm in arms for e in arm.engines for port in (e.port, e.control_port)}) == 14

    def told(engine) -> tuple[list[str], dict]:
        command = list(engine.server.command)
        at = command.index("--kv-transfer-config") if "--kv-transfer-config" in command else len(command)
        config = json.loads(command[at + 1]) if at < len(command) else {}
        return command[:at][11:] + command[at + 2 :], config  # what follows the port

    (alone,), (prefill, decode), (theirs, _), (waits, _) = (arm.engines for arm in arms)
    assert told(alone)[0] == told(prefill)[0] == told(theirs)[0] == told(waits)[0]
    assert told(decode)[0] == [*told(prefill)[0], "--y"]
    assert "--enforce-eager" not in told(alone)[0]
    assert [e.server.environment["GPU"] for e in (alone, prefill, decode)] == ["0", "0", "1"]
    assert all(
        name not in prefill.server.environment for name in ("VLLM_CPU_OMP_THREADS_BIND", "TORCH_COMPILE_DISABLE")
    )
    ours, upstreams = told(prefill)[1], told(theirs)[1]
    assert ours["kv_connector_extra_config"].items() >= {"backend": "UCX", "pin_limit": 0.3}.items()
    assert told(waits)[1]["kv_connector_extra_config"]["stream"] is False
    assert upstreams["kv_connector"] == "NixlPullConnector"
    assert upstreams["kv_connector_extra_config"] == {"backends": ["UCX"]}
    assert "kv_connector_module_path" not in upstreams, "vLLM's own class, as it is registered"
    assert "kv_buffer_device" not in {**ours, **upstreams}


def test_all_pairs_of_a_sitting_go_through_host_memory_or_none(tmp_path) -> None:
    build = Build(tmp_path, {"on_cpu": False, "buffer_device": "cpu"})
    for arm in make_arms(parse_arms("push,pull,upstream-push,upstream-pull,alone"), build, tmp_path):
        for engine in arm.engines:
            told = [json.loads(text) for text in engine.server.command if "kv_role" in text]
            assert [one["kv_buffer_device"] for one in told] == ([] if arm.label == ALONE else ["cpu"])


def test_arms_that_run_already() -> None:
    arm = running_arm("upstream-push@http://p:81/,http://d:82,prefill-0@[fe80::1]:5600", "m", 8)
    prefill, decode = arm.engines
    assert (prefill.url, decode.url) == ("http://p:81", "http://d:82")
    assert (prefill.spec.name, prefill.control_host, prefill.control_port) == ("prefill-0", "fe80::1", 5600)
    assert (decode.control_port, arm.servers, prefill.spec.tensor_parallel) == (0, [], 8)
    assert [e.url for e in running_arm("alone@http://a:1", "m").engines] == ["http://a:1"]
    for text in ("push@http://p:1,http://d:2", "pull@http://p:1", "alone@a:1", "push@http://p:1,http://d:2,x"):
        with pytest.raises(ConfigError, match="--running"):
            running_arm(text, "m")


# --- what engines tell ------------------------------------------------------------------------------------------------


def test_counters_are_read_without_buckets() -> None:
    page = (
        'vllm:prefix_cache_hits_total{engine="0"} 32.0\nvllm:prefix_cache_hits_created{engine="0"} 1.7e9\n'
        'vllm:nixl_xfer_time_seconds_sum{a="b"} 1.5\nvllm:nixl_xfer_time_seconds_bucket{le="1"} 4.0\nother 1\n'
    )
    assert dict(counted(page)) == {HITS: 32.0, "vllm:nixl_xfer_time_seconds_sum": 1.5}


def record(side: str, *, outcome: str = "done", **changes) -> HandoffRecord:
    times = Times(**changes.pop("times", {}))
    return HandoffRecord("h", "r", side, 0, "push", outcome=outcome, times=times, **changes)


def test_both_sides_records_make_one_transfer() -> None:
    source = record(
        "source", bytes=100, descriptors=3, backend="UCX", completed=[(1.0, 60), (3.0, 100)],
        times={"chunks_final": [0.5, 2.0], "first_post": 0.6, "last_byte": 3.0},
    )  # fmt: skip
    sink = record("sink", tokens=99, times={"released": 3.25})
    one = joined([source, sink], one_host=True)
    assert (one.bytes, one.descriptors, one.tokens, one.outcome, one.backend) == (100, 3, 99, "done", "UCX")
    assert (one.fence_to_report, one.early) == (1.25, 0.6)
    assert one.moving == pytest.approx(2.4)
    two_hosts = joined([source, sink], one_host=False)
    assert two_hosts.fence_to_report is None, "two hosts have no clock in common"
    assert two_hosts.early == 0.6, "both moments are the source's"
    assert joined([source], one_host=True).outcome == "one side has no record"
    failed = joined([record("source", outcome="failed", reason="why"), sink], one_host=True)
    assert (failed.outcome, failed.reason) == ("done+failed", "why")


def test_stages_add_up_to_the_first_token() -> None:
    source = record(
        "source", bytes=100, descriptors=3, backend="UCX",
        times={"expected": 10.1, "chunks_final": [10.5, 12.0], "first_post": 10.6, "last_byte": 12.25},
    )  # fmt: skip
    sink = record("sink", tokens=99, times={"released": 12.5})
    sample = Sample(0, 100, 4, ttft=3.0, prefill=2.1, transfer=joined([source, sink], one_host=True, here=True))
    found = stages(sample, 10.0)
    assert found == pytest.approx(
        {
            "to prefill": 0.1,
            "queued and computed": 1.9,
            "until the first post": 0.0,
            "moving": 0.25,
            "until decode knows": 0.25,
            "decode's first token": 0.5,
        }
    )
    assert sum(found.values()) == pytest.approx(3.0)
    assert stages(Sample(0, 100, 4, ttft=3.0, prefill=2.1), 10.0) == pytest.approx(
        {"until prefill's answer": 2.1, "decode's first token": 0.9}
    )
    assert stages(Sample(0, 100, 4, ttft=3.0), 10.0) == {"queued and computed": 3.0}
    assert stages(Sample(0, 100, 4, error="x"), 10.0) == {}
    assert joined([source, sink], one_host=True).moments == {}, "another host's clock"
    # A token that came before the record says decode knew: no stage is negative, and the sum stays.
    early = stages(Sample(0, 100, 4, ttft=2.3, transfer=joined([source, sink], one_host=True, here=True)), 10.0)
    assert sum(early.values()) == pytest.approx(2.3)
    assert min(early.values()) >= 0.0


def plane(bases: tuple[int, ...], stride: int) -> Plane:
    return Plane("kv", "uint8", 1, tuple(range(len(bases))), bases, (0,), 1, stride, 16, ((4, 4),), ((4, 1),))


@pytest.mark.parametrize(
    ("bases", "stride", "expected"),
    [((0, 16, 32), 48, "block-major"), ((0, 4800, 9600), 16, "layer-major"), ((0,), 16, "layer-major")],
)
def test_layouts_are_told_apart(bases, stride, expected) -> None:
    assert layout(CacheMap((Group(4, 100, (plane(bases, stride),)),), ((0, 1 << 20),), "DRAM")) == expected


# --- servers that play engines ----------------------------------------------------------------------------------------


def three_arms(urls: list[str]) -> list[Arm]:
    alone, prefill, decode, prefill2, decode2 = urls
    return [
        running_arm(f"alone@{alone}", "m"),
        running_arm(f"upstream-push@{prefill},{decode},p@127.0.0.1:1", "m"),
        running_arm(f"upstream-pull@{prefill2},{decode2}", "m"),
    ]


def test_a_pulls_first_token_is_counted_from_prefills_leg_on() -> None:
    with serving(Played(delay=0.2), Played(delay=0.1)) as (prefill, decode):
        line = Line(running_arm(f"pull@{prefill},{decode}", "m"), 10.0)

        async def main() -> Sample:
            async with line:
                return await line.one(points.Planned(0, 0.0, [5, 6, 7], 3))

        sample = asyncio.run(main())
    assert sample.error == ""
    assert sample.ttft is not None
    assert sample.prefill is not None
    assert sample.prefill >= 0.2
    assert sample.ttft >= sample.prefill + 0.1
    assert len(sample.gaps) == 2


def test_a_sitting_sends_every_arm_the_same_and_compares_it_with_one_engine_alone() -> None:
    played = [Played(delay=0.01), Played(), Played(delay=0.03), Played(), Played(wrong=True)]
    settings = Settings(
        unloaded=points.unloaded([20, 40], 4, 3),
        loaded=points.loaded("30@200x6", 4, "mixed"),
        ageing=9,
        load_rounds=2,
        verification=verify.Plan(3, 5, 60, 6, 0, 1024),
    )
    said, kept = [], []
    with serving(*played) as urls:
        arms = three_arms(urls)
        findings = Sitting(arms, settings, said.append, lambda _: kept.append(1)).execute()
        body = tables.body(arms, settings, findings)
    assert [p["name"] for p in body["points"]] == ["20", "40", "mixed30@200"]
    assert len(kept) == 3 + 2 + 2 + 1, "after each arm's comparison, each point and window, and at the end"
    for point, requests in zip(body["points"], (3, 3, 12), strict=True):
        sent = {label: sorted(s["number"] for s in one["samples"]) for label, one in point["arms"].items()}
        assert sent == {label: list(range(requests)) for label in ("alone", "upstream-push", "upstream-pull")}
        assert all(one["failed"] == 0 for one in point["arms"].values())
        assert point["arms"]["upstream-pull"]["exposed_over"] == "alone"
        exposed = point["arms"]["upstream-push"]["exposed_ms"]
        ours, alone = (point["arms"][label]["ttft_ms"]["median"] for label in ("upstream-push", "alone"))
        assert exposed["of_medians"] == pytest.approx(ours - alone, abs=0.01)
        assert exposed["paired_n"] == requests
    prompts = [[tuple(body["prompt"]) for body in one.asked] for one in played]
    # Warm-up and measured requests are the same everywhere; one engine alone is asked more for comparison.
    assert sorted(prompts[1]) == sorted(prompts[3]) == sorted(prompts[2])
    assert set(prompts[1]) <= set(prompts[0])
    assert len(set(prompts[1])) == len(prompts[1]), "nobody gets a prompt twice"
    told = body["verified"]
    assert told["reference"]["changed_by_an_early_token"] == 3
    assert told["arms"]["upstream-push"]["crowd"]["identical"] == 5
    assert told["arms"]["upstream-pull"]["one_by_one"]["identical"] == 0
    assert body["complaints"] == [
        "upstream-pull, one_by_one: 0 of 3 answers have the tokens of one engine alone",
        "upstream-pull, crowd: 0 of 5 answers have the tokens of one engine alone",
    ]
    assert played[2].most >= 9, "a crowd comes all at once"


def test_upstreams_failures_end_its_part_and_ours_end_the_sitting() -> None:
    settings = Settings(unloaded=points.unloaded([20], 4, 8))
    played = [Played(), Played(), Played(), Played(), Played(fail=True)]
    with serving(*played) as urls:
        arms = three_arms(urls)
        findings = Sitting(arms, settings, lambda _: None, lambda _: None).execute()
        assert set(findings.dropped) == {"upstream-pull"}
        assert set(findings.windows["20"]) == {"alone", "upstream-push"}
        ours = [running_arm(f"pull@{urls[3]},{urls[4]}", "m")]
        with pytest.raises(KvxferError, match="pull: its first requests failed"):
            Sitting(ours, settings, lambda _: None, lambda _: None).execute()


def test_failures_in_a_row_are_counted_while_it_goes_on() -> None:
    played = [Played(), Played(), Played(), Played(), Played()]
    settings = Settings(unloaded=points.unloaded([20], 4, 12), warm_up=1)

    class Breaks(list):
        def append(self, body) -> None:
            super().append(body)
            if len(self) == 4:
                played[4].fail = True

    played[4].asked = Breaks()
    with serving(*played) as urls:
        arms = three_arms(urls)
        findings = Sitting(arms, settings, lambda _: None, lambda _: None).execute()
        body = tables.body(arms, settings, findings)
    told = body["points"][0]["arms"]
    assert told["alone"]["requests"] == told["upstream-push"]["requests"] == 12
    assert (told["upstream-pull"]["requests"], told["upstream-pull"]["failed"]) == (6, 4)
    assert "4 requests in a row failed" in body["arms"]["upstream-pull"]["dropped"]


def test_prefix_hits_are_counted_and_complained_of() -> None:
    settings = Settings(unloaded=points.unloaded([20], 4, 2))
    with serving(Played(hits=7), Played()) as (prefill, decode):
        arms = [running_arm(f"pull@{prefill},{decode}", "m")]
        findings = Sitting(arms, settings, lambda _: None, lambda _: None).execute()
        body = tables.body(arms, settings, findings)
    assert body["points"][0]["arms"]["pull"]["prefix_hits"] == 14
    assert body["complaints"] == ["20: a prefix cache of pull had 14 tokens that nobody sent before"]


def test_what_there_is_no_time_for_is_left_out_and_told() -> None:
    settings = Settings(
        unloaded=points.unloaded([20], 4, 3), loaded=points.loaded("20@0.01x5", 4, "uniform"), limit=30.0
    )
    with serving(Played()) as (url,):
        arms = [running_arm(f"alone@{url}", "m")]
        findings = Sitting(arms, settings, lambda _: None, lambda _: None).execute()
    assert findings.skipped == ["20@0.01: window 1 of each arm"]
    assert set(findings.windows) == {"20"}


def test_arms_compare_with_an_engine_that_computes_as_many_tokens_a_step() -> None:
    names = "push,alone,alone:max_num_batched_tokens=64,pull:max_num_batched_tokens=64,push:max_num_batched_tokens=32"
    arms = [Arm(name, ()) for name in parse_arms(names)]
    assert [tables.baseline(arm, arms) for arm in arms if arm.name.connector != ALONE] == [
        "alone",
        "alone:max_num_batched_tokens=64",
        "alone",
    ]
    assert tables.baseline(arms[0], arms[:1]) == ""


def test_tables_can_be_printed_of_everything(capsys) -> None:
    from rich.console import Console

    arms = [Arm(name, ()) for name in parse_arms("alone,push,pull")]
    point = points.Point(100, 4, 2)
    samples = [Sample(0, 100, 4, ttft=0.1, tpot=0.01, gaps=[0.01]), Sample(1, 100, 4, error="lost")]
    findings = Findings(
        windows={"100": {"push": [Window(0, samples)], "alone": [Window(0, samples[:1])]}}, dropped={"pull": "gone"},
        skipped=["4@1: window 1 of each arm"],
    )  # fmt: skip
    for arm in arms:
        findings.layouts[arm.label] = ["block-major"]
    settings = Settings(unloaded=[point])
    body = {"points": [tables._point(point, arms, findings.windows["100"])], "verified": None, "skipped": findings.skipped,
            "arms": {"pull": {"dropped": "gone"}}}  # fmt: skip
    tables.show(Console(width=160), body)
    shown = capsys.readouterr().out
    assert "1 (1 failed)" in shown
    assert "pull left the sitting: gone" in shown
    assert tables.complaints(body["points"], arms) == ["100: 1 requests of push failed: lost"]
    assert settings.unloaded == [point]


# --- results and shapes -----------------------------------------------------------------------------------------------


def test_results_files_are_told_from_others(tmp_path) -> None:
    import sys

    path = tmp_path / "deep" / "r.json"
    results.write(path, results.report("pd", {"a": 1}, sys.executable, points=[]))
    found = results.read(path, "pd")
    assert (found["kind"], found["settings"], found["points"]) == ("pd", {"a": 1}, [])
    assert {"made", "versions", "machine"} <= found.keys()
    assert list(tmp_path.joinpath("deep").iterdir()) == [path]
    with pytest.raises(results.ResultsError, match="not of kvxfer bench idle"):
        results.read(path, "idle")
    for text, why in (
        ("[", "no results file"),
        ("[]", "schema"),
        (json.dumps({**found, "version": results.VERSION + 1}), "this kvxfer reads"),
    ):
        path.write_text(text)
        with pytest.raises(results.ResultsError, match=why):
            results.read(path)
    with pytest.raises(results.ResultsError, match="no results file"):
        results.read(tmp_path / "nowhere")


def test_spreads() -> None:
    assert results.spread([]) is None
    assert results.spread([3.0]) == {
        "n": 1, "least": 3.0, "median": 3.0, "p90": 3.0, "p99": 3.0, "greatest": 3.0, "middle_half": 0.0,
    }  # fmt: skip
    found = results.spread([float(i) for i in range(101)])
    assert found == {
        "n": 101, "least": 0.0, "median": 50.0, "p90": 90.0, "p99": 99.0, "greatest": 100.0, "middle_half": 50.0,
    }  # fmt: skip


def test_a_shape_has_no_weights(tmp_path, monkeypatch) -> None:
    where, args, vocab = shapes.choose("qwen3-8b", tmp_path)
    assert args == ("--load-format", "dummy")
    assert sorted(path.suffix for path in where.iterdir()) == [".jinja", ".json", ".json", ".json", ".json"]
    config = json.loads((where / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (36, 4096, vocab)
    assert shapes.choose(str(where)) == (where, (), vocab)
    assert shapes.QWEN3_8B_KV.kv_bytes_per_token(2) == shapes.QWEN3_8B.kv_bytes_per_token(2) == 147_456
    for name in ("nothing", str(tmp_path)):
        with pytest.raises(ConfigError, match="none of small, qwen3-8b and qwen3-8b-kv"):
            shapes.choose(name)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_drives_running_engines_and_writes_results(tmp_path) -> None:
    out = tmp_path / "r.json"
    with serving(Played(), Played(), Played()) as (alone, prefill, decode):
        done = CliRunner().invoke(
            bench,
            ["pd", "--small", "--json", str(out), "--running", f"alone@{alone}", "--running", f"pull@{prefill},{decode}",
             "--served-model-name", "m", "--inputs", "30", "--repeats", "2", "--output", "4", "--load", "20@100x4",
             "--trace", "mixed", "--verify", "2", "--crowd", "2", "--seed", "5"],
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = results.read(out, "pd")
    assert [point["name"] for point in found["points"]] == ["30", "mixed20@100"]
    assert found["verified"]["arms"]["pull"]["crowd"] == {"prompts": 2, "identical": 2, "different": []}
    assert found["settings"]["seed"] == 5
    assert found["complaints"] == []
    assert "30 tokens, one after another" in done.output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--inputs", "0"], "--inputs"),
        (["--trace", "bursty"], "--trace"),
        (["--env", "A"], "--env"),
        (["--connector-config", "{"], "--connector-config"),
        (["--upstream-config", "[]"], "--upstream-config"),
        (["--arms", "push", "--verify", "1"], "alone"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_the_command_says_what_is_wrong(options, why) -> None:
    done = CliRunner().invoke(bench, ["pd", "--small", *options])
    assert done.exit_code == 1
    assert why in done.output


def test_a_failure_of_ours_fails_the_command_and_keeps_what_was_measured(tmp_path) -> None:
    out = tmp_path / "r.json"
    broken = Played()
    with serving(Played(), broken) as (prefill, decode):
        started = time.monotonic()
        broken.fail = True
        done = CliRunner().invoke(
            bench, ["pd", "--small", "--json", str(out), "--running", f"pull@{prefill},{decode}", "--inputs", "30"]
        )
    assert done.exit_code == 1, time.monotonic() - started
    assert "its first requests failed" in results.read(out, "pd")["complaints"][0]
