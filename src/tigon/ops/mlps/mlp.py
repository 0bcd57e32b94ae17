r"""The MLP of two linear layers as one op, as in GPT-2, BERT and vision towers: y = act(x U^T + b) D^T + c.

    h = x U^T + b,  a = act(h),  y = a D^T + c
    da = dy D,  dh = da * act'(h)
    dD = dy^T a,  dc = sum_rows dy,  dU = dh^T x,  db = sum_rows dh,  dx = dh U

Autograd saves x, h and a, and further tensors if the activation is written as several torch operations (eight for the
tanh approximation of GPT-2). This node saves these tensors:

    by default                 x and h. The kernel that computes dh also recomputes a, into the memory of da.
    in `lean(mlp=True)`        x. The product of h is repeated.
    in a checkpointed layer    x and h, but before act(h) and the last product are computed. The second run of the
                               layer ends with the last tensor that is saved, so it does not repeat these two.

A weight may be a transposed view, as that of the layer `Conv1D` of transformers. The gradient of such a weight is
computed as a transposed view too, so that autograd does not copy it.

Shapes: T tokens, H hidden, I intermediate, O outputs.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.memory.lean import in_checkpoint, recomputes_mlp
from tigon.ops.mlps.activation_kernels import activation_backward_into, activation_forward
from tigon.ops.mlps.activations import GELU_KINDS, gelu, gelu_reference, relu2, relu2_reference
from tigon.ops.mlps.gated_node import check_version, save_gated, unpack_gated
from tigon.ops.mlps.projections import check_layer, linear, supports_products
from tigon.runtime import checks
from tigon.runtime.autograd import may_overwrite_saved
from tigon.runtime.op import Node
from tigon.runtime.products import multiply

MLPActivation = Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu2"]
# The approximation of `tigon.gelu` by the name of the activation.
APPROXIMATIONS: dict[str, Any] = {kind: name for name, kind in GELU_KINDS.items()}
ACTIVATIONS = (*APPROXIMATIONS, "relu2")


def mlp_reference(
    x: Tensor, up_weight: Tensor, down_weight: Tensor, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    activation: str = "gelu",
) -> Tensor:  # fmt: skip
    h = F.linear(x, up_weight, up_bias)
    a = relu2_reference(h) if activation == "relu2" else gelu_reference(h, APPROXIMATIONS[activation])
    return F.linear(a, down_weight, down_bias)


def activate(h: Tensor, activation: str) -> Tensor:
    """Return act(h), computed by the op of the activation."""
    return relu2(h) if activation == "relu2" else gelu(h, APPROXIMATIONS[activation])


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return dW [O, H] = dy^T x for dy [T, O] and x [T, H], with the order of the weight's memory."""
    is_transposed = weight.stride(0) == 1 and weight.stride(1) != 1
    return multiply(x.t(), dy).t() if is_transposed else multiply(dy.t(), x)


class _MLP(Node):
    """Compute y from x without saving a. The options are the kind of the activation, whether h is saved, and whether
    the layer is checkpointed."""

    def forward(
        ctx: Any, x: Tensor, up_weight: Tensor, down_weight: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
        options: tuple[str, bool, bool],
    ) -> Tensor:  # fmt: skip
        kind, saves_hidden, is_checkpointed = options
        h = linear(x.flatten(0, -2), up_weight, up_bias)
        saves_x = not saves_hidden or ctx.needs_input_grad[1]
        # The product of h needs the bias if it is repeated.
        tensors = x if saves_x else None, up_weight, down_weight, None if saves_hidden else up_bias
        save_gated(ctx, h, saves_hidden, is_checkpointed, *tensors, h if saves_hidden else None)
        ctx.kind, ctx.shape = kind, x.shape
        return linear(activation_forward(h, kind).view(*x.shape[:-1], -1), down_weight, down_bias)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, up_weight, down_weight, up_bias, h = unpack_gated(ctx)
        needs_x, needs_up, needs_down, needs_up_bias, needs_down_bias = ctx.needs_input_grad[:5]
        dy = dy.reshape(-1, dy.shape[-1])
        if x is not None:
            x = x.flatten(0, -2)
        check_version("mlp", ctx, h)
        is_recomputed = h is None
        needs_dh = needs_x or needs_up or needs_up_bias
        if is_recomputed and (needs_dh or needs_down):
            h = linear(x, up_weight, up_bias)
        dx = dup = ddown = dup_bias = None
        if needs_dh:
            da = multiply(dy, down_weight)
            if not needs_down:
                dh = da
            elif is_recomputed or (ctx.may_overwrite and may_overwrite_saved(h)):
                # If this backward raises an error, another attempt must not read the overwritten tensor.
                torch.autograd.graph.increment_version(h)
                dh = h
            else:
                dh = torch.empty_like(h)
            # The kernel reads da and h before it writes, so a takes the memory of da.
            activation_backward_into(da, h, ctx.kind, dh, da if needs_down else None)
            if needs_down:
                ddown = _weight_gradient(dy, da, down_weight)
            dup = _weight_gradient(dh, x, up_weight) if needs_up else None
            dup_bias = dh.sum(0) if needs_up_bias else None
            dx = multiply(dh, up_weight).view(ctx.shape) if needs_x else None
        elif needs_down:
            ddown = _weight_gradient(dy, activation_forward(h, ctx.kind), down_weight)
        return dx, dup, ddown, dup_bias, dy.sum(0) if needs_down_bias else None


