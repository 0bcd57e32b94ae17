"""Find decisions on the sizes of an input: run a forward on tensors without values, whose batch sizes are symbols.

A probe shows what a forward computes for the sizes of the probe. A forward may do something else beyond a length that
no probe reaches, as in `if x.shape[1] > 4096`. If the sizes are symbols, torch records this comparison as the guard
"size(1) > 4096". An operator that takes a size as a number, as in `x / x.shape[1]`, has the symbol in its arguments.
"""

import logging
import os
import re
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tigon.runtime.compat.graphs import DispatchMode, SymbolicTools, symbolic_tools
from tigon.runtime.compat.operators import schema_of
from tigon.runtime.reach.known_names import ARITHMETIC, WITHOUT_SIZES

LOGGER = logging.getLogger("tigon")

TORCH = os.path.dirname(torch.__file__)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Unusual sizes, with which no code compares. A guard on one of these numbers therefore comes from torch, which has
# specialised the run to this size.
SIZES = (37, 41, 43, 47)
# These operators take sizes as integers, but the values of their results depend on these integers.
BY_POSITION = frozenset(
    ("arange", "linspace", "logspace", "range", "eye", "tril", "triu", "tril_indices", "triu_indices", "randperm")
)
# These operators scan one dimension, so their results depend on its size.
SCANS = frozenset(["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"])


# The results of these functions of torch, if they are tensors, reveal no size.
HIDES_SIZES = WITHOUT_SIZES | ARITHMETIC


class _SizeWatch(TorchFunctionMode):
    """Record whether a function of torch returns anything but a tensor or a dtype, or raises an error."""

    may_reveal_size = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        # A forward may catch the error of sizes that do not fit together.
        previous, self.may_reveal_size = self.may_reveal_size, True
        result = func(*args, **(kwargs or {}))
        is_plain = type(result) in (Tensor, nn.Parameter) and func.__name__ in HIDES_SIZES
        self.may_reveal_size = previous or not (is_plain or isinstance(result, torch.dtype))
        return result


def reads_no_size(run: Callable, inputs: tuple[Tensor, ...]) -> bool:
    """Return True if torch gives a forward only tensors and dtypes. `reads_sizes_only_by_torch` must hold too."""
    watch = _SizeWatch()
    try:
        with watch:
            run(*inputs)
    except Exception:
        LOGGER.debug("a forward refuses small inputs", exc_info=True)
        return False
    return not watch.may_reveal_size


class _ArgumentWatch(DispatchMode):
    """Record the first operator that takes a size where its schema has a number or a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first: tuple[str, Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.first is None and (value := _size_as_value(func, args, kwargs)) is not None:
            self.first = f"aten.{_short_name(func)}", value
        return func(*args, **kwargs)


def _short_name(operator: Any) -> str:
    return schema_of(operator).name.partition("::")[2]


def _size_as_value(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return a size that an operator takes as a value, or None."""
    if (schema := schema_of(func)) is None:
        return None
    name = _short_name(func)
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_size = "int" in str(argument.type).lower() and name not in BY_POSITION
        values = value if isinstance(value, (list, tuple)) else (value,)
        if not is_size and (size := next((v for v in values if isinstance(v, SYMBOLIC)), None)) is not None:
            return size
    if name in SCANS and isinstance(args[0], Tensor) and len(args) > 1 and type(args[1]) is int and args[0].dim():
        scan_size = args[0].shape[args[1]]
        return scan_size if isinstance(scan_size, torch.SymInt) else None
    return None


def find_size_use(run: Callable, reference: Callable, inputs: tuple[Tensor, ...], *, any_width: bool) -> str | None:
    """Return why a forward may compute something else for inputs of other sizes, or None. `reference` computes what the
    recipe computes. A guard that a run of the reference also records comes from torch's operators, not from a decision
    of the forward. With `any_width`, the last size is a symbol too."""
    reason, guards = _run(run, inputs, any_width)
    if reason is None and guards:
        _, guards_of_reference = _run(reference, inputs, any_width)
        if new_guards := sorted(guards.keys() - guards_of_reference):
            return f"its forward decides by {guards[new_guards[0]]}"
    return reason


