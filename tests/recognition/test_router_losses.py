"""Functions that compute the loss of routers are found by what they compute, and anything else keeps its function."""

import copy
import linecache
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from recognition.modules import define
from tigon.recognition.parts.router_losses import RouterLossForward, find_router_losses

pytestmark = pytest.mark.no_interpreter("It calls no kernel.")


def one_hot_loss(gate_logits, num_experts=None, top_k=2, attention_mask=None):
    """Compute the loss as transformers 5.13 does."""
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    gates = torch.cat(gate_logits, dim=0)
    p = F.softmax(gates, dim=-1)
    chosen = F.one_hot(torch.topk(p, top_k, dim=-1)[1], num_experts)
    if attention_mask is None:
        counts, means = torch.mean(chosen.float(), dim=0), torch.mean(p, dim=0)
    else:
        batch, length = attention_mask.shape
        layers = gates.shape[0] // (batch * length)
        mask = attention_mask[None, :, :, None, None].expand((layers, batch, length, top_k, num_experts))
        mask = mask.reshape(-1, top_k, num_experts)
        counts = torch.sum(chosen.float() * mask, dim=0) / torch.sum(mask, dim=0)
        row_mask = attention_mask[None, :, :, None].expand((layers, batch, length, num_experts))
        row_mask = row_mask.reshape(-1, num_experts)
        means = torch.sum(p * row_mask, dim=0) / torch.sum(row_mask, dim=0)
    return torch.sum(counts * means.unsqueeze(0)) * num_experts


calls: list[int] = []
# Expressions of the loss of a function whose arguments have the names that recognition requires.
ARGUMENTS = "logits, num_experts, top_k, attention_mask"
STOCK = f"one_hot_loss({ARGUMENTS})"
OTHERS = {
    "counting": f"calls.append(1) or {STOCK}",
    "no factor": f"{STOCK} / num_experts",
    "no mask": "one_hot_loss(logits, num_experts, top_k)",
    "first choice": "one_hot_loss(logits, num_experts, 1, attention_mask)",
    "last layer": "one_hot_loss(logits[-1:], num_experts, top_k, attention_mask)",
    "no gradient": f"{STOCK}.detach() + 0 * sum(x.sum() for x in logits)",
    "in fp64": f"{STOCK}.double()",
    "more arguments": f"scale * {STOCK}",
}
FUNCTIONS: dict[str, Any] = {"relu": F.relu, "none": None}
FUNCTIONS |= {
    name: define(f"return {loss}", globals(), ARGUMENTS + ", scale=1.0" * ("scale" in loss))
    for name, loss in OTHERS.items()
}


def _router(logits, num_experts, top_k, attention_mask):
    return one_hot_loss(logits, num_experts, top_k, attention_mask)


class Model(nn.Module):
    """Its forward returns the loss of its argument."""

    def forward(self, logits, mask=None, top_k=2):
        return one_hot_loss(logits, logits[0].shape[1], top_k, attention_mask=mask)


def _logits(layers: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(layers))


def _model_with(function) -> type[nn.Module]:
    """Return a class whose forward calls a global `loss`, which is the function."""
    scope = {"nn": nn, "loss": function, "__name__": __name__}
    source = "class Other(nn.Module):\n    def forward(self, x, mask=None):\n        return loss(x, 6, 2, mask)\n"
    # The recipe reads the source of the forward.
    file = f"<model with {id(function)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), scope)
    return scope["Other"]


@pytest.mark.parametrize("function", [one_hot_loss, _router], ids=["one hot", "a wrapper of it"])
def test_a_function_with_the_losses_of_the_op_is_found(function):
    assert find_router_losses(_model_with(function)) == (("loss", "load_balancing_loss"),)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_anything_else_keeps_its_function(function):
    assert find_router_losses(_model_with(function)) == ()
    assert not calls


@pytest.fixture
def op_calls(monkeypatch) -> list:
    """Return the list to which each call of the op adds its arguments."""
    recorded, op = [], tigon.recognition.parts.router_losses.load_balancing_loss
    monkeypatch.setattr(
        tigon.recognition.parts.router_losses, "load_balancing_loss", lambda *args: recorded.append(args) or op(*args)
    )
    return recorded


def test_the_op_runs_and_the_file_keeps_its_function(op_calls):
    model, forward, logits = Model(), RouterLossForward(Model, find_router_losses(Model)), _logits()
    mask = torch.ones(2, 4, dtype=torch.int64)
    mask[1, 2:] = 0
    for m in (None, mask):
        torch.testing.assert_close(forward(model, logits, m), model(logits, m))
    assert len(op_calls) == 2
    assert Model.forward.__globals__["one_hot_loss"] is one_hot_loss


def test_arguments_that_the_op_does_not_take_go_to_the_stock_function(op_calls):
    model, forward = Model(), RouterLossForward(Model, (("one_hot_loss", "load_balancing_loss"),))
    run = forward.functions["one_hot_loss"]
    assert run(None, 6, 2, None) == run(list(_logits()), 6, 2, None) == 0
    wide = _logits(dtype=torch.float64)
    assert torch.equal(forward(model, wide), model(wide))
    with pytest.raises(RuntimeError):
        run(_logits(), 6, 7, None)
    with pytest.raises(TypeError):
        run(_logits(), 6, 2, None, None)
    with pytest.raises(TypeError, match="unknown"):
        run(_logits(), 6, 2, unknown=None)
    double = lambda x: forward(model, (x,))
    tangents = torch.func.jvp(double, _logits(1), _logits(1))
    expected = torch.func.jvp(lambda x: model((x,)), _logits(1), _logits(1))
    torch.testing.assert_close(tangents, expected)
    assert not op_calls


def test_a_function_that_replaces_the_one_of_the_file_is_used(op_calls, monkeypatch):
    model, forward, logits = Model(), RouterLossForward(Model, (("one_hot_loss", "load_balancing_loss"),)), _logits()
    expected = forward(model, logits)
    with monkeypatch.context() as context:
        context.setitem(Model.forward.__globals__, "one_hot_loss", lambda *args, **kwargs: torch.tensor(3.0))
        assert forward(model, logits) == 3.0
    assert torch.equal(forward(model, logits), expected)
    monkeypatch.setattr(Model, "forward", lambda self, *args: torch.tensor(4.0))
    assert forward(model, logits) == 4.0


def test_a_helper_that_was_replaced_is_used(op_calls, monkeypatch):
    cls = _model_with(_router)
    forward, logits = RouterLossForward(cls, (("loss", "load_balancing_loss"),)), _logits()
    forward(cls(), logits)
    monkeypatch.setitem(globals(), "one_hot_loss", lambda *args: torch.tensor(3.0))
    assert forward(cls(), logits) == 3.0
    assert len(op_calls) == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_run_the_op(duplicate, op_calls):
    forward, logits = duplicate(RouterLossForward(Model, (("one_hot_loss", "load_balancing_loss"),))), _logits()
    torch.testing.assert_close(forward(Model(), logits), Model()(logits))
    assert len(op_calls) == 1


def test_a_copy_does_not_run_the_op_if_the_function_was_replaced_in_between(op_calls, monkeypatch):
    pickled = pickle.dumps(RouterLossForward(Model, (("one_hot_loss", "load_balancing_loss"),)))
    monkeypatch.setitem(Model.forward.__globals__, "one_hot_loss", lambda *args, **kwargs: torch.tensor(3.0))
    assert pickle.loads(pickled)(Model(), _logits()) == 3.0
    assert not op_calls
