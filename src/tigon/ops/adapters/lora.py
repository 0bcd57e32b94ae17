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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.adapters.frozen_weight import FrozenWeight, dense_weight
from tigon.ops.adapters.low_rank import dropout_bits, empty_hidden, expand, project, split_terms, token_sums
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, keep_none_gradients, without_autocast
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.products import multiply
from tigon.runtime.torch_private.autograd import has_active_transform

__all__ = [
    "Adapter",
    "Projection",
    "adapter_hidden",
    "add_adapters",
    "eager_output",
    "lora_linear",
    "lora_linear_reference",
    "lora_linears",
    "takes_adapters",
]


class Adapter(NamedTuple):
    """One adapter, which adds s * (dropout(x) A^T B^T + bias) to the output of a linear layer."""

    a: Any  # Tensor [r, I]
    b: Any  # Tensor [O, r]
    scaling: float = 1.0
    bias: Any = None  # Tensor [O] or None
    dropout: float = 0.0


class Projection(NamedTuple):
    """A linear layer and its adapters. The weight is None if the caller computes its product (`add_adapters`)."""

    weight: Any  # Tensor or FrozenWeight [O, I], or None
    bias: Any = None  # Tensor [O] or None
    adapters: tuple[Adapter, ...] = ()


# --- reference -----------------------------------------------------------------------------------