def _run(run: Callable, inputs: tuple[Tensor, ...], any_width: bool) -> tuple[str | None, dict[str, str]]:
    """Run a function on tensors with symbolic sizes. Return a reason or None, and the guards with their places."""
    tools = symbolic_tools()
    environment = tools.ShapeEnv(duck_shape=False)
    mode = tools.FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    # The cache of results is global, and nothing needs the results of these runs a second time.
    mode.cache_enabled = False
    fakes = _without_values(tools, mode, inputs, any_width)
    # torch records guards on strides when an input is created. These are no decisions of the forward.
    first_guard = len(environment.guards)
    watch = _ArgumentWatch()
    error: Exception | None = None
    try:
        # Before torch 2.13, only the Python version of composite operators such as `chunk` accepts symbolic sizes.
        with tools.enable_python_dispatcher(), mode, watch:
            run(*fakes)
    except Exception as exception:
        LOGGER.debug("a forward cannot run on symbolic sizes", exc_info=True)
        error = exception
    names = {str(size): f"size({i})" for fake in fakes for i, size in enumerate(fake.shape)}
    readable = lambda expression: re.sub(r"\b[su]\d+\b", lambda m: names.get(m[0], m[0]), str(expression))
    guards = {}
    for guard in environment.guards[first_guard:]:
        text = readable(guard.expr)
        frame = getattr(getattr(guard, "sloc", None), "framework_loc", None)
        if frame is None or frame.filename.startswith(TORCH):
            guards[text] = f"the size of its input ({text})"
        else:
            guards[text] = f"its input ({_describe_place(frame, text)})"
    reason = None if error is None else _explain(error)
    if watch.first is not None:
        operator, size = watch.first
        reason = f"its forward computes with the size of its input ({operator} of {readable(size)})"
    return reason, guards


def _describe_place(frame: traceback.FrameSummary, text: str) -> str:
    return f"{frame.name}, {os.path.basename(frame.filename)}:{frame.lineno}: {text}"


def _without_values(tools: SymbolicTools, mode: Any, inputs: tuple[Tensor, ...], any_width: bool) -> list[Tensor]:
    """Return tensors without values like the inputs. All their sizes but the last are symbols, shared by them. With
    `any_width`, the last size is a symbol too."""
    *batch, width = inputs[0].shape
    sizes, width = SIZES[: len(batch)], SIZES[len(batch)] if any_width else width
    real = torch.empty(*sizes, width, dtype=inputs[0].dtype)
    dynamic, static = tools.DimDynamic.DYNAMIC, tools.DimDynamic.STATIC
    dynamic_sizes = [dynamic] * len(batch) + [dynamic if any_width else static]
    context = tools.StatelessSymbolicContext(dynamic_sizes=dynamic_sizes)
    first = mode.from_tensor(real, symbolic_context=context)
    with mode:
        others = [torch.empty(first.shape, dtype=x.dtype) for x in inputs[1:]]
    fakes = [first, *others]
    return [fake.requires_grad_(x.requires_grad) for fake, x in zip(fakes, inputs, strict=True)]


def _explain(error: Exception) -> str:
    """Return a reason for an exception that the symbolic run raised."""
    class_name, first = type(error).__name__, (str(error).splitlines() or [""])[0][:100]
    # The innermost code that is not part of torch raised the error.
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(TORCH)]
    place = _describe_place(frames[-1], class_name)
    if "DataDependent" in class_name or "DynamicOutputShape" in class_name:
        return f"its forward decides by its input ({place})"
    if "Sym" in first:
        return f"its forward computes with the size of its input ({class_name}: {first})"
    return f"its forward cannot be run with symbolic sizes ({class_name}: {first})"
