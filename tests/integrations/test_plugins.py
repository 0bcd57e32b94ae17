"""The plug-ins patch the model that a framework trains. Frameworks that are not installed have stand-ins.

A stand-in has exactly the names that the plug-in uses, as they are in the version named beside it.
"""

import doctest
import importlib
import sys
import types
import warnings
from importlib import metadata
from typing import Any

import pytest
import torch
import transformers

import tigon
from tigon.integrations import experts, frameworks, megatron
from tigon.integrations.trainer import TigonCallback

pytestmark = pytest.mark.no_interpreter("The tests show which modules are patched.")

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def tiny_llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def tiny_mixtral(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2)
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def parts_of(report: Any) -> set[str]:
    return {entry.part for entry in report.replaced}


@pytest.fixture
def install(monkeypatch):
    """Return a function that installs a stand-in: a version and modules with their attributes."""
    real_version = metadata.version

    def install(distribution: str, version: str, plugin: str, **modules: dict[str, Any]) -> None:
        find = lambda name: version if name == distribution else real_version(name)
        monkeypatch.setattr(metadata, "version", find)
        monkeypatch.setattr(frameworks, "_warned", set())
        for name, attributes in modules.items():
            module: Any = types.ModuleType(name.replace("__", "."))
            vars(module).update(attributes)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        # The plug-in is imported anew, because it reads the framework when it is imported.
        monkeypatch.delitem(sys.modules, f"tigon.integrations.{plugin}", raising=False)

    yield install
    for plugin in ("axolotl", "swift", "verl", "lightning", "torchtitan", "llamafactory"):
        sys.modules.pop(f"tigon.integrations.{plugin}", None)
        vars(sys.modules["tigon.integrations"]).pop(plugin, None)


# --- Trainer ---------------------------------------------------------------------------------------


def _losses(tmp_path, callbacks: list[Any], late: bool = False) -> list[float]:
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1, use_cpu=True,
        save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    tokens = torch.arange(12).remainder(7).add(3)
    data = [{"input_ids": tokens + i, "labels": tokens + i} for i in range(6)]
    trainer = transformers.Trainer(tiny_llama(), arguments, train_dataset=data, callbacks=[] if late else callbacks)
    for callback in callbacks if late else []:
        trainer.add_callback(callback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("late", [False, True], ids=["argument", "added later"])
def test_the_trainer_trains_a_patched_model(tmp_path, late):
    callback = TigonCallback(memory="lean", rope=False)
    assert _losses(tmp_path, [callback], late) == pytest.approx(_losses(tmp_path, []), rel=1e-4)
    assert {"rms_norm", "glu", "loss"} <= parts_of(callback.report)
    assert "rope" not in parts_of(callback.report)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"memory": "small"}, "TigonCallback: memory must be one of .*'lean'.*, got 'small'"),
        (TypeError, {"ropes": False}, "TigonCallback: unknown option 'ropes'"),
        (TypeError, {"rope": 1}, "TigonCallback: rope must be True or False, got 1"),
    ],
)
def test_a_callback_refuses_unknown_options(error, options, message):
    with pytest.raises(error, match=message):
        TigonCallback(**options)


# --- experts ---------------------------------------------------------------------------------------


def test_a_config_requests_the_experts_by_name(monkeypatch):
    experts.register()
    calls = []
    real = experts.moe_mlp
    monkeypatch.setattr(experts, "moe_mlp", lambda *a, **k: calls.append(k["activation"]) or real(*a, **k))
    tokens = torch.arange(10)[None]
    results = []
    for implementation in ("eager", "tigon"):
        model = tiny_mixtral(experts_implementation=implementation)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert calls == ["silu"]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


# --- versions and other libraries ------------------------------------------------------------------


