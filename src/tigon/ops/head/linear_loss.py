r"""Any loss of log-probabilities under a language model's head, without holding all logits.

    loss = f(log p_1, ..., log p_T),     log p_t = log softmax(x_t W^T)[target_t]

f is a function in plain torch. Autograd differentiates it only on the vector of log-probabilities. A loss that is the
mean (or the sum) of the losses of its sequences takes three products. For each part of the batch, whose logits fit into
the budget, forward computes

    logits   = x W^T                                 one product
    log p    = log_softmax(logits)[targets]          one kernel
    g        = df / d log p                          autograd, on a vector
    dlogits  = g_t ([j = target_t] - p_tj)           one kernel, over the logits
    dx = dlogits W,   dW += dlogits^T x              two products

and backward multiplies dx and dW by the upstream gradient of the loss. After the last part f is called once more, with
the log-probabilities of the whole batch, and returns the loss and its metrics. If a part would not fit, or if the loss
is no sum over parts, `linear_log_probs` computes all log-probabilities first, and the logits again in backward: four
products.

Shapes: T tokens (all leading dimensions of the targets), N sequences of L tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.head.chunks import (
    Chunk,
    ChunkConfig,
    ChunkProblem,
    GradientSums,
    Needs,
    head_product,
    select,
)
from tigon.ops.head.computed_rows import rows_to_compute
from tigon.ops.head.linear_log_probs import (
    LogProbOutput,
    cast_for_products,
    check_head_arguments,
    linear_log_probs,
    log_prob_options,
)
from tigon.ops.head.linear_loss_parts import Group, Part, Units, divide, find_units, select_arguments, select_units
from tigon.ops.logits.rescale import rescaled
from tigon.ops.logits.token.kernels import (
    Options,
    SavedStatistics,
    Shard,
    Upstream,
    Wants,
    gradient,
    gradient_scales,
    statistics,
)
from tigon.ops.logits.valid_rows import ValidRows, as_targets
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, keep_none_gradients
from tigon.runtime.device import device_kind, device_of, runs_kernels
from tigon.runtime.torch_private.operators import assert_on_device

__all__ = ["eager_linear_loss", "linear_loss"]

LossFunction = Callable[..., Any]

GROUPS = ("token", "sequence", "pair", "batch")

# The loss of the batch may differ from the sum of the losses of its parts by rounding only. The first bound is relative
# to the sum of their absolute values. The losses of the tokens may cancel: the advantages of a group of completions sum
# to zero, so on-policy losses are rounding errors. The second bound is therefore relative to the size of their terms,
# the sum over the tokens of |df / d log p| max(1, |log p|), of which rounding errors are about 1e-7.
LARGEST_DIFFERENCE, LARGEST_ROUNDING = 1e-3, 1e-5


# --- reference -----------------------------------------------------------------------------------


def eager_linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss_fn: LossFunction, *args: Any,
    group: Group = "batch", bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, with_entropy: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Compute `linear_loss` by its eager definition with all logits, the ground truth of the tests."""
    logits = F.linear(hidden, weight, bias)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p, is_valid = z.log_softmax(-1), targets != ignore_index
    log_probs = log_p.gather(-1, targets.where(is_valid, 0)[..., None])[..., 0].where(is_valid, 0.0)
    values = [log_probs, -(log_p.exp() * log_p).sum(-1).where(is_valid, 0.0)] if with_entropy else [log_probs]
    return _call(loss_fn, values, args, targets.shape, group)


# --- the calls of the loss function -----------------------------------------------------------------


def _call(loss_fn: LossFunction, values: list[Tensor], args: tuple, shape: torch.Size, group: Group) -> Any:
    """Call the function with values of all tokens. With the group "token", tensors of tokens have one dimension."""
    if group == "token":
        values = [value.reshape(-1) for value in values]
        is_tokens = lambda x: isinstance(x, Tensor) and x.dim() and x.shape[: len(shape)] == shape
        args = tuple(arg.flatten(0, len(shape) - 1) if is_tokens(arg) else arg for arg in args)
    return loss_fn(*values, *args)


def _loss_of(result: Any) -> Tensor:
    """Return the loss of a result of the function, which is the loss, or a pair of the loss and its metrics."""
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        form = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"linear_loss: loss_fn must return a tensor with one element, or a pair of it and metrics, got {form}"
        )
    return loss


# --- autograd ------------------------------------------------------------------------------------


