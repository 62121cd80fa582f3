"""Images through real pairs: another image with the same tokens around it never gets the first one's KV."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvxfer.bench import engines
from kvxfer.bench.client import Client, RequestError
from kvxfer.bench.process import ServerError, running
from tests.e2e.conftest import PYTHON, Pair
from tests.support import seeing

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT = ("--limit-mm-per-prompt", '{"image": 2}')


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory):
    return seeing.build(tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture(scope="module", params=["push", "pull"])
def pair(request, seeing_model, tmp_path_factory) -> Iterator[Pair]:
    """Prefix caches on both sides, which hash images as well."""
    prefill, decode = engines.pair_specs(
        request.param, seeing_model, python=PYTHON, prefix_caching=True, num_blocks=260, max_model_len=2048,
        connector_config={"leg_timeout": 8.0}, args=LIMIT,
    )  # fmt: skip
    first, second, router = engines.make_pair(request.param, prefill, decode, tmp_path_factory.mktemp("images"))
    with running(first.server, second.server, router):
        yield Pair(request.param, first, second, router)


def asked(*pictures: int, text: str = "Tell me about descriptors and what you see. " * 6) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": seeing.picture(seed)}} for seed in pictures]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


async def answers(url: str, *pictures: int, **extra: Any) -> tuple[int, ...]:
    async with Client(url) as client:
        return (await client.chat(asked(*pictures), 12, stream=False, extra=extra)).token_ids


def test_the_same_words_with_other_images(pair: Pair) -> None:
    async def go() -> None:
        seen = [(1,), (2,), (), (1, 2), (2, 1), (1,)]
        references = [await answers(pair.prefill.url, *pictures) for pictures in seen]
        assert len(set(references)) == 5, "images that change nothing prove nothing"
        for _ in range(2):  # then with decode's cache full of all of them
            for pictures, reference in zip(seen, references, strict=True):
                assert await answers(pair.router.url, *pictures) == reference, pictures
        together = await asyncio.gather(*(answers(pair.router.url, *pictures) for pictures in seen))
        assert together == references
        assert {record.outcome for record in pair.records(pair.decode)} == {"done"}
        await pair.all_free()

    asyncio.run(go())


def test_legs_with_different_images_are_refused(pair: Pair) -> None:
    async def go() -> None:
        prefill, decode = pair.legs()
        async with Client(pair.prefill.url) as p, Client(pair.decode.url) as d:
            text = "Words that no other test has asked for yet. " * 5
            first = p.chat(asked(3, text=text), 1, stream=False, extra=prefill)
            second = d.chat(asked(4, text=text), 12, stream=False, extra=decode)
            if pair.mode == "pull":
                await first
                results = [await asyncio.gather(second, return_exceptions=True)][0]
            else:
                results = await asyncio.gather(second, first, return_exceptions=True)
        assert isinstance(results[0], RequestError)
        assert "the two legs' prompts differ" in pair.record(pair.decode, decode).reason
        await pair.all_free(within=15.0)

    asyncio.run(go())


def test_an_engine_that_only_numbers_images_does_not_start(seeing_model, tmp_path) -> None:
    prefill, _ = engines.pair_specs(
        "push", seeing_model, python=PYTHON, prefix_caching=False, num_blocks=260, max_model_len=2048,
        args=(*LIMIT, "--mm-processor-cache-gb", "0"),
    )  # fmt: skip
    engine = engines.make_engine(prefill, tmp_path)
    with pytest.raises(ServerError), running(engine.server):
        pass
    assert "--mm-processor-cache-gb 0 vLLM numbers multimodal inputs" in engine.server.log.read_text()
