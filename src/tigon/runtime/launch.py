"""Launch Triton kernels with little overhead, and register launchers as custom operators."""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, library

from tigon.runtime.compat.operators import current_device, current_raw_stream
from tigon.runtime.compat.triton import (
    JITFunction,
    TensorDescriptor,
    TileDescriptor,
    direct_launch,
    has_launch_hook,
    recorded_launches,
    tl,
    triton,
)
from tigon.runtime.device import HAS_TRITON, HIP, PLAIN, simulation_of
from tigon.runtime.self_check import direct_launches_agree, may_wait

Function = TypeVar("Function", bound=Callable)

# Options of a launch that passes no others. By default Triton 3.10 does not fuse products and sums.
COMPILE = {"enable_fp_fusion": True}

# Builds of torch without process groups have no function that says whether there is one.
_HAS_PROCESS_GROUPS = dist.is_available()

# The types of tensor descriptors. The layout of a tile follows from its dtype and shape.
DESCRIPTORS = tuple(descriptor for descriptor in (TensorDescriptor, TileDescriptor) if descriptor is not None)

# Variants that may be launched directly. A key holds everything by which Triton chooses a variant. A value holds the
# results of `direct_launch` and the values of the constexprs. It also holds the kernel, by whose id the function in the
# key is found, and the compiled variant, because Triton may unload one that nobody refers to.
_variants: dict[tuple, tuple] = {}

# A verdict is True if the self-check of direct launches passed on the device of this index.
_verdicts: dict[int, bool] = {}

_split_functions: dict[tuple, Callable[..., tuple]] = {}


def _split_function(kernel: JITFunction | None, kinds: tuple[type, ...]) -> Callable[..., tuple]:
    """Return a function from arguments of these types to their properties, and to the values that a launch takes.

    The properties are everything that Triton compiles a variant of the kernel for. For a tensor these are the dtype and
    whether it is aligned to 16 bytes (on AMD also whether it has less than 2 GiB). For an int these are whether it
    takes 64 bits and, unless the kernel does not specialise it (such as M), whether it is 1 or a multiple of 16. The
    values of ints are not part of the key, because each batch has others. For a tensor descriptor they are its dtype
    and the shape of its tiles. `kernel` may be None if there are no ints.

    The value of a tensor is its address, because for a tensor Triton asks the driver at every launch whether the GPU
    can read it. Therefore the properties say whether all tensors are on a GPU. The function is compiled from source,
    once, because small models wait for the host.
    """
    parts, values, tensors = [], [], []
    for i, kind in enumerate(kinds):
        values.append(f"a{i}")
        if kind is int and kernel is not None:
            parts.append(f"a{i} >> 31")
            if not kernel.params[i].do_not_specialize:
                parts.append(f"a{i} == 1 or (a{i} & 15 == 0 and 16)")
        elif kind in DESCRIPTORS:
            parts.append(f"a{i}.base.dtype, *a{i}.block_shape")
        elif kind is not types.NoneType and kind is not float:
            tensors.append(i)
            values[i] = f"p{i}"
            parts.append(f"a{i}.dtype")
            if HIP:
                parts.append(f"a{i}.untyped_storage().nbytes() >> 31 == 0")
    if tensors:
        # Most tensors are aligned, so that one number stands for all of them.
        addresses = " | ".join(f"(p{i} := a{i}.data_ptr())" for i in tensors)
        parts.append(f"({addresses}) & 15 and ({''.join(f'p{i} & 15, ' for i in tensors)})")
        parts.append(" and ".join(f"a{i}.is_cuda" for i in tensors))
    names = ", ".join(f"a{i}" for i in range(len(kinds)))
    return eval(f"lambda {names}: (({', '.join(parts)},), ({', '.join(values)},))")


# The functions for tensors are the same for all kernels.
_split_tensors = functools.cache(functools.partial(_split_function, None))


