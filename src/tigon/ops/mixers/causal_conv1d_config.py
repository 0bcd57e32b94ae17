"""Launch parameters of the kernels of the causal convolution."""

from dataclasses import dataclass
from typing import NamedTuple

from tigon.runtime.device import Device, cdiv, next_power_of_2
from tigon.runtime.tuning import LaunchConfig


class ConvProblem(NamedTuple):
    """The sizes that the launch parameters of a convolution depend on."""

    channels: int
    taps: int
    is_packed: bool


class WalkConfig(NamedTuple):
    """Launch parameters of one direction."""

    # Channels of a program.
    block_c: int
    num_warps: int
    # The rows of a chunk. A program loads them while it computes the chunk before.
    rows: int
    # The tokens are split into runs until there are this many programs.
    programs: int


@dataclass(frozen=True)
class ConvConfig(LaunchConfig):
    """Launch parameters of the forward and the backward. A sweep replaces them by `tuned(ConvConfig, forward=...)`."""

    forward: WalkConfig
    backward: WalkConfig

    @staticmethod
    def heuristic(problem: ConvProblem, device: Device) -> "ConvConfig":
        """Return the parameters for any number of channels and 2 to 8 taps.

        A thread computes 4 channels in forward, or 2 of more than 4 taps. In backward it computes 2, because taps, sums
        and rows take 4 W registers for each channel. A chunk has 8 rows, or 4 in backward of more than 4 taps. All
        programs run at once: on Hopper, a thread of the forward takes up to 96 registers (10 programs a
        multiprocessor), and one of the backward 128 (8). With packed samples these are 128 (8) and 160 (6).
        """
        # A program computes at least two channels, because it loads pairs of bf16.
        width, warps = next_power_of_2(max(2, problem.channels)), 2
        block = lambda thread_channels: min(width, thread_channels * warps * device.warp_size)
        few_taps = problem.taps <= 4
        forward_programs, backward_programs = (8, 6) if problem.is_packed else (10, 8)
        return ConvConfig(
            WalkConfig(block(4 if few_taps else 2), warps, 8, forward_programs * device.multiprocessors),
            WalkConfig(block(2), warps, 8 if few_taps else 4, backward_programs * device.multiprocessors),
        )


def split_time(length: int, rows: int, shares: int, programs: int) -> tuple[int, int]:
    """Return into how many runs the tokens of a sequence are split, and the tokens of a run, a multiple of `rows`.

    `shares` is the number of programs that compute one run of every sequence. A run has at least 4 chunks of `rows`,
    because its halo is loaded and computed twice.
    """
    run = max(4, cdiv(cdiv(length, max(1, programs // max(1, shares))), rows)) * rows
    return cdiv(length, run), run
