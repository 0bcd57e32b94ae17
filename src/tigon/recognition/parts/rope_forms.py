"""Recognise a function that computes a rotary embedding: compare it bit for bit with every form of the op.

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1): ...     `Form`
    def apply_rotary_emb(xq, xk, freqs_cis): ...                       `ComplexForm`

A product of pairs of neighbouring features with a complex table cos + i sin rotates each pair, so `rope` computes it in
the layout "interleaved" from the real and the imaginary parts of the table, which it reads in place.
"""

import inspect
import itertools
import logging
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops.rotary.rope import MAX_HEAD_SIZE, Layout, Table, rope, rope_of_layer, rope_reference
from tigon.recognition.guards.code_facts import explain_identity, symbolic_modes
from tigon.recognition.probing.standin import describe, gradients, normal, probing, same_bits, same_gradients
from tigon.recognition.probing.symbolic import find_size_use
from tigon.recognition.probing.trials import Trials, current_trials, not_recording, record, recording
from tigon.runtime.device import KERNEL_DTYPES, PLAIN, runs_kernels
from tigon.runtime.reach.explore import explore
from tigon.runtime.weak_cache import cached_weakly

LOGGER = logging.getLogger("tigon")

DIFFERENT = "computes another rotary embedding than the op"

# The names of a complex table. A function with another name is not compared.
COMPLEX_TABLES = ("freqs_cis", "freqs_ci")
# In the comparisons, the number of features of a head, the number of tokens, and the numbers of heads of queries and of
# keys.
FEATURES, LENGTH, HEADS = 16, 5, (4, 2)

# The dtypes of queries and keys, and of tables, in the comparisons.
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32)

# The dtype of the result. "promoted": the dtype to which torch promotes q and cos. "cast": the dtype of q. "fp32": the
# dtype of q, and the computation is in fp32.
ResultDtype = Literal["promoted", "cast", "fp32"]


