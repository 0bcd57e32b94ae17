"""Launch Triton kernels with little overhead, and register launchers as custom operators."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import triton
from torch import library
from triton.runtime.jit import JITFunction

from tigon.runtime.device import HIP, PLAIN, simulation_of

__all__ = ["COMPILE", "launch", "launcher", "on_device"]

# Options of every launch: Triton 3.10 stops fusing products and sums by default.
COMPILE = {"enable_fp_fusion": True}

# Compiled kernels by what their choice depends on: how to run them, the values of their constexprs, and what must live
# as long: the key has a kernel's id, and Triton may unload a variant that nobody holds.
_variants: dict[tuple, tuple] = {}

_keys: dict[tuple, Callable] = {}  # of the types of a launch's arguments: the rest of what the choice depends on


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
    if device < 0 and (simulation := simulation_of(arguments[0].device)) is not None:
        simulation.launched(arguments)
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
