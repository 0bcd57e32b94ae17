"""Losses of preferences that `test_trl` does not compare: options that TRL lacks, and edge cases."""

import math

import pytest
import torch

from losses.cases import Tokens, tokens
from tigon import losses

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def _nls(z: float) -> float:
    """Return -log sigmoid(z)."""
    return -math.log(_sigmoid(z))


def _rows(x: Tokens, name: str = "policy") -> list[list[float]]:
    """Return the log-probabilities of the tokens of each sequence that count."""
    return [row[mask].tolist() for row, mask in zip(x.log_probs(name), x.mask, strict=True)]


def _average(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


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


def test_simpo_is_a_type_of_cpo():
    x = tokens(6, 5)
    simpo, _ = losses.simpo_loss(x.log_probs(), x.mask, beta=1.5, gamma=0.7, label_smoothing=0.1)
    options = {"beta": 1.5, "simpo_gamma": 0.7, "label_smoothing": 0.1}
    for loss_type, weight in (("simpo", 0.0), ("alphapo", 1.0)):
        cpo, _ = losses.cpo_loss(x.log_probs(), x.mask, loss_type=loss_type, cpo_alpha=weight, **options)
        assert torch.equal(simpo, cpo)


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
