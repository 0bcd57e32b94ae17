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
from tigon.integrations.liger.signatures import serve

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


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return `tigon.layer_norm` of x [..., H]."""
    return functional.liger_layer_norm(x, weight, torch.zeros_like(weight) if bias is None else bias, eps)


def _swiglu(a: Tensor, b: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """Return silu(a * gate_multiplier) * b * down_multiplier, by `tigon.swiglu`."""
    gate = a if gate_multiplier == 1.0 else a * gate_multiplier
    product = functional.liger_swiglu(gate, b)
    return product if down_multiplier == 1.0 else product * down_multiplier


def _serve(
    name: str, function: Callable[..., Any], parameters: str, renamed: dict[str, str] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    return _accept_kernel_options(serve(name, function, parameters, renamed, finish))


rms_norm = _serve(
    "rms_norm", functional.liger_rms_norm,
    "x, weight, eps=1e-6, *, offset=0.0, casting_mode='llama', in_place=False, row_mode=None",
    {"X": "x", "W": "weight"},
)  # fmt: skip
layer_norm = _serve("layer_norm", _layer_norm, "x, weight, bias=None, eps=1e-6")
fused_add_rms_norm = _serve(
    "fused_add_rms_norm", functional.liger_fused_add_rms_norm,
    "X, R, W, eps=1e-6, offset=0.0, casting_mode='llama', in_place=False",
)  # fmt: skip
softmax = _serve("softmax", functional.liger_softmax, "x")
swiglu = _serve("swiglu", _swiglu, "a, b, gate_multiplier=1.0, down_multiplier=1.0")
geglu = _serve("geglu", functional.liger_geglu, "a, b")
rope = _serve("rope", functional.liger_rope, "q, k, cos, sin, position_ids=None, unsqueeze_dim=1")
jsd = _serve(
    "jsd", functional.liger_jsd, "_input, target, shift_labels=None, beta=0.5, ignore_index=-100", {"input": "_input"}
)
kl_div = _serve(
    "kl_div", functional.liger_kl_div, "y_pred, y_true, reduction='batchmean', log_target=False, eps=1e-10",
    {"input": "y_pred", "target": "y_true"},
)  # fmt: skip
fused_linear_jsd = _serve(
    "fused_linear_jsd", functional.liger_fused_linear_jsd,
    "student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100, "
    "temperature=1.0",
)  # fmt: skip
LOSS_OPTIONS = (
    "ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False"
)
LOSS_RESULTS = "return_token_accuracy=False, return_predicted_tokens=False"
HEAD_PARAMETERS = (
    f"_input, weight, target, bias=None, ce_weight=None, {LOSS_OPTIONS}, accum_dtype=None, use_token_scaling=False, "
    f"{LOSS_RESULTS}"
)
cross_entropy = _serve(
    "cross_entropy", functional.liger_cross_entropy, f"input, target, weight=None, {LOSS_OPTIONS}, {LOSS_RESULTS}",
    finish=to_tuple,
)  # fmt: skip
fused_linear_cross_entropy = _serve(
    "fused_linear_cross_entropy",
    functional.liger_fused_linear_cross_entropy,
    HEAD_PARAMETERS,
    {"input": "_input"},
    to_tuple,
)
