"""Compare a candidate with a forward in other modes, layouts and devices, and with special upstream gradients.

The forward and the candidate run on their own stand-ins, which a `Subject` builds, so that a forward that changes its
module cannot influence the candidate.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tigon.recognition.guards.code_facts import (
    explain_identity,
    has_conditions,
    reads_sizes_only_by_torch,
)
from tigon.recognition.probing.standin import BF16, FP16, FP32, describe, normal, same_values
from tigon.recognition.probing.symbolic import find_size_use, reads_no_size
from tigon.recognition.probing.trials import record
from tigon.runtime.reach.places import Reach

LOGGER = logging.getLogger("tigon")

DTYPES = (FP32, BF16, FP16)
# The largest difference of gradients, relative to the largest value of a row.
TOLERANCE = {FP32: 1e-3, BF16: 0.1, FP16: 0.1}
SHAPES = ((), (8,), (2, 4), (2, 2, 2))
# Sizes of 0 and 1, which a run with symbolic sizes does not cover.
SMALL_SHAPES = ((1,), (1, 1), (2, 0), (1, 3), (3, 1), (2, 1, 3))

# A function that builds a stand-in, and the inputs for it.
SpecialCase = tuple[Callable[[], nn.Module], list[Tensor]]


class Subject:
    """Builds stand-ins of a module and inputs for them."""

    module: nn.Module
    # True if the module may have any width, which the run with symbolic sizes then treats as a symbol.
    has_any_width = False

    def __call__(self, dtype: torch.dtype | None = FP32, training: bool = True) -> nn.Module:
        """Return a fresh stand-in with parameters of this dtype."""
        raise NotImplementedError

    def inputs(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        """Return the inputs with these leading dimensions."""
        raise NotImplementedError

    def cases(self) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        """Yield stand-ins and inputs on which the outputs of a candidate must have the bits of the module's."""
        raise NotImplementedError

    def special_cases(self, recipe: Any, reach: Reach) -> Iterator[SpecialCase]:
        """Yield further cases for the comparison of a single candidate."""
        return iter(())

    def with_weights(
        self, dtype: torch.dtype | None, change: Callable[[str, Tensor], object], training: bool = True
    ) -> nn.Module:
        """Return a stand-in whose parameters `change(name, values)` has changed in place."""
        twin = self(dtype, training)
        for name, parameter in twin.named_parameters():
            change(name, parameter.data)
        return twin


def agrees(
    candidate: Callable,
    make: Callable[[], nn.Module],
    inputs: Sequence[Tensor],
    *,
    needs_grad: bool = False,
    has_special_upstream: bool = False,
    compares_values: bool = True,
    must_run: bool = False,
) -> bool | None:
    """Return True if a candidate computes what the forward computes, and None if the forward raises an exception.
    `make` returns a fresh stand-in. The forward and the candidate get one each. With `needs_grad`, gradients are
    compared too. With `has_special_upstream`, the upstream gradient holds NaN and infinities. Without
    `compares_values`, only the type, dtype, shape and layout of the output are compared. With `must_run`, the record of
    comparisons counts an exception of the forward as a mismatch."""
    words = ["special"] * has_special_upstream + ["gradients"] * needs_grad
    mode = " ".join(words + ["properties of the output"] * (not compares_values))
    stock, copy = make(), make()
    try:
        stock_run = functools.partial(type(stock).forward, stock)
        expected = _results(stock, stock_run, inputs, needs_grad, has_special_upstream)
    except Exception as error:
        LOGGER.debug("the forward of %s refuses a probe", type(stock).__name__, exc_info=True)
        if must_run:
            text = f"its forward raises {describe(error)}"
            record(False, candidate, stock, inputs, None, None, mode=mode, text=text)
        return None
    try:
        run = functools.partial(candidate, copy, reference=True)
        results = _results(copy, run, inputs, needs_grad, has_special_upstream)
    except Exception as error:
        text = f"the candidate raises {describe(error)}"
        record(False, candidate, stock, inputs, None, None, mode=mode, text=text)
        LOGGER.debug("%s refuses a probe that %s accepts", candidate, type(stock).__name__, exc_info=True)
        return False
    if not _same_output(results[0], expected[0], compares_values):
        return record(False, candidate, stock, inputs, results[0], expected[0], mode=mode)
    is_same = len(results) == len(expected) and all(map(_same_gradient, results[1:], expected[1:]))
    return record(is_same, candidate, stock, inputs, results[1:], expected[1:], mode=mode)


