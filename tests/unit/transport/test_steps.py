"""A step's work counts only behind its fence, and fences are passed in order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.layout.tables import packed
from kvxfer.protocol.ids import HandoffId
from kvxfer.transport.commands import EngineAddress, SinkOpen, SourceFinish, SourceHeld, SourceProgress, Step
from kvxfer.transport.steps import Steps


class Fence:
    def __init__(self, passed: bool = False) -> None:
        self.passed = passed

    def done(self) -> bool:
        return self.passed


def progress(request: str, final: int = 4) -> SourceProgress:
    return SourceProgress(request, packed([final]), final)


def finish(request: str) -> SourceFinish:
    return SourceFinish(request, None, held=True)


def opened(request: str) -> SinkOpen:
    return SinkOpen(HandoffId(request), request, EngineAddress("h", 1, ""), 0, 4, b"", 0.0, 0.0)


def computed(steps: Steps) -> list[str]:
    return [one.request_id for _, many in steps.passed_sources() for one in many]


def order(steps: Steps) -> list[str]:
    return [one.request_id for finished, many in steps.passed_sources() for one in [*finished, *many]]


def test_what_a_step_computes_waits_for_the_fence_behind_it_not_for_the_one_before_it() -> None:
    steps, before, behind = Steps(), Fence(passed=True), Fence()
    steps.begin(Step(progress=[progress("a")]), before)
    assert computed(steps) == [], "launched, not yet told to be"
    assert not steps.recorded(), "there is nothing to look at"
    steps.end(behind)
    assert computed(steps) == []
    assert steps
    assert steps.recorded()
    behind.passed = True
    assert computed(steps) == ["a"]
    assert not steps


def test_a_later_steps_fence_does_not_let_an_earlier_step_pass() -> None:
    steps, first, second = Steps(), Fence(), Fence(passed=True)
    steps.begin(Step(progress=[progress("a")]), Fence(passed=True))
    steps.end(first)
    steps.begin(Step(progress=[progress("b")]), Fence(passed=True))
    steps.end(second)
    assert computed(steps) == []
    first.passed = True
    assert computed(steps) == ["a", "b"]


def test_a_step_whose_end_was_never_told_is_covered_by_the_next_steps_fence() -> None:
    steps, next_begin = Steps(), Fence()
    steps.begin(Step(progress=[progress("a")]), Fence(passed=True))
    steps.begin(Step(progress=[progress("b")]), next_begin)
    assert computed(steps) == []
    next_begin.passed = True
    assert computed(steps) == ["a"]
    steps.end(Fence(passed=True))
    assert computed(steps) == ["b"]


def test_an_end_without_a_step_or_said_twice_changes_nothing() -> None:
    steps, behind = Steps(), Fence()
    steps.end(Fence(passed=True))
    assert not steps
    steps.begin(Step(progress=[progress("a")]), Fence(passed=True))
    steps.end(behind)
    steps.end(Fence(passed=True))
    assert computed(steps) == []


def test_a_preemption_takes_back_what_waits_for_that_request_and_nothing_else() -> None:
    steps, behind = Steps(), Fence()
    steps.begin(Step(progress=[progress("a"), progress("b")]), Fence(passed=True))
    steps.end(behind)
    steps.begin(Step(preempted=["a"], progress=[progress("c")]), Fence(passed=True))
    steps.end(behind)
    behind.passed = True
    assert computed(steps) == ["b", "c"]


def test_a_request_that_resumes_in_the_step_that_preempts_it_counts_anew() -> None:
    steps = Steps()
    steps.begin(Step(progress=[progress("a", 8)]), Fence(passed=True))
    steps.begin(Step(preempted=["a"], progress=[progress("a", 4)]), Fence(passed=True))
    steps.end(Fence(passed=True))
    assert [one.final for _, many in steps.passed_sources() for one in many] == [4]


def test_a_finish_comes_after_the_progress_of_earlier_steps_and_before_that_of_its_own() -> None:
    steps, behind = Steps(), Fence()
    steps.begin(Step(progress=[progress("a")]), Fence(passed=True))
    steps.end(behind)
    steps.begin(Step(finished=[finish("a")], progress=[progress("b")]), Fence(passed=True))
    assert order(steps) == [], "its last positions are not final yet"
    behind.passed = True
    assert [one.request_id for finished, many in steps.passed_sources() for one in [*finished, *many]] == ["a", "a"]
    assert order(steps) == [], "finished twice"
    steps.end(Fence(passed=True))
    assert order(steps) == ["b"]


def test_a_step_that_only_finishes_needs_no_end() -> None:
    steps = Steps()
    steps.begin(Step(finished=[finish("a")]), Fence(passed=True))
    assert order(steps) == ["a"]
    assert not steps


def test_sinks_wait_for_what_was_launched_before_them_and_not_for_their_own_step() -> None:
    steps, before = Steps(), Fence()
    steps.begin(Step(opened=[opened("a")], progress=[progress("x")]), before)
    steps.begin(Step(opened=[opened("b")]), Fence(passed=True))
    assert list(steps.passed_sinks()) == []
    before.passed = True
    assert [one.request_id for one in steps.passed_sinks()] == ["a", "b"]
    assert list(steps.passed_sinks()) == []


@pytest.mark.parametrize("step", [Step(), Step(preempted=["a"])])
def test_a_step_that_changes_nothing_here_waits_for_nothing(step) -> None:
    steps = Steps()
    steps.begin(step, Fence())
    assert not steps


class AnyOrder(RuleBasedStateMachine):
    """Random steps on a device that works in order: nothing is reported before it was computed, nor after a preemption."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps()
        self.launched = self.completed = 0  # the device's work
        self.fences: list[tuple[int, Fence]] = []
        self.work_of: dict[tuple[str, int], int] = {}  # (request, final) -> the work that makes it final
        self.generation: dict[str, int] = {}
        self.final = 0
        self.open_step = False
        self.waiting: list[tuple[str, int]] = []

    def fence(self) -> Fence:
        fence = Fence(passed=self.completed >= self.launched)
        self.fences.append((self.launched, fence))
        return fence

    @rule(requests=st.sets(st.sampled_from("abc"), max_size=2), preempted=st.sets(st.sampled_from("abc"), max_size=1))
    def begin(self, requests, preempted) -> None:
        fence = self.fence()
        self.waiting = [one for one in self.waiting if one[0] not in preempted]
        many = []
        self.launched += 1
        for request in sorted(requests):
            self.final += 1
            many.append(progress(request, self.final))
            self.work_of[request, self.final] = self.launched
            self.waiting.append((request, self.final))
        self.steps.begin(Step(preempted=sorted(preempted), progress=many), fence)
        self.open_step = bool(many)

    @precondition(lambda self: self.open_step)
    @rule()
    def end(self) -> None:
        self.open_step = False
        self.steps.end(self.fence())

    @rule(much=st.integers(1, 3))
    def device_works(self, much) -> None:
        self.completed = min(self.launched, self.completed + much)
        for covered, fence in self.fences:
            fence.passed = self.completed >= covered

    @invariant()
    def what_passes_was_computed_and_is_still_wanted_in_order(self) -> None:
        looked = self.steps.recorded()
        for _, many in self.steps.passed_sources():
            for one in many:
                assert looked, "nobody would have looked"
                key = (one.request_id, one.final)
                assert self.work_of[key] <= self.completed, "final before it was computed"
                assert self.waiting[0] == key, "out of order, doubled, or taken back"
                del self.waiting[0]

    def teardown(self) -> None:
        self.steps.end(self.fence())
        self.device_works(10**6)
        self.what_passes_was_computed_and_is_still_wanted_in_order()
        assert self.waiting == []
        assert not self.steps


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def held(name: str, *, computing: bool) -> SourceHeld:
    return SourceHeld(HandoffId(name), 16, packed([1]), 9.0, computing)


def test_what_is_held_waits_for_earlier_work_alone_unless_this_step_computes() -> None:
    steps, before, behind = Steps(), Fence(), Fence()
    steps.begin(Step(held=[held("idle", computing=False)]), before)
    assert steps
    assert list(steps.passed_held()) == []
    before.passed = True
    assert [one.handoff.transfer for one in steps.passed_held()] == ["idle"]
    step = Step(held=[held("busy", computing=True)])
    assert step
    assert step.computing
    steps.begin(step, before)
    assert list(steps.passed_held()) == [], "its own work has not been launched"
    steps.end(behind)
    assert list(steps.passed_held()) == []
    behind.passed = True
    assert [one.handoff.transfer for one in steps.passed_held()] == ["busy"]
    assert not steps


def test_the_next_step_stands_for_the_end_of_one_that_was_not_told() -> None:
    steps = Steps()
    steps.begin(Step(held=[held("a", computing=True)]), Fence(passed=True))
    assert list(steps.passed_held()) == []
    steps.begin(Step(held=[held("b", computing=True)]), Fence(passed=True))
    assert [one.handoff.transfer for one in steps.passed_held()] == ["a"]
