"""Checks that refuse a capture: of a model, of the state of torch, and of the arguments of a call."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tigon.graphs.signature import NotCaptured
from tigon.runtime.compat.autograd import saved_tensor_hooks
from tigon.runtime.compat.modules import HOOK_TABLES, any_global_hook
from tigon.runtime.compat.operators import dispatch_modes
from tigon.runtime.stock import origin_of
from tigon.runtime.weak_cache import cached_weakly


@cached_weakly
def parameters_of(forward: Callable) -> dict[str, Any]:
    """Return the parameters of a forward that have a position and a name, with their defaults."""
    _, *parameters = inspect.signature(forward).parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        return {}
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def bind(forward: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by name, without those that are None by default."""
    defaults = parameters_of(forward)
    positional = [*defaults][: len(args)]
    if len(positional) < len(args) or not kwargs.keys().isdisjoint(positional):
        raise NotCaptured("its arguments do not fit the parameters of the forward")
    arguments = {**dict(zip(positional, args, strict=True)), **kwargs}
    return {name: x for name, x in arguments.items() if x is not None or defaults.get(name, 0) is not None}


def check_torch() -> None:
    """Raise `NotCaptured` if torch calls other code during a call, which a replay would not do."""
    if any_global_hook():
        raise NotCaptured("torch has global hooks on modules")
    if dispatch_modes():
        raise NotCaptured("a dispatch mode of torch sees each operator")
    if (hooks := saved_tensor_hooks(True)) is not None and not origin_of(hooks[0]).startswith("tigon."):
        raise NotCaptured(f"hooks of {origin_of(hooks[0])} receive the tensors that are saved for backward")


def check_model(model: nn.Module) -> None:
    """Raise `NotCaptured` if the calls of a model cannot be captured, whatever their arguments are."""
    kinds = {(p.device, type(p), p.requires_grad) for p in model.parameters()}
    devices = {device for device, _, _ in kinds}
    if len(devices) != 1:
        raise NotCaptured(f"its parameters are on {len(devices)} devices")
    if not is_supported(device := devices.pop()):
        raise NotCaptured(f"the model is on {device}, where no CUDA graph is captured")
    if any(hasattr(kind, "__tensor_flatten__") or (kind is not nn.Parameter and trains) for _, kind, trains in kinds):
        raise NotCaptured("some parameters are not plain tensors")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise NotCaptured("the process group has several ranks")
    hooks = (hook for module in model.modules() for table in HOOK_TABLES for hook in getattr(module, table).values())
    for origin in map(origin_of, hooks):
        # Hooks of transformers and of Tigon only look at a call.
        if not origin.startswith(("tigon.", "transformers.")):
            raise NotCaptured(f"a hook of {origin} runs Python code in each call")


def is_supported(device: torch.device) -> bool:
    """Return whether graphs are captured on a device."""
    return device.type == "cuda"
