"""Launch parameters of the kernels of the state space dual, and which inputs the kernels compute."""

from dataclasses import dataclass
from typing import NamedTuple

from tigon.ops.mixers.ssd_chunks import SSDInputs
from tigon.runtime.device import Device, device_of, next_power_of_2
from tigon.runtime.tuning import LaunchConfig

# Larger heads or states do not fit into the registers.
MAX_SIZE, MAX_STATE_SIZE = 128, 256
# A program of `ssd_group_gradients_kernel` sums over at most this many heads. More of them would leave too few programs
# to models whose heads share one group.
MAX_HEADS = 16


class SSDProblem(NamedTuple):
    """The sizes that the launch parameters depend on. The number of tokens is not among them."""

    size: int
    state_size: int


@dataclass(frozen=True)
class SSDConfig(LaunchConfig):
    """Launch parameters of the kernels."""

    # The scans: rows of the state, warps, and stages of the pipeline.
    scan_block_p: int
    scan_warps: int
    scan_stages: int
    # The kernels of y and of the gradients: columns of the state at a time, and warps.
    gradient_block_n: int
    gradient_warps: int
    # How a kernel multiplies matrices in fp32 ("ieee" or "tf32").
    precision: str

    @staticmethod
    def heuristic(problem: SSDProblem, device: Device) -> "SSDConfig":
        """Return the parameters for heads of up to `MAX_SIZE` and states of up to `MAX_STATE_SIZE` features."""
        block_p = max(16, next_power_of_2(problem.size))
        is_large = problem.state_size > 128
        stages = 1 if device.shared_memory < 160 * 1024 else 3 if device.arch == "sm_90" and not is_large else 2
        warps = min(8, 256 // device.warp_size)
        return SSDConfig(
            scan_block_p=min(64 if device.arch == "sm_90" else 32, block_p),
            scan_warps=warps if is_large else 4,
            scan_stages=stages,
            gradient_block_n=16 if problem.state_size <= 16 else 64,
            gradient_warps=4 if block_p <= 64 else warps,
            precision="tf32" if device.arch.startswith("sm_") else "ieee",
        )


def choose_config(inputs: SSDInputs) -> SSDConfig:
    """Return the launch parameters for these inputs."""
    return SSDConfig.choose(SSDProblem(inputs.x.shape[3], inputs.B.shape[3]), device_of(inputs.x))


def has_scan_kernels(arch: str) -> bool:
    """Return whether the kernels run on a chip. On Ampere and Ada, one of them spills 32 bytes or more."""
    return not arch.startswith("sm_8")


def fits_kernels(inputs: SSDInputs) -> bool:
    """Return whether the kernels compute heads and states of these sizes and this dtype, if there are any."""
    x = inputs.x
    if not has_scan_kernels(device_of(x).arch):
        return False
    fits = x.shape[3] <= MAX_SIZE and inputs.B.shape[3] <= MAX_STATE_SIZE
    return fits and x.element_size() == 2 and x.shape[0] * x.shape[1] > 0


def split_count(groups: int) -> int:
    """Return into how many parts of the same number of heads the heads of a group are split."""
    return next(n for n in range(1, groups + 1) if groups % n == 0 and groups // n <= MAX_HEADS)
