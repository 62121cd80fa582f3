"""vLLM's real schedulers, pools and hooks over memory that the fabric does not reach: what holds elsewhere holds through mirrors.

Copies are late, and what is wrong shows at once (``tests/support/engine``). Preemption, aborts and reuse are those of the
modules from which these tests come.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.connector import worker
from kvxfer_host.platform import COPY_DELAY
from tests.contract.test_hooks import (  # noqa: F401 - they are collected here
    engines,
    test_decode_aborts,
    test_prefill_is_preempted_in_mid_push,
    tiny,
)
from tests.contract.test_reuse import (  # noqa: F401
    pair,
    test_a_client_that_goes_while_its_history_is_fetched,
    test_what_is_rewritten_truncated_or_branched_reuses_exactly_what_it_shares,
)

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def mirrored(monkeypatch):
    """Every engine's memory is mirrored, and copies are late."""
    monkeypatch.setenv(COPY_DELAY, "0.003")
    made, mirror_of = [], worker.mirror_of
    monkeypatch.setattr(worker, "mirror_of", lambda *args: made.append(mirror_of(*args)) or made[-1])
    yield
    assert len(made) >= 2
    assert None not in made
