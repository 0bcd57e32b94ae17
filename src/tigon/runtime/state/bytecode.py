"""Collect from the bytecode of a function which names it uses, and what it writes.

No code of the user runs. `code_use` follows the instructions of one function and of the functions that it defines. For

    def forward(self, x):
        self.calls += 1
        return torch.nn.functional.silu(x) * self.scale

it returns the global name `torch`, the attributes `calls`, `nn`, `functional`, `silu` and `scale`, the chain
`torch.nn.functional.silu`, and a write to `.calls`. If the instructions do not show which attribute is read, as in
`getattr(x, prefix + "scale")`, every attribute counts as read.
"""

import dis
import hashlib
import types
from dataclasses import dataclass
from typing import Any

from tigon.runtime.state.decisions import FunctionInputs, dependent_variables, find_decisions
from tigon.runtime.state.instructions import (
    call_arguments,
    enters_block,
    find_operand,
    is_call_with_constant,
    is_load,
    is_variable,
    line_of,
    names_of,
)
from tigon.runtime.state.known_names import MODE_SETTERS, MUTATORS, SETTERS
from tigon.runtime.weak_cache import cached_weakly

# Functions whose second argument names an attribute.
GETTERS = frozenset(("getattr", "hasattr", "attrgetter", "delattr", "setattr"))
# The methods of the operators that change their left side in place.
IN_PLACE = {"+=": "__iadd__", "*=": "__imul__", "|=": "__ior__", "&=": "__iand__", "-=": "__isub__", "^=": "__ixor__"}


@dataclass(frozen=True)
class CodeUse:
    """The names that one code object uses, and its writes to objects that outlive a call."""

    global_names: frozenset[str]
    # Attributes that the code loads from any object.
    attributes: frozenset[str]
    # Attributes that the code assigns.
    stored_names: frozenset[str]
    # Chains of attributes: `torch.nn.functional.silu` gives ("torch", "nn", "functional", "silu").
    chains: frozenset[tuple[str, ...]]
    strings: frozenset[str]
    # Names that may be missing from an object, because the code may look them up with `getattr` or `hasattr`.
    optional: frozenset[str]
    imports: frozenset[str]
    # Each write is a description and a line.
    writes: tuple[tuple[str, int], ...]
    # Writes of a constructor to the object that it constructs. In any other function this is empty.
    constructor_writes: tuple[tuple[str, int], ...]
    # Writes that matter only if the code can reach a container that has such a method: `x[i] = y`, `x.append(y)`.
    item_writes: tuple[tuple[str, int], ...]
    # Writes that matter only if they reach a tensor that outlives the call: a method or option, a line, and the names
    # in the expression that the method is called on.
    tensor_writes: tuple[tuple[str, int, frozenset[str]], ...]
    # Attributes whose type the code reads, as `isinstance(self.down, Quantised)` does.
    type_tested_names: frozenset[str]
    # Attributes that the code reads of an argument if they exist, with the line. None stands for every attribute.
    reads_of_arguments: tuple[tuple[str | None, int], ...]
    # Operations that the code may apply to any object: "construct", "compare", "format" or "store".
    operations: frozenset[str]
    # True if the code has an `except` or `finally`.
    catches_exceptions: bool
    # True if the code uses `vars`, `dir`, `__dict__`, or `getattr` with a computed name.
    reads_all_attributes: bool


