"""Recognise activations without a gate: modules that compute relu(x)^2 or a GELU for any input.

Models write the approximations of GELU in several ways, which round differently. Each way is a formula of its own, so
that a module can be compared bit for bit. The op that replaces it rounds once.
"""

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.memory.lean import is_lean
from tigon.ops.mlps.activations import relu2_reference
from tigon.ops.mlps.mlp import MLPActivation, activate
from tigon.recognition.guards.code_facts import largest_number
from tigon.recognition.parts.glu_recipe import is_plain_input
from tigon.recognition.probing.probes import (
    DTYPES,
    agrees_in_all_combinations,
    agrees_in_circumstances,
    explain_limits,
    runs_without_contiguity,
)
from tigon.recognition.probing.standin import (
    BF16,
    FP16,
    FP32,
    WritesTensor,
    accepts_inputs,
    describe,
    has_no_tensors,
    normal,
    probing,
    run_forward,
    select_equal,
    select_equal_gradients,
    stand_in,
    unusual_values,
)
from tigon.recognition.probing.trials import current_trials, explain_none, recording
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.places import Reach
from tigon.runtime.stock import has_stock_call

LOGGER = logging.getLogger("tigon")

SQUARE_ROOT = math.sqrt(2.0 / math.pi)


class Formula(NamedTuple):
    """A way to write an activation."""

    # The activation in the ops.
    activation: MLPActivation
    # The name of the activation in the report.
    label: str
    compute: Callable[[Tensor], Tensor]
    # True if torch computes the formula with one kernel, and saves nothing but its input.
    is_one_kernel: bool = False


