r"""Linear layers with low-rank adapters (Hu et al., arXiv:2106.09685) as one autograd node.

    h_i = x A_i^T,            y_i = x W_i^T + b_i + s_i h_i B_i^T
    dh_i = s_i dy_i B_i,      dB_i = s_i dy_i^T h_i,      dA_i = dh_i^T x
    dx = sum_i (dy_i W_i + dh_i A_i)

W is usually frozen: then no dW is computed. The low-rank products are those of `low_rank`, which multiply on tensor
cores and are as accurate as products in fp32. `expand` writes y_i (and dx) first, and the product with W_i adds to it
(beta = 1): two roundings, as in eager code. Layers of one input, such as query, key and value, read x once for all h_i
and share one buffer of dx.

The node saves x (in bf16, if the model is) and h, which is small. Eager code of PEFT casts x to the dtype of A and
saves that copy too.

Dropout multiplies the x of one adapter by its mask and by 1 / (1 - p). Backward computes the mask again from a seed.

Shapes: T tokens, I inputs, O outputs of a layer, r rank of an adapter, R ranks of all adapters together.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.adapters.low_rank import dropout_bits, empty_hidden, expand, project, split_terms, token_sums
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, keep_none_gradients, without_autocast
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.products import multiply
from tigon.runtime.torch_private.autograd import has_active_transform

__all__ = [
    "Adapter",
    "Projection",
    "add_adapters",
    "eager_output",
    "lora_linear",
    "lora_linear_reference",
    "lora_linears",
    "takes_adapters",
]


class Adapter(NamedTuple):
    """One adapter of a linear layer: s * (dropout(x) A^T B^T + bias)."""

    a: Any  # Tensor [r, I]
    b: Any  # Tensor [O, r]
    scaling: float = 1.0
    bias: Any = None  # Tensor [O] or None
    dropout: float = 0.0


class Projection(NamedTuple):
    """A linear layer and its adapters. Without a weight, the output of the layer is given (`add_adapters`)."""

    weight: Any  # Tensor [O, I] or None
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
    """Return y of one layer with its adapters, in the operations of PEFT."""
    y = F.linear(x, projection.weight, projection.bias)
    total = y
    for adapter in projection.adapters:
        hidden = F.linear(F.dropout(x.to(adapter.a.dtype), adapter.dropout), adapter.a)
        total = total + F.linear(hidden, adapter.b, adapter.bias) * adapter.scaling
    return total.to(y.dtype)


# --- the products of a node ----------------------------------------------------------------------


class Entry(NamedTuple):
    """One adapter of a node."""

    position: int  # among all adapters of the node
    projection: int  # index of its layer
    adapter: Adapter
    columns: slice  # of h, or of dh
    keep: Tensor | None  # the bits of its dropout

    @property
    def factor(self) -> float:
        """Return the factor of the values that dropout keeps."""
        return 1.0 / (1.0 - self.adapter.dropout)


def rows_of(x: Tensor) -> Tensor:
    """Return x [..., N] as rows [T, N] that are dense, a view if x has such rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def draw_seeds(projections: Sequence[Projection], x: Tensor) -> Tensor | None:
    """Return one seed for each adapter, drawn by torch's generator of the device, or None without dropout."""
    dropouts = [adapter.dropout for projection in projections for adapter in projection.adapters]
    return torch.randint(2**62, (len(dropouts),), device=x.device) if any(dropouts) else None


def list_entries(projections: Sequence[Projection], tokens: int, seeds: Tensor | None) -> list[Entry]:
    """Return all adapters of the projections, with their columns of h and the bits of their dropout."""
    entries: list[Entry] = []
    first = 0
    for i, projection in enumerate(projections):
        for adapter in projection.adapters:
            keep = None
            if seeds is not None and adapter.dropout > 0:
                keep = dropout_bits(seeds, len(entries), tokens, adapter.a.shape[1], adapter.dropout)
            entries.append(Entry(len(entries), i, adapter, slice(first, first + len(adapter.a)), keep))
            first += len(adapter.a)
    return entries


