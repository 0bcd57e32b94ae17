"""The recipe of a gated MLP: compute `down(act(gate(x)) * up(x))` through the children of the module, with an op.

Constant factors of gate(x) and of the result, and a limit of gate and up, belong to the recipe.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tigon.memory.lean import call_mlp_region, call_projection, recomputes_mlp
from tigon.ops.adapters.lora import takes_adapters
from tigon.ops.adapters.lora_mlp import has_one_node, lora_glu_mlp, lora_glu_mlp_node
from tigon.ops.adapters.projection import Projection, TensorLike
from tigon.ops.mlps.activation_kernels import PLAIN_GATE, GateOptions
from tigon.ops.mlps.glu import geglu, geglu_reference, swiglu, swiglu_reference
from tigon.ops.mlps.glu_mlp import glu_mlp_by_kernels, plain_weight, scaled, supports_weights
from tigon.recognition.parts.adapters import (
    cast_for_products,
    may_have_adapters,
    output_dtype,
    read_projection,
)
from tigon.recognition.parts.fp8 import compute_mlp_in_fp8
from tigon.runtime.compat.modules import any_global_hook
from tigon.runtime.device import KERNEL_DTYPES, PLAIN


class Gate(NamedTuple):
    """An activation with a gate: the op, its reference, and its name in `glu_mlp`."""

    op: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    activation: str


# The gates by the name that the report shows.
GATE_KINDS: dict[str, Gate] = {
    "swiglu": Gate(swiglu, swiglu_reference, "silu"),
    "geglu": Gate(geglu, geglu_reference, "gelu"),
    "geglu (tanh)": Gate(
        functools.partial(geglu, approximate="tanh"),
        functools.partial(geglu_reference, approximate="tanh"),
        "gelu_tanh",
    ),
}


def is_plain_input(x: Any, needs_contiguity: bool) -> bool:
    """Return True if recognition compared modules with an op for an input of this type, dtype and layout."""
    if type(x) not in PLAIN or x.dtype not in KERNEL_DTYPES or x.layout is not torch.strided or x.is_nested:
        return False
    return not needs_contiguity or x.is_contiguous()


class LayersWithAdapters(NamedTuple):
    """The layers of a gated MLP, some of which have adapters.

    `x` is the input in the dtype of the products, and `output_dtype` is the dtype of the output of the MLP.
    """

    x: Tensor
    gate: Projection
    up: Projection
    down: Projection
    output_dtype: torch.dtype
    # True if one node of autograd computes the MLP.
    is_one_node: bool


@dataclass(frozen=True)
class GLURecipe:
    """Recipe: `down(act(gate(x)) * up(x))` through the module's children.

    Without `up`, the output of `gate` contains both factors, packed.
    """

    kind: str
    gate: str
    up: str | None
    down: str
    # Factors of the output of `gate`, before the activation, and of the result.
    gate_scale: float = 1.0
    output_scale: float = 1.0
    # The largest value of the gate, and the largest absolute value of `up`; infinity is no limit.
    limit: float = math.inf
    # Numbers of dimensions of inputs for which the module was compared with the op.
    dims: frozenset[int] = field(default=frozenset((1, 2, 3, 4)), compare=False)
    # True if the module calls `up` before `gate`. The order affects hooks and the random numbers of the children.
    up_first: bool = field(default=False, compare=False)
    # True if the recipe takes contiguous inputs only. The stock forward runs for all others.
    needs_contiguity: bool = field(default=False, compare=False)
    live: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[tuple[str, ...]] = ()
    searched: ClassVar[tuple[str, ...]] = ()

    def __call__(self, module: nn.Module, *args: Any, reference: bool = False, **kwargs: Any) -> Tensor:
        fits = len(args) == 1 and not kwargs and (reference or self._fits(args[0]))
        # A global module hook would see a call of the activation, and the op makes no such call.
        if not fits or any_global_hook():
            return type(module).forward(module, *args, **kwargs)
        (x,) = args
        if self.up is not None and not reference:
            projections = [getattr(module, name) for name in (self.gate, self.up, self.down)]
            kind, weights = GATE_KINDS[self.kind].activation, [plain_weight(layer) for layer in projections]
            if supports_weights(x, *weights):
                gate_weight, up_weight, down_weight = weights
                assert isinstance(gate_weight, Tensor)
                assert isinstance(up_weight, Tensor)
                assert isinstance(down_weight, Tensor)
                return glu_mlp_by_kernels(x, gate_weight, up_weight, down_weight, kind, self.scaling)
            has_op = None in weights and self.scaling == PLAIN_GATE
            if has_op and (y := compute_mlp_in_fp8(x, projections, kind)) is not None:
                return y
            if has_op and (layers := self._layers_with_adapters(module, x)) is not None:
                if layers.is_one_node:
                    y = lora_glu_mlp_node(layers.x, (layers.gate, layers.up, layers.down), kind)
                else:
                    y = lora_glu_mlp(layers.x, layers.gate, layers.up, layers.down, kind)
                return y.to(layers.output_dtype)
        y = getattr(module, self.down)(call_mlp_region(self._product, module, x, reference))
        return scaled(y, self.output_scale)

    @property
    def scaling(self) -> GateOptions:
        return GateOptions(self.gate_scale, self.output_scale, self.limit)

    def _layers_with_adapters(self, module: nn.Module, x: Tensor) -> LayersWithAdapters | None:
        """Return gate, up and down if some of them have adapters, and an op computes them all."""
        assert self.up is not None
        layers = [getattr(module, name) for name in (self.gate, self.up, self.down)]
        if not may_have_adapters(x, layers):
            return None
        gate, up = (read_projection(layer, x) for layer in layers[:2])
        if gate is None or up is None:
            return None
        dtype = torch.promote_types(output_dtype(gate, x), output_dtype(up, x))
        inner = TensorLike(torch.Size((*x.shape[:-1], len(gate.weight))), dtype, x.device)
        down = read_projection(layers[2], inner)
        projections = [] if down is None else [gate, up, down]
        operand = cast_for_products(x)
        if down is None or not any(each.adapters for each in projections) or not takes_adapters(operand, projections):
            return None
        # With `lean(mlp=True)`, an MLP of several autograd nodes takes the path that recomputes gate and up one by one.
        if not (is_one_node := has_one_node(projections)) and recomputes_mlp():
            return None
        return LayersWithAdapters(operand, gate, up, down, output_dtype(down, inner), is_one_node)

    def _fits(self, x: Any) -> bool:
        """Return True if recognition compared the module with the op for an input of this kind."""
        return is_plain_input(x, self.needs_contiguity) and x.dim() in self.dims

    def _product(self, module: nn.Module, x: Tensor, reference: bool) -> Tensor:
        """Return act(gate) * up, computed through the module's children."""
        up_layer = None if self.up is None else getattr(module, self.up)
        up = call_projection(up_layer, x) if up_layer is not None and self.up_first else None
        gate = call_projection(getattr(module, self.gate), x)
        if up_layer is not None and not self.up_first:
            up = call_projection(up_layer, x)
        if self.scaling != PLAIN_GATE:
            gate, up = gate.chunk(2, -1) if up is None else (gate, up)
            gate = scaled(gate, self.gate_scale)
            if math.isfinite(self.limit):
                gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        # If gate and up have different dtypes, the reference promotes as torch does.
        is_mixed = up is not None and up.dtype != gate.dtype
        return (GATE_KINDS[self.kind].reference if reference or is_mixed else GATE_KINDS[self.kind].op)(gate, up)

    def with_call_order(self, order: list[str]) -> "GLURecipe":
        """Return the recipe for a module that calls its projections in this order."""
        return replace(self, up_first=self.up is not None and order[0] == self.up)

    def __str__(self) -> str:
        factors = f", gate times {self.gate_scale:g}" if self.gate_scale != 1.0 else ""
        factors += f", result times {self.output_scale:g}" if self.output_scale != 1.0 else ""
        factors += f", limit {self.limit:g}" if math.isfinite(self.limit) else ""
        return self.kind + (", packed" if self.up is None else "") + factors
