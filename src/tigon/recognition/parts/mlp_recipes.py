"""The recipes of MLPs and of activations: compute through the children of the module, with an op.

    down(act(gate(x)) * up(x))    `GLURecipe`; constant factors and a limit of gate and up belong to the recipe
    down(act(up(x)))              `MLPRecipe`, with dropouts where the module has them
    act(x)                        `ActivationRecipe`

Models write the approximations of GELU in several ways, which round differently. Each way is a formula of its own, so
that a module can be compared bit for bit. The op that replaces it rounds once.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.memory.lean import call_mlp_region, call_projection, is_lean, recomputes_mlp
from tigon.ops.adapters.lora_mlp import has_one_node, lora_glu_mlp, lora_glu_mlp_node
from tigon.ops.adapters.plan import find_plan
from tigon.ops.adapters.projection import TensorLike
from tigon.ops.mlps.activation_kernels import PLAIN_GATE, GateOptions
from tigon.ops.mlps.activations import relu2_reference
from tigon.ops.mlps.glu import geglu, geglu_reference, swiglu, swiglu_reference
from tigon.ops.mlps.glu_mlp import glu_mlp_by_kernels, plain_weights, scaled
from tigon.ops.mlps.mlp import MLPActivation, activate, mlp_by_kernels
from tigon.ops.mlps.projections import plain_parameters, supports_products
from tigon.recognition.parts.adapters import cast_for_products, may_have_adapters, output_dtype, read_projection
from tigon.recognition.parts.fp8 import compute_mlp_in_fp8
from tigon.runtime.compat.modules import any_global_hook
from tigon.runtime.device import KERNEL_DTYPES, PLAIN
from tigon.runtime.stock import does_more_than_forward


class Gate(NamedTuple):
    """An activation with a gate: the op, its reference, and its name in `glu_mlp`."""

    op: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    activation: str


GATE_KINDS: dict[str, Gate] = {
    "swiglu": Gate(swiglu, swiglu_reference, "silu"),
    "geglu": Gate(geglu, geglu_reference, "gelu"),
    "geglu (tanh)": Gate(
        functools.partial(geglu, approximate="tanh"),
        functools.partial(geglu_reference, approximate="tanh"),
        "gelu_tanh",
    ),
}


class Formula(NamedTuple):
    """A way to write an activation."""

    activation: MLPActivation
    compute: Callable[[Tensor], Tensor]
    # True if torch computes the formula with one kernel, and saves nothing but its input.
    is_one_kernel: bool = False

    @property
    def label(self) -> str:
        name, _, variant = self.activation.partition("_")
        return f"{name} ({variant})" if variant else name


SQUARE_ROOT = math.sqrt(2.0 / math.pi)
FORMULAS: dict[str, Formula] = {
    "relu2": Formula("relu2", relu2_reference),
    "gelu": Formula("gelu", F.gelu, True),
    "gelu, erf": Formula("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "gelu tanh": Formula("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), True),
    # GPT-2
    "gelu tanh, power": Formula(
        "gelu_tanh", lambda x: 0.5 * x * (1.0 + torch.tanh(SQUARE_ROOT * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    # BERT for fast inference
    "gelu tanh, factored": Formula(
        "gelu_tanh", lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))
    ),
    # Megatron and BLOOM
    "gelu tanh, constant first": Formula(
        "gelu_tanh", lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))
    ),
    # CLIP
    "gelu sigmoid": Formula("gelu_sigmoid", lambda x: x * torch.sigmoid(1.702 * x)),
}


@dataclass(frozen=True)
class _TensorRecipe:
    """A recipe that takes one plain tensor. The forward of the module's class runs for any other arguments."""

    # The numbers of dimensions of inputs for which the module was compared with the op.
    dims: frozenset[int] = field(default=frozenset((1, 2, 3, 4)), compare=False, kw_only=True)
    # True if the recipe takes contiguous inputs only.
    needs_contiguity: bool = field(default=False, compare=False, kw_only=True)

    def __call__(self, module: nn.Module, *args: Any, reference: bool = False, **kwargs: Any) -> Tensor:
        if len(args) == 1 and not kwargs and (reference or self._fits(args[0])):
            return self._compute(module, args[0], reference)
        return type(module).forward(module, *args, **kwargs)

    def _fits(self, x: Any) -> bool:
        """Return True if recognition compared the module with the op for an input of this kind."""
        if type(x) not in PLAIN or x.dtype not in KERNEL_DTYPES or x.layout is not torch.strided or x.is_nested:
            return False
        return x.dim() in self.dims and not (self.needs_contiguity and not x.is_contiguous())

    def _compute(self, module: nn.Module, x: Tensor, reference: bool) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class ActivationRecipe(_TensorRecipe):
    """Recipe: the op of an activation that is a module. `formula` is a key of `FORMULAS`."""

    formula: str

    def _compute(self, module: nn.Module, x: Tensor, reference: bool) -> Tensor:
        formula = FORMULAS[self.formula]
        if reference:
            return formula.compute(x)
        # A formula that is one kernel of torch gains nothing but that `lean` can recompute it.
        if formula.is_one_kernel and not is_lean():
            return type(module).forward(module, x)
        return activate(x, formula.activation)

    def __str__(self) -> str:
        return FORMULAS[self.formula].label


