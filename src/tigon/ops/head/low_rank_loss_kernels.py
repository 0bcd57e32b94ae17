"""The two kernels of `low_rank_loss`, which has their maths and their memory traffic.

Shapes: M tokens of a chunk, V vocabulary, R rank, S terms, P parts.
"""

from tigon.ops.adapters.low_rank_kernels import is_last, term
from tigon.ops.logits.token.maths import LOG2E, LOWEST, target_weight, transform
from tigon.runtime.compat.triton import tl, triton


@triton.jit
def _load(pointers, mask, IS_WHOLE: tl.constexpr):
    """Load a tile without a mask if it is whole. A mask takes instructions and registers for each element."""
    if IS_WHOLE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask, 0.0)
    return values


@triton.jit
def _next_target(class_t, start):
    """Return the smallest target of the tokens that is at least `start`, or a number above every target.

    A tile rarely contains one of the targets of its tokens. The kernels compare the columns with the targets only then.
    """
    return tl.min(tl.where(class_t >= start, class_t, 0x7FFFFFFF))


@triton.jit
def _low_rank_tile(
    h_ptr, b_ptr, rows, cols, row_mask, V, stride_h, stride_h_term, stride_b_term,
    R: tl.constexpr, ORDER: tl.constexpr, H_TERMS: tl.constexpr, B_TERMS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, HAS_WHOLE_TILES: tl.constexpr,
):  # fmt: skip
    """Return a tile of h B^T in fp32, without the products of terms whose indices add up to ORDER or more."""
    total = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    wide_cols = cols.to(tl.int64)
    IS_WHOLE: tl.constexpr = HAS_WHOLE_TILES and R % BLOCK_R == 0
    for start in tl.static_range(0, R, BLOCK_R):
        ranks = start + tl.arange(0, BLOCK_R)
        h_mask, b_mask = row_mask[:, None] & (ranks[None, :] < R), (cols[None, :] < V) & (ranks[:, None] < R)
        for i in tl.static_range(ORDER):
            if i < H_TERMS:
                h = tl.load(h_ptr + i * stride_h_term + rows[:, None] * stride_h + ranks[None, :], h_mask, 0.0)
                for j in tl.static_range(ORDER - i):
                    if j < B_TERMS:
                        offsets = j * stride_b_term + wide_cols[None, :] * R + ranks[:, None]
                        b = _load(b_ptr + offsets, b_mask, IS_WHOLE)
                        total = tl.dot(h, b, total)
    return total


