r"""Cross entropy of `input @ linear_weight.T + bias` that never holds all logits.

For chunks of C tokens, so that C * V logits fit in a budget:

    a   = x W^T + b                     one product; then `token_loss` writes da over a
    dx  = da W                          one product
    dW += da^T x,   db += sum_rows(da)  one product

Tokens that are ignored are left out before the products. The forward pass makes the gradients, because the logits are
there: three products in all, and backward multiplies them by the gradient that arrives (not at all if it is one). With
`reduction="none"` that gradient differs from token to token and dW is not known before it comes; and in fp16, da / T
would vanish without the loss scale that comes with it: then backward makes the logits again, four products in all. The
gradients of log-probabilities and entropies that were returned are made in backward too, if any arrives.

Every chunk reads and writes dW once more and rounds it once more, so chunks are as few as the budget allows, and a
half-precision dW of more than `linear_chunks.MOST_CHUNKS` is summed in fp32.

Shapes: T tokens (all leading dimensions), H hidden, V vocabulary, C tokens of a chunk.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.head.accumulate_grad import added_gradient
from tigon.ops.head.chunks import Call, linear_cross_entropy_chunks, rows_to_compute
from tigon.ops.head.vocab_parallel import cut_of, local_parts
from tigon.ops.logits.cross_entropy import (
    LossOutput,
    Reduction,
    as_scalar,
    check_loss_arguments,
    cross_entropy_reference,
    loss_options,
    loss_output,
)
from tigon.ops.logits.rescale import rescaled
from tigon.ops.logits.token.kernels import Statistics, Wants, gradient_scales
from tigon.ops.logits.valid_rows import ValidRows, as_targets
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, leave_absent

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy", "linear_cross_entropy_reference"]


# --- reference -----------------------------------------------------------------------------------


def linear_cross_entropy_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **options
) -> Tensor:
    """Eager definition of `linear_cross_entropy`: all logits at once, autograd; the tests' ground truth."""
    return cross_entropy_reference(F.linear(input, linear_weight, linear_bias), target, **options)


# --- autograd ------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, target, class_weight, scales, valid_rows, added, reduce, call):
        leave_absent(ctx)
        compiling = torch.compiler.is_compiling()
        # `torch.compile` gives zeros for gradients that do not arrive: then one backward makes all of them.
        beside = call.wants.log_probs or call.wants.entropy
        at_once = reduce and x.dtype != torch.float16 and not (compiling and beside)
        now = call if at_once else call._replace(needs=(False,) * 3)
        if compiling:  # the compiled op finds them when it runs
            rows, count = None, -1 if valid_rows is None else x.shape[0]
        else:
            multiplications = x.numel() * call.cut.most_rows
            rows, count = rows_to_compute(valid_rows, target, call.options.ignore_index, multiplications)
        results = linear_cross_entropy_chunks(
            x, weight, target, bias, class_weight, scales, rows, count, added and added.buffer, *[None] * 6,
            *now.arguments,
        )  # fmt: skip
        if added is not None and at_once:
            added.added()
        found = Statistics(*results[:6])
        made = [
            None if i == 1 and added else g if need else None
            for i, (g, need) in enumerate(zip(results[6:], now.needs, strict=True))
        ]
        later = (x, weight, target, bias, class_weight, scales, rows, found.lse, found.log_probs, found.entropy)
        ctx.save_for_backward(*made, *(later if beside or not at_once else ()))
        ctx.at_once, ctx.count, ctx.added, ctx.call = at_once, count, added, call
        ctx.mark_non_differentiable(found.z_loss, found.predicted)
        loss = found.loss.sum() if reduce else found.loss
        return loss, found.z_loss, found.predicted, found.log_probs, found.entropy

    @staticmethod
    @first_order
    def backward(ctx, dloss, _z_loss, _predicted, dlog_probs, dentropy):
        call, added, (*saved,) = ctx.call, ctx.added, ctx.saved_tensors  # once: the first three are overwritten below
        dlog_probs, dentropy = dlog_probs if call.wants.log_probs else None, dentropy if call.wants.entropy else None
        if added is not None:
            added.check_unchanged()
        gradients = [None] * 3
        if ctx.at_once:
            if added is not None:
                added.settle(dloss)
            if dloss is not None:
                gradients = [None if g is None else rescaled(_as_matrix(g), dloss).view(g.shape) for g in saved[:3]]
            dloss = None
        if not ctx.at_once or dlog_probs is not None or dentropy is not None:
            *inputs, lse, log_probs, entropy = saved[3:]
            dloss = lse.new_zeros(()) if dloss is None else dloss
            more = linear_cross_entropy_chunks(
                *inputs, ctx.count, added and added.buffer, lse, log_probs, entropy, dloss, dlog_probs, dentropy,
                *call.arguments,
            )[6:]  # fmt: skip
            gradients = [
                _sum(g, new if need else None) for g, new, need in zip(gradients, more, call.needs, strict=True)
            ]
        if added is not None:
            gradients[1] = added.returned()
        return *gradients, *[None] * 7


def _as_matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[None]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