class _Problem(NamedTuple):
    """Everything that a call requests, except the tensors that get gradients."""

    loss_fn: LossFunction
    args: tuple
    # of the targets
    shape: torch.Size
    units: Units
    parts: list[Part]
    is_mean: bool
    with_entropy: bool
    options: Options
    needs: Needs
    sums_in_fp32: bool
    computes_all_rows: bool

    def share(self, part: Part) -> float:
        """Return the factor of the loss of a part in the loss of the batch."""
        if not self.is_mean or self.units.group == "batch":
            return 1.0
        if self.units.group != "token":
            return (part.last - part.first) / self.units.number
        length, tokens = self.units.length, self.shape.numel()
        return (min(part.last * length, tokens) - part.first * length) / tokens


class _LinearLoss(torch.autograd.Function):
    """Return a zero whose gradient is that of the loss, the statistics of all tokens, and the sum of the losses.

    The last output is the largest difference of this sum from the loss of the batch that rounding explains.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, problem: _Problem
    ) -> tuple[Tensor | None, ...]:
        keep_none_gradients(ctx)
        options, vocabulary = problem.options, len(weight)
        scales = gradient_scales(target, None, None, vocabulary, options.ignore_index, False)
        wants = Wants(False, False, True, problem.with_entropy)
        log_probs = torch.zeros(len(x), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        entropy = torch.zeros_like(log_probs) if problem.with_entropy else None
        values = [log_probs] if entropy is None else [log_probs, entropy]
        sums = GradientSums(
            x, weight, bias, problem.computes_all_rows, None, problem.sums_in_fp32, problem.needs, None
        )  # fmt: skip
        weight = weight.to(x.dtype)
        longest = max((_length(part.rows) for part in problem.parts), default=0)
        buffer = x.new_empty(longest, vocabulary)
        losses = []
        # The size of the terms of the loss.
        terms = log_probs.new_zeros(())
        for part in problem.parts:
            if not _length(part.rows):
                losses.append(_differentiate(problem, part, values)[0])
                continue
            x_part, target_part = select(x, part.rows), select(target, part.rows)
            logits = buffer[: len(x_part)]
            head_product(x_part, weight, bias, logits)
            result = statistics(logits, target_part, None, scales, options, wants)
            for total, name in zip(values, ("log_probs", "entropy"), strict=False):
                total[part.rows] = getattr(result, name)
            loss, part_gradients = _differentiate(problem, part, values)
            losses.append(loss)
            upstream = [select(dvalue, part.rows) for dvalue in part_gradients]
            for dvalue, value in zip(upstream, values, strict=True):
                terms += (dvalue * select(value, part.rows).abs().clamp(min=1)).abs().sum()
            gradient(
                logits, target_part, None, scales, SavedStatistics(result.lse, result.log_probs, result.entropy),
                Upstream(log_probs.new_zeros(()), *upstream), options, logits, Shard(0, vocabulary),
            )  # fmt: skip
            sums.add(Chunk(part.rows, x_part, target_part, logits), weight)
        del buffer
        gradients = sums.finish(Shard(0, vocabulary))
        needs = problem.needs
        ctx.save_for_backward(*(g if need else None for g, need in zip(gradients[:3], needs[:3], strict=True)))
        total = torch.stack(losses).double() if losses else log_probs.new_zeros(1)
        tolerance = LARGEST_DIFFERENCE * total.abs().sum() + LARGEST_ROUNDING * terms
        outputs = log_probs, entropy, total.sum(), tolerance
        ctx.mark_non_differentiable(*(each for each in outputs if each is not None))
        return log_probs.new_zeros(()), *outputs

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if dloss is None:
            return (None,) * 5
        scaled = lambda g: rescaled(g if g.dim() == 2 else g[None], dloss).view(g.shape)
        return *(None if g is None else scaled(g) for g in gradients), None, None


def _length(rows: slice | Tensor) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _differentiate(problem: _Problem, part: Part, values: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the share of a part in the loss, and its gradients for all tokens' values, which are zero elsewhere."""
    units, args = problem.units, select_arguments(problem.args, problem.shape, problem.units, part)
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in values]
        parts = [select_units(leaf, units, part) for leaf in leaves]
        if units.group == "batch":
            parts = [each.view(problem.shape) for each in parts]
        loss = _loss_of(problem.loss_fn(*parts, *args)).reshape(()) * problem.share(part)
        if not loss.requires_grad:
            return loss.detach(), [torch.zeros_like(value) for value in values]
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), [
        torch.zeros_like(value) if g is None else g for g, value in zip(found, values, strict=True)
    ]  # fmt: skip


