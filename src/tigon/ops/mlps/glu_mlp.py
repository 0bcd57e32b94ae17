r"""The gated MLP of a decoder (Shazeer, arXiv:2002.05202) as one op: y = (act(x G^T) * (x U^T)) D^T.

    gate = x G^T,  up = x U^T,  a = act(gate) * up,  y = a D^T
    da = dy D,  (dgate, dup) from da, gate, up: `tigon.ops.mlps.glu`
    dD = dy^T a,  dG = dgate^T x,  dU = dup^T x,  dx = dgate G + dup U

Falcon H1 multiplies gate and y by numbers, and DeepSeek V4 limits gate and up (`GateOptions`).

The second product of dx adds to the first one, in fp32 (beta = 1). Autograd would write both and read them again. The
tensors that are saved for backward depend on where the MLP runs:

    by default                 x, gate and up. The kernel that computes dgate and dup also recomputes a: 0.05 ms for
                               each 224 MiB (H200).
    in `lean(mlp=True)`        x. The products of gate and up are repeated.
    in a checkpointed layer    x, gate and up, but before act(gate) and the last product are computed. The second run
                               of the layer ends with the last tensor that is saved, so it does not repeat these two.
    for very many tokens       x. Where gate and up are not saved from forward to backward, the MLP is computed in tiles
                               of tokens from `TILE_BYTES` on (`tigon.ops.mlps.tiled_glu_mlp`).

gate and up are written by ping-pong kernels. These save 0.7 % of the time of the nine products (12.74 instead of
12.83 ms, 8192 tokens of Llama-3-8B, H200). If the other products use them too, a step with so many tokens takes 0.9 %
longer, because the chip reaches its power limit, and a step of 32768 tokens takes 0.7 % to 1.0 % less (16 layers of
Mistral-7B). The other products therefore use them only from `MIN_MULTIPLICATIONS` of `products` on.

Shapes: T tokens, H hidden, I intermediate.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.memory.lean import call_mlp_region, call_projection, in_checkpoint, recomputes_large_mlp, recomputes_mlp
from tigon.ops.mlps.activation_kernels import PLAIN_GATE, GateOptions, glu_forward
from tigon.ops.mlps.gated_node import (
    backward_of_activation,
    check_version,
    gradient_buffers,
    multiply_gates,
    save_gated,
    unpack_gated,
)
from tigon.ops.mlps.glu import geglu, swiglu
from tigon.ops.mlps.projections import check_layer, linear, plain_parameters, supports_products
from tigon.ops.mlps.tiled_glu_mlp import tile_rows, tiled_glu_mlp
from tigon.runtime import checks
from tigon.runtime.op import Node
from tigon.runtime.products import multiply

GATES = {"silu": swiglu, "gelu": geglu, "gelu_tanh": lambda gate, up: geglu(gate, up, approximate="tanh")}


def glu_mlp_reference(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str = "silu", *,
    gate_scale: float = 1.0, output_scale: float = 1.0, limit: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute `glu_mlp` in eager torch, for devices without Triton and under `torch.compile`."""
    gate, up = scaled(F.linear(x, gate_weight), gate_scale), F.linear(x, up_weight)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return scaled(F.linear(GATES[activation](gate, up), down_weight), output_scale)


def scaled(x: Tensor, scale: float) -> Tensor:
    """Return scale * x; x itself if the scale is 1."""
    return x if scale == 1.0 else x * scale


