"""Find the statements of a forward that compute an MLP of two linear layers which is no module of its own.

There are two forms. In the first, a layer holds both linear layers, as decoders of the BART family do:

    h = self.act(self.up(h))                          |   y = mlp(self.up, self.act, self.down, h, p, training)
    h = F.dropout(h, p=p, training=training)          |   if y is None:
    h = self.down(h)                                  |       (the three stock statements)
                                                      |   else:
                                                      |       h = y
                                                      |   del y

In the second, two children compute the MLP, as in the BERT family. The first ends with the linear layer and the
activation, and the second begins with the other linear layer. The method that calls both is often run on chunks of the
tokens, by `apply_chunking_to_forward`:

    h = self.intermediate(x)                          |   y = two_children(self.intermediate, self.output, x, residual)
    y = self.output(h, residual)                      |

This module reads and builds syntax trees only. `tigon.recognition.parts.two_layer_mlps` has the functions that the
rewritten source calls. They check at every call that the children compute the op, and otherwise let the stock code run.
"""

import ast
import copy
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple

import torch.nn.functional as F

from tigon.recognition.rewriting.source import (
    NotReadable,
    Rewritten,
    cached_by_code,
    compile_definition,
    definition_of,
    innermost,
)

# The function of transformers that calls a method of a layer on chunks of the tokens. It is found by this name, and a
# function of this name that does something else still receives a method that computes the same.
CHUNKED_CALL = "apply_chunking_to_forward"


# --- expressions -----------------------------------------------------------------------------------


def _child_of(node: ast.AST) -> str | None:
    """Return the name of the attribute in `self.name`; None for any other node."""
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_attribute and isinstance(node, ast.Attribute) else None


def _calls(node: ast.expr) -> tuple[list[str], str] | None:
    """Return (["a", "b"], "x") for the expression `self.b(self.a(x))`: the children in the order of their calls."""
    children: list[str] = []
    while isinstance(node, ast.Call):
        child = _child_of(node.func)
        if child is None or node.keywords or len(node.args) != 1:
            return None
        children.insert(0, child)
        node = node.args[0]
    return (children, node.id) if isinstance(node, ast.Name) and node.id != "self" and children else None


