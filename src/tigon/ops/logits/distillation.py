r"""The loss of distillation for rows of logits, and its gradient in place of the student's logits.

For one token with the student's raw logits a and the teacher's raw logits b, soft caps c and scales s of each, and
temperature t:

    z = c / t tanh(s a / c)     without a soft cap z = s a / t;     q = softmax(z), and p is the same of the teacher
    loss = soft_weight * D(p, q) + hard_weight * (-log softmax(t z)_label)

D is a divergence of `divergence_kernels`, with its maths, or the distance of the cosine 1 - z_p z_q / (|z_p| |z_q|) of
the logits themselves. With g = dD / dlog q,

    dz_j = soft_weight (g_j - q_j G) + hard_weight t (softmax(t z)_j - [j = label]),     G = sum_k g_k
    da_j = dz_j (1 - (t z_j / c)^2) s / t

    cosine:  dD / dz_j = -(z_p,j - cos |z_p| / |z_q| z_q,j) / (|z_p| |z_q|)

One program computes one row and reads it in three passes: the log-sum-exps of both models, then D and G, then the
gradient, which overwrites the student's logits. The forward KL has G = -1 and D is computed with the gradient, so two
passes are enough. D and G of the reverse KL are not updated together with the log-sum-exps, because D would then be a
difference of numbers near the log-sum-exps, whose rounding of 1e-6 is as large as the divergence of a student that has
almost learnt its teacher. The second pass begins at the end of the row, which is still in the L2 cache.

The gradient of fp32 logits may be in half precision. It takes the first half of each row: the gradient of the column j
lies where the logit of the column j / 2 was, which the last pass has read already, or reads in the same block.

The teacher may have W != V columns. Columns that it lacks have the logit -inf, and its columns from V on do too.

Shapes: M tokens, V vocabulary of the student, W columns of the teacher.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.logits.divergence_kernels import DivergenceOptions, divergence, divergence_element, has_native_log2
from tigon.ops.logits.divergence_reference import DistillationOptions, RowLosses, distillation_torch
from tigon.ops.logits.token.scan import LOG2E, columns, scan, transform
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import Device, device_of, next_power_of_2, runs_kernels
from tigon.runtime.launch import in_order, launch, launcher, on_device
from tigon.runtime.tuning import LaunchConfig


@dataclass(frozen=True)
class DistillationConfig(LaunchConfig):
    """Launch parameters: a program reads `block_v` logits of each model at a time, each thread `lane` neighbours."""

    block_v: int
    # This is the number of logits in 16 bytes.
    lane: int
    num_warps: int

    @staticmethod
    def heuristic(problem: tuple[int, int, bool], device: Device) -> "DistillationConfig":
        """Return the parameters for V, the bytes of a logit of the student, and whether options take more registers."""
        vocabulary, itemsize, is_complex = problem
        # A thread holds 16 logits of each model at a time, as in `ScanConfig`, or 8 if it needs more registers. A long
        # row has 1024 threads, so that a multiprocessor has one or two rows at a time: with one, the rows of all
        # multiprocessors of an H200 take 68 MB (V = 128256), so a part of them is still in its L2 cache (50 MB) in the
        # next pass. With 256 threads there are five rows on a multiprocessor, and every pass reads memory.
        has_long_rows = vocabulary > 32768 and device.warp_size == 32 and not is_complex
        has_few_registers = is_complex or itemsize == 4
        threads, logits_per_thread = 1024 if has_long_rows else 256, 8 if has_few_registers else 16
        block_v = min(max(next_power_of_2(vocabulary), 64), threads * logits_per_thread)
        num_warps = max(1, block_v // (logits_per_thread * device.warp_size))
        return DistillationConfig(block_v, 16 // itemsize, num_warps)


@triton.jit
def _load(
    logits_ptr, cols, width, logit_scale, softcap, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, OTHER: tl.constexpr
):  # fmt: skip
    """Return z and dz / da for the columns of a row of this width. Columns outside of it have z = OTHER."""
    z, slope = transform(
        tl.load(logits_ptr + cols, mask=cols < width, other=0.0), logit_scale, softcap, SCALED, SOFTCAP
    )
    return tl.where(cols < width, z, OTHER), slope


@triton.jit
def _finite_top(top):
    """Return the largest logit of a row, or 0 if all logits are -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=["stride_dloss"])
