"""The kernels of the three products of a low-rank adapter, which the docstring of `low_rank` describes.

Other kernels that add the sums of parts use `is_last` and `add_parts` too.

Shapes: T tokens, N features, R rank (the sum of the ranks if several adapters share a product), S terms.
"""

from tigon.ops.fp8.quantisation_kernels import tensorwise_factor
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.maxima import magnitude_bits, raise_to_largest


@triton.jit
def term(x, index: tl.constexpr):
    """Return term number `index` of x, in bf16."""
    rest = x.to(tl.float32)
    for _ in tl.static_range(index):
        rest -= rest.to(tl.bfloat16).to(tl.float32)
    return rest.to(tl.bfloat16)


@triton.jit
def term_of(pointer, index: tl.constexpr, stride_term):
    """Return the pointer to term number `index`. It advances by one term at a time, because a multiple of the stride
    may take 64 bits where the stride takes 32."""
    for _ in tl.static_range(index):
        pointer += stride_term
    return pointer


@triton.jit(do_not_specialize=["first_end", "second_end", "rows", "blocks"])
def split_kernel(
    first_ptr, second_ptr, third_ptr, out_ptr,  # [r, N] of equal strides, [S, R, N]
    N, first_end, second_end, rows, blocks, stride_r, stride_n, NUM_TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the terms of a block of one row of up to three tensors, which are stacked by rows, to `out`. Row
    `first_end` is the first one of the second tensor, and row `second_end` is the first one of the third tensor."""
    row = tl.program_id(0) // blocks
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    source, source_row = first_ptr, row
    if row >= second_end:
        source, source_row = third_ptr, row - second_end
    elif row >= first_end:
        source, source_row = second_ptr, row - first_end
    values = tl.load(source + source_row.to(tl.int64) * stride_r + cols.to(tl.int64) * stride_n, cols < N, 0.0)
    for i in tl.static_range(NUM_TERMS):
        out_row = (i * rows + row).to(tl.int64)
        tl.store(out_ptr + out_row * N + cols, term(values, i), cols < N)


@triton.jit
def _load_mask(mask_ptr, stride_mask, rows, cols, inside):
    """Return 1 for each element that dropout keeps, and 0 for the others."""
    bits = tl.load(mask_ptr + rows * stride_mask + cols // 8, inside, 0)
    return (bits >> (cols % 8).to(tl.uint8)) & 1


@triton.jit(do_not_specialize=["position"])
def dropout_bits_kernel(seeds_ptr, mask_ptr, N, position, stride_mask, p, BLOCK: tl.constexpr):
    """Draw the bits of a block of columns of one row by Philox. A bit is 1 with a probability of 1 - p."""
    blocks = tl.cdiv(N, 8 * BLOCK)
    row = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)  # of bytes
    seed = tl.load(seeds_ptr + position)
    byte = tl.zeros([BLOCK], tl.int32)
    zero = tl.zeros([BLOCK], tl.uint32)
    for half in tl.static_range(2):
        numbers = tl.philox(seed, columns.to(tl.uint32), zero + row.to(tl.uint32), zero + half, zero)
        for i in tl.static_range(4):
            byte |= (tl.uint_to_uniform_float(numbers[i]) >= p).to(tl.int32) << (4 * half + i)
    tl.store(mask_ptr + row.to(tl.int64) * stride_mask + columns, byte.to(tl.uint8), columns * 8 < N)


@triton.jit
def store_terms(h, out_ptr, offsets, stride_term, mask):
    """Write the three terms of h."""
    for i in tl.static_range(3):
        tl.store(term_of(out_ptr, i, stride_term) + offsets, term(h, i), mask)


@triton.jit
def is_last(counter_ptr, parts):
    """Count this program, and return whether it is the last one of its tile, which sets the counter to zero again."""
    # All threads of this program have stored their values before one of them counts the program.
    tl.debug_barrier()
    found_others = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parts - 1
    if found_others:
        tl.store(counter_ptr, 0)
    return found_others


@triton.jit
def add_parts(sum_ptr, offsets, stride_part, parts, mask, UNROLL: tl.constexpr = 4):
    """Return the sum of the values at the offsets in all parts. Other programs have written these values."""
    total = tl.load(sum_ptr + offsets, mask, 0.0, cache_modifier=".cg")
    # The latencies of UNROLL loads overlap.
    for start in range(1, parts, UNROLL):
        for i in tl.static_range(UNROLL):
            part = start + i
            total += tl.load(sum_ptr + part * stride_part + offsets, mask & (part < parts), 0.0, cache_modifier=".cg")
    return total


@triton.jit
def _multiply_terms(
    x, a_ptr, ranks, cols, N, stride_ar, stride_an,
    R: tl.constexpr, X_TERMS: tl.constexpr, A_TERMS: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Return x A^T for a tile of x. If IS_SPLIT, `a` holds the terms of A. Otherwise it holds A itself."""
    a_mask = (ranks[:, None] < R) & (cols < N)
    if not IS_SPLIT:
        a_offsets = ranks[:, None].to(tl.int64) * stride_ar + cols.to(tl.int64) * stride_an
        a = tl.load(a_ptr + a_offsets, a_mask, 0.0)
    sums = tl.zeros([x.shape[0], ranks.shape[0]], tl.float32)
    for j in tl.static_range(A_TERMS):
        if IS_SPLIT:
            a_term = tl.load(a_ptr + (j * R + ranks[:, None]) * N + cols, a_mask, 0.0)
        else:
            a_term = term(a, j)
        for i in tl.static_range(X_TERMS):
            if i + j < 3:
                sums = tl.dot(x if X_TERMS == 1 else term(x, i), tl.trans(a_term), sums)
    return sums


@triton.jit(do_not_specialize=["T", "part_length", "first_end", "second_end", "parts", "stride_part"])
def project_kernel(
    # Up to three of each, or None: [T, N], [R, N] by strides or [S, R, N] bf16.
    x_ptr, x1_ptr, x2_ptr, a_ptr, a1_ptr, a2_ptr,
    # [parts, T, R] fp32, an int32 for each tile, [3, T, count * R] bf16, [T, N / 8] uint8 or None,
    # [1] int32 or None, [T, N] fp8 or None, [1] fp32 or None
    sum_ptr, counter_ptr, out_ptr, mask_ptr, maximum_ptr, copy_ptr, scale_ptr,
    T, N, N1, N2, part_length, first_end, second_end, parts, stride_x, stride_x1, stride_x2, stride_ar, stride_an,
    stride_part, stride_mask, stride_out, stride_term, stride_copy, factor, factor1, factor2,
    R: tl.constexpr, X_TERMS: tl.constexpr, A_TERMS: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute factor * x A^T over the features of a part, for a block of tokens and a block of the columns of h. If
    there are several x, each has an A of its own, and h has R columns for each of them. The parts of the first x end at
    `first_end`, and those of the second x at `second_end`. If IS_SPLIT, `a` holds the terms of A. Otherwise it holds A
    itself. The maximum is the bits of an fp32 number. Without a copy, the kernel raises the maximum to the largest |x|.
    With a copy, the maximum is an input, and the kernel writes x to the copy in FP8. Both use x before dropout."""
    r_blocks: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    part = pid // r_blocks % parts
    block = pid // r_blocks // parts
    first_part, parts_of_x, index = part * 0, parts, part * 0
    # Triton compiles no branch that `is not None` excludes, so each such condition is a statement of its own.
    if x1_ptr is not None:
        parts_of_x = first_end
        if part >= first_end:
            x_ptr, a_ptr, N, stride_x, factor = x1_ptr, a1_ptr, N1, stride_x1, factor1
            first_part, parts_of_x, index = first_end, second_end - first_end, index + 1
    if x2_ptr is not None:  # noqa: SIM102
        if part >= second_end:
            x_ptr, a_ptr, N, stride_x, factor = x2_ptr, a2_ptr, N2, stride_x2, factor2
            first_part, parts_of_x, index = second_end, parts - second_end, index + 1
    rows = (block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    ranks = (pid % r_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    steps = tl.arange(0, BLOCK_N)[None, :]
    # The length of a part is a multiple of `BLOCK_N`. Triton vectorises the loads only if it knows that.
    first = tl.multiple_of((part - first_part) * part_length, BLOCK_N)
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    if copy_ptr is not None:
        copy_factor = tensorwise_factor(maximum_ptr, scale_ptr, pid == 0)
    elif maximum_ptr is not None:
        row_bits = tl.zeros([BLOCK_T, 1], tl.int32)
    for start in tl.range(first, tl.minimum(first + part_length, N), BLOCK_N, num_stages=STAGES):
        cols = start + steps
        inside = (rows < T) & (cols < N)
        x = tl.load(x_ptr + rows * stride_x + cols, inside, 0.0)
        if copy_ptr is not None:
            # All blocks of columns of h read the same x. Only the programs of the first such block write the copy.
            q = (x.to(tl.float32) * copy_factor).to(copy_ptr.dtype.element_ty)
            tl.store(copy_ptr + rows * stride_copy + cols, q, inside & (pid % r_blocks == 0))
        elif maximum_ptr is not None:
            row_bits = tl.maximum(row_bits, tl.max(magnitude_bits(x.to(tl.float32)), axis=1, keep_dims=True))
        if mask_ptr is not None:
            x = tl.where(_load_mask(mask_ptr, stride_mask, rows, cols, inside) == 1, x, 0.0)
        sums = _multiply_terms(x, a_ptr, ranks, cols, N, stride_ar, stride_an, R, X_TERMS, A_TERMS, IS_SPLIT)
        total += sums * factor
    if copy_ptr is None and maximum_ptr is not None:
        raise_to_largest(maximum_ptr, row_bits)
    mask = (rows < T) & (ranks[None, :] < R)
    # A single part is stored and read again too, so that few tokens need no other variant of this kernel.
    offsets = rows * R + ranks[None, :]
    tl.store(sum_ptr + part.to(tl.int64) * stride_part + offsets, total, mask)
    tile = (index * tl.cdiv(T, BLOCK_T) + block) * r_blocks + pid % r_blocks
    if is_last(counter_ptr + tile, parts_of_x):
        sum_ptr += first_part.to(tl.int64) * stride_part
        # More values of a large tile would not fit in the registers.
        unroll: tl.constexpr = 4 if BLOCK_R <= 32 else 1
        total = add_parts(sum_ptr, offsets, stride_part.to(tl.int64), parts_of_x, mask, unroll)
        store_terms(total, out_ptr, rows * stride_out + index * R + ranks[None, :], stride_term, mask)


@triton.jit
def _add_expansion(
    total, h_ptr, b_ptr, rows, cols, T, N, stride_h, stride_term, stride_bn, stride_br, factor,
    R: tl.constexpr, ORDER: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return total [T, N] + factor * h B^T."""
    for start in tl.static_range(0, R, BLOCK_R):
        ranks = start + tl.arange(0, BLOCK_R)
        b_mask = (cols < N) & (ranks[:, None] < R)
        b_offsets = cols.to(tl.int64) * stride_bn + ranks[:, None].to(tl.int64) * stride_br
        b = tl.load(b_ptr + b_offsets, b_mask, 0.0).to(tl.float32) * factor
        for i in tl.static_range(ORDER):
            offsets = rows * stride_h + ranks[None, :]
            h = tl.load(term_of(h_ptr, i, stride_term) + offsets, (rows < T) & (ranks[None, :] < R), 0.0)
            for j in tl.static_range(ORDER - i):
                total = tl.dot(h, term(b, j), total)
    return total


@triton.jit(do_not_specialize=["T"])
def expand_kernel(
    # [3, T, count * R] bf16, and up to three of each, or None: [N, R] by strides, [N] fp32 and [T, N]
    h_ptr, b_ptr, b1_ptr, b2_ptr, bias_ptr, bias1_ptr, bias2_ptr, out_ptr, out1_ptr, out2_ptr,
    mask_ptr,  # a mask of `out`, or None
    T, N, N1, N2, stride_h, stride_term, stride_bn, stride_br, stride_out, stride_out1, stride_out2, stride_mask,
    factor, factor1, factor2,
    R: tl.constexpr, ORDER: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write factor * h B^T + bias to a tile of `out`, or add it to the tile if ADDS is True. h has R columns for each
    B. If there are as many outputs as B, each of them gets its own product. A single output gets the sum of all
    products. ORDER is the number of terms of h and of B that the precision of `out` needs. If ADDS, the tiles are
    computed in reverse order, because the last tiles that were written to `out` are still in the L2 cache."""
    first_end = tl.cdiv(N, BLOCK_N)
    second_end = first_end
    if out1_ptr is not None:
        second_end += tl.cdiv(N1, BLOCK_N)
    n_blocks = second_end
    if out2_ptr is not None:
        n_blocks += tl.cdiv(N2, BLOCK_N)
    pid = tl.program_id(0)
    if ADDS:
        pid = tl.num_programs(0) - 1 - pid
    n_block, first_block = pid % n_blocks, pid * 0
    # Triton compiles no branch that `is not None` excludes, so each such condition is a statement of its own.
    if out1_ptr is not None:  # noqa: SIM102
        if n_block >= first_end:
            h_ptr, b_ptr, out_ptr, N, stride_out, factor = h_ptr + R, b1_ptr, out1_ptr, N1, stride_out1, factor1
            first_block = first_end
            if bias_ptr is not None:
                bias_ptr = bias1_ptr
    if out2_ptr is not None:  # noqa: SIM102
        if n_block >= second_end:
            h_ptr, b_ptr, out_ptr, N, stride_out, factor = h_ptr + R, b2_ptr, out2_ptr, N2, stride_out2, factor2
            first_block = second_end
            if bias_ptr is not None:
                bias_ptr = bias2_ptr
    rows = ((pid // n_blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    cols = ((n_block - first_block) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    total = _add_expansion(
        total, h_ptr, b_ptr, rows, cols, T, N, stride_h, stride_term, stride_bn, stride_br, factor, R, ORDER, BLOCK_R
    )
    if out1_ptr is None:
        if b1_ptr is not None:
            total = _add_expansion(
                total, h_ptr + R, b1_ptr, rows, cols, T, N, stride_h, stride_term, stride_bn, stride_br, factor1,
                R, ORDER, BLOCK_R,
            )  # fmt: skip
        if b2_ptr is not None:
            total = _add_expansion(
                total, h_ptr + 2 * R, b2_ptr, rows, cols, T, N, stride_h, stride_term, stride_bn, stride_br, factor2,
                R, ORDER, BLOCK_R,
            )  # fmt: skip
    inside = (rows < T) & (cols < N)
    if mask_ptr is not None:
        total = tl.where(_load_mask(mask_ptr, stride_mask, rows, cols, inside) == 1, total, 0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + cols, cols < N, 0.0)
    out = out_ptr + rows * stride_out + cols
    if ADDS:
        total += tl.load(out, inside, 0.0).to(tl.float32)
    tl.store(out, total, inside)


@triton.jit
def _sum_tokens(
    z_ptr, h_ptr, sum_ptr, counter_ptr, out_ptr, mask_ptr, block, r_block, part,
    T, N, part_length, parts, stride_z, stride_mask, stride_h, stride_term, stride_on, stride_or, factor,
    R: tl.constexpr, Z_TERMS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one tile of factor * z^T h over the tokens of a part. The last program of a tile adds the parts."""
    cols = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    ranks = (r_block * BLOCK_R + tl.arange(0, BLOCK_R))[None, :]
    first = part.to(tl.int64) * part_length
    last = tl.minimum(first + part_length, T)
    steps = tl.arange(0, BLOCK_T)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for start in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        rows = start + steps
        inside = (rows < last) & (cols < N)
        z = tl.load(z_ptr + rows * stride_z + cols, inside, 0.0)
        if mask_ptr is not None:
            z = tl.where(_load_mask(mask_ptr, stride_mask, rows, cols, inside) == 1, z, 0.0)
        sums = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for j in tl.static_range(3):
            h_rows = term_of(h_ptr, j, stride_term) + rows * stride_h
            h = tl.load(h_rows + ranks, (rows < last) & (ranks < R), 0.0)
            for i in tl.static_range(Z_TERMS):
                if i + j < 3:
                    sums = tl.dot(tl.trans(z if Z_TERMS == 1 else term(z, i)), h, sums)
        total += sums * factor
    features = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    mask = (features < N) & (ranks < R)
    # The sums of the parts have the strides of the result.
    offsets = features * stride_on + ranks * stride_or
    # N is a constant if it is 1, so it has no method `to`.
    stride_part = tl.full([], R, tl.int64) * N
    tl.store(sum_ptr + part * stride_part + offsets, total, mask)
    if is_last(counter_ptr, parts):
        # More values of a large tile would not fit in the registers.
        unroll: tl.constexpr = 4 if BLOCK_R <= 16 else 2
        tl.store(out_ptr + offsets, add_parts(sum_ptr, offsets, stride_part, parts, mask, unroll), mask)


@triton.jit(do_not_specialize=["T", "part_length", "parts"])
def token_sum_kernel(
    # [T, N] and three more or None, [3, T, R] bf16, [3, T, count * R1] bf16 or None
    z_ptr, z1_ptr, z2_ptr, z3_ptr, h_ptr, g_ptr,
    # fp32 for each part and each element of a result, an int32 for each tile, [N, R] by strides, [N1, R1] ...
    sum_ptr, counter_ptr, out_ptr, out1_ptr, out2_ptr, out3_ptr, mask_ptr,  # [T, N / 8] or None
    T, N, N1, N2, N3, part_length, parts, stride_z, stride_z1, stride_z2, stride_z3, stride_mask,
    stride_h, stride_term, stride_g, stride_g_term, stride_on, stride_or, factor, factor1, factor2, factor3,
    R: tl.constexpr, R1: tl.constexpr, Z_TERMS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_R1: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute factor * z^T h, and factor_i * z_i^T g_i for up to three z_i. g has R1 columns for each of them."""
    r_blocks: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    r1_blocks: tl.constexpr = (R1 + BLOCK_R1 - 1) // BLOCK_R1
    part, tile = tl.program_id(0) % parts, tl.program_id(0) // parts
    counter_ptr += tile
    tiles = tl.cdiv(N, BLOCK_N) * r_blocks
    if tile < tiles:
        _sum_tokens(
            z_ptr, h_ptr, sum_ptr, counter_ptr, out_ptr, mask_ptr, tile // r_blocks, tile % r_blocks, part,
            T, N, part_length, parts, stride_z, stride_mask, stride_h, stride_term, stride_on, stride_or, factor,
            R, Z_TERMS, BLOCK_T, BLOCK_N, BLOCK_R, STAGES,
        )  # fmt: skip
    elif z1_ptr is not None:
        tile -= tiles
        sum_ptr += parts.to(tl.int64) * N * R
        if z2_ptr is not None:
            tiles = tl.cdiv(N1, BLOCK_N) * r1_blocks
            second_tiles = tl.cdiv(N2, BLOCK_N) * r1_blocks
            if tile >= tiles:
                tile -= tiles
                sum_ptr += parts.to(tl.int64) * N1 * R1
                z1_ptr, g_ptr, out1_ptr, N1, stride_z1, factor1 = z2_ptr, g_ptr + R1, out2_ptr, N2, stride_z2, factor2
                if z3_ptr is not None:  # noqa: SIM102
                    if tile >= second_tiles:
                        tile -= second_tiles
                        sum_ptr += parts.to(tl.int64) * N2 * R1
                        z1_ptr, g_ptr, out1_ptr = z3_ptr, g_ptr + R1, out3_ptr
                        N1, stride_z1, factor1 = N3, stride_z3, factor3
        _sum_tokens(
            z1_ptr, g_ptr, sum_ptr, counter_ptr, out1_ptr, None, tile // r1_blocks, tile % r1_blocks, part,
            T, N1, part_length, parts, stride_z1, 0, stride_g, stride_g_term, R1, 1, factor1,
            R1, Z_TERMS, BLOCK_T, BLOCK_N, BLOCK_R1, STAGES,
        )  # fmt: skip
