"""Run a step of experts or of a mixture, and compare it with another one."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def step(module: Any, inputs: Sequence[Tensor], parameters: Iterable[tuple[str, nn.Parameter]] | None = None) -> Any:
    """Return the outputs and every gradient that exists, by name. The loss is the sum of the squared outputs."""
    leaves = {f"input {i}": x for i, x in enumerate(inputs)} | dict(parameters or module.named_parameters())
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    results = module(*inputs)
    outputs = results if isinstance(results, tuple) else (results,)
    loss = torch.stack([y.square().sum() for y in outputs]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves, gradients, strict=True)
    named_outputs = {f"output {i}": y for i, y in enumerate(outputs)}
    return named_outputs | {name: gradient for name, gradient in pairs if gradient is not None}


def assert_same(results: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2**-17) -> None:
    """Assert that two steps differ by rounding at most, relative to the largest value of each tensor."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert results[name].dtype == value.dtype
        limit = tolerance * value.abs().max().item() if value.numel() else 0.0
        torch.testing.assert_close(results[name], value, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}")
