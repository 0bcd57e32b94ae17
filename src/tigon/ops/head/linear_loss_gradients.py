"""The parts of a batch, the calls of a loss function of `linear_loss`, and the gradients that follow from them.

A unit is a set of tokens that must stay in one part: a sequence or a pair of sequences, whose loss couples its tokens,
or a block of tokens. A part has one or more consecutive units. Its logits fit into the budget and are computed once.

The function is always called with all tokens of the batch, once for each part. At the call for part k, the values of
parts 1 to k are known, and the values of later parts are placeholders. If the loss is a sum over the parts, the
gradient of part k does not depend on the other parts. At the last call all values are known, so it returns the loss
itself, and its gradients show whether those of the earlier calls were right.

Shapes: T tokens, H hidden, V vocabulary, N sequences of L tokens each (or packed ones of any length), P = N / 2 pairs:
sequences 0..P-1 are the chosen ones, P..N-1 the rejected ones.
"""

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.chunks import Chunk, ChunkConfig, ChunkPlan, Head, HeadSettings, bytes_of_logit, compute_chunks
from tigon.ops.head.computed_rows import Rows, select
from tigon.ops.head.gradients import Gradients, rescale_gradients
from tigon.ops.logits.token.kernels import (
    Options,
    SavedStatistics,
    Upstream,
    Wants,
    gradient,
    gradient_scales,
    statistics,
)
from tigon.runtime.autograd import keep_none_gradients, without_autocast
from tigon.runtime.device import device_kind, device_of
from tigon.runtime.op import Node

Group = Literal["token", "sequence", "pair", "batch"]


class _Units(NamedTuple):
    """The units of a batch, and how many tokens of each are computed."""

    group: Group
    sizes: list[int]  # The number of computed tokens of each unit
    # The first computed token of each block or sequence among those of the batch, and the end of the last one.
    offsets: list[int]

    def spans(self, first: int, last: int) -> list[slice]:
        """Return the blocks or sequences of units `first` to `last`: of a pair, the chosen and the rejected ones."""
        shifts = (0, len(self.sizes)) if self.group == "pair" else (0,)
        return [slice(first + shift, last + shift) for shift in shifts]


