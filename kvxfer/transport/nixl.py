"""NIXL as an agent.

NIXL's own progress thread stays off: it spins (an idle engine then burns a whole core, measured on vLLM 0.29 with NIXL
1.4.1). The mover progresses the fabric when there is something to wait for, and only then.

What NIXL's calls do when a peer dies is told in ``nixl_raw``. Two things are decided here.

* **Who failed.** NIXL's errors name nobody. When all transfers under way go to one peer, it is that peer's connection that
  broke, and all of them have failed. When they go to several, or another was posted to just before, none is blamed: those
  that still end well are done, the others fail when their peer is ``lost``, at the latest after ``DOUBT`` seconds.
* **Which NIXL agent.** One of them can meet a limited number of peers in its life. When it has met enough, ``meet`` makes the
  next, under a name of its own; peers that know the old one go on with it, and with the last of them it is closed. Outside
  this module a peer has one name, whichever of its NIXL agents it is met by.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvxfer.errors import TransportError
from kvxfer.transport.agent import Status
from kvxfer.transport.nixl_raw import RawAgent
from kvxfer.transport.nixl_rescue import rescue, restore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvxfer.layout.runs import Descriptors

logger = logging.getLogger("kvxfer.nixl")

BACKENDS = ("LIBFABRIC", "UCX")

DOUBT = 60.0
"""Seconds after which a transfer has failed that was under way when some connection broke, and has not ended since."""

_STATUS = {"DONE": Status.DONE, "PROC": Status.PENDING}

_LATER = re.compile(r"~\d+\Z")


_made: dict[str, int] = {}
"""How many NIXL agents this process has made for a rank."""


class NixlAgent:
    """The agent of one rank: one NIXL agent at a time for new peers, earlier ones for those that know them.

    Raises TransportError or NativeLibraryError when NIXL or the backend's plugin cannot be loaded, saying what to install.
    ``options`` are the backend's own parameters, as strings.
    """

    def __init__(self, name: str, backend: str = "LIBFABRIC", options: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.backend = backend
        self._options = dict(options or {})
        self._registered: list[tuple[Sequence[tuple[int, int, int]], str]] = []
        # A peer that knew an earlier agent of this rank, which was closed, must not take this one for it.
        self._made = _made[name] = _made.get(name, 0) + 1
        self._raw = RawAgent(name if self._made == 1 else f"{name}~{self._made}", backend, self._options)
        self._all = [self._raw]
        self._of_peer: dict[str, tuple[RawAgent, str]] = {}  # with the peer's name in NIXL
        self._under_way: list[_Posted] = []
        self._posted_at: dict[str, float] = {}
        self._disturbed = False
        self._call: tuple[str, object] | None = None
        self._ended: set[str] = set()  # peers whose processes have ended: no call about them is begun
        self._interrupted: tuple[str, object] | None = None

    def register(self, spans: Sequence[tuple[int, int, int]], memory: str) -> None:
        """Register spans with the backend."""
        self._raw.register(spans, memory)
        self._registered.append((spans, memory))

    def metadata(self) -> bytes:
        """Return NIXL's metadata of the agent that new peers are to know."""
        return self._raw.metadata()

    def meet(self, name: str) -> bool:
        """Note that a peer knows ``metadata()``; True when that has changed for whoever comes next."""
        self._raw.meet(name)
        if not self._raw.full:
            return False
        self._made = _made[self.name] = _made[self.name] + 1
        fresh = RawAgent(f"{self.name}~{self._made}", self.backend, self._options)
        for spans, memory in self._registered:
            fresh.register(spans, memory)
        logger.info("%s has met as many peers as one NIXL agent can; new ones meet %s", self._raw.name, fresh.name)
        self._raw = fresh
        self._all.append(fresh)
        return True

    def add_peer(self, metadata: bytes, name: str = "") -> str:
        """Load a peer's metadata and connect it."""
        raw = self._raw
        with self._about(name) as call:
            known_as = raw.connect(metadata, lambda: self._interrupted is call)
        name = _LATER.sub("", known_as)
        raw.meet(name)
        self._of_peer[name] = (raw, known_as)
        return name

    def lost(self, name: str) -> None:
        """Note that a peer's process has ended: all that is under way to it has failed, whether or not NIXL will ever say so."""
        for one in [one for one in self._under_way if one.peer == name]:
            self._end(one, Status.FAILED)

    def remove_peer(self, name: str) -> None:
        """Forget a peer, whose transfers are terminal."""
        self._posted_at.pop(name, None)
        self._ended.discard(name)
        raw, known_as = self._of_peer.pop(name, (None, name))
        if raw is not None:
            raw.disconnect(known_as)
        for each in list(self._all):
            each.part(name)
            if each is not self._raw and each.deserted:
                self._all.remove(each)
                each.close()

    def post(
        self, operation: str, local: Descriptors, remote: Descriptors, memory: str, peer: str, notification: bytes = b""
    ) -> Any:
        """Create and post a transfer; it may be terminal already when this returns."""
        if peer not in self._of_peer:
            raise TransportError(f"{peer} is not connected")
        raw, known_as = self._of_peer[peer]
        self._progress(raw)
        nixl = raw.nixl
        try:
            handle = nixl.initialize_xfer(
                operation,
                nixl.get_xfer_descs(local, memory),
                nixl.get_xfer_descs(remote, memory),
                known_as,
                notification,
                [self.backend],
            )
        except Exception as error:
            raise TransportError(
                f"NIXL refused a {operation} of {len(local)} descriptors to {peer}: {error}"
            ) from error
        try:
            with self._about(peer):
                state = nixl.transfer(handle)
        except Exception as error:
            raw.keep(handle)
            self._disturbed = True
            raise TransportError(f"NIXL could not post a {operation} to {peer}: {error}") from error
        posted = _Posted(raw, handle, peer)
        self._under_way.append(posted)
        self._posted_at[peer] = time.monotonic()
        status = _STATUS.get(state, Status.FAILED)
        if status is not Status.PENDING:
            self._end(posted, status)
        return posted

    def status(self, transfer: _Posted) -> Status:
        """Ask NIXL, which progresses the backend on the way."""
        if transfer.status is Status.PENDING:
            self._progress(transfer.raw)
        if transfer.status is Status.PENDING:
            try:
                status = _STATUS.get(transfer.raw.nixl.check_xfer_state(transfer.handle), Status.FAILED)
            except Exception:  # noqa: BLE001 - an error that came just now: it is final in NIXL's eyes
                status = Status.FAILED
            if status is Status.FAILED:
                self._disturbed = True
            elif status is Status.PENDING and transfer.doubted and time.monotonic() - transfer.doubted > DOUBT:
                status = Status.FAILED
            if status is not Status.PENDING:
                self._end(transfer, status)
        return transfer.status

    def release(self, transfer: _Posted) -> None:
        """Release a terminal transfer's handle."""
        if transfer.status is not Status.DONE:
            transfer.raw.keep(transfer.handle)
            return
        try:
            transfer.handle.release()
        except Exception as error:
            raise TransportError(f"NIXL would not release a transfer: {error}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        """Take what has arrived from all peers, under the names by which the peers are known."""
        arrived = []
        for raw in self._all:
            self._progress(raw)
            arrived += [(_LATER.sub("", name), message) for name, message in raw.arrived()]
        return arrived

    def interrupt(self, name: str) -> None:
        """Make a call return that is under way about a peer whose process has ended. From any thread; returns at once."""
        self._ended.add(name)  # first: a call that begins just now looks at it after it has been noted down
        call = self._call
        if call is not None and call[0] == name:
            self._interrupted = call
            if self.backend == "LIBFABRIC" and os.environ.get("FI_PROVIDER", "tcp").startswith(
                "tcp"
            ):  # others end by themselves
                rescue(name, lambda: self._call is call)

    @contextmanager
    def _about(self, peer: str) -> Iterator[tuple[str, object]]:
        """Mark a call to NIXL that may not return while ``peer`` does not answer."""
        self._call = call = (peer, object())
        try:
            if peer in self._ended:
                raise TransportError(f"the process of {peer} has ended")
            yield call
        finally:
            self._call = None
            if self._interrupted is call:
                restore()
            self._take_blame()

    def disturbed(self) -> bool:
        """Tell, once, that some connection broke."""
        told, self._disturbed = self._disturbed, False
        return told

    def close(self) -> None:
        """Destroy what is left."""
        self._under_way.clear()
        for raw in list(self._all):
            raw.close()
            self._all.remove(raw)

    def _progress(self, raw: RawAgent) -> None:
        raw.progress()
        self._take_blame()

    def _take_blame(self) -> None:
        """Find out whom the errors concern that have been read away."""
        for raw in self._all:
            if not raw.broken:
                continue
            raw.broken, self._disturbed = False, True
            now = time.monotonic()
            under_way = [one for one in self._under_way if one.raw is raw]
            suspects = {one.peer for one in under_way}
            # The notification of a transfer that is done may be among what broke.
            suspects |= {
                name for name, at in self._posted_at.items() if now - at < DOUBT and self._of_peer[name][0] is raw
            }
            for one in under_way:
                if len(suspects) == 1:
                    self._end(one, Status.FAILED)
                else:
                    one.doubted = one.doubted or now

    def _end(self, one: _Posted, status: Status) -> None:
        one.status = status
        self._under_way.remove(one)


class _Posted:
    """A posted transfer: its last known status, and since when it may have been among those that broke."""

    __slots__ = ("doubted", "handle", "peer", "raw", "status")

    def __init__(self, raw: RawAgent, handle: Any, peer: str) -> None:
        self.raw = raw
        self.handle = handle
        self.peer = peer
        self.status = Status.PENDING
        self.doubted = 0.0
