"""The losses of policies are the formulas of their papers, computed here in Python's floats, token by token."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from losses.cases import Tokens, tokens
from tigon import losses
from tigon.losses.policy import GRPO_LOSSES

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")

NAN = float("nan")
# The arguments of the formulas. The ratios of the sequences of these tests lie on both sides of all bounds.
LOW, HIGH, DELTA = 0.1, 0.25, 1.4
GAMMA = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 0.8, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.2}
CONSTANT = 13


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


def _sapo(ratio: float, advantage: float) -> float:
    temperature = 1.2 if advantage > 0 else 0.8
    return -4 / temperature / (1 + math.exp(-temperature * (ratio - 1))) * advantage


def _vespo(weight: float, advantage: float) -> float:
    sign = "pos" if advantage >= 0 else "neg"
    k, decay = GAMMA[f"vespo_k_{sign}"], GAMMA[f"vespo_lambda_{sign}"]
    return -math.exp(decay) * weight**k * math.exp(-decay * weight) * advantage


def _losses(rows: list[list[SimpleNamespace]], loss_type: str, level: str) -> list[list[float]]:
    """Return the losses of the tokens."""
    result = []
    for row in rows:
        ratios = [math.exp(t.policy - t.old) for t in row]
        product = math.prod(ratios)
        if level == "sequence" and row:
            ratios = [product ** (1 / len(row))] * len(row)
        formula: dict[str, Callable[[float, SimpleNamespace], float]] = {
            "cispo": lambda ratio, t: -min(ratio, HIGH + 1) * t.advantage * t.policy,
            "sapo": lambda ratio, t: _sapo(ratio, t.advantage),
            "vespo": lambda ratio, t, product=product: _vespo(product, t.advantage) * t.policy,
            "dr_grpo": lambda ratio, t: _clipped(ratio, t.advantage, DELTA),
        }
        loss = formula.get(loss_type, lambda ratio, t: _clipped(ratio, t.advantage))
        result.append([loss(ratio, t) for ratio, t in zip(ratios, row, strict=True)])
    return result


def _batch(values: list[list[float]], loss_type: str, count: float | None = None) -> float:
    """Return the loss of the batch."""
    total = sum(map(sum, values))
    items = sum(map(len, values))
    if loss_type in ("grpo", "sapo", "gspo"):
        return _average([_average(row) for row in values])
    if loss_type == "luspo":
        return total / len(values)
    if loss_type == "dr_grpo":
        return total / (len(values) * CONSTANT)
    return total / (items if count is None else count)


def _options(loss_type: str) -> dict:
    options = {"loss_type": loss_type, "epsilon": LOW, "epsilon_high": HIGH}
    if loss_type == "cispo":
        options["epsilon_high"] = 1 + HIGH
    if loss_type == "dr_grpo":
        options |= {"max_completion_length": CONSTANT, "delta": DELTA}
    if loss_type == "sapo":
        options |= {"sapo_temperature_pos": 1.2, "sapo_temperature_neg": 0.8}
    return options | (GAMMA if loss_type == "vespo" else {})


def _arguments(x: Tokens, per_token: bool) -> tuple:
    advantages = x.normal("advantages") if per_token else x.per_sequence("advantages")
    return x.log_probs(), advantages, x.mask, x.log_probs("old")


LEVELS = {"luspo": "sequence", "gspo": "sequence"}


@pytest.mark.parametrize("empty", [(), (2,)], ids=["full", "empty"])
@pytest.mark.parametrize("per_token", [False, True], ids=["sequence advantages", "token advantages"])
@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_grpo_is_the_formula(loss_type, level, per_token, empty):
    x = tokens(5, 8, torch.float64, empty=empty)
    values = _losses(_tokens(x, per_token), loss_type, level or LEVELS.get(loss_type, "token"))
    loss, metrics = losses.grpo_loss(
        *_arguments(x, per_token), importance_sampling_level=level, **_options(loss_type)
    )  # fmt: skip
    assert loss.item() == pytest.approx(_batch(values, loss_type), rel=1e-10)
    assert metrics["policy_loss"] == loss


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
@pytest.mark.parametrize("count", [0, 40, 40.0, torch.tensor(40), torch.tensor(0.0)], ids=str)
def test_num_items_in_batch_is_the_divisor(loss_type, count):
    x = tokens(5, 8, torch.float64)
    values = _losses(_tokens(x), loss_type, "token")
    loss, _ = losses.grpo_loss(*_arguments(x, True), num_items_in_batch=count, **_options(loss_type))
    assert loss.item() == pytest.approx(_batch(values, loss_type, max(float(count), 1.0)), rel=1e-10)


@pytest.mark.parametrize("loss_type", ["cispo", "vespo"])
def test_the_weights_of_log_probabilities_have_no_gradient(loss_type):
    """The gradient is the weight: the loss of a token, divided by its log-probability."""
    x = tokens(5, 8, torch.float64, empty=(1,))
    rows = _tokens(x, per_token=False)
    values = _losses(rows, loss_type, "token")
    log_probs, *rest = _arguments(x, False)
    leaf = log_probs.clone().requires_grad_()
    loss, _ = losses.grpo_loss(leaf, *rest, num_items_in_batch=10, **_options(loss_type))
    (grad,) = torch.autograd.grad(loss, leaf)
    expected = [
        value / t.policy / 10
        for row, row_values in zip(rows, values, strict=True)
        for t, value in zip(row, row_values, strict=True)
    ]
    assert grad[x.mask].tolist() == pytest.approx(expected, rel=1e-9)
    assert (grad[~x.mask] == 0).all()


@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_without_old_log_probs_the_gradient_is_that_of_reinforce(loss_type):
    """All ratios are 1, so the gradient of a token's loss is minus its advantage."""
    x = tokens(4, 6, torch.float64)
    leaf = x.log_probs().clone().requires_grad_()
    options = _options(loss_type) | ({"importance_sampling_level": "token"} if loss_type in LEVELS else {})
    loss, metrics = losses.grpo_loss(leaf, x.per_sequence("advantages"), x.mask, **options)
    (grad,) = torch.autograd.grad(loss, leaf)
    rows = [[1.0] * length for length in x.lengths]
    for i, row in enumerate(rows):
        # The batch's loss of a token with loss 1 in this sequence, and none elsewhere.
        share = _batch([[float(j == i and k == 0) for k in range(len(r))] for j, r in enumerate(rows)], loss_type)
        expected = -x.per_sequence("advantages")[i] * share
        torch.testing.assert_close(grad[i][x.mask[i]], expected.expand(len(row)))
    for name in metrics:
        assert not name.startswith("clip_ratio") or metrics[name] == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_divergence_is_added_to_every_token(estimator, corrects, level):
    x = tokens(5, 8, torch.float64, empty=(2,))
    rows = _tokens(x)
    estimators = {
        "k1": lambda d: -d,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: math.exp(d) - d - 1,
    }
    divergences = []
    for row in rows:
        ratios = [math.exp(t.policy - t.old) for t in row]
        if level == "sequence" and row:
            ratios = [math.prod(ratios) ** (1 / len(row))] * len(row)
        divergences.append(
            [
                estimators[estimator](t.reference - t.policy) * (r if corrects else 1.0)
                for t, r in zip(row, ratios, strict=True)
            ]
        )
    arguments = _arguments(x, True)
    options = _options("bnpo") | {"importance_sampling_level": level}
    plain, _ = losses.grpo_loss(*arguments, **options)
    options |= {"beta": 0.7, "kl_estimator": estimator, "use_bias_correction_kl": corrects}
    loss, metrics = losses.grpo_loss(*arguments, x.log_probs("reference"), **options)
    expected = _average(list(itertools.chain(*divergences)))
    assert metrics["kl"].item() == pytest.approx(expected, rel=1e-10)
    assert (loss - plain).item() == pytest.approx(0.7 * expected, rel=1e-8)
    values = losses.kl_estimate(x.log_probs(), x.log_probs("reference"), estimator)
    first = next(row for row in rows if row)[0]
    row = next(i for i, length in enumerate(x.lengths) if length)
    assert values[row][x.mask[row]][0].item() == pytest.approx(estimators[estimator](first.reference - first.policy))


