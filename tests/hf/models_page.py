"""Write docs/models.md (`python -m hf.models_page`): what `tigon.patch` replaces in each type of causal LM."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import tigon
from tigon.cli.inspect.build import NotInspected, default_config
from tigon.cli.inspect.inspection import GROUPS, OCCASIONAL, inspect_config
from tigon.hf.report import Entry

INTRODUCTION = """\
# What `tigon.patch` replaces, by model type

`make models` writes this page; do not edit it. It was written with Tigon {tigon} and transformers {transformers};
[other versions](compatibility.md#versions) differ in a few types.

Tigon has no list of models, because it recognises what modules compute. This page is a result, and Tigon does not read
it. Each model was built from the defaults of its config class, in full size on the meta device, and then patched. For
any other config, a checkpoint, or a model with its own code, run `tigon inspect MODEL`, which also names the ops and
prints each reason in full. Of the 143 decoders among these types, the tests train the 139 that can be built small.

- ✓: an op replaces the modules of this kind, or the statements.
- A number: modules that resemble this kind keep their code, for the [reason](#reasons) of this number. With a ✓, only
  some of the modules do.
- An empty cell: no module resembles this kind.
- *MLPs* are whole MLPs, with or without a gate. *Activations* are modules that compute an activation by itself.
  *Mixers* are recurrent layers. *Statements* are [fused statements](patching.md#which-modules-are-replaced).

{totals}
"""

NOT_BUILT = """
## Not built

No model can be built from the defaults of these config classes; the config of a checkpoint may work, and
`tigon inspect TYPE` prints the reason. The tests build six of these small, from configs in `tests/hf/tiny.py`:
"""

# The columns of the table. The MLPs of a type are divided into experts and others.
COLUMNS = ("norms", "MLPs", "experts", "activations", "rope", "mixers", "statements", "loss")


@dataclass(frozen=True)
class TypeRow:
    """The row of one model type.

    Attributes:
        replaced: For each group, the ops that replace modules.
        unchanged: For each group, the classes of modules that keep their code, with the reasons.
    """

    model_type: str
    model_class: str
    replaced: dict[str, list[str]]
    unchanged: dict[str, list[tuple[str, str]]]


def _op_names(entry: Entry, group: str) -> list[str]:
    """Return the ops of an entry. For a loss, add what the model does to its logits."""
    name, *more = entry.detail.split(", ")
    if entry.part == "loss":
        return [", ".join([name.removesuffix(" in the head"), *more])]
    if entry.part != "fused_statements":
        return [name]
    # The MLP among the statements of a layer is counted with the MLPs.
    return ["mlp"] if group == "MLPs and experts" else [word for word in (name, *more) if word != "MLP"]


def make_row(model_type: str) -> TypeRow:
    """Inspect the type's default config.

    Raises:
        NotInspected: No model can be built from this config.
    """
    inspection = inspect_config(default_config(model_type))
    groups = {group: inspection.entries(group) for group in GROUPS}
    return TypeRow(
        model_type,
        inspection.model_class,
        {
            group: sorted({name for e in entries if e.replaced for name in _op_names(e, group)})
            for group, entries in groups.items()
        },
        {group: sorted({(e.module, e.detail) for e in entries if not e.replaced}) for group, entries in groups.items()},
    )


def _totals(rows: list[TypeRow], failures: dict[str, str]) -> str:
    """Return the number of types, and for each group the number of types in which modules of it are replaced."""
    counts = ", ".join(f"{group} in {sum(bool(row.replaced[group]) for row in rows)}" for group in GROUPS)
    # A model whose MLPs are all fused has no activations left to replace.
    all_groups = sum(all(ops for group, ops in row.replaced.items() if group not in OCCASIONAL) for row in rows)
    any_group = sum(any(row.replaced.values()) for row in rows)
    text = (
        f"Of {len(rows) + len(failures)} types, {len(rows)} can be built from the defaults of their config class. "
        f"Replaced are {counts}. All kinds but {' and '.join(OCCASIONAL)} are replaced in {all_groups} types, at "
        f"least one in {any_group}."
    )
    return textwrap.fill(text, 120)


def _cells(row: TypeRow, reasons: dict[str, list[str]]) -> list[str]:
    """Return the cells of a type, one for each column, and add its modules that keep their code to the reasons."""
    cells = []
    for group in GROUPS:
        numbers = set()
        for module, detail in row.unchanged[group]:
            # Parentheses hold the names of attributes, the lines of a file, or an exception.
            why = detail.partition(" (")[0]
            # The class of a whole model would repeat the name of the type.
            reasons.setdefault(why, []).append(row.model_type if group == "loss" else f"{module} of {row.model_type}")
            numbers.add(list(reasons).index(why) + 1)
        kinds = [bool(row.replaced[group])]
        if group == "MLPs and experts":
            kinds = [any(op != "moe_mlp" for op in row.replaced[group]), "moe_mlp" in row.replaced[group]]
        marks = ["✓" if replaced else "" for replaced in kinds]
        marks[0] = " ".join([mark for mark in marks[:1] if mark] + [str(number) for number in sorted(numbers)])
        cells += marks
    return cells


def table(rows: list[TypeRow]) -> str:
    """Return the table of all types, and below it the numbered reasons with the modules that they are about."""
    reasons: dict[str, list[str]] = {}
    lines = [f"|type|{'|'.join(COLUMNS)}|", "|---|" + ":-:|" * len(COLUMNS)]
    lines += [f"|{row.model_type}|{'|'.join(_cells(row, reasons))}|" for row in rows]
    lines += ["", "## Reasons", "", "Modules keep their code for these reasons:", ""]
    return "\n".join(
        [
            *lines,
            *(
                f"{number}. {_plain(why)}: {', '.join(map(_plain, dict.fromkeys(modules)))}"
                for number, (why, modules) in enumerate(reasons.items(), 1)
            ),
        ]
    )


def _plain(text: str) -> str:
    """Return a name or a message in which no character is Markdown."""
    return re.sub(r"([_*<`])", r"\\\1", text)


def causal_lm_types() -> list[str]:
    """Return every model type that has a causal language model, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def models_page() -> str:
    """Return the page in Markdown. The two hundred types of transformers 5 take one to four minutes."""
    import transformers

    rows: list[TypeRow] = []
    failures: dict[str, str] = {}
    for model_type in causal_lm_types():
        try:
            rows.append(make_row(model_type))
        except NotInspected as error:
            failures[model_type] = str(error)
    page = INTRODUCTION.format(
        tigon=tigon.__version__, transformers=transformers.__version__, totals=_totals(rows, failures)
    )
    page += f"\n## By type\n\n{table(rows)}\n"
    if failures:
        page += f"{NOT_BUILT}{', '.join(map(_plain, failures))}.\n"
    return page


if __name__ == "__main__":
    page_file = Path(__file__).parents[2] / "docs" / "models.md"
    page_file.write_text(models_page(), encoding="utf-8")
