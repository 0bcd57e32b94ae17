"""What stands between ops in a forward: sums of the residual before norms, linear layers of one input.

A layer's forward keeps its author's code but for those statements (`tigon.recognition.rewriting`), and the functions
that take their place look at every call whether the norm and the layers are what their op computes; where not, they do
what the statements did.
"""

import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tigon.memory import is_lean
from tigon.ops.dispatch import runs_kernels
from tigon.ops.linears import is_hooked, linears
from tigon.ops.rms_norm import add_rms_norm, rms_norm_passing
from tigon.recognition.kind import kind_of
from tigon.recognition.norms import RMSNormRecipe, recognise_norm
from tigon.recognition.replacement import Replacement
from tigon.recognition.rewriting import ADD_NORM, NORM_PASS, PRODUCTS, rewrite

__all__ = ["GlueRecipe", "glued", "recognise_glue"]


def _arguments(norm: nn.Module, x: Tensor) -> tuple[Tensor | None, float, dict[str, Any]] | None:
    """Weight, epsilon and form of a norm that is patched and does nothing else, if its op takes x."""
    own = getattr(norm, "__dict__", {})  # what is called may be any attribute, a method or a function
    forward = own.get("forward")  # a wrapper of accelerate's has all that a replacement has
    if type(forward) is not Replacement or type(recipe := forward.recipe) is not RMSNormRecipe:
        return None
    more = is_hooked(norm) or type(norm).__call__ is not nn.Module.__call__
    return None if more else recipe.arguments(norm, x)


def add_norm(norm: nn.Module, a: Any, b: Any) -> tuple[Any, Any]:
    """norm(a + b) and a + b."""
    if _alike(a, b) and (found := _arguments(norm, a)) is not None:
        weight, eps, form = found
        # In a lean block the norm of a sum is made again only where all is of one dtype.
        if runs_kernels(a, b, weight) and not (is_lean() and weight is not None and weight.dtype != a.dtype):
            return add_rms_norm(a, b, weight, eps, **form)
    total = a + b
    return norm(total), total


def _alike(a: Any, b: Any) -> bool:
    """Two tensors that a kernel may add, outside of graphs: there the compiler fuses sums."""
    alike = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return alike and a.device == b.device and not torch.compiler.is_compiling()


def norm_pass(norm: nn.Module, x: Any) -> tuple[Any, Any]:
    """norm(x) and x."""
    if isinstance(x, Tensor) and not torch.compiler.is_compiling() and (found := _arguments(norm, x)) is not None:
        weight, eps, form = found
        return rms_norm_passing(x, weight, eps, **form)
    return norm(x), x


def products(x: Any, *layers: nn.Module) -> tuple[Tensor, ...] | None:
    """layer(x) for each, or None: then the layers are called."""
    return None if torch.compiler.is_compiling() else linears(x, layers)


def glued(function: FunctionType) -> FunctionType | None:
    """A forward with its glue replaced, or None if it has none."""
    return rewrite(function, add_norm, norm_pass, products)


class GlueRecipe:
    """The stock forward of a class, rewritten."""

    part = "glue"

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls, self.stock = cls, inspect.getattr_static(cls, "forward")
        # None for a copy of a model that was sent to where the class is written otherwise, or cannot be read.
        self.forward = glued(self.stock) if isinstance(self.stock, FunctionType) else None

    def __call__(self, module: nn.Module, *args, **kwargs) -> Any:
        # A compiler fuses by itself; and somebody may have given the class another forward.
        other = self.forward is None or type(module).forward is not self.stock
        if torch.compiler.is_compiling() or other:
            return type(module).forward(module, *args, **kwargs)
        return self.forward(module, *args, **kwargs)

    def __reduce__(self):
        return GlueRecipe, (self.cls,)

    def __str__(self) -> str:
        words = {ADD_NORM: "add + norm", NORM_PASS: "norm + residual", PRODUCTS: "products of one input"}
        return ", ".join(word for name, word in words.items() if name in self.forward.__code__.co_freevars)


_rms_norms: dict[tuple, bool] = {}  # by kind: a layer's number makes it a kind of its own, and its norms none


def _is_rms_norm(module: nn.Module) -> bool:
    kind = kind_of(module)
    if kind not in _rms_norms:
        _rms_norms[kind] = isinstance(recognise_norm(module), RMSNormRecipe)
    return _rms_norms[kind]


def recognise_glue(module: nn.Module) -> GlueRecipe | None:
    """A module that adds to a residual before it calls a norm, or calls several linear layers with one input."""
    forward = inspect.getattr_static(type(module), "forward", None)
    children = [child for child in module._modules.values() if child is not None]
    if len(children) < 2 or not isinstance(forward, FunctionType) or glued(forward) is None:
        return None
    several = sum(isinstance(child, nn.Linear) for child in children) > 1
    serves = several or any(map(_is_rms_norm, children))
    return GlueRecipe(type(module)) if serves else None
