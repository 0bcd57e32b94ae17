"""`tigon.patch`: recognise the modules of a model that compute what an op computes, and replace them."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, ParamSpec, get_args

from torch import nn

from tigon.hf.by_type import patch_type
from tigon.hf.entered import watch_entry
from tigon.hf.learn import attach, learn_loss
from tigon.hf.levels import LEVELS, apply_level, refusal
from tigon.hf.report import Report
from tigon.recognition.experts import recognise_experts
from tigon.recognition.glue import GlueRecipe, overwritten_norms, recognise_glue
from tigon.recognition.guard import install_guarded
from tigon.recognition.kind import kind_of
from tigon.recognition.mlps import recognise_glu, recognise_relu2
from tigon.recognition.norms import recognise_norm
from tigon.recognition.replacement import find_replacement, foreign_forward, install
from tigon.recognition.rope import RopeRecipe, recognise_rope
from tigon.recognition.standin import describe
from tigon.runtime.requirements import require_for

__all__ = ["patch", "patched"]

# For each part: the function that recognises a module (it returns a recipe, a reason why not, or None), and the
# function that installs the recipe.
PARTS: dict[str, tuple[Callable[[nn.Module], Any], Callable]] = {
    "rms_norm": (recognise_norm, install_guarded),
    "layer_norm": (recognise_norm, install_guarded),
    "glu": (recognise_glu, install_guarded),
    "relu2": (recognise_relu2, install_guarded),
    "experts": (recognise_experts, install_guarded),
    "rope": (recognise_rope, install),
    "glue": (recognise_glue, install),
    "loss": (learn_loss, attach),
}
OPTIONS = (*PARTS, "memory")
# The names of LEVELS.
MemoryLevel = Literal["default", "lean", "lean+mlp", "checkpoint", "offload"]
MEMORY: tuple[str, ...] = get_args(MemoryLevel)
P = ParamSpec("P")


def _check_options(parts: dict[str, Any], memory: Any, unknown: Iterable[str]) -> None:
    """Refuse unknown options and wrong values."""
    for name in unknown:
        raise TypeError(f"patch: unknown option {name!r}; choose from {', '.join(OPTIONS)}")
    for name, value in parts.items():
        if not isinstance(value, bool):
            raise TypeError(f"patch: {name} must be True or False, got {value!r}")
    if not isinstance(memory, str) or memory not in MEMORY:
        raise ValueError(f"patch: memory must be one of {', '.join(map(repr, MEMORY))}, got {memory!r}")


# These recipes run the code of a module's class, and one module may have both.
JOINED = RopeRecipe, GlueRecipe


def _joined(before: Any, recipe: Any) -> RopeRecipe | None:
    """Return one recipe that does what two recipes for one module do; None if they cannot be joined."""
    ropes = [r for r in (before, recipe) if isinstance(r, RopeRecipe) and not r.glue]
    both = len(ropes) == 1 and any(isinstance(r, GlueRecipe) for r in (before, recipe))
    return ropes[0].with_glue() if both else None


def _kind_or_itself(module: nn.Module) -> Any:
    """Return the kind of a module. A module whose state cannot be read is a kind of its own."""
    try:
        return kind_of(module)
    except Exception:
        return module


def _recognise(recognise: Callable[[nn.Module], Any], module: nn.Module, unreadable: set[nn.Module]) -> Any:
    """Return what a recogniser returns, or the error that a module raises when it is read, as a reason.

    Attributes of a module may be objects of any class, and these may raise anything. The first error is reported.
    """
    try:
        return recognise(module)
    except Exception as error:
        is_first = module not in unreadable
        unreadable.add(module)
        return f"cannot be read ({describe(error)})" if is_first else None


def _lost(level: str, is_fused: bool) -> str:
    """Name the features that a model loses with another forward, as the beginning of a clause."""
    words = ["the loss in its head"] * is_fused + [f"memory={level!r}"] * LEVELS[level].lean
    return f"{' and '.join(words)} {'are' if len(words) > 1 else 'is'}"


def patch(
    model: nn.Module | str,
    *,
    rms_norm: bool = True,
    layer_norm: bool = True,
    glu: bool = True,
    relu2: bool = True,
    experts: bool = True,
    rope: bool = True,
    glue: bool = True,
    loss: bool = True,
    memory: MemoryLevel = "default",
    **unknown: Any,
) -> Report:
    """Replace the modules of this instance that compute, bit for bit, what an op of Tigon computes.

    Modules are recognised by running small copies of them, so the model may be of any class, and on any device or on
    meta. It can be moved, trained, compiled, copied and saved afterwards as before. A module that computes anything
    else keeps its own code. A replaced module checks at every call that nothing that its forward reads has changed, and
    runs its own code otherwise.

    Args:
        model: Any module; a causal language model of transformers profits most. Or a model type such as "llama": from
            now on, until the report's `restore()`, every model of that type is patched when it is built. Models that
            were built before stay stock, and models that were built in between stay patched.
        rms_norm: Replace RMS norms, also gated ones.
        layer_norm: Replace layer norms.
        glu: Replace gated MLPs.
        relu2: Replace squared ReLUs.
        experts: Replace the experts of a mixture whose weights are one tensor.
        rope: Replace the rotary embeddings of attentions.
        glue: Replace statements between modules: the sum of a residual and the norm after it, and linear layers that
            have the same input. The source of a layer's forward is rewritten for this. The stock statements run
            wherever the norm or the linear layers do more than the op.
        loss: Replace the head and the loss of a causal language model. In training mode with labels, the loss is
            computed in the head without holding the logits, and `logits` of the output raises `LogitsSkippedError` when
            it is used. `skip_logits=True` in a call of the model asks for this in any mode (then also with
            `shift_labels` alone); `skip_logits=False` gives logits in any mode. Evaluation, generation, and calls
            without labels or with `logits_to_keep` stay stock. While an adapter or a hook on the head takes part, the
            loss is stock too, with a warning. If the model scales or caps its logits in another way after the patch
            (another soft cap in the config), the loss is NaN instead of wrong. If it computes anything else from them,
            it raises at once.
        memory: The level that says how little is saved for backward. Results have the same bits at every level.
            "default": what each part saves. "lean": also no output of a norm or a gate. "lean+mlp": also no output of
            a gate or up projection. "checkpoint": only the input of each layer but the last, by the switch of
            transformers' models. "offload": as "lean+mlp", with the saved tensors in pinned host memory. Modules that
            must not be called twice run once at every level.

    Returns:
        A report: `print(report)` shows what was replaced, what was left alone and why; `report.restore()` undoes it.
        A model in which nothing is recognised is not touched, and a warning says so. Modules that are patched already
        stay as they are.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, or an option is unknown or of the wrong type.
        ImportError: The model comes from a transformers that is too old.
        ValueError: `memory` is none of its choices or is not possible here, or `model` is a string but no model type.

    Example:
        >>> report = tigon.patch(model, rope=False)
        >>> report.restore()
    """
    if not isinstance(model, (nn.Module, str)):
        raise TypeError(f"patch: model must be a torch.nn.Module or a model type, got {type(model).__name__}")
    options = {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "glu": glu,
        "relu2": relu2,
        "experts": experts,
        "rope": rope,
        "glue": glue,
        "loss": loss,
    }
    _check_options(options, memory, unknown)
    parts = [part for part in PARTS if options[part]]
    if isinstance(model, str):
        return patch_type(model, functools.partial(patch, **options, memory=memory))
    require_for(model)
    report, plan, asked, found = Report(type(model).__name__), {}, set(), {}
    installed = {module: getattr(find_replacement(module), "recipe", None) for module in model.modules()}
    modules = [
        (name, module) for name, module in model.named_modules() if isinstance(installed[module], (*JOINED, type(None)))
    ]
    kinds, unreadable = {module: _kind_or_itself(module) for _, module in modules}, set()
    overwritten = overwritten_norms(model)
    for part in parts:
        recognise, apply = PARTS[part]
        for name, module in modules:
            if (key := (recognise, kinds[module])) not in found:
                found[key] = _recognise(recognise, module, unreadable)
            recipe = found[key]
            # One function may recognise several parts, and the reason why it recognises nothing is reported once.
            other = recognise in asked if isinstance(recipe, str) else getattr(recipe, "part", part) != part
            before = plan[module][1] if module in plan else installed[module]
            if recipe is None or other or (before is not None and _joined(before, recipe) is None):
                continue
            recipe = (before is None and _recognise(foreign_forward, module, unreadable)) or recipe
            if part in ("rms_norm", "layer_norm"):
                recipe = overwritten.get(module, recipe)
            left = isinstance(recipe, str)
            report.add(part, type(module).__name__, not left, str(recipe), name)
            if not left:
                plan[module] = apply, recipe if before is None else _joined(before, recipe)
        asked.add(recognise)
    already = sum(recipe is not None and module not in plan for module, recipe in installed.items())
    # Levels that only recompute results of Tigon's ops have no effect in a model without such ops.
    ours = already or report or any(type(m).__module__.startswith("tigon.") for m in model.modules())
    level = memory if ours or memory in ("checkpoint", "offload") else "default"
    if reason := refusal(model, level):
        raise ValueError(f"patch: memory={level!r} cannot be had of this {report.model}: {reason}")
    # The model is changed only now, when everything is known and nothing was refused.
    report.undo = [apply(module, recipe) for module, (apply, recipe) in plan.items()]
    if level != "default":
        undo, note = apply_level(model, level)
        report.undo.append(undo)
        report.notes.append(note)
    fused = [module for module, (apply, _) in plan.items() if apply is attach]
    report.undo += [watch_entry(module, _lost(level, True)) for module in fused]
    if LEVELS[level].lean and model not in fused:
        report.undo.append(watch_entry(model, _lost(level, False)))
    if already:
        report.notes.append(f"{already} places were patched already and stay as they are")
    elif not report and level == "default":
        said = "nothing was replaced, see the report for why" if report.entries else "nothing was recognised"
        report.notes.append(f"{said} ({', '.join(parts)} asked for); the model was not touched")
        warnings.warn(f"tigon.patch({report.model}): {said}", stacklevel=2)
    return report


def _for_a_block(patch: Callable[P, Report]) -> Callable[P, contextlib.AbstractContextManager[Report]]:
    """Return a context manager that takes the arguments of `patch`, yields its report and restores the model."""

    @contextlib.contextmanager
    def patched(*args: P.args, **kwargs: P.kwargs) -> Iterator[Report]:
        report = patch(*args, **kwargs)
        try:
            yield report
        finally:
            report.restore()

    signature = inspect.signature(patch)
    patched.__signature__ = signature.replace(return_annotation=contextlib.AbstractContextManager[Report])
    patched.__qualname__ = "patched"
    return patched


patched = _for_a_block(patch)
patched.__doc__ = """Patch a model for the length of a `with` block: take the arguments of `patch`, yield the report.

Example:
    >>> with tigon.patched(model):
    ...     train(model)
    >>> with tigon.patched("llama"):  # Models that are built in the block stay patched.
    ...     model = AutoModelForCausalLM.from_pretrained(path)
"""
