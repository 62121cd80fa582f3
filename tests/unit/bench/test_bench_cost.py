"""The arithmetic and the tables of ``kvxfer bench engine``, and how its pairs are made and driven."""

import asyncio
import dataclasses
import itertools
import json
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
from rich.console import Console

from kvxfer.bench import cost, results
from kvxfer.bench.calls import METADATA, STEP, THREAD, Reading, Tally
from kvxfer.bench.client import Completion
from kvxfer.bench.cost import Findings, Measurement, Settings, specs_for
from kvxfer.bench.cost_report import Verdict, as_json, side, verdicts
from kvxfer.bench.cost_table import call_rows, show, sum_rows
from kvxfer.bench.engines import engine_command, make_engine, named_connector
from kvxfer.bench.handoffs import Pair
from kvxfer.errors import ConfigError, KvxferError

MODEL = Path("/models/m")


def request(scheduler_us, worker_us, steps, metadata_us=0.0):
    """What an engine counted for one request."""
    return Reading(
        {
            ("scheduler", STEP): Tally(steps, scheduler_us * 1e3),
            ("scheduler", METADATA): Tally(steps, metadata_us * 1e3),
            ("worker", "get_finished"): Tally(steps, worker_us * 1e3),
        }
    )


def test_a_side_is_summed_by_request_by_step_and_by_call():
    found = side([request(100, 300, 10, metadata_us=50), request(200, 600, 30), request(300, 900, 20)])
    assert found["requests"] == 3
    assert found["us_per_request"] == {"mean": 800.0, "median": 800.0, "p90": 1120.0}
    assert found["us_per_step"] == 40.0  # 2,400 µs in 60 steps
    assert found["steps_per_request"] == 20.0
    assert found["scheduler_us_per_request"] == 200.0
    assert found["worker_us_per_request"] == 600.0
    assert found["metadata_us_per_request"] == 16.7, "shown, and in no sum"
    assert found["calls"] == [
        {"part": "worker", "call": "get_finished", "calls_per_request": 20.0, "us_per_call": 30.0, "us_per_request": 600.0},
        {"part": "scheduler", "call": STEP, "calls_per_request": 20.0, "us_per_call": 10.0, "us_per_request": 200.0},
        {"part": "scheduler", "call": METADATA, "calls_per_request": 20.0, "us_per_call": 0.83, "us_per_request": 16.7},
    ]  # fmt: skip


def test_an_engine_that_made_no_step_has_no_time_for_one():
    found = side([Reading(), Reading()])
    assert found["us_per_step"] is None
    assert found["us_per_request"]["mean"] == 0.0


def measured(us, steps=10, *, short=100.0, long=120.0, itl=5.0, prefill=1000.0):
    """One connector's part of a result; every request takes ``us`` on decode and twice that on prefill."""
    sides = {"decode": side([request(us / 2, us / 2, steps)] * 2), "prefill": side([request(us, us, steps)] * 2)}
    window = {"tokens": 100, "prompts": 3, "itl_ms": {"mean": 5.0, "median": 5.0, "p90": 6.0}}
    prefill_ms = {"mean": 1000.0, "median": 1000.0, "p90": 1100.0}
    return {
        **sides,
        "served": sides,
        "lengths": {
            "8192": {"decode": side([request(long, 0, 30)] * 2), "prefill": sides["prefill"]},
            "1024": {"decode": side([request(short, 0, 10)] * 2), "prefill": sides["prefill"]},
        },
        "windows": {
            "quiet": {**window, "prompts": 0},
            "computing": {**window, "prefill_ms": prefill_ms},
            "handoffs": {
                **window,
                "itl_ms": {**window["itl_ms"], "median": itl},
                "prefill_ms": {**prefill_ms, "median": prefill},
            },
        },
    }


