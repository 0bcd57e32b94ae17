"""Rotary embeddings: a function of the module file, called by name from an attention's forward.

Writing to that file's globals would change every other model of the process, and on a GPU the kernel rounds once where
eager code rounds three times, so they would not even compute the same bits. Instead each patched attention runs its own
class's code object over a copy of the globals in which that one name is our function: no other instance, and nothing
outside, is touched, and there is nothing to share and to restore.
"""

import functools
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.hf.recognise import describe
from tigon.hf.standin import normal, probing
from tigon.ops.dispatch import runs_kernels
from tigon.ops.rope import Layout, Table, rope, rope_reference

__all__ = ["Form", "Rope", "recognise_function", "recognise_rope"]


@dataclass(frozen=True)
class Form:
    """How a function turns what it is given, in the words of `rope`."""

    layout: Layout
    table: Table
    result: Literal["promoted", "cast", "fp32"]  # its dtype: as torch has it; that of q; the same, computed in fp32
    flipped: bool = False  # by the negative angle
    partial: bool = False  # also where the tables are narrower than the heads

    def __call__(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, op: Callable = rope, **heads) -> tuple:
        dtype = None if self.result == "promoted" else q.dtype
        if self.result == "fp32" and (op is rope_reference or not runs_kernels(q)):  # kernels compute in it anyway
            q, k = q.float(), None if k is None else k.float()
        return op(q, k, cos, -sin if self.flipped else sin, layout=self.layout, table=self.table, dtype=dtype, **heads)

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
    """How a function is called: turned tensors by name, then `cos`, `sin` and what has a default, in any order."""

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    unsqueeze_dim: int | None  # its default, if there is such a parameter

    @staticmethod
    def of(function: Callable) -> "Call | None":
        parameters = inspect.signature(function).parameters
        names, own = tuple(parameters), {"cos", "sin", "unsqueeze_dim", "position_ids"}
        tensors = tuple(name for name in names if name not in own)
        if not {"cos", "sin"} <= parameters.keys() or len(tensors) not in (1, 2):
            return None
        dim = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else None
        return Call(names, tensors, dim) if dim in (None, 1, 2) else None

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


class _Turn:
    """Stands for the stock function: the op where it takes the arguments, the stock function where not."""

    def __init__(self, stock: Callable, call: Call, form: Form) -> None:
        self.stock, self.call, self.form = stock, call, form

    def __call__(self, *args, **kwargs) -> Any:
        given, (first, *others) = self.call.bind(args, kwargs), self.call.tensors
        q, k = given.get(first), given.get(others[0]) if others else None
        heads, cos, sin = given.get("unsqueeze_dim", self.call.unsqueeze_dim), given.get("cos"), given.get("sin")
        batched = isinstance(q, Tensor) and q.dim() == 4
        if not self._fits(q, k, cos, sin, given, heads, batched):
            return self.stock(*args, **kwargs)
        if batched:
            q, k = self.form(q, k, cos, sin, unsqueeze_dim=heads or 2)
        else:
            inputs = (x if x is None else x[None] for x in (q, k, cos, sin))
            q, k = (x if x is None else x[0] for x in self.form(*inputs, unsqueeze_dim=2))
        return (q, k) if others else q

    def _fits(self, q, k, cos, sin, given, heads, batched) -> bool:
        if not all(isinstance(x, Tensor) for x in (q, cos, sin)) or given.get("position_ids") is not None:
            return False
        alike = k is None or (isinstance(k, Tensor) and k.dim() == q.dim() and k.dtype == q.dtype)
        if (len(self.call.tensors) == 2 and k is None) or not alike or cos.dim() != 2 + batched:
            return False
        if not batched and (q.dim() != 3 or self.call.unsqueeze_dim is not None):
            return False
        width = cos.shape[-1] * (2 if self.form.table == "once" else 1)
        return heads in (None, 1, 2) and (width == q.shape[-1] or (self.form.partial and width < q.shape[-1]))


