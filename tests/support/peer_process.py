"""A rank in a process of its own, over real NIXL, driven by lines of JSON on its standard input. Run as a module.

Commands: the methods of ``Driver``, and quit. Each is answered by one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

import msgspec

from kvxfer.protocol import auth, messages
from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.peers import Timing
from kvxfer.transport import commands as cmd
from kvxfer.transport.nixl import NixlAgent
from kvxfer.transport.secret import load_secret
from tests.support.laid_out import KINDS
from tests.support.ranks import Rank


class Agent(NixlAgent):
    """Counts the connections that it makes."""

    connections = 0

    def add_peer(self, metadata, name=""):
        type(self).connections += 1
        return super().add_peer(metadata, name)


class Late:
    """A fence that passes after so many seconds."""

    def __init__(self, seconds) -> None:
        self.at = time.monotonic() + seconds

    def done(self):
        return time.monotonic() >= self.at


def in_heads(mine: list[int], total: int) -> dict:
    """What makes a rank one that holds these heads of so many, in blocks of four tokens of 16 bytes a head."""
    whole = {
        "heads": tuple(mine),
        "total_heads": total,
        "head_stride": 64,
        "tokens": ((4, 16),),
        "channels": ((16, 1),),
    }
    return {"changes": whole, "block_size": 4, "block_bytes": 64 * len(mine)}


class Driver:
    def __init__(self, options: dict) -> None:
        backend = options.pop("backend", "LIBFABRIC")
        # A release of another wire version differs in this number at least.
        messages.WIRE_VERSION = auth.WIRE_VERSION = options.pop("wire", messages.WIRE_VERSION)
        timing = options.pop("timing", (0.5, 5.0, 2.0, 0.2))
        layout = options.pop("layout", None)
        self.laid_out = None if layout is None else KINDS[layout]()
        heads = options.pop("heads", None)
        if heads is not None:
            options |= in_heads(*heads)
        if self.laid_out is not None:
            options |= {"cache": self.laid_out.cache, "block_size": self.laid_out.block}
        self.rank = Rank(
            make_agent=lambda name: Agent(name, backend),
            timing=Timing(*timing),
            secret=load_secret(),
            **options,
        )

    def fill(self, blocks, seed):
        self.rank.fill(blocks, seed)

    def put(self, **what):
        """Fill a cache of an engine's layout (``laid_out``) by position."""
        self.laid_out.put(**what)

    def wrong(self, **what):
        return self.laid_out.wrong(**what)

    def prefill(self, handoff, request, blocks, tokens, chunks=1):
        self.rank.prefill(HandoffId(handoff), request, blocks, tokens, chunks)

    def open(self, handoff, request, engine, port, blocks, tokens, start=0, host="127.0.0.1"):
        self.rank.open(HandoffId(handoff), request, cmd.EngineAddress(host, port, engine), blocks, tokens, start)

    def wait(self, request, timeout=30.0):
        done = self.rank.wait(request, timeout)
        return getattr(done, "reason", None)

    def cancel(self, request):
        self.rank.begin(cancelled=[cmd.SinkCancel(request, "cancelled by the test")])

    def digest(self, blocks, head=None):
        """Digest blocks of all layers, or one head's part of them."""
        part = slice(None) if head is None else slice(64 * head, 64 * (head + 1))
        return hashlib.sha256(self.rank.memory[:, blocks, part].tobytes()).hexdigest()

    def where(self):
        """Where this rank of an engine listens."""
        return msgspec.to_builtins(self.rank.where)

    def lead(self, ranks):
        """Be the first of an engine's ranks."""
        self.rank.lead(msgspec.convert(ranks, list[messages.RankAddress]))

    def arrived(self, blocks):
        """How many of these blocks, in all layers, hold anything at their end."""
        return int((self.rank.memory[:, blocks, -1] != 0).sum())

    def record(self, side, handoff):
        return msgspec.to_builtins(self.rank.record(side, HandoffId(handoff)))

    def idle(self, seconds):
        """CPU seconds used while nothing happens."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def keep(self, port, host="127.0.0.1"):
        """Stay connected with whoever listens there, as a router's introduction or ``peers`` asks for."""
        self.rank.control.keep(cmd.EngineAddress(host, port, ""), lasting=False)

    def busy(self, seconds):
        """Let work of the engine's be under way for so long."""
        progress = [cmd.SourceProgress("nobody's", (), 0)]
        self.rank.mover.post(cmd.StepBegin(cmd.Step(progress=progress), Late(0.0)))
        self.rank.mover.post(cmd.StepEnd(Late(seconds)))

    def counters(self):
        return self.rank.mover.counters

    def connections(self):
        """How many NIXL connections this rank has made, for whatever reason."""
        return Agent.connections

    def sessions(self):
        return sum(1 for _ in self.rank.control.sessions)

    def clock(self):
        return time.monotonic()

    def port(self):
        return self.rank.control.port


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # NIXL prints
    driver = Driver(json.loads(sys.argv[1]))
    print(json.dumps({"ok": driver.port()}), file=out)
    for line in sys.stdin:
        call = json.loads(line)
        verb = call.pop("do")
        if verb == "quit":
            break
        try:
            print(json.dumps({"ok": getattr(driver, verb)(**call)}), file=out)
        except Exception as error:  # noqa: BLE001 - the test reads it
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)
    driver.rank.close()


if __name__ == "__main__":
    main()