def test_bounds_are_held_against_the_right_connector():
    found = {
        "push": measured(200.0, itl=5.4, prefill=1200.0),
        "upstream-push": measured(800.0, steps=10),
        "upstream-pull": measured(1000.0),
    }
    assert [(one.connector, one.text, one.value, one.holds) for one in verdicts(found)] == [
        ("push", "decode, a request, by upstream pull's", 0.2, True),
        ("push", "prefill, a request, by upstream pull's", 0.2, True),
        ("push", "decode, a step, by upstream push's", 0.25, True),
        ("push", "decode, a step of long answers, by upstream push's", 0.25, True),
        ("push", "decode, a request of 8,192 tokens by one of 1,024", 1.2, True),
        ("push", "decode, between tokens, with handoffs by without", 1.08, True),
        ("push", "prefill, a step, with handoffs by without", 1.2, False),
    ]


def test_recording_is_held_against_all_that_the_threads_do():
    def one(us, stats=0.0):
        counted = request(us, 0, 10)
        more = {
            ("scheduler", "get_kv_connector_stats"): Tally(10, stats * 1e3),
            ("worker", THREAD): Tally(10, 10_000e3),
        }
        return measured(1.0) | {where: side([Reading({**counted.tallies, **more})]) for where in ("decode", "prefill")}

    def bounds(plain, recording):
        found = verdicts({"push": plain, "push:recording": recording})
        return [(one.text, one.value, one.limit, one.holds) for one in found if "recording, by all" in one.text]

    # 30 µs for the metrics, always; 40 more where lines are written: of 10,000.
    assert bounds(one(470.0, 30.0), one(510.0, 30.0)) == [
        ("decode, recording, by all that the engine's threads do", 0.007, 0.01, True),
        ("prefill, recording, by all that the engine's threads do", 0.007, 0.01, True),
    ]
    assert [value for _, value, _, _ in bounds(one(510.0, 30.0), one(470.0, 30.0))] == [0.003] * 2, "less is chance"
    assert [holds for *_, holds in bounds(one(100.0, 30.0), one(200.0, 30.0))] == [False] * 2
    assert bounds(one(100.0), measured(1.0))
    assert not [one for one in verdicts({"push:recording": measured(1.0)}) if "recording, by all" in one.text]


def test_a_step_is_judged_where_an_engine_decodes():
    def step(push, upstream):
        found = {"push": measured(600.0, steps=13), "upstream-push": measured(50_000.0, steps=900)}
        for one, us in zip(found.values(), (push, upstream), strict=True):
            one["served"] = us and {"decode": side([request(us / 2, us / 2, 100)])}
        return [one.value for one in verdicts(found) if "decode, a step" in one.text]

    each = round(600.0 / 13 / (50_000.0 / 900), 2)
    assert [round(one, 2) for one in step(2000.0, 5000.0)] == [each, 0.4]
    assert [len(one) for one in (step(2000.0, {}), step({}, 5000.0))] == [1, 1], (
        "a pair that failed before it has no figure"
    )


def test_a_bound_that_is_passed_does_not_hold():
    found = {
        "pull": measured(201.0, long=131.0, itl=5.6),
        "upstream-pull": measured(1000.0),
        "upstream-push": measured(300.0),
    }
    broken = {one.text for one in verdicts(found) if not one.holds}
    assert broken == {
        "decode, a request, by upstream pull's", "prefill, a request, by upstream pull's",
        "decode, a step, by upstream push's", "decode, a step of long answers, by upstream push's",
        "decode, a request of 8,192 tokens by one of 1,024", "decode, between tokens, with handoffs by without",
    }  # fmt: skip


def test_without_upstream_only_what_needs_none_is_judged():
    found = {"push": measured(200.0)}
    assert [one.text.split(",")[0] for one in verdicts(found)] == ["decode", "decode", "prefill"]
    one_length = measured(200.0)
    del one_length["lengths"]["8192"]
    assert len(verdicts({"push": one_length})) == 2
    assert verdicts({"upstream-push": measured(200.0)}) == []


def test_a_bound_against_nothing_never_holds():
    found = {"push": measured(200.0), "upstream-pull": measured(0.0)}
    assert {one.value for one in verdicts(found) if "upstream" in one.text} == {float("inf")}


