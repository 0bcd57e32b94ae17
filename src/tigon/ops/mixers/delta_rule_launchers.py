"""The operators that launch the kernels of the delta rules, and their self-check.

If the kernels fail the check (`kernel_check`) on a device, `delta_rule_chunks` computes such calls.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.mixers.delta_rule_chunks import (
    DeltaGradients,
    DeltaInputs,
    DeltaOptions,
    chunked_backward,
    chunked_forward,
)
from tigon.ops.mixers.delta_rule_config import DeltaConfig, choose_config
from tigon.ops.mixers.delta_rule_steps import (
    NeededDeltaGradients,
    empty_backward,
    empty_forward,
    launch_backward,
    launch_forward,
)
from tigon.ops.mixers.kernel_check import CHECK_TOKENS, compare_results, make_bounds, make_draw, move, passes_check
from tigon.runtime.launch import launcher

# --- operators -----------------------------------------------------------------------------------


@launcher(fake=empty_forward)
def delta_rule_forward(like: Tensor, inputs: DeltaInputs, options: DeltaOptions) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, Dv] and, if requested, the last states in fp32. `like` is any tensor on the device."""
    config = checked_config(inputs, options.normalises, options.returns_state)
    if config is None:
        o, last_state = chunked_forward(inputs, options)
        return o, last_state
    return launch_forward(inputs, options, config)


@launcher(fake=empty_backward)
def delta_rule_backward(
    do: Tensor, dlast_state: Tensor | None, inputs: DeltaInputs, options: DeltaOptions, needs: NeededDeltaGradients
) -> DeltaGradients:  # fmt: skip
    """Return the gradients of the inputs. Gradients that are not needed are None."""
    config = checked_config(inputs, options.normalises, dlast_state is not None)
    if config is None:
        gradients = chunked_backward(do, dlast_state, inputs, options)
        names = empty_backward(inputs, needs)._asdict()
        return gradients._replace(**{name: None for name, x in names.items() if x is None})
    return launch_backward(do, dlast_state, inputs, options, needs, config)


# --- the self-check ------------------------------------------------------------------------------


class DeltaVariant(NamedTuple):
    """The properties of a call for which Triton compiles kernels of their own.

    The dtype is such a property too.
    """

    size: int
    value_size: int
    groups: int
    normalises: bool
    has_initial_state: bool
    # True if forward returns the last state, and backward reads its gradient.
    has_last_state: bool
    # The dtype of `cu_seqlens`, or None without packed samples.
    bounds_dtype: torch.dtype | None
    config: DeltaConfig
    # True for Kimi Delta Attention.
    has_feature_decay: bool = False


def checked_config(inputs: DeltaInputs, normalises: bool, has_last_state: bool) -> DeltaConfig | None:
    """Return the launch parameters for these inputs, or None if their kernels failed the self-check on the device."""
    q, _, v, g, _, initial_state, bounds = inputs
    config = choose_config(inputs)
    variant = DeltaVariant(
        q.shape[3], v.shape[3], v.shape[2] // q.shape[2], normalises, initial_state is not None, has_last_state,
        None if bounds is None else bounds.dtype, config, g.dim() == 4,
    )  # fmt: skip
    op = "kda" if variant.has_feature_decay else "gated_delta_rule"
    return config if passes_check(op, q, variant, lambda: check_kernels(q, variant)) else None


def _draw_check(dtype: torch.dtype, variant: DeltaVariant) -> tuple[DeltaInputs, Tensor, Tensor | None]:
    """Return inputs on the CPU, and the gradients of o and of the last state."""
    size, value_size, groups, tokens = variant.size, variant.value_size, variant.groups, CHECK_TOKENS
    draw, bounds = make_draw(), make_bounds(variant.bounds_dtype)
    shape = 1 if bounds is None else 2, groups, size, value_size
    q, k = draw(1, tokens, 1, size), draw(1, tokens, 1, size) * (1.0 if variant.normalises else size**-0.5)
    v, do = draw(1, tokens, groups, value_size), draw(1, tokens, groups, value_size)
    features = (size,) if variant.has_feature_decay else ()
    g, beta = -draw(1, tokens, groups, *features).abs(), draw(1, tokens, groups).sigmoid()
    state = draw(*shape) if variant.has_initial_state else None
    dlast = draw(*shape) if variant.has_last_state else None
    q, k, v, g, beta, state, do, dlast = (move(x, dtype) for x in (q, k, v, g, beta, state, do, dlast))
    return DeltaInputs(q, k, v, g, beta, state, bounds), do, dlast


def check_kernels(like: Tensor, variant: DeltaVariant) -> bool:
    """Return whether the kernels compute what `delta_rule_chunks` computes: full chunks, a tail, and all gradients."""
    options = DeltaOptions(variant.size**-0.5, variant.normalises, variant.has_last_state)

    def run() -> tuple[Any, Any]:
        inputs, do, dlast = _draw_check(like.dtype, variant)
        expected = *chunked_forward(inputs, options), *chunked_backward(do, dlast, inputs, options)
        inputs = DeltaInputs._make(move(x, like.device) for x in inputs)
        outputs = launch_forward(inputs, options, variant.config)
        needs = NeededDeltaGradients(True, True)
        gradients = launch_backward(
            do.to(like.device), move(dlast, like.device), inputs, options, needs, variant.config
        )  # fmt: skip
        return (*outputs, *gradients), expected

    return compare_results(like.device, run)
