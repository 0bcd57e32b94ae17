"""Run the forward of a class with other functions in place of some globals of its file.

    def forward(self, hidden, ...):
        ...
        q, k = apply_rotary_pos_emb(q, k, cos, sin)   # a global of the file

The function is not replaced in the globals of that file, because this would change every other model of the process.
Instead, the code object of the forward runs with a copy of the globals, in which that one name is another function.
Nothing outside of the copy changes.
"""

import itertools
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from tigon.recognition.rewriting.source import code_state, innermost, is_unchanged, rebuild_wrappers
from tigon.runtime.reach.code import code_facts

# Stands for the value of a global that does not exist.
MISSING = object()


class ExchangedFunction(Protocol):
    """A function that takes the place of `stock`."""

    stock: types.FunctionType

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def written_globals(function: types.FunctionType) -> list[str]:
    """Return the globals that a function writes. A rebuilt forward would write them to its copy of the globals."""
    return [target for target, _ in code_facts(function.__code__).writes if target.startswith("the global")]


class ForwardWithFunctions:
    """The stock forward of a class, or a rewritten form of it, with other functions.

    Raises:
        NotReadable: A wrapper of the forward does not hold the function that it wraps.
    """

    def __init__(
        self,
        stock: types.FunctionType,
        functions: Mapping[str, ExchangedFunction],
        rewritten: types.FunctionType | None = None,
    ) -> None:
        self.stock, self.functions, self.state = stock, functions, code_state(stock)
        outer = rewritten or stock
        function = innermost(outer)
        self.file_globals, self.names = function.__globals__, code_facts(function.__code__).global_names
        # The values of these names at the last refresh.
        self.values: list[Any] = [MISSING] * len(self.names)
        scope = {**self.file_globals, **functions}
        # torch.compile identifies globals by the name of their Python module. With that name, a graph that contains a
        # stock and a patched model would use the same function for both.
        del scope["__name__"]
        self.scope = scope
        inner = types.FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
        )
        inner.__kwdefaults__, inner.__module__ = function.__kwdefaults__, function.__module__
        self.forward = rebuild_wrappers(outer, inner)

    def forward_for(self, module: nn.Module) -> Callable:
        """Return the forward with other functions; the forward of the module's class if that one has changed."""
        # The class may have another forward by now, or its forward may have other code.
        is_stock = type(module).forward is self.stock
        if is_stock and (self._refresh_for_graph() if torch.compiler.is_compiling() else self._refresh()):
            return self.forward
        return type(module).forward

    def _refresh(self) -> bool:
        """Copy the current globals of the file, and return True if the code of the forward is unchanged.

        Another function may have been assigned in the file, also in place of one that is exchanged.
        """
        values = map(self.file_globals.get, self.names, itertools.repeat(MISSING))
        if not all(map(operator.is_, values, self.values)):
            current = {name: self.file_globals[name] for name in self.names if name in self.file_globals}
            exchanged = {name: other for name, other in self.functions.items() if current.get(name) is other.stock}
            self.scope.update(current | exchanged)
            self.values = [self.file_globals.get(name, MISSING) for name in self.names]
        return is_unchanged(self.state)

    @torch.compiler.assume_constant_result
    def _refresh_for_graph(self) -> bool:
        """Refresh once for each graph."""
        return self._refresh()
