"""Every decoder type of transformers, tiny, on the kernels: in fp32 its step is stock's, in bf16 as accurate."""

import copy

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from hf.same_step import assert_same_step, make_batch, noise, step  # noqa: E402
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
    assert_same_step(step(model, batch), expected, allowed, report)


def _distance(given: dict, exact: dict) -> float:
    """Relative, of all gradients as one vector."""
    pairs = [(given[name].float(), value) for name, value in exact.items() if name != "loss"]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


@pytest.mark.parametrize("model_type", BUILT)
def test_bf16_is_as_accurate_as_stock(model_type):
    model, batch = tiny_model(model_type).to(torch.bfloat16).cuda(), make_batch(VOCABULARY, 4, 64, device="cuda")
    try:
        stock = step(model, batch)
    except RuntimeError as error:
        pytest.skip(f"the stock model does not run in bf16: {str(error)[:80]}")
    exact = step(copy.deepcopy(model).float(), batch)
    report = tigon.patch(model)
    given = step(model, batch)
    assert given.keys() == stock.keys()
    # A router may choose other experts where two are near: then both ways lie as far from the fp32 model.
    assert _distance(given, exact) <= 1.5 * _distance(stock, exact) + 1e-3, report
    error, allowed = (abs(losses["loss"].item() - exact["loss"].item()) for losses in (given, stock))
    assert error <= 2 * allowed + 4e-3 * exact["loss"].item(), report
