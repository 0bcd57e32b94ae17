"""`tigon.patch`: find what a model computes that Tigon computes better, and let it."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

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
from tigon.requirements import require_for

__all__ = ["patch", "patched"]

# How a module is recognised (a recipe, a reason why not, or None) and how what was found is installed.
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
MEMORY = tuple(LEVELS)


def _choose(options: dict[str, Any]) -> list[str]:
    """The parts asked for, in the order of the report; refuses what is no option."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise TypeError(f"patch: unknown option {name!r}; choose from {', '.join(OPTIONS)}")
        if name == "memory":
            if not isinstance(value, str) or value not in MEMORY:
                raise ValueError(f"patch: memory must be one of {', '.join(map(repr, MEMORY))}, got {value!r}")
        elif not isinstance(value, bool):
            raise TypeError(f"patch: {name} must be True or False, got {value!r}")
    return [name for name in PARTS if options.get(name, True)]


JOINED = RopeRecipe, GlueRecipe  # recipes that run the code of a module's class, and may both do so


def _joined(before: Any, recipe: Any) -> RopeRecipe | None:
    """Two recipes for one module as one, if they can be."""
    ropes = [r for r in (before, recipe) if isinstance(r, RopeRecipe) and not r.glue]
    both = len(ropes) == 1 and any(isinstance(r, GlueRecipe) for r in (before, recipe))
    return ropes[0].with_glue() if both else None


def _lost(level: str, is_fused: bool) -> str:
    """What a model with another forward does without."""
    words = ["the loss in its head"] * is_fused + [f"memory={level!r}"] * LEVELS[level].lean
    return f"{' and '.join(words)} {'are' if len(words) > 1 else 'is'}"


def patch(model: nn.Module | str, **options: Any) -> Report:
    """Replace, in this instance only, what computes what an op of Tigon computes, to the bit.

    Modules are recognised by running small twins of them, so the model may be of any class, on any device or on meta,
    and moved, trained, compiled, copied and saved afterwards as before. Whatever differs keeps its own code.

    Args:
        model: Any module; a causal language model of transformers profits most. Or a model type, "llama": every model
            of that type is patched when it is built from now on, until the report's `restore()`; what was built before
            stays stock, what was built in between stays patched.
        rms_norm: RMS norms, also gated ones.
        layer_norm: Layer norms.
        glu: Gated MLPs.
        relu2: Squared ReLUs.
        experts: Experts of a mixture whose weights are one tensor.
        rope: Rotary embeddings of attentions.
        glue: What stands between: the sum of a residual and the norm after it, linear layers of one input. The source
            of a layer's forward is rewritten for it, and runs the stock statements wherever they do more.
        loss: The head and the loss of a causal language model: in training mode with labels, the loss is computed in
            the head without holding the logits, and `logits` of the output raises when it is used. So it is in any mode
            where `skip_logits=True` is given to the model's call (then also with `shift_labels` alone), and in none
            with `skip_logits=False`. Evaluation, generation, calls without labels or with `logits_to_keep` stay stock,
            and so does the loss while an adapter or a hook on the head takes part, with a warning. If the logits are
            treated otherwise after the patch (another soft cap in the config), the loss is NaN instead of wrong; if
            something else is computed from them, that raises at once.
        memory: How little is kept for backward, bit for bit the same: "default"; "lean", no output of a norm or a
            gate; "lean+mlp", nor of a gate or up projection; "checkpoint", of each layer but the last its input alone,
            by the switch of transformers' models; "offload", as "lean+mlp", and what is left in pinned host memory.

    Returns:
        A report: `print(report)` shows what was replaced, what was left alone and why; `report.restore()` undoes it.
        A model in which nothing is recognised is not touched, and a warning says so. What is patched already is kept.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, or an option is unknown or of the wrong type.
        ImportError: The model comes from a transformers that is too old.
        ValueError: `memory` is none of its choices or cannot be had here, or `model` is a string that is no model type.

    Example:
        >>> report = tigon.patch(model, rope=False)
        >>> report.restore()
    """
    if not isinstance(model, (nn.Module, str)):
        raise TypeError(f"patch: model must be a torch.nn.Module or a model type, got {type(model).__name__}")
    parts = _choose(options)
    if isinstance(model, str):
        return patch_type(model, functools.partial(patch, **options))
    require_for(model)
    report, plan, asked, found = Report(type(model).__name__), {}, set(), {}
    installed = {module: getattr(find_replacement(module), "recipe", None) for module in model.modules()}
    modules = [
        (name, module) for name, module in model.named_modules() if isinstance(installed[module], (*JOINED, type(None)))
    ]
    kinds = {module: kind_of(module) for _, module in modules}
    overwritten = overwritten_norms(model)
    for part in parts:
        recognise, apply = PARTS[part]
        for name, module in modules:
            if (key := (recognise, kinds[module])) not in found:
                found[key] = recognise(module)
            recipe = found[key]
            # What one function recognises may be one of several parts; why it did not is said once.
            other = recognise in asked if isinstance(recipe, str) else getattr(recipe, "part", part) != part
            before = plan[module][1] if module in plan else installed[module]
            if recipe is None or other or (before is not None and _joined(before, recipe) is None):
                continue
            recipe = (before is None and foreign_forward(module)) or recipe
            if part in ("rms_norm", "layer_norm"):
                recipe = overwritten.get(module, recipe)
            left = isinstance(recipe, str)
            report.add(part, type(module).__name__, not left, str(recipe), name)
            if not left:
                plan[module] = apply, recipe if before is None else _joined(before, recipe)
        asked.add(recognise)
    already = sum(recipe is not None and module not in plan for module, recipe in installed.items())
    level = options.get("memory", "default")
    # What only makes results of Tigon's ops again has nothing to do without them.
    ours = already or report or any(type(m).__module__.startswith("tigon.") for m in model.modules())
    level = level if ours or level in ("checkpoint", "offload") else "default"
    if reason := refusal(model, level):
        raise ValueError(f"patch: memory={level!r} cannot be had of this {report.model}: {reason}")
    # Everything is known and nothing was refused: only now is the model touched.
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


@contextlib.contextmanager
def patched(model: nn.Module | str, **options: Any) -> Iterator[Report]:
    """`patch` for the length of a `with` block; takes the same options and yields the report.

    Example:
        >>> with tigon.patched(model):
        ...     train(model)
        >>> with tigon.patched("llama"):  # what is built in the block is patched, and stays so
        ...     model = AutoModelForCausalLM.from_pretrained(path)
    """
    report = patch(model, **options)
    try:
        yield report
    finally:
        report.restore()
