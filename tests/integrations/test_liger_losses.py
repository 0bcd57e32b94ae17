"""The losses, divergences and rare modules of the alias for Liger, against their formulas in eager torch."""

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tigon.integrations.liger import chunked, functional, layers, losses, mlps, names, rare, rotary

pytestmark = pytest.mark.no_interpreter("tests/ops has the tests of the ops that these modules call.")

N, L, H, V = 6, 5, 16, 37
LABELS = torch.tensor([1, -100, 3, 4, -100, 2])


@pytest.fixture
def head() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, a head, its bias, and targets with tokens that are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=generator) for s in ((N, L, H), (V, H), (V,)))
    targets = torch.randint(V, (N, L), generator=generator)
    targets[0, :2], targets[4, 3:] = -100, -100
    return hidden.requires_grad_(), (weight * 0.3).requires_grad_(), (bias * 0.1).requires_grad_(), targets


def log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias).log_softmax(-1)
    return logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)


def assert_same(ours: Tensor, expected: Tensor, leaves: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, expected)
    gradients = (torch.autograd.grad(x, leaves, retain_graph=True) for x in (ours, expected))
    for gradient, other in zip(*gradients, strict=True):
        # A sum over tokens rounds as its largest terms do.
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6 * max(1.0, float(other.abs().max())))


# --- preferences -----------------------------------------------------------------------------------

