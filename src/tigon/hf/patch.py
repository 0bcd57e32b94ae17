"""`tigon.patch`: recognise the modules of a model that compute what an op computes, and replace them."""

import contextlib
import functools
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Never, ParamSpec, get_args

import torch
from torch import nn

from tigon.hf.by_type import patch_type
from tigon.hf.fp8 import check_fp8, plan_fp8
from tigon.hf.head import CausalLMForward, watch_loss
from tigon.hf.later_adapters import watch_children
from tigon.hf.learn import attach, learn_loss
from tigon.hf.levels import LEVEL_NAMES, apply_level, describe_level, explain_refusal, find_level
from tigon.hf.loss_options import LOSS_OPTIONS, LossOptions, record_options
from tigon.hf.packing import watch_packing
from tigon.hf.report import ModuleOutcomes, Outcome, Report
from tigon.hf.transformers_private import dropped_heads
from tigon.recognition.guards.guard import install_guarded
from tigon.recognition.parts.activations import recognise_gelu, recognise_relu2
from tigon.recognition.parts.adapters import install_adapters, recognise_adapters
from tigon.recognition.parts.experts import ExpertsRecipe, recognise_experts
from tigon.recognition.parts.glu import recognise_glu
from tigon.recognition.parts.glu_recipe import GLURecipe
from tigon.recognition.parts.mixtures import MixtureRecipe, recognise_mixture
from tigon.recognition.parts.mlp import MLPRecipe, recognise_mlp
from tigon.recognition.parts.norms import recognise_norm
from tigon.recognition.parts.rope import RopeRecipe, recognise_rope
from tigon.recognition.probing.kind import kind_of
from tigon.recognition.probing.standin import describe, has_no_tensors
from tigon.recognition.probing.trials import Trials, recording
from tigon.recognition.replacement import find_replacement, foreign_forward, install
from tigon.recognition.rewriting.fused_statements import (
    FusedStatementsRecipe,
    overwritten_children,
    recognise_fused_statements,
)
from tigon.runtime.requirements import require_for

LOGGER = logging.getLogger("tigon")


@dataclass(frozen=True)
class Part:
    """How modules of one part are recognised and replaced."""

    # The function that returns a recipe, the reason why a module of this kind has none, or None for another kind.
    recognise: Callable[[nn.Module], Any]
    # The function that installs the recipe and returns the function that undoes this.
    install: Callable[[nn.Module, Any], Callable[[], None]]
    # The condition for a comparison with the op. `report.why` shows this text for a module that does not meet it.
    condition: str


NORM_CONDITION = (
    'a norm has no children, one or two inputs, and an epsilon beside its weight or "norm" in the name of its class'
)
PARTS = {
    "rms_norm": Part(recognise_norm, install_guarded, NORM_CONDITION),
    "layer_norm": Part(recognise_norm, install_guarded, NORM_CONDITION),
    "glu": Part(
        recognise_glu, install_guarded, "a gated MLP has two or three linear children whose sizes fit gate, up and down"
    ),
    "mlp": Part(
        recognise_mlp, install_guarded, "an MLP without a gate has two linear children, and no other parameters"
    ),
    "experts": Part(
        lambda module: recognise_experts(module) or recognise_mixture(module),
        install_guarded,
        "experts have the layout that transformers marks, or lie beside a router and an MLP that all tokens share",
    ),
    # The modules above compute their activations themselves, so these come after them.
    "relu2": Part(recognise_relu2, install_guarded, "a squared ReLU has no children, no parameters and one input"),
    "gelu": Part(recognise_gelu, install_guarded, "a GELU has no children, no parameters and one input"),
    "adapters": Part(
        recognise_adapters,
        install_adapters,
        "a layer with adapters has linear layers A (inputs to rank), B (rank to outputs) and base (inputs to outputs)",
    ),
    "rope": Part(recognise_rope, install, "its forward names no function of cos and sin"),
    "fused_statements": Part(
        recognise_fused_statements, install, "the module has fewer than two children, or no forward of its own"
    ),
    "loss": Part(learn_loss, attach, "a causal language model has output embeddings and a loss function"),
}
# The parts that are activations without a gate.
ACTIVATIONS = ("relu2", "gelu")
OPTIONS = (*PARTS, "memory", "fp8", "fp8_dw", *LOSS_OPTIONS)
# The names of LEVELS.
MemoryLevel = Literal[
    "default",
    "lean",
    "lean+mlp",
    "checkpoint",
    "checkpoint+attention",
    "checkpoint+offload",
    "checkpoint+attention+offload",
    "offload",
]
MEMORY: tuple[str, ...] = get_args(MemoryLevel)
# The recipes of FP8.
FP8Scales = Literal["rowwise", "tensorwise"]
P = ParamSpec("P")
Context = contextlib.AbstractContextManager[Report]


