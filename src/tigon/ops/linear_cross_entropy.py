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

Every chunk reads and writes dW once more and rounds it once more, so chunks are few: by default as large as
the budget allows, and dW of more than `linear_chunks.MOST_CHUNKS` is summed in fp32.

Shapes: T tokens (all leading dimensions), H hidden, V vocabulary, C tokens of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops import check
from tigon.ops.cross_entropy import (
    LossOutput,
    Reduction,
    as_scalar,
    check_loss_arguments,
    cross_entropy_reference,
    loss_options,
    loss_output,
)
from tigon.ops.dispatch import first_order, leave_absent
from tigon.ops.linear_chunks import Call, linear_cross_entropy_chunks, rows_to_compute
from tigon.ops.rescale import rescale, rescaled
from tigon.ops.token_loss import Statistics, Wants, gradient_scales
from tigon.ops.valid_rows import ValidRows
from tigon.ops.vocab_parallel import cut_of, local_parts

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
    def forward(ctx, x, weight, bias, target, class_weight, scales, valid, into, reduce, call):
        leave_absent(ctx)
        compiling = torch.compiler.is_compiling()
        # `torch.compile` gives zeros for gradients that do not arrive: then one backward makes all of them.
        extras = call.wants.log_probs or call.wants.entropy
        at_once = reduce and x.dtype != torch.float16 and not (compiling and extras)
        now = call if at_once else call._replace(needs=(False,) * 3)
        rows, count = None, -1
        if not compiling:
            rows, count = rows_to_compute(valid, target, call.options[0], x.numel() * call.cut.rows)
        results = linear_cross_entropy_chunks(
            x, weight, target, bias, class_weight, scales, rows, count, into, *[None] * 6, *now.arguments
        )
        found = Statistics(*results[:6])
        inputs = (x, weight, target, bias, class_weight, scales, rows, found.lse, found.log_probs, found.entropy)
        if at_once:
            gradients = [g if need else None for g, need in zip(results[6:], call.needs, strict=True)]
            gradients[1] = gradients[1] if into is None else None
        else:
            gradients = []
        ctx.save_for_backward(*gradients, *(inputs if extras or not at_once else ()))
        ctx.at_once, ctx.call, ctx.count, ctx.into, ctx.spent = at_once, call, count, into, False
        ctx.head = None if into is None else weight
        ctx.mark_non_differentiable(found.z_loss, found.predicted)
        loss = found.loss.sum() if reduce else found.loss
        return loss, found.z_loss, found.predicted, found.log_probs, found.entropy

    @staticmethod
    @first_order
    def backward(ctx, dloss, _z_loss, _predicted, dlog_probs, dentropy):
        saved, (needs, wants, *_), into, gradients = ctx.saved_tensors, ctx.call, ctx.into, [None] * 3
        dlog_probs, dentropy = dlog_probs if wants.log_probs else None, dentropy if wants.entropy else None
        if into is not None:
            _check_same_buffer(into, ctx.head)
            if ctx.at_once:
                _trust(into, dloss, ctx.spent)
                ctx.spent = True
        if ctx.at_once and dloss is not None:
            gradients = [
                None if g is None else rescaled(g if g.dim() == 2 else g[None], dloss).view(g.shape) for g in saved[:3]
            ]
        if not ctx.at_once or dlog_probs is not None or dentropy is not None:
            *inputs, lse, log_probs, entropy = saved[3:] if ctx.at_once else saved
            dloss = lse.new_zeros(()) if ctx.at_once or dloss is None else dloss
            later = linear_cross_entropy_chunks(
                *inputs, ctx.count, into, lse, log_probs, entropy, dloss, dlog_probs, dentropy, *ctx.call.arguments
            )
            later = [g if need else None for g, need in zip(later[6:], needs, strict=True)]
            gradients = [b if a is None else a if b is None else a + b for a, b in zip(gradients, later, strict=True)]
        dx, dw, db = gradients
        if into is not None:
            # Megatron's hooks want to see a gradient, and add it to main_grad, or not: zeros are right for both.
            dw = ctx.head.new_zeros(()).expand(ctx.head.shape) if _tells(ctx.head, into) else None
        return dx, dw, db, *[None] * 7


# --- accumulation --------------------------------------------------------------------------------


def _trust(into: Tensor, dloss: Tensor | None, spent: bool) -> None:
    """dW was added to `into` for a gradient of one: if another arrives, the sum is wrong, and becomes NaN."""
    if spent:
        raise RuntimeError(
            "linear_cross_entropy: a loss with accumulate_grad has one backward: its dW is added already"
        )
    rescale(into, into.new_full((), torch.nan) if dloss is None else torch.where(dloss == 1.0, 1.0, torch.nan))


