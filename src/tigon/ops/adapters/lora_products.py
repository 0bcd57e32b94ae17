"""The products of linear layers with low-rank adapters, as the autograd nodes of `lora` and `lora_mlp` compute them.

A node has several layers with the same input x, and each layer has any number of adapters. The ranks of all adapters
lie side by side in h and in dh. The docstring of `lora` has the formulas.

Shapes: T tokens, I inputs, O outputs of a layer, r rank of an adapter, R ranks of all adapters of a node together.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.fp8_weight import Fp8Operand
from tigon.ops.adapters.low_rank import (
    TokenSums,
    dropout_bits,
    empty_hidden,
    expand,
    project,
    project_each,
    token_sums,
)
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
    start: int
    stop: int
    # The index of the adapter's A among the tensors of the node. B and the bias follow.
    tensor_index: int


# The masks of dropouts, as bits (`dropout_bits`), by the position of the adapter. Those without dropout have none.
Masks = Mapping[int, Tensor]


def rows_of(x: Tensor) -> Tensor:
    """Return x [..., N] as [T, N] with dense rows. It is a view of x if the strides of x allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def draw_seeds(projections: Sequence[Projection], x: Tensor) -> Tensor | None:
    """Draw one seed for each adapter from torch's generator of the device. Return None if no adapter has dropout."""
    dropouts = [adapter.dropout for projection in projections for adapter in projection.adapters]
    return torch.randint(2**62, (len(dropouts),), device=x.device) if any(dropouts) else None


def list_entries(projections: Sequence[Projection]) -> list[Entry]:
    """Return the entries of all adapters of the projections, with their columns of h."""
    entries: list[Entry] = []
    start = index = 0
    for i, projection in enumerate(projections):
        index += 2
        for adapter in projection.adapters:
            stop = start + adapter.a.shape[0]
            entries.append(Entry(len(entries), i, adapter, start, stop, index))
            start, index = stop, index + 3
    return entries


def dropout_masks(entries: Sequence[Entry], rows: Tensor, seeds: Tensor | None) -> Masks:
    """Return the masks of the dropouts of all adapters. `rows` has one row for each token."""
    if seeds is None:
        return {}
    return {
        entry.position: dropout_bits(seeds, entry.position, rows.shape[0], entry.adapter.a.shape[1], p)
        for entry in entries
        if (p := entry.adapter.dropout) > 0
    }


def _factor(entry: Entry) -> float:
    """Return the factor by which dropout multiplies the elements that it keeps."""
    return 1.0 / (1.0 - entry.adapter.dropout)


def columns_of(h: Tensor, first: Entry, last: Entry) -> Tensor:
    """Return the columns of h [3, T, R] from those of the first entry to those of the last one."""
    is_whole = first.start == 0 and last.stop == h.shape[2]
    return h if is_whole else h[:, :, first.start : last.stop]


def _groups(entries: Sequence[Entry], masks: Masks) -> list[list[Entry]]:
    """Return the entries in groups, each of which needs one pass over x: all together, or each one if any masks x."""
    if entries and not masks:
        return [list(entries)]
    return [[entry] for entry in entries]


def _runs(entries: Sequence[Entry], kinds: Sequence[object]) -> list[list[Entry]]:
    """Return the entries in runs that one launch computes: at most three, with adjacent columns and equal kinds.

    The kind None is never equal.
    """
    runs: list[list[Entry]] = []
    last_kind = None
    for entry, kind in zip(entries, kinds, strict=True):
        if kind is not None and kind == last_kind and len(runs[-1]) < 3 and runs[-1][-1].stop == entry.start:
            runs[-1].append(entry)
        else:
            runs.append([entry])
        last_kind = kind
    return runs


def _kind(factor: Tensor) -> tuple:
    """Return the properties that the factors [N, r] of one launch share."""
    return factor.dtype, factor.stride(), factor.shape[1]


