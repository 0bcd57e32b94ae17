"""Log-probabilities and entropy, which are differentiable results, and losses scaled by the target's probability."""

import math

import pytest
import torch

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, one_in
from ops.logits.cross_entropy_cases import OPTIONS, SHAPES, class_weights, logits_of, target_of
from tigon.ops.logits.cross_entropy import cross_entropy_reference, log_probs_and_entropy_reference

RESULT_FLAGS = {"return_log_probs": True, "return_entropy": True}


def _run(x: torch.Tensor, target: torch.Tensor, weight=None, **options) -> tuple[torch.Tensor, ...]:
    result = tigon.cross_entropy(x, target, weight, **RESULT_FLAGS, **options)
    return result.loss, result.log_probs, result.entropy


def _reference(x: torch.Tensor, target: torch.Tensor, weight=None, **options) -> tuple[torch.Tensor, ...]:
    transform = {name: options[name] for name in ("softcap", "logit_scale") if name in options}
    return cross_entropy_reference(x, target, weight, **options), *log_probs_and_entropy_reference(
        x, target, **transform
    )


OUTPUT_OPTIONS = {name: OPTIONS[name] for name in ("plain", "none", "softcap", "logit scale", "token scaling")} | {
    "all": OPTIONS["all, token scaling"]
}


@one_in(2, shape=SHAPES, options=OUTPUT_OPTIONS, weighted={"": False, "class weights": True})
@pytest.mark.sampled(in_interpreter=3)
def test_outputs_are_as_accurate_as_eager_code(shape, options, weighted):
    """All three outputs have random upstream gradients. That of the entropy subtracts p log p and p H."""
    *rows, v = shape
    target = target_of(*rows, v=v)
    weight = class_weights(v) if weighted else None
    assert_as_accurate_as_eager(
        lambda x: _run(x, target, weight, **options), lambda x: _reference(x, target, weight, **options),
        [logits_of(*shape)], loss=True, term_size=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("output", range(3), ids=["loss", "log_probs", "entropy"])
def test_backward_works_if_one_output_is_used(output, dtype):
    logits, target = logits_of(9, 60, dtype=dtype), target_of(9, v=60)
    assert_as_accurate_as_eager(
        lambda x: _run(x, target, z_loss=0.1)[output], lambda x: _reference(x, target, z_loss=0.1)[output], [logits],
        loss=True, term_size=1.0 if output == 2 else 0.0,
    )  # fmt: skip
    assert _run(logits, target)[output].dtype == torch.float32


def test_log_probs_and_entropy_may_be_requested_alone():
    logits, target = logits_of(9, 60), target_of(9, v=60)
    loss, log_probs, entropy = _run(logits, target)
    alone = tigon.cross_entropy(logits, target, return_log_probs=True)
    assert torch.equal(alone.log_probs, log_probs)
    assert alone.entropy is None
    alone = tigon.cross_entropy(logits, target, return_entropy=True)
    assert torch.equal(alone.entropy, entropy)
    assert torch.equal(alone.loss, loss)
    assert alone.log_probs is None
    with torch.no_grad():
        assert torch.equal(tigon.cross_entropy(logits, target, inplace=True, **RESULT_FLAGS).entropy, entropy)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "token scaling"])
@pytest.mark.parametrize("at", [slice(0, 10), slice(2050, 2060), slice(5990, 6000)], ids=["first", "middle", "last"])
def test_classes_with_a_logit_of_minus_infinity_contribute_nothing(at, scaled):
    """There are whole blocks of such classes too, before and after the finite ones."""
    values, target = logits_of(3, 6000).detach(), torch.tensor([3, 4, 5], device=DEVICE) + at.start
    masked = torch.full_like(values, -torch.inf)
    masked[:, at] = values[:, at]
    masked.requires_grad_()
    few = values[:, at].clone().requires_grad_()
    actual, expected = _run(masked, target, token_scaling=scaled), _run(few, target - at.start, token_scaling=scaled)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    upstream = [torch.rand_like(y) + 1 for y in actual]
    (gradient,), (finite_gradient,) = (
        torch.autograd.grad(actual, masked, upstream), torch.autograd.grad(expected, few, upstream),
    )  # fmt: skip
    torch.testing.assert_close(gradient[:, at], finite_gradient, rtol=1e-5, atol=1e-6)
    assert gradient.count_nonzero() == finite_gradient.numel()
    assert gradient.isfinite().all()


