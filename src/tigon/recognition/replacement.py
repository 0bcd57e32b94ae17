"""Give one module another forward, as an attribute of the instance. Its class and its siblings stay as they are.

`nn.Module.__call__` looks `forward` up on the instance first. So hooks, sharding and checkpointing work as before, and
deleting the attribute restores the stock module:

    undo = install(module, recipe)   # module(x) now computes recipe(module, x)
    undo()                           # module(x) runs the forward of its class again
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from tigon.runtime.engines import FORWARD_SLOTS, WRAPPED_FORWARD, forward_slot, is_hook_of_deepspeed, keeps_values
from tigon.runtime.maxima import MaximaRequests
from tigon.runtime.stock import has_stock_call, origin_of, written_in
from tigon.runtime.torch_private.modules import HOOK_TABLES, REPLICATE

__all__ = [
    "Replacement",
    "exchange",
    "find_changing_hook",
    "find_replacement",
    "foreign_forward",
    "install",
    "installed_recipe",
    "is_changed",
    "requests_of",
    "uninstall",
    "wrapped_forward",
    "written_in",
]


class Replacement:
    """The forward that computes `recipe(module, *args, **kwargs)`.

    This object stands for a bound method. A call runs for the module that it is bound to, whatever the arguments are: a
    forward may take another module as its first argument. Code that binds the forward to another module uses
    `__func__`, as for any method.

    `copy.deepcopy` and `pickle` of the module treat this object as a part of the module's state, so the forward of a
    copy reads the parameters of the copy. A real bound method could not be pickled. The reference to the module is
    weak, so that the memory of a deleted model is freed at once.
    """

    def __init__(
        self, module: nn.Module, recipe: Callable | None, guard: Any = None, requests: MaximaRequests | None = None
    ) -> None:
        self.module = weakref.ref(module)
        # None after the recipe was uninstalled: a wrapper that still holds this object then runs the stock forward.
        self.recipe = recipe
        # The guard is None for a recipe that runs the code of the module's class.
        self.guard = guard
        # The maxima that FP8 layers need of the results of a norm. None for other modules and for models without such
        # layers.
        self.requests = requests
        # The results of earlier calls of a layer with adapters (`recognition.adapter_memo`). A copy of the layer has
        # other tensors, so it begins without a memo.
        self.memo: Any = None

    def __reduce__(self) -> tuple:
        return Replacement, (self.__self__, self.recipe, self.guard, self.requests)

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
        return self.run(self.__self__, args, kwargs)

    def replicate(self) -> nn.Module:
        """Return a replica of the module for `nn.DataParallel`, which copies the attributes of the module.

        This method is the attribute `REPLICATE` of the module, where it takes the place of torch's method.
        """
        replica: Any = getattr(type(self.__self__), REPLICATE)(self.__self__)
        del vars(replica)[REPLICATE]
        if vars(replica).get("forward") is self:
            vars(replica)["forward"] = Replacement(replica, self.recipe, self.guard, self.requests)
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

    @property
    def __func__(self) -> Callable:
        """Return `forward(module, ...)` for any module of the class. accelerate binds it to modules that it wraps."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.run(module, args, kwargs)

        vars(forward).update(is_replacement=True, __signature__=inspect.signature(type(self.__self__).forward))
        return forward

    @property
    def __wrapped__(self) -> Callable:
        """Return the stock forward as a bound method, whose source `inspect.getsource` reads."""
        return type(self.__self__).forward.__get__(self.__self__)

    @property
    def __code__(self) -> CodeType:
        """Return the code of the stock forward, from which `torch.export` reads the name of the file."""
        return inspect.unwrap(self.__wrapped__).__code__

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
        return inspect.signature(self.__wrapped__)


# --- the attribute that holds a forward --------------------------------------------------------------


def wrapped_forward(module: nn.Module) -> CellType | None:
    """Return the cell in which a function that was assigned as forward holds the forward that it calls.

    The tensor parallelism of transformers assigns such a function. The forward of the class then receives tensors of
    this rank.
    """
    assigned = vars(module).get("forward")
    is_forward = lambda f: isinstance(f, Replacement) or getattr(f, "__func__", None) is type(module).forward
    cells = (isinstance(assigned, FunctionType) and assigned.__closure__) or ()
    return next((cell for cell in cells if is_forward(cell.cell_contents)), None)


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
    cell = wrapped_forward(module)
    return cell.cell_contents if cell and isinstance(cell.cell_contents, Replacement) else None


def installed_recipe(module: Any) -> Any:
    """Return the recipe that is installed on a module; None without one, and if a wrapper has taken its place.

    `module` may be any object that a forward calls. A builtin function has no `__dict__`.
    """
    forward = getattr(module, "__dict__", {}).get("forward")
    # The type is compared, because a wrapper of accelerate has all attributes of a replacement.
    return forward.recipe if type(forward) is Replacement else None


