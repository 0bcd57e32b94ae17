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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.memory.lean import call_mlp_region, in_checkpoint, recomputes_mlp
from tigon.ops.adapters.fp8_weight import Fp8Group, Fp8Operand
from tigon.ops.adapters.lora import lora_linears, takes_adapters
from tigon.ops.adapters.lora_glu import GLUAdapters, lora_glu_backward, lora_glu_forward
from tigon.ops.adapters.lora_products import (
    BackwardTensors,
    Entry,
    add_low_rank,
    columns_of,
    compute_hidden,
    compute_input_gradient,
    layer_gradients,
    list_entries,
    project_gradients,
    rows_of,
    write_outputs,
)
from tigon.ops.adapters.projection import Projection, dense_weight, flatten, saved_projections, tensors_to_save
from tigon.ops.mlps.gated_node import check_version, gradient_buffers, multiply_gate, save_gated, unpack_gated
from tigon.ops.mlps.glu_mlp import GATES
from tigon.runtime.compat.operators import reshape_without_view
from tigon.runtime.launch import on_device
from tigon.runtime.op import Node
from tigon.runtime.products import multiply

# The largest rank for which the values of a tile fit in the registers of the kernels.
LARGEST_RANK = 16


def _list_entries(projections: Sequence[Projection]) -> tuple[list[Entry], list[Entry]]:
    """Return the entries of gate and up, and that of down, whose h and dh are tensors of their own."""
    entries = list_entries(projections)
    down_entries = [each._replace(start=0, stop=each.stop - each.start) for each in entries if each.projection == 2]
    return entries[: len(entries) - len(down_entries)], down_entries


def _glu_adapters(entries: Sequence[Entry], h: Tensor | None, down: Projection) -> GLUAdapters:
    """Return the tensors of adapters that the kernels of the activation read. `entries` are those of gate and up."""
    hidden: list[Tensor | None] = [None, None]
    b: list[Tensor | None] = [None, None]
    scaling = [1.0, 1.0]
    for entry in entries:
        assert h is not None
        hidden[entry.projection] = h if entry.start == 0 else columns_of(h, entry, entry)
        b[entry.projection] = entry.adapter.b.contiguous()
        scaling[entry.projection] = entry.adapter.scaling
    down_a = down.adapters[0].a.contiguous() if down.adapters else None
    return GLUAdapters(hidden[0], hidden[1], b[0], b[1], down_a, scaling[0], scaling[1])


def _zero_maximum(fp8: Fp8Group | None, layer_count: int, like: Tensor) -> Tensor | None:
    """Return a zero maximum for the kernel that writes what `layer_count` layers quantise.

    It is None if one of these layers is not in FP8, or if rows have scales of their own.
    """
    return fp8.zero_maximum(like) if fp8 is not None and len(fp8.indices) == layer_count else None


def _multiply_gates(
    rows: Tensor, gate: Projection, up: Projection, operand: Fp8Operand | None
) -> tuple[Tensor, Tensor]:
    """Return the products of x [T, H] with the weights of gate and up, of which one is dense at a time.

    `operand` is x as the operand of products in FP8, if there are any.
    """
    products = {} if operand is None else dict(operand.products())
    for i, layer in enumerate((gate, up)):
        if i not in products:
            products[i] = multiply_gate(rows, dense_weight(layer.weight))
    return products[0], products[1]


def _gradient_of_activation(dy: Tensor, down: Projection, operand: Fp8Operand | None) -> Tensor:
    """Return da [T, I] for dy [T, O], without the part of the adapters.

    `operand` holds dy if the weight of down is in FP8, and is None otherwise.
    """
    return multiply(dy, dense_weight(down.weight)) if operand is None else operand.input_gradient()


