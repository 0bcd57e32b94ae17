"""Which implementation an op runs, what its device can do, and how `torch.compile` sees it."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import triton
from torch import Tensor, library
from torch.nn.modules import module
from triton.runtime.jit import JITFunction

__all__ = [
    "Device",
    "Simulation",
    "any_global_hook",
    "cdiv",
    "device_kind",
    "device_of",
    "first_order",
    "frees_saved",
    "keeps_graph",
    "launch",
    "launcher",
    "leave_absent",
    "on_device",
    "runs_kernels",
    "simulated",
    "simulation_of",
    "without_autocast",
]

# Triton reads the same variable when a kernel is decorated: the interpreter then runs kernels on CPU tensors.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # fp64 takes the references

PLAIN = (Tensor, torch.nn.Parameter)

# Options of every launch: Triton 3.10 stops fusing products and sums by default.
COMPILE = {"enable_fp_fusion": True}


@dataclass(frozen=True, eq=False)  # compared by identity, for heuristics that cache: there is one for each device
class Device:
    """The properties that launch parameters depend on."""

    multiprocessors: int
    warp_size: int  # 32 on NVIDIA, 64 on the Instinct chips of AMD
    shared_memory: int  # bytes that one workgroup may use
    async_copy: bool = False  # from global to shared memory by single threads: NVIDIA since Ampere

    @property
    def max_warps(self) -> int:
        """A workgroup holds 1024 threads on either vendor."""
        return 1024 // self.warp_size


HIP = torch.version.hip is not None

# Compiled kernels by what their choice depends on: how to run them, the values of their constexprs, and what must live
# as long: the key has a kernel's id, and Triton may unload a variant that nobody holds.
_variants: dict[tuple, tuple] = {}
_keys: dict[tuple, Callable] = {}  # of the types of a launch's arguments: the rest of what the choice depends on

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
    )


def device_of(x: Tensor) -> Device:
    """Properties of the device that holds `x`."""
    if x.is_cuda:
        return _device(x.device.index)
    return _simulation.device if _simulation is not None and x.is_meta else EMULATED


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. `triton.cdiv` takes 1.7 us, and small models wait for the host."""
    return -(-a // b)


def _key_of(kernel: JITFunction, arguments: tuple) -> Callable:
    """A function of a launch's arguments, of these types, to what Triton compiles a variant of the kernel for.

    That is, of tensors the dtype and whether they are aligned to 16 bytes (on AMD also whether they take less than
    2 GiB), of ints whether they take 64 bits and, unless it leaves them alone (M), whether they are 1 or a multiple of
    16. Not their values: those of a batch are endless. The function is made once, as source, because small models wait
    for the host.
    """
    parts = []
    for i, value in enumerate(arguments):
        if type(value) is int:
            parts.append(f"a{i} >> 31")
            if not kernel.params[i].do_not_specialize:
                parts.append(f"a{i} == 1 or (a{i} & 15 == 0 and 16)")
        elif value is not None and type(value) is not float:
            parts.append(f"a{i}.dtype, a{i}.data_ptr() & 15")
            if HIP:
                parts.append(f"a{i}.untyped_storage().nbytes() >> 31 == 0")
    names = ", ".join(f"a{i}" for i in range(len(arguments)))
    return eval(f"lambda {names}: ({', '.join(parts)},)")


def launch(kernel: JITFunction, programs: int, *arguments: object, **constants: object) -> None:
    """Run `programs` programs of a kernel; `constants` are its constexprs by name, and `num_warps`. None run for 0.

    `arguments` are all others, in the kernel's order: tensors or None, the first a tensor, then ints and floats.

    Triton finds out anew at every launch which compiled variant the arguments call for (11 us); here it is looked up by
    what that depends on, because small models wait for the host.
    """
    if not programs:
        return
    device = arguments[0].get_device()
    if device < 0 and _simulation is not None and arguments[0].is_meta:
        _simulation.launched(arguments)
        return
    if device < 0 or _hooked():  # the interpreter's; a profiler's, which wants to be told of every launch
        kernel[(programs,)](*arguments, **constants, **COMPILE)
        return
    kinds = (id(kernel), *map(type, arguments))
    key_of = _keys.get(kinds)
    if key_of is None:
        key_of = _keys[kinds] = _key_of(kernel, arguments)
    key = (kinds, device, key_of(*arguments), *constants, *constants.values())
    found = _variants.get(key)
    if found is None:
        compiled = kernel[(programs,)](*arguments, **constants, **COMPILE)
        tail = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        _variants[key] = compiled.run, compiled.function, compiled.packed_metadata, tail, (kernel, compiled)
    else:
        run, function, metadata, tail, _ = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *tail)


