"""Launch parameters of the kernels of the delta rules, and which inputs the kernels compute."""

from dataclasses import dataclass
from typing import NamedTuple

from tigon.ops.mixers.delta_rule_chunks import DeltaInputs, count_samples
from tigon.runtime.device import Device, cdiv, device_of, next_power_of_2
from tigon.runtime.tuning import LaunchConfig, rung

# Wider heads do not fit into the registers.
MAX_SIZE = 256


class DeltaProblem(NamedTuple):
    """The sizes that the launch parameters depend on. The number of tokens is not among them."""

    key_size: int
    value_size: int
    # True if the forward scan has a program for most multiprocessors with `WIDE_BLOCK`, and no initial state.
    allows_wide_blocks: bool
    # True for Kimi Delta Attention.
    has_feature_decay: bool


# Each row has the largest size of a head of q and k; the columns of a block of the state in the forward scan and in the
# two scans of backward, the warps and the stages of the scans; and the columns, the warps and the stages of the kernels
# of the other gradients. Registers bound the columns and the warps. A kernel has at most 256 threads, because more of
# them leave too few registers to each on AMD. Shared memory bounds the stages.
LADDER = ((64, (32, 32, 4, 2, 32, 4, 1)), (128, (32, 32, 8, 2, 32, 8, 1)), (256, (32, 32, 8, 1, 32, 8, 1)))
# A product of Hopper's tensor cores has at least 64 rows for 4 warps, and the chunks have 64 rows. If a product reads
# the result of another product, Triton lets two groups of 4 warps compute the same rows. Therefore these kernels have 4
# warps. Heads of more than 128 features need the registers of 8.
WIDE_BLOCK = 64
HOPPER = ((128, (WIDE_BLOCK, 32, 4, 3, 32, 4, 3)), (256, (32, 32, 8, 1, 32, 8, 1)))


@dataclass(frozen=True)
class DeltaConfig(LaunchConfig):
    """Launch parameters of the kernels."""

    # The warps of the kernels that compute the scores and Z.
    pairs_warps: int
    couplings_warps: int
    # How kernels multiply matrices in fp32 ("ieee" or "tf32"). For tensors in fp16, an inverse is always computed in
    # "ieee", because the errors of TF32 would be larger than those of rounding.
    precision: str
    # Features at a time and warps of the kernels of Kimi Delta Attention that compute rows, scores and the gradients of
    # states. Its other kernels take only the warps, or neither.
    feature_block: int
    feature_warps: int
    # The scans over the chunks: columns of the state in forward and in backward, warps, and stages of the pipeline.
    scan_block_v: int
    backward_block_v: int
    scan_warps: int
    scan_stages: int
    # The kernels of dq, dk, dg and dbeta: columns of v at a time, warps, and stages of the pipeline.
    gradient_block_v: int
    gradient_warps: int
    gradient_stages: int

    @staticmethod
    def heuristic(problem: DeltaProblem, device: Device) -> "DeltaConfig":
        """Return the parameters for heads of up to `MAX_SIZE` features."""
        is_hopper = device.arch == "sm_90"
        numbers = rung(HOPPER if is_hopper else LADDER, problem.key_size)
        scan_block, backward_block, scan_warps, scan_stages, gradient_block, gradient_warps, gradient_stages = numbers
        if problem.has_feature_decay or not problem.allows_wide_blocks:
            # The scans of Kimi Delta Attention read more rows, and shared memory does not hold these and wider blocks.
            scan_block = min(scan_block, backward_block)
        if problem.has_feature_decay and problem.key_size <= 128:
            # 0.81 ms instead of 1.09 in the gradients of states (one H200, 2 x 4096 tokens, 32 heads).
            gradient_block = 2 * gradient_block
        # An inversion is a chain of dependent steps, so few warps are best: more programs then fit into a
        # multiprocessor. One warp has too few registers for large keys, for a K that it loads, and on B200.
        if problem.has_feature_decay:
            couplings_warps = 2
        else:
            couplings_warps = 4 if problem.key_size > 128 or device.arch == "sm_100" else 1
        most_columns = max(16, next_power_of_2(problem.value_size))
        has_room = device.shared_memory >= 160 * 1024
        return DeltaConfig(
            pairs_warps=4 if problem.key_size <= 128 else 8,
            couplings_warps=couplings_warps,
            precision="tf32" if device.arch.startswith("sm_") else "ieee",
            feature_block=min(32, max(16, next_power_of_2(problem.key_size))),
            feature_warps=4,
            scan_block_v=min(scan_block, most_columns),
            backward_block_v=min(backward_block, most_columns),
            scan_warps=min(scan_warps, 256 // device.warp_size),
            scan_stages=scan_stages if has_room else 1,
            gradient_block_v=min(gradient_block, most_columns),
            gradient_warps=min(gradient_warps, 256 // device.warp_size),
            gradient_stages=gradient_stages if has_room else 1,
        )


def choose_config(inputs: DeltaInputs) -> DeltaConfig:
    """Return the launch parameters for these inputs."""
    q, v, device = inputs.q, inputs.v, device_of(inputs.q)
    programs = count_samples(inputs) * v.shape[2] * cdiv(v.shape[3], WIDE_BLOCK)
    # With an initial state, wider blocks would spill registers.
    allows_wide_blocks = programs >= 0.75 * device.multiprocessors and inputs.initial_state is None
    return DeltaConfig.choose(DeltaProblem(q.shape[3], v.shape[3], allows_wide_blocks, inputs.g.dim() == 4), device)


def has_feature_kernels(arch: str) -> bool:
    """Return whether the kernels of Kimi Delta Attention run on a chip. On Ampere, they spill 32 bytes or more."""
    return not arch.startswith("sm_8")


def fits_kernels(inputs: DeltaInputs) -> bool:
    """Return whether the kernels compute heads of these sizes and this dtype, and there is something to compute.

    In fp32, the tiles fit neither into the registers nor into the shared memory of a GPU: on Hopper, a thread would
    spill 7 KB, and the compiler would take minutes.
    """
    q, v = inputs.q, inputs.v
    if inputs.g.dim() == 4 and not has_feature_kernels(device_of(q).arch):
        return False
    fits = max(q.shape[3], v.shape[3]) <= MAX_SIZE
    return fits and q.element_size() == 2 and q.shape[0] * q.shape[1] > 0