class _GLUMLP(Node):
    """Compute y from x without saving a. gate and up are saved if `saves_gates` is True. `activation` holds the kind of
    the gate, and its numbers."""

    def forward(
        ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        activation: tuple[str, GateOptions], saves_gates: bool, is_checkpointed: bool,
    ) -> Tensor:  # fmt: skip
        rows = x.flatten(0, -2)
        gate, up = multiply_gates(rows, gate_weight, up_weight)
        saves_x = not saves_gates or any(ctx.needs_input_grad[1:3])
        gates = (gate, up) if saves_gates else (None, None)
        tensors = x if saves_x else None, gate_weight, up_weight, down_weight, *gates
        save_gated(ctx, gate, saves_gates, is_checkpointed, *tensors)
        ctx.activation, ctx.shape = activation, x.shape
        return linear(glu_forward(gate, up, *activation).view(*x.shape[:-1], -1), down_weight)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_weight, up_weight, down_weight, gate, up = unpack_gated(ctx)
        needs_dx, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        dy = dy.reshape(-1, dy.shape[-1])
        if x is not None:
            x = x.flatten(0, -2)
        check_version("glu_mlp", ctx, gate)
        is_recomputed = gate is None
        if is_recomputed:
            gate, up = multiply_gates(x, gate_weight, up_weight)
        if not (needs_dx or needs_gate or needs_up):
            return None, None, None, torch.mm(dy.t(), glu_forward(gate, up, *ctx.activation))
        dgate, dup = gradient_buffers(ctx, gate, up, is_recomputed)
        ddown_weight = backward_of_activation(dy, down_weight, gate, up, ctx.activation, dgate, dup, needs_down)
        del gate, up
        dgate_weight = multiply(dgate.t(), x) if needs_gate else None
        dup_weight = multiply(dup.t(), x) if needs_up else None
        dx = multiply(dup, up_weight, total=multiply(dgate, gate_weight)).view(ctx.shape) if needs_dx else None
        return dx, dgate_weight, dup_weight, ddown_weight


def plain_weights(layers: Sequence[nn.Module]) -> list[Tensor] | None:
    """Return the weights of linear layers whose calls are only the products with them; None for any other layers."""
    if (parameters := plain_parameters(layers)) is None:
        return None
    for bias in parameters[1::2]:
        if bias is not None:
            return None
    return parameters[::2]


