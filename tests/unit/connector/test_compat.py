"""What is read off vLLM's objects: digests of prompts, and the requests of a step. The real ones are in the contract tests."""

from types import SimpleNamespace

import pytest

from kvxfer.connector.compat import Scheduled, prompt_digest, scheduled_requests


def request(tokens=(5, 6, 70_000), **more):
    return SimpleNamespace(prompt_token_ids=None if tokens is None else list(tokens), **more)


def test_equal_prompts_have_equal_digests_and_they_are_short():
    assert prompt_digest(request()) == prompt_digest(request(cache_salt=None, mm_features=[], lora_request=None))
    assert len(prompt_digest(request(range(100_000)))) == 16


@pytest.mark.parametrize(
    "other",
    [
        request((5, 6, 70_001)),
        request((5, 6)),
        request((6, 5, 70_000)),
        request((5, 6, 70_000, 0)),
        request(()),
        request(cache_salt="tenant"),
        request(lora_request=SimpleNamespace(lora_name="adapter")),
        request(mm_features=[SimpleNamespace(identifier="image")]),
    ],
)
def test_whatever_shapes_the_kv_is_in_the_digest(other):
    assert prompt_digest(other) not in (b"", prompt_digest(request()))


@pytest.mark.parametrize("other", [request(None), request(prompt_embeds=object())])
def test_a_prompt_that_is_not_all_tokens_has_none(other):
    assert prompt_digest(other) == b""


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
        Scheduled("a", [1, 2], True, 0, 32),
        Scheduled("b", [3], False, 32, 16),
        Scheduled("c", [], False, 40, 1),
        Scheduled("d", [4, 5], True, 0, 20),
    ]
    assert list(scheduled_requests(step, {})) == []
