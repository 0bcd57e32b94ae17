"""The code that the nodes of gated MLPs share: the products of gate and up, and how tensors are saved for backward.

Shapes: T tokens, H hidden, I intermediate.
"""

from typing import Any

import torch
from torch import Tensor

from tigon.memory.lean import is_checkpoint_recomputation, is_saved_only_by_this_op
from tigon.ops.mlps.activation_kernels import GateOptions, glu_backward_into
from tigon.runtime.autograd import may_overwrite_saved
from tigon.runtime.compat.autograd import keeps_graph
from tigon.runtime.products import multiply, multiply_by_weight

# Shorter products of gate and up run in torch: they take at most 0.05 ms on an H200, where a step waits for the host.
MIN_MULTIPLICATIONS = 2**34


def multiply_gate(x: Tensor, weight: Tensor) -> Tensor:
    """Return gate or up [T, I] for x [T, H] and its weight [I, H]."""
    return multiply_by_weight(x, weight, MIN_MULTIPLICATIONS)


def multiply_gates(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up [T, I] for x [T, H]."""
    return multiply_gate(x, gate_weight), multiply_gate(x, up_weight)


def backward_of_activation(
    dy: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor, activation: tuple[str, GateOptions], dgate: Tensor,
    dup: Tensor, needs_down: bool,
) -> Tensor | None:  # fmt: skip
    """Write dgate and dup [T, I], which may be the tensors gate and up, and return dD if it is needed."""
    da = multiply(dy, down_weight)
    glu_backward_into(da, gate, up, *activation, dgate, dup, da if needs_down else None)
    # The kernel has written a into the memory of da. Ping-pong kernels do not speed up this product.
    return torch.mm(dy.t(), da) if needs_down else None


class _SaveEarly(torch.autograd.Function):
    """A node whose backward never runs, and which saves tensors before the node of the MLP does. A node saves its
    tensors when its forward has ended, so the node of the MLP itself could save them only at its end."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: tuple[Tensor | None, ...]) -> Tensor:
        # The anchor requires a gradient. Without such an input autograd would create no node.
        ctx.save_for_backward(*tensors)
        return anchor.clone()


def _save_early(*tensors: Tensor | None) -> Tensor:
    """Return an empty tensor whose node has saved `tensors`. The caller must hold the tensor, because in torch 2.11 a
    reference to its `grad_fn` does not keep the node alive."""
    with torch.enable_grad():
        return _SaveEarly.apply(torch.empty(0, requires_grad=True), tensors)


def save_gated(
    ctx: Any, gate: Tensor | None, saves_gates: bool, is_checkpointed: bool, *tensors: Tensor | None
) -> None:
    """Save the tensors of a gated MLP, among them gate and up if `saves_gates` is True. The second run of a
    checkpointed layer ends with the last tensor that is saved. So with `is_checkpointed` all tensors are saved now,
    before the last product."""
    ctx.saves_early = is_checkpointed and any(ctx.needs_input_grad)
    if ctx.saves_early:
        ctx.saver = _save_early(*tensors)
    else:
        ctx.save_for_backward(*tensors)
    ctx.may_overwrite = is_saved_only_by_this_op()
    # The second run of a checkpointed layer shares gate and up with the node of the first run, which may overwrite
    # them.
    is_shared = saves_gates and is_checkpoint_recomputation()
    ctx.version = gate._version if is_shared and gate is not None else None


def unpack_gated(ctx: Any) -> tuple[Any, ...]:
    """Return the tensors that `save_gated` saved. As for any node, a second call needs a retained graph."""
    if not ctx.saves_early:
        return ctx.saved_tensors
    if ctx.saver is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time (glu_mlp in a checkpointed region): specify "
            "retain_graph=True in the first"
        )
    tensors = ctx.saver.grad_fn.saved_tensors
    if not keeps_graph():
        ctx.saver = None
    return tensors


def check_version(op: str, ctx: Any, gate: Tensor | None) -> None:
    """Raise an error if the backward of a node that shares the saved gate and up has overwritten them."""
    if ctx.version is not None and gate is not None and gate._version != ctx.version:
        raise RuntimeError(
            f"{op}: gate and up of a checkpointed region that ran again have been modified by an inplace "
            "operation: the backward of the whole region has overwritten them"
        )


def gradient_buffers(ctx: Any, gate: Tensor, up: Tensor, is_recomputed: bool) -> tuple[Tensor, Tensor]:
    """Return the memory for dgate and dup. The kernel reads gate and up before it writes, so these are overwritten.
    Saved tensors are not overwritten if they may be needed again."""
    if not is_recomputed and not (ctx.may_overwrite and may_overwrite_saved(gate)):
        return torch.empty_like(gate), torch.empty_like(up)
    # If this backward raises an error, another attempt must not read the overwritten tensors.
    torch.autograd.graph.increment_version((gate, up))
    return gate, up