def mlp(
    x: Tensor, up_weight: Tensor, down_weight: Tensor, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    activation: MLPActivation = "gelu",
) -> Tensor:  # fmt: skip
    """Return act(x U^T + b) D^T + c, an MLP of two linear layers. All tensors get gradients.

    Backward recomputes act(h) instead of saving it. In `tigon.lean(mlp=True)` it also recomputes h = x U^T + b.

    Args:
        x: [..., H], fp32 | bf16 | fp16.
        up_weight: U [I, H], like the weight of `nn.Linear`. It may be a transposed view.
        down_weight: D [O, I].
        up_bias: b [I], or None.
        down_bias: c [O], or None.
        activation: "gelu", "gelu_tanh" (GPT-2), "gelu_sigmoid" (x * sigmoid(1.702 x), CLIP) or "relu2" (Nemotron).

    Returns:
        [..., O] in the dtype of x.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: Shapes, devices or dtypes do not fit, or `activation` is unknown.

    Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 3.3, with the activation of Hendrycks
    and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

    Example:
        >>> up, down = torch.randn(32, 8), torch.randn(8, 32)
        >>> tigon.mlp(torch.randn(3, 8), up, down, activation="gelu_tanh").shape
        torch.Size([3, 8])
    """
    checks.tensor("mlp", x=x, up_weight=up_weight, down_weight=down_weight)
    checks.floating("mlp", x=x, up_weight=up_weight, down_weight=down_weight, up_bias=up_bias, down_bias=down_bias)
    checks.choice("mlp", "activation", activation, ACTIVATIONS)
    if x.dim() == 0 or up_weight.dim() != 2 or up_weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"mlp: up_weight must have shape [I, H] with H of x {tuple(x.shape)}, got {tuple(up_weight.shape)}"
        )
    if down_weight.dim() != 2 or down_weight.shape[1] != len(up_weight):
        raise ValueError(f"mlp: down_weight must have shape [O, {len(up_weight)}], got {tuple(down_weight.shape)}")
    if up_bias is not None:
        checks.shape("mlp", "up_bias", up_bias, (len(up_weight),))
    if down_bias is not None:
        checks.shape("mlp", "down_bias", down_bias, (len(down_weight),))
    biases = {name: b for name, b in (("up_bias", up_bias), ("down_bias", down_bias)) if b is not None}
    checks.products("mlp", x, up_weight=up_weight, down_weight=down_weight, **biases)
    if not supports_products(x, up_weight, down_weight, up_bias, down_bias):
        return F.linear(activate(F.linear(x, up_weight, up_bias), activation), down_weight, down_bias)
    return mlp_by_kernels(x, up_weight, down_weight, up_bias, down_bias, activation)


def mlp_by_kernels(
    x: Tensor, up_weight: Tensor, down_weight: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str,
) -> Tensor:  # fmt: skip
    """Return `mlp` of checked arguments for which `supports_products` is True."""
    is_checkpointed = in_checkpoint() and torch.is_grad_enabled()
    options = activation, not recomputes_mlp(), is_checkpointed
    return _MLP.apply(x, up_weight, down_weight, up_bias, down_bias, options)


class ReLU2MLP(nn.Module):
    """The MLP of Nemotron and Arcee: `down_proj(relu2(up_proj(x)))`, with the parameter names of transformers.

    Args:
        hidden_size, intermediate_size, bias, factory: As in `SwiGLUMLP`, with the same errors.

    Example:
        >>> tigon.ReLU2MLP(64, 256)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, **factory: Any) -> None:
        checks.mlp_module("ReLU2MLP", hidden_size, intermediate_size, bias, factory)
        super().__init__()
        self.hidden_size = hidden_size
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of x [..., H]."""
        checks.floating("ReLU2MLP", x=x)
        checks.features("ReLU2MLP", x, self.hidden_size)
        check_layer("ReLU2MLP", x, self.up_proj)
        return self.down_proj(relu2(self.up_proj(x)))