# --- public --------------------------------------------------------------------------------------


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    token_scaling: bool = False,
    num_items: Tensor | float | None = None,
    max_logits_mib: float | None = None,
    acc_dtype: torch.dtype | None = None,
    accumulate_grad: bool = False,
    valid_rows: ValidRows | Literal[False] | None = None,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    vocab_size: int | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_log_probs: bool = False,
    return_entropy: bool = False,
) -> Tensor | LossOutput:
    """Cross entropy of a linear layer's outputs, `cross_entropy(linear(input, linear_weight, linear_bias), target)`.

    The logits exist for one chunk of tokens at a time, on every device; ignored tokens are not computed, and each
    gradient is made only if it is needed.

    Args:
        input: [..., H] hidden states, fp32 | bf16 | fp16.
        linear_weight: [V, H], of the same dtype; under autocast both are cast as `linear` casts them, and dW comes in
            fp32 unrounded.
        target: [...] class indices, int64 | int32.
        linear_bias: [V].
        weight: [V] class weights.
        reduction: "none" for [...] (differentiable with any gradient), "sum" or "mean".
        ignore_index: Targets of this value have no loss and gradients of exactly zero.
        label_smoothing, softcap, logit_scale, z_loss, token_scaling, num_items: As in `cross_entropy`. A temperature
            is `logit_scale=1 / temperature`.
        max_logits_mib: Cap in MiB on the logits held at once, at least one token's, with what else the loss of a chunk
            needs of their size (nothing on a GPU). None: 96 on a CPU, 640 on a GPU. Of inputs so long that this makes
            more than 8 chunks, a half-precision dW is summed in fp32, or the chunks are larger, by at most the memory
            that this would take.
        acc_dtype: torch.float32 sums dW over all chunks in fp32 and rounds once, with a buffer of dW's size beside it.
            None: in the dtype of the weight, for up to 8 chunks. It changes nothing for fp32 and fp64, whose sums are
            as fine or finer.
        accumulate_grad: Add dW to `linear_weight.grad` (or `.main_grad`, if it has one) in the forward pass, instead of
            returning a second buffer to autograd. Call `zero_grad` before the forward pass, and `backward` on the loss
            itself, once: if another gradient than one arrives, the buffer becomes NaN (a divisor belongs into
            `num_items`); a loss whose backward is never run leaves its dW behind, with a warning. A bf16 gradient is
            rounded by every chunk. A weight without a gradient gets one as ever. No effect under `torch.compile`.
        valid_rows: Made of `target` by `ValidRows` as early as it is known, so that nothing waits here for the number
            of tokens that are not ignored. None: made here, where the products take longer than the wait. False:
            compute ignored tokens too and never wait, as CUDA graphs do in any case. Under `torch.compile` the rows
            are found when the compiled code runs.
        process_group: Ranks that each hold some rows of linear_weight (and linear_bias), in the order of ranks, and the
            same of all else: tensor parallelism. `linear_weight` may then be a DTensor. dx is summed over the ranks;
            `weight` and `target` are of the whole vocabulary.
        vocab_size: V, with a process_group unless linear_weight is a DTensor: all but the last ranks hold V / ranks
            rows, rounded up.
        return_z_loss, return_token_accuracy, return_predicted_tokens: As in `cross_entropy`.
        return_log_probs, return_entropy: As in `cross_entropy`, differentiable. Where such a gradient arrives beside
            that of a reduced loss, backward takes three more products; with `reduction="none"`, and whenever they are
            returned under `torch.compile`, all takes four.

    Returns:
        The loss, fp32; or a `LossOutput` if anything is asked for beside it. A mean over no valid target is 0.
        A target that is neither in [0, V) nor `ignore_index` makes the loss NaN, as in `cross_entropy`.

    Raises:
        TypeError: `input`, `linear_weight` or a bias is no floating-point tensor, `target` no integer tensor, or an
            option of another type than above.
        ValueError: Shapes, dtypes, devices or shards do not fit, or an option is out of range.
        RuntimeError: In a second backward with `accumulate_grad`, or where its buffer was replaced since.

    Source: the gradient in the forward pass and chunks, Hsu et al., "Liger Kernel", arXiv:2410.10989; argument names,
    `torch.nn.functional.linear_cross_entropy`.

    Example:
        >>> hidden, head = torch.randn(6, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss = tigon.linear_cross_entropy(hidden, head, torch.randint(100, (6,)), softcap=30.0)
        >>> loss.backward(); hidden.grad.shape
        torch.Size([6, 16])
    """
    op = "linear_cross_entropy"
    checks.tensor(op, input=input, linear_weight=linear_weight, target=target)
    checks.flag(
        op, accumulate_grad=accumulate_grad, return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, return_log_probs=return_log_probs,
        return_entropy=return_entropy,
    )  # fmt: skip
    checks.choice(op, "acc_dtype", acc_dtype, (None, torch.float32))
    added = added_gradient(op, linear_weight, acc_dtype) if accumulate_grad else None
    if any(hasattr(x, "placements") for x in (input, linear_weight, linear_bias, target)):
        if vocab_size is None and process_group is not None and hasattr(linear_weight, "placements"):
            vocab_size = linear_weight.shape[0]
        input, target, linear_weight, linear_bias = local_parts(
            op, process_group, input, target, linear_weight=linear_weight, linear_bias=linear_bias
        )
    checks.floating(op, input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    if linear_weight.dim() != 2 or linear_weight.shape[1] == 0 or (process_group is None and len(linear_weight) == 0):
        raise ValueError(f"{op}: linear_weight must have shape (V, H), got {tuple(linear_weight.shape)}")
    v, h = linear_weight.shape
    if input.dim() == 0 or input.shape[-1] != h:
        raise ValueError(
            f"{op}: input must have shape (..., H) and linear_weight (V, H), got {tuple(input.shape)} and {(v, h)}"
        )
    checks.shape(op, "target", target, input.shape[:-1])
    if linear_bias is not None:
        checks.shape(op, "linear_bias", linear_bias, (v,))
    checks.same(op, "device", input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    cut = cut_of(op, process_group, v, vocab_size)
    check_loss_arguments(op, cut.vocabulary, target, weight, reduction, num_items, input.device)
    ignore_index = checks.ignore_index(op, -100 if ignore_index is None else ignore_index)
    options = loss_options(op, ignore_index, label_smoothing, softcap, logit_scale, z_loss, token_scaling)
    if max_logits_mib is not None and checks.number(op, "max_logits_mib", max_logits_mib) < 1:
        raise ValueError(f"{op}: max_logits_mib must be at least 1 or None, got {max_logits_mib}")
    if valid_rows is not None and valid_rows is not False:
        if not isinstance(valid_rows, ValidRows):
            raise TypeError(f"{op}: valid_rows must be a tigon.ValidRows or False, got {type(valid_rows).__name__}")
        if not torch.compiler.is_compiling():
            valid_rows.check(op, target, ignore_index)
    if input.device.type != "meta" and torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        cast = lambda x: x if x is None or x.dtype == torch.float64 else x.to(dtype)
        # The weight is cast where it is used, so that its gradient need not be.
        checks.same(
            op, "dtype", input=cast(input), linear_weight=cast(linear_weight[:0]), linear_bias=cast(linear_bias)
        )
        input, linear_bias = cast(input), cast(linear_bias)
    else:
        checks.same(op, "dtype", input=input, linear_weight=linear_weight, linear_bias=linear_bias)

    x, targets = input.reshape(-1, h), as_targets(target, ignore_index)
    weight = None if weight is None else weight.detach().contiguous()
    needs = [torch.is_grad_enabled() and p is not None and p.requires_grad for p in (input, linear_weight, linear_bias)]
    wants = Wants(return_z_loss, return_token_accuracy or return_predicted_tokens, return_log_probs, return_entropy)
    num_items, mean = as_scalar(num_items, input.device), reduction == "mean"
    scales = gradient_scales(targets, weight, num_items, cut.vocabulary, ignore_index, mean)
    call = Call(tuple(needs), wants, acc_dtype is not None, max_logits_mib, cut, options)
    losses, z_losses, predicted, log_probs, entropy = _LinearCrossEntropy.apply(
        x, linear_weight, linear_bias, targets, weight, scales,
        None if valid_rows is not False and torch.compiler.is_compiling() else valid_rows,
        added, reduction != "none", call,
    )  # fmt: skip
    if added is not None:
        added.tell()
    return loss_output(
        losses, z_losses, predicted, target, ignore_index, reduction,
        return_z_loss, return_token_accuracy, return_predicted_tokens,
        log_probs if return_log_probs else None, entropy if return_entropy else None,
    )  # fmt: skip


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` as a module: the layer's weight comes with each call, as the hidden states do.

    Args:
        **options: What `linear_cross_entropy` takes by keyword, but for the bias, `num_items` and `valid_rows`.

    Example:
        >>> loss = tigon.LinearCrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.randn(6, 16), torch.randn(100, 16), torch.randint(100, (6,))).shape
        torch.Size([])
    """

    def __init__(self, weight: Tensor | None = None, **options) -> None:
        super().__init__()
        known = ("reduction", "ignore_index", "label_smoothing", "softcap", "logit_scale", "z_loss", "max_logits_mib")
        known += ("token_scaling", "acc_dtype", "accumulate_grad", "process_group", "vocab_size")
        known += ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
        known += ("return_log_probs", "return_entropy")
        for name in options:
            checks.choice("LinearCrossEntropyLoss", "an option", name, known)
        checks.floating("LinearCrossEntropyLoss", weight=weight)
        self.register_buffer("weight", weight)
        self.options = options

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        num_items: Tensor | float | None = None,
        valid_rows: ValidRows | None = None,
    ) -> Tensor | LossOutput:
        """input [..., H], linear_weight [V, H], target [...] -> as `linear_cross_entropy`."""
        return linear_cross_entropy(
            input, linear_weight, target,
            linear_bias=linear_bias, weight=self.weight, num_items=num_items, valid_rows=valid_rows,
            **self.options,
        )  # fmt: skip
