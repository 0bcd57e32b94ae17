"""Build small copies of modules, and run them in place of the originals.

A stand-in has the class and the settings of the original, small random parameters, and no hooks. It runs on the CPU and
in any dtype, and changes nothing of the original:

    twin = stand_in(module, {"weight": normal(0, 16)}, training=False)
    y = run_forward(twin, normal(1, 4, 16))   # type(module).forward(twin, x)
"""

import contextlib
import functools
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tigon.recognition.probing.trials import record
from tigon.runtime.autograd import without_saved_tensor_hooks
from tigon.runtime.compat.operators import function_modes
from tigon.runtime.engines import WRAPPER_ATTRIBUTES
from tigon.runtime.reach.places import REGISTERED

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# Special numbers that code may compare values with.
SENTINELS = (-100.0, 1.0, -1.0, 0.0)

ModuleType = TypeVar("ModuleType", bound=nn.Module)
Candidate = TypeVar("Candidate", bound=Callable)


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Compute eagerly on the CPU, independent of the caller's modes. Restore the global random state afterwards. A
    probe may run inside a call of a model, for adapters that were added after the patch."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    random_state, numpy_random = random.getstate(), sys.modules.get("numpy.random")
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    # Within a device context, every function of torch takes twice as long. Where the CPU is the default and no mode is
    # active, the context would change nothing.
    is_on_cpu = not function_modes() and torch.empty(0).device.type == "cpu"
    # More than one thread makes tensors this small six times slower on a busy machine.
    torch.set_num_threads(1)
    with (
        contextlib.ExitStack() as stack,
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
        contextlib.nullcontext() if is_on_cpu else torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        without_saved_tensor_hooks(),
        warnings.catch_warnings(),
    ):
        stack.callback(torch.set_num_threads, threads)
        stack.callback(random.setstate, random_state)
        if numpy_random is not None:
            stack.callback(numpy_random.set_state, numpy_state)
        # Loaders set another default dtype while they build a model.
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        # Warnings of a probe do not concern the user.
        warnings.simplefilter("ignore")
        yield


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal values from a private generator."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def stand_in(
    module: ModuleType,
    parameters: Mapping[str, Tensor] | None = None,
    children: Mapping[str, nn.Module | None] | None = None,
    **attributes: Any,
) -> ModuleType:
    """Return a shallow copy with these parameters, children and attributes, and without hooks. All other parameters are
    None. All other attributes are those of the module, and so are the children if `children` is None. Constructors and
    `register_parameter` are not called, because loaders replace them to build on meta."""
    twin = object.__new__(type(module))
    state = twin.__dict__
    state.update(module.__dict__)
    for name in ("forward", *WRAPPER_ATTRIBUTES, *(parameters or {})):
        state.pop(name, None)
    for name, value in state.items():
        if "_hooks" in name and isinstance(value, dict):
            state[name] = type(value)()
    new_parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in (parameters or {}).items()}
    state["_parameters"] = {name: new_parameters.get(name) for name in module._parameters} | new_parameters
    state["_buffers"] = dict(module._buffers)
    state["_modules"] = dict(module._modules if children is None else children)
    state.update(attributes)
    return twin


