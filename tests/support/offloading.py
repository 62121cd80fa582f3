"""A connector that keeps prompts' KV beside the cache, as vLLM's OffloadingConnector does, for engines without a device for that one.

It saves whole blocks of a request that ends, and says so only some passes later; it offers the longest prefix that it has of a
prompt, and loads it asynchronously. What it keeps is copied out of the cache, so that what another connector brought there is
what it later puts back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

if TYPE_CHECKING:
    import torch

PASSES = 3
"""How many looks a save or a load takes."""


@dataclass
class Copies(KVConnectorMetadata):
    saves: list[tuple[str, list[bytes], list[int]]] = field(default_factory=list)
    loads: list[tuple[str, list[bytes], list[int]]] = field(default_factory=list)


class OffloadingInSmall(KVConnectorBase_V1):
    """Blocks by vLLM's own hashes, of all engines of the process by their names."""

    kept: ClassVar[dict[str, dict[bytes, list[torch.Tensor]]]] = {}
    loaded: ClassVar[dict[str, int]] = {}
    """Blocks that were put back, by engine."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.engine = vllm_config.kv_transfer_config.engine_id
        self.block_size = vllm_config.cache_config.block_size
        self.shelf = self.kept.setdefault(self.engine, {})
        self.loaded.setdefault(self.engine, 0)
        self._step = Copies()
        self._under_way: dict[tuple[str, str], int] = {}
        self._caches: list[torch.Tensor] = []

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is lost can be computed again

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        known = 0
        for block in request.block_hashes[: (request.num_prompt_tokens - 1) // self.block_size]:
            if bytes(block) not in self.shelf:
                break
            known += self.block_size
        return max(0, known - num_computed_tokens), known > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (table,) = blocks.get_block_ids()
            last = (request.num_computed_tokens + num_external_tokens) // self.block_size
            first = last - num_external_tokens // self.block_size
            hashes = [bytes(one) for one in request.block_hashes[first:last]]
            self._step.loads.append((request.request_id, hashes, table[first:last]))

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        del scheduler_output
        step, self._step = self._step, Copies()
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        whole = min(request.num_computed_tokens, request.num_prompt_tokens) // self.block_size
        hashes = [bytes(one) for one in request.block_hashes[:whole]]
        if hashes and block_ids:
            self._step.saves.append((request.request_id, hashes, block_ids[:whole]))
        return bool(hashes and block_ids), None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        step, self._connector_metadata = self._connector_metadata, Copies()  # once, wherever a version calls this
        for request_id, hashes, blocks in step.saves:
            for one, block in zip(hashes, blocks, strict=True):
                self.shelf[one] = [cache[block].clone() for cache in self._caches]
            self._under_way["sent", request_id] = PASSES
        for request_id, hashes, blocks in step.loads:
            for one, block in zip(hashes, blocks, strict=True):
                for cache, content in zip(self._caches, self.shelf[one], strict=True):
                    cache[block] = content
            self.loaded[self.engine] += len(blocks)
            self._under_way["received", request_id] = PASSES

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        del finished_req_ids
        done: dict[str, set[str]] = {"sent": set(), "received": set()}
        for key in list(self._under_way):
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]
                done[key[0]].add(key[1])
        return done["sent"] or None, done["received"] or None
