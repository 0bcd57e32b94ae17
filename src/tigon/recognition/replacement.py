"""Give one module another forward, as an attribute of the instance. Its class and its siblings stay as they are.

`nn.Module.__call__` looks `forward` up on the instance first. So hooks, sharding and checkpointing work as before, and
deleting the attribute restores the stock module:

    undo = install(module, recipe)   # module(x) now computes recipe(module, x)
    undo()                           # module(x) runs the forward of its class again
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from tigon.runtime.compat.modules import HOOK_TABLES, REPLICATE, has_hooks
from tigon.runtime.engines import FORWARD_SLOTS, ORIGINAL_FORWARD, forward_slot, is_hook_of_deepspeed, keeps_values
from tigon.runtime.stock import has_stock_call, origin_of, written_in


class Replacement:
    """The forward that computes `recipe(module, *args, **kwargs)`. This object behaves like a bound method. A call
    always runs for the module that it is bound to, also if the first argument is another module. To bind the forward to
    another module, use `__func__`, as with any method. `copy.deepcopy` and `pickle` of the module treat this object as
    a part of the module's state, so the forward of a copy reads the parameters of the copy. A real bound method could
    not be pickled. The reference to the module is weak, so that the memory of a deleted model is freed at once."""

    def __init__(self, module: nn.Module, recipe: Callable | None, guard: Any = None) -> None:
        self.module = weakref.ref(module)
        # None after the recipe was uninstalled: a wrapper that still holds this object then runs the stock forward.
        self.recipe = recipe
        # The guard is None for a recipe that runs the code of the module's class.
        self.guard = guard

    def __reduce__(self) -> tuple:
        return _restore_replacement, (self.__self__, self.recipe, self.guard)

    def __eq__(self, other: object) -> bool:
        """Return True for this object, and for any function that `__func__` of a replacement returns. accelerate stores
        the forward of a model at `prepare`, and `unwrap_model` unwraps the later forward until it finds a function that
        equals the stored one."""
        return self is other or _is_unbound(other)

    __hash__ = object.__hash__

    def holds(self) -> bool:
        """Return True if the recipe may run: it is installed, and the module is as it was when it was recognised."""
        return self.recipe is not None and (self.guard is None or self.guard.holds(self.__self__))

    def run(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the recipe, or the forward of the class if the recipe was uninstalled or the module has changed."""
        recipe, guard = self.recipe, self.guard
        if recipe is None or (guard is not None and not guard.holds(module)):
            return type(module).forward(module, *args, **kwargs)
        return recipe(module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        return self.run(self.__self__ if module is None else module, args, kwargs)

    def replicate(self) -> nn.Module:
        """Return a replica of the module for `nn.DataParallel`, which copies the attributes of the module. This method
        is the attribute `REPLICATE` of the module, where it takes the place of torch's method."""
        replica: Any = getattr(type(self.__self__), REPLICATE)(self.__self__)
        del vars(replica)[REPLICATE]
        if vars(replica).get("forward") is self:
            vars(replica)["forward"] = Replacement(replica, self.recipe, self.guard)
        return replica

    # --- attributes of a bound method, which other libraries read --------------------------------------

    @property
    def __self__(self) -> nn.Module:
        """Return the module, as for a bound method."""
        if (module := self.module()) is None:
            raise ReferenceError(
                "tigon: the module of this forward was deleted: keep a reference to the module, not only to its forward"
            )
        return module

    # Every bound method has a name.
    __name__ = "forward"

    @property
    def __func__(self) -> Callable:
        """Return `forward(module, ...)` for any module of the class. accelerate binds it to modules that it wraps."""
        return _unbound_forward(type(self.__self__))

    # accelerate unwraps a forward down to this function and binds it. `inspect.getsource` unwraps further, down to the
    # stock forward.
    __wrapped__ = __func__

    @property
    def __code__(self) -> CodeType:
        """Return the code of the stock forward, from which `torch.export` reads the name of the file."""
        return inspect.unwrap(type(self.__self__).forward).__code__

    @property
    def __globals__(self) -> dict[str, Any]:
        """Raise an error that explains why `torch.jit.script` fails: it reads globals and source of a forward."""
        raise AttributeError(
            "tigon: torch.jit.script cannot read a forward that Tigon replaced: call report.restore() first, where "
            "report is the result of tigon.patch"
        )

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the stock forward, from which the Trainer and `generate` read the arguments."""
        return inspect.signature(type(self.__self__).forward.__get__(self.__self__))


def _unbound_forward(cls: type[nn.Module]) -> Callable:
    """Return `forward(module, ...)`, which runs the replacement of the module, or the forward of its class without one.
    A library may wrap this function. A deep copy of the module has the same wrapper, but its own replacement, and a
    restored module has none. Each call therefore looks the replacement up on the module."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        replacement = getattr(vars(module).get(REPLICATE), "__self__", None)
        if type(replacement) is Replacement:
            return replacement.run(module, args, kwargs)
        return type(module).forward(module, *args, **kwargs)

    # A library that unwraps the forward of a restored module arrives at the forward of the class.
    vars(forward).update(is_replacement=True, __wrapped__=cls.forward)
    return forward


_UNBOUND_CODE = next(constant for constant in _unbound_forward.__code__.co_consts if isinstance(constant, CodeType))


def _is_unbound(function: object) -> bool:
    """Return True for a result of `_unbound_forward`. A wrapper that has copied its attributes has other code."""
    return type(function) is FunctionType and function.__code__ is _UNBOUND_CODE


def _restore_replacement(module: nn.Module, *state: Any) -> Replacement:
    """Return the replacement of a copied module, and assign it if the attributes of the copy are not set yet. pickle
    stores a bound method by its name. accelerate binds forwards, and pickle looks the name "forward" up on the copy
    before it sets the attributes of the copy."""
    replacement = Replacement(module, *state)
    if replacement.recipe is not None:
        # The order is that of `install`, for a copy of the copy.
        vars(module).setdefault(REPLICATE, replacement.replicate)
        vars(module).setdefault("forward", replacement)
    return replacement


# --- the attribute that holds a forward --------------------------------------------------------------


def wrapped_functions(function: Any) -> Iterator[Any]:
    """Yield a forward, and then, one after the other, the functions inside methods, partials and wrappers. If Tigon has
    replaced the forward, the last one is a replacement, or the `__func__` of a replacement."""
    for _ in range(16):
        yield function
        if function is None or isinstance(function, Replacement) or _is_unbound(function):
            return
        names = ("__func__", "__wrapped__", "func")
        function = next((inner for name in names if (inner := getattr(function, name, None)) is not None), None)


def leads_to_replacement(function: Any) -> bool:
    """Return True if a forward is a replacement, or a method, a partial or a wrapper around one."""
    return any(isinstance(f, Replacement) or _is_unbound(f) for f in wrapped_functions(function))


def wrapped_forward(module: nn.Module) -> CellType | None:
    """Return the cell in which a function that was assigned as forward holds the forward that it calls. The tensor
    parallelism of transformers assigns such a function. The forward of the class then receives tensors of this rank."""
    assigned = vars(module).get("forward")
    is_forward = lambda f: isinstance(f, Replacement) or getattr(f, "__func__", None) is type(module).forward
    cells = (isinstance(assigned, FunctionType) and assigned.__closure__) or ()
    return next((cell for cell in cells if is_forward(cell.cell_contents)), None)


def _mixed_precision_wrapper(module: nn.Module) -> FunctionType | None:
    """Return the wrapper that calls the forward of the class, if all wrappers are those of mixed precision."""
    for function in wrapped_functions(vars(module).get("forward")):
        code = function if hasattr(function, "__globals__") else type(function)
        if not written_in(code).startswith(("accelerate.utils.operations", "torch.amp.")):
            return None
        if isinstance(function, FunctionType) and vars(function).get("__wrapped__") is type(module).forward:
            return function
    return None


def find_replacement(module: nn.Module) -> Replacement | None:
    """Return the replacement that is installed on a module, also if accelerate or tensor parallelism wraps it."""
    attributes = vars(module)
    if isinstance(shared := attributes.get("forward"), Replacement) and shared.module() is not module:
        # A shallow copy has the replacement of the module that it was copied from, so a call of the copy would run
        # that module. The copy gets the forward of its class back.
        del attributes["forward"]
        if getattr(attributes.get(REPLICATE), "__self__", None) is shared:
            del attributes[REPLICATE]
    for slot in FORWARD_SLOTS:
        if isinstance(forward := attributes.get(slot), Replacement):
            return forward
    if any(leads_to_replacement(attributes[slot]) for slot in FORWARD_SLOTS if slot in attributes):
        # The results of `__func__` run this replacement, unless it belongs to another module.
        replacement = getattr(attributes.get(REPLICATE), "__self__", None)
        return replacement if isinstance(replacement, Replacement) and replacement.module() is module else None
    cell = wrapped_forward(module)
    return cell.cell_contents if cell and isinstance(cell.cell_contents, Replacement) else None


def installed_recipe(module: Any) -> Any:
    """Return the recipe that is installed on a module, or any object; None without one, or behind a wrapper."""
    forward = getattr(module, "__dict__", {}).get("forward")
    # The type is compared, because a wrapper of accelerate has all attributes of a replacement.
    return forward.recipe if type(forward) is Replacement else None


def find_recipe(module: nn.Module, cls: type) -> Any:
    """Return the recipe of a class among those that a module runs, one inside the other; None if there is none."""
    recipe = getattr(find_replacement(module), "recipe", None)
    while recipe is not None and not isinstance(recipe, cls):
        recipe = getattr(recipe, "inner", None)
    return recipe


# --- hooks and other forwards ------------------------------------------------------------------------


def _assigned_forward(module: nn.Module) -> Callable | None:
    """Return a forward that was assigned to the instance and is not the forward of its class; None if there is none."""
    current = module.__dict__.get(forward_slot(module))
    return None if getattr(current, "__func__", None) is type(module).forward else current


def is_changed(module: nn.Module) -> bool:
    """Return True if a call of the module runs code apart from the forward of its class and hooks of DeepSpeed. These
    hooks are on every module and move its parameters."""
    hooks = (hook for name in HOOK_TABLES for hook in getattr(module, name).values())
    has_hook = has_hooks(module) and not all(map(is_hook_of_deepspeed, hooks))
    return has_hook or _assigned_forward(module) is not None or not has_stock_call(module)


def find_changing_hook(module: nn.Module) -> str | None:
    """Return the Python module that defines a hook which may change outputs or gradients; None without such a hook. The
    hooks of the descendants count too. Hooks before the forward do not count, because the forward receives their
    results. Hooks of engines that shard models do not count, because they change no values."""
    for each in module.modules():
        for group in (each._forward_hooks, each._backward_hooks, each._backward_pre_hooks):
            for hook in group.values():
                if not keeps_values(hook):
                    return origin_of(hook)
    return None


def foreign_forward(module: nn.Module, *, may_be_wrapped: bool = False) -> str | None:
    """Return a clause that says which code replaced the forward that the class was written with; None if none did. An
    integration of Tigon gives the clause itself, as the attribute `reason_to_keep` of the forward that it assigns. With
    `may_be_wrapped`, a function of transformers that calls the forward of the class does not count. A wrapper of
    accelerate for mixed precision never counts, and neither does a wrapper around an uninstalled replacement."""
    current = _assigned_forward(module)
    is_restored = not isinstance(current, Replacement) and leads_to_replacement(current)
    if is_restored or _mixed_precision_wrapper(module) is not None:
        current = None
    # `install` lets a function of transformers that calls the forward of the class call the replacement.
    is_wrapper = lambda: wrapped_forward(module) is not None and written_in(module.forward).startswith("transformers.")
    if current is not None and not (may_be_wrapped and is_wrapper()):
        if reason := getattr(current, "reason_to_keep", None):
            return reason
        return f"its forward was already replaced (by {written_in(current)})"
    owner, *bases = (cls for cls in type(module).__mro__ if "forward" in vars(cls))
    function = _undecorated_forward(owner)
    # transformers decorates the forward of a class once more for the subclass that FSDP2 makes of it.
    owner = next((base for base in bases if _undecorated_forward(base) is function), owner)
    if (origin := written_in(function)) != owner.__module__:
        return f"the forward of its class was already replaced (by {origin})"
    return None


def _undecorated_forward(cls: Any) -> Any:
    """Return the forward of a class behind the decorators of its author's package, of torch and of transformers."""
    function, packages = cls.forward, {cls.__module__.partition(".")[0], "torch", "transformers"}
    while hasattr(function, "__wrapped__") and written_in(function).partition(".")[0] in packages:
        function = function.__wrapped__
    return function


# --- install and uninstall ---------------------------------------------------------------------------


def install(module: nn.Module, recipe: Callable, guard: Any = None) -> Callable[[], None]:
    """Give a module the forward `recipe`, as long as its guard holds. Return a function that uninstalls it, also if
    hooks have moved the replacement in the meantime."""
    if (installed := find_replacement(module)) is not None:
        return exchange(installed, "recipe", recipe)
    replacement, attributes, slot = Replacement(module, recipe, guard), vars(module), forward_slot(module)
    # pickle restores attributes in this order, and the forward that accelerate has assigned needs the replacement.
    attributes[REPLICATE] = replacement.replicate
    if (cell := wrapped_forward(module)) is not None:
        cell.cell_contents = replacement
    else:
        if (wrapper := _mixed_precision_wrapper(module)) is not None:
            _bind_wrapper(wrapper, replacement.__func__)
        assigned = attributes.pop(slot, None)
        attributes[slot] = assigned if leads_to_replacement(assigned) else replacement
    if ORIGINAL_FORWARD in attributes:
        attributes[ORIGINAL_FORWARD] = replacement
    return functools.partial(uninstall, module, replacement)


def _bind_wrapper(wrapper: FunctionType, forward: Callable) -> None:
    """Let a wrapper call `forward` in place of the function that it wraps."""
    for cell in wrapper.__closure__ or ():
        if cell.cell_contents is vars(wrapper)["__wrapped__"]:
            cell.cell_contents = forward
    vars(wrapper)["__wrapped__"] = forward


def exchange(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute. Return a function that restores the earlier value, unless it has been set again."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if getattr(owner, name) is value else None


def uninstall(module: nn.Module, replacement: Replacement) -> None:
    """Give a module the forward of its class back."""
    attributes, cell = vars(module), wrapped_forward(module)
    stock = type(module).forward.__get__(module)
    replacement.recipe = None
    if getattr(attributes.get(REPLICATE), "__self__", None) is replacement:
        del attributes[REPLICATE]
    if cell is not None and cell.cell_contents is replacement:
        cell.cell_contents = stock
    for slot in (*FORWARD_SLOTS, ORIGINAL_FORWARD):
        forward = attributes.get(slot)
        # accelerate binds the function in `__func__` of the replacement to the module.
        if forward is replacement or (isinstance(forward, MethodType) and _is_unbound(forward.__func__)):
            del attributes[slot]
            attributes.update({} if slot == "forward" else {slot: stock})
