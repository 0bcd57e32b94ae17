"""Calls of modules that backward repeats: which calls allow it, and whether both calls give the same values.

Backward recomputes a projection by calling its module. This is correct only if the call is a function of its input and
of state that does not change: it draws no random numbers, writes nothing, and has no hook that must run once for each
call of the model. `CallWatch` checks this around the first call. `RepeatedCall` records the state that the first call
read. It raises an error in place of the second call if any of that state has changed: an adapter that was switched off,
merged or replaced, a weight, a hook or a setting.
"""

import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tigon.runtime.autograd import version_of
from tigon.runtime.compat.modules import MODULE_ATTRIBUTES, any_global_hook
from tigon.runtime.engines import may_run_twice
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.places import is_simple
from tigon.runtime.stock import calls_are_stock, has_stock_call, linears_are_stock, origin_of
from tigon.runtime.weak_cache import cached_weakly

# Packages whose layers, quantised layers and adapters give the same values at every call, except for effects of torch's
# random numbers and of buffers, which `CallWatch` compares.
REPEATABLE_PACKAGES = frozenset(
    ("torch", "transformers", "peft", "bitsandbytes", "torchao", "accelerate", "deepspeed", "tigon")
)


def _is_plain(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    is_stock = type(module) is nn.Linear and linears_are_stock() and has_stock_call(module)
    return is_stock and not hooks and "forward" not in vars(module)


def find_unrepeatable_hook(module: nn.Module) -> str | None:
    """Return the Python module that defines a forward hook of a module, if no engine defines it; None otherwise."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return None
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return next((origin_of(hook) for hook in hooks if not may_run_twice(hook)), None)


def _may_run_other_code(module: nn.Module) -> bool:
    """Return whether the call of a module was replaced, or hooks may do more than gather parameters. Such code must run
    once for each call of the model."""
    is_replaced = any_global_hook() or not calls_are_stock(module)
    return is_replaced or any(find_unrepeatable_hook(m) is not None for m in module.modules())


def _read_call_state(module: nn.Module, x: Tensor) -> tuple | None:
    """Return state that a call changes if it draws random numbers or writes its input or a buffer; None if it cannot be
    read, so that backward does not repeat the call."""
    if _is_plain(module):
        return x._version, (), None
    generator_state: int | Tensor
    if x.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        generator_state = torch.cuda.default_generators[x.device.index].get_offset()
    elif x.device.type == "cpu":
        generator_state = torch.default_generator.get_state()
    else:
        return None
    return x._version, tuple(buffer._version for buffer in module.buffers()), generator_state


def _is_same_state(before: tuple, after: tuple | None) -> bool:
    if after is None or before[:2] != after[:2]:
        return False
    generator_before, generator_after = before[2], after[2]
    if isinstance(generator_before, Tensor):
        return torch.equal(generator_before, generator_after)
    return generator_before == generator_after


class ReachableState:
    """A snapshot of the Python state that a call of a module and of its children can reach."""

    def __init__(self, module: nn.Module) -> None:
        parts = [m for m in module.modules() if type(m).__module__.partition(".")[0] not in REPEATABLE_PACKAGES]
        reaches = [explore(part) for part in parts]
        # Random number generators and iterators have no state that a snapshot could compare.
        self.is_watchable = not any(reach.unwatchable for reach in reaches)
        self.checks = [(weakref.ref(p), r.check()) for p, r in zip(parts, reaches, strict=True)]

    def is_unchanged(self) -> bool:
        try:
            return all(check(part().__dict__, type(part())) for part, check in self.checks)
        except (KeyError, IndexError, AttributeError):
            return False


# The snapshots by module. A snapshot refers to the settings of its module, and a setting may refer back to the module.
# The weak key of such an entry never expires, so the dictionary must belong to an object that is freed with the model.
ReachableStates: TypeAlias = "weakref.WeakKeyDictionary[nn.Module, ReachableState]"


def _read_reachable_state(module: nn.Module, earlier_states: ReachableStates) -> ReachableState:
    """Return a snapshot of the state that a call of the module can reach now."""
    state = earlier_states.get(module)
    if state is None or not state.is_unchanged():
        state = earlier_states[module] = ReachableState(module)
    return state


class CallWatch:
    """State that one call of a module must not change, so that backward may repeat the call."""

    __slots__ = ("module", "reachable_state", "state")

    def __init__(self, module: nn.Module, state: tuple, reachable_state: ReachableState | None) -> None:
        self.module, self.state, self.reachable_state = module, state, reachable_state

    @staticmethod
    def of(module: nn.Module, x: Any, earlier_states: ReachableStates) -> "CallWatch | None":
        """Return a watch that starts before `module(x)`; None if backward must not repeat that call.

        `earlier_states` holds the snapshots of earlier calls.
        """
        state = None if type(x) is not Tensor or _may_run_other_code(module) else _read_call_state(module, x)
        if state is None:
            return None
        return CallWatch(module, state, None if _is_plain(module) else _read_reachable_state(module, earlier_states))

    def may_repeat(self, x: Tensor) -> bool:
        """Return whether the call, which has ended, changed none of the watched state."""
        reachable_state = self.reachable_state
        is_unchanged = reachable_state is None or (reachable_state.is_watchable and reachable_state.is_unchanged())
        return is_unchanged and _is_same_state(self.state, _read_call_state(self.module, x))


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


@cached_weakly
def _setting_names(cls: type[nn.Module]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names in the code of a module's class and of its bases, without the names that every module has. The
    second set contains those names that have a plain value in the class itself. Attributes with other names are
    ignored, because engines store counters on modules, and no function of the class reads these."""
    names: set[str] = {"training"}
    for base in cls.__mro__:
        if base in nn.Module.__mro__:
            continue
        for value in vars(base).values():
            getters = (value.fget,) if isinstance(value, property) else (getattr(value, "__func__", value),)
            for function in getters:
                if isinstance(function, FunctionType):
                    names |= {*_code_names(function.__code__)} - MODULE_ATTRIBUTES
    return frozenset(names), frozenset(name for name in names if is_simple(getattr(cls, name, cls)))


def _layout(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.storage_offset()


class _TensorState:
    """A weak reference to a tensor that a call reads, and the version of the tensor. A view is identified by its base,
    shape, strides and offset, because FSDP creates new views of its flat parameter for backward."""

    __slots__ = ("base", "layout", "ref", "version")

    def __init__(self, x: Tensor) -> None:
        self.ref, self.version = weakref.ref(x), version_of(x)
        base = None if x.is_inference() else x._base
        self.base = None if base is None else weakref.ref(base)
        self.layout = None if base is None else _layout(x)

    def describe_change(self, x: Any) -> str | None:
        """Return a clause on how the tensor, which is now `x`, has changed; None if its values are the same."""
        if isinstance(x, Tensor) and self.ref() is x:
            return None if version_of(x) == self.version else "was written in place"
        # Engines swap a shard for the whole tensor, and replace a tensor on the host by an empty one.
        if any(t is not None and (hasattr(t, "placements") or t.is_meta) for t in (self.ref(), x)):
            return None
        base = None if self.base is None else self.base()
        is_same = base is not None and isinstance(x, Tensor) and x._base is base and _layout(x) == self.layout
        return None if is_same else "is another tensor"


def _snapshot(value: Any) -> Any:
    """Return a copy of a setting that later changes of a container do not affect. Elements are not copied."""
    if isinstance(value, Tensor):
        return _TensorState(value)
    if isinstance(value, dict):
        return dict, tuple(value.items())
    return (type(value), tuple(value)) if isinstance(value, (list, tuple, set, frozenset)) else value


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return type(a) is type(b) and is_simple(a) and a == b


# Maps the path of a child and the name of an attribute to the value that a call reads.
_State = dict[tuple[str, str], Any]


def _add_reads(state: _State, module: nn.Module, path: str) -> None:
    """Add the state that a call reads from a module, without its children: its forward, its settings, its tensors."""
    attributes = vars(module)
    cls: Any = type(module)
    names, defaults = _setting_names(cls)
    state[path, "class"] = cls
    state[path, "forward"] = cls.forward, attributes.get("forward")
    for name in defaults:
        state[path, name] = getattr(cls, name)
    for name, value in attributes.items():
        if name in names:
            state[path, name] = value if is_simple(value) else _snapshot(value)
    for tensors in (attributes["_parameters"], attributes["_buffers"]):
        for name, x in tensors.items():
            state[path, name] = None if x is None else _TensorState(x)
    state[path, "children"] = tuple(attributes["_modules"].values())


def _read_state(module: nn.Module) -> _State:
    state: _State = {}
    if type(module) is nn.Linear and not module._modules:
        attributes = vars(module)
        state["", "class"], state["", "forward"] = nn.Linear, (nn.Linear.forward, attributes.get("forward"))
        # FSDP assigns views of its flat parameter as plain attributes.
        for name in ("weight", "bias"):
            x = attributes[name] if name in attributes else module._parameters.get(name)
            state["", name] = None if x is None else _TensorState(x)
        return state
    for path, child in module.named_modules():
        _add_reads(state, child, path)
    return state


def _changes(before: _State, module: nn.Module) -> Iterator[str]:
    """Yield a clause for each part of a module's state that differs from `before`."""
    state = _read_state(module)
    for key in before if before.keys() == state.keys() else {**before, **state}:
        a, b = before.get(key), state.get(key)
        if a is b:
            continue
        name = ".".join(filter(None, key))
        if isinstance(a, _TensorState) or isinstance(b, _TensorState):
            if isinstance(a, _TensorState):
                change = a.describe_change(b.ref() if isinstance(b, _TensorState) else None)
            else:
                assert isinstance(b, _TensorState)
                change = b.describe_change(None)
            if change is not None:
                yield f"its {name} {change}"
        elif not _is_same(a, b):
            yield f"its {name} was changed"


class RepeatedCall:
    """The call `module(x)` of the forward pass, which backward repeats. It raises a RuntimeError if the state that the
    call reads has changed since the forward pass."""

    __slots__ = ("is_stock", "module", "reachable_state", "state")

    def __init__(self, module: nn.Module, watch: CallWatch) -> None:
        self.module, self.reachable_state = module, watch.reachable_state
        self.state, self.is_stock = _read_state(module), linears_are_stock()

    def __call__(self, x: Tensor) -> Tensor:
        if (change := self._find_change()) is not None:
            cls = type(self.module)
            size = f"{getattr(self.module, 'in_features', '?')} -> {getattr(self.module, 'out_features', '?')}"
            raise RuntimeError(
                f"tigon: a layer ({cls.__module__}.{cls.__qualname__}, {size}) has to be called again in backward, "
                f"but {change} since the forward pass. Run backward before this change, or do not recompute "
                "projections: memory='lean' in place of 'lean+mlp', lean() in place of lean(mlp=True)"
            )
        return self.module(x)

    def _find_change(self) -> str | None:
        """Return a clause that says which state has changed since the forward pass; None if none has."""
        if (change := next(_changes(self.state, self.module), None)) is not None:
            return change
        if linears_are_stock() != self.is_stock:
            return "the forward of torch.nn.Linear was replaced or restored"
        if _may_run_other_code(self.module):
            return "a hook was registered on it, or its call was replaced"
        if self.reachable_state is not None and not self.reachable_state.is_unchanged():
            return "an object that its forward reads was changed"
        return None