def _groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the adapters in groups that one pass over x serves: all together, or one by one if one has dropout."""
    if entries and all(entry.keep is None for entry in entries):
        return [list(entries)]
    return [[entry] for entry in entries]


def _span(group: Sequence[Entry]) -> slice:
    return slice(group[0].columns.start, group[-1].columns.stop)


def compute_hidden(rows: Tensor, entries: Sequence[Entry]) -> Tensor:
    """Return h [3, T, R], as terms, of x [T, I]."""
    h = empty_hidden(rows, len(rows), entries[-1].columns.stop)
    for group in _groups(entries):
        a = split_terms(*(entry.adapter.a for entry in group))
        project(rows, a, h[..., _span(group)], group[0].factor, group[0].keep)
    return h


def _total_bias(projection: Projection) -> Tensor | None:
    """Return b + sum_j s_j bias_j in fp32, or None."""
    terms = [] if projection.bias is None else [projection.bias.float()]
    terms += [adapter.scaling * adapter.bias.float() for adapter in projection.adapters if adapter.bias is not None]
    # `float` keeps an fp32 bias as it is, and the kernel reads dense memory.
    return sum(terms[1:], terms[0]).contiguous() if terms else None


def write_output(y: Tensor, rows: Tensor, projection: Projection, entries: Sequence[Entry], h: Tensor | None) -> None:
    """Write y [T, O] of one projection, of x [T, I] and h."""
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
        multiply(rows, projection.weight.t(), onto=y)
    else:
        torch.mm(rows, projection.weight.t(), out=y)


def project_gradients(dys: Mapping[int, Tensor], entries: Sequence[Entry]) -> tuple[Tensor, list[Entry]]:
    """Return dh [3, T, R], as terms, of dy_i [T, O_i], and the entries of these dy with their columns of dh."""
    first, used = 0, []
    some_dy = next(iter(dys.values()))
    for entry in entries:
        if entry.projection in dys:
            used.append(entry._replace(columns=slice(first, first + len(entry.adapter.a))))
            first += len(entry.adapter.a)
    dh = empty_hidden(some_dy, len(some_dy), first)
    for entry in used:
        b = split_terms(entry.adapter.b.t())
        project(dys[entry.projection], b, dh[..., entry.columns], entry.adapter.scaling)
    return dh, used


def compute_input_gradient(
    dys: Mapping[int, Tensor], projections: Sequence[Projection], dh: Tensor | None, entries: Sequence[Entry]
) -> Tensor | None:
    """Return dx [T, I] of dy_i [T, O_i], dh and its entries; None if there is no dy."""
    dx: Tensor | None = None
    for group in _groups(entries):
        assert dh is not None
        is_first = dx is None
        if dx is None:
            dx = next(iter(dys.values())).new_empty((dh.shape[1], group[0].adapter.a.shape[1]))
        stacked = [entry.adapter.a for entry in group]
        a = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
        expand(dh[..., _span(group)], a.t(), dx, group[0].factor, keep=group[0].keep, adds=not is_first)
    for i, dy in dys.items():
        if projections[i].weight is not None:
            dx = multiply(dy, projections[i].weight, onto=dx)
    return dx


# --- autograd ------------------------------------------------------------------------------------


def flatten(projections: Sequence[Projection]) -> tuple[list[Any], tuple]:
    """Return the tensors in a fixed order, and the numbers: scaling and probability, by projection and adapter."""
    tensors: list[Any] = []
    for projection in projections:
        tensors += [projection.weight, projection.bias]
        for adapter in projection.adapters:
            tensors += [adapter.a, adapter.b, adapter.bias]
    return tensors, tuple(tuple((x.scaling, x.dropout) for x in projection.adapters) for projection in projections)


def rebuild(tensors: Iterable[Any], numbers: tuple) -> list[Projection]:
    """Return the projections that `flatten` took apart, with any values in place of the tensors."""
    values = iter(tensors)
    projections = []
    for pairs in numbers:
        weight, bias = next(values), next(values)
        adapters = []
        for scaling, dropout in pairs:
            a, b, adapter_bias = next(values), next(values), next(values)
            adapters.append(Adapter(a, b, scaling, adapter_bias, dropout))
        projections.append(Projection(weight, bias, tuple(adapters)))
    return projections


class _LoRALinears(torch.autograd.Function):
    """x and the tensors of the projections -> y_i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: tuple, *tensors: Any) -> tuple[Tensor, ...]:
        projections, needs = rebuild(tensors, numbers), rebuild(ctx.needs_input_grad[2:], numbers)
        rows = rows_of(x)
        seeds = draw_seeds(projections, x)
        entries = list_entries(projections, len(rows), seeds)
        h = compute_hidden(rows, entries) if entries else None
        ys = []
        for i, projection in enumerate(projections):
            # The output is no view: autograd lets no view of a node's result be overwritten.
            y = x.new_empty((*x.shape[:-1], len(projection.weight)))
            write_output(y.view(len(rows), -1), rows, projection, [e for e in entries if e.projection == i], h)
            ys.append(y)
        adapter_needs = [need for projection in needs for need in projection.adapters]
        needs_x = any(need.a for need in adapter_needs) or any(projection.weight for projection in needs)
        needs_h = any(need.b for need in adapter_needs)
        ctx.save_for_backward(x if needs_x else None, h if needs_h else None, seeds, *tensors)
        ctx.numbers, ctx.shape = numbers, x.shape
        keep_none_gradients(ctx)
        return tuple(ys)

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        x, h, seeds, *tensors = ctx.saved_tensors
        projections, needs = rebuild(tensors, ctx.numbers), rebuild(ctx.needs_input_grad[2:], ctx.numbers)
        needs_dx = ctx.needs_input_grad[0]
        rows = None if x is None else rows_of(x)
        dys = {i: rows_of(dy) for i, dy in enumerate(upstream) if dy is not None}
        if not dys:
            return None, None, *(None for _ in tensors)
        tokens = len(next(iter(dys.values())))
        entries = list_entries(projections, tokens, seeds)
        dh: Tensor | None = None
        used: list[Entry] = []
        if entries and (needs_dx or any(need.a for projection in needs for need in projection.adapters)):
            dh, used = project_gradients(dys, entries)
        gradients = layer_gradients(rows, h, dys, dh, entries, used, needs)
        dx = compute_input_gradient(dys, projections, dh, used) if needs_dx else None
        return None if dx is None else dx.view(ctx.shape), None, *flatten(gradients)[0]