def glu_mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str = "silu", *,
    gate_scale: float = 1.0, output_scale: float = 1.0, limit: float | None = None,
) -> Tensor:  # fmt: skip
    """Return (act(x G^T) * (x U^T)) D^T, a gated MLP of three weights. All tensors get gradients.

    Backward recomputes act(gate) * up instead of saving it. In `tigon.lean(mlp=True)` it also recomputes gate and up.

    Args:
        x: [..., H], fp32 | bf16 | fp16.
        gate_weight: [I, H], like the weight of `nn.Linear`.
        up_weight: [I, H].
        down_weight: [O, I].
        activation: "silu", "gelu" or "gelu_tanh".
        gate_scale: A factor of x G^T, before the activation (Falcon H1).
        output_scale: A factor of the result.
        limit: The largest value of the gate, and the largest absolute value of x U^T (DeepSeek V4). None is no limit.

    Returns:
        [..., O] in the dtype of x.

    Raises:
        TypeError: An argument is not a floating-point tensor, or a factor or the limit is not a number.
        ValueError: Shapes, devices or dtypes do not fit, `activation` is unknown, or `limit` is negative.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Example:
        >>> gate, up, down = torch.randn(32, 8), torch.randn(32, 8), torch.randn(8, 32)
        >>> tigon.glu_mlp(torch.randn(3, 8), gate, up, down).shape
        torch.Size([3, 8])
    """
    checks.tensor("glu_mlp", x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    checks.floating("glu_mlp", x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    checks.choice("glu_mlp", "activation", activation, tuple(GATES))
    gate_scale = checks.number("glu_mlp", "gate_scale", gate_scale)
    output_scale = checks.number("glu_mlp", "output_scale", output_scale)
    limit = None if limit is None else checks.number("glu_mlp", "limit", limit, 0.0)
    if x.dim() == 0 or gate_weight.dim() != 2 or gate_weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"glu_mlp: gate_weight must have shape [I, H] with H of x {tuple(x.shape)}, got {tuple(gate_weight.shape)}"
        )
    checks.shape("glu_mlp", "up_weight", up_weight, gate_weight.shape)
    if down_weight.dim() != 2 or down_weight.shape[1] != len(gate_weight):
        raise ValueError(
            f"glu_mlp: down_weight must have shape [O, {len(gate_weight)}], got {tuple(down_weight.shape)}"
        )
    checks.products("glu_mlp", x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    if not supports_products(x, gate_weight, up_weight, down_weight):
        return glu_mlp_reference(
            x, gate_weight, up_weight, down_weight, activation, gate_scale=gate_scale, output_scale=output_scale,
            limit=limit,
        )  # fmt: skip
    options = GateOptions(gate_scale, output_scale, math.inf if limit is None else limit)
    return glu_mlp_by_kernels(x, gate_weight, up_weight, down_weight, activation, options)


def glu_mlp_by_kernels(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, kind: str,
    options: GateOptions = PLAIN_GATE,
) -> Tensor:  # fmt: skip
    """Return `glu_mlp` of checked arguments for which `supports_products` is True."""
    is_checkpointed = in_checkpoint() and torch.is_grad_enabled()
    activation = kind, options
    if (is_checkpointed or recomputes_large_mlp()) and (rows := tile_rows(x, gate_weight)):
        return tiled_glu_mlp(x, gate_weight, up_weight, down_weight, activation, rows, is_checkpointed)
    return _GLUMLP.apply(x, gate_weight, up_weight, down_weight, activation, not recomputes_mlp(), is_checkpointed)


class _GatedMLP(nn.Module):
    """The MLP down_proj(act(gate_proj(x)) * up_proj(x)), with the parameter names of transformers."""

    activation = "silu"

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, **factory: Any) -> None:
        checks.mlp_module(type(self).__name__, hidden_size, intermediate_size, bias, factory)
        super().__init__()
        self.hidden_size = hidden_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, **factory)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of x [..., H]."""
        checks.floating(type(self).__name__, x=x)
        checks.features(type(self).__name__, x, self.hidden_size)
        weights = plain_weights((self.gate_proj, self.up_proj, self.down_proj))
        if weights is not None and supports_products(x, *weights):
            gate, up, down = weights
            return glu_mlp_by_kernels(x, gate, up, down, self.activation)
        check_layer(type(self).__name__, x, self.gate_proj)
        return self.down_proj(call_mlp_region(self._product, x))

    def _product(self, x: Tensor) -> Tensor:
        """Return act(gate) * up, and let `lean(mlp=True)` recompute both projections."""
        return GATES[self.activation](call_projection(self.gate_proj, x), call_projection(self.up_proj, x))


class SwiGLUMLP(_GatedMLP):
    """The gated MLP of Llama: `down_proj(swiglu(gate_proj(x), up_proj(x)))`, with the parameter names of transformers.

    Args:
        hidden_size: H, the features of the input and of the output.
        intermediate_size: I, the features of the activation.
        bias: Whether the three projections have a bias.
        factory: The `device` and the `dtype` of the parameters.

    Raises:
        TypeError: An argument has another type. The forward raises it if its input is not a floating-point tensor.
        ValueError: A size is not positive, or `factory` has another option or an unknown device. The forward raises it
            if its input does not end in H features, or has another dtype or device than the weights.

    Example:
        >>> tigon.SwiGLUMLP(64, 256)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """


class GEGLUMLP(_GatedMLP):
    """The gated MLP of Gemma: `down_proj(geglu(gate_proj(x), up_proj(x)))`, with the parameter names of transformers.

    Args:
        hidden_size, intermediate_size, bias, factory: As in `SwiGLUMLP`, with the same errors.
        approximate: "none" is the exact GELU, and "tanh" the approximation of Gemma, as in `F.gelu`.

    Example:
        >>> tigon.GEGLUMLP(64, 256)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False,
        approximate: Literal["none", "tanh"] = "tanh", **factory: Any,
    ) -> None:  # fmt: skip
        checks.choice("GEGLUMLP", "approximate", approximate, ("none", "tanh"))
        super().__init__(hidden_size, intermediate_size, bias, **factory)
        self.activation = "gelu_tanh" if approximate == "tanh" else "gelu"