FORMULAS: dict[str, Formula] = {
    "relu2": Formula("relu2", "relu2", relu2_reference),
    "gelu": Formula("gelu", "gelu", F.gelu, True),
    "gelu, erf": Formula("gelu", "gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "gelu tanh": Formula("gelu_tanh", "gelu (tanh)", lambda x: F.gelu(x, approximate="tanh"), True),
    # GPT-2
    "gelu tanh, power": Formula(
        "gelu_tanh",
        "gelu (tanh)",
        lambda x: 0.5 * x * (1.0 + torch.tanh(SQUARE_ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    ),
    # BERT for fast inference
    "gelu tanh, factored": Formula(
        "gelu_tanh",
        "gelu (tanh)",
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    ),
    # Megatron and BLOOM
    "gelu tanh, constant first": Formula(
        "gelu_tanh",
        "gelu (tanh)",
        lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    ),
    # CLIP
    "gelu sigmoid": Formula("gelu_sigmoid", "gelu (sigmoid)", lambda x: x * torch.sigmoid(1.702 * x)),
}
DIFFERENT = "computes something else than {}"


@dataclass(frozen=True)
class ActivationRecipe:
    """Recipe: the op of an activation that is a module. `formula` is a key of `FORMULAS`."""

    formula: str
    # True if the recipe takes contiguous inputs only. The stock forward runs for all others.
    needs_contiguity: bool = field(default=False, compare=False)
    live: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[tuple[str, ...]] = ()
    searched: ClassVar[tuple[str, ...]] = ()

    def __call__(self, module: nn.Module, *args: Any, reference: bool = False, **kwargs: Any) -> Tensor:
        if kwargs or len(args) != 1 or not (reference or is_plain_input(args[0], self.needs_contiguity)):
            return type(module).forward(module, *args, **kwargs)
        formula = FORMULAS[self.formula]
        if reference:
            return formula.compute(*args)
        # A formula that is one kernel of torch gains nothing but that `lean` can recompute it.
        if formula.is_one_kernel and not is_lean():
            return type(module).forward(module, *args)
        return activate(*args, formula.activation)

    def __str__(self) -> str:
        return FORMULAS[self.formula].label


def recognise_relu2(module: nn.Module) -> ActivationRecipe | str | None:
    """Recognise a squared ReLU: a module without children and without parameters.

    A reason is returned only for a module that computes a squared ReLU for some inputs, or whose class is named like
    one. Other activations are not of this kind.
    """
    name = type(module).__name__.lower()
    is_named = "relu2" in name or ("relu" in name and "squared" in name)
    return _recognise(module, ["relu2"], "a squared ReLU", is_named)


def recognise_gelu(module: nn.Module) -> ActivationRecipe | str | None:
    """Recognise a GELU or one of its approximations: a module without children and without parameters.

    A reason is returned only for a module that computes a GELU for some inputs. Other activations are not of this kind.
    """
    return _recognise(module, [name for name in FORMULAS if name.startswith("gelu")], "a GELU", False)


def _recognise(module: nn.Module, formulas: list[str], kind: str, is_named: bool) -> ActivationRecipe | str | None:
    """Return the recipe for the first formula that agrees, the reason why there is none, or None for another kind."""
    if module._modules or not has_no_tensors(module) or not accepts_inputs(module, 1):
        return None
    if not has_stock_call(module):
        # A call of the module would not run the forward that the recipe replaces.
        return None
    reach, candidates = explore(module), [ActivationRecipe(formula) for formula in formulas]
    different = DIFFERENT.format(kind)
    result: ActivationRecipe | str
    try:
        with reach.preserved(), probing(), recording(current_trials()) as trials:
            matches = _select_by_values(module, candidates)
            if not matches:
                result = different
            else:
                result = reach.reason or _confirm(module, reach, matches[0], different)
    except WritesTensor as error:
        result = str(error)
    except Exception as error:
        LOGGER.debug("%s cannot be run as %s", type(module).__name__, kind, exc_info=True)
        result = f"cannot be run by itself ({describe(error)})"
    if isinstance(result, ActivationRecipe):
        return result
    if is_named or any(trials.agreements[candidate] for candidate in candidates):
        return result
    explain_none(result)
    return None


def _select_by_values(module: nn.Module, candidates: list[ActivationRecipe]) -> list[ActivationRecipe]:
    """Return the candidates that reproduce the module's outputs for values of every size, and its gradients."""
    for seed, dtype in enumerate((FP32, BF16, FP16)):
        wide = (normal(seed, 16, 24) * torch.logspace(-4, 1 if dtype == FP16 else 15, 16)[:, None]).to(dtype)
        others = [unusual_values(seed, *shape, 24, dtype=dtype) for shape in ((16,), (), (2, 8), (2, 2, 4))]
        twins = [stand_in(module, training=training) for training in (True, False)]
        for twin, x in itertools.product(twins, (wide, *others)):
            if candidates:
                candidates = select_equal(candidates, twin, [x], run_forward(twin, x))
    x = normal(3, 16, 24)
    return select_equal_gradients(candidates, stand_in(module), [x], [x]) if candidates else []


def _confirm(module: nn.Module, reach: Reach, recipe: ActivationRecipe, different: str) -> ActivationRecipe | str:
    """Compare a formula in all other circumstances. Return a recipe, or the reason why there is none."""
    number = largest_number(reach)
    # The code may treat features beyond an index that it contains in another way, so the inputs are wider than that.
    width = number + 8 if 24 <= number <= 65536 else 24
    subject = lambda dtype=FP32, training=True: stand_in(module, training=training)
    inputs = lambda dtype, *shape: [normal(60, *shape, width, dtype=dtype)]
    pairs = [(dtype, dtype) for dtype in DTYPES]
    accepts_strides = runs_without_contiguity(recipe, subject, inputs)
    if not agrees_in_circumstances(recipe, subject, inputs) or not agrees_in_all_combinations(
        recipe, subject, inputs, pairs
    ):
        return different
    if reason := explain_limits(recipe, subject, inputs, module, reach, pairs, (1, 2, 3, 4), any_width=True):
        return reason
    return replace(recipe, needs_contiguity=not accepts_strides)
