"""Rotary embeddings: a function of the module file, called by name from an attention's forward.

Writing to that file's globals would change every other model of the process, and on a GPU the kernel rounds once where
eager code rounds three times, so they would not even compute the same bits. Instead each patched attention runs its own
class's code object over a copy of the globals in which that one name is our function: no other instance, and nothing
outside, is touched, and there is nothing to share and to restore.
"""

import functools
import inspect
import itertools
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.ops.rotary.rope import Layout, Table, rope, rope_reference, rotary_size
from tigon.recognition.function_guard import FunctionGuard
from tigon.recognition.fused_statements import fuse_statements
from tigon.recognition.source import NotReadable, code_state, innermost, is_unchanged, rebuilt
from tigon.recognition.standin import describe, gradients, normal, probing, same_bits, same_gradients
from tigon.recognition.trials import Trials, record, recorded, recording, unrecorded
from tigon.runtime.bytecode import code_use
from tigon.runtime.device import runs_kernels
from tigon.runtime.reach import explore

__all__ = ["Form", "RopeRecipe", "recognise_function", "recognise_rope"]

LOGGER = logging.getLogger("tigon")


@dataclass(frozen=True)
class Form:
    """How a function turns what it is given, in the words of `rope`."""

    layout: Layout
    table: Table
    result: Literal["promoted", "cast", "fp32"]  # its dtype: as torch has it; that of q; the same, computed in fp32
    flipped: bool = False  # by the negative angle
    partial: bool = False  # also where the tables are narrower than the heads

    def __call__(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, reference: bool = False):
        op, dtype = rope_reference if reference else rope, None if self.result == "promoted" else q.dtype
        if self.result == "fp32" and (reference or not runs_kernels(q)):  # kernels compute in it anyway
            q, k = q.float(), None if k is None else k.float()
        sin = -sin if self.flipped else sin
        return op(q, k, cos, sin, unsqueeze_dim=heads, layout=self.layout, table=self.table, dtype=dtype)

    def __str__(self) -> str:
        words = ["rope", self.layout.replace("_", " ")]
        words += [] if self.table == "halves" else [f"table {self.table}"]
        words += ["backwards"] if self.flipped else []
        return ", ".join([*words, "on the whole head or a part"] if self.partial else words)


FORMS = [
    Form(layout, table, result, flipped)
    for (layout, table), result, flipped in itertools.product(
        (
            *itertools.product(("split_half", "interleaved", "deinterleaved"), ("halves", "once")),
            ("interleaved", "pairs"),
        ),
        ("promoted", "cast", "fp32"),
        (False, True),
    )
]


@dataclass(frozen=True)
class Call:
    """How a function is called: one or two tensors to turn, `cos`, `sin` and what has a default, in any order."""

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    heads: int | None  # the default of `unsqueeze_dim`; None: they are the last dimension but one

    @staticmethod
    def of(function: Callable) -> "Call | None":
        parameters = inspect.signature(function).parameters
        tensors = tuple(name for name in parameters if name not in ("cos", "sin", "unsqueeze_dim", "position_ids"))
        if not {"cos", "sin"} <= parameters.keys() or len(tensors) not in (1, 2):
            return None
        heads = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else None
        return Call(tuple(parameters), tensors, heads) if heads in (None, 1, 2) else None


class _Turn:
    """Stands for the stock function: the op where it takes the arguments, the stock function where not."""

    def __init__(self, stock: Callable, form: Form, guard: FunctionGuard) -> None:
        self.stock, self.form, self.call, self.guard = stock, form, Call.of(stock), guard

    def __call__(self, *args, **kwargs) -> Any:
        call, given = self.call, {**dict(zip(self.call.names, args, strict=False)), **kwargs}
        tensors = [given.get(name) for name in (*call.tensors, "cos", "sin")]
        heads = given.get("unsqueeze_dim", call.heads or 2)
        if not all(isinstance(x, Tensor) for x in tensors) or given.get("position_ids") is not None:
            return self.stock(*args, **kwargs)
        # Somebody may give the file another helper of this function.
        if not (self._holds_for_graph() if torch.compiler.is_compiling() else self.guard.holds(self.stock)):
            return self.stock(*args, **kwargs)
        *turned, cos, sin = tensors
        batched = cos.dim() == 3
        if not batched and cos.dim() == 2 and call.heads is None and all(x.dim() == 3 for x in turned):
            *turned, cos, sin = (x[None] for x in tensors)
        if heads not in (1, 2) or not self._fits(turned, cos, sin, heads):
            return self.stock(*args, **kwargs)
        results = self.form(turned[0], turned[1] if len(turned) == 2 else None, cos, sin, heads)
        q, k = (x if x is None or batched else x[0] for x in results)
        return q if len(turned) == 1 else (q, k)

    @torch._dynamo.assume_constant_result
    def _holds_for_graph(self) -> bool:
        """The check, once for each graph."""
        return self.guard.holds(self.stock)

    def _fits(self, turned: list[Tensor], cos: Tensor, sin: Tensor, heads: int) -> bool:
        """Whether the op takes these shapes; the stock function takes whatever broadcasts."""
        if cos.dim() != 3 or any(x.dim() != 4 for x in turned) or (cos.shape, cos.dtype) != (sin.shape, sin.dtype):
            return False
        q, width = turned[0], rotary_size(cos, self.form.table)
        batch, length, size = q.shape[0], q.shape[3 - heads], q.shape[3]
        sizes = ((x.shape[0], x.shape[3 - heads], x.shape[3], x.dtype) for x in turned)
        alike = all(each == (batch, length, size, q.dtype) for each in sizes)
        part = width == size or (self.form.partial and width < size)
        return alike and part and width % 2 == 0 and cos.shape[0] in (1, batch) and cos.shape[1] == length


