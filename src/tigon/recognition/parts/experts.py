"""Recognise experts of a mixture: modules that hold the weights of all experts as one tensor.

transformers marks such modules with their layout (`has_gate`, `has_bias`, `is_transposed`), and the config names the
implementation that computes them. If that is "grouped_mm" (the default) or "eager", and `moe_mlp` computes the same,
`moe_mlp` replaces it. The recipe reads the config at every call. If the config names another implementation by then,
permanently or during a generation, the stock forward runs.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon.ops.adapters.lora_experts import ExpertAdapter, adapted_moe_mlp
from tigon.ops.experts.arguments import ACTIVATIONS, ExpertParameters
from tigon.ops.experts.moe_mlp import moe_mlp
from tigon.ops.mlps.glu import ClampedGate
from tigon.recognition.parts.comparison import is_as_exact, run_probes
from tigon.recognition.parts.fp8_experts import FP8Experts
from tigon.recognition.probing.standin import (
    gradients,
    has_no_tensors,
    normal,
    own_tensors,
    same_bits,
    same_gradients,
    stand_in,
)
from tigon.recognition.probing.trials import record
from tigon.recognition.replacement import is_changed
from tigon.runtime.device import KERNEL_DTYPES, PLAIN
from tigon.runtime.reach.explore import explore

# The implementations of transformers that compute what `moe_mlp` computes.
CHOICES = ("grouped_mm", "eager")
EXPERTS, HIDDEN, INNER = 5, 24, 40


def parameter_names(module: Any) -> list[str]:
    """Return the names of the parameters in the order of `moe_mlp`: up, down, and their biases."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    return [up, "down_proj", *([f"{up}_bias", "down_proj_bias"] if module.has_bias else [])]


@dataclass
class AdaptedWeights:
    """The adapters of the experts that a call is about to run, for `with_adapters`."""

    experts: nn.Module
    up: tuple[ExpertAdapter, ...]
    down: tuple[ExpertAdapter, ...]
    # True once the recipe of the experts has computed the adapters.
    was_used: bool = False


_adapted: ContextVar[AdaptedWeights | None] = ContextVar("tigon_expert_adapters", default=None)


def current_adapters(experts: nn.Module) -> AdaptedWeights | None:
    """Return the adapters that the current call of these experts computes."""
    weights = None if torch.compiler.is_compiling() else _adapted.get()
    return weights if weights is not None and weights.experts is experts else None


@contextlib.contextmanager
def with_adapters(weights: AdaptedWeights) -> Iterator[None]:
    """Let the recipe of some experts compute these adapters in the block."""
    token = _adapted.set(weights)
    try:
        yield
    finally:
        _adapted.reset(token)


