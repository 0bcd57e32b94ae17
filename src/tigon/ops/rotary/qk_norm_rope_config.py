"""The launch parameters of `qk_norm_rope`. The kernels are in `kernels.py`."""

from dataclasses import dataclass

from tigon.runtime.device import Device, next_power_of_2
from tigon.runtime.tuning import LaunchConfig, rung

# The largest number of features of a token that are normalised together. More features do not fit in the registers of
# one workgroup.
MAX_FEATURES_TOGETHER = 32768


def heads_of_tile(heads: int, head_size: int) -> int:
    """Return how many heads a program rotates at a time without a norm: at most 1024 features, or one head. All 32
    heads of 128 features in one tile take 2 % longer than 8 (H200), and more registers."""
    heads, head_size = next_power_of_2(heads), next_power_of_2(head_size)
    return max(1, min(heads, 1024 // head_size))


# Features of a tile of several heads. Measured with 4 x 4096 tokens, 32 + 8 heads of 128, bf16, on an H200. Forward:
# 0.094 ms with all 32 heads in a tile, 0.101 with 8. Backward: 0.157 with 16 heads, three stages and three programs for
# each multiprocessor, 0.190 with 8 warps and no pipeline.
FORWARD_TILE, BACKWARD_TILE = 4096, 2048
# In each pair, the first number is the largest number of features of a tile. The second number is the warps of a
# program in WARPS, and the programs of the backward for each multiprocessor in PROGRAMS.
WARPS = ((4096, 4), (8192, 8), (16384, 16), (32768, 32))
PROGRAMS = ((2048, 3), (4096, 2), (8192, 1))


@dataclass(frozen=True)
class QKNormRopeConfig(LaunchConfig):
    """Launch parameters of the forward and the backward. A program of the forward computes one token, `block_h` heads
    at a time, first the heads of q and then those of k. A program of the backward loops over such tiles of all
    tokens."""

    block_h: int  # Heads of a tile of the forward
    num_warps: int  # Warps of a program of the forward
    backward_block_h: int  # Heads of a tile of the backward
    backward_warps: int  # Warps of a program of the backward
    num_stages: int  # Pipeline stages of the backward's loop
    programs: int  # Programs of the backward. Each program computes partial gradients of the weights.
    # True if the weight stays in registers during the backward's loop. A wide tile leaves no registers for the weight,
    # so the weight is loaded for every tile.
    keeps_w: bool

    @staticmethod
    def heuristic(problem: tuple[int, int, bool, int], device: Device) -> "QKNormRopeConfig":
        """Return tiles of several heads, or of all heads if they are normalised together. The problem is the larger
        number of heads of q and k, D, whether a tile holds all heads, and the bytes of an element of q."""
        heads, size, together, itemsize = problem
        heads, size = next_power_of_2(heads), next_power_of_2(size)
        heads_of_tile = lambda features: heads if together else max(1, min(heads, features // size))
        block_h, backward_block_h = heads_of_tile(FORWARD_TILE), heads_of_tile(BACKWARD_TILE)
        tile = backward_block_h * size
        # The pipeline holds a tile of dy and one of x for each of its three stages but the last.
        pipeline_bytes = 2 * 2 * tile * itemsize
        return QKNormRopeConfig(
            block_h=block_h, num_warps=min(rung(WARPS, block_h * size), device.max_warps),
            backward_block_h=backward_block_h, backward_warps=min(rung(WARPS, tile), device.max_warps),
            num_stages=3 if tile >= 2048 and pipeline_bytes <= device.shared_memory // 2 else 1,
            programs=device.multiprocessors * rung(PROGRAMS, tile), keeps_w=tile < 16384,
        )  # fmt: skip
