"""GRPO and its variants in the alias for Liger, against their formulas in eager torch."""

import pytest
import torch

from integrations.comparison import L, N, V, assert_same, log_probs, make_head
from tigon.integrations.liger import chunked, policy

pytestmark = pytest.mark.no_interpreter("tests/ops has the tests of the ops that these modules call.")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_grpo_with_clipped_ratios(loss_type):
    hidden, weight, bias, targets = make_head()
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


def test_cispo_weights_the_log_probabilities_by_limited_ratios():
    hidden, weight, bias, targets = make_head()
    mask = (targets != -100).float()
    policy_log_probs, advantages = log_probs(hidden, weight, bias, targets), torch.randn(N)
    old = policy_log_probs.detach() + 0.3 * torch.randn(N, L)
    module = chunked.LigerFusedLinearGRPOLoss(loss_type="cispo", beta=0.0, epsilon_high=1.1)
    loss, metrics = module(hidden, weight, targets.clamp(min=0), mask, advantages, bias, None, old)
    ratio = (policy_log_probs - old).exp().clamp(max=1.1).detach()
    expected = (-ratio * advantages[:, None] * policy_log_probs * mask).sum() / mask.sum()
    assert_same(loss, expected, (hidden, weight, bias))
    assert len(metrics) == 1


def test_the_function_takes_arguments_by_position_and_a_reference_model():
    hidden, weight, bias, targets = make_head()
    mask, tokens, advantages = torch.ones(N, L), targets.clamp(min=0), torch.randn(N)
    mask[1, 3:] = 0
    old, reference = -torch.rand(N, L), (torch.randn(N, L, 8), torch.randn(V, 8), torch.randn(V))
    arguments = hidden, weight, tokens, mask, advantages, bias
    options = 0.1, 0.3, 0.4, "bnpo", None, "sequence", 1.0, 1.05, 2.0
    loss, _ = chunked.liger_fused_linear_grpo(*arguments, None, old, *reference, *options)
    module = chunked.LigerFusedLinearGRPOLoss(
        beta=0.1, epsilon_low=0.3, epsilon_high=0.4, loss_type="bnpo", importance_sampling_level="sequence",
        temperature=2.0,
    )  # fmt: skip
    ref_hidden, ref_weight, ref_bias = reference
    ref = log_probs(ref_hidden / 2, ref_weight, ref_bias / 2, tokens)
    assert_same(loss, module(*arguments, ref, old)[0], (hidden, weight, bias))
    with pytest.warns(UserWarning, match="ref_input is ignored"):
        module(*arguments, ref, old, ref_hidden, ref_weight)
    with pytest.raises(ValueError, match="use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight"):
        module(*arguments)


def test_options_of_other_types_are_ignored():
    hidden, weight, _, targets = make_head()
    arguments = hidden, weight, targets.clamp(min=0), torch.ones(N, L), torch.randn(N)
    losses = [
        chunked.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="bnpo", **options)(*arguments)[0]
        for options in ({}, {"sapo_temperature_neg": False, "vespo_k_pos": -1.0, "temperature": True})
    ]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be above 0"),
        ({"loss_type": "dr_grpo"}, "dr_grpo needs max_completion_length"),
        ({"loss_type": "ppo"}, "loss_type must be one of grpo.*got 'ppo'"),
        ({"delta": 0.0}, "delta must be above 0, got 0.0"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be token or sequence, got 'word'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^LigerFusedLinearGRPOLoss: .*{message}"):
        chunked.LigerFusedLinearGRPOLoss(**options)


def test_the_level_of_a_sequence_is_refused_for_types_without_clipping():
    hidden, weight, _, targets = make_head()
    module = chunked.LigerFusedLinearGRPOLoss(loss_type="cispo", importance_sampling_level="sequence", beta=0.0)
    with pytest.raises(ValueError, match="Sequence-level importance sampling is not supported for loss_type 'cispo'"):
        module(hidden, weight, targets.clamp(min=0), torch.ones(N, L), torch.randn(N))


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
    assert_same(tokens, terms, (logits,))
    torch.testing.assert_close([divergences_of_tokens, clipped], [kl * mask, is_clipped.float()])
    loss, metrics = policy.triton_grpo_loss(*arguments, **options, reduce=True)
    expected = terms.sum() / mask.sum() if loss_type == "dapo" else (terms.sum(-1) / mask.sum(-1)).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics, [(kl * mask).sum() / mask.sum(), is_clipped.sum() / mask.sum()])
    selected = policy.fused_selective_log_softmax(logits, torch.cat((ids[:, :2], ids), 1), 0.9, torch.ones(N, L + 2))
    torch.testing.assert_close(selected, values.detach())


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, L)])
def test_vespo_multiplies_the_ratio_of_a_sequence_once(shape):
    logits, ids = torch.randn(N, L + 1, V), torch.randint(V, (N, L))
    mask, advantages, log_ratio = torch.ones(N, L), torch.randn(N), 0.1 * torch.randn(N, L)
    mask[1, 3:], mask[2, 0] = 0, 0
    ratio = torch.rand(*shape) + 0.5
    values = logits[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    total = (log_ratio * mask).sum(-1)
    total = total + ((ratio.log() * mask).sum(-1) if shape == (N, L) else ratio.view(N).log())
    k, rate = torch.where(advantages >= 0, 2.0, 3.0), torch.where(advantages >= 0, 3.0, 2.0)
    weights = (rate + k * total - rate * total.exp()).exp()
    tokens, _, _ = policy.triton_grpo_loss(
        logits, values - log_ratio, None, ids, advantages, mask, 1.0, 0.0, loss_type="vespo", vllm_is_ratio=ratio
    )
    torch.testing.assert_close(tokens, -(weights * advantages)[:, None] * values * mask)


@pytest.mark.parametrize("loss_type", policy.LOSS_TYPES)
def test_the_losses_of_tokens_reduce_to_the_loss_of_the_batch(loss_type):
    logits, ids, mask = torch.randn(N, L + 1, V), torch.randint(V, (N, L)), torch.ones(N, L, dtype=torch.long)
    mask[1, 3:], mask[2, 1:] = 0, 0
    arguments = logits, -torch.rand(N, L), -torch.rand(N, L), ids, torch.randn(N), mask
    tokens = policy.triton_grpo_loss(*arguments, loss_type=loss_type)[0]
    loss = policy.triton_grpo_loss(*arguments, loss_type=loss_type, reduce=True)[0]
    expected = {
        "grpo": (tokens.sum(-1) / mask.sum(-1)).mean(), "sapo": (tokens.sum(-1) / mask.sum(-1)).mean(),
        "luspo": tokens.sum(-1).mean(), "dr_grpo": tokens.sum() / (N * L),
    }.get(loss_type, tokens.sum() / mask.sum())  # fmt: skip
    torch.testing.assert_close(loss, expected)


def test_a_divergence_needs_a_reference_and_ratios_fit():
    arguments = torch.randn(N, L + 1, V), None, None, torch.randint(V, (N, L)), torch.randn(N)
    with pytest.raises(ValueError, match=r"triton_grpo_loss: ref_logp must be a tensor if beta is 0\.04, got None"):
        policy.triton_grpo_loss(*arguments)
    with pytest.raises(ValueError, match=r"vllm_is_ratio must have shape \(6,\), \(6, 1\) or \(6, 5\), got \(3,\)"):
        policy.triton_grpo_loss(*arguments, beta=0.0, vllm_is_ratio=torch.ones(3))