@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.5, 1.0])
def test_the_entropy_selects_tokens_and_gives_a_bonus(quantile):
    x = tokens(5, 8, torch.float64, empty=(2,))
    rows = _tokens(x)
    entropies = sorted(t.entropy for t in itertools.chain(*rows))
    position = (1 - quantile) * (len(entropies) - 1)
    low = math.floor(position)
    threshold = entropies[low] + (position - low) * (entropies[min(low + 1, len(entropies) - 1)] - entropies[low])
    values = [
        [value if t.entropy >= threshold - 1e-12 else 0.0 for t, value in zip(row, row_values, strict=True)]
        for row, row_values in zip(rows, _losses(rows, "bnpo", "token"), strict=True)
    ]
    selected = [entropy for entropy in entropies if entropy >= threshold - 1e-12]
    loss, metrics = losses.grpo_loss(
        *_arguments(x, True), entropy=x.normal("entropy").abs(), entropy_coef=0.3, top_entropy_quantile=quantile,
        **_options("bnpo"),
    )  # fmt: skip
    assert metrics["policy_loss"].item() == pytest.approx(_batch(values, "bnpo"), rel=1e-9)
    assert loss.item() == pytest.approx(_batch(values, "bnpo") - 0.3 * _average(selected), rel=1e-9)
    assert metrics["entropy"].item() == pytest.approx(_average(entropies))
    # The same threshold, computed elsewhere.
    other, _ = losses.grpo_loss(
        *_arguments(x, True), entropy=x.normal("entropy").abs(), entropy_coef=0.3,
        top_entropy_threshold=losses.entropy_threshold(x.normal("entropy").abs(), x.mask, quantile), **_options("bnpo"),
    )  # fmt: skip
    assert torch.equal(loss, other)


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


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("from_sampler", [False, True])
def test_off_policy_sequences_leave_the_loss(from_sampler, per_token):
    x = tokens(6, 8, torch.float64, empty=(2,))
    rows = _tokens(x, per_token)
    drift = [
        _average([(t.sampling if from_sampler else t.old) - t.policy for t in row]) for row in rows
    ]  # fmt: skip
    threshold = sorted(drift)[2]
    values = [
        [
            value if t.advantage >= 0 or drift[i] <= threshold else 0.0
            for t, value in zip(rows[i], row_values, strict=True)
        ]
        for i, row_values in enumerate(_losses(rows, "bnpo", "token"))
    ]
    sampling = {"sampling_log_probs": x.log_probs("sampling")} if from_sampler else {}
    loss, _ = losses.grpo_loss(
        *_arguments(x, per_token), off_policy_mask_threshold=threshold + 1e-9, **sampling, **_options("bnpo")
    )
    assert loss.item() == pytest.approx(_batch(values, "bnpo"), rel=1e-10)


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


