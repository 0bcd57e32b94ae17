"""Mixtures that run every expert on every token are recognised, and `moe_mlp` runs only the chosen experts."""

import copy

import pytest
import torch
from torch import Tensor, nn

import tigon
from recognition.expert_steps import assert_same, step
from tigon.ops.experts.moe_mlp import moe_mlp
from tigon.recognition.guards.guard import install_guarded
from tigon.recognition.parts import mixtures
from tigon.recognition.parts.mixtures import MixtureRecipe, recognise_mixture

transformers = pytest.importorskip("transformers", "5.0")
llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")

E, H, INNER = 6, 32, 24


def _mixture(cls: type | None = None, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    sizes = {"hidden_size": H, "intermediate_size": INNER, "intermediate_size_mlp": 40, "num_local_experts": E}
    config = transformers.Llama4TextConfig(**sizes | {"num_experts_per_tok": 2} | options)
    module = (cls or llama4.Llama4TextMoe)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.to(dtype).train()


def _input(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*(shape or (2, 11)), H, generator=generator).to(dtype).requires_grad_()


def _patched(module: nn.Module) -> nn.Module:
    recipe = recognise_mixture(module)
    assert isinstance(recipe, MixtureRecipe), recipe
    install_guarded(module, recipe)
    return module


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Return a list that grows with every call of the op."""
    calls: list[int] = []
    monkeypatch.setattr(mixtures, "moe_mlp", lambda *args, **options: calls.append(1) or moe_mlp(*args, **options))
    return calls


@pytest.mark.parametrize("shape", [(2, 11), (1, 1), (5,)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 3},
        {"hidden_act": "gelu"},
        {"num_local_experts": 16},
        {"intermediate_size": H},
        {"hidden_size": 48, "num_local_experts": 24},
    ],
    ids=str,
)
def test_outputs_and_gradients_are_the_stock_ones(options, shape, calls):
    stock = _mixture(**options)
    module = _patched(copy.deepcopy(stock))
    x = _input(*shape)
    if "hidden_size" in options:
        x = torch.cat([x, x[..., :16]], -1).detach().requires_grad_()
    calls.clear()
    assert_same(step(module, [x]), step(stock, [x]))
    assert calls, "the stock forward was called"


def test_patch_replaces_the_mixture_and_the_shared_mlp():
    report = tigon.patch(nn.Sequential(_mixture()))
    assert {entry.part: entry.names for entry in report.replaced} == {"experts": ["0"], "glu": ["0.shared_expert"]}


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


CHANGES = {
    "number of choices": lambda module: setattr(module.router, "top_k", 4),
    "activation": lambda module: setattr(module.experts, "act_fn", nn.Tanh()),
    "hook on the experts": lambda module: module.experts.register_forward_hook(lambda m, args, y: 2 * y),
    "hook before the experts": lambda module: module.experts.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
    "hook on the activation": lambda module: module.experts.act_fn.register_forward_hook(lambda m, args, y: 2 * y),
    "hook on the router": lambda module: module.router.register_forward_hook(lambda m, args, y: (y[0] / 2, y[1])),
    "forward of the experts": lambda module: setattr(module.experts, "forward", lambda x: x * 3),
    "forward of the router": lambda module: setattr(module.router, "forward", lambda x: (x[:, :E].relu(), x[:, :E])),
    "experts": lambda module: setattr(module, "experts", _mixture(hidden_act="gelu").experts),
    "weights": lambda module: nn.utils.parametrize.register_parametrization(module.experts, "gate_up_proj", Half()),
    "shared MLP": lambda module: setattr(module, "shared_expert", nn.Linear(H, H).requires_grad_(False)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_after_the_patch_has_the_effect_that_it_has_on_the_stock_module(change):
    stock, x = _mixture(), _input()
    module = _patched(copy.deepcopy(stock))
    assert_same(step(module, [x]), step(stock, [x]))
    before = step(stock, [x])["output 0"]
    for each in (stock, module):
        torch.manual_seed(0)
        change(each)
    assert_same(step(module, [x]), step(stock, [x]))
    assert not torch.allclose(step(stock, [x])["output 0"], before), "the change has no effect"


def test_a_global_hook_sees_the_experts():
    module, seen = _patched(_mixture()), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(type(m).__name__))
    try:
        module(_input())
    finally:
        handle.remove()
    assert "Llama4TextExperts" in seen


def test_autocast_runs_the_stock_code():
    stock, x = _mixture(), _input()
    module = _patched(copy.deepcopy(stock))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(step(module, [x]), step(stock, [x]), tolerance=0.0)


def weighted(self, x, scores):
    """Return the output for these scores of all experts."""
    inputs = x.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)
    return self.shared_expert(x) + self.experts(inputs).reshape(E, *x.shape).sum(0)


def count(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return stock_forward(self, x)


class PrintingRouter(llama4.Llama4Router):
    def forward(self, hidden_states):
        self.last = hidden_states
        return super().forward(hidden_states)


stock_forward = llama4.Llama4TextMoe.forward
OTHERS = {
    "detached": lambda self, x: (
        weighted(self, x.flatten(0, -2), self.router(x.flatten(0, -2))[0].detach()), self.router(x.flatten(0, -2))[1],
    ),
    "nearly scaled": lambda self, x: (stock_forward(self, x)[0] * 1.001, stock_forward(self, x)[1]),
    "without logits": lambda self, x: stock_forward(self, x)[0],
    "other logits": lambda self, x: (stock_forward(self, x)[0], stock_forward(self, x)[1] * 2),
    "dense scores": lambda self, x: (
        weighted(self, x.flatten(0, -2), self.router(x.flatten(0, -2))[1].sigmoid()), self.router(x.flatten(0, -2))[1],
    ),
    "counting": count,
    "a router that writes": None,
    "all experts": None,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_mixtures_that_compute_something_else_keep_their_forward(name):
    module = _mixture(**({"num_experts_per_tok": E} if name == "all experts" else {}))
    if OTHERS[name] is not None:
        module.__class__ = type("Other", (llama4.Llama4TextMoe,), {"forward": OTHERS[name]})
    elif name == "a router that writes":
        module.router.__class__ = PrintingRouter
    assert isinstance(recognise_mixture(module), str)
