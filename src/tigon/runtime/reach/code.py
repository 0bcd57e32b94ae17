"""List the names that a function uses and the lines where it stores something, without running it.

Python itself lists the names of globals and attributes (`co_names`) and the constants (`co_consts`) of a code object.
Which instructions a code object contains shows whether it assigns attributes, indexes anything or has conditions.
Nothing follows which value an instruction computes. Only for `getattr`, the loads up to its call show whether the name
of the attribute is a constant.
"""

import collections
import dis
import hashlib
import itertools
import types
from collections.abc import Iterator
from typing import NamedTuple

from tigon.runtime.reach.known_names import COMPARISONS, CONVERSIONS, GETTERS, MUTATORS, READERS, SETTERS
from tigon.runtime.weak_cache import cached_weakly

CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
_CONDITIONS = ("COMPARE_OP", "IS_OP", "CONTAINS_OP", "UNARY_NOT")


class CodeFacts(NamedTuple):
    """The names that one function uses, including the functions that it defines, and its lasting writes."""

    global_names: frozenset[str]
    # Names of attributes that the code loads or stores, and of special methods that its comparisons and texts call.
    attributes: frozenset[str]
    # Strings that may be names of attributes or keys of a table.
    strings: frozenset[str]
    # True if the function may read attributes whose names it computes.
    computes_names: bool
    # True if the function looks up attributes that may be missing.
    may_miss: bool
    imports: frozenset[str]
    # A description and the line of each assignment to an attribute, a global or a variable of an outer function.
    writes: tuple[tuple[str, int], ...]
    # Methods that change a container, and the line of the first one. `x[i] = y` stands for `__setitem__`.
    item_writes: tuple[tuple[str, int], ...]
    stored_names: frozenset[str]
    # True if the function looks at the type of an object.
    tests_types: bool
    # True if the function compares the identity of objects by `is`, and not only with None.
    tests_identity: bool
    # True if the function catches exceptions by `try`. `with` does not count.
    catches_errors: bool
    # True if the function computes a condition or jumps on one.
    has_conditions: bool


@cached_weakly
def code_facts(code: types.CodeType) -> CodeFacts:
    """Return the facts about a code object and the code objects of functions that it defines."""
    codes = list(nested_codes(code))
    strings = frozenset(c for each in codes for c in each.co_consts if isinstance(c, str) and c.isidentifier())
    names = frozenset(name for each in codes for name in each.co_names)
    # With such a function, any text may be the name of an attribute.
    attribute_texts = strings if GETTERS & names else frozenset()
    names |= attribute_texts
    getters = [getter for each in codes for getter in _getters(each)]
    steps = [(each, step) for each in codes for step in dis.get_instructions(each)]
    count = collections.Counter(step.opname for _, step in steps)
    operations = count.keys()
    loads_global = lambda step: step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    global_names = frozenset(step.argval for _, step in steps if loads_global(step))
    loaded = frozenset(s.argval for _, s in steps if not loads_global(s) and s.opcode in dis.hasname)
    makes_text = any(o.startswith("FORMAT_") for o in operations) or {"str", "repr", "format"} & names
    special = CONVERSIONS if makes_text or any(s.argrepr in ("%", "%=") for _, s in steps) else frozenset()
    special |= COMPARISONS if {"COMPARE_OP", "CONTAINS_OP"} & operations else frozenset()
    writes, item_writes, line = [], [], code.co_firstlineno
    for each, step in steps:
        line = (step.positions and step.positions.lineno) or line
        name, operation = step.argval, step.opname
        if operation in ("STORE_ATTR", "DELETE_ATTR") and each.co_name not in CONSTRUCTORS:
            writes.append((f".{name}", line))
        elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            writes.append((f"the global {name}", line))
        elif operation in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
            writes.append((f"{name} of the function around it", line))
        elif operation in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            item_writes.append(("__setitem__", line))
        elif operation == "BINARY_OP" and step.argrepr in ("+=", "*=", "|=", "&=", "-=", "^="):
            item_writes.append(("an operator in place", line))
        elif isinstance(name, str) and operation.startswith("LOAD_") and operation != "LOAD_CONST":
            if name in SETTERS:
                writes.append((f"attributes, by {name}", line))
            elif name in MUTATORS:
                item_writes.append((name, line))
    return CodeFacts(
        global_names=global_names,
        attributes=loaded | attribute_texts | special,
        strings=strings,
        computes_names=bool(READERS & names) or "MATCH_CLASS" in operations or any(c for c, _ in getters),
        may_miss=bool(GETTERS & loaded) or any(m for _, m in getters),
        imports=frozenset(step.argval for _, step in steps if step.opname == "IMPORT_NAME"),
        writes=tuple(writes),
        item_writes=tuple(item_writes),
        stored_names=frozenset(step.argval for _, step in steps if step.opname in ("STORE_ATTR", "DELETE_ATTR")),
        tests_types=bool(names & {"type", "isinstance", "issubclass", "__class__"}) or "MATCH_CLASS" in operations,
        tests_identity="IS_OP" in operations,
        catches_errors=count["PUSH_EXC_INFO"] > count["WITH_EXCEPT_START"],
        has_conditions=any(o in _CONDITIONS or ("JUMP" in o and "IF" in o) for o in operations),
    )


def _getters(code: types.CodeType) -> Iterator[tuple[bool, bool]]:
    """Yield for each use of a function such as `getattr` whether it may compute the name, and whether it may find no
    attribute. A constant name is the second value that is loaded between the function and its call."""
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("CACHE", "PRECALL", "PUSH_NULL", "LOAD_ATTR")]
    for i, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in GETTERS:
            arguments = list(itertools.takewhile(lambda s: s.opname.startswith("LOAD_"), steps[i + 1 :]))
            call = steps[i + 1 + len(arguments)]
            is_simple = call.opname == "CALL" and call.arg == len(arguments) > 1
            computes_name = not is_simple or arguments[1].opname != "LOAD_CONST"
            yield computes_name, step.argval != "getattr" or not is_simple or len(arguments) > 2


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


@cached_weakly
def digest(code: types.CodeType) -> str:
    """Return a hash of what a code object does, the same in every process of one Python version."""
    parts = [code.co_code, repr((code.co_names, code.co_varnames, code.co_freevars)).encode()]
    for constant in code.co_consts:
        # The `repr` of a set depends on the hash seed of the process.
        stable = sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
        parts.append((digest(constant) if isinstance(constant, types.CodeType) else repr(stable)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
