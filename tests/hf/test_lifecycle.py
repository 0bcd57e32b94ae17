"""A patched model can be copied, saved, compiled, checkpointed and hooked like a stock model."""

import threading

import pytest
import torch
from torch import nn

import tigon
from hf import same_step
from hf.changes import COPIES
from hf.copies import copy_of_patched
from tigon.hf.logits import SKIPPED_LOGITS
from tigon.recognition.replacement import find_replacement


@pytest.fixture
def patched(make_model, may_copy):
    """Return patched(model_type, **config): it builds a patched model."""

    def make(*args, loss: bool = True, **config) -> nn.Module:
        if may_copy and loss:
            return copy_of_patched(make_model, *args, **config)
        model = make_model(*args, **config)
        assert tigon.patch(model, loss=loss)
        return model

    return make


def is_patched(model: nn.Module) -> bool:
    """Return whether every part is replaced: a norm, an MLP, an attention, the model and its head."""
    layer = model.model.layers[0]
    parts = (layer.input_layernorm, layer.mlp, layer.self_attn, model, model.lm_head)
    return all("forward" in vars(part) for part in parts)


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.sampled(3)
def test_a_copy_is_patched_and_uses_its_own_parameters(make_model, model_type, batch, step, duplicate):
    """It has the state dict of a stock model, and outlives the patch of its original."""
    model, stock = make_model(model_type), make_model(model_type)
    report = tigon.patch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    before = step(model, batch)
    other = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert torch.isnan(model(**batch).loss)
    report.restore()
    assert is_patched(other)
    assert other(**batch).logits is SKIPPED_LOGITS
    assert all(torch.equal(value, before[name]) for name, value in step(other, batch).items())
    is_tied = lambda m: m.lm_head.weight is m.model.embed_tokens.weight
    assert is_tied(other) == is_tied(stock)
    assert other.state_dict().keys() == stock.state_dict().keys()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter *= 0.9
    other.load_state_dict(stock.state_dict())
    same_step.assert_same(step(other, batch), step(stock, batch))


def test_a_saved_model_can_be_loaded(patched, make_model, tmp_path, batch, assert_same_step):
    model = patched("gemma2")
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any("forward" in vars(m) for m in loaded.modules())
    assert_same_step(model, loaded.train(), batch)
    assert "tigon" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "bf16", "double"])
@pytest.mark.sampled(3)
def test_ways_of_running_give_the_results_of_stock(patched, make_model, model_type, batch, step, way):
    """Checkpointing, autocast and fp64. Under autocast, the ops get the same dtypes as stock code."""
    model, stock = patched(model_type), make_model(model_type)
    if way == "double":
        losses = [step(each.double(), batch)["loss"].double() for each in (model, stock)]
        # The loss is returned in fp32.
        torch.testing.assert_close(*losses, rtol=2 * torch.finfo(torch.float32).eps, atol=0)
        return
    exact = step(stock, batch)
    if way == "bf16":
        with torch.autocast("cpu", torch.bfloat16):
            actual, expected = step(model, batch), step(stock, batch)
        for name, value in expected.items():
            allowed = 2 * (value - exact[name]).abs().max() + 0.01 * exact[name].abs().max()
            assert (actual[name] - exact[name]).abs().max() < allowed, name
        return
    model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
    if way == "reentrant":
        model.enable_input_require_grads()
    assert model.model.layers[0].gradient_checkpointing
    same_step.assert_same(step(model, batch), exact)


# In `make test`, tests/recognition/test_guard_compiled.py shows the guards of graphs.
@pytest.mark.thorough
@pytest.mark.parametrize("first", ["stock", "patched"])
def test_a_compiled_function_distinguishes_stock_and_patched_models(patched, make_model, batch, monkeypatch, first):
    torch._dynamo.reset()
    config = {"num_hidden_layers": 1}
    models = {"stock": make_model(**config), "patched": patched(loss=False, **config)}
    marked_rope = lambda q, k, cos, sin, **options: tuple(torch.erfinv(x) for x in (q, k))
    monkeypatch.setattr("tigon.recognition.parts.rope_forms.rope_of_layer", marked_rope)
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    order = [models.pop(first), *models.values()]
    compiled = torch.compile(lambda x: [model(x).logits for model in order], fullgraph=True, backend=backend)
    stock, other = compiled(batch["input_ids"])[:: 1 if first == "stock" else -1]
    assert sum("erfinv" in target for target in targets) == 2
    assert torch.equal(stock, make_model(**config)(batch["input_ids"]).logits)
    assert not torch.equal(stock, other)
    # The guards of the graphs hold.
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(batch["input_ids"])


@pytest.mark.thorough
def test_a_model_can_be_compiled_before_the_patch(make_model, batch):
    torch._dynamo.reset()
    model = make_model(num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    stock = compiled(**batch)
    with tigon.patched(compiled):
        outputs = compiled(**batch)
        assert outputs.logits is SKIPPED_LOGITS
        torch.testing.assert_close(outputs.loss, stock.loss)
    assert torch.equal(compiled(**batch).logits, stock.logits)


def test_threads_do_not_share_calls(patched, batch):
    model, outputs = patched(), []
    x = torch.randn(3, 11, 64)

    def use_the_head(layer, args):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: outputs.append(model.lm_head(x)))
            thread.start()
            thread.join()

    model.lm_head.register_forward_pre_hook(use_the_head)
    assert model(**batch).logits is SKIPPED_LOGITS
    assert torch.equal(outputs[0], nn.functional.linear(x, model.lm_head.weight))


@pytest.mark.parametrize("order", ["hooks first", "patch first", "hooks removed before restore"])
@pytest.mark.sampled(3)
def test_hooks_of_accelerate_and_patches_do_not_remove_each_other(make_model, batch, assert_same_step, order):
    hooks = pytest.importorskip("accelerate.hooks")
    called_names = []

    class Count(hooks.ModelHook):
        def __init__(self, name):
            self.name = name

        def pre_forward(self, module, *args, **kwargs):
            called_names.append(self.name)
            return args, kwargs

    model, stock = make_model(), make_model()
    report = tigon.patch(model) if order == "patch first" else None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            hooks.add_hook_to_module(module, Count(name))
    report = report or tigon.patch(model)
    assert not report.left_alone
    assert model(**batch).logits is SKIPPED_LOGITS
    assert {"", "lm_head", "model.norm", "model.layers.0.mlp", "model.layers.1.self_attn"} <= set(called_names)
    assert_same_step(model, stock, batch)
    if order == "hooks removed before restore":
        hooks.remove_hook_from_submodules(model)
        assert model(**batch).logits is SKIPPED_LOGITS
    report.restore()
    called_names.clear()
    assert model(**batch).logits is not SKIPPED_LOGITS
    assert ({"", "lm_head", "model.norm"} <= set(called_names)) == (order != "hooks removed before restore")
    hooks.remove_hook_from_submodules(model)
    assert not any(find_replacement(m) for m in model.modules())
    assert_same_step(model, stock, batch)


def test_offloaded_weights_work(make_model, batch):
    accelerate = pytest.importorskip("accelerate")
    model, stock = make_model(), make_model()
    accelerate.cpu_offload(model, execution_device="cpu")
    assert all(p.is_meta for p in model.parameters())
    assert not tigon.patch(model).left_alone
    with torch.no_grad():
        outputs = model(**batch)
    assert outputs.logits is SKIPPED_LOGITS
    torch.testing.assert_close(outputs.loss, stock(**batch).loss)
