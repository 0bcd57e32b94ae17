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
    BackwardTensors,
    Entry,
    add_low_rank,
    compute_hidden,
    compute_input_gradient,
    draw_seeds,
    dropout_masks,
    layer_gradients,
    list_entries,
    project_gradients,
    rows_of,
    write_outputs,
)
from tigon.ops.adapters.projection import (
    Adapter,
    FrozenWeight,
    Projection,
    dense_weight,
    flatten,
    saved_projections,
    tensors_to_save,
)
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.compat.operators import reshape_without_view
from tigon.runtime.device import KERNEL_DTYPES, PLAIN, runs_kernels
from tigon.runtime.launch import on_device
from tigon.runtime.op import Node

# --- reference -----------------------------------------------------------------------------------


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


# --- autograd ------------------------------------------------------------------------------------


class _LoRALinears(Node):
    """Compute the outputs y_i of layers with the same input x. `tensors` are those of the projections."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, projections: Sequence[Projection], records: bool, *tensors: Any
    ) -> tuple[Tensor, ...]:
        rows = rows_of(x)
        seeds, entries = draw_seeds(projections, x), list_entries(projections)
        # In this method gradients are off, and `needs_input_grad` does not depend on them.
        needs_dx, _, _, *needs = ctx.needs_input_grad
        fp8 = Fp8Group.of(projections, records and needs_dx)
        operand = None if fp8 is None else fp8.operand(rows)
        h = compute_hidden(rows, entries, dropout_masks(entries, rows, seeds), operand) if entries else None
        # The outputs are not views, because a view that a node returns cannot be modified in place.
        ys: dict[int, Tensor] = {}
        if fp8 is not None and operand is not None:
            for i, product in operand.products():
                add_low_rank({i: product}, projections, entries, h)
                ys[i] = reshape_without_view(product, (*x.shape[:-1], product.shape[1]))
            fp8.end_forward()
        outputs: dict[int, Tensor] = {}
        for i, projection in enumerate(projections):
            if i not in ys:
                ys[i] = y = x.new_empty((*x.shape[:-1], projection.weight.shape[0]))
                outputs[i] = y.view(rows.shape[0], -1)
        write_outputs(outputs, rows, projections, entries, h)
        trains_weight = any(projection.weight.requires_grad for projection in projections)
        needs_x = trains_weight or any(needs[entry.tensor_index] for entry in entries)
        needs_h = any(needs[entry.tensor_index + 1] for entry in entries)
        others = tensors_to_save(ctx, projections, tensors)
        ctx.save_for_backward(x if needs_x else None, h if needs_h else None, seeds, *others)
        ctx.shape, ctx.fp8 = x.shape, fp8
        keep_none_gradients(ctx)
        return tuple([ys[i] for i in range(len(projections))])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        dys = {i: rows_of(dy) for i, dy in enumerate(upstream) if dy is not None}
        dx, gradients = _node_gradients(ctx, dys)
        return dx, None, None, *gradients


def _node_gradients(ctx: Any, dys: Mapping[int, Tensor]) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return dx in the shape of x and the gradients of the tensors of a node, from the upstream gradients [T, O_i].

    The node has saved x, h, the seeds and its tensors, which follow three other inputs of the node.
    """
    x, h, seeds, *tensors = ctx.saved_tensors
    projections = saved_projections(ctx, tensors)
    if not dys:
        return None, []
    needs_dx, _, _, *needs = ctx.needs_input_grad
    rows, entries = None if x is None else rows_of(x), list_entries(projections)
    masks = dropout_masks(entries, next(iter(dys.values())), seeds)
    dh: Tensor | None = None
    dh_entries: Sequence[Entry] = ()
    operand = ctx.fp8.operand_of_gradients(dys) if needs_dx and ctx.fp8 is not None else None
    if entries and (needs_dx or any(needs[entry.tensor_index] for entry in entries)):
        dh, dh_entries = project_gradients(dys, entries, operand)
    backward_tensors = BackwardTensors(rows, h, entries, dh, dh_entries, dys, masks)
    gradients = layer_gradients(backward_tensors, projections, needs, {})
    dx = compute_input_gradient(dys, projections, dh, dh_entries, masks, operand) if needs_dx else None
    return None if dx is None else dx.view(ctx.shape), gradients


