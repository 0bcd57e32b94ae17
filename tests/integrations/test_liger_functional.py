"""The functions and autograd functions of the alias for Liger, against their formulas in eager torch."""

import inspect
import os
import sys

import pytest
import torch
from torch import distributed
from torch.nn import functional as F

from ranks import LIMIT, leave, run_ranks
from tigon.integrations.liger import functional, layers, names, rare, rotary, variants

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
    for ours, x in zip(rotary.liger_qwen2vl_mrope(q, k, cos, sin, [2, 3, 3]), (q, k), strict=True):
        rotated = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones(()), angle)
        torch.testing.assert_close(ours, torch.cat((rotated.real, rotated.imag), -1))
    with pytest.raises(ValueError, match=r"mrope_section must be three sizes with the sum 8, got \[2, 3, 4\]"):
        rotary.liger_qwen2vl_mrope(q, k, cos, sin, [2, 3, 4])


def test_multi_token_attention_mixes_causal_weights():
    scores, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(4, 2, 3, 3), torch.randn(4)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    expected = F.conv2d(weights, weight, bias, padding=1, groups=2) * causal
    ours = rare.liger_multi_token_attention(scores, weight, bias, padding=1, groups=2)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(("kernel_size", "dilation"), [(3, 1), (5, 2)])
def test_neighborhood_attention_sees_the_window(kernel_size, dilation):
    q, k, v = torch.randn(3, 2, 2, 9, 4).unbind(0)
    ours = rare.liger_fused_neighborhood_attention(q, k, v, kernel_size, dilation)
    for row in range(9):
        offsets = range(-(kernel_size // 2) * dilation, kernel_size // 2 * dilation + 1, dilation)
        columns = [row + offset for offset in offsets if 0 <= row + offset < 9]
        weights = (q[:, :, row : row + 1] @ k[:, :, columns].mT / 2).softmax(-1)
        torch.testing.assert_close(ours[:, :, row : row + 1], weights @ v[:, :, columns])
    with pytest.raises(ValueError, match="kernel_size must be odd and positive, and dilation positive, got 4 and 1"):
        rare.liger_fused_neighborhood_attention(q, k, v, 4)


def test_attention_residual_weighs_the_blocks():
    blocks, query, weight = torch.randn(3, 2, 5, 8), torch.randn(8), torch.randn(8)
    keys = blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + 1e-6) * weight
    expected = torch.einsum("nbt,nbtd->btd", torch.einsum("d,nbtd->nbt", query, keys).softmax(0), blocks)
    torch.testing.assert_close(rare.liger_attn_res(list(blocks), query, weight), expected)


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


def test_scaled_cross_entropy_appends_the_log_probabilities_of_further_tokens():
    hidden, weight, target = torch.randn(6, 8), torch.randn(11, 8), torch.tensor([1, -100, 3, 4, -100, 10])
    function = variants.LigerFusedLinearScaledCrossEntropyFunction
    nll, selected = function.apply(hidden, weight, target, 0.7, -100, 1, False, torch.tensor([9, 2, 9]))
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    torch.testing.assert_close(nll, F.nll_loss(log_p, target, reduction="none"))
    torch.testing.assert_close(selected, log_p[:, [9, 2, 9]] * (target != -100)[:, None])


def test_vocab_parallel_losses_with_both_formulas_of_smoothing():
    logits, target = torch.randn(4, 2, 10, requires_grad=True), torch.randint(10, (4, 2))
    target[1, 0] = -100
    log_p = logits.log_softmax(-1)
    q = F.one_hot(target.clamp(min=0), 10)
    # "megatron" gives no share of the smoothing to the target.
    for formula, soft in (("pytorch", 0.9 * q + 0.1 / 10), ("megatron", 0.9 * q + 0.1 / 9 * (1 - q))):
        expected = -(soft * log_p).sum(-1) * (target != -100)
        module = layers.LigerVocabParallelCrossEntropy(label_smoothing=0.1, label_smoothing_formula=formula)
        ours = module(logits, target)
        torch.testing.assert_close(ours, expected)
        gradients = [torch.autograd.grad(x.square().sum(), logits, retain_graph=True)[0] for x in (ours, expected)]
        torch.testing.assert_close(*gradients)
    apply = variants.LigerVocabParallelCEFunction.apply
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(4, 2)
    torch.testing.assert_close(apply(logits, target, None, -100, 0.0, "pytorch", "global"), expected)
    with pytest.raises(ValueError, match=r"must be 3-D, \[S, B, V_p\], got \(8, 10\)"):
        apply(logits.flatten(0, 1), target.flatten(), None, -100, 0.0, "pytorch", "global")


def test_dispatched_losses_return_four_values():
    logits, target = torch.randn(6, 11), torch.randint(11, (6,))
    loss, z_loss, accuracy, predicted = variants.cross_entropy(
        logits, target, label_smoothing=0.1, return_predicted_tokens=True, impl="nvidia-triton", backend="cutile"
    )
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, label_smoothing=0.1))
    assert z_loss is None
    assert accuracy is None
    assert predicted.tolist() == logits.argmax(-1).tolist()
    hidden, weight = torch.randn(6, 8), torch.randn(11, 8)
    results = variants.fused_linear_cross_entropy(hidden, weight, target, reduction="sum")
    torch.testing.assert_close(results[0], F.cross_entropy(hidden @ weight.T, target, reduction="sum"))
    assert results[1:] == (None, None, None)
    with pytest.raises(TypeError, match="rms_norm: impl must be a string or None, got int"):
        variants.rms_norm(hidden, torch.ones(8), impl=3)


