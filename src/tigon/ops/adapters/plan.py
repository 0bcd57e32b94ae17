"""Plans of the autograd nodes of `lora` and `lora_mlp`: the columns of all adapters of a node, and their launches.

A node has several layers with the same input x, and each layer has any number of adapters. The ranks of all adapters
lie side by side in h and in dh. The docstring of `lora` has the formulas.

A plan depends on the dtypes, shapes, strides and devices of the tensors and on the numbers of the adapters. It is found
by these properties and holds no tensor, so one plan serves the same layers of all blocks of a model at every step.

Shapes: T tokens, I inputs, O outputs of a layer, r rank of an adapter, R ranks of all adapters of a node together.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.projection import FrozenWeight, Projection, product_dtype
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.device import KERNEL_DTYPES, PLAIN, runs_kernels

DENSE = torch.strided


class AdapterEntry(NamedTuple):
    # The index of the adapter among all adapters of the node, and the index of its layer.
    position: int
    layer: int
    a_index: int  # The index of A among the tensors of the node. B and the bias follow.
    # The columns of the adapter in h or in dh.
    start: int
    stop: int
    scaling: float
    dropout: float
    bias_dtype: torch.dtype | None  # The dtype of the bias, or None if there is none.
    # The properties that the A, or the B, of one launch share: the dtype, the strides and the rank.
    a_kind: tuple
    b_kind: tuple


class Run(NamedTuple):
    """Adapters with adjacent columns whose products one launch computes."""

    # The position of the first adapter, and the columns of all.
    position: int
    start: int
    stop: int
    # Properties of the adapters. `indices` are those of A, and `factors` those of the elements that dropout keeps.
    layers: tuple[int, ...]
    indices: tuple[int, ...]
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    factors: tuple[float, ...]
    a_dtypes: tuple[torch.dtype, ...]
    b_dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(entries: Sequence[AdapterEntry]) -> "Run":
        rows = [
            (e.layer, e.a_index, e.stop - e.start, e.scaling, 1.0 / (1.0 - e.dropout), e.a_kind[0], e.b_kind[0])
            for e in entries
        ]
        return Run(entries[0].position, entries[0].start, entries[-1].stop, *zip(*rows, strict=True))

    def columns(self, h: Tensor) -> Tensor:
        """Return the columns of h [3, T, R] that belong to this run."""
        return h if self.stop - self.start == h.shape[2] else h[:, :, self.start : self.stop]

    def a(self, tensors: Sequence[Any]) -> list[Tensor]:
        return [tensors[i] for i in self.indices]

    def b(self, tensors: Sequence[Any]) -> list[Tensor]:
        return [tensors[i + 1] for i in self.indices]


def _list_runs(entries: Sequence[AdapterEntry], kinds: Sequence[object]) -> tuple[Run, ...]:
    """Return the entries in runs of at most three, with adjacent columns and equal kinds. None equals no other kind."""
    runs: list[list[AdapterEntry]] = []
    last_kind = None
    for entry, kind in zip(entries, kinds, strict=True):
        if kind is not None and kind == last_kind and len(runs[-1]) < 3 and runs[-1][-1].stop == entry.start:
            runs[-1].append(entry)
        else:
            runs.append([entry])
        last_kind = kind
    return tuple(map(Run.of, runs))


class Layer(NamedTuple):
    """One layer of a node."""

    weight_index: int  # The index of the weight among the tensors of the node. The bias follows.
    shape: torch.Size  # [O, I]. It has no dimension if the caller computes the product with the weight.
    # The indices of all biases of the layer, and the scalings of their adapters. The layer's own bias has None.
    biases: tuple[tuple[int, float | None], ...]


class NodePlan:
    """The layers and adapters of a node, and its launches: the adapters of one of `passes` share one pass over x, and
    one launch reads all A of one of `a_runs`, or all B of one of `b_runs`. `present` are the indices of the tensors
    that are neither None nor a `FrozenWeight`."""

    def __init__(self, layers: tuple[Layer, ...], entries: tuple[AdapterEntry, ...], present: tuple[int, ...]) -> None:
        self.layers, self.entries, self.present = layers, entries, present
        self.all_layers = tuple(range(len(layers)))
        self.rank = entries[-1].stop if entries else 0
        self.has_biases = any(layer.biases for layer in layers)
        self.has_dropout = any(entry.dropout for entry in entries)
        # A dropout masks x for its adapter alone, and the sums of one pass have one dtype.
        shares_pass = not self.has_dropout and len({entry.a_kind[0] for entry in entries}) == 1
        self.passes = (Run.of(entries),) if shares_pass else tuple(Run.of([entry]) for entry in entries)
        self.a_runs = _list_runs(entries, [None if self.has_dropout else entry.a_kind for entry in entries])
        self.b_runs = _list_runs(entries, [entry.b_kind for entry in entries])


class NodeCall(NamedTuple):
    """The plan of a node, and its tensors: for each layer the weight, the bias, and A, B and the bias of each adapter.
    A tensor may be None, and the weight may be a `FrozenWeight`."""

    plan: NodePlan
    tensors: list[Any]


def takes_input(x: object, dtype: torch.dtype) -> bool:
    """Return whether a node may compute products of x, once it has this dtype. A model in fp32 runs in eager code,
    whose products are more accurate, because it would gain nothing from tensor cores."""
    if type(x) not in PLAIN or torch.compiler.is_compiling() or has_active_transform():
        return False
    assert isinstance(x, Tensor)
    if dtype not in (torch.bfloat16, torch.float16) or x.dim() < 2 or x.numel() == 0 or not runs_kernels(x):
        return False
    # The node saves x, where eager code saves a copy of x in the dtype of A. Autograd saves no inference tensor.
    return x.dtype != dtype or not (x.is_inference() and torch.is_grad_enabled())


def plan_node(x: object, projections: Sequence[Projection]) -> NodeCall | None:
    """Return the call of a node that computes these projections of x; None if no node supports them. Under autocast, x
    must have the dtype of autocast, which eager products would have too."""
    if not isinstance(x, Tensor) or not takes_input(x, x.dtype) or product_dtype(x) != x.dtype:
        return None
    return find_plan(x, projections)


def find_plan(x: Tensor, projections: Sequence[Projection]) -> NodeCall | None:
    """Return the same as `plan_node` for x that `takes_input` accepts."""
    tensors: list[Any] = []
    options: list[tuple] = []
    for weight, bias, adapters in projections:
        tensors += (weight, bias)
        for a, b, _, adapter_bias, _ in adapters:
            tensors += (a, b, adapter_bias)
        options.append(tuple([(scaling, dropout) for _, _, scaling, _, dropout in adapters]))
    properties = [
        t if t is None else (type(t), t.layout, t.device, t.dtype, t.shape, t.stride() if t.layout is DENSE else None)
        for t in tensors
    ]
    plan = _make_plan(x.dtype, x.device, tuple(properties), tuple(options))
    return None if plan is None else NodeCall(plan, tensors)


@functools.lru_cache(1024)
def _make_plan(
    dtype: torch.dtype, device: torch.device, properties: tuple, options: tuple[tuple[tuple[float, float], ...], ...]
) -> NodePlan | None:
    """Return the plan for tensors with these properties (`find_plan`), or None if no node supports them. `options` are
    the scaling and the dropout of each adapter of each layer."""
    for cls, layout, tensor_device, tensor_dtype, shape, _ in filter(None, properties):
        # A subclass of `Tensor` may compute another product, and the kernels read dense memory.
        is_supported = issubclass(cls, FrozenWeight) or (cls in PLAIN and layout is DENSE)
        if not is_supported or tensor_device != device or tensor_dtype not in KERNEL_DTYPES or not math.prod(shape):
            return None
    layers: list[Layer] = []
    entries: list[AdapterEntry] = []
    index = start = 0
    for i, numbers in enumerate(options):
        weight, bias = properties[index : index + 2]
        if weight is not None and weight[3] != dtype:
            return None
        biases: list[tuple[int, float | None]] = [] if bias is None else [(index + 1, None)]
        weight_index, index = index, index + 2
        for scaling, dropout in numbers:
            (*_, a_dtype, a_shape, a_strides), (*_, b_dtype, b_shape, b_strides), bias = properties[index : index + 3]
            # The dimensions differ while an engine has sharded the weights.
            if len(a_shape) != 2 or len(b_shape) != 2 or a_shape[0] != b_shape[1]:
                return None
            if weight is not None and weight[4] != (b_shape[0], a_shape[1]):
                return None
            stop = start + a_shape[0]
            columns = len(entries), i, index, start, stop, float(scaling), dropout
            kinds = (a_dtype, a_strides, a_shape[0]), (b_dtype, b_strides, a_shape[0])
            entries.append(AdapterEntry(*columns, None if bias is None else bias[3], *kinds))
            if bias is not None:
                biases.append((index + 2, scaling))
            start, index = stop, index + 3
        layers.append(Layer(weight_index, torch.Size() if weight is None else weight[4], tuple(biases)))
    present = tuple(i for i, each in enumerate(properties) if each is not None and each[1] is DENSE)
    return NodePlan(tuple(layers), tuple(entries), present)


# Plans are compared by identity, so these caches find a part in less than a microsecond.


@functools.lru_cache(1024)
def plan_part(plan: NodePlan, layers: tuple[int, ...]) -> NodePlan:
    """Return the plan of the adapters of some layers, whose columns then follow one another from 0."""
    entries: list[AdapterEntry] = []
    for entry in plan.entries:
        if entry.layer in layers:
            start = entries[-1].stop if entries else 0
            entries.append(entry._replace(start=start, stop=start + entry.stop - entry.start))
    return plan if len(entries) == len(plan.entries) else NodePlan(plan.layers, tuple(entries), plan.present)


@functools.lru_cache(1024)
def gradient_runs(plan: NodePlan, layers: tuple[int, ...]) -> tuple[Run, ...]:
    """Return `plan.b_runs`, but with a run of its own for the first adapter of each of these layers."""
    firsts = {entry.layer: entry for entry in reversed(plan.entries) if entry.layer in layers}
    kinds = [None if firsts.get(entry.layer) is entry else entry.b_kind for entry in plan.entries]
    return _list_runs(plan.entries, kinds)


class OutputPlan(NamedTuple):
    """The launches that add the outputs of adapters to those of layers."""

    # The first adapters of the layers, and the others, which add to the output of the first one.
    first_runs: tuple[Run, ...]
    other_runs: tuple[Run, ...]
    # The layers without an adapter that have a bias, and all layers with an adapter or a bias.
    biased_layers: tuple[int, ...]
    written_layers: frozenset[int]


@functools.lru_cache(1024)
def plan_outputs(plan: NodePlan, layers: tuple[int, ...]) -> OutputPlan:
    """Return how the outputs of the adapters of some layers are computed."""
    first_entries: dict[int, AdapterEntry] = {}
    others = []
    for entry in plan.entries:
        if entry.layer in layers and first_entries.setdefault(entry.layer, entry) is not entry:
            others.append(Run.of([entry]))
    kinds = [(entry.b_kind, bool(plan.layers[i].biases)) for i, entry in first_entries.items()]
    biased = tuple(i for i in layers if plan.layers[i].biases and i not in first_entries)
    runs = _list_runs([*first_entries.values()], kinds)
    return OutputPlan(runs, tuple(others), biased, frozenset((*first_entries, *biased)))


class GradientPlan(NamedTuple):
    # The layers and the tensors of weights and of biases.
    weights: tuple[tuple[int, int], ...]
    biases: tuple[tuple[int, int], ...]
    adapter_biases: tuple[AdapterEntry, ...]  # The adapters with a bias
    # The launches that compute the gradients of the A of a run and of the B of another run. One of both may be None.
    sums: tuple[tuple[Run | None, Run | None], ...]
    # These flags are True if the gradient of at least one A, or of at least one B, is needed.
    needs_a: bool
    needs_b: bool


@functools.lru_cache(1024)
def plan_gradients(
    a_plan: NodePlan, b_plan: NodePlan, needs: tuple[bool, ...], layers: tuple[int, ...]
) -> GradientPlan:
    """Return the gradients that are needed of the tensors of some layers, which have upstream gradients. `needs` has a
    flag for each tensor. The A are those of `a_plan`, whose columns are those of dh, and the B and the biases are those
    of `b_plan`, whose columns are those of h."""
    indices = [(i, layer.weight_index) for i, layer in enumerate(b_plan.layers) if i in layers]
    entries = [entry for entry in b_plan.entries if entry.layer in layers]
    b_entries = [entry for entry in entries if needs[entry.a_index + 1]]
    a_runs = [run for run in a_plan.passes if any(needs[i] for i in run.indices)]
    # Without a pass over x, each B has a launch of its own.
    b_runs = _list_runs(b_entries, [entry.b_kind for entry in b_entries])[: len(a_runs)]
    b_runs += tuple(Run.of([entry]) for entry in b_entries[sum(len(run.layers) for run in b_runs) :])
    return GradientPlan(
        tuple((i, index) for i, index in indices if needs[index]),
        tuple((i, index + 1) for i, index in indices if needs[index + 1]),
        tuple(entry for entry in entries if needs[entry.a_index + 2]),
        tuple(itertools.zip_longest(a_runs, b_runs)), bool(a_runs), bool(b_entries),
    )  # fmt: skip