def test_json_has_value_limit_and_whether_it_holds():
    assert as_json([Verdict("push", "what", 0.5, 0.6)]) == [
        {"connector": "push", "text": "what", "value": 0.5, "limit": 0.6, "holds": True}
    ]


def test_the_tables_have_a_cell_for_each_connector_and_leave_out_what_is_cheap_everywhere():
    cheap = Reading({("worker", "get_finished"): Tally(10, 5e3), ("worker", "wait_for_save"): Tally(10, 9.0)})
    found = {"push": measured(200.0), "upstream-pull": {**measured(900.0), "decode": side([cheap, cheap])}}
    assert list(call_rows(found, "decode")) == [
        ("scheduler", STEP, "100 (10 × 10.0)", "–"),
        ("worker", "get_finished", "100 (10 × 10.0)", "5 (10 × 0.5)"),
    ]
    rows = list(sum_rows(found))
    assert all(len(row) == 3 for row in rows)
    assert ("prefill: both, µs a request: mean (median, p90)", "400 (400, 400)", "1,800 (1,800, 1,800)") in rows
    assert ("decode: 8,192 tokens, µs a request (steps)", "120 (30)", "120 (30)") in rows
    assert ("ms between tokens, handoffs: median (p90)", "5.00 (6.00)", "5.00 (6.00)") in rows


def test_everything_is_shown():
    found = {"push": measured(200.0), "upstream-push": measured(900.0)}
    text = StringIO()
    show(Console(file=text, width=200), {"connectors": found, "bounds": as_json(verdicts(found))})
    for part in (
        "decode: µs a request",
        "prefill: µs a request",
        "get_finished",
        "upstream-push",
        "at most 0.6: holds",
    ):
        assert part in text.getvalue()


# --- pairs ----------------------------------------------------------------------------------------------------------------


def test_pairs_differ_in_their_connector_alone(tmp_path):
    commands = []
    for connector in ("push", "upstream-push", "pull", "upstream-pull"):
        prefill, decode = specs_for(connector, MODEL, "python")
        assert (prefill.connector_module, decode.connector_module) == ("kvxfer.bench.counted",) * 2
        assert prefill.connector == decode.connector == named_connector(connector)[1]
        words = engine_command(decode, 1, 2)
        at = words.index("--kv-transfer-config") + 1
        assert json.loads(words[at])["engine_id"] == f"{connector}-decode"
        commands.append(words[:at] + words[at + 1 :])
    assert all(command == commands[0] for command in commands)
    assert specs_for("push:recording", MODEL, "python") == specs_for("push", MODEL, "python")
    with pytest.raises(ConfigError, match="connector 'tcp' is none of push, pull, upstream-push, upstream-pull"):
        specs_for("tcp", MODEL, "python")
    for none in ("push:stream", "upstream-push:recording"):
        with pytest.raises(ConfigError, match=f"connector '{none}': behind a colon is 'recording', of kvxfer's own"):
            specs_for(none, MODEL, "python")


class FakeClient:
    """Takes the place of a client: answers at once, and remembers what it was asked and what was open then."""

    def __init__(self, log, name, params=None):
        self.log, self.name, self.params = log, name, params

    async def complete(self, prompt, max_tokens, *, stream=True, token_ids=True, extra=None, headers=None):
        assert token_ids or self.name == "prefill", "whoever asks a pair for tokens gets decode's"
        self.log.append((self.name, "asked", (extra or {}).get("kv_transfer_params"), headers))
        await asyncio.sleep(0.01)
        self.log.append((self.name, "answered", None, None))
        return Completion((1,) * max_tokens, "", 0.25, kv_transfer_params=self.params)


def fake_pair(mode, tmp_path, params):
    prefill, decode = (dataclasses.replace(spec) for spec in specs_for(mode, MODEL, "python"))
    pair = Pair(mode, make_engine(prefill, tmp_path, (1000, 1001)), make_engine(decode, tmp_path, (1002, 1003)))
    log = []
    pair.to_prefill, pair.to_decode = FakeClient(log, "prefill", params), FakeClient(log, "decode")
    return pair, log


