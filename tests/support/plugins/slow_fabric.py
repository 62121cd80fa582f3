"""A plugin for vLLM, for tests alone: a fabric on which every transfer takes a while, so that a test can hit it in mid-transfer.

vLLM's processes find it by the folder beside it when this directory is on PYTHONPATH. ``SLOW_FABRIC`` names a file with the
seconds that a transfer takes at least; a test may write it at any time. The bytes move as fast as ever; only their end is told
late, as by a NIC whose completion queue lags.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def register() -> None:
    """Wrap kvxfer's agent. Calling it again does nothing."""
    from kvxfer.transport.agent import Status
    from kvxfer.transport.nixl import NixlAgent

    file = os.environ.get("SLOW_FABRIC")
    if file is None or hasattr(NixlAgent, "posted_at"):
        return
    post, status, release = NixlAgent.post, NixlAgent.status, NixlAgent.release
    NixlAgent.posted_at = {}

    def slow_post(self, *args, **kwargs):
        transfer = post(self, *args, **kwargs)
        self.posted_at[id(transfer)] = time.monotonic() + float(Path(file).read_text())
        return transfer

    def slow_status(self, transfer):
        told = status(self, transfer)
        late = told is Status.DONE and time.monotonic() < self.posted_at[id(transfer)]
        return Status.PENDING if late else told

    def slow_release(self, transfer):
        del self.posted_at[id(transfer)]
        release(self, transfer)

    NixlAgent.post, NixlAgent.status, NixlAgent.release = slow_post, slow_status, slow_release
