"""The calls of a loss function of `linear_loss` for parts of a batch, and the gradients that follow from them.

Shapes: T tokens, N sequences, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.chunks import Chunk, GradientSums, Needs, head_product, select
from tigon.ops.head.linear_loss_parts import Group, Part, Units, select_arguments, select_boundaries, select_units
from tigon.ops.logits.rescale import rescaled
from tigon.ops.logits.token.kernels import (
    Options,
    SavedStatistics,
    Shard,
    Upstream,
    Wants,
    gradient,
    gradient_scales,
    statistics,
)
from tigon.runtime.autograd import first_order, keep_none_gradients

__all__ = ["LinearLoss", "LossFunction", "LossProblem", "call_on_batch", "loss_of"]

LossFunction = Callable[..., Any]

# The loss of the batch may differ from the sum of the losses of its parts by rounding only. The first bound is relative
# to the sum of their absolute values. The losses of the tokens may cancel: the advantages of a group of completions sum
# to zero, so on-policy losses are rounding errors. The second bound is therefore relative to the size of their terms,
# the sum over the tokens of |df / d log p| max(1, |log p|), of which rounding errors are about 1e-7.
LARGEST_DIFFERENCE, LARGEST_ROUNDING = 1e-3, 1e-5


# --- the calls of the loss function -----------------------------------------------------------------


def call_on_batch(
    loss_fn: LossFunction, values: list[Tensor], args: tuple, shape: torch.Size, group: Group,
    cu_seqlens: Tensor | None,
) -> Any:  # fmt: skip
    """Call the function with values of all tokens. With the group "token", tensors of tokens have one dimension."""
    if group == "token":
        values = [value.reshape(-1) for value in values]
        is_tokens = lambda x: isinstance(x, Tensor) and x.dim() and x.shape[: len(shape)] == shape
        args = tuple(arg.flatten(0, len(shape) - 1) if is_tokens(arg) else arg for arg in args)
    return loss_fn(*values, *args, **_boundaries(cu_seqlens))


def _boundaries(cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """Return the keyword arguments of the function: the boundaries of packed sequences, if there are any."""
    return {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}


def loss_of(result: Any) -> Tensor:
    """Return the loss of a result of the function, which is the loss, or a pair of the loss and its metrics."""
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        form = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"linear_loss: loss_fn must return a tensor with one element, or a pair of it and metrics, got {form}"
        )
    return loss


# --- autograd ------------------------------------------------------------------------------------


class LossProblem(NamedTuple):
    """Everything that a call requests, except the tensors that get gradients."""

    loss_fn: LossFunction
    args: tuple
    # of the targets
    shape: torch.Size
    units: Units
    parts: list[Part]
    is_mean: bool
    with_entropy: bool
    with_sum_sq_probs: bool
    cu_seqlens: Tensor | None
    options: Options
    needs: Needs
    sums_in_fp32: bool
    computes_all_rows: bool

    def share(self, part: Part) -> float:
        """Return the factor of the loss of a part in the loss of the batch."""
        if not self.is_mean or self.units.group == "batch":
            return 1.0
        if self.units.group != "token":
            return (part.last - part.first) / self.units.number
        bounds = self.units.bounds
        return (bounds[part.last] - bounds[part.first]) / self.shape.numel()


class LinearLoss(torch.autograd.Function):
    """Return a zero whose gradient is that of the loss, the statistics of all tokens, and the sum of the losses.

    The last output is the largest difference of this sum from the loss of the batch that rounding explains.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, problem: LossProblem
    ) -> tuple[Tensor | None, ...]:
        keep_none_gradients(ctx)
        options, vocabulary = problem.options, len(weight)
        scales = gradient_scales(target, None, None, vocabulary, options.ignore_index, False)
        wants = Wants(False, False, True, problem.with_entropy, False, problem.with_sum_sq_probs)
        log_probs = torch.zeros(len(x), dtype=torch.float32, device=x.device)
        entropy = torch.zeros_like(log_probs) if problem.with_entropy else None
        log_sum_sq_probs = torch.zeros_like(log_probs) if problem.with_sum_sq_probs else None
        values = [log_probs] if entropy is None else [log_probs, entropy]
        constants = [] if log_sum_sq_probs is None else [log_sum_sq_probs]
        sums = GradientSums(
            x, weight, bias, problem.computes_all_rows, None, problem.sums_in_fp32, problem.needs, None
        )  # fmt: skip
        weight = weight.to(x.dtype)
        longest = max((_length(part.rows) for part in problem.parts), default=0)
        buffer = x.new_empty(longest, vocabulary)
        losses = []
        # The size of the terms of the loss.
        terms = log_probs.new_zeros(())
        for part in problem.parts:
            if not _length(part.rows):
                losses.append(_differentiate(problem, part, values, constants)[0])
                continue
            x_part, target_part = select(x, part.rows), select(target, part.rows)
            logits = buffer[: len(x_part)]
            head_product(x_part, weight, bias, logits)
            result = statistics(logits, target_part, None, scales, options, wants)
            for total, name in zip(values, ("log_probs", "entropy"), strict=False):
                total[part.rows] = getattr(result, name)
            for total in constants:
                assert result.log_sum_sq_probs is not None
                total[part.rows] = result.log_sum_sq_probs
            loss, part_gradients = _differentiate(problem, part, values, constants)
            losses.append(loss)
            upstream = [select(dvalue, part.rows) for dvalue in part_gradients]
            for dvalue, value in zip(upstream, values, strict=True):
                terms += (dvalue * select(value, part.rows).abs().clamp(min=1)).abs().sum()
            gradient(
                logits, target_part, None, scales, SavedStatistics(result.lse, result.log_probs, result.entropy),
                Upstream(log_probs.new_zeros(()), *upstream), options, logits, Shard(0, vocabulary),
            )  # fmt: skip
            sums.add(Chunk(part.rows, x_part, target_part, logits), weight)
        del buffer
        gradients = sums.finish(Shard(0, vocabulary))
        needs = problem.needs
        ctx.save_for_backward(*(g if need else None for g, need in zip(gradients[:3], needs[:3], strict=True)))
        total = torch.stack(losses).double() if losses else log_probs.new_zeros(1)
        tolerance = LARGEST_DIFFERENCE * total.abs().sum() + LARGEST_ROUNDING * terms
        outputs = log_probs, entropy, log_sum_sq_probs, total.sum(), tolerance
        ctx.mark_non_differentiable(*(each for each in outputs if each is not None))
        return log_probs.new_zeros(()), *outputs

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if dloss is None:
            return (None,) * 5
        scaled = lambda g: rescaled(g if g.dim() == 2 else g[None], dloss).view(g.shape)
        return *(None if g is None else scaled(g) for g in gradients), None, None


def _length(rows: slice | Tensor) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _differentiate(
    problem: LossProblem, part: Part, values: list[Tensor], constants: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the share of a part in the loss, and its gradients for all tokens' values, which are zero elsewhere.

    `constants` are values of all tokens that get no gradient.
    """
    units, args = problem.units, select_arguments(problem.args, problem.shape, problem.units, part)
    cu_seqlens = None if problem.cu_seqlens is None else select_boundaries(problem.cu_seqlens, units, part)
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in values]
        parts = [select_units(value, units, part) for value in (*leaves, *constants)]
        if units.group == "batch":
            parts = [each.view(problem.shape) for each in parts]
        loss = loss_of(problem.loss_fn(*parts, *args, **_boundaries(cu_seqlens))).reshape(()) * problem.share(part)
        if not loss.requires_grad:
            return loss.detach(), [torch.zeros_like(value) for value in values]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), [
        torch.zeros_like(value) if g is None else g for g, value in zip(gradients, values, strict=True)
    ]  # fmt: skip