def lora_linear_reference(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float = 1.0, *,
    bias: Tensor | None = None, lora_bias: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `lora_linear` in eager torch, by the operations of PEFT."""
    return eager_output(x, Projection(weight, bias, (Adapter(a, b, scaling, lora_bias, dropout),)))


def eager_output(x: Tensor, projection: Projection) -> Tensor:
    """Return the output of one layer with its adapters, by the operations of PEFT."""
    y = F.linear(x, dense_weight(projection.weight), projection.bias)
    total = y
    for adapter in projection.adapters:
        hidden = F.linear(F.dropout(x.to(adapter.a.dtype), adapter.dropout), adapter.a)
        total = total + F.linear(hidden, adapter.b, adapter.bias) * adapter.scaling
    return total.to(y.dtype)


# --- the products of a node ----------------------------------------------------------------------


class Entry(NamedTuple):
    """One adapter of an autograd node, and its columns in the tensors of the node."""

    # The index of the adapter among all adapters of the node.
    position: int
    # The index of the adapter's layer.
    projection: int
    adapter: Adapter
    # The columns of the adapter in h or in dh.
    columns: slice
    # The mask of the adapter's dropout, as bits (`dropout_bits`), or None without dropout.
    dropout_mask: Tensor | None

    @property
    def factor(self) -> float:
        """Return the factor by which dropout multiplies the elements that it keeps."""
        return 1.0 / (1.0 - self.adapter.dropout)


def rows_of(x: Tensor) -> Tensor:
    """Return x [..., N] as [T, N] with dense rows. It is a view of x if the strides of x allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def draw_seeds(projections: Sequence[Projection], x: Tensor) -> Tensor | None:
    """Draw one seed for each adapter from torch's generator of the device. Return None if no adapter has dropout."""
    dropouts = [adapter.dropout for projection in projections for adapter in projection.adapters]
    return torch.randint(2**62, (len(dropouts),), device=x.device) if any(dropouts) else None


def list_entries(projections: Sequence[Projection], tokens: int, seeds: Tensor | None) -> list[Entry]:
    """Return the entries of all adapters of the projections, with their columns of h and the masks of their dropout."""
    entries: list[Entry] = []
    first = 0
    for i, projection in enumerate(projections):
        for adapter in projection.adapters:
            dropout_mask = None
            if seeds is not None and adapter.dropout > 0:
                dropout_mask = dropout_bits(seeds, len(entries), tokens, adapter.a.shape[1], adapter.dropout)
            entries.append(Entry(len(entries), i, adapter, slice(first, first + adapter.a.shape[0]), dropout_mask))
            first += adapter.a.shape[0]
    return entries


def _groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the entries in groups, each of which needs one pass over x.

    An adapter with dropout masks x. If there is one, each entry is a group of its own. Otherwise all form one group.
    """
    if entries and all(entry.dropout_mask is None for entry in entries):
        return [list(entries)]
    return [[entry] for entry in entries]


def _span(group: Sequence[Entry]) -> slice:
    """Return the columns from those of the first entry of a group to those of the last one."""
    return slice(group[0].columns.start, group[-1].columns.stop)


def compute_hidden(rows: Tensor, entries: Sequence[Entry]) -> Tensor:
    """Return the terms of h [3, T, R] for x [T, I]."""
    h = empty_hidden(rows, rows.shape[0], entries[-1].columns.stop)
    for group in _groups(entries):
        tensors = [entry.adapter.a for entry in group]
        project(rows, tensors, h[..., _span(group)], group[0].factor, group[0].dropout_mask)
    return h


def _total_bias(projection: Projection) -> Tensor | None:
    """Return b + sum_j s_j bias_j [O] in fp32, or None if there is no bias."""
    terms = [] if projection.bias is None else [projection.bias.float()]
    terms += [adapter.scaling * adapter.bias.float() for adapter in projection.adapters if adapter.bias is not None]
    # `float` keeps an fp32 bias as it is, and the kernel reads dense memory.
    return sum(terms[1:], terms[0]).contiguous() if terms else None


def write_output(y: Tensor, rows: Tensor, projection: Projection, entries: Sequence[Entry], h: Tensor | None) -> None:
    """Write y [T, O] of one projection, from x [T, I] and the terms of h."""
    bias = _total_bias(projection)
    if entries:
        assert h is not None
        for entry in entries:
            is_first = entry is entries[0]
            expand(
                h[..., entry.columns], entry.adapter.b, y, entry.adapter.scaling, bias if is_first else None,
                adds=not is_first,
            )  # fmt: skip
    elif bias is not None:
        y.copy_(bias.expand_as(y))
    if entries or bias is not None:
        multiply(rows, dense_weight(projection.weight).t(), total=y)
    else:
        torch.mm(rows, dense_weight(projection.weight).t(), out=y)


def project_gradients(dys: Mapping[int, Tensor], entries: Sequence[Entry]) -> tuple[Tensor, list[Entry]]:
    """Return the terms of dh [3, T, R] for the upstream gradients dy_i [T, O_i], and the entries of dh.

    dh has columns only for the adapters of projections in `dys`. The entries are those of these adapters, with their
    columns of dh.
    """
    first, dh_entries = 0, []
    some_dy = next(iter(dys.values()))
    for entry in entries:
        if entry.projection in dys:
            dh_entries.append(entry._replace(columns=slice(first, first + entry.adapter.a.shape[0])))
            first += entry.adapter.a.shape[0]
    dh = empty_hidden(some_dy, some_dy.shape[0], first)
    for entry in dh_entries:
        project(dys[entry.projection], [entry.adapter.b.t()], dh[..., entry.columns], entry.adapter.scaling)
    return dh, dh_entries


def compute_input_gradient(
    dys: Mapping[int, Tensor], projections: Sequence[Projection], dh: Tensor | None, entries: Sequence[Entry]
) -> Tensor | None:
    """Return dx [T, I], from dy_i [T, O_i], dh and the entries of dh; None if `dys` is empty."""
    dx: Tensor | None = None
    for group in _groups(entries):
        assert dh is not None
        is_first = dx is None
        if dx is None:
            dx = next(iter(dys.values())).new_empty((dh.shape[1], group[0].adapter.a.shape[1]))
        stacked = [entry.adapter.a for entry in group]
        a = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
        expand(dh[..., _span(group)], a.t(), dx, group[0].factor, dropout_mask=group[0].dropout_mask, adds=not is_first)
    for i, dy in dys.items():
        if projections[i].weight is not None:
            dx = multiply(dy, dense_weight(projections[i].weight), total=dx)
    return dx


# --- autograd ------------------------------------------------------------------------------------


class Constants(NamedTuple):
    """The values of a projection that are not tensors."""

    # The weight if it is a `FrozenWeight`, and None if it is a tensor.
    frozen_weight: FrozenWeight | None
    # (scaling, dropout) of each adapter.
    numbers: tuple[tuple[float, float], ...]


def flatten(projections: Sequence[Projection]) -> tuple[list[Any], tuple[Constants, ...]]:
    """Return the tensors of the projections in a fixed order, and the other values of each projection."""
    tensors: list[Any] = []
    constants: list[Constants] = []
    for projection in projections:
        weight = projection.weight
        frozen_weight = weight if isinstance(weight, FrozenWeight) else None
        tensors += [weight if frozen_weight is None else None, projection.bias]
        for adapter in projection.adapters:
            tensors += [adapter.a, adapter.b, adapter.bias]
        constants.append(Constants(frozen_weight, tuple((x.scaling, x.dropout) for x in projection.adapters)))
    return tensors, tuple(constants)


def rebuild(tensors: Iterable[Any], constants: tuple[Constants, ...]) -> list[Projection]:
    """Return the projections from the results of `flatten`. Other values, such as flags, may replace the tensors."""
    values = iter(tensors)
    projections = []
    for frozen_weight, numbers in constants:
        weight, bias = next(values), next(values)
        # If flags replace the tensors, that of this weight is False.
        weight = frozen_weight if weight is None else weight
        adapters = []
        for scaling, dropout in numbers:
            a, b, adapter_bias = next(values), next(values), next(values)
            adapters.append(Adapter(a, b, scaling, adapter_bias, dropout))
        projections.append(Projection(weight, bias, tuple(adapters)))
    return projections


class _LoRALinears(torch.autograd.Function):
    """Compute the outputs y_i of layers with the same input x, from x and the tensors of their projections."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, constants: tuple[Constants, ...], *tensors: Any) -> tuple[Tensor, ...]:
        # `needs` has the structure of `projections`. It holds True for each tensor that needs a gradient.
        projections, needs = rebuild(tensors, constants), rebuild(ctx.needs_input_grad[2:], constants)
        rows = rows_of(x)
        seeds = draw_seeds(projections, x)
        entries = list_entries(projections, rows.shape[0], seeds)
        h = compute_hidden(rows, entries) if entries else None
        ys = []
        for i, projection in enumerate(projections):
            # The output is not a view, because a view that a node returns cannot be modified in place.
            y = x.new_empty((*x.shape[:-1], projection.weight.shape[0]))
            write_output(y.view(rows.shape[0], -1), rows, projection, [e for e in entries if e.projection == i], h)
            ys.append(y)
        adapter_needs = [need for projection in needs for need in projection.adapters]
        needs_x = any(need.a for need in adapter_needs) or any(projection.weight for projection in needs)
        needs_h = any(need.b for need in adapter_needs)
        ctx.save_for_backward(x if needs_x else None, h if needs_h else None, seeds, *tensors)
        ctx.constants, ctx.shape = constants, x.shape
        keep_none_gradients(ctx)
        return tuple(ys)

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        dys = {i: rows_of(dy) for i, dy in enumerate(upstream) if dy is not None}
        dx, gradients = _node_gradients(ctx, dys, ctx.needs_input_grad[2:])
        return dx, None, *gradients


def _node_gradients(ctx: Any, dys: Mapping[int, Tensor], tensor_needs: Sequence[bool]) -> tuple[Tensor | None, list]:
    """Return dx in the shape of x and the gradients of the tensors of a node, from the upstream gradients [T, O_i].

    The node has saved x, h, the seeds and its tensors. `tensor_needs` says which of its tensors need a gradient.
    """
    x, h, seeds, *tensors = ctx.saved_tensors
    if not dys:
        return None, [None] * len(tensors)
    projections, needs = rebuild(tensors, ctx.constants), rebuild(tensor_needs, ctx.constants)
    needs_dx, rows = ctx.needs_input_grad[0], None if x is None else rows_of(x)
    entries = list_entries(projections, next(iter(dys.values())).shape[0], seeds)
    dh: Tensor | None = None
    dh_entries: list[Entry] = []
    if entries and (needs_dx or any(need.a for projection in needs for need in projection.adapters)):
        dh, dh_entries = project_gradients(dys, entries)
    gradients = layer_gradients(rows, h, dys, dh, entries, dh_entries, needs)
    dx = compute_input_gradient(dys, projections, dh, dh_entries) if needs_dx else None
    return None if dx is None else dx.view(ctx.shape), flatten(gradients)[0]


class _Hidden(torch.autograd.Function):
    """Compute h_j = dropout(x) A_j^T in fp32, side by side, from x and the tensors of the adapters of one layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, constants: tuple[Constants, ...], *tensors: Any) -> Tensor:
        projections, rows = rebuild(tensors, constants), rows_of(x)
        seeds = draw_seeds(projections, x)
        h = compute_hidden(rows, list_entries(projections, len(rows), seeds))
        ctx.save_for_backward(x, seeds, *tensors)
        ctx.constants = constants
        return h.sum(0, dtype=torch.float32).view(*x.shape[:-1], h.shape[-1])

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, dh: Tensor) -> tuple[Any, ...]:
        x, seeds, *tensors = ctx.saved_tensors
        projections, needs = rebuild(tensors, ctx.constants), rebuild(ctx.needs_input_grad[2:], ctx.constants)
        rows, terms = rows_of(x), split_terms(dh.reshape(-1, dh.shape[-1]))
        entries = list_entries(projections, len(rows), seeds)
        gradients = layer_gradients(rows, None, {}, terms, entries, entries, needs)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = compute_input_gradient({0: rows}, projections, terms, entries)
        return None if dx is None else dx.view(x.shape), None, *flatten(gradients)[0]


class _AddAdapters(torch.autograd.Function):
    """Add the outputs of adapters for the input x to y, the output of the layer without adapters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, constants: tuple[Constants, ...], *tensors: Any) -> Tensor:
        projections, needs = rebuild(tensors, constants), rebuild(ctx.needs_input_grad[3:], constants)
        rows, seeds = rows_of(x), draw_seeds(projections, x)
        entries = list_entries(projections, len(rows), seeds)
        h = compute_hidden(rows, entries)
        # The output is not a view, because a view that a node returns cannot be modified in place.
        out = x.new_empty(y.shape).copy_(y)
        out_rows, bias = out.view(len(rows), -1), _total_bias(projections[0])
        for entry in entries:
            first_bias = bias if entry is entries[0] else None
            expand(h[..., entry.columns], entry.adapter.b, out_rows, entry.adapter.scaling, first_bias, adds=True)
        needs_a, needs_b = (any(getattr(need, name) for need in needs[0].adapters) for name in ("a", "b"))
        ctx.save_for_backward(x if needs_a else None, h if needs_b else None, seeds, *tensors)
        ctx.constants, ctx.shape = constants, x.shape
        return out

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx, gradients = _node_gradients(ctx, {0: rows_of(dy)}, ctx.needs_input_grad[3:])
        return dx, dy, None, *gradients


