r"""Loss and gradient of a token with one read of its logits: a row stays on the chip between its two passes.

The gradient needs the sum of the exponentials of the whole row, so each row takes two passes. If both passes read the
row from memory, they move 3 V numbers, because the L2 cache cannot hold the rows of all multiprocessors from the first
pass to the second. Here the row is read once, and 2 V numbers move. In the first pass, a program copies its row in
chunks to shared memory, each chunk to its own buffer, which is called a slot, and adds each chunk to a maximum and a
sum of exponentials as soon as it has arrived. The second pass turns the chunks in the slots into gradients. When the
gradients of a slot have been computed, the slot receives the same chunk of the program's next row, so memory is busy
throughout. If a row has more chunks than there are slots, the other chunks are read twice, the second time mostly from
L2. The kernel is written in Gluon, because Triton has neither explicit shared memory nor asynchronous copies.

An exponential is 2^(x log2(e) - c), with one rounding (a fused product and sum). Here c is the largest x log2(e) of the
row after rounding. The results are correct for any c near this maximum, so its rounding needs no correction.

Shapes: M tokens, V vocabulary. A chunk is [R, THREADS, LANE]: a thread reads LANE neighbours R times, so sums over the
chunk need no exchange between threads until the end of the row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.ops.logits.token.scan import LN2, LOG2E, ScanProblem, target_weight, transform
from tigon.ops.logits.token.types import Options, Statistics, Wants
from tigon.runtime.compat.triton import async_load, block_barrier, commit_group, gl, gluon, wait_group
from tigon.runtime.device import Device, cdiv
from tigon.runtime.launch import in_order, launch
from tigon.runtime.tuning import LaunchConfig

# --- configuration -------------------------------------------------------------------------------

# Bytes of shared memory that a program needs in addition to its slots: for reductions and for the driver.
RESERVED_BYTES = 2048


@dataclass(frozen=True)
class RowConfig(LaunchConfig):
    """Launch parameters. The milliseconds below were measured with 8192 rows in bf16 on an H200."""

    slots: int
    # logits in a slot
    block: int
    # neighbouring logits that a thread reads at once: 16 bytes
    lane: int
    num_warps: int
    programs_per_multiprocessor: int

    @staticmethod
    def heuristic(problem: ScanProblem, device: Device) -> "RowConfig | None":
        """Return None if two passes are as fast, or the device has no asynchronous copies."""
        v, itemsize = problem
        if not device.async_copy or v * itemsize < 8192:
            return None
        # For short rows, several programs on a multiprocessor overlap their phases. V = 32000: 0.284 (two passes
        # 0.390), V = 50304: 0.450 (0.604).
        block, warps = 8192 // itemsize, 4
        slots = cdiv(v, block)
        programs = min(16, device.shared_memory // (slots * block * itemsize + RESERVED_BYTES))
        if programs < 2:
            # For long rows, one program runs on a multiprocessor. Its chunks are as large as the registers allow,
            # because each chunk costs three barriers. V = 128256: 1.091 with chunks of 16384, 1.20 with 8192 (two
            # passes 1.502); V = 102400: 0.879 (1.208).
            block, warps, programs = 32768 // itemsize, 16, 1
            slots = min(cdiv(v, block), (device.shared_memory - RESERVED_BYTES) // (block * itemsize))
            # At V = 256000 the slots hold 45 % of a row, and the kernel is still 4 % faster. With less there is no
            # gain.
            if slots * block < 0.4 * v:
                return None
        return RowConfig(slots, block, 16 // itemsize, warps, programs)


# --- kernel --------------------------------------------------------------------------------------

if gluon is not None:

    @gluon.jit
    def _fold(a, inside, high, total, logit_scale, SCALED: gl.constexpr):
        """Add the logits a [R, THREADS, LANE] to each thread's maximum of x log2(e) and sum of exponentials [THREADS].

        `inside` masks the logits of the row. It is None if all logits of the chunk belong to the row.
        """
        x, _ = transform(a, logit_scale, 0.0, SCALED, False)
        if inside is not None:
            x = gl.where(inside, x, float("-inf"))
        new_high = gl.maximum(high, gl.max(gl.max(x, axis=2), axis=0) * LOG2E)
        c = gl.where(new_high == float("-inf"), 0.0, new_high)
        e = gl.exp2(gl.fma(x, LOG2E, -c[None, :, None]))
        return new_high, total * gl.exp2(high - c) + gl.sum(gl.sum(e, axis=2), axis=0)

    @gluon.jit
    def _block(base, cols, end, POLICY: gl.constexpr):
        """Load a chunk of a row from memory."""
        return gl.load(base + cols, mask=cols < end, other=0.0, eviction_policy=POLICY)

    @gluon.jit
    def _gradient(a, c, factor, logit_scale, SCALED: gl.constexpr):
        """Return da of a chunk, without the term of the target's column."""
        x, slope = transform(a, logit_scale, 0.0, SCALED, False)
        return (factor * gl.exp2(gl.fma(x, LOG2E, -c)) * slope).to(a.dtype)

    @gluon.jit(do_not_specialize=["M"])
    def _row_kernel(
        logits_ptr, target_ptr, weight_ptr, scales_ptr,  # [M, V], [M], [V] or None, [3]
        loss_ptr, lse_ptr, z_ptr, log_probs_ptr,  # [M], [M, 2], [M] or None, [M] or None
        stride_logits, M, V, ignore_index, logit_scale, z_loss,
        SCALED: gl.constexpr, TOKEN_SCALING: gl.constexpr, LONG: gl.constexpr, MANY: gl.constexpr,
        READ_ONCE: gl.constexpr, READ_TWICE: gl.constexpr,
        SLOTS: gl.constexpr, BLOCK: gl.constexpr, LANE: gl.constexpr, num_warps: gl.constexpr,
    ):  # fmt: skip
        """Compute the statistics and the gradients of several rows per program.

        LONG is True if a row has logits that do not fit in the slots, and MANY if these take more than one chunk.
        READ_ONCE and READ_TWICE are the eviction policies of the logits in the slots and of the other logits.
        """
        THREADS: gl.constexpr = num_warps * 32
        R: gl.constexpr = BLOCK // (THREADS * LANE)
        CHUNK: gl.constexpr = gl.BlockedLayout([1, 1, LANE], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
        PER_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, CHUNK))
        r = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, CHUNK)))[:, None, None]
        thread = gl.arange(0, THREADS, PER_THREAD)[None, :, None]
        lane = gl.arange(0, LANE, gl.SliceLayout(0, gl.SliceLayout(1, CHUNK)))[None, None, :]
        cols = (r * THREADS + thread) * LANE + lane
        # The first IN_SLOTS logits of a row stay on the chip.
        IN_SLOTS: gl.constexpr = SLOTS * BLOCK
        slots = gl.allocate_shared_memory(
            logits_ptr.dtype.element_ty, [SLOTS, R, THREADS, LANE], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )
        scale, z_scale = gl.load(scales_ptr), gl.load(scales_ptr + 1)

        row = gl.program_id(0).to(gl.int64)
        target = gl.load(target_ptr + row).to(gl.int64)
        # An ignored row is not read: masked copies fill the slots with zeros.
        end = gl.where(target != ignore_index, V, 0)
        for start in range(0, IN_SLOTS, BLOCK):
            source = logits_ptr + row * stride_logits + (start + cols)
            async_load(slots.index(start // BLOCK), source, mask=start + cols < end, eviction_policy=READ_ONCE)
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
            if LONG:
                # This load runs while the slots are added to the sums.
                rest = _block(base, IN_SLOTS + cols, end, READ_TWICE)

            high = gl.full([THREADS], float("-inf"), gl.float32, PER_THREAD)
            total = gl.full([THREADS], 0.0, gl.float32, PER_THREAD)
            for start in range(0, gl.where(valid, IN_SLOTS, 0), BLOCK):
                wait_group(SLOTS - 1)
                a = slots.index(start // BLOCK).load(CHUNK)
                if start + BLOCK <= V:
                    high, total = _fold(a, None, high, total, logit_scale, SCALED)
                else:
                    high, total = _fold(a, start + cols < V, high, total, logit_scale, SCALED)
                # `wait_group(SLOTS - 1)` waits for the oldest of SLOTS groups of copies. After this empty group, the
                # oldest one is the group of the next slot.
                commit_group()
            if LONG:
                for start in range(IN_SLOTS, end, BLOCK):
                    a = rest
                    if not MANY or start + BLOCK < end:
                        rest = _block(base, start + BLOCK + cols, end, READ_TWICE)
                    high, total = _fold(a, start + cols < V, high, total, logit_scale, SCALED)
                if not MANY:
                    rest = _block(base, IN_SLOTS + cols, end, READ_TWICE)

            highest = gl.max(high, axis=0)
            c = gl.where((highest == float("-inf")) | (target == ignore_index), 0.0, highest)
            mass = gl.sum(total * gl.exp2(high - c), axis=0)
            x_t, slope_t = transform(a_t, logit_scale, 0.0, SCALED, False)
            log_prob = -(gl.log2(mass) - gl.fma(x_t, LOG2E, -c)) * LN2
            row_scale, row_z_scale = scale, z_scale
            if TOKEN_SCALING:
                p_t = gl.div_rn(gl.exp2(gl.fma(x_t, LOG2E, -c)), mass)
                row_scale, row_z_scale = scale * p_t, z_scale * p_t
            target_factor = row_scale * target_weight(weight_ptr, target, V)
            # `top` is c in natural units after another rounding. The second factor of `total_row` corrects the sum
            # from c to the rounded `top`.
            top = c * LN2
            total_row = mass * gl.exp2(-gl.fma(top, LOG2E, -c))
            lse = top + gl.log(total_row)
            z = row_z_scale * z_loss * lse * lse
            gl.store(loss_ptr + row, gl.where(valid, z - target_factor * log_prob, 0.0))
            gl.store(lse_ptr + row * 2, gl.where(valid, top, 0.0))
            gl.store(lse_ptr + row * 2 + 1, gl.where(valid, total_row, 0.0))
            if z_ptr is not None:
                gl.store(z_ptr + row, gl.where(valid, z, 0.0))
            if log_probs_ptr is not None:
                log_prob = gl.where(inside, log_prob, float("nan"))
                gl.store(log_probs_ptr + row, gl.where(valid, log_prob, 0.0))

            factor = gl.where(valid, gl.div_rn(target_factor + row_z_scale * 2.0 * z_loss * lse, mass), 0.0)
            if MANY:
                # The gradient is computed backwards from the chunk that was read last, before the copies of the next
                # row evict these chunks from L2.
                last = IN_SLOTS + (V - 1 - IN_SLOTS) // BLOCK * BLOCK
                for back in range(0, V - IN_SLOTS, BLOCK):
                    start = last - back
                    a = rest
                    if start > IN_SLOTS:
                        rest = _block(base, start - BLOCK + cols, end, READ_TWICE)
                    dx = _gradient(a, c, factor, logit_scale, SCALED)
                    gl.store(base + (start + cols), dx, mask=start + cols < V, eviction_policy=READ_ONCE)
            # The loop over the slots is skipped for an ignored row, so the copies of its zeros may still be in flight.
            # Without this wait, a slot could still hold logits of the previous row, whose exponentials may be infinite
            # for the c of this row, and the zeros could arrive after the copies of the next row.
            wait_group(0)
            for start in range(0, IN_SLOTS, BLOCK):
                slot = slots.index(start // BLOCK)
                a = slot.load(CHUNK)
                async_load(slot, next_base + (start + cols), mask=start + cols < next_end, eviction_policy=READ_ONCE)
                commit_group()
                dx = _gradient(a, c, factor, logit_scale, SCALED)
                gl.store(base + (start + cols), dx, mask=start + cols < V, eviction_policy=READ_ONCE)
            if LONG and not MANY:
                dx = _gradient(rest, c, factor, logit_scale, SCALED)
                gl.store(base + (IN_SLOTS + cols), dx, mask=IN_SLOTS + cols < V)
            # The gradient of the target's column is overwritten last, because comparing every column with the target
            # would take as long as the exponentials.
            block_barrier()
            dx_t = (factor * gl.exp2(gl.fma(x_t, LOG2E, -c)) - target_factor) * slope_t
            gl.store(base + target, dx_t.to(logits_ptr.dtype.element_ty), mask=inside)
            row, target, end = next_row, next_target, next_end
        wait_group(0)


# --- launcher ------------------------------------------------------------------------------------


def can_read_once(logits: Tensor, target: Tensor, options: Options, wants: Wants) -> bool:
    """Return whether the kernel supports these options and outputs for logits of this layout.

    It does not support a soft cap, because the special functions bound the time of such a row, so reading the row once
    gains nothing: 2.47 ms, and 2.40 ms in two passes, for 8192 x 128256 on an H200.
    """
    if gluon is None or options.softcap is not None or options.label_smoothing != 0 or wants.predicted or wants.entropy:
        return False
    if wants.mean_logits or wants.sum_sq_probs or wants.extra_targets:
        return False
    # The kernel gives rows past the last one the target `ignore_index`, so the dtype of the targets must hold it.
    if target.dtype != torch.int64 and abs(options.ignore_index) >= 2**31:
        return False
    return logits.stride(0) % 16 == 0 and logits.shape[1] % 16 == 0 and logits.data_ptr() % 16 == 0


def row_losses(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, result: Statistics, options: Options,
    config: RowConfig, device: Device,
) -> None:  # fmt: skip
    """Overwrite logits [M, V] with their gradient, and write the statistics to `result`."""
    m, v = logits.shape
    # logits of a row that do not fit in the slots
    beyond_slots = v - config.slots * config.block
    has_many_chunks = beyond_slots > config.block
    arguments = in_order(_row_kernel)(
        logits_ptr=logits, target_ptr=target, weight_ptr=weight, scales_ptr=scales,
        loss_ptr=result.loss, lse_ptr=result.lse,
        z_ptr=result.z_loss if result.z_loss.numel() else None,
        log_probs_ptr=result.log_probs if result.log_probs.numel() else None,
        stride_logits=logits.stride(0), M=m, V=v,
        ignore_index=options.ignore_index, logit_scale=options.logit_scale, z_loss=options.z_loss,
    )  # fmt: skip
    launch(
        _row_kernel, min(m, config.programs_per_multiprocessor * device.multiprocessors), *arguments,
        SCALED=options.logit_scale != 1, TOKEN_SCALING=options.token_scaling, LONG=beyond_slots > 0,
        MANY=has_many_chunks,
        # Logits that are read once must not evict those that are read twice from L2.
        READ_ONCE="evict_first" if has_many_chunks else "", READ_TWICE="evict_last" if has_many_chunks else "",
        SLOTS=config.slots, BLOCK=config.block, LANE=config.lane, num_warps=config.num_warps,
    )  # fmt: skip
