"""FP8 copies of weights, which are made once and used until the weights change.

Weights that multiply the same input form a group: their rows are those of one matrix [O, H], O being the sum of their
outputs. The copy by rows serves the forward products, and the transposed copy [H, O] serves dX, which is one product
for the whole group. A stack of weights [E, R, C], such as those of experts, is a group of its own
(`tigon.ops.fp8.stacks`).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.fp8.formats import Factor
from tigon.ops.fp8.quantisation import Layout, Quantised, quantise
from tigon.ops.fp8.stacks import quantise_stack
from tigon.runtime.device import is_capturing
from tigon.runtime.optimizer_steps import count_steps, step_count


def quantise_weights(
    weights: Sequence[Tensor], is_rowwise: bool, needs_rows: bool, needs_transposed: bool
) -> Quantised:
    """Return the FP8 copies of a group of weights [O_i, H], whose copies come from the same passes, or of one stack."""
    if weights[0].dim() == 3:
        (stack,) = weights
        return quantise_stack(stack, needs_rows, needs_transposed)
    layout = Layout(is_rowwise, needs_rows, needs_transposed)
    return quantise([weight.detach() for weight in weights], layout)


class _WeightState(NamedTuple):
    """The properties of a weight that change when its values may have changed."""

    address: int
    version: int
    shape: torch.Size
    dtype: torch.dtype
    step: int  # The number of optimizer steps; -1 for a frozen weight that does not depend on it.


def _state_of(weight: Tensor, keeps_frozen: bool) -> _WeightState:
    step = -1 if keeps_frozen and not weight.requires_grad else step_count()
    return _WeightState(weight.data_ptr(), weight._version, weight.shape, weight.dtype, step)


class _CachedCopies(NamedTuple):
    states: tuple[_WeightState, ...]
    is_rowwise: bool
    copies: Quantised


class WeightCache:
    """The FP8 copies of the weights of a module, by a name for each group of weights. A copy is used as long as the
    weights have the same memory and version, and no optimizer has stepped since. Micro-batches of one step and
    recomputed layers therefore share it. An entry that is outdated is freed before the new one is made. A step matters
    for frozen weights too, because averages of trained weights are often written to them through `weight.data` after a
    step. With `keeps_frozen`, copies of frozen weights serve over several steps. The copies take one byte for each
    weight and direction. Do not use a cache for weights whose shards are gathered for each layer: it would hold the
    copies of all layers at once. After a write that the cache cannot see, such as one through `weight.data`, the caller
    must call `clear`. Nothing is cached under `torch.compile` and while a CUDA graph is captured. A replay must
    quantise the weights that it finds, and a graph must not read copies that are freed later."""

    def __init__(self, keeps_frozen: bool = False) -> None:
        self.keeps_frozen = keeps_frozen
        self._entries: dict[str, _CachedCopies] = {}
        count_steps()

    def clear(self) -> None:
        self._entries.clear()

    @property
    def nbytes(self) -> int:
        factors = [factor for entry in self._entries.values() for factor in entry.copies if factor is not None]
        return sum(x.nbytes for factor in factors for x in factor)

    def __deepcopy__(self, memo: dict) -> "WeightCache":
        # A copied module has weights of its own.
        return WeightCache(self.keeps_frozen)

    def __reduce__(self) -> tuple:
        return WeightCache, (self.keeps_frozen,)

    def holds(self, name: str, weight: Tensor, needs_rows: bool, needs_transposed: bool) -> bool:
        """Return whether `find` has the copies of a single weight that are needed, and makes none."""
        entry = self._entries.get(name)
        if entry is None or entry.states != (_state_of(weight, self.keeps_frozen),):
            return False
        copies = entry.copies
        return not (needs_rows and copies.rows is None) and not (needs_transposed and copies.transposed is None)

    def find(
        self, name: str, weights: Sequence[Tensor], is_rowwise: bool, needs_rows: bool, needs_transposed: bool
    ) -> Quantised:
        """Return the copies of a group of weights, and make those that are needed and missing."""
        make = functools.partial(quantise_weights, weights, is_rowwise)
        if torch.compiler.is_compiling() or weights[0].is_meta or is_capturing(weights[0]):
            return make(needs_rows, needs_transposed)
        states = tuple(_state_of(weight, self.keeps_frozen) for weight in weights)
        entry = self._entries.get(name)
        if entry is None or entry.states != states or entry.is_rowwise != is_rowwise:
            # Free the outdated copies before the new ones are allocated.
            self._entries.pop(name, None)
            del entry
            copies = make(needs_rows, needs_transposed)
            self._entries[name] = _CachedCopies(states, is_rowwise, copies)
            return copies
        copies = entry.copies
        lacks_rows = needs_rows and copies.rows is None
        lacks_transposed = needs_transposed and copies.transposed is None
        if lacks_rows or lacks_transposed:
            missing = make(lacks_rows, lacks_transposed)
            copies = Quantised(copies.rows or missing.rows, copies.transposed or missing.transposed)
            self._entries[name] = entry._replace(copies=copies)
        return copies


def weight_rows(
    cache: WeightCache | None, name: str, weights: Sequence[Tensor], is_rowwise: bool, needs_transposed: bool
) -> Quantised:
    """Return copies of a group of weights for the forward. Only a cache also makes the transposed copy."""
    if cache is None:
        return quantise_weights(weights, is_rowwise, True, False)
    return cache.find(name, weights, is_rowwise, True, needs_transposed)


def weight_transposed(copies: Quantised | None, weights: Sequence[Tensor], is_rowwise: bool) -> Factor:
    """Return the transposed copy of a group of weights for dX: that of the forward, or a new one."""
    if copies is not None and copies.transposed is not None:
        return copies.transposed
    return quantise_weights(weights, is_rowwise, False, True).copy(by_rows=False)
