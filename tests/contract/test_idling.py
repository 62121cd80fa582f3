"""An engine core that only waits for handoffs makes no steps meanwhile, and wakes at whatever happens. Real scheduler, real hooks.

How long it would sleep at most is an hour here: what does not wake it fails the test by the time that the test may take. Steps are
counted, no time is measured.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.connector import idling
from kvxfer.transport.twin import TwinFabric
from tests.contract.test_hooks import check, decode_leg, engines, prefill_leg, prompt, tiny  # noqa: F401 - fixtures
from tests.support.engine import expected

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def _for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    original = idling.Idling.__init__

    def patient(self: idling.Idling, vllm_config: Any, limit: float) -> None:
        original(self, vllm_config, limit and 3600.0)

    monkeypatch.setattr(idling.Idling, "__init__", patient)


class Core:
    """What vLLM's engine core does around its scheduler (0.29, v1/engine/core.py ``run_busy_loop``), in a thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.engine = make()
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def ask(self, what: Callable[[], Any]) -> None:
        self.input_queue.put_nowait(what)

    def stop(self) -> None:
        self.ask(_End.end)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the engine core does not hear that it shall end"
        assert not self.failed, self.failed

    def _loop(self) -> None:
        try:
            while True:
                while not self.engine.busy:
                    self.input_queue.get()()
                while not self.input_queue.empty():
                    self.input_queue.get_nowait()()
                self.engine.step()
                time.sleep(0.001)  # as vLLM does after a step without a forward
        except _End:
            pass
        except BaseException as error:
            self.failed.append(error)
            raise


class _End(Exception):  # noqa: N818 - not an error
    @staticmethod
    def end() -> None:
        raise _End


@pytest.fixture
def cores(engines):  # noqa: F811
    made: list[Core] = []

    def make(*args: Any, **kwargs: Any) -> Core:
        made.append(Core(lambda: engines(*args, **kwargs)))
        return made[-1]

    yield make
    for core in made:
        core.stop()


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def still(core: Core) -> int:
    """Wait until a core makes no steps any more, and return how many it has made."""
    steps, since = -1, time.monotonic()
    while time.monotonic() - since < 0.3:  # a core that does not wait makes hundreds of them in that time
        if core.engine.steps != steps:
            steps, since = core.engine.steps, time.monotonic()
        assert steps < 1000, "the engine core does not wait"
        time.sleep(0.01)
    return steps


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_decode_makes_no_steps_while_prefill_has_not_come_and_wakes_when_its_kv_has(cores, mode, ahead) -> None:
    fabric = TwinFabric()
    p, d = cores("p", fabric, mode=mode, ahead=ahead), cores("d", fabric, mode=mode, ahead=ahead)
    tokens = prompt(150, 1)
    d.ask(lambda: d.engine.add("d", tokens, decode_leg(p.engine, "t"), max_tokens=5))
    until(lambda: d.engine.steps > 0, "decode does not begin")
    slept = still(d)
    p.ask(lambda: p.engine.add("p", tokens, prefill_leg("t")))
    until(lambda: len(d.engine.outputs["d"]) == 5, "decode does not go on")
    until(lambda: not (p.engine.busy or d.engine.busy), "blocks are held")
    assert d.engine.outputs["d"] == expected(tokens, 5)
    assert d.engine.steps < slept + 15
    check(p.engine, d.engine)


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_step_after_the_one_that_slept_computes(cores, mode, ahead) -> None:
    """Without what ``at_once`` does, a step without work comes between under asynchronous scheduling."""
    fabric = TwinFabric()
    p, d = cores("p", fabric, mode=mode, ahead=ahead), cores("d", fabric, mode=mode, ahead=ahead)
    tokens, scheduled = prompt(150, 1), []
    original = d.engine.scheduler.schedule

    def schedule(*args: Any) -> Any:
        output = original(*args)
        scheduled.append(output.total_num_scheduled_tokens)
        return output

    d.engine.scheduler.schedule = schedule
    d.ask(lambda: d.engine.add("d", tokens, decode_leg(p.engine, "t"), max_tokens=5))
    until(lambda: d.engine.steps > 0, "decode does not begin")
    still(d)
    slept = len(scheduled)
    assert not any(scheduled)
    p.ask(lambda: p.engine.add("p", tokens, prefill_leg("t")))
    until(lambda: len(d.engine.outputs["d"]) == 5, "decode does not go on")
    assert [bool(tokens) for tokens in scheduled[slept : slept + 2]] == [False, True], scheduled[slept:]
    assert d.engine.outputs["d"] == expected(tokens, 5)
    until(lambda: not (p.engine.busy or d.engine.busy), "blocks are held")
    check(p.engine, d.engine)


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_prefill_makes_no_steps_while_it_holds_a_prompt(cores, mode, ahead) -> None:
    fabric = TwinFabric()
    p, d = cores("p", fabric, mode=mode, ahead=ahead), cores("d", fabric, mode=mode, ahead=ahead)
    tokens = prompt(100, 2)
    p.ask(lambda: p.engine.add("p", tokens, prefill_leg("t")))
    until(lambda: "p" in p.engine.finish_reasons, "prefill does not end")
    slept = still(p)
    d.ask(lambda: d.engine.add("d", tokens, decode_leg(p.engine, "t"), max_tokens=3))
    until(lambda: not p.engine.busy, "prefill does not hear that its blocks are its own again")
    until(lambda: not d.engine.busy, "decode does not end")
    assert p.engine.steps < slept + 10
    assert d.engine.outputs["d"] == expected(tokens, 3)
    check(p.engine, d.engine)


