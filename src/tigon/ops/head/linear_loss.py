r"""Any loss of log-probabilities under a language model's head, without holding all logits.

    loss = f(log p_1, ..., log p_T),     log p_t = log softmax(x_t W^T)[target_t]

f is a function in plain torch. Autograd differentiates it only on the vector of log-probabilities. A loss that is a sum
(or a mean) over its sequences takes three products. For each part of the batch, whose logits fit into the budget,
forward computes

    logits   = x W^T                                 one product
    log p    = log_softmax(logits)[targets]          one kernel
    g        = df / d log p                          autograd, on a vector
    dlogits  = g_t ([j = target_t] - p_tj)           one kernel, over the logits
    dx = dlogits W,   dW += dlogits^T x              two products

and backward multiplies dx and dW by the upstream gradient of the loss. f always takes the log-probabilities of the
whole batch. Those of later parts are placeholders, on which the g of this part does not depend. The call for the last
part returns the loss and its metrics. If a unit does not fit into the budget, or if the loss is no sum over units,
`linear_log_probs` computes all log-probabilities first, and the logits again in backward: four products.

Shapes: T tokens (all leading dimensions of the targets), N sequences of L tokens, H hidden, V vocabulary.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from tigon.ops.head.arguments import (
    cast_for_products,
    check_head,
    check_sums,
    check_valid_rows,
    log_prob_options,
    needed_gradients,
)
from tigon.ops.head.chunks import HeadSettings, head_of
from tigon.ops.head.gradients import Needs
from tigon.ops.head.linear_log_probs import LogProbOutput, linear_log_probs, linear_log_probs_reference
from tigon.ops.head.linear_loss_gradients import (
    Group,
    LinearLoss,
    LossFunction,
    LossProblem,
    call_on_batch,
    compute_loss,
    divide_batch,
    loss_of,
)
from tigon.ops.logits.token.types import Shard
from tigon.ops.logits.valid_rows import ValidRows, as_targets
from tigon.runtime import checks
from tigon.runtime.late_checks import check_later, raise_earlier

GROUPS = ("token", "sequence", "pair", "batch")
NO_SUM = (
    "linear_loss: the loss of loss_fn must be a sum over the units of group={group!r}, got a loss whose gradients for "
    "one unit depend on the values of other units, or change from call to call; group='batch' accepts any loss"
)


def eager_linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss_fn: LossFunction, *args: Any, group: Group = "batch",
    with_entropy: bool = False, with_sum_sq_probs: bool = False, cu_seqlens: Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Compute `linear_loss` by its eager definition with all logits, the ground truth of the tests."""
    result = linear_log_probs_reference(
        hidden, weight, targets, return_entropy=with_entropy, return_sum_sq_probs=with_sum_sq_probs, **options
    )
    return call_on_batch(loss_fn, _values_of(result), args, targets.shape, group, cu_seqlens)


def _values_of(result: Tensor | LogProbOutput) -> list[Tensor]:
    values = [result] if isinstance(result, Tensor) else [result.log_probs, result.entropy, result.log_sum_sq_probs]
    return [each for each in values if each is not None]


def linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss_fn: LossFunction, *args: Any, group: Group = "batch",
    bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, with_entropy: bool = False, with_sum_sq_probs: bool = False,
    cu_seqlens: Tensor | None = None, max_logits_mib: float | None = None, acc_dtype: torch.dtype | None = None,
    valid_rows: ValidRows | Literal[False] | None = None, process_group: "torch.distributed.ProcessGroup | None" = None,
    vocab_size: int | None = None,
) -> Any:  # fmt: skip
    """Return `loss_fn(log_probs, *args)` for the log-probabilities of `targets` under a language model's head.

    `loss_fn` is a function in plain torch. With `group`, you promise that the loss of the batch is a sum over its
    tokens, sequences or pairs, such as their mean. Forward and backward then take three products with the head. Without
    this promise, or if the logits of one unit exceed the budget, they take four. A call without gradients takes one.
    Only the logits of one part of the batch exist at a time.

    `loss_fn` always takes the whole batch, and is called once for each part. Before the last call, valid tokens of
    later parts have a log-probability of -1 and an entropy of 1. Each call begins with the same random state of torch,
    so `loss_fn` may draw random numbers: all calls draw the same ones, and the state afterwards is the one after a
    single call. Other side effects happen once for each part.

    If the gradients of a call show that the promise does not hold, a ValueError is raised on a CPU. On a GPU, the host
    does not wait for this check: the loss and all gradients are NaN, and a later call raises the error.

    Args:
        hidden: [..., H] hidden states, fp32 | bf16 | fp16.
        weight: [V, H] of the head, of the same dtype. Under autocast both are cast as `linear` casts them.
        targets: [...] token indices, int64 | int32; for the groups "sequence" and "pair" [N, L], or [T] with
            `cu_seqlens`.
        loss_fn: Takes the log-probabilities in fp32, with `with_entropy` also the entropies, and `args`. It returns a
            tensor with one element, or a pair of it and anything else, such as a dict of metrics.
        *args: More arguments of `loss_fn`. Tensors may need gradients.
        group: The units over which the loss is a sum, and the shape in which `loss_fn` takes the tokens. "token":
            log-probabilities are [T], and so are arguments that begin with the dimensions of `targets`. "sequence":
            they are [N, L]. "pair": they are [N, L], where the first half are the chosen sequences and the second half
            the rejected ones. "batch": they have the shape of `targets`, and the loss needs the whole batch at once.
        bias: [V].
        temperature, softcap, logit_scale, ignore_index: As in `linear_log_probs`. Ignored tokens have a log-probability
            and an entropy of zero, whatever the loss does with them, and get no gradient.
        with_entropy: Pass the entropies of the tokens after their log-probabilities.
        with_sum_sq_probs: Pass, after these, the logarithm of the sum of the squared probabilities of each token (WPO),
            which has no gradient.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences. `loss_fn` then takes values [T], and the
            boundaries as the keyword `cu_seqlens`. The host waits for them once, unless they are on the CPU or the
            logits of the batch fit into the budget.
        max_logits_mib: The largest memory in MiB for the logits of a part. None means 96 on a CPU and 640 on a GPU, or
            1024 on a GPU if a sequence or a pair would not fit otherwise.
        acc_dtype: torch.float32 sums dW over the parts in fp32. None does so for more than 8 parts. With four products
            it is that of `linear_log_probs`.
        valid_rows: As in `linear_log_probs`.
        process_group, vocab_size: As in `linear_log_probs`. There are four products.

    Returns:
        What `loss_fn` returns for the whole batch. Only its loss has gradients of `hidden`, `weight` and `bias`.

    Raises:
        TypeError: `loss_fn` is not callable, or an argument has a wrong type.
        ValueError: Shapes, dtypes or devices do not match, an option is out of range, `loss_fn` returns something else
            than a tensor with one element, or its loss is no sum over the units of `group`.

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
    checks.flag(op, with_entropy=with_entropy, with_sum_sq_probs=with_sum_sq_probs)
    check_sums(op, max_logits_mib, acc_dtype)
    _check_sequences(op, targets, group, cu_seqlens)
    ignore_index = checks.ignore_index(op, ignore_index)
    # `linear_log_probs` checks the tensors of a sharded head.
    is_sharded = process_group is not None or any(hasattr(x, "placements") for x in (hidden, weight, bias, targets))
    if not is_sharded:
        check_head(op, hidden, weight, bias, targets)
        valid_rows = check_valid_rows(op, valid_rows, targets, ignore_index)
    options = log_prob_options(op, ignore_index, temperature, softcap, logit_scale)
    needs = Needs(*needed_gradients(hidden, weight, bias))
    # An fp16 gradient needs the scale of the loss, which only backward knows.
    in_forward = any(needs) and not is_sharded and not torch.compiler.is_compiling()
    if in_forward:
        products_hidden, products_bias = cast_for_products(op, hidden, weight, bias)
        in_forward = products_hidden.dtype != torch.float16
    if in_forward:
        x, target = products_hidden.reshape(-1, hidden.shape[-1]), as_targets(targets, ignore_index)
        settings = HeadSettings(needs, acc_dtype is not None, max_logits_mib, ignore_index, Shard(0, len(weight)))
        head = head_of(x, weight, products_bias, target, valid_rows, settings)
        may_wait = valid_rows is not False and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        plan = divide_batch(head, settings, targets.shape, group, cu_seqlens, may_wait=may_wait)
        if plan is not None:
            raise_earlier()
            call = lambda values: call_on_batch(
                loss_fn, [each.view(targets.shape) for each in values], args, targets.shape, group, cu_seqlens
            )
            problem = LossProblem(head, plan, settings, options, with_entropy, with_sum_sq_probs)
            result, gradients, is_sum = compute_loss(call, problem)
            zero = LinearLoss.apply(x, weight, products_bias, *gradients[:3])
            return _finish(result, zero, is_sum, group)
    result = linear_log_probs(
        hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
        ignore_index=ignore_index, return_entropy=with_entropy, return_sum_sq_probs=with_sum_sq_probs,
        acc_dtype=acc_dtype, valid_rows=valid_rows, process_group=process_group, vocab_size=vocab_size,
    )  # fmt: skip
    output = call_on_batch(loss_fn, _values_of(result), args, targets.shape, group, cu_seqlens)
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


def _finish(result: Any, zero: Tensor, is_sum: Tensor | None, group: Group) -> Any:
    """Return the result of the loss function, whose loss gets the gradients of `zero`. The loss and the gradients are
    NaN if `is_sum` is False."""
    loss = loss_of(result)
    loss = loss + zero.to(loss.dtype)
    if is_sum is not None:
        loss = loss * check_later(is_sum, "ValueError", NO_SUM.format(group=group)).to(loss.dtype)
    if not isinstance(result, (tuple, list)):
        return loss
    values = (loss, *result[1:])
    return type(result)(*values) if hasattr(result, "_fields") else type(result)(values)
