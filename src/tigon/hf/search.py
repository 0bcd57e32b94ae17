"""Find the modules of a model that each part can replace, and decide which recipe every module gets."""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tigon.hf.parts import ACTIVATIONS, PARTS
from tigon.hf.report import ModuleOutcomes, Outcome, Report
from tigon.recognition.parts.experts import ExpertsRecipe
from tigon.recognition.parts.functions import FunctionsRecipe
from tigon.recognition.parts.mixers import MixerRecipe
from tigon.recognition.parts.mixtures import MixtureRecipe
from tigon.recognition.parts.mlp_recipes import GLURecipe, MLPRecipe
from tigon.recognition.parts.rope import RopeRecipe
from tigon.recognition.probing.kind import kinds_of
from tigon.recognition.probing.standin import describe, has_no_tensors
from tigon.recognition.probing.trials import Trials, recording
from tigon.recognition.replacement import find_replacement, foreign_forward
from tigon.recognition.rewriting.fused_statements import FusedStatementsRecipe, has_fusible_child, overwritten_children
from tigon.runtime.requirements import require_for

LOGGER = logging.getLogger("tigon")

NOT_FUSIBLE = (
    "not replaced: its forward could be rewritten, but it has no RMS norm with an op, and fewer than two linear layers"
)
# Recipes of these classes run the code of a module's class. One recipe of each class can be joined into one recipe.
JOINABLE_RECIPES = RopeRecipe, MixerRecipe, FusedStatementsRecipe


@dataclass(slots=True)
class Finding:
    """The result of recognition for one module and one part, and the decision about it."""

    part: str
    name: str
    module: nn.Module
    result: Any
    # The recipe to install. It also does what an earlier recipe for the module does.
    recipe: Any = None
    # Why the module keeps its forward although it resembles the part.
    reason: str = ""
    # The explanation if there is neither a recipe nor a reason, or the names of what the recipe leaves out.
    note: str = ""
    trials: Trials = field(default_factory=Trials)

    @property
    def is_listed(self) -> bool:
        """True if the report lists the module, because it is replaced or because it resembles the part."""
        return self.recipe is not None or bool(self.reason)

    def outcome(self) -> Outcome:
        """Return what `report.why` says. It holds text only, because a report must not keep a model alive."""
        if self.recipe is not None:
            return Outcome(self.part, f"replaced: {self.result}{self.note and '; '}{self.note}")
        text = f"left alone: {self.reason}" if self.reason else self.note
        is_compared = bool(self.reason or self.trials.note)
        return Outcome(self.part, text, tuple(self.trials.lines()) if is_compared else ())


