"""The checks of the arguments that all losses of a head share."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops.logits.token.types import Options, Shard
from tigon.ops.logits.valid_rows import ValidRows
from tigon.ops.logits.vocab_parallel import local_parts, shard_of
from tigon.runtime import checks


class HeadNames(NamedTuple):
    """The names that an op has for its hidden states [..., H], weight [V, H], bias [V] and targets [...]."""

    hidden: str = "hidden"
    weight: str = "weight"
    bias: str = "bias"
    targets: str = "targets"


NAMES = HeadNames()


class HeadArguments(NamedTuple):
    """The tensors of a head, which are those of this rank, and its shard of the vocabulary."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    shard: Shard


def check_shapes(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, names: HeadNames = NAMES,
    may_be_empty: bool = False,
) -> None:  # fmt: skip
    """Check the types and shapes of the tensors of a head. A shard of the weight may be empty."""
    checks.floating(op, **{names.hidden: hidden, names.weight: weight, names.bias: bias})
    checks.integer(op, **{names.targets: targets})
    if weight.dim() != 2 or weight.shape[1] == 0 or (len(weight) == 0 and not may_be_empty):
        raise ValueError(f"{op}: {names.weight} must have shape (V, H), got {tuple(weight.shape)}")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: {names.hidden} must have shape (..., H) and {names.weight} (V, H), got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    checks.shape(op, names.targets, targets, hidden.shape[:-1])
    if bias is not None:
        checks.shape(op, names.bias, bias, (len(weight),))


def check_head(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
    process_group: "torch.distributed.ProcessGroup | None" = None, vocab_size: int | None = None, *,
    names: HeadNames = NAMES,
) -> HeadArguments:  # fmt: skip
    """Check the types, shapes and devices of the tensors of a head, and return them without DTensors."""
    if any(hasattr(x, "placements") for x in (hidden, weight, bias, targets)):
        if vocab_size is None and process_group is not None and hasattr(weight, "placements"):
            vocab_size = weight.shape[0]
        head = {names.weight: weight, names.bias: bias}
        of_tokens = names.hidden, names.targets
        hidden, targets, weight, bias = local_parts(op, process_group, hidden, targets, of_tokens, **head)
    check_shapes(op, hidden, weight, bias, targets, names=names, may_be_empty=process_group is not None)
    tensors = {names.hidden: hidden, names.weight: weight, names.bias: bias, names.targets: targets}
    checks.same(op, "device", **tensors)
    return HeadArguments(
        hidden, weight, bias, targets, shard_of(op, process_group, len(weight), vocab_size, names.weight)
    )  # fmt: skip


def check_valid_rows(op: str, valid_rows: Any, targets: Tensor, ignore_index: int) -> ValidRows | Literal[False] | None:
    """Check that `valid_rows` are the rows of `targets`, if they are given, and return them. Compiled code finds the
    rows when it runs, so None replaces them there."""
    if valid_rows is None or valid_rows is False:
        return valid_rows
    if not isinstance(valid_rows, ValidRows):
        raise TypeError(f"{op}: valid_rows must be a tigon.ValidRows or False, got {type(valid_rows).__name__}")
    if torch.compiler.is_compiling():
        return None
    valid_rows.check(op, targets, ignore_index)
    return valid_rows


def check_sums(op: str, max_logits_mib: float | None, acc_dtype: torch.dtype | None) -> None:
    """Check the cap on the logits of a chunk and the dtype of the sum of dW."""
    checks.choice(op, "acc_dtype", acc_dtype, (None, torch.float32))
    if max_logits_mib is not None and checks.number(op, "max_logits_mib", max_logits_mib) < 1:
        raise ValueError(f"{op}: max_logits_mib must be at least 1 or None, got {max_logits_mib}")


def needed_gradients(*tensors: Tensor | None) -> list[bool]:
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]


def log_prob_options(
    op: str, ignore_index: int, temperature: float, softcap: float | None, logit_scale: float
) -> Options:
    """Check the options that change the logits, and return those of the kernels, which divide by the temperature."""
    temperature = checks.number(op, "temperature", temperature, 0.0, excludes_low=True)
    if softcap is not None:
        softcap = checks.number(op, "softcap", softcap, 0.0, excludes_low=True)
    logit_scale = checks.number(op, "logit_scale", logit_scale)
    # c tanh(s a / c) / tau = c' tanh(s' a / c') with c' = c / tau and s' = s / tau.
    if softcap is not None:
        softcap = checks.number(op, "softcap / temperature", softcap / temperature, 0.0, excludes_low=True)
    logit_scale = checks.number(op, "logit_scale / temperature", logit_scale / temperature)
    return Options(ignore_index, softcap=softcap, logit_scale=logit_scale)


def cast_for_products(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, names: HeadNames = NAMES
) -> tuple[Tensor, Tensor | None]:
    """Check the dtypes, and return the hidden states and the bias in the dtype in which autocast computes products."""
    same_dtype = lambda *tensors: checks.same(op, "dtype", **dict(zip(names[:3], tensors, strict=True)))
    if hidden.device.type == "meta" or not torch.is_autocast_enabled(hidden.device.type):
        same_dtype(hidden, weight, bias)
        return hidden, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    cast = lambda x: x if x.dtype == torch.float64 else x.to(dtype)
    # The weight is cast where it is used, so that its gradient is not rounded.
    hidden, bias = cast(hidden), None if bias is None else cast(bias)
    same_dtype(hidden, cast(weight[:0]), bias)
    return hidden, bias
