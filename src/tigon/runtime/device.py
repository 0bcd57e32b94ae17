"""The device of a tensor: whether kernels run on it, its properties, and the simulation of a GPU on a CPU."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# macOS and Windows have no Triton, so no kernel runs there.
HAS_TRITON = importlib.util.find_spec("triton") is not None

# Triton reads the same variable when a kernel is decorated: the interpreter then runs kernels on CPU tensors.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"

# The references compute fp64.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# the types of tensors that have memory of their own
PLAIN = (Tensor, torch.nn.Parameter)


# Devices are compared by identity, which makes the look-up of cached launch parameters fast. There is one object for
# each device.
@dataclass(frozen=True, eq=False)
class Device:
    """The properties that launch parameters depend on."""

    multiprocessors: int
    # 32 on NVIDIA, 64 on the Instinct chips of AMD
    warp_size: int
    # The bytes that one workgroup may use.
    shared_memory: int
    # whether threads can copy from global to shared memory asynchronously: NVIDIA since Ampere
    async_copy: bool = False
    # "sm_90", "gfx942" and so on; "" for the interpreter
    arch: str = ""

    @property
    def max_warps(self) -> int:
        """The number of warps of the largest workgroup, which has 1024 threads on both vendors."""
        return 1024 // self.warp_size


HIP = torch.version.hip is not None

# The properties that stand for a device if kernels are launched on CPU tensors: in the interpreter, or when kernels are
# only compiled for a chip.
EMULATED = Device(multiprocessors=4, warp_size=32, shared_memory=65536)


class Simulation(Protocol):
    """An object that counts what a GPU would do."""

    device: Device
    # the number of GPUs that share the parameters and their gradients
    shards: int

    def count_launch(self, arguments: tuple) -> None:
        """Count the launch of a kernel with these arguments."""

    def count_copy(self, copy: Tensor, /, host_bytes: int) -> None:
        """Count a copy of a tensor: to the host, where it takes `host_bytes`, or back from the host if these are 0."""


_simulation: Simulation | None = None


@contextlib.contextmanager
def simulated(simulation: Simulation) -> Iterator[None]:
    """Let ops treat meta tensors as tensors of a GPU in the block, in every thread, without running kernels on them."""
    global _simulation
    previous, _simulation = _simulation, simulation
    try:
        yield
    finally:
        _simulation = previous


def simulation_of(device: torch.device) -> Simulation | None:
    """Return the simulation of a device, or None if the device is real."""
    return _simulation if device.type == "meta" else None


def device_kind(x: Tensor) -> str:
    """Return the type of the tensor's device, which is "cuda" for meta tensors in a simulation."""
    return "cuda" if _simulation is not None and x.is_meta else x.device.type


def runs_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether Triton kernels run on the tensors: on a CUDA or ROCm device, or on the CPU in the interpreter.
    Kernels do not run on DTensors and other wrappers without memory of their own. The references compute these by torch
    operations, which are correct for every placement. For the result of a collective that is still running, the answer
    is True, because `launcher` waits for it."""
    if not (
        (x.is_cuda and HAS_TRITON)
        or (INTERPRETED and x.device.type == "cpu")
        or (_simulation is not None and x.is_meta)
    ):
        return False
    # A loop takes half the time of `all`, and small models wait for the host.
    for t in (x, *others):
        if t is not None and (t.dtype not in KERNEL_DTYPES or not (type(t) in PLAIN or _has_memory(t))):
            return False
    return True


def is_capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph is captured on the current stream of the device of a tensor."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _has_memory(x: Tensor) -> bool:
    """Return whether a tensor of another class than `PLAIN` has memory of its own."""
    return not hasattr(x, "__tensor_flatten__") or hasattr(x, "trigger_wait")


@functools.cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        multiprocessors=properties.multi_processor_count,
        warp_size=properties.warp_size,
        # ROCm builds report no opt-in limit; the Instinct chips have 64 KiB.
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 65536),
        async_copy=not HIP and properties.major >= 8,
        # ROCm adds features to the name, as in "gfx942:sramecc+:xnack-".
        arch=properties.gcnArchName.split(":")[0] if HIP else f"sm_{properties.major}{properties.minor}",
    )


def device_of(x: Tensor) -> Device:
    """Return the properties of the device that holds `x`."""
    if x.is_cuda:
        return _device(x.device.index)
    return _simulation.device if _simulation is not None and x.is_meta else EMULATED


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up. `triton.cdiv` takes 1.7 us, and small models wait for the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n. `triton.next_power_of_2` takes 1.5 us."""
    return 1 << max(0, n - 1).bit_length()
