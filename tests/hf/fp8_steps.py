"""Comparisons of training steps in FP8 and in bf16, for the tests of FP8."""

import math

import torch

# The largest error of e4m3 is 2^-4, and that of e5m2 is 2^-3. Both are uniform, so an rms is the largest error divided
# by sqrt(3), and less for values that are not just above a power of two. A product rounds two factors. Gradients pass
# two layers of four products in forward and in backward, one after the other, and errors add up as random numbers do.
GRADIENT_ERROR = math.sqrt(16 * (2.0**-8 + 2.0**-6) / 3)
# The loss is nearly linear in errors whose mean is zero.
LOSS_ERROR = GRADIENT_ERROR / 10
# A model in bf16 differs from another order of its sums by about this much.
BF16_ERROR = 2.0**-8


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def assert_near(actual: dict, expected: dict) -> None:
    """Assert that two steps agree up to the errors of FP8.

    The gradients of vectors and of routers have few elements, or sums in which most terms cancel.
    """
    assert actual.keys() == expected.keys()
    assert error(actual["loss"], expected["loss"]) < LOSS_ERROR
    for name, value in expected.items():
        allowed = GRADIENT_ERROR if value.dim() == 2 and min(value.shape) >= 16 else 2 * GRADIENT_ERROR
        assert error(actual[name], value) < allowed, name


def reasons(report) -> dict[str, str]:
    """Return the lines of the report about FP8, by the first name of each."""
    return {entry.names[0]: entry.detail for entry in report.entries if entry.part == "fp8" and not entry.replaced}


def _names_in_fp8(report) -> set[str]:
    return {name for entry in report.replaced if entry.part == "fp8" for name in entry.names}


def layers_in_fp8(report) -> set[str]:
    """Return the names of the linear layers that run in FP8."""
    return {name for name in _names_in_fp8(report) if not name.endswith("experts")}


def experts_in_fp8(report) -> set[str]:
    return {name for name in _names_in_fp8(report) if name.endswith("experts")}
