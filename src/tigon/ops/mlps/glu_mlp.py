r"""The gated MLP of a decoder (Shazeer, arXiv:2002.05202) with its products: y = (act(x G^T) * (x U^T)) D^T.

    gate = x G^T,  up = x U^T,  a = act(gate) * up,  y = a D^T
    da = dy D,  (dgate, dup) from da, gate, up: `tigon.ops.mlps.glu`
    dD = dy^T a,  dG = dgate^T x,  dU = dup^T x,  dx = dgate G + dup U

The second product of dx adds to the first, in fp32 (beta = 1), where autograd would write both and read them again.
Kept for backward, and what is done twice instead:

    x, gate, up         a is written again by the kernel that makes dgate and dup: 0.05 ms for each 224 MiB (H200)
    x                   in `lean(mlp=True)`: gate and up are made again by their products
    x, gate, up         where a layer is checkpointed, but before act(gate) and the last product: there, what runs again
                        ends with the last tensor that is kept

gate and up are written by ping-pong kernels: 0.7 % of the nine products (12.74 for 12.83 ms, 8192 tokens of Llama-3-8B,
H200). With the others too, a step of so many tokens takes 0.9 % longer, at the chip's power limit, and one of 32768
0.7 % to 1.0 % less (16 layers of Mistral-7B): they are from `ProductConfig.min_multiplications` on.

Shapes: T tokens, H hidden, I intermediate.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.memory.lean import call, in_checkpoint, is_seen_by_nobody, remade_mlp, remakes_mlp, runs_again
from tigon.ops.mlps.glu import geglu, glu_backward_into, glu_forward, swiglu
from tigon.ops.mlps.projections import check_layer, input_gradient, is_plain, linear, takes_products
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, frees_saved, without_autocast
from tigon.runtime.products import multiply
from tigon.runtime.torch_private import keeps_graph

__all__ = [
    "GEGLUMLP",
    "SwiGLUMLP",
    "glu_mlp",
    "glu_mlp_by_kernels",
    "glu_mlp_reference",
    "plain_weight",
    "takes_weights",
]

GATES = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up: geglu(gate, up, approximate="tanh"),
}


# --- reference -----------------------------------------------------------------------------------


def glu_mlp_reference(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str = "silu"
) -> Tensor:
    """Eager definition of `glu_mlp`; what runs where no kernel does, and under `torch.compile`."""
    return F.linear(GATES[activation](F.linear(x, gate_weight), F.linear(x, up_weight)), down_weight)


# --- products ------------------------------------------------------------------------------------

SHORT = 2**34  # multiplications, 0.05 ms on an H200: below, a step waits for the host


def _gates(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] -> gate, up [T, I]."""
    return tuple(multiply(x, weight.t(), min_multiplications=SHORT) for weight in (gate_weight, up_weight))


def _through_gates(
    dy: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor, kind: str, dgate: Tensor, dup: Tensor, needs_down: bool
) -> Tensor | None:
    """dy [T, H] -> dgate, dup [T, I], which may be gate and up themselves; and dD, if it is needed."""
    da = multiply(dy, down_weight)
    glu_backward_into(da, gate, up, kind, dgate, dup, da if needs_down else None)
    return torch.mm(dy.t(), da) if needs_down else None  # the one product that ping-pong kernels do not make faster


