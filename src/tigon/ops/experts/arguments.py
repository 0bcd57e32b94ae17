"""The arguments of ops that compute experts: the activations by name, the parameters, and their checks.

Shapes: T tokens, K choices each, E experts, H hidden, I intermediate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tigon.ops.mlps.activations import relu2, relu2_reference
from tigon.ops.mlps.glu import geglu, geglu_reference, swiglu, swiglu_reference
from tigon.runtime import checks

# For the name of each activation: the op, its reference, and the number of input features for each output feature. This
# number is 2 if gate and up are packed as [gate | up].
ACTIVATIONS: dict[str, tuple[Callable, Callable, int]] = {
    "silu": (swiglu, swiglu_reference, 2),
    "gelu": (geglu, geglu_reference, 2),
    "gelu_tanh": (lambda x: geglu(x, approximate="tanh"), lambda x: geglu_reference(x, approximate="tanh"), 2),
    "relu2": (relu2, relu2_reference, 1),
}


class ExpertParameters(NamedTuple):
    """The parameters of all experts. The weights are [E, out, in], or [E, in, out] if they are transposed."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


class ExpertOptions(NamedTuple):
    """The options of `moe_mlp` with an activation that has a name, `kind`."""

    kind: str
    transposed: bool
    weight_inputs: bool


class ExpertSizes(NamedTuple):
    """The sizes of experts: their number E, H, I, and the features of the result of the first product."""

    experts: int
    hidden: int
    inner: int
    width: int


def check_experts(
    op: str, x: Tensor, parameters: ExpertParameters, top_k_index: Tensor, top_k_weights: Tensor, transposed: bool,
    activation: str | Callable[[Tensor], Tensor],
) -> ExpertSizes:  # fmt: skip
    """Refuse bad arguments of `moe_mlp` or of an op that has its arguments too. Return the sizes."""
    up_proj, down_proj, up_bias, down_bias = parameters
    checks.tensor(op, x=x, up_proj=up_proj, down_proj=down_proj, top_k_weights=top_k_weights)
    checks.floating(op, x=x, up_proj=up_proj, down_proj=down_proj, top_k_weights=top_k_weights)
    checks.floating(op, up_bias=up_bias, down_bias=down_bias)
    checks.integer(op, top_k_index=top_k_index)
    checks.flag(op, transposed=transposed)
    if isinstance(activation, str):
        checks.choice(op, "activation", activation, tuple(ACTIVATIONS))
    elif not callable(activation):
        raise TypeError(f"{op}: activation must be a str or a function, got {type(activation).__name__}")
    if x.dim() != 2 or up_proj.dim() != 3 or down_proj.dim() != 3 or top_k_index.dim() != 2:
        shapes = ", ".join(str(tuple(y.shape)) for y in (x, up_proj, down_proj, top_k_index))
        raise ValueError(
            f"{op}: x, up_proj, down_proj and top_k_index must be [T, H], 3-D, 3-D and [T, K], got {shapes}"
        )
    experts, hidden, width = up_proj.shape if transposed else up_proj.mT.shape
    inner = (
        width // ACTIVATIONS[activation][2] if isinstance(activation, str) else down_proj.shape[1 if transposed else 2]
    )
    down = (inner, hidden) if transposed else (hidden, inner)
    checks.shape(op, "x", x, (x.shape[0], hidden))
    checks.shape(op, "down_proj", down_proj, (experts, *down))
    checks.shape(op, "top_k_index", top_k_index, (x.shape[0], top_k_index.shape[1]))
    checks.shape(op, "top_k_weights", top_k_weights, top_k_index.shape)
    if up_bias is not None:
        checks.shape(op, "up_bias", up_bias, (experts, width))
    if down_bias is not None:
        checks.shape(op, "down_bias", down_bias, (experts, hidden))
    checks.same(op, "dtype", up_proj=up_proj, down_proj=down_proj, up_bias=up_bias, down_bias=down_bias)
    checks.same(
        op, "device", x=x, up_proj=up_proj, down_proj=down_proj, top_k_index=top_k_index, top_k_weights=top_k_weights,
        up_bias=up_bias, down_bias=down_bias,
    )  # fmt: skip
    return ExpertSizes(experts, hidden, inner, width)


def check_activated(op: str, h: Any, shape: tuple[int, int]) -> Tensor:
    """Return the result of an activation that the caller has passed, or refuse it."""
    checks.tensor(op, **{"the result of activation": h})
    checks.shape(op, "the result of activation", h, shape)
    return h
