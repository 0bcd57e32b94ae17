"""Compute an MLP of two linear layers whose parts are children of a layer, or of two children of a layer.

`tigon.recognition.rewriting.mlp_statements` finds the statements in the source of a forward, and these functions take
their place. Each checks at every call that the linear layers are plain, that the activation is one that `tigon.patch`
has replaced and whose replacement still holds, and that no dropout is active between them. If any of that is not so,
the stock code runs.
"""

import ast
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.mlps.mlp import mlp_by_kernels, supports_mlp
from tigon.ops.mlps.projections import does_more_than_forward, is_plain
from tigon.recognition.parts.activations import FORMULAS, ActivationRecipe, recognise_gelu, recognise_relu2
from tigon.recognition.probing.standin import is_linear
from tigon.recognition.replacement import Replacement, is_changed
from tigon.recognition.rewriting.mlp_statements import (
    match_two_children,
    read_activated_child,
    read_mlp,
    read_two_children,
    remove_first_product,
    replace_chunked_methods,
    walk_blocks,
)
from tigon.recognition.rewriting.source import (
    NotReadable,
    Rewritten,
    cached_by_code,
    compile_definition,
    definition_of,
    innermost,
)

# The name by which the rewritten source calls `_compute_two_children`. No forward uses such a name.
TWO_CHILDREN = "_tigon_two_children_"


# --- calls -----------------------------------------------------------------------------------------


def _activation_of(module: object) -> str | None:
    """Return the activation that a replaced module computes; None if a call of the module might do anything else."""
    forward = getattr(module, "__dict__", {}).get("forward")
    if type(forward) is not Replacement or type(recipe := forward.recipe) is not ActivationRecipe:
        return None
    is_usable = isinstance(module, nn.Module) and forward.holds() and not does_more_than_forward(module)
    return FORMULAS[recipe.formula].activation if is_usable else None


def compute_mlp(up: Any, activation: Any, down: Any, x: Any, p: Any = 0.0, training: Any = False) -> Tensor | None:
    """Return down(activation(up(x))) as one node of autograd, or None if the caller has to run the stock statements.

    `p` and `training` are the arguments of the dropout after the activation. The op has no dropout.
    """
    if torch.compiler.is_compiling() or (training and p):
        return None
    kind = _activation_of(activation)
    if kind is None or not isinstance(up, nn.Module) or not isinstance(down, nn.Module):
        return None
    if not (is_plain(up) and is_plain(down)) or not supports_mlp(x, up.weight, up.bias, down.weight, down.bias):
        return None
    return mlp_by_kernels(x, up.weight, down.weight, up.bias, down.bias, kind)


def _is_stock(module: object) -> bool:
    """Return True if a call of the module runs the forward of its class and nothing else."""
    return isinstance(module, nn.Module) and "forward" not in vars(module) and not does_more_than_forward(module)


def _compute_two_children(first: Any, second: Any, x: Any, other: Any) -> Any:
    """Return second(first(x), other). If both compute an MLP together, compute it as one node of autograd."""
    if torch.compiler.is_compiling() or not (_is_stock(first) and _is_stock(second)):
        return second(first(x), other)
    forwards = type(first).forward, type(second).forward
    are_functions = all(isinstance(forward, FunctionType) for forward in forwards)
    start = read_activated_child(forwards[0]) if are_functions else None
    rest = remove_first_product(forwards[1]) if are_functions else None
    if start is None or rest is None:
        return second(first(x), other)
    child, rewritten = rest
    activation, down = getattr(first, start.activation), getattr(second, child)
    if _activation_of(activation) is None:
        return second(first(x), other)
    h = x
    for name in start.earlier:
        h = getattr(first, name)(h)
    up = getattr(first, start.up)
    y = compute_mlp(up, activation, down, h)
    # The children that ran already must not run twice, because they may have hooks.
    y = down(activation(up(h))) if y is None else y
    return rewritten.build(forwards[1])(second, y, other)


