"""The modules of `liger_kernel.megatron`, with the constructors of Megatron-Core's, on Tigon's ops.

Importing this module imports nothing of Megatron-Core. `layers.py` has the loss.

Shapes: S tokens of B sequences, H hidden size, I intermediate size.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.mlps.glu import swiglu
from tigon.ops.norms.rms_norm import rms_norm

# Programs configure the logger of this name for Liger's messages.
swiglu_logger = logging.getLogger("liger_kernel.megatron.swiglu")


class LigerMegatronRMSNorm(nn.Module):
    """`tigon.rms_norm` with the constructor of Megatron-Core's norms. `persist_layer_norm` has no effect."""

    def __init__(
        self, config: Any, hidden_size: Any, eps: float = 1e-5, persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False, normalization: str = "RMSNorm",
    ) -> None:  # fmt: skip
        super().__init__()
        kind = getattr(config, "normalization", "RMSNorm")
        if kind != "RMSNorm":
            raise ValueError(f"LigerMegatronRMSNorm: config.normalization must be 'RMSNorm', got {kind!r}")
        self.config, self.eps = config, eps
        self.hidden_size = torch.Size([hidden_size] if isinstance(hidden_size, int) else hidden_size)
        self.zero_centered_gamma = zero_centered_gamma or bool(getattr(config, "layernorm_zero_centered_gamma", False))
        self._offset = float(self.zero_centered_gamma)
        self.weight = nn.Parameter(torch.empty(self.hidden_size))
        self.reset_parameters()
        # Megatron-Core sums the gradient of a parameter with this mark over the ranks.
        is_sharded = bool(getattr(config, "sequence_parallel", False))
        self.weight.sequence_parallel = is_sharded  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Set the factor of each feature to one."""
        nn.init.constant_(self.weight, 1.0 - self._offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., H] in its dtype."""
        return rms_norm(x, self.weight, self.eps, offset=self._offset, rounding="before_weight").to(x.dtype)

    def extra_repr(self) -> str:
        """Return the sizes that `print` shows."""
        return f"hidden_size={tuple(self.hidden_size)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LigerMegatronSwiGLU(nn.Module):
    """silu(gate) * up of [gate | up], by `tigon.swiglu`. `in_place` has no effect.

    Args:
        fallback_impl: Computes the calls with a bias, with an FP8 copy of the input or with its offload to the CPU.
            Without it, such a call is refused.
        in_place: Ignored. Backward never writes to the input.
    """

    def __init__(self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place
        self._logged: set[str] = set()

    def forward(
        self, input: Tensor, bias: Tensor | None = None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Tensor:
        """Return [T, I] for an input [T, 2 I], or [S, B, I] for [S, B, 2 I]."""
        options = {"bias": bias is not None, "fp8_input_store": fp8_input_store, "cpu_offload_input": cpu_offload_input}
        if any(options.values()):
            given = ", ".join(name for name, is_on in options.items() if is_on)
            if self.fallback_impl is None:
                raise RuntimeError(
                    f"LigerMegatronSwiGLU: a call with {given} needs fallback_impl, Megatron-Core's bias_swiglu_impl"
                )
            if given not in self._logged:
                self._logged.add(given)
                swiglu_logger.info("LigerMegatronSwiGLU is falling back to fallback_impl for calls with %s.", given)
            return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
        if input.dim() not in (2, 3):
            raise ValueError(f"LigerMegatronSwiGLU: input must be 2D or 3D, got shape {tuple(input.shape)}")
        if input.shape[-1] % 2:
            raise ValueError(f"LigerMegatronSwiGLU: the last dimension must be even, got {input.shape[-1]}")
        return swiglu(input)
