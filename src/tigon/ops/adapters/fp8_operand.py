"""An operand of products in FP8, for which kernels that read it do a pass on their way.

An FP8 copy with tensorwise scales takes two passes over a matrix: one finds the largest absolute value, and one writes
the copy. The low-rank products of a node read the same matrices. So their kernels do the first pass that is missing: if
the kernel that wrote a matrix has found its maximum, they write the copy, and otherwise they find the maximum.

Shapes: T tokens, K features of a part.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tigon.ops.fp8.formats import Factor, FirstPass, runs_fp8_kernels
from tigon.ops.fp8.quantisation import Layout, quantise
from tigon.runtime.counters import zero_number
from tigon.runtime.maxima import Maxima, find

__all__ = ["Fp8Operand", "known_maximum"]


def known_maximum(x: Tensor, layout: Layout) -> Tensor | None:
    """Return the bits [1] of the largest |x| that the scale of a copy needs, if the op that wrote x has found it."""
    maxima = find(x, layout.maxima_of_first_pass)
    return None if maxima is None else maxima.tensor


class Fp8Operand:
    """Matrices [T, K] side by side, and the FP8 copy by rows of the whole.

    Args:
        parts: The matrices. Their keys are the indices of the layers that they belong to, and 0 for an input.
        layout: The format and the scales of the copy.
        maximum: The bits [1] of the largest absolute value of all parts in int32, if it is known.
    """

    def __init__(self, parts: Mapping[int, Tensor], layout: Layout, maximum: Tensor | None) -> None:
        self.parts, self.layout, self.maximum = parts, layout, maximum
        self.copy: Factor | None = None

    def first_passes(self, read: Collection[int]) -> dict[int, FirstPass | None]:
        """Return what kernels that read the parts `read` have to do on their way, by the index of the part.

        The caller must let one kernel do this for each part, before it calls `factor`. The values are None if the
        kernels have nothing to do: if rows have scales of their own, or if a part is not among those that are read.
        """
        first = next(iter(self.parts.values()))
        nothing: dict[int, FirstPass | None] = dict.fromkeys(read)
        if self.layout.is_rowwise or not all(index in read for index in self.parts) or not runs_fp8_kernels(first):
            return nothing
        if self.maximum is None:
            self.maximum = zero_number(first)
            return nothing | dict.fromkeys(self.parts, FirstPass(self.maximum))
        widths = [part.shape[1] for part in self.parts.values()]
        values = first.new_empty((len(first), sum(widths)), dtype=self.layout.dtype)
        self.copy = Factor(values, first.new_empty(1, dtype=torch.float32))
        windows = values.split(widths, 1) if len(widths) > 1 else (values,)
        passes = (FirstPass(self.maximum, Factor(window, self.copy.scale)) for window in windows)
        return nothing | dict(zip(self.parts, passes, strict=True))

    def factor(self) -> Factor:
        """Return the FP8 copy of the whole. The first passes must have been done."""
        if self.copy is not None:
            return self.copy
        maxima = None if self.maximum is None else Maxima(self.maximum, None, None)
        copy = quantise([*self.parts.values()], self.layout, maxima).rows
        assert copy is not None
        return copy
