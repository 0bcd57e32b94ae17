"""Use Tigon's cross entropy in DeepSpeed, for logits whose columns are sharded over tensor-parallel ranks.

    tigon.integrations.deepspeed.enable_cross_entropy()

Written for DeepSpeed 0.19.8, `deepspeed.sequence.cross_entropy`. Importing this module imports nothing of DeepSpeed.
`tigon.patch` needs no integration with DeepSpeed's engine: patch the model before `deepspeed.initialize`.

Shapes: V vocabulary, V_p the columns of a rank.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

from torch import Tensor

from tigon.ops.logits.cross_entropy import cross_entropy

OWNER = "deepspeed.sequence.cross_entropy"
TESTED_VERSION = "0.19.8"


def token_losses(logits: Tensor, target: Tensor, group: Any, ignore_index: int) -> Tensor:
    """Return the losses [...] in fp32 of logits [..., V_p] and targets [...], which are indices of the vocabulary."""
    ranks = 1 if group is None else group.size()
    sharding: dict[str, Any] = {"process_group": group, "vocab_size": ranks * logits.shape[-1]} if ranks > 1 else {}
    losses = cross_entropy(logits, target, ignore_index=ignore_index, reduction="none", **sharding)
    assert isinstance(losses, Tensor)
    return losses


def _wrap_loss(original: Any) -> Any:
    """Return DeepSpeed's loss, which then takes its code for a kernel by default."""

    @functools.wraps(original)
    def replacement(vocab_parallel_logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The backend is the eleventh argument. "liger" is DeepSpeed's name of the code that calls a kernel.
        if len(args) < 9:
            kwargs["backend"] = "liger"
        return original(vocab_parallel_logits, target, *args, **kwargs)

    return replacement


def _can_compute(logits: Tensor, target: Tensor, local_size: int, size: int, group: Any) -> bool:
    """Return whether Tigon computes the loss. The answer is the same on all ranks, because the loss communicates."""
    ranks = 1 if group is None else group.size()
    return local_size * ranks == size and logits.is_floating_point()


def enable_cross_entropy() -> Callable[[], None]:
    """Let DeepSpeed compute its vocabulary-parallel losses with `tigon.cross_entropy`.

    This serves `VocabParallelCrossEntropyLoss`, `VocabParallelCausalLMLoss` and the two functions, for every `backend`.
    Where the ranks have different numbers of columns, DeepSpeed computes the loss. With another version of DeepSpeed,
    this function warns and changes nothing.

    As for the kernel that DeepSpeed itself can call, ranks whose number divides V must have equally many columns.

    Returns:
        A function that restores DeepSpeed's functions.

    Source: `deepspeed.sequence.cross_entropy` of DeepSpeed 0.19.8.
    """
    try:
        version = metadata.version("deepspeed")
        installed = f"deepspeed {version} is installed"
    except metadata.PackageNotFoundError:
        version, installed = "", "deepspeed is not installed"
    if version.split(".")[:2] != TESTED_VERSION.split(".")[:2]:
        warnings.warn(
            "tigon: tigon.integrations.deepspeed.enable_cross_entropy is off: it was written for deepspeed "
            f"{TESTED_VERSION}, but {installed}",
            stacklevel=2,
        )
        return lambda: None
    sequence, owner = importlib.import_module("deepspeed.sequence"), importlib.import_module(OWNER)
    if hasattr(owner.vocab_parallel_cross_entropy, "is_tigon"):
        return lambda: None
    original = owner.vocab_parallel_cross_entropy
    loss = _wrap_loss(original)
    vars(loss)["is_tigon"] = True
    values = [
        (owner, "vocab_parallel_cross_entropy", loss),
        (sequence, "vocab_parallel_cross_entropy", loss),
        (owner, "_liger_can_run", _can_compute),
        (owner, "_liger_vocab_cross_entropy", token_losses),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in values]
    for module, name, value in values:
        setattr(module, name, value)

    def undo() -> None:
        for module, name, value in originals:
            setattr(module, name, value)

    return undo
