"""Recognise gated MLPs, whatever the names of their children are.

    down(silu(gate(x)) * up(x))            three projections
    down(silu(a) * b), a, b = gate(x)      two projections, packed

The gate may be silu, gelu, or gelu in its tanh approximation. The output of the gate projection and the result may be
multiplied by numbers (Falcon H1), and gate and up may be clamped (DeepSeek V4). The module may have other children,
such as an activation or a dropout that changes nothing, but no other parameters.
"""

import itertools
import logging
import math
from dataclasses import replace
from typing import Any

from torch import nn

from tigon.recognition.parts.glu_probes import (
    DIFFERENT,
    GLUSubject,
    Wiring,
    confirm,
    select_by_dims,
    select_by_values,
    wirings,
)
from tigon.recognition.parts.glu_recipe import GATE_KINDS, GLURecipe
from tigon.recognition.probing.standin import (
    WritesTensor,
    accepts_inputs,
    describe,
    has_no_tensors,
    is_linear,
    own_tensors,
    probing,
)
from tigon.recognition.replacement import is_changed
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.places import Reach

LOGGER = logging.getLogger("tigon")


def recognise_glu(module: nn.Module) -> GLURecipe | str | None:
    """Recognise a gated MLP.

    It is a module with two (packed) or three linear children of fitting sizes, and no other parameters. Return a
    recipe, the reason why such a module keeps its forward, or None for another module.
    """
    projections: dict[str, Any] = {name: child for name, child in module._modules.items() if is_linear(child)}
    if len(projections) not in (2, 3) or not accepts_inputs(module, 1):
        return None
    if not (possible_wirings := list(wirings(projections))):
        return None
    others = {n: child for n, child in module._modules.items() if n not in projections and child is not None}
    extra = [name for name, child in others.items() if not has_no_tensors(child)]
    extra += [name for name, tensor in own_tensors(module).items() if tensor is not None]
    if extra:
        return f"has more state than a gated MLP ({', '.join(extra)})"
    if changed_children := [name for name, child in others.items() if is_changed(child)]:
        return f"has hooks on {', '.join(changed_children)}, or their call or forward was replaced"
    sizes = {size for layer in projections.values() for size in (layer.in_features, layer.out_features)}
    # Children of one size may be the projections of an attention layer, which need no reason in the report.
    may_be_attention = len(sizes) == 1
    reach = explore(module)
    if reason := reach.reason:
        return None if may_be_attention else reason
    if reach.names & {"weight", "bias"}:
        return "its forward reads the weights of its linear layers, besides calling them"
    return _try_wirings(module, projections, possible_wirings, reach, may_be_attention)


def _try_wirings(
    module: nn.Module, projections: dict[str, Any], possible_wirings: list[Wiring], reach: Reach, may_be_attention: bool
) -> GLURecipe | str | None:
    """Return the recipe for the first wiring that agrees, or the reason why there is none."""
    failure, has_run = DIFFERENT, False
    # An attribute may hold a factor or a limit. The guard of the recipe fails once such an attribute changes.
    floats = [value for value in vars(module).values() if type(value) is float and math.isfinite(value) and value]
    factors, limits = list(dict.fromkeys([1.0, *floats])), [value for value in dict.fromkeys(floats) if value > 0]
    for wiring in possible_wirings:
        subject = GLUSubject(module, projections, wiring)
        forms = itertools.product(GATE_KINDS, factors, factors, [math.inf, *limits])
        candidates = [GLURecipe(kind, *wiring, *numbers) for kind, *numbers in forms]
        try:
            with reach.preserved(), probing():
                subject = subject.with_size_names()
                candidates = select_by_values(subject, candidates)
                candidates, dims = select_by_dims(subject, candidates)
                results = [confirm(replace(candidate, dims=dims), subject, reach) for candidate in candidates[:1]]
        except WritesTensor as error:
            return str(error)
        except Exception as error:
            LOGGER.debug("%s cannot be run as a gated MLP", type(module).__name__, exc_info=True)
            failure = failure if has_run else f"cannot be run by itself ({describe(error)})"
            continue
        failure, has_run = DIFFERENT, True
        if reach.reason:
            return reach.reason
        if results and (isinstance(results[0], GLURecipe) or results[0] != DIFFERENT):
            return results[0]
    # The forward of an attention layer cannot be run with one input.
    return failure if has_run or not may_be_attention else None
