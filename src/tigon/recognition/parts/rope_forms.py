"""Describe how a function of queries, keys, `cos` and `sin` computes a rotary embedding, in the options of `rope`."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from tigon.ops.rotary.rope import Layout, Table, rope, rope_reference
from tigon.runtime.device import runs_kernels

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
        op, dtype = rope_reference if reference else rope, None if self.result == "promoted" else q.dtype
        # Kernels compute in fp32 in any case.
        if self.result == "fp32" and (reference or not runs_kernels(q)):
            q, k = q.float(), None if k is None else k.float()
        sin = -sin if self.flipped else sin
        return op(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, layout=self.layout, table=self.table, dtype=dtype)

    def __str__(self) -> str:
        words = ["rope", self.layout.replace("_", " ")]
        words += [] if self.table == "halves" else [f"table {self.table}"]
        words += ["backwards"] if self.flipped else []
        return ", ".join([*words, "on the whole head or a part"] if self.partial else words)


_LAYOUTS: tuple[Layout, ...] = ("split_half", "interleaved", "deinterleaved")
_TABLES: tuple[Table, ...] = ("halves", "once")
_RESULTS: tuple[ResultDtype, ...] = ("promoted", "cast", "fp32")
_LAYOUTS_WITH_TABLES: list[tuple[Layout, Table]] = [*itertools.product(_LAYOUTS, _TABLES), ("interleaved", "pairs")]

# The candidates, in the order in which they are compared with a function.
FORMS = [
    Form(layout, table, result, flipped)
    for (layout, table), result, flipped in itertools.product(_LAYOUTS_WITH_TABLES, _RESULTS, (False, True))
]


@dataclass(frozen=True)
class RopeCall:
    """The arguments of a function: one or two tensors to rotate, `cos`, `sin` and arguments with defaults."""

    # The names of all arguments, in their order.
    names: tuple[str, ...]
    # The names of the tensors to rotate.
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
        return RopeCall(tuple(parameters), tensors, unsqueeze_dim) if unsqueeze_dim in (None, 1, 2) else None
