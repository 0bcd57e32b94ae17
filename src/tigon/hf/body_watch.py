"""The checks at each call of the body of a patched model, which cost about 1 us for each module that they compare.

- A trainer, such as those of TRL, may replace the forward of the model after the patch and call the body. The loss in
  the head is then not used, which no result shows, so the body warns once in training.
- PEFT exchanges linear layers and experts for modules with adapters. The body compares the children of its modules with
  those of the previous call, and installs a recipe on each new child with adapters before it runs.
"""

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tigon.hf.loss_options import LossOptions
from tigon.hf.positions import NumberingForward
from tigon.hf.report import Report
from tigon.recognition.parts.adapters import (
    AdapterRecipe,
    install_adapters,
    recognise_adapters,
    replaced_modules,
    uninstall_adapters,
)
from tigon.recognition.parts.expert_adapters import ExpertAdapterRecipe
from tigon.recognition.parts.experts import is_experts
from tigon.recognition.probing.kind import kind_of
from tigon.recognition.probing.standin import is_linear
from tigon.recognition.replacement import (
    Replacement,
    find_replacement,
    foreign_forward,
    install,
    installed_recipe,
    wrapped_functions,
)
from tigon.runtime.stock import written_in

LOGGER = logging.getLogger("tigon")


def describe_bypass(what: str, model: nn.Module, origin: str) -> str:
    """Return the sentence that says what replaced a part of a patched model, what is off, and what to call. `what` is
    the part, such as "the forward". `origin` is the Python module with the new code, or "" for the model's class."""
    if origin.partition(".")[0] == "trl":
        advice = "call tigon.integrations.trl.enable() before the trainer is built"
    else:
        advice = "let the new code call the one that it replaces, or compute its loss by tigon.linear_cross_entropy"
    code = f"by {origin}" if origin else f"by {what} of its class"
    return (
        f"{what} of {type(model).__name__} was replaced ({code}) after tigon.patch, so the loss in its head is not "
        f"used; norms, MLPs, attention layers and the memory level stay as patched; {advice}"
    )


class LossWatch:
    """Warns once if a model has another forward than the patched one. The warning is added to the notes of a report."""

    def __init__(self, model: nn.Module, state: Any, notes: list[str]) -> None:
        # `state` is the `FusedLoss` of the model.
        self.model, self.state, self.notes = weakref.ref(model), state, notes
        self.is_on = True

    def check(self) -> None:
        """Compare the forward of the model with the patched one."""
        if not self.is_on or (model := self.model()) is None or self.state.is_running:
            return
        forward = vars(model).get("forward")
        # Tigon's integration of TRL sets the attribute on its forward, and wrappers of accelerate copy it.
        if isinstance(forward, Replacement) or find_replacement(model) is not None:
            return
        if any(hasattr(function, "is_replacement") for function in wrapped_functions(forward)):
            return
        self.is_on = False
        message = describe_bypass("the forward", model, "" if forward is None else written_in(forward))
        self.notes.append(message)
        warnings.warn(f"tigon: {message}", stacklevel=5)


class AdapterWatch:
    """Installs recipes on new layers that have adapters. The references to the report and to modules are weak, so
    removed adapters and deleted models are freed."""

    def __init__(self, parents: Mapping[nn.Module, str], report: Report) -> None:
        # The modules with linear layers or experts, by name, with the ids of their children at the last comparison.
        self.parents = {
            name: (weakref.ref(module), [*map(id, module._modules.values())]) for module, name in parents.items()
        }
        self.report = weakref.ref(report)
        self.replaced_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.results: dict[tuple, Any] = {}

    def check(self) -> None:
        """Install a recipe on each layer with adapters that was added since the last call."""
        for name, (reference, old_ids) in self.parents.items():
            module = reference()
            # A call for each module would take most of the time of this loop.
            if module is None or (ids := [*map(id, module._modules.values())]) == old_ids:
                continue
            self.parents[name] = reference, ids
            for child_name, child in module._modules.items():
                if child is not None and id(child) not in old_ids:
                    self.install_recipe(f"{name}.{child_name}" if name else child_name, child)

    def install_recipe(self, name: str, child: nn.Module) -> None:
        """Install a recipe on a layer with adapters. Modules of one kind are recognised once."""
        if find_replacement(child) is not None or foreign_forward(child):
            return
        recipe = self.recognise(child)
        if not isinstance(recipe, (AdapterRecipe, ExpertAdapterRecipe)):
            return
        install_adapters(child, recipe)
        self.replaced_modules.update(replaced_modules(child, recipe))
        if (report := self.report()) is not None:
            detail = f"{recipe}, added after the patch"
            # The name had another module before.
            report.outcomes.pop(name, None)
            report.record("adapters", child, True, detail, name)
        LOGGER.info("%s was added after the patch, and its adapters are computed by an op", name)

    def recognise(self, child: nn.Module) -> Any:
        """Return the result of recognition. The attributes of a module may be objects that raise when they are read."""
        try:
            kind = kind_of(child)
            if kind not in self.results:
                self.results[kind] = recognise_adapters(child)
            return self.results[kind]
        except Exception:
            LOGGER.debug("a %s that was added after the patch cannot be read", type(child).__name__, exc_info=True)
            return None

    def restore(self) -> None:
        """Give the modules that were replaced later the forwards of their classes back."""
        for module in [*self.replaced_modules]:
            uninstall_adapters(module)


