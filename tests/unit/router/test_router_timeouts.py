"""Time-outs of a router and its engines fit: by default in every mode, and what does not fit is said with what to set."""

import asyncio
import itertools
import logging
import math

import pytest
from router_fakes import FakeEngine, pair, routed, run

from kvxfer.config import Settings
from kvxfer.router.identity import IdentityError, parse_info
from kvxfer.router.settings import Mode, Role, RouterSettings, When
from kvxfer.router.timeouts import EARLY_QUEUE, ORDERS, advice, may_choose_late, queue_timeout

ENGINE = 'kvxfer_info{engine_id="p",host="h",port="1",tp_size="1"%s} 1.0'


def settings(**changes):
    return RouterSettings(prefill=("http://p:1",), decode=("http://d:1",), **changes)


def engine(leg_timeout):
    return parse_info(ENGINE % ("" if leg_timeout is None else f',leg_timeout="{leg_timeout}"'), "h")


@pytest.mark.parametrize(("mode", "when"), [*itertools.product(Mode, When)])
@pytest.mark.parametrize("leg_timeout", [None, Settings().leg_timeout, 6.0, 3600.0])
def test_by_default_everything_fits_whatever_the_engines_say(mode, when, leg_timeout):
    made = settings(mode=mode, decode_when=when)
    waits = queue_timeout(made, engine(leg_timeout))
    limit = Settings().leg_timeout if leg_timeout is None else leg_timeout
    assert 0 < waits <= EARLY_QUEUE
    if may_choose_late(made):
        assert waits < limit
    if leg_timeout is not None and leg_timeout < 600:
        assert [advice(made, role, engine(leg_timeout)) for role in Role] == [[], []]


def test_the_least_patient_engine_counts():
    made = settings(mode=Mode.PULL)
    assert queue_timeout(made, [*engine(30), *engine(9)]) == pytest.approx(6)
    assert queue_timeout(made, []) == queue_timeout(made, engine(None)) == pytest.approx(20)
    assert queue_timeout(settings(mode=Mode.PULL, queue_timeout=7.0), engine(9)) == 7


@pytest.mark.parametrize("order", ORDERS, ids=lambda one: one.name)
@pytest.mark.parametrize("equal", [False, True])
def test_each_pair_that_does_not_fit_is_said_with_both_values_and_what_to_set(order, equal):
    value = 30.0 if equal else 31.0 if order.shorter else 29.0
    flag = "--" + order.name.replace("_", "-")
    (said,) = advice(settings(mode=Mode.PULL, **{order.name: value}), Role.PREFILL, engine(30))
    assert f"{flag} {value:g} s" in said
    assert "leg_timeout 30 s" in said
    assert f"Set {flag} {'below' if order.shorter else 'above'} 30" in said
    fits = math.nextafter(30.0, 0 if order.shorter else 60)
    assert advice(settings(mode=Mode.PULL, **{order.name: fits}), Role.PREFILL, engine(30)) == []
    assert advice(settings(mode=Mode.PULL, **{order.name: value}), Role.PREFILL, engine(None)) == []


def test_a_wait_that_holds_nothing_may_be_long():
    assert advice(settings(queue_timeout=600.0), Role.PREFILL, engine(30)) == []
    assert advice(settings(queue_timeout=600.0, mode=Mode.PULL), Role.DECODE, engine(30)) == []


def test_what_is_no_time_is_not_understood():
    with pytest.raises(IdentityError, match="leg_timeout"):
        engine("soon")


def test_an_operator_reads_it_once_in_the_log_and_in_the_status(caplog):
    async def main():
        p, d = pair(leg_timeout="8")
        other = FakeEngine("kv_producer", "p1", leg_timeout="90")
        caplog.set_level(logging.WARNING, "kvxfer.router")
        async with routed([p, other], [d], mode="pull", queue_timeout=45.0, request_timeout=600.0) as router:
            status = await (await router.session.get(router.base + "/status")).json()
            said = {one["url"]: one["advice"] for one in status["engines"]}
            assert [len(said[one.url]) for one in (p, other, d)] == [1, 0, 0]
            assert "--queue-timeout 45 s is not below its leg_timeout 8 s" in said[p.url][0]
            assert (await router.json(prompt="x"))[0] == 200
            checked = len(p.probes)
            p.info["leg_timeout"] = "50"  # started anew with what fits
            await router.until(200, url=p.url, healthy=True)
            while len(p.probes) == checked:
                await router.health()
            await router.until(200, url=p.url, healthy=True)
            status = await (await router.session.get(router.base + "/status")).json()
            assert [one["advice"] for one in status["engines"] if one["url"] == p.url] == [[]]
        assert sum(f"prefill engine {p.url}: the router" in one.getMessage() for one in caplog.records) == 1

    run(main())


def test_what_is_chosen_by_itself_is_what_a_request_is_told():
    async def main():
        p, d = pair(leg_timeout="0.3")
        d.info["leg_timeout"] = "0.3"
        d.more_info = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="4"} 1.0\nvllm:kv_cache_usage_perc 0.0'
        async with routed([p], [d], mode="pull") as router:
            d.hold.clear()
            first = router.session.post(router.base + "/v1/completions", json={"prompt": [1] * 60, "model": "m"})
            waits = asyncio.ensure_future(first)
            await d.called()
            status, body, _ = await router.json(prompt=[1] * 60)
            assert (status, "within 0.2 s (--queue-timeout)" in body["error"]["message"]) == (503, True), body
            d.hold.set()
            assert (await waits).status == 200

    run(main())
