"""The alias for Liger: its finder, its names and their parameters, and the functions that patch models."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tigon
from integrations import liger_signatures
from tigon.integrations.liger import apply, names, uninstall

pytestmark = [pytest.mark.usefixtures("alias"), pytest.mark.no_interpreter("These tests show names and parameters.")]

transformers = pytest.importorskip("transformers")
CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
EMPTY = inspect.Parameter.empty


def test_finder_answers_metadata_and_find_spec():
    # transformers caches the answer, which would otherwise outlive the alias, or be older than it.
    available = transformers.utils.import_utils.is_liger_kernel_available
    assert importlib.metadata.version("liger-kernel") == "0.8.5"
    assert importlib.util.find_spec("liger_kernel.transformers") is not None
    assert available()
    uninstall()
    assert "liger_kernel" not in sys.modules
    assert not available()
    tigon.install_as_liger_kernel(force=True)
    assert available()


def test_real_package_is_refused(tmp_path, monkeypatch):
    uninstall()
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="real package liger_kernel is importable"):
        tigon.install_as_liger_kernel()


def test_the_command_runs_a_script_and_neither_it_nor_the_command_line_needs_an_extra(tmp_path):
    """An import of a package fails if its entry in sys.modules is None, as if it were not installed."""
    script = tmp_path / "script.py"
    (tmp_path / "sibling.py").write_text("")
    hidden = ("typer", "rich", "transformers", "trl", "datasets", "matplotlib", "tokenizers", "psutil")
    lines = (
        f"import sys; assert not sys.modules.keys() & {hidden}; sys.modules.update(dict.fromkeys({hidden}))",
        "import liger_kernel.ops, liger_kernel.functional, sibling, tigon, tigon.cli.main, tigon.cli.environment",
        "assert liger_kernel.functional.rms_norm and not tigon.integrations.trl.is_enabled()",
        "print(liger_kernel.__version__, sys.argv[1:])",
    )
    script.write_text("\n".join(lines))
    command = [sys.executable, "-m", "tigon.as_liger", str(script), "--x"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0.8.5 ['--x']"


# Modules of Liger Kernel 0.8.5 and names that they have, besides the 45 functions `apply_liger_kernel_to_<type>`. The
# packages `transformers` and `chunked_loss` have all their names here.
STATEMENTS = """
transformers: AutoLigerKernelForCausalLM LigerBlockSparseTop2MLP LigerCrossEntropyLoss LigerDyT LigerFalconH1MLP
    LigerFalconH1SwiGLUMLP LigerFusedAddRMSNorm LigerFusedCETVDLoss LigerFusedLinearCrossEntropyLoss LigerFusedLinearJSD
    LigerFusedLinearKLDivLoss LigerGEGLUMLP LigerJSD LigerKLDIVLoss LigerLayerNorm LigerMHC LigerMLP
    LigerModulatedRMSNorm LigerMultiTokenAttention LigerPhi3SwiGLUMLP LigerPolyNorm LigerQwen3MoeSwiGLUMLP LigerRMSNorm
    LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered LigerReLUSquared LigerSoftmax LigerSparsemax
    LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer LigerTVDLoss LigerTiledGEGLUMLP LigerTiledSwiGLUMLP _apply_liger_kernel
    _apply_liger_kernel_to_instance is_transformers_available liger_llama4_text_rotary_pos_emb
    liger_llama4_vision_rotary_pos_emb liger_rotary_pos_emb
chunked_loss: LigerFusedLinearCPOLoss LigerFusedLinearCosineSimilarityLoss LigerFusedLinearDPOLoss
    LigerFusedLinearGRPOLoss LigerFusedLinearJSDLoss LigerFusedLinearKTOLoss LigerFusedLinearORPOLoss
    LigerFusedLinearSimPOLoss
