"""Which sizes a sweep tries: given ones or doublings until one does not fit, then between the last two."""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Search"]


@dataclass
class Search:
    """The sizes of one provider. Ask `next`, try it, `record` whether it fitted; None is the end.

    `sizes` are tried in order; where `doubling`, twice the last follows until one does not fit or `limit` is passed.
    With a `resolution` the gap between the largest that fitted and the smallest that did not is then halved, in
    multiples of it, until it is no wider.

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
    fitted: list[int] = field(default_factory=list)
    too_large: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def largest(self) -> int | None:
        """The largest size that fitted."""
        return max(self.fitted, default=None)

    def record(self, size: int, fits: bool) -> None:
        (self.fitted if fits else self.too_large).append(size)

    def stop(self) -> None:
        """No more sizes, whatever would be next."""
        self.stopped = True

    def next(self) -> int | None:
        if self.stopped:
            return None
        if self.too_large:
            return self._between()
        done = len(self.fitted)
        if done < len(self.sizes):
            return self.sizes[done]
        if not self.doubling:  # and there may be none at all: a second round of what never fitted
            return None
        twice = 2 * max(self.fitted)
        return twice if self.limit is None or twice <= self.limit else None

    def _between(self) -> int | None:
        below, above = self.largest or 0, min(self.too_large)
        if self.resolution is None or above - below <= self.resolution:
            return None
        middle = (below + above) // 2 // self.resolution * self.resolution
        if middle <= below:
            middle += self.resolution
        return middle if below < middle < above else None
