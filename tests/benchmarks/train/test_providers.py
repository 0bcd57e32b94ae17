"""The providers of the training benchmark: their names, and what each changes in a model."""

import sys
import types

import pytest
import torch

import tigon
from benchmarks.train import providers
from tigon.memory.levels import MEMORY

# The fields of a provider that its name sets, besides `name` and those with their defaults.
NAMES = {
    "stock": {"base": "stock"}, "liger-checkpoint": {"base": "liger", "checkpoints": True},
    "compile": {"base": "compile"},
    "compile-reduce-overhead-checkpoint": {"base": "compile", "checkpoints": True, "mode": "reduce-overhead"},
    "unsloth": {"base": "unsloth"},
    "torchao-float8-rowwise-bf16-dw": {"base": "torchao", "fp8": "rowwise", "fp8_dw": False},
    "torchao-float8-tensorwise-checkpoint": {"base": "torchao", "fp8": "tensorwise", "checkpoints": True},
    "frozen": {"base": "tigon", "level": "lean", "trains": False},
    "stock-fp32": {"base": "stock", "checkpoints": True, "in_fp32": True},
    "tigon": {"base": "tigon", "level": "default"},
    "tigon-fp8-tensorwise": {"base": "tigon", "level": "default", "fp8": "tensorwise"},
    "tigon-lean-fp8-rowwise-bf16-dw": {"base": "tigon", "level": "lean", "fp8": "rowwise", "fp8_dw": False},
    "tigon-lean+mlp:4-fp8-rowwise": {"base": "tigon", "level": "lean+mlp:4", "fp8": "rowwise"},
    "tigon-adamw8bit": {"base": "tigon", "level": "default", "adamw_8bit": True},
    "tigon-lean-fp8-rowwise-adamw8bit": {"base": "tigon", "level": "lean", "fp8": "rowwise", "adamw_8bit": True},
    "tigon-graphs": {"base": "tigon", "level": "default", "graphs": True},
    "tigon-lean-pad64": {"base": "tigon", "level": "lean", "pad_to": 64},
    **{f"tigon-{level}": {"base": "tigon", "level": level} for level in MEMORY if level != "default"},
}  # fmt: skip


def test_the_name_of_a_provider_sets_its_fields():
    chosen = providers.select(",".join(NAMES))
    assert chosen == [providers.ModelProvider(name, **fields) for name, fields in NAMES.items()]
    assert [p.name for p in chosen if p.loads] == ["unsloth"]
    assert {p.base for p in chosen if p.compiles} == {"compile", "torchao"}


@pytest.mark.parametrize(("names", "message"), [
    ("stock,tigon-leen", "must be among stock, liger, .*, got 'tigon-leen'"),
    ("stock,stock", "must be named once, got 'stock' again"),
    ("unslot", "got 'unslot'"),
    (",", "must name at least one"),
    *((name, f"must be among .*, got '{name}'") for name in (
        "stock-adamw8bit", "tigon-leen-adamw8bit", "tigon-adamw4bit", "tigon-fp8", "tigon-fp8-blockwise",
        "tigon-leen-fp8-rowwise", "tigon-rowwise", "stock-graphs", "tigon-graphs-pad64", "compile-max-autotune",
    )),
])  # fmt: skip
def test_wrong_providers_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        providers.select(names)


@pytest.fixture
def liger(monkeypatch):
    """Install a Liger Kernel that knows llama alone; return the list of models that it was applied to."""
    models = []
    package = types.ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = lambda model: models.append(model)
    table = types.ModuleType("liger_kernel.transformers.monkey_patch")
    table.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for module in (types.ModuleType("liger_kernel"), package, table):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return models


def make_model(model_type: str) -> types.SimpleNamespace:
    calls = []
    config = types.SimpleNamespace(model_type=model_type)
    return types.SimpleNamespace(config=config, gradient_checkpointing_enable=calls.append, checkpointing_calls=calls)


def test_liger_is_applied_with_its_defaults_and_with_checkpointing(liger, monkeypatch):
    (provider,) = providers.select("liger")
    model = make_model("llama")
    provider.apply(model, "cuda")
    assert (liger, model.checkpointing_calls) == ([model], [])
    providers.select("liger-checkpoint")[0].apply(model, "cuda")
    assert model.checkpointing_calls == [{"use_reentrant": False}]
    with pytest.raises(providers.UnsupportedModel, match="does not know gpt2"):
        provider.apply(make_model("gpt2"), "cuda")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(providers.Missing, match="not installed"):
        provider.apply(model, "cuda")


def test_the_suffix_of_the_optimizer_changes_only_the_optimizer():
    chosen = providers.select("tigon,tigon-adamw8bit")
    weight = torch.nn.Parameter(torch.zeros(128, 64))
    weight.grad = torch.ones_like(weight)
    plain, small = (p.make_optimizer([weight], 0.1) for p in chosen)
    assert (type(plain), type(small)) == (torch.optim.AdamW, tigon.AdamW)
    for provider, optimizer in zip(chosen, (plain, small), strict=True):
        optimizer.step()
        moments = [x for x in optimizer.state[weight].values() if torch.is_tensor(x) and x.numel() >= weight.numel()]
        assert sum(x.nbytes for x in moments) == provider.moment_bytes(weight)


def test_the_patch_gets_the_options(monkeypatch):
    calls = []
    monkeypatch.setattr(tigon, "patch", lambda model, **options: calls.append(options))
    names = "tigon,tigon-lean-fp8-rowwise-bf16-dw,tigon-graphs,tigon-lean+mlp:4-fp8-rowwise-graphs,tigon-lean-pad64"
    for provider in providers.select(names):
        provider.apply(object(), "cuda")
    assert calls == [
        {"memory": "default"}, {"memory": "lean", "fp8": "rowwise", "fp8_dw": False},
        {"memory": "default", "graphs": True},
        {"memory": "lean+mlp:4", "fp8": "rowwise", "fp8_dw": True, "graphs": True},
        {"memory": "lean", "pad_to": 64},
    ]  # fmt: skip


def test_torchao_converts_all_layers_but_the_head(monkeypatch):
    def convert(model, *, module_filter_fn, config):
        for name, module in list(model.named_modules()):
            if module_filter_fn(module, name):
                module.__class__ = type("Float8Linear", (torch.nn.Linear,), {})
        model.recipe = config

    package, module = types.ModuleType("torchao"), types.ModuleType("torchao.float8")
    package.__version__ = "0.99"
    module.convert_to_float8_training = convert
    module.Float8LinearConfig = types.SimpleNamespace(from_recipe_name=lambda name: name)
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(32, 16), "b": torch.nn.Linear(8, 16), "head": torch.nn.Linear(16, 64)}
    )
    model.get_output_embeddings = lambda: model["head"]
    (provider,) = providers.select("torchao-float8-rowwise-bf16-dw")
    description = provider.apply(model, "cuda")
    assert description == "torchao 0.99, 1 linear layers in FP8; torch.compile"
    assert model.recipe == "rowwise_with_gw_hp"
    with pytest.raises(providers.Missing, match="needs a GPU"):
        provider.apply(model, "cpu")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(providers.Missing, match="not installed"):
        provider.apply(model, "cuda")