def launch(kernel: JITFunction, programs: int, *arguments: Any, **constants: Any) -> tuple | None:
    """Launch `programs` programs of a kernel, or do nothing if there are none.

    Triton derives from the arguments, at every launch, which compiled variant it needs (11 us). Small models wait for
    the host, so from the second launch on the variant is looked up here and returned, and the call by which Triton
    launched it is repeated with the new arguments. This is done only if that call has a known form, and only on devices
    where the self-check passed; every other launch goes through `kernel[grid]`.

    `arguments` are those of the kernel except the constexprs, in its order, which `in_order` finds: first a tensor,
    then tensors, tensor descriptors or None, then ints and floats. `constants` are the constexprs by name, `num_warps`,
    and other options of the compiler, such as `enable_fp_fusion`.
    """
    if not programs:
        return None
    device = arguments[0].get_device()
    if device < 0 and (simulation := simulation_of(arguments[0].device)) is not None:
        simulation.count_launch(arguments)
        return None
    # The interpreter has no device, and only Triton calls the hooks of a profiler.
    if device < 0 or has_launch_hook():
        kernel[(programs,)](*arguments, **COMPILE | constants)
        return None
    kinds = (id(kernel), *map(type, arguments))
    split = _split_functions.get(kinds)
    if split is None:
        split = _split_functions[kinds] = _split_function(kernel, tuple(map(type, arguments)))
    properties, values = split(*arguments)
    # There is one function for each kernel and types of arguments, so it stands for them.
    key = (split, device, properties, *constants, *constants.values())
    if (variant := _variants.get(key)) is None:
        _launch_and_store(key, kernel, programs, arguments, constants)
        return None
    call, middle, is_packed, constexprs, _ = variant
    values = (*values, *constexprs)
    call(programs, 1, 1, current_raw_stream(device), *middle, *((values,) if is_packed else values))
    return variant


class Plan:
    """A launch of a kernel with known numbers and constexprs, for which only tensors are missing. Launchers cache
    plans, which saves a third of the host's time in `launch`, and the search for the numbers."""

    def __init__(self, kernel: JITFunction, programs: int, *numbers: float, **constants: Any) -> None:
        self.kernel, self.programs, self.numbers, self.constants = kernel, programs, numbers, constants
        # The variants, by the types, the device and the properties of the tensors.
        self.variants: dict[tuple, tuple] = {}

    def launch(self, *tensors: Any) -> None:
        """Launch the kernel on its tensors, some of which may be None."""
        device = tensors[0].get_device()
        if device < 0 or has_launch_hook():
            launch(self.kernel, self.programs, *tensors, *self.numbers, **self.constants)
            return
        split = _split_tensors(tuple(map(type, tensors)))
        properties, values = split(*tensors)
        # The properties do not say which tensors are None, but each list of types has a function of its own.
        key = split, device, properties
        variant = self.variants.get(key)
        if variant is None:
            variant = launch(self.kernel, self.programs, *tensors, *self.numbers, **self.constants)
            if variant is not None:
                self.variants[key] = variant
            return
        call, middle, is_packed, constexprs, _ = variant
        values = (*values, *self.numbers, *constexprs)
        call(self.programs, 1, 1, current_raw_stream(device), *middle, *((values,) if is_packed else values))


def _launch_and_store(key: tuple, kernel: JITFunction, programs: int, arguments: tuple, constants: dict) -> None:
    """Launch a kernel through Triton, and store its variant if the next launch may be direct."""
    device = key[1]
    if _verdicts.get(device) is False or not all(getattr(x, "is_cuda", True) for x in arguments):
        kernel[(programs,)](*arguments, **COMPILE | constants)
        return
    with recorded_launches() as records:
        compiled = kernel[(programs,)](*arguments, **COMPILE | constants)
    if not _launches_directly(device):
        return
    constexprs = [constants[name] for name in kernel.arg_names[len(arguments) :]]
    stream = current_raw_stream(device)
    repeated = direct_launch(records[-1], programs, stream, (*arguments, *constexprs)) if records else None
    if repeated is not None:
        _variants[key] = *repeated, constexprs, (kernel, compiled)