SMOOTHED = lambda margin, epsilon: -(1 - epsilon) * F.logsigmoid(margin) - epsilon * F.logsigmoid(-margin)
# The class, its options, the loss of pairs of log-probabilities, and whether these are averages.
REFERENCE_FREE = {
    "CPO": (
        chunked.LigerFusedLinearCPOLoss, {"label_smoothing": 0.1}, lambda c, r: SMOOTHED(0.1 * (c - r), 0.1), False,
    ),
    "CPO of averages": (
        chunked.LigerFusedLinearCPOLoss, {"average_log_prob": True, "alpha": 0.5},
        lambda c, r: SMOOTHED(0.1 * (c - r), 0.0), True,
    ),
    "SimPO": (
        chunked.LigerFusedLinearSimPOLoss, {"gamma": 0.7}, lambda c, r: SMOOTHED(0.1 * (c - r) - 0.7, 0.0), True,
    ),
    "ORPO": (
        chunked.LigerFusedLinearORPOLoss, {},
        lambda c, r: -0.1 * F.logsigmoid(c - r - torch.log1p(-c.exp()) + torch.log1p(-r.exp())), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCE_FREE)
def test_losses_without_a_reference_model(name, head):
    cls, options, pair_loss, averages = REFERENCE_FREE[name]
    hidden, weight, bias, targets = head
    loss, (chosen, rejected, chosen_logits, rejected_logits, nll, *rewards) = cls(**options)(
        weight, hidden, targets, bias
    )
    tokens, mask = log_probs(hidden, weight, bias, targets), targets != -100
    sums = tokens.sum(-1) / (mask.sum(-1) if averages else 1)
    expected_nll = -tokens[: N // 2].sum() / mask[: N // 2].sum()
    expected = pair_loss(sums[: N // 2], sums[N // 2 :]).mean() + options.get("alpha", 1.0) * expected_nll
    assert_same(loss, expected, (hidden, weight, bias))
    logits = F.linear(hidden, weight, bias)
    torch.testing.assert_close(torch.cat([chosen, rejected]), sums)
    torch.testing.assert_close(torch.stack([chosen_logits, rejected_logits]), logits.view(2, -1).mean(-1))
    torch.testing.assert_close(nll, expected_nll)
    torch.testing.assert_close(rewards[0], 0.1 * sums[: N // 2])


def test_the_targets_of_the_likelihood_of_orpo_may_have_more_tokens(head):
    hidden, weight, bias, targets = head
    other = targets.where(targets != -100, 7)
    _, metrics = chunked.LigerFusedLinearORPOLoss()(weight, hidden, targets, bias, other)
    torch.testing.assert_close(metrics[4], -log_probs(hidden, weight, bias, other)[: N // 2].mean())
    assert len(metrics) == 9


@pytest.mark.parametrize("loss_type", losses.DPO_TYPES)
def test_dpo_with_a_reference_model(loss_type, head):
    hidden, weight, bias, targets = head
    ref_hidden, ref_weight = torch.randn(N, L, 8), torch.randn(V, 8)
    epsilon = 0.1 if loss_type in ("exo_pair", "robust") else 0.0
    module = chunked.LigerFusedLinearDPOLoss(loss_type=loss_type, label_smoothing=epsilon)
    loss, metrics = module(weight, hidden, targets, bias, ref_hidden, ref_weight)
    ratios = (log_probs(hidden, weight, bias, targets) - log_probs(ref_hidden, ref_weight, None, targets)).sum(-1)
    chosen, rejected = 0.1 * ratios.view(2, -1)
    margin = chosen - rejected
    expected = {
        "sigmoid": lambda: -F.logsigmoid(margin),
        "hinge": lambda: (1 - margin).relu(),
        "exo_pair": lambda: sum(
            F.sigmoid(x) * (F.logsigmoid(x) - math.log(p)) for x, p in ((margin, 0.9), (-margin, 0.1))
        ),
        "nca_pair": lambda: -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)),
        "robust": lambda: (-0.9 * F.logsigmoid(margin) + 0.1 * F.logsigmoid(-margin)) / 0.8,
        "bco_pair": lambda: -F.logsigmoid(chosen) - F.logsigmoid(-rejected),
        "sppo_hard": lambda: (10 * chosen - 5) ** 2 + (10 * rejected + 5) ** 2,
        "apo_zero": lambda: 1 - chosen.sigmoid() + rejected.sigmoid(),
        "apo_down": lambda: chosen.sigmoid() + 1 - margin.sigmoid(),
        "discopop": lambda: (
            -F.logsigmoid(margin) * (1 - (20 * margin).sigmoid()) + (-margin).exp() * (20 * margin).sigmoid()
        ),
    }[loss_type]()
    assert_same(loss, expected.mean(), (hidden, weight, bias))
    torch.testing.assert_close(torch.cat(metrics[-2:]), torch.cat([chosen, rejected]))


def test_kto_takes_the_hidden_states_first(head):
    hidden, weight, bias, targets = head
    labels, kl = torch.tensor([True, False, True, True, False, False]), torch.tensor(0.3)
    loss, metrics = chunked.LigerFusedLinearKTOLoss()(hidden, weight, targets, bias, labels, kl=kl)
    sums = log_probs(hidden, weight, bias, targets).sum(-1)
    expected = 1 - torch.sigmoid(0.1 * torch.where(labels, sums - kl, kl - sums))
    assert_same(loss, expected.mean(), (hidden, weight, bias))
    logits = F.linear(hidden, weight, bias).sum((1, 2))
    values = [(x * kind).sum() for x in (sums, logits, 0.1 * sums) for kind in (labels, ~labels)]
    torch.testing.assert_close(torch.stack(metrics), torch.stack(values), rtol=1e-4, atol=1e-4)


# --- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_grpo_with_clipped_ratios(loss_type, head):
    hidden, weight, bias, targets = head
    mask, tokens = (targets != -100).float(), targets.clamp(min=0)
    policy_log_probs = log_probs(hidden, weight, bias, targets)
    old, ref = (policy_log_probs.detach() + 0.3 * torch.randn(N, L) for _ in range(2))
    advantages = torch.randn(N)
    module = chunked.LigerFusedLinearGRPOLoss(loss_type=loss_type, max_completion_length=9)
    loss, (kl, clipped) = module(hidden, weight, tokens, mask, advantages, bias, ref, old)
    ratio = (policy_log_probs - old).exp()
    terms = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    difference = ref - policy_log_probs
    terms = (terms + 0.04 * (difference.exp() - difference - 1)) * mask
    expected = {
        "grpo": (terms.sum(-1) / mask.sum(-1)).mean(),
        "bnpo": terms.sum() / mask.sum(),
        "dr_grpo": terms.sum() / (N * 9),
        "dapo": terms.sum() / mask.sum(),
    }[loss_type]
    assert_same(loss, expected, (hidden, weight, bias))
    torch.testing.assert_close(kl, ((difference.exp() - difference - 1) * mask).sum() / mask.sum())
    is_clipped = ((ratio > 1.2) & (advantages[:, None] > 0)) | ((ratio < 0.8) & (advantages[:, None] < 0))
    torch.testing.assert_close(clipped, (is_clipped * mask).sum() / mask.sum())


def test_cispo_weights_the_log_probabilities_by_limited_ratios(head):
    hidden, weight, bias, targets = head
    mask = (targets != -100).float()
    policy_log_probs, advantages = log_probs(hidden, weight, bias, targets), torch.randn(N)
    old = policy_log_probs.detach() + 0.3 * torch.randn(N, L)
    module = chunked.LigerFusedLinearGRPOLoss(loss_type="cispo", beta=0.0, epsilon_high=1.1)
    loss, metrics = module(hidden, weight, targets.clamp(min=0), mask, advantages, bias, None, old)
    ratio = (policy_log_probs - old).exp().clamp(max=1.1).detach()
    expected = (-ratio * advantages[:, None] * policy_log_probs * mask).sum() / mask.sum()
    assert_same(loss, expected, (hidden, weight, bias))
    assert len(metrics) == 1


# --- divergences -----------------------------------------------------------------------------------


def jsd_of(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row of logits."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    mixture = ((1 - beta) * q + beta * p).log()
    kl = lambda x: (x * (x.log() - mixture)).sum(-1)
    return beta * kl(p) + (1 - beta) * kl(q)


@pytest.mark.parametrize("labels", [None, LABELS], ids=["", "labels"])
def test_divergences_of_distributions(labels):
    student, teacher = torch.randn(6, 11, requires_grad=True), torch.randn(6, 11)
    keep = torch.ones(6) if labels is None else (labels != -100).float()
    loss = layers.LigerJSD(beta=0.3)(student.log_softmax(-1), teacher.log_softmax(-1), labels)
    assert_same(loss, (jsd_of(student, teacher, 0.3) * keep).sum() / keep.sum(), (student,))
    loss = layers.LigerTVDLoss()(student.softmax(-1), teacher.softmax(-1), labels)
    distances = 0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    assert_same(loss, (distances * keep).sum() / keep.sum(), (student,))
    if labels is not None:
        both = layers.LigerFusedCETVDLoss()(student, teacher, labels)
        terms = F.cross_entropy(student, labels, reduction="none"), distances * keep
        assert_same(torch.stack(both).sum(), torch.stack(terms).sum(), (student,))


@pytest.mark.parametrize("label", [-1, 11, 2**31])
def test_a_label_outside_of_the_vocabulary_makes_the_losses_of_its_token_nan(label):
    student, teacher, labels = torch.randn(6, 11, requires_grad=True), torch.randn(6, 11), LABELS.clone()
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
    hidden, weight, target = torch.randn(6, H, requires_grad=True), torch.randn(V, H), torch.randn(6, V).softmax(-1)
    student = (F.linear(hidden, weight) / 2).log_softmax(-1)
    expected = F.kl_div(student, target, reduction=reduction)
    assert_same(layers.LigerKLDIVLoss(reduction=reduction)(student, target), expected, (hidden,))
    fused = layers.LigerFusedLinearKLDivLoss(reduction=reduction, temperature=2.0)(hidden, weight, target)
    assert_same(fused, expected, (hidden,))


def test_distillation_of_a_head(head):
    hidden, weight, _, targets = head
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    teacher_hidden, teacher_weight = torch.randn(N * L, 8), torch.randn(V, 8)
    student, teacher = F.linear(hidden, weight), F.linear(teacher_hidden, teacher_weight)
    keep = (targets != -100).float()
    soft = (jsd_of(student / 2, teacher / 2, 0.3) * keep).sum() / keep.sum()
    fused = layers.LigerFusedLinearJSD(jsd_beta=0.3, temperature=2.0)
    assert_same(fused(hidden, weight, teacher_hidden, teacher_weight, targets), soft, (weight,))
    module = chunked.LigerFusedLinearJSDLoss(0.2, 0.9, beta=0.3, temperature=2.0, return_soft_hard_loss=True)
    loss, soft_loss, hard_loss = module(hidden, weight, teacher_hidden, teacher_weight, targets)
    hard = F.cross_entropy(student, targets)
    assert_same(loss, 0.2 * hard + 0.9 * soft, (weight,))
    torch.testing.assert_close(torch.stack([soft_loss, hard_loss]), torch.stack([soft, hard]))
    angles = ((1 - F.cosine_similarity(student, teacher)) * keep).sum() / keep.sum()
    loss = chunked.LigerFusedLinearCosineSimilarityLoss()(hidden, weight, teacher_hidden, teacher_weight, targets)
    assert_same(loss, 0.5 * hard + 0.25 * angles, (weight,))


# --- rare modules ----------------------------------------------------------------------------------


def test_norms():
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    normalised = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    modulated = layers.LigerModulatedRMSNorm(8)
    modulated.weight.data = weight
    scale, shift = torch.randn(2, 8), torch.randn(2, 8)
    expected = normalised * weight * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(modulated(x, scale, shift), expected)
    with pytest.raises(ValueError, match=r"scale must have a divisor of the rows of x, got \(5, 8\)"):
        modulated(x, torch.randn(5, 8))
    polynomial = rare.LigerPolyNorm()
    powers = [x**k / ((x**k).square().mean(-1, keepdim=True) + 1e-6).sqrt() for k in (3, 2, 1)]
    torch.testing.assert_close(polynomial(x), sum(powers) / 3 + 1)
    torch.testing.assert_close(layers.LigerRMSNormForMuseGlimmer(8, with_scale=False)(x), normalised)
    torch.testing.assert_close(layers.LigerRMSNormForMuseGlimmerTextCentered(8)(x), normalised)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dim", [0, 1])
def test_sparsemax_of_a_row_without_a_nearest_point_is_nan(value, dim):
    x = torch.tensor([[1.0, 0.5, -1.0], [0.0, value, 0.0]])
    y = layers.LigerSparsemax(dim)(x if dim else x.T)
    assert (y if dim else y.T).isnan().any(-1).tolist() == [False, True]


def test_sparsemax_is_the_nearest_point_of_the_simplex():
    x = torch.tensor([[2.0, 1.5, -1.0], [0.1, 0.1, 0.1]])
    torch.testing.assert_close(layers.LigerSparsemax()(x), torch.tensor([[0.75, 0.25, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


@pytest.mark.parametrize("sparse", [False, True])
def test_multi_token_attention_mixes_earlier_weights(sparse):
    module = rare.LigerMultiTokenAttention(2, 2, 3, padding=1, sparse=sparse)
    scores = torch.randn(1, 2, 6, 6)
    later = torch.ones(6, 6).triu(1).bool()
    masked = scores.masked_fill(later, -torch.inf)
    weights = layers.LigerSparsemax()(masked.clamp(min=-1e9)) if sparse else masked.softmax(-1)
    expected = F.conv2d(weights, module.weight, module.bias, padding=1).masked_fill(later, 0.0)
    torch.testing.assert_close(module(scores), expected)


@pytest.mark.parametrize(
    "rotate",
    [rotary.liger_llama4_text_rotary_pos_emb, rotary.liger_llama4_vision_rotary_pos_emb],
    ids=["text", "vision"],
)
def test_rope_of_llama4_multiplies_adjacent_pairs(rotate):
    q, k, angles = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(5, 4)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    for x, y in zip((q, k), rotate(q, k, torch.polar(torch.ones(5, 4), angles)), strict=True):
        even, odd = x[..., ::2], x[..., 1::2]
        torch.testing.assert_close(y[..., ::2], even * cos - odd * sin)
        torch.testing.assert_close(y[..., 1::2], even * sin + odd * cos)


@pytest.mark.parametrize(
    ("cls", "activation"), [(mlps.LigerTiledSwiGLUMLP, "silu"), (mlps.LigerTiledGEGLUMLP, "gelu_pytorch_tanh")]
)
def test_tiles_compute_the_whole_mlp(cls, activation):
    config = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act=activation)
    mlp, x = cls(config, num_shards=3), torch.randn(2, 20, 8, requires_grad=True)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert_same(mlp(x).square().mean(), mlp.down_proj(act * up).square().mean(), (x, mlp.gate_proj.weight))


# --- functions -------------------------------------------------------------------------------------

X, Y, ROW, P, Q = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8), *torch.randn(2, 4, 8).softmax(-1)
TOKENS, WEIGHT = torch.tensor([1, 2, -100, 0]), torch.randn(11, 8)
RMS = X / (X.square().mean(-1, keepdim=True) + 1e-6).sqrt()
# The arguments of each function, and the expected result.
FUNCTIONS = {
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
    "liger_sparsemax": ((torch.tensor([2.0, 1.5, -1.0]),), torch.tensor([0.75, 0.25, 0.0])),
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


def resolve(name: str) -> Any:
    module, _, member = names.MODULES["liger_kernel.transformers.functional"][name].partition(":")
    return getattr(importlib.import_module(module), member)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_arguments_of_liger(name):
    arguments, expected = FUNCTIONS[name]
    torch.testing.assert_close(resolve(name)(*arguments), expected)


def test_the_functions_that_return_two_tensors():
    normalised, total = functional.liger_fused_add_rms_norm(X, Y, ROW, 1e-6)
    torch.testing.assert_close(total, X + Y)
    torch.testing.assert_close(normalised, functional.liger_rms_norm(X + Y, ROW, 1e-6))
    q, angles = torch.randn(1, 2, 4, 8), torch.cat((X[None, :, :4], X[None, :, :4]), -1)
    cos, sin = angles.cos(), angles.sin()
    rotated = q * cos[:, None] + torch.cat([-q[..., 4:], q[..., :4]], -1) * sin[:, None]
    for result in rotary.liger_rope(q, q, cos, sin):
        torch.testing.assert_close(result, rotated)
    # test_liger_functional.py has five more, and test_liger_hyper_connections.py the five of hyper-connections.
    functions = [name for name in names.MODULES["liger_kernel.transformers.functional"] if name.startswith("liger_")]
    assert len(FUNCTIONS) + 2 + 5 + 5 == len(functions)


# --- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chunked.LigerFusedLinearDPOLoss(loss_type="ipo"), "it must be one of sigmoid.*got 'ipo'"),
        (lambda: chunked.LigerFusedLinearDPOLoss(loss_type="exo_pair"), "label_smoothing must be > 0"),
        (lambda: chunked.LigerFusedLinearCPOLoss()(torch.ones(3, 2), torch.ones(3, 1, 2), torch.ones(3, 1).long()),
         "number of sequences must be even, got 3"),
        (lambda: chunked.LigerFusedLinearDPOLoss()(torch.ones(3, 2), torch.ones(2, 1, 2), torch.ones(2, 1).long()),
         "use_ref_model=True needs ref_input"),
        (lambda: chunked.LigerFusedLinearJSDLoss(temperature=0), "temperature must not be 0"),
        (lambda: chunked.LigerFusedLinearGRPOLoss(loss_type="dr_grpo"), "dr_grpo needs max_completion_length"),
        (lambda: chunked.LigerFusedLinearGRPOLoss(loss_type="ppo"), "loss_type must be one of grpo.*got 'ppo'"),
        (lambda: chunked.LigerFusedLinearGRPOLoss(delta=0.0), "delta must be above 0, got 0.0"),
        (lambda: layers.LigerFusedLinearKLDivLoss(reduction="none"), "reduction must be one of batchmean"),
    ],
)  # fmt: skip
def test_bad_input_names_the_class_and_the_value(call, message):
    with pytest.raises(ValueError, match=f"^Liger.*: .*{message}"):
        call()
