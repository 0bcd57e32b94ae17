"""Recognise RMS norms and layer norms.

A module without children, with one or two parameters of one size, is compared with every recipe of
`tigon.recognition.parts.norm_recipes`: RMS norms with and without an offset of the weight, with the rounding before or
after the weight, with and without a gate (before or after the norm), and layer norms. The name of the module's class
has no effect, except for a norm without parameters or without an epsilon.
"""

import logging
from dataclasses import replace

from torch import nn

from tigon.recognition.guards.code_facts import largest_number
from tigon.recognition.parts.norm_probes import (
    NormSubject,
    confirm,
    norm_candidates,
    select_by_dims,
    select_by_epsilon,
    select_by_values,
)
from tigon.recognition.parts.norm_recipes import NormRecipe
from tigon.recognition.probing.standin import WritesTensor, accepts_inputs, describe, own_tensors, probing
from tigon.runtime.engines import full_shape
from tigon.runtime.reach.code import code_facts
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.objects import bases_of_torch
from tigon.runtime.reach.places import Reach

LOGGER = logging.getLogger("tigon")


def recognise_norm(module: nn.Module) -> NormRecipe | str | None:
    """Recognise a norm.

    It is a module without children, with at most two parameters (1-D, of one size), and with an epsilon or "norm" in
    the name of its class. Return a recipe, the reason why such a module keeps its forward, or None for another module.
    """
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
    if reason := reach.reason:
        return reason
    reasons: list[str] = []
    # A second argument may be a gate, or a residual that is None by default.
    for gated in (True, False):
        if not accepts_inputs(module, 1 + gated):
            continue
        widths = [*next(iter(sizes))] if sizes else _likely_widths(module, reach)
        # An attribute that the forward does not read may have the value of epsilon by chance.
        read_names = reach.own_settings | _names_in_torch(type(module))
        read_epsilons: list[str | float] = [name for name in epsilons if name in read_names]
        read_epsilons = read_epsilons or [1e-5, 1e-6]
        candidates = list(norm_candidates(module, list(tensors), read_epsilons, widths[0], gated))
        subjects = [NormSubject(module, tuple(tensors), width, gated) for width in widths]
        result = _find_recipe(subjects, candidates, reach)
        if not isinstance(result, str):
            takes_more = not gated and accepts_inputs(module, 2)
            return replace(result, scope=replace(result.scope, takes_more=takes_more))
        reasons.append(result)
    return reasons[0]


def _names_in_torch(cls: type[nn.Module]) -> set[str]:
    """Return the names of attributes that torch's forwards in the bases of a class read. `explore` skips this code."""
    codes = [getattr(vars(base).get("forward"), "__code__", None) for base in bases_of_torch(cls)]
    return {name for code in codes if code is not None for name in code_facts(code).attributes}


def _likely_widths(module: nn.Module, reach: Reach) -> list[int]:
    """Return widths to try for a norm without a weight.

    Such a norm may compare its input's width with an attribute, or normalise parts of the input that have this width.
    The last width is larger than every number in its code.
    """
    values = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in vars(module).values()]
    likely_widths = [size for size in values if type(size) is int and 1 < size <= 65536] + [96]
    largest = largest_number(reach)
    return [factor * size for size in likely_widths for factor in (1, 2)] + [largest + 8] * (96 <= largest <= 65536)


def _find_recipe(subjects: list[NormSubject], candidates: list[NormRecipe], reach: Reach) -> NormRecipe | str:
    """Return the recipe of a norm, or the reason why there is none. The subjects have the widths to try."""
    class_name = type(subjects[0].module).__name__
    # The last subject that ran, with the numbers of dimensions that it accepts.
    last: tuple[NormSubject, frozenset[int]] | None = None
    failure = ""
    for subject in subjects:
        try:
            with reach.preserved(), probing():
                candidates = select_by_values(subject, candidates)
                candidates, dims = select_by_dims(subject, candidates)
                last = subject, dims
        except WritesTensor as error:
            return str(error)
        except Exception as error:
            LOGGER.debug("%s cannot be run as a norm of width %d", class_name, subject.width, exc_info=True)
            failure = f"cannot be run by itself ({describe(error)})"
    if last is None:
        return failure
    try:
        with reach.preserved(), probing():
            fitting, candidates = candidates, select_by_epsilon(last[0], candidates)
            results = (confirm(candidate, *last, reach) for candidate in candidates)
            result = next((result for result in results if result is not None), None)
    except Exception as error:
        LOGGER.debug("%s cannot be compared with a norm", class_name, exc_info=True)
        return f"cannot be run by itself ({describe(error)})"
    if fitting and not candidates and not reach.reason:
        names = " and ".join(sorted({str(candidate.eps) for candidate in fitting}))
        return f"its epsilon may be {names}, which have the same value, and changing each does not show which one it is"
    if result is None or reach.reason:
        return reach.reason or "computes something else than rms_norm or layer_norm"
    return result