def test_an_unknown_version_gives_one_warning(monkeypatch):
    monkeypatch.setattr(frameworks, "_warned", set())
    monkeypatch.setattr(metadata, "version", lambda name: "7.1.0")
    with pytest.warns(UserWarning, match="the thing is off: it was written for some 4.6.0, but some 7.1.0"):
        assert not frameworks.is_known_version("some", "4.6.0", "the thing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not frameworks.is_known_version("some", "4.6.0", "the thing")
        assert frameworks.is_known_version("some", "7.1.9", "the thing")


def test_forwards_of_another_library_are_named():
    model = tiny_llama()
    code = "def forward(self, x):\n    return type(self).forward(self, x)\n"
    names: dict[str, Any] = {"__name__": "liger_kernel.transformers.rms_norm"}
    exec(code, names)
    norm = model.model.norm
    norm.forward = types.MethodType(names["forward"], norm)
    with pytest.warns(UserWarning, match="Liger Kernel has replaced the forward of LlamaRMSNorm before tigon.patch"):
        frameworks.patch_model(model, "default", {})


@pytest.mark.parametrize("documented", [TigonCallback, experts.register, megatron.TigonRMSNorm])
def test_the_examples_run(documented):
    tests = doctest.DocTestFinder(recurse=False).find(documented, globs={"tigon": tigon, "torch": torch})
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(result.attempted for result in results) >= 2
    assert not any(result.failed for result in results)


# --- frameworks with stand-ins ---------------------------------------------------------------------


def test_axolotl(install):
    base = type("BasePlugin", (), {})
    install("axolotl", "0.19.0", "axolotl", axolotl={}, axolotl__integrations={},
            axolotl__integrations__base={"BasePlugin": base})  # fmt: skip
    plugin_module = importlib.import_module("tigon.integrations.axolotl")
    plugin = plugin_module.TigonPlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    cfg = getattr(importlib.import_module(module), name)(tigon_memory="lean", tigon_options={"glu": False})
    model = tiny_llama()
    plugin.post_model_load(cfg, model)
    assert "forward" in vars(model.model.norm)
    assert "forward" not in vars(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="tigon_memory"):
        plugin_module.TigonArgs(tigon_memory="small")


def test_ms_swift(install):
    table: dict[str, Any] = {}
    install("ms-swift", "4.6.0", "swift", swift={}, swift__callbacks={"callbacks_map": table})
    importlib.import_module("tigon.integrations.swift")
    callback = table["tigon_lean"](None, None)
    assert callback.memory == "lean"
    assert isinstance(callback, transformers.TrainerCallback)


def test_verl(install):
    calls = []
    owner = {"apply_monkey_patch": lambda model, **options: calls.append(options)}
    install("verl", "0.9.1", "verl", verl={}, verl__models={}, verl__models__transformers=owner,
            verl__models__transformers__monkey_patch=owner)  # fmt: skip
    plugin = importlib.import_module("tigon.integrations.verl")
    plugin.register()
    model = tiny_llama()
    sys.modules["verl.models.transformers"].apply_monkey_patch(model=model, ulysses_sp_size=1)
    assert calls == [{"ulysses_sp_size": 1}]
    assert "forward" in vars(model.model.norm)
    assert "forward" not in vars(model)


@pytest.mark.parametrize(("plugin", "distribution"), [("verl", "verl"), ("swift", "ms-swift")])
def test_the_import_with_another_version_only_warns(install, plugin, distribution):
    install(distribution, "99.0", plugin)
    with pytest.warns(UserWarning, match=f"but {distribution} 99.0 is installed"):
        importlib.import_module(f"tigon.integrations.{plugin}")


def test_llama_factory(install, monkeypatch):
    runs = []
    run_exp = lambda callbacks: runs.append((sys.argv[1:], callbacks))
    install("llamafactory", "0.9.5", "llamafactory", llamafactory={}, llamafactory__train={},
            llamafactory__train__tuner={"run_exp": run_exp})  # fmt: skip
    plugin = importlib.import_module("tigon.integrations.llamafactory")
    monkeypatch.setattr(sys, "argv", ["x", "config.yaml", "--tigon_memory", "lean", "lr=1"])
    plugin.main()
    ((arguments, (callback,)),) = runs
    assert arguments == ["config.yaml", "lr=1"]
    assert callback.memory == "lean"


# --- frameworks as they are ------------------------------------------------------------------------


def test_lightning(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    from tigon.integrations.lightning import TigonCallback as LightningCallback

    class Module(pl.LightningModule):
        def __init__(self, late: bool) -> None:
            super().__init__()
            self.model = None if late else tiny_llama()

        def configure_model(self) -> None:
            self.model = self.model or tiny_llama()

        def training_step(self, batch, index):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    for late in (False, True):
        callback = LightningCallback(memory="lean")
        trainer = pl.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback], default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Module(late), torch.utils.data.DataLoader(torch.randint(61, (2, 8)), batch_size=2))
        assert {"rms_norm", "glu", "rope", "loss"} <= parts_of(callback.report)


