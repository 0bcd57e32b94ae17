"""Read from the bytecode of a function which names it uses, what it writes, and on which values it decides.

Nothing is run. `code_use` follows the instructions of one function and of the functions that are defined in it. If the
instructions do not show which attribute is read, as in `getattr(x, prefix + "scale")`, every attribute counts as read.
"""

import dis
import functools
import hashlib
import itertools
import types
from dataclasses import dataclass

from tigon.runtime.known_names import MUTATORS, PROBED, PROBED_FUNCTIONS, SETTERS

__all__ = ["UNDERSTANDS_BYTECODE", "CodeUse", "code_use", "digest"]

GETTERS = frozenset(("getattr", "hasattr", "attrgetter", "delattr", "setattr"))
IN_PLACE = {"+=": "__iadd__", "*=": "__imul__", "|=": "__ior__", "&=": "__iand__", "-=": "__isub__", "^=": "__ixor__"}


@dataclass(frozen=True)
class CodeUse:
    """The names that one code object uses, its writes to what outlives a call, and its conditions on arguments."""

    global_names: frozenset[str]
    attributes: frozenset[str]
    stored: frozenset[str]
    # Chains of attributes: `torch.nn.functional.silu` gives ("torch", "nn", "functional", "silu").
    chains: frozenset[tuple[str, ...]]
    strings: frozenset[str]
    # Names that may be missing from an object, because the code may look them up with `getattr` or `hasattr`.
    optional: frozenset[str]
    imports: frozenset[str]
    # Each write is a description and a line.
    writes: tuple[tuple[str, int], ...]
    # Writes that matter only if the code can reach a container that has such a method: `x[i] = y`, `x.append(y)`.
    item_writes: tuple[tuple[str, int], ...]
    # Lines of conditions that depend on more of an argument than its type or its number of dimensions.
    decisions: tuple[int, ...]
    # This is True if the code uses `vars`, `dir`, `__dict__`, or `getattr` with a computed name.
    reads_all_attributes: bool


@functools.cache
def code_use(code: types.CodeType) -> CodeUse:
    """Read the bytecode of a function and of the functions that it defines."""
    global_names, attributes, chains, strings, stored, writes, item_writes = set(), set(), set(), set(), set(), [], []
    optional, imports, decisions, reads_all = set(), set(), [], False
    pending = [code]
    for each in pending:
        line, chain = each.co_firstlineno, ()
        steps = list(dis.get_instructions(each))
        for number, step in enumerate(steps):
            line = _line(step) or line
            name, operation = step.argval, step.opname
            if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                global_names.add(name)
                chain = (name,)
                reads_all |= name in GETTERS and not _is_called_with_constant(steps, number)
            elif operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                attributes.add(name)
                chain = (*chain, name) if chain else ()
                chains |= {chain} if chain else set()
                if name in MUTATORS:
                    item_writes.append((name, line))
                if name in SETTERS:
                    writes.append((f"attributes, by {name}", line))
                reads_all |= name in ("__getattribute__", "__getattr__", "attrgetter")
            elif operation in ("STORE_ATTR", "DELETE_ATTR"):
                writes.append((f".{name}", line))
                stored.add(name)
            elif operation == "IMPORT_NAME":
                imports.add(name)
            elif operation == "IMPORT_FROM":
                attributes.add(name)
            elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                writes.append((f"the global {name}", line))
            elif operation in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
                writes.append((f"{name} of the function around it", line))
            elif operation in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
                item_writes.append(("__setitem__", line))
            elif operation == "BINARY_OP" and step.argrepr in IN_PLACE:
                item_writes.append((IN_PLACE[step.argrepr], line))
            chain = chain if operation.startswith("LOAD_") else ()
        if "super" in global_names:
            attributes.add("super")
        constants = {c for c in each.co_consts if isinstance(c, str) and c.isidentifier()}
        strings |= constants
        if GETTERS & {*each.co_names}:
            attributes |= constants
            optional |= constants
        decisions += _decisions(each, steps)
        pending += [c for c in each.co_consts if isinstance(c, types.CodeType)]
    return CodeUse(
        frozenset(global_names),
        frozenset(attributes),
        frozenset(stored),
        frozenset(chains),
        frozenset(strings),
        frozenset(optional),
        frozenset(imports),
        tuple(writes),
        tuple(item_writes),
        tuple(decisions),
        reads_all or bool({"vars", "__dict__", "dir"} & (global_names | attributes)),
    )


def _line(step: dis.Instruction) -> int | None:
    positions = getattr(step, "positions", None)
    return positions.lineno if positions is not None else None


# --- the stack -------------------------------------------------------------------------------------

# A call begins with this instruction, which is the first that removes the arguments from the stack.
CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"


def _stack_effect(step: dis.Instruction) -> int:
    """Return the number of values that an instruction adds to the stack if it does not jump."""
    return dis.stack_effect(step.opcode, step.arg, jump=False)


