"""Images and adapters in conversations: vLLM's real requests, schedulers and block hashes, without a model that could see them.

What vLLM itself shares between two requests in its prefix cache is the measure: what prefill takes back from decode is never more.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvxfer.connector.shaping import chain_of
from kvxfer.protocol.chain import DIGEST, link
from tests.contract.test_reuse import BLOCK, pair, tiny, tokens  # noqa: F401 - fixtures

pytestmark = pytest.mark.contract

PLACEHOLDER = 7


def image(identifier: str, offset: int, length: int = 24) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


def seeing(words: list[int], *images: MultiModalFeatureSpec) -> list[int]:
    """The tokens with placeholders where images are: whatever they show, the same tokens."""
    for one in images:
        at = one.mm_position
        words = [*words[: at.offset], *[PLACEHOLDER] * at.length, *words[at.offset + at.length :]]
    return words


@pytest.fixture
def sighted(pair):  # noqa: F811
    """A pair whose schedulers think that they have an encoder."""
    both = pair()
    for engine in (both.p, both.d):
        engine.scheduler.max_num_encoder_input_tokens = 512
        engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=512)
    return both


def test_another_image_in_the_same_place_is_another_conversation_from_there_on(sighted) -> None:
    cat, dog = image("cat", 90), image("dog", 90)
    history = seeing(tokens(150, 1), cat)
    history += sighted.turn(history, features=[cat])
    more = history + tokens(20, 2)
    sighted.turn(more, 4, features=[dog])
    assert sighted.fetched() == 90 // BLOCK * BLOCK == 80, "what is before the image, and no more"
    before = sighted.fetched()
    sighted.turn(more, 4, features=[cat])
    assert sighted.fetched() - before == (len(history) - 1) // BLOCK * BLOCK


def test_an_image_and_the_bare_placeholders_are_not_the_same(sighted) -> None:
    cat = image("cat", 64)
    history = seeing(tokens(150, 3), cat)
    sighted.turn(history, features=[cat])
    sighted.turn(history + tokens(20, 4), 4)
    assert sighted.fetched() == 64


def test_of_two_images_the_second_is_another(sighted) -> None:
    cat, dog, cow = image("cat", 16), image("dog", 80), image("cow", 80)
    history = seeing(tokens(150, 5), cat, dog)
    sighted.turn(history, features=[cat, dog])
    sighted.turn(history + tokens(20, 6), 4, features=[cat, cow])
    assert sighted.fetched() == 80


def test_another_adapter_is_another_conversation(pair) -> None:  # noqa: F811
    both = pair()
    one, two = LoRARequest("one", 1, "/nowhere/one"), LoRARequest("two", 2, "/nowhere/two")
    history = tokens(150, 7)
    history += both.turn(history, lora=one)
    more = history + tokens(20, 8)
    both.turn(more, 4, lora=two)
    both.turn(more, 4)
    assert both.fetched() == 0
    both.turn(more, 4, lora=LoRARequest("one", 9, "/nowhere/one"))  # another engine numbers its adapters otherwise
    assert both.fetched() == (len(history) - 1) // BLOCK * BLOCK


def test_a_turn_that_comes_when_every_lease_is_over(pair) -> None:  # noqa: F811
    """Leases are for readers: between turns nothing is kept that could expire, and what the prefix cache has is taken."""
    both = pair(decoder_kv_blocks_ttl=2.5, decoder_kv_idle_ttl=2.5)
    history = tokens(150, 9)
    for seed in (10, 11):
        history += both.turn(history)
        known, before = (len(history) - 1) // BLOCK * BLOCK, both.fetched()
        time.sleep(3.0)
        history += tokens(20, seed)
        both.turn(history, 4)
        assert both.fetched() - before == known
        assert both.counters(both.d)["reuse_pinned"] == 0


def shared(one: list[Any], other: list[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


@pytest.mark.parametrize("block", [16, 32])
def test_the_chain_is_never_longer_than_what_vllm_shares(block) -> None:
    """Requests of equal tokens, with any two of many sets of images, salts and places."""
    hasher = get_hash_fn_by_name("sha256")
    init_none_hash(hasher)
    block_hasher = get_request_block_hasher(block, hasher)
    ids = [PLACEHOLDER] * 192
    sets: list[list[MultiModalFeatureSpec]] = [[]]
    sets += [[image(name, at, length)] for name in ("cat", "dog") for at in (0, 15, 40, 64) for length in (8, 40)]
    sets += [[image("cat", 8, 20), image(name, at, 20)] for name in ("cat", "dog") for at in (40, 100, 130)]
    made = []
    for number, (features, salt) in enumerate(itertools.product(sets, (None, "a tenant"))):
        sampling = SamplingParams(max_tokens=1)
        request = Request(
            str(number), ids, sampling, None, cache_salt=salt, mm_features=features, block_hasher=block_hasher
        )
        chain = chain_of(request, ids, "m")
        assert chain is not None
        assert len(chain) == len(ids) // 16 * DIGEST
        made.append((request.block_hashes, [link(chain, end) for end in range(block, len(ids) + 1, block)]))
    lengths = set()
    for (theirs, ours), (other_theirs, other_ours) in itertools.combinations(made, 2):
        lengths.add(shared(ours, other_ours))
        assert shared(ours, other_ours) <= shared(theirs, other_theirs)
    assert len(lengths) > 3, "the sets differ in too few places to show anything"
