"""Tiny models of transformers on the device: a patched model has the loss and the gradients of the stock model.

The rounding error of a gradient depends on the model. The stock model shows how large it is: its parameters are moved
by about one unit in the last place, and the change of its gradients is the noise. A patched model may differ from the
stock model by four times this noise and a few units in the last place.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

import tigon
from tigon.cli.check.report import Check, NotChecked
from tigon.runtime.requirements import unmet

EPS = torch.finfo(torch.float32).eps
VOCABULARY = 131
# Each type has parts that those before it lack: norms of queries and keys; a norm with an offset, GEGLU and soft caps;
# norms after the blocks; experts.
MODEL_TYPES = ("llama", "qwen3", "gemma2", "olmo2", "mixtral")
LEVELS = ("default", "lean")

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
_MORE_SIZES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make_batch(vocabulary: int, rows: int = 2, length: int = 12, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return random tokens, some without labels. Some state-space models need a length that is a multiple of four."""
    tokens = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def step(model: nn.Module, batch: dict) -> dict[str, Tensor]:
    """Return the loss and every gradient, by name. Dropout is the same in every call."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def noise(model: nn.Module, batch: dict, expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the change of each result when every parameter moves by about one unit in its last place."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes = dict.fromkeys(expected, 0.0)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + EPS * torch.randn(p.shape, generator=generator).to(p.device))
        for name, value in step(model, batch).items():
            changes[name] = max(changes[name], (value - expected[name]).abs().max().item())
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])
    return changes


def tiny_model(model_type: str, device: torch.device) -> Any:
    """Return a model in training mode whose parameters, those of norms too, are random and always the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **_SIZES, **_MORE_SIZES.get(model_type, {}))
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return model.to(device).train()


def _compare(model_type: str, level: str, device: torch.device) -> str:
    """Assert that a patched model has the loss and the gradients of the stock one, and return what was replaced."""
    model, batch = tiny_model(model_type, device), make_batch(VOCABULARY, device=str(device))
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model, memory=level)
    parts = sorted({entry.part for entry in report.entries if entry.replaced})
    assert "loss" in parts, f"the loss was left alone; replaced: {', '.join(parts) or 'nothing'}"
    results = step(model, batch)
    assert results.keys() == expected.keys(), "other parameters than in the stock model have a gradient"
    for name, value in expected.items():
        tolerance = 4 * allowed[name] + 16 * EPS * value.abs().max().item()
        difference = (results[name] - value).abs().max().item()
        assert difference <= tolerance, f"{name}: {difference:.3g} from stock, {tolerance:.3g} allowed"
    report.restore()
    return ", ".join(parts)


def model_checks(device: torch.device) -> list[Check]:
    """Return a check for each model type and level of memory."""

    def check(model_type: str, level: str) -> str:
        if reason := unmet("transformers", extra="hf"):
            raise NotChecked(reason)
        return _compare(model_type, level, device)

    return [
        ("models", model_type, f"patched, {level}, float32", functools.partial(check, model_type, level))
        for model_type in MODEL_TYPES
        for level in LEVELS
    ]