def _is_jump(step: dis.Instruction) -> bool:
    return step.opcode in dis.hasjrel or step.opcode in dis.hasjabs


def _is_called_with_constant(steps: list[dis.Instruction], number: int) -> bool:
    """Return True if the function that this instruction loads is called with a constant as its second argument.

    The depth of the stack above the function shows which call belongs to it. After a jump the result is False.
    """
    depth = 0
    for i in range(number + 1, len(steps)):
        step = steps[i]
        if step.opname == "PUSH_NULL" and i == number + 1:
            continue
        if step.opname == CALL and depth == step.arg:
            end = i
            for _ in range(depth - 2):
                end -= len(_find_operand(steps, end))
            second = _find_operand(steps, end)
            return depth >= 2 and len(second) == 1 and second[0].opname == "LOAD_CONST"
        depth += _stack_effect(step)
        if _is_jump(step) or depth < 0:
            return False
    return False


def _find_operand(steps: list[dis.Instruction], end: int) -> list[dis.Instruction]:
    """Return the instructions that compute the value on top of the stack before instruction `end`.

    The list is empty if several paths lead to the value, as in a loop or in `a if b else c`.
    """
    total = 0
    for start in range(end - 1, -1, -1):
        if _is_jump(steps[start]):
            break
        total += _stack_effect(steps[start])
        if total == 1 and steps[start].opname.startswith("LOAD_"):
            return steps[start:end]
    return []


# --- decisions -------------------------------------------------------------------------------------


def _depends(part: list[dis.Instruction], local: set[str]) -> bool:
    """Return True if an expression depends on one of these variables in a way that the probes do not cover.

    An expression whose instructions were not found counts as dependent.
    """
    if any(step.opname == "LOAD_GLOBAL" and step.argval in PROBED_FUNCTIONS for step in part):
        return False
    for step, following in itertools.zip_longest(part, part[1:]):
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME")):
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            probed = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
            if local & {*names} and not (probed and following.argval in PROBED):
                return True
    return not part


def _decisions(code: types.CodeType, steps: list[dis.Instruction]) -> list[int]:
    """Return the lines of conditions that depend on an argument other than `self`, or on a value computed from one."""
    count = code.co_argcount + code.co_kwonlyargcount
    arguments = code.co_varnames[: count + bool(code.co_flags & 4) + bool(code.co_flags & 8)]
    dependent = {*arguments} - ({"self"} if arguments[:1] == ("self",) else set())
    stores = [i for i, step in enumerate(steps) if step.opname.startswith(("STORE_FAST", "STORE_DEREF"))]
    while True:
        with_stores = set(dependent)
        for i in stores:
            if _depends(_find_operand(steps, i), dependent):
                argval = steps[i].argval
                with_stores |= {*argval} if isinstance(argval, tuple) else {argval}
        if with_stores == dependent:
            break
        dependent = with_stores
    lines, line = [], code.co_firstlineno
    for i, step in enumerate(steps):
        line = _line(step) or line
        ends_with_block = any(s.opname == "WITH_EXCEPT_START" for s in steps[max(i - 2, 0) : i])
        if "JUMP" in step.opname and "IF" in step.opname and "NONE" not in step.opname and not ends_with_block:
            part = _find_operand(steps, i)
            is_none = bool(part) and part[-1].opname == "IS_OP"
            if not is_none and _depends(part, dependent):
                lines.append(line)
    return lines


# --- this version of Python ------------------------------------------------------------------------


def _probe(self, x, other):
    self.attribute = probe_global  # noqa: F821
    if x.shape[0] > 4 and getattr(self, "constant", None):
        return self.method(x)
    if x.dim() == 2 or self.setting:
        x += 1
    return x


def _probe_of_names(self, x, name):
    return getattr(self, "a_" + name)(x)


def _understands_bytecode() -> bool:
    """Return True if the bytecode of this Python has the instructions that `code_use` looks for."""
    use, computed = code_use(_probe.__code__), code_use(_probe_of_names.__code__)
    return (
        use.global_names == {"probe_global", "getattr"}
        and use.attributes >= {"method", "constant", "shape", "setting"}
        and [what for what, _ in use.writes] == [".attribute"]
        and [what for what, _ in use.item_writes] == ["__iadd__"]
        and [line - _probe.__code__.co_firstlineno for line in use.decisions] == [2]
        and not use.reads_all_attributes
        and computed.reads_all_attributes
    )


UNDERSTANDS_BYTECODE = _understands_bytecode()


@functools.cache
def digest(code: types.CodeType) -> str:
    """Return a hash of what a code object does, the same in every process of one Python version."""
    parts = [code.co_code, repr((code.co_names, code.co_varnames, code.co_freevars)).encode()]
    for constant in code.co_consts:
        # The `repr` of a set depends on the hash seed of the process.
        stable = sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
        parts.append((digest(constant) if isinstance(constant, types.CodeType) else repr(stable)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
