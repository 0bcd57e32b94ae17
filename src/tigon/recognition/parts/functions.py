"""Replace functions of a model's file, which a forward calls by their global names, by ops that compute the same.

The forward is rewritten to call another function. If the globals of the file, such as `apply_rotary_pos_emb`, were
changed, other models of the process would compute other bits.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from tigon.recognition.guards.graph_guard import add_guard_of_object
from tigon.recognition.guards.guard import FunctionGuard
from tigon.recognition.rewriting.fused_statements import RewrittenForward, rewrite_forward
from tigon.recognition.rewriting.source import innermost
from tigon.runtime.compat.graphs import is_tracing

# The Python module whose wrappers call the function of another package, if that package is installed.
_DISPATCHER = "transformers.integrations.hub_kernels"


def computed_function(function: types.FunctionType) -> types.FunctionType:
    """Return the function that a dispatcher of transformers wraps, or the function itself. A dispatched function, as of
    flash-linear-attention, computes what the wrapped one computes."""
    return innermost(function) if function.__globals__.get("__name__") == _DISPATCHER else function


class FusedFunction:
    """Takes the place of a global. It runs an op where the op accepts the arguments, else the function of the file."""

    def __init__(self, scope: dict[str, Any], name: str, form: Any, guard: FunctionGuard) -> None:
        self.scope, self.name, self.form, self.guard = scope, name, form, guard
        self.stock: types.FunctionType = scope[name]
        self.computed = computed_function(self.stock)
        parameters = inspect.signature(self.stock).parameters.values()
        self.names = tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        self.known_names = frozenset(self.names)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.read(args, kwargs)
        result = None if arguments is None else self.compute(arguments)
        return self.scope[self.name](*args, **kwargs) if result is None else result

    def read(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name; None if the function takes no such arguments, or has changed."""
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        is_known = len(args) + len(kwargs) == len(arguments) and arguments.keys() <= self.known_names
        holds = self._holds_for_graph() if torch.compiler.is_compiling() else self._is_same()
        return arguments if is_known and holds else None

    def _is_same(self) -> bool:
        """Return True if neither the function nor a helper that it calls has been replaced in the file."""
        return self.scope.get(self.name) is self.stock and self.guard.is_same(self.computed)

    @torch.compiler.assume_constant_result
    def _holds_for_graph(self) -> bool:
        """Compare the function while torch.compile traces a graph, and before every run of the graph."""
        return self._is_same() and (not is_tracing() or add_guard_of_object(self))

    @property
    def fingerprint(self) -> tuple | None:
        return self.guard.fingerprint

    def holds_for_graph(self, _: None, fingerprint: tuple) -> bool:
        """Return True if a graph that was traced for `fingerprint` may run."""
        return self._is_same() and self.fingerprint == fingerprint

    def compute(self, arguments: dict[str, Any]) -> Any:
        """Return the results of the op; None if the op does not accept the arguments."""
        raise NotImplementedError


class FunctionsRecipe(RewrittenForward):
    """The stock forward of a class, with ops in place of functions, and perhaps with fused statements. `forms` holds
    the name of each function among the globals of the file, and its form."""

    # True for a linear recurrence: its ops take heads that the forward repeats for them, and one op computes its decay.
    is_recurrent = False
    # The class of the forms without which the forward stays as it is.
    required_form: ClassVar[type | tuple[type, ...]] = object

    def __init__(
        self,
        cls: type[nn.Module],
        forms: tuple[tuple[str, Any], ...],
        guards: tuple[FunctionGuard, ...] | None = None,
        fuses_statements: bool = False,
    ) -> None:
        super().__init__(cls)
        self.forms, self.fuses_statements = forms, fuses_statements
        # A model may be unpickled where the class has another forward.
        scope = innermost(self.stock).__globals__ if isinstance(self.stock, types.FunctionType) else {}
        # A copy of a recipe keeps its guards, because the file may have other functions by now.
        self.guards = guards or tuple(self.watch(computed_function(scope[name])) for name, _ in forms)
        self.functions: dict[str, FusedFunction] = {}
        for (name, form), guard in zip(forms, self.guards, strict=True):
            current = scope.get(name)
            if isinstance(current, types.FunctionType) and guard.holds(computed_function(current)):
                self.functions[name] = self.fuse(form, scope, name, guard)
        self.forward = self.forward_for(self.stock)

    def watch(self, function: types.FunctionType) -> FunctionGuard:
        return FunctionGuard(function)

    def with_fused_statements(self) -> "FunctionsRecipe":
        return type(self)(self.cls, self.forms, self.guards, True)

    def fuse(self, form: Any, scope: dict[str, Any], name: str, guard: FunctionGuard) -> FusedFunction:
        """Return the function that runs the op in this form in place of a global."""
        raise NotImplementedError

    def rewrite(self, forward: types.FunctionType) -> types.FunctionType | str | None:
        return rewrite_forward(forward, self.functions, self.fuses_statements, self.is_recurrent)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return super().__call__(module, *args, **kwargs)
        forward: Any = type(module).forward
        if forward is self.stock and self._has_forward_for_graph():
            forward = self.forward
        return forward(module, *args, **kwargs)

    @torch.compiler.assume_constant_result
    def _has_forward_for_graph(self) -> bool:
        """Compare the code of the forward once for each graph."""
        return self.forward_for(self.stock) is not None

    def __str__(self) -> str:
        return "; ".join(filter(None, dict.fromkeys(str(form) for _, form in self.forms)))

    def __reduce__(self) -> tuple:
        return type(self), (self.cls, self.forms, self.guards, self.fuses_statements)


def globals_of(forward: types.FunctionType) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions among the globals that a forward names, with their names."""
    function = innermost(forward)
    for name in function.__code__.co_names:
        if isinstance(value := function.__globals__.get(name), types.FunctionType):
            yield name, value


def recognise_functions(
    module: nn.Module, recipe: type[FunctionsRecipe], recognise: Callable[[types.FunctionType, str], Any]
) -> Any:
    """Return the recipe of a module, by the form, the reason or None that `recognise` returns for each function and
    the Python module of the forward."""
    stock = inspect.getattr_static(type(module), "forward", None)
    if not isinstance(stock, types.FunctionType):
        return None
    results = [(name, recognise(value, innermost(stock).__module__)) for name, value in globals_of(stock)]
    forms = tuple((name, form) for name, form in results if form is not None and not isinstance(form, str))
    if not any(isinstance(form, recipe.required_form) for _, form in forms):
        return "; ".join(f"{name}: {reason}" for name, reason in results if isinstance(reason, str)) or None
    if isinstance(reason := rewrite_forward(stock, dict.fromkeys((name for name, _ in forms), stock)), str):
        return reason
    return recipe(type(module), forms)
