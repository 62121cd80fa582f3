"""What ``kvxfer bench stream`` makes of its handoffs, and how its engines note their moments."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
from rich.console import Console

from kvxfer.bench import results, stream, stream_moments
from kvxfer.bench.engines import kv_transfer_config
from kvxfer.bench.stream import specs_for
from kvxfer.bench.stream_moments import COMPUTED, RECEIVED, Moments, Timed
from kvxfer.bench.stream_report import Sample, as_json, line, show, summary, verdicts
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.transport.records import MOST_MOMENTS, HandoffRecord

OURS = [
    Sample(0.002, 12, 1000, 940, 0.001, 48),
    Sample(0.004, 12, 1000, 900, 0.003, 48),
    Sample(0.003, 12, 1000, 940, 0.002, 48),
]
THEIRS = [Sample(0.020, 12), Sample(0.030, 12), Sample(0.010, 12)]


def found(ours=OURS, theirs=THEIRS, same=5):
    made = {"push": {**summary(ours), "same_answers": 5}}
    if theirs:
        made["upstream-push"] = {**summary(theirs), "same_answers": same}
    return made


def held(made) -> dict[str, bool]:
    return {f"{one.connector}: {one.text[:13]}": one.holds for one in verdicts(made, prompts=5)}


def test_a_connectors_handoffs_are_summed_up() -> None:
    one = summary(OURS)
    assert one["handoffs"] == 3
    assert one["tail_ms"]["median"] == 3.0
    assert one["fence_to_report_ms"]["median"] == 2.0
    assert one["early"] == {"least": 0.9, "median": 0.94}
    assert one["bytes"] == [1000]
    assert "early" not in summary(THEIRS), "upstream has no records"


def test_all_bounds_hold() -> None:
    assert set(held(found()).values()) == {True}


@pytest.mark.parametrize(
    ("made", "which"),
    [
        (found([*OURS, Sample(0.003, 12, 1000, 799, 0.002, 48)]), "push: bytes complet"),
        (found([Sample(0.010, 12, 1000, 940, 0.001, 48)]), "push: median tail, "),
        (found(same=4), "upstream-push: answers that "),
    ],
)
def test_each_bound_can_fail(made, which) -> None:
    assert [name for name, holds in held(made).items() if not holds] == [which]


def test_without_upstream_nothing_is_held_against_it() -> None:
    assert list(held(found(theirs=[]))) == ["push: answers that ", "push: bytes complet"]


def test_the_table_and_the_line_say_all_of_it() -> None:
    made, out = found(), io.StringIO()
    result = {
        "connectors": made,
        "bounds": as_json(verdicts(made, prompts=5)),
        "settings": {"prompt": 6000, "budget": 512, "repeats": 3},
    }
    show(Console(file=out, width=200), result)
    text = out.getvalue()
    for part in ("6,000 tokens", "94.0% (90.0%)", "20.00 (", "3.00", "holds", "below 0.5", "at least 0.8"):
        assert part in text, text
    assert "90.0% of the bytes early" in line("push", OURS)
    assert "early" not in line("upstream-push", THEIRS)


def test_pairs_differ_in_their_connector_alone() -> None:
    configs = []
    for name in ("push", "upstream-push"):
        prefill, decode = specs_for(name, Path("/models/m"), "python", 512)
        assert prefill.max_num_batched_tokens == decode.max_num_batched_tokens == 512
        configs.append(kv_transfer_config(prefill, 5600))
    assert [one["kv_connector"] for one in configs] == ["KvxferPushConnector", "NixlPushConnector"]
    assert {one["kv_connector_module_path"] for one in configs} == {"kvxfer.bench.stream_timed"}


def test_only_push_streams() -> None:
    with pytest.raises(KvxferError, match="does not push"):
        specs_for("pull", Path("/models/m"), "python", 512)
    with pytest.raises(ConfigError):
        specs_for("other", Path("/models/m"), "python", 512)


class Connector:
    """A connector as vLLM calls it."""

    def __init__(self) -> None:
        self.finished = (None, None)
        self.asked = False

    def register_kv_caches(self, kv_caches) -> None: ...

    def has_connector_metadata(self):
        return self.asked

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids):
        return self.finished


class Timing(Timed, Connector):
    """One with its moments noted."""


def test_steps_with_layers_and_receipts_are_noted(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(stream_moments.DIRECTORY, str(tmp_path))
    one = Timing()
    one.wait_for_save()  # before it has a cache
    one.register_kv_caches({})
    one.wait_for_save()  # a step without layers, as vLLM 0.32 makes them
    assert stream_moments.read(tmp_path) == []
    assert [one.has_connector_metadata() for _ in range(3)] == [False] * 3, "once a layer"
    one.asked = True
    assert one.has_connector_metadata()
    one.wait_for_save()
    one.wait_for_save()
    one.finished = ({"a"}, None)
    assert one.get_finished(set()) == one.finished
    one.finished = (None, {"b", "c"})
    assert one.get_finished(set()) == one.finished
    assert [moment.what for moment in stream_moments.read(tmp_path)] == [COMPUTED, RECEIVED, RECEIVED]


def test_moments_of_all_processes_come_in_their_order(tmp_path) -> None:
    Moments(tmp_path).add(COMPUTED)
    (tmp_path / "1.moments").write_text("0.5 received\n")
    assert [moment.what for moment in stream_moments.read(tmp_path)] == [RECEIVED, COMPUTED]


# --- what a record says of it ------------------------------------------------------------------------------------------


def test_a_record_knows_what_was_there_at_a_moment() -> None:
    record = HandoffRecord("h", "r", "source", 0, "push")
    assert record.completed_by(9.0) == 0
    for size, at in ((100, 1.0), (0, 1.5), (50, 2.0)):  # the second one failed
        record.ended(size, at)
    assert record.times.last_byte == 2.0
    assert [record.completed_by(at) for at in (0.9, 1.0, 1.9, 2.0, 3.0)] == [0, 100, 100, 150, 150]


def test_a_record_of_very_many_transfers_stays_small_and_its_sum_right() -> None:
    record = HandoffRecord("h", "r", "source", 0, "push")
    for number in range(3 * MOST_MOMENTS):
        record.ended(10, float(number))
    assert len(record.completed) == MOST_MOMENTS
    assert record.completed[-1] == (3 * MOST_MOMENTS - 1.0, 30 * MOST_MOMENTS)
    assert record.completed_by(5.0) == 60


# --- lives ----------------------------------------------------------------------------------------------------------------


def test_a_pair_that_fails_goes_on_anew_with_what_is_left(tmp_path, monkeypatch) -> None:
    lives = []

    def live(connector, _prefill, _decode, logs, settings, findings) -> None:
        lives.append((connector, logs.name, len(findings.samples)))
        until = min(settings.repeats, len(findings.samples) + 2) if connector == "upstream-push" else settings.repeats
        while len(findings.samples) < until:
            findings.answers.append((len(findings.samples),))
            findings.samples.append((OURS if connector == "push" else THEIRS)[0])
        if until < settings.repeats:
            raise KvxferError("it hangs")

    monkeypatch.setattr(stream, "_live", live)
    monkeypatch.setattr(stream, "build", lambda: Path("model"))
    monkeypatch.setattr(results, "versions", lambda _python: {})
    said: list[str] = []
    settings = stream.Settings(repeats=5)
    result = stream.run(["push", "upstream-push"], tmp_path, "python", settings, say=said.append)
    assert lives == [
        ("push", "life1", 0), ("upstream-push", "life1", 0), ("upstream-push", "life2", 2), ("upstream-push", "life3", 4),
    ]  # fmt: skip
    of = result["connectors"]
    assert {name: (one["handoffs"], one["same_answers"], one["failed"]) for name, one in of.items()} == {
        "push": (5, 5, []),
        "upstream-push": (5, 5, ["it hangs"] * 2),
    }
    assert any("upstream-push: its pair is brought up anew: it hangs" in text for text in said)


def test_a_pair_that_always_fails_ends_the_run(tmp_path, monkeypatch) -> None:
    def live(*_args) -> None:
        raise KvxferError("it hangs")

    monkeypatch.setattr(stream, "_live", live)
    monkeypatch.setattr(stream, "build", lambda: Path("model"))
    with pytest.raises(KvxferError, match="it hangs"):
        stream.run(["push"], tmp_path, "python", stream.Settings())


def test_what_was_handed_over_before_a_failure_is_not_handed_over_again(monkeypatch) -> None:
    asked: list[int] = []

    class Failing(stream.Measurement):
        async def _one(self, number: int):
            asked.append(number)
            if len(asked) == 4:
                raise KvxferError("lost")
            return OURS[0], (number,)

    monkeypatch.setattr(stream, "_WARM_UP", 1)
    findings = stream.Findings()
    one = Failing(None, (Path(), Path()), stream.Settings(repeats=4), recorded=True)
    with pytest.raises(KvxferError, match="lost"):
        asyncio.run(one.execute(findings))
    assert findings.answers == [(0,), (1,)]
    asyncio.run(one.execute(findings))
    assert findings.answers == [(0,), (1,), (2,), (3,)]
    assert asked == [stream._WARM_UPS, 0, 1, 2, stream._WARM_UPS, 2, 3]
