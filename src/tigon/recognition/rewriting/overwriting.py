"""Find the children of a module whose input the forward writes in place after they have run.

    y = self.norm(x)
    x += self.mlp(y)      # writes the input of `norm`

The op of a norm saves its input for backward, so the input must not change until then. `overwritten_inputs` reads the
source of the forward. It follows which variables hold the same tensor, through assignments, branches and loops.
"""

import ast
from types import FunctionType

from tigon.recognition.rewriting.source import NotReadable, cached_by_code, definition_of
from tigon.recognition.rewriting.statements import child_call


class _AliasTracker:
    """Tracks which variables hold the same tensor, and which tensors are written in place after a child read them. Each
    tensor has a number. After a branch, a variable may hold one of several tensors."""

    def __init__(self) -> None:
        self.numbers: dict[str, frozenset[int]] = {}
        # The names of the children that have read a tensor.
        self.readers: dict[int, set[str]] = {}
        # The line of the first write, by the name of the child.
        self.first_writes: dict[str, int] = {}
        self.count = 0

    def find_tensors(self, name: str) -> frozenset[int]:
        if name not in self.numbers:
            self.numbers[name] = self.add_tensor()
        return self.numbers[name]

    def add_tensor(self) -> frozenset[int]:
        """Return the number of a new tensor, as a set."""
        self.count += 1
        return frozenset((self.count,))

    def write(self, name: str, line: int) -> None:
        """Record a write in place to the tensors that a variable may hold."""
        for number in self.find_tensors(name):
            for child in self.readers.get(number, ()):
                self.first_writes.setdefault(child, line)

    def visit_block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit_statement(statement)

    def visit_statement(self, statement: ast.stmt) -> None:
        attributes = (getattr(statement, name, None) for name in ("body", "orelse", "finalbody"))
        blocks = [block for block in attributes if isinstance(block, list)]
        if blocks and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            self.visit_branches(blocks, is_loop=isinstance(statement, (ast.For, ast.While)))
            return
        self.visit_calls(statement)
        if isinstance(statement, ast.AugAssign):
            self.visit_target(statement.target, statement.lineno)
            if isinstance(statement.target, ast.Name):
                self.write(statement.target.id, statement.lineno)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                self.visit_target(target, statement.lineno)
            self.assign(statement)

    def visit_branches(self, blocks: list[list[ast.stmt]], is_loop: bool) -> None:
        """Visit each block from the same state. Afterwards, a variable may hold its tensors at the end of any block."""
        before, states = self.numbers, [self.numbers]
        for block in blocks:
            self.numbers = dict(before)
            # The body of a loop is visited twice: a write may affect a tensor that a child read one iteration before.
            for _ in range(2 if is_loop else 1):
                self.visit_block(block)
            states.append(self.numbers)
        names = {name for numbers in states for name in numbers}
        empty: frozenset[int] = frozenset()
        self.numbers = {name: empty.union(*(numbers.get(name, empty) for numbers in states)) for name in names}

    def visit_calls(self, statement: ast.stmt) -> None:
        """Record the children that a statement calls, and the methods of tensors that write in place."""
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call):
                continue
            if (call := child_call(node)) is not None:
                for number in self.find_tensors(call.argument):
                    self.readers.setdefault(number, set()).add(call.child)
            function = node.func
            if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
                continue
            if function.attr.endswith("_") and not function.attr.startswith("requires_grad"):
                self.write(function.value.id, node.lineno)

    def visit_target(self, target: ast.expr, line: int) -> None:
        """Record the write of `x[...] = y` to the tensor of `x`."""
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.write(target.value.id, line)

    def assign(self, statement: ast.Assign) -> None:
        """Give the variables of an assignment the tensor of another variable, or a new one."""
        value = statement.value
        for target in statement.targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    numbers = self.find_tensors(value.id) if isinstance(value, ast.Name) else self.add_tensor()
                    self.numbers[node.id] = numbers


@cached_by_code
def overwritten_inputs(function: FunctionType) -> dict[str, int]:
    """Return the children whose input a forward writes in place after they have run, with the line of the write."""
    try:
        definition = definition_of(function)
    except NotReadable:
        return {}
    tracker = _AliasTracker()
    tracker.visit_block(definition.body)
    return tracker.first_writes
