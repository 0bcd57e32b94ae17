"""`tigon.DistillationLoss` is `linear_distillation` with its options in the constructor."""

import pytest
import torch

import tigon

pytestmark = pytest.mark.no_interpreter("The tests of linear_distillation launch the kernel.")


def test_the_module_computes_the_function():
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(2, 3, 8), torch.randn(20, 8, requires_grad=True), torch.randn(20)
    targets = torch.tensor([[3, -1, 4], [19, 0, -1]])
    teacher = {
        "teacher_hidden": torch.randn(2, 3, 6), "teacher_weight": torch.randn(24, 6), "teacher_bias": torch.randn(24),
        "num_items": 5.0,
    }  # fmt: skip
    options = {
        "beta": 0.3, "temperature": 2.0, "soft_weight": 4.0, "hard_weight": 0.5, "softcap": 5.0, "logit_scale": 0.5,
        "teacher_softcap": 7.0, "teacher_logit_scale": 2.0, "ignore_index": -1, "return_parts": True,
        "return_entropy": True,
    }  # fmt: skip
    module = tigon.DistillationLoss(**options)
    results = module(hidden, weight, targets, bias=bias, **teacher)
    expected = tigon.linear_distillation(hidden, weight, targets, bias=bias, **teacher, **options)
    for actual, wanted in zip(results, expected, strict=True):
        assert torch.equal(actual, wanted)


def test_a_tensor_is_no_option_and_an_option_is_no_tensor():
    hidden, weight = torch.randn(3, 8), torch.randn(5, 8)
    with pytest.raises(ValueError, match=r"DistillationLoss: an option must be one of .* got 'teacher_hidden'"):
        tigon.DistillationLoss(teacher_hidden=hidden)
    with pytest.raises(ValueError, match=r"DistillationLoss: a tensor must be one of 'bias', .* got 'beta'"):
        tigon.DistillationLoss()(hidden, weight, beta=0.5)


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match=r"DistillationLoss: an option must be one of 'divergence', .* got 'alpha'"):
        tigon.DistillationLoss(alpha=0.5)
