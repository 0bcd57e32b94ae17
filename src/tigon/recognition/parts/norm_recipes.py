"""Recipes of norms: compute what a recognised RMS norm or layer norm computes, with its weight and its epsilon."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.norms.gated_rms_norm import GateActivation, gated_rms_norm, gated_rms_norm_reference
from tigon.ops.norms.layer_norm import layer_norm, layer_norm_reference
from tigon.ops.norms.rms_norm import Rounding, rms_norm_of_layer, rms_norm_reference
from tigon.recognition.probing.probes import DTYPES
from tigon.runtime.device import PLAIN, runs_kernels


@dataclass(frozen=True)
class Scope:
    """The inputs for which recognition compared a module with the op. The stock forward runs for all other inputs."""

    dims: frozenset[int] = frozenset((1, 2, 3, 4))
    # The dtypes of the weight for each dtype of the input. None stands for a norm without weight.
    weight_dtypes: dict[torch.dtype, tuple[torch.dtype | None, ...]] = field(
        default_factory=lambda: dict.fromkeys(DTYPES, (None, *DTYPES))
    )
    # It is True if the stock forward runs for inputs that are not contiguous.
    needs_contiguity: bool = False
    # An attribute that must stay equal to the shape of the weight, such as `normalized_shape`.
    shape: str | None = None

    def fits(self, module: nn.Module, args: tuple, weight: Tensor | None) -> bool:
        """Return True if recognition compared the module with the op for arguments of this kind."""
        x = args[0]
        if type(x) not in PLAIN or x.dim() not in self.dims or x.layout is not torch.strided or x.is_nested:
            return False
        if (None if weight is None else weight.dtype) not in self.weight_dtypes.get(x.dtype, ()):
            return False
        if weight is not None and (weight.device != x.device or weight.shape != x.shape[-1:]):
            return False
        if self.shape is not None and getattr(module, self.shape, None) != x.shape[-1:]:
            return False
        for gate in args[1:]:
            if type(gate) not in PLAIN or gate.layout is not torch.strided or gate.is_nested:
                return False
            if gate.dtype is not x.dtype or gate.dim() != x.dim() or gate.device != x.device:
                return False
        return not self.needs_contiguity or x.is_contiguous()


@dataclass(frozen=True)
class _NormRecipe:
    """The recipe of a norm, which reads its weight and its bias at every call. They are given by their names. The guard
    fails once epsilon changes."""

    eps: float
    weight: str | None
    scope: Scope = field(default_factory=Scope, compare=False, kw_only=True)
    # A subclass may have fields of these names. An annotation here would change the order of its fields.
    bias = cast("str | None", None)
    gate = cast("Gate | None", None)

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def _read(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None] | None:
        """Return weight and bias; None if the module has others than those that were recognised."""
        parameters, weight = module._parameters, None
        if self.weight is not None:
            # FSDP1 stores a parameter as a plain attribute. The table is faster than `nn.Module.__getattr__`.
            weight = parameters[self.weight] if self.weight in parameters else getattr(module, self.weight)
        bias = None if self.bias is None else getattr(module, self.bias)
        is_set = (self.weight is None) == (weight is None) and (self.bias is None) == (bias is None)
        return (weight, bias) if is_set else None

    def __call__(self, module: nn.Module, *args: Any, reference: bool = False, **kwargs: Any) -> Tensor:
        parameters = self._read(module)
        if parameters is None or kwargs or len(args) != (1 if self.gate is None else 2):
            return type(module).forward(module, *args, **kwargs)
        # `tigon.recognition.probing.symbolic` runs the reference on tensors without values.
        if not (reference or self.scope.fits(module, args, parameters[0])):
            return type(module).forward(module, *args, **kwargs)
        return self._compute(args, *parameters, reference)

    def _compute(self, args: tuple, weight: Tensor | None, bias: Tensor | None, reference: bool) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Gate:
    """How a gated norm uses its second input: the options of `gated_rms_norm` that `rms_norm` does not have."""

    activation: GateActivation = "silu"
    gate_first: bool = False
    group_size: int | None = None

    def __str__(self) -> str:
        group = "" if self.group_size is None else f", groups of {self.group_size}"
        return f", {self.activation} gate {'before' if self.gate_first else 'after'} the norm{group}"


# The weight, epsilon, the options that all ops with an RMS norm have, and whether the maximum of the gradient is found.
NormArguments = tuple[Tensor | None, float, dict[str, Any], bool]


@dataclass(frozen=True)
class RMSNormRecipe(_NormRecipe):
    """Recipe: `rms_norm`, or `gated_rms_norm`."""

    offset: float
    rounding: Rounding
    gate: Gate | None = None
    # True if layers in FP8 may read the gradient of the norm's input (`tigon.runtime.maxima`).
    finds_maximum: bool = field(default=False, compare=False)
    part = "rms_norm"

    def _compute(self, args: tuple, weight: Tensor | None, bias: Tensor | None, reference: bool) -> Tensor:
        options: dict[str, Any] = {"offset": self.offset, "rounding": self.rounding}
        if self.gate is None and not reference:
            return rms_norm_of_layer(args[0], weight, self.eps, **options, finds_maximum=self.finds_maximum)
        if self.gate is None:
            return rms_norm_reference(args[0], weight, self.eps, **options)
        options |= vars(self.gate)
        op = gated_rms_norm_reference if reference else gated_rms_norm
        return op(args[0], args[1], weight, self.eps, **options)

    def arguments(self, module: nn.Module, x: Tensor) -> NormArguments | None:
        """Return the arguments for the op; None if the module does anything else with x."""
        parameters = self._read(module)
        if self.gate is not None or parameters is None or not self.scope.fits(module, (x,), parameters[0]):
            return None
        return parameters[0], self.eps, {"offset": self.offset, "rounding": self.rounding}, self.finds_maximum

    def __str__(self) -> str:
        offset = f", offset {self.offset:g}, rounded {self.rounding.replace('_', ' the ')}"
        form = f"{'' if self.gate is None else 'gated_'}rms_norm{' without weight' if self.weight is None else offset}"
        return form + (str(self.gate) if self.gate else "")


# Modules compute a layer norm by several formulas that round once, but differ in the last bit. These functions and the
# reference of the op are the candidates.


def _layer_norm_in_fp32(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    weight, bias = (None if t is None else t.float() for t in (weight, bias))
    return layer_norm_reference(x.float(), weight, bias, eps).to(x.dtype)


def _layer_norm_mixed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    # On the CPU, torch's function also accepts a bf16 input with fp32 weights.
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layer_norm_in_steps(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = x.float() - x.float().mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else weight.float() * y
    return (y if bias is None else y + bias.float()).to(x.dtype)


LAYER_NORM_FORMULAS = (layer_norm_reference, _layer_norm_mixed, _layer_norm_in_fp32, _layer_norm_in_steps)


@dataclass(frozen=True)
class LayerNormRecipe(_NormRecipe):
    """Recipe: `layer_norm`. `formula` is the reference that gives the bits of the module."""

    bias: str | None = None
    formula: Callable = layer_norm_reference
    part = "layer_norm"

    def _compute(self, args: tuple, weight: Tensor | None, bias: Tensor | None, reference: bool) -> Tensor:
        # Without kernels, torch's layer norm sums the gradient of a bf16 weight in bf16. A module that computes in fp32
        # therefore keeps its formula there.
        has_other_formula = self.formula is not layer_norm_reference
        uses_formula = reference or (has_other_formula and not runs_kernels(args[0], weight, bias))
        return (self.formula if uses_formula else layer_norm)(args[0], weight, bias, self.eps)

    def __str__(self) -> str:
        without = [name for name in ("weight", "bias") if getattr(self, name) is None]
        return f"layer_norm without {' and '.join(without)}" if without else "layer_norm"


NormRecipe = RMSNormRecipe | LayerNormRecipe