class WatchedBody:
    """Recipe for the body of a model: it makes the checks, then runs the body's earlier forward. `inner` is the recipe
    that the body had before, or None for the forward of its class."""

    def __init__(
        self, inner: Callable | None, loss: LossWatch | None = None, adapters: AdapterWatch | None = None
    ) -> None:
        self.inner, self.loss, self.adapters = inner, loss, adapters
        # The first call sets this forward of the body's class.
        self.numbering: NumberingForward | None = None

    def __reduce__(self) -> tuple:
        # A copy of the body does not know its model and its modules, so it checks nothing.
        return WatchedBody, (self.inner,)

    def __call__(self, body: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            if self.adapters is not None:
                self.adapters.check()
            if self.loss is not None and body.training and torch.is_grad_enabled():
                self.loss.check()
        return (self.inner or self.find_forward(body, args, kwargs))(body, *args, **kwargs)

    def find_forward(self, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Callable:
        """Return the forward of the body's class, or a variant that computes the same for these arguments."""
        if torch.compiler.is_compiling():
            return type(body).forward
        if self.numbering is None:
            self.numbering = NumberingForward(type(body))
        return self.numbering.for_call(body, args, kwargs)


def watch_body(
    model: nn.Module, options: LossOptions | None, names: Mapping[nn.Module, str] | None, report: Report
) -> Callable[[], None]:
    """Set the options of a loss in the head, and let the body of its model make the checks. Return the undoing.
    `options` is None without a loss in the head. `names` is None to look for no adapters."""
    loss: LossWatch | None = None
    if options is not None and (replacement := find_replacement(model)) is not None:
        forward: Any = replacement.recipe
        forward.options, forward.notes = options, report.notes
        loss = LossWatch(model, forward.fused, report.notes)
    # The attribute of another library's class may raise anything.
    try:
        body: Any = model.base_model
    except Exception:
        return lambda: None
    if not isinstance(body, nn.Module) or body is model or (loss is None and names is None):
        return lambda: None
    replacement = find_replacement(body)
    if replacement is None and foreign_forward(body):
        return lambda: None
    adapters = None if names is None else AdapterWatch(_parents(body, names), report)
    recipe = WatchedBody(None if replacement is None else replacement.recipe, loss, adapters)
    undo = install(body, recipe)

    def restore() -> None:
        if adapters is not None:
            adapters.restore()
        undo()

    return restore


def _parents(body: nn.Module, names: Mapping[nn.Module, str]) -> dict[nn.Module, str]:
    """Return the modules of a body that a library may give layers with adapters, with their names. Linear layers with
    adapters and their submodules are left out. A further adapter only adds plain linear layers inside such a layer, and
    these need no recipe."""
    adapted_layers = [module for module in body.modules() if isinstance(installed_recipe(module), AdapterRecipe)]
    left_out = {part for layer in adapted_layers for part in layer.modules()}
    modules = [module for module in body.modules() if module not in left_out and module in names]
    # A library wraps linear layers and experts to add adapters.
    is_parent = lambda module: any(is_linear(child) or is_experts(child) for child in module.children())
    return {module: names[module] for module in modules if is_parent(module)}
