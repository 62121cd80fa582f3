"""The drawn diagrams are those of the tables, and the page in docs/ is the one that is drawn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.protocol import diagrams, peers, sink_states, source_states

PAGE = Path(__file__).parents[3] / "docs" / "states.md"


def test_the_page_is_what_is_drawn() -> None:
    assert PAGE.read_text() == diagrams.page(), "python -m kvxfer.protocol.diagrams > docs/states.md"
    assert subprocess.check_output([sys.executable, "-m", "kvxfer.protocol.diagrams"], text=True) == PAGE.read_text()


@pytest.mark.parametrize("module", [source_states, sink_states, peers])
def test_every_transition_is_drawn_once_and_nothing_else(module) -> None:
    drawn = diagrams.diagram(module.TRANSITIONS, "up")
    arrows = re.findall(r"^    (\w+) --> (\w+): (.*)$", drawn, re.MULTILINE)
    told = [(a, event, b) for a, b, events in arrows for event in events.split(", ")]
    table = [(s.value, e.value, t.value) for s, row in module.TRANSITIONS.items() for e, t in row.items()]
    assert sorted(told) == sorted(table)


@pytest.mark.parametrize("module", [source_states, sink_states, peers])
def test_every_state_and_event_has_its_meaning_beside_it(module) -> None:
    for enum in (module.State, module.Event):
        meanings = diagrams._meanings(enum)
        assert list(meanings) == [member.value for member in enum]
        assert all(meanings.values()), meanings
