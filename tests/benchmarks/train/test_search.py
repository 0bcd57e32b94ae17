"""Tests of the sizes that a sweep tries."""

import pytest

from benchmarks.train.search import Search


def try_sizes(search: Search, room: int) -> list[int]:
    """Return the sizes that a search tries if those above `room` do not fit."""
    sizes = []
    while (size := search.next()) is not None and len(sizes) < 30:
        sizes.append(size)
        search.record(size, fits=size <= room)
    return sizes


@pytest.mark.parametrize(
    ("search", "room", "sizes"),
    [
        (Search([512]), 100, [512]),
        (Search([512], doubling=True), 3000, [512, 1024, 2048, 4096]),
        (Search([512], doubling=True, limit=2048), 9999, [512, 1024, 2048]),
        (Search([1, 3, 5, 9], limit=4), 4, [1, 3, 5]),
        (Search([1024], doubling=True, resolution=256), 3000, [1024, 2048, 4096, 3072, 2560, 2816]),
        (Search([8], doubling=True, resolution=1), 3, [8, 4, 2, 3]),
        (Search([100], doubling=True, resolution=64), 150, [100, 200, 128, 192]),
        (Search([256], doubling=True, bisections=2), 1600, [256, 512, 1024, 2048, 1536, 1792]),
        (Search([256], doubling=True, bisections=2), 100, [256]),
        (Search([8], doubling=True, resolution=4), 0, [8, 4]),
        (Search([]), 100, []),
    ],
    ids=[
        "one",
        "doubling",
        "limit",
        "sizes",
        "resolution",
        "first too large",
        "odd start",
        "bisections",
        "bisections of nothing",
        "nothing fits",
        "none",
    ],
)
def test_a_search_doubles_and_then_halves_the_gap(search, room, sizes):
    assert try_sizes(search, room) == sizes
    assert search.largest == max((size for size in sizes if size <= room), default=None)
