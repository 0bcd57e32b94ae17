"""The functions and autograd functions of the alias for Liger, against their formulas in eager torch."""

import pytest
import torch
from torch.nn import functional as F

from tigon.integrations.liger import functional

pytestmark = pytest.mark.no_interpreter("tests/ops has the tests of the ops that these functions call.")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_mrope_takes_the_frequencies_of_three_axes():
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    angles = torch.randn(3, 2, 5, 8)
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
    # Frequency 0 and 1 belong to time, 2 to 4 to height, 5 to 7 to width.
    angle = torch.cat((angles[0, ..., :2], angles[1, ..., 2:5], angles[2, ..., 5:]), -1)[:, None]
    for ours, x in zip(functional.liger_qwen2vl_mrope(q, k, cos, sin, [2, 3, 3]), (q, k), strict=True):
        rotated = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones(()), angle)
        torch.testing.assert_close(ours, torch.cat((rotated.real, rotated.imag), -1))
    with pytest.raises(ValueError, match=r"mrope_section must be three sizes with the sum 8, got \[2, 3, 4\]"):
        functional.liger_qwen2vl_mrope(q, k, cos, sin, [2, 3, 4])


def test_multi_token_attention_mixes_causal_weights():
    scores, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(4, 2, 3, 3), torch.randn(4)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    expected = F.conv2d(weights, weight, bias, padding=1, groups=2) * causal
    ours = functional.liger_multi_token_attention(scores, weight, bias, padding=1, groups=2)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(("kernel_size", "dilation"), [(3, 1), (5, 2)])
def test_neighborhood_attention_sees_the_window(kernel_size, dilation):
    q, k, v = torch.randn(3, 2, 2, 9, 4).unbind(0)
    ours = functional.liger_fused_neighborhood_attention(q, k, v, kernel_size, dilation)
    for row in range(9):
        offsets = range(-(kernel_size // 2) * dilation, kernel_size // 2 * dilation + 1, dilation)
        columns = [row + offset for offset in offsets if 0 <= row + offset < 9]
        weights = (q[:, :, row : row + 1] @ k[:, :, columns].mT / 2).softmax(-1)
        torch.testing.assert_close(ours[:, :, row : row + 1], weights @ v[:, :, columns])
    with pytest.raises(ValueError, match="kernel_size must be odd and positive, and dilation positive, got 4 and 1"):
        functional.liger_fused_neighborhood_attention(q, k, v, 4)


def test_attention_residual_weighs_the_blocks():
    blocks, query, weight = torch.randn(3, 2, 5, 8), torch.randn(8), torch.randn(8)
    keys = blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + 1e-6) * weight
    expected = torch.einsum("nbt,nbtd->btd", torch.einsum("d,nbtd->nbt", query, keys).softmax(0), blocks)
    torch.testing.assert_close(functional.liger_attn_res(list(blocks), query, weight), expected)


def test_scaled_cross_entropy_without_a_group():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8)
    target = torch.tensor([1, -100, 3, 4, -100, 10])
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    expected = F.nll_loss(log_p, target, reduction="none")
    nll, entropy = functional.liger_fused_linear_scaled_cross_entropy_tp(
        hidden, weight, target, None, temperature=0.7, return_entropy=True
    )
    torch.testing.assert_close(nll, expected)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1) * (target != -100))
    ours, theirs = (torch.autograd.grad(x.sum(), hidden, retain_graph=True)[0] for x in (nll, expected))
    torch.testing.assert_close(ours, theirs)
