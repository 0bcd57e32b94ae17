"""Recognise RMS norms and layer norms.

A module without children, with one or two parameters of one size, is compared with every recipe of `norm_recipes`. Rows
of very different sizes show epsilon, offset and rounding: a row whose mean square is far below epsilon shows the value
of epsilon, and values of bf16 show whether the norm rounds before or after it multiplies by the weight.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.norms.gated_rms_norm import GateActivation
from tigon.ops.norms.rms_norm import Rounding
from tigon.recognition.guards.code_facts import largest_number
from tigon.recognition.parts.comparison import CANNOT_RUN, EQUAL_DTYPES, explain_difference, run_probes, select
from tigon.recognition.parts.norm_recipes import (
    LAYER_NORM_FORMULAS,
    Gate,
    LayerNormRecipe,
    NormRecipe,
    RMSNormRecipe,
    Scope,
)
from tigon.recognition.probing.probes import DTYPES, SpecialCase, Subject, agrees, runs_without_contiguity
from tigon.recognition.probing.standin import (
    BF16,
    FP16,
    FP32,
    accepts_inputs,
    normal,
    own_tensors,
    stand_in,
    unusual_values,
)
from tigon.recognition.probing.trials import not_recording
from tigon.runtime.engines import full_shape
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.places import Reach

DIFFERENT = "computes something else than rms_norm or layer_norm"


@dataclass(frozen=True)
class _NormSubject(Subject):
    """Builds stand-ins of a norm, whose parameters have these `names`, and inputs. A gated norm takes two."""

    module: nn.Module
    names: tuple[str, ...]
    width: int
    gated: bool

    def __call__(self, dtype: torch.dtype | None = FP32, training: bool = True) -> nn.Module:
        weights = {name: normal(40 + i, self.width).to(dtype) for i, name in enumerate(self.names)}
        return stand_in(self.module, weights, training=training)

    def inputs(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        return [normal(60 + i, *shape, self.width, dtype=dtype) for i in range(1 + self.gated)]

    def cases(self) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        rows = max(16, 4096 // self.width) // 4 * 4
        # The smallest rows have a mean square below any epsilon. The largest exceed any clamp.
        sizes, shapes = torch.logspace(-4, 12, rows), ((rows,), (2, rows // 2), (2, 2, rows // 4))
        dtypes = [*itertools.product((True, False), (FP32, BF16), (FP32, BF16)), (True, FP16, FP16)]
        for seed, (training, dtype, weight_dtype) in enumerate(dtypes):
            shape = (*shapes[seed % 3], self.width)
            largest = 1e3 if dtype == FP16 else 1e12
            inputs = [(normal(seed, *shape) * sizes.clamp(max=largest).view(*shape[:-1], 1)).to(dtype)]
            yield self(weight_dtype, training), inputs + [normal(50 + seed, *shape, dtype=dtype)] * self.gated
        for seed, (dtype, leading) in enumerate(itertools.product((FP32, BF16), ((16,), (2, 8), (2, 2, 4)))):
            inputs = [unusual_values(seed, *leading, self.width, dtype=dtype)]
            inputs += [normal(seed, *leading, self.width, dtype=dtype)] * self.gated
            row = unusual_values(3 + seed, 1, self.width, dtype=dtype)[0]
            # The lambda runs before the next iteration changes its variables.
            change = lambda name, weight: weight.copy_(row) if seed % 2 else weight.mul_(1e3)  # noqa: B023
            yield self.with_weights(dtype, change), inputs

    def special_cases(self, recipe: Any, reach: Reach) -> Iterator[SpecialCase]:
        """Yield weights of ones and zeros, and weights so large that outputs overflow in both directions."""
        for dtype in DTYPES:
            largest = torch.finfo(dtype).max
            # The lambdas run before the next iteration changes their variables.
            changes = (
                lambda name, weight: weight.fill_(1.0),
                lambda name, weight: weight.zero_(),
                lambda name, weight: weight.sign_().mul_(largest * 0.9),  # noqa: B023
                lambda name, weight: weight.fill_(largest),  # noqa: B023
            )
            for change in changes:
                yield functools.partial(self.with_weights, dtype, change), [t * 4 for t in self.inputs(dtype, 2, 8)]


_ROUNDINGS: tuple[Rounding, ...] = ("before_weight", "after_weight")
_ACTIVATIONS: tuple[GateActivation, ...] = ("silu", "sigmoid")


def _gates(module: nn.Module, width: int) -> Iterator[Gate]:
    """Yield the ways in which a norm may use a gate. An attribute may hold the size or number of groups."""
    numbers = {value for value in vars(module).values() if type(value) is int and 1 < value < width}
    divisors = [value for value in sorted(numbers) if width % value == 0]
    sizes = dict.fromkeys([None, *divisors, *(width // value for value in divisors)])
    for activation, gate_first, size in itertools.product(_ACTIVATIONS, (False, True), sizes):
        yield Gate(activation, gate_first, size)


def _candidates(
    module: nn.Module, names: Sequence[str], epsilons: Sequence[float], width: int, gated: bool
) -> Iterator[NormRecipe]:
    """Yield every recipe that a module with these parameters, for inputs of this width, may compute."""
    gates: list[Gate | None] = [*_gates(module, width)] if gated else [None]
    if len(names) < 2:
        forms = list(itertools.product((0.0, 1.0), _ROUNDINGS))[: None if names else 1]
        weight = names[0] if names else None
        for eps, (offset, rounding), gate in itertools.product(epsilons, forms, gates):
            yield RMSNormRecipe(eps, weight, offset, rounding, gate)
    if not gated:
        pairs: list[tuple[str | None, str | None]] = [(None, None)]
        if names:
            pairs = list(itertools.permutations([*names, None][:2], 2))
        for eps, (weight, bias), formula in itertools.product(epsilons, pairs, LAYER_NORM_FORMULAS):
            yield LayerNormRecipe(eps, weight, bias, formula)


def _confirm(recipe: NormRecipe, subject: _NormSubject, dims: frozenset[int], reach: Reach) -> NormRecipe | str:
    """Compare a candidate in all other circumstances. Return it with its scope, or a reason to keep the forward."""
    module, dtypes = subject.module, itertools.product(DTYPES, DTYPES) if subject.names else EQUAL_DTYPES
    # The pairs of dtypes that the module accepts and for which the recipe agrees with it.
    with not_recording():
        pairs = [(x, w) for x, w in dtypes if agrees(recipe, functools.partial(subject, w), subject.inputs(x, 2, 8))]
    if reason := explain_difference(recipe, subject, reach, dims, pairs=pairs, different=DIFFERENT):
        return reason
    weight_dtypes: dict[torch.dtype, tuple[torch.dtype | None, ...]] = {
        x: tuple(w for dtype, w in pairs if dtype == x) if recipe.weight else (None,) for x in DTYPES
    }
    accepts_strides = runs_without_contiguity(recipe, subject)
    shape = "normalized_shape" if getattr(module, "normalized_shape", None) == (subject.width,) else None
    return replace(recipe, scope=Scope(dims, weight_dtypes, not accepts_strides, shape))


def recognise_norm(module: nn.Module) -> NormRecipe | str | None:
    """Recognise a norm: a module without children, with at most two 1-D parameters of one size, and with an epsilon or
    "norm" in the name of its class."""
    tensors = {name: t for name, t in own_tensors(module).items() if t is not None}
    epsilons = [name for name, value in vars(module).items() if type(value) is float and 0.0 < value <= 0.1]
    # Without an epsilon or such a name, the module may be a dropout or an activation.
    is_likely = (tensors and epsilons) or "norm" in type(module).__name__.lower()
    if (
        module._modules
        or not is_likely
        or not accepts_inputs(module, 1, 2)
        or any(t.dim() > 1 for t in tensors.values())
    ):
        return None
    # FSDP1 may leave an empty shard on this rank.
    sizes = {full_shape(t) for t in tensors.values()} - {(0,)}
    if len(tensors) > 2 or len(sizes) > 1 or any(b is not None for b in module._buffers.values()):
        return "has more state than a norm"
    if (1,) in sizes:
        return "has a weight of one element"
    reach = explore(module)
    if reach.reason:
        return reach.reason
    # The guard of the recipe fails once such an attribute changes. Other norms have epsilon as a number in their code.
    values = dict.fromkeys(getattr(module, name) for name in epsilons if name in reach.own_settings)
    widths = [*next(iter(sizes))] if sizes else _likely_widths(module, reach)
    reasons: list[str] = []
    # A second argument may be a gate, or a residual that is None by default.
    for gated in (True, False):
        if not accepts_inputs(module, 1 + gated):
            continue
        candidates = list(_candidates(module, list(tensors), list(values) or [1e-5, 1e-6], widths[0], gated))
        subjects = [_NormSubject(module, tuple(tensors), width, gated) for width in widths]
        result = _find_recipe(subjects, candidates, reach)
        if not isinstance(result, str):
            return result
        reasons.append(result)
    return reasons[0]


def _likely_widths(module: nn.Module, reach: Reach) -> list[int]:
    """Return widths to try for a norm without a weight. Such a norm may compare its input's width with an attribute, or
    normalise parts of the input that have this width. The last width is larger than every number in its code."""
    values = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in vars(module).values()]
    likely_widths = [size for size in values if type(size) is int and 1 < size <= 65536] + [96]
    largest = largest_number(reach)
    return [factor * size for size in likely_widths for factor in (1, 2)] + [largest + 8] * (96 <= largest <= 65536)


def _find_recipe(subjects: list[_NormSubject], candidates: list[NormRecipe], reach: Reach) -> NormRecipe | str:
    """Return the recipe of a norm, or the reason why there is none. The subjects have the widths to try."""
    failure, module = DIFFERENT, subjects[0].module
    last: tuple[_NormSubject, frozenset[int]] | None = None
    for subject in subjects:
        result = run_probes(functools.partial(select, subject, candidates), module, reach)
        if not isinstance(result, str):
            candidates, last = result[0], (subject, result[1])
        elif result.startswith(CANNOT_RUN):
            failure = result
        else:
            return result
    if last is None:
        return failure
    last_subject, dims = last

    def confirm_one() -> NormRecipe | str:
        results = (_confirm(candidate, last_subject, dims, reach) for candidate in candidates)
        return next((result for result in results if result != DIFFERENT), DIFFERENT)

    return run_probes(confirm_one, module, reach)
