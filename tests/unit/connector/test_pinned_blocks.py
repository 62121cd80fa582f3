"""Pins of windows: whatever the bound, through preemptions, and until what vLLM has let go of is transferred."""

from kvxfer.connector.pins import Pins


class Pool:
    """Counts references as vLLM's BlockPool does."""

    def __init__(self) -> None:
        self.blocks = range(100)
        self.references: dict[int, int] = {}

    def touch(self, blocks) -> None:
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1

    def free_blocks(self, blocks) -> None:
        for block in blocks:
            self.references[block] -= 1
            assert self.references[block] >= 0

    @property
    def held(self) -> set[int]:
        return {block for block, count in self.references.items() if count}


def test_a_windows_blocks_are_pinned_whatever_the_bound_and_take_their_room() -> None:
    pins = Pins(pool := Pool(), 3, ranks=1)
    pins.pin_window("r", [7, 8])
    assert not pins.pin("r", [1, 2])
    assert pins.pin("r", [1])
    assert (pool.held, pins.count) == ({1, 7, 8}, 3)
    pins.pin_window("r", [])
    pins.pin_window("r", [9])
    assert (pool.held, pins.count) == ({1, 7, 8, 9}, 4)


def test_what_is_not_in_the_requests_tables_any_more_stays_until_it_is_sent() -> None:
    pins = Pins(pool := Pool(), 9, ranks=1)
    pins.pin("r", [1])
    pins.pin_window("r", [7, 8, 9])
    pins.let_go("r", ([1, 2], [0, 8, 9]))
    assert (pool.held, pins.count, bool(pins)) == ({7}, 1, False)
    pins.sent("another")
    pins.sent("r")
    pins.sent("r")
    assert (pool.held, pins.count) == (set(), 0)


def test_of_a_request_that_lost_its_blocks_all_stay_until_every_rank_is_quiet() -> None:
    pins = Pins(pool := Pool(), 9, ranks=2)
    pins.pin("r", [1])
    pins.pin_window("r", [7])
    token = pins.orphan("r")
    assert pins
    pins.quiet({token: 1})
    assert pool.held == {1, 7}
    pins.quiet({token: 1})
    assert (pool.held, pins.count, bool(pins)) == (set(), 0, False)
    assert pins.orphan("r") == 0
