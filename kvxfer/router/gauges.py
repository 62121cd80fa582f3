"""How full an engine is, out of its ``/metrics``.

``kvxfer_reclaimable_tokens`` is kvxfer's own gauge. Where an engine does not have it, vLLM's say nearly as much
(0.29 v1/metrics/loggers.py): of its cache a share of 1 - ``vllm:kv_cache_usage_perc`` is free or evictable, and
``vllm:cache_config_info`` names its blocks and their size.
"""

from __future__ import annotations

import contextlib
import re

from kvxfer.router.engine import Told

_GAUGE = re.compile(
    r"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|kvxfer_reclaimable_tokens"
    r"|vllm:cache_config_info)(\{[^\n]*\})?[ \t]+(\S+)",
    re.MULTILINE,
)
_HANDOFFS = re.compile(
    r'^kvxfer_handoffs_total\{(?=[^\n]*\bside="sink")[^\n]*\boutcome="(done|failed)"[^\n]*\}[ \t]+(\S+)', re.MULTILINE
)
# prometheus_client's process collector; vLLM's API server has it unless it runs several processes.
_STARTED = re.compile(
    r"^(?:process_start_time_seconds|kvxfer_start_time_seconds)(?:\{[^\n]*\})?[ \t]+(\S+)", re.MULTILINE
)
_NUMBER_OF = {name: re.compile(rf'[{{,]{name}="(\d+)"') for name in ("num_gpu_blocks", "block_size")}


def read_gauges(metrics: str) -> Told:
    """What the metrics say of all engines behind one URL together; unreadable values count as not said."""
    sums: dict[str, float] = {}
    capacity: int | None = None
    for name, labels, text in _GAUGE.findall(metrics):
        if name == "vllm:cache_config_info":
            found = [pattern.search(labels) for pattern in _NUMBER_OF.values()]
            if all(found):
                blocks, size = (int(one[1]) for one in found if one)
                capacity = (capacity or 0) + blocks * size
            continue
        try:
            value = float(text)
        except ValueError:
            continue
        if value == value and abs(value) < 1e15:  # noqa: PLR0124, PLR2004 -- not a number, or none that is meant
            sums[name] = sums.get(name, 0.0) + value
    usage = sums.get("vllm:kv_cache_usage_perc")
    own = sums.get("kvxfer_reclaimable_tokens")
    reclaimable = int(own) if own is not None else None
    if reclaimable is None and usage is not None and capacity is not None:
        reclaimable = int(capacity * min(max(1 - usage, 0.0), 1.0))
    ended = {"done": 0, "failed": 0}
    for outcome, text in _HANDOFFS.findall(metrics):
        with contextlib.suppress(ValueError, OverflowError):
            ended[outcome] += int(float(text))
    started = _STARTED.search(metrics)
    return Told(
        started=started[1] if started else "",
        running=int(sums.get("vllm:num_requests_running", 0)),
        waiting=int(sums.get("vllm:num_requests_waiting", 0)),
        capacity=capacity,
        reclaimable=reclaimable,
        received=ended["done"],
        not_received=ended["failed"],
    )
