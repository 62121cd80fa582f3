"""Conversations: which engines hold the KV of earlier turns.

A turn is found as the continuation of an earlier one by the ``conversation_id`` of the body, by the header
``X-Conversation-Id``, or (chat) by the chain of its messages: each turn repeats all messages of the one before. Whatever the
client names is bound to its API key by a keyed digest, so no client can reach or guess another's conversation, and a wrong
name costs speed, never correctness: engines compare token ids before they reuse anything.

What is remembered is small and bounded (``store``): the engines, their start (an engine that has started anew holds nothing), and
how many tokens there were.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvxfer.router.policies.asked import Asked
from kvxfer.router.settings import Role, RouterSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.router.engine import Engine
    from kvxfer.router.engines import Engines
    from kvxfer.router.openai import Json
    from kvxfer.router.split import ClientRequest
    from kvxfer.router.store import Store

log = logging.getLogger(__name__)

HEADER = "X-Conversation-Id"
_MOST_LINKS = 64
"""Of the newest messages: how far back an earlier turn is looked for."""
_CHARACTERS_OF_A_TOKEN = 4


class Memory(msgspec.Struct, array_like=True):
    """What is remembered of a conversation's last turn."""

    conversation: str
    prefill: str
    prefill_start: str
    decode: str
    decode_start: str
    tokens: int
    turns: int


@dataclass(slots=True)
class Conversation:
    """One turn's view of its conversation."""

    name: str
    """What engines are told; not what the client named it."""
    keys: list[bytes]
    """Under which the next turn will find this one."""
    decode: Engine | None = None
    """Who holds the KV of the earlier turns, if it is still the engine that it was."""
    tokens: int = 0
    turns: int = 0

    def reuse_params(self) -> Json:
        """What prefill is told: the conversation, and where its KV can be read back."""
        params: Json = {"conversation_id": self.name}
        if self.decode is not None and self.decode.usable:
            one = self.decode.identity
            params |= {"reuse_engine_id": one.engine_id, "reuse_host": one.host, "reuse_port": one.port}
        return params


class Conversations:
    """Finds and remembers them."""

    def __init__(self, settings: RouterSettings, engines: Engines, store: Store) -> None:
        self._settings = settings
        self._engines = engines
        self._store = store
        # Replicas that share a store must make the same digests.
        secret = (settings.conversation_secret or "").encode(errors="surrogateescape")
        self._key = secret or secrets.token_bytes(32)

    @property
    def kept(self) -> int | None:
        """Keys that are held, if here."""
        return self._store.size()

    async def find(self, request: ClientRequest, header: str | None, owner: str) -> tuple[Conversation | None, Asked]:
        """The conversation of a request, and what policies should know. One of several prompts belongs to none."""
        single = request.singles[0]
        tokens = estimated_tokens(single.body)
        if len(request.singles) != 1:
            return None, Asked(tokens)
        named = request.conversation_id or header
        links = self._links(owner, single.body) if named is None else [self._digest(b"id", owner, named)]
        if not links:
            return None, Asked(tokens)
        known = await self._store.first(links[::-1])
        memory = None if known is None else _read(known)
        if memory is None:
            return Conversation(links[-1].hex()[:32], links[-1:]), Asked(tokens)
        prefill = self._still(Role.PREFILL, memory.prefill, memory.prefill_start)
        decode = self._still(Role.DECODE, memory.decode, memory.decode_start)
        held = {one.name: min(memory.tokens, tokens) for one in (prefill, decode) if one is not None}
        found = Conversation(memory.conversation, links[-1:], decode, memory.tokens, memory.turns)
        return found, Asked(tokens, held)

    async def remember(
        self, conversation: Conversation, prefill: Engine | None, decode: Engine | None, tokens: int
    ) -> None:
        """A turn has been answered: its KV is on these engines now."""
        memory = Memory(
            conversation.name, *_place(prefill), *_place(decode), tokens=tokens, turns=conversation.turns + 1
        )
        await self._store.put(conversation.keys, msgspec.msgpack.encode(memory), self._settings.conversation_ttl)

    async def forget(self, conversation: Conversation) -> None:
        """Its KV is known to be gone."""
        await self._store.forget(conversation.keys)

    def _still(self, role: Role, name: str, start: str) -> Engine | None:
        """The engine of that name, if it is usable and has not been started anew."""
        for one in self._engines.by_role[role]:
            if one.name == name and one.usable and one.start == start:
                return one
        return None

    def _links(self, owner: str, body: Json) -> list[bytes]:
        """The chain of digests over the newest messages, oldest first."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return []
        # What else shapes the prompt, and the model: a conversation does not go on under another.
        shape = {name: body.get(name) for name in ("model", "tools", "chat_template", "documents", "cache_salt")}
        link = self._digest(b"chain", owner, msgspec.json.encode(shape).decode())
        links = []
        for message in messages:
            link = hmac.new(link, msgspec.json.encode(message, order="deterministic"), hashlib.sha256).digest()
            links.append(link)
        return links[-_MOST_LINKS:]

    def _digest(self, kind: bytes, owner: str, name: str) -> bytes:
        made = hmac.new(self._key, kind, hashlib.sha256)
        for part in (owner.encode(), name.encode(errors="surrogateescape")):
            made.update(len(part).to_bytes(4, "big"))
            made.update(part)
        return made.digest()


def _read(raw: bytes) -> Memory | None:
    try:
        return msgspec.msgpack.decode(raw, type=Memory)
    except msgspec.MsgspecError:
        log.warning("a remembered conversation is not understood: another version of this router wrote it")
        return None


def _place(engine: Engine | None) -> tuple[str, str]:
    return ("", "") if engine is None else (engine.name, engine.start)


def estimated_tokens(body: Json) -> int:
    """Tokens of a prompt: token ids counted, text at four characters a token, anything else by its text."""
    prompt: Any = body.get("prompt")
    if isinstance(prompt, list):
        return max(len(prompt), 1)
    if isinstance(prompt, str):
        return max(len(prompt) // _CHARACTERS_OF_A_TOKEN, 1)
    return max(_characters(body.get("messages") or ()) // _CHARACTERS_OF_A_TOKEN, 1)


def _characters(messages: Sequence[Any]) -> int:
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(len(str(part.get("text", ""))) for part in content if isinstance(part, dict))
    return total
