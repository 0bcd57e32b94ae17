"""The accuracy check of Tigon's tests, for everyone who writes kernels."""

import torch
from torch import Tensor

# The allowed error of a single value, in units in the last place, in addition to twice the error of eager code.
ULPS = 2.0
# The allowed root mean square of the errors, in the same units, for this many values or more.
RMS_ULPS, RMS_COUNT = 1.0, 64


def assert_accurate(actual: Tensor, eager: Tensor, exact: Tensor, *, smallest: float = 0.0, msg: str = "") -> None:
    """Check that the error of `actual` is at most twice that of `eager`, plus two units in the last place.

    The limit holds for the largest error. For the root mean square of the errors it is one unit instead of two, where
    rounding to nearest causes 0.2 to 0.3 units. So the check fails for one bad element among many, and also for a small
    bias of all elements.

    Args:
        actual: The result under test, of any shape, fp32 | bf16 | fp16.
        eager: The result of eager code in the same dtype.
        exact: The result in fp32 or fp64.
        smallest: A value that is smaller than this gets the unit in the last place of this number. For losses it is
            1.0, because the logarithm of a sum near one is no more precise than the sum. Eager code may also compute a
            single loss exactly by chance, and then its error gives no useful limit.
        msg: The name of the result, for the error message.

    Raises:
        AssertionError: An error is too large (the message contains its position and size), shapes or dtypes differ, or
            NaN and infinities are not at the positions where `exact` has them.

    Example:
        >>> x = torch.randn(4, 64)
        >>> assert_accurate(x.bfloat16().sum(-1), x.bfloat16().sum(-1), x.double().sum(-1), msg="sum")
    """
    prefix = f"{msg}: " if msg else ""
    if actual.shape != exact.shape or eager.shape != exact.shape:
        shapes = f"actual {tuple(actual.shape)}, eager {tuple(eager.shape)}, exact {tuple(exact.shape)}"
        raise AssertionError(f"{prefix}shapes differ: {shapes}")
    if actual.dtype != eager.dtype:
        raise AssertionError(f"{prefix}dtypes differ: actual {actual.dtype}, eager {eager.dtype}")
    if exact.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    actual, eager, exact = (x.detach().double() for x in (actual, eager, exact))
    finite = exact.isfinite()
    differs = torch.where(finite, ~actual.isfinite(), ~torch.isclose(actual, exact, equal_nan=True))
    if differs.any():
        index = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(f"{prefix}at {index} got {actual[index].item()}, expected {exact[index].item()}")
    zero = torch.zeros_like(exact)
    size = torch.where(finite, exact.abs().clamp(min=smallest), zero)
    error = torch.where(finite, (actual - exact).abs(), zero)
    # An element that overflows in eager code does not raise the limit.
    eager_error = torch.where(finite & eager.isfinite(), (eager - exact).abs(), zero)

    limit = 2 * eager_error.max() + ULPS * eps * size
    if (error > limit).any():
        index = tuple(int(i) for i in torch.unravel_index((error - limit).argmax(), error.shape))
        raise AssertionError(
            f"{prefix}at {index} got {actual[index].item():.9g}, exact is {exact[index].item():.9g}: the error "
            f"{error[index].item():.3g} exceeds the limit {limit[index].item():.3g} "
            f"(eager's largest error {eager_error.max().item():.3g})"
        )
    rms = lambda x: x.square().mean().sqrt().item()
    units = ULPS if error.numel() < RMS_COUNT else RMS_ULPS
    if rms(error) > 2 * rms(eager_error) + units * eps * rms(size):
        raise AssertionError(
            f"{prefix}the root mean square is {rms(error):.3g} for the errors, {rms(eager_error):.3g} for eager's "
            f"errors and {rms(size):.3g} for the values"
        )
