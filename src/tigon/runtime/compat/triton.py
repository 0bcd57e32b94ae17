"""Every private, experimental or undocumented name of Triton that Tigon uses, in one place.

A comment at each name states why it is needed, the versions of Triton that it was seen in, and what happens without it.
`tests/runtime/compat/test_triton.py` tests the behaviour of each name, so a failing test shows what a new version has
changed.
"""

import contextlib
import importlib
import re
import types
from pathlib import Path
from typing import Any, NamedTuple

from tigon.runtime.device import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.runtime.jit import JITFunction
else:
    from tigon.runtime.no_triton import JITFunction as JITFunction
    from tigon.runtime.no_triton import tl as tl
    from tigon.runtime.no_triton import triton

# Every file of kernels imports `triton` and `tl` from here, because macOS and Windows have no Triton.
#
# `JITFunction` is the class of kernels: annotations name it, and `benchmarks.compile` replaces its `run`. Its
# attributes `params` (with `do_not_specialize`) and `arg_names` give the key of a direct launch. Seen in 3.4 to 3.9.
# Without the class, `import tigon` raises an ImportError that names it.

# The releases whose launchers were called as `positional_launch` describes: Triton may change the order of these
# arguments in any release, and a launcher in C does not check them.
LAUNCHES_TESTED = ("3.4", "3.6", "3.7")


def has_direct_launch(version: str = triton.__version__) -> bool:
    """Return whether `positional_launch` may replace `kernel[grid]` in this Triton release."""
    return _is_one_of(LAUNCHES_TESTED, version)


def _is_one_of(releases: tuple[str, ...], version: str) -> bool:
    """Return whether the version is one of the releases, such as "3.7", or a patch of it, such as "3.7.1"."""
    return any(version == release or version.startswith(f"{release}.") for release in releases)


def positional_launch(compiled: Any) -> tuple:
    """Return `(run, function, metadata)` of a compiled kernel.

    `run(programs_x, programs_y, programs_z, stream, function, metadata, launch_metadata, enter_hook, exit_hook,
    *arguments, *constants)` launches the kernel. `kernel[grid]` does the same after 11 us of other work. Seen in the
    releases of `LAUNCHES_TESTED`; other releases use `kernel[grid]`.
    """
    return compiled.run, compiled.function, compiled.packed_metadata


# Profilers put hooks on launches into `triton.knobs.runtime`. Seen in 3.4 to 3.9. Without them, no hook is seen, so a
# profiler misses the launches after the first of each kernel.
_runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
if not (hasattr(_runtime, "launch_enter_hook") and hasattr(_runtime, "launch_exit_hook")):
    _runtime = types.SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)


def has_launch_hook() -> bool:
    """Return whether a profiler has set a hook on launches, which only a launch through Triton itself calls."""
    # A hook is None or a function in Triton 3.4, and a chain of functions later.
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


# --- Gluon -----------------------------------------------------------------------------------------

# Gluon is Triton's experimental language for kernels that place data in shared memory by hand. The kernel of
# `ops/logits/token/row.py` needs it, and asynchronous copies from global to shared memory. Seen in 3.5 to 3.9. Between
# 3.6 and 3.9 two functions have other names: `async_load` or `async_copy_global_to_shared`, `barrier` or
# `thread_barrier`. If a name is missing, as all are in 3.4, `gluon` is None, and cross entropy reads the logits twice.
gluon: Any = None
gl: Any = None
async_load: Any = None
block_barrier: Any = None
commit_group: Any = None
wait_group: Any = None
try:
    gl = importlib.import_module("triton.experimental.gluon.language")
    _async_copy = importlib.import_module("triton.experimental.gluon.language.nvidia.ampere").async_copy
    async_load = getattr(_async_copy, "async_load", None) or _async_copy.async_copy_global_to_shared
    block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    commit_group, wait_group = _async_copy.commit_group, _async_copy.wait_group
    gluon = importlib.import_module("triton.experimental.gluon")
except (ImportError, AttributeError):
    pass


# The instructions of Hopper in Gluon: products of tiles in shared memory, copies by the tensor memory accelerator, and
# barriers that count arrivals. The kernels of `ops/experts/tile_product.py` need them, and descriptors with the layout
# of the tiles in shared memory. Seen in the releases of `HOPPER_TESTED`. In other releases, `hopper` is None, and
# experts multiply by `grouped_mm` of torch.
HOPPER_TESTED = ("3.6", "3.7")


def has_hopper_instructions(version: str = triton.__version__) -> bool:
    """Return whether the kernels that use `hopper` were tested in this Triton release."""
    return _is_one_of(HOPPER_TESTED, version)


hopper: Any = None
TileDescriptor: Any = None
if gluon is not None and has_hopper_instructions():
    try:
        TileDescriptor = importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
        hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    except (ImportError, AttributeError):
        hopper = None


# A tensor descriptor is an argument from which a kernel copies tiles by the tensor memory accelerator of Hopper and
# later chips. Seen in 3.6 and 3.7; older releases launch it in another way. Without it, experts with adapters add the
# low-rank term in a kernel of its own.


def has_tensor_descriptors(version: str = triton.__version__) -> bool:
    """Return whether kernels may take tensor descriptors in this Triton release."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= (3, 6)


TensorDescriptor: Any = None
if has_tensor_descriptors():
    with contextlib.suppress(ImportError, AttributeError):
        TensorDescriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor


# --- the compiler for other chips ------------------------------------------------------------------


class CompilerTools(NamedTuple):
    """The names of Triton with which `benchmarks.compile` compiles kernels for other chips."""

    GPUTarget: Any
    ASTSource: Any
    # The source of a Gluon kernel; None in a Triton without Gluon, in which no such kernel is launched.
    GluonASTSource: Any
    # The program of CUDA that prints the registers and the stack of a compiled kernel.
    cuobjdump: Path


def compiler_tools() -> CompilerTools:
    """Import the names of Triton's compiler. Seen in 3.4 to 3.9.

    Raises:
        RuntimeError: This Triton lacks one of the names. `benchmarks.compile` then compiles nothing.
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
