"""Patch one model on the meta device, and show the result by module class and by part, as a table or as JSON."""

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tigon
from tigon.cli.inspect.build import build, quietly
from tigon.hf.report import Entry, Report

if TYPE_CHECKING:
    from rich.console import Console

# Most types have no modules of these groups.
OCCASIONAL = ("activations", "recurrent layers")
# The table shows these groups of parts. The report lists the parts. Libraries add adapters to a model, so no config has
# them.
GROUPS = {
    "norms": ("rms_norm", "layer_norm"),
    "MLPs and experts": ("glu", "mlp", "experts"),
    # Activations that are modules. A type that has only these has no fused MLP.
    "activations": ("relu2", "gelu"),
    "rope": ("rope",),
    "recurrent layers": ("mixers",),
    "fused statements": ("fused_statements",),
    "loss": ("loss",),
}


@dataclass(frozen=True)
class Inspection:
    """The result of patching a model on the meta device."""

    model_class: str
    model_type: str
    parameters: int
    head: str | None
    report: Report
    # The number of modules of each class that no part recognised.
    others: dict[str, int]

    def entries(self, group: str) -> list[Entry]:
        """Return the entries of the report whose part belongs to a group."""
        return [entry for entry in self.report.entries if entry.part in GROUPS[group]]

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Return for each group the number of replaced modules, and the number of all modules that resemble it."""
        count = lambda entries: sum(entry.count for entry in entries)
        entries = {group: self.entries(group) for group in GROUPS}
        return {group: (count(e for e in part if e.replaced), count(part)) for group, part in entries.items()}

    def as_json(self) -> dict[str, Any]:
        import transformers

        fields = ("part", "module", "count", "replaced", "detail", "names")
        return {
            "model": self.model_class,
            "model_type": self.model_type,
            "parameters": self.parameters,
            "head": self.head,
            "parts": [{name: getattr(entry, name) for name in fields} for entry in self.report.entries],
            "others": self.others,
            "coverage": {
                group: {"replaced": replaced, "found": total} for group, (replaced, total) in self.coverage().items()
            },
            "notes": self.report.notes,
            "versions": {"tigon": tigon.__version__, "transformers": transformers.__version__},
        }

    def print(self, console: "Console") -> None:
        """Print the table, and sentences about coverage, the head and the notes of the report."""
        from rich.markup import escape
        from rich.text import Text

        console.print(f"[bold]{self.model_class}[/] ({escape(self.model_type)}), {_size(self.parameters)} parameters\n")
        table = self.report.table()
        for name, count in self.others.items():
            table.add_row("", Text(name), f"{count:,}", "", style="dim")
        console.print(table)
        if self.others:
            console.print("Blank: no op of Tigon computes this class.", style="dim")
        coverage = [
            f"{group} {replaced:,} of {total:,}" if total else f"{group} none recognised"
            for group, (replaced, total) in self.coverage().items()
            if total or group not in OCCASIONAL
        ]
        console.print(f"Replaced: {escape(', '.join(coverage))}.")
        if self.head:
            console.print(f"Head: {escape(self.head)}.")
        for note in self.report.notes:
            console.print(f"Note: {escape(note)}.", style="yellow")


def _size(parameters: int) -> str:
    """Return a number of parameters in words that are easy to read.

    >>> _size(70_553_706_496), _size(124_439_808), _size(5_000)
    ('70.6B', '124.4M', '5,000')
    """
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if parameters >= unit:
            return f"{parameters / unit:,.1f}{name}"
    return f"{parameters:,}"


def _describe_head(model: Any, report: Report) -> str | None:
    """Describe the output layer of a model, and what the report says about its loss; None if there is no such layer."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return None
    name = next((name for name, module in model.named_modules() if module is head), "not a module of the model")
    weight = getattr(head, "weight", None)
    embeddings = model.get_input_embeddings()
    words = [type(head).__name__]
    if weight is not None:
        words += [f"{weight.shape[-1]:,} to {weight.shape[0]:,}"]
        words += ["tied to the embeddings" if weight is getattr(embeddings, "weight", None) else "its own weights"]
    words += ["with bias"] if getattr(head, "bias", None) is not None else []
    loss = next((entry for entry in report.entries if entry.part == "loss"), None)
    if loss is not None:
        words += [f"{'loss' if loss.replaced else 'its loss stays stock'}: {loss.detail}"]
    return f"{name}, {', '.join(words)}"


def inspect_config(config: Any, *, trust_remote_code: bool = False) -> Inspection:
    """Build the model of a config on the meta device, patch it, and return the result."""
    model, auto_class = build(config, trust_remote_code=trust_remote_code)
    with quietly():
        report = tigon.patch(model)
    if auto_class == "AutoModel":
        report.notes.append(f"transformers has no class with a language head for {config.model_type}: this is its body")
    names_in_report = {name for entry in report.entries for name in entry.names}
    others = collections.Counter(
        type(module).__name__ for name, module in model.named_modules() if name not in names_in_report
    )
    size, head = sum(parameter.numel() for parameter in model.parameters()), _describe_head(model, report)
    return Inspection(type(model).__name__, config.model_type, size, head, report, dict(others.most_common()))
