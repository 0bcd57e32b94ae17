r"""Depthwise causal convolution over time, with an optional SiLU, as recurrent layers compute it before their state.

    z[t, c]  = bias[c] + sum_d w[c, W - 1 - d] * x[t - d, c],  d = 0 .. W - 1
    y        = act(z)

    dz       = dy * act'(z)
    dx[t, c] = sum_d w[c, W - 1 - d] * dz[t + d, c]
    dw[c, W - 1 - d] = sum_t dz[t, c] * x[t - d, c],  dbias = sum_t dz[t]

A term exists only if tokens t and t - d belong to one sample. Only x is saved; backward recomputes z.

Shapes: B batch, T time, C channels, W taps of the kernel, N packed samples.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.ops.mixers.causal_conv1d_kernels import (
    ConvOptions,
    NeededConvGradients,
    conv_backward,
    conv_forward,
)
from tigon.ops.mixers.reach import INVALID, reach_reference, sample_reach
from tigon.runtime import checks
from tigon.runtime.autograd import without_autocast
from tigon.runtime.device import runs_kernels
from tigon.runtime.op import Node

ConvActivation = Literal["silu", "swish"]

# The numbers of taps that the op takes.
MIN_TAPS, MAX_TAPS = 2, 8


# --- reference -----------------------------------------------------------------------------------


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
        reach = reach_reference(taps, length, cu_seqlens, position_ids)[:, None] if is_packed else None
        padded = F.pad(rows, (taps - 1, 0))
        z = torch.zeros_like(rows) if bias is None else bias[:, None].expand_as(rows)
        for tap in range(taps):
            term = padded[..., tap : tap + length]
            if reach is not None:
                term = term.where(reach >= taps - 1 - tap, 0.0)
            z = z + weight[:, tap, None] * term
        if cu_seqlens is not None and reach is not None:
            z = z * torch.where(reach == INVALID, torch.nan, 1.0).to(fp32)
    y = z if activation is None else F.silu(z)
    # The result has the dtype and the memory order of x. It is no view, because `lean` recomputes no views.
    return torch.empty_like(x).copy_(y.transpose(1, 2) if channels_last else y)


# --- autograd ------------------------------------------------------------------------------------


class _CausalConv1d(Node):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reach: Tensor | None, options: ConvOptions
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, reach)
        ctx.options = options
        return conv_forward(x, weight, bias, reach, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, reach = ctx.saved_tensors
        needs = NeededConvGradients(*ctx.needs_input_grad[:3])
        return conv_backward(dy, x, weight, bias, reach, ctx.options, needs)


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
    if not runs_kernels(x, weight, bias):
        activation: ConvActivation | None = "silu" if is_silu else None
        return causal_conv1d_reference(
            x, weight, bias, activation, cu_seqlens, position_ids=position_ids, channels_last=channels_last
        )
    weight = weight.view(weight.shape[0], weight.shape[-1])
    source, reach = cu_seqlens if position_ids is None else position_ids, None
    if source is not None:
        length = x.shape[1 if channels_last else 2]
        reach = sample_reach(source, position_ids is None, length, weight.shape[1])
    return _CausalConv1d.apply(x, weight, bias, reach, ConvOptions(is_silu, channels_last))
