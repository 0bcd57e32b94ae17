"""The one oracle of accuracy, for Tigon's tests and for anyone who writes kernels."""

import torch
from torch import Tensor

__all__ = ["assert_accurate"]

ULPS = 2.0  # of any one value
RMS_ULPS, ENOUGH = 1.0, 64  # of the root mean square of so many values


def assert_accurate(actual: Tensor, eager: Tensor, exact: Tensor, *, smallest: float = 0.0, msg: str = "") -> None:
    """`actual` is at most twice as far from `exact` as `eager` is, plus two units in the last place.

    The largest error is held to it, and the root of the mean square to one unit instead of two (rounding to nearest
    makes 0.2 to 0.3), so that neither one bad element among many nor a small bias of all of them passes.

    Args:
        actual: The result under test, of any shape, fp32 | bf16 | fp16.
        eager: The same computed by eager code in the same dtype.
        exact: The same computed in fp32 or fp64.
        smallest: Values below it are allowed the units in the last place of a value of this size. For losses, 1.0:
            the logarithm of a sum near one is no more precise than the sum, and a single loss that eager code gets
            right by luck is no measure.
        msg: What is compared, for the error.

    Raises:
        AssertionError: With both errors and where the largest one stands. NaN and infinities must stand where
            `exact` has them.

    Example:
        >>> x = torch.randn(4, 64)
        >>> assert_accurate(x.bfloat16().sum(-1), x.bfloat16().sum(-1), x.double().sum(-1), msg="sum")
    """
    what = f"{msg}: " if msg else ""
    if actual.shape != exact.shape or eager.shape != exact.shape:
        shapes = f"actual {tuple(actual.shape)}, eager {tuple(eager.shape)}, exact {tuple(exact.shape)}"
        raise AssertionError(f"{what}shapes differ: {shapes}")
    if actual.dtype != eager.dtype:
        raise AssertionError(f"{what}dtypes differ: actual {actual.dtype}, eager {eager.dtype}")
    if exact.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    actual, eager, exact = (x.detach().double() for x in (actual, eager, exact))
    finite = exact.isfinite()
    odd = torch.where(finite, ~actual.isfinite(), ~torch.isclose(actual, exact, equal_nan=True))
    if odd.any():
        where = tuple(odd.nonzero()[0].tolist())
        raise AssertionError(f"{what}at {where} got {actual[where].item()}, expected {exact[where].item()}")
    zero = torch.zeros_like(exact)
    size = torch.where(finite, exact.abs().clamp(min=smallest), zero)
    error = torch.where(finite, (actual - exact).abs(), zero)
    # Where eager itself overflows, it sets no measure.
    eager_error = torch.where(finite & eager.isfinite(), (eager - exact).abs(), zero)

    largest = 2 * eager_error.max() + ULPS * eps * size
    if (error > largest).any():
        where = tuple(int(i) for i in torch.unravel_index((error - largest).argmax(), error.shape))
        raise AssertionError(
            f"{what}at {where} got {actual[where].item():.9g}, exact is {exact[where].item():.9g}: error "
            f"{error[where].item():.3g} over {largest[where].item():.3g} "
            f"(eager's largest {eager_error.max().item():.3g})"
        )
    rms = lambda x: x.square().mean().sqrt().item()
    units = ULPS if error.numel() < ENOUGH else RMS_ULPS
    if rms(error) > 2 * rms(eager_error) + units * eps * rms(size):
        raise AssertionError(
            f"{what}root mean square error {rms(error):.3g}, eager's is {rms(eager_error):.3g} "
            f"and the values' size {rms(size):.3g}"
        )