# --- public --------------------------------------------------------------------------------------


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: LossFunction,
    *args: Any,
    group: Group = "batch",
    reduction: Literal["mean", "sum"] = "mean",
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    with_entropy: bool = False,
    max_logits_mib: float | None = None,
    acc_dtype: torch.dtype | None = None,
    valid_rows: ValidRows | Literal[False] | None = None,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    vocab_size: int | None = None,
) -> Any:
    """Return `loss_fn(log_probs, *args)` for the log-probabilities of `targets` under a language model's head.

    `loss_fn` is a function in plain torch. With `group`, you promise that the loss of the batch is the mean (or the
    sum) of the losses of its tokens, sequences or pairs. Forward and backward then take three products with the head.
    Without this promise, or if the logits of one unit exceed the budget, they take four. A call without gradients takes
    one. Only the logits of one part of the batch exist at a time.

    `loss_fn` is called for each part of the batch with gradients, and once for the whole batch, whose loss and metrics
    are returned. It must therefore be a function of its arguments, without side effects or random numbers. If the
    losses of the parts do not add up to that of the batch, an assertion on the device fails.

    Args:
        hidden: [..., H] hidden states, fp32 | bf16 | fp16.
        weight: [V, H] of the head, of the same dtype. Under autocast both are cast as `linear` casts them.
        targets: [...] token indices, int64 | int32; [N, L] for the groups "sequence" and "pair".
        loss_fn: Takes the log-probabilities in fp32, with `with_entropy` also the entropies, and `args`. It returns a
            tensor with one element, or a pair of it and anything else, such as a dict of metrics.
        *args: More arguments of `loss_fn`. For a part, tensors are cut along their first dimension: [N, ...] by
            sequences, with the group "pair" also [N / 2, ...] by pairs, and with the group "token" tensors that begin
            with the dimensions of `targets`. All other arguments are passed as they are. Tensors may need gradients.
        group: The units whose losses add up. "token": log-probabilities are [T]. "sequence": they are [N, L]. "pair":
            they are [N, L], where the first half are the chosen sequences and the second half the rejected ones; a
            part has some pairs in the same order. "batch": the loss needs the whole batch at once.
        reduction: "mean" if the loss is the mean over its units, or "sum" if it is their sum.
        bias: [V].
        temperature, softcap, logit_scale, ignore_index: As in `linear_log_probs`. Ignored tokens have a log-probability
            and an entropy of zero, whatever the loss does with them, and get no gradient.
        with_entropy: Pass the entropies of the tokens after their log-probabilities.
        max_logits_mib: The largest memory in MiB for the logits of a part. None means 96 on a CPU and 640 on a GPU.
        acc_dtype: torch.float32 sums dW over the parts in fp32. None does so for more than 8 parts. With four products
            it is that of `linear_log_probs`.
        valid_rows: As in `linear_log_probs`.
        process_group, vocab_size: As in `linear_log_probs`. There are four products.

    Returns:
        What `loss_fn` returns for the whole batch.

    Raises:
        TypeError: `loss_fn` is not callable, or an argument has a wrong type.
        ValueError: Shapes, dtypes or devices do not match, an option is out of range, or `loss_fn` returns something
            else than a tensor with one element.

    Source: gradients in the forward pass and chunks, Hsu et al., "Liger Kernel", arXiv:2410.10989.

    Example:
        >>> hidden, head = torch.randn(4, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> def policy_gradient(log_probs, advantages):
        ...     return -(advantages[:, None] * log_probs).mean()
        >>> tokens, advantages = torch.randint(100, (4, 5)), torch.randn(4)
        >>> loss = tigon.linear_loss(hidden, head, tokens, policy_gradient, advantages, group="sequence")
        >>> loss.backward(); hidden.grad.shape
        torch.Size([4, 5, 16])
    """
    op = "linear_loss"
    checks.tensor(op, hidden=hidden, weight=weight, targets=targets)
    if not callable(loss_fn):
        raise TypeError(f"{op}: loss_fn must be callable, got {type(loss_fn).__name__}")
    checks.choice(op, "group", group, GROUPS)
    checks.choice(op, "reduction", reduction, ("mean", "sum"))
    checks.choice(op, "acc_dtype", acc_dtype, (None, torch.float32))
    checks.flag(op, with_entropy=with_entropy)
    if max_logits_mib is not None and checks.number(op, "max_logits_mib", max_logits_mib) < 1:
        raise ValueError(f"{op}: max_logits_mib must be at least 1 or None, got {max_logits_mib}")
    if group in ("sequence", "pair") and targets.dim() != 2:
        raise ValueError(f"{op}: targets must have shape (N, L) with group={group!r}, got {tuple(targets.shape)}")
    if group == "pair" and len(targets) % 2:
        raise ValueError(
            f"{op}: targets must have an even number of rows with group='pair', the chosen sequences and then the "
            f"rejected ones, got {tuple(targets.shape)}"
        )
    is_sharded = process_group is not None or any(hasattr(x, "placements") for x in (hidden, weight, bias, targets))
    if not is_sharded:
        check_head_arguments(op, hidden, weight, targets, bias)
        checks.same(op, "device", hidden=hidden, weight=weight, bias=bias, targets=targets)
    options = log_prob_options(op, checks.ignore_index(op, ignore_index), temperature, softcap, logit_scale)
    tensors = hidden, weight, bias
    needs = Needs(*(torch.is_grad_enabled() and p is not None and p.requires_grad for p in tensors))
    # An fp16 gradient needs the scale of the loss, which only backward knows.
    in_forward = any(needs) and not is_sharded and not torch.compiler.is_compiling()
    if in_forward:
        products_hidden, products_bias = cast_for_products(op, hidden, weight, bias)
        in_forward = products_hidden.dtype != torch.float16
    if in_forward:
        x, target = products_hidden.reshape(-1, hidden.shape[-1]), as_targets(targets, options.ignore_index)
        rows, count = rows_to_compute(valid_rows, target, options.ignore_index, x.numel() * len(weight))
        division = _divide(x, weight, targets.shape, group, rows, count, max_logits_mib, acc_dtype, needs)
        if division is not None:
            units, parts, sums_in_fp32 = division
            problem = _Problem(
                loss_fn, args, targets.shape, units, parts, reduction == "mean", with_entropy, options, needs,
                sums_in_fp32, rows is None and count > 0,
            )  # fmt: skip
            zero, log_probs, entropy, total, tolerance = _LinearLoss.apply(x, weight, products_bias, target, problem)
            values = [each.view(targets.shape) for each in (log_probs, entropy) if each is not None]
            return _finish(_call(loss_fn, values, args, targets.shape, group), zero, total, tolerance, len(parts))
    result = linear_log_probs(
        hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
        ignore_index=ignore_index, return_entropy=with_entropy, acc_dtype=acc_dtype, valid_rows=valid_rows,
        process_group=process_group, vocab_size=vocab_size,
    )  # fmt: skip
    values = [result.log_probs, result.entropy] if isinstance(result, LogProbOutput) else [result]
    output = _call(loss_fn, values, args, targets.shape, group)
    _loss_of(output)
    return output


