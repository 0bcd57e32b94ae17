"""The functions of `liger_kernel.transformers.functional`, with Liger's order of arguments, on Tigon's ops.

Liger's options `in_place`, `eps` of the divergences, `chunk_mem_const`, `size_average` and `reduce` have no effect. A
function without `liger_` in its name serves functions, modules and autograd functions with different parameters.

Shapes: T or N tokens, V vocabulary, H features.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.integrations.liger.signatures import serve
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy
from tigon.ops.head.linear_distillation import linear_distillation
from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.logits import cross_entropy as logits_loss
from tigon.ops.logits.divergences import jsd, kl_div, tvd
from tigon.ops.mlps.glu import geglu, swiglu
from tigon.ops.norms.layer_norm import layer_norm
from tigon.ops.norms.rms_norm import add_rms_norm, rms_norm


class CrossEntropyOutput(NamedTuple):
    """The loss, and the values that the options of the loss request; the others are None."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def _to_output(result: Any, dtype: torch.dtype, z_loss_dtype: torch.dtype) -> Any:
    """Return a loss in a dtype, and a `tigon.LossOutput` as Liger's output with the loss and z-loss in both dtypes."""
    if isinstance(result, Tensor):
        return result.to(dtype)
    values: dict[str, Any] = {field: getattr(result, field, None) for field in CrossEntropyOutput._fields}
    values["loss"] = result.loss.to(dtype)
    if values["z_loss"] is not None:
        values["z_loss"] = values["z_loss"].to(z_loss_dtype)
    return CrossEntropyOutput(**values)


def _check_targets(target: Tensor, ignore_index: int, v: int) -> None:
    """Raise the error that programs written for Liger expect of a target that is no class."""
    if torch.compiler.is_compiling() or (target.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    is_wrong = (target != ignore_index) & ((target < 0) | (target >= v))
    if bool(is_wrong.any()):
        wrong = target[is_wrong][0].item()
        raise AssertionError(
            f"LigerCrossEntropyLoss: target {wrong} is out of bounds; it must be {ignore_index} or in [0, {v})"
        )


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, *, lse_square_scale: float, ignore_index: int, **options: Any
) -> Any:
    """Return `tigon.cross_entropy` of logits [T, V] in their dtype, or a `CrossEntropyOutput` if more was requested. As
    in Liger, the check of the targets waits for the device and raises AssertionError. In a CUDA graph and in compiled
    code there is no check, and the loss of a wrong target is NaN."""
    result = logits_loss.cross_entropy(
        input, target, weight, ignore_index=ignore_index, z_loss=lse_square_scale, **options
    )
    _check_targets(target, ignore_index, input.shape[-1])
    return _to_output(result, input.dtype, input.dtype)


liger_cross_entropy = serve(
    "liger_cross_entropy", cross_entropy,
    "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
    "label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, return_token_accuracy=False, "
    "return_predicted_tokens=False",
)  # fmt: skip


def fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ce_weight: Tensor | None, *,
    lse_square_scale: float, accum_dtype: torch.dtype | None, use_token_scaling: bool, **options: Any,
) -> Any:  # fmt: skip
    """Return `tigon.linear_cross_entropy` of hidden states [T, H] and a head [V, H], in fp32. The result is a
    `CrossEntropyOutput` if more than the loss was requested."""
    result = linear_cross_entropy(
        input, weight, target, linear_bias=bias, weight=ce_weight, z_loss=lse_square_scale, acc_dtype=accum_dtype,
        token_scaling=use_token_scaling, **options,
    )  # fmt: skip
    # Liger sums this loss in fp32, and its z-loss in the dtype of the hidden states.
    return _to_output(result, torch.float32, input.dtype)


liger_fused_linear_cross_entropy = serve(
    "liger_fused_linear_cross_entropy", fused_linear_cross_entropy,
    "input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, "
    "reduction='mean', softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, "
    "return_token_accuracy=False, return_predicted_tokens=False, chunk_mem_const=1",
)  # fmt: skip