def order(log):
    return [(name, what) for name, what, *_ in log]


AT_ONCE = [("prefill", "asked"), ("decode", "asked"), ("prefill", "answered"), ("decode", "answered")]
ONE_AFTER_THE_OTHER = [("prefill", "asked"), ("prefill", "answered"), ("decode", "asked"), ("decode", "answered")]


@pytest.mark.parametrize("follow", [False, True])
def test_push_sends_both_legs_at_once_or_lets_decode_follow(tmp_path, follow):
    pair, log = fake_pair("push", tmp_path, {"remote_port": 7})
    asyncio.run(pair.hand_over([5, 6], 3, follow=follow))
    assert order(log) == (ONE_AFTER_THE_OTHER if follow else AT_ONCE)
    ((_, _, source, first), (_, _, sink, second)) = [entry for entry in log if entry[1] == "asked"]
    assert first == second, "upstream's push matches the legs by request id"
    assert source["do_remote_decode"] is True
    assert source["transfer_id"] == sink["transfer_id"] == first["X-Request-Id"]
    assert (sink["remote_host"], sink["remote_port"], sink["remote_engine_id"]) == ("127.0.0.1", 1001, "push-prefill")


def test_pull_gives_decode_what_prefill_answered(tmp_path):
    pair, log = fake_pair("pull", tmp_path, {"remote_port": 7, "remote_block_ids": [[1, 2]]})
    asyncio.run(pair.hand_over([5, 6], 3))
    assert order(log) == ONE_AFTER_THE_OTHER
    assert log[2][2] == {"remote_port": 7, "remote_block_ids": [[1, 2]]}
    pair, _ = fake_pair("pull", tmp_path, None)
    with pytest.raises(KvxferError, match="pull-prefill answered a prefill leg without kv_transfer_params"):
        asyncio.run(pair.hand_over([5, 6], 3))


# --- a measurement --------------------------------------------------------------------------------------------------------


