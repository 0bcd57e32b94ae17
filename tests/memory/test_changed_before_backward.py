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


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def replace_the_call(model):
    layer = gate(model)
    layer._call_impl = lambda x: 2 * nn.Module._call_impl(layer, x)


ADAPTERS = {
    "adapters off": lambda m: m.base_model.disable_adapter_layers(),
    "another adapter": lambda m: m.set_adapter("other1"), "merged": lambda m: m.merge_adapter(),
    "another scale": lambda m: gate(m).scaling.update(default=7.0),
    "a deleted adapter": lambda m: m.delete_adapter("default"),
    "a written adapter": lambda m: gate(m).lora_B["default"].weight.detach().add_(1.0),
    "dropout": lambda m: gate(m).lora_dropout.update({"default": nn.Dropout(0.5)}),
}  # fmt: skip
PLAIN = {
    "another weight": lambda m: setattr(gate(m), "weight", nn.Parameter(torch.zeros_like(gate(m).weight))),
    "a written weight": lambda m: gate(m).weight.detach().mul_(2.0),
    "a bias": lambda m: setattr(gate(m), "bias", nn.Parameter(torch.ones(48))),
    "an assigned forward": lambda m: setattr(gate(m), "forward", lambda x: torch.zeros(*x.shape[:-1], 48)),
    "a hook": lambda m: gate(m).register_forward_hook(lambda module, args, y: 2 * y),
    "a pre-hook": lambda m: gate(m).register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "another class": lambda m: setattr(gate(m), "__class__", Halved), "another call": replace_the_call,
}  # fmt: skip
# The number of adapters of the model, and the change.
CASES = [(2, change) for change in ADAPTERS.values()] + [(0, change) for change in PLAIN.values()]


@pytest.mark.parametrize(("adapters", "change"), CASES, ids=[*ADAPTERS, *PLAIN])
@pytest.mark.sampled(5)
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


def run_a_reference(model):
    with model.disable_adapter(), torch.no_grad():
        loss_of(model)


def exchange_the_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def hook_of_an_engine(model):
    gather = lambda module, args: None
    gather.__module__ = "deepspeed.runtime.zero"
    gate(model).register_forward_pre_hook(gather)


WITHOUT_EFFECT = {
    "a run of the reference": run_a_reference,
    "another adapter and back": lambda m: (m.set_adapter("other1"), m.set_adapter("default")),
    "adapters that are on": lambda m: m.base_model.enable_adapter_layers(),
    "an attribute": lambda m: setattr(gate(m), "ds_grads_remaining", 3), "other data": exchange_the_data,
    "a hook of an engine": hook_of_an_engine,
}  # fmt: skip


@pytest.mark.parametrize("change", WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
@pytest.mark.sampled(4)
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