class _AddAdapters(torch.autograd.Function):
    """Compute the output of one layer with adapters from x, the output y of its base, and the tensors of adapters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, numbers: tuple, *tensors: Any) -> Tensor:
        projections, needs = rebuild(tensors, numbers), rebuild(ctx.needs_input_grad[3:], numbers)
        rows, seeds = rows_of(x), draw_seeds(projections, x)
        entries = list_entries(projections, len(rows), seeds)
        h = compute_hidden(rows, entries)
        # The output is no view: autograd lets no view of a node's result be overwritten.
        out = x.new_empty(y.shape).copy_(y)
        out_rows, bias = out.view(len(rows), -1), _total_bias(projections[0])
        for entry in entries:
            first_bias = bias if entry is entries[0] else None
            expand(h[..., entry.columns], entry.adapter.b, out_rows, entry.adapter.scaling, first_bias, adds=True)
        needs_a, needs_b = (any(getattr(need, name) for need in needs[0].adapters) for name in ("a", "b"))
        ctx.save_for_backward(x if needs_a else None, h if needs_b else None, seeds, *tensors)
        ctx.numbers, ctx.shape = numbers, x.shape
        return out

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, h, seeds, *tensors = ctx.saved_tensors
        projections, needs = rebuild(tensors, ctx.numbers), rebuild(ctx.needs_input_grad[3:], ctx.numbers)
        dys = {0: rows_of(dy)}
        entries = list_entries(projections, len(dys[0]), seeds)
        dh: Tensor | None = None
        used: list[Entry] = []
        if ctx.needs_input_grad[0] or any(need.a for need in needs[0].adapters):
            dh, used = project_gradients(dys, entries)
        gradients = layer_gradients(None if x is None else rows_of(x), h, dys, dh, entries, used, needs)
        dx = compute_input_gradient(dys, projections, dh, used) if ctx.needs_input_grad[0] else None
        return None if dx is None else dx.view(ctx.shape), dy, None, *flatten(gradients)[0]


def layer_gradients(
    rows: Tensor | None,
    h: Tensor | None,
    dys: Mapping[int, Tensor],
    dh: Tensor | None,
    entries: Sequence[Entry],
    used: Sequence[Entry],
    needs: Sequence[Projection],
    dbs: Mapping[int, Tensor | None] | None = None,
) -> list[Projection]:
    """Return the gradients that are needed, in place of the tensors of the projections, and None for the others.

    Args:
        rows: x [T, I]; for gradients of A and W.
        h: [3, T, R], as terms; for gradients of B.
        dys: The upstream gradients [T, O_i], by projection.
        dh: [3, T, R], as terms; for gradients of A.
        entries: All adapters, with their columns of h.
        used: The adapters of projections in `dys`, with their columns of dh.
        needs: The layers with flags in place of the tensors.
        dbs: Gradients of B, by position of the adapter, if another kernel has computed them.
    """
    flags = [need for projection in needs for need in projection.adapters]
    das: dict[int, Tensor] = {}
    for group in _groups([entry for entry in used if flags[entry.position].a]):
        assert rows is not None
        assert dh is not None
        span = _span(group)
        # Adapters that need no gradient may lie between the columns of the group: the sums of their columns are unused.
        da = token_sums(rows, dh[..., span], group[0].factor, group[0].keep, transposed=True)
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
    """Return whether the node above computes these projections: kernels run, and dtypes and devices fit.

    fp32 takes eager code: it has no tensor cores to gain, and its products are more accurate there.

    Under autocast it does if x and the weights have the dtype of autocast, because eager products would run in it too.
    """
    tensors = [tensor for tensor in flatten(projections)[0] if tensor is not None]
    if type(x) not in PLAIN or torch.compiler.is_compiling() or has_active_transform():
        return False
    assert isinstance(x, Tensor)
    # A subclass may compute another product, and the kernels read dense memory.
    if any(type(tensor) not in PLAIN or tensor.layout is not torch.strided for tensor in tensors):
        return False
    # The node saves x, where eager code saves a copy of x in the dtype of A. Autograd saves no inference tensor.
    if x.is_inference() and torch.is_grad_enabled():
        return False
    if any(tensor.device != x.device for tensor in tensors) or not runs_kernels(x, *tensors):
        return False
    if x.dtype == torch.float32 or any(p.weight is not None and p.weight.dtype != x.dtype for p in projections):
        return False
    autocasts = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if autocasts and torch.get_autocast_dtype(x.device.type) != x.dtype:
        return False
    return x.dim() > 1 and x.numel() > 0 and all(tensor.numel() > 0 for tensor in tensors)


def lora_linears(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Return y_i of linear layers of one input, with their adapters, in one node if it `takes_adapters`.

    Args:
        x: [..., I].
        projections: The layers, of one input size.

    Returns:
        [..., O_i] each, in the dtype of x.
    """
    if not takes_adapters(x, projections):
        return tuple(eager_output(x, projection) for projection in projections)
    tensors, numbers = flatten(projections)
    return _LoRALinears.apply(x, numbers, *tensors)


