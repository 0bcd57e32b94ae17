"""Steps in backward are those that an optimizer takes after it, and free the gradients."""

import pytest
import torch
from torch import nn

import tigon
from op_cases import DEVICE

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1)).to(DEVICE)


def make_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(DEVICE)


@pytest.mark.parametrize("options", [{}, {"state": "8bit"}, {"state": "fp32", "stochastic_rounding": True}], ids=str)
def test_steps_in_backward_are_those_after_it(options):
    results = []
    for in_backward in (False, True):
        model = make_model()
        groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
        groups.append({"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0})
        optimizer = tigon.AdamW(groups, **OPTIONS, **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if in_backward:
            hooks = tigon.step_in_backward(optimizer)
        for step in range(3):
            model(make_batch(step)).square().sum().backward()
            assert all((p.grad is None) == in_backward for p in model.parameters())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)
    hooks.remove()
    hooks.remove()
    model(make_batch(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def make_adamw(**options) -> tigon.AdamW:
    return tigon.AdamW([nn.Parameter(torch.zeros(3))], **options)


REFUSALS = {
    "step_in_backward: step_in_backward and max_grad_norm=1.0 exclude each other, because the norm of all gradients is "
    "known only after backward": lambda: tigon.step_in_backward(make_adamw(max_grad_norm=1.0)),
    "step_in_backward: step_in_backward and gradient_accumulation_steps=2 exclude each other, because each backward is "
    "a step": lambda: tigon.step_in_backward(make_adamw(), gradient_accumulation_steps=2),
    "step_in_backward: optimizer must be a tigon.AdamW, got None": lambda: tigon.step_in_backward(None),
}


@pytest.mark.parametrize(("message", "call"), REFUSALS.items(), ids=range(len(REFUSALS)))
def test_a_refusal_names_the_options(message, call):
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    assert str(refusal.value) == message
