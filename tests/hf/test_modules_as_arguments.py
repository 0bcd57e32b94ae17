"""A patched model, layer or head runs its own forward, also if its first argument is another module."""

import copy

import pytest
import torch
from torch import Tensor, nn

import tigon

transformers = pytest.importorskip("transformers")


class Student(transformers.LlamaForCausalLM):
    """A causal language model that adds the loss of a teacher to its own loss."""

    def forward(self, teacher: nn.Module | None = None, **batch: Tensor):
        outputs = super().forward(**batch)
        if teacher is not None:
            outputs.loss = outputs.loss + 0.5 * teacher(**batch).loss
        return outputs


@pytest.mark.parametrize("memory", ["default", "lean+mlp:1"])
def test_a_language_model_that_takes_its_teacher_first_has_the_stock_loss(make_model, batch, memory):
    teacher, patched_teacher = make_model(), make_model()
    stock = Student(teacher.config).train()
    model = copy.deepcopy(stock)
    tigon.patch(model, memory=memory)
    tigon.patch(patched_teacher, memory=memory)
    expected = stock(teacher, **batch).loss
    assert expected > stock(**batch).loss
    for argument in (teacher, patched_teacher):
        torch.testing.assert_close(model(argument, **batch).loss, expected)
