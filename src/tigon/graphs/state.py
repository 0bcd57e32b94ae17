"""Everything that a captured call has read on the host, and would not read again when it is replayed.

A replay reads the values of tensors at their addresses. It does not see that a module has another tensor, mode,
setting, child, hook or forward than at the time of the capture. `ModelState` therefore records the attributes of all
modules and of their configurations, and compares them before each replay.
"""

import operator
from collections.abc import ItemsView, Iterator
from typing import Any

from torch import Tensor, nn

from tigon.recognition.replacement import Replacement
from tigon.runtime.compat.modules import HOOK_TABLES

_CONTAINERS = (dict, list, tuple, set)
# The tables of a module that are compared by their items.
_TABLES = ("_parameters", "_buffers", "_modules")


def _copy(x: Any) -> Any:
    """Return a copy of a container, and of the containers in it. Other objects are returned themselves."""
    if type(x) is dict:
        return {key: _copy(value) for key, value in x.items()}
    return type(x)(map(_copy, x)) if type(x) in _CONTAINERS else x


class ModelState:
    """The recorded state of a model.

    Each dict of attributes has a copy. Views of both are compared in C: an attribute is the same if it is the same
    object, or if it is equal, as numbers and containers may be.
    """

    def __init__(self, model: nn.Module) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.tensors = [*model.parameters(), *model.buffers()]
        self.facts = self._read_tensors()
        self.names, attributes = zip(*_attributes(model), strict=True)
        copies = [{k: _copy(x) for k, x in now.items() if k not in (*_TABLES, *HOOK_TABLES)} for now in attributes]
        self.copies: list[ItemsView] = [copy.items() for copy in copies]
        self.attributes: list[ItemsView] = [now.items() for now in attributes]
        tables = [table for module in model.modules() for table in map(vars(module).__getitem__, _TABLES)]
        self.copies += [dict(table).items() for table in tables]
        self.attributes += [table.items() for table in tables]
        # The number of items shows what was added. Hooks are compared by their number alone.
        self.sized = [
            *self.attributes,
            *(getattr(module, hooks) for module in model.modules() for hooks in HOOK_TABLES),
        ]
        self.sizes = [*map(len, self.sized)]
        self.replacements = [x for now in attributes for x in now.values() if isinstance(x, Replacement)]
        self.recipes = self._read_recipes()

    def _read_recipes(self) -> list[int]:
        return [id(replacement.recipe) for replacement in self.replacements]

    def _read_tensors(self) -> list[tuple]:
        """Return the facts about the tensors of the model that a graph depends on."""
        return [(x.data_ptr(), x.requires_grad, 0 if x.requires_grad else _version(x)) for x in self.tensors]

    def change(self) -> str | None:
        """Return what has changed since the capture, or None."""
        if self._read_tensors() != self.facts:
            return "a parameter or a buffer"
        if self._read_recipes() != self.recipes:
            return "a forward"
        try:
            if [*map(len, self.sized)] == self.sizes and all(map(operator.le, self.copies, self.attributes)):
                return None
        except Exception:
            # An object of another type may have no comparison.
            return "an attribute"
        return self._find_change()

    def _find_change(self) -> str:
        """Return the first attribute that has changed."""
        for i, (copy, now) in enumerate(zip(self.copies, self.attributes, strict=True)):
            changed = [key for key, value in copy if (key, value) not in now]
            if changed and i < len(self.names):
                return f"{self.names[i]}.{changed[0]}"
            if changed:
                return f"a child, a parameter or a buffer named {changed[0]}"
        return "the number of attributes, children or hooks"


def _attributes(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and the attributes of the modules of a model, and of their configurations."""
    configurations: dict[int, Any] = {}
    for name, module in model.named_modules():
        yield name or type(module).__name__, vars(module)
        if hasattr(config := vars(module).get("config"), "__dict__"):
            configurations[id(config)] = config
    for config in configurations.values():
        yield type(config).__name__, vars(config)


def _version(x: Tensor) -> int:
    """Return how often a frozen weight was changed in place, because Tigon may hold a copy of it in another format.

    The optimizer changes trained weights, and buffers may change in every step. Their values are read at each replay.
    """
    return x._version if isinstance(x, nn.Parameter) and not x.is_inference() else 0
