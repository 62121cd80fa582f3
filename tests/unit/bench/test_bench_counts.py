from array import array
from types import SimpleNamespace

import pytest

from kvxfer.bench import counts, marks
from kvxfer.bench.counts import Counters, NoRecordError, combine
from kvxfer.transport.records import HandoffRecord


def record(handoff, side, outcome="done", rank=0, **fields):
    return HandoffRecord(handoff, f"cmpl-{handoff}-0", side, rank, "push", outcome=outcome, **fields)


def source(handoff, **fields):
    return record(handoff, "source", **{"tokens": 300, "blocks": 10, "bytes": 640, "descriptors": 8, **fields})


def sink(handoff, **fields):
    return record(handoff, "sink", **{"tokens": 300, "blocks": 10, **fields})


def test_two_sides_of_two_ranks_become_one_handoff():
    records = [source("a", backend="LIBFABRIC", tokens=310), sink("a", backend="LIBFABRIC")]
    records += [source("a", backend="LIBFABRIC", rank=1), sink("a", rank=1, attempts=2)]
    (moved,) = combine(records)
    assert (moved.tokens, moved.blocks, moved.bytes, moved.descriptors) == (300, 10, 1280, 16)
    assert (moved.attempts, moved.backends, moved.outcomes) == (2, ("LIBFABRIC",), ("done",))


def test_only_who_moved_bytes_says_what_moved_them():
    (moved,) = combine([source("a", backend="UCX"), sink("a", backend="LIBFABRIC")])
    assert moved.backends == ("UCX",)
    (moved,) = combine([source("a", backend="LIBFABRIC", bytes=0), sink("a", backend="LIBFABRIC")])
    assert moved.backends == ()


def test_one_failed_rank_shows():
    (moved,) = combine([source("a"), sink("a"), sink("a", rank=1, outcome="failed")])
    assert moved.outcomes == ("done", "failed")


@pytest.fixture
def engines(monkeypatch):
    """A pair whose records are what the test puts into the two lists."""
    found = {1: [], 2: []}

    def fetch(host, port):
        assert host == "127.0.0.1"
        return SimpleNamespace(ranks=[SimpleNamespace(cache=f"cache of {port}")], records=list(found[port]))

    monkeypatch.setattr(counts, "fetch_records", fetch)
    pair = [
        SimpleNamespace(control_host="127.0.0.1", control_port=port, spec=SimpleNamespace(name=name))
        for port, name in ((1, "prefill"), (2, "decode"))
    ]
    return found, pair


def test_each_new_handoff_is_found_once_both_sides_have_ended_it(engines):
    found, pair = engines
    counters = Counters(*pair)
    assert counters.caches == ("cache of 2",)
    found[1] += [source("probe-1"), source("a")]
    found[2].append(sink("a"))
    assert counters.next_moved(0.0).handoff == "a"
    found[1].append(source("b"))
    with pytest.raises(NoRecordError, match=r"prefill and decode: .*'b', 'source', 'done'"):
        counters.next_moved(0.0)
    found[2].append(sink("b", outcome="open"))
    with pytest.raises(NoRecordError, match="'open'"):
        counters.next_moved(0.0)
    found[2][-1] = sink("b")
    assert counters.next_moved(0.0).handoff == "b"
    with pytest.raises(NoRecordError, match="none"):
        counters.next_moved(0.0)


def test_what_is_passed_over_is_not_new(engines):
    found, pair = engines
    counters = Counters(*pair)
    found[1].append(source("a"))
    found[2].append(sink("a"))
    counters.pass_over()
    with pytest.raises(NoRecordError):
        counters.next_moved(0.0)


def test_the_first_and_the_last_block_change_places():
    assert marks.swap_first_and_last(array("i", [4, 5, 6, 7])) == array("i", [7, 5, 6, 4])
    assert marks.swap_first_and_last(array("i", [4, 5])) == array("i", [5, 4])
    with pytest.raises(ValueError, match="among 1 blocks"):
        marks.swap_first_and_last(array("i", [4]))