class RopeRecipe:
    """The stock forward of an attention class, with its rope functions (globals, by name) and statements replaced."""

    def __init__(
        self,
        cls: type[nn.Module],
        forms: tuple[tuple[str, Form], ...],
        fuses_statements: bool = False,
        guards: tuple[FunctionGuard, ...] | None = None,
    ) -> None:
        self.cls, self.forms, self.fuses_statements = cls, forms, fuses_statements
        self.stock = inspect.getattr_static(cls, "forward")
        rewritten = fuse_statements(self.stock) if fuses_statements else None
        function = rewritten if isinstance(rewritten, types.FunctionType) else self.stock
        stock = innermost(function)
        self.live, self.names = stock.__globals__, code_use(stock.__code__).global_names
        # A copy has the guards of the recipe that it is a copy of: the file may have another function since.
        self.guards = guards or tuple(FunctionGuard(self.live[name]) for name, _ in forms)
        self.turns = {}
        for (name, form), guard in zip(forms, self.guards, strict=True):
            function_now = self.live.get(name)
            if isinstance(function_now, types.FunctionType) and guard.holds(function_now):
                self.turns[name] = _Turn(function_now, form, guard)
        self.state = code_state(self.stock)
        scope = {**self.live, **self.turns}
        # torch.compile knows globals by their module's name: with it, a graph of a stock and a patched model would take
        # the same function for both.
        del scope["__name__"]
        self.scope = scope
        inner = types.FunctionType(stock.__code__, scope, stock.__name__, stock.__defaults__, stock.__closure__)
        inner.__kwdefaults__, inner.__module__ = stock.__kwdefaults__, stock.__module__
        self.forward = rebuilt(function, inner)

    def __call__(self, module: nn.Module, *args, **kwargs):
        # Somebody may give the class another forward, or its forward other code.
        is_stock = type(module).forward is self.stock
        if not (is_stock and (self._look_for_graph() if torch.compiler.is_compiling() else self._look())):
            return type(module).forward(module, *args, **kwargs)
        return self.forward(module, *args, **kwargs)

    def _look(self) -> bool:
        """Take over what the file has now, another attention function or rope; whether the code is as it was."""
        now = {name: self.live[name] for name in self.names if name in self.live}
        kept = {name: turn for name, turn in self.turns.items() if now.get(name) is turn.stock}
        self.scope.update(now | kept)
        return is_unchanged(self.state)

    @torch._dynamo.assume_constant_result
    def _look_for_graph(self) -> bool:
        """The same, once for each graph."""
        return self._look()

    def __reduce__(self):
        return _restored, (self.cls, self.forms, self.fuses_statements, self.guards)

    def with_fused_statements(self) -> "RopeRecipe":
        return RopeRecipe(self.cls, self.forms, True, self.guards)

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(str(form) for _, form in self.forms))


class StockForward:
    """The forward of a module's class, in place of a recipe that cannot be made in this process."""

    def __init__(self, arguments: tuple) -> None:
        self.arguments = arguments

    def __call__(self, module: nn.Module, *args, **kwargs) -> Any:
        return type(module).forward(module, *args, **kwargs)

    def __reduce__(self):
        return _restored, self.arguments


def _restored(*arguments: Any) -> RopeRecipe | StockForward:
    """The recipe of a copy, if the forward of the class still is one that a copy can be made for."""
    forward = inspect.getattr_static(arguments[0], "forward", None)
    if not isinstance(forward, types.FunctionType) or _written_globals(innermost(forward)):
        return StockForward(arguments)
    try:
        return RopeRecipe(*arguments)
    except NotReadable:
        return StockForward(arguments)


def _written_globals(function: types.FunctionType) -> list[str]:
    """Globals that a function writes: it would write them to the copy that holds the op."""
    return [what for what, _ in code_use(function.__code__).writes if what.startswith("the global")]