def scaled_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, selected_token_ids: Tensor | None = None, group: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Return -log p(target) [T], and on request the entropy [T] and the log-probabilities of K tokens [T, K], in fp32.
    With a group, `weight` has the rows of this rank, and every rank has equally many."""
    ranks = 1 if group is None else group.size()
    sharding: dict[str, Any] = {"process_group": group, "vocab_size": ranks * weight.shape[0]} if ranks > 1 else {}
    extra_targets = None if selected_token_ids is None else selected_token_ids.expand(target.numel(), -1)
    result = linear_log_probs(hidden, weight, target, extra_targets=extra_targets, **options, **sharding)
    if isinstance(result, Tensor):
        return -result
    further = (result.entropy, result.extra_log_probs)
    return (-result.log_probs, *(value for value in further if value is not None))


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0, ignore_index: int = -100,
    tiles_per_reduce: int = 1, return_entropy: bool = False,
) -> Any:  # fmt: skip
    """Return -log p(target) [T], and the entropy on request, for a head whose rows are sharded over the group.
    `tigon.linear_log_probs` computes them. None as the group means all ranks. `tiles_per_reduce` has no effect."""
    if tp_group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        tp_group = torch.distributed.group.WORLD
    return scaled_cross_entropy(
        input, weight, target, temperature=temperature, ignore_index=ignore_index, return_entropy=return_entropy,
        group=tp_group,
    )  # fmt: skip


def check_smoothing(name: str, formula: str, mode: str) -> None:
    """Refuse an unknown formula or mode of label smoothing over shards of the vocabulary."""
    if formula not in ("pytorch", "megatron"):
        raise ValueError(f"{name}: label_smoothing_formula must be 'pytorch' or 'megatron', got {formula!r}")
    if mode not in ("global", "partition"):
        raise ValueError(f"{name}: label_smoothing_mode must be 'global' or 'partition', got {mode!r}")


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any, ignore_index: int, label_smoothing: float,
    label_smoothing_formula: str, label_smoothing_mode: str,
) -> Tensor:  # fmt: skip
    """Return `tigon.cross_entropy` [S, B] in fp32 of logits [S, B, V_p] whose columns are sharded over a group. The
    targets [S, B] are indices of the whole vocabulary. "megatron" spreads the smoothed share over the V - 1 other
    classes, "pytorch" over all V."""
    name = "LigerVocabParallelCEFunction"
    check_smoothing(name, label_smoothing_formula, label_smoothing_mode)
    if vocab_parallel_logits.dim() != 3:
        raise ValueError(
            f"{name}: vocab_parallel_logits must be 3-D, [S, B, V_p], got {tuple(vocab_parallel_logits.shape)}"
        )
    ranks = 1 if tp_group is None else tp_group.size()
    if label_smoothing and ranks > 1 and label_smoothing_mode == "partition":
        raise ValueError(
            f"{name}: label_smoothing_mode 'partition' gives each of the {ranks} ranks another loss and is not "
            "served; use 'global'"
        )
    v = ranks * vocab_parallel_logits.shape[-1]
    if label_smoothing_formula == "megatron":
        label_smoothing = label_smoothing * v / max(1, v - 1)
    sharding: dict[str, Any] = {"process_group": tp_group, "vocab_size": v} if ranks > 1 else {}
    losses = logits_loss.cross_entropy(
        vocab_parallel_logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none",
        **sharding,
    )  # fmt: skip
    assert isinstance(losses, Tensor)
    return losses


def check_temperature(name: str, temperature: float) -> None:
    """Refuse a temperature of zero, by which logits cannot be divided."""
    if temperature == 0:
        raise ValueError(f"{name}: temperature must not be 0")


def check_reduction(name: str, reduction: str) -> None:
    """Refuse a reduction that the divergence of a head does not have."""
    if reduction not in ("batchmean", "mean", "sum"):
        raise ValueError(f"{name}: reduction must be one of batchmean, mean, sum, got {reduction!r}")


def fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None, *, jsd_beta: float, temperature: float, ignore_index: int, accum_dtype: Any = None,
) -> Tensor:  # fmt: skip
    """Return the generalised Jensen-Shannon divergence of two heads, by `tigon.linear_distillation`. It is the mean
    over the tokens."""
    check_temperature("LigerFusedLinearJSD", temperature)
    loss = linear_distillation(
        student_input, student_weight, shift_labels, teacher_hidden=teacher_input, teacher_weight=teacher_weight,
        beta=jsd_beta, temperature=temperature, ignore_index=ignore_index, fp32_logits=True, acc_dtype=accum_dtype,
    )  # fmt: skip
    assert isinstance(loss, Tensor)
    return loss


liger_fused_linear_jsd = serve(
    "liger_fused_linear_jsd", fused_linear_jsd,
    "student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100, "
    "temperature=1.0, accum_dtype=None",
)  # fmt: skip


def fused_linear_kl_div(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None, *, reduction: str,
    ignore_index: int, temperature: float, accum_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Return KL(target || student) of a head [V, H] and probabilities [N, V], by `tigon.linear_distillation`."""
    check_temperature("LigerFusedLinearKLDivLoss", temperature)
    check_reduction("LigerFusedLinearKLDivLoss", reduction)
    loss = linear_distillation(
        # The temperature divides the logits of the student only.
        student_input, student_weight, shift_labels, teacher_probs=target, divergence="kl",
        logit_scale=1.0 / temperature, ignore_index=ignore_index, acc_dtype=accum_dtype,
        reduction="sum" if reduction == "sum" else "mean",
    )  # fmt: skip
    assert isinstance(loss, Tensor)
    return loss / len(student_weight) if reduction == "mean" else loss