def _check_options(parts: dict[str, Any], memory: Any, unknown: Iterable[str]) -> None:
    """Refuse unknown options and wrong values."""
    for name in unknown:
        raise TypeError(f"patch: unknown option {name!r}; choose from {', '.join(OPTIONS)}")
    for name, value in parts.items():
        if not isinstance(value, bool):
            raise TypeError(f"patch: {name} must be True or False, got {value!r}")
    if find_level(memory) is None:
        raise ValueError(f"patch: memory must be one of {LEVEL_NAMES}, got {memory!r}")


# Recipes of these classes run the code of a module's class. One recipe of each class can be joined into one recipe.
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
    # Why there is neither a recipe nor a reason, or what the recipe leaves out.
    note: str = ""
    # The comparisons with candidates.
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


def _installed_recipes(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the recipe of every module; None for a module without an installed recipe."""
    return {module: getattr(find_replacement(module), "recipe", None) for module in model.modules()}


def _find(model: nn.Module, parts: list[str], installed_recipes: dict[nn.Module, Any]) -> list[Finding]:
    """Try every part on every module that may get another recipe. Modules of one kind are tried once."""
    replaceable = (*JOINABLE_RECIPES, type(None))
    modules = [(name, m) for name, m in model.named_modules() if isinstance(installed_recipes[m], replaceable)]
    kinds = {module: _kind_or_itself(module) for _, module in modules}
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


def _decide(
    findings: list[Finding], installed_recipes: dict[nn.Module, Any], overwrite_reasons: dict[nn.Module, str]
) -> None:
    """Decide for each finding whether its module is replaced.

    If it is, set the recipe of the finding. If it is not, but the module resembles the part, set the reason.

    Args:
        findings: The results of recognition, in the order of the parts.
        installed_recipes: The recipe that each module has already, or None.
        overwrite_reasons: The reasons for the report, by module, for all modules whose input is changed in place after
            they have run.
    """
    recipes = dict(installed_recipes)
    activations = {child for module, recipe in recipes.items() for child in _activations_of(module, recipe)}
    # The first part of each recogniser. One function may recognise several parts.
    first_parts: dict[Callable, str] = {}
    for finding in findings:
        part, module, result = PARTS[finding.part], finding.module, finding.result
        first_part = first_parts.setdefault(part.recognise, finding.part)
        # A recipe belongs to one part. The reason why there is no recipe is reported for the first part only.
        reported_part = first_part if isinstance(result, str) else getattr(result, "part", finding.part)
        earlier_recipe = recipes[module]
        if result is None and first_part == finding.part:
            note = finding.trials.note
            finding.note = f"not replaced: {note}" if note else f"not tried: {part.condition}"
            continue
        if result is None or reported_part != finding.part:
            finding.note = f"see {first_part if result is None else reported_part}"
            continue
        if earlier_recipe is not None and _join(earlier_recipe, result) is None:
            finding.note = "another part replaces the forward of this module"
            continue
        if finding.part in ACTIVATIONS and module in activations:
            finding.note = "a replaced module computes this activation itself"
            continue
        if earlier_recipe is None:
            may_be_wrapped = isinstance(result, ExpertsRecipe)
            result = _read(functools.partial(foreign_forward, may_be_wrapped=may_be_wrapped), module) or result
        if finding.part in ("rms_norm", "layer_norm", "adapters"):
            result = overwrite_reasons.get(module, result)
        if isinstance(result, str):
            finding.reason = str(result)
        else:
            recipe = result if earlier_recipe is None else _join(earlier_recipe, result)
            if isinstance(result, FusedStatementsRecipe):
                if isinstance(recipe, RopeRecipe):
                    result = finding.result = recipe.describe_statements(module, result, recipes)
                finding.note = result.explain_other_norms(module, recipes)
                # The statements of the only pattern may be norms that no op computes with a rotary embedding.
                if not str(result):
                    continue
            finding.recipe = recipes[module] = recipe
            activations.update(_activations_of(module, result))


def _activations_of(module: nn.Module, recipe: Any) -> list[nn.Module]:
    """Return the children whose work the recipe of a module does: those without parameters.

    The guard of the recipe watches them, so it would no longer hold if one of them got another forward.
    """
    if isinstance(recipe, MixtureRecipe):
        module = getattr(module, recipe.experts)
    elif not isinstance(recipe, (GLURecipe, MLPRecipe, ExpertsRecipe)):
        return []
    return [child for child in module.modules() if child is not module and has_no_tensors(child)]


def _apply(findings: list[Finding]) -> list[Callable[[], None]]:
    """Install the recipes of the findings. Return the functions that undo this."""
    # If a module has two findings, the later one has the recipe that joins both.
    last_findings = {finding.module: finding for finding in findings if finding.recipe is not None}
    return [PARTS[finding.part].install(module, finding.recipe) for module, finding in last_findings.items()]


def _outcomes(model: nn.Module, findings: list[Finding]) -> dict[str, ModuleOutcomes]:
    """Return what `report.why` says about every module, by its name."""
    outcomes = {name: ModuleOutcomes(type(module).__name__) for name, module in model.named_modules()}
    # Equal outcomes are stored once, because modules of one kind have the same text.
    unique_outcomes: dict[Outcome, Outcome] = {}
    for finding in findings:
        outcome = finding.outcome()
        outcomes[finding.name].parts.append(unique_outcomes.setdefault(outcome, outcome))
    return outcomes


def _join(earlier_recipe: Any, recipe: Any) -> RopeRecipe | None:
    """Return one recipe that does what two recipes for one module do; None if they cannot be joined."""
    recipes = earlier_recipe, recipe
    ropes = [r for r in recipes if isinstance(r, RopeRecipe) and not r.fuses_statements]
    can_join = len(ropes) == 1 and any(isinstance(r, FusedStatementsRecipe) for r in recipes)
    return ropes[0].with_fused_statements() if can_join else None


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


def patch(
    model: nn.Module | str,
    *,
    rms_norm: bool = True,
    layer_norm: bool = True,
    glu: bool = True,
    mlp: bool = True,
    experts: bool = True,
    relu2: bool = True,
    gelu: bool = True,
    adapters: bool = True,
    rope: bool = True,
    fused_statements: bool = True,
    loss: bool = True,
    memory: MemoryLevel | str = "default",
    fp8: FP8Scales | str | None = None,
    fp8_dw: bool = True,
    token_scaling: bool = False,
    acc_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **unknown: Never,
) -> Report:
    """Replace the modules of this instance that compute, bit for bit, what an op of Tigon computes.

    Modules are recognised by running small copies of them, so the model may be of any class, and on any device or on
    meta. It can be moved, trained, compiled, copied and saved afterwards as before. A module that computes anything
    else keeps its own code. At every call, a replaced module compares the settings that its own forward reads with
    those at the time of the patch. If one of them has changed, the module runs its own code.

    Args:
        model: Any module; a causal language model of transformers profits most. Or a model type such as "llama": from
            now on, until the report's `restore()`, every model of that type is patched when it is built. Models that
            were built before stay stock, and models that were built in between stay patched.
        rms_norm: Replace RMS norms, also gated ones.
        layer_norm: Replace layer norms.
        glu: Replace gated MLPs.
        mlp: Replace MLPs of two linear layers with a GELU or a squared ReLU in between.
        experts: Replace the experts of a mixture whose weights are one tensor.
        relu2: Replace other squared ReLUs.
        gelu: Replace other GELUs. If torch computes one with a single kernel, it changes only in `tigon.lean`, which
            recomputes it.
        adapters: Replace linear layers with low-rank adapters (LoRA). Which of them are active, their scaling and their
            dropout are read at every call. Merged, disabled and other kinds of adapters run as before.
        rope: Replace the rotary embeddings of attention layers.
        fused_statements: Replace statements of a layer's forward that one op computes together: a residual sum and the
            norm of this sum, a norm whose input is also the residual, and linear layers that have the same input. The
            source of the forward is rewritten for this. The stock statements run if the norm or the linear layers do
            more than the op.
        loss: Replace the head and the loss of a causal language model, and the auxiliary loss that balances the experts
            of a mixture (`load_balancing_loss`). In training mode with labels, the loss is
            computed in the head without holding the logits, and `logits` of the output raises `LogitsSkippedError` when
            it is used. `skip_logits=True` in a call of the model requests this in any mode, also for a call that has
            `shift_labels` but no `labels`; `skip_logits=False` returns logits in any mode. Evaluation, generation, and
            calls without labels or with `logits_to_keep` stay stock. A LoRA adapter on the head is part of the fused
            loss. While the head has another adapter, or a hook that changes its output, the stock code computes the
            loss, with a warning. The same happens if a setting that scales or caps the logits has changed (another soft
            cap in the config). If anything else changes how the model scales or caps them (a global), the call raises a
            `RuntimeError`. On a GPU, its loss and its gradients are NaN, and a later fused call raises the error. If
            the model computes anything else from them, it raises an error at once.
        memory: The level that decides what is saved for backward. Results have the same bits at every level. "default":
            each op saves what its backward reads. "lean": the outputs of norms and gates are not saved either, because
            backward recomputes them. "lean+mlp": the outputs of gate and up projections, also those of experts, are not
            saved either.
            "lean+mlp:N" with a number N: this holds for the first N layers only, and the others are "lean".
            "checkpoint": each layer but the last saves only its input, by the checkpointing of transformers' models.
            "checkpoint+attention": as "checkpoint", and each of these layers also saves the outputs of its attention
            kernel, so that backward does not run attention's forward again. "checkpoint+attention:N": the last N
            checkpointed layers save them.
            "checkpoint+offload": as "checkpoint", and these inputs are in pinned host memory. The inputs of the last
            layers stay on the GPU if the peak memory does not grow. "checkpoint+offload:N" moves the inputs of the
            first N layers only. "checkpoint+attention+offload": as "checkpoint+attention", and both tensors are in
            pinned host memory. "attention" and "offload" may each have a number.
            "offload": as "lean+mlp", and the remaining saved tensors are in pinned host memory. Modules that must not
            be called twice run once at every level. The forward of a language model's body (`model.base_model`) has the
            level too, for trainers that call the body.
        fp8: Compute the products of the linear layers inside the repeated decoder layers in FP8, forward and backward,
            also in evaluation. Unlike every other option, this one approximates: the factors of the products are
            rounded to 8 bits. "tensorwise" has one scale for each tensor, and is the fastest. "rowwise" has one for
            each row, and is more accurate. Experts of a mixture always have one for each row. The head, routers,
            adapters, narrow layers and experts with few rows keep their dtype; the report names them and the reasons.
            None is no FP8. `docs/fp8.md` has the details.
        fp8_dw: The gradients of the weights are products in FP8 too. With False they have the dtype of the weights, as
            those of experts always do.
        token_scaling: The loss in the head scales the loss of each token by the detached probability of its target.
            A call of the model may also set this option and the next three. They have no effect on a call that computes
            logits; `token_scaling=True` in such a call is an error.
        acc_dtype: torch.float32 sums the gradient of the head's weight in fp32, as in `linear_cross_entropy`.
        return_token_accuracy: The output of the model has the field `token_accuracy`, an fp32 scalar: the share of
            valid tokens whose largest logit is that of the target.
        return_predicted_tokens: The output of the model has the field `predicted_tokens` [B, S]: the token of the
            largest logit at each position, and -1 where the target is ignored.

    Returns:
        A report: `print(report)` shows what was replaced, what was left alone and why; `report.why(name)` says for any
        module what was tried and where it differs from the nearest candidate; `report.restore()` undoes the patch.
        A model in which nothing is recognised is not changed, and a warning says so. Modules that are patched already
        stay as they are.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, or an option is unknown or of the wrong type.
        ImportError: The model comes from a transformers that is too old.
        ValueError: `memory` is none of its choices or is not possible here, `fp8` is no recipe or the device has no FP8
            products, or `model` is a string but no model type.

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
        "mlp": mlp,
        "experts": experts,
        "relu2": relu2,
        "gelu": gelu,
        "adapters": adapters,
        "rope": rope,
        "fused_statements": fused_statements,
        "loss": loss,
    }
    _check_options(options, memory, unknown)
    loss_options = LossOptions(token_scaling, acc_dtype, return_token_accuracy, return_predicted_tokens)
    loss_options.check("patch")
    fp8_settings = check_fp8(fp8, fp8_dw, memory)
    parts = [part for part in PARTS if options[part]]
    if isinstance(model, str):
        options |= {"memory": memory, "fp8": fp8, "fp8_dw": fp8_dw}
        return patch_type(model, functools.partial(patch, **options, **vars(loss_options)))
    require_for(model)
    report, installed_recipes = Report(type(model).__name__, patched=weakref.ref(model)), _installed_recipes(model)
    findings = _find(model, parts, installed_recipes)
    _decide(findings, installed_recipes, overwritten_children(model))
    report.outcomes = _outcomes(model, findings)
    for finding in filter(lambda finding: finding.is_listed, findings):
        detail = finding.reason or str(finding.result)
        report.add(finding.part, type(finding.module).__name__, not finding.reason, detail, finding.name)
    new_recipes = {finding.module: finding.recipe for finding in findings if finding.recipe is not None}
    fp8_plan = plan_fp8(model, fp8_settings, installed_recipes | new_recipes)
    patched_modules = {module for module, recipe in installed_recipes.items() if recipe is not None}
    earlier_count = len(patched_modules - new_recipes.keys() - fp8_plan.changed.keys())
    # Levels that only recompute results of Tigon's ops have no effect in a model without such ops.
    has_ops = (
        earlier_count
        or report
        or fp8_plan.changed
        or any(type(m).__module__.startswith("tigon.") for m in model.modules())
    )
    level = memory if has_ops or memory == "offload" or memory.startswith("checkpoint") else "default"
    if reason := explain_refusal(model, level):
        raise ValueError(f"patch: memory={level!r} is not possible for this {report.model}: {reason}")
    # The model is changed only here, after the last error that this function can raise on purpose.
    report.undo = _apply(findings) + fp8_plan.apply(report)
    fused_models = [finding.module for finding in findings if finding.part == "loss" and finding.recipe is not None]
    report.undo += [watch_loss(module, loss_options, report.notes) for module in fused_models]
    report.undo.append(record_options(model, loss_options))
    for module, recipe in installed_recipes.items():
        if isinstance(recipe, CausalLMForward):
            # The head may have been resized since the earlier patch. Its forward is replaced now, because a compiled
            # call cannot replace it.
            recipe.fused.find_head(getattr(module, recipe.fused.spec.head))
    if level != "default":
        report.undo += apply_level(model, level)
    report.describe_level = functools.partial(describe_level, weakref.ref(model), level)
    report.undo.append(watch_packing(model, report.notes))
    if heads := dropped_heads(model):
        report.notes.append(
            "transformers does not load heads of multi-token prediction, so they are neither trained nor saved "
            f"(weights of the checkpoint that match {', '.join(heads)})"
        )
    if adapters and report:
        report.undo += [watch_children(module, report, model) for module in fused_models or [model]]
    if earlier_count:
        report.notes.append(f"{earlier_count} places were patched already and stay as they are")
    elif not report and level == "default":
        result = "nothing was replaced, see the report for why" if report.entries else "nothing was recognised"
        report.notes.append(f"{result} (requested parts: {', '.join(parts)}); the model was not changed")
        warnings.warn(f"tigon.patch({report.model}): {result}", stacklevel=2)
    return report


def _takes_the_arguments_of(
    patch: Callable[P, Report],
) -> Callable[[Callable[..., Context]], Callable[P, Context]]:
    """Return a decorator that gives the signature of `patch` to a function that passes all its arguments to `patch`."""

    def decorate(function: Callable[..., Context]) -> Callable[P, Context]:
        signature = inspect.signature(patch).replace(return_annotation=Context)
        vars(function)["__signature__"] = signature
        return function

    return decorate


@_takes_the_arguments_of(patch)
@contextlib.contextmanager
def patched(*args: Any, **kwargs: Any) -> Iterator[Report]:
    """Patch a model for the length of a `with` block. The arguments are those of `patch`.

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
        ...     print([(entry.part, entry.module) for entry in report.replaced])
        [('loss', 'LlamaForCausalLM')]
    """
    report = patch(*args, **kwargs)
    try:
        yield report
    finally:
        report.restore()
