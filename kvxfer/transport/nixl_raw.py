"""One NIXL agent with one backend, behind the few calls that kvxfer makes, and what had to be learnt about them.

Read in NIXL's LIBFABRIC plugin and run with NIXL 1.4.1 over libfabric's tcp provider:

- **An error has no owner.** A connection that breaks leaves one error in the completion queue for each transfer that was under
  way on it, and the plugin takes the next one for a failure of whatever is asked next: another peer's transfer, a handshake.
  So errors are read away here (``progress``) before anything is asked, and nobody is blamed.
- **A call to a peer that does not answer does not return.** While a connection is being made, libfabric says "try again", and
  the plugin tries again for ever, in the caller's thread (adding a peer, posting); it waits 60 s for a peer's handshake. It
  holds no Python lock meanwhile, but its caller is lost. So nothing may be asked that concerns a peer whose life is in doubt,
  and a peer that dies while it is asked for needs ``nixl_rescue``.
- **A peer's index is never free again.** The plugin numbers the agents that it meets in 8 bits and has no way to forget one:
  the 256th is refused. Hence ``room``.
- **A handle that did not end well is pointed to.** Requests of it may complete later and count themselves in it, so it must not
  be released while its agent lives.
"""

from __future__ import annotations

import gc
import logging
import sys
from typing import TYPE_CHECKING, Any

from kvxfer.errors import TransportError
from kvxfer.transport.native import ensure_native_libraries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger("kvxfer.nixl")

ROOM = 200
"""Peers that one agent may meet: below the plugin's 255, for those that come while it is being replaced."""

_ERRORS = 20_000
"""Most errors that are read away at once."""

_NOBODY_ELSE = 3
"""References to NIXL's own agent when no handle has one: its wrapper's, a variable's and an argument's."""

_ATTEMPTS = 5
"""How often a peer is connected when errors of other connections spoil it."""


class RawAgent:
    """One NIXL agent. Raises TransportError or NativeLibraryError at start, saying what to install."""

    def __init__(self, name: str, backend: str, options: Mapping[str, str]) -> None:
        ensure_native_libraries(backend)
        from nixl._api import nixl_agent, nixl_agent_config

        self.name = name
        self.backend = backend
        self.broken = False
        """An error has been read away since this was last set to False."""
        self._met: set[str] = set()
        self._indexes = 0
        self._arrived: list[tuple[str, bytes]] = []
        self._unreleased: list[Any] = []
        try:
            # Telemetry off: asking for it can raise when it is not compiled in, and the records have the times.
            self.nixl: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            plugins = self.nixl.get_plugin_list()
        except Exception as error:
            raise TransportError(f"NIXL could not create the agent {name!r}: {error}") from error
        if backend not in plugins:
            raise TransportError(
                f"NIXL has no plugin {backend!r} (it has {', '.join(plugins) or 'none'}): install a nixl wheel that ships "
                f"libplugin_{backend}.so, or point NIXL_PLUGIN_DIR at it"
            )
        try:
            self.nixl.create_backend(backend, dict(options))
        except Exception as error:
            raise TransportError(
                f"NIXL's {backend} plugin did not start: {error}. Run with NIXL_LOG_LEVEL=DEBUG to see why; "
                "on a host without EFA set FI_PROVIDER=tcp"
            ) from error

    def register(self, spans: Sequence[tuple[int, int, int]], memory: str) -> None:
        """Register spans with the backend."""
        offered = self.nixl.get_backend_mem_types(self.backend)
        if f"{memory}_SEG" not in offered:
            raise TransportError(
                f"NIXL's {self.backend} backend cannot register {memory} memory here (it offers "
                f"{', '.join(offered) or 'nothing'}). LIBFABRIC offers "
                'device memory only over EFA; without EFA set "backend": "UCX", or "kv_buffer_device": "cpu" beside kv_role'
            )
        try:
            self.nixl.register_memory([(*span, "") for span in spans], memory, backends=[self.backend])
        except Exception as error:
            total = sum(length for _, length, _ in spans)
            raise TransportError(
                f"NIXL could not register {len(spans)} spans of {memory} memory, {total:,} bytes in all, with "
                f"{self.backend}: {error}. Check ulimit -l (locked memory) and NIXL_LOG_LEVEL=DEBUG"
            ) from error

    def metadata(self) -> bytes:
        """Return what a peer needs to reach this agent."""
        metadata: bytes = self.nixl.get_agent_metadata()
        return metadata

    # --- peers ------------------------------------------------------------------------------------------------------

    def meet(self, name: str) -> None:
        """Note that a peer knows this agent: its handshake may take an index at any time."""
        if name not in self._met:
            self._met.add(name)
            self._indexes += 1

    def part(self, name: str) -> None:
        """Note that a peer is gone. Its index stays taken."""
        self._met.discard(name)

    @property
    def full(self) -> bool:
        """Whether the next peers must meet another agent."""
        return self._indexes >= ROOM

    @property
    def deserted(self) -> bool:
        """Whether no peer knows this agent any more."""
        return not self._met

    def connect(self, metadata: bytes, given_up: Callable[[], bool]) -> str:
        """Load a peer's metadata and connect it, whatever other connections break meanwhile. Returns the peer's name.

        ``given_up`` tells that it need not be tried again.
        """
        problem: Exception | None = None
        for _ in range(_ATTEMPTS):
            self.progress()
            name = ""
            try:
                name = _text(self.nixl.add_remote_agent(metadata))
                # The handshake is waited for here, where it can be repeated, and not in the first post, where it cannot.
                self.nixl.make_connection(name, [self.backend])
            except Exception as error:  # noqa: BLE001 - NIXL has a class for each status
                problem = error
                self.broken = True
                self._indexes += 1  # it may have taken one
                if name:
                    self.disconnect(name)
                if given_up():
                    break
            else:
                return name
        raise TransportError(f"NIXL could not connect a peer: {problem}") from problem

    def disconnect(self, name: str) -> None:
        """Forget a peer by its name in NIXL."""
        try:
            self.nixl.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001 - names are never used twice, so this one can stay
            logger.info("NIXL would not forget %s: %s", name, error)

    # --- transfers --------------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Let the fabric make progress; read errors away until nothing is left of them, and keep what has arrived."""
        clean = 0
        for _ in range(_ERRORS):
            try:
                arrived = self.nixl.get_new_notifs()
            except Exception:  # noqa: BLE001 - one error less
                clean = 0
                self.broken = True
                continue
            self._arrived += [(_text(name), message) for name, messages in arrived.items() for message in messages]
            clean += 1
            if clean == 2 or not self.broken:  # noqa: PLR2004 - after an error, two looks: the next may be on its way
                return

    def arrived(self) -> list[tuple[str, bytes]]:
        """Take what has arrived."""
        taken, self._arrived = self._arrived, []
        return taken

    def keep(self, handle: Any) -> None:
        """Never release a handle: requests of it may still complete."""
        self._unreleased.append(handle)

    def close(self) -> None:
        """Destroy the agent: NIXL deregisters and disconnects in its destructor.

        Raises TransportError while a handle of it is referred to somewhere, since the agent then lives on.
        """
        self._unreleased.clear()
        agent = getattr(self.nixl, "agent", None)
        if agent is not None and sys.getrefcount(agent) > _NOBODY_ELSE:
            gc.collect()
            if sys.getrefcount(agent) > _NOBODY_ELSE:
                raise TransportError(f"NIXL's agent {self.name} cannot be destroyed: a transfer of it is referred to")
        self.nixl = None


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
