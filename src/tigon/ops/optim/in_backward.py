"""Work of the optimizer that runs in backward: whole steps, which free the gradients, or the norms of the gradients."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from tigon.ops.optim.adamw import AdamW
from tigon.runtime import checks

__all__ = ["BackwardHooks", "norm_in_backward", "step_in_backward"]


class BackwardHooks:
    """The hooks of parameters that a function of this file has registered."""

    def __init__(self, handles: list[Any], on_removal: Callable[[], None]) -> None:
        self._handles, self._on_removal = handles, on_removal

    def remove(self) -> None:
        """Remove all hooks. A second call does nothing."""
        if self._handles:
            self._on_removal()
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _check(op: str, optimizer: object) -> AdamW:
    if not isinstance(optimizer, AdamW):
        raise TypeError(f"{op}: optimizer must be a tigon.AdamW, got {checks.format_value(optimizer)}")
    return optimizer


def _parameters(optimizer: AdamW) -> list[tuple[Any, dict[str, Any]]]:
    """Return the parameters that need a gradient, with their groups."""
    return [(p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def step_in_backward(optimizer: AdamW, *, gradient_accumulation_steps: int = 1) -> BackwardHooks:
    """Take the optimizer's step of each parameter in backward, when its gradient is complete, and free the gradient.

    The gradients of all parameters then never exist at once: with bf16 parameters this saves 2 bytes of each. Do not
    call `zero_grad`, and scale no loss by a `GradScaler`. `optimizer.step()` finds no gradients and does nothing, so
    training loops and schedulers may call it. Hooks of the optimizer's step do not run in backward. A learning rate
    that a scheduler sets counts from the next backward on.

    Args:
        optimizer: A `tigon.AdamW` without `max_grad_norm`: the norm of all gradients is known only after backward.
        gradient_accumulation_steps: Must be 1, because each backward pass is a step.

    Returns:
        The hooks. `remove()` ends the steps in backward.

    Raises:
        TypeError: The optimizer is no `tigon.AdamW`.
        ValueError: The optimizer has `max_grad_norm`, gradients are accumulated, or gradients exist already.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv:2306.09782.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = tigon.AdamW(model.parameters(), lr=1e-3)
        >>> hooks = tigon.step_in_backward(optimizer)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> model.weight.grad is None
        True
    """
    _check("step_in_backward", optimizer)
    if optimizer.defaults.get("max_grad_norm") is not None:
        raise ValueError(
            f"step_in_backward: step_in_backward and max_grad_norm={optimizer.defaults['max_grad_norm']} exclude each "
            "other, because the norm of all gradients is known only after backward"
        )
    if gradient_accumulation_steps != 1:
        raise ValueError(
            "step_in_backward: step_in_backward and gradient_accumulation_steps="
            f"{checks.format_value(gradient_accumulation_steps)} exclude each other, because each backward is a step"
        )
    parameters = _parameters(optimizer)
    if any(p.grad is not None for p, _ in parameters):
        raise ValueError("step_in_backward: gradients must be None before the first backward, got some that exist")
    reference = weakref.ref(optimizer)
    # Autograd runs backward in one thread for each device.
    lock = threading.Lock()

    def make_hook(group_index: int, position: int) -> Callable[[Any], None]:
        # The group of one parameter, whose options are those of its group at each step.
        view: dict[str, Any] = {}

        def take_step(p: Any) -> None:
            current = reference()
            if current is None or p.grad is None:
                return
            with lock:
                view.update(current.param_groups[group_index], params=[p])
                current.step_group(view, ("in backward", position))
            p.grad = None

        return take_step

    indices = {id(group): i for i, group in enumerate(optimizer.param_groups)}
    handles = [
        p.register_post_accumulate_grad_hook(make_hook(indices[id(group)], i))
        for i, (p, group) in enumerate(parameters)
    ]
    return BackwardHooks(handles, lambda: None)


def norm_in_backward(optimizer: AdamW) -> BackwardHooks:
    """Compute the norms of gradients for `max_grad_norm` in backward, on another stream, while backward goes on.

    The step then reads no gradient a second time. Backward is mostly bound by arithmetic, and the norms by memory, so
    that they share the GPU well. A gradient that was changed after backward, or is another tensor, is read again in the
    step. With gradient accumulation each backward computes norms, and the last ones count.

    A gradient that is part of a larger tensor, as those of DDP with `gradient_as_bucket_view=True` are, is read in the
    step, because collectives change it without a trace. FSDP2 reduces gradients before the hooks run. A change through
    `p.grad.data` is not seen.

    Args:
        optimizer: A `tigon.AdamW` with `max_grad_norm`.

    Returns:
        The hooks. After `remove()` the step computes the norm again.

    Raises:
        TypeError: The optimizer is no `tigon.AdamW`.
        ValueError: The optimizer has no `max_grad_norm`.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = tigon.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        >>> hooks = tigon.norm_in_backward(optimizer)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """
    _check("norm_in_backward", optimizer)
    if optimizer.defaults.get("max_grad_norm") is None:
        raise ValueError("norm_in_backward: the optimizer must have max_grad_norm, got None")
    # For each parameter: its gradient, the version of the gradient, and the norm.
    norms: dict[int, tuple[TensorWeakRef, int, Tensor]] = {}
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def compute_norm(p: Any) -> None:
        g = p.grad
        if g is None:
            return
        local = g.to_local() if hasattr(g, "to_local") else g
        if local is g and g.untyped_storage().nbytes() != g.nbytes:
            return
        if not local.is_cuda:
            norms[id(p)] = TensorWeakRef(g), g._version, torch.linalg.vector_norm(local.detach(), dtype=torch.float64)
            return
        if local.device not in streams:
            streams[local.device] = torch.cuda.Stream(local.device)
        stream = streams[local.device]
        stream.wait_stream(torch.cuda.current_stream(local.device))
        with torch.cuda.stream(stream), torch.no_grad():
            norm = torch.linalg.vector_norm(local, dtype=torch.float32)
        # The gradient may be freed before this stream has read it. The norm is then that of other values, but no step
        # uses it, because the gradient no longer exists.
        norms[id(p)] = TensorWeakRef(g), g._version, norm

    def known_norms(params: list[Any]) -> dict[int, Tensor]:
        """Return the norms of gradients that have not changed, by their position."""
        for device, stream in streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        known: dict[int, Tensor] = {}
        for i, p in enumerate(params):
            if id(p) not in norms:
                continue
            gradient, version, norm = norms[id(p)]
            if gradient() is p.grad and p.grad._version == version:
                if norm.is_cuda:
                    norm.record_stream(torch.cuda.current_stream(norm.device))
                known[i] = norm
        norms.clear()
        return known

    optimizer._known_norms = known_norms
    handles = [p.register_post_accumulate_grad_hook(compute_norm) for p, _ in _parameters(optimizer)]
    reference = weakref.ref(optimizer)

    def forget() -> None:
        current = reference()
        if current is not None:
            current._known_norms = None

    return BackwardHooks(handles, forget)