@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "gspo", "sapo"])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_importance_ratio_of_the_sampler_scales_the_losses(loss_type, per_token):
    x = tokens(5, 8, torch.float64, empty=(2,))
    ratios = x.normal("ratios").exp() if per_token else x.per_sequence("ratios").exp()
    by_token = ratios if per_token else ratios[:, None].expand(x.mask.shape)
    values = _losses(_tokens(x), loss_type, LEVELS.get(loss_type, "token"))
    scaled = [
        [value * ratio for value, ratio in zip(row, by_token[i][x.mask[i]].tolist(), strict=True)]
        for i, row in enumerate(values)
    ]
    loss, _ = losses.grpo_loss(*_arguments(x, True), importance_sampling_ratio=ratios, **_options(loss_type))
    assert loss.item() == pytest.approx(_batch(scaled, loss_type), rel=1e-10)


def test_vespo_multiplies_the_ratio_of_the_sampler_into_the_weight():
    x = tokens(5, 8, torch.float64, empty=(2,))
    rows, ratios = _tokens(x, False), x.normal("ratios", 0.3).exp()
    values = []
    for i, row in enumerate(rows):
        weight = math.exp(sum(t.policy - t.old for t in row)) * math.prod(ratios[i][x.mask[i]].tolist())
        values.append([_vespo(weight, t.advantage) * t.policy for t in row])
    loss, _ = losses.grpo_loss(*_arguments(x, False), importance_sampling_ratio=ratios, **_options("vespo"))
    assert loss.item() == pytest.approx(_batch(values, "vespo"), rel=1e-10)


