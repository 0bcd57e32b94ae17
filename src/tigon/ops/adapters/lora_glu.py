r"""The activation of a gated MLP whose projections have low-rank adapters, forward and backward, in one pass each.

    gate' = gate + s_g h_g B_g^T,  up' = up + s_u h_u B_u^T,  a = act(gate') * up',  h_d = a A_d^T

    da'   = da + dh_d A_d                                   (da from the base product of down, dh_d scaled by s_d)
    dgate = da' * up' * act'(gate'),  dup = da' * act(gate')
    dB_g  = s_g dgate^T h_g,  dB_u = s_u dup^T h_u,  dA_d = dh_d^T a

gate and up are the base products, without their adapters. Adding the low-rank products here, in registers, costs no
traffic; as products of their own they would read and write [T, I] three times in forward and again in backward.
The sums over tokens (dB, dA) and over features (h_d) need parts of the other direction: the forward kernel gives a
program a block of tokens and a part of the features, the backward kernel a block of features and a part of the tokens.

Shapes: T tokens, I intermediate features, r rank of one adapter (at most 64).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.ops.adapters.low_rank import TERMS, dot_of_terms, rank_block, split_evenly
from tigon.ops.mlps.glu import activation_and_slope
from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import launch, on_device
from tigon.runtime.tuning import LaunchConfig

__all__ = ["LoRAGLUConfig", "lora_glu_backward", "lora_glu_forward"]


# --- configuration -------------------------------------------------------------------------------


class LoRAGLUProblem(NamedTuple):
    """What the launch parameters depend on."""

    rank: int  # the largest one
    itemsize: int
    backward: bool


@dataclass(frozen=True)
class LoRAGLUConfig(LaunchConfig):
    """Launch parameters: tiles of `block_t` tokens and `block_i` features."""

    block_t: int
    block_i: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int

    @staticmethod
    def heuristic(problem: LoRAGLUProblem, device: Device) -> "LoRAGLUConfig":
        stages = 2 if device.async_copy else 1
        if problem.backward:
            # Larger tiles do not fit into the registers.
            return LoRAGLUConfig(32, 64, num_warps=8, num_stages=stages, programs_per_multiprocessor=4)
        return LoRAGLUConfig(64, 32, num_warps=4, num_stages=stages, programs_per_multiprocessor=8)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _with_adapter(base, h, b, factor, B_TERMS: tl.constexpr, ORDER: tl.constexpr):
    """base [T, I] + factor * h [T, r] b [I, r]^T, in fp32."""
    product = dot_of_terms(h, tl.trans(b), tl.zeros(base.shape, tl.float32), 3, B_TERMS, ORDER)
    return base + factor * product


@triton.jit(do_not_specialize=["T", "part", "parts"])
def _forward_kernel(
    gate_ptr, up_ptr, a_ptr,  # [T, I] each
    gate_h_ptr, up_h_ptr, gate_b_ptr, up_b_ptr,  # [T, r] fp32 or None, [I, r] or None
    down_a_ptr, down_h_ptr,  # [r, I] or None, [parts, T, r] fp32
    T, N, part, parts, stride_gate_h, stride_up_h, gate_factor, up_factor,
    GATE_R: tl.constexpr, UP_R: tl.constexpr, DOWN_R: tl.constexpr, KIND: tl.constexpr, TERMS_: tl.constexpr,
    ADAPTER_TERMS: tl.constexpr, ORDER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write a for a block of tokens and a part of the features, and the part's h_d."""
    pid = tl.program_id(0)
    chunk = pid % parts
    rows = ((pid // parts).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    ranks = tl.arange(0, BLOCK_R)[None, :]
    steps = tl.arange(0, BLOCK_I)
    if gate_h_ptr is not None:
        gate_h = tl.load(gate_h_ptr + rows * stride_gate_h + ranks, (rows < T) & (ranks < GATE_R), 0.0)
    if up_h_ptr is not None:
        up_h = tl.load(up_h_ptr + rows * stride_up_h + ranks, (rows < T) & (ranks < UP_R), 0.0)
    down_h = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    # A part is a multiple of `BLOCK_I`. Triton vectorises the loads only if it knows that.
    first = tl.multiple_of(chunk * part, BLOCK_I)
    for start in tl.range(first, tl.minimum(first + part, N), BLOCK_I, num_stages=STAGES):
        cols = start + steps
        inside = (rows < T) & (cols[None, :] < N)
        offsets = rows * N + cols[None, :]
        gate = tl.load(gate_ptr + offsets, inside, 0.0).to(tl.float32)
        up = tl.load(up_ptr + offsets, inside, 0.0).to(tl.float32)
        if gate_h_ptr is not None:
            b_mask = (cols[:, None] < N) & (ranks < GATE_R)
            b = tl.load(gate_b_ptr + cols[:, None].to(tl.int64) * GATE_R + ranks, b_mask, 0.0)
            gate = _with_adapter(gate, gate_h, b, gate_factor, ADAPTER_TERMS, ORDER)
        if up_h_ptr is not None:
            b_mask = (cols[:, None] < N) & (ranks < UP_R)
            b = tl.load(up_b_ptr + cols[:, None].to(tl.int64) * UP_R + ranks, b_mask, 0.0)
            up = _with_adapter(up, up_h, b, up_factor, ADAPTER_TERMS, ORDER)
        act, _ = activation_and_slope(gate, KIND)
        a = (act * up).to(a_ptr.dtype.element_ty)
        tl.store(a_ptr + offsets, a, inside)
        if down_a_ptr is not None:
            down_ranks = tl.arange(0, BLOCK_R)[:, None]
            a_mask = (down_ranks < DOWN_R) & (cols[None, :] < N)
            down_a = tl.load(down_a_ptr + down_ranks.to(tl.int64) * N + cols[None, :], a_mask, 0.0)
            a = tl.where(inside, a, 0.0)
            down_h = dot_of_terms(a, tl.trans(down_a), down_h, TERMS_, ADAPTER_TERMS, 3)
    if down_a_ptr is not None:
        out = down_h_ptr + (chunk.to(tl.int64) * T + rows) * DOWN_R + ranks
        tl.store(out, down_h, (rows < T) & (ranks < DOWN_R))


@triton.jit(do_not_specialize=["T", "part", "parts"])
def _backward_kernel(
    da_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,  # [T, I] each
    gate_h_ptr, up_h_ptr, gate_b_ptr, up_b_ptr,  # [T, r] fp32 or None, [I, r] or None
    down_dh_ptr, down_a_ptr,  # [T, r] fp32 or None, [r, I] or None
    gate_db_ptr, up_db_ptr, down_da_ptr,  # [parts, I, r] fp32 or None, the last [parts, r, I]
    T, N, part, parts, stride_gate_h, stride_up_h, gate_factor, up_factor,
    GATE_R: tl.constexpr, UP_R: tl.constexpr, DOWN_R: tl.constexpr, KIND: tl.constexpr, TERMS_: tl.constexpr,
    ADAPTER_TERMS: tl.constexpr, ORDER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dgate and dup for a block of features and a part of the tokens, and the part's sums over tokens.

    dgate and dup may lie where gate and up, or da, do: a tile is read before it is written.
    """
    pid = tl.program_id(0)
    chunk = pid % parts
    block = pid // parts
    cols = (block * BLOCK_I + tl.arange(0, BLOCK_I))[None, :]
    features = (block * BLOCK_I + tl.arange(0, BLOCK_I))[:, None]
    ranks = tl.arange(0, BLOCK_R)[None, :]
    if gate_h_ptr is not None:
        gate_b = tl.load(
            gate_b_ptr + features.to(tl.int64) * GATE_R + ranks, (features < N) & (ranks < GATE_R), 0.0
        )  # fmt: skip
    if up_h_ptr is not None:
        up_b = tl.load(up_b_ptr + features.to(tl.int64) * UP_R + ranks, (features < N) & (ranks < UP_R), 0.0)
    if down_dh_ptr is not None:
        # [I, r], the transpose of what lies in memory.
        down_a = tl.load(down_a_ptr + features + ranks.to(tl.int64) * N, (features < N) & (ranks < DOWN_R), 0.0)
    gate_db = tl.zeros([BLOCK_I, BLOCK_R], tl.float32)
    up_db = tl.zeros([BLOCK_I, BLOCK_R], tl.float32)
    down_da = tl.zeros([BLOCK_I, BLOCK_R], tl.float32)
    steps = tl.arange(0, BLOCK_T)[:, None]
    first = chunk.to(tl.int64) * part
    for start in tl.range(first, tl.minimum(first + part, T), BLOCK_T, num_stages=STAGES):
        rows = start + steps
        inside = (rows < T) & (cols < N)
        offsets = rows * N + cols
        gate = tl.load(gate_ptr + offsets, inside, 0.0).to(tl.float32)
        up = tl.load(up_ptr + offsets, inside, 0.0).to(tl.float32)
        da = tl.load(da_ptr + offsets, inside, 0.0).to(tl.float32)
        if gate_h_ptr is not None:
            gate_h = tl.load(gate_h_ptr + rows * stride_gate_h + ranks, (rows < T) & (ranks < GATE_R), 0.0)
            gate = _with_adapter(gate, gate_h, gate_b, gate_factor, ADAPTER_TERMS, ORDER)
        if up_h_ptr is not None:
            up_h = tl.load(up_h_ptr + rows * stride_up_h + ranks, (rows < T) & (ranks < UP_R), 0.0)
            up = _with_adapter(up, up_h, up_b, up_factor, ADAPTER_TERMS, ORDER)
        if down_dh_ptr is not None:
            down_dh = tl.load(down_dh_ptr + rows * DOWN_R + ranks, (rows < T) & (ranks < DOWN_R), 0.0)
            da = _with_adapter(da, down_dh, down_a, 1.0, ADAPTER_TERMS, ORDER)
        act, slope = activation_and_slope(gate, KIND)
        dgate = (da * up * slope).to(dgate_ptr.dtype.element_ty)
        dup = (da * act).to(dup_ptr.dtype.element_ty)
        tl.store(dgate_ptr + offsets, dgate, inside)
        tl.store(dup_ptr + offsets, dup, inside)
        # Values outside are zeros, because da is.
        if gate_db_ptr is not None:
            gate_db = dot_of_terms(tl.trans(dgate), gate_h, gate_db, TERMS_, 3, 3)
        if up_db_ptr is not None:
            up_db = dot_of_terms(tl.trans(dup), up_h, up_db, TERMS_, 3, 3)
        if down_da_ptr is not None:
            a = (act * up).to(dgate_ptr.dtype.element_ty)
            down_da = dot_of_terms(tl.trans(a), down_dh, down_da, TERMS_, 3, 3)
    part_of_b = chunk.to(tl.int64) * N + features
    if gate_db_ptr is not None:
        out = gate_db_ptr + part_of_b * GATE_R + ranks
        tl.store(out, gate_db * gate_factor, (features < N) & (ranks < GATE_R))
    if up_db_ptr is not None:
        out = up_db_ptr + part_of_b * UP_R + ranks
        tl.store(out, up_db * up_factor, (features < N) & (ranks < UP_R))
    if down_da_ptr is not None:
        out = down_da_ptr + (chunk.to(tl.int64) * DOWN_R + ranks) * N + features
        tl.store(out, down_da, (features < N) & (ranks < DOWN_R))


# --- launchers (no autograd) ---------------------------------------------------------------------


class GLUAdapters(NamedTuple):
    """The parts of the adapters that the activation needs. None where a projection has no adapter."""

    gate_h: Tensor | None  # [T, r] fp32
    up_h: Tensor | None
    gate_b: Tensor | None  # [I, r], contiguous
    up_b: Tensor | None
    down_a: Tensor | None  # [r, I], contiguous
    gate_scaling: float
    up_scaling: float

    @property
    def ranks(self) -> tuple[int, int, int]:
        """Return the ranks of gate, up and down, 0 without an adapter."""
        gate_r, up_r = (0 if b is None else b.shape[1] for b in (self.gate_b, self.up_b))
        return gate_r, up_r, 0 if self.down_a is None else len(self.down_a)

    def strides(self) -> tuple[int, int]:
        """Return the distances of the rows of h."""
        gate, up = (0 if h is None else h.stride(0) for h in (self.gate_h, self.up_h))
        return gate, up


def _constants(x: Tensor, adapters: GLUAdapters, kind: str, config: LoRAGLUConfig) -> dict[str, object]:
    gate_r, up_r, down_r = adapters.ranks
    tensors = [t for t in (adapters.gate_b, adapters.up_b, adapters.down_a) if t is not None]
    return {
        "GATE_R": gate_r,
        "UP_R": up_r,
        "DOWN_R": down_r,
        "KIND": kind,
        "TERMS_": TERMS[x.dtype],
        "ADAPTER_TERMS": max(TERMS[t.dtype] for t in tensors),
        "ORDER": 3 if x.dtype == torch.float32 else 2,
        "BLOCK_T": config.block_t,
        "BLOCK_I": config.block_i,
        "BLOCK_R": rank_block(max(adapters.ranks)),
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


@on_device
def lora_glu_forward(
    gate: Tensor, up: Tensor, adapters: GLUAdapters, kind: str
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """gate, up [T, I] -> a [T, I], h_d [T, r] in fp32 or None."""
    t, i = gate.shape
    device = device_of(gate)
    config = LoRAGLUConfig.choose(LoRAGLUProblem(max(adapters.ranks), gate.element_size(), False), device)
    blocks = cdiv(t, config.block_t)
    part, parts = split_evenly(i, config.block_i, blocks, device.multiprocessors * config.programs_per_multiprocessor)
    a, down_r = torch.empty_like(gate), adapters.ranks[2]
    h = gate.new_empty((parts, t, down_r), dtype=torch.float32) if down_r else None
    launch(
        _forward_kernel, blocks * parts, gate, up, a, adapters.gate_h, adapters.up_h, adapters.gate_b, adapters.up_b,
        adapters.down_a, h, t, i, part, parts, *adapters.strides(), adapters.gate_scaling, adapters.up_scaling,
        **_constants(gate, adapters, kind, config),
    )  # fmt: skip
    if h is None:
        return a, None
    return a, h[0] if parts == 1 else h.sum(0)


class GLUGradients(NamedTuple):
    """Gradients of the adapters, in fp32; None where they are not needed."""

    gate_b: Tensor | None  # [I, r]
    up_b: Tensor | None
    down_a: Tensor | None  # [r, I]


@on_device
def lora_glu_backward(
    da: Tensor, gate: Tensor, up: Tensor, adapters: GLUAdapters, down_dh: Tensor | None, kind: str,
    dgate: Tensor, dup: Tensor, needs: tuple[bool, bool, bool],
) -> GLUGradients:  # fmt: skip
    """Write dgate and dup [T, I], which may be gate and up, and return the gradients of B_g, B_u and A_d.

    da [T, I] is the gradient by the base product of down; down_dh [T, r] fp32 that of h_d. `needs` are for B_g, B_u,
    A_d.
    """
    t, i = gate.shape
    device = device_of(gate)
    config = LoRAGLUConfig.choose(LoRAGLUProblem(max(adapters.ranks), gate.element_size(), True), device)
    blocks = cdiv(i, config.block_i)
    part, parts = split_evenly(t, config.block_t, blocks, device.multiprocessors * config.programs_per_multiprocessor)
    gate_r, up_r, down_r = adapters.ranks
    shapes = (parts, i, gate_r), (parts, i, up_r), (parts, down_r, i)
    sums = [
        gate.new_empty(shape, dtype=torch.float32) if need else None for shape, need in zip(shapes, needs, strict=True)
    ]  # fmt: skip
    launch(
        _backward_kernel, blocks * parts, da, gate, up, dgate, dup, adapters.gate_h, adapters.up_h, adapters.gate_b,
        adapters.up_b, down_dh, adapters.down_a, *sums, t, i, part, parts, *adapters.strides(),
        adapters.gate_scaling, adapters.up_scaling, **_constants(gate, adapters, kind, config),
    )  # fmt: skip
    return GLUGradients(*(None if x is None else x[0] if parts == 1 else x.sum(0) for x in sums))
