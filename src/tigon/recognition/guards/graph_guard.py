"""Let torch.compile call a guard of Tigon before every run of a graph, so that a changed setting recompiles the graph.

Dynamo, the tracer of torch.compile, guards only what it traces, and a recipe does not read what the forward that it
replaces reads. Therefore Tigon adds a guard to the graph: a Python function that compares the whole state, as an eager
call does. This uses internals of Dynamo, which are in `tigon.runtime.compat.graphs`. Where they are missing or
differ, graphs contain the stock forward: it is exact, and Dynamo guards what it reads.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tigon.runtime.compat.graphs import (
    DYNAMO_ERRORS,
    add_lambda_guard,
    changed_objects,
    global_source,
    install_guard,
    load_comptime,
    locals_of_caller,
)

# Dynamo knows this object by its identity, so it is a global of the code that Dynamo traces.
comptime = load_comptime()
_decision = threading.local()


def guard_holds() -> bool:
    """Decide, inside a traced `holds(self, module)`, whether the graph may contain the recipe."""
    comptime(_add_guard_of_frame)
    return _last_decision()


@torch.compiler.assume_constant_result
def _last_decision() -> bool:
    return getattr(_decision, "holds", False)


def _add_guard_of_frame(context: Any) -> None:
    """Compare the state while Dynamo traces, and add the guard to the graph if the state is unchanged. The traced frame
    calls `guard_holds`, whose caller has the guard as `self` and the module as `module`."""
    _decision.holds = False
    try:
        frame, (guard, module) = locals_of_caller(context, "self", "module")
        holds = guard.value.holds_for_graph(module.value, guard.value.fingerprint)
        # Dynamo delays changes by the traced code until the graph has run, so the guard compares unchanged objects.
        ids, writes_global = changed_objects(frame)
        is_mutated = bool(ids) and (writes_global or not ids.isdisjoint(guard.value.owners(module.value)))
        if holds and guard.source is not None and not is_mutated:
            install_guard(guard.source, _make_comparison(guard.value.fingerprint))
            _decision.holds = True
    except DYNAMO_ERRORS:
        pass


def add_guard_of_object(guard: Any) -> bool:
    """Add the guard of a function, held by a global, to the graph that Dynamo traces; return False if impossible."""
    try:
        # The graph lives as long as the code that was compiled, so it must not keep a model alive.
        source = global_source("__tigon_guard", weakref.ref(guard))
        install_guard(source, _make_comparison(guard.fingerprint))
    except DYNAMO_ERRORS:
        return False
    return True


# Dynamo drops a second guard that has the same source and the same function.
@functools.lru_cache(maxsize=1024)
def _make_comparison(fingerprint: tuple) -> Callable[[Any, Any], None]:
    return functools.partial(_add_comparison, fingerprint=fingerprint)


def _add_comparison(builder: Any, dynamo_guard: Any, fingerprint: tuple) -> None:
    """Add the comparison to the guards of a graph. Dynamo calls this when the graph is complete."""

    # Dynamo skips guards below a module whose `__dict__` is unchanged, but a setting may be outside of this dict.
    # Therefore the guard is added below the Guard object, not below the module.
    def is_unchanged(value: Any) -> bool:
        guard = value() if isinstance(value, weakref.ref) else value
        return guard is not None and guard.holds_for_graph(None, fingerprint)

    add_lambda_guard(
        builder, dynamo_guard, is_unchanged, "tigon: the state that the replaced forward reads is unchanged"
    )