class _AddAdapters(Node):
    """Add the outputs of adapters for the input x to y, the output of the layer without adapters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, projections: Sequence[Projection], *tensors: Any) -> Tensor:
        rows, seeds, entries = rows_of(x), draw_seeds(projections, x), list_entries(projections)
        h = compute_hidden(rows, entries, dropout_masks(entries, rows, seeds))
        # The output is not a view, because a view that a node returns cannot be modified in place.
        out = x.new_empty(y.shape).copy_(y)
        add_low_rank({0: out.view(rows.shape[0], -1)}, projections, entries, h)
        needs = ctx.needs_input_grad[3:]
        needs_a, needs_b = (any(needs[entry.tensor_index + i] for entry in entries) for i in (0, 1))
        others = tensors_to_save(ctx, projections, tensors)
        ctx.save_for_backward(x if needs_a else None, h if needs_b else None, seeds, *others)
        ctx.shape, ctx.fp8 = x.shape, None
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx, gradients = _node_gradients(ctx, {0: rows_of(dy)})
        return dx, dy, None, *gradients


# --- public --------------------------------------------------------------------------------------


def takes_adapters(x: object, projections: Sequence[Projection]) -> bool:
    """Return whether the nodes of this file support these projections of x: kernels run, and dtypes and devices match.

    A model in fp32 runs in eager code, because it would gain nothing from tensor cores, and eager products are more
    accurate. Under autocast, x and the weights must have the dtype of autocast, which eager products would have too.
    """
    if type(x) not in PLAIN or torch.compiler.is_compiling() or has_active_transform():
        return False
    assert isinstance(x, Tensor)
    # The node saves x, where eager code saves a copy of x in the dtype of A. Autograd saves no inference tensor.
    if x.is_inference() and torch.is_grad_enabled():
        return False
    dtype, device = x.dtype, x.device
    if dtype == torch.float32 or not runs_kernels(x) or x.dim() < 2 or x.numel() == 0:
        return False
    if not x.is_meta and torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != dtype:
        return False
    for weight, bias, adapters in projections:
        if weight is not None and (weight.dtype != dtype or weight.device != device):
            return False
        tensors = [bias] if isinstance(weight, FrozenWeight) else [weight, bias]
        for a, b, _, adapter_bias, _ in adapters:
            tensors += (a, b, adapter_bias)
        for tensor in tensors:
            # A subclass of `Tensor` may compute another product, and the kernels read dense memory on the device of x.
            if tensor is not None and not (
                type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.numel() > 0
                and tensor.dtype in KERNEL_DTYPES and tensor.device == device
            ):  # fmt: skip
                return False
    return True


def lora_linears(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Return the outputs y_i of linear layers with adapters and with the same input x.

    One autograd node computes them if `takes_adapters` is True, and eager code otherwise.

    Args:
        x: [..., I].
        projections: The layers and their adapters.

    Returns:
        A tensor [..., O_i] for each layer, in the dtype of x.
    """
    if not takes_adapters(x, projections):
        return tuple(eager_output(x, projection) for projection in projections)
    return lora_node(x, projections)


@on_device
def lora_node(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Return the same as `lora_linears` by one node. The caller knows that `takes_adapters` is True."""
    return _LoRALinears.apply(x, projections, torch.is_grad_enabled(), *flatten(projections))


@on_device
def add_adapters(x: Tensor, y: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """Return y + sum_j s_j (B_j(A_j(dropout(x))) + bias_j), in one node if it supports x and y.

    This is for a layer whose product only its own code can compute, such as a quantised one.

    Args:
        x: [..., I], the input of the layer.
        y: [..., O], the output of the layer. The node supports the dtype of x. Eager code supports any dtype.
        adapters: At least one adapter.
    """
    projections = [Projection(None, None, tuple(adapters))]
    is_output = y.dtype == x.dtype and y.device == x.device and y.shape == (*x.shape[:-1], len(adapters[0].b))
    if not is_output or not takes_adapters(x, projections):
        return _eager_sum(x, y, adapters)
    return _AddAdapters.apply(x, y, projections, *flatten(projections))


def lora_linear(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float = 1.0,
    *,
    bias: Tensor | None = None,
    lora_bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
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