def compute_hidden(rows: Tensor, entries: Sequence[Entry], masks: Masks, operand: Fp8Operand | None = None) -> Tensor:
    """Return the terms of h [3, T, R] for x [T, I]. The kernels do the fused passes of x as an FP8 operand first."""
    fused_pass = None if operand is None else operand.fused_passes((0,)).get(0)
    h = empty_hidden(rows, rows.shape[0], entries[-1].stop)
    for group in _groups(entries, masks):
        tensors = [entry.adapter.a for entry in group]
        first, last = group[0], group[-1]
        project(rows, tensors, columns_of(h, first, last), _factor(first), masks.get(first.position), fused_pass)
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
    ys: Mapping[int, Tensor], projections: Sequence[Projection], entries: Sequence[Entry], h: Tensor | None,
    adds: bool = True,
) -> Collection[int]:  # fmt: skip
    """Add the outputs of the adapters and the biases of projections to y_i [T, O_i]; without `adds`, write them to y_i.

    `ys` holds the y_i by the indices of their projections. Return the indices of those that have an adapter or a bias.
    The others are not written.
    """
    biases = {i: _total_bias(projections[i]) for i in ys}
    # The first entry of each projection, and those that add to the output of the first one.
    first_entries: dict[int, Entry] = {}
    other_entries = []
    for entry in entries:
        if entry.projection in ys and first_entries.setdefault(entry.projection, entry) is not entry:
            other_entries.append(entry)
    kinds = [(_kind(entry.adapter.b), biases[i] is None) for i, entry in first_entries.items()]
    for run in _runs([*first_entries.values()], kinds):
        _expand_run(run, ys, biases, h, adds)
    for entry in other_entries:
        _expand_run([entry], ys, {}, h, True)
    for i, bias in biases.items():
        if bias is not None and i not in first_entries:
            ys[i].add_(bias) if adds else ys[i].copy_(bias.expand_as(ys[i]))
    return [i for i, bias in biases.items() if bias is not None or i in first_entries]


def _expand_run(
    run: Sequence[Entry], ys: Mapping[int, Tensor], biases: Mapping[int, Tensor | None], h: Tensor | None, adds: bool
) -> None:
    """Add the outputs of the adapters of a run to the y of their projections, or write them."""
    assert h is not None
    expand(
        columns_of(h, run[0], run[-1]), [entry.adapter.b for entry in run], [ys[entry.projection] for entry in run],
        [entry.adapter.scaling for entry in run], [biases.get(entry.projection) for entry in run], adds=adds,
    )  # fmt: skip


def write_outputs(
    ys: Mapping[int, Tensor], rows: Tensor, projections: Sequence[Projection], entries: Sequence[Entry],
    h: Tensor | None,
) -> None:  # fmt: skip
    """Write y_i [T, O_i] of projections, by their indices, from x [T, I] and the terms of h."""
    written = add_low_rank(ys, projections, entries, h, adds=False)
    for i, y in ys.items():
        weight = dense_weight(projections[i].weight).t()
        if i in written:
            multiply(rows, weight, total=y)
        else:
            torch.mm(rows, weight, out=y)


def project_gradients(
    dys: Mapping[int, Tensor], entries: Sequence[Entry], operand: Fp8Operand | None = None
) -> tuple[Tensor, Sequence[Entry]]:
    """Return the terms of dh [3, T, R] for the upstream gradients dy_i [T, O_i], and the entries of dh.

    dh has columns only for the adapters of projections in `dys`, whose entries are returned. The kernels do the fused
    passes of the gradients as an FP8 operand first.
    """
    some_dy = next(iter(dys.values()))
    dh_entries = entries
    if any(entry.projection not in dys for entry in entries):
        dh_entries, start = [], 0
        for entry in entries:
            if entry.projection in dys:
                stop = start + entry.stop - entry.start
                dh_entries.append(entry._replace(start=start, stop=stop))
                start = stop
    dh = empty_hidden(some_dy, some_dy.shape[0], dh_entries[-1].stop if dh_entries else 0)
    fused_passes = {} if operand is None else operand.fused_passes([entry.projection for entry in dh_entries])
    # Only the layer's first adapter does the pass, because it reads the whole gradient.
    passes = [fused_passes.pop(entry.projection, None) for entry in dh_entries]
    kinds = [_kind(entry.adapter.b) if each is None else None for entry, each in zip(dh_entries, passes, strict=True)]
    for run in _runs(dh_entries, kinds):
        project_each(
            columns_of(dh, run[0], run[-1]), [dys[entry.projection] for entry in run],
            [entry.adapter.b for entry in run], [entry.adapter.scaling for entry in run],
            passes[dh_entries.index(run[0])],
        )  # fmt: skip
    return dh, dh_entries


def compute_input_gradient(
    dys: Mapping[int, Tensor], projections: Sequence[Projection], dh: Tensor | None, entries: Sequence[Entry],
    masks: Masks, operand: Fp8Operand | None = None,
) -> Tensor | None:  # fmt: skip
    """Return dx [T, I], from dy_i [T, O_i], dh and the entries of dh; None if `dys` is empty.

    `operand` holds the dy_i of the layers whose weights are in FP8, or is None if there are none.
    """
    dx = None if operand is None else operand.input_gradient()
    kinds = [
        None if masks else (entry.adapter.a.dtype, entry.adapter.a.stride(), entry.stop - entry.start)
        for entry in entries
    ]
    for run in _runs(entries, kinds):
        assert dh is not None
        tensors = [entry.adapter.a for entry in run]
        is_first = dx is None
        if dx is None:
            dx = next(iter(dys.values())).new_empty((dh.shape[1], tensors[0].shape[1]))
        expand(
            columns_of(dh, run[0], run[-1]), tensors, [dx], [_factor(entry) for entry in run], [],
            masks.get(run[0].position), adds=not is_first, transposed=True,
        )  # fmt: skip
    for i, dy in dys.items():
        if projections[i].weight is not None and (operand is None or i not in operand.parts):
            dx = multiply(dy, dense_weight(projections[i].weight), total=dx)
    return dx


