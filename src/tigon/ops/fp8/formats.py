"""The FP8 format, the options of an FP8 op, and the types that its parts exchange.

The format is e4m3: 4 bits of exponent and 3 of mantissa. It rounds by at most 2^-4, its largest value is 448, and its
smallest normal value is 2^-6. With e5m2 for upstream gradients, dX and dW would have errors of 5.9 % in place of 3.8 %.

A recipe says which values share a scale: all values of a matrix ("tensorwise"), or those that one output of a product
reads ("rowwise"): a row of its first factor or a column of its second one.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime import checks
from tigon.runtime.device import HIP, device_kind, device_of, runs_kernels

RECIPES = ("tensorwise", "rowwise")

# The format of all factors, and its largest finite value.
E4M3, LARGEST = torch.float8_e4m3fn, 448.0

# The scale of a matrix whose absolute values are all smaller than this number is that of this number. The scale of a
# matrix of zeros is therefore positive, and its inverse is finite.
SMALLEST_AMAX = 2.0**-100

# FP8 products need inner sizes and widths that are multiples of this number.
MULTIPLE = 16


class Fp8Options(NamedTuple):
    recipe: str = "tensorwise"  # The recipe is one of `RECIPES`.
    # If True, the gradients of weights are FP8 products too. Otherwise they are products in the dtype of the input.
    fp8_dw: bool = True

    @property
    def is_rowwise(self) -> bool:
        return self.recipe == "rowwise"


class Factor(NamedTuple):
    """An FP8 factor of a product: values [R, C], stored by rows along which the product sums, and their scale. The
    scale has the shape [1], or [R, 1] with one number for each row. The matrix is `scale * values`."""

    values: Tensor
    scale: Tensor

    def get_device(self) -> int:
        """Return the number of the device, on which launchers run their function."""
        return self.values.get_device()

    def rows(self, start: int, stop: int) -> "Factor":
        return Factor(self.values[start:stop], self.scale if self.scale.dim() == 1 else self.scale[start:stop])


class FusedPass(NamedTuple):
    """A pass of a quantisation that a kernel does while it reads the matrix for another product. `maximum` [1] holds
    the bits of an fp32 number, in int32. Without `copy`, the kernel raises it to the largest absolute value that it
    reads. With `copy`, `maximum` already holds the largest absolute value of the whole matrix, and the kernel writes
    the values of the copy and their scale."""

    maximum: Tensor
    copy: Factor | None = None


def pad(size: int) -> int:
    """Return the next multiple of `MULTIPLE`."""
    return -(-size // MULTIPLE) * MULTIPLE


def check_sizes(op: str, **weights: Tensor) -> None:
    for name, weight in weights.items():
        if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE or not weight.numel():
            raise ValueError(
                f"{op}: both sizes of {name} must be positive multiples of {MULTIPLE}, got {tuple(weight.shape)}"
            )


def check_options(op: str, recipe: object, fp8_dw: object) -> None:
    checks.choice(op, "recipe", recipe, RECIPES)
    checks.flag(op, fp8_dw=fp8_dw)


@functools.cache
def has_units(arch: str) -> bool:
    """Return whether a chip has the FP8 units that Tigon uses: "sm_89" (Ada), "sm_90" (Hopper) and later ones. Chips of
    AMD have units too, some of them for other formats. Tigon has not been tested with them."""
    return arch.startswith("sm_") and int(arch[3:]) >= 89


def has_fp8_units(x: Tensor) -> bool:
    """Return whether the FP8 units of the device of `x` compute products. Elsewhere these are emulated."""
    return not HIP and device_kind(x) == "cuda" and has_units(device_of(x).arch)


def runs_fp8_kernels(x: Tensor) -> bool:
    """Return whether the kernels of this family run on `x`: on a GPU with FP8 units, or in the interpreter."""
    if not runs_kernels(x):
        return False
    # The interpreter and a simulated GPU may have no name.
    arch = device_of(x).arch
    return arch == "" or has_units(arch)
