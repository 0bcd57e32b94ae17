"""The plug-ins patch the model that a framework trains. Frameworks that are not installed have stand-ins.

A stand-in has exactly the names that the plug-in uses, as they are in the version named beside it.
"""

import doctest
import importlib
import importlib.util
import sys
import types
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tigon
from tigon.integrations import experts, frameworks, megatron
from tigon.integrations.trainer import TigonCallback
from tigon.runtime import requirements

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


def test_a_callback_takes_a_level_with_a_number_of_layers():
    assert TigonCallback(memory="lean+mlp:4").memory == "lean+mlp:4"


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


def test_a_norm_after_each_expert_is_refused():
    module = types.SimpleNamespace(has_post_expert_norm=True)
    with pytest.raises(ValueError, match="'tigon' does not compute SimpleNamespace, .* use 'grouped_mm'"):
        experts.compute_experts(module, *(torch.ones(1, 1),) * 3)


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
    arguments = getattr(importlib.import_module(module), name)(tigon_memory="lean", tigon_options={"glu": False})
    cfg = types.SimpleNamespace(**arguments.model_dump(), rl=None)
    model = tiny_llama()
    plugin.post_model_load(cfg, model)
    assert "forward" in vars(model.lm_head)
    assert "forward" in vars(model.model.norm)
    assert "forward" not in vars(model.model.layers[0].mlp)
    # The trainers of preferences pass labels to the model and compute their loss from its logits.
    cfg.rl, model = "orpo", tiny_llama()
    plugin.post_model_load(cfg, model)
    assert "forward" in vars(model.model.norm)
    assert "forward" not in vars(model.lm_head)
    with pytest.raises(ValueError, match="tigon_memory"):
        plugin_module.TigonArgs(tigon_memory="small")


def test_ms_swift(install):
    table: dict[str, Any] = {}
    install("ms-swift", "4.6.0", "swift", swift={}, swift__callbacks={"callbacks_map": table})
    importlib.import_module("tigon.integrations.swift")
    shapes: list[Any] = []
    trainer = types.SimpleNamespace(_compute_acc=lambda outputs, labels: shapes.append(outputs.logits.shape))
    callback = table["tigon_lean"](None, trainer)
    assert callback.memory == "lean"
    assert isinstance(callback, transformers.TrainerCallback)
    # ms-swift reads the logits of each step that has a loss.
    model, tokens = tiny_llama(), torch.arange(5)[None]
    callback.on_init_end(None, None, None, model=model)
    for options in ({}, {"skip_logits": False}):
        trainer._compute_acc(model(input_ids=tokens, labels=tokens, **options), tokens)
    assert shapes == [(1, 5, 61)]


def test_the_file_for_ms_swift_hides_no_package():
    # `--external_plugins` adds the folder of the file to `sys.path`.
    folder = Path(frameworks.__file__).parent / "swift"
    assert [file.name for file in folder.iterdir() if file.name != "__pycache__"] == ["__init__.py"]


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


@pytest.mark.parametrize("plugin", ["axolotl", "lightning", "torchtitan"])
def test_the_import_without_the_framework_names_the_package(plugin, monkeypatch):
    if importlib.util.find_spec(plugin) is not None:
        pytest.skip(f"{plugin} is installed")
    with pytest.raises(ImportError, match=f"tigon.integrations.{plugin} needs {plugin}: pip install {plugin}"):
        importlib.import_module(f"tigon.integrations.{plugin}")


def test_an_old_transformers_gives_one_warning(monkeypatch):
    monkeypatch.setattr(frameworks, "_warned", set())
    monkeypatch.setitem(requirements.FLOORS, "transformers", "99")
    model = tiny_llama()
    with pytest.warns(UserWarning, match=r"trained without Tigon: .* needs transformers 99 or later \("):
        assert frameworks.patch_model(model, "default", {}) is None
    assert "forward" not in vars(model.model.norm)


def test_a_wrapped_model_is_not_patched_again():
    callback, model = TigonCallback(), tiny_llama()
    callback.on_init_end(None, None, None, model=model)
    report = callback.report
    callback.on_train_begin(None, None, None, model=torch.nn.Sequential(model))
    assert callback.report is report
    callback.on_train_begin(None, None, None, model=tiny_llama())
    assert callback.report is not report


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
    monkeypatch.setattr(sys, "argv", ["x", "config.yaml", "--tigon_memory=offload"])
    plugin.main()
    assert [(arguments, callback.memory) for arguments, (callback,) in runs] == [
        (["config.yaml", "lr=1"], "lean"),
        (["config.yaml"], "offload"),
    ]
    monkeypatch.setattr(sys, "argv", ["x", "config.yaml", "--tigon_memory"])
    with pytest.raises(ValueError, match="--tigon_memory needs a memory level"):
        plugin.main()


# --- frameworks as they are ------------------------------------------------------------------------


@pytest.fixture
def real_plugin():
    """Return a function that imports a plug-in, and skips the test unless its framework has the known version."""

    def import_plugin(plugin: str, distribution: str, version: str, module: str) -> Any:
        pytest.importorskip(module)
        if metadata.version(distribution).split(".")[:2] != version.split(".")[:2]:
            pytest.skip(f"the plug-in was written for {distribution} {version}")
        sys.modules.pop(f"tigon.integrations.{plugin}", None)
        return importlib.import_module(f"tigon.integrations.{plugin}")

    return import_plugin


def test_axolotl_itself(real_plugin):
    real_plugin("axolotl", "axolotl", "0.19.0", "axolotl.integrations.base")
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    manager = PluginManager.get_instance()
    manager.register("tigon.integrations.axolotl.TigonPlugin")
    assert manager.get_input_args() == ["tigon.integrations.axolotl.TigonArgs"]
    for cfg, has_glu in (({}, True), ({"tigon_memory": "lean", "tigon_options": {"glu": False}}, False)):
        model = tiny_llama()
        manager.post_model_load(DictDefault(cfg), model)
        assert "forward" in vars(model.model.norm)
        assert ("forward" in vars(model.model.layers[0].mlp)) == has_glu


def test_ms_swift_itself(real_plugin, tmp_path):
    real_plugin("swift", "ms-swift", "4.6.0", "swift.callbacks")
    from swift.callbacks import callbacks_map
    from swift.utils import import_external_file

    for name in [name for name in callbacks_map if name.startswith("tigon")]:
        del callbacks_map[name]
    sys.modules.pop("tigon.integrations.swift")
    (tmp_path / "tigon_plugin.py").write_text("import tigon.integrations.swift\n")
    import_external_file(str(tmp_path / "tigon_plugin.py"))
    assert callbacks_map["tigon_lean_mlp"](None, None).memory == "lean+mlp"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_verl_itself(real_plugin, device):
    real_plugin("verl", "verl", "0.9.1", "verl.models.transformers.monkey_patch")
    from verl.models.transformers import apply_monkey_patch

    # All ranks but the first one build the model on the meta device.
    with torch.device(device):
        model = tiny_llama()
    apply_monkey_patch(model=model, use_remove_padding=True, ulysses_sp_size=1, use_fused_kernels=False)
    assert "forward" in vars(model.model.norm)
    assert "forward" in vars(model.model.layers[0].mlp)
    assert "forward" not in vars(model.lm_head)


def test_lightning(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    from tigon.integrations.lightning import TigonCallback as LightningCallback

    class Module(pl.LightningModule):
        def __init__(self, late: bool) -> None:
            super().__init__()
            # A module that is patched at the start does not keep the callback from a model that is built later.
            self.norm = torch.nn.RMSNorm(4, eps=1e-6)
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