class BackwardTensors(NamedTuple):
    """What the gradients of the tensors of a node depend on. A tensor is None if no needed gradient depends on it."""

    # x [T, I]
    rows: Tensor | None
    # The terms of h and of dh, and their entries.
    h: Tensor | None
    entries: Sequence[Entry]
    dh: Tensor | None
    dh_entries: Sequence[Entry]
    # The upstream gradients [T, O_i] by the indices of their projections. Some may be missing.
    dys: Mapping[int, Tensor]
    masks: Masks


def layer_gradients(
    tensors: BackwardTensors, projections: Sequence[Projection], needs: Sequence[bool],
    dbs: Mapping[int, Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of the tensors of the projections, in the order of `flatten`.

    A gradient that is not needed is None. `needs` has a flag for each tensor. `dbs` holds those gradients of B that
    another kernel has computed, by the positions of the adapters.
    """
    rows, dys = tensors.rows, tensors.dys
    gradients: list[Tensor | None] = [None] * len(needs)
    index = 0
    for i, projection in enumerate(projections):
        if (needs[index] or needs[index + 1]) and (dy := dys.get(i)) is not None:
            gradients[index] = torch.mm(dy.t(), rows) if needs[index] and rows is not None else None
            gradients[index + 1] = dy.sum(0) if needs[index + 1] else None
        index += 2 + 3 * len(projection.adapters)
    b_entries = []
    for entry in tensors.entries:
        if (dy := dys.get(entry.projection)) is None:
            continue
        if needs[entry.tensor_index + 2]:
            bias = entry.adapter.scaling * dy.sum(0, dtype=torch.float32)
            gradients[entry.tensor_index + 2] = bias.to(entry.adapter.bias.dtype)
        if entry.position in dbs:
            gradients[entry.tensor_index + 1] = dbs[entry.position]
        elif needs[entry.tensor_index + 1]:
            b_entries.append(entry)
    a_groups = _groups([entry for entry in tensors.dh_entries if needs[entry.tensor_index]], tensors.masks)
    _sum_over_tokens(tensors, a_groups, b_entries, gradients)
    return gradients


def _sum_over_tokens(
    tensors: BackwardTensors, a_groups: Sequence[Sequence[Entry]], b_entries: Sequence[Entry],
    gradients: list[Tensor | None],
) -> None:  # fmt: skip
    """Write the gradients of the A of `a_groups`, and those of the B of `b_entries`, to the list of gradients.

    One launch computes those of a group of A, and those of a run of B.
    """
    rows, h, dh = tensors.rows, tensors.h, tensors.dh
    b_runs = _runs(b_entries, [_kind(entry.adapter.b) for entry in b_entries])
    for group in a_groups:
        assert rows is not None
        assert dh is not None
        run: Sequence[Entry] = b_runs.pop(0) if b_runs else ()
        others = None
        if run:
            assert h is not None
            others = TokenSums(
                [tensors.dys[entry.projection] for entry in run], columns_of(h, run[0], run[-1]),
                run[0].stop - run[0].start, [entry.adapter.scaling for entry in run],
                [entry.adapter.b.dtype for entry in run],
            )  # fmt: skip
        first, last = group[0], group[-1]
        dtypes = {entry.adapter.a.dtype for entry in group}
        # Columns of adapters that need no gradient may lie between those of the group. Their sums are not used.
        da, *b_gradients = token_sums(
            rows, columns_of(dh, first, last), _factor(first), tensors.masks.get(first.position), True,
            first.adapter.a.dtype if len(dtypes) == 1 else torch.float32, others,
        )  # fmt: skip
        for entry in group:
            part = da if first is last else da[entry.start - first.start : entry.stop - first.start]
            gradients[entry.tensor_index] = part if len(dtypes) == 1 else part.to(entry.adapter.a.dtype)
        for entry, db in zip(run, b_gradients, strict=True):
            gradients[entry.tensor_index + 1] = db
    for entry in (entry for run in b_runs for entry in run):
        assert h is not None
        (gradients[entry.tensor_index + 1],) = token_sums(
            tensors.dys[entry.projection], columns_of(h, entry, entry), entry.adapter.scaling,
            dtype=entry.adapter.b.dtype,
        )  # fmt: skip
