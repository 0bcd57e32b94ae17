"""Run a training step of a stock and of a patched model, and compare the results.

The rounding error of a gradient depends on the model. A gradient that is zero in exact arithmetic (for example, of a
key's bias before a softmax) consists of rounding errors only. The stock model shows how large they are: its parameters
are moved by about one unit in the last place, and the change of its gradients is the noise.
"""

import torch
from torch import Tensor

from tigon.cli.check.model_checks import EPS, make_batch, noise, step

__all__ = ["EPS", "assert_same", "assert_within_noise", "make_batch", "noise", "step"]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 64 * EPS) -> None:
    """Assert that two steps agree up to `tolerance`, relative to the largest element of each tensor.

    The sums run in another order, so errors are relative to their terms, which are as large as the largest element. By
    default, the tolerance is a few units in the last place.
    """
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, value in expected.items():
        atol = tolerance * value.abs().max().item()
        torch.testing.assert_close(actual[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_within_noise(
    actual: dict[str, Tensor], expected: dict[str, Tensor], allowed: dict[str, float], message: object
):
    """Assert that two steps in fp32 differ by no more than the noise and a few units in the last place."""
    assert actual.keys() == expected.keys(), str(message)
    for name, value in expected.items():
        tolerance = 4 * allowed[name] + 16 * EPS * value.abs().max().item()
        worst = (actual[name] - value).abs().max().item()
        assert worst <= tolerance, f"{name}: {worst:.3g} apart, {tolerance:.3g} allowed\n{message}"