def _gradient_of(linear_weight: Tensor) -> tuple[str, Tensor | None]:
    """What a weight's gradients are summed in, and its name."""
    main = getattr(linear_weight, "main_grad", None)
    return ("linear_weight.grad", linear_weight.grad) if main is None else ("linear_weight.main_grad", main)


def _check_same_buffer(into: Tensor, linear_weight: Tensor) -> None:
    name, now = _gradient_of(linear_weight)
    if now is None or now.data_ptr() != into.data_ptr():
        raise RuntimeError(
            f"linear_cross_entropy: {name}, to which accumulate_grad adds, was replaced between forward and backward: "
            "call zero_grad before the forward pass"
        )


def _tells(linear_weight: Tensor, into: Tensor) -> bool:
    """Whether the weight is to know that dW is in its main_grad: Megatron's protocol."""
    return into is getattr(linear_weight, "main_grad", None) and hasattr(linear_weight, "grad_added_to_main_grad")


def _gradient_to_add_to(op: str, linear_weight: Tensor) -> Tensor | None:
    """The buffer that `accumulate_grad` adds to; None if the weight has no gradient yet."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and linear_weight.requires_grad):
        return None
    if hasattr(linear_weight, "placements"):
        raise ValueError(
            f"{op}: accumulate_grad adds the whole dW, but linear_weight is a DTensor, whose .grad holds a shard "
            "(FSDP2 reduces gradients over the ranks first): leave accumulate_grad out"
        )
    if not linear_weight.is_leaf:
        raise ValueError(
            f"{op}: accumulate_grad needs a linear_weight that has a .grad (a leaf), got the result of an op"
        )
    if linear_weight._backward_hooks or linear_weight._post_accumulate_grad_hooks:
        raise ValueError(
            f"{op}: linear_weight has hooks that wait for its gradient, which accumulate_grad does not hand to autograd"
        )
    if torch._C._current_graph_task_id() != -1:
        raise ValueError(
            f"{op}: accumulate_grad adds dW in the forward pass, which runs again here in backward (activation "
            "checkpointing): keep the loss out of the checkpointed region"
        )
    name, into = _gradient_of(linear_weight)
    if into is None:
        return None
    check.same(op, "device", **{"linear_weight": linear_weight, name: into})
    check.shape(op, name, into, linear_weight.shape)
    if (
        into.layout != torch.strided
        or not into.is_contiguous()
        or into.dtype not in (linear_weight.dtype, torch.float32)
    ):
        raise ValueError(
            f"{op}: accumulate_grad needs a dense {name} in {linear_weight.dtype} or float32, "
            f"got {into.layout}, {into.dtype}, strides {into.stride()}"
        )
    return into


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
    valid_rows: ValidRows | None = None,
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
            needs of their size (nothing on a GPU). None: 640 on a GPU (more for long inputs, so that there are at most
            8 chunks), 96 on a CPU. A half-precision dW of more than 8 chunks is summed in fp32, if it is a new one.
        acc_dtype: torch.float32 sums dW over chunks in fp32 and rounds once, with a buffer of the size of dW beside it.
            None: in the dtype of the weight.
        accumulate_grad: Add dW to `linear_weight.grad` (or `.main_grad`, if it has one) in the forward pass, instead of
            returning a second buffer to autograd. The loss must be what `backward` starts from, once: if another
            gradient than one arrives, the buffer becomes NaN; a divisor belongs into `num_items`, and zero_grad before
            the forward pass. With `reduction="none"` and in fp16 it is added in backward, with any gradient. A weight
            without a gradient gets one as ever. Right under DDP, whose hooks run, and FSDP2, inside the module that
            holds the weight. No effect under `torch.compile`. Refused with the reason: activation checkpointing, a
            weight with hooks on its gradient, a DTensor, a weight that is no leaf (FSDP1).
        valid_rows: Made of `target` by `ValidRows` as early as it is known, so that nothing waits here for the number
            of tokens that are not ignored. None: made here, where the products are large enough to be worth a wait.
        process_group: Ranks that each hold some rows of linear_weight (and linear_bias), in the order of ranks, and the
            same of all else: tensor parallelism. `linear_weight` may then be a DTensor. dx is summed over the ranks;
            `weight` and `target` are of the whole vocabulary.
        vocab_size: V, if it is not `linear_weight.shape[0]` times the ranks: then all but the last ranks hold
            V / ranks rows, rounded up. A DTensor knows it. The first call with a head asks whether the ranks agree.
        return_z_loss, return_token_accuracy, return_predicted_tokens: As in `cross_entropy`.
        return_log_probs, return_entropy: As in `cross_entropy`, differentiable. Where such a gradient arrives beside
            that of a reduced loss, backward takes three more products; with `reduction="none"` all takes four.

    Returns:
        The loss, fp32; or a `LossOutput` if anything is asked for beside it. A mean over no valid target is 0.
        A target that is neither in [0, V) nor `ignore_index` makes the loss NaN, as in `cross_entropy`.

    Raises:
        TypeError: `input`, `linear_weight` or a bias is no floating-point tensor, or `target` no integer tensor.
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
    check.tensor(op, input=input, linear_weight=linear_weight, target=target)
    into = _gradient_to_add_to(op, linear_weight) if accumulate_grad else None
    if any(hasattr(x, "placements") for x in (input, linear_weight, linear_bias, target)):
        if vocab_size is None and process_group is not None and hasattr(linear_weight, "placements"):
            vocab_size = linear_weight.shape[0]
        input, target, linear_weight, linear_bias = local_parts(
            op, process_group, input, target, linear_weight=linear_weight, linear_bias=linear_bias
        )
    check.floating(op, input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    if linear_weight.dim() != 2 or linear_weight.shape[1] == 0 or (process_group is None and len(linear_weight) == 0):
        raise ValueError(f"{op}: linear_weight must have shape (V, H), got {tuple(linear_weight.shape)}")
    v, h = linear_weight.shape
    if input.dim() == 0 or input.shape[-1] != h:
        raise ValueError(f"{op}: input must have shape (..., {h}), as linear_weight has, got {tuple(input.shape)}")
    check.shape(op, "target", target, input.shape[:-1])
    if linear_bias is not None:
        check.shape(op, "linear_bias", linear_bias, (v,))
    check.same(op, "device", input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    cut = cut_of(op, process_group, v, vocab_size)
    check_loss_arguments(op, cut.vocabulary, target, weight, reduction, num_items, input.device)
    ignore_index = -100 if ignore_index is None else ignore_index
    options = loss_options(op, ignore_index, label_smoothing, softcap, logit_scale, z_loss, token_scaling)
    if max_logits_mib is not None and check.number(op, "max_logits_mib", max_logits_mib) < 1:
        raise ValueError(f"{op}: max_logits_mib must be at least 1 or None, got {max_logits_mib}")
    check.choice(op, "acc_dtype", acc_dtype, (None, torch.float32))
    if acc_dtype is not None and into is not None and into.dtype != acc_dtype:
        raise ValueError(f"{op}: acc_dtype=float32 with accumulate_grad needs a gradient in float32, got {into.dtype}")
    if valid_rows is not None and not torch.compiler.is_compiling():
        if not isinstance(valid_rows, ValidRows):
            raise TypeError(f"{op}: valid_rows must be a tigon.ValidRows, got {type(valid_rows).__name__}")
        if not valid_rows.of(target, ignore_index):
            raise ValueError(f"{op}: valid_rows must be made of this target (not a copy, unchanged) and ignore_index")
    if input.device.type != "meta" and torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        cast = lambda x: x if x is None or x.dtype == torch.float64 else x.to(dtype)
        # The weight is cast where it is used, so that its gradient need not be.
        check.same(op, "dtype", input=cast(input), linear_weight=cast(linear_weight[:0]), linear_bias=cast(linear_bias))
        input, linear_bias = cast(input), cast(linear_bias)
    else:
        check.same(op, "dtype", input=input, linear_weight=linear_weight, linear_bias=linear_bias)

    x, targets = input.reshape(-1, h), target.reshape(-1).contiguous()
    weight = None if weight is None else weight.detach().contiguous()
    needs = [torch.is_grad_enabled() and p is not None and p.requires_grad for p in (input, linear_weight, linear_bias)]
    wants = Wants(return_z_loss, return_token_accuracy or return_predicted_tokens, return_log_probs, return_entropy)
    if torch.compiler.is_compiling():
        valid_rows = None
    elif valid_rows is not None:
        valid_rows = valid_rows if targets.numel() else None
    num_items, mean = as_scalar(num_items, input.device), reduction == "mean"
    scales = gradient_scales(targets, weight, num_items, cut.vocabulary, ignore_index, mean)
    call = Call(tuple(needs), wants, acc_dtype is not None, max_logits_mib, cut, options)
    losses, z_losses, predicted, log_probs, entropy = _LinearCrossEntropy.apply(
        x, linear_weight, linear_bias, targets, weight, scales, valid_rows, into, reduction != "none", call
    )
    if into is not None and _tells(linear_weight, into):
        linear_weight.grad_added_to_main_grad = True
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
            check.choice("LinearCrossEntropyLoss", "an option", name, known)
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
