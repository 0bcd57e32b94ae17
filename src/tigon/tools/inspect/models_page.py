"""The page that says what is replaced in every type of causal language model: one row a type, its default config."""

import re
from dataclasses import dataclass

import tigon
from tigon.hf.report import Entry
from tigon.tools.inspect.build import NotInspected, default_config
from tigon.tools.inspect.inspection import GROUPS, inspect_config

__all__ = ["Row", "make_row", "model_types", "models_page", "table"]

HEAD = """\
# What `tigon.patch` replaces, by model type

Written by `tigon inspect --all --out docs/models.md` (or `make models`); do not edit. Tigon {tigon}, transformers
{transformers}. What other versions of transformers change: [versions](versions.md).

Tigon holds no list of models: it recognises what modules compute. This page is an outcome, not a list that Tigon reads:
each model was built from the defaults of its config class, in full size on the meta device, and patched. For any other
config, a checkpoint or remote code: `tigon inspect MODEL`.

The page counts every type for which this version of transformers has a causal language model. The tests count the 143
decoders of transformers 5.17: the others are encoders, decoders of encoder-decoders, and a few that are neither. Of
the 143, the tests build 139 small, from configs of their own (`tests/hf/tiny.py`), patch them, and compare the loss and
every gradient with the stock model's.

- A name in a cell is the op that replaces modules of that kind. Each was compared with the module when this page was
  made, and is again in every call of `tigon.patch`: bit for bit (experts and the loss, whose sums run in another order,
  to their last places).
- *left* names a module class that was recognised as of that kind and keeps its own code, and why (the number).
- A dash: no module of that kind was recognised.

{totals}
"""

NOT_BUILT = """
## Not built

The defaults of these types' config classes build no model; a config of a checkpoint may. The tests build six of these
small, from configs of their own (`tests/hf/tiny.py`), and patch them.

"""


@dataclass(frozen=True)
class Row:
    """One type: for each group, what replaces modules and what is left of which class, with the reason."""

    model_type: str
    model_class: str
    replaced: dict[str, list[str]]
    left: dict[str, list[tuple[str, str]]]


def model_types() -> list[str]:
    """Every type with a causal language model in the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _name(entry: Entry) -> str:
    """An op, and in the loss what is done to the logits."""
    name, *more = entry.detail.split(", ")
    return ", ".join([name.removesuffix(" in the head"), *more]) if entry.part == "loss" else name


def make_row(model_type: str) -> Row:
    """Inspect the type's default config.

    Raises:
        NotInspected: its default config builds no model.
    """
    inspection = inspect_config(default_config(model_type))
    groups = {group: inspection.entries(group) for group in GROUPS}
    return Row(
        model_type,
        inspection.model_class,
        {group: sorted({_name(e) for e in found if e.replaced}) for group, found in groups.items()},
        {group: sorted({(e.module, e.detail) for e in found if not e.replaced}) for group, found in groups.items()},
    )


def _totals(rows: list[Row], failed: dict[str, str]) -> str:
    lines = [
        f"Of {len(rows) + len(failed)} types, {len(rows)} can be built from the defaults of their config class.",
        "",
    ]
    lines += [
        "| | replaced | of these, partly | recognised, all left | none |",
        "|---|---|---|---|---|",
    ]
    for group in GROUPS:
        states = [(bool(row.replaced[group]), bool(row.left[group])) for row in rows]
        counts = [sum(r for r, _ in states), states.count((True, True)), states.count((False, True))]
        lines.append(f"| {group} | {' | '.join(map(str, [*counts, states.count((False, False))]))} |")
    every = sum(all(row.replaced.values()) for row in rows)
    some = sum(any(row.replaced.values()) for row in rows)
    return "\n".join([*lines, "", f"All are replaced in {every} types, at least one in {some}."])


def table(rows: list[Row]) -> str:
    """One row a type, and below it the reasons that the rows give by number."""
    reasons: dict[str, int] = {}
    lines = [f"| type | class | {' | '.join(GROUPS)} |", "|" + "---|" * (2 + len(GROUPS))]
    for row in rows:
        cells = []
        for group in GROUPS:
            words = [", ".join(row.replaced[group])] if row.replaced[group] else []
            words += [f"*left*: {cls} ({reasons.setdefault(why, len(reasons) + 1)})" for cls, why in row.left[group]]
            cells.append("; ".join(words) or "–")
        lines.append(f"| {row.model_type} | {row.model_class} | {' | '.join(cells)} |")
    lines += ["", "Why modules are left:", ""]
    return "\n".join([*lines, *(f"{number}. {_plain(why)}" for why, number in reasons.items())])


def _plain(text: str) -> str:
    """No Markdown in what names and messages hold."""
    return re.sub(r"([_*<`])", r"\\\1", text)


def models_page() -> str:
    """The page, in Markdown. One to four minutes for the two hundred types of transformers 5."""
    import transformers

    rows, failed = [], {}
    for model_type in model_types():
        try:
            rows.append(make_row(model_type))
        except NotInspected as error:
            failed[model_type] = str(error)
    page = HEAD.format(
        tigon=tigon.__version__,
        transformers=transformers.__version__,
        totals=_totals(rows, failed),
    )
    page += f"\n## By type\n\n{table(rows)}\n"
    if failed:
        page += NOT_BUILT
        page += "".join(f"- {_plain(name)}: {_plain(reason)}\n" for name, reason in failed.items())
    return page