def _gradients(
    needs: tuple[bool, ...], x: Tensor | None, dgate: Tensor, dup: Tensor, gate_weight: Tensor, up_weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx [T, H], dG, dU that are needed, of those of both products."""
    dgate_weight = multiply(dgate.t(), x) if needs[1] else None
    dup_weight = multiply(dup.t(), x) if needs[2] else None
    dx = input_gradient((dgate, dup), (gate_weight, up_weight)) if needs[0] else None
    return dx, dgate_weight, dup_weight


# --- autograd ------------------------------------------------------------------------------------


class _Keep(torch.autograd.Function):
    """Saves tensors at once, on a node that never runs; any other saves at the end of its forward."""

    @staticmethod
    def forward(ctx, anchor, tensors):  # a node is made only for an input that requires a gradient
        ctx.save_for_backward(*tensors)
        return anchor.clone()


def _keep(*tensors: Tensor | None) -> Tensor:
    """An empty tensor whose node saved these. In torch 2.11 the tensor keeps the node alive, its `grad_fn` does not."""
    with torch.enable_grad():
        return _Keep.apply(torch.empty(0, requires_grad=True), tensors)


class _GLUMLP(torch.autograd.Function):
    """x -> y, and a is not kept; gate and up are if `keeps_gates`.

    In a checkpointed layer everything is kept `early`, before the gate: what runs again ends with the last that is.
    """

    @staticmethod
    def forward(ctx, x, gate_weight, up_weight, down_weight, kind, keeps_gates, early):
        rows = x.flatten(0, -2)
        gate, up = _gates(rows, gate_weight, up_weight)
        keeps_x = not keeps_gates or any(ctx.needs_input_grad[1:3])
        gates = (gate, up) if keeps_gates else (None, None)
        kept = x if keeps_x else None, gate_weight, up_weight, down_weight, *gates
        ctx.early = early and any(ctx.needs_input_grad)
        if ctx.early:
            ctx.kept = _keep(*kept)
        else:
            ctx.save_for_backward(*kept)
        ctx.kind, ctx.shape, ctx.overwrites = kind, x.shape, is_seen_by_nobody()
        # What runs again shares gate and up with the node of the first run, which may overwrite them.
        ctx.version = gate._version if keeps_gates and runs_again() else None
        return linear(glu_forward(gate, up, kind).view(*x.shape[:-1], -1), down_weight)

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx, dy):
        x, gate_weight, up_weight, down_weight, gate, up = _early(ctx) if ctx.early else ctx.saved_tensors
        *needs, needs_down = ctx.needs_input_grad[:4]
        x, dy = None if x is None else x.flatten(0, -2), dy.reshape(-1, dy.shape[-1])
        if ctx.version is not None and gate._version != ctx.version:
            raise RuntimeError(
                "glu_mlp: gate and up of a checkpointed region that ran again have been modified by an inplace "
                "operation: the backward around has taken them"
            )
        own = gate is None
        if own:
            gate, up = _gates(x, gate_weight, up_weight)
        if not any(needs):
            return None, None, None, torch.mm(dy.t(), glu_forward(gate, up, ctx.kind)), None, None, None
        # Over what is ours, once it is read; what was kept may be asked for again.
        if own or (ctx.overwrites and frees_saved(gate)):
            dgate, dup = gate, up
            torch.autograd.graph.increment_version((gate, up))  # a second try after an error is told
        else:
            dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        ddown_weight = _through_gates(dy, down_weight, gate, up, ctx.kind, dgate, dup, needs_down)
        del gate, up
        dx, *dweights = _gradients(needs, x, dgate, dup, gate_weight, up_weight)
        return None if dx is None else dx.view(ctx.shape), *dweights, ddown_weight, None, None, None


def _early(ctx) -> tuple[Tensor | None, ...]:
    """What was kept early; as of any node, once, unless the graph is retained."""
    if ctx.kept is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time (glu_mlp in a checkpointed region): specify "
            "retain_graph=True in the first"
        )
    tensors = ctx.kept.grad_fn.saved_tensors
    if not keeps_graph():
        ctx.kept = None
    return tensors


# --- public --------------------------------------------------------------------------------------


def plain_weight(layer: nn.Module) -> Tensor | None:
    """The weight of a linear layer that does nothing but its product."""
    return layer.weight if is_plain(layer) and layer.bias is None else None


def takes_weights(x: object, *weights: Tensor | None) -> bool:
    """Whether this op's own products run here: of weights that are all there."""
    return all(w is not None for w in weights) and takes_products(x, *weights)


def glu_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str = "silu") -> Tensor:
    """(act(x G^T) * (x U^T)) D^T: a gated MLP of three weights, with gradients for all.

    act(gate) * up is not kept for backward but made again there; in `tigon.lean(mlp=True)` gate and up are too.

    Args:
        x: [..., H], fp32 | bf16 | fp16.
        gate_weight: [I, H], as that of `nn.Linear`.
        up_weight: [I, H].
        down_weight: [O, I].
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        [..., O] in the dtype of x.

    Raises:
        TypeError: An argument is no floating-point tensor.
        ValueError: Shapes or devices do not fit, or `activation` is unknown.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Example:
        >>> gate, up, down = torch.randn(32, 8), torch.randn(32, 8), torch.randn(8, 32)
        >>> tigon.glu_mlp(torch.randn(3, 8), gate, up, down).shape
        torch.Size([3, 8])
    """
    checks.tensor("glu_mlp", x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    checks.floating("glu_mlp", x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    checks.choice("glu_mlp", "activation", activation, tuple(GATES))
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
    if not takes_weights(x, gate_weight, up_weight, down_weight):
        return glu_mlp_reference(x, gate_weight, up_weight, down_weight, activation)
    return glu_mlp_by_kernels(x, gate_weight, up_weight, down_weight, activation)


def glu_mlp_by_kernels(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str
) -> Tensor:
    """`glu_mlp` of arguments that it takes and that `takes_weights`."""
    early = in_checkpoint() and torch.is_grad_enabled()
    return _GLUMLP.apply(x, gate_weight, up_weight, down_weight, activation, not remakes_mlp(), early)


class _GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)), with the parameter names of Hugging Face's decoders."""

    activation = "silu"

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, **factory) -> None:
        checks.mlp_module(type(self).__name__, hidden_size, intermediate_size, bias, factory)
        super().__init__()
        self.hidden_size = hidden_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, **factory)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        checks.floating(type(self).__name__, x=x)
        checks.features(type(self).__name__, x, self.hidden_size)
        weights = [plain_weight(layer) for layer in (self.gate_proj, self.up_proj, self.down_proj)]
        if takes_weights(x, *weights):
            return glu_mlp_by_kernels(x, *weights, self.activation)
        check_layer(type(self).__name__, x, self.gate_proj)
        return self.down_proj(remade_mlp(self._product, x))

    def _product(self, x: Tensor) -> Tensor:
        return GATES[self.activation](call(self.gate_proj, x), call(self.up_proj, x))


class SwiGLUMLP(_GatedMLP):
    """Gated MLP of Llama: `down_proj(swiglu(gate_proj(x), up_proj(x)))`.

    Example:
        >>> tigon.SwiGLUMLP(64, 256)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """


class GEGLUMLP(_GatedMLP):
    """Gated MLP of Gemma: `down_proj(geglu(gate_proj(x), up_proj(x)))`, by default with the tanh approximation.

    Example:
        >>> tigon.GEGLUMLP(64, 256)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        approximate: Literal["none", "tanh"] = "tanh",
        **factory,
    ) -> None:
        checks.choice("GEGLUMLP", "approximate", approximate, ("none", "tanh"))
        super().__init__(hidden_size, intermediate_size, bias, **factory)
        self.activation = "gelu_tanh" if approximate == "tanh" else "gelu"
