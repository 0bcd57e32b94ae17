r"""Linear layers with low-rank adapters (Hu et al., arXiv:2106.09685) as one autograd node.

    h_i = x A_i^T,            y_i = x W_i^T + b_i + s_i h_i B_i^T
    dh_i = s_i dy_i B_i,      dB_i = s_i dy_i^T h_i,      dA_i = dh_i^T x
    dx = sum_i (dy_i W_i + dh_i A_i)

No dW is computed for a frozen W, which is the usual case. `low_rank` computes the low-rank products on tensor cores, as
accurately as products in fp32. It stores h and dh as three bf16 terms, whose sum is the fp32 value. `expand` writes the
low-rank summand of y_i (or dx) first, and the product with W_i is then added to it (beta = 1). The result is rounded
twice, as in eager code. Layers with the same input, such as query, key and value, read x once for all h_i, and sum
their gradients of x in one buffer.

The node saves x in the dtype of the model, and h, which is small. PEFT's eager code casts x to the dtype of A, and
saves this copy too.

Dropout multiplies the x of one adapter by its mask and by 1 / (1 - p). Backward recomputes the mask from a seed.

Shapes: T tokens, I inputs, O outputs of a layer, r rank of an adapter, R ranks of all adapters together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.adapters.fp8_weight import Fp8Group
from tigon.ops.adapters.lora_products import (
    add_low_rank,
    compute_hidden,
    compute_input_gradient,
    draw_seeds,
    dropout_masks,
    layer_gradients,
    project_gradients,
    rows_of,
    write_outputs,
)
from tigon.ops.adapters.plan import NodeCall, NodePlan, plan_gradients, plan_node, plan_part
from tigon.ops.adapters.projection import Adapter, Projection, dense_weight, saved_tensors, tensors_to_save
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.compat.operators import reshape_without_view
from tigon.runtime.launch import on_device
from tigon.runtime.op import Node


def lora_linear_reference(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float = 1.0, *,
    bias: Tensor | None = None, lora_bias: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `lora_linear` in eager torch, by the operations of PEFT."""
    return eager_output(x, Projection(weight, bias, (Adapter(a, b, scaling, lora_bias, dropout),)))


def eager_output(x: Tensor, projection: Projection) -> Tensor:
    """Return the output of one layer with its adapters, by the operations of PEFT."""
    return _eager_sum(x, F.linear(x, dense_weight(projection.weight), projection.bias), projection.adapters)


