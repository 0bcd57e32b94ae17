"""Recognise statements of a forward that one op computes together.

They are the sum of a residual and the norm after it, a norm and the residual beside it, and linear layers that have the
same input. All other statements stay as their author wrote them (`tigon.recognition.rewriting`). The functions that
replace the statements check at every call that the norm and the linear layers compute what their op computes.
Otherwise they do what the statements did.
"""

import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tigon.memory.lean import is_lean
from tigon.ops.mlps.projections import is_hooked, linears
from tigon.ops.norms.rms_norm import add_rms_norm, rms_norm_with_residual
from tigon.recognition.kind import kind_of
from tigon.recognition.norms import RMSNormRecipe, recognise_norm
from tigon.recognition.replacement import Replacement
from tigon.recognition.rewriting import ADD_NORM, NORM_PASS, PRODUCTS, overwritten_inputs, rewrite
from tigon.recognition.source import CodeState, code_state, innermost, is_unchanged
from tigon.recognition.trials import explain_none, unrecorded
from tigon.runtime.device import runs_kernels
from tigon.runtime.reach import explore

__all__ = ["FusedStatementsRecipe", "fuse_statements", "overwritten_norms", "recognise_fused_statements"]


def _arguments(norm: nn.Module, x: Tensor) -> tuple[Tensor | None, float, dict[str, Any]] | None:
    """Weight, epsilon and form of a norm that is patched and does nothing else, if its op takes x."""
    own = getattr(norm, "__dict__", {})  # what is called may be any attribute, a method or a function
    forward = own.get("forward")  # a wrapper of accelerate's has all that a replacement has
    if type(forward) is not Replacement or type(recipe := forward.recipe) is not RMSNormRecipe or not forward.holds():
        return None
    return None if is_hooked(norm) else recipe.arguments(norm, x)


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
        return rms_norm_with_residual(x, weight, eps, **form)
    return norm(x), x


def products(x: Any, *layers: nn.Module) -> tuple[Tensor, ...] | None:
    """layer(x) for each, or None: then the layers are called."""
    return None if torch.compiler.is_compiling() else linears(x, layers)


def fuse_statements(function: FunctionType) -> FunctionType | str | None:
    """Return a forward with such statements replaced, None if it has none, or the reason why it cannot be rewritten."""
    return rewrite(function, add_norm, norm_pass, products)


class FusedStatementsRecipe:
    """The stock forward of a class, rewritten."""

    part = "fused_statements"

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls, self.stock = cls, inspect.getattr_static(cls, "forward")
        self.forwards: dict[Any, FunctionType | None] = {}
        self.states: dict[Any, CodeState] = {}

    @property
    def forward(self) -> FunctionType | None:
        """The rewritten forward of the class."""
        return self.forward_for(self.stock)

    def forward_for(self, forward: Any) -> FunctionType | None:
        """The rewritten form of `forward`, if it is the stock one, or the stock one in more wrappers.

        FSDP2 gives a layer a subclass of its class, whose forward transformers wraps once more. The result is None for
        any other forward, and for a copy of a model that was sent to where the class is written otherwise.
        """
        if forward not in self.forwards:
            functions = isinstance(forward, FunctionType) and isinstance(self.stock, FunctionType)
            same = functions and innermost(forward) is innermost(self.stock)
            result = fuse_statements(forward) if same else None
            self.forwards[forward] = result if isinstance(result, FunctionType) else None
            self.states[forward] = code_state(forward) if same else ()
        # A debugger may give a function other code: the rewritten form is that of the code before.
        return self.forwards[forward] if is_unchanged(self.states[forward]) else None

    def __call__(self, module: nn.Module, *args, **kwargs) -> Any:
        stock = type(module).forward
        # A compiler fuses by itself; and somebody may have given the class another forward.
        forward = None if torch.compiler.is_compiling() else self.forward_for(stock)
        return (forward or stock)(module, *args, **kwargs)

    def __reduce__(self):
        return FusedStatementsRecipe, (self.cls,)

    def __str__(self) -> str:
        words = {ADD_NORM: "add + norm", NORM_PASS: "norm + residual", PRODUCTS: "products of one input"}
        names = innermost(self.forward).__code__.co_freevars
        return ", ".join(word for name, word in words.items() if name in names)


# By what recognition depends on. A layer's number makes it a kind of its own, and the norms in all layers are one kind.
_rms_norms: dict[tuple, bool] = {}


def _is_rms_norm(module: nn.Module) -> bool:
    key = kind_of(module), explore(module).fingerprint
    if key not in _rms_norms:
        _rms_norms[key] = isinstance(recognise_norm(module), RMSNormRecipe)
    return _rms_norms[key]


def overwritten_norms(model: nn.Module) -> dict[nn.Module, str]:
    """Children whose input is changed in place after they have run, and why their own forward must stay.

    A norm in half precision saves an fp32 copy of its input for backward. The op saves the input itself, which must not
    change until then.
    """
    reasons = {}
    for module in model.modules():
        forward = inspect.getattr_static(type(module), "forward", None)
        if module._modules and isinstance(forward, FunctionType):
            for name, line in overwritten_inputs(forward).items():
                if isinstance(child := getattr(module, name, None), nn.Module):
                    reasons[child] = f"its input is changed in place afterwards ({type(module).__name__}, line {line})"
    return reasons


def recognise_fused_statements(module: nn.Module) -> FusedStatementsRecipe | str | None:
    """Recognise a module that adds to a residual before it calls a norm, or calls several linear layers with one input.

    Return a recipe, the reason why the forward of such a module cannot be rewritten, or None for another module.
    """
    forward = inspect.getattr_static(type(module), "forward", None)
    children = [child for child in module._modules.values() if child is not None]
    if len(children) < 2 or not isinstance(forward, FunctionType):
        return None
    function = fuse_statements(forward)
    several = sum(isinstance(child, nn.Linear) for child in children) > 1
    if function is None:
        explain_none("its forward has no sum or residual before a norm, and no linear layers called with one input")
        return None
    with unrecorded():
        has_rms_norm = any(map(_is_rms_norm, children))
    if not (several or has_rms_norm):
        explain_none("its forward could be rewritten, but it has no RMS norm, and fewer than two plain linear layers")
        return None
    return function if isinstance(function, str) else FusedStatementsRecipe(type(module))
