"""The parts of reuse by themselves: what shapes KV, when fetching is worth while, what must hold at the start, what is private."""

from __future__ import annotations

import math
import queue
from types import SimpleNamespace

import pytest

from kvxfer.connector import private
from kvxfer.connector.bidirectional import check
from kvxfer.connector.courier import Courier
from kvxfer.connector.params import ParamsError, PlainParams, SinkParams, SourceParams, parse
from kvxfer.connector.shaping import chain_of
from kvxfer.connector.worth import AGAIN, DEFAULT, Worth
from kvxfer.errors import ConfigError
from kvxfer.layout.tables import Shape, Tables
from kvxfer.protocol.chain import CHUNK, DIGEST
from kvxfer.protocol.ids import RankId
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.dialer import Outcome

TOKENS = list(range(4 * CHUNK))
D = EngineAddress("10.0.0.2", 5601, "decode-1", front=True)


# --- what shapes KV ---------------------------------------------------------------------------------------------------


def request(**fields):
    return SimpleNamespace(**{"prompt_token_ids": TOKENS, "prompt_embeds": None, **fields})


def image(identifier: str, offset: int, length: int = 8):
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def same(one, other) -> int:
    """Chunks that two requests have in common."""
    a, b = (chain_of(each, TOKENS, "m") for each in (one, other))
    return next((i for i in range(4) if a[: (i + 1) * DIGEST] != b[: (i + 1) * DIGEST]), 4)


def lora(name: str):
    return SimpleNamespace(lora_name=name)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (request(), request(), 4),
        (request(cache_salt="a"), request(), 0),
        (request(cache_salt="a"), request(cache_salt="b"), 0),
        (request(lora_request=lora("a")), request(), 0),
        (request(lora_request=lora("a")), request(cache_salt="a"), 0),
        (request(mm_features=[image("a", 20)]), request(mm_features=[image("b", 20)]), 1),
        (request(mm_features=[image("a", 20)]), request(mm_features=[image("a", 21)]), 1),
        (request(mm_features=[image("a", 20)]), request(mm_features=[image("a", 20, 9)]), 1),
        (request(mm_features=[image("a", 20), image("b", 40)]), request(mm_features=[image("a", 20)]), 2),
        (request(mm_features=[image("a", 20), image("b", 25)]), request(mm_features=[image("b", 25)]), 1),
        (request(mm_features=[image("a", 99)]), request(), 4),
    ],
)
def test_requests_share_what_shapes_their_kv_alike(one, other, common) -> None:
    assert same(one, other) == common


@pytest.mark.parametrize("start", [CHUNK, 3 * CHUNK])
def test_a_chain_goes_on_where_it_was_left(start) -> None:
    one = request(cache_salt="a", mm_features=[image("a", 5), image("b", 50)])
    whole = chain_of(one, TOKENS, "m")
    at = start // CHUNK * DIGEST
    assert chain_of(one, TOKENS[start:], "m", start, whole[at - DIGEST : at]) == whole[at:]


def test_another_model_is_another_conversation() -> None:
    assert chain_of(request(), TOKENS, "m") != chain_of(request(), TOKENS, "n")


@pytest.mark.parametrize("one", [request(prompt_embeds=object()), request(prompt_token_ids=None)])
def test_of_prompt_embeddings_nothing_is_said(one) -> None:
    assert chain_of(one, TOKENS, "m") is None


# --- fetch or compute -------------------------------------------------------------------------------------------------


def measured(computed: float, fetched: float, answer: float) -> Worth:
    """An engine that computes so many tokens a second, and a peer that delivers so many, ``answer`` seconds after it was asked."""
    worth = Worth("auto")
    now = 0.0
    for _ in range(60):
        worth.step(512, now)
        now += 512 / computed
    worth.fetched(D, 1000, 1000 / fetched, answer, now)
    return worth


def test_a_number_is_what_it_says_whatever_is_measured() -> None:
    worth = Worth(100)
    worth.fetched(D, 1000, 100.0, 1.0, 0.0)
    assert worth.threshold(D, 1.0) == 100
    assert not worth.measures


