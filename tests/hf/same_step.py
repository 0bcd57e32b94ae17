"""One training step of a stock and of a patched model, and how far two right ways to compute it may lie apart.

That depends on the model: a gradient that is zero by its maths (a key's bias under a softmax) is all noise. So the
stock model says how large it is: its parameters are moved by about a unit in their last place, and its gradients move
by so much.
"""

import torch
from torch import Tensor, nn

EPS = torch.finfo(torch.float32).eps


def make_batch(
    vocabulary: int, rows: int = 2, length: int = 12, device: str = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """Random tokens, some without labels; lengths are a multiple of four, which some state-space models want."""
    tokens = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def step(model: nn.Module, batch: dict) -> dict[str, Tensor]:
    """The loss and every gradient; the same dropout each time."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def noise(model: nn.Module, batch: dict, expected: dict[str, Tensor]) -> dict[str, float]:
    """How far each result moves when every parameter moves by about a unit in its last place."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved = dict.fromkeys(expected, 0.0)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p *= 1 + EPS * torch.randn(p.shape, generator=generator).to(p.device)
        for name, value in step(model, batch).items():
            moved[name] = max(moved[name], (value - expected[name]).abs().max().item())
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])
    return moved


def assert_same(given: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 64 * EPS) -> None:
    """They agree to `tolerance` of the largest element: by default a few units in the last place of the reductions.

    The sums run in another order: errors are relative to the terms, of the size of the largest element.
    """
    assert given.keys() == expected.keys(), given.keys() ^ expected.keys()
    for name, value in expected.items():
        atol = tolerance * value.abs().max().item()
        torch.testing.assert_close(given[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_within_noise(given: dict[str, Tensor], expected: dict[str, Tensor], allowed: dict[str, float], said: object):
    """In fp32: no further apart than the noise, and a few units in the last place of the largest element."""
    assert given.keys() == expected.keys(), str(said)
    for name, value in expected.items():
        tolerance = 4 * allowed[name] + 16 * EPS * value.abs().max().item()
        worst = (given[name] - value).abs().max().item()
        assert worst <= tolerance, f"{name}: {worst:.3g} apart, {tolerance:.3g} allowed\n{said}"