def layer_gradients(
    rows: Tensor | None,
    h: Tensor | None,
    dys: Mapping[int, Tensor],
    dh: Tensor | None,
    entries: Sequence[Entry],
    dh_entries: Sequence[Entry],
    needs: Sequence[Projection],
    dbs: Mapping[int, Tensor | None] | None = None,
) -> list[Projection]:
    """Return the projections with gradients in place of their tensors. A gradient that is not needed is None.

    Args:
        rows: x [T, I]. It may be None if no A and no W needs a gradient.
        h: The terms [3, T, R]. They may be None if no B needs a gradient, or if `dbs` is passed.
        dys: The upstream gradients [T, O_i], by the index of the projection. Some may be missing.
        dh: The terms [3, T, R]. They may be None if no A needs a gradient.
        entries: The entries of all adapters, with their columns of h.
        dh_entries: The entries of the adapters of projections in `dys`, with their columns of dh.
        needs: The projections with flags in place of their tensors: True if the tensor needs a gradient.
        dbs: The gradients of B, by the position of the adapter, if another kernel has computed them.
    """
    flags = [need for projection in needs for need in projection.adapters]
    das: dict[int, Tensor] = {}
    for group in _groups([entry for entry in dh_entries if flags[entry.position].a]):
        assert rows is not None
        assert dh is not None
        span = _span(group)
        # Columns of adapters that need no gradient may lie between those of the group. Their sums are not used.
        da = token_sums(rows, dh[..., span], group[0].factor, group[0].dropout_mask, transposed=True)
        for entry in group:
            part = da[entry.columns.start - span.start : entry.columns.stop - span.start]
            das[entry.position] = part.to(entry.adapter.a.dtype)
    result = []
    for i, need in enumerate(needs):
        dy = dys.get(i)
        adapters = []
        for entry in (entry for entry in entries if entry.projection == i):
            db = bias = None
            if dbs is not None:
                db = dbs[entry.position]
                db = None if db is None else db.to(entry.adapter.b.dtype)
            elif dy is not None and flags[entry.position].b:
                assert h is not None
                db = token_sums(dy, h[..., entry.columns], entry.adapter.scaling).to(entry.adapter.b.dtype)
            if dy is not None and flags[entry.position].bias:
                bias = (entry.adapter.scaling * dy.sum(0, dtype=torch.float32)).to(entry.adapter.bias.dtype)
            adapters.append(Adapter(das.get(entry.position), db, bias=bias))
        dweight = torch.mm(dy.t(), rows) if dy is not None and rows is not None and need.weight else None
        dbias = dy.sum(0) if dy is not None and need.bias else None
        result.append(Projection(dweight, dbias, tuple(adapters)))
    return result


