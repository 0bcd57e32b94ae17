r"""The gated MLP of a decoder with low-rank adapters on any of its three projections, as one autograd node.

    [h_g | h_u] = x [A_g | A_u]^T,  gate = x G^T,  up = x U^T
    (a, h_d)    = `lora_glu_forward`(gate, up, h_g, h_u)
    y           = a D^T + s_d h_d B_d^T

The node saves x, gate, up and h. Backward recomputes a in the pass that computes dgate and dup. The base weights must
be frozen, as they are in fine-tuning with adapters. In other cases (a base weight that needs a gradient, a bias,
dropout, several adapters of one projection, a rank above 16) `lora_linears` and the op of the activation compute the
MLP.

If the weights are in FP8 with one scale for a matrix, the kernels that write a, dgate and dup also find the largest
absolute values for the scales, so no second read of these tensors is needed.

Shapes: T tokens, H hidden, I intermediate, r rank.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.memory.lean import call_mlp_region, in_checkpoint, recomputes_mlp
from tigon.ops.adapters.fp8_weight import Fp8Group, Fp8Operand
from tigon.ops.adapters.lora import lora_linears
from tigon.ops.adapters.lora_glu import GLUAdapters, lora_glu_backward, lora_glu_forward
from tigon.ops.adapters.lora_products import (
    add_low_rank,
    compute_hidden,
    compute_input_gradient,
    layer_gradients,
    project_gradients,
    rows_of,
    write_outputs,
)
from tigon.ops.adapters.plan import NodeCall, NodePlan, plan_gradients, plan_node, plan_part
from tigon.ops.adapters.projection import Projection, dense_weight, saved_tensors, tensors_to_save
from tigon.ops.mlps.gated_node import check_version, gradient_buffers, multiply_gate, save_gated, unpack_gated
from tigon.ops.mlps.glu_mlp import GATES
from tigon.runtime.compat.operators import reshape_without_view
from tigon.runtime.launch import on_device
from tigon.runtime.op import Node
from tigon.runtime.products import multiply

# The largest rank for which the values of a tile fit in the registers of the kernels.
LARGEST_RANK = 16


class _GLUPlan(NamedTuple):
    """The plans of gate and up together, and of down, whose h and dh are tensors of their own."""

    inner: NodePlan
    down: NodePlan
    # The indices of B of gate, B of up and A of down among the tensors of the node, or None without an adapter.
    indices: tuple[int | None, ...]
    gate_scaling: float
    up_scaling: float

    def adapters(self, tensors: Sequence[Any], h: Tensor | None) -> GLUAdapters:
        """Return the tensors of adapters that the kernels of the activation read. `h` is that of gate and up."""
        gate_b, up_b, down_a = [None if i is None else tensors[i].contiguous() for i in self.indices]
        return GLUAdapters(h, gate_b, up_b, down_a, self.gate_scaling, self.up_scaling)


@functools.lru_cache(1024)
def _plan_glu(plan: NodePlan) -> Any:
    """Return the `_GLUPlan` of the node, or None if it does not support these adapters."""
    entries = {entry.layer: entry for entry in plan.entries}
    is_supported = len(entries) == len(plan.entries) > 0 and not plan.has_dropout
    if not is_supported or max(entry.stop - entry.start for entry in plan.entries) > LARGEST_RANK:
        return None
    gate, up, _ = plan.layers
    if gate.shape != up.shape or any(layer.biases for layer in plan.layers):
        return None
    scalings = [entries[i].scaling if i in entries else 1.0 for i in (0, 1)]
    indices = tuple(entries[i].a_index + (i < 2) if i in entries else None for i in (0, 1, 2))
    return _GLUPlan(plan_part(plan, (0, 1)), plan_part(plan, (2,)), indices, *scalings)


def _zero_maximum(fp8: Fp8Group | None, layer_count: int, like: Tensor) -> Tensor | None:
    """Return a zero maximum for the kernel that writes what `layer_count` layers quantise, or None if one of them is
    not in FP8, or if rows have scales of their own."""
    return fp8.zero_maximum(like) if fp8 is not None and len(fp8.indices) == layer_count else None


def _multiply_gates(rows: Tensor, weights: Sequence[Any], operand: Fp8Operand | None) -> tuple[Tensor, Tensor]:
    """Return the products of x [T, H] with the weights of gate and up, of which one is dense at a time. `operand` is x
    for products in FP8."""
    products = {} if operand is None else dict(operand.products())
    for i in (0, 1):
        if i not in products:
            products[i] = multiply_gate(rows, dense_weight(weights[i]))
    return products[0], products[1]


class _LoRAGLUMLP(Node):
    """Compute y from x and the tensors of gate, up and down. gate and up are saved if `saves_gates` is True."""

    def forward(
        ctx: Any, x: Tensor, plan: NodePlan, kind: str, saves_gates: bool, is_checkpointed: bool, records: bool,
        *tensors: Any,
    ) -> Tensor:  # fmt: skip
        rows, glu = rows_of(x), _plan_glu(plan)
        weights = [tensors[layer.weight_index] for layer in plan.layers]
        # In this method gradients are off, and `needs_input_grad` does not depend on them.
        fp8 = Fp8Group.of(weights[:2], records and ctx.needs_input_grad[0])
        operand = None if fp8 is None else fp8.operand(rows)
        h = compute_hidden(rows, glu.inner, tensors, {}, operand)
        gate, up = _multiply_gates(rows, weights, operand)
        # The gradients of gate and up need da.
        down_fp8 = Fp8Group.of((None, None, weights[2]), records and any(ctx.needs_input_grad))
        maximum = _zero_maximum(down_fp8, 1, gate)
        a, down_h = lora_glu_forward(gate, up, glu.adapters(tensors, h), kind, maximum)
        gates = (gate, up) if saves_gates else (None, None)
        others = tensors_to_save(ctx, tensors, plan.present)
        save_gated(ctx, gate, saves_gates, is_checkpointed, x, h, down_h, *gates, *others)
        ctx.plan, ctx.kind, ctx.shape = plan, kind, x.shape
        ctx.fp8, ctx.down_fp8 = fp8, down_fp8
        # The output is not a view, because a view that a node returns cannot be modified in place.
        outputs = plan.layers[2].shape[0]
        if down_fp8 is not None:
            ((_, product),) = down_fp8.operand(a, maximum).products()
            add_low_rank({2: product}, glu.down, tensors, down_h)
            y = reshape_without_view(product, (*x.shape[:-1], outputs))
        else:
            y = x.new_empty((*x.shape[:-1], outputs))
            write_outputs({2: y.view(-1, outputs)}, a, glu.down, tensors, down_h)
        for group in filter(None, (fp8, down_fp8)):
            group.end_forward()
        return y

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, h, down_h, gate, up, *saved = unpack_gated(ctx)
        tensors, glu = saved_tensors(ctx, saved), _plan_glu(ctx.plan)
        needs_dx, *_ = needs = ctx.needs_input_grad
        needs, rows, dy = needs[6:], rows_of(x), rows_of(dy)
        check_version("lora_glu_mlp", ctx, gate)
        weights = [tensors[layer.weight_index] for layer in ctx.plan.layers]
        is_recomputed = gate is None
        if is_recomputed:
            gate, up = _multiply_gates(rows, weights, None if ctx.fp8 is None else ctx.fp8.operand(rows))
        down_operand = None if ctx.down_fp8 is None else ctx.down_fp8.operand_of_gradients({2: dy})
        down_dh = project_gradients({2: dy}, glu.down, tensors, down_operand) if glu.down.rank else None
        # This is the gradient of a without the part of the adapters.
        da = multiply(dy, dense_weight(weights[2])) if down_operand is None else down_operand.input_gradient()
        dgate, dup = gradient_buffers(ctx, gate, up, is_recomputed)
        maximum = _zero_maximum(ctx.fp8, 2, gate) if needs_dx else None
        sums = lora_glu_backward(
            da, gate, up, glu.adapters(tensors, h), down_dh, ctx.kind, dgate, dup,
            needs=[i is not None and needs[i] for i in glu.indices], maximum=maximum,
        )  # fmt: skip
        del gate, up, da
        dys = {0: dgate, 1: dup}
        operand = ctx.fp8.operand_of_gradients(dys, maximum) if needs_dx and ctx.fp8 is not None else None
        gradient_plan = plan_gradients(glu.inner, glu.down, needs, ctx.plan.all_layers)
        dh = None
        if glu.inner.rank and (needs_dx or gradient_plan.needs_a):
            dh = project_gradients(dys, glu.inner, tensors, operand)
        gradients = layer_gradients(gradient_plan, rows, down_h, dh, {**dys, 2: dy}, {}, len(tensors))
        for index, gradient in zip(glu.indices, sums, strict=True):
            if index is not None:
                gradients[index] = gradient
        dx = compute_input_gradient(dys, glu.inner, tensors, dh, {}, operand) if needs_dx else None
        return None if dx is None else dx.view(ctx.shape), *[None] * 5, *gradients


def has_one_node(call: NodeCall) -> bool:
    """Return whether one node can compute the MLP of the layers of a call. The module docstring names the others."""
    plan, tensors = call
    return _plan_glu(plan) is not None and not any(tensors[layer.weight_index].requires_grad for layer in plan.layers)


@on_device
def lora_glu_mlp_node(x: Tensor, call: NodeCall, activation: str) -> Tensor:
    """Return the same as `lora_glu_mlp` by one node, for whose call `has_one_node` is True."""
    records = torch.is_grad_enabled()
    is_checkpointed = records and in_checkpoint()
    saves_gates = not recomputes_mlp()
    return _LoRAGLUMLP.apply(x, call.plan, activation, saves_gates, is_checkpointed, records, *call.tensors)


def lora_glu_mlp(x: Tensor, gate: Projection, up: Projection, down: Projection, activation: str = "silu") -> Tensor:
    """Return down(act(gate(x)) * up(x)) for x [..., H], where each projection is a linear layer with adapters.
    `activation` is "silu", "gelu" or "gelu_tanh"."""
    if (call := plan_node(x, (gate, up, down))) is not None and has_one_node(call):
        return lora_glu_mlp_node(x, call, activation)

    def inner(x: Tensor) -> Tensor:
        return GATES[activation](*lora_linears(x, (gate, up)))

    (y,) = lora_linears(call_mlp_region(inner, x), (down,))
    return y