def recognise_function(function: Callable) -> Form | str | None:
    """The form that computes what `function` does, for a whole head of 16 features and perhaps for a part of it."""
    # Probed once for all layers, but again where something that it reads was replaced.
    reach = explore(function)
    if reach.reason:
        return reach.reason
    with reach.preserved():
        form, trials = _recognise(function, reach.fingerprint)
    if (current := recorded()) is not None:
        current.passed.update(trials.passed)
        current.mismatches.update(trials.mismatches)
    return reach.reason or form


@functools.cache
def _recognise(function: Callable, state: tuple) -> tuple[Form | str | None, Trials]:
    """Return the form of a function and the comparisons that found it."""
    with recording() as trials:
        return _find_form(function), trials


def _find_form(function: Callable) -> Form | str | None:
    if (call := Call.of(function)) is None:
        return None
    dtypes = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
    cases = list(itertools.product((1, 2) if call.heads else (2,), (1, 2), dtypes))

    def prepare(i: int, width: int) -> tuple[list[Tensor], list[Tensor]]:
        heads, batch, (dtype, table_dtype) = cases[i]
        shapes = [(2, n, 5, 16) if heads == 1 else (2, 5, n, 16) for n in (4, 2)][: len(call.tensors)]
        inputs = [normal(100 * i + n, *shape, dtype=dtype) for n, shape in enumerate(shapes)]
        return inputs, [normal(100 * i + n, batch, 5, width, dtype=table_dtype) for n in (7, 8)]

    def stock(i: int, inputs: list[Tensor], tables: list[Tensor]) -> tuple:
        named = dict(zip((*call.tensors, "cos", "sin"), (*inputs, *tables), strict=True))
        given = function(**named, **({"unsqueeze_dim": cases[i][0]} if call.heads else {}))
        return given if isinstance(given, tuple) else (given, None)

    def ours(form: Form, i: int, inputs: list[Tensor], tables: list[Tensor]) -> tuple:
        return form(*[*inputs, None][:2], *tables, cases[i][0], reference=True)

    @functools.cache
    def given(i: int, width: int) -> tuple:
        inputs, tables = prepare(i, width)
        return stock(i, [x.clone() for x in inputs], [x.clone() for x in tables])

    def same(form: Form, width: int) -> bool:
        for i in range(len(cases)):
            inputs, tables = prepare(i, width)
            wanted, expected = ours(form, i, inputs, tables), given(i, width)
            is_same = all(a is b or same_bits(a, b) for a, b in zip(expected, wanted, strict=True))
            if not record(is_same, form, None, [*inputs, *tables], wanted, expected):
                return False
        inputs, tables = prepare(0, width)
        theirs = gradients(lambda: stock(0, inputs, tables), inputs)
        mine = gradients(lambda: ours(form, 0, inputs, tables), inputs)
        return record(same_gradients(mine, theirs), form, None, [*inputs, *tables], mine, theirs, mode="gradients")

    failure = "computes another rotary embedding than the op"
    with probing():
        for form in FORMS:
            width = 8 if form.table == "once" else 16
            try:
                if not same(form, width):
                    continue
            except Exception as error:
                LOGGER.debug("%s cannot be compared with %s", function.__qualname__, form, exc_info=True)
                failure = f"cannot be run by itself ({describe(error)})" if width == 16 else failure
                continue
            try:
                with unrecorded():
                    form = replace(form, partial=same(form, width // 2))
            except Exception:
                LOGGER.debug("%s refuses tables narrower than the head", function.__qualname__, exc_info=True)
            return form
    return failure


def _rope_of(function: object, file: str) -> Form | str | None:
    """What a global that a forward names is; `file` is the name of the forward's module."""
    if (
        not isinstance(function, types.FunctionType)
        or not {"cos", "sin"} <= inspect.signature(function).parameters.keys()
    ):
        return None
    origin = inspect.unwrap(function).__module__ or ""
    if origin.split(".")[0] not in (file.split(".")[0], "transformers"):
        return f"was already replaced (by {origin})"
    return recognise_function(function) or "takes other arguments than queries, keys, cos and sin"


def recognise_rope(module: nn.Module) -> RopeRecipe | str | None:
    """A module whose forward calls a function of `cos` and `sin` that turns queries and keys as `rope` can."""
    forward, forms, reasons = inspect.getattr_static(type(module), "forward", None), [], []
    if not isinstance(forward, types.FunctionType):
        return None
    stock, forward = forward, innermost(forward)
    for name in forward.__code__.co_names:
        found = _rope_of(forward.__globals__.get(name), forward.__module__)
        if isinstance(found, Form):
            forms.append((name, found))
        elif found:
            reasons.append(f"{name}: {found}")
    if not forms:
        return "; ".join(reasons) or None
    if written := _written_globals(forward):
        return f"its forward writes {written[0]}"
    try:
        rebuilt(stock, forward)
    except NotReadable as error:
        return f"its forward {error}"
    return RopeRecipe(type(module), tuple(forms))
