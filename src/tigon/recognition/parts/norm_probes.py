"""Compare a module with the candidates for a norm: rows of very different sizes show epsilon, offset and rounding.

A row whose mean square is far below epsilon shows the value of epsilon. Values of bf16 show whether the norm rounds
before or after it multiplies by the weight.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.norms.gated_rms_norm import GateActivation
from tigon.ops.norms.rms_norm import Rounding
from tigon.recognition.guards.code_facts import has_conditions
from tigon.recognition.parts.norm_recipes import (
    LAYER_NORM_FORMULAS,
    Gate,
    LayerNormRecipe,
    NormRecipe,
    RMSNormRecipe,
    Scope,
)
from tigon.recognition.probing.probes import (
    DTYPES,
    agrees,
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
    normal,
    run_forward,
    select_equal,
    select_equal_gradients,
    stand_in,
    unusual_values,
)
from tigon.recognition.probing.trials import not_recording
from tigon.runtime.reach.places import Reach

LOGGER = logging.getLogger("tigon")

# Pairs of a dtype of the input and a dtype of the weights. A norm without weights has None.
Pair = tuple[torch.dtype, torch.dtype | None]
PAIRS: tuple[Pair, ...] = tuple(itertools.product(DTYPES, DTYPES))

# Each case is (training, dtype of the input, dtype of the weights).
CASES = [
    *itertools.product((True, False), (FP32, BF16), (FP32, BF16)),
    (True, FP16, FP16),
]


@dataclass(frozen=True)
class NormSubject:
    """Builds stand-ins of a norm and inputs for them.

    `names` are the names of the parameters. A gated norm takes a second input.
    """

    module: nn.Module
    names: tuple[str, ...]
    width: int
    gated: bool

    def __call__(self, dtype: torch.dtype | None = FP32, training: bool = True, **attributes: Any) -> nn.Module:
        weights = {name: normal(40 + i, self.width).to(dtype) for i, name in enumerate(self.names)}
        return stand_in(self.module, weights, training=training, **attributes)

    def inputs(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        """Return the inputs with these leading dimensions."""
        return [normal(60 + i, *shape, self.width, dtype=dtype) for i in range(1 + self.gated)]

    def with_weights(self, make_weight: Callable[[int], Tensor], training: bool = True) -> nn.Module:
        """Return a stand-in whose parameter number i is `make_weight(i)`."""
        weights = {name: make_weight(i) for i, name in enumerate(self.names)}
        return stand_in(self.module, weights, training=training)


# --- candidates --------------------------------------------------------------------------------------

# The offsets of the weight and the roundings of RMS norms.
_ROUNDINGS: tuple[Rounding, ...] = ("before_weight", "after_weight")
_ACTIVATIONS: tuple[GateActivation, ...] = ("silu", "sigmoid")
RMS_NORM_FORMS = list(itertools.product((0.0, 1.0), _ROUNDINGS))


def _gates(module: nn.Module, width: int) -> Iterator[Gate]:
    """Yield the ways in which a norm of this width may use a gate. An attribute may hold the size or number of groups.

    The guard of the recipe fails once such an attribute changes.
    """
    numbers = {value for value in vars(module).values() if type(value) is int and 1 < value < width}
    divisors = [value for value in sorted(numbers) if width % value == 0]
    sizes = dict.fromkeys([None, *divisors, *(width // value for value in divisors)])
    for activation, gate_first, size in itertools.product(_ACTIVATIONS, (False, True), sizes):
        yield Gate(activation, gate_first, size)


def norm_candidates(
    module: nn.Module, names: Sequence[str], epsilons: Sequence[str | float], width: int, gated: bool
) -> Iterator[NormRecipe]:
    """Yield every recipe that a module with these parameters, for inputs of this width, may compute.

    `epsilons` are the names of attributes that may hold epsilon, or values that the code may contain.
    """
    gates: list[Gate | None] = [*_gates(module, width)] if gated else [None]
    if len(names) < 2:
        forms = RMS_NORM_FORMS if names else RMS_NORM_FORMS[:1]
        weight = names[0] if names else None
        for eps, (offset, rounding), gate in itertools.product(epsilons, forms, gates):
            yield RMSNormRecipe(eps, weight, offset, rounding, gate)
    if not gated:
        pairs: list[tuple[str | None, str | None]] = [(None, None)]
        if names:
            pairs = list(itertools.permutations([*names, None][:2], 2))
        for eps, (weight, bias), formula in itertools.product(epsilons, pairs, LAYER_NORM_FORMULAS):
            yield LayerNormRecipe(eps, weight, bias, formula)


# --- comparisons that select candidates --------------------------------------------------------------


def select_by_values(subject: NormSubject, candidates: list[NormRecipe]) -> list[NormRecipe]:
    """Return the candidates that reproduce the module's outputs in every dtype that it accepts, and its gradients.

    Raises:
        WritesTensor: The forward writes to its input or to a parameter, or draws random numbers.
    """
    rows = max(16, 4096 // subject.width) // 4 * 4
    # The smallest rows have a mean square below any epsilon. The largest exceed any clamp.
    sizes = torch.logspace(-4, 12, rows)
    shapes = (rows,), (2, rows // 2), (2, 2, rows // 4)
    for seed, (training, dtype, weight_dtype) in enumerate(CASES):
        shape = (*shapes[seed % 3], subject.width)
        largest = 1e3 if dtype == FP16 else 1e12
        inputs = [(normal(seed, *shape) * sizes.clamp(max=largest).view(*shape[:-1], 1)).to(dtype)]
        inputs += [normal(50 + seed, *shape, dtype=dtype)] if subject.gated else []
        make_weight = lambda i: normal(100 + seed + 10 * i, subject.width, dtype=weight_dtype)  # noqa: B023
        twin = subject.with_weights(make_weight, training)
        try:
            y = run_forward(twin, *inputs)
        except WritesTensor:
            raise
        except Exception:
            name = type(subject.module).__name__
            LOGGER.debug("%s refuses %s with weights in %s", name, dtype, weight_dtype, exc_info=True)
            if dtype == weight_dtype:
                raise
            # The module refuses mixed dtypes, so there is nothing to reproduce.
            continue
        candidates = select_equal(candidates, twin, inputs, y)
    return _select_by_unusual_values(subject, _select_by_gradients(subject, candidates))


def _select_by_gradients(subject: NormSubject, candidates: list[NormRecipe]) -> list[NormRecipe]:
    """Return the candidates that reproduce the gradients of all tensors, and those of the parameters alone."""
    twin = subject.with_weights(lambda i: normal(i, subject.width))
    inputs = [normal(20 + i, 8, subject.width) for i in range(1 + subject.gated)]
    parameters: list[Tensor] = [p for name in subject.names if (p := twin._parameters[name]) is not None]
    for leaves in ([*inputs, *parameters], parameters):
        candidates = select_equal_gradients(candidates, twin, inputs, leaves)
        inputs = [x.detach() for x in inputs]
    return candidates


def _select_by_unusual_values(subject: NormSubject, candidates: list[NormRecipe]) -> list[NormRecipe]:
    """Return the candidates that reproduce the outputs for values and weights of any size."""
    width = subject.width
    for seed, (dtype, shape) in enumerate(itertools.product((FP32, BF16), ((16,), (2, 8), (2, 2, 4)))):
        inputs = [unusual_values(seed, *shape, width, dtype=dtype)]
        inputs += [normal(seed, *shape, width, dtype=dtype)] * subject.gated
        if seed % 2:
            make_weight = lambda i: unusual_values(3 + i + seed, 1, width)[0].to(dtype)  # noqa: B023
        else:
            make_weight = lambda i: (normal(seed + i, width) * 1e3).to(dtype)  # noqa: B023
        twin = subject.with_weights(make_weight)
        candidates = select_equal(candidates, twin, inputs, run_forward(twin, *inputs))
    return candidates


def select_by_dims(subject: NormSubject, candidates: list[NormRecipe]) -> tuple[list[NormRecipe], frozenset[int]]:
    """Try an input with one dimension.

    Return the candidates that reproduce its output, and the numbers of dimensions that the module accepts.
    """
    twin = subject.with_weights(lambda i: normal(i, subject.width))
    inputs = [normal(i, subject.width) for i in range(1 + subject.gated)]
    try:
        y = run_forward(twin, *inputs)
    except Exception:
        LOGGER.debug("%s refuses an input with one dimension", type(subject.module).__name__, exc_info=True)
        return candidates, frozenset((2, 3, 4))
    return select_equal(candidates, twin, inputs, y), frozenset((1, 2, 3, 4))


def select_by_epsilon(subject: NormSubject, candidates: list[NormRecipe]) -> list[NormRecipe]:
    """Return the candidates that also agree with the forward after a change of each attribute that may be epsilon.

    If several attributes that the forward reads have the same value, only such changes show which of them is epsilon.
    If several of them are, for example one in training and one in evaluation, no candidate agrees.
    """
    names = sorted({candidate.eps for candidate in candidates if isinstance(candidate.eps, str)})
    if len(names) > 1:
        candidates = [each for each in candidates if all(_agrees_with_others(each, subject, name) for name in names)]
    return candidates


def _agrees_with_others(recipe: NormRecipe, subject: NormSubject, name: str) -> bool:
    """Return whether a recipe agrees with the forward when the attribute `name` has other values.

    All modes, shapes and gradients are compared. Pairs of dtypes for which the recipe differs in any case are left out,
    because calls with them run the stock forward.
    """

    def inputs(dtype: torch.dtype, *shape: int) -> list[Tensor]:
        x, *gate = subject.inputs(dtype, *shape)
        # The squares of these values are near the usual epsilons, so a larger and a smaller epsilon change the result.
        return [x * 1e-3, *gate]

    pairs = _agreeing_pairs(recipe, subject)
    changes: list[dict[str, Any]] = [{name: eps} for eps in (1e-12, 0.5)]
    subjects = [functools.partial(subject, **change) for change in changes]
    with not_recording():
        return all(agrees_in_all_combinations(recipe, each, inputs, pairs) for each in subjects)


# --- comparisons of one candidate in other circumstances ---------------------------------------------


def confirm(recipe: NormRecipe, subject: NormSubject, dims: frozenset[int], reach: Reach) -> NormRecipe | str | None:
    """Compare a candidate in all other circumstances.

    Return the candidate with its scope, a reason to keep the forward, or None if the candidate differs.
    """
    pairs, module = _agreeing_pairs(recipe, subject), subject.module
    if not (agrees_in_circumstances(recipe, subject, subject.inputs) and _agrees_on_weights(recipe, subject)):
        return None
    if has_conditions(reach) and not agrees_in_all_combinations(recipe, subject, subject.inputs, pairs):
        return None
    accepts_strides = runs_without_contiguity(recipe, subject, subject.inputs)
    if reason := explain_limits(recipe, subject, subject.inputs, module, reach, pairs, dims):
        return reason
    weight_dtypes = {x: tuple(w for dtype, w in pairs if dtype == x) for x in DTYPES}
    if not recipe.weight:
        weight_dtypes = dict.fromkeys(DTYPES, (None,))
    shape = "normalized_shape" if getattr(module, "normalized_shape", None) == (subject.width,) else None
    live_eps = not has_conditions(reach) and _uses_eps_unchanged(recipe, subject)
    if isinstance(recipe.eps, str) and not live_eps and recipe.eps not in reach.own_settings:
        # Only code of torch may read this attribute, so no guard watches it.
        constant = replace(recipe, eps=getattr(module, recipe.eps))
        agreeing = (each for each in (recipe, constant) if _agrees_with_others(each, subject, str(recipe.eps)))
        if (agreeing_recipe := next(agreeing, None)) is None:
            return None
        recipe, live_eps = agreeing_recipe, True
    return replace(recipe, scope=Scope(dims, weight_dtypes, not accepts_strides, shape, live_eps))


def _agreeing_pairs(recipe: NormRecipe, subject: NormSubject) -> list[Pair]:
    """Return the pairs of dtypes that the module accepts and for which the recipe agrees with it."""
    pairs = list(PAIRS) if subject.names else [(dtype, dtype) for dtype in DTYPES]
    with not_recording():
        return [(x, w) for x, w in pairs if agrees(recipe, functools.partial(subject, w), subject.inputs(x, 2, 8))]


def _agrees_on_weights(recipe: NormRecipe, subject: NormSubject) -> bool:
    """Compare for weights of ones and zeros, and for weights so large that outputs overflow in both directions."""
    width = subject.width
    for dtype in DTYPES:
        x = [t * 4 for t in subject.inputs(dtype, 2, 8)]
        largest = torch.finfo(dtype).max
        # The lambdas run before the next iteration changes their variables.
        weights: list[Callable[[int], Tensor]] = [
            lambda i: torch.ones(width, dtype=dtype),  # noqa: B023
            lambda i: torch.zeros(width, dtype=dtype),  # noqa: B023
            lambda i: (normal(80 + i, width).sign() * largest * 0.9).to(dtype),  # noqa: B023
            lambda i: torch.full((width,), largest).to(dtype),  # noqa: B023
        ]
        factories = (functools.partial(subject.with_weights, make_weight) for make_weight in weights)
        if any(agrees(recipe, make, x) is False for make in factories):
            return False
    return True


def _uses_eps_unchanged(recipe: NormRecipe, subject: NormSubject) -> bool:
    """Return True if the module uses any epsilon as the op does. Other modules limit epsilon or replace a zero."""
    if not isinstance(recipe.eps, str):
        return True
    x, *gate = subject.inputs(FP32, 8)
    x = x * torch.logspace(-8, 4, 8)[:, None]
    x[0] = 0
    attributes: list[dict[str, Any]] = [{recipe.eps: eps} for eps in (0.0, 1e-12, 1e-3, 0.5, 10.0)]
    with not_recording():
        return all(agrees(recipe, functools.partial(subject, FP32, **each), [x, *gate]) for each in attributes)
