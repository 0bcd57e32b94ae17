"""Checkpointed layers: which layers may run twice, and whether their code has changed before the second run.

Backward runs a checkpointed layer a second time. This gives wrong gradients if the second run computes other values
than the first. A layer may therefore run twice only if the code of its modules changes no state that outlives the call,
and reads none that can change unnoticed, such as a random generator of Python. Also, none of its forward hooks may have
to run exactly once for each call. This judgement reads the names in code, which is slow. It depends on the classes, the
forwards and the hooks of the modules in the layer, and comparing these is fast. Every call of the layer compares them,
in 4 us for a layer of 13 modules.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from tigon.memory.lean import is_checkpoint_recomputation
from tigon.memory.repeating import REPEATABLE_PACKAGES, find_unrepeatable_hook
from tigon.runtime.compat.modules import any_global_hook
from tigon.runtime.engines import FORWARD_SLOTS
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.places import Reach
from tigon.runtime.stock import written_in


def _weak_reference(forward: Any) -> Any:
    """Return a weak reference to a forward, or the forward itself if it supports none. All weak references to one
    object are equal, so two lists of them can be compared."""
    try:
        return weakref.ref(forward)
    except TypeError:
        return forward


def _read_code(layer: nn.Module) -> tuple[list, list]:
    """Return two lists that decide which code a layer runs: its modules with classes and forwards, and its hooks."""
    code: list[Any] = []
    hooks, modules = [any_global_hook()], [layer]
    for module in modules:
        if module is None:
            continue
        attributes, cls = module.__dict__, type(module)
        forward = attributes.get("forward")
        code += weakref.ref(module), cls, cls.forward, None if forward is None else _weak_reference(forward)
        # The keys are numbers, and torch never gives the same number to two hooks.
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
            hooks += (*attributes["_forward_hooks"], *attributes["_forward_pre_hooks"])
        modules += attributes["_modules"].values()
    return code, hooks


def _is_trusted(package: str) -> bool:
    return package.partition(".")[0] in REPEATABLE_PACKAGES


def _explore_module(module: nn.Module) -> Reach | None:
    """Return the state that the forward of a module's class can reach; None if its package is trusted."""
    is_trusted = _is_trusted(type(module).__module__) and _is_trusted(written_in(type(module).forward))
    return None if is_trusted else explore(module)


def _explore_assigned(module: nn.Module) -> list[Reach]:
    """Return the state that functions assigned to a module as its forward can reach."""
    forwards = (vars(module).get(slot) for slot in FORWARD_SLOTS)
    return [explore(forward) for forward in forwards if forward is not None and not _is_trusted(written_in(forward))]


class LayerJudgement:
    """The reason why a layer must not run twice, or None, and the code on which this judgement is based."""

    def __init__(self, layer: nn.Module) -> None:
        self.code, self.hooks = _read_code(layer)
        # For each module whose code was read, a function that compares all state that this code depends on.
        self.checks: list[tuple[weakref.ref, Callable]] = []
        self.reason = "a hook of all modules is registered" if any_global_hook() else None
        for name, module in layer.named_modules():
            if self.reason is None and (clause := self._judge(module)) is not None:
                self.reason = f"{name or type(layer).__name__} ({type(module).__name__}) {clause}"

    def _judge(self, module: nn.Module) -> str | None:
        if (origin := find_unrepeatable_hook(module)) is not None:
            return f"has a forward hook (by {origin})"
        reaches = _explore_assigned(module)
        if (class_reach := _explore_module(module)) is not None:
            self.checks.append((weakref.ref(module), class_reach.check()))
            reaches.append(class_reach)
        return next((clause for reach in reaches for clause in (*reach.writes, *reach.unwatchable)), None)

    def is_current(self, layer: nn.Module) -> bool:
        """Return whether everything that the judgement depends on is unchanged."""
        if (self.code, self.hooks) != _read_code(layer):
            return False
        # A module that changes its state does so at every call, so the reason remains true.
        if self.reason is not None:
            return True
        try:
            return all(check(ref().__dict__, type(ref())) for ref, check in self.checks)
        except (KeyError, IndexError, AttributeError):
            return False

    def wrap_for_checkpoint(self, function: Callable, layer: nn.Module) -> Callable:
        """Return a function for a checkpoint. In backward it raises an error if the code of the layer has changed."""

        def call(*args: Any) -> Any:
            if is_checkpoint_recomputation() and (change := self._find_change(layer)) is not None:
                raise RuntimeError(
                    f"tigon: a checkpointed layer ({type(layer).__name__}) has to run again in backward, but {change} "
                    "since the forward pass. Run backward before this change, or use memory='lean', which runs no "
                    "layer again"
                )
            return function(*args)

        return call

    def _find_change(self, layer: nn.Module) -> str | None:
        code, hooks = _read_code(layer)
        if code != self.code:
            return "a module in it, or the class or the forward of one, was replaced"
        if hooks != self.hooks:
            # Training engines may have added hooks that allow a second run.
            return LayerJudgement(layer).reason
        return None