# --- public --------------------------------------------------------------------------------------


def takes_adapters(x: object, projections: Sequence[Projection]) -> bool:
    """Return whether the nodes of this file support these projections of x: kernels run, and dtypes and devices match.

    A model in fp32 runs in eager code, because it would gain nothing from tensor cores, and eager products are more
    accurate. Under autocast, x and the weights must have the dtype of autocast, which eager products would have too.
    """
    tensors, constants = flatten(projections)
    tensors = [tensor for tensor in tensors if tensor is not None]
    frozen_weights = [each.frozen_weight for each in constants if each.frozen_weight is not None]
    if type(x) not in PLAIN or torch.compiler.is_compiling() or has_active_transform():
        return False
    assert isinstance(x, Tensor)
    # A subclass may compute another product, and the kernels read dense memory.
    if any(type(tensor) not in PLAIN or tensor.layout is not torch.strided for tensor in tensors):
        return False
    # The node saves x, where eager code saves a copy of x in the dtype of A. Autograd saves no inference tensor.
    if x.is_inference() and torch.is_grad_enabled():
        return False
    if any(each.device != x.device for each in (*tensors, *frozen_weights)) or not runs_kernels(x, *tensors):
        return False
    if x.dtype == torch.float32 or any(p.weight is not None and p.weight.dtype != x.dtype for p in projections):
        return False
    is_autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if is_autocast and torch.get_autocast_dtype(x.device.type) != x.dtype:
        return False
    return x.dim() > 1 and x.numel() > 0 and all(tensor.numel() > 0 for tensor in tensors)


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
    tensors, constants = flatten(projections)
    return _LoRALinears.apply(x, constants, *tensors)


