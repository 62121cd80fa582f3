"""What a step carries between the halves: next to nothing in every step that changes nothing."""

from __future__ import annotations

import math
import pickle

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.connector.metadata import NOTHING, StepMetadata
from kvxfer.protocol.ids import HandoffId
from kvxfer.transport.commands import (
    EngineAddress,
    SinkCancel,
    SinkOpen,
    SourceFinish,
    SourceHeld,
    SourceProgress,
    SourceStart,
    Step,
)
from kvxfer.transport.twin import TwinFabric
from tests.contract.test_hooks import check, decode_leg, engines, prefill_leg, prompt, run, tiny  # noqa: F401 - fixtures

pytestmark = pytest.mark.contract


def test_nothing_takes_no_more_than_a_byte_and_is_not_none():
    alone, beside = (len(pickle.dumps({"output": one}, pickle.HIGHEST_PROTOCOL)) for one in ([NOTHING], [None]))
    assert alone == beside
    assert NOTHING is not None, "vLLM asserts it (0.24 to 0.32, both runners)"
    assert not pickle.loads(pickle.dumps(NOTHING, pickle.HIGHEST_PROTOCOL)), "by that the workers know it"


FULL = Step(
    preempted=["p"],
    tokens={"p": 7},
    started=[SourceStart(HandoffId("t", 1, 2), "p", 100, 1.5, (b"a" * 16, b"b" * 16))],
    finished=[SourceFinish("p", None, True, 3, SourceProgress("p", b"1234", 5))],
    progress=[SourceProgress("p", b"12345678", 64)],
    opened=[
        SinkOpen(HandoffId("t"), "d", EngineAddress("::1", 5600, "e", True), 0, 99, b"1234", 1.0, 2.0, b"c", "pull")
    ],
    cancelled=[SinkCancel("d", "gave up")],
    introduced=[EngineAddress("host", 1, "")],
    held=[SourceHeld(HandoffId("r"), 32, b"12345678", math.inf, True)],
    bell="kvxfer-bell",
)


def test_every_field_of_a_step_is_tested():
    empty = Step()
    assert [name for name in Step.__struct_fields__ if getattr(FULL, name) == getattr(empty, name)] == []


@pytest.mark.parametrize(
    "step", [FULL, Step(), Step(cancelled=[SinkCancel("\ud800", "no text")])], ids=["full", "empty", "odd"]
)
def test_a_step_that_changes_something_arrives_whole(step):
    read = pickle.loads(pickle.dumps(StepMetadata(step)))
    assert read, "what is false changes nothing"
    assert read.step == step


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_steps_in_which_nothing_is_new_carry_nothing(engines, mode) -> None:  # noqa: F811
    fabric = TwinFabric()
    p, d = engines("p", fabric, mode=mode, runner="v1"), engines("d", fabric, mode=mode, runner="v1")
    said: dict[str, list[StepMetadata]] = {"p": [], "d": []}
    for engine in (p, d):
        build = engine.scheduler.connector.build_connector_meta

        def noting(output, build=build, name=engine.name):
            said[name].append(build(output))
            return said[name][-1]

        engine.scheduler.connector.build_connector_meta = noting
    tokens = prompt(150, 1)  # three steps of prefill
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=40)
    for _ in range(100):
        d.step()
    p.add("p", tokens, prefill_leg("t"))
    run(p, d)
    check(p, d)
    told = {name: [one.step for one in steps if one] for name, steps in said.items()}
    assert len(said["d"]) > 130
    assert len(told["d"]) == 1, (
        "one step says that blocks were allocated; none of those that wait or decode says anything"
    )
    assert len(told["p"]) <= 4, "one for each chunk, and one for the end"
