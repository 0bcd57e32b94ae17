"""Use Tigon's RMSNorm and SwiGLU in Megatron-Core.

    layer_norm=tigon.integrations.megatron.TigonRMSNorm     in the submodules of a layer's specification
    tigon.integrations.megatron.enable_swiglu()             with bias_activation_fusion=True in the TransformerConfig

Written for megatron-core 0.16.1: `WrappedTorchNorm` and `bias_swiglu_impl` of `megatron.core.transformer.mlp`.
Importing this module imports nothing of Megatron-Core.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.integrations.frameworks import is_known_version
from tigon.ops.mlps.glu import swiglu
from tigon.ops.norms.rms_norm import rms_norm

__all__ = ["TigonRMSNorm", "bias_swiglu_impl", "enable_swiglu"]


class TigonRMSNorm(nn.Module):
    """An RMSNorm for the specifications of Megatron-Core, computed by `tigon.rms_norm`.

    Args:
        config: A `TransformerConfig`. With `layernorm_zero_centered_gamma`, the norm multiplies by 1 + weight. With
            `sequence_parallel`, the weight is marked, so that Megatron-Core sums its gradient over the ranks.
        hidden_size: H.
        eps: The number that is added to the mean square.
        ignored: Arguments of Megatron-Core's norms that have no meaning here.

    Shapes: the input and the output are [..., H].

    Source: `megatron.core.transformer.torch_norm.WrappedTorchNorm` of megatron-core 0.16.1.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(layernorm_zero_centered_gamma=False, sequence_parallel=False)
        >>> tigon.integrations.megatron.TigonRMSNorm(config, 8)(torch.randn(4, 2, 8)).shape
        torch.Size([4, 2, 8])
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, float(bool(config.layernorm_zero_centered_gamma))
        self.weight = nn.Parameter(torch.full((hidden_size,), 1 - self.offset))
        # Megatron-Core reads this attribute of the parameter.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., H]."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset, rounding="after_weight")


def bias_swiglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu(gate) * up [..., I] for [gate | up] = input + bias [..., 2 I]."""
    return swiglu(input if bias is None else input + bias)


def enable_swiglu() -> Callable[[], None]:
    """Let the MLPs of Megatron-Core compute SwiGLU with Tigon.

    Calls with `fp8_input_store` or `cpu_offload_input` run Megatron-Core's code. With another version of Megatron-Core,
    this function warns once and changes nothing.

    Returns:
        A function that restores Megatron-Core's function.

    Source: `megatron.core.fusions.fused_bias_swiglu.bias_swiglu_impl` of megatron-core 0.16.1.
    """
    if not is_known_version("megatron-core", "0.16.1", "tigon.integrations.megatron.enable_swiglu"):
        return lambda: None
    module: Any = importlib.import_module("megatron.core.transformer.mlp")
    original = module.bias_swiglu_impl

    @functools.wraps(original)
    def replacement(
        input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Tensor:
        if fp8_input_store or cpu_offload_input:
            return original(input, bias, fp8_input_store, cpu_offload_input)
        return bias_swiglu_impl(input, bias)

    module.bias_swiglu_impl = replacement

    def undo() -> None:
        if module.bias_swiglu_impl is replacement:
            module.bias_swiglu_impl = original

    return undo