def test_the_megatron_layers():
    config = types.SimpleNamespace(layernorm_zero_centered_gamma=True, sequence_parallel=False)
    norm = megatron.TigonRMSNorm(config, 8, eps=1e-5)
    x = torch.randn(4, 2, 8)
    # The weight of a zero-centred norm starts at zero, and the norm multiplies by 1 + weight.
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-5))
    assert not norm.weight.any()
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(megatron.bias_swiglu_impl(x, None), torch.nn.functional.silu(gate) * up)
    bias = torch.randn(8)
    torch.testing.assert_close(megatron.bias_swiglu_impl(x, bias), megatron.bias_swiglu_impl(x + bias, None))


def test_megatron_calls_the_function(install):
    mlp: dict[str, Any] = {"bias_swiglu_impl": lambda *a: "stock"}
    install("megatron-core", "0.16.1", "none", megatron={}, megatron__core={}, megatron__core__transformer={},
            megatron__core__transformer__mlp=mlp)  # fmt: skip
    undo = megatron.enable_swiglu()
    module = sys.modules["megatron.core.transformer.mlp"]
    assert module.bias_swiglu_impl is not mlp["bias_swiglu_impl"]
    # A request that Tigon's op does not serve runs the code of Megatron.
    assert module.bias_swiglu_impl(torch.randn(2, 8), None, True, False) == "stock"
    assert module.bias_swiglu_impl(torch.randn(2, 8), None, False, False).shape == (2, 4)
    undo()
    assert module.bias_swiglu_impl is mlp["bias_swiglu_impl"]


# The linear layers of torchtitan's `FeedForward`.
SHAPES = ("w1", 8, 12), ("w3", 8, 12), ("w2", 12, 8)


def test_torchtitan():
    pytest.importorskip("torchtitan.models.common.feed_forward")
    pytest.importorskip("torchtitan.config.override")
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.nn_modules import RMSNorm

    plugin = importlib.import_module("tigon.integrations.torchtitan")
    x = torch.randn(3, 8)
    stock = RMSNorm.Config(normalized_shape=8)
    torch.testing.assert_close(plugin.rms_norm(stock).build()(x), stock.build()(x))
    linears = {name: Linear.Config(in_features=i, out_features=o) for name, i, o in SHAPES}
    stock_mlp = FeedForward.Config(**linears)
    mlp, tigon_mlp = stock_mlp.build(), plugin.feed_forward(stock_mlp).build()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    tigon_mlp.load_state_dict(mlp.state_dict())
    torch.testing.assert_close(tigon_mlp(x), mlp(x))
    logits, labels = torch.randn(2, 3, 8), torch.tensor([[1, 2, -100], [0, 7, 3]])
    losses = [config.build()(logits, labels, None)[0] for config in (plugin.cross_entropy(CrossEntropyLoss.Config()),
                                                                     CrossEntropyLoss.Config())]  # fmt: skip
    torch.testing.assert_close(*losses)
