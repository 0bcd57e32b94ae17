"""The products of linear layers with low-rank adapters, as the autograd nodes of `lora` and `lora_mlp` compute them.

The docstring of `lora` has the formulas. A plan (`plan`) says which adapters share a launch. `tensors` are those of the
node, in the order of `NodeCall`.

Shapes: T tokens, I inputs, O outputs of a layer, r rank of an adapter, R ranks of all adapters of a node together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.ops.adapters.fp8_weight import Fp8Operand
from tigon.ops.adapters.low_rank import TokenSums, dropout_bits, empty_hidden, expand, project, project_each, token_sums
from tigon.ops.adapters.plan import GradientPlan, NodePlan, gradient_runs, plan_outputs
from tigon.ops.adapters.projection import dense_weight
from tigon.runtime.products import multiply

# The masks of dropouts, as bits (`dropout_bits`), by the position of the adapter. Those without dropout have none.
Masks = Mapping[int, Tensor]


def rows_of(x: Tensor) -> Tensor:
    """Return x [..., N] as [T, N] with dense rows. It is a view of x if the strides of x allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def draw_seeds(plan: NodePlan, x: Tensor) -> Tensor | None:
    """Draw one seed for each adapter from torch's generator of the device. Return None if no adapter has dropout."""
    return torch.randint(2**62, (len(plan.entries),), device=x.device) if plan.has_dropout else None


def dropout_masks(plan: NodePlan, rows: Tensor, tensors: Sequence[Any], seeds: Tensor | None) -> Masks:
    """Return the masks of the dropouts of all adapters. `rows` has one row for each token."""
    if seeds is None:
        return {}
    dropped = [entry for entry in plan.entries if entry.dropout > 0]
    tokens, features = rows.shape[0], [tensors[entry.a_index].shape[1] for entry in dropped]
    return {
        entry.position: dropout_bits(seeds, entry.position, tokens, width, entry.dropout)
        for entry, width in zip(dropped, features, strict=True)
    }


def compute_hidden(
    rows: Tensor, plan: NodePlan, tensors: Sequence[Any], masks: Masks, operand: Fp8Operand | None = None
) -> Tensor | None:
    """Return the terms of h [3, T, R] for x [T, I], or None if there is no adapter. The kernels do the fused passes of
    x as an FP8 operand first."""
    if not plan.rank:
        return None
    fused_pass = None if operand is None else operand.fused_passes((0,)).get(0)
    h = empty_hidden(rows, rows.shape[0], plan.rank)
    for run in plan.passes:
        project(rows, run.a(tensors), run.columns(h), run.factors[0], masks.get(run.position), fused_pass)
        # Only the first group does the pass, because it reads all of x.
        fused_pass = None
    return h


def _total_bias(biases: Sequence[tuple[int, float | None]], tensors: Sequence[Any]) -> Tensor | None:
    """Return b + sum_j s_j bias_j [O] in fp32, or None if there is no bias."""
    if not biases:
        return None
    terms = [tensors[i].float() if scaling is None else scaling * tensors[i].float() for i, scaling in biases]
    # `float` keeps an fp32 bias as it is, and the kernel reads dense memory.
    return sum(terms[1:], terms[0]).contiguous()


def add_low_rank(
    ys: Mapping[int, Tensor], plan: NodePlan, tensors: Sequence[Any], h: Any, adds: bool = True
) -> frozenset[int]:
    """Add the outputs of the adapters and the biases of layers to y_i [T, O_i]; without `adds`, write them to y_i. `ys`
    holds the y_i by the indices of their layers. Return the indices of those that have an adapter or a bias. The others
    are not written."""
    outputs = plan_outputs(plan, tuple(ys))
    for run in outputs.first_runs:
        biases = [_total_bias(plan.layers[i].biases, tensors) for i in run.layers] if plan.has_biases else []
        expand(run.columns(h), run.b(tensors), [ys[i] for i in run.layers], run.scalings, biases, adds=adds)
    for run in outputs.other_runs:
        expand(run.columns(h), run.b(tensors), [ys[run.layers[0]]], run.scalings, [], adds=True)
    for i in outputs.biased_layers:
        bias: Any = _total_bias(plan.layers[i].biases, tensors)
        ys[i].add_(bias) if adds else ys[i].copy_(bias.expand_as(ys[i]))
    return outputs.written_layers


