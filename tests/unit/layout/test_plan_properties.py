"""Plans between random engines against what must be where afterwards, element by element."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.layout.plan import Prepared
from kvxfer.layout.ranks import Shard, share, uncovered
from tests.unit.layout import caches
from tests.unit.layout.caches import (
    MAX_POSITION,
    NOTHING,
    byte_pairs,
    carry_out,
    engines,
    fewest,
    models,
    regrouped,
    styles,
    tables,
    tag,
)


@st.composite
def handoffs(draw):
    model = draw(models())
    sources = draw(engines(model, draw(styles()), 1 << 40))
    sinks = draw(engines(draw(regrouped(model)), draw(styles()), 1 << 44))
    prompt = draw(st.integers(1, MAX_POSITION))
    start = draw(st.integers(0, prompt))
    end = draw(st.integers(start, prompt))
    keep = draw(st.integers(0, start))
    for one in sources:
        one.tables = draw(tables(one, 0, prompt, null_before=prompt, more=6))
        one.fill(prompt)
    for one in sinks:
        one.tables = draw(tables(one, keep, end, null_before=prompt))
    return sources, sinks, start, end, prompt, keep


@settings(max_examples=150)
@given(handoffs(), st.booleans())
def test_every_byte_goes_where_it_belongs_and_no_other_changes(case, exact) -> None:
    sources, sinks, start, end, prompt, keep = case
    for sink in sinks:
        shares = [share(source.cache, source.shard, sink.cache, sink.shard) for source in sources]
        assert uncovered(sink.cache, shares) == []
        for source, part in zip(sources, shares, strict=True):
            if part:
                prepared = Prepared(source.cache, sink.cache, part)
                args = (source.tables, sink.tables, start, end)
                plan = prepared.plan(*args, prompt=prompt, keep=keep, exact=exact)
                carry_out(plan, source, sink)
                for pairing, span in zip(prepared.pairings, plan.moved, strict=True):
                    assert span.end == end or not exact
                    assert all(span.end <= -(-end // size) * size for size in pairing.block_sizes)
        wanted = sink.memory * 0 + NOTHING
        for plane, layer, position, head, channel, at in sink.elements(start, end):
            if sink.looks_back(plane, position, prompt):
                for byte in range(plane.item):
                    wanted[at + byte] = tag(plane.name, layer, position, head, channel, byte)
        if not exact and end > start:  # what is in the rest of the last block does not count
            for at, item in _rest(sink, end):
                wanted[at : at + item] = sink.memory[at : at + item]
        assert (sink.memory == wanted).all()


def _rest(sink, end):
    """Go through the elements behind ``end`` in the blocks that hold the position before it."""
    for plane, _, position, _, _, at in sink.elements(end, end + MAX_POSITION):
        size = next(group.block_size for group in sink.cache.groups if plane in group.planes)
        if position < -(-end // size) * size:
            yield at, plane.item


@settings(max_examples=150)
@given(handoffs(), st.sampled_from([1, 3, 16, 1 << 30]))
def test_there_are_no_more_descriptors_than_runs_contiguous_on_both_sides(case, limit) -> None:
    sources, sinks, start, end, prompt, keep = case
    for source in sources:
        for sink in sinks:
            part = share(source.cache, source.shard, sink.cache, sink.shard)
            if part:
                prepared = Prepared(source.cache, sink.cache, part)
                args = (source.tables, sink.tables, start, end)
                plan = prepared.plan(*args, prompt=prompt, keep=keep)
                pairs = byte_pairs(plan)
                assert plan.count == fewest(pairs)
                assert len(pairs) == plan.bytes
                cut = prepared.plan(*args, prompt=prompt, keep=keep, limit=limit)
                assert byte_pairs(cut) == pairs
                assert cut.count == sum(-(-length // limit) for length in plan.sink[:, 1].tolist())
                assert all(length <= limit for length in cut.sink[:, 1].tolist())


@st.composite
def opaque_handoffs(draw):
    model = draw(models())
    size = st.just(draw(st.integers(1, 5)))
    sides = []
    for base in (1 << 40, 1 << 44):
        style = draw(styles(size))
        whole = caches.Style(style.order, style.block_size, style.num_blocks, style.padding, False, False, "tiles")
        sides.append(caches.rank(model, whole, Shard(0, 1), tuple(range(model.layers)), base))
    source, sink = sides
    prompt = draw(st.integers(1, MAX_POSITION))
    start = draw(st.integers(0, prompt))
    end = draw(st.integers(start, prompt))
    block = sink.cache.groups[0].block_size
    keep = draw(st.integers(0, start // block)) * block
    source.tables = draw(tables(source, 0, prompt, null_before=prompt))
    source.fill(-(-prompt // block) * block)
    sink.tables = draw(tables(sink, keep, end, null_before=prompt))
    return source, sink, start, end, prompt, keep


@settings(max_examples=100)
@given(opaque_handoffs())
def test_of_opaque_interiors_whole_blocks_move_and_nothing_that_the_sink_keeps(case) -> None:
    source, sink, start, end, prompt, keep = case
    prepared = Prepared(source.cache, sink.cache)
    groups = {p.sink_group: number for number, p in enumerate(prepared.pairings)}
    refusals = []
    for number in groups.values():
        window = prepared.pairings[number].window
        size = prepared.pairings[number].block_sizes[0]
        low = start if window is None else max(start, (prompt - window) // size * size)
        refusals.append(low < end and low // size * size < keep)
    assert not any(refusals), "keep is at a block's begin here, so rounding down never passes it"
    plan = prepared.plan(source.tables, sink.tables, start, end, prompt=prompt, keep=keep)
    carry_out(plan, source, sink)
    wanted = sink.memory * 0 + NOTHING
    for number, group in enumerate(sink.cache.groups):
        if number in groups:
            span = plan.moved[groups[number]]
            assert span.start == span.end or (span.start <= max(start, span.start) and span.end >= end)
            for plane, layer, position, head, channel, at in sink.elements(span.start, span.end):
                if plane in group.planes:
                    wanted[at] = tag(plane.name, layer, position, head, channel, 0)
    assert (sink.memory == wanted).all()
    assert plan.count == fewest(byte_pairs(plan))
