"""docs/safety.md names, for each claim, tests that attack it: they exist, and no claim stands alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "safety.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE)))


@pytest.mark.parametrize("named", NAMED)
def test_the_test_exists(named) -> None:
    path, _, test = named.partition("::")
    text = (ROOT / path).read_text()
    assert not test or f"def {test}(" in text


def test_every_section_that_claims_something_names_what_attacks_it() -> None:
    sections = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]
    silent = [s.splitlines()[0] for s in sections if "*Attacked by*" not in s]
    assert silent == ["What is assumed"]
    assert len(NAMED) > 20
