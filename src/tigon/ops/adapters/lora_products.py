"""The products of linear layers with low-rank adapters, as the autograd nodes of `lora` and `lora_mlp` compute them.

A node has several layers with the same input x, and each layer has any number of adapters. The ranks of all adapters
lie side by side in h and in dh. The docstring of `lora` has the formulas.

Shapes: T tokens, I inputs, O outputs of a layer, r rank of an adapter, R ranks of all adapters of a node together.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.fp8_weight import Fp8Operand
from tigon.ops.adapters.low_rank import dropout_bits, empty_hidden, expand, project, token_sums
from tigon.ops.adapters.projection import Adapter, Projection, dense_weight
from tigon.runtime.products import multiply


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
    """Return the entries in groups, each of which needs one pass over x: all together, or each one if any masks x."""
    if entries and all(entry.dropout_mask is None for entry in entries):
        return [list(entries)]
    return [[entry] for entry in entries]


def _span(group: Sequence[Entry]) -> slice:
    """Return the columns from those of the first entry of a group to those of the last one."""
    return slice(group[0].columns.start, group[-1].columns.stop)


def compute_hidden(rows: Tensor, entries: Sequence[Entry], operand: Fp8Operand | None = None) -> Tensor:
    """Return the terms of h [3, T, R] for x [T, I]. The kernels do the fused passes of x as an FP8 operand first."""
    fused_pass = None if operand is None else operand.fused_passes((0,)).get(0)
    h = empty_hidden(rows, rows.shape[0], entries[-1].columns.stop)
    for group in _groups(entries):
        tensors = [entry.adapter.a for entry in group]
        project(rows, tensors, h[..., _span(group)], group[0].factor, group[0].dropout_mask, fused_pass)
        # Only the first group does the pass, because it reads all of x.
        fused_pass = None
    return h


def _total_bias(projection: Projection) -> Tensor | None:
    """Return b + sum_j s_j bias_j [O] in fp32, or None if there is no bias."""
    terms = [] if projection.bias is None else [projection.bias.float()]
    terms += [adapter.scaling * adapter.bias.float() for adapter in projection.adapters if adapter.bias is not None]
    # `float` keeps an fp32 bias as it is, and the kernel reads dense memory.
    return sum(terms[1:], terms[0]).contiguous() if terms else None


def add_low_rank(
    y: Tensor, projection: Projection, entries: Sequence[Entry], h: Tensor | None, adds: bool = True
) -> bool:
    """Add the outputs of the adapters and the biases of one projection to y [T, O]; without `adds`, write them to y.

    Return whether there are any. Otherwise y is not written.
    """
    bias = _total_bias(projection)
    for entry in entries:
        assert h is not None
        is_first = entry is entries[0]
        expand(
            h[..., entry.columns], entry.adapter.b, y, entry.adapter.scaling, bias if is_first else None,
            adds=adds or not is_first,
        )  # fmt: skip
    if not entries and bias is not None:
        y.add_(bias) if adds else y.copy_(bias.expand_as(y))
    return bool(entries) or bias is not None


def write_output(y: Tensor, rows: Tensor, projection: Projection, entries: Sequence[Entry], h: Tensor | None) -> None:
    """Write y [T, O] of one projection, from x [T, I] and the terms of h."""
    if add_low_rank(y, projection, entries, h, adds=False):
        multiply(rows, dense_weight(projection.weight).t(), total=y)
    else:
        torch.mm(rows, dense_weight(projection.weight).t(), out=y)


def project_gradients(
    dys: Mapping[int, Tensor], entries: Sequence[Entry], operand: Fp8Operand | None = None
) -> tuple[Tensor, list[Entry]]:
    """Return the terms of dh [3, T, R] for the upstream gradients dy_i [T, O_i], and the entries of dh.

    dh has columns only for the adapters of projections in `dys`, whose entries are returned. The kernels do the fused
    passes of the gradients as an FP8 operand first.
    """
    first, dh_entries = 0, []
    some_dy = next(iter(dys.values()))
    for entry in entries:
        if entry.projection in dys:
            dh_entries.append(entry._replace(columns=slice(first, first + entry.adapter.a.shape[0])))
            first += entry.adapter.a.shape[0]
    dh = empty_hidden(some_dy, some_dy.shape[0], first)
    fused_passes = {} if operand is None else operand.fused_passes([entry.projection for entry in dh_entries])
    for entry in dh_entries:
        project(
            dys[entry.projection], [entry.adapter.b.t()], dh[..., entry.columns], entry.adapter.scaling,
            # Only the layer's first adapter does the pass, because it reads the whole gradient.
            fused_pass=fused_passes.pop(entry.projection, None),
        )  # fmt: skip
    return dh, dh_entries


def compute_input_gradient(
    dys: Mapping[int, Tensor],
    projections: Sequence[Projection],
    dh: Tensor | None,
    entries: Sequence[Entry],
    operand: Fp8Operand | None = None,
) -> Tensor | None:
    """Return dx [T, I], from dy_i [T, O_i], dh and the entries of dh; None if `dys` is empty.

    `operand` holds the dy_i of the layers whose weights are in FP8, or is None if there are none.
    """
    dx = None if operand is None else operand.input_gradient()
    for group in _groups(entries):
        assert dh is not None
        is_first = dx is None
        if dx is None:
            dx = next(iter(dys.values())).new_empty((dh.shape[1], group[0].adapter.a.shape[1]))
        stacked = [entry.adapter.a for entry in group]
        a = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
        expand(dh[..., _span(group)], a.t(), dx, group[0].factor, dropout_mask=group[0].dropout_mask, adds=not is_first)
    for i, dy in dys.items():
        if projections[i].weight is not None and (operand is None or i not in operand.parts):
            dx = multiply(dy, dense_weight(projections[i].weight), total=dx)
    return dx


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

    x [T, I], the terms of h and those of dh may be None if no needed gradient depends on them. `dys` may lack upstream
    gradients. `needs` has flags in place of tensors. `dbs` holds the gradients of B, by the position of the adapter, if
    another kernel has computed them.
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
