r"""Cross entropy of logits, with the options that language models use; the maths stands in `token_loss`.

Two ways to the gradient. By default the forward pass keeps the logits and two numbers a row (lse), and backward writes
the gradient to a new buffer. With `inplace=True` the forward pass writes the gradient over the logits, and backward
only hands it on: half the memory, and for vocabularies that fit on the chip one trip less.

Shapes: M tokens (all leading dimensions), V vocabulary.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from tigon.ops.logits.rescale import rescaled
from tigon.ops.logits.token.kernels import (
    Options,
    Statistics,
    Upstream,
    Wants,
    empty_statistics,
    gradient,
    gradient_scales,
    statistics,
)
from tigon.ops.logits.valid_rows import as_targets
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, leave_absent
from tigon.runtime.launch import launcher

__all__ = ["CrossEntropyLoss", "LossOutput", "Reduction", "cross_entropy", "cross_entropy_reference"]

Reduction = Literal["none", "mean", "sum"]


class LossOutput(NamedTuple):
    """A loss with what was asked for beside it; the other fields are None.

    `loss`, `log_probs` and `entropy` carry gradients.
    """

    loss: Tensor
    z_loss: Tensor | None = None  # the part of `loss` that the z-loss is, reduced like it
    token_accuracy: Tensor | None = None  # fp32 scalar: the share of valid tokens whose largest logit is the target's
    predicted_tokens: Tensor | None = None  # int64, shaped as the target: the argmax; -1 where ignored
    log_probs: Tensor | None = None  # fp32, shaped as the target: log of its probability; 0 where ignored
    entropy: Tensor | None = None  # fp32, shaped as the target: of the probabilities, in nats; 0 where ignored


# --- reference -----------------------------------------------------------------------------------


def _transformed_reference(logits: Tensor, softcap: float | None, logit_scale: float) -> Tensor:
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def cross_entropy_reference(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    token_scaling: bool = False,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Eager definition of `cross_entropy`, differentiated by autograd: the tests' ground truth."""
    x = _transformed_reference(input, softcap, logit_scale)
    v = x.shape[-1]
    w = x.new_ones(v) if weight is None else weight.to(x.dtype)
    log_p, lse, valid = torch.log_softmax(x, -1), torch.logsumexp(x, -1), target != ignore_index
    inside = (target >= 0) & (target < v)
    safe = target.where(inside, 0)
    w_t = w[safe].where(inside | ~valid, torch.nan)  # an ignored target may stand outside [0, V)
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
    """Eager definition of what `cross_entropy` returns by these names."""
    log_p, valid = torch.log_softmax(_transformed_reference(input, softcap, logit_scale), -1), target != ignore_index
    inside = (target >= 0) & (target < log_p.shape[-1])
    log_p_t = log_p.gather(-1, target.where(inside, 0)[..., None])[..., 0].where(inside, torch.nan)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)  # p log p is 0 where p is
    return log_p_t.where(valid, 0.0), entropy.where(valid, 0.0)


# --- launchers (2-D in, no autograd) -------------------------------------------------------------


def _fake_forward(logits, target, weight, scales, *arguments):
    return tuple(empty_statistics(logits, Options(*arguments[:-4]), Wants(*arguments[-4:])))


