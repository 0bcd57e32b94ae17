"""The report of `tigon.patch`: which modules it replaced, which it left alone, and why."""

import dataclasses
import difflib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import nn

from tigon.graphs.forward import GraphRecord
from tigon.recognition.parts.fp8 import copies_of
from tigon.recognition.replacement import find_replacement

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class Entry:
    """Modules of one class that were replaced by the same recipe, or left alone for the same reason."""

    # A key of `tigon.hf.parts.PARTS`, or "fp8".
    part: str
    # The name of the class.
    module: str
    replaced: bool
    # The recipe, or the reason why there is none.
    detail: str
    names: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Outcome:
    """The text of `report.why` about one module and one part."""

    part: str
    text: str
    lines: tuple[str, ...] = ()


@dataclass
class ModuleOutcomes:
    """The text of `report.why` about one module."""

    # The name of the class.
    module: str
    parts: list[Outcome] = field(default_factory=list)


@dataclass
class Report:
    """The outcome of `tigon.patch`.

    `bool(report)` is True if a module was replaced, and `len(report)` is the number of replaced modules. After
    `report.restore()`, they are False and 0, the list of entries is empty, and the title says that the patch was
    undone.

    Example:
        >>> report = tigon.patch(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)))
        >>> len(report)
        1
        >>> print(report)
        Sequential: 1 modules patched
        part        module     count  now
        ----------  ---------  -----  ----------
        layer_norm  LayerNorm  1      layer_norm
        >>> report.restore()
        >>> print(report)
        Sequential: restored, 1 modules patched before
    """

    model: str
    entries: list[Entry] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    outcomes: dict[str, ModuleOutcomes] = field(default_factory=dict, repr=False)
    # The title of the report if nothing was replaced.
    empty: str = field(default="nothing patched", repr=False)
    # The model that was patched; None for a report about a class.
    patched: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    # A function that returns the note about the memory level that the model has now, or None if there is no note.
    describe_level: Callable[[], str | None] | None = field(default=None, repr=False, compare=False)
    graphs: GraphRecord | None = field(default=None, compare=False)
    _level_note: str | None = field(default=None, repr=False, compare=False)
    # The progress of `restore`: "" before it, "interrupted" after an error in it, "restored" after it.
    state: Literal["", "interrupted", "restored"] = ""

    @property
    def replaced(self) -> list[Entry]:
        """The entries of modules that were replaced."""
        return [entry for entry in self.entries if entry.replaced]

    @property
    def left_alone(self) -> list[Entry]:
        """The entries of modules that resemble what an op computes, but keep their own code."""
        return [entry for entry in self.entries if not entry.replaced]

    @property
    def notes(self) -> list[str]:
        """The sentences below the table. The note about the memory level is computed anew each time they are read."""
        if self.describe_level is not None:
            note = self.describe_level()
            # Behind the last note, the slice is empty.
            i = next((i for i, text in enumerate(self._notes) if text == self._level_note), len(self._notes))
            self._notes[i : i + 1] = [] if note is None else [note]
            self._level_note = note
        return self._notes

    def why(self, name: str) -> str:
        """Say for any module of the model which parts were tried, and why each of them replaces it or does not.

        Where the module was compared with candidates, the text names the nearest candidate, the first case that differs
        (dtypes, shapes, mode) and the largest difference, also relative to the largest value of the module.

        Args:
            name: The name of a module in `model.named_modules()`; "" is the model itself.

        Raises:
            ValueError: The model has no module of this name.

        Example:
            >>> report = tigon.patch(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)), glu=False)
            >>> print(report.why("0").splitlines()[2])
            layer_norm        replaced: layer_norm
        """
        if name not in self.outcomes:
            nearest = ", ".join(map(repr, difflib.get_close_matches(str(name), self.outcomes, cutoff=0.0)))
            raise ValueError(f"report.why: {self.model} has no module {name!r}; nearest names: {nearest or 'none'}")
        module = self.outcomes[name]
        lines = [f"{name or 'the model'} ({module.module})"]
        if not module.parts:
            lines.append("no part was tried: the module was patched before, or no part was requested")
        width = max([len(outcome.part) for outcome in module.parts], default=0)
        before = "before restore(): " if self.state == "restored" else ""
        for outcome in module.parts:
            texts = [f"{before}{outcome.text}", *outcome.lines]
            names = [outcome.part, *[""] * len(outcome.lines)]
            lines += [f"{part:<{width}}  {text}" for part, text in zip(names, texts, strict=True)]
        return "\n".join(lines)

    def restore(self) -> None:
        """Undo this patch exactly; a second call does nothing. After an error, a call continues where it happened."""
        if not self.undo:
            return
        self.state = "interrupted"
        while self.undo:
            self.undo[-1]()
            self.undo.pop()
        self.empty = f"restored, {len(self):,} modules patched before"
        # New lists, because the report of a model may share its lists with that of a model type.
        self.state, self.entries, self.describe_level = "restored", [], None
        self._notes = ["models that were built before stay patched"] if self.patched is None else []

    def clear_fp8(self, model: nn.Module | None = None) -> None:
        """Free the FP8 copies of all weights; the next call of each layer makes new ones.

        Call it after a write that Tigon cannot see: one through `weight.data` to a frozen weight, if no optimizer steps
        before the next call. It also frees the memory of the copies.

        Args:
            model: A copy of the patched model, or any model with layers in FP8. None is the patched model.
        """
        if model is None:
            model = None if self.patched is None else self.patched()
        for module in () if model is None else model.modules():
            copies = copies_of(getattr(find_replacement(module), "recipe", None))
            if copies is not None:
                copies.clear()

    def record(self, part: str, module: nn.Module, replaced: bool, detail: str, name: str) -> None:
        """Add the module `name` to the table and to the texts of `why`."""
        kind = type(module).__name__
        self.add(part, kind, replaced, detail, name)
        outcome = Outcome(part, f"{'replaced' if replaced else 'left alone'}: {detail}")
        self.outcomes.setdefault(name, ModuleOutcomes(kind)).parts.append(outcome)

    def add(self, part: str, module: str, replaced: bool, detail: str, name: str) -> None:
        """Add the module `name` to the entry that it belongs to."""
        new = Entry(part, module, replaced, detail)
        entry = next((e for e in self.entries if dataclasses.replace(e, names=[]) == new), new)
        if entry is new:
            self.entries.append(new)
        entry.names.append(name)

    def take_notes(self, other: "Report") -> None:
        self._notes, self._level_note, self.describe_level = other.notes, other._level_note, other.describe_level

    def __len__(self) -> int:
        return sum(entry.count for entry in self.replaced)

    def __bool__(self) -> bool:
        return bool(self.replaced)

    def _rows(self) -> list[tuple[str, ...]]:
        describe = lambda entry: entry.detail if entry.replaced else f"left alone: {entry.detail}"
        return [(e.part, e.module, f"{e.count:,}", describe(e)) for e in [*self.replaced, *self.left_alone]]

    def _title(self) -> str:
        suffix = ", but restore() stopped at an error: call it again" if self.state == "interrupted" else ""
        return f"{self.model}: {f'{len(self):,} modules patched' if self else self.empty}{suffix}"

    def __str__(self) -> str:
        rows = [COLUMNS, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(
            [self._title(), *(lines if self.entries else []), *(f"note: {note}" for note in self._footnotes())]
        )

    def _footnotes(self) -> list[str]:
        return [*self.notes, *([] if self.graphs is None else [str(self.graphs)])]

    def table(self) -> "Table":
        """Return the entries as a table of rich."""
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for column in COLUMNS:
            table.add_column(column, justify="right" if column == "count" else "left", overflow="fold")
        for row in self._rows():
            table.add_row(*map(Text, row), style="yellow" if row[-1].startswith("left alone") else None)
        return table

    def __rich__(self) -> object:
        from rich.console import Group
        from rich.text import Text

        table = self.table()
        table.title, table.title_justify = self._title(), "left"
        notes = self._footnotes()
        return Group(table, *(Text(f"note: {note}") for note in notes)) if notes else table


COLUMNS = ("part", "module", "count", "now")
