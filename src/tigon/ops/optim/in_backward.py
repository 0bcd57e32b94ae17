"""Steps of the optimizer that run in backward and free the gradients."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tigon.ops.optim.adamw import AdamW
from tigon.runtime import checks
from tigon.runtime.optimizer_steps import count_step_in_backward


class BackwardHooks:
    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove all hooks. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _has_local_gradients(parameters: list[tuple[Any, dict[str, Any]]]) -> bool:
    """Return whether each of several ranks computes its own gradients of a parameter, as far as can be known."""
    is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return is_distributed and not all(hasattr(p, "placements") for p, _ in parameters)


def _parameters(optimizer: AdamW) -> list[tuple[Any, dict[str, Any]]]:
    return [(p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def step_in_backward(
    optimizer: AdamW, *, gradient_accumulation_steps: int = 1, allow_local_gradients: bool = False
) -> BackwardHooks:
    """Take the optimizer's step of each parameter in backward, when its gradient is complete, and free the gradient.

    The gradients of all parameters then never exist at once: with bf16 parameters this saves 2 bytes of each. Do not
    call `zero_grad`, and scale no loss by a `GradScaler`. `optimizer.step()` finds no gradients and does nothing, so
    training loops and schedulers may call it. Hooks of the optimizer's step do not run in backward. A learning rate
    that a scheduler sets counts from the next backward on.

    Args:
        optimizer: A `tigon.AdamW` without `max_grad_norm`: the norm of all gradients is known only after backward.
        gradient_accumulation_steps: Must be 1, because each backward pass is a step.
        allow_local_gradients: With several ranks, the parameters must be DTensors, as those of FSDP2, whose gradients
            are reduced before the step. DDP reduces gradients after it, so the ranks would diverge. True allows other
            parameters, for ranks that train models of their own.

    Returns:
        The hooks. `remove()` ends the steps in backward.

    Raises:
        TypeError: The optimizer is no `tigon.AdamW`.
        ValueError: The optimizer has `max_grad_norm`, gradients are accumulated, gradients exist already, or the ranks
            of a process group have parameters that are no DTensors.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv:2306.09782.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = tigon.AdamW(model.parameters(), lr=1e-3)
        >>> hooks = tigon.step_in_backward(optimizer)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> model.weight.grad is None
        True
    """
    if not isinstance(optimizer, AdamW):
        raise TypeError(f"step_in_backward: optimizer must be a tigon.AdamW, got {checks.format_value(optimizer)}")
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
    if not allow_local_gradients and _has_local_gradients(parameters):
        raise ValueError(
            f"step_in_backward: with {dist.get_world_size()} ranks all parameters must be DTensors, as those of FSDP2, "
            "because DDP and FSDP1 reduce gradients after the step; allow_local_gradients=True allows others"
        )
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
            with lock, torch.no_grad():
                view.update(current.param_groups[group_index], params=[p])
                current.step_group(view, ("in backward", position))
                count_step_in_backward()
            p.grad = None

        return take_step

    indices = {id(group): i for i, group in enumerate(optimizer.param_groups)}
    handles = [
        p.register_post_accumulate_grad_hook(make_hook(indices[id(group)], i))
        for i, (p, group) in enumerate(parameters)
    ]
    return BackwardHooks(handles)
