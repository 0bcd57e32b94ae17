"""A patched model, layer or head runs its own forward, also if its first argument is another module."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import Tensor, nn

import tigon
from tigon.recognition.replacement import find_replacement

transformers = pytest.importorskip("transformers")


class Distiller(nn.Module):
    """A model that is not a transformers model, and whose first argument is its teacher."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def forward(self, teacher: nn.Module, input_ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = getattr(teacher, "student", teacher)(input_ids).logits
        return (self.student(input_ids).logits - target).square().mean() + len([*teacher.children()])


class Student(transformers.LlamaForCausalLM):
    """A causal language model that adds the loss of a teacher to its own loss."""

    def forward(self, teacher: nn.Module | None = None, **batch: Tensor):
        outputs = super().forward(**batch)
        if teacher is not None:
            outputs.loss = outputs.loss + 0.5 * teacher(**batch).loss
        return outputs


DUPLICATES = {"itself": lambda m: m, "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize(("memory", "way"), [("lean", "itself"), ("lean", "deepcopy"), ("lean+mlp", "pickle")])
def test_a_model_that_takes_its_teacher_first_runs_its_own_forward(make_model, batch, memory, way):
    tokens = batch["input_ids"]
    make = lambda: make_model(num_hidden_layers=1)
    stock, model, teacher = Distiller(make()), Distiller(make()), make_model(num_hidden_layers=1, mlp_bias=False)
    tigon.patch(model, memory=memory)
    model = DUPLICATES[way](model)
    torch.testing.assert_close(model(teacher, tokens), stock(teacher, tokens))
    torch.testing.assert_close(model(model, tokens), stock(stock, tokens))


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


@pytest.mark.parametrize("name", ["", "model", "model.layers.0", "model.layers.0.mlp", "model.norm", "lm_head"])
def test_no_replaced_forward_runs_for_a_module_among_its_arguments(make_model, name):
    """A module that expects a tensor raises the same error for a module as the stock module does."""
    model, stock = make_model(), make_model()
    tigon.patch(model, memory="lean+mlp:1")
    module, stock_module = model.get_submodule(name), stock.get_submodule(name)
    assert find_replacement(module) is not None
    errors = []
    for each in (module, stock_module):
        other = copy.deepcopy(stock_module)
        other.forward = lambda *args, **kwargs: pytest.fail("the forward of an argument ran")
        with pytest.raises((TypeError, AttributeError, ValueError)) as error:
            each(other)
        errors.append(type(error.value))
    assert errors[0] is errors[1]


# --- what other code reads -------------------------------------------------------------------------


def test_signatures_and_sources_of_all_forwards_are_those_of_stock(make_model):
    model, stock = make_model("qwen3"), make_model("qwen3")
    tigon.patch(model, memory="lean")
    for duplicate in DUPLICATES.values():
        names = []
        for (name, module), stock_module in zip(duplicate(model).named_modules(), stock.modules(), strict=True):
            if find_replacement(module) is not None:
                names.append(name)
                for ask in (inspect.signature, inspect.getsource):
                    assert ask(module.forward) == ask(stock_module.forward), name
        assert {"", "model", "lm_head", "model.layers.0", "model.layers.1.self_attn", "model.norm"} <= {*names}
