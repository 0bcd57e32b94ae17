r"""Cross entropy of logits, with the options that language models use. `token.kernels` has the maths.

The gradient is computed in one of two ways. By default the forward pass saves the logits and two numbers per row (lse),
and backward writes the gradient to a new buffer. With `inplace=True` the forward pass overwrites the logits with the
gradient, and backward returns it: this takes half the memory.

With a process group, each rank has some columns of the logits. `vocab_parallel` has the exchange between the ranks,
after which each rank computes the gradient of its columns.

Shapes: M tokens (all leading dimensions), V vocabulary.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

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
from tigon.ops.logits.rescale import rescaled
from tigon.ops.logits.token.kernels import (
    Options,
    SavedStatistics,
    Shard,
    Statistics,
    Upstream,
    Wants,
    empty_statistics,
    gradient,
    gradient_scales,
    statistics,
)
from tigon.ops.logits.valid_rows import as_targets
from tigon.ops.logits.vocab_parallel import parallel_statistics, shard_of
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.launch import launcher
from tigon.runtime.op import Node


def _transform_reference(logits: Tensor, softcap: float | None, logit_scale: float) -> Tensor:
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def cross_entropy_reference(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100,
    reduction: Reduction = "mean", label_smoothing: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    z_loss: float = 0.0, token_scaling: bool = False, num_items: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    """Compute `cross_entropy` by its eager definition, the ground truth of the tests. Autograd differentiates it."""
    x = _transform_reference(input, softcap, logit_scale)
    v = x.shape[-1]
    w = x.new_ones(v) if weight is None else weight.to(x.dtype)
    log_p, lse, valid = torch.log_softmax(x, -1), torch.logsumexp(x, -1), target != ignore_index
    inside = (target >= 0) & (target < v)
    safe = target.where(inside, 0)
    # An ignored target may be outside [0, V).
    w_t = w[safe].where(inside | ~valid, torch.nan)
    log_p_t = log_p.gather(-1, safe[..., None])[..., 0]
    loss, z = -(1 - label_smoothing) * w_t * log_p_t, z_loss * lse.square()
    if label_smoothing:
        loss = loss - label_smoothing / v * (log_p * w).sum(-1)
    if token_scaling:
        loss, z = (log_p_t.detach().exp() * term for term in (loss, z))
    zeros = torch.zeros_like(lse)
    loss, z = torch.where(valid, loss, zeros), torch.where(valid, z, zeros)
    if reduction == "none":
        return loss + z
    if reduction == "sum":
        return (loss + z).sum()
    if num_items is not None:
        return (loss + z).sum() / num_items if num_items else (loss + z).sum() * 0
    inverse = lambda total: torch.where(total == 0, 0.0, 1 / total)
    weights = torch.where(valid & inside, w_t, zeros).sum()
    return loss.sum() * inverse(weights) + z.sum() * inverse(valid.sum().to(z.dtype))


def log_probs_and_entropy_reference(
    input: Tensor, target: Tensor, *, ignore_index: int = -100, softcap: float | None = None, logit_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the `log_probs` and the `entropy` of `cross_entropy` by their eager definition."""
    log_p = torch.log_softmax(_transform_reference(input, softcap, logit_scale), -1)
    log_probs = gather_log_probs(log_p, target[..., None], target, ignore_index)[..., 0]
    return log_probs, entropy_of(log_p, target, ignore_index)


def gather_log_probs(log_p: Tensor, indices: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return log p [..., V] at indices [..., K]: 0 for ignored tokens and indices, NaN for indices outside [0, V)."""
    inside = (indices >= 0) & (indices < log_p.shape[-1])
    values = log_p.gather(-1, indices.where(inside, 0).long()).where(inside, torch.nan)
    return values.where((target != ignore_index)[..., None] & (indices != ignore_index), 0.0)


def entropy_of(log_p: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the entropy [...] of log-probabilities [..., V], 0 for ignored tokens."""
    # The clamp makes p log p zero if p is zero.
    return -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1).where(target != ignore_index, 0.0)


@launcher(fake=empty_statistics)
def cross_entropy_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options, wants: Wants, shard: Shard
) -> Statistics:
    """Return the statistics of logits [M, V], of which the shard may be some columns."""
    if shard.group_name:
        return parallel_statistics(logits, target, weight, scales, options, wants, shard)
    return statistics(logits, target, weight, scales, options, wants)


@launcher(fake=lambda logits: logits.new_empty(logits.shape))
def cross_entropy_backward(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, saved: SavedStatistics, upstream: Upstream,
    options: Options, shard: Shard,
) -> Tensor:  # fmt: skip
    """Return dlogits [M, V] for upstream gradients [M], of which None means zeros, also for the loss."""
    if upstream.loss is None:
        upstream = upstream._replace(loss=scales.new_zeros(()))
    out = logits.new_empty(logits.shape)
    columns = shard if shard.group_name else None
    return gradient(logits, target, weight, scales, saved, upstream, options, out=out, shard=columns)


