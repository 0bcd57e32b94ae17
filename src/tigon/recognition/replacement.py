"""How a module gets another forward: as an attribute of the instance, its class and its siblings stay as they are.

`nn.Module.__call__` looks `forward` up on the instance first, so hooks, sharding and checkpointing see no difference,
and deleting the attribute gives the stock module back.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from tigon.runtime.stock import has_stock_call, origin_of, written_in

__all__ = [
    "Replacement",
    "exchange",
    "find_replacement",
    "foreign_forward",
    "foreign_hook",
    "install",
    "is_changed",
    "uninstall",
    "wrapped_forward",
    "written_in",
]

# Whose hooks on a module only gather and shard its parameters, or what goes in and out.
SHARDING = ("torch.", "deepspeed.", "accelerate.", "transformers.distributed.", "transformers.integrations.")
REPLICATE = "_replicate_for_data_parallel"


class Replacement:
    """`recipe(module, *args, **kwargs)` as the forward of `module`.

    A plain object that names its module: `copy.deepcopy` and `pickle` of the module meet it as part of the module's
    own state, so a copy's forward reads the copy's parameters (a bound method in its place would not survive pickling).
    It does not keep its module: a model that is deleted frees its memory at once, as a stock one does.
    """

    def __init__(self, module: nn.Module, recipe: Callable | None, guard: Any = None) -> None:
        self.module = weakref.ref(module)
        # None once undone: a wrapper that still holds this replacement then gets the stock forward.
        self.recipe = recipe
        # A recipe that runs the code of the module's class needs no guard.
        self.guard = guard

    def __reduce__(self):
        return Replacement, (self.__self__, self.recipe, self.guard)

    def holds(self) -> bool:
        """Whether the recipe may run: the module is what it was when it was recognised."""
        return self.recipe is not None and (self.guard is None or self.guard.holds(self.__self__))

    def run(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The recipe, or the forward of the class if the recipe was undone or the module has changed."""
        recipe, guard = self.recipe, self.guard
        if recipe is None or (guard is not None and not guard.holds(module)):
            return type(module).forward(module, *args, **kwargs)
        return recipe(module, *args, **kwargs)

    @property
    def __self__(self) -> nn.Module:
        if (module := self.module()) is None:
            raise ReferenceError("tigon: the module of this forward is gone: keep the module, not its forward alone")
        return module

    @property
    def __func__(self) -> FunctionType:
        """Of any module of its class, as of a method: accelerate binds it to the module it wraps or copies."""

        def forward(module: nn.Module, *args, **kwargs) -> Any:
            return self.run(module, args, kwargs)

        forward.is_replacement = True
        forward.__signature__ = inspect.signature(type(self.__self__).forward)
        return forward

    @property
    def __code__(self) -> CodeType:
        """That of the stock forward: `torch.export` says where it is from."""
        return inspect.unwrap(type(self.__self__).forward).__code__

    @property
    def __globals__(self) -> dict[str, Any]:
        """Say why `torch.jit.script` fails: it reads the globals and then the source text of a Python function."""
        raise AttributeError(
            "tigon: torch.jit.script cannot read a forward that Tigon replaced: call report.restore() first, where "
            "report is the result of tigon.patch"
        )

    def replicate(self) -> nn.Module:
        """In place of the module's `_replicate_for_data_parallel`: `nn.DataParallel` copies what the module holds."""
        replica = type(self.__self__)._replicate_for_data_parallel(self.__self__)
        del vars(replica)[REPLICATE]
        if vars(replica).get("forward") is self:
            vars(replica)["forward"] = Replacement(replica, self.recipe, self.guard)
        return replica

    def __call__(self, *args, **kwargs) -> Any:
        module = self.__self__
        if args and isinstance(args[0], nn.Module):  # accelerate's unwrap_model made it a method
            module, *args = args
        return self.run(module, args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the stock forward: the Trainer and `generate` read it to learn what the model takes."""
        return inspect.signature(type(self.__self__).forward.__get__(self.__self__))


def _slot(module: nn.Module) -> str:
    """Where the forward of the model's author is: accelerate's hooks wrap it and keep it as `_old_forward`."""
    hooked = "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__  # in words that torch.compile knows
    return "_old_forward" if hooked else "forward"


def wrapped_forward(module: nn.Module) -> CellType | None:
    """Where a function that was assigned as forward keeps the one of the module's class, to call it.

    So transformers' tensor parallelism wraps a module: the forward of its class meets the tensors of this rank.
    """
    assigned = vars(module).get("forward")
    kept = lambda f: isinstance(f, Replacement) or getattr(f, "__func__", None) is type(module).forward
    cells = (isinstance(assigned, FunctionType) and assigned.__closure__) or ()
    return next((cell for cell in cells if kept(cell.cell_contents)), None)


def find_replacement(module: nn.Module) -> Replacement | None:
    """The replacement installed on `module`, also one that accelerate or tensor parallelism has wrapped since."""
    own = vars(module)
    if isinstance(shared := own.get("forward"), Replacement) and shared.module() is not module:
        # A shallow copy has the replacement of the module that it was copied from, so a call of the copy would run
        # that module. The copy gets the forward of its class back.
        del own["forward"]
        if getattr(own.get(REPLICATE), "__self__", None) is shared:
            del own[REPLICATE]
    for slot in ("forward", "_old_forward"):
        if isinstance(forward := own.get(slot), Replacement):
            return forward
    cell = wrapped_forward(module)
    return cell.cell_contents if cell and isinstance(cell.cell_contents, Replacement) else None


def _assigned_forward(module: nn.Module) -> Callable | None:
    current = module.__dict__.get(_slot(module))
    return None if getattr(current, "__func__", None) is type(module).forward else current


def is_changed(module: nn.Module) -> bool:
    """Whether a call of the module does anything but the forward of its class."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    # Those of DeepSpeed, on every module, move its parameters.
    change = any(not str(hook.__module__).startswith("deepspeed.") for group in hooks for hook in group.values())
    return change or _assigned_forward(module) is not None or not has_stock_call(module)


def is_of_an_engine(hook: Callable) -> bool:
    """Return whether a hook belongs to an engine that shards models, whose hooks change no values."""
    return origin_of(hook).startswith(SHARDING)


def _foreign_hook(module: nn.Module) -> str | None:
    groups = module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
    return next((origin_of(hook) for group in groups for hook in group.values() if not is_of_an_engine(hook)), None)


def foreign_hook(module: nn.Module) -> str | None:
    """Who has put a hook that may change outputs or gradients on a module or what is in it; None if nobody did.

    Hooks before the forward may: the forward sees what they change. So may those that shard: they change no values.
    """
    return next(filter(None, map(_foreign_hook, module.modules())), None)


def foreign_forward(module: nn.Module) -> str | None:
    """What stands in place of the forward that the module's class was written with, or None if nothing does."""
    if (current := _assigned_forward(module)) is not None:
        return f"its forward was already replaced (by {written_in(current)})"
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    function, known = owner.forward, {owner.__module__.partition(".")[0], "torch", "transformers"}
    while hasattr(function, "__wrapped__") and written_in(function).partition(".")[0] in known:  # a decorator of theirs
        function = function.__wrapped__
    if (origin := written_in(function)) != owner.__module__:
        return f"the forward of its class was already replaced (by {origin})"
    return None


def install(module: nn.Module, recipe: Callable, guard: Any = None) -> Callable[[], None]:
    """Give `module` the forward `recipe`, as long as its guard holds.

    Returns the function that undoes it, wherever hooks have moved the replacement since.
    """
    if (installed := find_replacement(module)) is not None:
        return exchange(installed, recipe)
    replacement = Replacement(module, recipe, guard)
    if (cell := wrapped_forward(module)) is not None:
        cell.cell_contents = replacement
    else:
        vars(module)[_slot(module)] = replacement
    vars(module)[REPLICATE] = replacement.replicate
    return functools.partial(uninstall, module, replacement)


def exchange(replacement: Replacement, recipe: Callable) -> Callable[[], None]:
    """Give what is replaced already another recipe; the function that undoes it gives it the old one back."""
    before, replacement.recipe = replacement.recipe, recipe

    def undo() -> None:
        if replacement.recipe is recipe:
            replacement.recipe = before

    return undo


def uninstall(module: nn.Module, replacement: Replacement) -> None:
    """Give `module` the forward of its class back."""
    own, stock, cell = vars(module), type(module).forward.__get__(module), wrapped_forward(module)
    replacement.recipe = None
    if getattr(own.get(REPLICATE), "__self__", None) is replacement:
        del own[REPLICATE]
    if cell is not None and cell.cell_contents is replacement:
        cell.cell_contents = stock
    elif own.get("forward") is replacement:
        del own["forward"]
    elif own.get("_old_forward") is replacement:
        own["_old_forward"] = stock