@triton.jit(do_not_specialize=["M", "part_length", "parts"])
def low_rank_statistics_kernel(
    # [M, V], [M], [V] or None, [3], [S, M, R] bf16, [S, V, R] bf16, [6, P, M] fp32, an int32 for each block of tokens
    logits_ptr, target_ptr, weight_ptr, scales_ptr, h_ptr, b_ptr, partial_ptr, counter_ptr,
    loss_ptr, lse_ptr, z_ptr, predicted_ptr, log_prob_ptr, entropy_ptr,  # [M], [M, 2], four times [M] or None
    M, V, part_length, parts, stride_logits, stride_h, stride_h_term, stride_b_term,
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    SMOOTHING: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, TOKEN_SCALING: tl.constexpr,
    R: tl.constexpr, ORDER: tl.constexpr, H_TERMS: tl.constexpr, B_TERMS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, HAS_WHOLE_TILES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the sums of a block of tokens over a part of the vocabulary. The last program computes the statistics.

    HAS_WHOLE_TILES says that V is a multiple of BLOCK_V.
    """
    part = tl.program_id(0) % parts
    block = tl.program_id(0) // parts
    rows = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = rows < M
    target = tl.load(target_ptr + rows, exists, 0)
    valid = exists & (target != ignore_index)
    inside = valid & (target >= 0) & (target < V)
    # Comparing each column with an int64 target would take twice the instructions and registers.
    class_t = tl.where(inside, target, -1).to(tl.int32)
    pivot = tl.zeros([BLOCK_T], tl.float32)
    if SMOOTHING:
        # The sum of differences from a number near the logits loses no digits to their common offset.
        a_t = tl.load(logits_ptr + rows * stride_logits + target, inside, 0.0)
        near = transform(a_t, logit_scale, softcap, SCALED, SOFTCAP)[0]
        pivot = tl.where(tl.abs(near) < float("inf"), near, 0.0)

    high = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    moment = tl.zeros([BLOCK_T], tl.float32)
    weighted = tl.zeros([BLOCK_T], tl.float32)
    x_t = tl.zeros([BLOCK_T], tl.float32)
    best = tl.zeros([BLOCK_T], tl.int32)
    # The length of a part is a multiple of `BLOCK_V`. Triton vectorises the loads only if it knows that.
    first = tl.multiple_of(part * part_length, BLOCK_V)
    next_target = _next_target(class_t, first)
    for start in tl.range(first, tl.minimum(first + part_length, V), BLOCK_V, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_V)
        is_class = (cols < V)[None, :]
        mask = valid[:, None] if HAS_WHOLE_TILES else valid[:, None] & is_class
        a = tl.load(logits_ptr + rows[:, None] * stride_logits + cols[None, :], mask, 0.0)
        low = _low_rank_tile(
            h_ptr, b_ptr, rows, cols, valid, V, stride_h, stride_h_term, stride_b_term,
            R, ORDER, H_TERMS, B_TERMS, BLOCK_T, BLOCK_V, BLOCK_R, HAS_WHOLE_TILES,
        )  # fmt: skip
        x = transform(a.to(tl.float32) + low, logit_scale, softcap, SCALED, SOFTCAP)[0]
        if SMOOTHING:
            difference = x - pivot[:, None]
            if weight_ptr is not None:
                difference *= tl.load(weight_ptr + cols, cols < V, 0.0).to(tl.float32)[None, :]
            weighted += tl.sum(tl.where(is_class, difference, 0.0), axis=1)
        if next_target < start + BLOCK_V:
            x_t += tl.sum(tl.where(cols[None, :] == class_t[:, None], x, 0.0), axis=1)
            next_target = _next_target(class_t, start + BLOCK_V)
        if not HAS_WHOLE_TILES:
            x = tl.where(is_class, x, float("-inf"))
        if predicted_ptr is not None:
            tile_high, index = tl.max(x, axis=1, return_indices=True)
            best = tl.where(tile_high > high, start + index, best)
        else:
            tile_high = tl.max(x, axis=1)
        new_high = tl.maximum(high, tile_high)
        finite = tl.where(new_high == float("-inf"), 0.0, new_high)
        # The difference comes before the product with log2(e), so that the largest logit contributes exactly one.
        fall, shifted = high - finite, x - finite[:, None]
        factor, e = tl.exp2(fall * LOG2E), tl.exp2(shifted * LOG2E)
        if entropy_ptr is not None:
            tile_moment = tl.sum(e * tl.maximum(shifted, LOWEST), axis=1)
            moment = (moment + tl.maximum(fall, LOWEST) * total) * factor + tile_moment
        total = total * factor + tl.sum(e, axis=1)
        high = new_high

    # The sums are stored by kind, then by part, then by token.
    field = parts.to(tl.int64) * M
    partial_ptr += rows
    part_ptr = partial_ptr + part.to(tl.int64) * M
    tl.store(part_ptr, high, exists)
    tl.store(part_ptr + field, total, exists)
    tl.store(part_ptr + 2 * field, x_t, exists)
    if SMOOTHING:
        tl.store(part_ptr + 3 * field, weighted, exists)
    if entropy_ptr is not None:
        tl.store(part_ptr + 4 * field, moment, exists)
    if predicted_ptr is not None:
        tl.store(part_ptr + 5 * field, best.to(tl.float32), exists)
    if is_last(counter_ptr + block, parts):
        high = tl.full([BLOCK_T], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_T], tl.float32)
        moment = tl.zeros([BLOCK_T], tl.float32)
        weighted = tl.zeros([BLOCK_T], tl.float32)
        x_t = tl.zeros([BLOCK_T], tl.float32)
        argmax = tl.zeros([BLOCK_T], tl.float32)
        for _part in range(0, parts):
            part_high = tl.load(partial_ptr, exists, 0.0, cache_modifier=".cg")
            part_total = tl.load(partial_ptr + field, exists, 1.0, cache_modifier=".cg")
            x_t += tl.load(partial_ptr + 2 * field, exists, 0.0, cache_modifier=".cg")
            if SMOOTHING:
                weighted += tl.load(partial_ptr + 3 * field, exists, 0.0, cache_modifier=".cg")
            if predicted_ptr is not None:
                part_best = tl.load(partial_ptr + 5 * field, exists, 0.0, cache_modifier=".cg")
                argmax = tl.where(part_high > high, part_best, argmax)
            new_high = tl.maximum(high, part_high)
            finite = tl.where(new_high == float("-inf"), 0.0, new_high)
            fall, part_fall = high - finite, part_high - finite
            factor, part_factor = tl.exp2(fall * LOG2E), tl.exp2(part_fall * LOG2E)
            if entropy_ptr is not None:
                part_moment = tl.load(partial_ptr + 4 * field, exists, 0.0, cache_modifier=".cg")
                moment = (moment + tl.maximum(fall, LOWEST) * total) * factor
                moment += (part_moment + tl.maximum(part_fall, LOWEST) * part_total) * part_factor
            total = total * factor + part_total * part_factor
            high = new_high
            partial_ptr += M

        top = tl.where(high == float("-inf"), 0.0, high)
        log_total = tl.log(total)
        lse = top + log_total
        nll = log_total - (x_t - top)
        loss = (1.0 - label_smoothing) * target_weight(weight_ptr, target, V) * nll
        if SMOOTHING:
            pivot_difference = log_total - (pivot - top)
            loss += label_smoothing / V * (tl.load(scales_ptr + 2) * pivot_difference - weighted)
        z = tl.load(scales_ptr + 1) * z_loss * lse * lse
        loss = tl.load(scales_ptr) * loss + z
        log_prob = tl.where(inside, -nll, float("nan"))
        if TOKEN_SCALING:
            loss *= tl.exp(log_prob)
            z *= tl.exp(log_prob)
        tl.store(loss_ptr + rows, tl.where(valid, loss, 0.0), exists)
        tl.store(lse_ptr + rows * 2, tl.where(valid, top, 0.0), exists)
        tl.store(lse_ptr + rows * 2 + 1, tl.where(valid, total, 0.0), exists)
        if z_ptr is not None:
            tl.store(z_ptr + rows, tl.where(valid, z, 0.0), exists)
        if predicted_ptr is not None:
            tl.store(predicted_ptr + rows, tl.where(valid, argmax.to(tl.int64), -1), exists)
        if log_prob_ptr is not None:
            tl.store(log_prob_ptr + rows, tl.where(valid, log_prob, 0.0), exists)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + rows, tl.where(valid, log_total - tl.div_rn(moment, total), 0.0), exists)


@triton.jit
def _load_terms(pointer, stride_term, mask, NUM_TERMS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Return two tiles of terms. The second one repeats the first one, and is never read, if there is only one term."""
    first = _load(pointer, mask, IS_WHOLE)
    second = first
    if NUM_TERMS > 1:
        second = _load(pointer + stride_term, mask, IS_WHOLE)
    return first, second


@triton.jit(do_not_specialize=["M", "part_length", "parts", "stride_dloss"])
def low_rank_gradient_kernel(
    logits_ptr, target_ptr, weight_ptr, scales_ptr, lse_ptr,  # [M, V], [M], [V] or None, [3], [M, 2]
    log_prob_ptr, entropy_ptr,  # [M] or None: read for token scaling, and for the gradient of the entropy
    dloss_ptr, dlog_prob_ptr, dentropy_ptr,  # [M] or None
    h_ptr, b_ptr, dh_ptr,  # [S, M, R] bf16, [S, V, R] bf16, [P, M, R] fp32 or None
    M, V, part_length, parts, stride_logits, stride_dloss, stride_h, stride_h_term, stride_b_term,
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    SMOOTHING: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    R: tl.constexpr, ORDER: tl.constexpr, H_TERMS: tl.constexpr, B_TERMS: tl.constexpr, DA_TERMS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, HAS_WHOLE_TILES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Overwrite a part of the vocabulary of a block of tokens with the gradient, and sum dh over the tiles.

    dh needs R <= BLOCK_R. HAS_WHOLE_TILES says that V is a multiple of BLOCK_V.
    """
    part = tl.program_id(0) % parts
    block = (tl.program_id(0) // parts).to(tl.int64)
    rows = block * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = rows < M
    target = tl.load(target_ptr + rows, exists, 0)
    valid = exists & (target != ignore_index)
    class_t = tl.where(valid & (target >= 0) & (target < V), target, -1).to(tl.int32)
    ranks = tl.arange(0, BLOCK_R)
    HOLDS_FACTORS: tl.constexpr = R <= BLOCK_R
    if HOLDS_FACTORS:
        h_offsets = rows[:, None] * stride_h + ranks[None, :]
        h0, h1 = _load_terms(
            h_ptr + h_offsets, stride_h_term, valid[:, None] & (ranks[None, :] < R), H_TERMS, False
        )  # fmt: skip

    # The factors of a masked row are zero, and its logits are read as zeros, so that its gradient is zero. It must not
    # divide by zero, because 0 times infinity is NaN.
    top, total = tl.load(lse_ptr + rows * 2, valid, 0.0), tl.load(lse_ptr + rows * 2 + 1, valid, 1.0)
    dloss = tl.full([BLOCK_T], 1.0, tl.float32)
    if dloss_ptr is not None:
        dloss = tl.load(dloss_ptr + rows * stride_dloss, valid, 0.0).to(tl.float32)
    if log_prob_ptr is not None:
        dloss *= tl.exp(tl.load(log_prob_ptr + rows, valid, 0.0))
    scale = tl.where(valid, dloss * tl.load(scales_ptr), 0.0)
    z_scale = tl.where(valid, dloss * tl.load(scales_ptr + 1), 0.0)
    target_factor = tl.where(valid, scale * (1.0 - label_smoothing) * target_weight(weight_ptr, target, V), 0.0)
    if dlog_prob_ptr is not None:
        target_factor -= tl.load(dlog_prob_ptr + rows, valid, 0.0)
    mass = target_factor + z_scale * 2.0 * z_loss * (top + tl.log(total))
    if SMOOTHING:
        smoothing = scale * label_smoothing / V
        mass += smoothing * tl.load(scales_ptr + 2)
    per_exponential = tl.div_rn(mass, total)
    if dentropy_ptr is not None:
        # This is the mean of x - top.
        mean = tl.log(total) - tl.load(entropy_ptr + rows, valid, 0.0)
        dentropy = tl.div_rn(tl.load(dentropy_ptr + rows, valid, 0.0), total)

    dh = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    first = tl.multiple_of(part * part_length, BLOCK_V)
    next_target = _next_target(class_t, first)
    for start in tl.range(first, tl.minimum(first + part_length, V), BLOCK_V, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_V)
        is_class = cols < V
        pointers = logits_ptr + rows[:, None] * stride_logits + cols[None, :]
        inside = valid[:, None] if HAS_WHOLE_TILES else valid[:, None] & is_class[None, :]
        a = tl.load(pointers, inside, 0.0)
        if HOLDS_FACTORS:
            b_offsets = cols.to(tl.int64)[:, None] * R + ranks[None, :]
            b_mask = is_class[:, None] & (ranks[None, :] < R)
            IS_WHOLE: tl.constexpr = HAS_WHOLE_TILES and R == BLOCK_R
            b0, b1 = _load_terms(b_ptr + b_offsets, stride_b_term, b_mask, B_TERMS, IS_WHOLE)
            low = tl.dot(h0, tl.trans(b0))
            if ORDER > 1:
                if B_TERMS > 1:
                    low = tl.dot(h0, tl.trans(b1), low)
                if H_TERMS > 1:
                    low = tl.dot(h1, tl.trans(b0), low)
        else:
            low = _low_rank_tile(
                h_ptr, b_ptr, rows, cols, valid, V, stride_h, stride_h_term, stride_b_term,
                R, ORDER, H_TERMS, B_TERMS, BLOCK_T, BLOCK_V, BLOCK_R, HAS_WHOLE_TILES,
            )  # fmt: skip
        x, slope = transform(a.to(tl.float32) + low, logit_scale, softcap, SCALED, SOFTCAP)
        shifted = x - top[:, None]
        factor = per_exponential[:, None]
        if dentropy_ptr is not None:
            factor = factor - dentropy[:, None] * (tl.maximum(shifted, LOWEST) - mean[:, None])
        dx = factor * tl.exp2(shifted * LOG2E)
        if next_target < start + BLOCK_V:
            dx -= tl.where(cols[None, :] == class_t[:, None], target_factor[:, None], 0.0)
            next_target = _next_target(class_t, start + BLOCK_V)
        if SMOOTHING:
            if weight_ptr is not None:
                dx -= smoothing[:, None] * tl.load(weight_ptr + cols, is_class, 0.0).to(tl.float32)[None, :]
            else:
                dx -= smoothing[:, None]
        dx *= slope
        if not HAS_WHOLE_TILES:
            dx = tl.where(is_class[None, :], dx, 0.0)
        da = dx.to(logits_ptr.dtype.element_ty)
        tl.store(pointers, da, exists[:, None] if HAS_WHOLE_TILES else exists[:, None] & is_class[None, :])

        # Tensor cores do not round the sums that they carry, so the sums of each tile start from zero.
        if dh_ptr is not None:
            sums = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for i in tl.static_range(DA_TERMS):
                for j in tl.static_range(B_TERMS):
                    if i + j < ORDER:
                        b = b0 if j == 0 else b1
                        sums = tl.dot(da if DA_TERMS == 1 else term(da, i), b, sums)
            dh += sums
    if dh_ptr is not None:
        dh_offsets = (part.to(tl.int64) * M + rows[:, None]) * R + ranks[None, :]
        tl.store(dh_ptr + dh_offsets, dh, exists[:, None] & (ranks[None, :] < R))