class _CrossEntropy(Node):
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options,
        in_place: bool, wants: Wants, shard: Shard,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        keep_none_gradients(ctx)
        if in_place:
            result = statistics(logits, target, weight, scales, options, wants, with_gradient=True)
            # An earlier op that saved the logits for its backward must notice the change.
            torch.autograd.graph.increment_version(logits)
            ctx.save_for_backward(logits.detach())
        else:
            result = cross_entropy_forward(logits, target, weight, scales, options, wants, shard)
            ctx.save_for_backward(logits, target, weight, scales, result.lse, result.log_probs, result.entropy)
        ctx.options, ctx.wants, ctx.in_place, ctx.shard = options, wants, in_place, shard
        ctx.mark_non_differentiable(result.z_loss, result.predicted)
        return result.loss, result.z_loss, result.predicted, result.log_probs, result.entropy

    def backward(
        ctx: Any, dloss: Tensor | None, _dz_loss: None, _dpredicted: None, dlog_probs: Tensor | None,
        dentropy: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if ctx.in_place:
            (dlogits,) = ctx.saved_tensors
            assert dloss is not None
            dlogits = rescaled(dlogits, dloss)
        else:
            logits, target, weight, scales, *statistics = ctx.saved_tensors
            wants = ctx.wants
            upstream = Upstream(dloss, dlog_probs if wants.log_probs else None, dentropy if wants.entropy else None)
            saved = SavedStatistics(*statistics)
            dlogits = cross_entropy_backward(logits, target, weight, scales, saved, upstream, ctx.options, ctx.shard)
        return (dlogits,)


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int | None = -100,
    reduction: Reduction = "mean", label_smoothing: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    z_loss: float = 0.0, token_scaling: bool = False, num_items: Tensor | float | None = None, inplace: bool = False,
    return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    return_log_probs: bool = False, return_entropy: bool = False,
    process_group: "torch.distributed.ProcessGroup | None" = None, vocab_size: int | None = None,
) -> Tensor | LossOutput:  # fmt: skip
    """Return the cross entropy of logits and class indices, in fp32 for every dtype of the logits.

    Args:
        input: [..., V] logits, fp32 | bf16 | fp16.
        target: [...] class indices, int64 | int32.
        weight: [V] class weights.
        ignore_index: Targets of this value have loss and gradient zero. None means -100, as in torch.
        reduction: "none" for [...], "sum", or "mean": over the valid targets, by their class weights as in torch.
        label_smoothing: In [0, 1]: the share of the target that is spread over all classes.
        softcap: Logits become `softcap * tanh(logits / softcap)` (Gemma 2), after `logit_scale`.
        logit_scale: Multiplies the logits (Cohere; the reciprocal of a temperature).
        z_loss: Adds `z_loss * logsumexp(logits)^2` to each token's loss (PaLM); its mean is over the valid targets.
        token_scaling: Multiplies each token's loss, including its z-loss, by the probability of the target as a
            constant (dynamic fine-tuning, DFT).
        num_items: The divisor of a mean, a number or a tensor (Hugging Face's `num_items_in_batch`), in place of the
            number of valid targets; 0 gives 0. Pass a tensor under `torch.compile`, which compiles again for each new
            number.
        inplace: Allow the forward pass to overwrite `input` with its gradient, if it needs one. The memory is not
            reused under `torch.compile`, if `input` is not dense, for fp16 (whose gradients need the loss scale, known
            only in backward), or with log-probabilities or the entropy (whose gradients need the logits).
        return_z_loss: Also return the z-loss, reduced like the loss.
        return_token_accuracy: Also return the share of valid tokens whose largest logit is that of the target.
        return_predicted_tokens: Also return the argmax of the logits, shaped as the target, -1 for ignored targets.
        return_log_probs: Also return log p(target), shaped as the target, 0 for ignored targets. The probability is
            that of the logits after `logit_scale` and `softcap`, without class weights and label smoothing. It is
            differentiable.
        return_entropy: Also return the entropy of these probabilities in nats, shaped as the target, 0 for ignored
            targets. Classes of probability 0 add 0. It is differentiable.
        process_group: The ranks that share the vocabulary, in the order of its columns (Megatron's vocabulary-parallel
            cross entropy). `input` has the columns of this rank, and all ranks have the same other arguments: `target`
            has indices of the whole vocabulary, and `weight` has all V class weights. Every rank gets all results and
            the gradient of its columns. All ranks must call the loss; backward does not communicate. `inplace` has no
            effect.
        vocab_size: V, required with a process_group. Each rank has V / ranks columns, rounded up, and the last ranks
            have the remaining columns.

    Returns:
        The loss in fp32, or a `LossOutput` if a further result is requested. A mean over no valid target is 0.
        A target that is neither in [0, V) nor `ignore_index` makes its loss, its log-probability and its row of the
        gradient NaN, on every device. The host does not wait for the GPU to find such a target.

    Raises:
        TypeError: `input` is not a floating-point tensor, `target` is not an integer tensor, or an option is not a
            number.
        ValueError: Shapes or devices do not match, or an option is out of range.

    Source: label smoothing, Szegedy et al., arXiv:1512.00567; z-loss, Chowdhery et al., arXiv:2204.02311; soft cap,
    Gemma 2, arXiv:2408.00118; token scaling, Wu et al., arXiv:2508.05629; the sharded vocabulary, Shoeybi et al.,
    "Megatron-LM", arXiv:1909.08053.

    Example:
        >>> logits, target = torch.randn(4, 10), torch.tensor([1, 2, -100, 9])
        >>> tigon.cross_entropy(logits, target, label_smoothing=0.1).shape
        torch.Size([])
    """
    op = "cross_entropy"
    checks.tensor(op, input=input, target=target)
    checks.floating(op, input=input)
    checks.flag(op, inplace=inplace)
    requested = requested_results(
        op, return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, return_log_probs=return_log_probs,
        return_entropy=return_entropy,
    )  # fmt: skip
    for name, x in (("input", input), ("target", target)):
        if hasattr(x, "placements"):
            raise ValueError(
                f"{op}: {name} must not be a DTensor, got {x.placements}: pass {name}.to_local(), and for logits that "
                "are sharded by columns also process_group and vocab_size"
            )
    # A rank may have no columns, if there are fewer classes than ranks.
    if input.dim() == 0 or (input.shape[-1] == 0 and process_group is None):
        raise ValueError(f"{op}: input must have shape (..., V) with V > 0, got {tuple(input.shape)}")
    v = input.shape[-1]
    checks.shape(op, "target", target, input.shape[:-1])
    shard = shard_of(op, process_group, v, vocab_size, "input", "columns")
    ignore_index = checks.ignore_index(op, -100 if ignore_index is None else ignore_index)
    options = loss_options(op, ignore_index, label_smoothing, softcap, logit_scale, z_loss, token_scaling)
    check_loss_arguments(op, shard.vocabulary, target, weight, reduction, num_items, input.device)
    logits, targets = input.reshape(target.numel(), v), as_targets(target, ignore_index)
    weight = None if weight is None else weight.detach().contiguous()
    in_place = inplace and torch.is_grad_enabled() and input.requires_grad and not torch.compiler.is_compiling()
    # The gradients of log-probabilities and of the entropy need the logits.
    in_place = in_place and not (return_log_probs or return_entropy or shard.group_name)
    in_place = in_place and logits.stride(-1) == 1 and logits.data_ptr() == input.data_ptr()
    # Each row needs memory of its own for its gradient.
    in_place = in_place and (len(logits) < 2 or logits.stride(0) >= v)
    # Small fp16 gradients need the loss scale, which is part of the upstream gradient.
    in_place = in_place and input.dtype != torch.float16
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_items, is_mean = as_scalar(num_items, input.device), reduction == "mean"
    scales = gradient_scales(targets, weight, num_items, shard.vocabulary, ignore_index, is_mean)
    results = _CrossEntropy.apply(logits, targets, weight, scales, options, in_place, requested.wants, shard)
    return loss_output(results, target, requested, ignore_index, reduction)


