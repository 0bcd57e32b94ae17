r"""The gradients of gate and up in FP8, computed from da, gate and up without storing them in another format.

    dgate = da * up * act'(gate),  dup = da * act(gate),  a = act(gate) * up

dX of a gated MLP needs [dgate | dup] by rows, the gradients of its weights need it transposed, and that of the last
weight needs a, transposed. Two passes compute the three from the same inputs: the first one finds their largest
absolute values, and the second one writes the copies that are needed. Both compute dgate, dup and a again, because that
takes no time while the memory is busy. Rounding them to bf16 in between would cost 6 more bytes for each value.

For N values in bf16 the passes move 6 N + 6 N bytes read and 5 N written: 17 N, or 0.46 ms for 8192 x 14336 (H200, 4.3
TB/s), where the pass of a bf16 MLP moves 12 N. If dW is a product in bf16, the first pass also writes dgate, dup and a
in bf16, and the second one reads the first two.

Shapes: T tokens, I intermediate.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.fp8.formats import MULTIPLE, Factor, pad, runs_fp8_kernels
from tigon.ops.fp8.quantisation import Copies, Layout, activate, empty_copies, quantise_reference
from tigon.ops.fp8.quantisation_kernels import Fp8TileConfig, scaling, store_transposed, tensorwise_factor
from tigon.ops.mlps.activation_kernels import activation_and_slope
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv, device_of
from tigon.runtime.launch import launch, launcher
from tigon.runtime.maxima import magnitude_bits, raise_to, raise_to_largest, zero_maxima


class GatedNeeds(NamedTuple):
    """The copies of [dgate | dup] and of a that are needed, and how scales are shared."""

    is_rowwise: bool
    rows: bool
    transposed: bool
    a_transposed: bool

    @property
    def layout(self) -> Layout:
        return Layout(self.is_rowwise, self.rows, self.transposed, True)

    @property
    def layout_of_a(self) -> Layout:
        return Layout(self.is_rowwise, False, self.a_transposed)


class _GatedCopies(NamedTuple):
    gradients: Copies  # [T, 2 I] and [2 I, padded T]
    a: Copies  # [I, padded T]


def gated_gradients_reference(da: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return dgate, dup and a [T, I] in fp32 (or fp64)."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    da, gate, up = da.to(wide), gate.to(wide), up.to(wide)
    a, dact = activate(gate, up, kind), da * up
    if kind == "silu":
        return torch.ops.aten.silu_backward(dact, gate), da * F.silu(gate), a
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    dgate = torch.ops.aten.gelu_backward(dact, gate, approximate=approximate)
    return dgate, da * F.gelu(gate, approximate=approximate), a


@triton.jit
def _gradients(da_ptr, gate_ptr, up_ptr, offsets, mask, KIND: tl.constexpr):
    """Return dgate, dup and a in fp32."""
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    act, slope = activation_and_slope(gate, KIND)
    da = tl.load(da_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return da * up * slope, da * act, act * up


@triton.jit(do_not_specialize=["m", "column_blocks"])
def gradient_amax_kernel(
    da_ptr, gate_ptr, up_ptr,  # [T, I]
    tensor_ptr, rows_ptr, columns_ptr,  # int32: [1], [T] and [2 I] of [dgate | dup], or None
    a_tensor_ptr, a_columns_ptr,  # int32: [1] and [I] of a, or None
    m, k, column_blocks,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Raise the amax of [dgate | dup] and of a to the values of a tile."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % column_blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    row_mask, col_mask = rows < m, cols < k
    mask = row_mask[:, None] & col_mask[None, :]
    dgate, dup, a = _gradients(da_ptr, gate_ptr, up_ptr, rows[:, None] * k + cols[None, :], mask, KIND)
    dgate_bits, dup_bits = magnitude_bits(dgate), magnitude_bits(dup)
    if tensor_ptr is not None:
        raise_to_largest(tensor_ptr, tl.maximum(dgate_bits, dup_bits))
    if rows_ptr is not None:
        raise_to(rows_ptr + rows, tl.max(tl.maximum(dgate_bits, dup_bits), 1), row_mask)
    if columns_ptr is not None:
        raise_to(columns_ptr + cols, tl.max(dgate_bits, 0), col_mask)
        raise_to(columns_ptr + k + cols, tl.max(dup_bits, 0), col_mask)
    if a_tensor_ptr is not None:
        raise_to_largest(a_tensor_ptr, magnitude_bits(a))
    if a_columns_ptr is not None:
        raise_to(a_columns_ptr + cols, tl.max(magnitude_bits(a), 0), col_mask)


@triton.jit
def _column_factors(amax_ptr, scale_ptr, cols, col_mask, is_first_row, pid, TENSORWISE: tl.constexpr):
    """Return the factors of columns, [1, BLOCK_K], and store their scales once."""
    if TENSORWISE:
        factors = tl.zeros_like(cols).to(tl.float32) + tensorwise_factor(amax_ptr, scale_ptr, pid == 0)
    else:
        factors, scales = scaling(tl.load(amax_ptr + cols, mask=col_mask, other=0))
        tl.store(scale_ptr + cols, scales, mask=col_mask & is_first_row)
    return factors[None, :]


@triton.jit(do_not_specialize=["m", "padded_groups", "column_blocks"])
def gradient_write_kernel(
    da_ptr, gate_ptr, up_ptr,  # [T, I]
    row_amax_ptr, column_amax_ptr, a_amax_ptr,  # int32: [T], [2 I] and [I], or with TENSORWISE [1]
    row_ptr, row_scale_ptr,  # [T, 2 I] fp8 and [T] (TENSORWISE: [1]) fp32, or None
    transposed_ptr, column_scale_ptr,  # [2 I, padded T] fp8 and [2 I] (TENSORWISE: [1]) fp32, or None
    a_ptr, a_scale_ptr,  # [I, padded T] fp8 and [I] (TENSORWISE: [1]) fp32, or None
    stride_transposed, m, padded_groups, k, column_blocks,
    KIND: tl.constexpr, TENSORWISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the FP8 copies of a tile of dgate, dup and a, and the scales."""
    pid = tl.program_id(0)
    row_block, column_block = pid // column_blocks, pid % column_blocks
    rows = row_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = column_block * BLOCK_K + tl.arange(0, BLOCK_K)
    row_mask, col_mask = rows < m, cols < k
    mask = row_mask[:, None] & col_mask[None, :]
    dgate, dup, a = _gradients(da_ptr, gate_ptr, up_ptr, rows[:, None] * k + cols[None, :], mask, KIND)
    is_first_row = row_block == 0
    if row_ptr is not None:
        if TENSORWISE:
            factors = tensorwise_factor(row_amax_ptr, row_scale_ptr, pid == 0)
        else:
            row_factors, scales = scaling(tl.load(row_amax_ptr + rows, mask=row_mask, other=0))
            tl.store(row_scale_ptr + rows, scales, mask=row_mask & (column_block == 0))
            factors = row_factors[:, None]
        offsets = rows[:, None] * (2 * k) + cols[None, :]
        tl.store(row_ptr + offsets, (dgate * factors).to(row_ptr.dtype.element_ty), mask=mask)
        tl.store(row_ptr + offsets + k, (dup * factors).to(row_ptr.dtype.element_ty), mask=mask)
    if transposed_ptr is not None:
        gate_factors = _column_factors(column_amax_ptr, column_scale_ptr, cols, col_mask, is_first_row, pid, TENSORWISE)
        store_transposed(transposed_ptr, stride_transposed, rows, cols, padded_groups, k, dgate * gate_factors)
        # The rows of dup follow those of dgate. A single scale is that of both.
        if TENSORWISE:
            up_factors = gate_factors
        else:
            up_factors = _column_factors(
                column_amax_ptr + k, column_scale_ptr + k, cols, col_mask, is_first_row, pid, TENSORWISE
            )
        up_ptr_of_rows = transposed_ptr + k.to(tl.int64) * stride_transposed
        store_transposed(up_ptr_of_rows, stride_transposed, rows, cols, padded_groups, k, dup * up_factors)
    if a_ptr is not None:
        a_factors = _column_factors(a_amax_ptr, a_scale_ptr, cols, col_mask, is_first_row, pid, TENSORWISE)
        store_transposed(a_ptr, stride_transposed, rows, cols, padded_groups, k, a * a_factors)


