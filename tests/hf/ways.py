"""Models and steps for the scripts that run on each rank, which have no fixtures of pytest."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import tigon
from hf import same_step
from tigon.hf.logits import SKIPPED_LOGITS
from tigon.hf.report import Report
from tigon.recognition.parts import experts
from tigon.recognition.parts.experts import is_experts

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
# The first layer has an MLP, and the second one has experts.
EXPERTS = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}
# The device of the ranks: the CPU, or "cuda" with one GPU for each rank.
DEVICE = os.environ.get("TIGON_TEST_DEVICE", "cpu")
# Kernels on a GPU compute exponentials in another way.
TOLERANCE = 1e-4 if DEVICE == "cuda" else 64 * same_step.EPS
PARTS = {"rms_norm", "glu", "rope", "fused_statements", "loss"}
# transformers 5.23 replaces the forward of these modules when it shards them, so they stay stock: norms of heads in its
# tensor parallelism, and experts in its expert parallelism.
REPLACED_BY_TRANSFORMERS = ("q_norm", "k_norm", "experts")

# The loss, and every gradient by name.
Step = dict[str, Tensor]


def build(model_type: str = "gemma2", **config) -> nn.Module:
    """Return a model whose parameters, those of norms too, are random and always the same."""
    config = transformers.AutoConfig.for_model(model_type, **SIZE | config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    randomise(model)
    return model.to(DEVICE)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Add noise to every parameter."""
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)


def patch(model: nn.Module, **options) -> Report:
    """Patch a model, and assert that every part is replaced."""
    report = tigon.patch(model, **options)
    has_experts = any(map(is_experts, model.modules()))
    has_experts &= all(entry.part != "experts" for entry in report.left_alone)
    parts = PARTS | ({"experts"} if has_experts else set())
    assert {entry.part for entry in report.replaced} == parts, report
    for entry in report.left_alone:
        assert all(name.endswith(REPLACED_BY_TRANSFORMERS) for name in entry.names), report
        assert "(by transformers.distributed." in entry.detail, report
    return report


@contextlib.contextmanager
def recorded(owner: Any, name: str) -> Iterator[list[tuple]]:
    """Yield a list to which every call of the function `owner.name` in the block adds its arguments."""
    function, calls = getattr(owner, name), []
    setattr(owner, name, staticmethod(lambda *args, **kwargs: calls.append(args) or function(*args, **kwargs)))
    try:
        yield calls
    finally:
        setattr(owner, name, function)


def with_op_on_experts(setup: Callable[[int], None], count: int) -> Callable[[int], None]:
    """Return the setup with an assertion that the op computes the experts of its models `count` times."""

    def setup_with_count(rank: int) -> None:
        with recorded(experts, "moe_mlp") as calls:
            setup(rank)
        # Recognition calls the op with small copies of the experts.
        assert sum(x.shape[-1] == SIZE["hidden_size"] for x, *_ in calls) == count

    return setup_with_count


def distributed(distribute: Callable, patched: bool, patch_after: bool, **config) -> nn.Module:
    """Return a distributed model of `build`: stock, or patched before or after it is distributed."""
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
    """Return the loss and every gradient as full tensors. The loss must be fused if the model is patched."""
    outputs = model(**inputs)
    assert (outputs.logits is SKIPPED_LOGITS) == patched, (
        "the loss was not fused" if patched else "the stock model is patched"
    )
    outputs.loss.backward()
    full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": full(outputs.loss.detach()), **gradients}


def assert_same(actual: Step, expected: Step) -> None:
    assert len(expected) > 2
    same_step.assert_same(actual, expected, TOLERANCE)
