"""The sizes that a sweep tries: given sizes, or doublings until one does not fit, then sizes between the last two."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Search:
    """The sizes of one run. Call `next`, try the size, and `record` whether it fitted; None ends the search.

    `sizes` are tried in order. With `doubling`, twice the last size follows until one does not fit or passes `limit`.
    Then the gap between the largest size that fitted and the smallest that did not is halved. With a `resolution`, the
    sizes are multiples of it, and the search ends when the gap is at most as wide. With `bisections`, the gap is halved
    that many times.

    >>> search, tried = Search([4], doubling=True, resolution=2), []
    >>> while (size := search.next()) is not None:
    ...     tried.append(size)
    ...     search.record(size, fits=size <= 21)
    >>> tried, search.largest
    ([4, 8, 16, 32, 24, 20, 22], 20)
    """

    sizes: Sequence[int]
    doubling: bool = False
    resolution: int | None = None
    limit: int | None = None
    bisections: int = 0
    fitting_sizes: list[int] = field(default_factory=list)
    too_large: list[int] = field(default_factory=list)

    @property
    def largest(self) -> int | None:
        """Return the largest size that fitted."""
        return max(self.fitting_sizes, default=None)

    def record(self, size: int, fits: bool) -> None:
        (self.fitting_sizes if fits else self.too_large).append(size)

    def next(self) -> int | None:
        """Return the next size, or None at the end."""
        if self.too_large:
            return self._between()
        tried_count = len(self.fitting_sizes)
        if tried_count < len(self.sizes):
            return self.sizes[tried_count]
        # There may be no sizes at all: a second round tries those that fitted in the first.
        if not self.doubling:
            return None
        twice = 2 * max(self.fitting_sizes)
        return twice if self.limit is None or twice <= self.limit else None

    def _between(self) -> int | None:
        below, above = self.largest or 0, min(self.too_large)
        if self.bisections:
            self.bisections -= 1
            return (below + above) // 2 if below and above - below > 1 else None
        if self.resolution is None or above - below <= self.resolution:
            return None
        middle = (below + above) // 2 // self.resolution * self.resolution
        if middle <= below:
            middle += self.resolution
        return middle if below < middle < above else None
