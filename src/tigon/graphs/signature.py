"""The signature of a call: everything about its arguments and about torch that a pair of graphs is captured for."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        """Return the inputs that need a gradient."""
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