class Rope:
    """The stock forward of an attention class, with its rope functions (globals, by name) replaced."""

    def __init__(self, cls: type[nn.Module], forms: tuple[tuple[str, Form], ...]) -> None:
        self.cls, self.forms = cls, forms
        stock = inspect.getattr_static(cls, "forward")
        self.live, others = stock.__globals__, stock.__code__.co_names
        turns = {name: _Turn(self.live[name], Call.of(self.live[name]), form) for name, form in forms}
        scope = {**self.live, **turns}
        self.others = [other for other in others if other in scope and other not in turns]
        # torch.compile knows globals by their module's name: with it, a graph of a stock and a patched model would take
        # the same function for both.
        del scope["__name__"]
        self.forward = types.FunctionType(stock.__code__, scope, stock.__name__, stock.__defaults__, stock.__closure__)
        self.forward.__kwdefaults__, self.forward.__module__ = stock.__kwdefaults__, stock.__module__

    def __call__(self, module: nn.Module, *args, **kwargs):
        if not torch.compiler.is_compiling():  # somebody may give the file another attention function
            self.forward.__globals__.update({name: self.live[name] for name in self.others})
        return self.forward(module, *args, **kwargs)

    def __reduce__(self):
        return Rope, (self.cls, self.forms)

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(str(form) for _, form in self.forms))


@functools.cache
def recognise_function(function: Callable) -> Form | str | None:
    """The form that has the bits of `function`, for a whole head of 16 features and perhaps for a part of it."""
    if (call := Call.of(function)) is None:
        return None
    dtypes = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
    cases = list(itertools.product((1, 2) if call.unsqueeze_dim else (2,), (1, 2), dtypes))
    reason = "computes another rotary embedding than the op"

    @functools.cache
    def run(i: int, width: int) -> tuple[list, tuple]:
        heads, batch, (dtype, table_dtype) = cases[i]
        shapes = [(2, n, 5, 16) if heads == 1 else (2, 5, n, 16) for n in (4, 2)][: len(call.tensors)]
        inputs = [normal(100 * i + n, *shape, dtype=dtype) for n, shape in enumerate(shapes)]
        tables = [normal(100 * i + n, batch, 5, width, dtype=table_dtype) for n in (7, 8)]
        options = {"unsqueeze_dim": heads} if call.unsqueeze_dim else {}
        named = dict(zip((*call.tensors, "cos", "sin"), [x.clone() for x in (*inputs, *tables)], strict=True))
        given = function(**named, **options)
        return [*inputs, None][:2] + tables, given if isinstance(given, tuple) else (given, None)

    def same(form: Form, width: int, i: int) -> bool:
        inputs, given = run(i, width)
        wanted = form(*inputs, op=rope_reference, unsqueeze_dim=cases[i][0])
        return all(a is b or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(given, wanted, strict=True))

    with probing():
        for form in FORMS:
            width = 8 if form.table == "once" else 16
            try:
                if all(same(form, width, i) for i in range(len(cases))):
                    with_a_part = True
                    try:
                        with_a_part = all(same(form, width // 2, i) for i in range(len(cases)))
                    except Exception:
                        with_a_part = False
                    return replace(form, partial=with_a_part)
            except Exception as error:
                reason = f"cannot be run by itself ({describe(error)})" if width == 16 else reason
    return reason


def recognise_rope(module: nn.Module) -> Rope | str | None:
    """A module whose forward calls a function of `cos` and `sin` that turns queries and keys as `rope` can."""
    forward, forms, reasons = inspect.getattr_static(type(module), "forward", None), [], []
    for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
        function = forward.__globals__.get(name)
        found = recognise_function(function) if isinstance(function, types.FunctionType) else None
        if isinstance(found, Form):
            forms.append((name, found))
        elif found:
            reasons.append(f"{name}: {found}")
    return Rope(type(module), tuple(forms)) if forms else "; ".join(reasons) or None