class _CodeReader:
    """Collects the uses of one function and of the functions that are defined in it."""

    def __init__(self, code: types.CodeType) -> None:
        self.outermost = code
        self.global_names: set[str] = set()
        self.attributes: set[str] = set()
        self.stored_names: set[str] = set()
        self.chains: set[tuple[str, ...]] = set()
        self.strings: set[str] = set()
        self.optional: set[str] = set()
        self.imports: set[str] = set()
        self.writes: list[tuple[str, int]] = []
        self.constructor_writes: list[tuple[str, int]] = []
        self.item_writes: list[tuple[str, int]] = []
        self.tensor_writes: list[tuple[str, int, frozenset[str]]] = []
        self.type_tested_names: set[str] = set()
        self.reads_of_arguments: list[tuple[str | None, int]] = []
        self.operations: set[str] = set()
        self.catches_exceptions = False
        self.reads_all = False

    def read(self) -> CodeUse:
        """Read the function, then each function that it defines, with the variables that depend on an argument."""
        pending: list[tuple[types.CodeType, frozenset[str]]] = [(self.outermost, frozenset())]
        for code, inherited in pending:
            steps = list(dis.get_instructions(code))
            dependent = frozenset(dependent_variables(code, steps, inherited))
            self.read_steps(code, steps)
            self.read_constants(code, steps)
            has_handler = _has_handler(steps)
            if has_handler:
                # A handler may replace the value of an attribute that is missing.
                self.catches_exceptions = True
                self.optional |= {step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")}
            self.tensor_writes += _tensor_writes(code, steps)
            self.type_tested_names |= _type_tested_names(steps)
            self.reads_of_arguments += _reads_of_arguments(code, steps, dependent, has_handler)
            self.operations |= _operations(steps)
            pending += [(c, dependent) for c in code.co_consts if isinstance(c, types.CodeType)]
        return self.result()

    def read_steps(self, code: types.CodeType, steps: list[dis.Instruction]) -> None:
        """Collect the names that the instructions of one code object load, and what they write."""
        line = code.co_firstlineno
        chain: tuple[str, ...] = ()
        constructed_names = _constructed_names(code, steps)
        for number, step in enumerate(steps):
            line = line_of(step) or line
            chain = self.read_load(steps, number, chain, line)
            self.read_store(steps, number, constructed_names, line)
            if is_load(step, *MODE_SETTERS) and not enters_block(steps, number):
                self.writes.append((f"a mode of torch, by {step.argval}", line))
        if "super" in self.global_names:
            self.attributes.add("super")

    def read_load(
        self, steps: list[dis.Instruction], number: int, chain: tuple[str, ...], line: int
    ) -> tuple[str, ...]:
        """Collect the name that an instruction loads. Return the chain of attributes that it continues."""
        step = steps[number]
        name, operation = step.argval, step.opname
        if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            self.global_names.add(name)
            self.reads_all |= name in GETTERS and not is_call_with_constant(steps, number)
            return (name,)
        if operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            self.attributes.add(name)
            if name in MUTATORS:
                self.item_writes.append((name, line))
            if name in SETTERS:
                self.writes.append((f"attributes, by {name}", line))
            self.reads_all |= name in ("__getattribute__", "__getattr__", "attrgetter")
            chain = (*chain, name) if chain else ()
            self.chains |= {chain} if chain else set()
        elif operation == "IMPORT_NAME":
            self.imports.add(name)
        elif operation == "IMPORT_FROM":
            self.attributes.add(name)
        return chain if operation.startswith("LOAD_") else ()

    def read_store(self, steps: list[dis.Instruction], number: int, constructed_names: set[str], line: int) -> None:
        """Collect what an instruction writes: an attribute, a global, a variable of an outer function, or an item."""
        step = steps[number]
        name, operation = step.argval, step.opname
        if operation in ("STORE_ATTR", "DELETE_ATTR"):
            target = find_operand(steps, number)
            is_own = len(target) == 1 and target[0].argval in constructed_names
            (self.constructor_writes if is_own else self.writes).append((f".{name}", line))
            self.stored_names.add(name)
        elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            self.writes.append((f"the global {name}", line))
        elif operation in ("STORE_DEREF", "DELETE_DEREF") and name in self.outermost.co_freevars:
            self.writes.append((f"{name} of the function around it", line))
        elif operation in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            self.item_writes.append(("__setitem__", line))
        elif operation == "BINARY_OP" and step.argrepr in IN_PLACE:
            self.item_writes.append((IN_PLACE[step.argrepr], line))

    def read_constants(self, code: types.CodeType, steps: list[dis.Instruction]) -> None:
        """Collect the strings of one code object. Where it calls `getattr`, they may be names of attributes."""
        constants = {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
        self.strings |= constants
        if GETTERS & {*code.co_names}:
            self.attributes |= constants
            self.optional |= constants

    def result(self) -> CodeUse:
        """Return the collected uses in an immutable form."""
        return CodeUse(
            global_names=frozenset(self.global_names),
            attributes=frozenset(self.attributes),
            stored_names=frozenset(self.stored_names),
            chains=frozenset(self.chains),
            strings=frozenset(self.strings),
            optional=frozenset(self.optional),
            imports=frozenset(self.imports),
            writes=tuple(self.writes),
            constructor_writes=tuple(self.constructor_writes),
            item_writes=tuple(self.item_writes),
            tensor_writes=tuple(self.tensor_writes),
            type_tested_names=frozenset(self.type_tested_names),
            reads_of_arguments=tuple(self.reads_of_arguments),
            operations=frozenset(self.operations),
            catches_exceptions=self.catches_exceptions,
            reads_all_attributes=self.reads_all
            or bool({"vars", "__dict__", "dir"} & (self.global_names | self.attributes)),
        )


@cached_weakly
def code_use(code: types.CodeType) -> CodeUse:
    """Read the bytecode of a function and of the functions that it defines."""
    return _CodeReader(code).read()


# --- questions about the instructions of one function ----------------------------------------------


def _has_handler(steps: list[dis.Instruction]) -> bool:
    """Return True if the code has an `except` or `finally`. A `with` block has a handler too, which does not count."""
    handlers = sum(step.opname == "PUSH_EXC_INFO" for step in steps)
    return handlers > sum(step.opname == "WITH_EXCEPT_START" for step in steps)


def _constructed_names(code: types.CodeType, steps: list[dis.Instruction]) -> set[str]:
    """Return the variables of a constructor that hold nothing but the object that it constructs."""
    stores = [(names_of(s), i) for i, s in enumerate(steps) if s.opname.startswith(("STORE_FAST", "STORE_DEREF"))]
    if code.co_name in ("__init__", "__post_init__"):
        return {*code.co_varnames[:1]} - {name for names, _ in stores for name in names}
    if code.co_name == "__new__":
        calls_new = lambda i: any(is_load(s, "__new__") or s.argval == "__new__" for s in find_operand(steps, i))
        names = {name for names, _ in stores for name in names}
        return {name for name in names if all(calls_new(i) for each, i in stores if name in each)}
    return set()


def _tensor_writes(code: types.CodeType, steps: list[dis.Instruction]) -> list[tuple[str, int, frozenset[str]]]:
    """Return the methods and options with which this code may write to a tensor, such as `add_` and `out=`."""
    writes, line = [], code.co_firstlineno
    for i, step in enumerate(steps):
        line = line_of(step) or line
        name = step.argval
        if step.opname.startswith("LOAD_") and isinstance(name, str) and name[-1:] == "_" and name[-2:] != "__":
            if step.opname != "LOAD_CONST":
                writes.append((name, line, frozenset(_all_names(find_operand(steps, i)))))
        elif isinstance(name, tuple) and {"out", "inplace"} & {n for n in name if isinstance(n, str)}:
            writes.append(("an option out= or inplace=", line, frozenset()))
    return writes


def _all_names(expression: list[dis.Instruction]) -> set[str]:
    """Return the names of attributes and variables in an expression, and its strings."""
    return {name for step in expression for name in names_of(step) if isinstance(name, str)}


def _type_tested_names(steps: list[dis.Instruction]) -> set[str]:
    """Return the names of the attributes whose type the code reads, directly or by a variable that holds one."""
    arguments_of_tests: list[dis.Instruction] = []
    for i, step in enumerate(steps):
        if is_load(step, "isinstance", "type", "issubclass"):
            arguments = call_arguments(steps, i)
            arguments_of_tests += arguments[0] if arguments else [s for s in steps if s.opname.startswith("LOAD_")]
        elif is_load(step, "__class__"):
            arguments_of_tests += find_operand(steps, i)
        elif step.opname == "MATCH_CLASS":
            arguments_of_tests += steps
    names = _all_names([s for s in arguments_of_tests if s.opname.startswith("LOAD_")])
    stores = [(names_of(s), i) for i, s in enumerate(steps) if s.opname.startswith(("STORE_FAST", "STORE_DEREF"))]
    while True:
        # If the code tests the type of a variable, it tests the type of the attribute that was assigned to it.
        sources = {n for each, i in stores if names & {*each} for n in _all_names(find_operand(steps, i))}
        if sources <= names:
            return names
        names |= sources


def _reads_of_arguments(
    code: types.CodeType, steps: list[dis.Instruction], dependent: frozenset[str], has_handler: bool
) -> list[tuple[str | None, int]]:
    """Return the attributes that the code reads of an input only if they exist."""
    reads, line = [], code.co_firstlineno
    is_input = lambda expression: (
        len(expression) == 1 and is_variable(expression[0]) and bool(dependent & {*names_of(expression[0])})
    )
    for i, step in enumerate(steps):
        line = line_of(step) or line
        if is_load(step, "getattr", "hasattr", "vars"):
            arguments = call_arguments(steps, i)
            if arguments and is_input(arguments[0]):
                constant = len(arguments) > 1 and arguments[1][0].opname == "LOAD_CONST"
                reads.append((arguments[1][0].argval if constant else None, line))
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and i and is_input(steps[i - 1 : i]):
            if step.argval == "__dict__":
                reads.append((None, line))
            elif has_handler:
                reads.append((step.argval, line))
    return reads


# Operations that Python may apply to an object if the code loads one of these names.
OPERATIONS = {
    "type": "construct",
    "__class__": "construct",
    "replace": "construct",
    "copy": "construct",
    "deepcopy": "construct",
    "str": "format",
    "repr": "format",
    "format": "format",
    "print": "format",
    "setattr": "store",
    "delattr": "store",
    "__setattr__": "store",
    "__delattr__": "store",
    "hash": "compare",
}


def _operations(steps: list[dis.Instruction]) -> set[str]:
    """Return the operations that the code may apply to an object. Python calls special methods for them."""
    operations = {OPERATIONS[s.argval] for s in steps if s.opname.startswith("LOAD_") and _is_operation(s)}
    for i, step in enumerate(steps):
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            operations.add("store")
        elif step.opname.startswith(("FORMAT_", "CONVERT_VALUE")) or step.argrepr in ("%", "%="):
            operations.add("format")
        elif step.opname in ("COMPARE_OP", "CONTAINS_OP") and not _compares_with_constant(steps, i):
            operations.add("compare")
    return operations


def _is_operation(step: dis.Instruction) -> bool:
    return isinstance(step.argval, str) and step.argval in OPERATIONS


def _compares_with_constant(steps: list[dis.Instruction], index: int) -> bool:
    """Return True if one side of a comparison is a constant, or a dtype of torch."""
    right = find_operand(steps, index)
    left = find_operand(steps, index - len(right)) if right else []
    is_constant = lambda expression: len(expression) == 1 and expression[0].opname == "LOAD_CONST"
    is_torch = lambda expression: bool(expression) and is_load(expression[0], "torch")
    return any(is_constant(expression) or is_torch(expression) for expression in (left, right))


# --- this version of Python ------------------------------------------------------------------------


def _probe(self: Any, x: Any, other: Any) -> Any:
    self.attribute = probe_global  # type: ignore[name-defined]  # noqa: F821
    if x.shape[0] > 4 and getattr(self, "constant", None):
        return self.method(x)
    if x.dim() == 2 or self.setting:
        x += 1
    return x


def _probe_of_names(self: Any, x: Any, name: Any) -> Any:
    return getattr(self, "a_" + name)(x)


def _understands_bytecode() -> bool:
    """Return True if the bytecode of this Python has the instructions that `code_use` looks for."""
    use, computed = code_use(_probe.__code__), code_use(_probe_of_names.__code__)
    return (
        use.global_names == {"probe_global", "getattr"}
        and use.attributes >= {"method", "constant", "shape", "setting"}
        and [description for description, _ in use.writes] == [".attribute"]
        and [method for method, _ in use.item_writes] == ["__iadd__"]
        and [line - _probe.__code__.co_firstlineno for line in find_decisions(_probe.__code__, FunctionInputs())[0]]
        == [2]
        and not use.reads_all_attributes
        and computed.reads_all_attributes
    )


UNDERSTANDS_BYTECODE = _understands_bytecode()


@cached_weakly
def digest(code: types.CodeType) -> str:
    """Return a hash of what a code object does, the same in every process of one Python version."""
    parts = [code.co_code, repr((code.co_names, code.co_varnames, code.co_freevars)).encode()]
    for constant in code.co_consts:
        # The `repr` of a set depends on the hash seed of the process.
        stable = sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
        parts.append((digest(constant) if isinstance(constant, types.CodeType) else repr(stable)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
