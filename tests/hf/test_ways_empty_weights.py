"""Weights that exist only during the forward and the backward of their own module, as in ZeRO-3.

This file emulates, in one process, the effects of ZeRO-3 on a patched model. test_two_ranks.py runs DeepSpeed itself.
"""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import tigon
from hf.ways import assert_same
from op_cases import one_in


class Guarded(OrderedDict):
    """The parameters of a module. Reading one while it is empty raises an error."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.in_step = module, False

    def __getitem__(self, name: str):
        parameter = super().__getitem__(name)
        if self.in_step and parameter is not None and parameter.numel() == 0:
            raise AssertionError(f"a weight of {type(self.module).__name__} is read where it is empty")
        return parameter


def empty_weights(model: nn.Module) -> None:
    """Empty the weights of a model. The attribute `ds_shape` of a weight holds its shape."""
    for parameter in model.parameters():
        parameter.full, parameter.ds_shape = parameter.data, parameter.shape
        parameter.data = torch.empty(0)


def add_engine_hooks(model: nn.Module) -> None:
    """Add hooks that fill and empty the weights to every module, even to modules without parameters."""

    def gather(module: nn.Module, *args) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.full

    def release(module: nn.Module, *args) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = torch.empty(0)

    for hook in (gather, release):
        hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    for module in model.modules():
        guarded = Guarded(module)
        for name, parameter in module._parameters.items():
            guarded[name] = parameter
        module._parameters = guarded
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        if any(p is not None for p in module._parameters.values()):
            module.register_full_backward_pre_hook(gather)


def step(model: nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    tensors = [m._parameters for m in model.modules()]
    for guarded in tensors:
        guarded.in_step = True
    loss = model(**batch).loss
    for guarded in tensors:
        guarded.in_step = False
    assert all(p.numel() == 0 for p in model.parameters())
    loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.full
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@one_in(
    4,
    model_type=["llama", "qwen3", "gemma2", "phi3"],
    order=["patch first", "engine first"],
    tied={"untied": False, "tied": True},
)
def test_empty_weights_give_the_results_of_stock(make_model, batch, monkeypatch, model_type, order, tied):
    model, stock = (make_model(model_type, tie_word_embeddings=tied) for _ in range(2))
    empty_weights(model)
    if order == "engine first":
        add_engine_hooks(model)
    report = tigon.patch(model)
    assert {entry.part for entry in report.replaced} == {"rms_norm", "glu", "rope", "fused_statements", "loss"}
    assert not report.left_alone, report
    if order == "patch first":
        add_engine_hooks(model)
    calls, runs_kernels = [], tigon.ops.mlps.glu.runs_kernels
    monkeypatch.setattr("tigon.ops.mlps.glu.runs_kernels", lambda *x: calls.append(x) or runs_kernels(*x))
    actual = step(model, batch)
    assert len(calls) == 2, "hooks on an activation that move no weights turned off the gated MLPs"
    loss = stock(**batch).loss
    loss.backward()
    expected = {"loss": loss.detach(), **{name: p.grad for name, p in stock.named_parameters()}}
    assert_same(actual, expected)