def requests_of(norm: nn.Module) -> MaximaRequests | None:
    """Return what the readers of the results of a norm need to quantise them; None if they need nothing."""
    replacement = vars(norm).get("forward")
    return replacement.requests if type(replacement) is Replacement else None


# --- hooks and other forwards ------------------------------------------------------------------------


def _assigned_forward(module: nn.Module) -> Callable | None:
    """Return a forward that was assigned to the instance and is not the forward of its class; None if there is none."""
    current = module.__dict__.get(forward_slot(module))
    return None if getattr(current, "__func__", None) is type(module).forward else current


def is_changed(module: nn.Module) -> bool:
    """Return True if a call of the module runs any code besides the forward of its class.

    Hooks of DeepSpeed do not count. They are on every module, and move its parameters.
    """
    tables = (getattr(module, name) for name in HOOK_TABLES)
    has_hook = any(not is_hook_of_deepspeed(hook) for table in tables for hook in table.values())
    return has_hook or _assigned_forward(module) is not None or not has_stock_call(module)


def find_changing_hook(module: nn.Module) -> str | None:
    """Return the Python module that defines a hook which may change outputs or gradients; None without such a hook.

    The hooks of the descendants count too. Hooks before the forward do not count, because the forward receives their
    results. Hooks of engines that shard models do not count, because they change no values.
    """
    for each in module.modules():
        for group in (each._forward_hooks, each._backward_hooks, each._backward_pre_hooks):
            for hook in group.values():
                if not keeps_values(hook):
                    return origin_of(hook)
    return None


def _is_wrapped_by_transformers(module: nn.Module) -> bool:
    """Return True if the assigned forward is a function of transformers that calls the forward of the class.

    `install` then lets this function call the replacement.
    """
    return wrapped_forward(module) is not None and written_in(module.forward).startswith("transformers.")


def foreign_forward(module: nn.Module, *, may_be_wrapped: bool = False) -> str | None:
    """Return a clause that says which code replaced the forward that the class was written with; None if none did.

    An integration of Tigon gives the clause itself, as the attribute `reason_to_keep` of the forward that it assigns.
    With `may_be_wrapped`, a function of transformers that calls the forward of the class does not count.
    """
    current = _assigned_forward(module)
    if current is not None and not (may_be_wrapped and _is_wrapped_by_transformers(module)):
        if reason := getattr(current, "reason_to_keep", None):
            return reason
        return f"its forward was already replaced (by {written_in(current)})"
    owner: Any = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    function, known_packages = owner.forward, {owner.__module__.partition(".")[0], "torch", "transformers"}
    # Decorators of the author's package, of torch and of transformers belong to the forward.
    while hasattr(function, "__wrapped__") and written_in(function).partition(".")[0] in known_packages:
        function = function.__wrapped__
    if (origin := written_in(function)) != owner.__module__:
        return f"the forward of its class was already replaced (by {origin})"
    return None


# --- install and uninstall ---------------------------------------------------------------------------


def install(module: nn.Module, recipe: Callable, guard: Any = None) -> Callable[[], None]:
    """Give a module the forward `recipe`, as long as its guard holds.

    Returns:
        A function that uninstalls the recipe, also if hooks have moved the replacement in the meantime.
    """
    if (installed := find_replacement(module)) is not None:
        return exchange(installed, recipe)
    replacement = Replacement(module, recipe, guard)
    if (cell := wrapped_forward(module)) is not None:
        cell.cell_contents = replacement
    else:
        vars(module)[forward_slot(module)] = replacement
    vars(module)[REPLICATE] = replacement.replicate
    return functools.partial(uninstall, module, replacement)


def exchange(replacement: Replacement, recipe: Callable) -> Callable[[], None]:
    """Give a replacement another recipe. Return a function that gives it the old recipe back."""
    before, replacement.recipe = replacement.recipe, recipe

    def undo() -> None:
        if replacement.recipe is recipe:
            replacement.recipe = before

    return undo


def uninstall(module: nn.Module, replacement: Replacement) -> None:
    """Give a module the forward of its class back."""
    attributes, cell = vars(module), wrapped_forward(module)
    stock = type(module).forward.__get__(module)
    replacement.recipe = None
    if getattr(attributes.get(REPLICATE), "__self__", None) is replacement:
        del attributes[REPLICATE]
    if cell is not None and cell.cell_contents is replacement:
        cell.cell_contents = stock
    elif attributes.get("forward") is replacement:
        del attributes["forward"]
    elif attributes.get(WRAPPED_FORWARD) is replacement:
        attributes[WRAPPED_FORWARD] = stock
