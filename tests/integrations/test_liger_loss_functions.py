"""The functions and base classes of `liger_kernel.chunked_loss`: arguments by position, and losses of subclasses."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tigon.integrations.liger import chunked, layers, loss_bases, policy

pytestmark = pytest.mark.no_interpreter("tests/ops has the tests of the ops that these functions call.")

N, L, H, V = 6, 5, 16, 37


def head() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(*s, generator=generator) for name, s in {"x": (N, L, H), "w": (V, H), "b": (V,)}.items()
    }
    tensors["target"] = torch.randint(V, (N, L), generator=generator)
    tensors["target"][0, :2], tensors["target"][4, 3:] = -100, -100
    return {name: x.requires_grad_(x.is_floating_point()) for name, x in tensors.items()}


def log_probs(x: Tensor, w: Tensor, b: Tensor | None, target: Tensor) -> Tensor:
    return F.linear(x, w, b).log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target != -100)


def assert_same(ours: Any, expected: Any, leaves: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, expected)
    for gradient, other in zip(*(torch.autograd.grad(x, leaves) for x in (ours, expected)), strict=True):
        # A sum over tokens rounds as its largest terms do.
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6 * max(1.0, float(other.abs().max())))


# --- functions -------------------------------------------------------------------------------------

LABELS = torch.tensor([True, False, True, True, False, False])
REF = torch.randn(N, L, 8), torch.randn(V, 8), torch.randn(V)
FUNCTIONS = {
    "cpo": (
        lambda x, w, b, target: (x, w, target, b, -100, 0.2, 0.5, 0.1, True, False, True, 2),
        chunked.LigerFusedLinearCPOLoss(beta=0.2, alpha=0.5, label_smoothing=0.1, average_log_prob=True),
        "w x target b",
    ),
    "simpo": (
        lambda x, w, b, target: (x, w, target, b, -100, 0.2, 0.5, 0.1, True, False, 0.7),
        chunked.LigerFusedLinearSimPOLoss(beta=0.2, alpha=0.5, label_smoothing=0.1, gamma=0.7), "w x target b",
    ),
    "orpo": (
        lambda x, w, b, target: (x, w, target, b, -100, 0.2, False), chunked.LigerFusedLinearORPOLoss(
            beta=0.2, compute_nll_loss=False
        ), "w x target b",
    ),
    "dpo": (
        lambda x, w, b, target: (
            x, w, target, b, *REF, -100, 0.2, True, False, True, True, 1, "robust", 0.1, 0.05, 0.7,
        ), chunked.LigerFusedLinearDPOLoss(
            beta=0.2, alpha=0.7, compute_nll_loss=True, average_log_prob=True, loss_type="robust", label_smoothing=0.1
        ), "w x target b REF",
    ),
    "kto": (
        lambda x, w, b, target: (x, w, target, LABELS, b, *REF, torch.tensor(0.3), -100, 0.2),
        chunked.LigerFusedLinearKTOLoss(beta=0.2, use_ref_model=True), "x w target b LABELS REF KL",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_arguments_of_liger_by_position(name):
    arguments, module, order = FUNCTIONS[name]
    values = head()
    more = {"LABELS": (LABELS,), "REF": REF, "KL": (torch.tensor(0.3),)}
    loss, metrics = getattr(chunked, f"liger_fused_linear_{name}")(*arguments(**values))
    expected = [part for word in order.split() for part in more.get(word, (values.get(word),))]
    expected_loss, expected_metrics = module(*expected)
    assert_same(loss, expected_loss, (values["x"], values["w"], values["b"]))
    torch.testing.assert_close(metrics, expected_metrics)


def test_the_function_of_grpo():
    values, mask = head(), torch.ones(N, L)
    mask[1, 3:] = 0
    tokens, advantages = values["target"].clamp(min=0), torch.randn(N)
    old, ref = -torch.rand(2, N, L)
    arguments = values["x"], values["w"], tokens, mask, advantages, values["b"], ref, old
    options = 0.1, 0.3, 0.4, "bnpo", None, "sequence", 1.0, 1.05, 2.0
    loss, _ = chunked.liger_fused_linear_grpo(*arguments, None, None, None, *options)
    module = chunked.LigerFusedLinearGRPOLoss(
        beta=0.1, epsilon_low=0.3, epsilon_high=0.4, loss_type="bnpo", importance_sampling_level="sequence",
        temperature=2.0,
    )  # fmt: skip
    assert_same(loss, module(*arguments)[0], (values["x"], values["w"], values["b"]))


@pytest.mark.parametrize("name", ["jsd", "cosine"])
def test_functions_of_distillation(name):
    values = head()
    x, target = values["x"].flatten(0, 1), values["target"].flatten()
    arguments = x, values["w"], REF[0].flatten(0, 1), REF[1], target, values["b"], REF[2]
    function = getattr(chunked, f"liger_fused_linear_{name}")
    classes = chunked.LigerFusedLinearJSDLoss, chunked.LigerFusedLinearCosineSimilarityLoss
    module = classes[name == "cosine"](0.2, 0.9, 0.3, -100, 2.0)
    loss = function(*arguments, 0.2, 0.9, 0.3, -100, 2.0)
    assert_same(loss, module(*arguments), (values["w"], values["b"]))


# --- subclasses of the bases -------------------------------------------------------------------------


class Margin(loss_bases.LigerFusedLinearPreferenceBase):
    @staticmethod
    def preference_loss_fn(
        chosen, rejected, full_target, ref_chosen_logps=None, ref_rejected_logps=None, beta=0.1, margin=0.0
    ):
        margins = beta * (chosen - rejected) - margin
        if ref_chosen_logps is not None:
            margins = margins - beta * (ref_chosen_logps - ref_rejected_logps)
        return (1 - margins).relu().sum() / (len(full_target) // 2), margins, margins.mean()

    @classmethod
    def forward(
        cls, ctx, _input, weight, target, bias, chunk_size, margin, ref_input=None, ref_weight=None, ref_bias=None
    ):
        return super().forward(
            cls=cls, ctx=ctx, _input=_input, weight=weight, target=target, bias=bias, chunk_size=chunk_size, beta=0.3,
            alpha=0.5, average_log_prob=False, margin=margin, use_ref_model=ref_input is not None, ref_input=ref_input,
            ref_weight=ref_weight, ref_bias=ref_bias, compiled=False,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, *grad_output):
        return *loss_bases.LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], *[None] * 5


@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("reference", [False, True])
def test_a_preference_loss_of_a_subclass(chunk_size, reference):
    x, w, b, target = head().values()
    ref = REF if reference else ()
    loss, (chosen, *_, nll, margins, means) = Margin.apply(x, w, target, b, chunk_size, 0.2, *ref)
    sums = log_probs(x, w, b, target).sum(-1)
    expected_margins = sums[:3] - sums[3:]
    if reference:
        sums_of_reference = log_probs(*REF, target).sum(-1)
        expected_margins = expected_margins - (sums_of_reference[:3] - sums_of_reference[3:])
    expected_margins = 0.3 * expected_margins - 0.2
    expected_nll = -log_probs(x, w, b, target)[:3].sum() / (target[:3] != -100).sum()
    torch.testing.assert_close(margins, expected_margins.detach())
    torch.testing.assert_close([chosen, nll], [sums[:3].detach(), expected_nll.detach()])
    # Values without dimensions are summed over Liger's chunks: three of one pair, or one of all.
    chunks = 3 if chunk_size == 1 else 1
    torch.testing.assert_close(means, expected_margins.detach().mean() * chunks)
    assert_same(2 * loss, 2 * ((1 - expected_margins).relu().mean() + 0.5 * expected_nll), (x, w, b))


class Squares(loss_bases.LigerFusedLinearUnpairedPreferenceBase):
    @staticmethod
    def preference_loss_fn(log_probs, labels, full_target, ref_log_prob_chunk=None):
        signed = torch.where(labels, log_probs, -log_probs)
        return signed.square().sum() / len(full_target), signed.sum()

    @classmethod
    def forward(cls, ctx, _input, weight, target, preference_labels, bias=None):
        return super().forward(cls=cls, ctx=ctx, _input=_input, weight=weight, target=target,
                               preference_labels=preference_labels, bias=bias, average_log_prob=True)  # fmt: skip


def test_a_loss_of_labelled_sequences_of_a_subclass():
    x, w, b, target = head().values()
    loss, (*_, total) = Squares.apply(x, w, target, LABELS, b)
    averages = log_probs(x, w, b, target).sum(-1) / (target != -100).sum(-1)
    torch.testing.assert_close(total, torch.where(LABELS, averages, -averages).sum().detach())
    assert_same(loss, averages.square().mean(), (x, w, b))


class Weighted(loss_bases.LigerFusedLinearPPOBase):
    @staticmethod
    def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, epsilon_low, **_):
        losses = -advantages[:, None] * per_token_logps * attention_mask
        return losses.sum() / full_attention_mask.sum(), [epsilon_low * attention_mask.sum()]

    @classmethod
    def forward(cls, ctx, _input, weight, tokens, mask, advantages, bias=None):
        return super().forward(cls=cls, ctx=ctx, _input=_input, weight=weight, selected_token_ids=tokens,
                               attention_mask=mask, advantages=advantages, bias=bias, temperature=2.0)  # fmt: skip


def test_a_loss_of_policies_of_a_subclass():
    x, w, b, target = head().values()
    mask, tokens, advantages = (target != -100).float(), target.clamp(min=0), torch.randn(N)
    loss, (metric,) = Weighted.apply(x, w, tokens, mask, advantages, b)
    values = (F.linear(x, w, b) / 2).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert_same(loss, -(advantages[:, None] * values * mask).sum() / mask.sum(), (x, w, b))
    torch.testing.assert_close(metric, 0.2 * mask.sum())


class SquaredError(loss_bases.LigerFusedLinearDistillationBase):
    @staticmethod
    def distillation_loss_fn(student, teacher, target=None, ignore_index=None, beta=1.0):
        errors = (student - teacher).square().sum(-1)
        return beta * errors.masked_fill(target == ignore_index, 0.0).sum()

    @classmethod
    def forward(cls, ctx, x, w, teacher, teacher_weight, target, bias=None):
        return super().forward(cls=cls, ctx=ctx, student_input=x, student_weight=w, teacher_input=teacher,
                               teacher_weight=teacher_weight, target=target, student_bias=bias, beta=0.3,
                               weight_hard_loss=0.2, weight_soft_loss=0.9, chunk_size=7, temperature=2.0)  # fmt: skip


@pytest.mark.parametrize("padding", [0, 3])
def test_a_loss_of_distillation_of_a_subclass(padding):
    x, w, b, target = head().values()
    x, target, teacher = x.detach().flatten(0, 1).requires_grad_(), target.flatten(), REF[0].flatten(0, 1)
    teacher_weight = torch.randn(V + padding, 8)
    loss = SquaredError.apply(x, w, teacher, teacher_weight, target, b)
    student, keep = F.linear(x, w, b), (target != -100).float()
    errors = (F.pad(student, (0, padding)) / 2 - F.linear(teacher, teacher_weight) / 2).square().sum(-1)
    expected = 0.2 * F.cross_entropy(student, target) + 0.9 * 0.3 * (errors * keep).sum() / keep.sum()
    assert_same(loss, expected, (x, w, b))


class Empty(loss_bases.LigerFusedLinearPreferenceBase):
    @classmethod
    def forward(cls, ctx, *args):
        return super().forward(cls, ctx, *args)


def test_a_base_needs_a_loss_and_a_function_refuses_another():
    x, w, b, target = head().values()
    with pytest.raises(NotImplementedError, match="preference_loss_fn must be defined by the subclass"):
        Empty.apply(x, w, target, b)
    with pytest.raises(TypeError, match="DPOFunction cannot be subclassed; derive from LigerFusedLinearPreferenceBase"):
        type("Mine", (chunked.LigerFusedLinearDPOFunction,), {})


# --- values that differ by argument ------------------------------------------------------------------


@pytest.mark.parametrize("differs", ["everywhere", "prompts", "some", "fewer"])
def test_orpo_takes_other_targets_for_its_likelihood(differs):
    x, w, b, target = head().values()
    other = torch.randint(V, (N, L), generator=torch.Generator().manual_seed(1))
    if differs == "prompts":
        other = other.where(target == -100, target)
    elif differs == "some":
        other[:, ::2] = target[:, ::2]
    elif differs == "fewer":
        other[:, 3:] = -100
    loss, metrics = chunked.LigerFusedLinearORPOLoss()(w, x, target, b, other)
    averages = log_probs(x, w, b, target).sum(-1) / (target != -100).sum(-1)
    odds = averages - torch.log1p(-averages.exp())
    nll = -log_probs(x, w, b, other)[:3].sum() / (other[:3] != -100).sum()
    assert_same(loss, nll - 0.1 * F.logsigmoid(odds[:3] - odds[3:]).mean(), (x, w, b))
    torch.testing.assert_close([metrics[0], metrics[4]], [averages[:3].detach(), nll.detach()])


@pytest.mark.parametrize("kl", [torch.tensor(-0.4), torch.linspace(-1, 1, N)], ids=["negative", "of each sequence"])
def test_kto_subtracts_the_divergence_as_it_is(kl):
    x, w, b, target = head().values()
    loss, _ = chunked.LigerFusedLinearKTOLoss()(x, w, target, b, LABELS, kl=kl)
    margins = log_probs(x, w, b, target).sum(-1) - kl
    assert_same(loss, (1 - (0.1 * torch.where(LABELS, margins, -margins)).sigmoid()).mean(), (x, w, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtypes_of_divergences_are_those_of_liger(dtype):
    q, p = (torch.randn(6, V).log_softmax(-1).to(dtype).requires_grad_() for _ in range(2))
    loss = layers.LigerJSD()(q, p.detach())
    assert loss.dtype == dtype
    assert layers.LigerKLDIVLoss()(q, p.detach().exp()).dtype == torch.float32
    assert layers.LigerTVDLoss()(q.exp(), p.detach().exp()).dtype == torch.float32
    assert torch.autograd.grad(loss, q)[0].dtype == dtype


# --- the losses of logits ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_grpo_of_logits(loss_type, level):
    logits, ids = torch.randn(N, L + 1, V, requires_grad=True), torch.randint(V, (N, L))
    mask, advantages = torch.ones(N, L, dtype=torch.long), torch.randn(N)
    mask[1, 3:] = 0
    values = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    old, ref = (values.detach() + 0.3 * torch.randn(N, L) for _ in range(2))
    log_ratio = values - old
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1))[:, None].expand(N, L)
    ratio, a = log_ratio.exp(), advantages[:, None]
    kl = (ref - values).exp() - (ref - values) - 1
    terms = (-torch.min(ratio * a, ratio.clamp(0.8, 1.4) * a) + 0.04 * kl) * mask
    is_clipped = (((ratio < 0.8) & (a < 0)) | ((ratio > 1.4) & (a > 0))) * mask
    arguments = logits, old, ref, ids, advantages, mask
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    tokens, divergences_of_tokens, clipped = policy.triton_grpo_loss(*arguments, **options)
    weights = torch.randn(N, L)
    assert_same((tokens * weights).sum(), (terms * weights).sum(), (logits,))
    torch.testing.assert_close(divergences_of_tokens, kl * mask)
    torch.testing.assert_close(clipped, is_clipped.float())
    loss, metrics = policy.triton_grpo_loss(*arguments, **options, reduce=True)
    expected = terms.sum() / mask.sum() if loss_type == "dapo" else (terms.sum(-1) / mask.sum(-1)).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics, [(kl * mask).sum() / mask.sum(), is_clipped.sum() / mask.sum()])
    selected = policy.fused_selective_log_softmax(logits, torch.cat((ids[:, :2], ids), 1), 0.9, torch.ones(N, L + 2))
    torch.testing.assert_close(selected, values.detach())


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, L)])
def test_vespo_multiplies_the_ratio_of_a_sequence_once(shape):
    mask, advantages, log_ratio = torch.ones(N, L), torch.randn(N), 0.1 * torch.randn(N, L)
    mask[1, 3:], mask[2, 0] = 0, 0
    ratio = torch.rand(*shape) + 0.5
    total = (log_ratio * mask).sum(-1)
    total = total + ((ratio.log() * mask).sum(-1) if shape == (N, L) else ratio.view(N).log())
    k, rate = torch.where(advantages >= 0, 2.0, 3.0), torch.where(advantages >= 0, 3.0, 2.0)
    expected = (rate + k * total - rate * total.exp()).exp()[:, None]
    torch.testing.assert_close(policy.get_gamma_weights(advantages, log_ratio, mask, ratio), expected)


@pytest.mark.parametrize("loss_type", policy.LOSS_TYPES)
def test_the_losses_of_tokens_reduce_to_the_loss_of_the_batch(loss_type):
    logits, ids, mask = torch.randn(N, L + 1, V), torch.randint(V, (N, L)), torch.ones(N, L, dtype=torch.long)
    mask[1, 3:], mask[2] = 0, 0
    arguments = logits, -torch.rand(N, L), -torch.rand(N, L), ids, torch.randn(N), mask
    tokens = policy.triton_grpo_loss(*arguments, loss_type=loss_type)[0]
    loss = policy.triton_grpo_loss(*arguments, loss_type=loss_type, reduce=True)[0]
    torch.testing.assert_close(policy.reduce_grpo_loss(tokens, mask, loss_type, None), loss)


def test_options_of_other_types_are_ignored():
    values, mask, advantages = head(), torch.ones(N, L), torch.randn(N)
    tokens = values["target"].clamp(min=0)
    arguments = values["x"], values["w"], tokens, mask, advantages
    losses_of = [
        chunked.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="bnpo", **options)(*arguments)[0]
        for options in ({}, {"sapo_temperature_neg": False, "vespo_k_pos": -1.0, "temperature": True})
    ]
    torch.testing.assert_close(*losses_of)
    with pytest.raises(ValueError, match="sapo_temperature_neg must be above 0"):
        chunked.LigerFusedLinearGRPOLoss(loss_type="sapo", sapo_temperature_neg=0.0)
