"""What every folder of ``platforms/`` must pass. Subclass ``PlatformConformance`` and say how its caches are made.

Nothing here knows an accelerator; what depends on one stands in the hooks.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from kvxfer.errors import PlatformError
from kvxfer.layout.check import check
from kvxfer.layout.maps import CacheMap, Plane, offsets
from kvxfer.layout.mirror import Mirrored, Reflection
from kvxfer.layout.plan import prepare
from kvxfer.layout.positions import Table
from kvxfer.layout.repack import STRIDED, Repacking
from kvxfer.layout.tables import Tables
from kvxfer.platform import Geometry, Platform, Presence, platform_for

PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def bytes_of(cache: CacheMap) -> np.ndarray:
    """Return the address of every byte of every element of a map."""
    found = []
    for group in cache.groups:
        for plane in group.planes:
            axes = [plane.bases, np.arange(group.num_blocks) * plane.block_stride]
            axes += [np.arange(len(plane.heads)) * plane.head_stride, offsets(plane.tokens), offsets(plane.channels)]
            addresses = np.zeros(1, dtype=np.int64)
            for axis in [*axes, np.arange(plane.item)]:
                addresses = np.add.outer(addresses, np.asarray(axis, dtype=np.int64)).ravel()
            found.append(addresses)
    return np.concatenate(found)


def cell(plane: Plane, layer: int, block: int, head: int, token: int) -> np.ndarray:
    """Return the addresses of the bytes of one head of one token."""
    at = plane.bases[plane.layers.index(layer)] + block * plane.block_stride
    at += plane.heads.index(head) * plane.head_stride + int(offsets(plane.tokens)[token])
    return at + np.add.outer(offsets(plane.channels), np.arange(plane.item)).ravel()


def token_major(sink: CacheMap) -> CacheMap:
    """The same content in half as large blocks of another order, [block][token][head][channel], nowhere in memory."""
    groups, at = [], 1 << 40
    for group in sink.groups:
        planes, tokens = [], group.block_size // 2
        for plane in group.planes:
            row = len(plane.heads) * plane.content
            bases = tuple(at + number * group.num_blocks * tokens * row for number in range(len(plane.layers)))
            at = bases[-1] + group.num_blocks * tokens * row
            axes = {"block_stride": tokens * row, "head_stride": plane.content, "tokens": ((tokens, row),)}
            axes["channels"] = ((plane.content // plane.item, plane.item),)
            planes.append(msgspec.structs.replace(plane, bases=bases, **axes))
        groups.append(msgspec.structs.replace(group, block_size=tokens, planes=tuple(planes)))
    return msgspec.structs.replace(sink, groups=tuple(groups), spans=((1 << 40, at - (1 << 40)),))


class PlatformConformance:
    """Hooks first; a platform's own test module overrides the first three at least."""

    def make_platform(self) -> Platform:
        """Make the platform as kvxfer makes it: without arguments."""
        raise NotImplementedError

    def make_caches(self) -> tuple[dict[str, Any], Geometry]:
        """Allocate the caches of a small model as vLLM does on this platform, and tell their geometry."""
        raise NotImplementedError

    def misshapen(self, caches: dict[str, Any]) -> dict[str, Any]:
        """Return the same layers, one of which has a shape that this platform cannot describe."""
        raise NotImplementedError

    def copy_memory(self, target: int, origin: int, length: int) -> None:
        """Copy bytes between two addresses, each of this platform's memory or of the host's, and wait for the copy."""
        raise NotImplementedError

    def launch(self, platform: Platform, seconds: float) -> Any:
        """Launch work that takes ``seconds`` on the device; return a function that tells whether it has finished.

        Skip where the platform's memory never has unfinished work behind it.
        """
        pytest.skip("nothing is ever under way in this platform's memory")

    # --- who it is --------------------------------------------------------------------------------------------------

    def test_it_is_installed_and_found_by_its_device_type(self) -> None:
        platform = self.make_platform()
        assert type(platform_for(platform.device_type)) is type(platform)
        assert platform.name
        caches, _ = self.make_caches()
        assert {cache.device.type for cache in caches.values()} == {platform.device_type}

    def test_presence_says_why_and_is_cheap(self) -> None:
        platform = self.make_platform()
        platform.presence()
        start = time.process_time()
        presences = [platform.presence() for _ in range(20)]
        assert time.process_time() - start < 1.0
        assert all(isinstance(presence, Presence) and presence.why for presence in presences)
        assert len(set(presences)) == 1

    def test_the_environment_is_text_and_asking_for_it_sets_nothing(self, monkeypatch) -> None:
        platform = self.make_platform()
        before = dict(os.environ)
        wanted = dict(platform.environment())
        assert all(isinstance(key, str) and isinstance(value, str) and key for key, value in wanted.items())
        assert dict(os.environ) == before
        for key in wanted:
            monkeypatch.setenv(key, "set by the operator")
        platform.environment()
        assert all(os.environ[key] == "set by the operator" for key in wanted)

    # --- where blocks lie -------------------------------------------------------------------------------------------

    def test_the_map_passes_the_check_that_a_peer_makes(self) -> None:
        caches, geometry = self.make_caches()
        cache = self.make_platform().describe(caches, geometry)
        check(cache)
        assert cache.memory in ("DRAM", "VRAM")

    def test_every_byte_lies_inside_one_registered_span_and_spans_are_disjoint(self) -> None:
        caches, geometry = self.make_caches()
        cache = self.make_platform().describe(caches, geometry)
        spans = sorted(cache.spans)
        assert all(start + length <= following for (start, length), (following, _) in itertools.pairwise(spans))
        addresses = bytes_of(cache)
        assert sum(((addresses >= at) & (addresses < at + length)).sum() for at, length in spans) == addresses.size

    def test_no_two_elements_share_a_byte_and_together_they_are_the_tensors(self) -> None:
        caches, geometry = self.make_caches()
        addresses = bytes_of(self.make_platform().describe(caches, geometry))
        assert np.unique(addresses).size == addresses.size
        assert addresses.size == sum(cache.numel() * cache.element_size() for cache in caches.values())

    def test_groups_layers_and_heads_are_those_of_the_geometry(self) -> None:
        caches, geometry = self.make_caches()
        groups = self.make_platform().describe(caches, geometry).groups
        assert len(groups) == len(geometry.groups)
        for group, told in zip(groups, geometry.groups, strict=True):
            assert (group.block_size, group.num_blocks) == (told.block_size, geometry.num_blocks)
            assert group.window == told.window
            assert {layer for plane in group.planes for layer in plane.layers} == {number for _, number in told.layers}
            assert all(set(plane.heads) <= set(told.heads) for plane in group.planes)

    def test_a_description_does_not_depend_on_when_or_by_whom_it_is_made(self) -> None:
        caches, geometry = self.make_caches()
        first = self.make_platform()
        assert (
            first.describe(caches, geometry)
            == first.describe(caches, geometry)
            == self.make_platform().describe(caches, geometry)
        )

    def test_copying_a_block_by_the_description_copies_that_block_of_every_layer_and_nothing_else(self) -> None:
        caches, geometry = self.make_caches()
        cache = self.make_platform().describe(caches, geometry)
        blocks = self.blocks_of(caches)
        for layer, tensor in enumerate(blocks.values()):
            for block in range(geometry.num_blocks):
                tensor[block].fill_(layer * geometry.num_blocks + block + 1)
        expected = {name: tensor.clone() for name, tensor in blocks.items()}
        source, target = 1, geometry.num_blocks - 1
        for tensor in expected.values():
            tensor[target] = tensor[source]
        ours, theirs = ([Table(np.array([block], dtype=np.int32))] * len(cache.groups) for block in (source, target))
        plan = prepare(cache, cache, useful=0).plan(ours, theirs, 0, min(group.block_size for group in cache.groups))
        for (origin, length, _), (at, _, _) in zip(plan.source.tolist(), plan.sink.tolist(), strict=True):
            self.copy_memory(at, origin, length)
        for name, tensor in blocks.items():
            assert tensor.equal(expected[name]), name

    def blocks_of(self, caches: dict[str, Any]) -> dict[str, Any]:
        """View each cache with the block as its first dimension; override where it is not."""
        return caches

    def test_tensors_that_it_does_not_know_are_refused_with_layer_and_shape(self) -> None:
        caches, geometry = self.make_caches()
        wrong = self.misshapen(caches)
        (name,) = [name for name in caches if wrong[name] is not caches[name]]
        with pytest.raises(PlatformError) as raised:
            self.make_platform().describe(wrong, geometry)
        assert name in str(raised.value)
        assert str(tuple(wrong[name].shape)) in str(raised.value)

    def test_a_number_of_blocks_that_the_tensors_do_not_have_is_refused(self) -> None:
        caches, geometry = self.make_caches()
        with pytest.raises(PlatformError, match=str(geometry.num_blocks + 1)):
            self.make_platform().describe(caches, dataclasses.replace(geometry, num_blocks=geometry.num_blocks + 1))

    # --- re-packing -------------------------------------------------------------------------------------------------

    def test_what_it_re_packs_arrives_where_it_belongs_and_nothing_else_changes(self) -> None:
        platform = self.make_platform()
        caches, geometry = self.make_caches()
        sink = platform.describe(caches, geometry)
        if STRIDED not in platform.offers or any(plane.interior for group in sink.groups for plane in group.planes):
            pytest.skip("this platform does not re-pack these caches")
        source = token_major(sink)
        size = Repacking(source, sink, platform.offers, base=0, slots=4).size
        staging = platform.staging(size, sink.device)
        assert staging.size >= size
        noise = np.random.default_rng(0).integers(0, 256, size=size, dtype=np.uint8)
        self.copy_memory(staging.address, noise.ctypes.data, size)
        repacking = Repacking(source, sink, platform.offers, base=staging.address, slots=4)
        block, last = min(group.block_size for group in source.groups), geometry.num_blocks - 1
        start, end, tables = 1, 3 * block - 1, [Table(np.array([last, 1], dtype=np.int32))] * len(sink.groups)
        before = self.memory_of(sink)
        expected = before.copy()
        for area, group in zip(repacking.staging.groups, sink.groups, strict=True):
            for staged, plane in itertools.product(area.planes, group.planes):
                for layer in set(staged.layers) & set(plane.layers) if staged.name == plane.name else ():
                    for token, head in itertools.product(range(start, end), plane.heads):
                        at = cell(plane, layer, (last, 1)[token // group.block_size], head, token % group.block_size)
                        here = cell(staged, layer, token // area.block_size, head, token % area.block_size)
                        expected[at - min(sink.spans)[0]] = noise[here - staging.address]
        slots = [Table(np.arange(4, dtype=np.int32))] * len(source.groups)
        fences = [platform.repack(call) for call in repacking.calls(slots, tables, start, end)]
        deadline = time.monotonic() + 30.0
        while not all(fence.done() for fence in fences):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert (before != expected).any()
        assert (self.memory_of(sink) == expected).all()

    def memory_of(self, cache: CacheMap) -> np.ndarray:
        """Copy out all memory from the first byte of the first span to the last of the last; zero between spans."""
        first = min(at for at, _ in cache.spans)
        copy = np.zeros(max(at + length for at, length in cache.spans) - first, dtype=np.uint8)
        for at, length in cache.spans:
            self.copy_memory(copy.ctypes.data + at - first, at, length)
        return copy

    # --- through host memory ----------------------------------------------------------------------------------------

    def mirror_of(self, platform: Platform, spans: Any, device: int) -> Any:
        """Make a mirror; override where only a test mode has one."""
        return platform.mirror(spans, device)

    def test_what_goes_through_its_mirror_comes_back_as_it_was_and_nothing_else_changes(self) -> None:
        platform = self.make_platform()
        caches, geometry = self.make_caches()
        cache = platform.describe(caches, geometry)
        mirror = self.mirror_of(platform, cache.spans, cache.device)
        if mirror is None:
            pytest.skip("this platform moves nothing through a mirror")
        assert mirror.size >= sum(length for _, length in cache.spans)
        reflection = Reflection(cache.spans, mirror.addresses)
        reflected = reflection.of(cache)
        check(reflected)
        assert (reflected.memory, reflected.device) == ("DRAM", 0)
        before = self.noise(cache)
        last = geometry.num_blocks - 1
        tables = Tables.of(cache)
        ids = tables.spanning([(last, 1, 2)] * len(cache.groups), 0, 2 * cache.block_size)
        span, plan = (0, 2 * cache.block_size), Mirrored(cache, reflected)
        self.wait_for(mirror.copy(plan.copies(ids, span, *span, source=True), inward=False))
        assert (self.memory_of(cache) == before).all(), "a copy out changed the device's memory"
        zeros = np.zeros(before.size, dtype=np.uint8)
        first = min(at for at, _ in cache.spans)
        for at, length in cache.spans:
            self.copy_memory(at, zeros.ctypes.data + at - first, length)
        self.wait_for(mirror.copy(plan.copies(ids, span, *span, source=False), inward=True))
        got, moved = self.memory_of(cache), np.zeros(before.size, dtype=bool)
        for group in cache.groups:
            for plane in group.planes:
                for layer, token, head in itertools.product(plane.layers, range(group.block_size), plane.heads):
                    for block in (last, 1) if not plane.interior else ():
                        moved[cell(plane, layer, block, head, token) - first] = True
        if moved.any():
            assert (got[moved] == before[moved]).all()
            assert not got[~moved].any(), "bytes of other blocks were copied"
        else:
            assert got.any()
            assert (got[got != 0] == before[got != 0]).all()

    def test_a_mirrors_copies_keep_their_order_whichever_way_they_go(self) -> None:
        platform = self.make_platform()
        caches, geometry = self.make_caches()
        cache = platform.describe(caches, geometry)
        mirror = self.mirror_of(platform, cache.spans, cache.device)
        if mirror is None:
            pytest.skip("this platform moves nothing through a mirror")
        before = self.noise(cache)
        (at, length), here, half = cache.spans[0], mirror.addresses[0], cache.spans[0][1] // 2
        out = np.array([[at, here, half, 1, 0, 0]], dtype=np.int64)
        back = np.array([[at + half, here, half, 1, 0, 0]], dtype=np.int64)
        fences = [mirror.copy(out, inward=False), mirror.copy(back, inward=True)]
        self.wait_for(fences[1])
        assert fences[0].done()
        start = at - min(at for at, _ in cache.spans)
        got = self.memory_of(cache)[start : start + length]
        assert (got[half : 2 * half] == before[start : start + half]).all()

    def noise(self, cache: CacheMap) -> np.ndarray:
        """Fill the cache's memory with noise and return it, as ``memory_of`` does."""
        first = min(at for at, _ in cache.spans)
        noise = np.random.default_rng(1).integers(1, 256, size=self.memory_of(cache).size, dtype=np.uint8)
        for at, length in cache.spans:
            self.copy_memory(at, noise.ctypes.data + at - first, length)
        return self.memory_of(cache)

    def wait_for(self, fence: Any) -> None:
        """Wait until a fence has passed."""
        deadline = time.monotonic() + 30.0
        while not fence.done():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    # --- where it is attached ---------------------------------------------------------------------------------------

    def test_rails_are_named_only_for_what_is_attached_to_pci(self) -> None:
        platform = self.make_platform()
        caches, geometry = self.make_caches()
        device = platform.describe(caches, geometry).device
        address, rails = platform.pci_address(device), platform.local_rails(device)
        assert address is None or PCI.fullmatch(address)
        assert rails is None or all(isinstance(rail, str) and rail for rail in rails)
        if address is None:
            assert rails is None, "local to what?"

    def test_background_cpus_are_cpus_of_this_machine(self) -> None:
        cpus = self.make_platform().background_cpus()
        assert cpus is None or (cpus and set(cpus) <= set(range(os.cpu_count() or 1)))

    # --- fences -----------------------------------------------------------------------------------------------------

    def test_a_fence_passes_by_itself_and_stays_passed(self) -> None:
        fence = self.make_platform().fence()
        deadline = time.monotonic() + 30.0
        while not fence.done():
            assert time.monotonic() < deadline, "a fence behind no work never passes"
            time.sleep(0.001)
        assert all(fence.done() for _ in range(100))

    def test_a_fence_does_not_pass_before_the_work_that_was_launched_before_it(self) -> None:
        platform = self.make_platform()
        finished = self.launch(platform, 0.1)
        fence = platform.fence()
        assert not fence.done(), "the hook's work was over at once: nothing is tested"
        deadline = time.monotonic() + 30.0
        while not (passed := fence.done()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert passed
        assert finished()

    def test_recording_a_fence_does_not_wait_for_work(self) -> None:
        platform = self.make_platform()
        finished = self.launch(platform, 1.0)
        platform.fence()
        assert not finished(), "fence() waited"
