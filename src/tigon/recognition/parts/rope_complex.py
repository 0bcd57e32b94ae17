"""Recognise rotary embeddings of complex numbers: q and k are multiplied by a complex table.

    def apply_rotary_emb(xq, xk, freqs_cis):
        xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
        ...
        return torch.view_as_real(xq_ * freqs_cis).flatten(3).type_as(xq), ...

The product with cos + i sin rotates each pair of neighbouring features. So the kernel of `rope` computes it, in the
layout "interleaved", from the real and the imaginary parts of the table, which it reads in place.
"""

import inspect
import logging
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.ops.rotary.rope import MAX_HEAD_SIZE, rope
from tigon.recognition.guards.function_guard import FunctionGuard
from tigon.recognition.probing.standin import gradients, normal, probing, same_bits, same_gradients
from tigon.recognition.probing.trials import record
from tigon.runtime.device import KERNEL_DTYPES, PLAIN, runs_kernels

LOGGER = logging.getLogger("tigon")

# The names of the table. A function with another name is not compared.
TABLES = ("freqs_cis", "freqs_ci")
# The numbers of heads of queries and of keys, of tokens, and of features in the comparisons.
HEADS, LENGTH, FEATURES = (4, 2), 5, 16


def takes_complex_table(function: types.FunctionType) -> bool:
    """Return True if a function has three arguments without defaults, and the last one is named like the table."""
    parameters = list(inspect.signature(function).parameters.values())
    has_defaults = any(parameter.default is not parameter.empty for parameter in parameters)
    return len(parameters) == 3 and not has_defaults and parameters[2].name in TABLES


def _multiply(x: Tensor, table: Tensor, heads: int) -> Tensor:
    """Multiply pairs of neighbouring features by the table [B, S, R / 2], as models do."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.unsqueeze(heads)).flatten(3).type_as(x)


@dataclass(frozen=True)
class ComplexForm:
    """A product with a complex table [B | 1, S, R / 2], or [S, R / 2] for the whole batch."""

    # The dimension of the heads of q and k, 1 or 2, with a table of three dimensions. None if it is not supported.
    heads: int | None = None
    # The same with a table of two dimensions.
    heads_of_plain_table: int | None = None
    # True if the function accepts a table for each sequence of the batch.
    has_batch: bool = False

    def __call__(self, q: Tensor, k: Tensor, table: Tensor, reference: bool = False) -> tuple[Tensor, Tensor]:
        heads, table = (self.heads, table) if table.dim() == 3 else (self.heads_of_plain_table, table[None])
        assert heads is not None, "`accepts` has checked the table"
        if reference or not runs_kernels(q, k):
            return _multiply(q, table, heads), _multiply(k, table, heads)
        cos, sin = torch.view_as_real(table).unbind(-1)
        options: dict[str, Any] = {"layout": "interleaved", "table": "once", "dtype": q.dtype}
        q_out, k_out = rope(q, k, cos, sin, unsqueeze_dim=heads, **options)
        assert k_out is not None
        return q_out, k_out

    def accepts(self, q: Any, k: Any, table: Any) -> bool:
        """Return True if the op computes what the function computes of these arguments."""
        if not all(type(x) in PLAIN for x in (q, k, table)) or q.dim() != 4 or k.dim() != 4:
            return False
        if table.dtype != torch.complex64 or table.is_conj() or table.requires_grad or q.dtype not in KERNEL_DTYPES:
            return False
        heads = {3: self.heads, 2: self.heads_of_plain_table}.get(table.dim())
        if heads is None:
            return False
        batch, length, size = q.shape[0], q.shape[3 - heads], q.shape[3]
        same_sizes = (k.shape[0], k.shape[3 - heads], k.shape[3], k.dtype) == (batch, length, size, q.dtype)
        fits = table.dim() == 2 or table.shape[0] == 1 or (self.has_batch and table.shape[0] == batch)
        fits = fits and table.shape[-2:] == (length, size // 2) and size % 2 == 0 and 0 < size <= MAX_HEAD_SIZE
        return bool(same_sizes and fits and q.device == k.device == table.device)

    def __str__(self) -> str:
        return "rope, interleaved, complex table"


class FusedComplexRope:
    """Takes the place of the stock function. It runs the op where the op accepts the arguments, else this function."""

    def __init__(self, stock: types.FunctionType, form: ComplexForm, guard: FunctionGuard) -> None:
        self.stock, self.form, self.guard = stock, form, guard
        self.names = tuple(inspect.signature(stock).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != 3 or arguments.keys() != set(self.names):
            return self.stock(*args, **kwargs)
        q, k, table = (arguments[name] for name in self.names)
        holds = self._holds_for_graph() if torch.compiler.is_compiling() else self.guard.holds(self.stock)
        return self.form(q, k, table) if holds and self.form.accepts(q, k, table) else self.stock(*args, **kwargs)

    @torch.compiler.assume_constant_result
    def _holds_for_graph(self) -> bool:
        """Compare the function once for each graph."""
        return self.guard.holds(self.stock)


# --- comparison ----------------------------------------------------------------------------------


def _inputs(seed: int, heads: int, dtype: torch.dtype, table_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and a table of random complex numbers, whose absolute values are not 1."""
    shapes = [(2, n, LENGTH, FEATURES) if heads == 1 else (2, LENGTH, n, FEATURES) for n in HEADS]
    q, k = (normal(seed + i, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    return q, k, torch.view_as_complex(normal(seed + 2, *table_shape, FEATURES // 2, 2))


def _agrees(function: types.FunctionType, form: ComplexForm, table_shape: tuple[int, ...]) -> bool:
    """Return True if a form has the results and the gradients of a function for a table of this shape."""
    heads = form.heads or form.heads_of_plain_table or 1
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        q, k, table = _inputs(10 * seed, heads, dtype, table_shape)
        expected, ours = function(q.clone(), k.clone(), table.clone()), form(q, k, table, reference=True)
        is_same = type(expected) is tuple and len(expected) == 2 and all(map(same_bits, expected, ours))
        if not record(is_same, form, None, [q, k], ours, expected):
            return False
    q, k, table = _inputs(40, heads, torch.float32, table_shape)
    stock = gradients(lambda: function(q, k, table), [q, k])
    our_gradients = gradients(lambda: form(q, k, table, reference=True), [q, k])
    is_same = same_gradients(our_gradients, stock)
    return record(is_same, form, None, [q, k], our_gradients, stock, mode="gradients")


def _find_heads(function: types.FunctionType, field: str, table_shape: tuple[int, ...]) -> int | None:
    """Return the dimension of the heads for which a function agrees, for a table of this shape; None if none does.

    `field` is the field of the form that holds the dimension.
    """
    for heads in (1, 2):
        form = ComplexForm(heads) if field == "heads" else ComplexForm(heads_of_plain_table=heads)
        try:
            with probing():
                if _agrees(function, form, table_shape):
                    return heads
        except Exception:
            LOGGER.debug("%s refuses a table of shape %s", function.__qualname__, table_shape, exc_info=True)
    return None


def find_complex_form(function: types.FunctionType) -> ComplexForm | str:
    """Return the form that computes what a function computes, or the reason why there is none."""
    heads = _find_heads(function, "heads", (1, LENGTH))
    plain = _find_heads(function, "heads_of_plain_table", (LENGTH,))
    if heads is None and plain is None:
        return "computes another rotary embedding than the op"
    has_batch = heads is not None and _find_heads(function, "heads", (2, LENGTH)) == heads
    return ComplexForm(heads, plain, has_batch)
