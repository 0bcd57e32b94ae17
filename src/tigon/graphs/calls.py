"""The arguments of a call, for which a pair of graphs is captured, and why a call or a model has no graph."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tigon.runtime.compat.autograd import saved_tensor_hooks
from tigon.runtime.compat.modules import HOOK_TABLES, any_global_hook
from tigon.runtime.compat.operators import dispatch_modes
from tigon.runtime.stock import origin_of
from tigon.runtime.weak_cache import cached_weakly

_CONSTANTS = (bool, int, float, str, type(None))

# Arguments whose value differs from batch to batch, so a number becomes a tensor of the graph.
_COUNTS = ("num_items_in_batch",)


class NotCaptured(Exception):
    """A call runs eagerly. The message is the reason, as a clause."""


class Call(NamedTuple):
    """The arguments of a call: tensors and counts, which change from call to call, and constants."""

    inputs: dict[str, Tensor | float]
    constants: dict[str, Any]

    def signature(self) -> tuple:
        """Return the key of the pair of graphs that computes this call."""
        described = tuple(
            (name, x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else (name, type(x))
            for name, x in self.inputs.items()
        )
        constants = tuple((name, type(x), x) for name, x in self.constants.items())
        return described, constants, _settings_of_torch()

    def differentiated(self) -> list[Tensor]:
        return [x for x in self.inputs.values() if isinstance(x, Tensor) and x.requires_grad]

    def describe(self) -> str:
        """Return the signature as a text for people."""
        shapes = {n: "x".join(map(str, x.shape)) for n, x in self.inputs.items() if isinstance(x, Tensor) and x.dim()}
        return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _settings_of_torch() -> tuple:
    """Return the settings of torch that change what a call launches."""
    is_autocast = torch.is_autocast_enabled("cuda")
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    # From 2.9 on, torch refuses the older question about the precision of products after a newer setting.
    precision = getattr(cuda.matmul, "fp32_precision", None)
    precision = torch.get_float32_matmul_precision() if precision is None else precision
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return (
        is_autocast and torch.get_autocast_dtype("cuda"), torch.are_deterministic_algorithms_enabled(), precision,
        torch.get_default_dtype(), *attention, cuda.cudnn_sdp_enabled(), cudnn.deterministic, cudnn.benchmark,
    )  # fmt: skip


def divide_arguments(arguments: dict[str, Any], device: torch.device) -> Call:
    """Divide the arguments of a call, by name, into inputs and constants."""
    inputs: dict[str, Tensor | float] = {}
    constants: dict[str, Any] = {}
    for name, x in arguments.items():
        if type(x) in (Tensor, torch.nn.Parameter):
            if x.device != device:
                raise NotCaptured(f"{name} is on {x.device}, and the model on {device}")
            inputs[name] = x
        elif name in _COUNTS and type(x) in (int, float):
            inputs[name] = x
        elif type(x) in _CONSTANTS:
            constants[name] = x
        else:
            raise NotCaptured(f"{name} is a {type(x).__name__}")
    return Call(inputs, constants)


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