def test_a_new_request_and_an_abort_end_the_sleep(cores) -> None:
    fabric = TwinFabric()
    p, d = cores("p", fabric), cores("d", fabric)
    d.ask(lambda: d.engine.add("d", prompt(100, 3), decode_leg(p.engine, "t"), max_tokens=3))
    until(lambda: d.engine.steps > 0, "decode does not begin")
    still(d)
    own = prompt(40, 4)
    d.ask(lambda: d.engine.add("own", own, None, max_tokens=6))
    until(lambda: "own" in d.engine.finish_reasons, "a request of decode's own does not run beside one that waits")
    assert d.engine.outputs["own"] == expected(own, 6)
    still(d)
    d.ask(lambda: d.engine.abort("d"))
    until(lambda: not d.engine.busy, "an aborted request's blocks do not come back")


def test_a_request_that_queues_for_blocks_keeps_the_engine_stepping(cores) -> None:
    """What it waits for is the scheduler's to see."""
    p, d = cores("p", TwinFabric()), cores("d", TwinFabric(), num_blocks=12)
    d.ask(lambda: d.engine.add("d", prompt(100, 3), decode_leg(p.engine, "t"), max_tokens=3))
    d.ask(lambda: d.engine.add("own", prompt(150, 4), None, max_tokens=3))
    until(lambda: d.engine.steps > 300, "the engine sleeps with a request that no load is awaited for")


@pytest.mark.parametrize(
    "other", ["a worker that cannot ring", "off", "several connectors", "several engines that step together"]
)
def test_where_it_may_not_wait_it_makes_steps(engines, monkeypatch, other) -> None:  # noqa: F811
    settings: dict[str, Any] = {}
    if other == "a worker that cannot ring":
        monkeypatch.setattr(idling.Ringer, "ring", lambda _self: None)
    elif other == "off":
        settings["idle_wait"] = 0
    elif other == "several engines that step together":
        original = idling.private.own_inbox

        def seen(vllm_config: Any) -> Any:
            vllm_config.parallel_config.data_parallel_size = 2
            return original(vllm_config)

        monkeypatch.setattr(idling.private, "own_inbox", seen)

    class Several:
        def __init__(self) -> None:
            self._connectors: list[Any] = []
            self.engine = engines("d", TwinFabric(), **settings)

    class Around:
        def __init__(self) -> None:
            self.input_queue: queue.Queue[Any] = queue.Queue()
            self.engine = Several().engine if other == "several connectors" else engines("d", TwinFabric(), **settings)

    d = Around().engine
    p = engines("p", TwinFabric())
    d.add("d", prompt(100, 3), decode_leg(p, "t"), max_tokens=3)
    for _ in range(100):
        d.step()  # would sleep for an hour
    assert d.busy


def test_an_empty_datagram_of_a_stranger_does_not_stop_the_bell() -> None:
    bell = idling.Bell(queue.Queue(), ranks=1)
    ringer = idling.Ringer(bell.name, 0)
    until(lambda: not bell._missing, "the rank is not heard")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"", b"\0" + bell.name.encode())
    until(lambda: bell._rung, "nothing was heard")
    bell.wait(3600)  # at once, since it was rung
    bell.wait(0.01)
    ringer.ring()
    until(lambda: bell._rung, "the bell is heard no more")
    bell.close()
