r"""Compact formats of optimizer states: moments of 8 bits, master weights of 24 bits, and stochastic rounding.

8-bit moments have one fp32 scale s for each block of 128 values:

    m = sign(c) (|c| s)^2,   c in -127..127,   s = max(sqrt(|m|)) / 127
    v = ((c + 1/2) s)^4,     c in    0..255,   s = max(sqrt(sqrt(v))) / 255.5

The codes c are uniform in a root of the value, so small values of a block keep digits that a linear code would lose. No
code stands for a v of zero, unless the whole block is zero: the update would divide by eps alone.

The first moment is rounded to nearest. The second one changes by less than half a step of its codes at a time, and
would stay where it is if it were rounded to nearest. Instead a number u in [0, 1) is added to it before it is rounded
down. Random numbers would add more noise. The values of u in successive steps t are evenly distributed (Weyl, 1916), so
that on average no change is lost:

    u = fractional part of (i 0.7549 + t 0.6180) for element i, in fixed point of 32 bits

On a small Llama with beta2 = 0.999, the update differs from that of fp32 moments by 2 % to 6 % of its norm after 300
steps, and by 2 % to 10 % with rounding to nearest. Sources: blocks of Dettmers et al., arXiv:2110.02861; functions in
place of tables of codes of Gonzalez Ortiz et al., "FlashOptim", arXiv:2602.23349.

A 24-bit master weight is an fp32 number whose lowest 8 bits are zero, given by its bits:

    parameter  = (bits + 0x8000) >> 16, the nearest bf16 number
    correction = int8((bits - (parameter << 16)) >> 8), in -128..127

fp32 is rounded to 24 bits, and these to bf16, to nearest, with ties away from zero. The correction is exact even where
the exponents of the two numbers differ, so parameter and correction hold all 24 bits.

Stochastic rounding takes bf16 from the upper bits of an fp32 number plus a random number:

    parameter = (bits + r) >> 16, r in 0..65535

r is a half of a word of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), whose
counter is (index of the element / 8, key of the parameter, number of the step, 0), so a run can be repeated exactly.
"""

import torch
from torch import Tensor

from tigon.runtime.device import cdiv

# The number of values that share a scale. Two fp32 scales for each 128 values are 0.06 bytes a parameter.
QUANT_BLOCK = 128

# The factors of the dither: 2^32 times 0.7549 (1 / the plastic number) and 0.6180 (1 / the golden ratio).
INDEX_FACTOR = 3242174889
STEP_FACTOR = 2654435769

# The bits of a NaN whose lowest bits are zero. A NaN of a GPU is 0x7fffffff, which rounding would turn into -0.
NAN_BITS = 0x7FC00000


