"""Compile the kernels of an op for a chip that this machine does not have, and read the resources of each.

The op runs on small CPU tensors, and its launches are recorded instead of executed. So the compiler gets exactly the
signature, constants and launch parameters of the op.

    h100 = CHIPS[1]
    with recorded(h100) as launches:
        tigon.rms_norm(torch.empty(2, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16))
    resources(launches[0], h100)      # {'kernel': '_forward_kernel', 'registers': 48, 'spilled': 0, ...}
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from unittest.mock import patch

import torch

from tigon.runtime import device
from tigon.runtime.compat.triton import JITFunction, TensorDescriptor, TileDescriptor, gluon, triton
from tigon.runtime.device import Device


@dataclass(frozen=True)
class Chip:
    name: str
    # "cuda" or "hip".
    backend: str
    arch: int | str
    device: Device

    @property
    def allowed_spills(self) -> int:
        """The largest `KernelResources.spilled` with which a kernel ships. On NVIDIA, these are four registers of a
        thread: the compiler writes them before a long loop and reads them after it, which costs nothing that can be
        measured."""
        return 16 if self.backend == "cuda" else 0


def _chip(name: str, backend: str, arch: int | str, multiprocessors: int, shared_kib: int) -> Chip:
    warp_size = 64 if backend == "hip" else 32
    device = Device(multiprocessors, warp_size, shared_kib * 1024, backend == "cuda", name)
    return Chip(name, backend, arch, device)


# These are A100, H100 and H200, B200, one of the two dies of MI250X, MI300X, and MI355X.
CHIPS = (
    _chip("sm_80", "cuda", 80, 108, 163),
    _chip("sm_90", "cuda", 90, 132, 227),
    _chip("sm_100", "cuda", 100, 148, 227),
    _chip("gfx90a", "hip", "gfx90a", 104, 64),
    _chip("gfx942", "hip", "gfx942", 304, 64),
    _chip("gfx950", "hip", "gfx950", 256, 160),
)

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


@dataclass
class Launch:
    """One launch of a kernel: its arguments, and options of the compiler such as `num_warps`."""

    kernel: JITFunction
    arguments: dict[str, object]
    options: dict[str, object]


class KernelResources(TypedDict):
    """The resources of a compiled kernel. `threads` and `shared` bytes are those of a workgroup, and `registers` those
    of a thread. `spilled` counts bytes of stack per thread on NVIDIA and registers on AMD."""

    kernel: str
    threads: int
    registers: int
    spilled: int
    shared: int


@contextmanager
def recorded(chip: Chip) -> Iterator[list[Launch]]:
    """Record launches on CPU tensors, with the launch parameters for `chip`, instead of executing them."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, *values: object, grid: object, warmup: bool, **keywords: object) -> None:
        arguments = dict(zip(kernel.arg_names, values, strict=False))
        arguments |= {name: value for name, value in keywords.items() if name in kernel.arg_names}
        # For a Gluon kernel num_warps is an argument too, because its layouts depend on it.
        options = {name: value for name, value in keywords.items() if name not in arguments or name == "num_warps"}
        launches.append(Launch(kernel, arguments, options))

    with (
        patch.object(JITFunction, "run", record),
        patch.object(device, "INTERPRETED", True),
        patch.object(device, "EMULATED", chip.device),
    ):
        yield launches


class CompilerTools(NamedTuple):
    """The private names of Triton that compile kernels for other chips."""

    GPUTarget: Any
    ASTSource: Any
    # The source of a Gluon kernel; None in a Triton without Gluon, in which no such kernel is launched.
    GluonASTSource: Any
    cuobjdump: Path  # The program of CUDA that prints the registers and the stack of a compiled kernel


def compiler_tools() -> CompilerTools:
    """Import the names of Triton's compiler. Seen in 3.4 to 3.9.

    Raises:
        RuntimeError: This Triton lacks one of the names.
    """
    try:
        compiler = importlib.import_module("triton.backends.compiler")
        backend = importlib.import_module("triton.backends.nvidia")
        source = importlib.import_module("triton.compiler").ASTSource
        gluon_source = None
        if gluon is not None:
            gluon_source = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
        cuobjdump = Path(str(backend.__file__)).parent / "bin" / "cuobjdump"
        return CompilerTools(compiler.GPUTarget, source, gluon_source, cuobjdump)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"triton {triton.__version__} has another compiler than Tigon needs here ({error}); docs/compatibility.md "
            "lists the versions that work"
        ) from error


def _source(launch: Launch, tools: CompilerTools) -> Any:
    """Return the source that Triton compiles for the launch, specialised for tensors whose addresses are aligned."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    attributes: dict[tuple[int], list] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        is_specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and is_specialised):
            signature[name], constants[(index,)] = "constexpr", value
            continue
        if TensorDescriptor is not None and isinstance(value, TensorDescriptor):
            shape = ",".join(map(str, value.block_shape))
            signature[name], is_aligned = f"tensordesc<{TYPES[value.base.dtype]}[{shape}]>", False
        elif TileDescriptor is not None and isinstance(value, TileDescriptor):
            shape = ", ".join(map(str, value.block_shape))
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}[{shape}],{value.layout!r}>"
            is_aligned = False
        elif isinstance(value, torch.Tensor):
            signature[name], is_aligned = f"*{TYPES[value.dtype]}", True
        elif isinstance(value, int):
            signature[name], is_aligned = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
        else:
            signature[name], is_aligned = "fp32", False
        if is_aligned and is_specialised:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source_type = tools.GluonASTSource if gluon is not None and launch.kernel.is_gluon() else tools.ASTSource
    return source_type(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, f"the output of the compiler has no {pattern}"
    return int(match.group(1))


def resources(launch: Launch, chip: Chip) -> KernelResources:
    """Compile the launch for `chip`, and return its resources. If it does not compile, the error is that of Triton."""
    tools = compiler_tools()
    target = tools.GPUTarget(chip.backend, chip.arch, chip.device.warp_size)
    compiled_kernel = triton.compile(_source(launch, tools), target=target, options=launch.options)
    if chip.backend == "cuda":
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compiled_kernel.asm["cubin"])
            text = subprocess.run(
                [tools.cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        registers, spilled = (_number(rf"{word}:(\d+)", text) for word in ("REG", "STACK"))
    else:
        text = compiled_kernel.asm["amdgcn"]
        registers, spilled = (_number(rf"\.{word}:\s*(\d+)", text) for word in ("vgpr_count", "vgpr_spill_count"))
    return {
        "kernel": launch.kernel.__name__, "threads": compiled_kernel.metadata.num_warps * chip.device.warp_size,
        "registers": registers, "spilled": spilled, "shared": compiled_kernel.metadata.shared,
    }  # fmt: skip
