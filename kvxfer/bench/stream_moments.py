"""The push connectors, kvxfer's and vLLM's own, each noting two moments that both have. For ``kvxfer bench stream`` only.

Loaded by ``kv_connector_module_path``: the classes have the same names as what they time, so nothing else about an engine
differs. In the worker, at the same hooks of either connector, they append to a file of their own:

* ``computed``: a step's forward is done (``wait_for_save`` is called, and this step had layers). The last of a prompt is where
  kvxfer records its last fence, and from where upstream has the whole prompt to write.
* ``received``: the engine hears that a request's KV is there (``get_finished``).

The clock is CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

DIRECTORY: Final = "KVXFER_BENCH_MOMENTS"
"""The environment variable that tells a worker in which directory its file shall be."""

COMPUTED, RECEIVED = "computed", "received"
_SUFFIX: Final = ".moments"


class Moment(NamedTuple):
    """What happened, and when, in monotonic seconds."""

    at: float
    what: str


class Moments:
    """The file of one process, to which moments are added."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory / f"{os.getpid()}{_SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, what: str, count: int = 1) -> None:
        """Note that something happens now, so many times."""
        os.write(self._file, f"{time.monotonic()!r} {what}\n".encode() * count)


def read(directory: Path) -> list[Moment]:
    """Return what all processes of a directory have noted, the earliest first."""
    lines = [line.split() for path in directory.glob(f"*{_SUFFIX}") for line in path.read_text().splitlines()]
    return sorted(Moment(float(at), what) for at, what in lines)


class Timed:
    """Notes the moments of the connector that it is mixed into."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._moments: Moments | None = None
        self._has_layers = False

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Called in workers alone, once."""
        self._moments = Moments(Path(os.environ[DIRECTORY]))
        super().register_kv_caches(kv_caches)  # type: ignore[misc]  # the connector's

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Note that this step has a forward: ``wait_for_save`` is also called for steps without one (vLLM 0.31 and later)."""
        self._has_layers = True
        super().save_kv_layer(*args, **kwargs)  # type: ignore[misc]  # likewise

    def wait_for_save(self) -> None:
        """Note that what the step computes is there."""
        if self._has_layers and self._moments is not None:
            self._has_layers = False
            self._moments.add(COMPUTED)
        super().wait_for_save()  # type: ignore[misc]  # likewise

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Note what has been received."""
        sent, received = super().get_finished(finished_req_ids)  # type: ignore[misc]  # likewise
        if received and self._moments is not None:
            self._moments.add(RECEIVED, len(received))
        return sent, received