def in_order(kernel: JITFunction) -> Callable[..., tuple]:
    """Return a function from the arguments of a kernel, given by name, to a tuple in the order of its parameters.
    Kernels with many parameters are launched as `launch(kernel, programs, *in_order(kernel)(x_ptr=x, ...), ...)`.
    Strides of one tensor, which are parameters such as `stride_x_b, stride_x_s`, are given as one tuple, `strides_x`.
    The function raises a TypeError if a parameter has no argument, or an argument has no parameter."""
    return _order_function(kernel.fn)


@functools.cache
def _order_function(kernel: Callable) -> Callable[..., tuple]:
    """Return the function of `in_order`. It is compiled from source: collecting a dict by name takes 3 us more."""
    names: dict[str, str] = {}
    for name, parameter in inspect.signature(kernel).parameters.items():
        if parameter.annotation is not tl.constexpr:
            strides = re.fullmatch(r"stride_(\w+)_[a-z]", name)
            names |= {f"strides_{strides[1]}": f"*strides_{strides[1]}"} if strides else {name: name}
    return eval(f"lambda *, {', '.join(names)}: ({', '.join(names.values())},)")


def _launches_directly(device: int) -> bool:
    """Return whether kernels may be launched directly on the device. For each device, the first call at which the host
    may wait runs the self-check. This function is called only after a launch through Triton, so it costs direct
    launches no time."""
    verdict = _verdicts.get(device)
    if verdict is None:
        if not may_wait():
            return False
        verdict = _verdicts[device] = direct_launches_agree(device)
    return verdict


def self_check_verdict(device: int) -> bool | None:
    """Return whether the self-check passed on a device, or None if it has not run there."""
    return _verdicts.get(device)


def launch_method(runs_self_checks: bool = False) -> str:
    """Return a text for `tigon env` that says how kernels are launched after the first time."""
    if runs_self_checks and HAS_TRITON and torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            if device not in _verdicts:
                with torch.cuda.device(device):
                    _verdicts[device] = direct_launches_agree(device)
    failed = [device for device, passed in _verdicts.items() if not passed]
    if failed:
        return f"through Triton {triton.__version__} on devices {failed}, where the self-check failed"
    return "direct" if _verdicts else "direct, once the self-check on the device has passed"


def on_device(function: Function) -> Function:
    """Decorate a function that launches kernels, so that the device of its first argument is current while it runs."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        # -1 stands for the CPU.
        device = args[0].get_device()
        if device >= 0 and device != current_device():
            with torch.cuda.device(device):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, call)


# --- custom operators ------------------------------------------------------------------------------

# The form of a value that a launcher takes or returns: None for a single value, or else the type of the tuple (a
# NamedTuple or `tuple`) and the forms of its items.
_Form: TypeAlias = "tuple[type[tuple], tuple[_Form, ...]] | None"


def _is_named_tuple(annotation: object) -> TypeGuard[type[NamedTuple]]:
    return isinstance(annotation, type) and issubclass(annotation, tuple) and hasattr(annotation, "_fields")


def _form(annotation: Any) -> _Form:
    """Return the form of the values of a type."""
    if _is_named_tuple(annotation):
        return annotation, tuple(map(_form, get_type_hints(annotation).values()))
    if get_origin(annotation) is tuple:
        return tuple, tuple(map(_form, get_args(annotation)))
    return None


def _parameters(name: str, annotation: Any) -> Iterator[inspect.Parameter]:
    """Yield the operator's parameters for one parameter of a launcher: one for each single value in it."""
    if _is_named_tuple(annotation):
        for field, field_annotation in get_type_hints(annotation).items():
            yield from _parameters(f"{name}_{field}", field_annotation)
    else:
        yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _count_values(form: _Form) -> int:
    """Return how many single values a value of this form holds."""
    return 1 if form is None else sum(map(_count_values, form[1]))


