"""Draws the machines' state diagrams from their tables, so that what is drawn is what runs.

``python -m kvxfer.protocol.diagrams > docs/states.md`` makes the page; a test holds the two together.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from kvxfer.protocol import peers, sink_states, source_states

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import Enum

_MEMBER = re.compile(r'^    [A-Z]+ = "([a-z]+)"(?:  # (.*))?$', re.MULTILINE)

_HEAD = """# State diagrams
Drawn from the tables by `python -m kvxfer.protocol.diagrams`; do not edit. Why they are so stands above each table, and
[safety.md](safety.md) argues from them.
"""


def page() -> str:
    """Return the page, in Markdown."""
    parts = [
        _HEAD,
        _machine("A handoff at its source", "protocol/source_states.py", source_states, "expected or computing"),
        _machine("A handoff at its sink", "protocol/sink_states.py", sink_states, "opening"),
        _machine("A session between two processes", "protocol/peers.py", peers, "up"),
    ]
    return "\n".join(parts)


def diagram(table: Mapping[Enum, Mapping[Enum, Enum]], starts: str) -> str:
    """Return a Mermaid diagram; several events between the same two states share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, row in table.items():
        for event, after in row.items():
            arrows.setdefault((state.value, after.value), []).append(event.value)
    lines = [f"    [*] --> {start}" for start in starts.split(" or ")]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    lines += [f"    {state.value} --> [*]" for state, row in table.items() if not row]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def _machine(title: str, path: str, module: object, starts: str) -> str:
    table = getattr(module, "TRANSITIONS")  # noqa: B009 - the modules share these names, not a type
    states, events = (_meanings(getattr(module, name)) for name in ("State", "Event"))
    return "\n".join(
        [
            f"## {title}",
            f"`kvxfer/{path}`",
            "",
            diagram(table, starts),
            "",
            _table("state", states),
            "",
            _table("event", events),
            "",
        ]
    )


def _meanings(enum: type[Enum]) -> dict[str, str]:
    """Return each member's value and what the comment beside it says."""
    return {value: comment or "" for value, comment in _MEMBER.findall(inspect.getsource(enum))}


def _table(what: str, meanings: Mapping[str, str]) -> str:
    rows = [f"| {value} | {meaning} |" for value, meaning in meanings.items()]
    return "\n".join([f"| {what} | meaning |", "|---|---|", *rows])


if __name__ == "__main__":  # pragma: no cover - run by a test in a process of its own
    print(page(), end="")
