"""Tiny models of every decoder type of transformers on the kernels: steps agree with stock in fp32 and in bf16."""

import copy
import sys
from math import exp, log, sqrt
from statistics import mean, stdev

import pytest
import torch
from torch import nn

import tigon
from tigon.ops.mixers.gated_delta_rule import gated_delta_rule_reference

transformers = pytest.importorskip("transformers")
from hf.same_step import assert_within_noise, make_batch, noise, step  # noqa: E402
from hf.tiny import TYPES, VOCABULARY, WITHOUT, tiny_model  # noqa: E402

# The loss, and every gradient by name.
Step = dict[str, torch.Tensor]
BUILT = [name for name in TYPES if name not in WITHOUT]


def compute_rule_in_fp64(*tensors, use_qk_l2norm_in_kernel, output_final_state, **options):
    """Compute what transformers' function of this signature computes, with smaller rounding errors."""
    assert options.get("initial_state") is None
    assert options.get("cu_seqlens") is None
    wide = [x.double() for x in tensors]
    o, state = gated_delta_rule_reference(
        *wide[:3], *(options[name].double() for name in ("g", "beta")), use_qk_l2norm=use_qk_l2norm_in_kernel,
        output_final_state=output_final_state,
    )  # fmt: skip
    return o.to(tensors[0].dtype), state


def second_step(stock: nn.Module, batch: dict) -> Step:
    """Repeat a stock step with recurrences in fp64, which shows the rounding errors of two kinds of stock gradients.

    Some sums have no fixed order, so their results differ from run to run. The gradient of the decay of a recurrence is
    a difference of sums, of which few digits are left in fp32 if the decay is strong.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in {sys.modules[type(module).__module__] for module in stock.modules()}:
            if hasattr(module, "torch_chunk_gated_delta_rule"):
                patch.setattr(module, "torch_chunk_gated_delta_rule", compute_rule_in_fp64)
        return step(stock, batch)


@pytest.mark.parametrize("model_type", BUILT)
def test_steps_in_fp32_agree_with_stock(model_type):
    """After each step, the stock model gets the weights of the patched one, so differences do not add up."""
    stock, batch = tiny_model(model_type).cuda(), make_batch(VOCABULARY, device="cuda")
    model = copy.deepcopy(stock)
    report = tigon.patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        expected = step(stock, batch)
        limits = noise(stock, batch, expected)
        for name, value in second_step(stock, batch).items():
            limits[name] = max(limits[name], (value - expected[name]).abs().max().item())
        assert_within_noise(step(model, batch), expected, limits, report)
        optimizer.step()
        stock.load_state_dict(model.state_dict())


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
