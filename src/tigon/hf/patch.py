"""`tigon.patch`: recognise the modules of a model that compute what an op computes, and replace them."""

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, get_args

from torch import nn

from tigon.hf.by_type import patch_type
from tigon.hf.entered import watch_entry
from tigon.hf.learn import attach, learn_loss
from tigon.hf.levels import LEVELS, apply_level, refusal
from tigon.hf.report import ModuleOutcomes, Outcome, Report
from tigon.recognition.experts import recognise_experts
from tigon.recognition.fused_statements import FusedStatementsRecipe, overwritten_norms, recognise_fused_statements
from tigon.recognition.glu import recognise_glu
from tigon.recognition.guard import install_guarded
from tigon.recognition.kind import kind_of
from tigon.recognition.norms import recognise_norm
from tigon.recognition.relu2 import recognise_relu2
from tigon.recognition.replacement import find_replacement, foreign_forward, install
from tigon.recognition.rope import RopeRecipe, recognise_rope
from tigon.recognition.standin import describe
from tigon.recognition.trials import Trials, recording
from tigon.runtime.requirements import require_for

__all__ = ["patch", "patched"]

LOGGER = logging.getLogger("tigon")


@dataclass(frozen=True)
class Part:
    """How modules of one part are recognised and replaced."""

    # It returns a recipe, the reason why a module of this kind has none, or None for a module of another kind.
    recognise: Callable[[nn.Module], Any]
    # It installs the recipe and returns the function that undoes this.
    install: Callable[[nn.Module, Any], Callable[[], None]]
    # Which modules are compared with the op, for `report.why`.
    candidates: str


