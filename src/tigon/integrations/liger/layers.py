"""Modules with the constructors and the order of arguments of Liger's, on the ops of Tigon."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.ops.head.linear_cross_entropy import linear_cross_entropy
from tigon.ops.logits.cross_entropy import cross_entropy
from tigon.ops.norms.rms_norm import add_rms_norm, rms_norm

ROUNDING = {"llama": "before_weight", "gemma": "after_weight", "none": "after_weight"}


class CrossEntropyOutput(NamedTuple):
    """The loss, and the values that the options of the loss request; the others are None."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def to_output(result: Any, dtype: torch.dtype, z_loss_dtype: torch.dtype) -> Any:
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


class _Norm(nn.Module):
    weight: nn.Parameter | None

    def __init__(self, hidden_size: int, eps: float, offset: float, casting_mode: str, init_fn: str) -> None:
        super().__init__()
        name = type(self).__name__
        if init_fn not in ("ones", "zeros"):
            raise ValueError(f"{name}: init_fn must be 'ones' or 'zeros', got {init_fn!r}")
        if casting_mode not in ROUNDING:
            raise ValueError(f"{name}: casting_mode must be one of {', '.join(ROUNDING)}, got {casting_mode!r}")
        self.weight = nn.Parameter(torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size))
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode

    @property
    def options(self) -> dict[str, Any]:
        """The options of `tigon.rms_norm`."""
        return {"eps": self.variance_epsilon, "offset": self.offset, "rounding": ROUNDING[self.casting_mode]}


class LigerRMSNorm(_Norm):
    """`tigon.rms_norm`. It writes to no input, whatever `in_place` is; `row_mode` has no effect."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, row_mode: bool | None = None, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)
        if not elementwise_affine:
            self.weight = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the norm over the last dimension, in the dtype of the input."""
        return rms_norm(hidden_states, self.weight, **self.options).to(hidden_states.dtype)


class LigerFusedAddRMSNorm(_Norm):
    """`tigon.add_rms_norm`: returns the norm of the sum, and the sum."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, and the sum."""
        return add_rms_norm(hidden_states, residual, self.weight, **self.options)


class _Loss(nn.Module):
    """Keeps the options of a loss under the names of Tigon."""

    def __init__(
        self, ignore_index: int, lse_square_scale: float, label_smoothing: float, reduction: str,
        softcap: float | None, return_z_loss: bool, return_token_accuracy: bool, return_predicted_tokens: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index, "z_loss": lse_square_scale, "label_smoothing": label_smoothing,
            "reduction": reduction, "softcap": softcap, "return_z_loss": return_z_loss,
            "return_token_accuracy": return_token_accuracy, "return_predicted_tokens": return_predicted_tokens,
        }  # fmt: skip


class LigerCrossEntropyLoss(_Loss):
    """`tigon.cross_entropy` of logits [T, V] and targets [T], rounded to the dtype of the logits."""

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
            return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        self.weight = weight

    def forward(self, _input: Tensor, target: Tensor) -> Any:
        """Return the loss, or a `CrossEntropyOutput` if more was requested.

        Raises:
            AssertionError: A target is neither a class nor `ignore_index`. As in Liger, the check waits for the device.
                Inside a CUDA graph and in compiled code there is none, and the loss of that target is NaN.
        """
        result = cross_entropy(_input, target, self.weight, **self.options)
        _check_targets(target, self.options["ignore_index"], _input.shape[-1])
        return to_output(result, _input.dtype, _input.dtype)


class LigerFusedLinearCrossEntropyLoss(_Loss):
    """`tigon.linear_cross_entropy`, with the weight [V, H] of the head before the hidden states [T, H]."""

    def __init__(
        self, ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
            return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        self.ce_weight = ce_weight
        self.options |= {"acc_dtype": accum_dtype, "token_scaling": use_token_scaling}

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        """Return the loss, or a `CrossEntropyOutput` if more was requested."""
        result = linear_cross_entropy(
            _input, lin_weight, target, linear_bias=bias, weight=self.ce_weight, **self.options
        )
        # Liger sums this loss in fp32, and its z-loss in the dtype of the hidden states.
        return to_output(result, torch.float32, _input.dtype)
