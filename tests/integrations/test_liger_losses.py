"""The losses of `liger_kernel.chunked_loss` as modules, functions and bases, against their formulas in eager torch."""

import math

import pytest
import torch
from torch.nn import functional as F

from integrations.comparison import L, N, V, assert_same, jsd_of, log_probs, make_head
from tigon.integrations.liger import chunked, layers, loss_bases, losses

pytestmark = pytest.mark.no_interpreter("tests/ops has the tests of the ops that these modules call.")

LABELS = torch.tensor([True, False, True, True, False, False])


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
def test_losses_without_a_reference_model(name):
    cls, options, pair_loss, averages = REFERENCE_FREE[name]
    hidden, weight, bias, targets = make_head()
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


@pytest.mark.parametrize("differs", ["everywhere", "prompts", "some", "fewer", "more"])
def test_orpo_takes_other_targets_for_its_likelihood(differs):
    hidden, weight, bias, targets = make_head()
    other = torch.randint(V, (N, L), generator=torch.Generator().manual_seed(1))
    if differs == "prompts":
        other = other.where(targets == -100, targets)
    elif differs == "some":
        other[:, ::2] = targets[:, ::2]
    elif differs == "fewer":
        other[:, 3:] = -100
    elif differs == "more":
        other = targets.where(targets != -100, 7)
    loss, metrics = chunked.LigerFusedLinearORPOLoss()(weight, hidden, targets, bias, other)
    averages = log_probs(hidden, weight, bias, targets).sum(-1) / (targets != -100).sum(-1)
    odds = averages - torch.log1p(-averages.exp())
    nll = -log_probs(hidden, weight, bias, other)[:3].sum() / (other[:3] != -100).sum()
    assert_same(loss, nll - 0.1 * F.logsigmoid(odds[:3] - odds[3:]).mean(), (hidden, weight, bias))
    torch.testing.assert_close([metrics[0], metrics[4]], [averages[:3].detach(), nll.detach()])
    assert len(metrics) == 9


@pytest.mark.parametrize("loss_type", losses.DPO_TYPES)
def test_dpo_with_a_reference_model(loss_type):
    hidden, weight, bias, targets = make_head()
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


@pytest.mark.parametrize("kl", [None, torch.tensor(-0.4), torch.linspace(-1, 1, N)], ids=["", "negative", "each"])
def test_kto_takes_the_hidden_states_first(kl):
    hidden, weight, bias, targets = make_head()
    loss, metrics = chunked.LigerFusedLinearKTOLoss()(hidden, weight, targets, bias, LABELS, kl=kl)
    sums = log_probs(hidden, weight, bias, targets).sum(-1)
    margins = sums - (0 if kl is None else kl)
    expected = (1 - (0.1 * torch.where(LABELS, margins, -margins)).sigmoid()).mean()
    assert_same(loss, expected, (hidden, weight, bias))
    logits = F.linear(hidden, weight, bias).sum((1, 2))
    values = [(x * kind).sum() for x in (sums, logits, 0.1 * sums) for kind in (LABELS, ~LABELS)]
    torch.testing.assert_close(torch.stack(metrics), torch.stack(values), rtol=1e-4, atol=1e-4)


def test_distillation_of_a_head():
    hidden, weight, _, targets = make_head()
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


REF = torch.randn(N, L, 8), torch.randn(V, 8), torch.randn(V)
# The arguments after those of the head, and the module with the arguments of its forward after the head and the bias.
FUNCTIONS = {
    "cpo": (
        (-100, 0.2, 0.5, 0.1, True, False, True, 2),
        chunked.LigerFusedLinearCPOLoss(beta=0.2, alpha=0.5, label_smoothing=0.1, average_log_prob=True), (),
    ),
    "simpo": (
        (-100, 0.2, 0.5, 0.1, True, False, 0.7),
        chunked.LigerFusedLinearSimPOLoss(beta=0.2, alpha=0.5, label_smoothing=0.1, gamma=0.7), (),
    ),
    "orpo": ((-100, 0.2, False), chunked.LigerFusedLinearORPOLoss(beta=0.2, compute_nll_loss=False), ()),
    "dpo": (
        (*REF, -100, 0.2, True, False, True, True, 1, "robust", 0.1, 0.05, 0.7),
        chunked.LigerFusedLinearDPOLoss(
            beta=0.2, alpha=0.7, compute_nll_loss=True, average_log_prob=True, loss_type="robust", label_smoothing=0.1
        ),
        REF,
    ),
    "kto": (
        (*REF, torch.tensor(0.3), -100, 0.2), chunked.LigerFusedLinearKTOLoss(beta=0.2, use_ref_model=True),
        (LABELS, *REF, torch.tensor(0.3)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_arguments_of_liger_by_position(name):
    arguments, module, further = FUNCTIONS[name]
    hidden, weight, bias, targets = make_head()
    function = getattr(chunked, f"liger_fused_linear_{name}")
    labels = (LABELS,) if name == "kto" else ()
    loss, metrics = function(hidden, weight, targets, *labels, bias, *arguments)
    first = (hidden, weight) if name == "kto" else (weight, hidden)
    expected, expected_metrics = module(*first, targets, bias, *further)
    assert_same(loss, expected, (hidden, weight, bias))
    torch.testing.assert_close(metrics, expected_metrics)


@pytest.mark.parametrize("name", ["JSD", "CosineSimilarity"])
def test_functions_of_distillation(name):
    hidden, weight, bias, targets = make_head()
    arguments = hidden.flatten(0, 1), weight, REF[0].flatten(0, 1), REF[1], targets.flatten(), bias, REF[2]
    options = 0.2, 0.9, 0.3, -100, 2.0
    function = getattr(chunked, f"liger_fused_linear_{name.removesuffix('Similarity').lower()}")
    module = getattr(chunked, f"LigerFusedLinear{name}Loss")(*options)
    assert_same(function(*arguments, *options), module(*arguments), (weight, bias))


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
    x, w, b, target = make_head()
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
    x, w, b, target = make_head()
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
    x, w, b, target = make_head()
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
    x, w, b, target = make_head()
    with pytest.raises(NotImplementedError, match="preference_loss_fn must be defined by the subclass"):
        Empty.apply(x, w, target, b)
    for name, advice in (("DPO", "derive from LigerFusedLinearPreferenceBase"), ("KTO", "use tigon.linear_loss")):
        with pytest.raises(TypeError, match=f"{name}Function cannot be subclassed; {advice}"):
            type("Mine", (getattr(chunked, f"LigerFusedLinear{name}Function"),), {})


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
        (lambda: layers.LigerFusedLinearKLDivLoss(reduction="none"), "reduction must be one of batchmean"),
    ],
)  # fmt: skip
def test_bad_input_names_the_class_and_the_value(call, message):
    with pytest.raises(ValueError, match=f"^Liger.*: .*{message}"):
        call()
