"""The divergence of TRL's distillation trainer has the values and gradients of TRL's own functions."""

import inspect

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("accelerate")

from trl.trainer import distillation_trainer

from tigon.integrations import trl
from tigon.integrations.trl_divergence import chunked_divergence_loss

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")

CAPS = {"student_final_logit_softcapping": 5.0, "teacher_final_logit_softcapping": 7.0}
SCALES = {"student_logit_scale": 0.6, "teacher_logit_scale": 1.3, "temperature": 1.7}


def make() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    return {
        "student_hidden": normal(12, 16).requires_grad_(), "student_weight": normal(90, 16).requires_grad_(),
        "student_bias": normal(90).requires_grad_(), "teacher_hidden": normal(12, 24),
        "teacher_weight": normal(90, 24), "teacher_bias": normal(90),
    }  # fmt: skip


def run(function, num_items=None, weight_dtype=torch.float32, mask=True, beta=0.3, **options: float):
    tensors = make()
    tensors["student_weight"] = tensors["student_weight"].detach().to(weight_dtype).requires_grad_()
    completion_mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0]]) * mask
    loss, entropy, count = function(
        tensors["student_hidden"].view(2, 6, 16), tensors["teacher_hidden"].view(2, 6, 24), tensors["student_weight"],
        tensors["teacher_weight"], completion_mask, beta, num_items_in_batch=num_items,
        student_lm_head_bias=tensors["student_bias"], teacher_lm_head_bias=tensors["teacher_bias"], **options,
    )  # fmt: skip
    loss.backward()
    return [loss.detach(), entropy, count, *(x.grad for x in tensors.values() if x.requires_grad)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("options", [{}, SCALES, SCALES | CAPS], ids=["plain", "scales", "caps"])
def test_the_loss_is_that_of_trl(beta, options):
    stock = run(distillation_trainer._chunked_divergence_loss, beta=beta, **options)
    torch.testing.assert_close(run(chunked_divergence_loss, beta=beta, **options), stock, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("num_items", "mask"), [(5, True), (torch.tensor(5), True), (5, False), (None, False)])
def test_the_divisor_of_the_loss_is_that_of_trl(num_items, mask):
    stock = run(distillation_trainer._chunked_divergence_loss, num_items, mask=mask)
    torch.testing.assert_close(run(chunked_divergence_loss, num_items, mask=mask), stock, rtol=1e-4, atol=2e-5)


def test_a_weight_of_another_dtype_is_cast():
    stock = run(distillation_trainer._chunked_divergence_loss, None, torch.bfloat16)
    for ours, theirs in zip(run(chunked_divergence_loss, None, torch.bfloat16), stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if ours.dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def test_enable_replaces_a_function_of_the_same_arguments_and_disable_restores_it():
    before = distillation_trainer._chunked_divergence_loss
    assert [*inspect.signature(chunked_divergence_loss).parameters] == [*inspect.signature(before).parameters]
    trl.enable()
    assert distillation_trainer._chunked_divergence_loss is chunked_divergence_loss
    trl.disable()
    assert distillation_trainer._chunked_divergence_loss is before
