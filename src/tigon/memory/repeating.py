"""Modules that backward calls again: which may be, and whether a second call computes what the first one did.

A projection is recomputed by calling its module. That is right only if the call is a function of its input and of
state that stays: it draws no random numbers, writes nothing, and has no hooks that are to see one call. `CallWatch`
finds that out around the first call. `RepeatedCall` remembers what the first call read, and refuses the second one
where any of it has changed: an adapter that was switched off, merged or exchanged, a weight, a hook, a setting.
"""

import functools
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime.reach import explore, is_simple
from tigon.runtime.stock import calls_are_stock, has_stock_call, linears_are_stock, origin_of
from tigon.runtime.torch_private import any_global_hook

__all__ = ["REPEATING", "CallWatch", "RepeatedCall", "foreign_hook"]

# Whose hooks on a module only gather and shard what is in it, or convert what goes in and out. Those that transformers
# leaves on layers for the outputs of a call (`output_hidden_states`) do nothing outside of that call.
_ENGINES = "torch.distributed.", "deepspeed.", "accelerate.", "transformers.distributed.", "transformers.integrations."
_ENGINES += ("transformers.utils.output_capturing",)

# Packages whose layers, quantised ones and adapters, give the same at every call but for torch's random numbers and
# buffers, which are compared.
REPEATING = frozenset(("torch", "transformers", "peft", "bitsandbytes", "torchao", "accelerate", "deepspeed", "tigon"))


# --- the first call --------------------------------------------------------------------------------


