"""The policies: what they compare, one at a time, on engines that are made up; then admission and skipping in a running router."""

import asyncio

import pytest
from router_fakes import FakeEngine, pair, routed, run
from yarl import URL

from kvxfer.router.engine import Engine, Told
from kvxfer.router.policies.admission import admits
from kvxfer.router.policies.asked import Asked
from kvxfer.router.policies.decode import SoonestToken, has_room
from kvxfer.router.policies.prefill import LeastWork, RoundRobin
from kvxfer.router.policies.timing import EXPLORE, Adaptive, Figure, Fixed
from kvxfer.router.settings import Role, When


def engines(count, role=Role.DECODE):
    return [Engine(role, URL(f"http://e{number}:1")) for number in range(count)]


def test_prefill_goes_where_least_is_to_be_computed():
    some = engines(3, Role.PREFILL)
    policy = LeastWork()
    some[0].load.queued_tokens, some[2].load.queued_tokens = 500, 300
    assert policy.pick(some, Asked(100)) is some[1]
    some[1].load.queued_tokens = 400
    assert policy.pick(some, Asked(100)) is some[2]


def test_prefill_stays_with_its_conversation_until_the_queue_there_costs_more():
    some = engines(2, Role.PREFILL)
    policy = LeastWork()
    asked = Asked(1000, {some[1].name: 900})
    for queued, chosen in ((0, 1), (899, 1), (901, 0)):
        some[1].load.queued_tokens = queued
        assert policy.pick(some, asked) is some[chosen]


@pytest.mark.parametrize("policy", [LeastWork, RoundRobin, SoonestToken])
def test_equals_take_turns_and_absence_shifts_nobody(policy):
    some = engines(3)
    made = policy()
    picks = [made.pick(some, Asked()).name for _ in range(6)]
    assert picks[:3] == picks[3:]
    assert len(set(picks[:3])) == 3
    without = [one for one in some if one.name != picks[0]]
    assert [made.pick(without, Asked()).name for _ in range(2)] == picks[1:3]


def test_decode_without_room_comes_last_and_is_taken_if_there_is_no_other():
    some = engines(2)
    some[0].says = Told(capacity=1000, reclaimable=50)
    some[1].says = Told(capacity=1000, reclaimable=500)
    some[1].load.waiting_tokens = 300
    policy = SoonestToken()
    assert policy.pick(some, Asked(100)) is some[1]
    assert not has_room(some[1], Asked(201))
    assert has_room(some[1], Asked(201, {some[1].name: 10}))
    assert policy.pick(some[:1], Asked(100)) is some[0]
    assert has_room(engines(1)[0], Asked(10**9)), "an engine that does not say is not refused"


def test_decode_goes_where_least_waits_and_what_it_holds_counts():
    some = engines(2)
    policy = SoonestToken()
    some[0].load.waiting_tokens = 400
    assert policy.pick(some, Asked(1000)) is some[1]
    assert policy.pick(some, Asked(1000, {some[0].name: 900})) is some[0]
    some[0].load.first_token_delay = 1.0
    assert policy.pick(some, Asked(1000, {some[0].name: 900})) is some[1]


def test_admission_keeps_waiting_handoffs_to_their_share():
    engine = engines(1)[0]
    engine.says = Told(capacity=1000, reclaimable=900)
    assert admits(engine, Asked(5000), 0.5), (
        "an engine that has nothing takes anything: what never fits is vLLM's to refuse"
    )
    engine.load.requests = 1
    engine.load.waiting_tokens = 400
    assert admits(engine, Asked(100), 0.5)
    assert not admits(engine, Asked(101), 0.5)
    engine.says = Told(capacity=1000, reclaimable=450)
    assert not admits(engine, Asked(100), 0.5)
    engine.says = Told()
    assert admits(engine, Asked(10**9), 0.5)


