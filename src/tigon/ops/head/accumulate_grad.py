"""`accumulate_grad`: the forward pass adds dW to the existing gradient of the weight.

Autograd would write dW to a buffer of its own and then add it: V * H more values in memory, and three times the
traffic. But a dW that the forward pass has added cannot be scaled later, so the upstream gradient of the loss must be
one. Only the device knows the upstream gradient. If it is not one, a kernel makes the sum NaN, so that it is not
silently wrong.
"""

import warnings

import torch
from torch import Tensor

from tigon.ops.logits.rescale import rescale
from tigon.runtime import checks
from tigon.runtime.compat.autograd import backward_id, has_gradient_hooks

# A sample of a buffer has this many rows and columns, approximately.
SAMPLE_SIZE = 64


class AccumulatedGradient:
    """The gradient buffer of a weight [V, H], to which a forward pass adds dW. The buffer is `main_grad` if the weight
    has one, and `grad` otherwise."""

    def __init__(self, op: str, weight: Tensor, name: str, buffer: Tensor) -> None:
        self.op, self.weight, self.name, self.buffer = op, weight, name, buffer
        # A sample of the buffer that contains dW. It is set between the forward pass and its backward.
        self.sample: Tensor | None = None
        self.had_backward = False

    def __del__(self) -> None:
        if self.sample is not None and not self.had_backward:
            warnings.warn(
                f"{self.op}: a loss with accumulate_grad was dropped before its backward; {self.name} keeps its dW",
                RuntimeWarning,
                stacklevel=2,
            )

    def _current_sample(self) -> Tensor:
        rows = self.buffer[:: max(1, len(self.buffer) // SAMPLE_SIZE)]
        return rows[:, :: max(1, rows.shape[1] // SAMPLE_SIZE)]

    def record_sum(self) -> None:
        """Record that the buffer contains dW. Call this in forward."""
        self.sample = self._current_sample().clone()

    @property
    def _has_flag(self) -> bool:
        return self.name.endswith("main_grad") and hasattr(self.weight, "grad_added_to_main_grad")

    def set_flag(self) -> None:
        """Set the flag by which Megatron knows that dW is in `main_grad`."""
        if self._has_flag:
            self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]

    def gradient_for_autograd(self) -> Tensor | None:
        """Return the result of backward for the weight: zeros for Megatron, whose hooks need a tensor, or else None."""
        return self.weight.new_zeros(()).expand(self.weight.shape) if self._has_flag else None

    def check_unchanged(self) -> None:
        """Raise a RuntimeError if another gradient has replaced the buffer."""
        _, buffer = _buffer_of(self.weight)
        if buffer is None or buffer.data_ptr() != self.buffer.data_ptr():
            raise RuntimeError(
                f"{self.op}: {self.name}, to which accumulate_grad adds, was replaced between forward and backward: "
                "call zero_grad before the forward pass"
            )

    def make_nan_if_wrong(self, dloss: Tensor | None) -> None:
        """Make the buffer NaN in backward unless the upstream gradient [] is one and the buffer still contains dW. A
        second backward raises a RuntimeError."""
        if self.had_backward:
            raise RuntimeError(f"{self.op}: a loss with accumulate_grad has one backward, got a second one")
        self.had_backward = True
        assert self.sample is not None
        # The sample has become zero if the buffer was set to zero after the forward pass.
        is_right = (self._current_sample() != 0).any() | (self.sample == 0).all()
        is_right = is_right & (dloss == 1.0) if dloss is not None else torch.zeros_like(is_right)
        rescale(self.buffer, torch.where(is_right, 1.0, torch.nan))


def _buffer_of(weight: Tensor) -> tuple[str, Tensor | None]:
    """Return the name of the buffer in which the gradients of a weight are summed, and the buffer if there is one."""
    main_grad = getattr(weight, "main_grad", None)
    return ("linear_weight.grad", weight.grad) if main_grad is None else ("linear_weight.main_grad", main_grad)


def accumulated_gradient(op: str, weight: Tensor, acc_dtype: torch.dtype | None) -> AccumulatedGradient | None:
    """Return the buffer to which the forward pass adds dW, or None if the weight has no gradient yet, or needs none. A
    buffer that would not contain the sum of the gradients that autograd would pass on raises a ValueError."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    if hasattr(weight, "placements"):
        raise ValueError(
            f"{op}: accumulate_grad needs a linear_weight whose .grad is the whole gradient, got a DTensor with the "
            ".grad of a shard (FSDP2 reduces gradients over the ranks first): use accumulate_grad=False"
        )
    if not weight.is_leaf:
        raise ValueError(
            f"{op}: accumulate_grad needs a linear_weight that has a .grad (a leaf), got the result of an op"
        )
    if has_gradient_hooks(weight):
        raise ValueError(
            f"{op}: accumulate_grad needs a linear_weight without hooks on its gradient, got one with hooks, which "
            "would not be called"
        )
    name, buffer = _buffer_of(weight)
    if acc_dtype is not None and (weight if buffer is None else buffer).element_size() < acc_dtype.itemsize:
        raise ValueError(
            f"{op}: acc_dtype=float32 with accumulate_grad needs gradients in float32, got a linear_weight in "
            f"{weight.dtype} without such a main_grad"
        )
    if backward_id() != -1:
        # The first run of the forward pass has added dW already.
        if buffer is not None:
            rescale(buffer, buffer.new_full((), torch.nan))
        raise ValueError(
            f"{op}: accumulate_grad adds dW in the forward pass, which runs again here in backward (activation "
            f"checkpointing): call the loss outside of the checkpointed region; {name}, if there was one, is NaN now"
        )
    if buffer is None:
        return None
    checks.same(op, "device", **{"linear_weight": weight, name: buffer})
    checks.shape(op, name, buffer, weight.shape)
    is_dense = buffer.layout == torch.strided and buffer.is_contiguous()
    if not is_dense or buffer.dtype not in (weight.dtype, torch.float32):
        raise ValueError(
            f"{op}: accumulate_grad needs a dense {name} in {weight.dtype} or float32, "
            f"got {buffer.layout}, {buffer.dtype}, strides {buffer.stride()}"
        )
    return AccumulatedGradient(op, weight, name, buffer)
