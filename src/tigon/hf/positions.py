"""Spare a forward the question whether its batch is packed, where the answer is known.

transformers infers from the positions of the tokens whether several sequences are packed into one row: then a position
is not its predecessor plus one. If a caller passes neither positions nor a mask, the body of a model numbers the tokens
itself, and nothing can be packed. transformers asks nevertheless, on the device, and the host waits for the answer. It
waits at the start of every forward, until the device has finished the step before, so it can never prepare a step while
the device still computes the last one. Models with small layers then wait for the host in each forward.

`known_positions` encloses the call of a body. `find_packed_sequence_indices`, the function of transformers, then
returns its answer without asking, but only if the forward of this body calls it, and if the source of the forward shows
that it numbers the tokens itself.
"""

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tigon.hf.transformers_private import replace_packing_check

__all__ = ["known_positions"]

# The expressions that forwards of transformers assign to `position_ids`, if the caller passes none.
_COUNT = "torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)"
_COUNTS = {f"{_COUNT} + past_seen_tokens", f"{_COUNT}.unsqueeze(0)"}
_VIEWS = {"position_ids.unsqueeze(0)"}
# The functions of transformers that call `find_packed_sequence_indices` for a forward are at most this many.
_MOST_CALLERS = 6

_calls = threading.local()


@functools.cache
def _code_of_counting_forward(forward: Callable) -> types.CodeType | None:
    """Return the code of a forward that assigns nothing but 0, 1, 2, ... to `position_ids`; None for another one."""
    function = inspect.unwrap(forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    stores = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "position_ids" and isinstance(node.ctx, ast.Store)
    ]  # fmt: skip
    texts = [
        ast.unparse(node.value) for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["position_ids"]
    ]  # fmt: skip
    # A loop or the assignment of a tuple would store the name too, without such a statement.
    is_known = len(stores) == len(texts) and {*texts} <= _COUNTS | _VIEWS and not _COUNTS.isdisjoint(texts)
    return getattr(function, "__code__", None) if is_known else None


def _is_called_by(code: types.CodeType, body: nn.Module) -> bool:
    """Return whether one of the next callers of the caller of this function is the method of a body with this code."""
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(_MOST_CALLERS):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code is code:
            # A hook may call another model of the same class.
            return frame.f_locals.get("self") is body
    return False


def _answer_if_known(original: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Return a function that answers like `find_packed_sequence_indices`, and does not ask where it need not."""

    @functools.wraps(original)
    def find(position_ids: Tensor) -> Tensor | None:
        call = getattr(_calls, "call", None)
        # In a graph, transformers keeps the question.
        is_plain = type(position_ids) is Tensor and not torch.compiler.is_compiling()
        if call is not None and is_plain and not torch.jit.is_tracing() and _is_called_by(call[0], call[1]):
            return None
        return original(position_ids)

    return find


@contextlib.contextmanager
def known_positions(body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
    """Enclose a call of the forward of a model's body, which may number its tokens itself."""
    has_none = len(args) <= 1 and all(kwargs.get(name) is None for name in ("position_ids", "attention_mask"))
    code = None
    if has_none and not torch.compiler.is_compiling():
        code = _code_of_counting_forward(type(body).forward)
        replace_packing_check(_answer_if_known)
    # A call inside another one may pass positions.
    outer, _calls.call = getattr(_calls, "call", None), None if code is None else (code, body)
    try:
        yield
    finally:
        _calls.call = outer
