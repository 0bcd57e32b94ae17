"""Losses of policies that `test_trl` does not compare: PPO, GSPO, the ratios of sampling engines, and edge cases."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from losses.cases import Tokens, tokens
from tigon import losses

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")

NAN = float("nan")
# The arguments of the formulas. The ratios of the sequences of these tests lie on both sides of all bounds.
LOW, HIGH, DELTA = 0.1, 0.25, 1.4


def _average(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def _tokens(x: Tokens, per_token: bool = True) -> list[list[SimpleNamespace]]:
    """Return the tokens of each sequence that count, with what the formulas need."""
    names = ("policy", "old", "reference", "sampling")
    values = {name: x.log_probs(name) for name in names} | {"entropy": x.normal("entropy").abs()}
    values["advantage"] = (
        x.normal("advantages") if per_token else x.per_sequence("advantages")[:, None].expand(x.mask.shape)
    )
    rows = []
    for i in range(len(x.mask)):
        columns = x.mask[i].nonzero()[:, 0].tolist()
        rows.append([SimpleNamespace(**{k: v[i, j].item() for k, v in values.items()}) for j in columns])
    return rows


def _clipped(ratio: float, advantage: float, delta: float = math.inf) -> float:
    return -min(min(ratio, delta) * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)


def _arguments(x: Tokens, per_token: bool) -> tuple:
    advantages = x.normal("advantages") if per_token else x.per_sequence("advantages")
    return x.log_probs(), advantages, x.mask, x.log_probs("old")


def test_gspo_is_grpo_with_ratios_of_sequences():
    x = tokens(5, 8, torch.float64, empty=(2,))
    options = {"epsilon": LOW, "epsilon_high": HIGH}
    loss, metrics = losses.grpo_loss(*_arguments(x, False), loss_type="gspo", **options)
    grpo = losses.grpo_loss(
        *_arguments(x, False), loss_type="grpo", importance_sampling_level="sequence", **options
    )  # fmt: skip
    torch.testing.assert_close((loss, metrics), grpo, equal_nan=True)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
@pytest.mark.parametrize("count", [0, 40, 40.0, torch.tensor(40), torch.tensor(0.0)], ids=str)
def test_num_items_in_batch_is_the_divisor(loss_type, count):
    x = tokens(5, 8, torch.float64)
    call = lambda **options: losses.grpo_loss(
        *_arguments(x, True), loss_type=loss_type, epsilon_high=HIGH, **options
    )[0]  # fmt: skip
    torch.testing.assert_close(call(num_items_in_batch=count) * max(float(count), 1.0), call() * x.mask.sum())


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_estimators(estimator, value):
    log_probs = torch.tensor([-1.0], dtype=torch.float64)
    assert losses.kl_estimate(log_probs, log_probs - 0.5, estimator).item() == pytest.approx(value)
    # Without a ratio, the mean over all tokens is added to the loss.
    options = {"loss_type": "bnpo", "beta": 0.7, "kl_estimator": estimator, "use_bias_correction_kl": False}
    tokens_of = log_probs[None], torch.zeros(1), torch.ones(1, 1, dtype=torch.bool), None, log_probs[None] - 0.5
    assert losses.grpo_loss(*tokens_of, **options)[0].item() == pytest.approx(0.7 * value)


def test_the_entropy_gets_a_gradient_from_the_bonus():
    x = tokens(5, 8, torch.float64, empty=(2,))
    entropy = x.normal("entropy").abs().clone().requires_grad_()
    for loss in (losses.grpo_loss, losses.ppo_loss, losses.rloo_loss):
        value, _ = loss(x.log_probs(), x.per_sequence("advantages"), x.mask, entropy=entropy, entropy_coef=0.3)
        (grad,) = torch.autograd.grad(value, entropy)
        torch.testing.assert_close(grad, -0.3 * x.mask.double() / x.mask.sum())


@pytest.mark.parametrize("shape", [(3, 5), (7, 300)], ids=str)
@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.37, 0.5, 1.0])
def test_entropy_threshold_is_a_quantile(quantile, shape):
    for dtype in (torch.float32, torch.float64):
        x = tokens(*shape, dtype)
        entropy = x.normal("entropy")
        expected = torch.quantile(entropy[x.mask], 1 - quantile)
        torch.testing.assert_close(losses.entropy_threshold(entropy, x.mask, quantile), expected)
    assert losses.entropy_threshold(entropy, torch.zeros_like(x.mask), quantile) == math.inf


def test_an_unknown_sampling_probability_counts_as_no_drift():
    log_probs = torch.tensor([[-3.0, -3.0]])
    mask, advantages = log_probs < 0, torch.tensor([-1.0])
    for sampling, keeps in (([-1.0, -1.0], False), ([NAN, -2.5], True), ([NAN, NAN], True)):
        result = losses.off_policy_mask(log_probs, torch.tensor([sampling]), advantages, mask, 0.3)
        assert result.tolist() == [keeps]
        loss, _ = losses.grpo_loss(
            log_probs, advantages, mask, sampling_log_probs=torch.tensor([sampling]), off_policy_mask_threshold=0.3
        )
        assert loss.item() == pytest.approx(1.0 if keeps else 0.0)


def test_an_advantage_of_zero_keeps_a_sequence():
    log_probs = torch.full((3, 1), -3.0)
    advantages = torch.tensor([0.0, -1e-6, 1.0])
    result = losses.off_policy_mask(log_probs, log_probs + 2, advantages, log_probs < 0, 0.3)
    assert result.tolist() == [True, False, True]


def test_vespo_limits_the_logarithms_of_ratios():
    log_probs = torch.tensor([[-1.0, -1.0], [-90.0, -90.0]])
    old = torch.tensor([[-90.0, -90.0], [-1.0, -1.0]])
    loss, metrics = losses.grpo_loss(log_probs, torch.ones(2), log_probs < 0, old, loss_type="vespo")
    assert loss.item() == pytest.approx(0.0, abs=1e-9)
    smallest = math.exp(3.0) * 1e-8**2
    assert metrics["vespo/phi_seq_mean"].item() == pytest.approx(smallest / 2, rel=1e-4, abs=0)


@pytest.mark.parametrize("bounds", [(None, 1.5), (0.7, 1.4), (1.2, None)], ids=str)
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_sampling_ratio(mode, bounds):
    x = tokens(5, 8, torch.float64, empty=(2,))
    low, high = bounds[0] or 0.0, bounds[1] or math.inf
    rows = _tokens(x)

    def bounded(ratio: float) -> float:
        if mode.endswith("truncate"):
            return min(max(ratio, low), high)
        return ratio if low <= ratio <= high else 0.0

    by_token = [[math.exp(t.policy - t.sampling) for t in row] for row in rows]
    ratio, metrics = losses.importance_sampling_ratio(
        x.log_probs(), x.log_probs("sampling"), x.mask, mode=mode, clip_min=bounds[0], clip_max=bounds[1]
    )
    if mode.startswith("sequence"):
        expected = [bounded(math.prod(row)) for row in by_token]
        assert ratio.tolist() == pytest.approx(expected)
    else:
        expected = [bounded(value) for value in itertools.chain(*by_token)]
        assert ratio[x.mask].tolist() == pytest.approx(expected)
        assert (ratio[~x.mask] == 1).all()
    drift = [abs(t.policy - t.sampling) for t in itertools.chain(*rows)]
    assert metrics["sampling/sampling_logp_difference/mean"].item() == pytest.approx(_average(drift))
    assert metrics["sampling/sampling_logp_difference/max"].item() == pytest.approx(max(drift))
    assert metrics["sampling/importance_sampling_ratio/min"].item() == pytest.approx(min(expected))
    assert metrics["sampling/importance_sampling_ratio/mean"].item() == pytest.approx(_average(expected))
    assert metrics["sampling/importance_sampling_ratio/max"].item() == pytest.approx(max(expected))


def test_an_unknown_sampling_probability_has_the_ratio_one():
    log_probs = torch.tensor([[-3.0, -2.0]], requires_grad=True)
    sampling = torch.tensor([[NAN, -2.5]])
    for mode, expected in (("token_mask", [1.0, math.exp(0.5)]), ("sequence_mask", [math.exp(0.5)])):
        ratio, metrics = losses.importance_sampling_ratio(log_probs, sampling, log_probs < 0, mode=mode)
        assert ratio.flatten().tolist() == pytest.approx(expected)
        assert not ratio.requires_grad
        # The metrics of the differences leave out unknown ones.
        assert metrics["sampling/sampling_logp_difference/mean"].item() == pytest.approx(0.5)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_importance_sampling_ratio_without_tokens(shape):
    empty = torch.zeros(shape)
    ratio, metrics = losses.importance_sampling_ratio(empty, empty, empty < 0)
    assert ratio.tolist() == [1.0] * shape[0]
    assert metrics["sampling/sampling_logp_difference/max"] == 0


@pytest.mark.parametrize("per_token", [False, True])
def test_ppo(per_token):
    x = tokens(5, 8, torch.float64, empty=(2,))
    rows = list(itertools.chain(*_tokens(x, per_token)))
    ratios = [math.exp(t.policy - t.old) for t in rows]
    expected = _average([_clipped(r, t.advantage, DELTA) for r, t in zip(ratios, rows, strict=True)])
    loss, metrics = losses.ppo_loss(*_arguments(x, per_token), epsilon=LOW, epsilon_high=HIGH, delta=DELTA)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert metrics["kl"].item() == pytest.approx(_average([(t.policy - t.old) ** 2 / 2 for t in rows]))


def test_a_ratio_that_counts_as_delta_is_not_clipped_above_delta():
    log_probs = torch.tensor([[-1.0, -1.0, -1.0]])
    old = log_probs - torch.tensor([[1.05, 1.15, 2.0]]).log()
    for delta, share in ((None, 2 / 3), (1.1, 0.0), (1.12, 2 / 3), (3.0, 2 / 3)):
        _, metrics = losses.grpo_loss(
            log_probs, torch.ones(1), log_probs < 0, old, epsilon=0.5, epsilon_high=0.11, delta=delta
        )
        assert metrics["clip_ratio/high_mean"].item() == pytest.approx(share)


def test_extrema_of_no_tokens_are_nan():
    x = tokens(2, 3, empty=(0, 1))
    loss, metrics = losses.grpo_loss(*_arguments(x, False))
    assert loss == 0
    assert metrics["clip_ratio/low_min"].isnan()
    assert metrics["clip_ratio/high_max"].isnan()
    assert metrics["clip_ratio/low_mean"] == 0


@pytest.mark.parametrize("clips", [True, False])
def test_ppo_value_loss(clips):
    x = tokens(5, 8, torch.float64, empty=(2,))
    values, returns, old = x.normal("values"), x.normal("returns"), x.normal("old values")
    errors, is_clipped = [], []
    for v, r, o in zip(*(y[x.mask].tolist() for y in (values, returns, old)), strict=True):
        limited = min(max(v, o - 0.2), o + 0.2) if clips else v
        errors.append(max((v - r) ** 2, (limited - r) ** 2) / 2)
        is_clipped.append(float((limited - r) ** 2 > (v - r) ** 2))
    loss, metrics = losses.ppo_value_loss(values, returns, x.mask, old if clips else None)
    assert loss.item() == pytest.approx(_average(errors), rel=1e-10)
    assert ("value_clip_ratio" in metrics) == clips
    if clips:
        assert metrics["value_clip_ratio"].item() == pytest.approx(_average(is_clipped))