transformers.modulated_rms_norm: LigerModulatedRMSNorm
transformers.mlp: LigerMLP LigerFalconH1MLP
transformers.jsd: LigerJSD LigerJSDFunction
transformers.functional: CrossEntropyOutput liger_rope liger_mhc_coeffs liger_mhc_forward
transformers.qwen2vl_mrope: liger_multimodal_rotary_pos_emb
transformers.monkey_patch: MODEL_TYPE_TO_APPLY_LIGER_FN liger_rotary_pos_emb liger_rotary_pos_emb_vision
transformers.trainer_integration: _apply_liger_kernel
transformers.experimental.embedding: LigerEmbedding
transformers.grpo_loss: triton_grpo_loss
ops: LigerFusedMoEFunction LigerLlama4RopeFunction
ops.fused_ce_tvd: LigerFusedCETVDFunction
ops.fused_moe: LigerFusedMoEFunction
ops.mhc: LigerMHCCoeffsFunction LigerMHCPreFunction LigerMHCPostResFunction
ops.swiglu: LigerFusedGateUpSiLUMulFunction LigerSiLUMulFunction
ops.vocab_parallel_cross_entropy: LigerVocabParallelCEFunction
ops.grpo_loss: fused_selective_log_softmax
chunked_loss.fused_linear_ppo: LigerFusedLinearPPOBase
megatron.rms_norm: LigerMegatronRMSNorm
utils: infer_device
"""


def import_from(module: str, name: str) -> object:
    """Execute the statement, because `getattr` takes another path through the import machinery."""
    scope: dict[str, object] = {}
    exec(f"from {module} import {name}", scope)
    return scope[name]


def test_names_of_modules_can_be_imported():
    for line in STATEMENTS.strip().replace("\n    ", " ").splitlines():
        module, _, served = line.partition(": ")
        for name in served.split():
            full_name = f"liger_kernel.{module}"
            assert import_from(full_name, name) is getattr(importlib.import_module(full_name), name)


def test_every_name_has_an_object_with_a_docstring():
    """A name in a table without an object behind it would fail only in the program that imports it."""
    for module, table in names.MODULES.items():
        served = importlib.import_module(module)
        assert set(served.__all__) == set(table)
        assert [name for name in table if not getattr(served, name).__doc__] == [], module
    assert "liger_kernel.transformers.rope" in sys.modules


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        ("ops.grpo_loss", "GrpoLossFunction", "use triton_grpo_loss"),
        ("ops.tiled_mlp", "apply_tiled_mlp", "use LigerTiledSwiGLUMLP"),
        ("transformers.rope", "no_such_name", "use the op of tigon that computes it"),
        ("utils", "no_such_name", "use the op of tigon that computes it"),
        ("ops.cutile.ops.rope", "rope_forward", "use liger_kernel.functional"),
        ("transformers.model.llama", "lce_forward", "use tigon.patch"),
        ("transformers.trainer", "LigerORPOTrainer", "use trl's ORPOTrainer"),
        ("megatron.monkey_patch", "apply_liger_kernel_to_megatron", "use LigerMegatronRMSNorm"),
        *[("ops", name, re.escape(advice)) for name, advice in names.NOT_SERVED.items()],
    ],
)
def test_the_import_of_an_absent_name_says_what_to_use(module, name, advice):
    with pytest.raises(ImportError, match=f"is not served by Tigon.* {advice}"):
        import_from(f"liger_kernel.{module}", name)


def test_an_absent_name_is_an_attribute_error_outside_of_an_import():
    import liger_kernel.chunked_loss as chunked
    import liger_kernel.transformers.rope as module

    assert not hasattr(module, "apply_tiled_mlp")
    assert getattr(module, "no_such_name", None) is None
    with pytest.raises(AttributeError, match="use LigerTiledSwiGLUMLP"):
        _ = module.apply_tiled_mlp
    with pytest.raises(AttributeError, match=r"names.MODULES\['liger_kernel.chunked_loss'\]; use the op of tigon"):
        _ = chunked.LigerFusedLinearPPOLoss
    with pytest.raises(ImportError, match="liger_kernel.backends is not served by Tigon: use liger_kernel.functional"):
        import_from("liger_kernel", "backends")
    assert importlib.util.find_spec("liger_kernel.no_such_module") is None
    # `inspect.getmembers` and completion look here.
    assert "liger_rotary_pos_emb" in dir(module)


def test_the_page_names_everything_that_is_served_and_what_is_not():
    text = (Path(__file__).parents[2] / "docs" / "liger.md").read_text("utf-8")
    served = {name for table in names.MODULES.values() for name in table if not name.startswith("apply_liger_kernel_")}
    absent = {*names.NOT_SERVED, *(f"liger_kernel.{name}" for name in names.NOT_SERVED_MODULES)}
    assert [name for name in sorted(served | absent) if f"`{name}`" not in text] == []
    (types,) = re.findall(r"for \d+ types: ([^.]*)\.", text)
    assert " ".join(types.split()).split(", ") == list(apply.PARAMETERS)


# The modules whose classes the tests compare. `rope` stands for all modules below `liger_kernel.transformers`.
CLASS_MODULES = ("transformers", "chunked_loss", "megatron", "transformers.rope")


def resolve(module: str, name: str) -> Any:
    return names.MODULES[f"liger_kernel.{module}"][name]


def assert_same_parameters(function: Any, row: str, with_names: bool = True) -> None:
    """Check that Liger's parameters come first and in order. Further ones must have a default."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [
        p for p in inspect.signature(function).parameters.values() if p.name != "self" and p.kind not in kinds
    ]
    ours = [(p.name, p.default) for p in parameters]
    pairs = [word.partition("=") for word in row.split() if not word.startswith("*")]
    expected = [(name, eval(default) if equals else EMPTY) for name, equals, default in pairs]
    assert len(ours) >= len(expected)
    assert all(default is not EMPTY for _, default in ours[len(expected) :])
    if not with_names:
        # A default where Liger has none does no harm to a call by position.
        ours = [(None, value) for _, value in ours]
        expected = [(None, b if b is not EMPTY else a) for (_, a), (_, b) in zip(ours, expected, strict=False)]
    assert ours[: len(expected)] == expected


