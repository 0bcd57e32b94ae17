"""Rotary embeddings: a function of the module file, called by name from an attention's forward.

Writing to that file's globals would change every other model of the process, and on a GPU the kernel rounds once where
eager code rounds three times, so they would not even compute the same bits. Instead each patched attention runs its own
class's code object over a copy of the globals in which that one name is our function: no other instance, and nothing
outside, is touched, and there is nothing to share and to restore.
"""

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.ops.dispatch import runs_kernels
from tigon.ops.rope import Layout, Table, rope, rope_reference, rotary_size
from tigon.recognition.standin import describe, normal, probing

__all__ = ["Form", "RopeRecipe", "recognise_function", "recognise_rope"]


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

    def __init__(self, stock: Callable, form: Form) -> None:
        self.stock, self.form, self.call = stock, form, Call.of(stock)

    def __call__(self, *args, **kwargs) -> Any:
        call, given = self.call, {**dict(zip(self.call.names, args, strict=False)), **kwargs}
        tensors = [given.get(name) for name in (*call.tensors, "cos", "sin")]
        heads = given.get("unsqueeze_dim", call.heads or 2)
        if not all(isinstance(x, Tensor) for x in tensors) or given.get("position_ids") is not None:
            return self.stock(*args, **kwargs)
        *turned, cos, sin = tensors
        size, width = turned[0].shape[-1], rotary_size(cos, self.form.table)
        batched, alone = (all(x.dim() == n for x in turned) and cos.dim() == n - 1 for n in (4, 3))
        fits = width == size or (self.form.partial and width < size)
        alike = all(x.dtype == turned[0].dtype for x in turned)
        if not (fits and alike and heads in (1, 2) and (batched or (alone and call.heads is None))):
            return self.stock(*args, **kwargs)
        if alone:
            *turned, cos, sin = (x[None] for x in tensors)
        results = self.form(turned[0], turned[1] if len(turned) == 2 else None, cos, sin, heads)
        q, k = (x if x is None or batched else x[0] for x in results)
        return q if len(turned) == 1 else (q, k)


class RopeRecipe:
    """The stock forward of an attention class, with its rope functions (globals, by name) replaced."""

    def __init__(self, cls: type[nn.Module], forms: tuple[tuple[str, Form], ...]) -> None:
        self.cls, self.forms = cls, forms
        stock = inspect.getattr_static(cls, "forward")
        self.live, others = stock.__globals__, stock.__code__.co_names
        turns = {name: _Turn(self.live[name], form) for name, form in forms}
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
        return RopeRecipe, (self.cls, self.forms)

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(str(form) for _, form in self.forms))


@functools.cache
def recognise_function(function: Callable) -> Form | str | None:
    """The form that has the bits of `function`, for a whole head of 16 features and perhaps for a part of it."""
    if (call := Call.of(function)) is None:
        return None
    dtypes = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
    cases = list(itertools.product((1, 2) if call.heads else (2,), (1, 2), dtypes))

    @functools.cache
    def run(i: int, width: int) -> tuple[list, tuple]:
        heads, batch, (dtype, table_dtype) = cases[i]
        shapes = [(2, n, 5, 16) if heads == 1 else (2, 5, n, 16) for n in (4, 2)][: len(call.tensors)]
        inputs = [normal(100 * i + n, *shape, dtype=dtype) for n, shape in enumerate(shapes)]
        tables = [normal(100 * i + n, batch, 5, width, dtype=table_dtype) for n in (7, 8)]
        named = dict(zip((*call.tensors, "cos", "sin"), [x.clone() for x in (*inputs, *tables)], strict=True))
        given = function(**named, **({"unsqueeze_dim": heads} if call.heads else {}))
        return [*inputs, None][:2] + tables, given if isinstance(given, tuple) else (given, None)

    def same(form: Form, width: int) -> bool:
        for i, (heads, *_) in enumerate(cases):
            inputs, given = run(i, width)
            wanted = form(*inputs, heads, reference=True)
            if not all(
                a is b or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(given, wanted, strict=True)
            ):
                return False
        return True

    failure = "computes another rotary embedding than the op"
    with probing():
        for form in FORMS:
            width = 8 if form.table == "once" else 16
            try:
                if not same(form, width):
                    continue
            except Exception as error:
                failure = f"cannot be run by itself ({describe(error)})" if width == 16 else failure
                continue
            with contextlib.suppress(Exception):
                form = replace(form, partial=same(form, width // 2))
            return form
    return failure


def recognise_rope(module: nn.Module) -> RopeRecipe | str | None:
    """A module whose forward calls a function of `cos` and `sin` that turns queries and keys as `rope` can."""
    forward, forms, reasons = inspect.getattr_static(type(module), "forward", None), [], []
    for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
        function = forward.__globals__.get(name)
        found = recognise_function(function) if isinstance(function, types.FunctionType) else None
        if isinstance(found, Form):
            forms.append((name, found))
        elif found:
            reasons.append(f"{name}: {found}")
    return RopeRecipe(type(module), tuple(forms)) if forms else "; ".join(reasons) or None
