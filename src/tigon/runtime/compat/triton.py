"""Every private, experimental or undocumented name of Triton that Tigon uses, in one place.

A comment at each name states why it is needed, the versions of Triton that it was seen in, and what happens without it.
`tests/runtime/compat/test_triton.py` tests the behaviour of each name, so a failing test shows what a new version has
changed.
"""

import contextlib
import copy
import importlib
import inspect
import operator
import re
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


# `tl.range(..., disable_licm=True)` switches off the motion of loop-invariant code, whose results would occupy
# registers through the whole loop. Seen in 3.6 and 3.7. Where it is missing, as in 3.4, Tigon lets `tl.range` of the
# whole process take and ignore it, and kernels with such loops spill up to 130 bytes of a thread.


def ignore_disable_licm(cls: Any) -> None:
    """Let the constructor of a class take `disable_licm`, and ignore it."""
    construct = cls.__init__

    def construct_without(self: Any, *arguments: Any, disable_licm: bool = False, **options: Any) -> None:
        construct(self, *arguments, **options)

    cls.__init__ = construct_without


if HAS_TRITON and "disable_licm" not in inspect.signature(tl.range.__init__).parameters:
    ignore_disable_licm(tl.range)


# A launch by `kernel[grid]` ends with the call `run(programs, 1, 1, stream, function, metadata, launch_metadata,
# enter_hook, exit_hook, *arguments, *constexprs)`, where `run` is an object of the driver's class `launcher_cls`. `run`
# allocates memory for a kernel that needs it, and calls its attribute `launch`, a function in C, with the programs, the
# stream, some constants and the arguments, one by one until 3.6 and in a tuple since 3.7. Seen in 3.4 to 3.9. A launch
# is repeated only if its calls were recorded and have this form. Others go through `kernel[grid]`, which takes 11 us
# more of the host's time.

_recording = threading.Lock()


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[tuple]]:
    """Record `(run, *arguments)` of each launch of this thread by Triton in the block. Nothing is recorded if Triton's
    class of `run` is not written in Python."""
    records: list[tuple] = []
    thread = threading.get_ident()
    launcher_class: Any = getattr(triton.runtime.driver.active, "launcher_cls", object)
    if not isinstance(vars(launcher_class).get("__call__"), types.FunctionType):
        yield records
        return

    def call(run: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            records.append((run, *arguments))
        return original(run, *arguments, **options)

    with _recording:
        original = launcher_class.__call__
        launcher_class.__call__ = call
        try:
            yield records
        finally:
            launcher_class.__call__ = original


def _are_identical(values: Sequence, others: Sequence) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))


def direct_launch(record: tuple, programs: int, stream: int, values: tuple) -> tuple[Callable, tuple, bool] | None:
    """Return `(call, middle, is_packed)` with which a recorded launch is repeated, or None if it has another form.
    `call(programs, 1, 1, stream, *middle, *values)` launches the kernel. If `is_packed` is True, the last argument is
    the tuple of the values. `values` are the arguments and the constexprs of the recorded launch."""
    run, *arguments = record
    if arguments[:4] != [programs, 1, 1, stream] or not _are_identical(arguments[9:], values):
        return None
    middle: tuple = (*arguments[4:6], None, None, None)
    # A copy of `run` shows what the function in C receives. Memory that `run` allocates differs between two calls.
    calls: list[tuple] = []
    try:
        twin = copy.copy(run)
        twin.launch = lambda *arguments: calls.append(arguments)
        for count in (1, 2):
            twin(count, 1, 1, stream, *middle, *values)
    except Exception:
        return run, middle, False
    is_packed = type(calls[-1][-1]) is tuple and _are_identical(calls[-1][-1], values)
    end = -1 if is_packed else -len(values)
    fixed, other = (call[4:end] for call in calls)
    has_known_form = calls[-1][:4] == (2, 1, 1, stream) and (is_packed or _are_identical(calls[-1][end:], values))
    return (run.launch, fixed, is_packed) if has_known_form and _are_identical(fixed, other) else (run, middle, False)


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


# Gluon is Triton's experimental language for kernels that place data in shared memory by hand. Seen in 3.4 to 3.9. If a
# name is missing, `gluon` is None, and no kernel in Gluon exists.
gluon: Any = None
gl: Any = None
with contextlib.suppress(ImportError):
    gl = importlib.import_module("triton.experimental.gluon.language")
    gluon = importlib.import_module("triton.experimental.gluon")


# The instructions of Hopper in Gluon: products of tiles in shared memory, copies by the tensor memory accelerator, and
# barriers that count arrivals. The kernels of `ops/experts/tile_product.py` need them, and descriptors with the layout
# of the tiles in shared memory. Seen in the releases of `HOPPER_TESTED`. In other releases, `hopper` is None, and
# experts multiply by `grouped_mm` of torch.
HOPPER_TESTED = ("3.6", "3.7")


def has_hopper_instructions() -> bool:
    """Return whether the kernels that use `hopper` were tested in this Triton release."""
    return any(f"{triton.__version__}.".startswith(f"{release}.") for release in HOPPER_TESTED)


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


def has_tensor_descriptors() -> bool:
    """Return whether kernels may take tensor descriptors in this Triton release."""
    match = re.match(r"(\d+)\.(\d+)", triton.__version__)
    return match is not None and (int(match[1]), int(match[2])) >= (3, 6)


TensorDescriptor: Any = None
if has_tensor_descriptors():
    with contextlib.suppress(ImportError, AttributeError):
        TensorDescriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
