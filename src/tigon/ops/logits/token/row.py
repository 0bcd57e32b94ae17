r"""Loss and gradient of `token_loss` with one read of the logits: a row stays on the chip between its two passes.

Two passes over a row in memory move 3 V numbers, and the L2 cache does not keep the rows of all multiprocessors from
one to the next. Here a program copies its row to shared memory in chunks ("slots"), folds each chunk into maximum and
sum of exponentials as it arrives, and then turns the slots into gradients. A slot that is done at once receives
the same chunk of the program's next row, so memory is busy throughout: 2 V numbers. What of a row is longer than the
slots is read again, mostly from L2. Shared memory by hand and asynchronous copies are what Gluon adds to Triton.

Exponentials are 2^(x log2(e) - c) with one rounding (a fused product and sum); c, the largest x log2(e) after rounding,
is a pivot like any other, so nothing else need know that it is rounded.

Shapes: M tokens, V vocabulary. A chunk is [R, THREADS, LANE]: a thread takes LANE neighbours R times, so sums over
the chunk need no exchange until the row's end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.logits.token.maths import LN2, LOG2E, target_weight, transformed
from tigon.ops.logits.token.types import Options, Statistics, Wants
from tigon.runtime.device import Device, cdiv
from tigon.runtime.launch import launch
from tigon.runtime.tuning import LaunchConfig

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    # Triton 3.6 and 3.9 name these differently.
    copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    commit_group, wait_group = async_copy.commit_group, async_copy.wait_group
except (ImportError, AttributeError):  # Triton before 3.5
    gluon = None

__all__ = ["RowConfig", "RowProblem", "row_losses", "takes"]


# --- configuration -------------------------------------------------------------------------------

RESERVED = 2048  # bytes of shared memory a program beside its slots: reductions, and what the driver takes


class RowProblem(NamedTuple):
    """What the launch parameters of the kernel that reads logits once depend on."""

    vocabulary: int
    itemsize: int  # bytes of a logit


@dataclass(frozen=True)
class RowConfig(LaunchConfig):
    """Launch parameters. Milliseconds are those of 8192 rows in bf16 on an H200."""

    slots: int
    block: int  # logits a slot
    lane: int  # logits a thread takes together: 16 bytes
    num_warps: int
    programs_per_multiprocessor: int

    @staticmethod
    def heuristic(problem: RowProblem, device: Device) -> "RowConfig | None":
        """Return None where two passes are as good, or the device has no asynchronous copies."""
        v, itemsize = problem
        if not device.async_copy or v * itemsize < 8192:
            return None
        # Short rows: several programs overlap their phases. V = 32000: 0.284 (two passes 0.390), 50304: 0.450 (0.604).
        block, warps = 8192 // itemsize, 4
        slots = cdiv(v, block)
        together = min(16, device.shared_memory // (slots * block * itemsize + RESERVED))
        if together < 2:
            # One long row a multiprocessor, in chunks as large as registers allow, because each costs three barriers:
            # V = 128256: 1.091 with chunks of 16384, 1.20 with 8192 (two passes 1.502); 102400: 0.879 (1.208).
            block, warps, together = 32768 // itemsize, 16, 1
            slots = min(cdiv(v, block), (device.shared_memory - RESERVED) // (block * itemsize))
            # V = 256000 keeps 45 % and still gains 4 %; with less on the chip there is nothing to gain.
            if slots * block < 0.4 * v:
                return None
        return RowConfig(slots, block, 16 // itemsize, warps, together)


# --- kernel --------------------------------------------------------------------------------------

if gluon is not None:

    @gluon.jit
    def _fold(a, inside, high, total, logit_scale, SCALED: gl.constexpr):
        """Fold logits [R, T, L] into each thread's maximum of x log2(e) and sum [T]; None is inside everywhere."""
        x, _ = transformed(a, logit_scale, 0.0, SCALED, False)
        if inside is not None:
            x = gl.where(inside, x, float("-inf"))
        new = gl.maximum(high, gl.max(gl.max(x, axis=2), axis=0) * LOG2E)
        c = gl.where(new == float("-inf"), 0.0, new)
        e = gl.exp2(gl.fma(x, LOG2E, -c[None, :, None]))
        return new, total * gl.exp2(high - c) + gl.sum(gl.sum(e, axis=2), axis=0)

    @gluon.jit
    def _block(base, cols, end, POLICY: gl.constexpr):
        return gl.load(base + cols, mask=cols < end, other=0.0, eviction_policy=POLICY)

    @gluon.jit
    def _gradient(a, c, factor, logit_scale, SCALED: gl.constexpr):
        """da but for the target's own part."""
        x, slope = transformed(a, logit_scale, 0.0, SCALED, False)
        return (factor * gl.exp2(gl.fma(x, LOG2E, -c)) * slope).to(a.dtype)

    @gluon.jit(do_not_specialize=["M"])
    def _row_kernel(
        logits_ptr, target_ptr, weight_ptr, scales_ptr,  # [M, V], [M], [V] or None, [3]
        loss_ptr, lse_ptr, z_ptr, log_probs_ptr,  # [M], [M, 2], [M] or None, [M] or None
        stride_logits, M, V, ignore_index, logit_scale, z_loss,
        SCALED: gl.constexpr, TOKEN_SCALING: gl.constexpr, LONG: gl.constexpr, MANY: gl.constexpr,
        ONCE: gl.constexpr, TWICE: gl.constexpr,
        SLOTS: gl.constexpr, BLOCK: gl.constexpr, LANE: gl.constexpr, num_warps: gl.constexpr,
    ):  # fmt: skip
        THREADS: gl.constexpr = num_warps * 32
        R: gl.constexpr = BLOCK // (THREADS * LANE)
        CHUNK: gl.constexpr = gl.BlockedLayout([1, 1, LANE], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
        PER_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, CHUNK))
        r = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, CHUNK)))[:, None, None]
        thread = gl.arange(0, THREADS, PER_THREAD)[None, :, None]
        lane = gl.arange(0, LANE, gl.SliceLayout(0, gl.SliceLayout(1, CHUNK)))[None, None, :]
        cols = (r * THREADS + thread) * LANE + lane
        held: gl.constexpr = SLOTS * BLOCK
        slots = gl.allocate_shared_memory(
            logits_ptr.dtype.element_ty, [SLOTS, R, THREADS, LANE], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )
        scale, z_scale = gl.load(scales_ptr), gl.load(scales_ptr + 1)

        row = gl.program_id(0).to(gl.int64)
        target = gl.load(target_ptr + row).to(gl.int64)
        end = gl.where(target != ignore_index, V, 0)  # of an ignored row nothing is read: masked copies fill zeros in
        for start in range(0, held, BLOCK):
            source = logits_ptr + row * stride_logits + (start + cols)
            copy(slots.index(start // BLOCK), source, mask=start + cols < end, eviction_policy=ONCE)
            commit_group()

        while row < M:
            base = logits_ptr + row * stride_logits
            valid = target != ignore_index
            next_row = row + gl.num_programs(0)
            next_base = logits_ptr + next_row * stride_logits
            next_target = gl.load(target_ptr + next_row, mask=next_row < M, other=ignore_index).to(gl.int64)
            next_end = gl.where(next_target != ignore_index, V, 0)
            inside = valid & (target >= 0) & (target < V)
            a_t = gl.load(base + target, mask=inside, other=0.0)
            if LONG:  # asked for now, used when the slots are folded
                rest = _block(base, held + cols, end, TWICE)

            high = gl.full([THREADS], float("-inf"), gl.float32, PER_THREAD)
            total = gl.full([THREADS], 0.0, gl.float32, PER_THREAD)
            for start in range(0, gl.where(valid, held, 0), BLOCK):
                wait_group(SLOTS - 1)
                a = slots.index(start // BLOCK).load(CHUNK)
                if start + BLOCK <= V:
                    high, total = _fold(a, None, high, total, logit_scale, SCALED)
                else:
                    high, total = _fold(a, start + cols < V, high, total, logit_scale, SCALED)
                commit_group()  # an empty one, so that the next slot is again the oldest of SLOTS
            if LONG:
                for start in range(held, end, BLOCK):
                    a = rest
                    if not MANY or start + BLOCK < end:
                        rest = _block(base, start + BLOCK + cols, end, TWICE)
                    high, total = _fold(a, start + cols < V, high, total, logit_scale, SCALED)
                if not MANY:
                    rest = _block(base, held + cols, end, TWICE)

            highest = gl.max(high, axis=0)
            c = gl.where((highest == float("-inf")) | (target == ignore_index), 0.0, highest)
            mass = gl.sum(total * gl.exp2(high - c), axis=0)
            x_t, slope_t = transformed(a_t, logit_scale, 0.0, SCALED, False)
            log_prob = -(gl.log2(mass) - gl.fma(x_t, LOG2E, -c)) * LN2
            row_scale, row_z_scale = scale, z_scale
            if TOKEN_SCALING:
                p_t = gl.div_rn(gl.exp2(gl.fma(x_t, LOG2E, -c)), mass)
                row_scale, row_z_scale = scale * p_t, z_scale * p_t
            hit = row_scale * target_weight(weight_ptr, target, V)
            top = c * LN2
            total_row = mass * gl.exp2(-gl.fma(top, LOG2E, -c))
            lse = top + gl.log(total_row)
            z = row_z_scale * z_loss * lse * lse
            gl.store(loss_ptr + row, gl.where(valid, z - hit * log_prob, 0.0))
            gl.store(lse_ptr + row * 2, gl.where(valid, top, 0.0))
            gl.store(lse_ptr + row * 2 + 1, gl.where(valid, total_row, 0.0))
            if z_ptr is not None:
                gl.store(z_ptr + row, gl.where(valid, z, 0.0))
            if log_probs_ptr is not None:
                log_prob = gl.where(inside, log_prob, float("nan"))
                gl.store(log_probs_ptr + row, gl.where(valid, log_prob, 0.0))

            factor = gl.where(valid, gl.div_rn(hit + row_z_scale * 2.0 * z_loss * lse, mass), 0.0)
            if MANY:
                # Backwards from the chunk just folded, and before the slots' next row crowds these out of L2.
                last = held + (V - 1 - held) // BLOCK * BLOCK
                for back in range(0, V - held, BLOCK):
                    start = last - back
                    a = rest
                    if start > held:
                        rest = _block(base, start - BLOCK + cols, end, TWICE)
                    dx = _gradient(a, c, factor, logit_scale, SCALED)
                    gl.store(base + (start + cols), dx, mask=start + cols < V, eviction_policy=ONCE)
            # For an ignored row, whose zeros nothing has waited for: without them, logits of the row before would stand
            # here, whose exponentials may be infinite, and the next row's copies could be overtaken.
            wait_group(0)
            for start in range(0, held, BLOCK):
                slot = slots.index(start // BLOCK)
                a = slot.load(CHUNK)
                copy(slot, next_base + (start + cols), mask=start + cols < next_end, eviction_policy=ONCE)
                commit_group()
                dx = _gradient(a, c, factor, logit_scale, SCALED)
                gl.store(base + (start + cols), dx, mask=start + cols < V, eviction_policy=ONCE)
            if LONG and not MANY:
                dx = _gradient(rest, c, factor, logit_scale, SCALED)
                gl.store(base + (held + cols), dx, mask=held + cols < V)
            # The target's own part last: a comparison for every element would take as long as its exponential.
            barrier()
            dx_t = (factor * gl.exp2(gl.fma(x_t, LOG2E, -c)) - hit) * slope_t
            gl.store(base + target, dx_t.to(logits_ptr.dtype.element_ty), mask=inside)
            row, target, end = next_row, next_target, next_end
        wait_group(0)


# --- launcher ------------------------------------------------------------------------------------


def takes(logits: Tensor, target: Tensor, options: Options, wants: Wants) -> bool:
    """Whether the kernel computes this. A soft cap is bound by special functions and gains nothing here (2.47 for
    2.40 ms, 8192 x 128256 on an H200).
    """
    plain = gluon is not None and options.softcap is None and options.label_smoothing == 0
    plain = plain and not (wants.predicted or wants.entropy)
    # Rows past the last are given the target `ignore_index`, which must be one.
    plain = plain and (target.dtype == torch.int64 or abs(options.ignore_index) < 2**31)
    return plain and logits.stride(0) % 16 == 0 and logits.shape[1] % 16 == 0 and logits.data_ptr() % 16 == 0


def row_losses(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, result: Statistics, options: Options,
    config: RowConfig, device: Device,
) -> None:  # fmt: skip
    """logits [M, V] -> their gradient in their place, and the statistics in `result`."""
    (m, v), rest = logits.shape, logits.shape[1] - config.slots * config.block
    many = rest > config.block  # chunks beyond the slots
    launch(
        _row_kernel, min(m, config.programs_per_multiprocessor * device.multiprocessors),
        logits, target, weight, scales, result.loss, result.lse,
        result.z_loss if result.z_loss.numel() else None, result.log_probs if result.log_probs.numel() else None,
        logits.stride(0), m, v, options.ignore_index, options.logit_scale, options.z_loss,
        SCALED=options.logit_scale != 1, TOKEN_SCALING=options.token_scaling, LONG=rest > 0, MANY=many,
        # What is read twice must find the L2 cache not full of what passes through once.
        ONCE="evict_first" if many else "", TWICE="evict_last" if many else "",
        SLOTS=config.slots, BLOCK=config.block, LANE=config.lane, num_warps=config.num_warps,
    )  # fmt: skip
