"""What the router learns of engines, and when it uses them."""

import asyncio

import pytest
from router_fakes import FakeEngine, error_answer, free_port, pair, routed, run


def test_health_lists_every_engine():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            status, body = await router.health()
            assert status == 200
            assert body["engines"] == [
                {
                    "role": "prefill",
                    "url": p.url,
                    "engine_id": "p0",
                    "healthy": True,
                    "draining": False,
                    "reason": None,
                },
                {"role": "decode", "url": d.url, "engine_id": "d0", "healthy": True, "draining": False, "reason": None},
            ]

    run(main())


def test_each_prefill_engine_is_probed_once():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            await router.json(prompt="x")
            await asyncio.sleep(0.2)  # several checks
            (probe,) = p.probes
            params = probe.body.pop("kv_transfer_params")
            assert probe.body == {"model": "the-model", "prompt": [1], "max_tokens": 1}
            assert params.pop("transfer_id").startswith("probe-")
            assert params == {"do_remote_decode": True, "kvxfer_probe": True}
            assert not d.probes

    run(main())


def test_a_probe_that_disagrees_names_both_values():
    async def main():
        p, d = pair()
        p.probe_answer = {"remote_engine_id": "another", "remote_port": 1}
        async with routed([p], [d], wait=False) as router:
            await router.until(503, url=d.url, healthy=True)
            body = await router.until(503, url=p.url, healthy=False)
            while "another" not in (reason := body["engines"][0]["reason"]):
                body = (await router.health())[1]
            assert all(value in reason for value in ("'p0'", "'another'", "5600", "1"))
            p.probe_answer = {}
            await router.until(200, url=p.url, healthy=True)

    run(main())


def test_an_engine_without_the_metric_is_not_used():
    async def main():
        p, d = pair()
        d.has_info = False
        async with routed([p], [d], wait=False) as router:
            await router.until(503, url=p.url, healthy=True)
            body = (await router.health())[1]
            assert "start vLLM with a kvxfer connector" in body["engines"][1]["reason"]
            d.has_info = True
            await router.until(200, url=d.url, healthy=True)

    run(main())


@pytest.mark.parametrize("which", [0, 1])
def test_an_engine_that_comes_up_later_is_used(which):
    async def main():
        engines = pair()
        late, early = engines[which], engines[1 - which]
        late.port = free_port()
        await early.start()
        async with routed([engines[0]], [engines[1]], start=False, wait=False) as router:
            await router.until(503, url=early.url, healthy=True)
            assert (await router.json(prompt="x"))[0] == 503
            await late.start()
            await router.until(200, url=late.url, healthy=True)
            assert (await router.json(prompt="x"))[0] == 200

    run(main())


def test_an_engine_that_was_restarted_is_named_by_its_new_id_and_port():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            await router.json(prompt="x")
            assert d.calls[0].params["remote_engine_id"] == "p0"
            await p.stop()
            p.engine_id = "p0-again"
            p.info["port"] = "6001"
            await p.start()
            await router.until(200, url=p.url, engine_id="p0-again", healthy=True)
            await router.json(prompt="x")
            assert d.calls[-1].params["remote_engine_id"] == "p0-again"
            assert d.calls[-1].params["remote_port"] == 6001
            assert len(p.probes) == 2

    run(main())


def test_a_new_id_between_two_checks_is_probed_before_it_is_used():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            p.probe_answer = {"remote_engine_id": "p0"}
            p.engine_id = "p1"
            body = await router.until(503, url=p.url, healthy=False)
            assert "'p1'" in body["engines"][0]["reason"]

    run(main())


def test_an_unhealthy_engine_gets_nothing_until_it_is_well():
    async def main():
        p, d = pair()
        d2 = FakeEngine("kv_consumer", "d1")
        async with routed([p], [d, d2]) as router:
            d2.ok = False
            await router.until(200, url=d2.url, healthy=False)
            for _ in range(4):
                assert (await router.json(prompt="x"))[0] == 200
            assert (len(d.calls), len(d2.calls)) == (4, 0)
            d2.ok = True
            await router.until(200, url=d2.url, healthy=True)
            await router.json(prompt="x")
            await router.json(prompt="x")
            assert len(d2.calls) == 1

    run(main())


def test_the_wrong_role_and_the_wrong_mode_are_told():
    async def main():
        p, d = pair()
        async with routed([d], [p], wait=False) as router:
            body = (await router.health())[1]
            while any(one["reason"] == "not checked yet" for one in body["engines"]):
                body = (await router.health())[1]
            assert "kv_role kv_consumer" in body["engines"][0]["reason"]
            assert "kv_role kv_producer" in body["engines"][1]["reason"]

    run(main())


