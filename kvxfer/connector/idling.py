"""An engine that has nothing to do but wait for handoffs sleeps until something happens.

vLLM goes on making steps while any request waits for its KV: one each 1 to 1.3 ms, each with a call to the workers, so that
decode takes most of a core from whoever shares it. Nothing can come of such a step before a mover has a result, or a client
asks for something. So the scheduler's last act in it is to wait for one of the two, on the condition of the very queue through
which everything reaches an engine core (``EngineCoreProc.input_queue``): a new request, an abort, a utility call or a signal
ends the wait as it would end the sleep of an engine without requests, and so does a result, by way of the *bell*.

The bell is a local datagram socket of the scheduler's process, which the workers hear of in a step's metadata. Each rank rings
it once when it has heard of it; until all of them have, as when one is on another host, no step waits.

A step waits only where that changes nothing but time: every request of the engine is a load of ours that is open, the step
carries nothing to the workers, and so many like it went before that no batch is in flight.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

from kvxfer.connector import compat, private

if TYPE_CHECKING:
    import queue


class Bell:
    """The scheduler process's end. Its thread only turns datagrams into wakes; it lives as long as the process.

    Raises OSError where there are no such sockets.
    """

    def __init__(self, inbox: queue.Queue[Any], ranks: int) -> None:
        self.name = f"kvxfer-{secrets.token_hex(12)}"
        self._inbox = inbox
        self._missing = set(range(ranks))
        self._rung = False
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_abstract(self.name))
        threading.Thread(target=self._listen, name="kvxfer-bell", daemon=True).start()

    def wait(self, limit: float) -> None:
        """Sleep until the engine core is asked something, a rank rings, or for ``limit`` seconds.

        In the engine core's own thread, the only one that takes anything out of its queue. Returns at once if a rank has rung
        since the last wait: a step must see what for.
        """
        with self._inbox.not_empty:
            if not (self._missing or self._rung or self._inbox.queue):
                self._inbox.not_empty.wait(limit)
            self._rung = False

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while not self._closed:
            rank = self._socket.recv(8)  # nothing at all, too, from somebody else on this host: it only costs a step
            with self._inbox.not_empty:
                self._missing.discard(int.from_bytes(rank, "big") - 1)
                self._rung = True
                self._inbox.not_empty.notify()
        self._socket.close()


class Ringer:
    """A worker rank's end. Rings once when it is made."""

    def __init__(self, name: str, rank: int) -> None:
        self._at = _abstract(name)
        self._rank = (rank + 1).to_bytes(8, "big")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.ring()

    def ring(self) -> None:
        """Wake the engine core. From any thread; what it shall find must be there already.

        A bell that cannot be reached, or that rings so much that there is no room for more, is none of the mover's business.
        """
        with contextlib.suppress(OSError):
            self._socket.sendto(self._rank, self._at)


def _abstract(name: str) -> bytes:
    return b"\0" + name.encode()


class Idling:
    """The scheduler half's side: which steps may wait."""

    def __init__(self, vllm_config: Any, limit: float) -> None:
        self.limit = limit
        parallel = vllm_config.parallel_config
        inbox = private.own_inbox(vllm_config) if limit > 0 else None
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._bell: Bell | None = None
        with contextlib.suppress(OSError):
            self._bell = None if inbox is None else Bell(inbox, ranks)
        self.untold = "" if self._bell is None else self._bell.name
        """The name of the bell until the workers have been told of it."""
        self._still = 0
        self._settled = compat.batches_in_flight(vllm_config)
        self._live: set[str] = set()
        self.waiting: set[str] = set()
        """The requests that can do nothing before their load has ended."""

    def came(self, request_id: str) -> None:
        """Note that the engine has a request."""
        self._live.add(request_id)

    def waits(self, request_id: str) -> None:
        """Note that a request can do nothing before its load has ended."""
        self.waiting.add(request_id)

    def may_go_on(self, request_id: str) -> None:
        """Note that its load has ended."""
        self.waiting.discard(request_id)

    def went(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._live.discard(request_id)
        self.waiting.discard(request_id)

    def rest(self, output: Any) -> bool:
        """Wait, if a step that carries nothing of ours may, and tell whether it did."""
        if self._bell is None:
            return False
        if output.total_num_scheduled_tokens or output.finished_req_ids or len(self._live) != len(self.waiting):
            self._still = 0
        elif self._still < self._settled:
            self._still += 1
        else:
            self._bell.wait(self.limit)
            self._still = 0  # what this step learns, the scheduler may hear only when as many more were launched
            return True
        return False

    def close(self) -> None:
        """End the bell's thread."""
        if self._bell is not None:
            self._bell.close()
