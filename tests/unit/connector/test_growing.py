"""What of a source's growing tables is told and pinned: of windows nothing before the prompt's last one, and never the null block."""

from kvxfer.connector.growing import Growing
from kvxfer.layout.tables import Shape, Tables, packed

ONE = Tables([Shape(16)])
HYBRID = Tables([Shape(16), Shape(16, 40)])


def read(grown) -> list:
    return [(table.first // 16, table.ids.tolist()) for table in HYBRID.read(grown.tables)]


def test_of_one_group_all_is_told() -> None:
    growing = Growing(ONE, 100)
    assert growing.grow(([1, 2],)) == (packed([1, 2]), [1, 2], [])
    assert growing.grow(()) == (b"", [], [])


def test_of_a_window_what_the_shortest_prompt_of_decode_looks_back_to() -> None:
    growing = Growing(HYBRID, 105)  # decode's may have 104 tokens: the last looks back to 64
    first = growing.grow(([1, 2, 3], [11, 12, 13]))
    assert (read(first), first.whole, first.window) == ([(0, [1, 2, 3]), (4, [])], [1, 2, 3], [])
    assert read(growing.grow(())) == [(3, []), (4, [])]
    second = growing.grow(([4, 5, 6, 7], [14, 15, 16, 17]))
    assert (read(second), second.window) == ([(3, [4, 5, 6, 7]), (4, [15, 16, 17])], [15, 16, 17])
    assert read(growing.grow(([8], [18]))) == [(7, [8]), (7, [18])]
    joined = b""
    growing.restart()
    for step in (([1, 2, 3], [11, 12, 13]), (), ([4, 5, 6, 7], [14, 15, 16, 17]), ([8], [18])):
        joined = HYBRID.join(joined, growing.grow(step).tables)
    assert joined == HYBRID.pack([[1, 2, 3, 4, 5, 6, 7, 8], [15, 16, 17, 18]], [0, 4])


def test_a_prefix_hit_brings_null_blocks_which_are_told_as_such_and_not_pinned() -> None:
    growing = Growing(HYBRID, 105)
    grown = growing.grow(([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 16, 17]))
    assert (read(grown), grown.window) == ([(0, [1, 2, 3, 4, 5, 6, 7]), (4, [0, 16, 17])], [16, 17])


def test_a_prompt_shorter_than_the_window_is_told_whole() -> None:
    assert read(Growing(HYBRID, 30).grow(([1, 2], [3, 4]))) == [(0, [1, 2]), (0, [3, 4])]
