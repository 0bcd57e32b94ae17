"""Forwards with fused statements in changed and copied models, with hooks, and in other ways of running a model."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from op_cases import DEVICE
from recognition.test_fused_statements import WIDTH, Layer, Norm, assert_close, inputs, make, pair, step
from tigon.recognition.replacement import find_replacement
from tigon.recognition.rewriting import fused_statements
from tigon.testing import assert_accurate

pytestmark = pytest.mark.usefixtures("no_symbolic_runs")


class DoubledCall(Norm):
    def __call__(self, x):
        return 2 * super().__call__(x)


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def freeze(is_trained):
    return lambda model: [p.requires_grad_(is_trained(name)) for name, p in model.named_parameters()]


def replace_the_call(where: str):
    def change(model: nn.Module) -> None:
        norm = model[0].get_submodule(where)
        norm._call_impl = lambda x: 2 * nn.Module._call_impl(norm, x)

    return change


def exchange_layers(model: nn.Module) -> None:
    layer = DoubledLinear(WIDTH, 16, bias=False).to(DEVICE)
    layer.load_state_dict(model[0].attention.k.state_dict())
    model[0].attention.k = layer
    model[1].after = nn.LayerNorm(WIDTH, device=DEVICE)


NORM_NAMES = ("before", "after")
# A change of the stock and of the patched model, before or after the patch.
CHANGES = {
    "frozen norms": freeze(lambda name: not any(norm in name for norm in NORM_NAMES)),
    "frozen layers": freeze(lambda name: any(norm in name for norm in NORM_NAMES)),
    "all frozen but one": freeze(lambda name: name == "0.attention.k.weight"),
    "a class with another call": lambda model: setattr(model[0].after, "__class__", DoubledCall),
    "a call of a norm with a sum": replace_the_call("before"),
    "a call of a norm with a residual": replace_the_call("after"),
    "exchanged layers": exchange_layers,
}


@pytest.mark.parametrize("when", ["before the patch", "after the patch"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.sampled(in_interpreter=3)
def test_a_changed_model_has_the_stock_output_and_gradients(change, when):
    (model, stock), x = (pair() if when == "after the patch" else (make(), make())), inputs()
    change(model), change(stock)
    if when == "before the patch":
        tigon.patch(model)
    assert_close(step(model, x), step(stock, x))
    assert_close(step(model, x.detach()), step(stock, x.detach()))


@pytest.mark.parametrize("where", ["before", "after", "attention.q"])
@pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_are_called(where, hook):
    (model, stock), x, calls = pair(), inputs(), []
    getattr(model[0].get_submodule(where), f"register_{hook}")(lambda *args: calls.append(1) or None)
    assert_close(step(model, x), step(stock, x))
    assert calls


class Calls(nn.Module):
    """A module that calls a method, a function and perhaps None, where other modules call a norm and linear layers."""

    def __init__(self, k: bool):
        super().__init__()
        self.norm, self.q, self.k = Norm(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH) if k else None
        self.squash = torch.tanh

    def twice(self, hidden):
        return 2 * hidden

    def forward(self, hidden):
        residual = hidden
        hidden = self.twice(hidden)
        hidden = residual + hidden
        hidden = self.norm(hidden)
        q = self.squash(hidden)
        p = self.q(hidden)
        k = self.k(hidden) if self.k is not None else p
        return q + p + k


@pytest.mark.parametrize("k", [False, True])
def test_a_forward_may_call_any_attribute(k):
    model, x = Calls(k).to(DEVICE), inputs()
    expected = step(model, x)
    assert any(e.part == "fused_statements" for e in tigon.patch(model).replaced)
    assert_close(step(model, x), expected)


def test_hooks_of_accelerate_on_a_norm_run():
    """These hooks wrap the forward, and the wrapper has all attributes of the replacement."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Counter(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    (model, stock), x, hook = pair(), inputs(), Counter()
    for norm in (model[0].before, model[0].after):
        hooks.add_hook_to_module(norm, hook)
    assert_close(step(model, x), step(stock, x))
    assert hook.calls == 2


def test_a_model_that_is_unpickled_without_the_source_of_its_class_runs_the_stock_forward(monkeypatch):
    (model, stock), x = pair(), inputs()
    data = pickle.dumps(model)
    monkeypatch.setattr(fused_statements, "fuse_statements", lambda function: None)
    assert_close(step(pickle.loads(data), x), step(stock, x))


class TakesAMixer(Layer):
    """A layer whose first argument is another layer, which it calls."""

    def forward(self, mixer, hidden):
        residual = hidden
        hidden = residual + mixer(hidden)
        residual = hidden
        hidden = self.after(hidden)
        return residual + self.down(F.silu(self.up(hidden)))


def test_a_layer_may_take_another_layer_first():
    stock, x = TakesAMixer().to(DEVICE), inputs()
    model = copy.deepcopy(stock)
    assert any(e.part == "fused_statements" for e in tigon.patch(model).replaced)
    for mixer in (Layer().to(DEVICE), nn.Identity()):
        torch.testing.assert_close(model(mixer, x), stock(mixer, x))


def test_a_residual_of_another_shape_or_dtype_is_added_by_torch():
    norm = Norm().to(DEVICE)
    tigon.patch(norm)
    for a, b in [
        (torch.randn(2, 3, WIDTH), torch.randn(WIDTH)),
        (torch.randn(2, WIDTH), torch.randn(2, WIDTH).half()),
        (torch.randn(2, WIDTH), 1.0),
    ]:
        a, b = a.to(DEVICE), b.to(DEVICE) if isinstance(b, Tensor) else b
        y, total = fused_statements.add_norm(norm, a, b)
        assert torch.equal(total, a + b)
        torch.testing.assert_close(y, norm(a + b))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_stock_output_and_gradients(reentrant):
    (model, stock), x = pair(), inputs()
    leaves = [x, *model.parameters()]
    y = model[1](torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=reentrant))
    y.square().sum().backward()
    results = [y, *(t.grad for t in leaves)]
    assert_close(results, step(stock, x))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_read_their_own_weights(duplicate):
    (model, stock), x = pair(), inputs()
    other = duplicate(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_close(step(other, x), step(stock, x))
    assert all(find_replacement(m) is not None for m in (other[0], other[0].attention))


def test_a_step_under_autocast_is_as_accurate_as_the_stock_one():
    (model, stock), x = pair(), inputs()
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, eager = step(model, x), step(stock, x)
    exact = step(make().double(), x.detach().double().requires_grad_())
    for i, triple in enumerate(zip(ours, eager, exact, strict=True)):
        assert_accurate(*triple, msg=str(i))