def test_a_measurement_attributes_each_request_what_was_counted_for_it(tmp_path, monkeypatch):
    """Engines whose counters move by 100 µs and one step (decode), 1,000 and two (prefill), with every leg."""
    pair, _ = fake_pair("pull", tmp_path, {})
    counted = {"decode": request(0, 0, 0), "prefill": request(0, 0, 0)}
    prompts = []

    class Counting(FakeClient):
        async def complete(self, prompt, max_tokens, **more):
            scheduler, steps = (50, 1) if self.name == "decode" else (500, 2)
            old, new = counted[self.name].tallies, request(scheduler, scheduler, steps).tallies
            counted[self.name] = Reading({key: old[key] + new[key] for key in old})
            prompts.append((self.name, len(prompt), tuple(prompt), max_tokens))
            return await super().complete(prompt, max_tokens, **more)

    pair.to_prefill, pair.to_decode = Counting([], "prefill", {}), Counting([], "decode")
    monkeypatch.setattr(cost, "read", lambda directory: counted[directory.name])
    monkeypatch.setattr(cost, "headers", lambda _directory: [])
    monkeypatch.setattr(cost, "_AT_REST", 0.001)
    asked = []

    def read_spans(directory, since, until):
        """Twenty steps in each window: decode's begin every 5 ms, prefill's take 250 ms."""
        asked.append((directory.name, since < until))
        every, lasts = (5, 3) if directory.name == "decode" else (300, 250)
        return [(since + i * every * 10**6, since + (i * every + lasts) * 10**6) for i in range(20)]

    monkeypatch.setattr(cost.spans, "read", read_spans)
    settings = Settings(
        repeats=4, prompt=16, answer=3, served=2, served_answer=40,
        lengths=(8, 32), length_repeats=2, rounds=2, streams=2, stream_tokens=50,
    )  # fmt: skip
    directories = {where: tmp_path / where for where in ("decode", "prefill")}
    findings = Findings()
    for turn in range(2):
        until = dataclasses.replace(settings, passes=2).until(turn)
        asyncio.run(Measurement(pair, directories, until, findings, turn * 1000).execute())
        assert len(findings.requests) == 2 * (turn + 1)
    found = findings.report()
    assert found["decode"]["requests"] == 4
    assert found["decode"]["us_per_request"] == {"mean": 100.0, "median": 100.0, "p90": 100.0}
    assert found["prefill"]["us_per_request"]["mean"] == 1000.0
    assert found["prefill"]["us_per_step"] == 500.0
    assert found["served"]["decode"]["requests"] == 2
    assert [tokens for name, _, _, tokens in prompts if name == "decode"].count(40) == 2
    assert {length: one["decode"]["requests"] for length, one in found["lengths"].items()} == {
        "8": 2, "16": 2, "32": 2,
    }  # fmt: skip
    windows = found["windows"]
    assert asked == [("decode", True), ("prefill", True)] * 2 * len(cost.WINDOWS)
    assert {name: one["tokens"] for name, one in windows.items()} == dict.fromkeys(cost.WINDOWS, 2 * 19)
    assert windows["handoffs"]["itl_ms"]["median"] == 5.0
    assert windows["quiet"]["prompts"] == 0
    assert windows["computing"]["prompts"] >= 2
    assert windows["handoffs"]["prefill_ms"]["median"] == 250.0
    of_prefill = [tokens for name, _, tokens, _ in prompts if name == "prefill"]
    assert len(set(of_prefill)) == len(of_prefill), "no prompt is computed twice: a prefix cache would answer it"


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_passes_have_equal_shares_and_the_last_one_ends_it(passes):
    settings = Settings(repeats=50, served=10, length_repeats=20, rounds=4, passes=passes)
    for name in ("repeats", "served", "length_repeats", "rounds"):
        reached = [0, *(getattr(settings.until(turn), name) for turn in range(passes))]
        assert reached[-1] == getattr(settings, name)
        shares = [after - before for before, after in itertools.pairwise(reached)]
        assert max(shares) - min(shares) <= 1


class Lives:
    """Takes the place of ``_live``: finds what it is asked for, or a part of it and fails, as often as it is told to."""

    def __init__(self):
        self.failures, self.asked = [], []

    def __call__(self, connector, prefill, decode, logs, settings, findings, seed):
        self.asked.append((connector, logs.name, settings.repeats, seed))
        one = {"decode": request(50, 50, 1), "prefill": request(50, 50, 1)}
        fails = (connector, len(self.asked)) in self.failures
        missing = settings.repeats - len(findings.requests)
        findings.requests += [one] * (1 if fails else missing)
        if fails:
            raise KvxferError(f"{connector} hangs")
        findings.lengths = {8: [one], 32: [one]}
        for window in findings.windows.values():
            window.gaps, window.prefills = [5 * 10**6] * 4, [10**9] * 2


@pytest.fixture
def lives(monkeypatch):
    made = Lives()
    monkeypatch.setattr(cost, "_live", made)
    monkeypatch.setattr(cost, "build", lambda _recipe: MODEL)
    monkeypatch.setattr(results, "versions", lambda _python: {})
    return made


def test_connectors_take_turns_and_a_pair_that_fails_goes_on_anew(tmp_path, lives):
    lives.failures = [("upstream-push", 4)]
    said, kept = [], []
    settings = Settings(repeats=6, passes=2)
    result = cost.run(["push", "upstream-push"], tmp_path, "python", settings, say=said.append, keep=kept.append)
    assert [sorted(one["connectors"]) for one in kept] == [["push"], *[["push", "upstream-push"]] * 4]
    assert kept[-1] == result
    assert lives.asked == [
        ("push", "1-push", 3, 100_000), ("upstream-push", "2-upstream-push", 3, 200_000),
        ("push", "3-push", 6, 300_000), ("upstream-push", "4-upstream-push", 6, 400_000),
        ("upstream-push", "5-upstream-push", 6, 500_000),
    ]  # fmt: skip
    found = result["connectors"]
    assert {name: one["decode"]["requests"] for name, one in found.items()} == {"push": 6, "upstream-push": 6}
    assert {name: one["failed"] for name, one in found.items()} == {
        "push": [],
        "upstream-push": ["upstream-push hangs"],
    }
    assert any("hangs" in text for text in said)
    json.dumps(result)


