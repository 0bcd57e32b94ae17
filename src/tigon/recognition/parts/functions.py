"""Replace functions of a model's file, which a forward calls by their global names, by ops that compute the same.

The recipe runs the forward of its class with the op in place of the function (`exchanged_functions`). If the globals of
the file were changed, other models of the process would compute other bits.
"""

import inspect
import types
from typing import Any

import torch
from torch import nn

from tigon.recognition.guards.guard import FunctionGuard
from tigon.recognition.probing.exchanged_functions import ForwardWithFunctions, written_globals
from tigon.recognition.rewriting.source import NotReadable, innermost


class FusedFunction:
    """Takes the place of a stock function. It runs an op where the op accepts the arguments, else this function."""

    def __init__(self, stock: types.FunctionType, guard: FunctionGuard) -> None:
        self.stock, self.guard = stock, guard
        self.names = tuple(inspect.signature(stock).parameters)
        self.known_names = frozenset(self.names)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.read(args, kwargs)
        result = None if arguments is None else self.compute(arguments)
        return self.stock(*args, **kwargs) if result is None else result

    def read(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name; None if the function takes no such arguments, or has changed.

        A helper that the function calls may have been replaced in the file.
        """
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        is_known = len(args) + len(kwargs) == len(arguments) and arguments.keys() <= self.known_names
        holds = self._holds_for_graph() if torch.compiler.is_compiling() else self.guard.is_same(self.stock)
        return arguments if is_known and holds else None

    @torch.compiler.assume_constant_result
    def _holds_for_graph(self) -> bool:
        """Compare the function once for each graph."""
        return self.guard.holds(self.stock)

    def compute(self, arguments: dict[str, Any]) -> Any:
        """Return the results of the op; None if the op does not accept the arguments."""
        raise NotImplementedError


class FunctionsRecipe:
    """The stock forward of a class, with ops in place of functions.

    `forms` holds the name of each function among the globals of the file, and the form in which an op computes it.
    """

    def __init__(
        self,
        cls: type[nn.Module],
        forms: tuple[tuple[str, Any], ...],
        guards: tuple[FunctionGuard, ...] | None = None,
        rewritten: types.FunctionType | None = None,
    ) -> None:
        self.cls, self.forms = cls, forms
        stock = inspect.getattr_static(cls, "forward")
        file_globals = innermost(rewritten or stock).__globals__
        # A copy of a recipe keeps its guards, because the file may have other functions by now.
        self.guards = guards or tuple(FunctionGuard(file_globals[name]) for name, _ in forms)
        functions: dict[str, FusedFunction] = {}
        for (name, form), guard in zip(forms, self.guards, strict=True):
            current = file_globals.get(name)
            if isinstance(current, types.FunctionType) and guard.holds(current):
                functions[name] = self.fuse(form, current, guard)
        self.exchanged = ForwardWithFunctions(stock, functions, rewritten)

    def fuse(self, form: Any, stock: types.FunctionType, guard: FunctionGuard) -> FusedFunction:
        """Return the function that runs the op in this form."""
        raise NotImplementedError

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.exchanged.forward_for(module)(module, *args, **kwargs)

    def __reduce__(self) -> tuple:
        return restore_recipe, (type(self), self.cls, self.forms, self.guards)


class StockForward:
    """The forward of a module's class, in place of a recipe that cannot be built in this process."""

    def __init__(self, arguments: tuple) -> None:
        self.arguments = arguments

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    def __reduce__(self) -> tuple:
        return restore_recipe, self.arguments


def restore_recipe(recipe: Any, cls: type[nn.Module], *arguments: Any) -> Any:
    """Return the recipe of a copied module, or the stock forward if the forward of its class cannot be rebuilt."""
    if not is_exchangeable(inspect.getattr_static(cls, "forward", None)):
        return StockForward((recipe, cls, *arguments))
    return recipe(cls, *arguments)


def is_exchangeable(forward: Any) -> bool:
    """Return True if a forward can run with other functions."""
    if not isinstance(forward, types.FunctionType) or written_globals(innermost(forward)):
        return False
    try:
        ForwardWithFunctions(forward, {})
    except NotReadable:
        return False
    return True
