"""With `memory="checkpoint"` a layer runs twice only if the second run computes the same values as the first.

The tests change a projection by a hook, a class or a forward: before the patch, after the patch, or between the forward
pass and backward.
"""

import functools
import gc
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

import tigon

pytest.importorskip("transformers")

from hf.ways import batch, build
from memory.runs import count_runs


def times_counter(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """Change the output by a value that differs in every call."""
    module.calls = getattr(module, "calls", 0) + 1
    return y * (1 + 0.1 * (module.calls % 3))


class Counting(nn.Linear):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * (1 + 0.1 * (self.calls % 3))


class Doubling(nn.Linear):
    """A layer that may run twice."""

    def forward(self, x):
        return 2 * super().forward(x)


def counted(self, x):
    return times_counter(self, nn.Linear.forward(self, x))


def with_class(gate, cls=Counting):
    gate.__class__ = cls


# The changes, and what the report says of them.
HOOK, WRITE = (f"mlp.gate_proj (Linear) {text}" for text in (f"has a forward hook (by {__name__})", "writes .calls ("))
FILE = "test_checkpointed_layers.py:"
CHANGES = {
    "a hook": (lambda gate: gate.register_forward_hook(lambda module, args, y: times_counter(module, y)), HOOK),
    "a pre-hook": (lambda gate: gate.register_forward_pre_hook(lambda m, args: times_counter(m, args[0])), HOOK),
    "a class": (with_class, f"mlp.gate_proj (Counting) writes .calls (Counting.forward, {FILE}"),
    "a forward": (
        lambda gate: setattr(gate, "forward", types.MethodType(counted, gate)), f"{WRITE}times_counter, {FILE}"
    ),
    "a partial forward": (
        lambda gate: setattr(gate, "forward", functools.partial(counted, gate)), f"{WRITE}times_counter, {FILE}"
    ),
}  # fmt: skip
each_change = pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)


def gates(model):
    return [layer.mlp.gate_proj for layer in model.model.layers]


def change_all(model, change):
    for gate in gates(model):
        change(gate)


def assert_stock_steps(model, stock, steps=2):
    """Compare the gradients of several steps. If a layer runs once too often, the next step differs."""
    for i in range(steps):
        for each in (model, stock):
            each.zero_grad()
            each(**batch(i)).loss.backward()
        for (name, p), expected in zip(model.named_parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@each_change
@pytest.mark.sampled(2)
def test_layers_that_were_changed_before_the_patch_run_once(change, message):
    model, stock = build("llama", num_hidden_layers=3), build("llama", num_hidden_layers=3)
    change_all(model, change), change_all(stock, change)
    (note,) = [note for note in tigon.patch(model, memory="checkpoint").notes if note.startswith("checkpoint")]
    assert f"2 layers run once, because a second run might differ: {message}" in note
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_stock_steps(model, stock)


@each_change
@pytest.mark.sampled(2)
def test_a_layer_that_was_changed_after_the_patch_runs_once(change, message):
    """One layer is changed, and there is one warning. The last layer always runs once."""
    model, stock = build("llama", num_hidden_layers=3), build("llama", num_hidden_layers=3)
    tigon.patch(model, memory="checkpoint")
    assert_stock_steps(model, stock, 1)
    change(gates(model)[0]), change(gates(stock)[0])
    runs = [count_runs(layer) for layer in model.model.layers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_stock_steps(model, stock)
    (warning,) = [str(each.message) for each in caught if "tigon" in str(each.message)]
    assert "tigon: LlamaDecoderLayer is not checkpointed, because a second run might differ: " in warning
    assert message in warning
    assert [len(run) for run in runs] == [2, 4, 2]


@pytest.mark.filterwarnings("error")
def test_a_layer_is_checkpointed_after_its_hook_is_removed():
    model = build("llama")
    handle = gates(model)[0].register_forward_hook(lambda *_: None)
    tigon.patch(model, memory="checkpoint")
    runs = count_runs(model.model.layers[0])
    model(**batch(0)).loss.backward()
    assert len(runs) == 1
    handle.remove()
    model(**batch(0)).loss.backward()
    assert len(runs) == 3


@pytest.mark.filterwarnings("error")
def test_a_layer_runs_twice_after_changes_that_a_second_run_repeats():
    """The changes are a pure class and the hooks that transformers leaves on layers for `output_hidden_states`."""
    model, stock = build("llama"), build("llama")
    tigon.patch(model, memory="checkpoint")
    runs = count_runs(model.model.layers[0])
    for gate in (*gates(model), *gates(stock)):
        gate.__class__ = Doubling
    model(**batch(0), output_hidden_states=True)
    assert model.model.layers[0]._forward_hooks
    runs.clear()
    assert_stock_steps(model, stock, 1)
    assert len(runs) == 2


REFUSED = {name: change for name, (change, _) in CHANGES.items()} | {
    "a pure class": lambda gate: with_class(gate, Doubling),
    "another child": lambda gate: setattr(gate, "child", nn.Identity()),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_change_between_forward_and_backward_is_refused(change):
    model = build("llama")
    tigon.patch(model, memory="checkpoint")
    loss = model(**batch(0)).loss
    change(gates(model)[0])
    with pytest.raises(RuntimeError, match=r"a checkpointed layer \(LlamaDecoderLayer\) has to run again in backward"):
        loss.backward()


def test_layers_run_once_with_a_hook_of_all_modules():
    model, called_modules = build("llama"), []
    tigon.patch(model, memory="checkpoint")
    handle = nn.modules.module.register_module_forward_hook(lambda module, *rest: called_modules.append(module))
    try:
        with pytest.warns(UserWarning, match="is not checkpointed, .* a hook of all modules is registered"):
            model(**batch(0)).loss.backward()
    finally:
        handle.remove()
    assert called_modules.count(gates(model)[0]) == 1


def test_a_checkpointed_layer_is_in_no_reference_cycle():
    model = build("llama")
    tigon.patch(model, memory="checkpoint")
    model(**batch(0)).loss.backward()
    layer = model.model.layers[0]
    switch, reference = layer._gradient_checkpointing_func, weakref.ref(layer)
    gc.disable()
    try:
        del model, layer
        assert reference() is None
    finally:
        gc.enable()
    assert switch.judgement.reason is None