liger_fused_linear_kl_div = serve(
    "liger_fused_linear_kl_div", fused_linear_kl_div,
    "student_input, student_weight, target, shift_labels=None, reduction='batchmean', ignore_index=-100, "
    "temperature=1.0, eps=1e-10, accum_dtype=None",
)  # fmt: skip


def fused_ce_tvd(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy and the total variation distance [N] of each token in fp32, from both logits [N, V]."""
    name = "LigerFusedCETVDLoss"
    if student_logits.dim() != 2 or student_logits.shape != teacher_logits.shape:
        shapes = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        raise ValueError(f"{name}: student_logits and teacher_logits must be 2D and of the same shape, got {shapes}")
    if target.shape != student_logits.shape[:1]:
        raise ValueError(f"{name}: target must have shape ({len(student_logits)},), got {tuple(target.shape)}")
    losses: Any = logits_loss.cross_entropy(student_logits, target, ignore_index=ignore_index, reduction="none")
    distances = tvd(
        student_logits, teacher_logits.detach(), reduction="none", from_logits=True, labels=target,
        ignore_index=ignore_index,
    )  # fmt: skip
    return losses, distances.sum(-1)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Return `tigon.jsd` of log-probabilities [N, V], the student's first, in the dtype of `input`."""
    return jsd(input, target, beta=beta, labels=shift_labels, ignore_index=ignore_index).to(input.dtype)


def liger_kl_div(
    input: Tensor, target: Tensor, size_average: Any = True, reduce: Any = True, reduction: Any = "mean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """Return `tigon.kl_div` of log-probabilities [N, V]. A probability of zero adds nothing, whatever `eps` is."""
    return kl_div(input, target, reduction=reduction, log_target=log_target)


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: Any = "mean",
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Return `tigon.tvd` of probabilities [N, V], half of the sum of absolute differences."""
    return tvd(input, target, reduction=reduction, labels=shift_labels, ignore_index=ignore_index)


def liger_swiglu(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """Return silu(a * gate_multiplier) * b * down_multiplier, by `tigon.swiglu`."""
    product = swiglu(a if gate_multiplier == 1.0 else a * gate_multiplier, b)
    return product if down_multiplier == 1.0 else product * down_multiplier


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """Return gelu_tanh(a) * b, by `tigon.geglu`."""
    return geglu(a, b, approximate="tanh")


ROUNDING = {"llama": "before_weight", "gemma": "after_weight", "none": "after_weight"}


def norm_options(casting_mode: str, eps: float, offset: float) -> dict[str, Any]:
    """Return the options of `tigon.rms_norm`."""
    if casting_mode not in ROUNDING:
        raise ValueError(f"liger_rms_norm: casting_mode must be one of {', '.join(ROUNDING)}, got {casting_mode!r}")
    return {"eps": eps, "offset": offset, "rounding": ROUNDING[casting_mode]}


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """Return `tigon.rms_norm` of X, in its dtype."""
    return rms_norm(X, W, **norm_options(casting_mode, eps, offset)).to(X.dtype)


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the norm of X + R, and the sum, by `tigon.add_rms_norm`."""
    return add_rms_norm(X, R, W, **norm_options(casting_mode, eps, offset))


def liger_modulated_rms_norm(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama", in_place: bool = True,
) -> Tensor:  # fmt: skip
    """Return (1 + scale) * norm(X) + shift in the dtype of X, as in diffusion transformers (arXiv:2212.09748). `scale`
    and `shift` are [H], one row for each sequence [B, H], or [..., H]."""
    y = liger_rms_norm(X, W, eps, offset, casting_mode)
    z = y * (1 + _broadcast("scale", scale, y))
    return (z if shift is None else z + _broadcast("shift", shift, y)).to(y.dtype)


def _broadcast(name: str, value: Tensor, like: Tensor) -> Tensor:
    """Return `value` in a shape that broadcasts to `like`: each of its rows serves as many adjacent rows as needed."""
    rows, width = like.numel() // like.shape[-1], like.shape[-1]
    count = value.numel() // width
    if value.shape[-1] != width or count == 0 or rows % count:
        shapes = f"{tuple(value.shape)} and {tuple(like.shape)}"
        raise ValueError(f"LigerModulatedRMSNorm: {name} must have a divisor of the rows of x, got {shapes}")
    return value.reshape(count, 1, width).expand(count, rows // count, width).reshape(like.shape)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor | None, eps: float) -> Tensor:
    """Return `tigon.layer_norm` of X."""
    return layer_norm(X, W, B, eps)


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor, affine_shifting_bias: Tensor, num_channels: int, num_groups: int,
    eps: float,
) -> Tensor:  # fmt: skip
    """Return the group norm of X [B, C, ...], a call of torch."""
    return F.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)
