"""The functions, autograd functions and losses of the alias for Liger, against their formulas in eager torch."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import tigon
from integrations.comparison import assert_same, jsd_of
from tigon.integrations.liger import functional, layers, names, variants

pytestmark = pytest.mark.no_interpreter("tests/ops has the tests of the ops that these functions call.")

HALF = [torch.bfloat16, torch.float16]
V = 11


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


X, Y, ROW, P, Q = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8), *torch.randn(2, 4, 8).softmax(-1)
TOKENS, WEIGHT = torch.tensor([1, 2, -100, 0]), torch.randn(11, 8)
RMS = X / (X.square().mean(-1, keepdim=True) + 1e-6).sqrt()
BLOCKS = torch.randn(3, 2, 5, 8)
KEYS = BLOCKS * torch.rsqrt(BLOCKS.square().mean(-1, keepdim=True) + 1e-6) * ROW
# The arguments of each function, and the expected result.
FUNCTIONS = {
    "liger_attn_res": (
        (list(BLOCKS), Y[0], ROW), torch.einsum("nbt,nbtd->btd", (KEYS @ Y[0]).softmax(0), BLOCKS),
    ),
    "liger_cross_entropy": ((X, TOKENS), F.cross_entropy(X, TOKENS)),
    "liger_fused_linear_cross_entropy": ((X, WEIGHT, TOKENS), F.cross_entropy(X @ WEIGHT.T, TOKENS)),
    "liger_fused_linear_jsd": ((X, WEIGHT, Y, WEIGHT), jsd_of(X @ WEIGHT.T, Y @ WEIGHT.T, 0.5).mean()),
    "liger_fused_linear_kl_div": (
        (X, WEIGHT[:8], P), F.kl_div((X @ WEIGHT[:8].T).log_softmax(-1), P, reduction="batchmean"),
    ),
    "liger_jsd": ((P.log(), Q.log()), jsd_of(P.log(), Q.log(), 0.5).mean()),
    "liger_kl_div": ((P.log(), Q), F.kl_div(P.log(), Q, reduction="sum") / 32),
    "liger_tvd": ((P, Q), 0.5 * (P - Q).abs().mean()),
    "liger_swiglu": ((X, Y), F.silu(X) * Y),
    "liger_geglu": ((X, Y), F.gelu(X, approximate="tanh") * Y),
    "liger_relu_squared": ((X,), X.relu().square()),
    "liger_softmax": ((X,), X.softmax(-1)),
    "liger_sparsemax": (
        (torch.tensor([[2.0, 1.5, -1.0], [0.1, 0.1, 0.1]]),), torch.tensor([[0.75, 0.25, 0.0], [1 / 3, 1 / 3, 1 / 3]]),
    ),
    "liger_dyt": ((X, torch.tensor(0.5), ROW, Y[0]), ROW * (0.5 * X).tanh() + Y[0]),
    "liger_rms_norm": ((X, ROW, 1e-6, 1.0), RMS * (1 + ROW)),
    "liger_modulated_rms_norm": ((X, ROW, Y[0], Y[1]), RMS * ROW * (1 + Y[0]) + Y[1]),
    "liger_poly_norm": (
        (X, ROW[:3], ROW[3]),
        sum(ROW[3 - k] * X**k / ((X**k).square().mean(-1, keepdim=True) + 1e-6).sqrt() for k in (1, 2, 3)) + ROW[3],
    ),
    "liger_layer_norm": ((X, ROW, Y[0], 1e-5), F.layer_norm(X, (8,), ROW, Y[0])),
    "liger_group_norm": ((X[..., None], ROW, Y[0], 8, 2, 1e-5), F.group_norm(X[..., None], 2, ROW, Y[0])),
}  # fmt: skip
# The functions that tests below compare.
FURTHER = {
    "liger_fused_add_rms_norm", "liger_fused_linear_scaled_cross_entropy_tp", "liger_fused_neighborhood_attention",
    "liger_mhc_apply", "liger_mhc_coeffs", "liger_mhc_forward", "liger_mhc_post_res", "liger_mhc_pre",
    "liger_multi_token_attention", "liger_qwen2vl_mrope", "liger_rope",
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_arguments_of_liger(name):
    table = names.MODULES["liger_kernel.transformers.functional"]
    arguments, expected = FUNCTIONS[name]
    torch.testing.assert_close(table[name](*arguments), expected)
    assert {*FUNCTIONS, *FURTHER} == {served for served in table if served.startswith("liger_")}


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_a_cross_entropy_has_the_dtype_of_the_logits(dtype):
    logits, target = torch.randn(6, 9).to(dtype).requires_grad_(), torch.randint(9, (6,))
    for reduction in ("mean", "sum", "none"):
        expected = F.cross_entropy(logits, target, reduction=reduction)
        module = layers.LigerCrossEntropyLoss(reduction=reduction, lse_square_scale=1e-3, return_z_loss=True)
        output = module(logits, target)
        assert output.loss.dtype == output.z_loss.dtype == dtype
        losses = [
            layers.LigerCrossEntropyLoss(reduction=reduction)(logits, target),
            functional.liger_cross_entropy(logits, target, reduction=reduction),
            variants.cross_entropy(logits, target, reduction=reduction)[0],
            variants.LigerCrossEntropyFunction.apply(logits, target, None, -100, 0.0, 0.0, reduction)[0],
        ]
        for loss in losses:
            torch.testing.assert_close(loss, expected)
            assert torch.autograd.grad(loss.sum(), logits)[0].dtype == dtype
        # Tigon's own function is as exact as fp32 can be.
        assert tigon.cross_entropy(logits, target, reduction=reduction).dtype == torch.float32


def test_the_loss_of_a_head_takes_the_weight_first_and_stays_in_fp32():
    hidden, weight, target = torch.randn(6, 8), torch.randn(V, 8), torch.randint(V, (6,))
    expected = F.cross_entropy(hidden @ weight.T, target)
    torch.testing.assert_close(layers.LigerFusedLinearCrossEntropyLoss()(weight, hidden, target), expected)
    module = layers.LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-2, return_z_loss=True)
    output = module(weight, hidden, target)
    z_loss = 1e-2 * (hidden @ weight.T).logsumexp(-1).square().mean()
    torch.testing.assert_close([output.z_loss, output.loss], [z_loss, expected + z_loss])
    output = module(weight.bfloat16(), hidden.bfloat16(), target)
    assert (output.loss.dtype, output.z_loss.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("target", "ignore_index"), [(9, -100), (-1, 3)])
def test_a_target_that_is_no_class_raises(target, ignore_index):
    loss = layers.LigerCrossEntropyLoss(ignore_index=ignore_index, reduction="none")
    assert loss(torch.randn(2, 9), torch.tensor([1, ignore_index]))[1] == 0
    message = f"target {target} is out of bounds; it must be {ignore_index} or in "
    with pytest.raises(AssertionError, match=message):
        loss(torch.randn(2, 9), torch.tensor([1, target]))


def test_scaled_cross_entropies():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(V, 8)
    target = torch.tensor([1, -100, 3, 4, -100, 10])
    log_p, keep = (hidden @ weight.T / 0.7).log_softmax(-1), target != -100
    expected = F.nll_loss(log_p, target, reduction="none")
    nll, entropy = functional.liger_fused_linear_scaled_cross_entropy_tp(
        hidden, weight, target, None, temperature=0.7, return_entropy=True
    )
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1) * keep)
    assert_same(nll, expected, (hidden,))
    function = variants.LigerFusedLinearScaledCrossEntropyFunction
    nll, selected = function.apply(hidden, weight, target, 0.7, -100, 1, False, torch.tensor([9, 2, 9]))
    torch.testing.assert_close([nll, selected], [expected, log_p[:, [9, 2, 9]] * keep[:, None]])


def test_vocab_parallel_losses_with_both_formulas_of_smoothing():
    logits, target = torch.randn(4, 2, 10, requires_grad=True), torch.randint(10, (4, 2))
    target[1, 0] = -100
    log_p = logits.log_softmax(-1)
    q = F.one_hot(target.clamp(min=0), 10)
    # "megatron" gives no share of the smoothing to the target.
    for cls, soft in (("VocabParallel", 0.9 * q + 0.1 / 10), ("Megatron", 0.9 * q + 0.1 / 9 * (1 - q))):
        expected = -(soft * log_p).sum(-1) * (target != -100)
        assert_same(
            getattr(layers, f"Liger{cls}CrossEntropy")(label_smoothing=0.1)(logits, target), expected, (logits,)
        )
    apply = variants.LigerVocabParallelCEFunction.apply
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(4, 2)
    torch.testing.assert_close(apply(logits, target, None, -100, 0.0, "pytorch", "global"), expected)
    with pytest.raises(ValueError, match=r"must be 3-D, \[S, B, V_p\], got \(8, 10\)"):
        apply(logits.flatten(0, 1), target.flatten(), None, -100, 0.0, "pytorch", "global")
    for option, value in (("reduction", "mean"), ("label_smoothing", 1.0), ("label_smoothing_mode", "both")):
        with pytest.raises(ValueError, match=f"LigerVocabParallelCrossEntropy: {option} must be .* got {value!r}"):
            layers.LigerVocabParallelCrossEntropy(**{option: value})


def test_losses_over_a_group_shard_the_vocabulary(monkeypatch):
    """tests/ops compares the sharded ops on ranks. Here is what they get."""
    group, calls = SimpleNamespace(size=lambda: 2), []
    for owner, op in ((functional, "linear_log_probs"), (functional.logits_loss, "cross_entropy")):
        monkeypatch.setattr(owner, op, lambda *tensors, **options: calls.append(options) or torch.zeros(()))
    hidden, shard, target = torch.randn(6, 8), torch.randn(5, 8), torch.randint(10, (6,))
    variants.LigerFusedLinearScaledCrossEntropyTPFunction.apply(hidden, shard, target, group, 0.7)
    columns, labels = torch.randn(4, 2, 5), torch.randint(10, (4, 2))
    layers.LigerVocabParallelCrossEntropy(label_smoothing=0.1)(columns, labels, group)
    layers.LigerMegatronCrossEntropy(label_smoothing=0.1, label_smoothing_mode="global")(columns, labels, group)
    assert [call["process_group"] for call in calls] == [group] * 3
    assert [call["vocab_size"] for call in calls] == [10] * 3
    assert [call.get("label_smoothing") for call in calls] == [None, 0.1, pytest.approx(0.1 * 10 / 9)]
    with pytest.raises(ValueError, match="'partition' gives each of the 2 ranks another loss"):
        variants.LigerVocabParallelCEFunction.apply(columns, labels, group, -100, 0.1, "megatron", "partition")


def test_dispatched_functions():
    logits, target = torch.randn(6, V), torch.randint(V, (6,))
    loss, z_loss, accuracy, predicted = variants.cross_entropy(
        logits, target, label_smoothing=0.1, return_predicted_tokens=True, impl="nvidia-triton", backend="cutile"
    )
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, label_smoothing=0.1))
    assert (z_loss, accuracy) == (None, None)
    assert predicted.tolist() == logits.argmax(-1).tolist()
    hidden, weight = torch.randn(6, 8), torch.randn(V, 8)
    results = variants.fused_linear_cross_entropy(hidden, weight, target, reduction="sum")
    torch.testing.assert_close(results[0], F.cross_entropy(hidden @ weight.T, target, reduction="sum"))
    assert results[1:] == (None, None, None)
    with pytest.raises(TypeError, match="rms_norm: impl must be a string or None, got int"):
        variants.rms_norm(hidden, torch.ones(8), impl=3)
    torch.testing.assert_close(variants.swiglu(X, Y, 0.5, 3.0), F.silu(0.5 * X) * Y * 3.0)
    torch.testing.assert_close(variants.LigerSiLUMulFunction.apply(X, Y), F.silu(X) * Y)
    torch.testing.assert_close(variants.LigerFusedGateUpSiLUMulFunction.apply(torch.cat((X, Y), -1)), F.silu(X) * Y)
    torch.testing.assert_close(variants.LigerEmbeddingFunction.apply(WEIGHT, target), WEIGHT[target])
    # These reduce otherwise than the functions of `liger_kernel.transformers.functional`.
    expected = F.kl_div(P.log(), Q, reduction="batchmean")
    for function in (variants.kl_div, variants.LigerKLDivLossFunction.apply):
        torch.testing.assert_close(function(P.log(), Q), expected)
    torch.testing.assert_close(variants.LigerTVDLossFunction.apply(P, Q), (P - Q).abs().sum() / 2 / 4)


LABELS = torch.tensor([1, -100, 3, 4, -100, 2])


@pytest.mark.parametrize("labels", [None, LABELS], ids=["", "labels"])
def test_divergences_of_distributions(labels):
    student, teacher = torch.randn(6, V, requires_grad=True), torch.randn(6, V)
    keep = torch.ones(6) if labels is None else (labels != -100).float()
    loss = layers.LigerJSD(beta=0.3)(student.log_softmax(-1), teacher.log_softmax(-1), labels)
    assert_same(loss, (jsd_of(student, teacher, 0.3) * keep).sum() / keep.sum(), (student,))
    loss = layers.LigerTVDLoss()(student.softmax(-1), teacher.softmax(-1), labels)
    distances = 0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    assert_same(loss, (distances * keep).sum() / keep.sum(), (student,))
    if labels is not None:
        both = layers.LigerFusedCETVDLoss()(student, teacher, labels)
        terms = F.cross_entropy(student, labels, reduction="none"), distances * keep
        assert_same(torch.stack(both), torch.stack(terms), (student,))


@pytest.mark.parametrize("label", [-1, V, 2**31])
def test_a_label_outside_of_the_vocabulary_makes_the_losses_of_its_token_nan(label):
    student, teacher, labels = torch.randn(6, V, requires_grad=True), torch.randn(6, V), LABELS.clone()
    expected, distances = layers.LigerFusedCETVDLoss()(student, teacher, labels)
    labels[1] = label
    losses, others = layers.LigerFusedCETVDLoss()(student, teacher, labels)
    assert losses.isnan().nonzero().tolist() == [[1]]
    assert torch.equal(losses.where(labels != label, 0), expected.where(labels != label, 0))
    assert torch.equal(others.where(labels != label, 0), distances.where(labels != label, 0))
    assert torch.autograd.grad(losses.sum(), student)[0].isnan().any(-1).nonzero().tolist() == [[1]]


@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean"])
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_kl_divergences(reduction):
    hidden, weight, target = torch.randn(6, 8, requires_grad=True), torch.randn(V, 8), torch.randn(6, V).softmax(-1)
    student = (F.linear(hidden, weight) / 2).log_softmax(-1)
    expected = F.kl_div(student, target, reduction=reduction)
    assert_same(layers.LigerKLDIVLoss(reduction=reduction)(student, target), expected, (hidden,))
    fused = layers.LigerFusedLinearKLDivLoss(reduction=reduction, temperature=2.0)(hidden, weight, target)
    assert_same(fused, expected, (hidden,))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_dtypes_of_divergences_are_those_of_liger(dtype):
    q, p = (torch.randn(6, V).log_softmax(-1).to(dtype).requires_grad_() for _ in range(2))
    loss = layers.LigerJSD()(q, p.detach())
    assert loss.dtype == dtype
    assert layers.LigerKLDIVLoss()(q, p.detach().exp()).dtype == torch.float32
    assert layers.LigerTVDLoss()(q.exp(), p.detach().exp()).dtype == torch.float32
    assert torch.autograd.grad(loss, q)[0].dtype == dtype