def test_a_key_is_sent_with_the_probe_and_asked_for_when_missing():
    async def main():
        p, d = pair()

        async with routed([p], [d], engine_api_key="k") as router:
            assert p.probes[0].headers["Authorization"] == "Bearer k"
            await router.json(prompt="x")
            assert "Authorization" not in p.calls[0].headers
            assert "Authorization" not in d.calls[0].headers

        p, d = pair()
        p.json = lambda call, params=None: error_answer(401, "Unauthorized")
        async with routed([p], [d], wait=False) as router:
            await router.until(503, url=d.url, healthy=True)
            body = await router.until(503, url=p.url, healthy=False)
            while "--engine-api-key" not in body["engines"][0]["reason"]:
                body = (await router.health())[1]

    run(main())


def test_a_wildcard_host_is_replaced_by_the_urls():
    async def main():
        p, d = pair(host="0.0.0.0")
        async with routed([p], [d]) as router:
            await router.json(prompt="x")
            assert d.calls[0].params["remote_host"] == "127.0.0.1"

    run(main())


def test_a_slow_engine_delays_no_other_and_is_told():
    async def main():
        p, d = pair()
        async with routed([p], [d], check_timeout=0.1) as router:

            async def slow(request):
                await asyncio.Event().wait()

            await d.stop()
            d._health = slow
            await d.start()
            body = await router.until(503, url=d.url, healthy=False)
            while "within 0.1 s" not in body["engines"][1]["reason"]:
                body = (await router.health())[1]
            assert body["engines"][0]["healthy"]

    run(main())


async def introduced(engine, count):
    """Wait until an engine has been told of others so often, and return what it was told."""
    for _ in range(1000):
        if len(engine.introductions) >= count:
            return engine.introductions
        await asyncio.sleep(0.01)
    raise AssertionError(f"{count} introductions wanted, have {engine.introductions}")


async def introduced_to(engine, *addresses):
    """Wait until an engine has been told of all of these, and of each once."""
    for _ in range(1000):
        told = [one for introduction in engine.introductions for one in introduction]
        if sorted(told) == sorted(addresses):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{addresses} wanted, have {engine.introductions}")


def test_each_decode_engine_is_told_once_of_each_prefill_engine_and_no_prefill_engine_of_any():
    async def main():
        (p, d), p1, d1 = pair(), FakeEngine("kv_producer", "p1", port="5601"), FakeEngine("kv_consumer", "d1")
        async with routed([p, p1], [d, d1]):
            for decode in (d, d1):
                await introduced_to(decode, "127.0.0.1:5600", "127.0.0.1:5601")
            before = d.introductions + d1.introductions
            await asyncio.sleep(0.2)  # several checks
            assert d.introductions + d1.introductions == before
            assert p.introductions == p1.introductions == []

    run(main())


def test_a_wildcard_host_is_introduced_by_its_urls_and_ipv6_in_brackets():
    async def main():
        p, d = pair(host="0.0.0.0")
        p1 = FakeEngine("kv_producer", "p1", host="fd00::1", port="5601")
        async with routed([p, p1], [d]):
            await introduced_to(d, "127.0.0.1:5600", "[fd00::1]:5601")

    run(main())


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_who_comes_back_is_introduced_again(which):
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            assert await introduced(d, 1) == [["127.0.0.1:5600"]]
            gone = p if which == "prefill" else d
            gone.ok = False
            await router.until(503, url=gone.url, healthy=False)
            gone.ok = True
            assert await introduced(d, 2) == [["127.0.0.1:5600"]] * 2

    run(main())


def test_an_engine_that_takes_no_introduction_is_used_all_the_same_and_it_is_said_once(caplog):
    async def main():
        p, d = pair()
        d.takes_introductions = False
        async with routed([p], [d]) as router:
            await introduced(d, 3)
            assert (await router.json(prompt="x"))[0] == 200
            d.takes_introductions = True
            count = len(await introduced(d, 4))
            await asyncio.sleep(0.2)
            assert len(d.introductions) <= count + 1, "it has taken one"

    run(main())
    said = [record.getMessage() for record in caplog.records if "could not be introduced" in record.getMessage()]
    assert len(said) == 1
    assert "127.0.0.1:5600" in said[0]
    assert "500" in said[0]


def test_an_introduction_that_is_not_answered_delays_no_check_and_no_other_introduction():
    async def main():
        (p, d), d1 = pair(), FakeEngine("kv_consumer", "d1")
        d.introduction_answered.clear()
        async with routed([p], [d, d1]) as router:
            await introduced(d, 1)
            await introduced(d1, 1)
            p.ok = False
            await router.until(503, url=p.url, healthy=False)
            p.ok = True
            await router.until(200, url=p.url, healthy=True)
            assert await introduced(d1, 2)
            assert len(d.introductions) == 1
            d.introduction_answered.set()

    run(main())