def _flatten(values: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            flat.extend(_flatten(value))
        else:
            flat.append(value)
    return flat


def _rebuild(form: _Form, flat: Iterator[Any]) -> Any:
    """Return the value of this form that takes its single values from `flat`: the inverse of `_flatten`."""
    if form is None:
        return next(flat)
    tuple_type, item_forms = form
    items = [_rebuild(item_form, flat) for item_form in item_forms]
    return tuple(items) if tuple_type is tuple else tuple_type(*items)


# The types of values that need not wait for a collective, besides NamedTuples without tensors.
_READY = {*PLAIN, types.NoneType, bool, int, float, str, torch.dtype}


def _may_hold_tensors(annotation: Any) -> bool:
    if _is_named_tuple(annotation):
        return any(map(_may_hold_tensors, get_type_hints(annotation).values()))
    return Tensor in (annotation, *get_args(annotation))


def _wait_for_collectives(value: Any) -> Any:
    """Wait for the tensors in a value that a collective still computes. Return the value with their results."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_wait_for_collectives, value))
    return value.trigger_wait() if hasattr(value, "trigger_wait") else value


def launcher(fake: Callable) -> Callable[[Function], Function]:
    """Decorate a function that launches kernels and returns new tensors, with None for results that are not computed.

    An eager call runs the function on the device of its first argument, a tensor. `torch.compile` sees one opaque
    operator, `tigon::<name>`. `fake` allocates tensors with the shapes of the results. Its parameters have the names of
    those parameters of the function that it needs.

    A parameter may be a NamedTuple of tensors, numbers, flags, strings and further NamedTuples, and so may the result.
    The function and `fake` take and return them as they are. The operator's schema has one parameter for each field:
    `options: Options` becomes `options_softcap` and so on. A parameter cannot be `SomeNamedTuple | None`; a field can
    be `Tensor | None`. Results of an operator cannot be None, so under `torch.compile` empty tensors replace None.

    Example:
        >>> class Options(NamedTuple):
        ...     scale: float
        ...     bias: Tensor | None
        >>> @launcher(fake=lambda x: torch.empty_like(x))
        ... def scaled(x: Tensor, options: Options) -> Tensor:
        ...     return x * options.scale if options.bias is None else x * options.scale + options.bias
    """

    def decorate(function: Function) -> Function:
        run_on_device = on_device(function)
        annotations = get_type_hints(function)
        result_form = _form(annotations.pop("return"))
        positions = [list(annotations).index(name) for name in inspect.signature(fake).parameters]
        argument_forms = [_form(annotation) for annotation in annotations.values()]
        tensors = (Tensor,) * _count_values(result_form)
        ready = frozenset(x for x in annotations.values() if _is_named_tuple(x) and not _may_hold_tensors(x)) | _READY
        signature = inspect.Signature(
            [parameter for name, annotation in annotations.items() for parameter in _parameters(name, annotation)],
            return_annotation=Tensor if result_form is None else types.GenericAlias(tuple, tensors),
        )

        def as_operator(run: Callable) -> Callable:
            """Return a function that takes and returns the single values only, as an operator does."""

            @functools.wraps(function)
            def call(*flat: Any) -> Any:
                values = iter(flat)
                results = run(*(_rebuild(form, values) for form in argument_forms))
                if not isinstance(results, tuple):
                    return results
                return tuple(flat[0].new_empty(0) if x is None else x for x in _flatten(results))

            call.__signature__ = signature  # type: ignore[attr-defined]
            return call

        operator = library.custom_op(f"tigon::{function.__name__}", as_operator(run_on_device), mutates_args=())
        operator.register_fake(as_operator(lambda *args: fake(*[args[i] for i in positions])))

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                results = operator(*_flatten(args))
                return _rebuild(result_form, iter(results if isinstance(results, tuple) else (results,)))
            if not ready.issuperset(map(type, args)) and _HAS_PROCESS_GROUPS and dist.is_initialized():
                # Tensor parallelism passes tensors that a collective may still compute.
                args = tuple([_wait_for_collectives(x) for x in args])
            device = args[0].get_device()
            # The condition repeats that of `run_on_device`, and saves one call, because small models wait for the host.
            return function(*args) if device < 0 or device == current_device() else run_on_device(*args)

        return cast(Function, call)

    return decorate