def _scaled(roots: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return roots [N] such that the largest magnitude of each block is `largest`, and the scales [ceil(N / 128)]."""
    n = roots.numel()
    blocks = torch.nn.functional.pad(roots, (0, -n % QUANT_BLOCK)).view(-1, QUANT_BLOCK)
    maxima = blocks.abs().amax(1, keepdim=True) if n else blocks[:, :1]
    scaled = blocks * torch.where(maxima > 0, largest / maxima, 0.0)
    return scaled.view(-1)[:n], maxima.view(-1) / largest


def encode_signed(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 codes and the scales of a first moment, m [N] in fp32."""
    scaled, scales = _scaled(m.abs().sqrt().copysign(m), 127.0)
    return scaled.round().to(torch.int8), scales


def _times_scales(x: Tensor, scales: Tensor) -> Tensor:
    """Return the products of x [N] and the scales of its blocks."""
    return x * scales.repeat_interleave(QUANT_BLOCK)[: x.numel()]


def decode_signed(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the first moment [N] in fp32."""
    roots = _times_scales(codes.float(), scales)
    return roots * roots.abs()


def dither(n: int, step: int, device: torch.device) -> Tensor:
    """Return the numbers u of n elements in a step: odd multiples of 2^-16."""
    words = torch.arange(n, dtype=torch.int64, device=device) * INDEX_FACTOR + step * STEP_FACTOR
    return (((words & 0xFFFFFFFF) >> 17).float() + 0.5) * 2.0**-15


def encode_squares(v: Tensor, dithers: Tensor | float = 0.5) -> tuple[Tensor, Tensor]:
    """Return the uint8 codes and the scales of a second moment, v [N] in fp32, not negative. With 0.5 a code is the
    nearest one."""
    scaled, scales = _scaled(v.sqrt().sqrt(), 255.5)
    codes = ((scaled - 0.5).clamp(min=0.0) + dithers).floor()
    # The maximum of a block may be above 255.5 in its last digit.
    return codes.clamp(max=255.0).to(torch.uint8), scales


def decode_squares(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the second moment [N] in fp32."""
    return _times_scales(codes + 0.5, scales).square().square()


def _finite_bits(p: Tensor) -> Tensor:
    """Return the bits of fp32 numbers as int32, with one pattern for all NaNs."""
    return torch.where(p.isnan(), NAN_BITS, p.view(torch.int32))


def split_master(p: Tensor) -> tuple[Tensor, Tensor]:
    """Round p (fp32) to 24 bits, and return it as a bf16 parameter and an int8 correction."""
    bits = _finite_bits(p) + 0x80
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), (bits >> 8).to(torch.int8)


def correction_of(parameter: Tensor, master: Tensor) -> Tensor:
    """Return the correction of a bf16 parameter whose fp32 master was rounded in any way; 0 if it is another number."""
    bits = ((_finite_bits(master) + 0x80) & ~0xFF).to(torch.int64)
    difference = (bits - (parameter.view(torch.int16).to(torch.int64) << 16)) >> 8
    # A tie may have been rounded down.
    return torch.where(difference.abs() <= 128, difference.clamp(max=127), 0).to(torch.int8)


def join_master(parameter: Tensor, correction: Tensor) -> Tensor:
    """Return the 24-bit master in fp32. If other code has set a parameter to zero, a negative correction does not
    count: it would carry into the sign."""
    correction = torch.where(parameter == 0, correction.clamp(min=0), correction)
    bits = (parameter.view(torch.int16).to(torch.int32) << 16) + (correction.to(torch.int32) << 8)
    return bits.view(torch.float32)


def philox(counter: tuple[Tensor, int, int, int]) -> tuple[Tensor, ...]:
    """Return the four words of Philox 4x32-10 with the key 0, as int64 in 0..2^32-1."""
    c0, c1, c2, c3 = (torch.as_tensor(x, dtype=torch.int64, device=counter[0].device) for x in counter)
    k0 = k1 = 0
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        # The products take 64 bits. A shift of a negative int64 is arithmetic, so the mask removes its sign.
        c0, c2 = ((b >> 32) & 0xFFFFFFFF) ^ c1 ^ k0, ((a >> 32) & 0xFFFFFFFF) ^ c3 ^ k1
        c1, c3 = b & 0xFFFFFFFF, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_halves(n: int, key: int, step: int, device: torch.device) -> Tensor:
    """Return n random numbers in 0..65535 as int32: the low half of each word of Philox, then its high half."""
    groups = torch.arange(cdiv(n, 8), dtype=torch.int64, device=device)
    words = torch.stack(philox((groups & 0xFFFFFFFF, key, step, 0)), 1)
    return torch.stack((words & 0xFFFF, words >> 16), 2).view(-1)[:n].to(torch.int32)


def round_stochastically(p: Tensor, key: int, step: int) -> Tensor:
    """Return p [N] (fp32) in bf16, rounded up or down with the probabilities that make the expected value exact."""
    bits = _finite_bits(p)
    # An infinite number or a NaN is not rounded.
    is_finite = bits & 0x7F800000 != 0x7F800000
    bits = bits + torch.where(is_finite, random_halves(p.numel(), key, step, p.device), 0)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)
