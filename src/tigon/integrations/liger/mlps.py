"""Liger's gated MLPs, which keep its constructors and the names of its parameters, on Tigon's ops."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon.integrations.liger.functional import liger_geglu
from tigon.ops.experts.moe_mlp import moe_mlp
from tigon.ops.mlps.glu import swiglu


def _check_silu(module: nn.Module, config: Any) -> None:
    if config.hidden_act not in ("silu", "swish"):
        name = type(module).__name__
        raise ValueError(f"{name}: config.hidden_act must be 'silu' or 'swish', got {config.hidden_act!r}")


class _ConfiguredMLP(nn.Module):
    """`down_proj(gate(gate_proj(x), up_proj(x)))` with three linear layers."""

    gate: Callable[[Tensor, Tensor], Tensor] = staticmethod(swiglu)

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.gate(self.gate_proj(x), self.up_proj(x)))
        return down


class LigerGEGLUMLP(_ConfiguredMLP):
    """`down_proj(gelu_tanh(gate_proj(x)) * up_proj(x))` on `tigon.geglu`."""

    gate = staticmethod(liger_geglu)


class LigerSwiGLUMLP(_ConfiguredMLP):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))` on `tigon.swiglu`."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        _check_silu(self, config)
        super().__init__(config, intermediate_size)


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """The gated MLP of Hunyuan. Its further arguments change nothing."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerSwiGLUMLPForMuseGlimmer(_ConfiguredMLP):
    """The gated MLP of Muse Glimmer, whose config calls the activation `hidden_activation`."""

    def __init__(self, config: Any) -> None:
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        if activation not in ("silu", "swish"):
            raise ValueError(f"{type(self).__name__}: hidden_activation must be silu or swish, got {activation!r}")
        super().__init__(config)


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """The gated MLP of Gemma 4, which may be twice as wide in the layers that share keys and values."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0)
        first_shared = getattr(config, "num_hidden_layers", 0) - shared
        is_wide = getattr(config, "use_double_wide_mlp", False) and shared > 0
        factor = 2 if is_wide and layer_idx is not None and layer_idx >= first_shared else 1
        super().__init__(config, factor * config.intermediate_size)


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """The gated MLP with a multiplier of the gate and one of the result, `config.mlp_multipliers`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if getattr(config, "mlp_bias", False):
            raise ValueError(f"{type(self).__name__}: config.mlp_bias must be False, got {config.mlp_bias!r}")
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        product = swiglu(self.gate_proj(x) * self.gate_multiplier, self.up_proj(x))
        down: Tensor = self.down_proj(product) * self.down_multiplier
        return down


class LigerPhi3SwiGLUMLP(nn.Module):
    """The gated MLP whose gate and up projections are one linear layer `gate_up_proj`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check_silu(self, config)
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(swiglu(*self.gate_up_proj(x).chunk(2, dim=-1)))
        return down


class LigerBlockSparseTop2MLP(nn.Module):
    """The gated MLP `w2(silu(w1(x)) * w3(x))`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check_silu(self, config)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.w2(swiglu(self.w1(x), self.w3(x)))
        return down


class LigerExperts(nn.Module):
    """The experts of a sparse MLP on `tigon.moe_mlp`, with `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check_silu(self, config)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self.num_experts = next(getattr(config, name) for name in names if hasattr(config, name))
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = (x.reshape(-1, x.shape[-1]) for x in (top_k_index, top_k_weights))
        y = moe_mlp(hidden_states.reshape(-1, self.hidden_dim), self.gate_up_proj, self.down_proj, *rows)
        return y.view(hidden_states.shape)


def _in_tiles(mlp: Callable[[Tensor], Tensor], x: Tensor, tiles: int | None) -> Tensor:
    """Return the MLP of x [..., L, H], tile by tile along L. Backward computes each tile again."""
    count = max(1, math.ceil(x.shape[-2] / x.shape[-1]) if tiles is None else tiles)
    parts = [checkpoint(mlp, part, use_reentrant=False) for part in x.chunk(count, -2)]
    return torch.cat([part for part in parts if part is not None], -2)


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """The gated MLP with SiLU on tiles of the sequence, each of which backward computes again."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        return _in_tiles(super().forward, x, self.num_shards)


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """The gated MLP with GELU on tiles of the sequence, each of which backward computes again."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        activation = getattr(config, "hidden_act", "gelu")
        if activation not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(f"{type(self).__name__}: hidden_act must be a GELU, got {activation!r}")
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        return _in_tiles(super().forward, x, self.num_shards)
