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

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.head.chunks import ChunkConfig, ChunkProblem, Needs
from tigon.ops.head.computed_rows import rows_to_compute
from tigon.ops.head.linear_log_probs import (
    cast_for_products,
    check_head_arguments,
    check_valid_rows,
    linear_log_probs,
    log_prob_options,
)
from tigon.ops.head.linear_loss_gradients import LinearLoss, LossFunction, LossProblem, call_on_batch, loss_of
from tigon.ops.head.linear_loss_parts import Group, Part, Units, divide, find_units
from tigon.ops.logits.valid_rows import ValidRows, as_targets
from tigon.runtime import checks
from tigon.runtime.device import device_kind, device_of, runs_kernels
from tigon.runtime.torch_private.operators import assert_on_device

__all__ = ["eager_linear_loss", "linear_loss"]

GROUPS = ("token", "sequence", "pair", "batch")

# --- reference -----------------------------------------------------------------------------------


def eager_linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss_fn: LossFunction, *args: Any,
    group: Group = "batch", bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, with_entropy: bool = False, with_sum_sq_probs: bool = False,
    cu_seqlens: Tensor | None = None, **_: Any,
) -> Any:  # fmt: skip
    """Compute `linear_loss` by its eager definition with all logits, the ground truth of the tests."""
    logits = F.linear(hidden, weight, bias)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p, is_valid = z.log_softmax(-1), targets != ignore_index
    log_probs = log_p.gather(-1, targets.where(is_valid, 0)[..., None])[..., 0].where(is_valid, 0.0)
    values = [log_probs]
    if with_entropy:
        values.append(-(log_p.exp() * log_p).sum(-1).where(is_valid, 0.0))
    if with_sum_sq_probs:
        values.append((2.0 * log_p.detach()).logsumexp(-1).where(is_valid, 0.0))
    return call_on_batch(loss_fn, values, args, targets.shape, group, cu_seqlens)


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
    with_sum_sq_probs: bool = False,
    cu_seqlens: Tensor | None = None,
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
        targets: [...] token indices, int64 | int32; for the groups "sequence" and "pair" [N, L], or [T] with
            `cu_seqlens`.
        loss_fn: Takes the log-probabilities in fp32, with `with_entropy` also the entropies, and `args`. It returns a
            tensor with one element, or a pair of it and anything else, such as a dict of metrics.
        *args: More arguments of `loss_fn`. For a part, tensors are cut along their first dimension: [N, ...] by
            sequences, with the group "pair" also [N / 2, ...] by pairs, with `cu_seqlens` also [T, ...] by tokens, and
            with the group "token" tensors that begin with the dimensions of `targets`. All other arguments are passed
            as they are. Tensors may need gradients.
        group: The units whose losses add up. "token": log-probabilities are [T]. "sequence": they are [N, L]. "pair":
            they are [N, L], where the first half are the chosen sequences and the second half the rejected ones; a
            part has some pairs in the same order. "batch": the loss needs the whole batch at once.
        reduction: "mean" if the loss is the mean over its units, or "sum" if it is their sum.
        bias: [V].
        temperature, softcap, logit_scale, ignore_index: As in `linear_log_probs`. Ignored tokens have a log-probability
            and an entropy of zero, whatever the loss does with them, and get no gradient.
        with_entropy: Pass the entropies of the tokens after their log-probabilities.
        with_sum_sq_probs: Pass, after these, the logarithm of the sum of the squared probabilities of each token (WPO),
            which has no gradient.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences. `loss_fn` then takes values [T], or the
            tokens of a part one after the other, and the boundaries as the keyword `cu_seqlens`. The host waits for
            them once, unless they are on the CPU or the logits of the batch fit into the budget.
        max_logits_mib: The largest memory in MiB for the logits of a part. None means 96 on a CPU and 640 on a GPU, or
            1024 on a GPU if a sequence or a pair would not fit otherwise.
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
    checks.flag(op, with_entropy=with_entropy, with_sum_sq_probs=with_sum_sq_probs)
    if max_logits_mib is not None and checks.number(op, "max_logits_mib", max_logits_mib) < 1:
        raise ValueError(f"{op}: max_logits_mib must be at least 1 or None, got {max_logits_mib}")
    _check_sequences(op, targets, group, cu_seqlens)
    is_sharded = process_group is not None or any(hasattr(x, "placements") for x in (hidden, weight, bias, targets))
    if not is_sharded:
        check_head_arguments(op, hidden, weight, targets, bias)
        checks.same(op, "device", hidden=hidden, weight=weight, bias=bias, targets=targets)
        check_valid_rows(op, valid_rows, targets, checks.ignore_index(op, ignore_index))
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
        may_wait = valid_rows is not False and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        division = _divide(
            x, weight, targets.shape, group, rows, count, cu_seqlens, may_wait, max_logits_mib, acc_dtype, needs
        )
        if division is not None:
            units, parts, sums_in_fp32 = division
            covers_all = units.bounds[0] == 0 and units.bounds[-1] == len(x)
            problem = LossProblem(
                loss_fn, args, targets.shape, units, parts, reduction == "mean", with_entropy, with_sum_sq_probs,
                cu_seqlens, options, needs, sums_in_fp32, rows is None and count > 0 and covers_all,
            )  # fmt: skip
            zero, *outputs, total, tolerance = LinearLoss.apply(x, weight, products_bias, target, problem)
            values = [each.view(targets.shape) for each in outputs if each is not None]
            result = call_on_batch(loss_fn, values, args, targets.shape, group, cu_seqlens)
            return _finish(result, zero, total, tolerance, len(parts))
    result = linear_log_probs(
        hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
        ignore_index=ignore_index, return_entropy=with_entropy, return_sum_sq_probs=with_sum_sq_probs,
        acc_dtype=acc_dtype, valid_rows=valid_rows, process_group=process_group, vocab_size=vocab_size,
    )  # fmt: skip
    values = [result] if isinstance(result, Tensor) else [result.log_probs, result.entropy, result.log_sum_sq_probs]
    values = [each for each in values if each is not None]
    output = call_on_batch(loss_fn, values, args, targets.shape, group, cu_seqlens)
    loss_of(output)
    return output