def test_vespo_limits_the_logarithms_of_ratios():
    log_probs = torch.tensor([[-1.0, -1.0], [-90.0, -90.0]])
    old = torch.tensor([[-90.0, -90.0], [-1.0, -1.0]])
    loss, metrics = losses.grpo_loss(log_probs, torch.ones(2), log_probs < 0, old, loss_type="vespo")
    assert loss.item() == pytest.approx(0.0, abs=1e-9)
    smallest = math.exp(3.0) * 1e-8**2
    assert metrics["vespo/phi_seq_mean"].item() == pytest.approx(smallest / 2, rel=1e-4, abs=0)


def test_the_decay_of_vespo_is_at_least_1e_4():
    log_probs = torch.tensor([[-1.0]], dtype=torch.float64)
    advantages, old = torch.tensor([-1.0], dtype=torch.float64), log_probs - 10
    options = {"loss_type": "vespo", "vespo_lambda_neg": 0.0, "vespo_k_neg": 0.5}
    _, metrics = losses.grpo_loss(log_probs, advantages, log_probs < 0, old, **options)
    expected = math.exp(1e-4 + 5 - 1e-4 * math.exp(10))
    assert metrics["vespo/phi_seq_mean"].item() == pytest.approx(expected, rel=1e-9)


# --- the ratios of the sampling engine -----------------------------------------------------------


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


# --- PPO and RLOO --------------------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True])
def test_ppo(per_token):
    x = tokens(5, 8, torch.float64, empty=(2,))
    rows = list(itertools.chain(*_tokens(x, per_token)))
    ratios = [math.exp(t.policy - t.old) for t in rows]
    expected = _average([_clipped(r, t.advantage, DELTA) for r, t in zip(ratios, rows, strict=True)])
    loss, metrics = losses.ppo_loss(*_arguments(x, per_token), epsilon=LOW, epsilon_high=HIGH, delta=DELTA)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert metrics["kl"].item() == pytest.approx(_average([(t.policy - t.old) ** 2 / 2 for t in rows]))


def test_rloo():
    x = tokens(16, 4, torch.float64, empty=(2,))
    rows = _tokens(x, False)
    advantages = x.per_sequence("advantages").tolist()
    ratios = [math.exp(sum(t.policy - t.old for t in row)) for row in rows]
    loss, metrics = losses.rloo_loss(*_arguments(x, False), epsilon=LOW, epsilon_high=HIGH)
    expected = _average([_clipped(r, a) for r, a in zip(ratios, advantages, strict=True)])
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    low = [float(r < 1 - LOW and a < 0) for r, a in zip(ratios, advantages, strict=True)]
    high = [float(r > 1 + HIGH and a > 0) for r, a in zip(ratios, advantages, strict=True)]
    assert sum(low) * sum(high) > 0
    names = {"low_mean": _average(low), "high_mean": _average(high), "low_min": min(low), "high_max": max(high)}
    names["region_mean"] = _average(low) + _average(high)
    for name, value in names.items():
        assert metrics[f"clip_ratio/{name}"].item() == pytest.approx(value), name


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clip_ratios(level):
    x = tokens(6, 8, torch.float64, empty=(2,))
    rows = _tokens(x, False)
    advantages = x.per_sequence("advantages").tolist()
    low, high = [], []
    for row, a in zip(rows, advantages, strict=True):
        ratios = [math.exp(t.policy - t.old) for t in row]
        if level == "sequence":
            ratios = [math.prod(ratios) ** (1 / max(len(row), 1))]
        low.append([float(r < 1 - LOW and a < 0) for r in ratios])
        high.append([float(r > 1 + HIGH and a > 0) for r in ratios])
    _, metrics = losses.grpo_loss(*_arguments(x, False), importance_sampling_level=level, **_options("grpo"))
    shares = [[_average(row) for row in rows if row] for rows in (low, high)]
    names = {"low_mean": _average(list(itertools.chain(*low))), "low_min": min(shares[0])}
    names |= {"high_mean": _average(list(itertools.chain(*high))), "high_max": max(shares[1])}
    names["region_mean"] = names["low_mean"] + names["high_mean"]
    for name, value in names.items():
        assert metrics[f"clip_ratio/{name}"].item() == pytest.approx(value), name


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