def _divide(
    x: Tensor, weight: Tensor, shape: torch.Size, group: Group, rows: Tensor | None, count: int,
    max_logits_mib: float | None, acc_dtype: torch.dtype | None, needs: Needs,
) -> tuple[Units, list[Part], bool] | None:  # fmt: skip
    """Return the units, the parts, and whether dW is summed in fp32; None if a unit exceeds the budget."""
    # Without kernels, a part takes two fp32 values per logit in addition to the logit itself.
    logit_bytes = x.element_size() + (0 if runs_kernels(x) else 8)
    config = ChunkConfig.choose(ChunkProblem(len(weight), logit_bytes, device_kind(x)), device_of(x))
    may_sum_in_fp32 = needs.dw and weight.element_size() == 2
    spare_tokens = x.shape[1] if may_sum_in_fp32 and acc_dtype is None else 0
    limit = config.token_limit(count, len(weight) * logit_bytes, max_logits_mib, spare_tokens)
    units = find_units(group, shape, rows, count, limit)
    parts = divide(units, rows, limit, x.device)
    if parts is None:
        return None
    return units, parts, acc_dtype is not None or (may_sum_in_fp32 and len(parts) > config.max_chunks)


def _finish(result: Any, zero: Tensor, total: Tensor, tolerance: Tensor, parts: int) -> Any:
    """Return the result of the function for the whole batch, whose loss gets the gradients of `zero`."""
    loss = _loss_of(result)
    if parts > 1:
        whole = loss.detach().double().reshape(())
        # A loss that is NaN or infinite shows in the loss curve.
        assert_on_device(
            ((whole - total).abs() <= tolerance + 1e-9) | ~whole.isfinite(),
            "linear_loss: the losses of the parts do not add up to the loss of the batch: loss_fn is not a mean (or, "
            'with reduction="sum", a sum) over the units of `group`',
        )
    loss = loss + zero.to(loss.dtype)
    return (loss, *result[1:]) if isinstance(result, (tuple, list)) else loss
