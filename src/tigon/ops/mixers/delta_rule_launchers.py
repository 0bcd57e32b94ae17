"""The operators that launch the kernels of the delta rules, and the self-check on each device.

Triton has miscompiled kernels of this kind. Therefore the first call on a device with another dtype, other sizes of
heads, other launch parameters or other optional tensors first runs the kernels on a small problem, and compares all
results with those of `delta_rule_chunks`. If they disagree, `delta_rule_chunks` computes such calls.
"""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.mixers.chunks import CHUNK
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
from tigon.runtime.compat.triton import triton
from tigon.runtime.launch import launcher
from tigon.runtime.self_check import may_wait

_log = logging.getLogger("tigon")

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

    The dtype, the size of a head of q and the launch parameters are such properties too.
    """

    value_size: int
    groups: int
    normalises: bool
    has_initial_state: bool
    # True if forward returns the last state, and backward reads its gradient.
    has_last_state: bool
    # The dtype of `cu_seqlens`, or None without packed samples.
    bounds_dtype: torch.dtype | None
    # True for Kimi Delta Attention.
    has_feature_decay: bool = False


# The verdict for each device, dtype, size of a head of q, launch parameters and variant.
_verdicts: dict[tuple, bool] = {}
# The root mean square of the errors that the check allows, relative to that of the results. Products of rounded factors
# cause 0.5 % in bf16. A wrong kernel causes much more.
MAX_ERROR = 0.05


def checked_config(inputs: DeltaInputs, normalises: bool, has_last_state: bool) -> DeltaConfig | None:
    """Return the launch parameters for these inputs, or None if their kernels failed the self-check on the device.

    The first call at which the host may wait runs the check. Until then, and in the interpreter, no kernel has failed.
    """
    q, _, v, g, _, initial_state, bounds = inputs
    config = choose_config(inputs)
    if q.get_device() < 0:
        return config
    variant = DeltaVariant(
        v.shape[3], v.shape[2] // q.shape[2], normalises, initial_state is not None, has_last_state,
        None if bounds is None else bounds.dtype, g.dim() == 4,
    )  # fmt: skip
    key = q.get_device(), q.dtype, q.shape[3], config, variant
    verdict = _verdicts.get(key)
    if verdict is None:
        if not may_wait():
            return config
        verdict = _verdicts[key] = check_kernels(q, variant, config)
        if not verdict:
            _log.warning(
                "On device %s, Triton %s compiles kernels of %s that are wrong for %s heads of %d and %d features. "
                "PyTorch code computes them, correctly but slowly.",
                q.device, triton.__version__, "kda" if variant.has_feature_decay else "gated_delta_rule",
                q.dtype, q.shape[3], v.shape[3],
            )  # fmt: skip
    return config if verdict else None


def _draw_check(like: Tensor, variant: DeltaVariant) -> tuple[DeltaInputs, Tensor, Tensor | None]:
    """Return inputs on the CPU in the dtype of `like`, and the gradients of o and of the last state."""
    size, value_size, groups, tokens = like.shape[3], variant.value_size, variant.groups, 2 * CHUNK + 5
    generator = torch.Generator(device="cpu").manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, device="cpu")
    bounds = None
    if variant.bounds_dtype is not None:
        bounds = torch.tensor([0, CHUNK + 3, tokens], dtype=variant.bounds_dtype, device="cpu")
    shape = 1 if bounds is None else 2, groups, size, value_size
    q, k = draw(1, tokens, 1, size), draw(1, tokens, 1, size) * (1.0 if variant.normalises else size**-0.5)
    v, do = draw(1, tokens, groups, value_size), draw(1, tokens, groups, value_size)
    features = (size,) if variant.has_feature_decay else ()
    g, beta = -draw(1, tokens, groups, *features).abs(), draw(1, tokens, groups).sigmoid()
    state = draw(*shape) if variant.has_initial_state else None
    dlast = draw(*shape) if variant.has_last_state else None
    q, k, v, g, beta, state, do, dlast = (_move(x, like.dtype) for x in (q, k, v, g, beta, state, do, dlast))
    return DeltaInputs(q, k, v, g, beta, state, bounds), do, dlast


def _move(x: Tensor | None, to: torch.dtype | torch.device) -> Any:
    return None if x is None else x.to(to)


@torch.no_grad()
def check_kernels(like: Tensor, variant: DeltaVariant, config: DeltaConfig) -> bool:
    """Return whether the kernels compute what `delta_rule_chunks` computes: full chunks, a tail, and all gradients.

    An exception means a wrong kernel, but a lack of memory is raised.
    """
    options = DeltaOptions(like.shape[3] ** -0.5, variant.normalises, variant.has_last_state)
    try:
        inputs, do, dlast = _draw_check(like, variant)
        expected = *chunked_forward(inputs, options), *chunked_backward(do, dlast, inputs, options)
        inputs = DeltaInputs._make(_move(x, like.device) for x in inputs)
        do, dlast = _move(do, like.device), _move(dlast, like.device)
        outputs = launch_forward(inputs, options, config)
        needs = NeededDeltaGradients(True, True)
        gradients = launch_backward(do, dlast, inputs, options, needs, config)
        actual: tuple[Any, ...] = (*outputs, *gradients)
        pairs = [(x.float().cpu(), y.float()) for x, y in zip(actual, expected, strict=True) if y is not None]
    except torch.OutOfMemoryError:
        raise
    except Exception:
        _log.debug("The self-check of a delta rule raised on device %s.", like.device, exc_info=True)
        return False
    return all(bool((x - y).square().mean() <= MAX_ERROR**2 * y.square().mean()) for x, y in pairs)
