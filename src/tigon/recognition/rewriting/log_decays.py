"""Compute the decay of a linear recurrence by one op.

    g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
    g = log_decay_of(self.A_log, F.softplus, a, self.dt_bias)

`a` may be any expression. The function checks at every call that the op takes the tensors, and that `F.softplus` is
that of torch.
"""

import ast
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.mixers.log_decay import log_decay
from tigon.recognition.rewriting.statements import LOG_DECAY
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.device import PLAIN

SOFTPLUS = F.softplus


def log_decay_of(a_log: Any, softplus: Any, a: Any, bias: Any) -> Tensor:
    """Return -a_log.float().exp() * softplus(a.float() + bias)."""
    # A compiler fuses these operations itself.
    if softplus is SOFTPLUS and not torch.compiler.is_compiling() and _is_decay(a, a_log, bias):
        return log_decay(a, a_log, bias)
    return -a_log.float().exp() * softplus(a.float() + bias)


def _is_decay(a: Any, a_log: Any, bias: Any) -> bool:
    """Return True if the op takes the tensors."""
    if any(type(x) not in PLAIN for x in (a, a_log, bias)) or a.dim() == 0 or has_active_transform():
        return False
    is_head = a_log.shape == bias.shape == a.shape[-1:]
    return is_head and a.device == a_log.device == bias.device and a.is_floating_point()


class _LogDecays(ast.NodeTransformer):
    """Replaces the expression, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.BinOp(
                ast.UnaryOp(ast.USub(), ast.Call(ast.Attribute(rate, "exp"), [], [])),
                ast.Mult(),
                ast.Call(ast.Attribute(_, "softplus") as softplus, [ast.BinOp(x, ast.Add(), bias)], []),
            ):
                a_log, a = _widened(rate), _widened(x)
                if a_log is not None and a is not None:
                    self.count += 1
                    name = ast.Name(LOG_DECAY, ast.Load())
                    return ast.copy_location(ast.Call(name, [a_log, softplus, a, bias], []), node)
        return node


def _widened(node: ast.expr) -> ast.expr | None:
    """Return x if an expression is `x.float()`."""
    match node:
        case ast.Call(ast.Attribute(x, "float"), [], []):
            return x
    return None


def replace_log_decays(definition: ast.FunctionDef) -> int:
    """Replace the expressions in a function. Return their number."""
    transformer = _LogDecays()
    transformer.visit(definition)
    return transformer.count
