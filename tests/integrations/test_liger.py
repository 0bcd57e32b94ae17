"""The alias for Liger: its finder, the names that it serves, and their behaviour."""

import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import tigon
from tigon.integrations.liger import apply, uninstall

pytestmark = pytest.mark.usefixtures("alias")

transformers = pytest.importorskip("transformers")
CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


def test_finder_answers_metadata_and_find_spec():
    assert importlib.metadata.version("liger-kernel") == "0.8.5"
    assert importlib.util.find_spec("liger_kernel.transformers") is not None
    uninstall()
    assert "liger_kernel" not in sys.modules


def test_transformers_looks_for_the_package_again():
    """transformers caches the answer, which would otherwise outlive the alias, or be older than it."""
    available = transformers.utils.import_utils.is_liger_kernel_available
    assert available()
    uninstall()
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


def test_every_served_name_resolves():
    import liger_kernel.transformers as served

    assert all(getattr(served, name) is not None for name in served.__all__)
    assert sum(name.startswith("apply_liger_kernel_to_") for name in served.__all__) == 45


# The public names of Liger Kernel 0.8.5, besides the 45 functions `apply_liger_kernel_to_<type>`.
TRANSFORMERS_NAMES = """
AutoLigerKernelForCausalLM LigerBlockSparseTop2MLP LigerCrossEntropyLoss LigerDyT LigerFalconH1MLP
LigerFalconH1SwiGLUMLP LigerFusedAddRMSNorm LigerFusedCETVDLoss LigerFusedLinearCrossEntropyLoss LigerFusedLinearJSD
LigerFusedLinearKLDivLoss LigerGEGLUMLP LigerJSD LigerKLDIVLoss LigerLayerNorm LigerMHC LigerMLP
LigerModulatedRMSNorm LigerMultiTokenAttention LigerPhi3SwiGLUMLP LigerPolyNorm LigerQwen3MoeSwiGLUMLP LigerRMSNorm
LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered LigerReLUSquared LigerSoftmax LigerSparsemax
LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer LigerTVDLoss LigerTiledGEGLUMLP LigerTiledSwiGLUMLP _apply_liger_kernel
_apply_liger_kernel_to_instance is_transformers_available liger_llama4_text_rotary_pos_emb
liger_llama4_vision_rotary_pos_emb liger_rotary_pos_emb
"""
CHUNKED_NAMES = """
LigerFusedLinearCPOLoss LigerFusedLinearCosineSimilarityLoss LigerFusedLinearDPOLoss LigerFusedLinearGRPOLoss
LigerFusedLinearJSDLoss LigerFusedLinearKTOLoss LigerFusedLinearORPOLoss LigerFusedLinearSimPOLoss
"""


def test_all_names_are_served():
    import liger_kernel.chunked_loss
    import liger_kernel.transformers

    names = [(liger_kernel.transformers, name) for name in TRANSFORMERS_NAMES.split()]
    names += [(liger_kernel.chunked_loss, name) for name in CHUNKED_NAMES.split()]
    assert all(getattr(module, name).__doc__ for module, name in names)


def test_missing_name_says_where_the_served_ones_are():
    import liger_kernel.chunked_loss as served

    with pytest.raises(AttributeError, match=r"names.MODULES\['liger_kernel.chunked_loss'\]; use the op of tigon"):
        _ = served.LigerFusedLinearPPOLoss


def test_from_pretrained_refuses_two_losses():
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    with pytest.raises(ValueError, match="cross_entropy and fused_linear_cross_entropy, which is True by default"):
        AutoLigerKernelForCausalLM.from_pretrained("nothing", cross_entropy=True)


def test_the_norm_returns_the_dtype_of_its_input():
    from liger_kernel.transformers import LigerRMSNorm

    for casting_mode in ("llama", "gemma", "none"):
        norm, x = LigerRMSNorm(8, casting_mode=casting_mode), torch.randn(3, 8, dtype=torch.bfloat16)
        expected = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        assert norm(x).dtype == torch.bfloat16
        torch.testing.assert_close(norm(x).float(), expected, rtol=2**-7, atol=0)


def test_signatures_are_those_of_liger():
    from liger_kernel.transformers import apply_liger_kernel_to_granite as function

    parameters = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    assert parameters == {
        "rope": True, "cross_entropy": True, "fused_linear_cross_entropy": False, "rms_norm": True, "swiglu": True,
        "model": None,
    }  # fmt: skip


def test_published_snippet_patches_later_models():
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=True, swiglu=True, cross_entropy=True, fused_linear_cross_entropy=False, rms_norm=False
    )
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    assert {entry.part for entry in apply._reports["llama"].entries} == {"glu", "rope"}


def test_linear_cross_entropy_takes_the_weight_first():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden, weight, target = torch.randn(6, 8), torch.randn(11, 8), torch.randint(11, (6,))
    expected = F.cross_entropy(hidden @ weight.T, target)
    torch.testing.assert_close(LigerFusedLinearCrossEntropyLoss()(weight, hidden, target), expected)
    output = LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-2, return_z_loss=True)(weight, hidden, target)
    z_loss = 1e-2 * (hidden @ weight.T).logsumexp(-1).square().mean()
    torch.testing.assert_close(output.z_loss, z_loss)
    torch.testing.assert_close(output.loss, expected + z_loss)


def test_gemma_norm_multiplies_before_it_rounds():
    from liger_kernel.transformers import LigerRMSNorm

    x = torch.randn(5, 16, dtype=torch.bfloat16)
    norm = LigerRMSNorm(16, offset=1.0, casting_mode="gemma")
    x_hat = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(norm(x), (2 * x_hat).to(x.dtype))


def test_falcon_mlp_applies_both_multipliers():
    from liger_kernel.transformers import LigerFalconH1MLP

    config = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu", mlp_multipliers=(0.5, 3.0))
    module, x = LigerFalconH1MLP(config), torch.randn(4, 8)
    expected = module.down_proj(F.silu(module.gate_proj(x) * 0.5) * module.up_proj(x)) * 3.0
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("config", [None, {"rope": False, "fused_linear_cross_entropy": False}], ids=["", "config"])
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


def test_command_runs_a_script(tmp_path):
    script = tmp_path / "script.py"
    (tmp_path / "sibling.py").write_text("")
    lines = (
        "import sys, liger_kernel.ops, liger_kernel.functional, sibling",
        # The alias must not import transformers before a script needs it.
        "assert liger_kernel.functional.rms_norm and 'transformers' not in sys.modules",
        "print(liger_kernel.__version__, sys.argv[1:])",
    )
    script.write_text("\n".join(lines))
    command = [sys.executable, "-m", "tigon.as_liger", str(script), "--x"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0.8.5 ['--x']"
