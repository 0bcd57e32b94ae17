"""Tiny models of every decoder type of transformers on the kernels: steps in bf16 are as accurate as stock."""

import copy
from math import exp, log, sqrt
from statistics import mean, stdev

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
from hf.same_step import make_batch, step  # noqa: E402
from hf.tiny import TYPES, VOCABULARY, WITHOUT, tiny_model  # noqa: E402

# The loss, and every gradient by name.
Step = dict[str, torch.Tensor]
BUILT = [name for name in TYPES if name not in WITHOUT]


def relative_errors(actual: Step, exact: Step) -> dict[str, float]:
    """Return the norm of the error of every gradient, divided by the norm of the gradient."""
    names = [name for name in exact if name != "loss"]
    error = torch.stack([(actual[name].float() - exact[name]).norm() for name in names])
    size = torch.stack([exact[name].norm() for name in names])
    return dict(zip(names, (error / size.where(size > 0, 1.0)).tolist(), strict=True))


def largest_mean(stock_errors: list[float]) -> float:
    """Return the limit for the mean error, over as many batches, of an implementation that is as accurate as stock.

    Means are geometric. The limit is 1.5 times the mean of stock's errors, plus three standard errors of the difference
    of two such means. The standard error comes from the scatter of stock's errors between batches. It is largest in
    models that choose experts or tokens, where a value near a threshold may fall on either side, and in gradients with
    few values.
    """
    logs = [log(error) for error in stock_errors]
    return exp(mean(logs) + log(1.5) + 3 * stdev(logs) * sqrt(2 / len(logs)))


def assert_as_accurate(actual: list[Step], stock: list[Step], exact: list[Step], report: object) -> None:
    """Assert that the mean errors of every gradient and of the loss are not larger than those of stock allow."""
    errors, stock_errors = (
        [relative_errors(*pair) for pair in zip(results, exact, strict=True)] for results in (actual, stock)
    )
    for name in errors[0]:
        # Stock computes some gradients without any error, so half a unit in the last place of bf16 is added.
        ours, theirs = ([batch[name] + 2**-9 for batch in batches] for batches in (errors, stock_errors))
        assert exp(mean(map(log, ours))) <= largest_mean(theirs), f"{name}: {ours}, stock {theirs}\n{report}"
    losses = [torch.stack([result["loss"].float() for result in results]) for results in (actual, stock, exact)]
    error, limits = ((loss - losses[2]).square().mean().sqrt().item() for loss in losses[:2])
    assert error <= 2 * limits + 1e-3 * losses[2].mean().item(), f"{losses}\n{report}"


def compare(model: nn.Module, batches: list[dict]) -> None:
    """Assert that the patched model is as accurate as stock. Stock in fp32 gives the exact values."""
    wide = copy.deepcopy(model).float()
    stock, exact = ([step(m, batch) for batch in batches] for m in (model, wide))
    report = tigon.patch(model)
    actual = [step(model, batch) for batch in batches]
    report.restore()
    assert actual[0].keys() == stock[0].keys() == exact[0].keys()
    assert_as_accurate(actual, stock, exact, report)


@pytest.mark.parametrize("model_type", BUILT)
def test_steps_in_bf16_are_as_accurate_as_stock(model_type):
    model = tiny_model(model_type).to(torch.bfloat16).cuda()
    compare(model, [make_batch(VOCABULARY, 4, 64, device="cuda", seed=seed) for seed in range(12)])