def test_entropy_is_right_from_certain_to_uniform_rows():
    logits = torch.zeros(3, 5000, device=DEVICE)
    logits[1, 4000] = 300.0
    logits[2] += 1000.0
    logits.requires_grad_()
    entropy = tigon.cross_entropy(logits, torch.full((3,), 7, device=DEVICE), **RESULT_FLAGS).entropy
    torch.testing.assert_close(entropy, torch.tensor([math.log(5000), 0.0, math.log(5000)], device=DEVICE))
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert gradient.abs().max() < 1e-9


@pytest.mark.parametrize("bad", [30, 10**6, 2**40, -1, -101])
def test_out_of_range_target_gives_nan_outputs_in_its_row_only(bad):
    logits, target = logits_of(4, 30), torch.tensor([3, bad, -100, 29], device=DEVICE)
    loss, log_probs, entropy = _run(logits, target, reduction="none", token_scaling=True, z_loss=0.1)
    for values in (loss, log_probs):
        assert values.isnan().tolist() == [False, True, False, False]
    assert entropy.isfinite().all()
    for output in (loss, log_probs):
        (gradient,) = torch.autograd.grad(output.sum(), logits, retain_graph=True)
        assert gradient.isnan().all(-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_nan_results(value):
    logits, target = logits_of(3, 3000).detach(), torch.tensor([3, 4, 5], device=DEVICE)
    logits[1, 2900] = value
    for values in _run(logits, target, reduction="none"):
        assert values.isnan().tolist() == [False, True, False]


def test_token_scaling_is_a_constant_factor():
    logits, target = logits_of(8, 30), target_of(8, v=30)
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": "none", "return_z_loss": True}
    plain = tigon.cross_entropy(logits, target, return_log_probs=True, **options)
    scaled = tigon.cross_entropy(logits, target, token_scaling=True, **options)
    p = plain.log_probs.detach().exp()
    torch.testing.assert_close(scaled.loss, p * plain.loss)
    torch.testing.assert_close(scaled.z_loss, p * plain.z_loss)
    assert scaled.log_probs is None
    actual, expected = (torch.autograd.grad(y.sum(), logits)[0] for y in (scaled.loss, p * plain.loss))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_inplace_does_not_change_logits_that_outputs_need():
    x, target = logits_of(6, 30), target_of(6, v=30)
    for requested in ({"return_log_probs": True}, {"return_entropy": True}):
        hidden = x * 1.0
        result = tigon.cross_entropy(hidden, target, inplace=True, **requested)
        assert torch.equal(hidden, x)
        output = next(y for y in (result.log_probs, result.entropy) if y is not None)
        (gradient,) = torch.autograd.grad(result.loss + output.sum(), hidden)
        loss, log_probs, entropy = _reference(x, target)
        expected = loss + (log_probs if "return_log_probs" in requested else entropy).sum()
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, x)[0], rtol=1e-5, atol=1e-6)


def test_module_returns_outputs_and_refuses_bad_input():
    logits, target = logits_of(8, 30), target_of(8, v=30)
    module = tigon.CrossEntropyLoss(token_scaling=True, **RESULT_FLAGS)
    expected = tigon.cross_entropy(logits, target, token_scaling=True, **RESULT_FLAGS)
    for a, b in zip(module(logits, target), expected, strict=True):
        assert a is b is None or torch.equal(a, b)
    with pytest.raises(TypeError, match="cross_entropy: token_scaling must be a bool, got 1.0"):
        tigon.cross_entropy(logits, target, token_scaling=1.0)
