"""The options, tensors and comparisons that the tests of FP8 ops share."""

import pytest
import torch
from torch import Tensor

from op_cases import DEVICE

RECIPES = ["tensorwise", "rowwise"]
MODES = {"dW in FP8": True, "dW in the dtype of x": False}
recipes = pytest.mark.parametrize("recipe", RECIPES)
modes = pytest.mark.parametrize("fp8_dw", MODES.values(), ids=MODES)
same_node = pytest.mark.no_interpreter("The node is the same where kernels run, and a kernel takes seconds there.")
# On a GPU the units accumulate with fewer bits, and return rows with their own scales in bf16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2} if DEVICE == "cuda" else {"rtol": 1e-5, "atol": 1e-5}


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale
    return values.to(DEVICE, dtype)


def leaf(*shape: int, **options) -> Tensor:
    return randn(*shape, **options).requires_grad_()


def step(run, leaves: list[Tensor], **options) -> list[Tensor]:
    """Return y, and the gradients of the leaves that need one."""
    y = run(*leaves, **options)
    needed = [x for x in leaves if x.requires_grad]
    return [y, *torch.autograd.grad(y, needed, randn(*y.shape, seed=7).to(y.dtype))]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        size = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a / size, b / size, **TOLERANCE)
