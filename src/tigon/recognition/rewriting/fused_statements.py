"""Recognise statements of a forward that one op computes together.

There are four patterns: a sum and the norm of that sum, a norm whose input is also the residual, several linear layers
with the same input, and the norms of queries and keys with the rotary embedding after them. All other statements stay
as their author wrote them (`tigon.recognition.rewriting.rewriting`). The functions that replace the statements check at
every call that the norm and the linear layers compute what their op computes. If one of them does not, the functions
compute what the stock statements compute.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tigon.memory.lean import is_lean
from tigon.ops.mlps.projections import linears
from tigon.ops.norms.rms_norm import add_rms_norm_of_layer, rms_norm_with_input
from tigon.recognition.parts.adapters import compute_layers, read_projections
from tigon.recognition.parts.fp8 import compute_in_fp8
from tigon.recognition.parts.norm_recipes import NormArguments, RMSNormRecipe
from tigon.recognition.probing.standin import is_linear
from tigon.recognition.probing.trials import explain_none
from tigon.recognition.replacement import Replacement
from tigon.recognition.rewriting.overwriting import overwritten_inputs
from tigon.recognition.rewriting.rewriting import HEAD_NORMS, rewrite
from tigon.recognition.rewriting.source import CodeState, Rewritten, cached_by_code, code_state, innermost, is_unchanged
from tigon.recognition.rewriting.statements import ADD_NORM, NORM_WITH_RESIDUAL, PRODUCTS
from tigon.runtime.device import runs_kernels
from tigon.runtime.stock import does_more_than_forward


def _arguments(norm: Any, x: Tensor) -> NormArguments | None:
    """Return the arguments for the op of a patched norm without hooks; None otherwise. `norm` may be any attribute."""
    forward = getattr(norm, "__dict__", {}).get("forward")
    # The type is compared, because a wrapper of accelerate has all attributes of a replacement.
    if type(forward) is not Replacement or type(recipe := forward.recipe) is not RMSNormRecipe:
        return None
    # A shallow copy of a norm has the forward of the norm that it was copied from.
    if (module := forward.module()) is None or module is not norm or does_more_than_forward(module):
        return None
    return recipe.arguments(module, x) if forward.guard is None or forward.guard.holds(module) else None


def add_norm(norm: nn.Module, a: Any, b: Any) -> tuple[Any, Any]:
    """Return norm(a + b) and a + b."""
    if _is_fusible_sum(a, b) and (arguments := _arguments(norm, a)) is not None:
        weight, eps, options, finds_maximum = arguments
        # In a lean block, the norm of a sum is recomputed only if all tensors have one dtype.
        if runs_kernels(a, b, weight) and not (weight is not None and weight.dtype != a.dtype and is_lean()):
            return add_rms_norm_of_layer(a, b, weight, eps, **options, finds_maximum=finds_maximum)
    total = a + b
    return norm(total), total


def _is_fusible_sum(a: Any, b: Any) -> bool:
    """Return True if a kernel may add two tensors. In graphs it may not, because the compiler fuses sums itself."""
    is_plain = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return is_plain and a.device == b.device and not torch.compiler.is_compiling()


def norm_with_residual(norm: nn.Module, x: Any) -> tuple[Any, Any]:
    """Return norm(x) and x."""
    if isinstance(x, Tensor) and not torch.compiler.is_compiling() and (arguments := _arguments(norm, x)) is not None:
        weight, eps, options, finds_maximum = arguments
        return rms_norm_with_input(x, weight, eps, **options, finds_maximum=finds_maximum)
    return norm(x), x


def products(x: Any, *layers: nn.Module) -> tuple[Tensor, ...] | None:
    """Return layer(x) for each layer; None if the caller has to call the layers."""
    if torch.compiler.is_compiling():
        return None
    if (outputs := linears(x, layers)) is not None or (outputs := compute_in_fp8(x, layers)) is not None:
        return outputs
    projections = read_projections(x, layers)
    return None if projections is None else compute_layers(x, projections)


@dataclass(frozen=True)
class _StartedNorm:
    """A norm over the features of each head, which `norm_rope` computes."""

    norm: nn.Module
    weight: Tensor | None
    options: dict[str, Any]


def start_norm(rope: Any, norm: nn.Module, x: Any) -> tuple[Any, _StartedNorm | None]:
    """Return x and its norm if `norm_rope` may compute the norm together with `rope`, else norm(x) and None. In graphs,
    the norm is computed at once, because the compiler fuses it."""
    if torch.compiler.is_compiling() or not hasattr(rope, "rotate_normalised"):
        return norm(x), None
    if isinstance(x, Tensor) and x.dim() == 4 and (arguments := _arguments(norm, x)) is not None:
        weight, eps, options, _ = arguments
        if runs_kernels(x, weight):
            return x, _StartedNorm(norm, weight, {"eps": eps, **options})
    return norm(x), None


def norm_rope(
    rope: Any, started_norms: tuple[_StartedNorm | None, ...], transposed: tuple[bool, ...], *args: Any, **kwargs: Any
) -> Any:
    """Compute the norms that `start_norm` has started, then `rope(*args, **kwargs)`, if possible in one kernel. `rope`
    is None if nothing is to be rotated. `transposed` says for each tensor whether dimensions 1 and 2 were exchanged
    since its norm was started."""
    norms = [norm for norm in started_norms if norm is not None]
    if rope is not None and len(norms) == len(started_norms) and norms[0].options == norms[-1].options:
        weights = [norm.weight for norm in norms]
        if (rotated := rope.rotate_normalised(weights, norms[0].options, args, kwargs)) is not None:
            return rotated
    tensors = list(args)
    for i, (started_norm, is_transposed) in enumerate(zip(started_norms, transposed, strict=True)):
        if started_norm is not None:
            norm, x = started_norm.norm, tensors[i]
            tensors[i] = norm(x.transpose(1, 2)).transpose(1, 2) if is_transposed else norm(x)
    if rope is not None:
        return rope(*tensors, **kwargs)
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


@cached_by_code
def _rewrite(function: FunctionType, fuses: bool, is_recurrent: bool, *exchanged: str) -> Rewritten | str | None:
    helpers = (add_norm, norm_with_residual, products, start_norm, norm_rope) if fuses else ()
    return rewrite(function, helpers, exchanged, is_recurrent)


def rewrite_forward(
    function: FunctionType,
    exchanged: Mapping[str, Callable],
    fuses_statements: bool = False,
    is_recurrent: bool = False,
) -> FunctionType | str | None:
    """Return a forward that calls other functions in place of globals, and whose statements may be fused. With
    `is_recurrent`, the other functions take results of `repeat_heads` too. Return None if nothing of the forward is
    replaced, or the reason why it cannot be rewritten."""
    result = _rewrite(function, fuses_statements, is_recurrent, *exchanged)
    return result.build(function, exchanged) if isinstance(result, Rewritten) else result


def fuse_statements(function: FunctionType) -> FunctionType | str | None:
    """Return a forward whose patterns are replaced, None if it has none, or the reason why it cannot be rewritten."""
    return rewrite_forward(function, {}, fuses_statements=True)


class RewrittenForward:
    """A recipe that runs a rewritten form of the stock forward of a class."""

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls, self.stock = cls, inspect.getattr_static(cls, "forward", None)
        # The rewritten form of each forward, and the state of the code that was rewritten.
        self.forwards: dict[Any, tuple[FunctionType | None, CodeState]] = {}

    def rewrite(self, forward: FunctionType) -> FunctionType | str | None:
        """Return the rewritten form of a forward; None or a reason if it has none."""
        raise NotImplementedError

    def forward_for(self, forward: Any) -> FunctionType | None:
        """Return the rewritten form of `forward`, if it is the stock forward, or the stock forward in more wrappers.
        FSDP2 gives a layer a subclass of its class, whose forward transformers wraps once more. The result is None for
        any other forward. It is None too if the model was unpickled where the class has another source."""
        if forward not in self.forwards:
            are_functions = isinstance(forward, FunctionType) and isinstance(self.stock, FunctionType)
            is_stock = are_functions and innermost(forward) is innermost(self.stock)
            result = self.rewrite(forward) if is_stock else None
            rewritten = result if isinstance(result, FunctionType) else None
            self.forwards[forward] = rewritten, code_state(forward) if is_stock else ()
        # A debugger may give a function other code. The rewritten form then belongs to the old code and must not run.
        rewritten, state = self.forwards[forward]
        return rewritten if is_unchanged(state) else None

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The class may have another forward by now.
        stock = type(module).forward
        forward = self.forward_for(stock)
        return (stock if forward is None else forward)(module, *args, **kwargs)


class FusedStatementsRecipe(RewrittenForward):
    """Recipe: the stock forward of a class, with its statements fused."""

    part = "fused_statements"

    def __init__(self, cls: type[nn.Module], has_head_norms: bool = False) -> None:
        super().__init__(cls)
        # True if one op computes the norms of queries and keys and the rotary embedding. Only the name depends on it.
        self.has_head_norms = has_head_norms

    def rewrite(self, forward: FunctionType) -> FunctionType | str | None:
        return fuse_statements(forward)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A compiler fuses statements itself.
        if torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)
        return super().__call__(module, *args, **kwargs)

    def __reduce__(self) -> tuple:
        return FusedStatementsRecipe, (self.cls, self.has_head_norms)

    def with_head_norms(self, module: nn.Module, recipes: Mapping[nn.Module, Any]) -> "FusedStatementsRecipe":
        """Return the recipe for a module whose rotary embedding is an op, which may compute norms too."""
        # A layer that reads the keys of another layer has no norm of keys.
        norms = [norm for name in self.head_norms if (norm := getattr(module, name, None)) is not None]
        has_recipes = (isinstance(norm, nn.Module) and isinstance(recipes.get(norm), RMSNormRecipe) for norm in norms)
        return FusedStatementsRecipe(self.cls, bool(norms) and all(has_recipes))

    def explain_other_norms(self, module: nn.Module, recipes: Mapping[nn.Module, Any]) -> str:
        """Return a sentence about the norms of the module that are not computed with its rotary embedding, or ""."""
        fused = self.head_norms if self.has_head_norms else ()
        others = [n for n, m in module.named_children() if n not in fused and isinstance(recipes.get(m), RMSNormRecipe)]
        reason = "no rotary embedding follows in a form that one op computes together with a norm"
        return f"computed by themselves: {', '.join(others)} ({reason})" if others else ""

    @property
    def head_norms(self) -> tuple[str, ...]:
        """Return the names of the children that normalise queries and keys just before their rotary embedding."""
        forward = self.forward_for(self.stock)
        return () if forward is None else vars(innermost(forward)).get(HEAD_NORMS, ())

    def __str__(self) -> str:
        words = {ADD_NORM: "add + norm", NORM_WITH_RESIDUAL: "norm + residual", PRODUCTS: "products of one input"}
        forward = self.forward_for(self.stock)
        names = innermost(forward).__code__.co_freevars if forward is not None else ()
        fused = [word for name, word in words.items() if name in names]
        return ", ".join(fused + ["q/k norm + rope"] * self.has_head_norms)


def _forward_of(module: nn.Module) -> FunctionType | None:
    """Return the forward of a module; None if its class has none, as `nn.ModuleList`, or one that is no function."""
    forward = inspect.getattr_static(type(module), "forward", None)
    return forward if isinstance(forward, FunctionType) and forward is not nn.Module.forward else None


def overwritten_children(modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return the children whose input is written in place after they have run, with the reason to keep their forward. A
    norm in half precision and an fp32 adapter save an fp32 copy of their input for backward. Their ops save the input
    itself, which must not change until then."""
    reasons: dict[nn.Module, str] = {}
    for module in modules:
        if module._modules and (forward := _forward_of(module)) is not None:
            for name, line in overwritten_inputs(forward).items():
                if isinstance(child := getattr(module, name, None), nn.Module):
                    reasons[child] = f"its input is changed in place afterwards ({type(module).__name__}, line {line})"
    return reasons


def recognise_fused_statements(module: nn.Module) -> FusedStatementsRecipe | str | None:
    """Recognise a module that adds before a norm, or calls several linear layers with one input."""
    forward = _forward_of(module)
    if sum(child is not None for child in module._modules.values()) < 2 or forward is None:
        return None
    function = fuse_statements(forward)
    if function is None:
        explain_none("its forward has no sum or residual before a norm, and no linear layers called with one input")
    return FusedStatementsRecipe(type(module)) if isinstance(function, FunctionType) else function


def has_fusible_child(module: nn.Module, recipes: Mapping[nn.Module, Any]) -> bool:
    """Return True if a module has an RMS norm that an op computes, or several linear layers."""
    children = [child for child in module._modules.values() if child is not None]
    return sum(map(is_linear, children)) > 1 or any(isinstance(recipes.get(c), RMSNormRecipe) for c in children)