@dataclass(frozen=True)
class Form:
    """One way to compute a rotary embedding. A call computes it by the op, or by its reference."""

    layout: Layout
    table: Table
    result: ResultDtype
    # True if the function rotates by the negative angle.
    flipped: bool = False
    # True if the function also accepts tables that are narrower than the heads, and rotates a part of each head.
    partial: bool = False

    def __call__(
        self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int, reference: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        op, dtype = rope_reference if reference else rope_of_layer, None if self.result == "promoted" else q.dtype
        # Kernels compute in fp32 in any case.
        if self.result == "fp32" and (reference or not runs_kernels(q)):
            q, k = q.float(), None if k is None else k.float()
        sin = -sin if self.flipped else sin
        options = {"unsqueeze_dim": unsqueeze_dim, "layout": self.layout, "table": self.table, "dtype": dtype}
        return op(q, k, cos, sin, **options, sections=None)

    def __str__(self) -> str:
        words = ["rope", self.layout.replace("_", " ")]
        words += [] if self.table == "halves" else [f"table {self.table}"]
        words += ["backwards"] if self.flipped else []
        return ", ".join([*words, "on the whole head or a part"] if self.partial else words)


_LAYOUTS: tuple[Layout, ...] = ("split_half", "interleaved", "deinterleaved")
_TABLES: tuple[Table, ...] = ("halves", "once")
_RESULTS: tuple[ResultDtype, ...] = ("promoted", "cast", "fp32")
_LAYOUTS_WITH_TABLES: list[tuple[Layout, Table]] = [*itertools.product(_LAYOUTS, _TABLES), ("interleaved", "pairs")]

FORMS = [
    Form(layout, table, result, flipped)
    for (layout, table), result, flipped in itertools.product(_LAYOUTS_WITH_TABLES, _RESULTS, (False, True))
]


@dataclass(frozen=True)
class ComplexForm:
    """A product with a complex table [B | 1, S, R / 2]."""

    # The dimension of the heads of q and k, 1 or 2.
    heads: int
    has_batch: bool = False

    def __call__(self, q: Tensor, k: Tensor, table: Tensor, reference: bool = False) -> tuple[Tensor, Tensor]:
        if reference or not runs_kernels(q, k):
            return _multiply(q, table, self.heads), _multiply(k, table, self.heads)
        cos, sin = torch.view_as_real(table).unbind(-1)
        options: dict[str, Any] = {"layout": "interleaved", "table": "once", "dtype": q.dtype}
        q_out, k_out = rope(q, k, cos, sin, unsqueeze_dim=self.heads, **options)
        assert k_out is not None
        return q_out, k_out

    def accepts(self, q: Any, k: Any, table: Any) -> bool:
        """Return True if the op computes what the function computes of these arguments."""
        if not all(type(x) in PLAIN for x in (q, k, table)) or q.dim() != 4 or k.dim() != 4 or table.dim() != 3:
            return False
        if table.dtype != torch.complex64 or table.is_conj() or table.requires_grad or q.dtype not in KERNEL_DTYPES:
            return False
        batch, length, size = q.shape[0], q.shape[3 - self.heads], q.shape[3]
        same_sizes = (k.shape[0], k.shape[3 - self.heads], k.shape[3], k.dtype) == (batch, length, size, q.dtype)
        fits = table.shape[0] == 1 or (self.has_batch and table.shape[0] == batch)
        fits = fits and table.shape[1:] == (length, size // 2) and size % 2 == 0 and 0 < size <= MAX_HEAD_SIZE
        return bool(same_sizes and fits and q.device == k.device == table.device)

    def __str__(self) -> str:
        return "rope, interleaved, complex table"


def _multiply(x: Tensor, table: Tensor, heads: int) -> Tensor:
    """Multiply pairs of neighbouring features by the table [B, S, R / 2], as models do."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.unsqueeze(heads)).flatten(3).type_as(x)


@dataclass(frozen=True)
class RopeCall:
    """The arguments of a function: one or two tensors to rotate, `cos`, `sin` and arguments with defaults."""

    tensors: tuple[str, ...]
    # The default of the argument `unsqueeze_dim`, which is the dimension of the heads. It is None if the function has
    # no such argument. The heads are then the last dimension but one.
    unsqueeze_dim: int | None

    @staticmethod
    def of(function: Callable[..., Any]) -> "RopeCall | None":
        """Return the arguments of a function; None if they are not those of a rotary embedding."""
        parameters = inspect.signature(function).parameters
        tensors = tuple(name for name in parameters if name not in ("cos", "sin", "unsqueeze_dim", "position_ids"))
        if not {"cos", "sin"} <= parameters.keys() or len(tensors) not in (1, 2):
            return None
        unsqueeze_dim = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else None
        return RopeCall(tensors, unsqueeze_dim) if unsqueeze_dim in (None, 1, 2) else None


def takes_complex_table(function: types.FunctionType) -> bool:
    """Return True if a function has three arguments without defaults, and the last one is named like the table."""
    parameters = list(inspect.signature(function).parameters.values())
    has_defaults = any(parameter.default is not parameter.empty for parameter in parameters)
    return len(parameters) == 3 and not has_defaults and parameters[2].name in COMPLEX_TABLES


class _Case(NamedTuple):
    """The arguments of one comparison, and the results of the function."""

    # The tensors to rotate, whose gradients are compared.
    inputs: list[Tensor]
    run: Callable[[], tuple]
    form_arguments: tuple
    expected: tuple


def _prepare(function: Callable, arguments: Iterable[tuple[list[Tensor], dict[str, Any], tuple]]) -> list[_Case] | str:
    """Return the cases for the inputs, the arguments of the function and those of a form, or the function's error."""

    def run(named: dict[str, Any]) -> tuple:
        result = function(**named)
        # A function of one tensor has None as its second result.
        return result if type(result) is tuple else (result, None)

    try:
        return [
            _Case(inputs, lambda named=named: run(named), of_form, run(named))  # type: ignore[misc]
            for inputs, named, of_form in arguments
        ]
    except Exception as error:
        LOGGER.debug("%s refuses arguments of a rotary embedding", function.__qualname__, exc_info=True)
        return f"cannot be run by itself ({describe(error)})"


def _agrees(form: Any, cases: list[_Case] | str) -> bool:
    """Return True if a form has the results of a function in all cases, and its gradients in the first one."""
    if isinstance(cases, str):
        return False
    try:
        for case in cases:
            ours = form(*case.form_arguments, reference=True)
            pairs = list(zip(case.expected, ours, strict=False))
            is_same = len(case.expected) == 2 and all(a is b or (b is not None and same_bits(a, b)) for a, b in pairs)
            if not record(is_same, form, None, case.inputs, ours, case.expected):
                return False
        inputs, run, arguments, _ = cases[0]
        stock = gradients(run, inputs)
        our_gradients = gradients(lambda: form(*arguments, reference=True), inputs)
    except Exception:
        LOGGER.debug("%s refuses the arguments of a function", form, exc_info=True)
        return False
    return record(same_gradients(our_gradients, stock), form, None, inputs, our_gradients, stock, mode="gradients")


def _cases(function: types.FunctionType, call: RopeCall, width: int) -> list[_Case] | str:
    """Return the cases with tables of this width, or the reason why the function cannot be run on them."""
    arguments = []
    sizes = itertools.product((1, 2) if call.unsqueeze_dim else (2,), (1, 2), DTYPES)
    for number, (heads, batch, (dtype, table_dtype)) in enumerate(sizes):
        inputs = _inputs(100 * number, heads, dtype)[: len(call.tensors)]
        tables = [normal(100 * number + n, batch, LENGTH, width, dtype=table_dtype) for n in (7, 8)]
        named: dict[str, Any] = dict(zip((*call.tensors, "cos", "sin"), (*inputs, *tables), strict=True))
        named |= {"unsqueeze_dim": heads} if call.unsqueeze_dim else {}
        arguments.append((inputs, named, (*inputs, *[None] * (2 - len(inputs)), *tables, heads)))
    return _prepare(function, arguments)


def _complex_cases(function: types.FunctionType, heads: int, batch: int) -> list[_Case] | str:
    """Return the cases with tables of this batch size, of random complex numbers whose absolute values are not 1."""
    arguments = []
    for seed, dtype in enumerate((FP32, BF16, FP16)):
        inputs = _inputs(10 * seed, heads, dtype)
        table = torch.view_as_complex(normal(10 * seed + 2, batch, LENGTH, FEATURES // 2, 2))
        named = dict(zip(inspect.signature(function).parameters, (*inputs, table), strict=True))
        arguments.append((inputs, named, (*inputs, table)))
    return _prepare(function, arguments)


def _inputs(seed: int, heads: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(2, n, LENGTH, FEATURES) if heads == 1 else (2, LENGTH, n, FEATURES) for n in HEADS]
    return [normal(seed + i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def _find_complex_form(function: types.FunctionType) -> ComplexForm | str:
    """Return the form that computes what a function of a complex table computes, or the reason why there is none."""
    for form in (ComplexForm(1), ComplexForm(2)):
        if _agrees(form, _complex_cases(function, form.heads, 1)):
            return replace(form, has_batch=_agrees(form, _complex_cases(function, form.heads, 2)))
    return DIFFERENT


def _find_form(function: types.FunctionType, call: RopeCall) -> Form | str:
    cases = {width: _cases(function, call, width) for width in (FEATURES, FEATURES // 2, FEATURES // 4)}
    for form in FORMS:
        width = FEATURES // 2 if form.table == "once" else FEATURES
        if _agrees(form, cases[width]):
            with not_recording():
                return replace(form, partial=_agrees(form, cases[width // 2]))
    reason = cases[FEATURES]
    return reason if isinstance(reason, str) else DIFFERENT


def _explain_limits(function: types.FunctionType, form: Any, modes: tuple[bool, ...]) -> str | None:
    """Return why a function may compute something else for other tensors or other sizes, or None."""
    call, names = RopeCall.of(function), list(inspect.signature(function).parameters)
    for number, (dtype, table_dtype) in enumerate(DTYPES if modes else ()):
        # A function with the argument `unsqueeze_dim` runs with both of its values.
        heads = form.heads if isinstance(form, ComplexForm) else 1 + number % 2 if call and call.unsqueeze_dim else 2

        def expand(
            half: Tensor, heads: int = heads, dtype: torch.dtype = table_dtype
        ) -> tuple[dict[str, Any], tuple[Any, ...]]:
            """Return the arguments of the function and those of the form for an input of half the width."""
            # The width is even, and keys have another number of heads. `chunk` leaves a guard in both runs that a
            # function with `chunk` leaves too.
            q = torch.cat(torch.cat((half, half), -1).chunk(2, -1), -1)
            k = q.new_empty([n if dim != heads else 2 * n - 1 for dim, n in enumerate(q.shape)])
            if isinstance(form, ComplexForm):
                table = torch.empty((1, q.shape[3 - heads], half.shape[3]), dtype=torch.complex64)
                return dict(zip(names, (q, k, table), strict=True)), (q, k, table)
            assert call is not None, "only a function with a complex table has no `cos`"
            width = half.shape[3] if form.table == "once" else q.shape[3]
            shape = q.shape[0], q.shape[3 - heads], width
            cos, sin = (q.new_empty(shape, dtype=dtype, requires_grad=False) for _ in range(2))
            named: dict[str, Any] = dict(zip(call.tensors, (q, k), strict=False)) | {"cos": cos, "sin": sin}
            named |= {"unsqueeze_dim": heads} if call.unsqueeze_dim else {}
            return named, (q, k if len(call.tensors) == 2 else None, cos, sin, heads)

        run = lambda half, expand=expand: function(**expand(half)[0])
        reference = lambda half, expand=expand: form(*expand(half)[1], reference=True)
        for has_grad in modes:
            with torch.set_grad_enabled(has_grad):
                inputs = (normal(0, 2, 2, 2, 8, dtype=dtype).requires_grad_(has_grad),)
                if reason := find_size_use(run, reference, inputs, any_width=True):
                    return reason.removeprefix("its forward ")
    return None


@cached_weakly
def _recognise(
    function: types.FunctionType, state: tuple, modes: tuple[bool, ...]
) -> tuple[Form | ComplexForm | str | None, Trials]:
    """Return the form of a function and the comparisons that found it."""
    with recording() as trials, probing():
        call = RopeCall.of(function)
        if takes_complex_table(function):
            form: Form | ComplexForm | str = _find_complex_form(function)
        elif call is not None:
            form = _find_form(function, call)
        else:
            return None, trials
        return form if isinstance(form, str) else _explain_limits(function, form, modes) or form, trials


def recognise_function(function: types.FunctionType) -> Form | ComplexForm | str | None:
    """Return the form that computes what a function computes, a reason, or None for other arguments than those of a
    rotary embedding. The comparisons also try tables for a part of each head."""
    # A function is compared once for all layers, and again if anything that it reads has been replaced.
    reach = explore(function)
    modes = symbolic_modes(reach)
    if reason := reach.reason or (modes and explain_identity(reach)):
        return reason
    with reach.preserved():
        form, trials = _recognise(function, reach.fingerprint, modes)
    if (current := current_trials()) is not None:
        current.agreements.update(trials.agreements)
        current.mismatches.update(trials.mismatches)
    return reach.reason or form