def add_adapters(x: Tensor, y: Tensor, adapters: Sequence[Adapter]) -> Tensor | None:
    """Return y + sum_j s_j (B_j(A_j(dropout(x))) + bias_j) in one node, or None if the node does not take x and y.

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
    tensors, numbers = flatten([projection])
    return _AddAdapters.apply(x, y, numbers, *tensors)


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
    """x W^T + bias + scaling * (dropout(x) A^T B^T + lora_bias): a linear layer with a low-rank adapter.

    Gradients are computed for every argument that requires one, and no product for a frozen weight. An fp32 adapter
    beside a bf16 model is as accurate as in eager code, which computes its products in fp32.

    Args:
        x: [..., I], fp32 | bf16 | fp16.
        weight: [O, I], as that of `nn.Linear`; in the dtype of x.
        a: [r, I], fp32 | bf16 | fp16, may differ from x.
        b: [O, r].
        scaling: The factor of the adapter: alpha / r, or alpha / sqrt(r) if it is rank-stabilised.
        bias: [O] or None.
        lora_bias: [O] or None, of the adapter.
        dropout: The probability that an element of the adapter's input is 0.

    Returns:
        [..., O] in the dtype of x.

    Raises:
        TypeError: An argument is no floating-point tensor, or a number is none.
        ValueError: Shapes, dtypes or devices do not fit, or a number is out of range.

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
