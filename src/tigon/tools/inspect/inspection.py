"""What `tigon.patch` does to one model: by module class, by part, as a table and as JSON."""

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

import tigon
from tigon.hf.report import Entry, Report
from tigon.tools.inspect.build import build, quietly

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["GROUPS", "Inspection", "inspect_config"]

# What a reader asks for, and the parts of a report that answer it.
GROUPS = {
    "norms": ("rms_norm", "layer_norm"),
    "MLPs and experts": ("glu", "relu2", "experts"),
    "rope": ("rope",),
    "fused statements": ("fused_statements",),
    "loss": ("loss",),
}


@dataclass(frozen=True)
class Inspection:
    """A model, patched on the meta device."""

    model_class: str
    model_type: str
    parameters: int
    head: str | None
    report: Report
    others: dict[str, int]  # classes of which nothing is recognised, with their numbers

    def entries(self, group: str) -> list[Entry]:
        """What was recognised as of a group."""
        return [entry for entry in self.report.entries if entry.part in GROUPS[group]]

    def coverage(self) -> dict[str, tuple[int, int]]:
        """By group: modules that are replaced, and modules that were recognised as of its kind."""
        count = lambda entries: sum(entry.count for entry in entries)
        return {g: (count(e for e in self.entries(g) if e.replaced), count(self.entries(g))) for g in GROUPS}

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        import transformers

        fields = ("part", "module", "count", "replaced", "detail", "names")
        return {
            "model": self.model_class,
            "model_type": self.model_type,
            "parameters": self.parameters,
            "head": self.head,
            "parts": [{name: getattr(entry, name) for name in fields} for entry in self.report.entries],
            "others": self.others,
            "coverage": {group: {"replaced": n, "found": m} for group, (n, m) in self.coverage().items()},
            "notes": self.report.notes,
            "versions": {"tigon": tigon.__version__, "transformers": transformers.__version__},
        }

    def print(self, console: "Console") -> None:
        """The table and what is below it."""
        from rich.markup import escape
        from rich.text import Text

        console.print(f"[bold]{self.model_class}[/] ({escape(self.model_type)}), {_size(self.parameters)} parameters\n")
        table = self.report.table()
        for name, count in self.others.items():
            table.add_row("", Text(name), f"{count:,}", "", style="dim")
        console.print(table)
        if self.others:
            console.print("Blank: no op of Tigon computes this class.", style="dim")
        covered = [
            f"{group} {n:,} of {m:,}" if m else f"{group} none found" for group, (n, m) in self.coverage().items()
        ]
        console.print(f"Replaced: {escape(', '.join(covered))}.")
        if self.head:
            console.print(f"Head: {escape(self.head)}.")
        for note in self.report.notes:
            console.print(f"Note: {escape(note)}.", style="yellow")


def _size(parameters: int) -> str:
    """Parameters as a person says it.

    >>> _size(70_553_706_496), _size(124_439_808), _size(5_000)
    ('70.6B', '124.4M', '5,000')
    """
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if parameters >= unit:
            return f"{parameters / unit:,.1f}{name}"
    return f"{parameters:,}"


def _head(model: nn.Module, report: Report) -> str | None:
    """The output layer, and what is done to its logits as far as that was learnt."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if head is None:
        return None
    name = next((name for name, module in model.named_modules() if module is head), "not a module of the model")
    weight = getattr(head, "weight", None)
    embeddings = model.get_input_embeddings()
    words = [type(head).__name__]
    if weight is not None:
        words += [f"{weight.shape[-1]:,} to {weight.shape[0]:,}"]
        words += ["tied to the embeddings" if weight is getattr(embeddings, "weight", None) else "weights of its own"]
    words += ["with bias"] if getattr(head, "bias", None) is not None else []
    loss = next((entry for entry in report.entries if entry.part == "loss"), None)
    if loss is not None:
        words += [f"{'loss' if loss.replaced else 'its loss stays stock'}: {loss.detail}"]
    return f"{name}, {', '.join(words)}"


def inspect_config(config: Any, *, trust_remote_code: bool = False) -> Inspection:
    """Build the model of a config on meta, patch it, and note what happened.

    Raises:
        NotInspected: there is no such model, or its constructor fails.
    """
    model, auto = build(config, trust_remote_code=trust_remote_code)
    with quietly():
        report = tigon.patch(model)
    if auto == "AutoModel":
        report.notes.append(f"transformers has no class with a language head for {config.model_type}: this is its body")
    patched = {name for entry in report.entries for name in entry.names}
    others = collections.Counter(type(module).__name__ for name, module in model.named_modules() if name not in patched)
    return Inspection(
        type(model).__name__,
        config.model_type,
        sum(parameter.numel() for parameter in model.parameters()),
        _head(model, report),
        report,
        dict(others.most_common()),
    )
