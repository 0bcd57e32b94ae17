r"""Cross entropy of `input @ linear_weight.T + bias` that never holds all logits.

The tokens are processed in chunks, so that the logits of a chunk fit in a budget (`chunks`). Ignored tokens are removed
before the products. The forward pass computes the gradients, because it has the logits: three products in total.
Backward multiplies the gradients by the upstream gradient. If the upstream gradient is one, it does not read them.

In two cases backward recomputes the logits and computes the gradients from them: four products in total. With
`reduction="none"` the upstream gradient differs from token to token, and dW depends on it. In fp16, da / T would
underflow without the loss scale, which is part of the upstream gradient. Backward also computes the gradients of
returned log-probabilities and entropies, if they have an upstream gradient.

Each chunk reads and writes dW once more, and rounds it once more. There are therefore as few chunks as the budget
allows, and a half-precision dW of more than `ChunkConfig.max_chunks` chunks is summed in fp32.

Shapes: T tokens (all leading dimensions), H hidden, V vocabulary.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.head.accumulate_grad import AccumulatedGradient, accumulated_gradient
from tigon.ops.head.arguments import (
    HeadNames,
    cast_for_products,
    check_head,
    check_sums,
    check_valid_rows,
    needed_gradients,
)
from tigon.ops.head.chunks import Head, HeadSettings, head_of
from tigon.ops.head.cross_entropy_chunks import (
    LossSettings,
    linear_cross_entropy_chunks,
    linear_cross_entropy_gradients,
)
from tigon.ops.head.gradients import NO_NEEDS, Gradients, LowRank, Needs, rescale_gradients
from tigon.ops.logits.cross_entropy import cross_entropy_reference
from tigon.ops.logits.loss_arguments import (
    RESULT_OPTIONS,
    LossOutput,
    Reduction,
    as_scalar,
    check_loss_arguments,
    loss_options,
    loss_output,
    requested_results,
)
from tigon.ops.logits.token.kernels import SavedStatistics, Upstream, gradient_scales
from tigon.ops.logits.valid_rows import ValidRows, as_targets
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.op import Node

NAMES = HeadNames("input", "linear_weight", "linear_bias", "target")


def linear_cross_entropy_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Compute `linear_cross_entropy` by its eager definition with all logits, the ground truth of the tests."""
    logits = F.linear(input, linear_weight, linear_bias)
    if low_rank is not None:
        logits = (logits + F.linear(*low_rank)).to(logits.dtype)
    return cross_entropy_reference(logits, target, **options)


class _Targets(NamedTuple):
    """The targets of all tokens, and the factors of their losses. None of these tensors gets a gradient."""

    target: Tensor
    class_weight: Tensor | None
    scales: Tensor
    valid_rows: ValidRows | Literal[False] | None


