"""What prompts are made of, and how one continues another: what a later turn of a conversation shares with an earlier one.

A prompt has an *id* at each position, which is what a hash chain sees, and a *tag*, which stands for the KV there. Tags differ
where ids do, and where something else does that shapes KV: here a cache salt, of which every second tenant has one of his own.
So equal ids under another salt are another conversation, and whoever forgets the salt reads what is not its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.chaos.process import BLOCK_SIZE
from kvxfer.protocol.chain import CHUNK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.chaos.engine import Request
    from kvxfer.chaos.legs import Handoff
    from kvxfer.chaos.world import World

SPAN = 64
"""Positions of which a prompt's ids and tags are known: more than any request comes to."""
SCALE = CHUNK // BLOCK_SIZE
"""Tokens of kvxfer's for a position of the simulation, so that blocks of the simulation are chunks of kvxfer's chain."""
LAST = 8
"""Turns that were answered of late, of which one is continued."""
CONTINUED = 0.75
"""Probability of a prompt that continues another, in a world with conversations."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What stands at each position, as said above. ``before``: the host that answered the turn before, if any."""

    ids: Sequence[int]
    tags: Sequence[int]
    salt: str | None = None
    before: str = ""


def fresh(tag: int) -> Prompt:
    """Return a prompt that has nothing in common with any other."""
    return Prompt(range(tag, tag + SPAN), range(tag, tag + SPAN))


def another_turn(world: World, before: Handoff, host: str, tag: int, most: int) -> tuple[Prompt, int]:
    """Continue, rewrite, truncate or branch a turn that ``host`` has answered, or say the same for another tenant.

    Returns its prompt and how many tokens of it are sent, at most ``most``.
    """
    draw = world.random
    theirs, kind = before.prompt, draw.random()
    if kind < 0.1:  # noqa: PLR2004
        other = Prompt(theirs.ids, range(tag, tag + SPAN), f"tenant {tag}", host)
        return other, min(most, before.tokens + draw.randint(1, 8))
    kept = before.tokens + draw.randint(0, 3) if kind < 0.75 else draw.randint(0, before.tokens)  # noqa: PLR2004
    new = range(tag + kept, tag + SPAN)
    prompt = Prompt([*theirs.ids[:kept], *new], [*theirs.tags[:kept], *new], theirs.salt, host)
    return prompt, max(1, min(most, kept + draw.randint(1, 9)))


class AsVllm:
    """A request of the simulation as kvxfer's scheduler half sees one of vLLM's, in tokens of kvxfer's."""

    __slots__ = ("_one", "max_tokens", "request_id")

    def __init__(self, one: Request) -> None:
        self._one = one
        self.request_id = one.id
        self.max_tokens = one.grow * SCALE

    @property
    def cache_salt(self) -> str | None:
        """As the client sent it."""
        return self._one.said.salt

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt."""
        return self._one.tokens * SCALE

    @property
    def num_tokens(self) -> int:
        """With what has been generated."""
        return max(self._one.tokens, self._one.computed) * SCALE

    @property
    def num_computed_tokens(self) -> int:
        """What there is KV of, or will be when a load is over."""
        one = self._one
        return (one.load[1] if one.state == "loading" and one.load is not None else one.computed) * SCALE

    @property
    def prompt_token_ids(self) -> list[int]:
        """All ids of the prompt."""
        return [token for token in self._one.said.ids[: self._one.tokens] for _ in range(SCALE)]

    @property
    def all_token_ids(self) -> list[int]:
        """With what has been generated."""
        one = self._one
        return [token for token in one.said.ids[: max(one.tokens, one.computed)] for _ in range(SCALE)]

    @property
    def block_hashes(self) -> list[int]:
        """Of whole blocks: the tag at a block's end is that of nothing else, and stands for all that is before it."""
        one = self._one
        return list(one.said.tags[BLOCK_SIZE - 1 : max(one.tokens, one.computed) : BLOCK_SIZE])