def random_linear(seed: int, features_in: int, features_out: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    """Return a linear layer with random weights, scaled so that outputs are about as large as inputs."""
    layer = object.__new__(nn.Linear)
    nn.Module.__init__(layer)
    weight = normal(seed, features_out, features_in) * features_in**-0.5
    parameters = {"weight": weight.to(dtype)} | ({"bias": normal(seed + 1, features_out, dtype=dtype)} if bias else {})
    layer = stand_in(layer, parameters, in_features=features_in, out_features=features_out)
    layer._parameters.setdefault("bias", None)
    return layer


def copy_in_mode(module: ModuleType, training: bool) -> ModuleType:
    """Return a stand-in of a module and all its descendants, in training or evaluation mode."""
    children = {name: child and copy_in_mode(child, training) for name, child in module._modules.items()}
    return stand_in(module, {}, children, training=training)


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """Return parameters, buffers and tensors that are plain attributes, as FSDP1 leaves views of its flat parameter."""
    # `|` is not used: ZeRO-3's dict of parameters does not support copying.
    plain_tensors = ((name, value) for name, value in vars(module).items() if isinstance(value, Tensor))
    return dict([*module._parameters.items(), *module._buffers.items(), *plain_tensors])


def has_no_tensors(module: nn.Module) -> bool:
    """Return True if a module and its descendants hold no tensor, as for an activation or a dropout."""
    return all(tensor is None for each in module.modules() for tensor in own_tensors(each).values())


def describe(error: Exception) -> str:
    """Return the type and the first line of an exception, for a report."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:100]}{'...' if len(first) > 100 else ''}"


def is_linear(module: Any) -> bool:
    """Return True for a module that states the features of its input and output, as linear layers do."""
    return all(type(getattr(module, name, None)) is int for name in ("in_features", "out_features"))


def accepts_inputs(module: nn.Module, *counts: int) -> bool:
    """Return True if the class defines a forward that accepts one of these numbers of positional arguments."""
    if type(module).forward is nn.Module.forward:
        return False
    for count in counts:
        with contextlib.suppress(TypeError, ValueError):
            inspect.signature(type(module).forward).bind(module, *[None] * count)
            return True
    return False


class WritesTensor(Exception):
    """A forward wrote to its input or to the module, or drew random numbers. The message is shown to the user."""


def run_forward(twin: nn.Module, *inputs: Tensor) -> Any:
    """Run the forward of the stand-in's class on copies of the inputs."""
    copies = [x.clone() for x in inputs]
    tensors = [*copies, *(t for m in twin.modules() for t in own_tensors(m).values() if t is not None)]
    before = [(t, t._version, t.detach().clone()) for t in tensors]
    attributes = [(m, _state(m)) for m in twin.modules()]
    random_state = torch.get_rng_state()
    y = type(twin).forward(twin, *copies)
    for module, old in attributes:
        now = _state(module)
        for name in old.keys() | now.keys():
            if old.get(name, now) is not now.get(name, old):
                raise WritesTensor(f"its forward writes .{name}")
    if not torch.equal(random_state, torch.get_rng_state()):
        raise WritesTensor("its forward draws random numbers")
    # Values are compared too, because a write through `.data` does not change the version.
    if any(t._version != version or not same_values(t, values) for t, version, values in before):
        raise WritesTensor("its forward writes to its input or to a parameter")
    return y


def _state(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **{k: v for table in REGISTERED for k, v in vars(module)[table].items()}}


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of one dtype have the same values. NaN equals NaN."""
    return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def same_bits(a: object, b: Tensor) -> bool:
    """Return True if `a` is a tensor with the dtype and the values of `b`."""
    return isinstance(a, Tensor) and a.dtype == b.dtype and same_values(a, b)


def select_equal(candidates: Sequence[Candidate], twin: nn.Module, inputs: Sequence[Tensor], y: Any) -> list[Candidate]:
    """Return the candidates whose output has the bits of `y`, the output of the module."""
    outputs = [candidate(twin, *inputs, reference=True) for candidate in candidates]
    pairs = zip(candidates, outputs, strict=True)
    return [c for c, ours in pairs if record(same_bits(y, ours), c, twin, inputs, ours, y)]


def select_equal_gradients(
    candidates: Sequence[Candidate], twin: nn.Module, inputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[Candidate]:
    """Return the candidates whose gradients of the leaves are those of the module."""
    stock = gradients(functools.partial(type(twin).forward, twin, *inputs), leaves)
    ours = [gradients(functools.partial(candidate, twin, *inputs), leaves) for candidate in candidates]
    pairs = zip(candidates, ours, strict=True)
    return [c for c, g in pairs if record(same_gradients(g, stock), c, twin, inputs, g, stock, mode="gradients")]


def unusual_values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal values in rows of very different sizes. Some rows hold zeros, an infinity or a NaN."""
    x = normal(seed, *shape)
    rows = x.view(-1, shape[-1])  # [rows, features]
    largest = 3e4 if dtype == torch.float16 else 1e30
    for i, row in enumerate(rows):
        row *= (1.0, largest, 1.0 / largest, 1.0, 1.0, 1.0, 0.0, 1e4)[(i + seed) % 8]
        special = (None, None, None, torch.inf, -torch.inf, torch.nan, None, None)[(i + seed) % 8]
        if special is not None:
            row[i % len(row)] = special
        if i % 8 == 3:
            # Modules compare inputs with such numbers, which mark padding.
            row[: len(SENTINELS)] = torch.tensor(SENTINELS[: len(row)])
    return x.to(dtype)


def gradients(run: Callable[[], Any], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the leaves for one random upstream gradient; None for a leaf without one."""
    with torch.enable_grad():
        for leaf in leaves:
            leaf.requires_grad_()
        results = run()
        outputs = [y for y in (results if isinstance(results, tuple) else (results,)) if y is not None]
        upstream = [normal(9 + i, *y.shape, dtype=y.dtype) for i, y in enumerate(outputs)]
        differentiable = [(y, dy) for y, dy in zip(outputs, upstream, strict=True) if y.requires_grad]
        if not differentiable:
            return [None] * len(leaves)
        outputs, upstream = [y for y, _ in differentiable], [dy for _, dy in differentiable]
        return list(torch.autograd.grad(outputs, leaves, upstream, allow_unused=True))


def same_gradients(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    """Return True if the same leaves have a gradient, with values that differ at most by the order of sums."""
    is_close = lambda x, y: (x - y).abs().max() <= 1e-4 * y.abs().max()
    pairs = zip(a, b, strict=True)
    return all(x is y is None or (x is not None and y is not None and is_close(x, y)) for x, y in pairs)
