"""Recognise squared ReLUs: modules that compute relu(x)^2 for any input, such as an activation of an MLP."""

import itertools
import logging
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon.ops.mlps.relu2 import relu2, relu2_reference
from tigon.recognition.code_facts import largest_number
from tigon.recognition.glu_recipe import is_plain_input
from tigon.recognition.probes import (
    DTYPES,
    agrees_in_all_combinations,
    agrees_in_circumstances,
    explain_limits,
    runs_without_contiguity,
)
from tigon.recognition.standin import (
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
from tigon.recognition.trials import current_trials, explain_none, recording
from tigon.runtime.state.places import Reach
from tigon.runtime.state.reach import explore

__all__ = ["ReLU2Recipe", "recognise_relu2"]

LOGGER = logging.getLogger("tigon")

DIFFERENT = "computes something else than a squared ReLU"


@dataclass(frozen=True)
class ReLU2Recipe:
    """Recipe: `relu2`, for an activation that is a module."""

    # True if the recipe takes contiguous inputs only. The stock forward runs for all others.
    needs_contiguity: bool = field(default=False, compare=False)
    live: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[tuple[str, ...]] = ()

    def __call__(self, module: nn.Module, *args: Any, reference: bool = False, **kwargs: Any) -> Tensor:
        if kwargs or len(args) != 1 or not (reference or is_plain_input(args[0], self.needs_contiguity)):
            return type(module).forward(module, *args, **kwargs)
        return (relu2_reference if reference else relu2)(*args)

    def __str__(self) -> str:
        return "relu2"


def recognise_relu2(module: nn.Module) -> ReLU2Recipe | str | None:
    """Recognise a squared ReLU: a module without children and without parameters.

    A reason is returned only for a module that computes a squared ReLU for some inputs, or whose class is named like
    one. Other activations are not of this kind.
    """
    if module._modules or not has_no_tensors(module) or not accepts_inputs(module, 1):
        return None
    reach, recipe = explore(module, inputs=1), ReLU2Recipe()
    result: ReLU2Recipe | str
    try:
        with reach.preserved(), probing(), recording(current_trials()) as trials:
            if not _agrees_on_values(module, recipe):
                result = DIFFERENT
            else:
                result = reach.reason or reach.decision or _confirm(module, reach)
    except WritesTensor as error:
        result = str(error)
    except Exception as error:
        LOGGER.debug("%s cannot be run as a squared ReLU", type(module).__name__, exc_info=True)
        result = f"cannot be run by itself ({describe(error)})"
    if isinstance(result, ReLU2Recipe):
        return result
    name = type(module).__name__.lower()
    if trials.agreements[recipe] or "relu2" in name or ("relu" in name and "squared" in name):
        return result
    explain_none(result)
    return None


def _agrees_on_values(module: nn.Module, recipe: ReLU2Recipe) -> bool:
    """Return True if the recipe reproduces the module's outputs for values of every size, and its gradients."""
    for seed, dtype in enumerate((FP32, BF16, FP16)):
        wide = (normal(seed, 16, 24) * torch.logspace(-4, 1 if dtype == FP16 else 15, 16)[:, None]).to(dtype)
        others = [unusual_values(seed, *shape, 24, dtype=dtype) for shape in ((16,), (), (2, 8), (2, 2, 4))]
        twins = [stand_in(module, training=training) for training in (True, False)]
        for twin, x in itertools.product(twins, (wide, *others)):
            if not select_equal([recipe], twin, [x], run_forward(twin, x)):
                return False
    x = normal(3, 16, 24)
    return bool(select_equal_gradients([recipe], stand_in(module), [x], [x]))


def _confirm(module: nn.Module, reach: Reach) -> ReLU2Recipe | str:
    """Compare a squared ReLU in all other circumstances. Return a recipe, or the reason why there is none."""
    recipe, number = ReLU2Recipe(), largest_number(reach)
    # The code may treat features beyond an index that it contains in another way, so the inputs are wider than that.
    width = number + 8 if 24 <= number <= 65536 else 24
    subject = lambda dtype=FP32, training=True: stand_in(module, training=training)
    inputs = lambda dtype, *shape: [normal(60, *shape, width, dtype=dtype)]
    pairs = [(dtype, dtype) for dtype in DTYPES]
    accepts_strides = runs_without_contiguity(recipe, subject, inputs)
    if not agrees_in_circumstances(recipe, subject, inputs) or not agrees_in_all_combinations(
        recipe, subject, inputs, pairs
    ):
        return DIFFERENT
    if reason := explain_limits(recipe, subject, inputs, module, reach):
        return reason
    return replace(recipe, needs_contiguity=not accepts_strides)
