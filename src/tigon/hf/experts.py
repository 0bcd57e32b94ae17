"""Experts of a mixture: modules that hold the weights of all experts as one tensor and are given the router's choice.

transformers marks them with what their layout is (`has_gate`, `has_bias`, `is_transposed`) and lets the config choose
who computes them. Where that is "grouped_mm" (the default) or "eager", `moe_mlp` does, if it computes the same; another
choice, made later or for the length of a generation, is respected at every call.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.hf.recognise import describe
from tigon.hf.replacement import is_changed
from tigon.hf.standin import in_mode, normal, probing, stand_in, without_parameters
from tigon.ops.moe_mlp import ACTIVATIONS, moe_mlp

__all__ = ["Experts", "recognise_experts"]

FLAGS = ("has_gate", "has_bias", "is_transposed", "num_experts")
EXPERTS, HIDDEN, INNER = 5, 24, 40  # of a twin


class _Choice:
    """A config in which another implementation is chosen, without writing to it or to its sub-configs."""

    def __init__(self, config: Any, implementation: str) -> None:
        self._config, self._experts_implementation = config, implementation

    def __getattr__(self, name: str) -> Any:
        if name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)


def _names(module: nn.Module) -> list[str]:
    """Of the parameters, in the order of `moe_mlp`: up, down, and their biases."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    return [up, "down_proj", *([f"{up}_bias", "down_proj_bias"] if module.has_bias else [])]


@dataclass(frozen=True)
class Experts:
    """`moe_mlp` of the module's own parameters, with an activation of the op or, for None, the module's own."""

    activation: str | None
    implementations: tuple[str, ...]  # that compute the same
    skipped: tuple[tuple[str, type], ...]  # the children that the op does without: the activation

    def __call__(self, module: nn.Module, *args, **kwargs) -> Tensor:
        chosen, weights = module.config._experts_implementation, [getattr(module, name) for name in _names(module)]
        skips = all(type(module._modules[n]) is cls and not is_changed(module._modules[n]) for n, cls in self.skipped)
        # Its products are in the dtype of autocast, grouped ones in that of the weights.
        cast = chosen == "eager" and torch.is_autocast_enabled(weights[0].device.type)
        plain = all(type(w) in (nn.Parameter, Tensor) and w.is_floating_point() for w in weights)  # no DTensor
        fits = len(args) == 3 and not kwargs and args[0].dim() == args[1].dim() == 2
        if chosen not in self.implementations or not (skips and plain and fits) or cast:
            return type(module).forward(module, *args, **kwargs)
        up, down, *biases = weights
        up_bias, down_bias = biases or (None, None)
        own = module._apply_gate if module.has_gate else module.act_fn
        return moe_mlp(
            args[0], up, down, *args[1:], up_bias=up_bias, down_bias=down_bias,
            transposed=module.is_transposed, activation=self.activation or own,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"moe_mlp, {self.activation or 'its own activation'}, where {' or '.join(self.implementations)} is chosen"
        )


def _twin(module: nn.Module, implementation: str, dtype: torch.dtype, seed: int) -> nn.Module:
    """The module with a few small experts, and its attributes that name sizes made small likewise."""
    up, down = (HIDDEN, INNER * (1 + module.has_gate)), (INNER, HIDDEN)
    shapes = [s if module.is_transposed else s[::-1] for s in (up, down)] + [up[1:], down[1:]]
    names, children = _names(module), {n: child and in_mode(child, False) for n, child in module._modules.items()}
    sizes = zip(names, shapes, (0.5, 0.3, 1.0, 1.0), strict=False)
    own = {n: (normal(seed + i, EXPERTS, *s) * size).to(dtype) for i, (n, s, size) in enumerate(sizes)}
    config = _Choice(module.config, implementation)
    return stand_in(module, own, children, num_experts=EXPERTS, config=config)


def _activation(twin: nn.Module, dtype: torch.dtype) -> set[str]:
    """The activations of the op that agree bit for bit with the module's, at values of every size."""
    x = (normal(7, 64, 2 * INNER) * torch.logspace(-4, 15, 64)[:, None]).to(dtype)
    y = (twin._apply_gate if twin.has_gate else twin.act_fn)(x.clone())
    same = lambda z: isinstance(y, Tensor) and y.dtype == z.dtype and torch.equal(y, z)
    kinds = {kind: reference(x) for kind, (_, reference, width) in ACTIVATIONS.items() if (width == 2) == twin.has_gate}
    return {kind for kind, z in kinds.items() if same(z)}


def _reproduces(recipe: Experts, module: nn.Module, implementation: str) -> bool:
    """Whether the recipe is the module: in fp32 but for the order of the sums, in bf16 as near to fp32 as the module."""
    for seed, weights_dtype in itertools.product((10, 20), (torch.float32, torch.bfloat16)):
        x = (normal(seed, 17, HIDDEN) * 3).bfloat16()
        weights, index = normal(seed + 1, 17, EXPERTS).sigmoid().bfloat16().topk(3)
        run = lambda f, twin, dtype, w=weights_dtype, x=x, weights=weights, index=index: f(
            twin, x.to(dtype), index.clone(), weights.to(w)
        ).double()
        twin = _twin(module, implementation, torch.bfloat16, seed)
        wide = stand_in(twin, {name: p.float() for name, p in twin._parameters.items()})
        exact, stock = (run(type(module).forward, *of) for of in ((wide, torch.float32), (twin, torch.bfloat16)))
        error = lambda y, exact=exact: (y - exact).abs().max() / exact.abs().max()
        if not (error(run(recipe, wide, torch.float32)) < 1e-5 and error(stock) < 0.1):
            return False
        if error(run(recipe, twin, torch.bfloat16)) > 2 * error(stock) + 2**-8:
            return False
    return True


def recognise_experts(module: nn.Module) -> Experts | str | None:
    """Experts in the layout that transformers marks, whose forward the config chooses."""
    if not hasattr(getattr(module, "config", None), "_experts_implementation") or not all(
        hasattr(module, flag) for flag in FLAGS
    ):
        return None
    own = {name for name, t in (module._parameters | module._buffers).items() if t is not None}
    if own != set(_names(module)) or not all(child is None or without_parameters(child) for child in module.children()):
        return f"has other parameters than {', '.join(_names(module))}"
    chosen = module.config._experts_implementation
    if chosen not in ("grouped_mm", "eager"):
        return f"the config has chosen its own implementation: {chosen!r}"
    if changed := [name for name, child in module._modules.items() if child is not None and is_changed(child)]:
        return f"has hooks on {', '.join(changed)}, or another forward there"
    skipped = tuple((name, type(child)) for name, child in module._modules.items() if child is not None)
    try:
        with probing():
            kinds = [_activation(_twin(module, chosen, t, 0), t) for t in (torch.float32, torch.bfloat16)]
            activation = next(iter(sorted(kinds[0] & kinds[1])), None)
            both = Experts(activation, ("grouped_mm", "eager"), skipped if activation else ())
            right = tuple(name for name in both.implementations if _reproduces(both, module, name))
    except Exception as error:
        return f"cannot be run by itself ({describe(error)})"
    if chosen not in right:
        return f"computes something else than moe_mlp does, where {chosen!r} is chosen"
    return Experts(activation, right, both.skipped)
