"""The measurements of the router: that they count right, that the simulation is one, and what must hold of it."""

import asyncio
import json
import math
import time

import pytest
from typer.testing import CliRunner

from kvxfer.bench.process import free_ports
from kvxfer.bench.route.engine import Connection, Pace
from kvxfer.bench.route.leavers import outlived
from kvxfer.bench.route.load import Counts, Stream, Wanted, load, request_of
from kvxfer.bench.route.simulation import SCENARIOS, TIMINGS, Costs, Request, Simulation, simulate
from kvxfer.bench.route.traffic import (
    Load,
    added,
    bare,
    bounds,
    engines,
    leavers,
    quantile,
    router,
    short,
    through,
)
from kvxfer.bench.route.wire import length_of
from kvxfer.router.policies.timing import Fixed


def test_the_generator_counts_what_the_engines_send():
    async def main():
        pace = Pace(0.01, 0.002)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection("decode", 0, pace), "127.0.0.1", 0)
        ticking = asyncio.ensure_future(pace.run())
        port = server.sockets[0].getsockname()[1]
        other = Wanted([port], 2, 4)
        counted = await load(Wanted([port], 5, 7, 25), 1.0, 0.0, other)
        ticking.cancel()
        server.close()
        return counted

    counted = asyncio.run(main())
    assert (counted["requests"], counted["failed"], counted["errors"]) == (25, 0, [])
    assert counted["events"] == 25 * 8  # seven tokens and [DONE]
    assert counted["all_events"] == counted["events"]
    assert len(counted["first"]) == 25
    assert [when for when, _ in counted["first"]] == sorted(when for when, _ in counted["first"])
    assert min(took for _, took in counted["first"]) >= 9
    assert counted["beside"]["requests"] == len(counted["beside"]["first"]) > 0
    assert counted["beside"]["failed"] == 0


def test_an_engine_that_is_behind_sends_what_it_owes_at_once_where_that_is_asked():
    sent = []

    class Stalls(Connection):
        def tokens(self, owed):
            sent.append(owed)
            super().tokens(owed)

    async def main(catch_up):
        sent.clear()
        pace = Pace(0.0, 0.02, catch_up)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Stalls("decode", 0, pace), "127.0.0.1", 0)
        ticking = asyncio.ensure_future(pace.run())
        loop.call_later(0.1, time.sleep, 0.3)
        counted = await load(Wanted([server.sockets[0].getsockname()[1]], 1, 60, 1), 1.0, 0.0)
        ticking.cancel()
        server.close()
        return counted

    for catch_up in (False, True):
        counted = asyncio.run(main(catch_up))
        assert (counted["requests"], counted["failed"], counted["events"]) == (1, 0, 61)
        assert (max(sent) > 5) is catch_up


def test_the_generator_says_what_failed():
    class Refuses(Connection):
        def asked(self, method, path, head, body):
            self.answer(b"{}", status="503 Full")

    async def main():
        server = await asyncio.get_running_loop().create_server(
            lambda: Refuses("decode", 0, Pace(0, 1)), "127.0.0.1", 0
        )
        counted = await load(Wanted([server.sockets[0].getsockname()[1]], 2, 7, 4), 1.0, 0.0)
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
        port = free_ports(1)[0]
        with router(ports, port) as running:
            counted = through(running, port, small, beside=ports["decode"])
            assert counted["failed"] == counted["straight"]["failed"] == 0, counted["errors"]
            assert counted["events"] > 0
            assert counted["events_per_processor_s"] > 0
            assert counted["added_first_token_ms"]["p50"]["straight"] >= 10
            few = short(running, port, small, 40)
            assert few["failed"] == 0
            assert [part["requests"] for part in few["parts"]] == [8] * 5
            assert running.memory > 10_000_000


def test_a_bare_pipe_passes_everything_on():
    small = Load(streams=4, seconds=3.0, tokens=5, first=0.01, interval=0.002)
    with engines(small) as ports, bare(ports, port := free_ports(1)[0]) as running:
        few = short(running, port, small, 40)
        assert (few["failed"], sum(part["requests"] for part in few["parts"])) == (0, 40)