def test_before_anything_is_measured_the_default_holds() -> None:
    worth = Worth("auto")
    assert worth.threshold(D, 0.0) == DEFAULT
    worth.fetched(D, 1000, 0.1, 0.01, 0.0)
    assert worth.threshold(D, 0.0) == DEFAULT, "how fast this engine computes is not known"


def test_the_break_even_of_what_was_measured() -> None:
    worth = measured(computed=1000.0, fetched=100_000.0, answer=0.05)
    assert worth.threshold(D, 31.0) == pytest.approx(0.05 / (1 / 1000 - 1 / 100_000))
    assert measured(computed=50_000.0, fetched=60_000.0, answer=0.05).threshold(D, 1.0) == pytest.approx(15_000)


def test_a_peer_that_is_slower_than_computing_is_left_alone_and_tried_again_later() -> None:
    worth = measured(computed=10_000.0, fetched=1000.0, answer=0.0)
    assert worth.threshold(D, 4.0) == math.inf
    assert worth.threshold(D, 4.0 + AGAIN) == DEFAULT
    for _ in range(40):
        worth.fetched(D, 1000, 0.001, 0.0, 40.0)
    assert worth.threshold(D, 41.0) < math.inf, "it has become fast"


def test_steps_that_compute_little_say_nothing_of_speed() -> None:
    worth = Worth("auto")
    for second in range(10):
        worth.step(1, float(second))
    worth.fetched(D, 1000, 0.1, 0.0, 10.0)
    assert worth.threshold(D, 10.0) == DEFAULT


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_how_fast_prompts_are_computed_is_the_same_however_many_steps_are_launched_ahead(batches, chunks) -> None:
    """An engine core's loop: it fills its queue first, with empty steps too, and then waits for the oldest step's result."""
    worth, now, free_at, each = Worth("auto", batches), 0.0, 0.0, 0.5
    for _ in range(20):
        now += 100.0  # idle
        queue: list[float] = []
        for tokens in [512] * chunks + [0] * (batches + 1):
            if len(queue) == batches:
                now = max(now, queue.pop(0))
            worth.step(tokens, now)
            free_at = max(free_at, now) + (each if tokens else 0.0)
            queue.append(free_at)
            now += 0.0005
    assert worth._computing == pytest.approx(each / 512, rel=0.01)


# --- params -----------------------------------------------------------------------------------------------------------

SOURCE = {"do_remote_decode": True, "transfer_id": "t"}
WHERE = {"engine_id": "decode-1", "host": "10.0.0.2", "port": 5601}


def named(which: str) -> dict:
    return {f"{which}_{key}": value for key, value in WHERE.items()}


@pytest.mark.parametrize("which", ["reuse", "remote"])
def test_a_prefill_leg_names_where_its_conversation_was_decoded(which) -> None:
    read = parse("r", {**SOURCE, **named(which), "remote_block_ids": [[1, 2]]})
    assert isinstance(read, SourceParams)
    assert read.reuse == D


def test_ours_wins_over_upstreams() -> None:
    assert parse("r", {**SOURCE, **named("reuse"), "remote_host": "10.9.9.9", "remote_port": 1}).reuse == D


def test_a_plain_request_may_name_it_as_well() -> None:
    assert parse("r", named("reuse")) == PlainParams(D)
    assert parse("r", {"reuse_host": None}) is None


def test_a_first_turn_names_nobody() -> None:
    none = {"remote_host": None, "remote_port": None, "remote_engine_id": None, "remote_block_ids": None}
    assert parse("r", {**SOURCE, **none}).reuse is None


@pytest.mark.parametrize("port", [None, "x", 0, 1 << 16, True])
def test_what_is_malformed_of_ours_is_refused_and_of_upstreams_ignored(port) -> None:
    with pytest.raises(ParamsError, match="reuse_port"):
        parse("r", {**SOURCE, "reuse_host": "h", "reuse_port": port})
    assert parse("r", {**SOURCE, "remote_host": "h", "remote_port": port}).reuse is None


def test_a_decode_leg_is_not_confused_by_it() -> None:
    read = parse("r", {"do_remote_prefill": True, **named("remote"), **named("reuse")})
    assert isinstance(read, SinkParams)
    assert not read.source.front