def test_apply_functions_have_the_parameters_of_liger():
    rows = liger_signatures.APPLY
    served = [name for name in names.MODULES["liger_kernel.transformers"] if name.startswith("apply_")]
    assert sorted(served) == sorted(f"apply_liger_kernel_to_{name}" for name in rows)
    assert len(rows) == 45
    for name, row in rows.items():
        signature = inspect.signature(resolve("transformers", f"apply_liger_kernel_to_{name}"))
        words = row.removesuffix(" **").split()
        expected = [(word.removeprefix("-"), None if word == "model" else word[0] != "-") for word in words]
        has_kwargs = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        named = [(p.name, p.default) for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert (named, has_kwargs) == (expected, row.endswith("**")), name


@pytest.mark.parametrize("name", liger_signatures.CLASSES)
def test_classes_have_the_parameters_of_liger(name):
    module = next(module for module in CLASS_MODULES if name in names.MODULES[f"liger_kernel.{module}"])
    served, (constructor, _, forward) = resolve(module, name), liger_signatures.CLASSES[name].partition("->")
    assert_same_parameters(served.__init__, constructor)
    assert_same_parameters(served.forward, forward)


@pytest.mark.parametrize("path", liger_signatures.FUNCTIONS)
def test_functions_have_the_parameters_of_liger(path):
    module, _, name = path.rpartition(".")
    assert_same_parameters(resolve(module, name), liger_signatures.FUNCTIONS[path])


@pytest.mark.parametrize("name", liger_signatures.OPS)
def test_autograd_functions_have_the_arguments_of_liger(name):
    # `torch.autograd.Function.apply` takes no keyword arguments, so only positions and defaults matter.
    assert_same_parameters(resolve("ops", name).apply, liger_signatures.OPS[name], with_names=False)


def test_every_class_and_function_is_compared():
    classes = {
        name
        for module in CLASS_MODULES
        for name in names.MODULES[f"liger_kernel.{module}"]
        if inspect.isclass(resolve(module, name)) and name not in names.MODULES["liger_kernel.ops"]
    }
    classes -= {"AutoLigerKernelForCausalLM", "CrossEntropyOutput", "LigerEmbedding"}
    assert set(liger_signatures.CLASSES) == classes
    assert set(liger_signatures.OPS) == set(names.MODULES["liger_kernel.ops"])
    paths = {
        f"{module}.{name}"
        for module in ("functional", "transformers.functional", "utils")
        for name in names.MODULES[f"liger_kernel.{module}"]
        if name != "CrossEntropyOutput"
    }
    assert paths <= set(liger_signatures.FUNCTIONS)


def test_published_snippet_patches_later_models():
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=True, swiglu=True, cross_entropy=True, fused_linear_cross_entropy=False, rms_norm=False
    )
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    assert {entry.part for entry in apply._reports["llama"].entries} == {"glu", "rope"}


