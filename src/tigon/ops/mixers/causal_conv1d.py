r"""Depthwise causal convolution over time, with an optional SiLU, as recurrent layers compute it before their state.

    z[t, c]  = bias[c] + sum_d w[c, W - 1 - d] * x[t - d, c],  d = 0 .. W - 1
    y        = act(z)

    dz       = dy * act'(z)
    dx[t, c] = sum_d w[c, W - 1 - d] * dz[t + d, c]
    dw[c, W - 1 - d] = sum_t dz[t, c] * x[t - d, c],  dbias = sum_t dz[t]

A term exists only if tokens t and t - d belong to one sample. Only x is saved; backward recomputes z.

Shapes: B batch, T time, C channels, W taps of the kernel, N packed samples.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.runtime import checks
from tigon.runtime.autograd import without_autocast

ConvActivation = Literal["silu", "swish"]

# The numbers of taps that the op takes.
MIN_TAPS, MAX_TAPS = 2, 8


# --- reference -----------------------------------------------------------------------------------


def _reach_reference(taps: int, length: int, cu_seqlens: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Return how many earlier tokens of its sample each token reads, [B, T], at most W - 1.

    It is -1 for all tokens if `cu_seqlens` are malformed.
    """
    if cu_seqlens is not None:
        time = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        sample = (torch.searchsorted(cu_seqlens, time, right=True) - 1).clamp(min=0)
        is_valid = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all()
        return (time - cu_seqlens[sample]).clamp(max=taps - 1).where(is_valid, -1)[None]
    assert position_ids is not None
    # A token continues the sample of its predecessor if its position is the next one.
    continues = (position_ids[:, 1:] == position_ids[:, :-1] + 1) & (position_ids[:, 1:] != 0)
    reach, is_unbroken = torch.zeros_like(position_ids), torch.ones_like(position_ids, dtype=torch.bool)
    for d in range(1, taps):
        is_unbroken = is_unbroken & F.pad(continues, (d, 0))[:, :length]
        reach = reach + is_unbroken
    return reach


@without_autocast
def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: ConvActivation | None = "silu",
    cu_seqlens: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    channels_last: bool = True,
) -> Tensor:
    """Compute `causal_conv1d` in eager torch, for tests and for devices without Triton."""
    fp32 = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels, taps = weight.shape[0], weight.shape[-1]
    rows = (x.transpose(1, 2) if channels_last else x).to(fp32)  # [B, C, T]
    weight, bias = weight.view(channels, taps).to(fp32), None if bias is None else bias.to(fp32)
    length = rows.shape[2]
    is_packed = cu_seqlens is not None or position_ids is not None
    if rows.numel() and not is_packed:
        z = F.conv1d(rows, weight[:, None], bias, padding=taps - 1, groups=channels)[..., :length]
    else:
        reach = _reach_reference(taps, length, cu_seqlens, position_ids)[:, None] if is_packed else None
        padded = F.pad(rows, (taps - 1, 0))
        z = torch.zeros_like(rows) if bias is None else bias[:, None].expand_as(rows)
        for tap in range(taps):
            term = padded[..., tap : tap + length]
            if reach is not None:
                term = term.where(reach >= taps - 1 - tap, 0.0)
            z = z + weight[:, tap, None] * term
        if cu_seqlens is not None and reach is not None:
            z = z * torch.where(reach < 0, torch.nan, 1.0).to(fp32)
    y = z if activation is None else F.silu(z)
    # The result has the dtype and the memory order of x. It is no view, because `lean` recomputes no views.
    return torch.empty_like(x).copy_(y.transpose(1, 2) if channels_last else y)


# --- public --------------------------------------------------------------------------------------


