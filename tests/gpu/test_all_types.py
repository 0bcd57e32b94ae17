"""Every decoder type of transformers, tiny, on the kernels: in fp32 its step is stock's, in bf16 as accurate."""

import copy
from statistics import median

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from hf.same_step import assert_within_noise, make_batch, noise, step  # noqa: E402
from hf.tiny import TYPES, VOCABULARY, WITHOUT, tiny_model  # noqa: E402

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


def _distance(given: dict, exact: dict) -> float:
    """Relative, of all gradients as one vector."""
    pairs = [(given[name].float(), value) for name, value in exact.items() if name != "loss"]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


@pytest.mark.parametrize("model_type", BUILT)
def test_bf16_is_as_accurate_as_stock(model_type):
    """Over six batches: where two experts are near, which one a router takes is rounded either way, and that is most of
    the error of a model that small, stock or patched. A kernel that is wrong is wrong in most batches.
    """
    model = tiny_model(model_type).to(torch.bfloat16).cuda()
    wide = copy.deepcopy(model).float()
    batches = [make_batch(VOCABULARY, 4, 64, device="cuda", seed=seed) for seed in range(6)]
    try:
        stock = [step(model, batch) for batch in batches]
    except RuntimeError as error:
        pytest.skip(f"the stock model does not run in bf16: {str(error)[:80]}")
    exact = [step(wide, batch) for batch in batches]
    report = tigon.patch(model)
    given = [step(model, batch) for batch in batches]
    assert given[0].keys() == stock[0].keys()
    errors, allowed = ([_distance(a, b) for a, b in zip(results, exact, strict=True)] for results in (given, stock))
    assert median(errors) <= 1.5 * max(allowed) + 1e-3, f"{errors}, stock {allowed}\n{report}"
    losses = [torch.stack([result["loss"].float() for result in results]) for results in (given, stock, exact)]
    error, allowed = ((loss - losses[2]).square().mean().sqrt().item() for loss in losses[:2])
    assert error <= 2 * allowed + 1e-3 * losses[2].mean().item(), f"{losses}\n{report}"
