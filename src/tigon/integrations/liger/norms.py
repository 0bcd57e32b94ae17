"""The RMSNorms of Liger for particular models, its modulated RMSNorm and its group norm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.integrations.liger.layers import LigerRMSNorm

# --- RMSNorm whose defaults are those of a model ----------------------------------------------------


class LigerRMSNormForQwen3Next(LigerRMSNorm):
    """The norm of Qwen3-Next, whose weight is an offset from one."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = False, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNormForQwen3Next):
    """The norm of Gemma 2, whose weight is an offset from one."""


class LigerRMSNormForGemma(LigerRMSNorm):
    """The norm of Gemma, whose weight is an offset from one."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = True, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma3(LigerRMSNorm):
    """The norm of Gemma 3, whose weight is an offset from one."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma", init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """The norm of Gemma 4, which may have no weight."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma", init_fn: str = "ones",
        in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """The norm of OLMo 2."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """The norm of GLM-4."""


class LigerRMSNormForMuseGlimmer(LigerRMSNorm):
    """The norm of Muse Glimmer, which may have no weight."""

    def __init__(
        self, dim: int | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma",
        init_fn: str = "ones", in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        if dim is None and with_scale:
            raise ValueError(f"{type(self).__name__}: dim must be the number of features if with_scale is True")
        super().__init__(dim or 1, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForQwen3Next):
    """The norm of Muse Glimmer whose weight is an offset from one."""


# --- further norms ---------------------------------------------------------------------------------


class LigerModulatedRMSNorm(LigerRMSNorm):
    """(1 + scale) * norm(x) + shift, as in diffusion transformers (Peebles and Xie, arXiv:2212.09748)."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=elementwise_affine
        )

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the modulated norm. `scale` and `shift` are [H], one row for each sequence [B, H], or [..., H]."""
        return modulate(super().forward(hidden_states), scale, shift)


def modulate(y: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Return (1 + scale) * y + shift in the dtype of y, which may be narrower than that of scale and shift."""
    z = y * (1 + _broadcast("scale", scale, y))
    return (z if shift is None else z + _broadcast("shift", shift, y)).to(y.dtype)


def _broadcast(name: str, value: Tensor, like: Tensor) -> Tensor:
    """Return `value` in a shape that broadcasts to `like`: each of its rows serves as many adjacent rows as needed."""
    rows, width = like.numel() // like.shape[-1], like.shape[-1]
    count = value.numel() // width
    if value.shape[-1] != width or count == 0 or rows % count:
        shapes = f"{tuple(value.shape)} and {tuple(like.shape)}"
        raise ValueError(f"LigerModulatedRMSNorm: {name} must have a divisor of the rows of x, got {shapes}")
    return value.reshape(count, 1, width).expand(count, rows // count, width).reshape(like.shape)


class LigerGroupNorm(nn.Module):
    """The group norm of torch. Without `bias`, the bias starts at zero and is trained all the same."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise ValueError(f"LigerGroupNorm: init_fn must be 'ones' or 'zeros', got {init_fn!r}")
        if num_channels % num_groups:
            raise ValueError(f"LigerGroupNorm: num_channels must be divisible by {num_groups}, got {num_channels}")
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight = nn.Parameter(torch.ones(num_channels) if init_fn == "ones" else torch.zeros(num_channels))
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the norm over each group of channels."""
        return F.group_norm(hidden_states, self.num_groups, self.weight, self.bias, self.variance_epsilon)