def _results(
    twin: nn.Module, run: Callable, inputs: Sequence[Tensor], needs_grad: bool, has_special_upstream: bool
) -> list:
    """Return an output and, with `needs_grad`, the gradients of the inputs and of the parameters."""
    leaves = [x.detach().clone().requires_grad_(needs_grad or x.requires_grad) for x in inputs]
    if not needs_grad:
        return [run(*leaves)]
    parameters = [p.requires_grad_() for m in twin.modules() for p in m._parameters.values() if p is not None]
    with torch.enable_grad():
        y = run(*leaves)
    if not (isinstance(y, Tensor) and y.requires_grad):
        return [y]
    dy = _upstream(y, has_special_upstream)
    return [y, *torch.autograd.grad(y, [*leaves, *parameters], dy, allow_unused=True)]


def _upstream(y: Tensor, is_special: bool) -> Tensor:
    """Return an upstream gradient. A special one has rows of very different sizes, NaN and infinities."""
    dy = normal(9, *y.shape, dtype=y.dtype)
    if is_special:
        for i, row in enumerate(dy.view(-1, dy.shape[-1])):
            row *= (1.0, 1e-3, 1e4, 1.0, 1e8, 1.0, 0.0, 1.0)[i % 8]
            if i % 8 in (3, 5, 7):
                row[i % len(row)] = {3: torch.nan, 5: torch.inf, 7: -torch.inf}[i % 8]
    return dy


def _same_output(a: Any, b: Any, compares_values: bool) -> bool:
    """Return True if two outputs are tensors of one type with the same values and properties."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    properties = lambda t: (type(t), t.dtype, t.device, t.shape, t.layout, t.requires_grad, getattr(t, "names", None))
    if properties(a) != properties(b) or _strides(a) != _strides(b):
        return False
    return a.is_meta or not compares_values or same_values(a.detach(), b.detach())


def _strides(x: Tensor) -> list[int]:
    """Return the strides of dimensions with several elements. The strides of other dimensions have no effect."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]


