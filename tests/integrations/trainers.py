"""Tiny models and data for the trainers of TRL, one training run of each trainer, and counts of the ops that ran."""

import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tigon.integrations import trl_divergence, trl_head
from tigon.memory.lean import is_lean

WORDS = [f"w{i}" for i in range(93)]
VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", *WORDS]

SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# A soft cap and a scale that change the logits.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "cohere": {"logit_scale": 0.25},
}
TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    "distillation": (trl.DistillationTrainer, trl.DistillationConfig),
}
STEPS = 2


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def save_model(folder: Path, model_type: str = "llama") -> str:
    """Write a tiny model with random weights. Trainers load it again as their reference model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | CONFIGS[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        # Logits of several units, so that a soft cap or a missing scale changes the loss.
        model.get_output_embeddings().weight *= 20
    model.save_pretrained(folder)
    return str(folder)


def load_model(path: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)


def _words(generator: random.Random, count: int) -> str:
    return " ".join(generator.choices(WORDS, k=count))


def make_data(kind: str) -> Dataset:
    """Return eight examples of different lengths for a trainer."""
    generator = random.Random(0)
    rows = []
    for i in range(8):
        prompt, first, second = (_words(generator, 3 + (i + k) % 4) for k in range(3))
        rows.append(
            {
                "sft": {"prompt": prompt, "completion": " " + first},
                "dpo": {"prompt": prompt, "chosen": " " + first, "rejected": " " + second},
                "kto": {"prompt": prompt, "completion": " " + first, "label": i % 2 == 0},
            }.get(kind, {"prompt": prompt})
        )
    return Dataset.from_list(rows)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Prefer completions with large numbers of words, so that the members of a group have different rewards."""
    return [sum(int(word[1:]) for word in text.split() if word[1:].isdigit()) / 100 for text in completions]


def make_teacher(student: nn.Module) -> nn.Module:
    """Return a model of the same type, whose head differs."""
    teacher, generator = copy.deepcopy(student), torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = teacher.get_output_embeddings().weight
        weight += torch.randn(weight.shape, generator=generator)
    return teacher


def build(kind: str, model: nn.Module, folder: Path, peft_config: Any = None, **options: Any) -> Any:
    """Return a trainer that trains two steps on a CPU."""
    trainer_class, config_class = TRAINERS[kind]
    if kind in ("grpo", "rloo"):
        options = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1} | options
    if kind == "distillation":
        options = {"max_completion_length": 4, "temperature": 1.5} | options
    config = config_class(
        **{
            "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1,
            "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "learning_rate": 1e-2,
            "gradient_checkpointing": False, "disable_tqdm": True, "seed": 0,
        } | options
    )  # fmt: skip
    arguments: dict[str, Any] = {"reward_funcs": reward} if kind in ("grpo", "rloo") else {}
    if kind == "distillation":
        arguments["teacher_model"] = make_teacher(model)
    return trainer_class(
        model=model, args=config, train_dataset=make_data(kind), processing_class=make_tokenizer(),
        peft_config=copy.deepcopy(peft_config), **arguments,
    )  # fmt: skip


def train(trainer: Any) -> SimpleNamespace:
    """Train, and return the logged numbers of each step and the trained parameters."""
    torch.manual_seed(0)
    trainer.train()
    timing = ("runtime", "per_second", "step_time", "total_flos", "epoch")
    logs = [
        {name: value for name, value in entry.items() if not any(word in name for word in timing)}
        for entry in trainer.state.log_history[:STEPS]
    ]
    parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return SimpleNamespace(logs=logs, parameters=parameters)


class Counts:
    """How often the ops of the head ran, and in which forwards of the first layer a level was at work."""

    def __init__(self, monkeypatch) -> None:
        self.losses = self.log_probs = self.divergences = 0
        self.levels: list[bool] = []
        monkeypatch.setattr(trl_head, "linear_cross_entropy", self._count("losses", trl_head.linear_cross_entropy))
        monkeypatch.setattr(trl_head, "linear_log_probs", self._count("log_probs", trl_head.linear_log_probs))
        function = trl_divergence.linear_distillation
        monkeypatch.setattr(trl_divergence, "linear_distillation", self._count("divergences", function))

    def _count(self, name, function):
        def call(*args, **kwargs):
            setattr(self, name, getattr(self, name) + 1)
            return function(*args, **kwargs)

        return call

    def watch(self, model) -> None:
        """Record at each training call of the first layer whether it runs in a block of `lean`."""
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        layers[0].register_forward_pre_hook(lambda m, _: self.levels.append(is_lean()) if m.training else None)