def _empty_gated(gate: Tensor, needs: GatedNeeds) -> _GatedCopies:
    t, i = gate.shape
    return _GatedCopies(empty_copies(gate, t, 2 * i, needs.layout), empty_copies(gate, t, i, needs.layout_of_a))


@launcher(fake=_empty_gated)
def quantise_gradients(gate: Tensor, up: Tensor, da: Tensor, kind: str, needs: GatedNeeds) -> _GatedCopies:
    """Return the FP8 copies of [dgate | dup] and of a, for contiguous tensors [T, I]."""
    results, (t, i), device = _empty_gated(gate, needs), gate.shape, device_of(gate)
    maxima = zero_maxima(gate, t, 2 * i, needs.layout.maxima)
    a_maxima = zero_maxima(gate, t, i, needs.layout_of_a.maxima)
    config = Fp8TileConfig.choose((3, False), device)
    column_blocks = cdiv(i, config.block_k)
    launch(
        gradient_amax_kernel, cdiv(t, config.block_m) * column_blocks, da, gate, up, *maxima, a_maxima.tensor,
        a_maxima.columns, t, i, column_blocks,
        KIND=kind, BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip
    config = Fp8TileConfig.choose((3, True), device)
    column_blocks = cdiv(i, config.block_k)
    programs = cdiv(t, config.block_m) * column_blocks
    is_tensorwise = not needs.is_rowwise
    row_amax, column_amax, a_amax = (
        (maxima.tensor, maxima.tensor, a_maxima.tensor) if is_tensorwise
        else (maxima.rows, maxima.columns, a_maxima.columns)
    )  # fmt: skip
    launch(
        gradient_write_kernel, programs, da, gate, up, row_amax, column_amax, a_amax,
        *results.gradients, results.a.transposed, results.a.column_scale,
        pad(t), t, pad(t) // MULTIPLE, i, column_blocks,
        KIND=kind, TENSORWISE=is_tensorwise, BLOCK_M=config.block_m, BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )  # fmt: skip
    return results


def gated_gradients(
    da: Tensor, gate: Tensor, up: Tensor, kind: str, needs: GatedNeeds
) -> tuple[Factor | None, Factor | None, Factor | None]:
    """Return the FP8 copies of [dgate | dup] by rows and transposed, and that of a, for contiguous tensors [T, I]. A
    copy that is not needed is None."""
    if runs_fp8_kernels(gate):
        gradients, of_a = quantise_gradients(gate, up, da, kind, needs)
    else:
        dgate, dup, a = gated_gradients_reference(da, gate, up, kind)
        gradients, of_a = (
            quantise_reference(torch.cat((dgate, dup), 1), needs.layout),
            quantise_reference(a, needs.layout_of_a),
        )
    return *gradients.factors(needs.layout), of_a.factors(needs.layout_of_a).transposed
