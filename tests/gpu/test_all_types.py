"""Every decoder type of transformers, tiny, on the kernels: in fp32 its step is stock's, in bf16 as accurate."""

import copy
from math import exp, log, sqrt
from statistics import mean, stdev

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
from hf.same_step import assert_within_noise, make_batch, noise, step  # noqa: E402
from hf.tiny import TYPES, VOCABULARY, WITHOUT, tiny_model  # noqa: E402

Step = dict[str, torch.Tensor]  # the loss, and every gradient by name
BUILT = [name for name in TYPES if name not in WITHOUT]


@pytest.mark.parametrize("model_type", BUILT)
def test_fp32_is_stock(model_type):
    model, batch = tiny_model(model_type).cuda(), make_batch(VOCABULARY, device="cuda")
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    for name, value in step(model, batch).items():  # sums in no fixed order
        allowed[name] = max(allowed[name], (value - expected[name]).abs().max().item())
    report = tigon.patch(model)
    assert_within_noise(step(model, batch), expected, allowed, report)


def relative_errors(given: Step, exact: Step) -> dict[str, float]:
    """Of every gradient: the root of the mean square, of the error by that of the gradient."""
    names = [name for name in exact if name != "loss"]
    error = torch.stack([(given[name].float() - exact[name]).norm() for name in names])
    size = torch.stack([exact[name].norm() for name in names])
    return dict(zip(names, (error / size.where(size > 0, 1.0)).tolist(), strict=True))


def largest_mean(stock_errors: list[float]) -> float:
    """Return the largest mean error, over as many batches, that an implementation as accurate as stock may have.

    Means are geometric. The limit is 1.5 times the mean of stock's errors, and three standard errors of the difference
    of two such means more: the scatter of stock's errors from batch to batch says how much of a mean over the batches
    is chance. They scatter most in models that choose experts or tokens, where a value near a threshold may fall on
    either side, and in gradients of few values.
    """
    logs = [log(error) for error in stock_errors]
    return exp(mean(logs) + log(1.5) + 3 * stdev(logs) * sqrt(2 / len(logs)))


def assert_as_accurate(given: list[Step], stock: list[Step], exact: list[Step], said: object) -> None:
    """Assert that over several batches every gradient, and the loss, is on average as near to fp32 as stock's."""
    errors, stock_errors = (
        [relative_errors(*pair) for pair in zip(results, exact, strict=True)] for results in (given, stock)
    )
    for name in errors[0]:
        # Half a unit in the last place of bf16 more, for gradients that stock computes without any error.
        own, theirs = ([batch[name] + 2**-9 for batch in batches] for batches in (errors, stock_errors))
        assert exp(mean(map(log, own))) <= largest_mean(theirs), f"{name}: {own}, stock {theirs}\n{said}"
    losses = [torch.stack([result["loss"].float() for result in results]) for results in (given, stock, exact)]
    error, allowed = ((loss - losses[2]).square().mean().sqrt().item() for loss in losses[:2])
    assert error <= 2 * allowed + 1e-3 * losses[2].mean().item(), f"{losses}\n{said}"


def compare(model: nn.Module, batches: list[dict]) -> None:
    """Assert that the patched model is as near as stock to stock in fp32."""
    wide = copy.deepcopy(model).float()
    stock, exact = ([step(m, batch) for batch in batches] for m in (model, wide))
    report = tigon.patch(model)
    given = [step(model, batch) for batch in batches]
    report.restore()
    assert given[0].keys() == stock[0].keys() == exact[0].keys()
    assert_as_accurate(given, stock, exact, report)


@pytest.mark.parametrize("model_type", BUILT)
def test_bf16_is_as_accurate_as_stock(model_type):
    model = tiny_model(model_type).to(torch.bfloat16).cuda()
    compare(model, [make_batch(VOCABULARY, 4, 64, device="cuda", seed=seed) for seed in range(12)])
