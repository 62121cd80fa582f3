"""What is read off vLLM's objects: digests of prompts, and the requests of a step. The real ones are in the contract tests."""

from types import SimpleNamespace

import pytest

from kvxfer.connector.checks import check_inputs
from kvxfer.connector.compat import Scheduled, prompt_digests, scheduled_requests
from kvxfer.errors import ConfigError


def request(tokens=(5, 6, 70_000), **more):
    return SimpleNamespace(prompt_token_ids=None if tokens is None else list(tokens), **more)


def image(identifier, offset, length=1):
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_equal_prompts_have_equal_digests_and_they_are_short():
    assert prompt_digests(request(), 0) == prompt_digests(
        request(cache_salt=None, mm_features=[], lora_request=None), 0
    )
    assert [len(digest) for digest in prompt_digests(request(range(100_000)), 0, 1)] == [16, 16]


@pytest.mark.parametrize(
    "other",
    [
        request((5, 6, 70_001)),
        request((5, 6)),
        request((6, 5, 70_000)),
        request((5, 6, 70_000, 0)),
        request(cache_salt="tenant"),
        request(lora_request=SimpleNamespace(lora_name="adapter")),
        request(mm_features=[image("image", 0)]),
    ],
)
def test_whatever_shapes_the_kv_is_in_the_digest(other):
    ((digest,), (theirs,)) = prompt_digests(request(), 0), prompt_digests(other, 0)
    assert digest != theirs


def test_images_are_told_apart_by_what_they_are_and_where_they_stand():
    each = [[image("a", 0)], [image("b", 0)], [image("a", 1)], [image("a", 0, 2)], [image("a", 0), image("a", 1)]]
    digests = [prompt_digests(request(mm_features=features), 0) for features in each]
    assert len(set(digests)) == len(each)
    assert digests[0] == prompt_digests(request(mm_features=[image("a", 0)]), 0)


@pytest.mark.parametrize("processed", [None, 0, 4.0])
@pytest.mark.parametrize("prefixes", [True, False])
def test_multimodal_inputs_that_are_only_numbered_are_refused_at_start(processed, prefixes):
    multimodal = None if processed is None else SimpleNamespace(mm_processor_cache_gb=processed)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )
    if processed == 0 and not prefixes:
        with pytest.raises(ConfigError, match="--mm-processor-cache-gb 0 vLLM numbers multimodal inputs"):
            check_inputs(config)
    else:
        check_inputs(config)


# Around the lengths at which MessagePack counts otherwise, of tokens that take one, three and five bytes.
@pytest.mark.parametrize("length", [1, 2, 3, 14, 15, 16, 17, 18, 4096, 65_535, 65_536, 65_537, 65_538])
@pytest.mark.parametrize("last", [1, 200, 70_000])
def test_a_prompt_without_its_last_tokens_is_a_shorter_prompt(length, last):
    tokens = [*range(length - 1), last]
    found = prompt_digests(request(tokens), 0, 1, 2)
    assert len(found) == min(3, length)
    for less, digest in enumerate(found):
        assert (digest,) == prompt_digests(request(tokens[: length - less]), 0)


@pytest.mark.parametrize("other", [request(None), request(prompt_embeds=object()), request(())])
def test_a_prompt_that_is_not_all_tokens_has_none(other):
    assert prompt_digests(other, 0, 1) == ()


def output(new=(), cached=(), resumed=()):
    """A SchedulerOutput: (id, blocks or None, computed, scheduled) of each request."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=one, block_ids=(blocks,), num_computed_tokens=done) for one, blocks, done, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[one for one, *_ in cached],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, *_ in cached],
            num_computed_tokens=[done for *_, done, _ in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens={one: count for one, _, _, count in (*new, *cached)},
    )


def test_the_requests_of_a_step_that_are_asked_for():
    step = output(
        new=[("a", [1, 2], 0, 32), ("other", [9], 0, 16)],
        cached=[("another", [8], 16, 16), ("b", [3], 32, 16), ("c", None, 40, 1), ("d", [4, 5], 0, 20)],
        resumed=["d"],
    )
    assert list(scheduled_requests(step, {"a", "b", "c", "d", "not in it"})) == [
        Scheduled("a", ([1, 2],), True, 0, 32),
        Scheduled("b", ([3],), False, 32, 16),
        Scheduled("c", (), False, 40, 1),
        Scheduled("d", ([4, 5],), True, 0, 20),
    ]
    assert list(scheduled_requests(step, {})) == []