class Search:
    """The modules of a model that the requested parts, in the order of `PARTS`, can replace. It changes nothing."""

    def __init__(self, model: nn.Module, parts: Iterable[str]) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        require_for(self.names)
        # The recipe that each module has from an earlier patch, or None.
        self.installed = {module: getattr(find_replacement(module), "recipe", None) for module in self.names}
        self.recipes = dict(self.installed)
        # Norms and adapters among the modules whose input is changed in place after they have run, with the reason.
        self.overwrite_reasons = overwritten_children(self.names)
        self.findings = self._find(parts)

    @property
    def new_recipes(self) -> dict[nn.Module, Any]:
        """Return the recipes to install. A module with two findings has one recipe, which does the work of both."""
        return {finding.module: finding.recipe for finding in self.findings if finding.recipe is not None}

    def _find(self, parts: Iterable[str]) -> list[Finding]:
        """Try every part on every module that may get another recipe. Modules of one kind are tried once."""
        replaceable = (*JOINABLE_RECIPES, type(None))
        modules = [(name, m) for m, name in self.names.items() if isinstance(self.installed[m], replaceable)]
        kinds = kinds_of(module for _, module in modules)
        results: dict[tuple, tuple[Any, Trials]] = {}
        # Modules that raised an error when they were read. Only the first error of a module is reported.
        unreadable_modules: set[nn.Module] = set()
        findings = []
        for part in parts:
            recognise = PARTS[part].recognise
            for name, module in modules:
                if (key := (recognise, kinds[module])) not in results:
                    with recording() as trials:
                        result = _read(recognise, module)
                    is_repeated = isinstance(result, _Unreadable) and module in unreadable_modules
                    unreadable_modules |= {module} if isinstance(result, _Unreadable) else set()
                    results[key] = None if is_repeated else result, trials
                result, trials = results[key]
                findings.append(Finding(part, name, module, result, trials=trials))
        return findings

    def decide(self) -> None:
        """Decide for each finding whether its module is replaced."""
        activations = {child for module, recipe in self.recipes.items() for child in _activations_of(module, recipe)}
        # The first part of each recogniser. One function may recognise several parts.
        first_parts: dict[Callable, str] = {}
        for finding in self.findings:
            first_part = first_parts.setdefault(PARTS[finding.part].recognise, finding.part)
            finding.note = self._explain_other_part(finding, first_part)
            if not finding.note and finding.part in ACTIVATIONS and finding.module in activations:
                finding.note = "a replaced module computes this activation itself"
            if not finding.note:
                self._choose_recipe(finding)
                activations.update(_activations_of(finding.module, finding.recipe))

    def _explain_other_part(self, finding: Finding, first_part: str) -> str:
        """Return why a module is not of the part of a finding, or "" if it may be."""
        result, earlier_recipe = finding.result, self.recipes[finding.module]
        if result is None and first_part == finding.part:
            note = finding.trials.note
            return f"not replaced: {note}" if note else f"not tried: {PARTS[finding.part].condition}"
        # A recipe belongs to one part. The reason why there is no recipe is reported for the first part only.
        reported_part = first_part if isinstance(result, str) else getattr(result, "part", finding.part)
        if result is None or reported_part != finding.part:
            return f"see {first_part if result is None else reported_part}"
        if earlier_recipe is not None and _join(earlier_recipe, result) is None:
            return "another part replaces the forward of this module"
        return ""

    def _choose_recipe(self, finding: Finding) -> None:
        """Set the recipe of a finding, or the reason why the module keeps its forward."""
        module, result, earlier_recipe = finding.module, finding.result, self.recipes[finding.module]
        if finding.part == "fused_statements" and not has_fusible_child(module, self.recipes):
            finding.note = NOT_FUSIBLE
            return
        if earlier_recipe is None:
            may_be_wrapped = isinstance(result, ExpertsRecipe)
            result = _read(functools.partial(foreign_forward, may_be_wrapped=may_be_wrapped), module) or result
        if PARTS[finding.part].saves_input:
            result = self.overwrite_reasons.get(module, result)
        if isinstance(result, str):
            finding.reason = str(result)
            return
        recipe = result if earlier_recipe is None else _join(earlier_recipe, result)
        if isinstance(result, FusedStatementsRecipe):
            if isinstance(recipe, RopeRecipe):
                result = finding.result = recipe.describe_statements(module, result, self.recipes)
            finding.note = result.explain_other_norms(module, self.recipes)
            # The statements of the only pattern may be norms that no op computes with a rotary embedding.
            if not str(result):
                return
        finding.recipe = self.recipes[module] = recipe

    def install(self) -> list[Callable[[], None]]:
        """Install the recipes of the findings. Return the functions that undo this."""
        last_findings = {finding.module: finding for finding in self.findings if finding.recipe is not None}
        return [PARTS[finding.part].install(module, finding.recipe) for module, finding in last_findings.items()]

    def write(self, report: Report) -> None:
        """Add the findings to a report, and what `report.why` says about every module."""
        outcomes = {name: ModuleOutcomes(type(module).__name__) for module, name in self.names.items()}
        # Equal outcomes are stored once, because modules of one kind have the same text.
        unique_outcomes: dict[Outcome, Outcome] = {}
        for finding in self.findings:
            outcome = finding.outcome()
            outcomes[finding.name].parts.append(unique_outcomes.setdefault(outcome, outcome))
            if finding.is_listed:
                detail = finding.reason or str(finding.result)
                report.add(finding.part, type(finding.module).__name__, not finding.reason, detail, finding.name)
        report.outcomes = outcomes


def _activations_of(module: nn.Module, recipe: Any) -> list[nn.Module]:
    """Return the children whose work the recipe of a module does: those without parameters. The guard of the recipe
    watches them, so it would fail if one of them got another forward."""
    if isinstance(recipe, MixtureRecipe):
        module = getattr(module, recipe.roles.experts)
    elif not isinstance(recipe, (GLURecipe, MLPRecipe, ExpertsRecipe)):
        return []
    return [child for child in module.modules() if child is not module and has_no_tensors(child)]


def _join(earlier_recipe: Any, recipe: Any) -> FunctionsRecipe | None:
    """Return one recipe that does what two recipes for one module do; None if they cannot be joined."""
    recipes = earlier_recipe, recipe
    others = [r for r in recipes if isinstance(r, (RopeRecipe, MixerRecipe)) and not r.fuses_statements]
    can_join = len(others) == 1 and any(isinstance(r, FusedStatementsRecipe) for r in recipes)
    return others[0].with_fused_statements() if can_join else None


class _Unreadable(str):
    """The reason of a module that raises an error when it is read."""


def _read(recognise: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    """Return what a recogniser returns, or the error of a module whose attributes cannot be read, as a reason."""
    try:
        return recognise(module)
    except Exception as error:
        LOGGER.debug("a %s cannot be read", type(module).__name__, exc_info=True)
        return _Unreadable(f"cannot be read ({describe(error)})")