@dataclass(frozen=True)
class GLURecipe(_TensorRecipe):
    """Recipe: `down(act(gate(x)) * up(x))` through the children. Without `up`, `gate` computes both, packed."""

    kind: str
    gate: str
    up: str | None
    down: str
    # Factors of the output of `gate`, before the activation, and of the result.
    gate_scale: float = 1.0
    output_scale: float = 1.0
    # The largest value of the gate, and the largest absolute value of `up`; infinity is no limit.
    limit: float = math.inf
    # True if the module calls `up` before `gate`. The order affects hooks and the random numbers of the children.
    up_first: bool = field(default=False, compare=False)
    scaling: GateOptions = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaling", GateOptions(self.gate_scale, self.output_scale, self.limit))

    def _compute(self, module: nn.Module, x: Tensor, reference: bool) -> Tensor:
        # A global module hook would see a call of the activation, and the op makes no such call.
        if any_global_hook():
            return type(module).forward(module, x)
        y = None if reference or self.up is None else self._run_op(module, x)
        if y is None:
            y = scaled(
                getattr(module, self.down)(call_mlp_region(self._product, module, x, reference)), self.output_scale
            )
        return y

    def _run_op(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return the MLP by one op, or None if none computes all of its layers."""
        children, kind = module._modules, GATE_KINDS[self.kind].activation
        layers: list[Any] = [children.get(self.gate), children.get(cast("str", self.up)), children.get(self.down)]
        if None in layers:
            return None
        if (weights := plain_weights(layers)) is not None:
            gate, up, down = weights
            return glu_mlp_by_kernels(x, gate, up, down, kind, self.scaling) if supports_products(x, *weights) else None
        if self.scaling != PLAIN_GATE:
            return None
        y = compute_mlp_in_fp8(x, layers, kind)
        return _run_with_adapters(x, layers, kind) if y is None else y

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

    def __str__(self) -> str:
        factors = f", gate times {self.gate_scale:g}" if self.gate_scale != 1.0 else ""
        factors += f", result times {self.output_scale:g}" if self.output_scale != 1.0 else ""
        factors += f", limit {self.limit:g}" if math.isfinite(self.limit) else ""
        return self.kind + (", packed" if self.up is None else "") + factors


def _run_with_adapters(x: Tensor, layers: Sequence[nn.Module], kind: str) -> Tensor | None:
    """Return a gated MLP of which some layers have adapters; None if none has, or no op computes them all."""
    if not may_have_adapters(x, layers):
        return None
    gate, up = read_projection(layers[0], x), read_projection(layers[1], x)
    if gate is None or up is None:
        return None
    operand = cast_for_products(x)
    is_cast = operand is not x
    dtype = torch.promote_types(output_dtype(gate, x), output_dtype(up, x)) if is_cast else x.dtype
    inner = TensorLike(torch.Size((*x.shape[:-1], gate.weight.shape[0])), dtype, x.device)
    down = read_projection(layers[2], inner)
    if down is None:
        return None
    projections = gate, up, down
    call = find_plan(operand, projections)
    if call is None or not call.plan.entries:
        return None
    if has_one_node(call):
        y = lora_glu_mlp_node(operand, call, kind)
    elif recomputes_mlp():
        # With `lean(mlp=True)`, an MLP of several autograd nodes takes the path that recomputes gate and up one by one.
        return None
    else:
        y = lora_glu_mlp(operand, *projections, kind)
    return y.to(output_dtype(down, inner)) if is_cast else y


@dataclass(frozen=True)
class MLPRecipe(_TensorRecipe):
    """Recipe: `down(act(up(x)))` through the module's children, with dropouts where the module has them."""

    # A key of `FORMULAS`.
    formula: str
    up: str
    down: str
    inner_dropouts: tuple[str, ...] = ()
    outer_dropouts: tuple[str, ...] = ()
    # The forward of the layers' class if they multiply by transposed weights.
    transposed_forward: Any = field(default=None, compare=False)

    def _compute(self, module: nn.Module, x: Tensor, reference: bool) -> Tensor:
        # A global module hook would see a call of the activation, and the op makes no such call.
        if any_global_hook():
            return type(module).forward(module, x)
        y = None if reference else self._run_op(module, x)
        if y is None:
            y = getattr(module, self.down)(call_mlp_region(self._activation, module, x, reference))
        for name in self.outer_dropouts:
            y = getattr(module, name)(y)
        return y

    def _run_op(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return the MLP as one node of autograd, or None if a layer or a dropout does more than the op."""
        dropouts = (getattr(module, name) for name in self.inner_dropouts)
        if any(dropout.training and dropout.p for dropout in dropouts):
            return None
        up, down = (self._parameters(getattr(module, name)) for name in (self.up, self.down))
        if up is None or down is None or not supports_products(x, *up, *down):
            return None
        return mlp_by_kernels(x, up[0], down[0], up[1], down[1], FORMULAS[self.formula].activation)

    def _parameters(self, layer: Any) -> tuple[Tensor, Tensor | None] | None:
        """Return weight [out, in] and bias of a layer whose call is only its product; None for any other layer."""
        if (parameters := plain_parameters((layer,))) is not None:
            return parameters[0], parameters[1]
        forward = self.transposed_forward
        if forward is None or type(layer).forward is not forward or "forward" in vars(layer):
            return None
        return None if does_more_than_forward(layer) else (layer.weight.t(), layer.bias)

    def _activation(self, module: nn.Module, x: Tensor, reference: bool) -> Tensor:
        """Return the input of the second layer, computed through the module's children."""
        h = call_projection(getattr(module, self.up), x)
        formula = FORMULAS[self.formula]
        a = formula.compute(h) if reference else activate(h, formula.activation)
        for name in self.inner_dropouts:
            a = getattr(module, name)(a)
        return a

    def __str__(self) -> str:
        return f"mlp, {FORMULAS[self.formula].label}"
