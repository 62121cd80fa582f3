"""Whether an arm's tokens are those of one engine alone: long prompts one by one, and a crowd all at once.

It is worth no more than the model is sensitive. So one engine alone is asked for each long prompt once more with an early token
changed, and how many answers that changed is part of the result, beside how many different tokens an answer has at least.
vLLM's own answers may depend on what else it computes at that moment: compare under ``VLLM_BATCH_INVARIANT=1`` on a GPU.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.bench.pd import points
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.bench.pd.window import Line

_EARLY = 5
_CROWD_PART = 8  # a crowd's longest prompt, as part of the longest there is

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """``prompts`` of up to ``longest`` tokens one by one, ``crowd`` shorter ones all at once, ``output`` tokens each."""

    prompts: int
    crowd: int
    longest: int
    output: int
    seed: int
    vocab: int

    def serial(self) -> list[list[int]]:
        """Prompts from the shortest to the longest, each a good deal longer than the one before."""
        few = max(1, self.prompts - 1)
        return [
            self._prompt(round(32 * (self.longest / 32) ** (number / few)), number) for number in range(self.prompts)
        ]

    def together(self) -> list[list[int]]:
        """Prompts of a crowd: of all lengths up to a part of the longest."""
        most = max(self.longest // _CROWD_PART, 33)
        return [
            self._prompt(33 + (most - 33) * number // max(1, self.crowd), 1000 + number) for number in range(self.crowd)
        ]

    def changed(self, prompt: Sequence[int]) -> list[int]:
        """Return a prompt with one early token changed."""
        early = min(_EARLY, len(prompt) - 1)
        other = [*prompt]
        other[early] = other[early] + 1 if other[early] + 1 < self.vocab else other[early] - 1
        return other

    def _prompt(self, length: int, number: int) -> list[int]:
        return points.tokens(max(2, length), (self.seed, points.WARM_UP, number), self.vocab)


@dataclass(slots=True)
class Answers:
    """What one arm answered; an answer that failed is its error."""

    serial: list[Tokens | str] = field(default_factory=list)
    together: list[Tokens | str] = field(default_factory=list)
    changed: list[Tokens | str] = field(default_factory=list)


async def answers(line: Line, plan: Plan, *, reference: bool) -> Answers:
    """Ask an arm for all answers. ``reference``: it is one engine alone, asked one by one, with changed prompts as well."""
    found = Answers()
    for prompt in plan.serial():
        found.serial.append(await _answer(line, prompt, plan.output))
        if reference:
            found.changed.append(await _answer(line, plan.changed(prompt), plan.output))
    crowd = plan.together()
    if reference:
        found.together = [await _answer(line, prompt, plan.output) for prompt in crowd]
    else:
        found.together = [*await asyncio.gather(*(_answer(line, prompt, plan.output) for prompt in crowd))]
    return found


async def _answer(line: Line, prompt: Sequence[int], output: int) -> Tokens | str:
    try:
        answer, _ = await line.answer(prompt, output)
    except KvxferError as error:
        return str(error)
    return answer.token_ids


def judge(plan: Plan, reference: Answers, others: dict[str, Answers]) -> dict[str, Any]:
    """Compare. An answer that failed is like no other, a failed reference included."""
    lengths = [len(prompt) for prompt in plan.serial()], [len(prompt) for prompt in plan.together()]
    changed = [a != b for a, b in zip(reference.changed, reference.serial, strict=True)]
    kinds = [0 if isinstance(one, str) else len(set(one)) for one in reference.serial]
    return {
        "output": plan.output,
        "reference": {
            "lengths": lengths[0],
            "changed_by_an_early_token": sum(changed),
            "least_kinds_of_tokens": min(kinds, default=0),
        },
        "arms": {
            label: {
                "one_by_one": _compared(one.serial, reference.serial, lengths[0]),
                "crowd": _compared(one.together, reference.together, lengths[1]),
            }
            for label, one in others.items()
        },
    }


def _compared(ours: Sequence[Tokens | str], theirs: Sequence[Tokens | str], lengths: Sequence[int]) -> dict[str, Any]:
    different = [
        {"length": length, "error": one}
        if isinstance(one, str)
        else {"length": length, "answer": one, "reference": other}
        for one, other, length in zip(ours, theirs, lengths, strict=True)
        if one != other or isinstance(one, str)
    ]
    return {"prompts": len(ours), "identical": len(ours) - len(different), "different": different}


def complaints(verified: dict[str, Any]) -> list[str]:
    """Say which arms of ours differ, and where equality proves little."""
    found = []
    told = verified["reference"]
    if told["changed_by_an_early_token"] < len(told["lengths"]):
        found.append(
            f"an early token changed {told['changed_by_an_early_token']} of {len(told['lengths'])} answers of one engine alone: "
            "this model is not sensitive enough for equal tokens to prove anything; use --model small"
        )
    for label, arm in verified["arms"].items():
        for way, one in arm.items():
            if one["identical"] < one["prompts"]:
                found.append(
                    f"{label}, {way}: {one['identical']} of {one['prompts']} answers have the tokens of one engine alone"
                )
    return found