def adapter_hidden(x: Tensor, adapters: Sequence[Adapter]) -> list[Tensor]:
    """Return h_j = dropout(x) A_j^T [..., r_j] of each adapter, for x [..., I]; in fp32 if kernels compute it.

    The gradient of B_j is not computed here, and scaling and bias have no effect.
    """
    projection = Projection(None, None, tuple(adapter._replace(bias=None) for adapter in adapters))
    if not takes_adapters(x, [projection]):
        return [F.linear(F.dropout(x.to(each.a.dtype), each.dropout), each.a) for each in adapters]
    tensors, constants = flatten([projection])
    h = _Hidden.apply(x, constants, *tensors)
    return list(h.split([len(adapter.a) for adapter in adapters], -1))


def add_adapters(x: Tensor, y: Tensor, adapters: Sequence[Adapter]) -> Tensor | None:
    """Return y + sum_j s_j (B_j(A_j(dropout(x))) + bias_j) in one node, or None if the node does not support x and y.

    This is for a layer whose product only its own code can compute, such as a quantised one.

    Args:
        x: [..., I], the input of the layer.
        y: [..., O], the output of the layer, in the dtype of x.
        adapters: At least one adapter.
    """
    projection = Projection(None, None, tuple(adapters))
    is_output = y.dtype == x.dtype and y.device == x.device and y.shape == (*x.shape[:-1], len(adapters[0].b))
    if not is_output or not takes_adapters(x, [projection]):
        return None
    tensors, constants = flatten([projection])
    return _AddAdapters.apply(x, y, constants, *tensors)


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
