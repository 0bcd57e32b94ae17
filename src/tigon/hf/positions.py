"""Avoid the host synchronisation by which transformers checks whether a batch is packed, if it cannot be packed.

transformers compares positions on the device to find packed sequences, also those that the body of a model has numbered
itself. The host then waits at the start of every forward until the device has finished the previous step:

    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
    causal_mask = create_causal_mask(..., position_ids=position_ids)   # compares, and the host waits

If the source of a body's forward assigns nothing but these numbers to `position_ids`, the forward runs with functions
that pass no positions to those that build masks. No module of transformers is changed.
"""

import ast
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.hf.transformers_private import builds_mask
from tigon.recognition.rewriting.fused_statements import RewrittenForward, rewrite_forward
from tigon.recognition.rewriting.source import NotReadable, definition_of, innermost
from tigon.runtime.reach.code import code_facts

# The expressions that forwards of transformers assign to `position_ids`, if the caller passes none.
_COUNT = "torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)"
_COUNTS = {f"{_COUNT} + past_seen_tokens", f"{_COUNT}.unsqueeze(0)"}
_VIEWS = {"position_ids.unsqueeze(0)"}


def _numbers_tokens(definition: ast.FunctionDef) -> bool:
    """Return True if a forward assigns nothing but 0, 1, 2, ... to `position_ids`, and passes no other positions."""
    nodes = [*ast.walk(definition)]
    stores = [n for n in nodes if isinstance(n, ast.Name) and n.id == "position_ids" and isinstance(n.ctx, ast.Store)]
    texts = [
        ast.unparse(node.value) for node in nodes
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["position_ids"]
    ]  # fmt: skip
    passed = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "position_ids"]
    for node in nodes:
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            passed += [value for key, value in pairs if getattr(key, "value", None) == "position_ids"]
    # A loop or the assignment of a tuple would store the name too, without such a statement.
    is_known = len(stores) == len(texts) and {*texts} <= _COUNTS | _VIEWS and not _COUNTS.isdisjoint(texts)
    return is_known and all(isinstance(value, ast.Name) and value.id == "position_ids" for value in passed)


class _MaskWithoutPositions:
    """Replaces a function that builds a mask, and calls it without positions."""

    def __init__(self, scope: dict[str, Any], name: str) -> None:
        self.scope, self.name = scope, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.scope[self.name]
        # Fake tensors and proxies belong to a graph, which contains the comparison of transformers.
        if type(kwargs.get("position_ids")) is Tensor and builds_mask(function):
            kwargs["position_ids"] = None
        return function(*args, **kwargs)


class NumberingForward(RewrittenForward):
    """The forward of a body's class. A call without positions and mask does not check whether its batch is packed."""

    def rewrite(self, forward: types.FunctionType) -> types.FunctionType | str | None:
        """Return a variant that passes no positions to functions that build masks; None if that may differ."""
        try:
            if not _numbers_tokens(definition_of(forward)):
                return None
        except NotReadable:
            return None
        function = innermost(forward)
        # A forward may call these functions in a lambda.
        scope, names = function.__globals__, code_facts(function.__code__).global_names
        masks = {name: _MaskWithoutPositions(scope, name) for name in names if builds_mask(scope.get(name))}
        return rewrite_forward(forward, masks)

    def for_call(self, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Callable:
        """Return the function that computes the forward of the body for these arguments."""
        has_positions = len(args) > 1 or any(kwargs.get(n) is not None for n in ("position_ids", "attention_mask"))
        stock = type(body).forward
        return stock if has_positions or torch.jit.is_tracing() else self.forward_for(stock) or stock
