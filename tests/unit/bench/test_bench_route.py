"""The measurements of the router: that they count right, that the simulation is one, and what must hold of it."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from kvxfer.bench.route.engine import Connection, Pace
from kvxfer.bench.route.load import load
from kvxfer.bench.route.simulation import SCENARIOS, TIMINGS, Costs, Request, Simulation, simulate
from kvxfer.bench.route.traffic import Load, bounds, engines, quantile, router, short, through
from kvxfer.bench.route.wire import length_of
from kvxfer.router.policies.timing import Fixed


def test_the_generator_counts_what_the_engines_send():
    async def main():
        pace = Pace(0.01, 0.002)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection("decode", 0, pace), "127.0.0.1", 0)
        ticking = asyncio.ensure_future(pace.run())
        port = server.sockets[0].getsockname()[1]
        counted = await load([port], 5, 1.0, 7, 0.0, 25)
        ticking.cancel()
        server.close()
        return counted

    counted = asyncio.run(main())
    assert (counted["requests"], counted["failed"], counted["errors"]) == (25, 0, [])
    assert counted["events"] == 25 * 8  # seven tokens and [DONE]
    assert len(counted["first_ms"]) == 25
    assert counted["first_ms"] == sorted(counted["first_ms"])
    assert counted["first_ms"][0] >= 9


def test_the_generator_says_what_failed():
    class Refuses(Connection):
        def asked(self, method, path, head, body):
            self.answer(b"{}", status="503 Full")

    async def main():
        server = await asyncio.get_running_loop().create_server(
            lambda: Refuses("decode", 0, Pace(0, 1)), "127.0.0.1", 0
        )
        counted = await load([server.sockets[0].getsockname()[1]], 2, 1.0, 7, 0.0, 4)
        server.close()
        return counted

    counted = asyncio.run(main())
    assert counted["failed"] == 4
    assert "503 Full" in counted["errors"][0]


def test_the_router_between_generator_and_engines():
    """The processes of a measurement; nothing is held against the clock here."""
    small = Load(streams=4, seconds=3.0, tokens=5, first=0.01, interval=0.002)
    with engines(small) as ports:
        assert [len(ports[role]) for role in ("prefill", "decode")] == [2, 2]
        from kvxfer.bench.route.traffic import _free_port

        port = _free_port()
        with router(ports, port) as running:
            counted = through(running, port, small)
            assert counted["failed"] == 0, counted["errors"]
            assert counted["events"] > 0
            assert counted["events_per_processor_s"] > 0
            few = short(running, port, small, 40)
            assert few["short_failed"] == 0
            assert running.memory > 10_000_000


def test_bounds_say_what_holds():
    def counted(p50, p99, rate):
        return {"first_token_ms": {"p50": p50, "p99": p99}, "events_per_processor_s": rate, "failed": 0}

    result = {
        "direct": counted(100.0, 101.0, 0),
        "router": counted(101.0, 120.0, 30_000),
        "memory": {"resident_bytes": [100, 200], "failed": 0, "requests_per_s": 300},
        "upstream": {"p.py": counted(0, 0, 10_000) | {"requests_per_s": 200}},
    }
    assert {name: one["holds"] for name, one in bounds(result).items()} == {
        "added_first_token_ms_p50": True,
        "added_first_token_ms_p99": False,
        "events_per_processor_s": True,
        "memory_growth_bytes": True,
        "failed": True,
        "times_p.py_events": True,
        "times_p.py_requests": False,
    }
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([], 0.5) is None
    assert length_of(b"POST / HTTP/1.1\r\ncontent-length: 12") == 12
    assert length_of(b"GET / HTTP/1.1") == 0


def test_one_request_alone_takes_what_its_stages_take():
    costs = Costs(prefill_s=0.001, transfer_s=0.0001, register_s=0.01, step_s=0.02, stream_s=0.0, chunk=100)
    (early,) = Simulation(Fixed(late=False), costs, (1.0,)).run([Request(0.0, 1000, 10)])
    (late,) = Simulation(Fixed(late=True), costs, (1.0,)).run([Request(0.0, 1000, 10)])
    assert early == pytest.approx(1.0 + 0.1 * 0.1 + 0.02)
    assert late == pytest.approx(1.0 + 0.01 + 0.1 + 0.02)
    (slow,) = Simulation(Fixed(late=True), costs, (3.0,)).run([Request(0.0, 1000, 10)])
    assert slow == pytest.approx(1.0 + 0.01 + 0.1 + 0.06)


@pytest.mark.parametrize("timing", TIMINGS)
def test_nothing_is_left_behind(timing):
    for scenario in SCENARIOS:
        run = Simulation(TIMINGS[timing](), Costs(), scenario.slow)
        assert len(run.run(scenario.load(300, 1))) == 300
        for engine, decode in run._decodes.items():
            assert decode.free == decode.capacity
            assert (engine.load.requests, engine.load.waiting_tokens, engine.load.running) == (0, 0, 0)


def test_adaptive_is_never_much_worse_than_the_better_of_early_and_late():
    found = simulate(Costs(), count=2000, seeds=2)
    assert found["worst"] <= 1.1, {name: row["adaptive_over_better"] for name, row in found["scenarios"].items()}
    assert found["holds"]
    # The comparison would be empty if the two were alike everywhere.
    p90 = [(row["early"]["p90"], row["late"]["p90"]) for row in found["scenarios"].values()]
    assert any(early < 0.95 * late for early, late in p90)
    assert any(late < 0.97 * early for early, late in p90)


def test_the_command_writes_the_simulation(tmp_path):
    import typer

    from kvxfer.bench.command import register

    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(
        app, ["bench", "route", "--no-traffic", "--count", "200", "--seeds", "1", "--json", str(tmp_path / "r.json")]
    )
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "r.json").read_text())
    assert set(written["simulation"]["scenarios"]) == {one.name for one in SCENARIOS}
    assert "one slow decode" in result.output
