"""`load_balancing_loss`: equal to the function of transformers, but for equal logits, and deterministic."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, one_in, outputs_and_gradients


def _logits(layers: int, tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(layers + tokens + experts)
    make = lambda: (torch.randn(tokens, experts, generator=generator) * 2).to(DEVICE, dtype).requires_grad_()
    return [make() for _ in range(layers)]


def _mask(tokens: int) -> Tensor:
    mask = torch.ones(2, tokens // 2, dtype=torch.int64, device=DEVICE)
    mask[0, -max(1, tokens // 5) :] = 0
    return mask


def _stock(logits: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None = None) -> Tensor:
    """Compute the loss as transformers 5.13 does, with a one-hot tensor. In fp64 the result is exact."""
    wide = torch.float64 if logits[0].dtype == torch.float64 else torch.float32
    gates = torch.cat(logits)
    p = F.softmax(gates, dim=-1)
    chosen = F.one_hot(torch.topk(p, top_k, dim=-1).indices, num_experts).to(wide)
    if attention_mask is None:
        counts, means = chosen.mean(0), p.mean(0)
    else:
        mask = attention_mask.reshape(1, -1).expand(len(logits), -1).reshape(-1, 1).to(gates.dtype)
        counts, means = (chosen * mask[..., None]).sum(0) / mask.sum(), (p * mask).sum(0) / mask.sum()
    return (counts * means).sum() * num_experts


# Sizes of (layers, tokens, experts) and K.
SIZES = {
    "one layer": ((1, 10, 8), 2), "one choice": ((2, 12, 4), 1), "no power of two": ((3, 14, 11), 3),
    "all experts": ((2, 6, 5), 5), "one expert": ((2, 6, 1), 1), "many experts": ((1, 4, 300), 10),
}  # fmt: skip


@one_in(2, sizes=SIZES, dtype=DTYPES, masked=[False, True])
def test_the_loss_is_that_of_transformers(sizes, dtype, masked):
    """The loss and the gradients are as accurate as those of the stock function, and fp64 is the judge."""
    (layers, tokens, experts), top_k = sizes
    mask = _mask(tokens) if masked else None
    call = lambda f: lambda *logits: (f(logits, experts, top_k, mask),)
    # Gradients are differences of terms p g, where g is at most E / N.
    assert_as_accurate_as_eager(
        call(tigon.load_balancing_loss), call(_stock), _logits(layers, tokens, experts, dtype), loss=True,
        term_size=experts / (layers * tokens),
    )  # fmt: skip


def test_layers_may_be_a_tensor_or_a_sequence_and_may_have_different_rows():
    layers = _logits(3, 7, 5)
    stacked = torch.stack([x.detach() for x in layers]).requires_grad_()
    losses = [tigon.load_balancing_loss(x, 5, 2) for x in (tuple(layers), layers, stacked)]
    assert losses[0] == losses[1] == losses[2]
    (gradient,) = torch.autograd.grad(losses[2], stacked)
    assert torch.equal(gradient, torch.stack(torch.autograd.grad(losses[0], layers)))
    assert tigon.load_balancing_loss(layers[0], 5, 2) == tigon.load_balancing_loss((layers[0],), 5, 2)
    parts = (layers[0][:3], layers[0][3:])
    torch.testing.assert_close(tigon.load_balancing_loss(parts, 5, 2), tigon.load_balancing_loss(layers[0], 5, 2))


ROWS = {
    "three equal": [1.0, 1.0, 1.0, 0.0], "negative zero first": [-0.0, 0.0, -1.0, 0.0],
    "negative zero second": [0.0, -0.0, -1.0, 0.0], "minus infinity": [-math.inf, 2.0, -math.inf, -math.inf],
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_of_equal_logits_the_first_expert_is_chosen(row):
    """Zero equals negative zero. Minus infinity is a logit like any other, below all finite ones."""
    # Both tokens choose the first two experts. Equal logits of one token add equal probabilities, so the second token
    # tells them apart.
    logits = torch.tensor([row, [3.0, 2.0, 0.0, -1.0]], device=DEVICE)
    expected = 4 * logits.softmax(-1).mean(0)[:2].sum()
    torch.testing.assert_close(tigon.load_balancing_loss(logits, 4, 2), expected)


def test_experts_are_ranked_by_logits_that_a_softmax_in_bf16_makes_equal():
    logits = torch.tensor([[0.25, 0.251953125, 0.0]], device=DEVICE, dtype=torch.bfloat16)
    p = logits.softmax(-1)[0]
    assert logits[0, 0] != logits[0, 1]
    assert p[0] == p[1]
    expected = 3 * logits.float().softmax(-1)[0, 1]
    torch.testing.assert_close(tigon.load_balancing_loss(logits, 3, 1), expected)


def test_what_is_stored_outside_of_the_mask_is_not_read():
    mask = torch.tensor([[1, 0], [1, 1]], device=DEVICE)
    (logits,), (other,) = _logits(1, 4, 5), _logits(1, 4, 5)
    with torch.no_grad():
        other[1] = torch.nan
    for kind in (torch.int64, torch.bool, torch.float32):
        results, expected = (
            outputs_and_gradients(lambda x, kind=kind: tigon.load_balancing_loss(x, 5, 2, mask.to(kind)), [x])
            for x in (other, logits)
        )
        assert torch.equal(results[0][0], expected[0][0])
        assert torch.equal(results[1][0], expected[1][0])
        assert (results[1][0][1] == 0).all()
    # Without the mask, NaN reaches the loss.
    assert tigon.load_balancing_loss(other, 5, 2).isnan()


def test_without_tokens_the_loss_is_zero():
    logits = _logits(2, 4, 5)
    loss = tigon.load_balancing_loss(logits, 5, 2, torch.zeros(1, 4, device=DEVICE))
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, logits))
    assert tigon.load_balancing_loss([x[:0] for x in logits], 5, 2) == 0