@cached_by_code
def _rewrite_method(method: FunctionType) -> Rewritten | None:
    """Return the code of a method in which one call computes the two children of an MLP; None without such children."""
    try:
        definition = definition_of(method)
        if innermost(method) is not method or definition.decorator_list:
            return None
        body = definition.body
        for index in range(len(body)):
            match = match_two_children(body[index:], definition, TWO_CHILDREN)
            if match is not None:
                definition.body = [*body[:index], *match.replacement, *body[index + match.length :]]
                return compile_definition(definition, method, {TWO_CHILDREN: _compute_two_children})
    except NotReadable:
        return None
    return None


def chunked_method(method: Any) -> Any:
    """Return a method that computes the same as `method`, with the MLP in it as one op if it has one."""
    if type(method) is not MethodType or not isinstance(method.__func__, FunctionType):
        return method
    if torch.compiler.is_compiling() or not isinstance(method.__self__, nn.Module):
        return method
    rewritten = _rewrite_method(method.__func__)
    return method if rewritten is None else MethodType(rewritten.build(method.__func__), method.__self__)


# --- recognition -------------------------------------------------------------------------------------


def has_two_layer_mlp(module: nn.Module, forward: FunctionType) -> bool:
    """Return True if a forward has statements that compute such an MLP, and the module's children fit the op.

    A layer with a dropout between the activation and the second linear layer would train with the stock statements.
    """
    try:
        definition = definition_of(forward)
    except NotReadable:
        return False
    scope = innermost(forward).__globals__
    for statements in walk_blocks(definition):
        if (result := read_mlp(statements, scope)) is not None:
            mlp, _ = result
            children = [_child(module, name) for name in (mlp.up, mlp.activation, mlp.down)]
            if not _dropout_rate(module, mlp.dropout.p) and _fits(*children):
                return True
    methods = replace_chunked_methods(definition, "_")
    return any(_method_fits(module, getattr(type(module), name, None)) for name in methods)


def _dropout_rate(module: nn.Module, p: ast.expr) -> Any:
    """Return the value of the argument `p` of a dropout, which is a constant or an attribute of the module."""
    return getattr(module, p.attr, 1.0) if isinstance(p, ast.Attribute) else getattr(p, "value", 1.0)


def _method_fits(module: nn.Module, method: object) -> bool:
    """Return True if a method calls two children that compute such an MLP together."""
    if not isinstance(method, FunctionType) or _rewrite_method(method) is None:
        return False
    definition = definition_of(method)
    pairs = (read_two_children(definition.body[index:], definition) for index in range(len(definition.body)))
    for pair in filter(None, pairs):
        first, second = _child(module, pair.first), _child(module, pair.second)
        if first is None or second is None:
            continue
        first_forward, second_forward = type(first).forward, type(second).forward
        if not (isinstance(first_forward, FunctionType) and isinstance(second_forward, FunctionType)):
            continue
        start, rest = read_activated_child(first_forward), remove_first_product(second_forward)
        if start is not None and rest is not None:
            return _fits(_child(first, start.up), _child(first, start.activation), _child(second, rest[0]))
    return False


def _child(module: nn.Module, name: str) -> nn.Module | None:
    return module._modules.get(name)


def _fits(up: nn.Module | None, activation: nn.Module | None, down: nn.Module | None) -> bool:
    """Return True if two layers are linear, fit each other, and an op computes the activation between them."""
    if up is None or activation is None or down is None or not (is_linear(up) and is_linear(down)):
        return False
    if up.out_features != down.in_features or type(up) is not nn.Linear or type(down) is not nn.Linear:
        return False
    if type(getattr(vars(activation).get("forward"), "recipe", None)) is ActivationRecipe:
        return True
    is_stock = not is_changed(activation)
    return is_stock and any(
        isinstance(recognise(activation), ActivationRecipe) for recognise in (recognise_gelu, recognise_relu2)
    )
