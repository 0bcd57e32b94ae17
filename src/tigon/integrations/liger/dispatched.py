"""The 12 functions of `liger_kernel.functional`, with Liger's order of arguments, on Tigon's ops.

`impl`, `mode` and `backend` choose among Liger's kernels. They have no effect here: Tigon has one kernel for all of
them. `in_place` and `row_mode` have none either.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.integrations.liger import functional
from tigon.integrations.liger.layers import CrossEntropyOutput

__all__ = [
    "cross_entropy", "fused_add_rms_norm", "fused_linear_cross_entropy", "fused_linear_jsd", "geglu", "jsd", "kl_div",
    "layer_norm", "rms_norm", "rope", "softmax", "swiglu",
]  # fmt: skip

# The losses, the z-losses, the token accuracy and the predicted tokens.
Losses = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _accept_kernel_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the further options `impl`, `mode` and `backend`, which it ignores."""
    signature, names = inspect.signature(function), ("impl", "mode", "backend")
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for name in names:
            value = kwargs.pop(name, None)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{function.__name__}: {name} must be a string or None, got {type(value).__name__}")
        return function(*args, **kwargs)

    vars(wrapped)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *options])
    return wrapped


def to_tuple(result: Any) -> Losses:
    """Return the four values of a cross entropy. Values that were not requested are None."""
    if isinstance(result, CrossEntropyOutput):
        return (result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens)
    return (result, None, None, None)


@_accept_kernel_options
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = False, row_mode: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return `tigon.rms_norm` of x [..., H], in its dtype."""
    return functional.liger_rms_norm(x, weight, eps, offset, casting_mode)


@_accept_kernel_options
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Return `tigon.layer_norm` of x [..., H]."""
    return functional.liger_layer_norm(x, weight, torch.zeros_like(weight) if bias is None else bias, eps)


@_accept_kernel_options
def fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the norm of X + R, and the sum, by `tigon.add_rms_norm`."""
    return functional.liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


@_accept_kernel_options
def softmax(x: Tensor) -> Tensor:
    """Return `tigon.softmax` of x over the last dimension."""
    return functional.liger_softmax(x)


@_accept_kernel_options
def swiglu(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """Return silu(a * gate_multiplier) * b * down_multiplier, by `tigon.swiglu`."""
    gate = a if gate_multiplier == 1.0 else a * gate_multiplier
    product = functional.liger_swiglu(gate, b)
    return product if down_multiplier == 1.0 else product * down_multiplier


@_accept_kernel_options
def geglu(a: Tensor, b: Tensor) -> Tensor:
    """Return gelu_tanh(a) * b, by `tigon.geglu`."""
    return functional.liger_geglu(a, b)


@_accept_kernel_options
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Return `tigon.rope` of q and k [B, heads, L, D], each in its dtype. `position_ids` has no effect."""
    return functional.liger_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


@_accept_kernel_options
def jsd(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Return `tigon.jsd` of log-probabilities [N, V]."""
    return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


@_accept_kernel_options
def kl_div(
    y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """Return `tigon.kl_div` of log-probabilities [N, V]. `eps` has no effect."""
    return functional.liger_kl_div(y_pred, y_true, reduction=reduction, log_target=log_target)


@_accept_kernel_options
def fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return the generalised Jensen-Shannon divergence of two heads, by `tigon.linear_distillation`."""
    return functional.liger_fused_linear_jsd(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, temperature
    )


@_accept_kernel_options
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Losses:  # fmt: skip
    """Return `tigon.cross_entropy` of logits [T, V], with z-loss, token accuracy and predicted tokens or None."""
    return to_tuple(
        functional.liger_cross_entropy(
            input, target, weight, None, ignore_index, None, reduction, label_smoothing, lse_square_scale, softcap,
            return_z_loss, return_token_accuracy, return_predicted_tokens,
        )
    )  # fmt: skip


@_accept_kernel_options
def fused_linear_cross_entropy(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Losses:  # fmt: skip
    """Return `tigon.linear_cross_entropy` of hidden states [T, H] and a head [V, H], as `cross_entropy` does."""
    return to_tuple(
        functional.liger_fused_linear_cross_entropy(
            _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
            softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
        )
    )  # fmt: skip
