"""The launch parameters of the norms over the last dimension. The kernels are in `kernels.py`."""

from dataclasses import dataclass

from tigon.runtime.device import Device, next_power_of_2
from tigon.runtime.tuning import LaunchConfig, rung

# Wider rows do not fit in the registers of one workgroup. The references compute them.
MAX_FEATURES = 32768
# The bytes that the registers of one workgroup hold at most.
REGISTER_BYTES = 2**18


# The first number is the largest number of features of a rung. The others are the warps of the forward, the warps of
# the backward, and the programs of the backward per multiprocessor. Measured on an H200 in bf16: the backward of short
# rows is faster with many programs (655360 x 128: 0.145 ms instead of 0.286), that of longer rows with few.
LADDER = ((1024, (8, 8, 4)), (4096, (4, 4, 2)), (8192, (16, 8, 1)), (16384, (32, 32, 1)))


@dataclass(frozen=True)
class NormConfig(LaunchConfig):
    block_m: int  # Rows of a tile
    block_n: int  # Features of a tile
    num_warps: int  # Warps of a program of the forward
    backward_warps: int  # Warps of a program of the backward
    num_stages: int  # Pipeline stages of the backward's loop over rows
    # The largest number of programs of the backward. Each program computes one partial dw and one partial db.
    programs: int
    # True if w stays in registers during the backward's loop. A wide row leaves no registers for w, so w is loaded for
    # every tile.
    keeps_w: bool
    # True if dy and z stay in registers while the backward sums over features. Otherwise they are loaded twice, the
    # second time from the L1 cache.
    keeps_row: bool
    splits: bool  # True if a second launch sums dw and db, in blocks of columns
    columns: int = 4096  # Columns of a block of the second launch

    @staticmethod
    def heuristic(problem: tuple[int, int, int, int], device: Device) -> "NormConfig":
        """Return the parameters for rows of up to `MAX_FEATURES` features. The problem is N, the bytes of an element of
        z, and how many tensors [M, N] the backward reads (dy, z, perhaps dtotal) and sums over rows."""
        n, itemsize, loads, sums = problem
        block_n = next_power_of_2(n)
        num_warps, backward_warps, programs = rung(LADDER, block_n)
        # A tile holds several short rows or one long row. Measured on an H200 in bf16: the backward of 16384 x 4096
        # takes 0.108 ms with two rows in a tile and 0.109 with one. Layer norm lacks the registers for two rows.
        block_m = max(1, min(16, 4096 // block_n))
        if block_n == 4096 and sums == 1:
            block_m, backward_warps, programs = 2, 8, 1
        if block_n > 8192 and n != block_n:
            # Masks take registers, and more threads have more registers.
            backward_warps = 16
        # The pipeline holds one tile for each stage but the last.
        tile_bytes = loads * block_m * block_n * itemsize
        # The sums and the rows may take half of the registers. Addresses, loads in flight and results take the rest.
        fits = lambda rows: (4 * max(sums, 1) + rows * itemsize) * block_n <= REGISTER_BYTES // 2
        # Short rows are faster without a pipeline, longer rows with loads three tiles ahead.
        is_pipelined = 1024 < block_n <= 8192 and fits(loads)
        return NormConfig(
            block_m=block_m, block_n=block_n, num_warps=min(num_warps, device.max_warps),
            backward_warps=min(backward_warps, device.max_warps),
            num_stages=3 if is_pipelined and programs * 2 * tile_bytes <= 0.6 * device.shared_memory else 1,
            programs=programs * device.multiprocessors, keeps_w=block_n < 16384, keeps_row=fits(loads),
            splits=not fits(2),
        )  # fmt: skip

    def count_programs(self, m: int, blocks: int = 1) -> int:
        """Return how many programs share `m` rows, if `blocks` programs share each row: the fewest with which none gets
        more tiles than with `self.programs` programs, and each gets at least two. Fewer programs compute fewer partial
        sums."""
        # `-(-a // b)` is `cdiv(a, b)` without a call, because small models wait for the host.
        tiles, limit = -(-m // self.block_m), max(1, self.programs // blocks)
        return -(-tiles // max(2, -(-tiles // limit)))
