"""Record which candidates recognition compares with a module, and in which case each of them differs first.

`report.why` shows the record, for example

    nearest candidate: rms_norm, offset 0, rounded before the weight (4 comparisons agreed before the first difference)
    first case that differs: input bfloat16 (2, 8, 48), weights bfloat16, training: the largest difference is 0.01, ...
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Mismatch:
    """The first comparison in which a candidate differs from a module."""

    # The dtypes and shapes of the inputs, the dtype of the weights, and the mode.
    case: str
    text: str
    # The largest absolute difference of two values. It is infinite if the outputs cannot be compared.
    difference: float


@dataclass
class Trials:
    """The comparisons that a recogniser made for one module."""

    # The number of comparisons in which each candidate agreed before its first mismatch.
    agreements: Counter[Any] = field(default_factory=Counter)
    mismatches: dict[Any, Mismatch] = field(default_factory=dict)
    # Why the recogniser returned None, if it compared anything.
    note: str = ""

    def add(self, candidate: Any, mismatch: Mismatch | None) -> None:
        """Count a comparison of a candidate. Comparisons after its first mismatch are ignored."""
        if candidate not in self.mismatches:
            self.agreements[candidate] += mismatch is None
            if mismatch is not None:
                self.mismatches[candidate] = mismatch

    def lines(self) -> list[str]:
        """Return sentences about the nearest candidate: the one with the most agreements."""
        if not self.agreements:
            return []
        difference = lambda c: self.mismatches[c].difference if c in self.mismatches else 0.0
        nearest = max(self.agreements, key=lambda c: (c not in self.mismatches, self.agreements[c], -difference(c)))
        count = self.agreements[nearest]
        agreement = f"{count} comparison{'s' * (count != 1)} agreed"
        if (mismatch := self.mismatches.get(nearest)) is None:
            return [f"nearest candidate: {nearest} ({agreement}, none differed)"]
        return [
            f"nearest candidate: {nearest} ({agreement} before the first difference)",
            f"first case that differs: {mismatch.case}: {mismatch.text}",
        ]


_current: ContextVar[Trials | None] = ContextVar("tigon_trials", default=None)


@contextlib.contextmanager
def recording(trials: Trials | None = None) -> Iterator[Trials]:
    """Record the comparisons that are made in this block."""
    trials = Trials() if trials is None else trials
    token = _current.set(trials)
    try:
        yield trials
    finally:
        _current.reset(token)


@contextlib.contextmanager
def not_recording() -> Iterator[None]:
    """Record no comparison of this block, because a mismatch in it does not exclude the candidate."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def current_trials() -> Trials | None:
    """Return the current record, or None."""
    return _current.get()


def explain_none(reason: str) -> None:
    """Record why a recogniser returns None. The report does not list the module, but `report.why` shows the reason."""
    if (trials := _current.get()) is not None:
        trials.note = reason


def record(
    is_same: bool,
    candidate: Any,
    twin: nn.Module | None,
    inputs: Sequence[Any],
    results: Any,
    expected: Any,
    *,
    mode: str = "",
    text: str = "",
) -> bool:
    """Record one comparison and return `is_same`. `twin` is None for a function. `mode` names further circumstances,
    such as "gradients", and `text` a difference that is no difference of values."""
    if (trials := _current.get()) is not None:
        mismatch = None
        if not is_same:
            words, difference = (text, torch.inf) if text else _difference(results, expected)
            mismatch = Mismatch(_describe_case(twin, inputs, mode), words, difference)
        trials.add(candidate, mismatch)
    return is_same


def _describe_case(twin: nn.Module | None, inputs: Sequence[Any], mode: str) -> str:
    """Return the dtypes, the shapes and the mode of a comparison."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    words = [f"{'input' if i == 0 else 'and'} {_dtype(x)} {tuple(x.shape)}" for i, x in enumerate(tensors)]
    words = [" ".join(words)]
    if any(x.is_meta for x in tensors):
        words.append("on meta")
    if twin is not None:
        dtypes = {_dtype(p): None for m in twin.modules() for p in m._parameters.values() if p is not None}
        words += [f"weights {'/'.join(dtypes)}"] if dtypes else []
        words.append("training" if twin.training else "evaluation")
    if torch.is_autocast_enabled("cpu"):
        words.append("autocast")
    return ", ".join([*words, mode] if mode else words)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _difference(results: Any, expected: Any) -> tuple[str, float]:
    """Return a description of how results differ, and the largest absolute difference."""
    results, expected = ([x] if not isinstance(x, (list, tuple)) else list(x) for x in (results, expected))
    if len(results) != len(expected):
        return f"the candidate returns {len(results)} results, the module {len(expected)}", torch.inf
    # The largest difference, and the largest absolute value of the expected tensor that it belongs to.
    largest, scale, others = 0.0, 0.0, []
    for ours, stock in zip(results, expected, strict=True):
        if not (isinstance(ours, Tensor) and isinstance(stock, Tensor)):
            if ours is not stock:
                names = [type(x).__name__ for x in (ours, stock)]
                others.append(f"the candidate returns {names[0]}, the module {names[1]}")
            continue
        if ours.shape != stock.shape:
            others.append(f"the candidate returns shape {tuple(ours.shape)}, the module {tuple(stock.shape)}")
            continue
        if ours.dtype != stock.dtype:
            others.append(f"the candidate returns {_dtype(ours)}, the module {_dtype(stock)}")
        if ours.is_meta or stock.is_meta or not ours.numel():
            continue
        a, b = (x.detach().double() for x in (ours, stock))
        is_equal = (a == b) | (a.isnan() & b.isnan())
        # A NaN or an infinity in one of the two is an infinite difference.
        gap = torch.where(is_equal, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        finite = b[b.isfinite()]
        if (difference := gap.max().item()) > largest:
            largest, scale = difference, finite.abs().max().item() if finite.numel() else 0.0
    if others:
        return "; ".join(dict.fromkeys(others)), torch.inf
    if largest == 0:
        return "values are equal, but the layout, the device, the type or requires_grad differs", torch.inf
    return _describe_difference(largest, scale), largest


def _describe_difference(largest: float, scale: float) -> str:
    """Return a sentence about the largest difference, relative to the largest absolute value that was expected."""
    if math.isinf(largest):
        return "the candidate or the module computes NaN or infinity where the other computes another value"
    if scale == 0:
        return f"the largest difference is {largest:.3g}, where the module computes only zeros"
    ratio = f"{largest / scale:.3g} times the largest value that the module computes"
    return f"the largest difference is {largest:.3g}, which is {ratio} ({scale:.3g})"
