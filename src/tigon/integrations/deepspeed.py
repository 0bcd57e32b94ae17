"""Use Tigon's cross entropy in DeepSpeed, for logits whose columns are sharded over tensor-parallel ranks.

    tigon.integrations.deepspeed.enable_cross_entropy()

Written for DeepSpeed 0.19.8, `deepspeed.sequence.cross_entropy`. Importing this module imports nothing of DeepSpeed.
`tigon.patch` needs no integration with DeepSpeed's engine: patch the model before `deepspeed.initialize`.

Shapes: V vocabulary, V_p the columns of a rank.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tigon.integrations.frameworks import is_known_version, replace_function, token_losses

__all__ = ["enable_cross_entropy"]

OWNER = "deepspeed.sequence.cross_entropy"


def _wrap_loss(original: Any) -> Any:
    """Return DeepSpeed's loss, which then takes its code for a kernel by default."""

    @functools.wraps(original)
    def replacement(vocab_parallel_logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The backend is the eleventh argument. "liger" is DeepSpeed's name of the code that calls a kernel.
        if len(args) < 9:
            kwargs["backend"] = "liger"
        return original(vocab_parallel_logits, target, *args, **kwargs)

    return replacement


def _wrap_condition(original: Any) -> Any:
    """Return the condition for Tigon's loss. It must be the same on all ranks, because the loss communicates."""

    @functools.wraps(original)
    def replacement(logits: Tensor, target: Tensor, local_size: int, size: int, group: Any) -> bool:
        ranks = 1 if group is None else group.size()
        return local_size * ranks == size and logits.is_floating_point()

    return replacement


def _wrap_kernel(original: Any) -> Any:
    """Return the function that computes the losses, shaped as the target, of logits [..., V_p]."""

    @functools.wraps(original)
    def replacement(logits: Tensor, target: Tensor, group: Any, ignore_index: int) -> Tensor:
        return token_losses(logits, target, ignore_index, group)

    return replacement


def enable_cross_entropy() -> Callable[[], None]:
    """Let DeepSpeed compute its vocabulary-parallel losses with `tigon.cross_entropy`.

    This serves `VocabParallelCrossEntropyLoss`, `VocabParallelCausalLMLoss` and the two functions, for every `backend`.
    Where the ranks have different numbers of columns, DeepSpeed computes the loss. With another version of DeepSpeed,
    this function warns once and changes nothing.

    As for the kernel that DeepSpeed itself can call, ranks whose number divides V must have equally many columns.

    Returns:
        A function that restores DeepSpeed's functions.

    Source: `deepspeed.sequence.cross_entropy` of DeepSpeed 0.19.8.
    """
    if not is_known_version("deepspeed", "0.19.8", "tigon.integrations.deepspeed.enable_cross_entropy"):
        return lambda: None
    importlib.import_module("deepspeed.sequence")
    undo = [
        replace_function("vocab_parallel_cross_entropy", (OWNER, "deepspeed.sequence"), _wrap_loss),
        replace_function("_liger_can_run", (OWNER,), _wrap_condition),
        replace_function("_liger_vocab_cross_entropy", (OWNER,), _wrap_kernel),
    ]

    def undo_all() -> None:
        for function in undo:
            function()

    return undo_all
