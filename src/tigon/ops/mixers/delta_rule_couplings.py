r"""The kernel of Z, which solves the system of each chunk, in parallel. `delta_rule_kernels` says what Z is.

Z = (I + K beta)^-1 K has no division by beta, so it is finite for beta = 0. The kernel computes it as
(I - (I + beta K)^-1) / beta, where the magnitude of beta is at least `MIN_BETA`.
"""

from tigon.ops.mixers.delta_rule_kernels import (
    CHUNK,
    load_log_decay,
    load_tile,
    norm_factor,
    pair_decays,
    rows_of_chunk,
    saturate,
    square_offsets,
)
from tigon.runtime.compat.triton import tl, triton

# `_couple` divides by beta and replaces smaller magnitudes by this one, which does not change Z.
MIN_BETA = tl.constexpr(1e-20)


@triton.jit
def _invert_diagonal(a):
    """Return the inverses of the diagonal blocks [16, 16] of I + a, by forward substitution, which is stable.

    All blocks are computed at once, [4, 16, 16], because each step waits for the one before it.
    """
    index, block = tl.arange(0, 16), tl.arange(0, 4)
    blocks = tl.permute(tl.reshape(a, [4, 16, 4, 16]), [0, 2, 1, 3])
    is_diagonal = block[:, None, None, None] == block[None, :, None, None]
    a = tl.sum(tl.where(is_diagonal, blocks, 0.0), 1)
    x = tl.where(index[None, :, None] == index[None, None, :], 1.0, tl.zeros_like(a))
    for j in range(15):
        column = tl.sum(tl.where(index[None, None, :] == j, a, 0.0), 2)
        row = tl.sum(tl.where(index[None, :, None] == j, x, 0.0), 1)
        x -= column[:, :, None] * row[:, None, :]
    return x


@triton.jit
def _quarters(a, SIZE: tl.constexpr):
    """Return the blocks (1, 1), (2, 1) and (2, 2) of a matrix of 2 x 2 blocks."""
    blocks = tl.permute(tl.reshape(a, [2, SIZE, 2, SIZE]), [1, 3, 0, 2])
    left, right = tl.split(blocks)
    a11, a21 = tl.split(left)
    _, a22 = tl.split(right)
    return a11, a21, a22


@triton.jit
def _join_inverse(x11, a21, x22, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of a block triangular matrix, given the inverses of its diagonal blocks."""
    x21 = -tl.dot(tl.dot(x22, a21, input_precision=PRECISION), x11, input_precision=PRECISION)
    blocks = tl.join(tl.join(x11, x21), tl.join(tl.zeros_like(x11), x22))
    return tl.reshape(tl.permute(blocks, [2, 0, 3, 1]), [2 * SIZE, 2 * SIZE])


@triton.jit
def _invert_64(a, PRECISION: tl.constexpr):
    """Return (I + a)^-1 for a strictly lower triangular matrix [64, 64] in fp32."""
    inverses = tl.permute(tl.reshape(_invert_diagonal(a), [2, 2, 16, 16]), [2, 3, 0, 1])
    left, right = tl.split(inverses)
    x1, x3 = tl.split(left)
    x2, x4 = tl.split(right)
    a11, a21, a22 = _quarters(a, 32)
    _, b21, _ = _quarters(a11, 16)
    _, b43, _ = _quarters(a22, 16)
    x11, x22 = _join_inverse(x1, b21, x2, 16, PRECISION), _join_inverse(x3, b43, x4, 16, PRECISION)
    return _join_inverse(x11, a21, x22, 32, PRECISION)


@triton.jit
def _couple(pairs, beta, PRECISION: tl.constexpr):
    """Return Z [C, C], given K, of which only the part below the diagonal is read, and beta [C]."""
    index = tl.arange(0, CHUNK)
    pairs = tl.where(index[:, None] > index[None, :], pairs, 0.0)
    beta = tl.where(tl.abs(beta) < MIN_BETA, MIN_BETA, beta)
    # (I + beta K)^-1 = I - beta Z.
    inverse = _invert_64(beta[:, None] * pairs, PRECISION)
    return tl.where(index[:, None] > index[None, :], inverse * (-1.0 / beta)[:, None], 0.0)


@triton.jit(do_not_specialize=["T", "chunks"])
def couplings_kernel(
    k_ptr, g_ptr, beta_ptr, keys_ptr, chunks_ptr, couplings_ptr,  # rows 3 times, [M, H, C, C] or None, [M, 3] or None
    T, chunks, groups, stride_k, stride_g, stride_beta,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALISES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute Z of one chunk, for one head of v. `keys` has K, unless all features have the same decay."""
    heads = KEY_HEADS * groups
    chunk, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    place = (chunk.to(tl.int64) * heads + head) * (CHUNK * CHUNK)
    rows = first + tl.arange(0, CHUNK)
    beta = tl.load(beta_ptr + rows * stride_beta + head, rows < end, 0.0).to(tl.float32)
    if keys_ptr is None:
        k = load_tile(k_ptr + head // groups * KEY_SIZE, first, end, stride_k, KEY_SIZE, tl.arange(0, BLOCK_K))
        factor = norm_factor(k, NORMALISES)
        g = load_log_decay(g_ptr + rows * stride_g + head, rows < end)
        keys = tl.dot(k, tl.trans(k), input_precision="ieee") * factor[:, None] * factor[None, :]
        keys *= pair_decays(tl.cumsum(g, 0))
    else:
        keys = tl.load(keys_ptr + place + square_offsets())
    tl.store(couplings_ptr + place + square_offsets(), saturate(_couple(keys, beta, PRECISION), couplings_ptr))
