"""Backward does not call a projection again if state that it reads has changed since the forward pass."""

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")

LEVEL = "lean+mlp"


def make_model(adapters: int = 0) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    if adapters:
        peft = pytest.importorskip("peft")
        lora = lambda: peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, lora())
        for number in range(1, adapters):
            model.add_adapter(f"other{number}", lora())
    return model


def gate(model: nn.Module) -> nn.Module:
    return next(m for name, m in model.named_modules() if name.endswith("layers.1.mlp.gate_proj"))


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12)
    return model(input_ids=ids, labels=ids).loss


# --- changes that would affect a second call -------------------------------------------------------


def switch_off(model):
    model.base_model.disable_adapter_layers()


def switch_adapter(model):
    model.set_adapter("other1")


def merge(model):
    model.merge_adapter()


def scale_adapter(model):
    gate(model).scaling["default"] = 7.0


def delete_adapter(model):
    model.delete_adapter("default")


def write_an_adapter(model):
    with torch.no_grad():
        gate(model).lora_B["default"].weight.add_(1.0)


def add_dropout(model):
    gate(model).lora_dropout["default"] = nn.Dropout(0.5)


ADAPTERS = [switch_off, switch_adapter, merge, scale_adapter, delete_adapter, write_an_adapter, add_dropout]


def exchange_the_weight(model):
    gate(model).weight = nn.Parameter(torch.zeros_like(gate(model).weight))


def write_the_weight(model):
    with torch.no_grad():
        gate(model).weight.mul_(2.0)


def add_a_bias(model):
    gate(model).bias = nn.Parameter(torch.ones(48))


def assign_a_forward(model):
    gate(model).forward = lambda x: torch.zeros(*x.shape[:-1], 48)


def replace_the_call(model):
    layer = gate(model)
    layer._call_impl = lambda x: 2 * nn.Module._call_impl(layer, x)


def add_a_hook(model):
    gate(model).register_forward_hook(lambda module, args, y: 2 * y)


def add_a_pre_hook(model):
    gate(model).register_forward_pre_hook(lambda module, args: (2 * args[0],))


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def change_the_class(model):
    gate(model).__class__ = Halved


PLAIN = [
    *(exchange_the_weight, write_the_weight, add_a_bias, assign_a_forward, add_a_hook, add_a_pre_hook),
    *(change_the_class, replace_the_call),
]
CASES = [*((2, change) for change in ADAPTERS), *((0, change) for change in PLAIN)]
IDS = [change.__name__ for _, change in CASES]


@pytest.mark.parametrize(("adapters", "change"), CASES, ids=IDS)
@pytest.mark.sampled(3)
def test_a_change_between_forward_and_backward_is_refused(adapters, change):
    model = make_model(adapters)
    tigon.patch(model, memory=LEVEL)
    loss = loss_of(model)
    change(model)
    with pytest.raises(RuntimeError, match=r"tigon: a layer \(.*, 32 -> 48\) has to be called again in backward"):
        loss.backward()
    # The next step is a step of the changed model.
    model.zero_grad()
    if (loss := loss_of(model)).requires_grad:
        loss.backward()


def assert_same_gradients(ours, stock):
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("memory", ["default", "lean"])
def test_levels_that_repeat_no_call_refuse_no_change(memory):
    models = [make_model(2), make_model(2)]
    tigon.patch(models[0], memory=memory)
    for model in models:
        loss = loss_of(model)
        switch_off(model)
        loss.backward()
    assert_same_gradients(*models)


def test_the_error_names_the_changed_attribute():
    model = make_model(2).requires_grad_(True)
    tigon.patch(model, memory=LEVEL)
    with model.disable_adapter():
        loss = loss_of(model)
    with pytest.raises(RuntimeError, match="but its _disable_adapters was changed since the forward pass"):
        loss.backward()


def test_a_replaced_forward_of_torch_is_refused(monkeypatch):
    model = make_model()
    tigon.patch(model, memory=LEVEL)
    loss = loss_of(model)
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
    with pytest.raises(RuntimeError, match="but its forward was changed"):
        loss.backward()


# --- changes without effect on a second call -------------------------------------------------------


def run_a_reference(model):
    with model.disable_adapter(), torch.no_grad():
        loss_of(model)


def to_another_adapter_and_back(model):
    model.set_adapter("other1")
    model.set_adapter("default")


def enable_enabled_adapters(model):
    model.base_model.enable_adapter_layers()


def add_an_attribute(model):
    gate(model).ds_grads_remaining = 3


def exchange_the_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def hook_of_an_engine(model):
    def gather(module, args):
        return None

    gather.__module__ = "deepspeed.runtime.zero"
    gate(model).register_forward_pre_hook(gather)


WITHOUT_EFFECT = [
    *(run_a_reference, to_another_adapter_and_back, enable_enabled_adapters, add_an_attribute),
    *(exchange_the_data, hook_of_an_engine),
]


@pytest.mark.parametrize("change", WITHOUT_EFFECT, ids=lambda f: f.__name__)
def test_changes_without_effect_on_a_second_call_are_accepted(change):
    models = [make_model(2), make_model(2)]
    tigon.patch(models[0], memory=LEVEL)
    for model in models:
        loss = loss_of(model)
        change(model)
        loss.backward()
    assert_same_gradients(*models)


class Scaled(nn.Linear):
    """A projection of a user, whose code reads an attribute and a global variable."""

    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale * FACTOR


FACTOR = 1.0


@pytest.mark.parametrize("where", ["attribute", "class", "global"])
def test_a_changed_setting_of_a_module_of_the_user_is_refused(monkeypatch, where):
    model = make_model()
    gate(model).__class__ = Scaled
    tigon.patch(model, memory=LEVEL)
    loss = loss_of(model)
    if where == "global":
        monkeypatch.setitem(globals(), "FACTOR", 2.0)
    else:
        monkeypatch.setattr(gate(model) if where == "attribute" else Scaled, "scale", 2.0, raising=False)
    with pytest.raises(RuntimeError, match=r"\(.*Scaled, 32 -> 48\) has to be called again in backward"):
        loss.backward()


def test_the_weights_of_a_functional_call_are_refused():
    """The module has its own parameters again in backward, and the forward pass had other ones."""
    model = make_model()
    tigon.patch(model, memory=LEVEL)
    ids = torch.arange(24).view(2, 12)
    fast = {name: (p * 2.0) for name, p in model.named_parameters()}
    outputs = torch.func.functional_call(model, fast, (), {"input_ids": ids, "labels": ids})
    with pytest.raises(RuntimeError, match=r"its weight is another tensor since the forward pass"):
        outputs.loss.backward()


@pytest.mark.parametrize("is_same", [True, False], ids=["a view of the same", "a view of another"])
def test_a_view_of_the_same_flat_parameter_is_accepted(is_same):
    """FSDP with a flat parameter assigns new views of it to its layers for backward."""
    model = make_model()
    tigon.patch(model, memory=LEVEL)
    layer = gate(model)
    flat = nn.Parameter(layer.weight.detach().flatten().clone())
    del layer._parameters["weight"]
    vars(layer)["weight"] = flat.view(48, 32)
    loss = loss_of(model)
    base = flat if is_same else nn.Parameter(flat.detach() * 2)
    vars(layer)["weight"] = base.view(48, 32)
    if is_same:
        loss.backward()
        assert flat.grad is not None
    else:
        with pytest.raises(RuntimeError, match="its weight is another tensor"):
            loss.backward()
