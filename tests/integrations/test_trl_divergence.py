"""The divergence of TRL's distillation trainer has the values and gradients of TRL's own functions."""

import inspect

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("accelerate")

from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.trainer import distillation_trainer

from tigon.integrations import trl
from tigon.integrations.trl_divergence import ChunkedDivergence, chunked_divergence_loss

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


def run(function, beta: float, **options: float) -> list[torch.Tensor]:
    tensors = make()
    signature = inspect.signature(ChunkedDivergenceFunction.forward)
    arguments = signature.bind(None, *tensors.values(), beta, **options)
    arguments.apply_defaults()
    divergence, entropy = function.apply(*arguments.args[1:])
    divergence.backward(torch.linspace(-1.0, 2.0, 12))
    return [divergence.detach(), entropy, *(x.grad for x in tensors.values() if x.requires_grad)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("options", [{}, SCALES, SCALES | CAPS], ids=["plain", "scales", "caps"])
def test_each_token_has_the_divergence_of_trl(beta, options):
    for ours, stock in zip(
        run(ChunkedDivergence, beta, **options), run(ChunkedDivergenceFunction, beta, **options), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=2e-5)


def run_loss(function, num_items, weight_dtype=torch.float32, mask=True):
    tensors = make()
    tensors["student_weight"] = tensors["student_weight"].detach().to(weight_dtype).requires_grad_()
    completion_mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0]]) * mask
    loss, entropy, count = function(
        tensors["student_hidden"].view(2, 6, 16), tensors["teacher_hidden"].view(2, 6, 24), tensors["student_weight"],
        tensors["teacher_weight"], completion_mask, 0.3, num_items, tensors["student_bias"], tensors["teacher_bias"],
        **SCALES, **CAPS,
    )  # fmt: skip
    loss.backward()
    return [loss.detach(), entropy, count, *(x.grad for x in tensors.values() if x.requires_grad)]


@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(5)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("mask", [True, False], ids=["some tokens", "no token"])
def test_the_loss_is_that_of_trl(num_items, mask):
    stock = run_loss(distillation_trainer._chunked_divergence_loss, num_items, mask=mask)
    for ours, theirs in zip(run_loss(chunked_divergence_loss, num_items, mask=mask), stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_a_weight_of_another_dtype_is_cast():
    stock = run_loss(distillation_trainer._chunked_divergence_loss, None, torch.bfloat16)
    for ours, theirs in zip(run_loss(chunked_divergence_loss, None, torch.bfloat16), stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if ours.dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def test_the_arguments_are_those_of_trl():
    parameters = lambda function: list(inspect.signature(function).parameters)
    assert parameters(chunked_divergence_loss) == parameters(distillation_trainer._chunked_divergence_loss)
    assert parameters(ChunkedDivergence.apply) == parameters(ChunkedDivergenceFunction.forward)[1:]


def test_enable_replaces_the_functions_and_disable_restores_them():
    names = ("ChunkedDivergenceFunction", "_chunked_divergence_loss")
    before = [getattr(distillation_trainer, name) for name in names]
    trl.enable()
    assert [getattr(distillation_trainer, name) for name in names] == [ChunkedDivergence, chunked_divergence_loss]
    trl.disable()
    assert [getattr(distillation_trainer, name) for name in names] == before