@launcher(fake=_fake_forward)
def cross_entropy_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor,
    ignore_index: int, smoothing: float, softcap: float | None, logit_scale: float, z: float, token_scaling: bool,
    wants_z_loss: bool, wants_predicted: bool, wants_log_probs: bool, wants_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [M, V] -> `Statistics`."""
    options = Options(ignore_index, smoothing, softcap, logit_scale, z, token_scaling)
    wants = Wants(wants_z_loss, wants_predicted, wants_log_probs, wants_entropy)
    return tuple(statistics(logits, target, weight, scales, options, wants))


@launcher(fake=lambda logits, *arguments: logits.new_empty(logits.shape))
def cross_entropy_backward(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, lse: Tensor,
    log_probs: Tensor | None, entropy: Tensor | None,
    dloss: Tensor | None, dlog_probs: Tensor | None, dentropy: Tensor | None,
    ignore_index: int, smoothing: float, softcap: float | None, logit_scale: float, z: float, token_scaling: bool,
) -> Tensor:  # fmt: skip
    """logits [M, V], lse [M, 2], gradients [M] or None for zeros -> dlogits [M, V]."""
    options = Options(ignore_index, smoothing, softcap, logit_scale, z, token_scaling)
    found = Statistics(None, lse, None, None, log_probs, entropy)
    upstream = Upstream(lse.new_zeros(()) if dloss is None else dloss, dlog_probs, dentropy)
    return gradient(logits, target, weight, scales, found, upstream, options, out=logits.new_empty(logits.shape))


# --- autograd ------------------------------------------------------------------------------------


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, weight, scales, options, in_place, wants):
        leave_absent(ctx)
        if in_place:
            found = statistics(logits, target, weight, scales, options, wants, True)
            torch.autograd.graph.increment_version(logits)  # whoever saved the logits for backward hears of it
            ctx.save_for_backward(logits.detach())
        else:
            found = Statistics(*cross_entropy_forward(logits, target, weight, scales, *options, *wants))
            ctx.save_for_backward(logits, target, weight, scales, found.lse, found.log_probs, found.entropy)
        ctx.options, ctx.wants, ctx.in_place = options, wants, in_place
        ctx.mark_non_differentiable(found.z_loss, found.predicted)
        return found.loss, found.z_loss, found.predicted, found.log_probs, found.entropy

    @staticmethod
    @first_order
    def backward(ctx, dloss, dz_loss, dpredicted, dlog_probs, dentropy):
        if ctx.in_place:
            (dlogits,) = ctx.saved_tensors
            dlogits = rescaled(dlogits, dloss)
        else:
            upstream = dloss, dlog_probs if ctx.wants.log_probs else None, dentropy if ctx.wants.entropy else None
            dlogits = cross_entropy_backward(*ctx.saved_tensors, *upstream, *ctx.options)
        return dlogits, *[None] * 6


# --- public --------------------------------------------------------------------------------------


def check_loss_arguments(
    op: str, vocabulary: int, target: Tensor, weight: Tensor | None, reduction: str,
    num_items: Tensor | float | None, device: torch.device,
) -> None:  # fmt: skip
    """The rules that both losses share."""
    checks.integer(op, target=target)
    checks.choice(op, "reduction", reduction, ("none", "mean", "sum"))
    if target.device != device:
        raise ValueError(f"{op}: target must be on {device}, as the input is, got {target.device}")
    if weight is not None:
        checks.floating(op, weight=weight)
        checks.shape(op, "weight", weight, (vocabulary,))
        if weight.device != device:
            raise ValueError(f"{op}: weight must be on {device}, as the input is, got {weight.device}")
        if weight.requires_grad:
            raise ValueError(f"{op}: weight must not require gradients: none flows to class weights")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"{op}: num_items divides a mean, but reduction is {reduction!r}")
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"{op}: num_items must be a number or one element, got shape {tuple(num_items.shape)}")
        if num_items.dtype == torch.bool or num_items.is_complex():
            raise TypeError(f"{op}: num_items must be a number, got a tensor of {num_items.dtype}")
        if num_items.is_meta and device.type != "meta":
            raise ValueError(f"{op}: num_items must be on {device}, as the input is, got meta")
    elif num_items is not None:
        checks.number(op, "num_items", num_items, 0.0)


def loss_options(
    op: str, ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    token_scaling: bool = False,
) -> Options:  # fmt: skip
    """The options, checked."""
    checks.flag(op, token_scaling=token_scaling)
    return Options(
        ignore_index,
        checks.number(op, "label_smoothing", label_smoothing, 0.0, 1.0),
        None if softcap is None else checks.number(op, "softcap", softcap, 0.0, above=True),
        checks.number(op, "logit_scale", logit_scale),
        checks.number(op, "z_loss", z_loss, 0.0),
        token_scaling,
    )


def as_scalar(num_items: Tensor | float | None, device: torch.device) -> Tensor | None:
    """`num_items` as a tensor [] on the device; no wait in either direction."""
    if num_items is None:
        return None
    if isinstance(num_items, Tensor):
        return num_items.detach().reshape(()).to(device, non_blocking=device.type != "cpu")
    return torch.full((), float(num_items), dtype=torch.float32, device=device)


def loss_output(
    losses: Tensor, z_losses: Tensor, predicted: Tensor, target: Tensor, ignore_index: int, reduction: str,
    return_z_loss: bool, return_token_accuracy: bool, return_predicted_tokens: bool,
    log_probs: Tensor | None = None, entropy: Tensor | None = None,
) -> Tensor | LossOutput:  # fmt: skip
    """Per-token results [M], reduced and shaped as the target, and only what was asked for (the last two: None)."""
    reduced = lambda values: values.view(target.shape) if reduction == "none" else values.sum()
    shaped = lambda values: None if values is None else values.view(target.shape)
    loss = losses if losses.dim() == 0 else reduced(losses)
    beside = return_z_loss or return_token_accuracy or return_predicted_tokens
    if not beside and log_probs is None and entropy is None:
        return loss
    accuracy = None
    if return_token_accuracy:
        target = as_targets(target, ignore_index).view(target.shape)
        valid = target != ignore_index
        right = valid & (predicted.view(target.shape) == target)
        accuracy = right.sum() / valid.sum().clamp(min=1)
    return LossOutput(
        loss,
        reduced(z_losses) if return_z_loss else None,
        accuracy,
        shaped(predicted) if return_predicted_tokens else None,
        shaped(log_probs),
        shaped(entropy),
    )


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    token_scaling: bool = False,
    num_items: Tensor | float | None = None,
    inplace: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_log_probs: bool = False,
    return_entropy: bool = False,
) -> Tensor | LossOutput:
    """Cross entropy of logits and class indices, in fp32 whatever the dtype of the logits.

    Args:
        input: [..., V] logits, fp32 | bf16 | fp16.
        target: [...] class indices, int64 | int32.
        weight: [V] class weights.
        ignore_index: Targets of this value have no loss and gradient zero; None is -100, as in torch.
        reduction: "none" for [...], "sum", or "mean": over the valid targets, by their class weights as in torch.
        label_smoothing: In [0, 1]: the share of the target that is spread over all classes.
        softcap: Logits become `softcap * tanh(logits / softcap)` (Gemma 2), after `logit_scale`.
        logit_scale: Multiplies the logits (Cohere; the reciprocal of a temperature).
        z_loss: Adds `z_loss * logsumexp(logits)^2` to each token's loss (PaLM); its mean is over the valid targets.
        token_scaling: Multiplies each token's loss, z-loss included, by the probability of its target, as a constant
            (dynamic fine-tuning, DFT).
        num_items: What a mean divides by instead, a number or a tensor (Hugging Face's `num_items_in_batch`); 0 gives
            0. Under `torch.compile` a tensor, because each new number compiles anew.
        inplace: Allow the gradient to overwrite `input` in the forward pass, if it needs one. A permission: under
            `torch.compile`, for fp16 (whose gradients need the loss scale that backward brings), where `input` is not
            dense, or with log-probabilities or the entropy (whose gradients need the logits), memory is not reused.
        return_z_loss: Also return the z-loss, reduced like the loss.
        return_token_accuracy: Also return the share of valid tokens whose largest logit is the target's.
        return_predicted_tokens: Also return the argmax, shaped as the target, -1 where ignored.
        return_log_probs: Also return log p(target), shaped as the target, 0 where ignored; of the logits after
            `logit_scale` and `softcap`, without class weights and label smoothing. Differentiable.
        return_entropy: Also return the entropy of these probabilities in nats, shaped as the target, 0 where ignored;
            what has probability 0 adds 0. Differentiable.

    Returns:
        The loss, fp32; or a `LossOutput` if anything is asked for beside it. A mean over no valid target is 0.
        A target that is neither in [0, V) nor `ignore_index` makes its loss and its log-probability NaN, and its row
        of the gradient, on every device; nothing waits for the GPU to find it.

    Raises:
        TypeError: `input` is no floating-point tensor, `target` no integer tensor, or an option no number.
        ValueError: Shapes or devices do not fit, or an option is out of range.

    Source: label smoothing, Szegedy et al., arXiv:1512.00567; z-loss, Chowdhery et al., arXiv:2204.02311; soft cap,
    Gemma 2, arXiv:2408.00118; token scaling, Wu et al., arXiv:2508.05629.

    Example:
        >>> logits, target = torch.randn(4, 10), torch.tensor([1, 2, -100, 9])
        >>> tigon.cross_entropy(logits, target, label_smoothing=0.1).shape
        torch.Size([])
    """
    op = "cross_entropy"
    checks.tensor(op, input=input, target=target)
    checks.floating(op, input=input)
    checks.flag(
        op, inplace=inplace, return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, return_log_probs=return_log_probs,
        return_entropy=return_entropy,
    )  # fmt: skip
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"{op}: input must have shape (..., V) with V > 0, got {tuple(input.shape)}")
    v = input.shape[-1]
    checks.shape(op, "target", target, input.shape[:-1])
    ignore_index = checks.ignore_index(op, -100 if ignore_index is None else ignore_index)
    options = loss_options(op, ignore_index, label_smoothing, softcap, logit_scale, z_loss, token_scaling)
    check_loss_arguments(
        op, v, target, weight, reduction, num_items, input.device
    )  # fmt: skip
    logits, targets = input.reshape(-1, v), as_targets(target, ignore_index)
    weight = None if weight is None else weight.detach().contiguous()
    in_place = inplace and torch.is_grad_enabled() and input.requires_grad and not torch.compiler.is_compiling()
    in_place = in_place and not (return_log_probs or return_entropy)  # whose gradients need the logits
    in_place = in_place and logits.stride(-1) == 1 and logits.data_ptr() == input.data_ptr()
    in_place = in_place and (len(logits) < 2 or logits.stride(0) >= v)  # rows that share memory cannot each have theirs
    in_place = (
        in_place and input.dtype != torch.float16
    )  # whose small gradients live by the loss scale that comes later
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    scales = gradient_scales(targets, weight, as_scalar(num_items, input.device), v, ignore_index, reduction == "mean")
    wants = Wants(return_z_loss, return_token_accuracy or return_predicted_tokens, return_log_probs, return_entropy)
    losses, z_losses, predicted, log_probs, entropy = _CrossEntropy.apply(
        logits, targets, weight, scales, options, in_place, wants
    )
    return loss_output(
        losses, z_losses, predicted, target, ignore_index, reduction,
        return_z_loss, return_token_accuracy, return_predicted_tokens,
        log_probs if return_log_probs else None, entropy if return_entropy else None,
    )  # fmt: skip


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` computed by `cross_entropy`, with its further options as keywords.

    Classes stand in the last dimension, also where torch's module takes them from the second.

    Args:
        weight: [V] class weights.
        ignore_index: Targets of this value do not count.
        reduction: "none" | "mean" | "sum".
        label_smoothing: In [0, 1].
        **options: `softcap`, `logit_scale`, `z_loss`, `token_scaling`, `inplace`, `return_...`, as `cross_entropy` has
            them.

    Example:
        >>> loss = tigon.CrossEntropyLoss(softcap=30.0)
        >>> loss(torch.randn(4, 10), torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        **options,
    ) -> None:
        checks.floating("CrossEntropyLoss", weight=weight)
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        known = ("softcap", "logit_scale", "z_loss", "token_scaling", "inplace", "return_z_loss")
        known += ("return_token_accuracy", "return_predicted_tokens", "return_log_probs", "return_entropy")
        for name in options:
            checks.choice("CrossEntropyLoss", "an option", name, known)
        self.options = options

    def forward(self, input: Tensor, target: Tensor, num_items: Tensor | float | None = None) -> Tensor | LossOutput:
        """input [..., V], target [...] -> as `cross_entropy`."""
        return cross_entropy(
            input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, num_items=num_items, **self.options,
        )  # fmt: skip
