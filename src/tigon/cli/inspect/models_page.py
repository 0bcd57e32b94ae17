"""Write docs/models.md: a row for each type of causal language model shows what `tigon.patch` replaces in it."""

import re
from dataclasses import dataclass

import tigon
from tigon.cli.inspect.build import NotInspected, default_config
from tigon.cli.inspect.inspection import ACTIVATIONS, GROUPS, inspect_config
from tigon.hf.report import Entry
from tigon.hf.transformers_private import causal_lm_types

INTRODUCTION = """\
# What `tigon.patch` replaces, by model type

`tigon inspect --all --out docs/models.md` (or `make models`) writes this page; do not edit it. It was written with
Tigon {tigon} and transformers {transformers}. [Versions](versions.md) lists what other versions of transformers change.

Tigon has no list of models, because it recognises what modules compute. This page is a result, and Tigon does not read
it. Each model was built from the defaults of its config class, in full size on the meta device, and then patched. For
any other config, a checkpoint, or a model with its own code, run `tigon inspect MODEL`.

The page counts every type for which this version of transformers has a causal language model. The tests count the 143
decoders of transformers 5.17; the other types are encoders, decoders of encoder-decoders, and a few that are neither.
Of the 143, the tests build 139 small models from configs in `tests/hf/tiny.py`, patch them, and compare the loss and
every gradient with those of the stock model.

- A name in a cell is the op that replaces modules of this kind. The op was compared with the module when this page was
  written, and every call of `tigon.patch` compares them again, bit for bit. Experts and the loss compute their sums in
  another order, so these may differ in their last places.
- *unchanged* names a module class that resembles this kind but keeps its own code. The number leads to the reason.
- A dash means that no module resembles this kind.
- *MLPs and experts* counts only whole MLPs. *activations* counts modules that compute an activation by itself. In a
  type without a fused MLP these lie between linear layers that keep their own code. In the layers of other types an MLP
  of statements reads them, and they also stand in heads.

{totals}
"""

NOT_BUILT = """
## Not built

No model can be built from the defaults of these config classes; the config of a checkpoint may work. The tests build
six of these small, from configs in `tests/hf/tiny.py`, and patch them.

"""


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
    """Return the number of types, and for each group the number of types by what is replaced in them."""
    lines = [
        f"Of {len(rows) + len(failures)} types, {len(rows)} can be built from the defaults of their config class.",
        "",
    ]
    lines += [
        "| | replaced | of these, some modules unchanged | all modules unchanged | no such module |",
        "|---|---|---|---|---|",
    ]
    for group in GROUPS:
        states = [(bool(row.replaced[group]), bool(row.unchanged[group])) for row in rows]
        counts = [sum(r for r, _ in states), states.count((True, True)), states.count((False, True))]
        lines.append(f"| {group} | {' | '.join(map(str, [*counts, states.count((False, False))]))} |")
    # A model whose MLPs are all fused has no activations left to replace.
    all_groups = sum(all(ops for group, ops in row.replaced.items() if group != ACTIVATIONS) for row in rows)
    any_group = sum(any(row.replaced.values()) for row in rows)
    return "\n".join([*lines, "", f"All are replaced in {all_groups} types, at least one in {any_group}."])


def table(rows: list[TypeRow]) -> str:
    """Return the table of all types, and below it the numbered reasons."""
    reasons: dict[str, int] = {}
    lines = [f"| type | class | {' | '.join(GROUPS)} |", "|" + "---|" * (2 + len(GROUPS))]
    for row in rows:
        cells = []
        for group in GROUPS:
            words = [", ".join(row.replaced[group])] if row.replaced[group] else []
            words += [
                f"*unchanged*: {cls} ({reasons.setdefault(why, len(reasons) + 1)})" for cls, why in row.unchanged[group]
            ]
            cells.append("; ".join(words) or "–")
        lines.append(f"| {row.model_type} | {row.model_class} | {' | '.join(cells)} |")
    lines += ["", "These are the reasons why modules keep their code:", ""]
    return "\n".join([*lines, *(f"{number}. {_plain(why)}" for why, number in reasons.items())])


def _plain(text: str) -> str:
    """Return a name or a message in which no character is Markdown."""
    return re.sub(r"([_*<`])", r"\\\1", text)


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
        tigon=tigon.__version__,
        transformers=transformers.__version__,
        totals=_totals(rows, failures),
    )
    page += f"\n## By type\n\n{table(rows)}\n"
    if failures:
        page += NOT_BUILT
        page += "".join(f"- {_plain(name)}: {_plain(reason)}\n" for name, reason in failures.items())
    return page
