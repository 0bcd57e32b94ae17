"""Recognise activations without a gate: modules that compute relu(x)^2 or a GELU for any input."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tigon.recognition.guards.code_facts import largest_number
from tigon.recognition.parts.comparison import explain_difference, if_similar, run_probes, select
from tigon.recognition.parts.mlp_recipes import FORMULAS, ActivationRecipe
from tigon.recognition.probing.probes import Subject, runs_without_contiguity
from tigon.recognition.probing.standin import (
    BF16,
    FP16,
    FP32,
    accepts_inputs,
    has_no_tensors,
    normal,
    stand_in,
    unusual_values,
)
from tigon.runtime.reach.explore import explore
from tigon.runtime.stock import has_stock_call


@dataclass(frozen=True)
class _ActivationSubject(Subject):
    """Builds stand-ins of an activation, and inputs of a width for them."""

    module: nn.Module
    width: int
    has_any_width = True

    def __call__(self, dtype: torch.dtype | None = FP32, training: bool = True) -> nn.Module:
        return stand_in(self.module, training=training)

    def inputs(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        return [normal(60, *shape, self.width, dtype=dtype)]

    def cases(self) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        for seed, dtype in enumerate((FP32, BF16, FP16)):
            wide = (normal(seed, 16, 24) * torch.logspace(-4, 1 if dtype == FP16 else 15, 16)[:, None]).to(dtype)
            others = [unusual_values(seed, *shape, 24, dtype=dtype) for shape in ((16,), (), (2, 8), (2, 2, 4))]
            for training, x in itertools.product((True, False), (wide, *others)):
                yield self(training=training), [x]


def recognise_relu2(module: nn.Module) -> ActivationRecipe | str | None:
    """Recognise a squared ReLU: a module without children and parameters. Another module gets a reason only if its
    class has such a name, or if it computes a squared ReLU for some inputs."""
    name = type(module).__name__.lower()
    is_named = "relu2" in name or ("relu" in name and "squared" in name)
    return _recognise_activation(module, ["relu2"], "a squared ReLU", is_named)


def recognise_gelu(module: nn.Module) -> ActivationRecipe | str | None:
    """Recognise a GELU or an approximation of it: a module without children and parameters. Another module gets a
    reason only if it computes a GELU for some inputs."""
    return _recognise_activation(module, [name for name in FORMULAS if name.startswith("gelu")], "a GELU", False)


def _recognise_activation(
    module: nn.Module, formulas: list[str], kind: str, is_named: bool
) -> ActivationRecipe | str | None:
    """Return the recipe for the first formula that agrees, the reason why there is none, or None for another kind."""
    # If the call of a module is not that of torch, it may not run the forward that the recipe replaces.
    is_plain = not module._modules and has_no_tensors(module) and has_stock_call(module)
    if not is_plain or not accepts_inputs(module, 1):
        return None
    reach, candidates = explore(module), [ActivationRecipe(formula) for formula in formulas]
    number, different = largest_number(reach), f"computes something else than {kind}"
    # The code may treat features beyond an index that it contains in another way, so the inputs are wider than that.
    subject = _ActivationSubject(module, number + 8 if 24 <= number <= 65536 else 24)

    def compare() -> ActivationRecipe | str:
        selected, dims = select(subject, candidates)
        if not selected:
            return different
        accepts_strides = runs_without_contiguity(selected[0], subject)
        reason = reach.reason or explain_difference(selected[0], subject, reach, dims, different=different)
        return reason or replace(selected[0], needs_contiguity=not accepts_strides)

    find = functools.partial(run_probes, compare, module, reach)
    return find() if is_named else if_similar(find, candidates)
