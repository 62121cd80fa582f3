"""How much the bench model's answers depend on its prompt: the measurement behind the figures in ``model.py``.

One engine alone answers a prompt, then the same prompt with a single token changed. What is counted is how many
of those answers differ in their first 16 tokens.
"""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvxfer.bench.client import Client
from kvxfer.bench.engines import EngineSpec, make_engine
from kvxfer.bench.model import SPECIAL_TOKENS, Recipe, build, prompt_tokens
from kvxfer.bench.process import running

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LENGTHS = (31, 127, 300, 1000, 2000, 4000, 6000)
_EARLY = 32
_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Of ``trials`` prompts of ``length`` tokens with one token changed, how many answers changed."""

    length: int
    trials: int
    early_changed: int
    anywhere_changed: int
    distinct: int
    """Different tokens among the 16 of the unchanged prompt's answer."""
    repeated: bool
    """The unchanged prompt, sent once more at the end, had the same answer."""


async def measure(url: str, lengths: Sequence[int] = LENGTHS, trials: int = 24) -> list[Sensitivity]:
    """Measure on the engine at ``url``: position 5 first, then random ones among the first 32, and anywhere."""
    rows = []
    async with Client(url) as client:
        for length in lengths:
            prompt = prompt_tokens(length, seed=0)
            choice = random.Random(length)  # noqa: S311 - a fixed choice of trials
            base = await client.complete(prompt, _TOKENS)

            async def changed(
                position: int, prompt: list[int] = prompt, base: tuple[int, ...] = base.token_ids
            ) -> bool:
                token = choice.randrange(len(SPECIAL_TOKENS), Recipe().vocab - 1)  # noqa: B023 - awaited in this round
                other = [*prompt[:position], token + (token >= prompt[position]), *prompt[position + 1 :]]
                return (await client.complete(other, _TOKENS)).token_ids != base

            early = [5] + [choice.randrange(min(_EARLY, length)) for _ in range(trials - 1)]
            rows.append(
                Sensitivity(
                    length=length,
                    trials=trials,
                    early_changed=sum([await changed(position) for position in early]),
                    anywhere_changed=sum([await changed(choice.randrange(length)) for _ in range(trials)]),
                    distinct=len(set(base.token_ids)),
                    repeated=(await client.complete(prompt, _TOKENS)).token_ids == base.token_ids,
                )
            )
    return rows


async def run(logs: Path, *, trials: int = 24, python: str = sys.executable) -> list[dict[str, object]]:
    """Start an engine alone, measure, and return one dictionary a prompt length."""
    spec = EngineSpec(name="sensitivity", model=build(), python=python)
    engine = make_engine(spec, logs)
    with running(engine.server):
        return [asdict(row) for row in await measure(engine.url, trials=trials)]
