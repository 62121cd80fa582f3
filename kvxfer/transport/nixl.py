"""NIXL as an agent.

NIXL's own progress thread stays off: it spins (an idle engine then burns a whole core, measured on vLLM 0.29 with NIXL
1.4.1). The mover progresses the fabric when there is something to wait for, and only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer.errors import TransportError
from kvxfer.transport.agent import Status
from kvxfer.transport.native import ensure_native_libraries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvxfer.layout.blocks import Descriptors

BACKENDS = ("LIBFABRIC", "UCX")

_ERRORS = 20_000
"""Most errors that are read away at once."""

_STATUS = {"DONE": Status.DONE, "PROC": Status.PENDING}


class NixlAgent:
    """One NIXL agent with one backend.

    Raises TransportError or NativeLibraryError when NIXL or the backend's plugin cannot be loaded, saying what to install.
    ``options`` are the backend's own parameters, as strings.
    """

    def __init__(self, name: str, backend: str = "LIBFABRIC", options: Mapping[str, str] | None = None) -> None:
        ensure_native_libraries(backend)
        from nixl._api import nixl_agent, nixl_agent_config

        self.name = name
        self.backend = backend
        self._kept: list[tuple[str, bytes]] = []  # notifications that arrived while errors were read away
        self._soiled = False  # a connection broke: its errors may wait in the completion queue
        try:
            # Telemetry off: asking for it can raise when it is not compiled in, and the records have the times.
            self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            plugins = self._agent.get_plugin_list()
        except Exception as error:
            raise TransportError(f"NIXL could not create the agent {name!r}: {error}") from error
        if backend not in plugins:
            raise TransportError(
                f"NIXL has no plugin {backend!r} (it has {', '.join(plugins) or 'none'}): install a nixl wheel that ships "
                f"libplugin_{backend}.so, or point NIXL_PLUGIN_DIR at it"
            )
        try:
            self._agent.create_backend(backend, dict(options or {}))
        except Exception as error:
            raise TransportError(
                f"NIXL's {backend} plugin did not start: {error}. Run with NIXL_LOG_LEVEL=DEBUG to see why; "
                "on a host without EFA set FI_PROVIDER=tcp"
            ) from error

    def register(self, spans: Sequence[tuple[int, int, int]], memory: str) -> None:
        """Register spans with the backend."""
        if f"{memory}_SEG" not in self._agent.get_backend_mem_types(self.backend):
            offered = ", ".join(self._agent.get_backend_mem_types(self.backend)) or "nothing"
            raise TransportError(
                f"NIXL's {self.backend} backend cannot register {memory} memory here (it offers {offered}). LIBFABRIC offers "
                'device memory only over EFA; without EFA set "backend": "UCX", or keep the KV cache in host memory'
            )
        try:
            self._agent.register_memory([(*span, "") for span in spans], memory, backends=[self.backend])
        except Exception as error:
            total = sum(length for _, length, _ in spans)
            raise TransportError(
                f"NIXL could not register {len(spans)} spans of {memory} memory, {total:,} bytes in all, with "
                f"{self.backend}: {error}. Check ulimit -l (locked memory) and NIXL_LOG_LEVEL=DEBUG"
            ) from error

    def metadata(self) -> bytes:
        """Return NIXL's metadata of this agent."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata."""
        self._settle()
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception:  # noqa: BLE001 - the last of the errors may have come just now
            self._settle()
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise TransportError(f"NIXL could not load a peer's metadata: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Invalidate a peer's metadata; NIXL's refusals are of no consequence, since names are unique per incarnation."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            raise TransportError(f"NIXL would not forget {name}: {error}") from error

    def post(
        self, operation: str, local: Descriptors, remote: Descriptors, memory: str, peer: str, notification: bytes = b""
    ) -> Any:
        """Create and post a transfer; it may be terminal already when this returns."""
        agent = self._agent
        if self._soiled:
            self._settle()
        try:
            handle = agent.initialize_xfer(
                operation,
                agent.get_xfer_descs(local, memory),
                agent.get_xfer_descs(remote, memory),
                peer,
                notification,
                [self.backend],
            )
        except Exception as error:
            raise TransportError(
                f"NIXL refused a {operation} of {len(local)} descriptors to {peer}: {error}"
            ) from error
        try:
            state = agent.transfer(handle)
        except Exception as error:
            self._soiled = True
            raise TransportError(f"NIXL could not post a {operation} to {peer}: {error}") from error
        return _Posted(handle, _STATUS.get(state, Status.FAILED))

    def status(self, transfer: Any) -> Status:
        """Ask NIXL, which progresses the backend on the way."""
        if transfer.last is Status.PENDING:
            try:
                transfer.last = _STATUS.get(self._agent.check_xfer_state(transfer.handle), Status.FAILED)
            except Exception:  # noqa: BLE001 - NIXL raises its own classes for a transfer that failed
                transfer.last = Status.FAILED
            self._soiled = self._soiled or transfer.last is Status.FAILED
        status: Status = transfer.last
        return status

    def release(self, transfer: Any) -> None:
        """Release a terminal transfer's handle."""
        try:
            transfer.handle.release()
        except Exception as error:
            raise TransportError(f"NIXL would not release a transfer: {error}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        """Take what has arrived from all peers. Raises TransportError for the error of a broken connection, once for each."""
        kept, self._kept = self._kept, []
        try:
            return kept + self._take()
        except Exception as error:
            self._kept, self._soiled = kept, True
            raise TransportError(f"NIXL reports a broken connection: {error}") from error

    def _take(self) -> list[tuple[str, bytes]]:
        arrived = self._agent.get_new_notifs()
        return [(_text(name), message) for name, messages in arrived.items() for message in messages]

    def _settle(self) -> None:
        """Read the errors of broken connections away.

        Each transfer that was under way to a peer that died leaves one in the completion queue, and NIXL's LIBFABRIC backend
        takes the next one for an error of whatever it does next, for another peer too (seen with NIXL 1.4.1 over tcp, when a
        killed engine came back). Progressing takes one away each time; nothing is clean before that has gone well twice.
        """
        clean = 0
        for _ in range(_ERRORS):
            try:
                self._kept += self._take()
                clean += 1
            except Exception:  # noqa: BLE001 - one error less
                clean = 0
            if clean == 2:  # noqa: PLR2004
                self._soiled = False
                return

    def close(self) -> None:
        """Destroy the agent: NIXL deregisters and disconnects in its destructor."""
        self._agent = None


class _Posted:
    """A transfer handle and its last known status."""

    __slots__ = ("handle", "last")

    def __init__(self, handle: Any, last: Status) -> None:
        self.handle = handle
        self.last = last


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