def _assignment(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return the target and the value of an assignment to one plain name; None for any other statement."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id != "self":
            return target.id, statement.value
    return None


def _loads(definition: ast.AST, name: str) -> int:
    """Return how often a syntax tree loads a variable."""
    nodes = ast.walk(definition)
    return sum(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id == name for n in nodes)


class DropoutStatement(NamedTuple):
    """The statement `h = F.dropout(h, p=p, training=training)`."""

    p: ast.expr
    training: ast.expr


def _is_simple(node: ast.expr) -> bool:
    """Return True for a constant and for `self.name`. Evaluating these twice changes nothing."""
    return isinstance(node, ast.Constant) or _child_of(node) is not None


def _dropout(value: ast.expr, name: str, scope: dict) -> DropoutStatement | None:
    """Return the arguments of a call of torch's dropout function with the variable `name`, or None.

    `scope` holds the globals of the function.
    """
    if not isinstance(value, ast.Call) or len(value.args) != 1 or not isinstance(value.func, ast.Attribute):
        return None
    (argument,) = value.args
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    if not isinstance(argument, ast.Name) or argument.id != name or set(keywords) != {"p", "training"}:
        return None
    root, *names = ast.unparse(value.func).split(".")
    try:
        function = operator.attrgetter(".".join(names))(scope[root])
    except (KeyError, AttributeError):
        return None
    is_known = function is F.dropout and all(map(_is_simple, keywords.values()))
    return DropoutStatement(keywords["p"], keywords["training"]) if is_known else None


# --- an MLP in one block of statements ---------------------------------------------------------------


class MLPStatements(NamedTuple):
    """The children that an MLP in one block calls: `down(dropout(activation(up(argument))))`."""

    up: str
    activation: str
    down: str
    argument: str
    dropout: DropoutStatement


class MLPMatch(NamedTuple):
    """The first statements of a block, and the statements that replace them."""

    length: int
    replacement: list[ast.stmt]


def read_mlp(statements: list[ast.stmt], scope: dict) -> tuple[MLPStatements, int] | None:
    """Return the MLP that the first statements of a block compute, and the number of these statements; None if none.

    The dropout separates the activation from the second layer. Without it, the calls of children could not be told
    from those of a norm before the first layer.
    """
    children: list[str] = []
    argument, target, dropout = "", "", None
    for index, statement in enumerate(statements[:4]):
        assignment = _assignment(statement)
        # All statements assign to one variable, so nothing else can read the intermediate values.
        if assignment is None or (target and assignment[0] != target):
            return None
        name, value = assignment
        if len(children) == 2 and dropout is None:
            dropout = _dropout(value, target, scope)
            if dropout is None:
                return None
            continue
        call = _calls(value)
        if call is None or (target and call[1] != target):
            return None
        argument, target = argument or call[1], name
        children += call[0]
        if dropout is not None:
            if len(children) != 3 or len(set(children)) != 3:
                return None
            up, activation, down = children
            return MLPStatements(up, activation, down, argument, dropout), index + 1
        if len(children) > 2:
            return None
    return None


def match_mlp(statements: list[ast.stmt], scope: dict, function: str, variable: str) -> MLPMatch | None:
    """Return the match of an MLP at the start of a block, or None.

    Args:
        statements: The statements of the block.
        scope: The globals of the function.
        function: The name by which the new statements call the op.
        variable: A name for the result of the op, which is unique in the function.
    """
    result = read_mlp(statements, scope)
    if result is None:
        return None
    mlp, length = result
    target, _ = _assignment(statements[0]) or ("", None)
    load = lambda name: ast.Name(name, ast.Load())
    child = lambda name: ast.Attribute(load("self"), name, ast.Load())
    children = [child(mlp.up), child(mlp.activation), child(mlp.down)]
    call = ast.Call(load(function), [*children, load(mlp.argument), *copy.deepcopy(mlp.dropout)], [])
    is_none = ast.Compare(load(variable), [ast.Is()], [ast.Constant(None)])
    accept = ast.Assign([ast.Name(target, ast.Store())], load(variable))
    replacement: list[ast.stmt] = [
        ast.Assign([ast.Name(variable, ast.Store())], call),
        ast.If(is_none, statements[:length], [ast.copy_location(accept, statements[length - 1])]),
        # The variable must not keep the result alive until the function returns.
        ast.Delete([ast.Name(variable, ast.Del())]),
    ]
    return MLPMatch(length, [ast.copy_location(each, statements[0]) for each in replacement])


# --- an MLP in two children --------------------------------------------------------------------------


class TwoChildren(NamedTuple):
    """The statements `h = self.first(argument); y = self.second(h, other)`."""

    first: str
    second: str
    argument: str
    other: str


def read_two_children(statements: list[ast.stmt], definition: ast.FunctionDef) -> TwoChildren | None:
    """Return the calls of the first two statements of a block, if nothing but the second reads the first's result."""
    pair = [_assignment(statement) for statement in statements[:2]]
    if len(pair) < 2 or pair[0] is None or pair[1] is None:
        return None
    (hidden, first_value), (_, call) = pair[0], pair[1]
    first = _calls(first_value)
    if first is None or len(first[0]) != 1 or not isinstance(call, ast.Call) or call.keywords or len(call.args) != 2:
        return None
    second = _child_of(call.func)
    names = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
    if second is None or len(names) != 2 or names[0] != hidden or names[1] == hidden:
        return None
    # `h` may also be the variable that the first child reads.
    if _loads(definition, hidden) != 1 + (first[1] == hidden):
        return None
    return TwoChildren(first[0][0], second, first[1], names[1])


def match_two_children(statements: list[ast.stmt], definition: ast.FunctionDef, function: str) -> MLPMatch | None:
    """Return the match of an MLP in two children at the start of a block, or None."""
    pair = read_two_children(statements, definition)
    if pair is None:
        return None
    load = lambda name: ast.Name(name, ast.Load())
    child = lambda name: ast.Attribute(load("self"), name, ast.Load())
    target, _ = _assignment(statements[1]) or ("", None)
    call = ast.Call(load(function), [child(pair.first), child(pair.second), load(pair.argument), load(pair.other)], [])
    statement = ast.Assign([ast.Name(target, ast.Store())], call)
    return MLPMatch(2, [ast.copy_location(statement, statements[1])])


class ActivatedChild(NamedTuple):
    """What the forward of a child with the first layer of an MLP calls, in this order."""

    # Children that run before the first layer, such as a norm.
    earlier: tuple[str, ...]
    up: str
    activation: str


@cached_by_code
def read_activated_child(forward: FunctionType) -> ActivatedChild | None:
    """Return what a forward calls if it consists of calls of children, each with the previous result; None otherwise.

    The last two children may then be a linear layer and an activation. Whether they are is known only from the module.
    """
    try:
        definition = definition_of(forward)
    except NotReadable:
        return None
    names = _parameters(definition)
    if innermost(forward) is not forward or len(names) != 2 or definition.decorator_list:
        return None
    _, name = names
    children: list[str] = []
    *statements, last = _without_docstring(definition)
    for statement in statements:
        assignment = _assignment(statement)
        call = assignment and _calls(assignment[1])
        if assignment is None or call is None or call[1] != name:
            return None
        children += call[0]
        name = assignment[0]
    if not isinstance(last, ast.Return) or last.value is None:
        return None
    if not (isinstance(last.value, ast.Name) and last.value.id == name):
        call = _calls(last.value)
        if call is None or call[1] != name:
            return None
        children += call[0]
    if len(children) < 2 or len(set(children)) < len(children):
        return None
    return ActivatedChild(tuple(children[:-2]), *children[-2:])


@cached_by_code
def remove_first_product(forward: FunctionType) -> tuple[str, Rewritten] | None:
    """Return a child and the rest of a forward, if the forward begins with `h = self.child(h)`; None otherwise.

    `h` is the first argument of the forward. The rest takes the result of the child in its place.
    """
    try:
        definition = definition_of(forward)
        names, statements = _parameters(definition), _without_docstring(definition)
        assignment = _assignment(statements[0])
        call = assignment and _calls(assignment[1])
        is_decorated = innermost(forward) is not forward or bool(definition.decorator_list)
        if is_decorated or len(names) != 3 or assignment is None or call is None or len(call[0]) != 1:
            return None
        if not assignment[0] == call[1] == names[1] or len(statements) < 2:
            return None
        definition.body = statements[1:]
        return call[0][0], compile_definition(definition, forward, {})
    except NotReadable:
        return None


def _parameters(definition: ast.FunctionDef) -> list[str]:
    """Return the names of the parameters, or an empty list if some are no plain parameters without a default value."""
    arguments = definition.args
    others = [*arguments.posonlyargs, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg, *arguments.defaults]
    return [] if any(others) else [argument.arg for argument in arguments.args]


def _without_docstring(definition: ast.FunctionDef) -> list[ast.stmt]:
    """Return the statements of a function without its docstring."""
    return definition.body[1:] if ast.get_docstring(definition) is not None else definition.body


# --- methods that run on chunks ----------------------------------------------------------------------


@dataclass
class _ChunkedMethods(ast.NodeTransformer):
    """Replaces the argument `self.method` of `apply_chunking_to_forward` by `function(self.method)`."""

    function: str
    methods: list[str]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == CHUNKED_CALL and node.args:
            method = _child_of(node.args[0])
            if method is not None:
                self.methods.append(method)
                node.args[0] = ast.Call(ast.Name(self.function, ast.Load()), [node.args[0]], [])
        return node


def replace_chunked_methods(definition: ast.FunctionDef, function: str) -> list[str]:
    """Wrap the methods that a function runs on chunks in a call of `function`. Return their names."""
    transformer = _ChunkedMethods(function, [])
    definition.body = [transformer.visit(statement) for statement in definition.body]
    return transformer.methods


# --- all statements of a function ----------------------------------------------------------------------


def walk_blocks(definition: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the statements from each statement of each block to the end of the block."""
    for node in ast.walk(definition):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield from (block[index:] for index in range(len(block)))