def _check_sequences(op: str, targets: Tensor, group: Group, cu_seqlens: Tensor | None) -> None:
    """Check that the targets have sequences, or pairs of them."""
    sequences = len(targets) if targets.dim() else 0
    if cu_seqlens is not None:
        checks.tensor(op, cu_seqlens=cu_seqlens)
        checks.integer(op, cu_seqlens=cu_seqlens)
        if cu_seqlens.dim() != 1 or not len(cu_seqlens):
            raise ValueError(f"{op}: cu_seqlens must have shape (N + 1,), got {tuple(cu_seqlens.shape)}")
        if group == "token":
            raise ValueError(f"{op}: cu_seqlens must be None with group='token', got a Tensor")
        if targets.dim() != 1:
            raise ValueError(f"{op}: targets must have shape (T,) with cu_seqlens, got {tuple(targets.shape)}")
        sequences = len(cu_seqlens) - 1
    elif group in ("sequence", "pair") and targets.dim() != 2:
        raise ValueError(
            f"{op}: targets must have shape (N, L) with group={group!r} and without cu_seqlens, got "
            f"{tuple(targets.shape)}"
        )
    if group == "pair" and sequences % 2:
        raise ValueError(
            f"{op}: targets must have an even number of sequences with group='pair', the chosen ones and then the "
            f"rejected ones, got {sequences}"
        )


def _divide(
    x: Tensor, weight: Tensor, shape: torch.Size, group: Group, rows: Tensor | None, count: int,
    cu_seqlens: Tensor | None, may_wait: bool, max_logits_mib: float | None, acc_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Units, list[Part], bool] | None:  # fmt: skip
    """Return the units, the parts, and whether dW is summed in fp32.

    Return None if a unit exceeds the budget, or if the division of packed tokens is not known.
    """
    # Without kernels, a part takes two fp32 values per logit in addition to the logit itself.
    logit_bytes = x.element_size() + (0 if runs_kernels(x) else 8)
    config = ChunkConfig.choose(ChunkProblem(len(weight), logit_bytes, device_kind(x)), device_of(x))
    may_sum_in_fp32 = needs.dw and weight.element_size() == 2
    spare_tokens = x.shape[1] if may_sum_in_fp32 and acc_dtype is None else 0
    limit = config.token_limit(count, len(weight) * logit_bytes, max_logits_mib, spare_tokens)
    if count <= limit and group != "token":
        # One part needs no division.
        group = "batch"
    if cu_seqlens is not None and group != "batch":
        sequences = len(cu_seqlens) - 1
        # With as many tokens as sequences or pairs, the shape of an argument does not say which of them it belongs to.
        if (not may_wait and cu_seqlens.is_cuda) or shape[0] in (sequences, sequences // 2):
            return None
    units = find_units(group, shape, rows, count, limit, cu_seqlens)
    parts = divide(units, rows, limit, x.device)
    if parts is None:
        parts = divide(units, rows, config.unit_limit(len(weight) * logit_bytes, max_logits_mib), x.device)
        # With more than `max_chunks` parts, the fp32 sum of dW would take memory beside these logits.
        if parts is not None and may_sum_in_fp32 and len(parts) > config.max_chunks:
            parts = None
    if parts is None:
        return None
    return units, parts, acc_dtype is not None or (may_sum_in_fp32 and len(parts) > config.max_chunks)


def _finish(result: Any, zero: Tensor, total: Tensor, tolerance: Tensor, parts: int) -> Any:
    """Return the result of the function for the whole batch, whose loss gets the gradients of `zero`."""
    loss = loss_of(result)
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
