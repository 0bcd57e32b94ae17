"""The functions of `liger_kernel.transformers.functional`, with Liger's order of arguments, on Tigon's ops.

Liger's options `in_place`, `eps` of the divergences, `chunk_mem_const`, `size_average` and `reduce` have no effect.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.integrations.liger import divergences, layers, rare
from tigon.ops.logits.jsd import jsd
from tigon.ops.logits.kl_div import kl_div
from tigon.ops.logits.softmax import softmax
from tigon.ops.logits.tvd import tvd
from tigon.ops.mlps.glu import geglu, swiglu
from tigon.ops.mlps.relu2 import relu2
from tigon.ops.norms.layer_norm import layer_norm
from tigon.ops.norms.rms_norm import add_rms_norm, rms_norm
from tigon.ops.rotary.rope import rope

__all__ = [
    "liger_cross_entropy", "liger_dyt", "liger_fused_add_rms_norm", "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd", "liger_fused_linear_kl_div", "liger_geglu", "liger_group_norm", "liger_jsd",
    "liger_kl_div", "liger_layer_norm", "liger_modulated_rms_norm", "liger_poly_norm", "liger_relu_squared",
    "liger_rms_norm", "liger_rope", "liger_softmax", "liger_sparsemax", "liger_swiglu", "liger_tvd",
]  # fmt: skip


# --- losses ----------------------------------------------------------------------------------------


def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0, lse_square_scale: float = 0.0,
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:  # fmt: skip
    """Return `tigon.cross_entropy` of logits [T, V], or a `CrossEntropyOutput` if more was requested."""
    module = layers.LigerCrossEntropyLoss(
        weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return module(input, target)


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Any:  # fmt: skip
    """Return `tigon.linear_cross_entropy` of hidden states [T, H] and a head [V, H]."""
    module = layers.LigerFusedLinearCrossEntropyLoss(
        ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype,
        use_token_scaling, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return module(weight, input, target, bias)


def liger_fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return the generalised Jensen-Shannon divergence of two heads, by `tigon.linear_distillation`."""
    module = divergences.LigerFusedLinearJSD(jsd_beta, ignore_index, temperature, accum_dtype)
    return module.forward(student_input, student_weight, teacher_input, teacher_weight, shift_labels)


def liger_fused_linear_kl_div(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
    reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return KL(target || student) of a head and probabilities [N, V], by `tigon.linear_distillation`."""
    module = divergences.LigerFusedLinearKLDivLoss(reduction, ignore_index, temperature, eps, accum_dtype)
    return module.forward(student_input, student_weight, target, shift_labels)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Return `tigon.jsd` of log-probabilities [N, V]."""
    return jsd(input, target, beta=beta, labels=shift_labels, ignore_index=ignore_index)


def liger_kl_div(
    input: Tensor, target: Tensor, size_average: Any = True, reduce: Any = True, reduction: str = "mean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """Return `tigon.kl_div` of log-probabilities [N, V]."""
    return kl_div(input, target, reduction=reduction, log_target=log_target)  # type: ignore[arg-type]


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Return `tigon.tvd` of probabilities [N, V]."""
    return tvd(input, target, reduction=reduction, labels=shift_labels, ignore_index=ignore_index)  # type: ignore[arg-type]


# --- activations -----------------------------------------------------------------------------------


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b, by `tigon.swiglu`."""
    return swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """Return gelu_tanh(a) * b, by `tigon.geglu`."""
    return geglu(a, b, approximate="tanh")


def liger_relu_squared(x: Tensor) -> Tensor:
    """Return `tigon.relu2` of x."""
    return relu2(x)


def liger_softmax(x: Tensor) -> Tensor:
    """Return `tigon.softmax` of x over the last dimension."""
    return softmax(x)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Return sparsemax over a dimension, a composition of torch."""
    return rare.LigerSparsemax(dim).forward(input)


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """Return gamma * tanh(alpha * x) + beta, a composition of torch."""
    y = gamma * torch.tanh(alpha * x)
    return y if beta is None else y + beta


# --- norms -----------------------------------------------------------------------------------------


def _norm_options(casting_mode: str, eps: float, offset: float) -> dict[str, Any]:
    if casting_mode not in layers.ROUNDING:
        raise ValueError(
            f"liger_rms_norm: casting_mode must be one of {', '.join(layers.ROUNDING)}, got {casting_mode!r}"
        )
    return {"eps": eps, "offset": offset, "rounding": layers.ROUNDING[casting_mode]}


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """Return `tigon.rms_norm` of X, in its dtype."""
    return rms_norm(X, W, **_norm_options(casting_mode, eps, offset)).to(X.dtype)


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the norm of X + R, and the sum, by `tigon.add_rms_norm`."""
    return add_rms_norm(X, R, W, **_norm_options(casting_mode, eps, offset))


def liger_modulated_rms_norm(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama", in_place: bool = True,
) -> Tensor:  # fmt: skip
    """Return (1 + scale) * norm(X) + shift."""
    return rare.modulate(liger_rms_norm(X, W, eps, offset, casting_mode), scale, shift)


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """Return W0 n(X^3) + W1 n(X^2) + W2 n(X) + B."""
    return rare.poly_norm(X, W, B, eps)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    """Return `tigon.layer_norm` of X."""
    return layer_norm(X, W, B, eps)


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor, affine_shifting_bias: Tensor, num_channels: int, num_groups: int,
    eps: float,
) -> Tensor:  # fmt: skip
    """Return the group norm of X [B, C, ...], a call of torch."""
    return F.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


# --- rotary embedding ------------------------------------------------------------------------------


def liger_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `tigon.rope` of q and k. `position_ids` has no effect, and `rotary_dim` is that of `cos`."""
    if rotary_dim is not None and rotary_dim != cos.shape[-1]:
        raise ValueError(f"liger_rope: rotary_dim must be the size of cos, {cos.shape[-1]}, got {rotary_dim}")
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