def _find_units(
    group: Group, shape: torch.Size, rows: Tensor | None, count: int, token_limit: int, cu_seqlens: Tensor | None
) -> _Units:
    """Return the units of targets of this shape, of which `rows` [count] are computed, or all if it is None. Tokens
    before the first packed sequence belong to its unit, and tokens after the last one to the last unit."""
    tokens = shape.numel()
    if group == "batch" or not tokens:
        return _Units("batch", [count], [0, count])
    # The host reads numbers of the device below, so it waits for the device once.
    if cu_seqlens is not None and rows is not None:
        offsets = torch.searchsorted(rows, cu_seqlens.to(rows.device, torch.int64)).tolist()
    elif cu_seqlens is not None:
        offsets = [min(max(bound, 0), tokens) for bound in cu_seqlens.tolist()]
    else:
        # Blocks of a quarter of the limit waste at most a quarter of it.
        length = max(1, token_limit // 4) if group == "token" else shape[1]
        offsets = [min(i * length, tokens) for i in range(-(-tokens // length) + 1)]
        if rows is not None:
            offsets = torch.searchsorted(rows, torch.tensor(offsets, device=rows.device)).tolist()
    if len(offsets) == 1 or offsets != sorted(offsets):
        # There is no sequence, or the boundaries decrease.
        return _Units("batch", [count], [0, count])
    offsets[0], offsets[-1] = 0, count
    sizes = [last - first for first, last in itertools.pairwise(offsets)]
    if group == "pair":
        pairs = len(sizes) // 2
        sizes = [sizes[i] + sizes[pairs + i] for i in range(pairs)]
    return _Units(group, sizes, offsets)


def _divide(units: _Units, rows: Tensor | None, token_limit: int, device: torch.device) -> list[Rows] | None:
    """Return the rows of parts of at most `token_limit` computed tokens, without empty ones; None if a unit has more
    tokens."""
    if any(size > token_limit for size in units.sizes):
        return None
    ends, size = [0], 0
    for i, unit_size in enumerate(units.sizes):
        if size and size + unit_size > token_limit:
            ends.append(i)
            size = 0
        size += unit_size
    if size:
        ends.append(len(units.sizes))
    return [_rows_of(units, first, last, rows, device) for first, last in itertools.pairwise(ends)]


def _rows_of(units: _Units, first: int, last: int, rows: Tensor | None, device: torch.device) -> Rows:
    """Return the computed tokens of units `first` to `last`."""
    spans = [(units.offsets[span.start], units.offsets[span.stop]) for span in units.spans(first, last)]
    if rows is not None:
        return torch.cat([rows[start:stop] for start, stop in spans])
    # The chosen and the rejected sequences of all pairs lie next to each other.
    if spans[0][1] == spans[-1][0] or len(spans) == 1:
        return slice(spans[0][0], spans[-1][1])
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def divide_batch(
    head: Head, settings: HeadSettings, shape: torch.Size, group: Group, cu_seqlens: Tensor | None, *, may_wait: bool
) -> ChunkPlan | None:
    """Return the parts of a batch; None if a unit exceeds the budget, or if the host must not wait for the sizes."""
    x, weight, _, _, rows, count = head
    max_logits_mib = settings.max_logits_mib
    token_bytes = len(weight) * bytes_of_logit(x)
    config = ChunkConfig.choose((device_kind(x), False), device_of(x))
    may_sum_in_fp32 = settings.needs.dw and weight.element_size() == 2
    spare_tokens = x.shape[1] if may_sum_in_fp32 and not settings.sums_in_fp32 else 0
    limit = config.token_limit(count, token_bytes, max_logits_mib, spare_tokens)
    if count <= limit:
        # One part needs no division.
        group = "batch"
    if group != "batch" and cu_seqlens is not None and cu_seqlens.is_cuda and not may_wait:
        return None
    units = _find_units(group, shape, rows, count, limit, cu_seqlens)
    parts = _divide(units, rows, limit, x.device)
    if parts is None:
        parts = _divide(units, rows, config.unit_limit(token_bytes, max_logits_mib), x.device)
        # With more than `max_chunks` parts, the fp32 sum of dW would take memory in addition to these logits.
        if parts is not None and may_sum_in_fp32 and len(parts) > config.max_chunks:
            parts = None
    if parts is None:
        return None
    sums_in_fp32 = settings.sums_in_fp32 or (may_sum_in_fp32 and len(parts) > config.max_chunks)
    return ChunkPlan(parts, sums_in_fp32, rows is None)


LossFunction = Callable[..., Any]

# The gradient of a token may differ between two calls by this fraction of the largest gradient. The values on which it
# depends are the same in both calls, so only the order of sums may differ, whose rounding errors are about 1e-6.
LARGEST_DIFFERENCE = 1e-4

# The values of tokens that are not computed yet. A log-probability of 0 would make log(1 - p) infinite.
PLACEHOLDERS = {"log_probs": -1.0, "entropy": 1.0, "log_sum_sq_probs": -1.0}


def call_on_batch(
    loss_fn: LossFunction, values: list[Tensor], args: tuple, shape: torch.Size, group: Group,
    cu_seqlens: Tensor | None,
) -> Any:  # fmt: skip
    """Call the function with values of all tokens. With the group "token", tensors of tokens have one dimension."""
    # The function may write to its arguments in place, but later calls and backward need the values.
    values = [value.clone() for value in values]
    if group == "token":
        values = [value.reshape(-1) for value in values]
        is_tokens = lambda x: isinstance(x, Tensor) and x.dim() and x.shape[: len(shape)] == shape
        args = tuple(arg.flatten(0, len(shape) - 1) if is_tokens(arg) else arg for arg in args)
    return loss_fn(*values, *args, **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}))


def loss_of(result: Any) -> Tensor:
    """Return the loss of a result of the function, which is the loss, or a pair of the loss and its metrics."""
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        form = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"linear_loss: loss_fn must return a tensor with one element, or a pair of it and metrics, got {form}"
        )
    return loss


def _differentiate(
    call: Callable[[list[Tensor]], Any], values: list[Tensor], constants: list[Tensor], is_last: bool
) -> tuple[Any, list[Tensor]]:
    """Return the result of the function, and the gradients of its loss for `values`. The last call retains its graph,
    because arguments of the function may need gradients."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in values]
        result = call([*leaves, *constants])
        loss = loss_of(result)
        if not loss.requires_grad:
            return result, [torch.zeros_like(value) for value in values]
        gradients = _gradients(loss.reshape(()), leaves, retain_graph=is_last, allow_unused=True)
    return result, [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, values, strict=True)]


_gradients = without_autocast(torch.autograd.grad)


def _random_state(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the current random state of the CPU and of the device. The state of the GPU
    cannot be read while a CUDA graph is captured."""
    state, gpu_state = torch.get_rng_state(), None
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        gpu_state = torch.cuda.get_rng_state(device)

    def restore() -> None:
        torch.set_rng_state(state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state, device)

    return restore


class LossProblem(NamedTuple):
    """Everything that `compute_loss` needs in addition to the function."""

    head: Head
    plan: ChunkPlan
    settings: HeadSettings
    options: Options
    # These flags are True if the function takes the entropies, or the sums of the squared probabilities, too.
    with_entropy: bool
    with_sum_sq_probs: bool


@torch.no_grad()
def compute_loss(
    call: Callable[[list[Tensor]], Any], problem: LossProblem
) -> tuple[Any, Gradients, Tensor | None]:  # fmt: skip
    """Return what the loss function returned for the whole batch, the gradients, and whether the loss is a sum. `call`
    calls the loss function with values [T] of all tokens. The third result is a bool tensor [], or None if there is
    only one part."""
    head, plan, settings, options, with_entropy, with_sum_sq_probs = problem
    x, weight, target, parts = head.x, head.weight, head.target, len(plan.parts)
    scales = gradient_scales(target, None, None, len(weight), options.ignore_index, False)
    wants = Wants(False, False, True, with_entropy, False, with_sum_sq_probs)
    names = ["log_probs", *["entropy"] * with_entropy, *["log_sum_sq_probs"] * with_sum_sq_probs]
    all_values = {name: torch.zeros(len(x), dtype=torch.float32, device=x.device) for name in names}
    is_valid, restore_random_state = None, None
    if parts > 1:
        is_valid, restore_random_state = target != options.ignore_index, _random_state(x.device)
        for name, whole in all_values.items():
            whole.masked_fill_(is_valid, PLACEHOLDERS[name])
    constants = [all_values[name] for name in names if name == "log_sum_sq_probs"]
    values = [all_values[name] for name in names if name != "log_sum_sq_probs"]
    used_gradients = [torch.zeros_like(value) for value in values]
    # The list has the results of the function for each part, and their gradients.
    calls = [] if parts else [_differentiate(call, values, constants, True)]

    def compute(chunk: Chunk) -> tuple[None, Tensor]:
        part = statistics(chunk.logits, chunk.target, None, scales, options, wants)
        for name, whole in all_values.items():
            whole[chunk.rows] = getattr(part, name)
        if calls and restore_random_state is not None:
            restore_random_state()
        calls[:] = [*calls, _differentiate(call, values, constants, len(calls) == parts - 1)]
        upstream = [select(dvalue, chunk.rows).float() for dvalue in calls[-1][1]]
        for used, dvalue in zip(used_gradients, upstream, strict=True):
            used[chunk.rows] = dvalue
        saved = SavedStatistics(part.lse, part.log_probs, part.entropy)
        total = Upstream(part.lse.new_zeros(()), *upstream)
        gradient(chunk.logits, chunk.target, None, scales, saved, total, options, out=chunk.logits)
        return None, chunk.logits

    _, gradients = compute_chunks(head, plan, settings, compute, None)
    result, last_gradients = calls[-1]
    return result, gradients, None if is_valid is None else _agree(used_gradients, last_gradients, is_valid)


def _agree(used_gradients: list[Tensor], gradients: list[Tensor], is_valid: Tensor) -> Tensor:
    """Return whether the gradients that were used are those of the last call, for all valid tokens with finite ones."""
    agreements = []
    for used, exact in zip(used_gradients, gradients, strict=True):
        is_compared = is_valid & exact.isfinite()
        limit = LARGEST_DIFFERENCE * exact.where(is_compared, 0.0).abs().amax()
        agreements.append((((used - exact).abs() <= limit) | ~is_compared).all())
    return torch.stack(agreements).all()


class LinearLoss(Node):
    """Return a zero that has the gradients dx, dw and db for x, weight and bias."""

    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dx: Tensor | None, dw: Tensor | None,
        db: Tensor | None,
    ) -> Tensor:  # fmt: skip
        keep_none_gradients(ctx)
        ctx.save_for_backward(dx, dw, db)
        return x.new_zeros((), dtype=torch.float32)

    def backward(ctx: Any, dloss: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if dloss is None:
            return ()
        return tuple(rescale_gradients(gradients, dloss))
