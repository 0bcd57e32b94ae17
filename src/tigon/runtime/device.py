"""The device of a tensor: whether kernels run on it, what they may use of it, and simulation of a GPU on a CPU."""

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "EMULATED",
    "HIP",
    "INTERPRETED",
    "KERNEL_DTYPES",
    "PLAIN",
    "Device",
    "Simulation",
    "cdiv",
    "device_kind",
    "device_of",
    "runs_kernels",
    "simulated",
    "simulation_of",
]

# Triton reads the same variable when a kernel is decorated: the interpreter then runs kernels on CPU tensors.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # fp64 takes the references

PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, eq=False)  # compared by identity, for heuristics that cache: there is one for each device
class Device:
    """The properties that launch parameters depend on."""

    multiprocessors: int
    warp_size: int  # 32 on NVIDIA, 64 on the Instinct chips of AMD
    shared_memory: int  # bytes that one workgroup may use
    async_copy: bool = False  # from global to shared memory by single threads: NVIDIA since Ampere
    arch: str = ""  # "sm_90", "gfx942" and so on; "" is the interpreter's

    @property
    def max_warps(self) -> int:
        """A workgroup holds 1024 threads on either vendor."""
        return 1024 // self.warp_size


HIP = torch.version.hip is not None

# What kernels launched on CPU tensors take for their device: the interpreter's, or one that is compiled for.
EMULATED = Device(multiprocessors=4, warp_size=32, shared_memory=65536)


class Simulation(Protocol):
    """Who counts what a GPU would do."""

    device: Device  # that meta tensors are taken to be on

    def launched(self, arguments: tuple) -> None:
        """A kernel would run with these."""

    def copied(self, made: Tensor, out: bool) -> None:
        """`made` would have been copied out to the host, or back from it."""


_simulation: Simulation | None = None


@contextlib.contextmanager
def simulated(simulation: Simulation) -> Iterator[None]:
    """Ops treat meta tensors as those of a GPU in the block, in every thread, and run no kernel on them."""
    global _simulation
    before, _simulation = _simulation, simulation
    try:
        yield
    finally:
        _simulation = before


def simulation_of(device: torch.device) -> Simulation | None:
    """Who counts what would happen on a device; None if it does happen."""
    return _simulation if device.type == "meta" else None


def device_kind(x: Tensor) -> str:
    """The type of the tensor's device, or of the one it is taken to be on."""
    return "cuda" if _simulation is not None and x.is_meta else x.device.type


def runs_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Whether Triton kernels run on the tensors: on a CUDA or ROCm device, or on the CPU in Triton's interpreter.

    Not on DTensors and other wrappers without memory of their own: the references, in torch's operations, are right for
    any cut. A collective's result that is still on its way is waited for where it is read (`launcher`).
    """
    if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu") or (_simulation is not None and x.is_meta)):
        return False
    return all(t is None or (t.dtype in KERNEL_DTYPES and _has_memory(t)) for t in (x, *others))


def _has_memory(x: Tensor) -> bool:
    return type(x) in PLAIN or not hasattr(x, "__tensor_flatten__") or hasattr(x, "trigger_wait")


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
    """Properties of the device that holds `x`."""
    if x.is_cuda:
        return _device(x.device.index)
    return _simulation.device if _simulation is not None and x.is_meta else EMULATED


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. `triton.cdiv` takes 1.7 us, and small models wait for the host."""
    return -(-a // b)