def test_the_map_of_types_decides_which_function_patches(monkeypatch):
    import liger_kernel.transformers.monkey_patch as served

    functions = {getattr(served, name) for name in dir(served) if name.startswith("apply_liger_kernel_to_")}
    assert functions == set(served.MODEL_TYPE_TO_APPLY_LIGER_FN.values())
    calls = []
    monkeypatch.setitem(
        served.MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", lambda rope=True, model=None: calls.append((rope, model))
    )
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="llama")
    served._apply_liger_kernel("llama", rope=False, unknown=1)
    served._apply_liger_kernel_to_instance(model)
    assert calls == [(False, None), (True, model)]


@pytest.mark.parametrize("from_disk", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_automatic_class_patches_or_calls_a_function_of_the_program(monkeypatch, tmp_path, from_disk):
    from liger_kernel.transformers import AutoLigerKernelForCausalLM
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    config = transformers.LlamaConfig(**CONFIG)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)

    def build(**options):
        if from_disk:
            return AutoLigerKernelForCausalLM.from_pretrained(str(tmp_path), **options)
        return AutoLigerKernelForCausalLM.from_config(config, **options)

    model, tokens = build(rope=False, attn_implementation="eager"), torch.arange(8)[None]
    assert model(tokens, labels=tokens).loss.requires_grad
    assert "already" in str(tigon.patch(model))
    calls = []
    monkeypatch.setitem(MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", lambda rope=True, model=None: calls.append(rope))
    model = build(rope=False, attn_implementation="eager")
    assert calls == [False]
    assert model.config._attn_implementation == "eager"
    assert "already" not in str(tigon.patch(model))
    with pytest.raises(ValueError, match="cross_entropy and fused_linear_cross_entropy, which is True by default"):
        AutoLigerKernelForCausalLM.from_config(SimpleNamespace(), cross_entropy=True)


def test_a_type_that_nobody_knows_is_logged(caplog):
    from liger_kernel.transformers import _apply_liger_kernel

    _apply_liger_kernel("no_such_type")
    assert "model_type must be a model type, got 'no_such_type'" in caplog.text


@pytest.mark.parametrize("config", [{"rope": False, "fused_linear_cross_entropy": False}, None], ids=["config", ""])
@pytest.mark.sampled(2)
def test_trainer_with_use_liger_kernel_trains_with_tigon(tmp_path, config):
    """With `prediction_loss_only`, evaluation passes `skip_logits=True` to the model, and computes the same loss."""
    losses, evaluated = [], []
    for use_liger_kernel in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
        tokens = torch.arange(8) % 7
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, use_liger_kernel=use_liger_kernel, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, seed=0, liger_kernel_config=config, prediction_loss_only=True,
        )  # fmt: skip
        data = [{"input_ids": tokens, "labels": tokens}] * 16
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2])
        losses.append(trainer.train().training_loss)
        evaluated.append(trainer.evaluate()["eval_loss"])
    report = tigon.patch(model)
    # The patched model says that its modules are patched already. Only the parts that the config left out are new.
    assert "already" in str(report)
    assert {entry.part for entry in report.replaced} == (set() if config is None else {"rope", "loss"})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
