"""The body of `kl_div`, `jsd` and `tvd`: checks, the choice between kernels and reference, and the autograd node."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.ops.logits.divergence_kernels import (
    DivergenceOptions,
    SavedDivergence,
    divergence_backward,
    divergence_forward,
)
from tigon.ops.logits.divergence_reference import DivergenceReduction, divisor
from tigon.ops.logits.rescale import rescaled
from tigon.ops.logits.token.kernels import gradient_scales
from tigon.runtime import checks
from tigon.runtime.autograd import first_order
from tigon.runtime.device import runs_kernels
from tigon.runtime.rows import dense_rows

# --- autograd ------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    return dense_rows(x)[0].view(-1, x.shape[-1])


def _flat(labels: Tensor | None) -> Tensor | None:
    return None if labels is None else labels.reshape(-1).contiguous()


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, target: Tensor, labels: Tensor | None, inverse_count: Tensor | None, needs_dx: bool,
        options: DivergenceOptions,
    ) -> Tensor:  # fmt: skip
        x, y = _rows(input), _rows(target)
        # The gradient is computed in backward if it needs the upstream gradient: elementwise losses have one for each
        # element, and in fp16 it contains the loss scale.
        in_forward = needs_dx and not options.elementwise and x.dtype != torch.float16
        results = divergence_forward(x, y, _flat(labels), inverse_count, in_forward, options)
        if in_forward:
            ctx.save_for_backward(results.dx)
        elif needs_dx:
            saved = results.x_lse, results.y_lse, results.slope
            ctx.save_for_backward(input, target, labels, inverse_count, *saved)
        ctx.in_forward, ctx.options, ctx.shape = in_forward, options, input.shape
        return results.loss.view(input.shape) if options.elementwise else results.loss

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.in_forward:
            (dx,) = ctx.saved_tensors
            dx = rescaled(dx, dloss)
        else:
            input, target, labels, inverse_count, *statistics = ctx.saved_tensors
            dloss = dloss.reshape(-1, ctx.shape[-1]) if dloss.dim() else dloss
            saved = SavedDivergence(*statistics)
            dx = divergence_backward(
                dloss, _rows(input), _rows(target), _flat(labels), inverse_count, saved, ctx.options
            )  # fmt: skip
        return dx.view(ctx.shape), None, None, None, None, None


# --- the body of the three functions -------------------------------------------------------------


def divergence(
    op: str, kind: str, reference: Callable[[], Tensor], input: Tensor, target: Tensor, labels: Tensor | None,
    ignore_index: int, from_logits: bool, temperature: float, reduction: DivergenceReduction,
    is_log: bool = True, beta: float = 0.0,
) -> Tensor:  # fmt: skip
    """Check the arguments of a divergence, and return its loss by the kernels or by `reference`."""
    checks.tensor(op, input=input, target=target)
    checks.floating(op, input=input, target=target)
    checks.flag(op, from_logits=from_logits)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"{op}: input must have shape (..., V) with V > 0, got {tuple(input.shape)}")
    checks.shape(op, "target", target, input.shape)
    checks.choice(op, "reduction", reduction, ("batchmean", "mean", "sum", "none"))
    temperature = checks.number(op, "temperature", temperature, 0.0, excludes_low=True)
    if temperature != 1.0 and not from_logits:
        raise ValueError(
            f"{op}: temperature must be 1 without from_logits=True, got {temperature:g}; from_logits=True also accepts "
            "log-probabilities"
        )
    checks.ignore_index(op, ignore_index)
    if labels is not None:
        checks.integer(op, labels=labels)
        checks.shape(op, "labels", labels, input.shape[:-1])
    checks.same(op, "device", input=input, target=target, labels=labels)
    needs_grad = torch.is_grad_enabled()
    if not runs_kernels(input, target) or (needs_grad and target.requires_grad):
        return reference()
    inverse_count = None
    if labels is not None and reduction in ("batchmean", "mean"):
        inverse_count = gradient_scales(labels.reshape(-1).contiguous(), None, None, 1, ignore_index, True)
    options = DivergenceOptions(
        kind=kind, is_log=is_log or from_logits, from_logits=from_logits, elementwise=reduction == "none",
        divisor=divisor(input, labels, reduction), ignore_index=ignore_index, beta=beta, temperature=temperature,
    )  # fmt: skip
    return _Divergence.apply(input, target, labels, inverse_count, needs_grad and input.requires_grad, options)