NORMS = 'a norm has no children, one or two inputs, and an epsilon beside its weight or "norm" in the name of its class'
PARTS = {
    "rms_norm": Part(recognise_norm, install_guarded, NORMS),
    "layer_norm": Part(recognise_norm, install_guarded, NORMS),
    "glu": Part(
        recognise_glu, install_guarded, "a gated MLP has two or three linear children whose sizes fit gate, up and down"
    ),
    "relu2": Part(recognise_relu2, install_guarded, "a squared ReLU has no children, no parameters and one input"),
    "experts": Part(recognise_experts, install_guarded, "experts have the layout that transformers marks"),
    "rope": Part(recognise_rope, install, "its forward names no function of cos and sin"),
    "fused_statements": Part(
        recognise_fused_statements, install, "the module has fewer than two children, or no forward of its own"
    ),
    "loss": Part(learn_loss, attach, "a causal language model has output embeddings and a loss function"),
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


# These recipes run the code of a module's class. One module may have one of each, joined into one recipe.
JOINABLE_RECIPES = RopeRecipe, FusedStatementsRecipe


@dataclass
class Finding:
    """The result of recognition for one module and one part, and the decision about it."""

    part: str
    name: str
    module: nn.Module
    # What the recogniser of the part returned.
    result: Any
    # The recipe to install. It also does what an earlier recipe for the module does.
    recipe: Any = None
    # Why the module keeps its forward although it resembles the part.
    reason: str = ""
    # Why there is neither a recipe nor a reason.
    note: str = ""
    # The comparisons with candidates.
    trials: Trials = field(default_factory=Trials)

    @property
    def is_listed(self) -> bool:
        """The report lists a module that is replaced, and one that resembles the part."""
        return self.recipe is not None or bool(self.reason)

    def outcome(self) -> Outcome:
        """Return what `report.why` says. It holds text only, because a report must not keep a model alive."""
        if self.recipe is not None:
            return Outcome(self.part, f"replaced: {self.result}")
        text = f"left alone: {self.reason}" if self.reason else self.note
        is_compared = bool(self.reason or self.trials.note)
        return Outcome(self.part, text, tuple(self.trials.lines()) if is_compared else ())


def _installed_recipes(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the recipe of every module. It is None where no recipe is installed."""
    return {module: getattr(find_replacement(module), "recipe", None) for module in model.modules()}


def _find(model: nn.Module, parts: list[str], installed: dict[nn.Module, Any]) -> list[Finding]:
    """Try every part on every module that may get another recipe. Modules of one kind are tried once."""
    modules = [
        (name, m) for name, m in model.named_modules() if isinstance(installed[m], (*JOINABLE_RECIPES, type(None)))
    ]
    kinds = {module: _kind_or_itself(module) for _, module in modules}
    results: dict[tuple, tuple[Any, Trials]] = {}
    # Modules that raised an error when they were read. Only the first error of a module is a reason.
    unreadable: set[nn.Module] = set()
    findings = []
    for part in parts:
        recognise = PARTS[part].recognise
        for name, module in modules:
            if (key := (recognise, kinds[module])) not in results:
                with recording() as trials:
                    result = _read(recognise, module)
                repeats = isinstance(result, _Unreadable) and module in unreadable
                unreadable |= {module} if isinstance(result, _Unreadable) else set()
                results[key] = None if repeats else result, trials
            result, trials = results[key]
            findings.append(Finding(part, name, module, result, trials=trials))
    return findings


def _decide(findings: list[Finding], installed: dict[nn.Module, Any], overwritten: dict[nn.Module, str]) -> None:
    """Set the recipe of each finding that is replaced, and the reason of each that resembles its part and is not.

    Args:
        findings: The results of recognition, in the order of the parts.
        installed: The recipe that each module has already, or None.
        overwritten: Norms whose input is changed in place after they have run, with the reason for the report.
    """
    recipes = dict(installed)
    # The first part of each recogniser. One function may recognise several parts.
    first_parts: dict[Callable, str] = {}
    for finding in findings:
        part, module, result = PARTS[finding.part], finding.module, finding.result
        first_part = first_parts.setdefault(part.recognise, finding.part)
        # A recipe belongs to one part. The reason why there is no recipe is reported for the first part only.
        expected = first_part if isinstance(result, str) else getattr(result, "part", finding.part)
        before = recipes[module]
        if result is None and first_part == finding.part:
            note = finding.trials.note
            finding.note = f"not replaced: {note}" if note else f"not tried: {part.candidates}"
            continue
        if result is None or expected != finding.part:
            finding.note = f"see {first_part if result is None else expected}"
            continue
        if before is not None and _join(before, result) is None:
            finding.note = "another part replaces the forward of this module"
            continue
        result = (before is None and _read(foreign_forward, module)) or result
        if finding.part in ("rms_norm", "layer_norm"):
            result = overwritten.get(module, result)
        if isinstance(result, str):
            finding.reason = str(result)
        else:
            finding.recipe = recipes[module] = result if before is None else _join(before, result)


def _apply(findings: list[Finding]) -> list[Callable[[], None]]:
    """Install the recipes that were decided. Return the functions that undo this."""
    # A later finding for a module has the recipe that joins both.
    last = {finding.module: finding for finding in findings if finding.recipe is not None}
    return [PARTS[finding.part].install(module, finding.recipe) for module, finding in last.items()]


def _outcomes(model: nn.Module, findings: list[Finding]) -> dict[str, ModuleOutcomes]:
    """Return what `report.why` says about every module, by its name."""
    outcomes = {name: ModuleOutcomes(type(module).__name__) for name, module in model.named_modules()}
    # Modules of one kind share the text.
    shared: dict[Outcome, Outcome] = {}
    for finding in findings:
        outcome = finding.outcome()
        outcomes[finding.name].parts.append(shared.setdefault(outcome, outcome))
    return outcomes


def _join(before: Any, recipe: Any) -> RopeRecipe | None:
    """Return one recipe that does what two recipes for one module do; None if they cannot be joined."""
    ropes = [r for r in (before, recipe) if isinstance(r, RopeRecipe) and not r.fuses_statements]
    both = len(ropes) == 1 and any(isinstance(r, FusedStatementsRecipe) for r in (before, recipe))
    return ropes[0].with_fused_statements() if both else None


def _kind_or_itself(module: nn.Module) -> Any:
    """Return the kind of a module. A module whose state cannot be read is its own kind."""
    try:
        return kind_of(module)
    except Exception:
        LOGGER.debug("the state of a %s cannot be read", type(module).__name__, exc_info=True)
        return module


class _Unreadable(str):
    """The reason of a module that raises an error when it is read."""


def _read(recognise: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    """Return what a recogniser returns, or the error that a module raises when it is read, as a reason.

    Attributes of a module may be objects of any class, and these may raise anything.
    """
    try:
        return recognise(module)
    except Exception as error:
        LOGGER.debug("a %s cannot be read", type(module).__name__, exc_info=True)
        return _Unreadable(f"cannot be read ({describe(error)})")


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
    fused_statements: bool = True,
    loss: bool = True,
    memory: MemoryLevel = "default",
    glue: bool | None = None,
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
        fused_statements: Replace statements between modules that one op computes together: the sum of a residual and
            the norm after it, a norm and the residual beside it, and linear layers that have the same input. The source
            of a layer's forward is rewritten for this. The stock statements run wherever the norm or the linear layers
            do more than the op.
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
        glue: The old name of `fused_statements`. Either of the two leaves this part out if it is False.

    Returns:
        A report: `print(report)` shows what was replaced, what was left alone and why; `report.why(name)` says for any
        module what was tried and where it differs from the nearest candidate; `report.restore()` undoes the patch.
        A model in which nothing is recognised is not changed, and a warning says so. Modules that are patched already
        stay as they are.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, or an option is unknown or of the wrong type.
        ImportError: The model comes from a transformers that is too old.
        ValueError: `memory` is none of its choices or is not possible here, or `model` is a string but no model type.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> report = tigon.patch(model, fused_statements=False)
        >>> print(report)
        LlamaForCausalLM: 6 modules patched
        part      module            count  now
        --------  ----------------  -----  ---------------------------------------------
        rms_norm  LlamaRMSNorm      3      rms_norm, offset 0, rounded before the weight
        glu       LlamaMLP          1      swiglu
        rope      LlamaAttention    1      rope, split half
        loss      LlamaForCausalLM  1      linear_cross_entropy in the head
        >>> report.restore()
    """
    if not isinstance(model, (nn.Module, str)):
        raise TypeError(f"patch: model must be a torch.nn.Module or a model type, got {type(model).__name__}")
    options: dict[str, Any] = {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "glu": glu,
        "relu2": relu2,
        "experts": experts,
        "rope": rope,
        "fused_statements": fused_statements,
        "loss": loss,
    }
    _check_options(options if glue is None else options | {"glue": glue}, memory, unknown)
    options["fused_statements"] = fused_statements and glue is not False
    parts = [part for part in PARTS if options[part]]
    if isinstance(model, str):
        return patch_type(model, functools.partial(patch, **options, memory=memory))
    require_for(model)
    report, installed = Report(type(model).__name__), _installed_recipes(model)
    findings = _find(model, parts, installed)
    _decide(findings, installed, overwritten_norms(model))
    report.outcomes = _outcomes(model, findings)
    for finding in filter(lambda finding: finding.is_listed, findings):
        detail = finding.reason or str(finding.result)
        report.add(finding.part, type(finding.module).__name__, not finding.reason, detail, finding.name)
    replaced = {finding.module for finding in findings if finding.recipe is not None}
    already = sum(recipe is not None and module not in replaced for module, recipe in installed.items())
    # Levels that only recompute results of Tigon's ops have no effect in a model without such ops.
    ours = already or report or any(type(m).__module__.startswith("tigon.") for m in model.modules())
    level = memory if ours or memory in ("checkpoint", "offload") else "default"
    if reason := refusal(model, level):
        raise ValueError(f"patch: memory={level!r} is not possible for this {report.model}: {reason}")
    # The model is changed only now, when everything is known and nothing was refused.
    report.undo = _apply(findings)
    if level != "default":
        undo, note = apply_level(model, level)
        report.undo.append(undo)
        report.notes.append(note)
    fused = [finding.module for finding in findings if finding.part == "loss" and finding.recipe is not None]
    report.undo += [watch_entry(module, _lost(level, True)) for module in fused]
    if LEVELS[level].lean and model not in fused:
        report.undo.append(watch_entry(model, _lost(level, False)))
    if already:
        report.notes.append(f"{already} places were patched already and stay as they are")
    elif not report and level == "default":
        result = "nothing was replaced, see the report for why" if report.entries else "nothing was recognised"
        report.notes.append(f"{result} (requested parts: {', '.join(parts)}); the model was not changed")
        warnings.warn(f"tigon.patch({report.model}): {result}", stacklevel=2)
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
    vars(patched)["__signature__"] = signature.replace(return_annotation=contextlib.AbstractContextManager[Report])
    patched.__qualname__ = "patched"
    return patched


patched = _for_a_block(patch)
patched.__doc__ = """Patch a model for the length of a `with` block. The arguments are those of `patch`.

With a model type, every model that is built in the block is patched, and stays patched after it.

Returns:
    A context manager. It yields the report, and calls `report.restore()` at the end of the block.

Example:
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> with tigon.patched("llama", loss=False):
    ...     model = LlamaForCausalLM(config)
    >>> tokens = torch.tensor([[1, 2, 3, 4]])
    >>> with tigon.patched(model) as report:
    ...     model(input_ids=tokens, labels=tokens).loss.backward()
    >>> [(entry.part, entry.module) for entry in report.replaced]
    [('loss', 'LlamaForCausalLM')]
"""