# --- at the start -----------------------------------------------------------------------------------------------------


def config(role="kv_producer", policy="recompute", caching=True, nnodes=1, executor="mp", cascade=False):
    return SimpleNamespace(
        model_config=SimpleNamespace(disable_cascade_attn=not cascade),
        kv_transfer_config=SimpleNamespace(kv_role=role, kv_load_failure_policy=policy),
        parallel_config=SimpleNamespace(nnodes=nnodes, distributed_executor_backend=executor),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )


PLAIN = Tables([Shape(32)])


@pytest.mark.parametrize(
    ("given", "tables", "cure"),
    [
        (config(policy="fail"), PLAIN, '"kv_load_failure_policy": "recompute"'),
        (config("kv_both", policy="fail"), PLAIN, '"kv_load_failure_policy": "recompute"'),
        (config("kv_consumer", caching=False), PLAIN, "--enable-prefix-caching"),
        (config(), Tables([Shape(32), Shape(32, 128)]), "--disable-hybrid-kv-cache-manager"),
        (config(), Tables([Shape(8)]), "--block-size"),
        (config(nnodes=2), PLAIN, "--distributed-executor-backend mp"),
        (config(executor="ray"), PLAIN, "--distributed-executor-backend mp"),
        (config("kv_consumer", cascade=True), PLAIN, "--no-disable-cascade-attn"),
    ],
)
def test_what_must_hold_is_said_at_the_start_with_its_cure(given, tables, cure) -> None:
    with pytest.raises(ConfigError, match=cure):
        check(given, tables, pinning=True)


def test_without_pins_there_is_no_reuse() -> None:
    with pytest.raises(ConfigError, match="bind_gpu_block_pool"):
        check(config(), PLAIN, pinning=False)


@pytest.mark.parametrize(
    "given",
    [
        config(),
        config("kv_consumer", policy="fail"),
        config("kv_both"),
        config(caching=False),
        config(executor=None),
        config(executor="uni"),
        config(cascade=True),
    ],
)
def test_what_holds_starts(given) -> None:
    check(given, PLAIN, pinning=True)


# --- vLLM's own names -------------------------------------------------------------------------------------------------


def test_the_engine_core_is_found_among_the_callers_and_woken() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.engine import EngineCoreRequestType

    class Core:
        def __init__(self, inbox) -> None:
            self.input_queue = inbox
            self.wake = self.made()

        def made(self):
            return private.waker()

    core = Core(queue.Queue())
    core.wake()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    assert Core([]).wake is None, "what is not as expected is not there"
    assert private.waker() is None


def test_what_the_scheduler_keeps_free_is_found_among_the_callers() -> None:
    class Scheduler:
        def __init__(self) -> None:
            self.kv_cache_manager = SimpleNamespace(watermark_blocks=3)
            self.reserved = private.reservations()

        def _inflight_prefill_reserved_blocks(self) -> int:
            return 4

    assert Scheduler().reserved() == 7
    assert private.reservations() is None


# --- the courier ------------------------------------------------------------------------------------------------------


class Channel:
    def __init__(self) -> None:
        self.sent, self.connecting = [], []

    def connect(self, address) -> None:
        self.connecting.append(address)

    def send(self, rank, message) -> None:
        self.sent.append((rank, message))


def test_what_is_said_waits_for_the_connection_and_comes_back_when_there_is_none() -> None:
    channel, rank = Channel(), RankId("decode-1", "i", -1)
    courier = Courier(channel)
    courier.send(D, "one")
    courier.send(D, "two")
    assert channel.connecting == [D]
    assert courier.on_outcome(Outcome(D, (rank,), None)) == []
    assert channel.sent == [(rank, "one"), (rank, "two")]
    courier.send(D, "three")
    assert channel.sent[-1] == (rank, "three")
    assert courier.on_lost(rank) == [D]
    courier.send(D, "four")
    assert courier.on_outcome(Outcome(D, (), "nobody answers")) == ["four"]
    assert courier.on_lost(rank) == []
