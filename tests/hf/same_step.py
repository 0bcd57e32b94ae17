"""Run a training step of a stock and of a patched model, and compare the results.

The rounding error of a gradient depends on the model. A gradient that is zero in exact arithmetic (for example, of a
key's bias before a softmax) consists of rounding errors only. The stock model shows how large they are: its parameters
are moved by about one unit in the last place, and the change of its gradients is the noise.
"""

import torch
from torch import Tensor, nn

EPS = torch.finfo(torch.float32).eps


def make_batch(
    vocabulary: int, rows: int = 2, length: int = 12, device: str = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """Return random tokens, some without labels. Some state-space models need a length that is a multiple of four."""
    tokens = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def step(model: nn.Module, batch: dict) -> dict[str, Tensor]:
    """Return the loss and every gradient, by name. Dropout is the same in every call."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def noise(model: nn.Module, batch: dict, expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the change of each result when every parameter moves by about one unit in its last place."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes = dict.fromkeys(expected, 0.0)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p *= 1 + EPS * torch.randn(p.shape, generator=generator).to(p.device)
        for name, value in step(model, batch).items():
            changes[name] = max(changes[name], (value - expected[name]).abs().max().item())
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])
    return changes


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
