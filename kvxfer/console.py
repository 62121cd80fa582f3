"""Where the command line's tables go: to a terminal as wide as it is, to a file or a pipe as wide as they need."""

from __future__ import annotations

from typing import Final

from rich.console import Console

_WIDE: Final = 240


def for_tables() -> Console:
    """Return a console on which no cell is cut for want of a terminal: rich takes 80 columns where there is none."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    return console