def _check_causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, position_ids: Tensor | None,
    channels_last: bool,
) -> None:  # fmt: skip
    op = "causal_conv1d"
    checks.tensor(op, x=x, weight=weight)
    checks.floating(op, x=x, weight=weight, bias=bias)
    checks.flag(op, channels_last=channels_last)
    names = "[B, T, C]" if channels_last else "[B, C, T]"
    if x.dim() != 3:
        raise ValueError(f"{op}: x must have shape {names}, got {tuple(x.shape)}")
    batch, length, channels = x.shape if channels_last else (x.shape[0], x.shape[2], x.shape[1])
    if channels == 0:
        raise ValueError(f"{op}: x must have at least one channel, got {names} = {tuple(x.shape)}")
    taps = weight.shape[-1] if weight.dim() else 0
    if tuple(weight.shape) not in ((channels, taps), (channels, 1, taps)):
        raise ValueError(
            f"{op}: weight must have shape ({channels}, W) or ({channels}, 1, W), got {tuple(weight.shape)}"
        )
    if not MIN_TAPS <= taps <= MAX_TAPS:
        raise ValueError(f"{op}: weight must have {MIN_TAPS} to {MAX_TAPS} taps W, got {taps}")
    if bias is not None:
        checks.shape(op, "bias", bias, (channels,))
    if cu_seqlens is not None and position_ids is not None:
        raise ValueError(f"{op}: cu_seqlens and position_ids must not be given together")
    if cu_seqlens is not None:
        checks.integer(op, cu_seqlens=cu_seqlens)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            raise ValueError(f"{op}: cu_seqlens must have shape (N + 1,), got {tuple(cu_seqlens.shape)}")
        if batch != 1:
            raise ValueError(f"{op}: cu_seqlens need a batch of 1, got x {tuple(x.shape)}")
    if position_ids is not None:
        checks.integer(op, position_ids=position_ids)
        if tuple(position_ids.shape) not in ((batch, length), (1, length)):
            raise ValueError(
                f"{op}: position_ids must have shape (1 or {batch}, {length}), got {tuple(position_ids.shape)}"
            )
    checks.same(op, "device", x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens, position_ids=position_ids)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: ConvActivation | None = "silu",
    cu_seqlens: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    channels_last: bool = True,
) -> Tensor:
    """Convolve each channel over time with its own taps; a token reads itself and the W - 1 tokens before it.

    `x`, `weight` and `bias` get gradients.

    Args:
        x: [B, T, C], fp32 | bf16 | fp16, any strides: views such as `wide[..., :C]` are read without a copy.
        weight: [C, W] or [C, 1, W], as `nn.Conv1d(groups=C)` holds it; 2 <= W <= 8. The last tap multiplies the token
            itself.
        bias: [C], or None.
        activation: "silu" (or its other name, "swish"), or None.
        cu_seqlens: [N + 1] int32 | int64, if N samples are packed into one row (B = 1): the first token of each sample,
            and T. No token reads another sample. If these numbers do not begin with 0, do not end with T or decrease,
            every result is NaN on every device, because reading them would wait for the GPU.
        position_ids: [B, T] or [1, T] int32 | int64, in place of `cu_seqlens`. A token begins a sample if its position
            is 0 or does not continue that of the token before it.
        channels_last: True for `x` of shape [B, T, C], False for [B, C, T]. If channels are dense in memory, both take
            the same time: `x.transpose(1, 2)` is not copied.

    Returns:
        The shape, the dtype and the memory order of `x`.

    Raises:
        TypeError: `x`, `weight` or `bias` is not a floating-point tensor, `cu_seqlens` or `position_ids` is not an
            integer tensor, or `channels_last` is not a bool.
        ValueError: Shapes or devices do not fit together, W is outside of [2, 8], `activation` is unknown, or both
            `cu_seqlens` and `position_ids` are given.

    Source: Gu and Dao, "Mamba", arXiv:2312.00752; Yang et al., "Gated Delta Networks", arXiv:2412.06464.

    Example:
        >>> x, weight = torch.randn(1, 7, 64), torch.randn(64, 4)
        >>> y = tigon.causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 3, 7]))
        >>> torch.allclose(y[:, 3:], tigon.causal_conv1d(x[:, 3:], weight), atol=1e-6)
        True
    """
    checks.choice("causal_conv1d", "activation", activation, ("silu", "swish", None))
    _check_causal_conv1d(x, weight, bias, cu_seqlens, position_ids, channels_last)
    return _causal_conv1d(x, weight, bias, activation is not None, cu_seqlens, position_ids, channels_last)


@recomputed_by_call
def _causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool, cu_seqlens: Tensor | None,
    position_ids: Tensor | None, channels_last: bool,
) -> Tensor:  # fmt: skip
    return causal_conv1d_reference(
        x, weight, bias, "silu" if is_silu else None, cu_seqlens, position_ids=position_ids,
        channels_last=channels_last,
    )  # fmt: skip