def _hooked() -> bool:
    """Return whether launches must go through Triton itself, because a profiler has set its launch hooks."""
    runtime = triton.knobs.runtime
    # A hook is None or a function in Triton 3.4, and a chain of functions later.
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def on_device(function: Callable) -> Callable:
    """Decorate a function that launches kernels: the device of its first tensor is the current one while it runs."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        device = args[0].get_device()  # -1 for the CPU
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def first_order(backward: Callable) -> Callable:
    """Decorate the backward of an autograd function that has no second derivative: `create_graph=True` is refused.

    torch's `once_differentiable` raises only where the incoming gradient itself needs a gradient: a penalty on the
    gradient of a plain loss would silently be a constant.
    """

    @functools.wraps(backward)
    def call(ctx, *gradients):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            name = type(ctx).__name__.strip("_").removesuffix("Backward")
            raise RuntimeError(f"tigon: {name} has no second derivative, so it refuses create_graph=True")
        return backward(ctx, *gradients)

    return call


def without_autocast(backward: Callable) -> Callable:
    """Decorate the backward of an autograd function that never runs under autocast: nor do its products then, if the
    caller takes gradients in a block of it.
    """

    @functools.wraps(backward)
    def call(ctx, *gradients):
        kind = next((x.device.type for x in gradients if x is not None), "meta")
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return backward(ctx, *gradients)
        with torch.autocast(kind, enabled=False):
            return backward(ctx, *gradients)

    return call


_GLOBAL_HOOKS = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
    module._global_backward_pre_hooks,
    module._global_backward_hooks,
)


def any_global_hook() -> bool:
    """Whether a hook sees every module."""
    return any(_GLOBAL_HOOKS)


# In the backward of an autograd function: whether the graph is retained.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def frees_saved(x: Tensor) -> bool:
    """In the backward of an autograd function: whether what it saved, as x, is let go after it and may be overwritten.

    Not where the graph is retained, and not in a CUDA graph, whose backward may be replayed alone.
    """
    return not keeps_graph() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def leave_absent(ctx) -> None:
    """In the forward of an autograd function: gradients of outputs that nothing was computed from stay None.

    Not under `torch.compile`, which does not know the method in every version, and makes zeros of them.
    """
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)


def launcher(fake: Callable) -> Callable[[Callable], Callable]:
    """Decorate a function that launches kernels and returns new tensors, and None for what is not asked for.

    Eagerly it is a plain call, on the device of its first tensor. `torch.compile` sees one opaque operator
    `tigon::<name>`, whose results have the shapes that `fake`, called with the same arguments, allocates; an operator
    returns tensors alone, so there an empty one stands for None.
    """

    def decorate(function: Callable) -> Callable:
        guarded = on_device(function)

        def tensors(run: Callable) -> Callable:
            @functools.wraps(function)
            def call(*args):
                made = run(*args)
                if not isinstance(made, tuple):
                    return made
                return tuple(args[0].new_empty(0) if x is None else x for x in made)

            return call

        operator = library.custom_op(f"tigon::{function.__name__}", tensors(guarded), mutates_args=())
        operator.register_fake(tensors(fake))

        @functools.wraps(function)
        def call(*args):
            if torch.compiler.is_compiling():
                return operator(*args)
            if dist.is_available() and dist.is_initialized():  # what tensor parallelism gathers comes as a promise
                args = [x.trigger_wait() if type(x) not in PLAIN and hasattr(x, "trigger_wait") else x for x in args]
            device = args[0].get_device()
            # As `guarded` has it, without one more call: small models wait for the host.
            return function(*args) if device < 0 or device == torch._C._cuda_getDevice() else guarded(*args)

        return call

    return decorate