def test_what_leavers_leave_is_found_by_when_their_legs_ended():
    engines = [{"ended": {"0": 10.0, "10": 4.0}}, {"ended": {"0": 12.5}}]
    assert outlived({"0": 11.0, "10": 5.0, "20": 1.0}, engines) == [0.0, 0.0, 1.5]
    found = leavers(Load(first=0.05, interval=0.01), lambda _: None, requests=60)
    assert (found["failed"], found["open"]) == (0, 0), found
    assert found["whole"] == 54
    assert 0 < found["left"] <= 6


async def until(holds):
    while not holds():  # noqa: ASYNC110 -- what it waits for sets no event
        await asyncio.sleep(0.001)


def test_a_leg_that_nobody_ends_is_seen():
    async def main():
        pace = Pace(5.0, 0.01)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection("decode", 0, pace), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        _, stream = await loop.create_connection(
            lambda: Stream(request_of("h", {"prompt": "20", "stream": True}), Counts()), "127.0.0.1", port
        )
        stream.ask()
        await asyncio.wait_for(until(lambda: pace.legs.open), 10)
        assert json.loads(pace.legs.told()) == {"open": ["20"], "ended": {}}
        stream.close()
        await asyncio.wait_for(until(lambda: not pace.legs.open), 10)
        assert set(json.loads(pace.legs.told())["ended"]) == {"20"}
        server.close()

    asyncio.run(main())


def test_what_is_added_is_told_slice_by_slice_so_that_trouble_spoils_one():
    calm = [(slot / 10, 100.0 + slot % 10) for slot in range(100)]
    routed = [(when, took + 1.5) for when, took in calm]
    found = added(routed, calm)
    assert found["p50"]["median"] == found["p99"]["median"] == pytest.approx(1.5)
    assert len(found["p50"]["slices"]) == 5
    both_late = [(when, took + (300 if 2 <= when < 4 else 0)) for when, took in calm]
    found = added([(when, took + 1.5) for when, took in both_late], both_late)
    assert found["p99"]["slices"] == pytest.approx([1.5] * 5)
    one_late = [(when, took + (300 if 2 <= when < 4 else 0)) for when, took in routed]
    found = added(one_late, calm)
    assert found["p99"]["median"] == pytest.approx(1.5)
    assert max(found["p99"]["slices"]) == pytest.approx(301.5)
    always_late = added([(when, took + 300) for when, took in calm], calm)
    assert always_late["p50"]["median"] == pytest.approx(300)
    assert math.isnan(added([], calm)["p50"]["median"])


def test_bounds_say_what_holds():
    def counted(p50, p99, paced, flooded, short, sizes):
        return {
            "paced": {
                "added_first_token_ms": {"p50": {"median": p50}, "p99": {"median": p99}},
                "events_per_processor_s": paced,
                "failed": 0,
            },
            "flooded": {"events_per_processor_s": flooded, "events_per_s": 50_000, "failed": 0},
            "short": {
                "requests_per_processor_s": short,
                "parts": [{"resident_bytes": one} for one in sizes],
                "failed": 0,
            },
        }

    result = {
        "generator_limit": {"events_per_s": 60_000},
        "leavers": {"open": 0, "outlived_s": {"most": 1.5}, "failed": 0},
        "router": counted(1.0, 20.0, 30_000, 100_000, 1_000, [100, 150, 200]),
        "upstream": {"p.py": counted(0, 0, 10_000, 30_000, 400, [1, 1])},
    }
    assert {name: one["holds"] for name, one in bounds(result).items()} == {
        "added_first_token_ms_p50": True,
        "added_first_token_ms_p99": False,
        "events_per_processor_s": True,
        "memory_growth_bytes": True,
        "failed": True,
        "legs_left_open": True,
        "leg_outlives_its_client_s": False,
        "failed_beside_leavers": True,
        "generator_limit_over_flooded": True,
        "times_p.py_paced_events": True,
        "times_p.py_flooded_events": True,
        "times_p.py_short_requests": False,
    }
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert math.isnan(quantile([], 0.5))
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
