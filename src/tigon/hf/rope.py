"""Rotary embeddings: a function of the module file, called by name from an attention's forward.

Writing to that file's globals would change every other model of the process, and on a GPU the kernel rounds once where
eager code rounds three times, so they would not even compute the same bits. Instead each patched attention runs its own
class's code object over a copy of the globals in which that one name is our function: no other instance, and nothing
outside, is touched, and there is nothing to share and to restore.
"""

import functools
import inspect
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tigon.hf.recognise import describe
from tigon.hf.standin import normal, probing
from tigon.ops.rope import rope, rope_reference

__all__ = ["Rope", "recognise_rope"]


class _Turn:
    """Stands for the stock function: the op where it takes the arguments, the stock function where not."""

    def __init__(self, stock: Callable, partial: bool) -> None:
        self.stock, self.partial = stock, partial

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        fits = cos.shape[-1] == q.shape[-1] or (self.partial and cos.shape[-1] < q.shape[-1])
        if args or kwargs.keys() - {"unsqueeze_dim"} or not (q.dim() == k.dim() == 4 and cos.dim() == 3 and fits):
            return self.stock(q, k, cos, sin, *args, **kwargs)
        return rope(q, k, cos, sin, **kwargs)


class Rope:
    """The stock forward of an attention class, with its rope function (a global called `name`) replaced."""

    def __init__(self, cls: type[nn.Module], name: str, partial: bool) -> None:
        self.cls, self.name, self.partial = cls, name, partial
        stock = inspect.getattr_static(cls, "forward")
        self.live, others = stock.__globals__, stock.__code__.co_names
        scope = {**self.live, name: _Turn(self.live[name], partial)}
        self.others = [other for other in others if other in scope and other != name]
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
        return Rope, (self.cls, self.name, self.partial)

    def __str__(self) -> str:
        return "rope, on the whole head or a part" if self.partial else "rope"


def _computes_rope(function: Callable, width: int, unsqueeze_dim: int, batch: int, dtype, table_dtype) -> bool:
    """Whether the function turns `width` of 16 features as `rope_reference` does, bit for bit."""
    seed, lengths = width + unsqueeze_dim + batch, (4, 5) if unsqueeze_dim == 1 else (5, 4)
    q = normal(seed, 2, *lengths, 16, dtype=dtype)
    k = normal(seed + 1, 2, *(2 if n == 4 else n for n in lengths), 16, dtype=dtype)
    cos, sin = (normal(seed + i, batch, 5, width, dtype=table_dtype) for i in (2, 3))
    given = function(q.clone(), k.clone(), cos.clone(), sin.clone(), unsqueeze_dim=unsqueeze_dim)
    wanted = rope_reference(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


@functools.cache
def _widths(function: Callable) -> tuple[list[int], str]:
    """How many of 16 features, all or half of them, `function` turns as the op does; and why not all."""
    dtypes = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
    cases = [(heads, batch, *pair) for heads in (1, 2) for batch in (1, 2) for pair in dtypes]
    right, reason = [], "computes another rotary embedding than split halves"
    for width in (8, 16):
        try:
            with probing():
                right += [width] if all(_computes_rope(function, width, *case) for case in cases) else []
        except Exception as error:
            reason += f" ({describe(error)})" if width == 16 else ""
    return right, reason


def recognise_rope(module: nn.Module) -> Rope | str | None:
    """An attention whose forward calls a split-half rope function, on the whole head or a part of it."""
    forward = inspect.getattr_static(type(module), "forward", None)
    for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
        function = forward.__globals__.get(name)
        if isinstance(function, types.FunctionType):
            parameters = list(inspect.signature(function).parameters)
            if parameters[2:4] == ["cos", "sin"] and "unsqueeze_dim" in parameters:
                widths, reason = _widths(function)
                return Rope(type(module), name, 8 in widths) if 16 in widths else f"{name}: {reason}"
    return None