@dataclass(frozen=True)
class ExpertsRecipe:
    """Recipe: `moe_mlp` on the module's parameters. `activation` is the name of an activation of the op, or a clamped
    gate. If it is None, the op calls the module's own activation."""

    activation: str | ClampedGate | None
    # The implementations for which the recipe replaces the forward, because they compute the same.
    choices: tuple[str, ...]
    # The decision which calls run in FP8; None if none does. Each module has its own.
    fp8: FP8Experts | None = field(default=None, compare=False)
    live: ClassVar[tuple[str, ...]] = ("_experts_implementation", "_experts_implementation_internal")

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not self.takes(module, args, kwargs):
            return type(module).forward(module, *args, **kwargs)
        weights = [getattr(module, name) for name in parameter_names(module)]
        activation = self.activation or (module._apply_gate if module.has_gate else module.act_fn)
        transposed: bool = module.is_transposed
        up, down, *biases = weights
        parameters = ExpertParameters(up, down, *(biases or (None, None)))
        x, index, router_weights = args
        if (adapted := current_adapters(module)) is not None:
            adapted.was_used = True
            return adapted_moe_mlp(
                x, parameters, index, router_weights, adapted.up, adapted.down, activation, transposed
            )
        if self.fp8 is not None:
            y = self.fp8.compute(x, parameters, index, router_weights, transposed, activation)
            if y is not None:
                return y
        return moe_mlp(
            x, up, down, index, router_weights, up_bias=parameters.up_bias, down_bias=parameters.down_bias,
            transposed=transposed, activation=activation,
        )  # fmt: skip

    def takes(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return True if the op computes what the module computes of these arguments."""
        implementation = module.config._experts_implementation
        weights = [getattr(module, name) for name in parameter_names(module)]
        is_plain = all(type(w) in PLAIN and w.dtype == weights[0].dtype in KERNEL_DTYPES for w in weights)
        # "eager" computes its products in the dtype of autocast, "grouped_mm" in the dtype of the weights.
        is_cast = implementation == "eager" and torch.is_autocast_enabled(weights[0].device.type)
        fits = len(args) == 3 and not kwargs and args[0].dim() == args[1].dim() == 2
        return implementation in self.choices and not is_cast and fits and is_plain

    def __str__(self) -> str:
        return f"moe_mlp, {self.activation or 'its own activation'}"


def small_experts(module: Any, seed: int, implementation: str) -> nn.Module:
    """Return a copy of the module with a few small experts, in bf16."""
    names = parameter_names(module)
    sizes = ((HIDDEN, INNER * (1 + module.has_gate)), (INNER, HIDDEN))
    shapes = [s if module.is_transposed else s[::-1] for s in sizes] + [(s[1],) for s in sizes]
    weights = {n: normal(seed + len(n), EXPERTS, *s).mul(0.4).bfloat16() for n, s in zip(names, shapes, strict=False)}
    config = SimpleNamespace(**vars(module.config) | {"_experts_implementation": implementation})
    return stand_in(module, weights, num_experts=EXPERTS, config=config)


def _matching_activations(module: Any, dtype: torch.dtype) -> set[str]:
    """Return the op's activations that agree bit for bit with the module's own, at values of every size."""
    x = (normal(7, 64, 2 * INNER) * torch.logspace(-4, 15, 64)[:, None]).to(dtype)
    y = (module._apply_gate if module.has_gate else module.act_fn)(x.clone())
    outputs = {kind: f(x) for kind, (_, f, width) in ACTIVATIONS.items() if width == 1 + module.has_gate}
    return {kind for kind, z in outputs.items() if y.dtype == z.dtype and torch.equal(y, z)}


def _matching_clamped_gate(module: Any) -> ClampedGate | None:
    """Return the clamped gate that agrees bit for bit with the module's own, at values of every size."""
    # An attribute may hold a number of the gate.
    numbers = sorted({value for value in vars(module).values() if type(value) is float and value > 0})
    forms = itertools.product(numbers, [None, *numbers], (0.0, 1.0), (False, True))
    candidates = [ClampedGate(*form) for form in forms] if module.has_gate else []
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        x = normal(seed, 64, 2 * INNER) * torch.logspace(-4, 3 if dtype == torch.float16 else 15, 64)[:, None]
        y = module._apply_gate(x.to(dtype)) if candidates else x
        candidates = [c for c in candidates if same_bits(c.reference(x.to(dtype)), y)]
    x = normal(3, 64, 2 * INNER) * 8
    if candidates:
        stock = gradients(functools.partial(module._apply_gate, x), [x])
        candidates = [c for c in candidates if same_gradients(gradients(functools.partial(c.reference, x), [x]), stock)]
    return next(iter(candidates), None)


def _reproduces(recipe: ExpertsRecipe, module: nn.Module, implementation: str) -> bool:
    """Return True if the recipe computes what the module computes."""
    # The router's weights have this dtype.
    for seed, dtype in ((10, torch.float32), (20, torch.bfloat16)):
        twin, x = small_experts(module, seed, implementation), (normal(seed, 17, HIDDEN) * 3).bfloat16()
        weights, index = normal(seed + 1, 17, EXPERTS).sigmoid().bfloat16().topk(3)
        wide = stand_in(twin, {name: p.float() for name, p in twin._parameters.items() if p is not None})
        functions: tuple[Callable[..., Tensor], ...] = (type(module).forward, recipe)
        stock, ours = (f(twin, x, index, weights.to(dtype)) for f in functions)
        exact, ours_in_fp32 = (f(wide, x.float(), index, weights.float()) for f in functions)
        reproduces = is_as_exact(stock, ours, exact, ours_in_fp32)
        if not record(reproduces, recipe, twin, [x], ours, stock, mode=f"implementation {implementation!r}"):
            return False
    return True


def is_experts(module: Any) -> bool:
    """Return True if a module has the marks of experts in transformers."""
    marks = "has_gate", "has_bias", "is_transposed", "num_experts", "config"
    return all(hasattr(module, mark) for mark in marks) and hasattr(module.config, "_experts_implementation")


def recognise_experts(module: Any) -> ExpertsRecipe | str | None:
    """Recognise experts in the layout that transformers marks."""
    if not is_experts(module):
        return None
    children = [child for child in module._modules.values() if child is not None]
    tensors = {name for name, tensor in own_tensors(module).items() if tensor is not None}
    has_plain_children = all(has_no_tensors(child) and not is_changed(child) for child in children)
    if tensors != set(parameter_names(module)) or not has_plain_children:
        return f"has other state than {', '.join(parameter_names(module))}, or hooks on its activation"
    if (implementation := module.config._experts_implementation) not in CHOICES:
        return f"its config has chosen {implementation!r} for its experts"
    if (reach := explore(module, ExpertsRecipe.live)).reason:
        return reach.reason

    def find() -> ExpertsRecipe:
        kinds = _matching_activations(module, torch.float32) & _matching_activations(module, torch.bfloat16)
        recipe = ExpertsRecipe(next(iter(kinds), None) or _matching_clamped_gate(module), CHOICES)
        return replace(recipe, choices=tuple(name for name in CHOICES if _reproduces(recipe, module, name)))

    result = run_probes(find, module, reach)
    if isinstance(result, str) or implementation in result.choices:
        return result
    return f"computes something else than moe_mlp with {implementation!r}, the implementation in its config"