def write_outputs(ys: Mapping[int, Tensor], rows: Tensor, plan: NodePlan, tensors: Sequence[Any], h: Any) -> None:
    """Write y_i [T, O_i] of layers, by their indices, from x [T, I] and the terms of h."""
    written = add_low_rank(ys, plan, tensors, h, adds=False)
    for i, y in ys.items():
        weight = dense_weight(tensors[plan.layers[i].weight_index]).t()
        if i in written:
            multiply(rows, weight, total=y)
        else:
            torch.mm(rows, weight, out=y)


def project_gradients(
    dys: Mapping[int, Tensor], plan: NodePlan, tensors: Sequence[Any], operand: Fp8Operand | None = None
) -> Tensor:
    """Return the terms of dh [3, T, R] of the adapters of a plan, from the upstream gradients dy_i [T, O_i]. The
    kernels do the fused passes of the gradients as an FP8 operand first."""
    some_dy = next(iter(dys.values()))
    dh = empty_hidden(some_dy, some_dy.shape[0], plan.rank)
    passes = {} if operand is None else operand.fused_passes({entry.layer for entry in plan.entries})
    # Only the layer's first adapter does the pass, because it reads the whole gradient.
    for run in gradient_runs(plan, tuple(passes)) if passes else plan.b_runs:
        fused_pass = passes.pop(run.layers[0], None) if passes else None
        project_each(run.columns(dh), [dys[i] for i in run.layers], run.b(tensors), run.scalings, fused_pass)
    return dh


def compute_input_gradient(
    dys: Mapping[int, Tensor], plan: NodePlan, tensors: Sequence[Any], dh: Any, masks: Masks,
    operand: Fp8Operand | None = None,
) -> Tensor | None:  # fmt: skip
    """Return dx [T, I], from dy_i [T, O_i] and the terms of dh, whose columns are those of the plan. The result is None
    if `dys` is empty. `operand` holds the dy_i of the layers whose weights are in FP8, or is None if there are none."""
    dx = None if operand is None else operand.input_gradient()
    for run in plan.a_runs:
        factors = run.a(tensors)
        is_first = dx is None
        if dx is None:
            dx = next(iter(dys.values())).new_empty((dh.shape[1], factors[0].shape[1]))
        expand(
            run.columns(dh), factors, [dx], run.factors, [], masks.get(run.position),
            adds=not is_first, transposed=True,
        )  # fmt: skip
    for i, dy in dys.items():
        weight = tensors[plan.layers[i].weight_index]
        if weight is not None and (operand is None or i not in operand.parts):
            dx = multiply(dy, dense_weight(weight), total=dx)
    return dx


def layer_gradients(
    plan: GradientPlan, rows: Any, h: Any, dh: Any, dys: Mapping[int, Tensor],
    masks: Masks, count: int,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of the `count` tensors of a node. A gradient that is not needed is None. They depend on x
    [T, I], on the terms of h and dh, and on dy_i [T, O_i], of which some may be missing. A tensor may be None if no
    needed gradient depends on it."""
    gradients: list[Tensor | None] = [None] * count
    for layer, index in plan.weights:
        gradients[index] = torch.mm(dys[layer].t(), rows)
    for layer, index in plan.biases:
        gradients[index] = dys[layer].sum(0)
    for entry in plan.adapter_biases:
        db = entry.scaling * dys[entry.layer].sum(0, dtype=torch.float32)
        gradients[entry.a_index + 2] = db.to(entry.bias_dtype)
    for a_run, b_run in plan.sums:
        others: Any = None
        if b_run is not None:
            zs = [dys[i] for i in b_run.layers]
            others = TokenSums(zs, b_run.columns(h), b_run.ranks[0], b_run.scalings, b_run.b_dtypes)
        if a_run is not None:
            mask = masks.get(a_run.position)
            da, *dbs = token_sums(rows, a_run.columns(dh), a_run.factors[0], mask, True, a_run.a_dtypes[0], others)
            parts = (da,) if len(a_run.ranks) == 1 else da.split(a_run.ranks)
            for index, part in zip(a_run.indices, parts, strict=True):
                gradients[index] = part
        elif others is not None:
            dbs = token_sums(others.zs[0], others.h, others.factors[0], dtype=others.dtypes[0])
        if b_run is not None:
            for index, db in zip(b_run.indices, dbs, strict=True):
                gradients[index + 1] = db
    return gradients