def test_dispatched_swiglu_applies_both_multipliers():
    a, b = torch.randn(2, 3, 8).unbind(0)
    torch.testing.assert_close(variants.swiglu(a, b, 0.5, 3.0), F.silu(0.5 * a) * b * 3.0)
    torch.testing.assert_close(variants.LigerSiLUMulFunction.apply(a, b), F.silu(a) * b)


def test_divergences_reduce_as_liger_does_by_default():
    log_p, q = torch.randn(3, 7).log_softmax(-1), torch.randn(3, 7).softmax(-1)
    expected = F.kl_div(log_p, q, reduction="batchmean")
    torch.testing.assert_close(variants.kl_div(log_p, q), expected)
    torch.testing.assert_close(variants.LigerKLDivLossFunction.apply(log_p, q), expected)
    expected = (log_p.exp() - q).abs().sum() / 2 / 3
    torch.testing.assert_close(variants.LigerTVDLossFunction.apply(log_p.exp(), q), expected)


def test_names_of_the_other_modules_resolve(alias):
    import liger_kernel.functional
    import liger_kernel.ops
    import liger_kernel.ops.vocab_parallel_cross_entropy as vocab_parallel
    import liger_kernel.utils

    for module in (liger_kernel.functional, liger_kernel.ops, liger_kernel.utils):
        assert all(getattr(module, name).__doc__ for name in module.__all__)
    assert set(liger_kernel.ops.__all__) == set(variants.OPS)
    assert len(liger_kernel.functional.__all__) == 12
    assert vocab_parallel.LigerVocabParallelCEFunction is liger_kernel.ops.LigerVocabParallelCEFunction
    for name, advice in names.NOT_SERVED.items():
        with pytest.raises(AttributeError, match=f"liger_kernel.ops.{name} is not served by Tigon: ") as error:
            getattr(liger_kernel.ops, name)
        assert str(error.value).endswith(advice)
    parameters = inspect.signature(liger_kernel.functional.softmax).parameters
    assert list(parameters) == ["x", "impl", "mode", "backend"]


# --- two ranks -------------------------------------------------------------------------------------


def compare_on_a_rank(rank: int) -> None:
    """Compare the tensor-parallel losses and their gradients with those of the whole vocabulary."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    target, rows = torch.tensor([1, -100, 3, 4, -100, 9]), slice(5 * rank, 5 * rank + 5)
    expected = F.nll_loss((hidden @ weight.T / 0.7).log_softmax(-1), target, reduction="none")
    expected_gradients = torch.autograd.grad(expected.square().sum(), (hidden, weight))
    shard = weight.detach()[rows].requires_grad_()
    function = variants.LigerFusedLinearScaledCrossEntropyTPFunction
    nll = function.apply(hidden, shard, target, distributed.group.WORLD, 0.7)
    gradients = torch.autograd.grad(nll.square().sum(), (hidden, shard))
    torch.testing.assert_close(nll, expected)
    torch.testing.assert_close(gradients[0], expected_gradients[0])
    torch.testing.assert_close(gradients[1], expected_gradients[1][rows])

    logits, labels = torch.randn(4, 2, 10, requires_grad=True), torch.randint(10, (4, 2))
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="none")
    columns = logits.detach()[..., rows].requires_grad_()
    losses = layers.LigerVocabParallelCrossEntropy(label_smoothing=0.1)(columns, labels, distributed.group.WORLD)
    torch.testing.assert_close(losses, expected.view(4, 2))
    (gradient,) = torch.autograd.grad(losses.square().sum(), columns)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), logits)[0][..., rows])
    with pytest.raises(ValueError, match="'partition' gives each of the 2 ranks another loss"):
        variants.LigerVocabParallelCEFunction.apply(
            columns, labels, distributed.group.WORLD, -100, 0.1, "megatron", "partition"
        )


def test_sharded_losses_on_two_ranks():
    for output in run_ranks(__file__):
        assert "equal" in output, output


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    store = distributed.FileStore(sys.argv[1], 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    compare_on_a_rank(rank)
    print("equal")
    leave()
