"""The sizes and inputs that the tests of the rotary ops share."""

import torch
from torch import Tensor

from op_cases import DEVICE

LAYOUTS = ["split_half", "interleaved", "deinterleaved"]
# B, Hq, Hk, S, D and R.
SIZES = {
    "equal heads": (2, 4, 4, 3, 16, 16), "head counts that fill no tile": (1, 14, 2, 5, 64, 64),
    "a part of the head": (2, 3, 1, 4, 80, 32), "odd sizes": (1, 2, 1, 3, 10, 6),
    "wide heads": (1, 40 if DEVICE == "cuda" else 9, 8 if DEVICE == "cuda" else 2, 2, 256, 256),
    "one of each": (1, 1, 1, 1, 2, 2),
}  # fmt: skip


def make_inputs(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, *, axes: tuple[int, ...] = (), is_shared: bool = False,
    memory_order: str = "BHSD", table: str = "halves",
) -> list[Tensor]:  # fmt: skip
    """Return q, k, cos and sin. One table serves the whole batch if it `is_shared`."""
    b, hq, hk, s, d, r = sizes
    generator = torch.Generator().manual_seed(hq * s + d)
    heads = []
    for h in (hq, hk):
        shape = (b, s, h, d) if memory_order == "BSHD" else (b, h, s, d)
        x = (torch.randn(shape, generator=generator) * 2).to(DEVICE, dtype)
        heads.append((x.transpose(1, 2) if memory_order == "BSHD" else x).requires_grad_())
    width = r // 2 if table == "once" else r
    angles = torch.rand((*axes, 1 if is_shared else b, s, width), generator=generator).to(DEVICE) * 100
    return [*heads, angles.cos().to(dtype), angles.sin().to(dtype)]


def make_packed_heads(projection: Tensor) -> list[Tensor]:
    """Return q and k [2, 4 | 2, 3, 16] as slices of one projection [2, 3, 96], as in Phi-3. Their rows have gaps."""
    return [x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in projection.split([64, 32], -1)]


def assert_close(results: tuple, expected: tuple, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Compare two results of `outputs_and_gradients`."""
    for a, b in zip([*results[0], *results[1]], [*expected[0], *expected[1]], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
