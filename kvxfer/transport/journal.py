"""Ended handoff records to a file and to spans, by a thread of their own. Off unless the settings say so.

The mover puts a record into a queue, which is all that it or the engine's thread pays; this thread sleeps in that queue. What
cannot be written is told once and dropped: telemetry never holds up a handoff, nor ends an engine that has started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from kvxfer.protocol.ids import RankId
    from kvxfer.transport.records import HandoffRecord
    from kvxfer.transport.spans import Spans

logger = logging.getLogger("kvxfer.telemetry")


def epoch() -> float:
    """Return the Unix time, in seconds, at which this host's monotonic clock was zero."""
    return time.time() - time.monotonic()


class Lines:
    """Appends records to ``<engine>-rank<n>.jsonl`` in a directory, one JSON object a line.

    The file is opened anew when it is not the one at its path any more, so logrotate may move it away. Each batch of lines is one
    ``write`` to a file opened for appending. Raises ConfigError where it cannot be opened at the start.
    """

    def __init__(self, directory: Path, me: RankId) -> None:
        self._path = directory / f"{re.sub(r'[^A-Za-z0-9._-]', '_', me.engine)}-rank{me.rank}.jsonl"
        self._head = {"engine": me.engine, "incarnation": me.incarnation}
        self._told = False
        self._torn = False  # a line could be written in part only
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"records_dir: {self._path} cannot be written: {error}") from error

    def write(self, records: list[HandoffRecord]) -> None:
        """Append these records. What goes wrong is logged once, until it goes right again."""
        head = self._head | {"epoch": epoch()}
        lines = b"".join(msgspec.json.encode(head | msgspec.to_builtins(record)) + b"\n" for record in records)
        try:
            if self._moved():
                self.close()
                self._file = self._open()
                self._torn = False
            if self._torn:
                lines = b"\n" + lines
            while lines:
                written = os.write(self._file, lines)
                self._torn = not lines[:written].endswith(b"\n")
                lines = lines[written:]
            self._told = False
        except OSError as error:
            if not self._told:
                logger.warning("handoff records are lost, %s cannot be written: %s", self._path, error)
            self._told = True

    def close(self) -> None:
        """Close the file, once: its number may be another file's, or a socket's, from then on."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = -1

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _moved(self) -> bool:
        try:
            there, ours = self._path.stat(), os.fstat(self._file)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)


class Journal(threading.Thread):
    """Takes ended records from a mover and writes them down."""

    def __init__(self, lines: Lines | None, spans: Spans | None) -> None:
        super().__init__(name="kvxfer-journal", daemon=True)
        self._lines = lines
        self._spans = spans
        self._queue: queue.SimpleQueue[HandoffRecord | None] = queue.SimpleQueue()

    def hear(self, record: HandoffRecord) -> None:
        """Take a record that will not change any more. Never waits."""
        self._queue.put(record)

    def run(self) -> None:
        """Write what comes until told to stop, then what is left."""
        going_on = True
        while going_on:
            batch, going_on = self._batch()
            try:
                if self._lines is not None and batch:
                    self._lines.write(batch)
                if self._spans is not None:
                    for record in batch:
                        self._spans.export(record)
            except Exception:
                logger.exception("defect in the telemetry of %d handoffs", len(batch))

    def stop(self, timeout: float = 5.0) -> None:
        """Write what has come so far and end."""
        if self.is_alive():
            self._queue.put(None)
            self.join(timeout)
        if self._lines is not None:
            self._lines.close()
        if self._spans is not None:
            self._spans.close()

    def _batch(self) -> tuple[list[HandoffRecord], bool]:
        batch: list[HandoffRecord] = []
        one = self._queue.get()
        while one is not None:
            batch.append(one)
            try:
                one = self._queue.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False