def _eager_sum(x: Tensor, y: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """Return the sum of y and the outputs of adapters for x, by the operations of PEFT."""
    total = y
    for adapter in adapters:
        hidden = F.linear(F.dropout(x.to(adapter.a.dtype), adapter.dropout), adapter.a)
        total = total + F.linear(hidden, adapter.b, adapter.bias) * adapter.scaling
    return total.to(y.dtype)


class _LoRALinears(Node):
    """Compute the outputs y_i of layers with the same input x. `plan` and `tensors` are those of a `NodeCall`."""

    def forward(ctx: Any, x: Tensor, plan: NodePlan, records: bool, *tensors: Any) -> tuple[Tensor, ...]:
        rows, seeds = rows_of(x), draw_seeds(plan, x)
        # In this method gradients are off, and `needs_input_grad` does not depend on them.
        needs = ctx.needs_input_grad
        fp8 = Fp8Group.of([tensors[layer.weight_index] for layer in plan.layers], records and needs[0])
        operand = None if fp8 is None else fp8.operand(rows)
        h = compute_hidden(rows, plan, tensors, dropout_masks(plan, rows, tensors, seeds), operand)
        # The outputs are not views, because a view that a node returns cannot be modified in place.
        ys: dict[int, Tensor] = {}
        if fp8 is not None and operand is not None:
            for i, product in operand.products():
                add_low_rank({i: product}, plan, tensors, h)
                ys[i] = reshape_without_view(product, (*x.shape[:-1], product.shape[1]))
            fp8.end_forward()
        outputs: dict[int, Tensor] = {}
        for i, layer in enumerate(plan.layers):
            if i not in ys:
                width = layer.shape[0]
                ys[i] = y = x.new_empty((*x.shape[:-1], width))
                outputs[i] = y.view(-1, width)
        write_outputs(outputs, rows, plan, tensors, h)
        _save_for_backward(ctx, x, h, seeds, plan, tensors)
        ctx.fp8 = fp8
        keep_none_gradients(ctx)
        return tuple([ys[i] for i in range(len(ys))])

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        dys = {i: rows_of(dy) for i, dy in enumerate(upstream) if dy is not None}
        dx, gradients = _node_gradients(ctx, dys)
        return dx, None, None, *gradients


def _save_for_backward(
    ctx: Any, x: Tensor, h: Tensor | None, seeds: Tensor | None, plan: NodePlan, tensors: Sequence[Any]
) -> None:
    """Save what `_node_gradients` reads. The tensors follow three other inputs of the node."""
    gradient_plan = plan_gradients(plan, plan, ctx.needs_input_grad[3:], plan.all_layers)
    needs_x = gradient_plan.weights or gradient_plan.needs_a
    saved = tensors_to_save(ctx, tensors, plan.present)
    ctx.save_for_backward(x if needs_x else None, h if gradient_plan.needs_b else None, seeds, *saved)
    ctx.shape, ctx.plan = x.shape, plan


def _node_gradients(ctx: Any, dys: Mapping[int, Tensor]) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return dx in the shape of x and the gradients of the tensors of a node, from the upstream gradients [T, O_i]. The
    tensors follow three other inputs of the node."""
    x, h, seeds, *saved = ctx.saved_tensors
    tensors = saved_tensors(ctx, saved)
    if not dys:
        return None, []
    needs = ctx.needs_input_grad
    needs_dx, layers = needs[0], tuple(dys)
    # dh has columns only for the adapters of layers with an upstream gradient.
    plan = plan_part(ctx.plan, layers)
    gradient_plan = plan_gradients(plan, ctx.plan, needs[3:], layers)
    rows = None if x is None else rows_of(x)
    masks = dropout_masks(plan, dys[layers[0]], tensors, seeds)
    operand = ctx.fp8.operand_of_gradients(dys) if needs_dx and ctx.fp8 is not None else None
    dh = None
    if plan.rank and (needs_dx or gradient_plan.needs_a):
        dh = project_gradients(dys, plan, tensors, operand)
    gradients = layer_gradients(gradient_plan, rows, h, dh, dys, masks, len(tensors))
    dx = compute_input_gradient(dys, plan, tensors, dh, masks, operand) if needs_dx else None
    return None if dx is None else dx.view(ctx.shape), gradients


class _AddAdapters(Node):
    """Add the outputs of adapters for the input x to y, the output of the layer without adapters."""

    def forward(ctx: Any, x: Tensor, y: Tensor, plan: NodePlan, *tensors: Any) -> Tensor:
        rows, seeds = rows_of(x), draw_seeds(plan, x)
        h = compute_hidden(rows, plan, tensors, dropout_masks(plan, rows, tensors, seeds))
        # The output is not a view, because a view that a node returns cannot be modified in place.
        out = x.new_empty(y.shape).copy_(y)
        add_low_rank({0: out.view(rows.shape[0], -1)}, plan, tensors, h)
        _save_for_backward(ctx, x, h, seeds, plan, tensors)
        ctx.fp8 = None
        return out

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx, gradients = _node_gradients(ctx, {0: rows_of(dy)})
        return dx, dy, None, *gradients


def takes_adapters(x: object, projections: Sequence[Projection]) -> bool:
    """Return whether the nodes of this file support these projections of x (`plan_node`)."""
    return plan_node(x, projections) is not None


def lora_linears(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Return the outputs [..., O_i] of layers with adapters and the same input x [..., I], in the dtype of x: by one
    node if `plan_node` finds a plan, else by eager code."""
    call = plan_node(x, projections)
    if call is None:
        return tuple(eager_output(x, projection) for projection in projections)
    return lora_node(x, call)


@on_device
def lora_node(x: Tensor, call: NodeCall) -> tuple[Tensor, ...]:
    """Return the same as `lora_linears` by one node, whose call `plan_node` has returned."""
    return _LoRALinears.apply(x, call.plan, torch.is_grad_enabled(), *call.tensors)


@on_device
def add_adapters(x: Tensor, y: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """Return y + sum_j s_j (B_j(A_j(dropout(x))) + bias_j) for x [..., I], y [..., O] and at least one adapter, in one
    node if it supports them. This is for a layer whose product only its own code can compute, such as a quantised
    one."""
    projections = [Projection(None, None, tuple(adapters))]
    is_output = y.dtype == x.dtype and y.device == x.device and y.shape == (*x.shape[:-1], len(adapters[0].b))
    if not is_output or (call := plan_node(x, projections)) is None:
        return _eager_sum(x, y, adapters)
    return _AddAdapters.apply(x, y, call.plan, *call.tensors)


def lora_linear(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float = 1.0, *, bias: Tensor | None = None,
    lora_bias: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return x W^T + bias + scaling * (dropout(x) A^T B^T + lora_bias), a linear layer with a low-rank adapter.

    All tensors get gradients. Backward computes no product for a frozen weight. If an adapter of a bf16 model is in
    fp32, x A^T and the gradients of A and B are as accurate as in eager code, which computes them in fp32. The product
    with B rounds both factors to bf16 first, as it rounds its result.

    Args:
        x: [..., I], fp32 | bf16 | fp16.
        weight: [O, I], like the weight of `nn.Linear`, in the dtype of x.
        a: [r, I], fp32 | bf16 | fp16. Its dtype may differ from that of x.
        b: [O, r], in the dtype of a.
        scaling: The factor of the adapter: alpha / r, or alpha / sqrt(r) if it is rank-stabilised.
        bias: [O], the bias of the layer, or None.
        lora_bias: [O], the bias of the adapter, or None.
        dropout: The probability that an element of the adapter's input is 0.

    Returns:
        [..., O] in the dtype of x.

    Raises:
        TypeError: A tensor argument is not a floating-point tensor, or `scaling` or `dropout` is not a number.
        ValueError: Shapes, dtypes or devices do not match, or a number is out of range.

    Source: Hu et al., "LoRA", arXiv:2106.09685; Kalajdzievski, "rsLoRA", arXiv:2312.03732.

    Example:
        >>> x, weight = torch.randn(3, 8), torch.randn(16, 8)
        >>> a, b = torch.randn(4, 8), torch.zeros(16, 4)
        >>> tigon.lora_linear(x, weight, a, b, scaling=2.0).shape
        torch.Size([3, 16])
    """
    op = "lora_linear"
    checks.tensor(op, x=x, weight=weight, a=a, b=b)
    checks.floating(op, x=x, weight=weight, a=a, b=b, bias=bias, lora_bias=lora_bias)
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{op}: weight must have shape [O, I] with I of x {tuple(x.shape)}, got {tuple(weight.shape)}")
    outputs, inputs = weight.shape
    if a.dim() != 2 or a.shape[1] != inputs:
        raise ValueError(f"{op}: a must have shape [r, {inputs}], got {tuple(a.shape)}")
    checks.shape(op, "b", b, (outputs, len(a)))
    for name, value in {"bias": bias, "lora_bias": lora_bias}.items():
        if value is not None:
            checks.shape(op, name, value, (outputs,))
    checks.products(op, x, weight=weight)
    checks.same(op, "device", x=x, a=a, b=b, bias=bias, lora_bias=lora_bias)
    checks.same(op, "dtype", a=a, b=b)
    scaling = checks.number(op, "scaling", scaling)
    dropout = checks.number(op, "dropout", dropout, 0.0, 1.0)
    if dropout == 1.0:
        raise ValueError(f"{op}: dropout must be below 1, got 1.0")
    adapter = Adapter(a, b, scaling, lora_bias, dropout)
    (y,) = lora_linears(x, [Projection(weight, bias, (adapter,))])
    return y
