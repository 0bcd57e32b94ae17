"""The self-check of the kernels of linear recurrences on each device.

Triton has miscompiled kernels of this kind. Therefore the first call on a device with another dtype, other sizes, other
launch parameters or other optional tensors first runs the kernels on a small problem, and compares all results with
those of torch. If they disagree, torch computes such calls.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.ops.mixers.chunks import CHUNK
from tigon.runtime.compat.triton import triton
from tigon.runtime.self_check import may_wait

_log = logging.getLogger("tigon")

# The verdict for each op, device, dtype and variant of the kernels.
_verdicts: dict[tuple, bool] = {}
# The root mean square of the errors that the check allows, relative to that of the results. Products of rounded factors
# cause 0.5 % in bf16. A wrong kernel causes much more.
MAX_ERROR = 0.05
Results = Sequence[Any]
# The tokens of the problem of a check: two full chunks and a tail.
CHECK_TOKENS = 2 * CHUNK + 5


def passes_check(op: str, like: Tensor, variant: tuple, check: Callable[[], bool]) -> bool:
    """Return whether the kernels of `op` for this variant are right on the device of `like`, by `check`.

    The first call at which the host may wait runs the check. Until then, and in the interpreter, no kernel has failed.
    """
    if like.get_device() < 0:
        return True
    key = op, like.get_device(), like.dtype, variant
    verdict = _verdicts.get(key)
    if verdict is None:
        if not may_wait():
            return True
        verdict = _verdicts[key] = check()
        if not verdict:
            _log.warning(
                "On device %s, Triton %s compiles kernels of %s in %s that are wrong for these sizes: %s. "
                "PyTorch code computes them, correctly but slowly.",
                like.device, triton.__version__, op, like.dtype, variant,
            )  # fmt: skip
    return verdict


@torch.no_grad()
def compare_results(device: torch.device, run: Callable[[], tuple[Results, Results]]) -> bool:
    """Return whether the two results of `run`, of kernels and of torch, agree. Results that are None are skipped.

    An exception means a wrong kernel, but a lack of memory is raised.
    """
    try:
        actual, expected = run()
        pairs = [
            (x.float().cpu(), y.float())
            for x, y in zip(actual, expected, strict=True)
            if x is not None and y is not None
        ]
    except torch.OutOfMemoryError:
        raise
    except Exception:
        _log.debug("A self-check of kernels raised on device %s.", device, exc_info=True)
        return False
    return all(bool((x - y).square().mean() <= MAX_ERROR**2 * y.square().mean()) for x, y in pairs)


def make_draw() -> Callable[..., Tensor]:
    """Return a function that draws normal numbers of a shape on the CPU, the same ones for every check."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device="cpu")


def make_bounds(dtype: torch.dtype | None) -> Tensor | None:
    """Return the bounds of two packed samples in this dtype, or None if a check has none."""
    return None if dtype is None else torch.tensor([0, CHUNK + 3, CHECK_TOKENS], dtype=dtype, device="cpu")


def move(x: Any, to: torch.dtype | torch.device) -> Any:
    """Return a tensor in another dtype or on another device, and None as None."""
    return None if x is None else x.to(to)