class _LinearCrossEntropy(Node):
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low_rank_h: Tensor | None,
        low_rank_b: Tensor | None, targets: _Targets, accumulation: AccumulatedGradient | None, settings: LossSettings,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        keep_none_gradients(ctx)
        target, class_weight, scales, valid_rows = targets
        returns_more = settings.wants.log_probs or settings.wants.entropy
        # Under `torch.compile` a missing upstream gradient is zeros instead of None. Backward cannot know which results
        # were used there, so it computes the gradients of all results together.
        needs_upstream = x.dtype == torch.float16 or (torch.compiler.is_compiling() and returns_more)
        in_forward = settings.is_reduced and not needs_upstream
        needs = settings.head.needs if in_forward else NO_NEEDS
        head, low_rank = head_of(x, weight, bias, target, valid_rows, settings.head), LowRank(low_rank_h, low_rank_b)
        dw_buffer = None if accumulation is None else accumulation.buffer
        statistics, gradients = linear_cross_entropy_chunks(
            head, low_rank, class_weight, scales, dw_buffer,
            settings._replace(head=settings.head._replace(needs=needs)),
        )  # fmt: skip
        if accumulation is not None and in_forward:
            accumulation.record_sum()
        # Autograd must not add dW to the buffer that contains it.
        is_saved = needs._replace(dw=needs.dw and accumulation is None)
        saved_gradients = [g if need else None for g, need in zip(gradients, is_saved, strict=True)]
        saved = *head[:5], *low_rank, class_weight, scales, statistics.lse, statistics.log_probs, statistics.entropy
        ctx.save_for_backward(*saved_gradients, *(saved if returns_more or not in_forward else ()))
        ctx.in_forward, ctx.computed, ctx.accumulation, ctx.settings = in_forward, head.computed, accumulation, settings
        ctx.mark_non_differentiable(statistics.z_loss, statistics.predicted)
        loss = statistics.loss.sum() if settings.is_reduced else statistics.loss
        return loss, statistics.z_loss, statistics.predicted, statistics.log_probs, statistics.entropy

    def backward(
        ctx: Any, dloss: Tensor | None, _dz_loss: None, _dpredicted: None, dlog_probs: Tensor | None,
        dentropy: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        # `ctx.saved_tensors` is read once: the gradients are overwritten below, and a second read would raise an error.
        settings, accumulation, (*saved,) = ctx.settings, ctx.accumulation, ctx.saved_tensors
        dlog_probs = dlog_probs if settings.wants.log_probs else None
        dentropy = dentropy if settings.wants.entropy else None
        if accumulation is not None:
            accumulation.check_unchanged()
        gradients, count = Gradients(), len(Gradients._fields)
        if ctx.in_forward:
            if accumulation is not None:
                accumulation.make_nan_if_wrong(dloss)
            if dloss is not None:
                gradients = Gradients(*rescale_gradients(saved[:count], dloss))
            dloss = None
        if not ctx.in_forward or dlog_probs is not None or dentropy is not None:
            *inputs, h, b, class_weight, scales, lse, log_probs, entropy = saved[count:]
            upstream = Upstream(lse.new_zeros(()) if dloss is None else dloss, dlog_probs, dentropy)
            dw_buffer = None if accumulation is None else accumulation.buffer
            new_gradients = linear_cross_entropy_gradients(
                Head._make((*inputs, ctx.computed)), LowRank(h, b), class_weight, scales, dw_buffer,
                SavedStatistics(lse, log_probs, entropy), upstream, settings,
            )  # fmt: skip
            sums = zip(gradients, new_gradients, settings.head.needs, strict=True)
            gradients = Gradients(*(_sum(g, new if need else None) for g, new, need in sums))
        if accumulation is not None:
            gradients = gradients._replace(dw=accumulation.gradient_for_autograd())
        return tuple(gradients)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None, weight: Tensor | None = None, reduction: Reduction = "mean",
    ignore_index: int | None = -100, label_smoothing: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, z_loss: float = 0.0, token_scaling: bool = False, num_items: Tensor | float | None = None,
    max_logits_mib: float | None = None, acc_dtype: torch.dtype | None = None, accumulate_grad: bool = False,
    valid_rows: ValidRows | Literal[False] | None = None, process_group: "torch.distributed.ProcessGroup | None" = None,
    vocab_size: int | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, return_log_probs: bool = False, return_entropy: bool = False,
) -> Tensor | LossOutput:  # fmt: skip
    """Return the cross entropy of a linear layer's outputs, `cross_entropy(linear(input, linear_weight), target)`.

    Only the logits of one chunk of tokens exist at a time, on every device. Ignored tokens are not computed, and each
    gradient is computed only if it is needed.

    Args:
        input: [..., H] hidden states, fp32 | bf16 | fp16.
        linear_weight: [V, H], of the same dtype. Under autocast both are cast as `linear` casts them, and the dW of an
            fp32 weight is fp32 and not rounded.
        target: [...] class indices, int64 | int32.
        linear_bias: [V].
        low_rank: Two factors [..., R] and [V, R], fp32 | bf16 | fp16, whose product is added to the logits: the hidden
            values and the matrix B of an adapter (LoRA) on the head. Both may require gradients.
        weight: [V] class weights.
        reduction: "none" for [...] (differentiable with any upstream gradient), "sum" or "mean".
        ignore_index: Targets of this value have a loss and gradients of exactly zero. None means -100, as in torch.
        label_smoothing, softcap, logit_scale, z_loss, token_scaling, num_items: As in `cross_entropy`. For a
            temperature, pass `logit_scale=1 / temperature`.
        max_logits_mib: The largest memory in MiB for the logits of a chunk. A chunk has at least one token. On devices
            without kernels the limit includes the fp32 copies that the loss needs. None means 96 on a CPU and 640 on a
            GPU. If this limit leads to more than 8 chunks, a half-precision dW is summed in fp32, or the chunks are
            longer, by at most the memory that an fp32 sum would take.
        acc_dtype: torch.float32 sums dW over all chunks in fp32 and rounds it once, which takes another buffer of the
            size of dW. None sums in the dtype of the weight for up to 8 chunks. The option has no effect on the dW of
            an fp32 or fp64 weight, whose sum is at least as precise.
        accumulate_grad: Add dW to `linear_weight.grad` (or to `.main_grad`, if the weight has one) in the forward pass,
            so that autograd needs no second buffer. Call `zero_grad` before the forward pass, and call `backward` once,
            on the loss itself. If the upstream gradient is not one, the buffer becomes NaN (pass a divisor as
            `num_items`). If the loss gets no backward, its dW remains in the buffer, and a warning says so. A bf16
            gradient is rounded by every chunk. If the weight has no gradient yet, autograd creates it as usual. The
            option has no effect under `torch.compile`.
        valid_rows: The `ValidRows` of `target`, created as early as possible, so that the host does not wait here for
            the number of valid tokens. None creates them here if the products take longer than the wait. False computes
            ignored tokens too and never waits, as every call in a CUDA graph does. Under `torch.compile` the compiled
            code finds the rows when it runs.
        process_group: The ranks of a tensor-parallel head, in the order of its rows. Each rank holds some rows of
            linear_weight (and linear_bias), and all ranks have the same other arguments. `linear_weight` may be a
            DTensor. dx is summed over the ranks. `weight` and `target` are those of the whole vocabulary.
        vocab_size: V, required with a process_group unless linear_weight is a DTensor. Each rank holds V / ranks rows,
            rounded up, and the last ranks hold the remaining rows.
        return_z_loss, return_token_accuracy, return_predicted_tokens: As in `cross_entropy`.
        return_log_probs, return_entropy: As in `cross_entropy`. Both are differentiable. If one of them has an upstream
            gradient in addition to a reduced loss, backward computes three more products. With `reduction="none"`, and
            whenever they are returned under `torch.compile`, there are four products in total.

    Returns:
        The loss in fp32, or a `LossOutput` if a further result is requested. A mean over no valid target is 0.
        A target that is neither in [0, V) nor `ignore_index` makes the loss NaN, as in `cross_entropy`.

    Raises:
        TypeError: `input`, `linear_weight` or a bias is not a floating-point tensor, `target` is not an integer tensor,
            or an option has a wrong type.
        ValueError: Shapes, dtypes, devices or shards do not match, or an option is out of range.
        RuntimeError: With `accumulate_grad`, a second backward runs, or the buffer was replaced after the forward pass.

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
    checks.flag(op, accumulate_grad=accumulate_grad)
    requested = requested_results(
        op, return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, return_log_probs=return_log_probs,
        return_entropy=return_entropy,
    )  # fmt: skip
    check_sums(op, max_logits_mib, acc_dtype)
    accumulation = accumulated_gradient(op, linear_weight, acc_dtype) if accumulate_grad else None
    input, linear_weight, linear_bias, target, shard = check_head(
        op, input, linear_weight, linear_bias, target, process_group, vocab_size, names=NAMES
    )
    check_loss_arguments(op, shard.vocabulary, target, weight, reduction, num_items, input.device)
    ignore_index = checks.ignore_index(op, -100 if ignore_index is None else ignore_index)
    options = loss_options(op, ignore_index, label_smoothing, softcap, logit_scale, z_loss, token_scaling)
    valid_rows = check_valid_rows(op, valid_rows, target, ignore_index)
    input, linear_bias = cast_for_products(op, input, linear_weight, linear_bias, NAMES)

    x, targets = input.reshape(-1, input.shape[-1]), as_targets(target, ignore_index)
    weight = None if weight is None else weight.detach().contiguous()
    factors = check_low_rank(op, low_rank, input, len(linear_weight), process_group)
    needs = Needs(*needed_gradients(input, linear_weight, linear_bias, *factors))
    num_items, is_mean = as_scalar(num_items, input.device), reduction == "mean"
    scales = gradient_scales(targets, weight, num_items, shard.vocabulary, ignore_index, is_mean)
    head = HeadSettings(needs, acc_dtype is not None, max_logits_mib, ignore_index, shard)
    settings = LossSettings(head, requested.wants, reduction != "none", options)
    results = _LinearCrossEntropy.apply(
        x, linear_weight, linear_bias, *factors, _Targets(targets, weight, scales, valid_rows), accumulation, settings
    )
    if accumulation is not None:
        accumulation.set_flag()
    return loss_output(results, target, requested, ignore_index, reduction)


def check_low_rank(
    op: str, low_rank: tuple[Tensor, Tensor] | None, input: Tensor, vocabulary: int, process_group: object
) -> LowRank:
    """Check the factors of a product that is added to the logits, and return them with rows [T, R] and [V, R]."""
    if low_rank is None:
        return LowRank()
    if not isinstance(low_rank, (tuple, list)) or len(low_rank) != 2:
        raise TypeError(f"{op}: low_rank must be a pair of tensors or None, got {type(low_rank).__name__}")
    if process_group is not None:
        raise ValueError(f"{op}: low_rank must be None with a process_group, because its factors are not sharded")
    h, b = low_rank
    checks.tensor(op, low_rank_h=h, low_rank_b=b)
    checks.floating(op, low_rank_h=h, low_rank_b=b)
    if b.dim() != 2 or len(b) != vocabulary:
        raise ValueError(f"{op}: low_rank must have shapes (..., R) and ({vocabulary}, R), got B {tuple(b.shape)}")
    checks.shape(op, "low_rank_h", h, (*input.shape[:-1], b.shape[1]))
    checks.same(op, "device", input=input, low_rank_h=h, low_rank_b=b)
    checks.same(op, "dtype", low_rank_h=h, low_rank_b=b)
    return LowRank(h.reshape(-1, b.shape[1]), b)


_MODULE_OPTIONS = (
    "reduction", "ignore_index", "label_smoothing", "softcap", "logit_scale", "z_loss", "max_logits_mib",
    "token_scaling", "acc_dtype", "accumulate_grad", "process_group", "vocab_size", *RESULT_OPTIONS,
)  # fmt: skip


class LinearCrossEntropyLoss(nn.Module):
    """Compute `linear_cross_entropy` as a module. Each call takes the hidden states and the weight of the layer.

    Args:
        weight: [V] class weights, a buffer of the module.
        **options: The keyword arguments of `linear_cross_entropy`, except `linear_bias`, `low_rank`, `num_items` and
            `valid_rows`, which each call takes.

    Raises:
        TypeError: `weight` is not a floating-point tensor.
        ValueError: An option has another name. The module checks values when it is called.

    Example:
        >>> loss = tigon.LinearCrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.randn(6, 16), torch.randn(100, 16), torch.randint(100, (6,))).shape
        torch.Size([])
    """

    weight: Tensor | None

    def __init__(self, weight: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        for name in options:
            checks.choice("LinearCrossEntropyLoss", "an option", name, _MODULE_OPTIONS)
        checks.floating("LinearCrossEntropyLoss", weight=weight)
        self.register_buffer("weight", weight)
        self.options = options

    def forward(
        self, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None,
        num_items: Tensor | float | None = None, valid_rows: ValidRows | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | LossOutput:  # fmt: skip
        """Return `linear_cross_entropy` of input [..., H], linear_weight [V, H] and target [...]."""
        return linear_cross_entropy(
            input, linear_weight, target,
            linear_bias=linear_bias, low_rank=low_rank, weight=self.weight, num_items=num_items,
            valid_rows=valid_rows,
            **self.options,
        )  # fmt: skip
