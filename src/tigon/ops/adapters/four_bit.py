r"""Dequantise weights of 4 bits, such as nf4 (Dettmers et al., arXiv:2305.14314), into the dtype of a product.

A byte holds two codes, the first of them in its upper half. Every block of B consecutive weights has one scale:

    w_i = table[code_i] * scale_(i // B)                                                rounded once, from fp32
    scale_j = scale_table[scale_code_j] * scale_of_scales_(j // B') + offset            with double quantisation

The products and the sum are rounded to fp32 one by one, as the kernels of bitsandbytes round them, so the weights are
the same bit by bit. Therefore the compiler must not fuse the product and the sum.

One pass reads half a byte and writes two bytes for each weight. For 218 million weights, one layer of Llama-3-8B, this
is 0.55 GB, or 0.13 ms on an H200.

Shapes: O outputs, I inputs, B weights of a block, B' scales of a block of scales.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv, device_of
from tigon.runtime.launch import launch, on_device


class QuantisedScales(NamedTuple):
    """What double quantisation replaces the scales with, except their codes."""

    table: Tensor  # [256] fp32: the values of the codes
    scales: Tensor  # [ceil(O I / (B B'))] fp32
    offset: Tensor  # [] fp32
    block: int  # B'


class FourBitWeight(NamedTuple):
    """A weight [O, I] in 4 bits."""

    packed: Tensor  # ceil(O I / 2) bytes, uint8
    table: Tensor  # [16] fp32: the values of the codes
    scales: Tensor  # [ceil(O I / B)]: the scales in fp32, or with double quantisation their codes in uint8
    block: int  # B, a power of two
    # None without double quantisation
    quantised_scales: QuantisedScales | None
    shape: torch.Size
    dtype: torch.dtype  # of the dense weight


@triton.jit(do_not_specialize=["N"])
def _dequantise_kernel(
    packed_ptr, table_ptr, scale_ptr, out_ptr,  # ceil(N / 2) bytes, [16] fp32, [ceil(N / B)], N weights
    scale_table_ptr, scale_of_scale_ptr, offset_ptr,  # [256], [ceil(N / (B B'))], [] fp32, all None without the codes
    N, BLOCK: tl.constexpr, BLOCK_OF_SCALES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the weights of `BLOCKS` blocks of `BLOCK` weights."""
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    blocks = first_block + tl.arange(0, BLOCKS)
    is_block = blocks * BLOCK < N
    if scale_table_ptr is None:
        scales = tl.load(scale_ptr + blocks, is_block, 0.0)
    else:
        codes = tl.load(scale_ptr + blocks, is_block, 0).to(tl.int32)
        scales_of_scales = tl.load(scale_of_scale_ptr + blocks // BLOCK_OF_SCALES, is_block, 0.0)
        scales = tl.load(scale_table_ptr + codes) * scales_of_scales + tl.load(offset_ptr)
    positions = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    packed = tl.load(packed_ptr + positions, positions * 2 < N, 0).to(tl.int32)
    first = tl.load(table_ptr + (packed >> 4)) * scales[:, None]
    second = tl.load(table_ptr + (packed & 15)) * scales[:, None]
    weights = tl.interleave(first, second)
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + offsets, weights.to(out_ptr.dtype.element_ty), offsets < N)


@on_device
def _write(out: Tensor, weight: FourBitWeight) -> None:
    # A program writes whole blocks. A thread reads 16 bytes and writes 64.
    weights = max(4096, weight.block)
    quantised = weight.quantised_scales
    scale_table, scales_of_scales, offset = (None, None, None) if quantised is None else quantised[:3]
    launch(
        _dequantise_kernel, cdiv(out.numel(), weights), weight.packed, weight.table, weight.scales, out,
        scale_table, scales_of_scales, offset, out.numel(), BLOCK=weight.block,
        BLOCK_OF_SCALES=1 if quantised is None else quantised.block, BLOCKS=weights // weight.block,
        num_warps=4 if device_of(out).warp_size == 32 else 2, enable_fp_fusion=False,
    )  # fmt: skip


def dequantise(weight: FourBitWeight) -> Tensor:
    """Return the dense weight [O, I], for tensors on which kernels run. All tensors are dense in memory."""
    out = weight.packed.new_empty(weight.shape, dtype=weight.dtype)
    _write(out, weight)
    return out