def _same_gradient(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if both gradients are None, or the same rows are finite and differ at most by rounding."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    tolerance = TOLERANCE[a.dtype]
    a, b = (t.double().reshape(-1, t.shape[-1]) for t in (a, b))
    is_finite = b.isfinite().all(-1)
    difference, bound = (a - b).abs().amax(-1), tolerance * b.abs().amax(-1)
    return torch.equal(a.isfinite().all(-1), is_finite) and bool((~is_finite | (difference <= bound)).all())


def agrees_in_circumstances(candidate: Callable, subject: Subject) -> bool:
    """Compare special gradients, small sizes, autocast, no_grad for inputs that require gradients, and devices."""
    in_fp32, inputs = functools.partial(subject, FP32), subject.inputs
    x, x_bf16 = inputs(FP32, 2, 4), inputs(BF16, 2, 4)
    in_bf16 = functools.partial(subject, BF16)
    runs_and_agrees = functools.partial(agrees, candidate, must_run=True)
    results = [
        runs_and_agrees(in_fp32, inputs(FP32, 4, 4), needs_grad=True, has_special_upstream=True) is True,
        runs_and_agrees(in_bf16, inputs(BF16, 4, 4), needs_grad=True, has_special_upstream=True) is True,
        # Under `no_grad`, the output must not require gradients although the inputs do.
        runs_and_agrees(in_fp32, [t.clone().requires_grad_() for t in x]) is True,
    ]
    results += [agrees(candidate, in_fp32, inputs(FP32, *shape)) is not False for shape in SMALL_SHAPES]
    with torch.autocast("cpu", BF16):
        results += [agrees(candidate, in_fp32, each) is not False for each in (x, x_bf16)]
    on_meta = lambda training=True: _to_meta(subject(FP32, training))
    # A forward that decides by the values of a tensor raises an error on meta.
    in_evaluation = functools.partial(on_meta, False)
    results += [runs_and_agrees(make, [t.to("meta") for t in x]) is True for make in (on_meta, in_evaluation)]
    results += [
        # A forward that moves its input gives an output on another device. `F.linear` of tensors on different devices
        # raises no error, and its values are undefined.
        agrees(candidate, on_meta, x, compares_values=False) is not False,
        agrees(candidate, in_fp32, [t.to("meta") for t in x], compares_values=False) is not False,
    ]
    return all(results)


def _to_meta(twin: nn.Module) -> nn.Module:
    for module in twin.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    return twin


def extends_torch(module: nn.Module) -> bool:
    """Return True if a class of torch is a base of the module's class. The code of torch is not in the reach."""
    return any(base.__module__.startswith("torch.") for base in type(module).__mro__ if base is not nn.Module)


def modes_of(subject: Subject, reach: Reach) -> tuple[bool, ...]:
    """Return the values of `training` to try. A forward that never loads this name computes the same in both modes."""
    reads_mode = "training" in reach.names or subject.module._modules or extends_torch(subject.module)
    return (True, False) if reads_mode else (True,)


def agrees_in_all_combinations(
    candidate: Callable,
    subject: Subject,
    modes: Iterable[bool],
    pairs: Sequence[tuple[torch.dtype, torch.dtype | None]],
) -> bool:
    """Compare in all combinations of modes, dtypes, shapes and gradients. A condition may depend on several of them."""
    shapes = dict.fromkeys(SHAPES + SMALL_SHAPES)
    for training, (dtype, weight_dtype), shape in itertools.product(modes, pairs, shapes):
        make, x = functools.partial(subject, weight_dtype, training), subject.inputs(dtype, *shape)
        if any(agrees(candidate, make, x, needs_grad=needs_grad) is False for needs_grad in (False, True)):
            return False
    return True


def runs_without_contiguity(candidate: Callable, subject: Subject) -> bool:
    """Return True if the candidate reproduces a forward for an input that is not contiguous. A forward may refuse this
    input, as `view` does, or copy it first, which changes the order of sums."""
    x = [t.transpose(0, 1) for t in subject.inputs(FP32, 3, 4)]
    stock = subject(FP32)
    try:
        expected = type(stock).forward(stock, *x)
        return same_values(candidate(subject(FP32), *x, reference=True), expected)
    except Exception:
        LOGGER.debug("%s refuses an input that is not contiguous", type(stock).__name__, exc_info=True)
        return False


def explain_limits(
    candidate: Callable,
    subject: Subject,
    reach: Reach,
    pairs: Sequence[tuple[torch.dtype, torch.dtype | None]],
    dims: Iterable[int],
) -> str | None:
    """Return why a forward may compute something else for other tensors or other batch sizes, or None. `reach` is the
    code that the forward may run. The run with symbolic sizes is in training mode, in fp32, with three dimensions. If
    the code has conditions, it runs with every combination of modes, `pairs` (the dtypes of the input and of the
    weights) and `dims` (numbers of dimensions). If the code reads `requires_grad`, it also runs with inputs that
    require gradients. If `reads_no_size` holds for a combination, its run with symbolic sizes is skipped, because it
    takes 40 ms."""
    modes = modes_of(subject, reach)
    if reason := explain_identity(reach):
        return f"its forward {reason}"
    if not has_conditions(reach):
        modes, pairs, dims = (True,), ((FP32, FP32),), (3,)
    gradients = (False, True) if "requires_grad" in reach.names else (False,)
    sees_all_reads = reads_sizes_only_by_torch(reach, subject.module)
    for training, (dtype, weight_dtype), dim, has_grad in itertools.product(modes, pairs, sorted(dims), gradients):
        twin = subject(weight_dtype, training)
        reference = functools.partial(candidate, twin, reference=True)
        tensors = tuple(x.requires_grad_(has_grad) for x in subject.inputs(dtype, *[2] * (dim - 1)))
        run = functools.partial(type(twin).forward, twin)
        with torch.set_grad_enabled(has_grad):
            if sees_all_reads and reads_no_size(run, tensors):
                continue
            reason = find_size_use(run, reference, tensors, any_width=subject.has_any_width)
        if reason is not None:
            return reason
    return None
