"""Models and steps for the scripts that are run once a rank, where pytest's fixtures are out of reach."""

import os
from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

import tigon
from hf import same_step
from tigon.hf.logits import SKIPPED_LOGITS
from tigon.hf.report import Report

SIZE = {
    "vocab_size": 132,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DEVICE = os.environ.get("TIGON_TEST_DEVICE", "cpu")  # of the ranks: cpu, or cuda with a GPU each
# A GPU's kernels have exponentials of their own.
TOLERANCE = 1e-4 if DEVICE == "cuda" else 64 * same_step.EPS
PARTS = {"rms_norm", "glu", "rope", "fused_statements", "loss"}
# The tensor parallelism of transformers 5.23 puts a forward of its own on these norms, so they stay stock.
HEAD_NORMS = ("q_norm", "k_norm")

Step = dict[str, Tensor]  # the loss, and every gradient by name


def build(model_type: str = "gemma2", **config) -> nn.Module:
    """A model with random parameters, norms included, always the same."""
    config = transformers.AutoConfig.for_model(model_type, **SIZE | config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    randomise(model)
    return model.to(DEVICE)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)


def patch(model: nn.Module, **options) -> Report:
    report = tigon.patch(model, **options)
    assert {entry.part for entry in report.replaced} == PARTS, report
    for entry in report.left_alone:
        assert all(name.endswith(HEAD_NORMS) for name in entry.names), report
        assert "(by transformers.distributed." in entry.detail, report
    return report


def distributed(distribute: Callable, patched: bool, patch_after: bool, **config) -> nn.Module:
    """A model of `build` over the ranks, patched before or after that, or stock."""
    model = build(**config)
    if patched and not patch_after:
        patch(model)
    model = distribute(model)
    if patched and patch_after:
        patch(model)
    return model


def batch(rank: int, seed: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(3, SIZE["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(2 * seed + rank))
    return {"input_ids": tokens.to(DEVICE), "labels": tokens.to(DEVICE)}


def step(model: nn.Module, patched: bool, **inputs) -> Step:
    outputs = model(**inputs)
    assert (outputs.logits is SKIPPED_LOGITS) == patched, (
        "the loss was not fused" if patched else "the stock model is patched"
    )
    outputs.loss.backward()
    full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": full(outputs.loss.detach()), **gradients}


def assert_same(given: Step, expected: Step) -> None:
    assert len(expected) > 2
    same_step.assert_same(given, expected, TOLERANCE)
