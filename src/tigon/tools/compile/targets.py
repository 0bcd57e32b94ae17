"""Compile the kernels of an op for a chip that is not here, and read what each needs of it.

The op runs as it always does, on small CPU tensors, but its launches are recorded and not carried out: so what is
compiled has the very signature, constants and launch parameters of the op.

    with recorded(SM_90) as launches:
        tigon.rms_norm(torch.empty(2, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16))
    resources(launches[0], SM_90)      # {'kernel': '_forward_kernel', 'registers': 48, 'spilled': 0, ...}
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tigon.runtime import device
from tigon.runtime.device import Device
from tigon.runtime.triton_private import gluon

__all__ = ["CHIPS", "Chip", "Launch", "recorded", "resources"]


@dataclass(frozen=True)
class Chip:
    """A compilation target and the properties that launch parameters depend on."""

    name: str
    target: GPUTarget
    device: Device


def _chip(name: str, backend: str, arch: int | str, multiprocessors: int, shared_kib: int) -> Chip:
    warp_size = 64 if backend == "hip" else 32
    return Chip(
        name,
        GPUTarget(backend, arch, warp_size),
        Device(multiprocessors, warp_size, shared_kib * 1024, backend == "cuda", name),
    )


CHIPS = (
    _chip("sm_80", "cuda", 80, 108, 163),  # A100
    _chip("sm_90", "cuda", 90, 132, 227),  # H100, H200
    _chip("sm_100", "cuda", 100, 148, 227),  # B200
    _chip("gfx90a", "hip", "gfx90a", 104, 64),  # MI250X, one of its two dies
    _chip("gfx942", "hip", "gfx942", 304, 64),  # MI300X
    _chip("gfx950", "hip", "gfx950", 256, 160),  # MI355X
)

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
}


@dataclass
class Launch:
    """One launch of a kernel: what Triton would have been given."""

    kernel: JITFunction
    arguments: dict[str, object]
    options: dict[str, int]  # num_warps and the like


@contextmanager
def recorded(chip: Chip) -> Iterator[list[Launch]]:
    """Launches on CPU tensors are noted, with the launch parameters for `chip`, and not carried out."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, *values: object, grid: object, warmup: bool, **keywords: object) -> None:
        arguments = dict(zip(kernel.arg_names, values, strict=False))
        arguments |= {name: value for name, value in keywords.items() if name in kernel.arg_names}
        # A Gluon kernel takes num_warps both ways: its layouts are made of it.
        options = {name: value for name, value in keywords.items() if name not in arguments or name == "num_warps"}
        launches.append(Launch(kernel, arguments, options))

    with (
        patch.object(JITFunction, "run", record),
        patch.object(device, "INTERPRETED", True),
        patch.object(device, "EMULATED", chip.device),
    ):
        yield launches


def _source(launch: Launch) -> ASTSource:
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and specialised):
            signature[name], constants[(index,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], aligned = f"*{TYPES[value.dtype]}", True
        elif isinstance(value, int):
            signature[name], aligned = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
        else:
            signature[name], aligned = "fp32", False
        if aligned and specialised:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource
    if gluon is not None and launch.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source
    return source(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def resources(launch: Launch, chip: Chip) -> dict[str, object]:
    """Compile the launch for `chip`.

    Returns:
        `kernel`, `threads` a workgroup, `registers` a thread, `spilled` (NVIDIA: bytes of stack a thread; AMD:
        registers), `shared` bytes a workgroup.

    Raises:
        Whatever Triton raises where the kernel does not compile.
    """
    built = triton.compile(_source(launch), target=chip.target, options=launch.options)
    if chip.target.backend == "cuda":
        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(built.asm["cubin"])
            text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        registers, spilled = (int(re.search(rf"{word}:(\d+)", text).group(1)) for word in ("REG", "STACK"))
    else:
        text = built.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{word}:\s*(\d+)", text).group(1)) for word in ("vgpr_count", "vgpr_spill_count")
        )
    return {
        "kernel": launch.kernel.__name__,
        "threads": built.metadata.num_warps * chip.target.warp_size,
        "registers": registers,
        "spilled": spilled,
        "shared": built.metadata.shared,
    }
