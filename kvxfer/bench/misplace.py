"""A push connector for decode that, for marked requests only, registers two of its blocks in each other's place.

The demo's proof that its comparison would notice: loaded by ``kv_connector_module_path``, it exists here and
not in the product. A request is marked by its own id, which the demo sets (``X-Request-Id``) and the router never does.

The two blocks are the first and the last, partly filled one. Two *full* blocks of one request would not do: attention sums
over a set of keys that carry their positions, so changing their places changes no answer. The last block's unfilled part
is masked, and so most of the first block's content is lost there.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvxfer.bench.marks import MISPLACED, swap_first_and_last
from kvxfer.connector.connectors import KvxferPushConnector
from kvxfer.connector.scheduler import SchedulerHalf

if TYPE_CHECKING:
    from collections.abc import Sequence


class MisplacingScheduler(SchedulerHalf):
    """The scheduler half whose marked requests register wrongly."""

    def registered_blocks(self, request_id: str, tables: Sequence[list[int]], start: int, end: int) -> bytes:
        """Pack the ids as they are, or with the first and the last swapped for a marked request."""
        right = super().registered_blocks(request_id, tables, start, end)
        return swap_first_and_last(array("i", right)).tobytes() if MISPLACED in request_id else right


class MisplacingPushConnector(KvxferPushConnector):
    """``KvxferPushConnector`` that misplaces the blocks of requests whose id has ``MISPLACED`` in it."""

    scheduler_half = MisplacingScheduler
