"""The losses of preferences are the formulas of their papers, computed here in Python's floats, pair by pair."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from losses.cases import Tokens, tokens
from tigon import losses
from tigon.losses.preference import DPO_LOSSES

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")

BETA, SMOOTHING, TAU = 0.6, 0.15, 0.4


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def _nls(z: float) -> float:
    """Return -log sigmoid(z)."""
    return -math.log(_sigmoid(z))


def _soft(z: float, smoothing: float = SMOOTHING) -> float:
    return (1 - smoothing) * _nls(z) + smoothing * _nls(-z)


def _rows(x: Tokens, name: str = "policy") -> list[list[float]]:
    """Return the log-probabilities of the tokens of each sequence that count."""
    return [row[mask].tolist() for row, mask in zip(x.log_probs(name), x.mask, strict=True)]


def _average(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def _exo(delta: float) -> float:
    q = _sigmoid(BETA * delta)
    return q * math.log(q / (1 - SMOOTHING)) + (1 - q) * math.log((1 - q) / SMOOTHING)


def _discopop(delta: float) -> float:
    share = _sigmoid(BETA * delta / TAU)
    return (1 - share) * _nls(BETA * delta) + share * math.exp(-BETA * delta)


# Each formula has the log-ratios c and r of the chosen and rejected completion, and their lengths m and n.
FORMULAS: dict[str, Callable[[float, float, int, int], float]] = {
    "sigmoid": lambda c, r, m, n: _nls(BETA * (c - r)),
    "hinge": lambda c, r, m, n: max(0.0, 1 - BETA * (c - r)),
    "ipo": lambda c, r, m, n: (c / m - r / n - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda c, r, m, n: _exo(c - r),
    "nca_pair": lambda c, r, m, n: _nls(BETA * c) + 0.5 * _nls(-BETA * c) + 0.5 * _nls(-BETA * r),
    "robust": lambda c, r, m, n: (
        ((1 - SMOOTHING) * _nls(BETA * (c - r)) - SMOOTHING * _nls(BETA * (r - c))) / (1 - 2 * SMOOTHING)
    ),
    "bco_pair": lambda c, r, m, n: _nls(BETA * c) + _nls(-BETA * r),
    "sppo_hard": lambda c, r, m, n: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2,
    "apo_zero": lambda c, r, m, n: 1 - _sigmoid(BETA * c) + _sigmoid(BETA * r),
    "apo_down": lambda c, r, m, n: _sigmoid(BETA * c) + 1 - _sigmoid(BETA * (c - r)),
    "discopop": lambda c, r, m, n: _discopop(c - r),
    "sigmoid_norm": lambda c, r, m, n: _nls(BETA * (c / m - r / n)),
}


def _options(name: str) -> dict:
    smoothed = name in ("exo_pair", "robust", "aot", "aot_unpaired")
    return {"beta": BETA, "discopop_tau": TAU, "label_smoothing": SMOOTHING if smoothed else 0.0, "loss_type": name}


@pytest.mark.parametrize("pairs", [1, 3, 4])
@pytest.mark.parametrize("empty", [(), (0,)], ids=["full", "empty"])
@pytest.mark.parametrize("has_reference", [True, False], ids=["reference", "no reference"])
@pytest.mark.parametrize("name", FORMULAS)
def test_dpo_is_the_mean_of_the_formula_over_the_pairs(name, has_reference, empty, pairs):
    x = tokens(2 * pairs, 7, torch.float64, empty=empty)
    policy, reference = _rows(x), _rows(x, "reference")
    ratios = [sum(p) - (sum(r) if has_reference else 0) for p, r in zip(policy, reference, strict=True)]
    expected = _average(
        [
            FORMULAS[name](ratios[i], ratios[i + pairs], max(len(policy[i]), 1), max(len(policy[i + pairs]), 1))
            for i in range(pairs)
        ]
    )
    ref_log_probs = x.log_probs("reference") if has_reference else None
    loss, metrics = losses.dpo_loss(x.log_probs(), x.mask, ref_log_probs, **_options(name))
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    chosen, rejected = (_average([BETA * x for x in part]) for part in (ratios[:pairs], ratios[pairs:]))
    assert metrics["rewards/chosen"].item() == pytest.approx(chosen, rel=1e-10)
    assert metrics["rewards/rejected"].item() == pytest.approx(rejected, rel=1e-10)
    assert metrics["rewards/margins"].item() == pytest.approx(chosen - rejected, rel=1e-10)
    assert metrics["rewards/accuracies"].item() == pytest.approx(
        _average([float(ratios[i] > ratios[i + pairs]) for i in range(pairs)])
    )
    assert metrics["logps/chosen"].item() == pytest.approx(_average([sum(p) for p in policy[:pairs]]), rel=1e-10)
    assert metrics["logps/rejected"].item() == pytest.approx(_average([sum(p) for p in policy[pairs:]]), rel=1e-10)


def test_every_type_has_a_formula_here():
    assert set(FORMULAS) | {"aot", "aot_unpaired", "sft"} == set(DPO_LOSSES)


def test_aot_compares_sorted_values():
    x = tokens(8, 7, torch.float64)
    policy, reference = ([sum(row) for row in _rows(x, name)] for name in ("policy", "reference"))
    ratios = [p - r for p, r in zip(policy, reference, strict=True)]
    differences = [sorted(y[i] - y[i + 4] for i in range(4)) for y in (policy, reference)]
    expected = _average([_soft(BETA * (p - r)) for p, r in zip(*differences, strict=True)])
    loss, _ = losses.dpo_loss(x.log_probs(), x.mask, x.log_probs("reference"), **_options("aot"))
    assert loss.item() == pytest.approx(expected, rel=1e-10)

    pairs = zip(sorted(ratios[:4]), sorted(ratios[4:]), strict=True)
    expected = _average([_soft(BETA * (c - r)) for c, r in pairs])
    loss, _ = losses.dpo_loss(x.log_probs(), x.mask, x.log_probs("reference"), **_options("aot_unpaired"))
    assert loss.item() == pytest.approx(expected, rel=1e-10)


def test_sft_is_the_mean_over_all_tokens_of_chosen_completions():
    x = tokens(6, 7, torch.float64, empty=(1,))
    expected = -_average(list(itertools.chain(*_rows(x)[:3])))
    loss, _ = losses.dpo_loss(x.log_probs(), x.mask, x.log_probs("reference"), loss_type="sft")
    assert loss.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("name", "alpha", "score"),
    [
        ("forward_kl", 0.5, lambda r: 1 - 1 / r),
        ("js_divergence", 0.5, lambda r: math.log(2 * r / (1 + r))),
        ("alpha_divergence", 0.5, lambda r: (r**-0.5 - 1) / -0.5),
        ("alpha_divergence", 1.0, lambda r: math.log(r)),
        ("alpha_divergence", 0.0, lambda r: 1 - 1 / r),
        ("alpha_divergence", 3.0, lambda r: (r**2 - 1) / 2),
    ],
)
def test_f_divergences(name, alpha, score):
    x = tokens(6, 7, torch.float64)
    sums = [sum(p) - sum(r) for p, r in zip(_rows(x), _rows(x, "reference"), strict=True)]
    scores = [score(math.exp(value)) for value in sums]
    expected = _average([_nls(0.3 * (scores[i] - scores[i + 3])) for i in range(3)])
    loss, metrics = losses.dpo_loss(
        x.log_probs(), x.mask, x.log_probs("reference"), beta=0.3, f_divergence_type=name, f_alpha_divergence_coef=alpha
    )
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    # The rewards that are reported do not depend on the divergence.
    assert metrics["rewards/chosen"].item() == pytest.approx(_average([0.3 * x for x in sums[:3]]))


@pytest.mark.parametrize("ld_alpha", [0.0, 0.4, 1.0])
def test_ld_alpha_weighs_the_tokens_beyond_the_shorter_completion(ld_alpha):
    x = tokens(6, 9, torch.float64, empty=(4,))
    policy, reference = _rows(x), _rows(x, "reference")

    def limited(rows: list[list[float]], i: int) -> float:
        shorter = min(len(rows[i]), len(rows[(i + 3) % 6]))
        return sum(rows[i][:shorter]) + ld_alpha * sum(rows[i][shorter:])

    ratios = [limited(policy, i) - limited(reference, i) for i in range(6)]
    expected = _average([_nls(BETA * (ratios[i] - ratios[i + 3])) for i in range(3)])
    loss, metrics = losses.dpo_loss(x.log_probs(), x.mask, x.log_probs("reference"), beta=BETA, ld_alpha=ld_alpha)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert metrics["logps/chosen"].item() == pytest.approx(_average([limited(policy, i) for i in range(3)]))


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "sft"])
def test_wpo_weighs_the_gradients_of_pairs(name):
    """The weights are constants for autograd."""
    x = tokens(6, 7, torch.float64, empty=(4,))
    squares = x.normal("squares", 0.3, -2.0)
    policy, reference = _rows(x), _rows(x, "reference")
    rows = [y[mask].tolist() for y, mask in zip(squares, x.mask, strict=True)]
    averages = [_average([p - s for p, s in zip(policy[i], rows[i], strict=True)]) for i in range(6)]
    weights = [math.exp(averages[i] + averages[i + 3]) for i in range(3)]
    ratios = [sum(p) - sum(r) for p, r in zip(policy, reference, strict=True)]
    nll = -_average(list(itertools.chain(*policy[:3])))
    values = {
        "sigmoid": lambda i: _nls(BETA * (ratios[i] - ratios[i + 3])),
        "hinge": lambda i: max(0.0, 1 - BETA * (ratios[i] - ratios[i + 3])),
        "sft": lambda i: nll,
    }
    leaf = x.log_probs().clone().requires_grad_()
    loss, _ = losses.dpo_loss(
        leaf, x.mask, x.log_probs("reference"), beta=BETA, loss_type=name, use_weighting=True, log_sum_sq_probs=squares
    )
    assert loss.item() == pytest.approx(_average([weights[i] * values[name](i) for i in range(3)]), rel=1e-10)
    if name == "sigmoid":
        (grad,) = torch.autograd.grad(loss, leaf)
        slopes = [-BETA * _sigmoid(-BETA * (ratios[i] - ratios[i + 3])) * weights[i] / 3 for i in range(3)]
        expected = torch.tensor(slopes + [-slope for slope in slopes]).double()[:, None] * x.mask
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-9)


def test_several_losses_are_added_with_their_weights():
    x = tokens(6, 7, torch.float64)
    arguments = x.log_probs(), x.mask, x.log_probs("reference")
    both, _ = losses.dpo_loss(*arguments, loss_type=["ipo", "sft"], loss_weights=[0.3, -2.0])
    single = [losses.dpo_loss(*arguments, loss_type=name)[0] for name in ("ipo", "sft")]
    torch.testing.assert_close(both, 0.3 * single[0] - 2.0 * single[1])
    unweighted, _ = losses.dpo_loss(*arguments, loss_type=("ipo", "sft"))
    torch.testing.assert_close(unweighted, single[0] + single[1])


def test_the_sums_of_the_reference_replace_its_tokens():
    x = tokens(6, 7, empty=(2,))
    sums = losses.sequence_log_probs(x.log_probs("reference"), x.mask)
    dpo = [losses.dpo_loss(x.log_probs(), x.mask, x.log_probs("reference"), loss_type="aot", label_smoothing=0.1)]
    dpo += [losses.dpo_loss(x.log_probs(), x.mask, ref_sequence_log_probs=sums, loss_type="aot", label_smoothing=0.1)]
    assert torch.equal(dpo[0][0], dpo[1][0])
    labels = x.per_sequence("labels") > 0
    kto = [losses.kto_loss(x.log_probs(), x.mask, labels, x.log_probs("reference"))]
    kto += [losses.kto_loss(x.log_probs(), x.mask, labels, ref_sequence_log_probs=sums)]
    assert torch.equal(kto[0][0], kto[1][0])


# --- without a reference -------------------------------------------------------------------------


def test_orpo():
    x = tokens(6, 7, torch.float64)
    policy = _rows(x)
    nll_mask = x.mask & (x.normal("nll") > -0.5)
    nll = -_average(x.log_probs()[:3][nll_mask[:3]].tolist())
    averages = [_average(row) for row in policy]
    odds = [math.log(math.exp(a) / (1 - math.exp(a))) for a in averages]
    logs = [-_nls(odds[i] - odds[i + 3]) for i in range(3)]
    loss, metrics = losses.orpo_loss(x.log_probs(), x.mask, beta=0.7, nll_mask=nll_mask)
    assert loss.item() == pytest.approx(nll - 0.7 * _average(logs), rel=1e-10)
    assert metrics["nll_loss"].item() == pytest.approx(nll)
    assert metrics["log_odds_ratio"].item() == pytest.approx(_average(logs))
    assert metrics["log_odds_chosen"].item() == pytest.approx(_average([odds[i] - odds[i + 3] for i in range(3)]))
    assert metrics["rewards/chosen"].item() == pytest.approx(0.7 * _average(averages[:3]))


@pytest.mark.parametrize("average", [-1e-10, -1e-7, -1e-4, -0.3, -0.6931, -0.6932, -5.0, -100.0])
def test_the_odds_of_orpo_are_precise(average):
    """The formula log(p / (1 - p)) in fp32 would lose all digits near p = 1."""
    log_probs = torch.tensor([[average], [-1.0]], requires_grad=True)
    loss, metrics = losses.orpo_loss(log_probs, torch.ones(2, 1, dtype=torch.bool))
    exact = min(average, -torch.finfo(torch.float32).eps)
    odds = exact - math.log(-math.expm1(exact)) - (-1.0 - math.log(-math.expm1(-1.0)))
    assert metrics["log_odds_chosen"].item() == pytest.approx(odds, rel=1e-5)
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert grad.isfinite().all()


def test_a_pair_of_orpo_with_an_empty_completion_has_equal_odds():
    x = tokens(4, 7, torch.float64, empty=(0,))
    loss, _ = losses.orpo_loss(x.log_probs(), x.mask, beta=1.0)
    averages = [_average(row) for row in _rows(x)]
    odds = [averages[i] - math.log(1 - math.exp(averages[i])) for i in (1, 3)]
    nll = -averages[1]
    assert loss.item() == pytest.approx(nll + 0.5 * (math.log(2) + _nls(odds[0] - odds[1])), rel=1e-10)


@pytest.mark.parametrize("alpha", [0.0, 0.3, -0.2])
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo", "alphapo"])
def test_cpo(name, alpha):
    x = tokens(6, 5, torch.float64)
    policy = _rows(x)
    scores = [sum(row) if name in ("sigmoid", "hinge") else _average(row) for row in policy]
    rewards = [(1 - math.exp(score) ** -alpha) / alpha if alpha else score for score in scores]
    deltas = [rewards[i] - rewards[i + 3] for i in range(3)]
    smoothing = 0.0 if name in ("hinge", "ipo") else SMOOTHING
    formulas = {
        "sigmoid": lambda d: _soft(BETA * d),
        "hinge": lambda d: max(0.0, 1 - BETA * d),
        "ipo": lambda d: (d - 1 / (2 * BETA)) ** 2,
        "simpo": lambda d: _soft(BETA * d - 0.8),
    }
    formula = formulas.get(name, formulas["simpo"])
    nll = -_average(list(itertools.chain(*policy[:3])))
    expected = _average([formula(d) for d in deltas]) + (0.4 * nll if name != "alphapo" else 0)
    loss, metrics = losses.cpo_loss(
        x.log_probs(), x.mask, beta=BETA, loss_type=name, cpo_alpha=0.4, label_smoothing=smoothing, simpo_gamma=0.8,
        alpha=alpha,
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert metrics["nll_loss"].item() == pytest.approx(nll)
    assert metrics["rewards/chosen"].item() == pytest.approx(BETA * _average(rewards[:3]))
    assert metrics["logps/rejected"].item() == pytest.approx(_average(scores[3:]))


def test_simpo():
    x = tokens(6, 5, torch.float64, empty=(5,))
    averages = [_average(row) for row in _rows(x)]
    loss, metrics = losses.simpo_loss(x.log_probs(), x.mask)
    expected = _average([_nls(2.0 * (averages[i] - averages[i + 3]) - 1.0) for i in range(3)])
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert metrics["rewards/rejected"].item() == pytest.approx(2.0 * _average(averages[3:]))


def test_simpo_is_a_type_of_cpo():
    x = tokens(6, 5)
    simpo, _ = losses.simpo_loss(x.log_probs(), x.mask, beta=1.5, gamma=0.7, label_smoothing=0.1)
    options = {"beta": 1.5, "simpo_gamma": 0.7, "label_smoothing": 0.1}
    for loss_type, weight in (("simpo", 0.0), ("alphapo", 1.0)):
        cpo, _ = losses.cpo_loss(x.log_probs(), x.mask, loss_type=loss_type, cpo_alpha=weight, **options)
        assert torch.equal(simpo, cpo)


# --- KTO and rewards -----------------------------------------------------------------------------


@pytest.mark.parametrize("kl", [None, -0.4, 0.7])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type, kl):
    if loss_type == "apo_zero_unpaired":
        kl = None
    x = tokens(5, 7, torch.float64, empty=(3,))
    labels = [True, False, False, True, True]
    ratios = [sum(p) - sum(r) for p, r in zip(_rows(x), _rows(x, "reference"), strict=True)]
    z = max(kl or 0.0, 0.0)
    values = [
        1.7 * (1 - _sigmoid(BETA * (r - z))) if label else 0.4 * (1 - _sigmoid(BETA * (z - r)))
        for r, label in zip(ratios, labels, strict=True)
    ]
    loss, metrics = losses.kto_loss(
        x.log_probs(), x.mask, torch.tensor(labels), x.log_probs("reference"),
        None if kl is None else torch.tensor(kl, dtype=torch.float64), beta=BETA, loss_type=loss_type,
        desirable_weight=1.7, undesirable_weight=0.4,
    )  # fmt: skip
    assert loss.item() == pytest.approx(_average(values), rel=1e-10)
    assert metrics["kl"].item() == pytest.approx(z)
    assert metrics["count/chosen"] == 3
    assert metrics["count/rejected"] == 2
    assert metrics["rewards/rejected"].item() == pytest.approx(BETA * (ratios[1] + ratios[2]) / 2)


def test_the_kl_term_of_kto_has_no_gradient():
    x = tokens(5, 7, torch.float64)
    log_probs = x.log_probs().clone().requires_grad_()
    kl = losses.kto_kl(log_probs, x.mask, x.log_probs("reference"))
    sums = [sum(p) - sum(r) for p, r in zip(_rows(x), _rows(x, "reference"), strict=True)]
    assert kl.item() == pytest.approx(_average(sums), rel=1e-10)
    assert not kl.requires_grad
    other = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    loss, _ = losses.kto_loss(log_probs, x.mask, x.per_sequence("labels") > 0, kl=other)
    loss.backward()
    assert other.grad is None


def test_metrics_of_absent_completions_are_nan():
    x = tokens(2, 3)
    loss, metrics = losses.kto_loss(x.log_probs(), x.mask, torch.ones(2, dtype=torch.bool))
    assert loss.isfinite()
    assert metrics["rewards/rejected"].isnan()
    assert metrics["rewards/margins"].isnan()
    assert metrics["rewards/chosen"].isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_bradley_terry(dtype):
    x = tokens(6, 3, torch.float64)
    rewards, margin = x.per_sequence("rewards").to(dtype), x.per_sequence("margin")[:3].to(dtype)
    r, m = rewards.tolist(), margin.tolist()
    expected = _average([_nls(r[i] - r[i + 3] - m[i]) + 0.2 * (r[i] + r[i + 3]) ** 2 for i in range(3)])
    loss, metrics = losses.bradley_terry_loss(rewards, margin, center_rewards_coefficient=0.2)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert metrics["accuracy"].item() == pytest.approx(_average([float(r[i] > r[i + 3]) for i in range(3)]))
    assert metrics["margin"].item() == pytest.approx(_average([r[i] - r[i + 3] for i in range(3)]), rel=1e-5)
    assert (metrics["min_reward"].item(), metrics["max_reward"].item()) == (min(r), max(r))


def test_bradley_terry_gradient():
    rewards = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    margin = torch.tensor([0.1, 0.0, 2.0], dtype=torch.float64)
    for m, c in ((None, None), (margin, 0.3)):
        function = lambda x, m=m, c=c: losses.bradley_terry_loss(x, m, center_rewards_coefficient=c)[0]
        assert torch.autograd.gradcheck(function, rewards)
    empty = torch.zeros(0, requires_grad=True)
    loss, _ = losses.bradley_terry_loss(empty)
    loss.backward()
    assert loss == 0


def test_token_metrics():
    x = tokens(6, 7, torch.float64, empty=(1,))
    entropy, logits, top = x.normal("entropy"), x.normal("logits"), x.normal("top") > 0
    metrics = losses.preference_token_metrics(x.mask, entropy=entropy, mean_logits=logits, is_top1=top)
    assert metrics["entropy"].item() == pytest.approx(_average(entropy[x.mask].tolist()), rel=1e-6)
    assert metrics["logits/chosen"].item() == pytest.approx(_average(logits[:3][x.mask[:3]].tolist()), rel=1e-6)
    assert metrics["logits/rejected"].item() == pytest.approx(_average(logits[3:][x.mask[3:]].tolist()), rel=1e-6)
    assert metrics["mean_token_accuracy"].item() == pytest.approx(_average(top[:3][x.mask[:3]].float().tolist()))
    is_chosen = torch.tensor([False, True, False, True, False, True])
    metrics = losses.preference_token_metrics(x.mask, mean_logits=logits, is_chosen=is_chosen)
    assert set(metrics) == {"logits/chosen", "logits/rejected"}
    chosen = logits[is_chosen][x.mask[is_chosen]].tolist()
    assert metrics["logits/chosen"].item() == pytest.approx(_average(chosen), rel=1e-6)
