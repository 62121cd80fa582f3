"""One schema for what kvxfer's benches write: a head that is the same for all of them, and figures with their spread.

A results file is a JSON object. Its head: ``schema`` and ``version`` (this module's), ``kind`` (which bench), ``made`` (UTC),
``settings``, ``versions`` and ``machine``. All other keys are the bench's own. A reader must refuse a version that it does not
know, since keys may have another meaning there; keys that it does not know it passes over.
"""

from __future__ import annotations

import datetime as dt
import json
import statistics
from typing import TYPE_CHECKING, Any, Final

from kvxfer.bench.machine import machine, versions
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SCHEMA: Final = "kvxfer-bench"
VERSION: Final = 1


class ResultsError(KvxferError):
    """A file is not a results file, or one of another version."""


def report(kind: str, settings: Mapping[str, Any], python: str, **body: Any) -> dict[str, Any]:
    """Return a bench's results under the common head; ``python`` is the interpreter whose packages were measured."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "kind": kind,
        "made": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        **body,
        "settings": dict(settings),
        "versions": versions(python),
        "machine": machine(),
    }


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float | int] | None:
    """Return how values are spread: their number, least, median, 90th and 99th percentile, greatest, and the middle half.

    Percentiles lie between the two nearest values, as NumPy's do. None where there is nothing.
    """
    if not values:
        return None
    ordered = sorted(values)
    quartiles = percentile(ordered, 0.25), percentile(ordered, 0.75)
    found = {
        "least": ordered[0],
        "median": statistics.median(ordered),
        "p90": percentile(ordered, 0.9),
        "p99": percentile(ordered, 0.99),
        "greatest": ordered[-1],
        "middle_half": quartiles[1] - quartiles[0],
    }
    return {"n": len(ordered), **{name: round(value, digits) for name, value in found.items()}}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which that share of sorted values lies."""
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def write(path: Path, value: object) -> None:
    """Write ``value`` as JSON, making the directory; whoever reads meanwhile finds the former file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)


def read(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Read a results file, of that kind where one is named. Raises ResultsError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{path} is no results file: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ResultsError(f"{path} is no results file of a kvxfer bench: its schema is not {SCHEMA!r}")
    if found.get("version") != VERSION:
        raise ResultsError(f"{path} has version {found.get('version')} of the schema; this kvxfer reads {VERSION}")
    if kind is not None and found.get("kind") != kind:
        raise ResultsError(f"{path} is of kvxfer bench {found.get('kind')}, not of kvxfer bench {kind}")
    return found
