"""The connectors, each with a note of the KV that its engine hands over or has been handed: digests, layer by layer.

For models of which tokens cannot tell whether their KV is right. Loaded by ``kv_connector_module_path``, like
``kvxfer.bench.counted``. ``KV_DIGESTS`` names a directory. The scheduler's half writes which blocks a request has, when its prompt
is computed (prefill) or allocated (decode); each worker's, when vLLM is told that the handoff is over and before it has the
blocks back, digests of what they hold. Of caches of one group whose layers are (blocks, [1,] tokens, channels): a latent's.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvxfer.connector import connectors as ours

SOURCE, SINK = "source", "sink"


class _Digesting:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._where = Path(os.environ["KV_DIGESTS"])
        self._where.mkdir(parents=True, exist_ok=True)

    # The scheduler's half.

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        if num_external_tokens:
            self._note(SINK, request, blocks.get_block_ids())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        held, answer = super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]
        if held:
            self._note(SOURCE, request, block_ids)
        return held, answer

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        held, answer = super().request_finished(request, block_ids)  # type: ignore[misc]
        if held:
            self._note(SOURCE, request, (block_ids,))
        return held, answer

    def _note(self, side: str, request: Any, tables: Any) -> None:
        path = self._where / f"{side}-{request.request_id}.blocks"
        path.with_suffix(".new").write_text(json.dumps([request.num_prompt_tokens - 1, list(tables[0])]))
        path.with_suffix(".new").rename(path)

    # A worker's.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches
        super().register_kv_caches(kv_caches)  # type: ignore[misc]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        over = super().get_finished(finished_req_ids)  # type: ignore[misc]
        for side, ids in zip((SOURCE, SINK), over, strict=True):
            for request_id in ids or ():
                tokens, blocks = json.loads((self._where / f"{side}-{request_id}.blocks").read_text())
                digests = {name: _digest(cache, blocks, tokens) for name, cache in self._caches.items()}
                path = self._where / f"{side}-{request_id}-{os.getpid()}.json"
                path.write_text(json.dumps(digests))
        return over


def _digest(cache: Any, blocks: list[int], tokens: int) -> str:
    held = cache[blocks].flatten(0, -2)[:tokens].contiguous()
    assert held.any(dim=-1).all(), "a position that nothing was written to"
    return hashlib.sha256(held.numpy().tobytes()).hexdigest()


class KvxferPushConnector(_Digesting, ours.KvxferPushConnector):
    """Digesting."""


class KvxferPullConnector(_Digesting, ours.KvxferPullConnector):
    """Digesting."""