class _LoRAGLUMLP(Node):
    """Compute y from x and the tensors of gate, up and down. gate and up are saved if `saves_gates` is True."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        projections: Sequence[Projection],
        kind: str,
        saves_gates: bool,
        is_checkpointed: bool,
        records: bool,
        *tensors: Any,
    ) -> Tensor:
        gate_layer, up_layer, down = projections
        rows, (entries, down_entries) = rows_of(x), _list_entries(projections)
        # In this method gradients are off, and `needs_input_grad` does not depend on them.
        fp8 = Fp8Group.of((gate_layer, up_layer), records and ctx.needs_input_grad[0])
        operand = None if fp8 is None else fp8.operand(rows)
        h = compute_hidden(rows, entries, {}, operand) if entries else None
        gate, up = _multiply_gates(rows, gate_layer, up_layer, operand)
        # The gradients of gate and up need da.
        down_fp8 = Fp8Group.of((down,), records and any(ctx.needs_input_grad))
        maximum = _zero_maximum(down_fp8, 1, gate)
        a, down_h = lora_glu_forward(gate, up, _glu_adapters(entries, h, down), kind, maximum)
        gates = (gate, up) if saves_gates else (None, None)
        others = tensors_to_save(ctx, projections, tensors)
        save_gated(ctx, gate, saves_gates, is_checkpointed, x, h, down_h, *gates, *others)
        ctx.kind, ctx.shape = kind, x.shape
        ctx.fp8, ctx.down_fp8 = fp8, down_fp8
        # The output is not a view, because a view that a node returns cannot be modified in place.
        if down_fp8 is not None:
            ((_, product),) = down_fp8.operand(a, maximum).products()
            add_low_rank({2: product}, projections, down_entries, down_h)
            y = reshape_without_view(product, (*x.shape[:-1], len(down.weight)))
        else:
            y = x.new_empty((*x.shape[:-1], down.weight.shape[0]))
            write_outputs({2: y.view(rows.shape[0], -1)}, a, projections, down_entries, down_h)
        for group in filter(None, (fp8, down_fp8)):
            group.end_forward()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, h, down_h, gate, up, *tensors = unpack_gated(ctx)
        projections = saved_projections(ctx, tensors)
        *layers, down = projections
        needs_dx, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        rows, dy, (entries, down_entries) = rows_of(x), rows_of(dy), _list_entries(projections)
        check_version("lora_glu_mlp", ctx, gate)
        is_recomputed = gate is None
        if is_recomputed:
            operand = None if ctx.fp8 is None else ctx.fp8.operand(rows)
            gate, up = _multiply_gates(rows, layers[0], layers[1], operand)
        down_operand = None if ctx.down_fp8 is None else ctx.down_fp8.operand_of_gradients({0: dy})
        down_dh = None
        if down_entries:
            # The operand of down has a single layer.
            down_dh, _ = project_gradients({0: dy}, [e._replace(projection=0) for e in down_entries], down_operand)
        dgate, dup = gradient_buffers(ctx, gate, up, is_recomputed)
        # These flags say whether B of gate, B of up and A of down need gradients.
        flags = [False, False, any(needs[entry.tensor_index] for entry in down_entries)]
        for entry in entries:
            flags[entry.projection] = needs[entry.tensor_index + 1]
        maximum = _zero_maximum(ctx.fp8, 2, gate) if needs_dx else None
        sums = lora_glu_backward(
            _gradient_of_activation(dy, down, down_operand), gate, up, _glu_adapters(entries, h, down), down_dh,
            ctx.kind, dgate, dup, needs=tuple(flags), maximum=maximum,
        )  # fmt: skip
        del gate, up
        dys = {0: dgate, 1: dup}
        operand = ctx.fp8.operand_of_gradients(dys, maximum) if needs_dx and ctx.fp8 is not None else None
        dh: Tensor | None = None
        dh_entries: Sequence[Entry] = ()
        if entries and (needs_dx or any(needs[entry.tensor_index] for entry in entries)):
            dh, dh_entries = project_gradients(dys, entries, operand)
        dbs = {entry.position: (sums.gate_b, sums.up_b)[entry.projection] for entry in entries}
        backward_tensors = BackwardTensors(rows, down_h, [*entries, *down_entries], dh, dh_entries, {**dys, 2: dy}, {})
        gradients = layer_gradients(backward_tensors, projections, needs, dbs)
        for entry in down_entries:
            gradients[entry.tensor_index] = sums.down_a
        dx = compute_input_gradient(dys, layers, dh, dh_entries, {}, operand) if needs_dx else None
        return None if dx is None else dx.view(ctx.shape), *[None] * 5, *gradients


# --- public --------------------------------------------------------------------------------------


def has_one_node(layers: Sequence[Projection]) -> bool:
    """Return whether one node can compute the MLP of layers for which `takes_adapters` is True.

    The module docstring names the cases that it does not support.
    """
    adapters = [adapter for layer in layers for adapter in layer.adapters]
    return (
        bool(adapters)
        and all(len(layer.adapters) <= 1 and layer.bias is None and not layer.weight.requires_grad for layer in layers)
        and all(a.bias is None and a.dropout == 0.0 and a.a.shape[0] <= LARGEST_RANK for a in adapters)
        and layers[0].weight.shape == layers[1].weight.shape
    )


def runs_as_one_node(x: object, layers: Sequence[Projection]) -> bool:
    """Return whether one node computes the MLP for the input x."""
    return has_one_node(layers) and takes_adapters(x, layers)


@on_device
def lora_glu_mlp_node(x: Tensor, layers: Sequence[Projection], activation: str) -> Tensor:
    """Return the same as `lora_glu_mlp` by one node. The caller knows that `runs_as_one_node` is True."""
    records = torch.is_grad_enabled()
    is_checkpointed = records and in_checkpoint()
    saves_gates = not recomputes_mlp()
    return _LoRAGLUMLP.apply(x, layers, activation, saves_gates, is_checkpointed, records, *flatten(layers))


def lora_glu_mlp(x: Tensor, gate: Projection, up: Projection, down: Projection, activation: str = "silu") -> Tensor:
    """Return down(act(gate(x)) * up(x)), where each of the three projections is a linear layer with adapters.

    Args:
        x: [..., H], fp32 | bf16 | fp16.
        gate: The layer [I, H] and its adapters.
        up: The layer [I, H] and its adapters.
        down: The layer [O, I] and its adapters.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        [..., O] in the dtype of x.
    """
    if runs_as_one_node(x, (gate, up, down)):
        return lora_glu_mlp_node(x, (gate, up, down), activation)

    def inner(x: Tensor) -> Tensor:
        return GATES[activation](*lora_linears(x, (gate, up)))

    (y,) = lora_linears(call_mlp_region(inner, x), (down,))
    return y