_MODULE_OPTIONS = (
    "softcap", "logit_scale", "z_loss", "token_scaling", "inplace", "process_group", "vocab_size", *RESULT_OPTIONS,
)  # fmt: skip


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """Compute `cross_entropy` as a module with the constructor of `torch.nn.CrossEntropyLoss` and further options.

    The classes are in the last dimension, also for inputs whose classes torch's module expects in the second.

    Args:
        weight: [V] class weights.
        ignore_index: Targets of this value have loss and gradient zero.
        reduction: "none" | "mean" | "sum".
        label_smoothing: In [0, 1]: the share of the target that is spread over all classes.
        **options: `softcap`, `logit_scale`, `z_loss`, `token_scaling`, `inplace`, `process_group`, `vocab_size` and
            `return_...` of `cross_entropy`.

    Raises:
        TypeError: `weight` is not a floating-point tensor.
        ValueError: An option has another name. The module checks values when it is called.

    Example:
        >>> loss = tigon.CrossEntropyLoss(softcap=30.0)
        >>> loss(torch.randn(4, 10), torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(
        self, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: Reduction = "mean",
        label_smoothing: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        checks.floating("CrossEntropyLoss", weight=weight)
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        for name in options:
            checks.choice("CrossEntropyLoss", "an option", name, _MODULE_OPTIONS)
        self.options = options

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor, num_items: Tensor | float | None = None
    ) -> Tensor | LossOutput:
        """Return `cross_entropy` of input [..., V] and target [...]."""
        return cross_entropy(
            input, target, self.weight, ignore_index=self.ignore_index, reduction=cast(Reduction, self.reduction),
            label_smoothing=self.label_smoothing, num_items=num_items, **self.options,
        )  # fmt: skip
