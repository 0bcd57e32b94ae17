"""The types of the table of workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import tigon
from benchmarks.workloads.inputs import InputMaker, Inputs

# The shapes with the tags `first-light` and `roofline` are measured by default. docs/performance.md has the
# results of the tag `roofline`, and docs/losses.md names the tag `linear`.
FIRST_LIGHT, ROOFLINE, FIRST_ROOFLINE = ("first-light",), ("roofline",), ("first-light", "roofline")
MORE = ("more",)


@dataclass(frozen=True)
class Variant:
    """An op with some options at some sizes, for the tests or for the compiler. Its full name is that of the op
    followed by `name`. `form` says what the inputs look like beyond sizes and options. An option that has the name of a
    tensor, as in `{"weight": None}`, replaces this tensor."""

    name: str
    sizes: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16  # The compiler compiles for this dtype; the tests try several
    # The gradients of this variant are differences of terms of this size. The tests allow an error in units of the last
    # place of this size.
    term_size: float = 0.0


@dataclass(frozen=True)
class Case:
    """An op at the shape of a model, for the benchmark. `OPS` of `benchmarks.ops.cases` sets the op. `options` are the
    op's keyword arguments; `ignored` is the share of targets that are -100; `frozen` names inputs that get no gradient.
    With `no_grad` no input gets one, and the forward pass alone is measured. `skewed` is the exponent of Zipf's law by
    which tokens choose experts: expert e has the weight (e + 1)^-skewed."""

    model: str
    shape: tuple[int, ...]
    tags: tuple[str, ...] = FIRST_LIGHT
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    ignored: float = 0.0
    frozen: tuple[str, ...] = ()
    no_grad: bool = False
    skewed: float = 0.0
    op: str = ""
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """Return `op/model/shape`, followed by what is unusual; no other case has this name."""
        return "/".join([self.op, self.model, "x".join(map(str, self.shape)), *self.extras])

    @property
    def extras(self) -> tuple[str, ...]:
        """Return words for the options that differ from the usual case."""
        words = [f"{key}={_as_word(value)}" for key, value in self.options.items()]
        words += [f"ignored={self.ignored:g}"] if self.ignored else []
        words += [f"frozen={name}" for name in self.frozen]
        words += [f"skewed={self.skewed:g}"] if self.skewed else []
        return (*words, *(["no_grad"] if self.no_grad else []))


def _as_word(value: object) -> str:
    return "+".join(map(_as_word, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One op: how it is called, its reference, its inputs, and its sizes for tests, compiler and benchmark."""

    # `name` is the name in the benchmark. The function in `tigon` has this name too, unless `function` is another one.
    name: str
    function: str = ""
    # Without `call`, the op is called with the tensors and the options. `call` takes the function, the tensors and the
    # options, for modules, whose constructor takes the options.
    call: Callable[..., Any] | None = None
    reference: Callable[..., Any]  # The reference is the definition in torch, with the signature of the op.
    # This function makes the inputs from sizes. `legend` names the sizes, as in "T x I".
    inputs: Callable[[InputMaker], Inputs]
    legend: str
    rows_axis: int = 0  # This is the index of the size that can be halved or zero: rows, tokens or the sequence.

    # The contract tests run these. The tolerance of a loss is in units of the last place of 1, or of larger values.
    # An op that `has_cpu_code` does not run its reference on a CPU.
    test_variants: tuple[Variant, ...] = ()
    is_loss: bool = False
    # These arguments may have any shape, such as that of a scalar or of an empty tensor, and any dtype.
    any_shape: tuple[str, ...] = ()
    has_cpu_code: bool = False

    compile_variants: tuple[Variant, ...] = ()  # The compiler compiles these

    # The benchmark measures these. Ops of one `family` share a picture. One of `elements` and `flops` gives the floor:
    # the elements that memory must move once, forward and backward, or the operations that matrix products must do.
    bench_shapes: tuple[Case, ...] = ()
    family: str = ""
    elements: Callable[..., int] | None = None
    flops: Callable[[Case], int] | None = None
    # The benchmark calls the op with these options and those of a shape.
    bench_options: Mapping[str, Any] = field(default_factory=dict)

    def bytes_of(self, case: Case) -> int | None:
        """Return the fewest bytes that memory must move, forward and backward; None where products are the bound."""
        return None if self.elements is None else self.elements(*case.shape) * case.dtype.itemsize

    def flops_of(self, case: Case) -> int | None:
        """Return the fewest operations of matrix products, forward and backward; None where memory is the bound."""
        return None if self.flops is None else self.flops(case)

    def function_in(self, package: ModuleType = tigon) -> Callable[..., Any] | None:
        """Return the op of this Tigon or of another revision, or None if that has no such op."""
        return getattr(package, self.function or self.name, None)

    def make_inputs(
        self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int | None = 0,
        options: Mapping[str, Any] | None = None, form: Mapping[str, Any] | None = None,
    ) -> Inputs:  # fmt: skip
        """Make the inputs for these sizes: the same for the same seed, zeros for a seed of None."""
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        inputs = self.inputs(InputMaker(sizes, dtype, device, generator, options or {}, form or {}))
        for name in options or {}:
            inputs.tensors.pop(name, None)
        return inputs


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """Return the outputs of an op: a tensor, or a tuple in which None stands for an output that was not requested."""
    outputs = result if isinstance(result, tuple) else (result,)
    return tuple(output for output in outputs if output is not None)


def small(*sizes: int, **properties: Any) -> Case:
    """Return sizes so small that a CPU measures them quickly."""
    return Case("small", sizes, ("small",), **properties)


def sweep(sizes: Iterable[tuple[int, ...]], options: Mapping[str, Any] | None = None) -> tuple[Case, ...]:
    """Return shapes that differ in one size: the points of a picture of speed and memory over this size."""
    return tuple(Case("sweep", point, ("sweep",), options or {}) for point in sizes)
