"""Steps that change a model, in any order, and their outcome: which code computes the loss, and its value.

`docs/patching.md` has the table of the outcomes, and test_orders.py compares the two.
"""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tigon
from hf.changes import save_and_load
from tigon.hf.logits import SKIPPED_LOGITS

VOCABULARY, RESIZED = 40, 48
LOSS_IN_HEAD, STOCK_LOSS, NOT_POSSIBLE = "yes", "stock loss", "no"


def build() -> nn.Module:
    """Return a model of one layer in training mode. Its weights are the same in every call."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def add_adapters(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


def resize(model: Any) -> nn.Module:
    model.resize_token_embeddings(RESIZED)
    return model


def accelerator() -> Any:
    import accelerate

    return accelerate.Accelerator(mixed_precision="bf16", cpu=True)


def prepare(model: nn.Module) -> nn.Module:
    return accelerator().prepare(model)


def unwrap(model: nn.Module) -> nn.Module:
    return accelerator().unwrap_model(prepare(model), keep_fp32_wrapper=False)


def shard(model: Any) -> nn.Module:
    """Shard each layer and the model by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module)
    return fully_shard(model)


def compile_model(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


STEPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "PEFT": add_adapters,
    "resize": resize,
    "prepare": prepare,
    "unwrap": unwrap,
    "FSDP2": shard,
    "compile": compile_model,
    "save": save_and_load,
}


@functools.cache
def patched() -> nn.Module:
    model = build()
    tigon.patch(model)
    return model


def run(steps: list[str], *, is_patched: bool) -> tuple[float, bool]:
    """Run steps on a new model; return the loss of a call after them, and whether it was computed in the head."""
    model, report = build(), None
    if is_patched and steps[0] == "patch" and "restore" not in steps:
        # A copy of a patched model is patched too. Copying is much faster than patching.
        model, steps = copy.deepcopy(patched()), steps[1:]
    for step in steps:
        torch.manual_seed(1)
        if step in STEPS:
            model = STEPS[step](model)
        elif is_patched and step == "patch":
            report = tigon.patch(model)
        elif is_patched and step == "restore":
            assert report is not None
            report.restore()
    tokens = torch.arange(24).view(2, 12) % VOCABULARY
    outputs = model(input_ids=tokens, labels=tokens)
    outputs.loss.backward()
    return outputs.loss.item(), outputs.logits is SKIPPED_LOGITS


def outcome(first: str, second: str) -> str:
    """Return the cell of the table for two steps. The steps of a stock model are the same without the patch."""
    columns = {"restore": [first, "restore"], "patch again": [first, "restore", "patch"]}
    steps = columns.get(second, [first, second])
    steps = steps if "patch" in (first, second) else ["patch", *steps]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # A compiled stock model has the loss of the model itself.
            expected, _ = run(steps[:-1] if second == "compile" else steps, is_patched=False)
        except (RuntimeError, pickle.PicklingError):
            return NOT_POSSIBLE
        actual, is_fused = run(steps, is_patched=True)
    # In bf16 the two losses round in different places: the logits have a few values of size 1.
    tolerance = 2e-2 if {"prepare", "unwrap"} & {*steps} else 1e-5
    assert abs(actual - expected) < tolerance, f"{steps}: {actual}, stock {expected}"
    return LOSS_IN_HEAD if is_fused else STOCK_LOSS