def test_a_pair_that_always_fails_ends_the_run(tmp_path, lives):
    lives.failures = [("push", life) for life in range(1, 20)]
    with pytest.raises(KvxferError, match="push hangs"):
        cost.run(["push"], tmp_path, "python", Settings())
    assert len(lives.asked) == 6


def test_what_was_found_before_a_request_failed_is_kept_and_not_done_again(tmp_path, monkeypatch):
    pair, log = fake_pair("pull", tmp_path, {})
    still = request(1, 1, 1)
    monkeypatch.setattr(cost, "read", lambda _directory: still)
    monkeypatch.setattr(cost, "headers", lambda _directory: [])
    monkeypatch.setattr(cost, "_AT_REST", 0.001)
    monkeypatch.setattr(cost, "_WARM_UP", 1)
    settings = Settings(
        repeats=3, prompt=4, answer=2, served=1, lengths=(2, 8), length_repeats=1, rounds=1, stream_tokens=30
    )
    findings = Findings()
    good = pair.to_decode.complete
    asked = itertools.count(1)

    async def failing(*args, **more):
        if next(asked) == 3:
            raise KvxferError("lost")
        return await good(*args, **more)

    pair.to_decode.complete = failing
    with pytest.raises(KvxferError, match="lost"):
        asyncio.run(Measurement(pair, {"decode": tmp_path, "prefill": tmp_path}, settings, findings).execute())
    assert len(findings.requests) == 1
    assert not findings.lengths
    log.clear()
    asyncio.run(Measurement(pair, {"decode": tmp_path, "prefill": tmp_path}, settings, findings, 1000).execute())
    assert len(findings.requests) == 3
    assert {length: len(found) for length, found in findings.lengths.items()} == {2: 1, 4: 1, 8: 1}
    assert {window.rounds for window in findings.windows.values()} == {1}


def test_an_upstream_pair_that_always_fails_ends_its_turn_and_its_figures_stay(tmp_path, lives):
    lives.failures = [("upstream-push", life) for life in range(1, 30)]
    settings = Settings(repeats=20, passes=1)
    found = cost.run(["push", "upstream-push"], tmp_path, "python", settings)["connectors"]
    assert found["push"]["decode"]["requests"] == 20
    assert found["upstream-push"]["decode"]["requests"] == len(found["upstream-push"]["failed"]) == 6
    assert found["upstream-push"]["lengths"] == {}
    assert found["upstream-push"]["served"] == {}
    bounds = verdicts(found)
    assert "decode, a step, by upstream push's" in [one.text for one in bounds]


def test_a_window_without_steps_has_no_times_and_no_bounds():
    window = cost.Window()
    window.add([], [])
    assert window.report() == {"tokens": 0, "prompts": 0}
    found = {"push": measured(200.0)}
    for figure in ("itl_ms", "prefill_ms"):
        del found["push"]["windows"]["handoffs"][figure]
    assert [one.text for one in verdicts(found)] == ["decode, a request of 8,192 tokens by one of 1,024"]


def test_an_engine_that_never_rests_is_read_all_the_same(tmp_path, monkeypatch):
    pair, _ = fake_pair("pull", tmp_path, {})
    steps = iter(range(1, 10**6))
    monkeypatch.setattr(cost, "read", lambda _directory: request(1, 1, next(steps)))
    monkeypatch.setattr(cost, "_AT_REST", 0.001)
    monkeypatch.setattr(cost, "_REST_TIMEOUT", 0.01)
    measurement = Measurement(pair, {"decode": tmp_path}, Settings(), Findings())
    assert asyncio.run(measurement._one(4, 2))["decode"].calls("scheduler", STEP) > 0
