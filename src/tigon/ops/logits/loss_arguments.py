"""The arguments and the results that `cross_entropy` and `linear_cross_entropy` share."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops.logits.token.kernels import Options, Wants
from tigon.ops.logits.valid_rows import as_targets
from tigon.runtime import checks

Reduction = Literal["none", "mean", "sum"]

# The options that request further results.
RESULT_OPTIONS = (
    "return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_log_probs", "return_entropy",
)  # fmt: skip


class LossOutput(NamedTuple):
    """A loss and the further results that were requested. The fields of other results are None.

    `loss`, `log_probs` and `entropy` are differentiable.
    """

    loss: Tensor
    z_loss: Tensor | None = None  # the part of `loss` that is the z-loss, reduced like the loss
    # fp32 scalar: the share of valid tokens whose largest logit is that of the target
    token_accuracy: Tensor | None = None
    # int64, shaped as the target: the argmax of the logits, -1 for ignored targets
    predicted_tokens: Tensor | None = None
    log_probs: Tensor | None = None  # fp32, shaped as the target: log p(target), 0 for ignored targets
    # fp32, shaped as the target: the entropy of the probabilities in nats, 0 for ignored targets
    entropy: Tensor | None = None


def check_loss_arguments(
    op: str, vocabulary: int, target: Tensor, weight: Tensor | None, reduction: str,
    num_items: Tensor | float | None, device: torch.device,
) -> None:  # fmt: skip
    checks.integer(op, target=target)
    checks.choice(op, "reduction", reduction, ("none", "mean", "sum"))
    if target.device != device:
        raise ValueError(f"{op}: target must be on {device} like the input, got {target.device}")
    if weight is not None:
        checks.floating(op, weight=weight)
        checks.shape(op, "weight", weight, (vocabulary,))
        if weight.device != device:
            raise ValueError(f"{op}: weight must be on {device} like the input, got {weight.device}")
        if weight.requires_grad:
            raise ValueError(f"{op}: weight must not require a gradient, because class weights get none")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"{op}: num_items needs reduction='mean', because it divides the sum, got {reduction!r}")
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"{op}: num_items must be a number or one element, got shape {tuple(num_items.shape)}")
        if num_items.dtype == torch.bool or num_items.is_complex():
            raise TypeError(f"{op}: num_items must be a number, got a tensor of {num_items.dtype}")
        if num_items.is_meta and device.type != "meta":
            raise ValueError(f"{op}: num_items must be on {device} like the input, got meta")
    elif num_items is not None:
        checks.number(op, "num_items", num_items, 0.0)


def loss_options(
    op: str, ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    token_scaling: bool = False,
) -> Options:  # fmt: skip
    checks.flag(op, token_scaling=token_scaling)
    return Options(
        ignore_index, checks.number(op, "label_smoothing", label_smoothing, 0.0, 1.0),
        None if softcap is None else checks.number(op, "softcap", softcap, 0.0, excludes_low=True),
        checks.number(op, "logit_scale", logit_scale), checks.number(op, "z_loss", z_loss, 0.0), token_scaling,
    )  # fmt: skip


def as_scalar(num_items: Tensor | float | None, device: torch.device) -> Tensor | None:
    """Return `num_items` as a tensor [] on the device. Neither the host nor the device waits for the other."""
    if num_items is None:
        return None
    if isinstance(num_items, Tensor):
        return num_items.detach().reshape(()).to(device, non_blocking=device.type != "cpu")
    return torch.full((), float(num_items), dtype=torch.float32, device=device)


class RequestedResults(NamedTuple):
    z_loss: bool
    token_accuracy: bool
    predicted_tokens: bool
    log_probs: bool
    entropy: bool

    @property
    def wants(self) -> Wants:
        """Return the values of tokens from which the results follow."""
        return Wants(self.z_loss, self.token_accuracy or self.predicted_tokens, self.log_probs, self.entropy)


def requested_results(op: str, **flags: bool) -> RequestedResults:
    checks.flag(op, **flags)
    return RequestedResults(*(flags[name] for name in RESULT_OPTIONS))


def loss_output(
    results: tuple[Tensor, ...], target: Tensor, requested: RequestedResults, ignore_index: int, reduction: str
) -> Tensor | LossOutput:
    """Return the loss, or a `LossOutput` with the requested results, reduced and shaped as the target. `results` are
    losses, z-losses, predictions, log-probabilities and entropies per token [M]; the losses may be []."""
    losses, z_losses, predicted, log_probs, entropy = results
    reduced = lambda values: values.view(target.shape) if reduction == "none" else values.sum()
    loss = losses if losses.dim() == 0 else reduced(losses)
    if not any(requested):
        return loss
    accuracy = None
    if requested.token_accuracy:
        target = as_targets(target, ignore_index).view(target.shape)
        valid = target != ignore_index
        is_correct = valid & (predicted.view(target.shape) == target)
        accuracy = is_correct.sum() / valid.sum().clamp(min=1)
    return LossOutput(
        loss=loss,
        z_loss=reduced(z_losses) if requested.z_loss else None,
        token_accuracy=accuracy,
        predicted_tokens=predicted.view(target.shape) if requested.predicted_tokens else None,
        log_probs=log_probs.view(target.shape) if requested.log_probs else None,
        entropy=entropy.view(target.shape) if requested.entropy else None,
    )