def _distillation_kernel(
    student_ptr, teacher_ptr, gradient_ptr,  # [M, V], [M, W], [M, V]: a part of the student's memory
    target_ptr, scales_ptr,  # [M], [3]
    dloss_ptr,  # [M], [] (stride 0), or None
    loss_ptr, soft_ptr, hard_ptr, entropy_ptr,  # [M] or None, four times
    stride_student, stride_teacher, stride_gradient, stride_dloss, V, W,
    ignore_index, beta, rest, temperature, soft_weight, hard_weight,
    softcap, logit_scale, hard_softcap, hard_logit_scale, teacher_softcap, teacher_logit_scale,
    KIND: tl.constexpr, HARD: tl.constexpr, TEMPERED: tl.constexpr, GRADIENT: tl.constexpr, NATIVE: tl.constexpr,
    SCALED: tl.constexpr, SOFTCAP: tl.constexpr, HARD_SCALED: tl.constexpr, TEACHER_SCALED: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Compute the losses of one row per program and, with GRADIENT, overwrite the student's logits with da."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    gradient_ptr += row * stride_gradient
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        if loss_ptr is not None:
            tl.store(loss_ptr + row, 0.0)
        if soft_ptr is not None:
            tl.store(soft_ptr + row, 0.0)
        if hard_ptr is not None:
            tl.store(hard_ptr + row, 0.0)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK_V // LANE, LANE], tl.float32)
            for start in tl.range(0, V, BLOCK_V):
                cols = columns(start, BLOCK_V, LANE)
                tl.store(gradient_ptr + cols, zeros, mask=cols < V)
        return

    SOFTMAX: tl.constexpr = KIND != "cosine" or entropy_ptr is not None
    # The forward KL needs no sum before its gradient.
    ONE_PASS: tl.constexpr = KIND == "kl" and GRADIENT
    OTHER: tl.constexpr = 0.0 if KIND == "cosine" else float("-inf")
    scale = tl.load(scales_ptr)
    log_hard = 0.0
    if HARD:
        inside = (target >= 0) & (target < V)
        a_t = tl.load(student_ptr + target, mask=inside, other=0.0)
        hard_z_t, _ = transform(a_t, hard_logit_scale, hard_softcap, HARD_SCALED, SOFTCAP)
        scale = tl.where(inside, scale, float("nan"))

    # The first pass computes the log-sum-exps.
    top, log_total, teacher_top, teacher_log_total, hard_top, hard_total = 0.0, 0.0, 0.0, 0.0, 0.0, 1.0
    if SOFTMAX:
        highest, total, moment, _, _, _ = scan(
            student_ptr, V, 0.0, None, logit_scale, softcap,
            False, SCALED, SOFTCAP, False, entropy_ptr is not None, False, BLOCK_V, LANE,
        )  # fmt: skip
        top, log_total = _finite_top(highest), tl.log(total)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, log_total - tl.div_rn(moment, total))
    if KIND != "cosine":
        highest, teacher_total, _, _, _, _ = scan(
            teacher_ptr, W, 0.0, None, teacher_logit_scale, teacher_softcap,
            False, TEACHER_SCALED, TEACHER_SOFTCAP, False, False, False, BLOCK_V, LANE,
        )  # fmt: skip
        teacher_top, teacher_log_total = _finite_top(highest), tl.log(teacher_total)
    if HARD:
        if TEMPERED or not SOFTMAX:
            highest, hard_total, _, _, _, _ = scan(
                student_ptr, V, 0.0, None, hard_logit_scale, hard_softcap,
                False, HARD_SCALED, SOFTCAP, False, False, False, BLOCK_V, LANE,
            )  # fmt: skip
            hard_top = _finite_top(highest)
        else:
            hard_top, hard_total = top, total
        log_hard = tl.log(hard_total) - (hard_z_t - hard_top)

    # The second pass computes D and G, or the three products of the cosine.
    blocks = tl.cdiv(V, BLOCK_V)
    losses = tl.zeros([BLOCK_V // LANE], tl.float32)
    slopes = tl.zeros([BLOCK_V // LANE], tl.float32)
    squares = tl.zeros([BLOCK_V // LANE], tl.float32)
    slope_sum, cosine, inverse_norms, ratio = -1.0, 0.0, 0.0, 0.0
    if not ONE_PASS:
        for block in tl.range(0, blocks):
            cols = columns((blocks - 1 - block) * BLOCK_V, BLOCK_V, LANE)
            z, slope = _load(student_ptr, cols, V, logit_scale, softcap, SCALED, SOFTCAP, OTHER)
            y = _load(
                teacher_ptr, cols, W, teacher_logit_scale, teacher_softcap, TEACHER_SCALED, TEACHER_SOFTCAP, OTHER
            )[0]  # fmt: skip
            if KIND == "cosine":
                losses += tl.sum(z * y, axis=1)
                slopes += tl.sum(z * z, axis=1)
                squares += tl.sum(y * y, axis=1)
            else:
                loss, g, q = divergence_element(
                    (z - top) - log_total, (y - teacher_top) - teacher_log_total, 1.0, beta, rest, KIND, True, True,
                    NATIVE,
                )  # fmt: skip
                losses += tl.sum(loss, axis=1)
                slopes += tl.sum(g, axis=1)
    if KIND == "cosine":
        student_square, teacher_square = tl.sum(slopes, axis=0), tl.sum(squares, axis=0)
        norms = tl.sqrt_rn(student_square) * tl.sqrt_rn(teacher_square)
        # If all logits of a model are zero, the cosine counts as zero, and so does its gradient.
        is_zero = norms == 0.0
        inverse_norms = tl.where(is_zero, 0.0, tl.div_rn(1.0, tl.where(is_zero, 1.0, norms)))
        cosine = tl.sum(losses, axis=0) * inverse_norms
        ratio = cosine * tl.where(is_zero, 0.0, tl.div_rn(1.0, tl.where(is_zero, 1.0, student_square)))
    elif KIND != "kl":
        slope_sum = tl.sum(slopes, axis=0)

    # The third pass computes the gradient.
    if GRADIENT:
        unit = scale
        if dloss_ptr is not None:
            unit = scale * tl.load(dloss_ptr + row * stride_dloss)
        soft_unit, hard_unit = unit * soft_weight, unit * hard_weight * temperature
        hard_factor = tl.div_rn(hard_unit, hard_total)
        for start in tl.range(0, V, BLOCK_V):
            cols = columns(start, BLOCK_V, LANE)
            z, slope = _load(student_ptr, cols, V, logit_scale, softcap, SCALED, SOFTCAP, OTHER)
            y = _load(
                teacher_ptr, cols, W, teacher_logit_scale, teacher_softcap, TEACHER_SCALED, TEACHER_SOFTCAP, OTHER
            )[0]  # fmt: skip
            if KIND == "cosine":
                dz = soft_unit * (z * ratio - y * inverse_norms)
            else:
                loss, g, q = divergence_element(
                    (z - top) - log_total, (y - teacher_top) - teacher_log_total, 1.0, beta, rest, KIND, True, True,
                    NATIVE,
                )  # fmt: skip
                if ONE_PASS:
                    losses += tl.sum(loss, axis=1)
                dz = soft_unit * (g - q * slope_sum)
            if HARD:
                hard_z = z * temperature if TEMPERED else z
                dz += hard_factor * tl.exp2((hard_z - hard_top) * LOG2E)
                if (target >= start) & (target < start + BLOCK_V):
                    dz -= tl.where(cols == target, hard_unit, 0.0)
            if gradient_ptr.dtype != student_ptr.dtype:
                # All threads have read this block before one of them overwrites a part of it.
                tl.debug_barrier()
            tl.store(gradient_ptr + cols, dz * slope, mask=cols < V)

    soft = 1.0 - cosine if KIND == "cosine" else tl.sum(losses, axis=0)
    if loss_ptr is not None:
        row_loss = soft_weight * soft
        if HARD:
            row_loss += hard_weight * log_hard
        tl.store(loss_ptr + row, scale * row_loss)
    if soft_ptr is not None:
        tl.store(soft_ptr + row, scale * soft)
    if hard_ptr is not None:
        tl.store(hard_ptr + row, scale * log_hard)


@on_device
def distill_rows(
    student: Tensor, teacher: Tensor, target: Tensor, scales: Tensor, dloss: Tensor | None,
    options: DistillationOptions, gradient: Tensor | None,
) -> RowLosses:  # fmt: skip
    """Return the losses of logits [M, V] and [M, W], and with `gradient` [M, V] also write the gradient of the student.
    `gradient` may be the memory of the student's logits; for fp32 logits also in half precision, as
    `student.view(dtype)[:, :V]`. The first element of `scales` multiplies every loss, and `dloss`, [M], [] or None for
    ones, multiplies the gradient only. Rows with the target `ignore_index` have losses and gradients of zero."""
    if not runs_kernels(student, teacher):
        return distillation_torch(student, teacher, target, scales, dloss, options, gradient)
    (m, v), device = student.shape, device_of(student)
    w = min(teacher.shape[1], v)
    has_hard = options.has_cross_entropy
    empty = lambda needed: student.new_empty(m, dtype=torch.float32) if needed else None
    further = options.returns_parts, options.returns_parts and has_hard, options.with_entropy
    result = RowLosses(student.new_empty(m, dtype=torch.float32), *map(empty, further))
    student_softcap, teacher_softcap = options.softcap, options.teacher_softcap
    is_complex = has_hard or student_softcap is not None or teacher_softcap is not None
    config = DistillationConfig.choose((v, student.element_size(), is_complex), device)
    t = options.temperature
    arguments = in_order(_distillation_kernel)(
        student_ptr=student, teacher_ptr=teacher, gradient_ptr=student if gradient is None else gradient,
        target_ptr=target, scales_ptr=scales, dloss_ptr=dloss,
        loss_ptr=result.loss, soft_ptr=result.soft, hard_ptr=result.hard, entropy_ptr=result.entropy,
        stride_student=student.stride(0), stride_teacher=teacher.stride(0),
        stride_gradient=0 if gradient is None else gradient.stride(0),
        stride_dloss=0 if dloss is None or dloss.dim() == 0 else dloss.stride(0), V=v, W=w,
        ignore_index=options.ignore_index, beta=options.beta, rest=1.0 - options.beta, temperature=t,
        soft_weight=options.soft_weight, hard_weight=options.hard_weight,
        softcap=(student_softcap or 1.0) / t, logit_scale=options.logit_scale / t,
        hard_softcap=student_softcap or 1.0, hard_logit_scale=options.logit_scale,
        teacher_softcap=(teacher_softcap or 1.0) / t, teacher_logit_scale=options.teacher_logit_scale / t,
    )  # fmt: skip
    launch(
        _distillation_kernel, m, *arguments,
        KIND=options.kind, HARD=has_hard, TEMPERED=t != 1.0, GRADIENT=gradient is not None,
        NATIVE=has_native_log2(student, device),
        SCALED=options.logit_scale / t != 1.0, SOFTCAP=student_softcap is not None,
        HARD_SCALED=options.logit_scale != 1.0, TEACHER_SCALED=options.teacher_logit_scale / t != 1.0,
        TEACHER_SOFTCAP=teacher_softcap is not None,
        BLOCK_V=config.block_v, LANE=config.lane, num_warps=config.num_warps,
    )  # fmt: skip
    return result


class DivergenceResults(NamedTuple):
    """The results of `divergence_forward`: the loss [] in fp32, and dx [M, V] or None."""

    loss: Tensor
    dx: Tensor | None


def _divergence(
    x: Tensor, y: Tensor, labels: Tensor | None, inverse_count: Tensor | None, options: DivergenceOptions,
    dloss: Tensor | None, with_dx: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the loss and, with `with_dx`, its gradient for the upstream gradient `dloss`, or for ones."""
    if not options.from_logits:
        return divergence(
            x, y, labels, inverse_count, options, with_loss=dloss is None, with_dx=with_dx, dloss=dloss
        )  # fmt: skip
    # Without labels no row is ignored, whatever `ignore_index` is.
    targets, ignored = (labels, options.ignore_index) if labels is not None else (x.new_zeros(len(x)).long(), -1)
    scales = x.new_ones(1, dtype=torch.float32) if inverse_count is None else inverse_count
    weight = 1.0 / options.divisor
    row_options = DistillationOptions(
        options.kind, options.beta, options.temperature, weight, 0.0, None, 1.0, None, 1.0, ignored, False, False, False
    )
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if with_dx else None
    return distill_rows(x, y, targets, scales, dloss, row_options, dx).loss.sum(), dx


@launcher(
    fake=lambda x, needs_dx: DivergenceResults(
        x.new_empty((), dtype=torch.float32), x.new_empty(x.shape) if needs_dx else None
    )
)
def divergence_forward(
    x: Tensor, y: Tensor, labels: Tensor | None, inverse_count: Tensor | None, needs_dx: bool,
    options: DivergenceOptions,
) -> DivergenceResults:  # fmt: skip
    """Return the loss of students and teachers [M, V] with labels [M], and with `needs_dx` its gradient. The first
    element of `inverse_count` [3] is 1 / valid rows, a factor of the loss. None means 1."""
    loss, dx = _divergence(x, y, labels, inverse_count, options, None, needs_dx)
    return DivergenceResults(loss, dx)


@launcher(fake=lambda x: x.new_empty(x.shape))
def divergence_backward(
    dloss: Tensor, x: Tensor, y: Tensor, labels: Tensor | None, inverse_count: Tensor | None,
    options: DivergenceOptions,
) -> Tensor:  # fmt: skip
    """Return dx [M, V] for dloss []."""
    dx = _divergence(x, y, labels, inverse_count, options, dloss, True)[1]
    return dx
