"""Unsloth's two functions get the random model, a tokenizer of its size, and the settings of the other providers."""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.train import unsloth_model
from benchmarks.train.models import config_fields
from benchmarks.train.providers import Missing, UnsupportedModel
from benchmarks.train.worker import Job, Trainer

peft = pytest.importorskip("peft")

CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
PAD = unsloth_model.SPECIAL_TOKENS.index("pad")


class Unsloth:
    """A stand-in for the package: it loads by transformers, adds adapters by PEFT, and marks layers as fused."""

    def __init__(self) -> None:
        self.fuses = True
        self.loading: dict[str, Any] = {}
        self.adapting: dict[str, Any] = {}

    def from_pretrained(self, folder: str, **settings: Any) -> tuple[Any, Any]:
        self.loading = settings
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert transformers.AutoConfig.from_pretrained(folder).hidden_size == CONFIG.hidden_size
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert (len(tokenizer), tokenizer.pad_token_id) == (model.config.vocab_size, PAD)
        with torch.no_grad():
            model.get_input_embeddings().weight[PAD] = 0
        for module in model.modules():
            module.max_seq_length = settings["max_seq_length"]
        return model, tokenizer

    def get_peft_model(self, model: Any, use_gradient_checkpointing: Any, **settings: Any) -> Any:
        self.adapting = {**settings, "use_gradient_checkpointing": use_gradient_checkpointing}
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        for layer in adapted.get_base_model().model.layers if self.fuses else []:
            layer.self_attn.apply_qkv, layer.self_attn.apply_o = "qkv", "o"
            layer.mlp.forward = layer.mlp.forward
        return adapted

    def for_training(self, model: Any) -> None:
        model.train()


@pytest.fixture
def unsloth(monkeypatch) -> Unsloth:
    """Install a package `unsloth` without kernels."""
    stand_in = Unsloth()
    packages: dict[str, dict[str, Any]] = {
        "unsloth": {"FastLanguageModel": stand_in, "__version__": "1"},
        "unsloth.kernels": {"apply_lora_qkv": "qkv", "apply_lora_o": "o"}, "unsloth.utils": {},
        "unsloth.utils.attention_dispatch": {"select_attention_backend": lambda: "sdpa"},
    }  # fmt: skip
    for name, contents in packages.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    # The worker would refuse a CPU.
    monkeypatch.setattr(unsloth_model, "import_unsloth", lambda device: None)
    return stand_in


def make_trainer(folder: Path, provider: str, seq: int = 16, dtype: str = "bfloat16") -> Trainer:
    tokens = folder / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(64, size=4096))
    job = Job(provider, config_fields(CONFIG), str(tokens), 2, seq, 3, 1, dtype, "cpu", lora=4, lr=1e-2)
    return Trainer(job, 0)


@pytest.mark.thorough
def test_unsloth_trains_the_weights_and_adapters_of_stock(tmp_path, unsloth):
    stock, result = (make_trainer(tmp_path, name, dtype="float32").train() for name in ("stock", "unsloth"))
    for name in ("losses", "parameters", "state_bytes"):
        assert result[name] == stock[name]
    assert "fused adapters in 2 QKV, 2 O, 2 MLP of 2 layers, attention by sdpa" in result["applied"]
    assert unsloth.adapting["r"] == 4
    assert unsloth.adapting["lora_alpha"] == 8
    assert not unsloth.loading["load_in_4bit"]


@pytest.mark.parametrize(("provider", "expected"), [("unsloth", False), ("unsloth-checkpoint", "unsloth")])
def test_only_the_suffix_enables_checkpointing_and_long_sequences_are_not_cut(tmp_path, unsloth, provider, expected):
    trainer: Any = make_trainer(tmp_path, provider, seq=64)
    assert unsloth.loading["use_gradient_checkpointing"] == expected
    assert unsloth.adapting["use_gradient_checkpointing"] == expected
    lengths = {module.max_seq_length for module in trainer.model.modules() if hasattr(module, "max_seq_length")}
    assert lengths == {64}
    assert trainer.model.config.max_position_embeddings == 64


def test_a_model_without_fused_kernels_is_refused(tmp_path, unsloth):
    unsloth.fuses = False
    with pytest.raises(UnsupportedModel, match="installed its fused kernels in .*'QKV': 0.* of 2 layers"):
        make_trainer(tmp_path, "unsloth")
    config = transformers.AutoConfig.for_model("gpt2")
    with pytest.raises(UnsupportedModel, match="no fused kernels for gpt2, only for llama"):
        unsloth_model.load_with_adapters(lambda: None, config, "bfloat16", 4, False, False)


def test_unsloth_is_missing_without_a_gpu_or_the_package(monkeypatch):
    with pytest.raises(Missing, match="needs a GPU"):
        unsloth_model.import_unsloth("cpu")
    monkeypatch.setenv("UNSLOTH_DISABLE_STATISTICS", "1")
    monkeypatch.setenv("UNSLOTH_COMPILE_LOCATION", "nowhere")
    monkeypatch.setitem(sys.modules, "unsloth", None)
    with pytest.raises(Missing, match="not installed"):
        unsloth_model.import_unsloth("cuda")
