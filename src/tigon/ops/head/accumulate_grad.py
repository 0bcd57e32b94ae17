"""`accumulate_grad`: dW is added, in the forward pass, to the gradient that the weight already has.

Autograd would make dW a buffer of its own and add that: V * H more values held, and moved three times more. But what
is added in the forward pass cannot be scaled later, so the gradient that arrives must be one. Only the device knows it,
and where it is not one, it makes the sum NaN rather than leave it wrong.
"""

import warnings

import torch
from torch import Tensor

from tigon.ops.logits.rescale import rescale
from tigon.runtime import checks
from tigon.runtime.torch_private import backward_id

__all__ = ["AddedGradient", "added_gradient"]

SAMPLED_ROWS = 64


class AddedGradient:
    """A weight [V, H] and the buffer that its gradients are summed in: `main_grad` if it has one, else `grad`."""

    def __init__(self, op: str, weight: Tensor) -> None:
        self.op, self.weight = op, weight
        self.name, self.buffer = _sum_of(weight)
        self.sample = None  # of the buffer, with dW in it that no backward has confirmed
        self.spent = False

    def __del__(self) -> None:
        if self.sample is not None and not self.spent:
            warnings.warn(
                f"{self.op}: a loss with accumulate_grad was dropped before its backward; {self.name} keeps its dW",
                RuntimeWarning,
                stacklevel=2,
            )

    def _sampled(self) -> Tensor:
        rows = self.buffer[:: max(1, len(self.buffer) // SAMPLED_ROWS)]
        return rows[:, :: max(1, rows.shape[1] // SAMPLED_ROWS)]

    def added(self) -> None:
        """In forward, when dW is in the buffer."""
        self.sample = self._sampled().clone()

    @property
    def _is_megatrons(self) -> bool:
        return self.name.endswith("main_grad") and hasattr(self.weight, "grad_added_to_main_grad")

    def tell(self) -> None:
        """Megatron's protocol: dW is in main_grad."""
        if self._is_megatrons:
            self.weight.grad_added_to_main_grad = True

    def returned(self) -> Tensor | None:
        """What autograd gets for the weight. Megatron's hooks want to see a gradient: zeros, whether added or not."""
        return self.weight.new_zeros(()).expand(self.weight.shape) if self._is_megatrons else None

    def check_unchanged(self) -> None:
        _, now = _sum_of(self.weight)
        if now is None or now.data_ptr() != self.buffer.data_ptr():
            raise RuntimeError(
                f"{self.op}: {self.name}, to which accumulate_grad adds, was replaced between forward and backward: "
                "call zero_grad before the forward pass"
            )

    def settle(self, dloss: Tensor | None) -> None:
        """In backward, with the gradient that arrived [], if any did: NaN unless it is one."""
        if self.spent:
            raise RuntimeError(f"{self.op}: a loss with accumulate_grad has one backward: its dW is added already")
        self.spent = True
        right = (self._sampled() != 0).any() | (self.sample == 0).all()  # nobody has set it to zero since
        right = right & (dloss == 1.0) if dloss is not None else torch.zeros_like(right)
        rescale(self.buffer, torch.where(right, 1.0, torch.nan))


def _sum_of(weight: Tensor) -> tuple[str, Tensor | None]:
    main = getattr(weight, "main_grad", None)
    return ("linear_weight.grad", weight.grad) if main is None else ("linear_weight.main_grad", main)


def added_gradient(op: str, weight: Tensor, acc_dtype: torch.dtype | None) -> AddedGradient | None:
    """Where the forward pass may add dW; None if the weight has no gradient yet, or gets none.

    Raises:
        ValueError: The weight's gradient is not the sum of what autograd would be given.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    if hasattr(weight, "placements"):
        raise ValueError(
            f"{op}: accumulate_grad adds the whole dW, but linear_weight is a DTensor, whose .grad holds a shard "
            "(FSDP2 reduces gradients over the ranks first): leave accumulate_grad out"
        )
    if not weight.is_leaf:
        raise ValueError(
            f"{op}: accumulate_grad needs a linear_weight that has a .grad (a leaf), got the result of an op"
        )
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        raise ValueError(
            f"{op}: linear_weight has hooks that wait for its gradient, which accumulate_grad does not hand to autograd"
        )
    name, buffer = _sum_of(weight)
    if acc_dtype is not None and (weight if buffer is None else buffer).element_size() < acc_dtype.itemsize:
        raise ValueError(
            f"{op}: acc_dtype=float32 with accumulate_grad needs gradients in float32, got a linear_weight in "
            f"{weight.dtype} without such a main_grad"
        )
    if backward_id() != -1:
        if buffer is not None:
            rescale(buffer, buffer.new_full((), torch.nan))  # the first forward has added dW already
        raise ValueError(
            f"{op}: accumulate_grad adds dW in the forward pass, which runs again here in backward (activation "
            f"checkpointing): keep the loss out of the checkpointed region; {name}, if there was one, is NaN now"
        )
    if buffer is None:
        return None
    checks.same(op, "device", **{"linear_weight": weight, name: buffer})
    checks.shape(op, name, buffer, weight.shape)
    dense = buffer.layout == torch.strided and buffer.is_contiguous()
    if not dense or buffer.dtype not in (weight.dtype, torch.float32):
        raise ValueError(
            f"{op}: accumulate_grad needs a dense {name} in {weight.dtype} or float32, "
            f"got {buffer.layout}, {buffer.dtype}, strides {buffer.stride()}"
        )
    return AddedGradient(op, weight)
