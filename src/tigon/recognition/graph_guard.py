"""Let torch.compile call a guard of Tigon before every run of a graph, so that a changed setting recompiles the graph.

Dynamo guards only what it traces, and a recipe does not read what the forward that it replaces reads. Therefore Tigon
adds a guard to the graph: a Python function that compares the whole state, as an eager call does. This uses internals
of Dynamo. Where they are missing or differ, graphs contain the stock forward: it is exact, and Dynamo guards what it
reads.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.comptime import ComptimeContext, comptime
from torch._guards import TracingContext

__all__ = ["add_guard_of_object", "guard_holds", "traces_a_graph"]

_decision = threading.local()
# Dynamo raises these if a name that this file uses is missing or takes other arguments.
MISSING = (AttributeError, ImportError, KeyError, TypeError)


def guard_holds() -> bool:
    """Decide, inside a traced `holds(self, module)`, whether the graph may contain the recipe."""
    comptime(_add_guard_of_frame)
    return _last_decision()


@torch._dynamo.assume_constant_result
def _last_decision() -> bool:
    return _decision.holds


def _add_guard_of_frame(context: ComptimeContext) -> None:
    """Compare the state while Dynamo traces, and add the guard to the graph if the state is unchanged.

    The traced frame calls `guard_holds`, whose caller has the guard as `self` and the module as `module`.
    """
    _decision.holds = False
    try:
        frame = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().parent
        guard, module = (frame.symbolic_locals[name].realize() for name in ("self", "module"))
        holds = guard.value.holds_for_graph(module.value, guard.value.fingerprint)
        if holds and guard.source is not None and not _is_mutated(frame, guard.value.owners(module.value)):
            _install(guard.source, guard.value.fingerprint)
            _decision.holds = True
    except MISSING:
        pass


def traces_a_graph() -> bool:
    """Return True in Python code that Dynamo runs, instead of tracing it, while it traces a graph."""
    return TracingContext.try_get() is not None


def add_guard_of_object(guard: Any) -> bool:
    """Add a guard that no module holds to the graph that Dynamo traces now; return False if that is impossible."""
    try:
        from torch._dynamo.source import GlobalSource
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tx = InstructionTranslator.current_tx()
        # The graph lives as long as the code that was compiled, so it must not keep a model alive.
        name = tx.output.install_global_by_id("__tigon_guard", weakref.ref(guard))
        _install(GlobalSource(name), guard.fingerprint)
    except MISSING:
        return False
    return True


def _install(source: Any, fingerprint: tuple) -> None:
    from torch._dynamo.guards import install_guard

    install_guard(source.make_guard(_creator(fingerprint)))


# Dynamo drops a second guard that has the same source and the same function.
@functools.cache
def _creator(fingerprint: tuple) -> Callable:
    return functools.partial(_tigon_guard, fingerprint=fingerprint)


def _tigon_guard(builder: Any, guard: Any, fingerprint: tuple) -> None:
    """Add the comparison to the guards of a graph. Dynamo calls this when the graph is complete."""
    # The guard belongs to the Guard object, not to the module, because Dynamo skips guards below a module whose
    # `__dict__` is unchanged, and a setting may be somewhere else.
    manager, name = builder.get_guard_manager(guard), guard.name

    def is_unchanged(found: Any) -> bool:
        found = found() if isinstance(found, weakref.ref) else found
        return found is not None and found.holds_for_graph(None, fingerprint)

    text = [f"tigon: what the replaced forward reads is unchanged ({name})"]
    try:
        manager.add_lambda_guard(is_unchanged, text, guard.user_stack)
    except TypeError:  # torch before 2.10 has no third argument
        manager.add_lambda_guard(is_unchanged, text)


def _is_mutated(frame: Any, owners: Iterator[int]) -> bool:
    """Return True if the traced code has changed an object that the forward reads.

    Dynamo delays such changes until the graph has run, so the real object, which a guard compares, is unchanged.
    """
    effects = frame.output.side_effects
    # Dynamo keeps existing objects under their ids, and assignments to globals under an id of its own.
    mutated = {key: variable for key, variable in effects.id_to_variable.items() if effects.is_modified(variable)}
    writes_global = any(type(variable).__name__ == "NewGlobalVariable" for variable in mutated.values())
    return bool(mutated) and (writes_global or not mutated.keys().isdisjoint(owners))
