"""The loss stays in the head with the two functions that ZeRO-3 of DeepSpeed puts around every linear layer.

`make test-deepspeed` runs ZeRO-3 itself. These tests need no DeepSpeed, so `make test` notices if its functions would
turn the fused loss off.
"""

import pytest
import torch
import torch.nn.functional as F

import tigon
from tigon.hf.logits import SKIPPED_LOGITS
from tigon.runtime.stock import linears_are_stock

pytestmark = pytest.mark.no_interpreter("It compares which code runs, and launches no kernel of its own.")

# The function reads and sets a global, as that of DeepSpeed does: `get_accelerator` caches the accelerator.
SOURCE = """
import torch
accelerator = None

def get_accelerator():
    global accelerator
    if accelerator is None:
        accelerator = "cpu"
    return accelerator

def zero3_linear_wrap(input, weight, bias=None):
    get_accelerator()
    output = input.matmul(weight.t())
    return output if bias is None else output + bias
"""


def make_linear(module_name):
    variables = {"__name__": module_name}
    exec(SOURCE, variables)
    return variables["zero3_linear_wrap"]


class BeforeBackward(torch.autograd.Function):
    """ZeRO-3 gathers the weights of a module in the backward of such a function."""

    @staticmethod
    def forward(outputs):
        return outputs.detach()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def loss_part(report):
    return next(entry for entry in report.entries if entry.part == "loss")


def test_the_linear_of_zero_counts_as_stock(make_model, batch, monkeypatch):
    expected = make_model()(**batch).loss
    monkeypatch.setattr(F, "linear", make_linear("deepspeed.runtime.zero.linear"))
    assert linears_are_stock()
    model = make_model()
    assert loss_part(tigon.patch(model)).replaced
    outputs = model(**batch)
    assert outputs.logits is SKIPPED_LOGITS
    torch.testing.assert_close(outputs.loss, expected)


def test_a_linear_of_another_library_does_not(make_model, monkeypatch):
    monkeypatch.setattr(F, "linear", make_linear("another.library"))
    assert not linears_are_stock()
    assert not loss_part(tigon.patch(make_model())).replaced


def test_the_output_of_the_head_may_pass_through_a_function_that_detaches_it(make_model, batch):
    stock, model = make_model(), make_model()
    tigon.patch(model)

    def detaching_hook(module, args, output):
        return BeforeBackward.apply(output)

    # Tigon trusts the hooks of DeepSpeed to keep the values of outputs.
    detaching_hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model.lm_head.register_forward_hook(detaching_hook)
    outputs, expected = model(**batch), stock(**batch)
    assert outputs.logits is SKIPPED_LOGITS
    outputs.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, stock.lm_head.weight.grad)