def test_adaptive_takes_what_measures_better_apart_for_even_and_uneven_queues():
    some = engines(2)
    policy = Adaptive()

    def run_with(delays, rounds=4000):
        chosen = []
        for _ in range(rounds):
            late, context = policy.late(some, Asked(100))
            chosen.append(late)
            policy.observed(context, late=late, delay=delays[late])
        return sum(chosen[rounds // 2 :]) / (rounds // 2)

    assert run_with({False: 0.01, True: 0.05}) <= 1.5 / EXPLORE
    some[0].load.waiting_tokens = 10_000
    assert run_with({False: 0.5, True: 0.05}) >= 1 - 1.5 / EXPLORE
    some[0].load.waiting_tokens = 0
    assert run_with({False: 0.01, True: 0.05}) <= 1.5 / EXPLORE, (
        "what was learned of uneven queues says nothing of even ones"
    )


def test_a_figure_follows_what_it_is_told():
    figure = Figure()
    for value in (1.0, 1.0, 1.0):
        figure.add(value)
    assert figure.bad == pytest.approx(1.0)
    for _ in range(200):
        figure.add(3.0)
    assert figure.mean == pytest.approx(3.0, abs=0.01)
    noisy = Figure()
    for number in range(1000):
        noisy.add(float(number % 2))
    assert noisy.bad > noisy.mean + 0.5
    assert Fixed(late=True).late([], Asked())[0]


CACHE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="64",x="y"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} %s'


def test_a_request_waits_for_room_and_goes_on_when_there_is_some():
    async def main():
        p, d = pair()
        d.more_info = CACHE % "0.25"
        async with routed([p], [d], decode_share=0.5) as router:
            d.hold.clear()
            first = asyncio.ensure_future(router.json(prompt=[1] * 400))
            await d.called(1)
            second = asyncio.ensure_future(router.json(prompt=[1] * 400))
            await asyncio.sleep(0.1)
            assert len(d.calls) == len(p.calls) == 1, "a request without room holds nothing anywhere"
            status = await (await router.session.get(router.base + "/status")).json()
            assert status["queued_requests"] == 1
            assert status["engines"][1]["kv_capacity_tokens"] == 1024
            assert status["engines"][1]["kv_reclaimable_tokens"] == 768
            d.hold.set()
            assert (await first)[0] == (await second)[0] == 200

    run(main())


def test_waits_for_room_are_bounded_in_time_and_number():
    async def main():
        p, d = pair()
        d.more_info = CACHE % "1.0"
        async with routed([p], [d], queue_timeout=0.3, queue_limit=1) as router:
            d.hold.clear()
            first = asyncio.ensure_future(router.json(prompt=[1] * 400))
            await d.called(1)
            second = asyncio.ensure_future(router.json(prompt=[1] * 400))
            await asyncio.sleep(0.05)
            status, body, headers = await router.json(prompt=[1] * 400)
            assert status == 503
            assert "--queue-limit" in body["error"]["message"]
            assert headers["Retry-After"]
            status, body, _ = await second
            assert status == 503
            assert "--queue-timeout" in body["error"]["message"]
            d.hold.set()
            assert (await first)[0] == 200

    run(main())


def test_late_choice_sends_decode_when_prefill_has_answered():
    async def main():
        p, d = pair()
        async with routed([p], [d], decode_when=When.LATE) as router:
            p.hold.clear()
            asked = asyncio.ensure_future(router.events(prompt="x"))
            await p.called()
            await asyncio.sleep(0.05)
            assert not d.calls
            p.hold.set()
            assert (await asked)[-1] == "[DONE]"
            assert d.calls[0].params["remote_engine_id"] == "p0"
            assert d.calls[0].params["transfer_id"] == p.calls[0].params["transfer_id"]

    run(main())


def test_a_prompt_that_decode_holds_nearly_all_of_is_not_handed_over_and_the_client_sees_it():
    async def main():
        p, d = pair()
        other = FakeEngine("kv_consumer", "d1")
        async with routed([p], [d, other], skip_prefill_below=20) as router:
            status, _, headers = await router.json(prompt=[1] * 400, conversation_id="c")
            assert (status, "X-Kvxfer-Prefill" in headers) == (200, False)
            (holder,) = (one for one in (d, other) if one.calls)
            for stream in (False, True):
                async with router.post(prompt=[1] * 410, conversation_id="c", stream=stream) as response:
                    assert response.headers["X-Kvxfer-Prefill"] == "skipped"
                    await response.read()
            assert len(p.calls) == 1
            assert len(holder.calls) == 3
            assert "kv_transfer_params" not in holder.calls[-1].body
            text = await (await router.session.get(router.base + "/metrics")).text()
            assert "kvxfer_router_prefill_skipped_total 2.0" in text

    run(main())