def _is_plain(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    is_stock = type(module) is nn.Linear and linears_are_stock() and has_stock_call(module)
    return is_stock and not hooks and "forward" not in vars(module)


def foreign_hook(module: nn.Module) -> str | None:
    """Return the Python module that wrote a forward hook of a module, if it is none of an engine; None otherwise."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return None
    origins = (origin_of(h) for hooks in (module._forward_pre_hooks, module._forward_hooks) for h in hooks.values())
    return next((origin for origin in origins if not origin.startswith(_ENGINES)), None)


def _does_more(module: nn.Module) -> bool:
    """Return whether a call has hooks that may do more than gather parameters, or was replaced.

    Such code must run once for each call of the model.
    """
    is_changed = any_global_hook() or not calls_are_stock(module)
    return is_changed or any(foreign_hook(m) is not None for m in module.modules())


def _state(module: nn.Module, x: Tensor) -> tuple | None:
    """What a call changes if it draws random numbers, as dropout does, or writes to its input or to a buffer.

    None where that cannot be told: then the call is not made again.
    """
    if _is_plain(module):
        return x._version, (), None
    if x.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        drawn = torch.cuda.default_generators[x.device.index].get_offset()
    elif x.device.type == "cpu":
        drawn = torch.default_generator.get_state()
    else:
        return None
    return x._version, tuple(buffer._version for buffer in module.buffers()), drawn


def _same_state(before: tuple, after: tuple | None) -> bool:
    if after is None or before[:2] != after[:2]:
        return False
    one, two = before[2], after[2]
    return torch.equal(one, two) if isinstance(one, Tensor) else one == two


class _Surroundings:
    """The Python state that a call of a module and of its children can reach, as it was at one moment."""

    def __init__(self, module: nn.Module) -> None:
        parts = [m for m in module.modules() if type(m).__module__.partition(".")[0] not in REPEATING]
        reaches = [explore(part) for part in parts]
        # Generators of random numbers and iterators change without any sign.
        self.is_watchable = not any(reach.unwatchable for reach in reaches)
        self.checks = [(weakref.ref(p), r.check()) for p, r in zip(parts, reaches, strict=True)]

    def is_unchanged(self) -> bool:
        try:
            return all(check(part().__dict__, type(part())) for part, check in self.checks)
        except (KeyError, IndexError, AttributeError):
            return False


_known_surroundings: "weakref.WeakKeyDictionary[nn.Module, _Surroundings]" = weakref.WeakKeyDictionary()


def _surroundings(module: nn.Module) -> _Surroundings:
    """What a call of the module can reach, as it is now."""
    known = _known_surroundings.get(module)
    if known is None or not known.is_unchanged():
        known = _known_surroundings[module] = _Surroundings(module)
    return known


class CallWatch:
    """What one call of a module must leave as it is, if the same call is to be made again."""

    __slots__ = ("module", "state", "surroundings")

    def __init__(self, module: nn.Module, state: tuple, surroundings: _Surroundings | None) -> None:
        self.module, self.state, self.surroundings = module, state, surroundings

    @staticmethod
    def of(module: nn.Module, x: Any) -> "CallWatch | None":
        """The watch to take before `module(x)`; None if that call must not be made again."""
        state = None if type(x) is not Tensor or _does_more(module) else _state(module, x)
        if state is None:
            return None
        return CallWatch(module, state, None if _is_plain(module) else _surroundings(module))

    def may_repeat(self, x: Tensor) -> bool:
        """Whether the call, which has been made, left everything as it was."""
        around = self.surroundings
        is_watched = around is None or (around.is_watchable and around.is_unchanged())
        return is_watched and _same_state(self.state, _state(self.module, x))


# --- the second call -------------------------------------------------------------------------------


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


_MODULE_STATE = frozenset(vars(nn.Module()))


@functools.cache
def _setting_names(cls: type[nn.Module]) -> tuple[frozenset[str], frozenset[str]]:
    """Names that the code of a module's class and of its bases mentions, without those that every module has.

    The second set holds those that the class itself has a plain value for. Engines keep counters of their own on
    modules, which none of the classes' functions read.
    """
    names: set[str] = {"training"}
    for base in cls.__mro__:
        if base in nn.Module.__mro__:
            continue
        for value in vars(base).values():
            getters = (value.fget,) if isinstance(value, property) else (getattr(value, "__func__", value),)
            for function in getters:
                if isinstance(function, FunctionType):
                    names |= {*_code_names(function.__code__)} - _MODULE_STATE
    return frozenset(names), frozenset(name for name in names if is_simple(getattr(cls, name, cls)))


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _place(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.storage_offset()


class _TensorState:
    """A tensor that a call reads, and its version. It is not kept alive.

    A view is told by its base and its place in that: FSDP makes the views of its flat parameter anew for backward.
    """

    __slots__ = ("base", "place", "ref", "version")

    def __init__(self, x: Tensor) -> None:
        self.ref, self.version = weakref.ref(x), _version(x)
        base = None if x.is_inference() else x._base
        self.base, self.place = (None, None) if base is None else (weakref.ref(base), _place(x))

    def change(self, x: Any) -> str | None:
        """What happened to the tensor since, which now is `x`; None if it has the same values."""
        if x is not None and self.ref() is x:
            return None if _version(x) == self.version else "was written in place"
        # Engines exchange a shard for the whole, and what is on the host for an empty tensor.
        if any(t is not None and (hasattr(t, "placements") or t.is_meta) for t in (self.ref(), x)):
            return None
        base = None if self.base is None else self.base()
        is_same = base is not None and isinstance(x, Tensor) and x._base is base and _place(x) == self.place
        return None if is_same else "is another tensor"


def _frozen(value: Any) -> Any:
    """A setting as it is now: containers by what they hold."""
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


_State = dict[tuple[str, str], Any]  # by the path of a child and the name of what is read of it


def _add_reads(state: _State, module: nn.Module, path: str) -> None:
    """Note what a call reads of a module itself: its class's forward, its settings, its tensors."""
    own, kind = vars(module), type(module)
    names, defaults = _setting_names(kind)
    state[path, "class"] = kind
    state[path, "forward"] = kind.forward, own.get("forward")
    for name in defaults:
        state[path, name] = getattr(kind, name)
    for name, value in own.items():
        if name in names:
            state[path, name] = value if is_simple(value) else _frozen(value)
    for tensors in (own["_parameters"], own["_buffers"]):
        for name, x in tensors.items():
            state[path, name] = None if x is None else _TensorState(x)
    state[path, "children"] = tuple(own["_modules"].values())


def _reads(module: nn.Module) -> _State:
    """What a call reads of a module and its children."""
    state: _State = {}
    if type(module) is nn.Linear and not module._modules:
        own = vars(module)
        state["", "class"], state["", "forward"] = nn.Linear, (nn.Linear.forward, own.get("forward"))
        for name in ("weight", "bias"):  # FSDP assigns views of its flat parameter as plain attributes
            x = own[name] if name in own else module._parameters.get(name)
            state["", name] = None if x is None else _TensorState(x)
        return state
    for path, child in module.named_modules():
        _add_reads(state, child, path)
    return state


def _changes(before: _State, module: nn.Module) -> Iterator[str]:
    """What of a module's state differs now, as clauses."""
    now = _reads(module)
    names = before if before.keys() == now.keys() else {**before, **now}
    for key in names:
        a, b = before.get(key), now.get(key)
        if a is b:
            continue
        name = ".".join(filter(None, key))
        if isinstance(a, _TensorState) or isinstance(b, _TensorState):
            known, other = (a, b) if isinstance(a, _TensorState) else (b, a)
            if (change := known.change(other.ref() if isinstance(other, _TensorState) else None)) is not None:
                yield f"its {name} {change}"
        elif not _is_same(a, b):
            yield f"its {name} was changed"


class RepeatedCall:
    """`module(x)` for backward, as the forward pass made it.

    Raises:
        RuntimeError: What the call reads has changed since.
    """

    __slots__ = ("is_stock", "module", "state", "surroundings")

    def __init__(self, module: nn.Module, watch: CallWatch) -> None:
        self.module, self.surroundings = module, watch.surroundings
        self.state, self.is_stock = _reads(module), linears_are_stock()

    def __call__(self, x: Tensor) -> Tensor:
        if (change := self._change()) is not None:
            kind = type(self.module)
            size = f"{getattr(self.module, 'in_features', '?')} -> {getattr(self.module, 'out_features', '?')}"
            raise RuntimeError(
                f"tigon: a layer ({kind.__module__}.{kind.__qualname__}, {size}) has to be called again in backward, "
                f"but {change} since the forward pass. Run backward before this change, or do not recompute "
                "projections: memory='lean' in place of 'lean+mlp' or 'offload', lean() in place of lean(mlp=True)"
            )
        return self.module(x)

    def _change(self) -> str | None:
        """What the call would read otherwise than in the forward pass; None if nothing."""
        if (change := next(_changes(self.state, self.module), None)) is not None:
            return change
        if linears_are_stock() != self.is_stock:
            return "torch's own forward of linear layers was replaced or put back"
        if _does_more(self.module):
            return "a hook was registered on it, or its call was replaced"
        if self.surroundings is not None and not self.surroundings.is_unchanged():
            return "what its forward reads was changed"
        return None
