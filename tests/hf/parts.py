"""Record the recipes that `tigon.patch` installs in the tiny model of every decoder type, and its reasons for the rest.

`make models` writes the record, parts.json. The test of each type compares its model with the record, and the numbers
in README.md and docs/patching.md are compared with its totals, so no test builds every type to count.
"""

import json
from collections import Counter
from pathlib import Path

import tigon
from hf.tiny import TYPES, WITHOUT, tiny_model

RECORD = Path(__file__).with_name("parts.json")
# The version of transformers in constraints.txt, with which the record was written. Older versions write some models in
# another way.
RECORDED_VERSION = "5.17.0"
BUILT = [name for name in TYPES if name not in WITHOUT]
FUSED_MLPS = {"glu", "mlp", "experts"}
# What the tiny model of one type shows: "replaced" lists each part with its recipe, as "glu: swiglu", and "left alone"
# lists each part with its reason.
Kinds = dict[str, list[str]]


def recorded_kinds() -> dict[str, Kinds]:
    """Return the kinds of recipes and reasons by model type, as they were when the record was written."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def kinds_of(report: tigon.hf.Report) -> Kinds:
    """Return the kinds of recipes and reasons in a report, in alphabetical order.

    Parentheses in a reason hold the names of attributes and the lines of a file, so they are no part of its kind.
    """
    return {
        "replaced": sorted({f"{entry.part}: {entry.detail}" for entry in report.replaced}),
        "left alone": sorted({f"{entry.part}: {entry.detail.partition(' (')[0]}" for entry in report.left_alone}),
    }


def parts_of(kinds: Kinds) -> set[str]:
    """Return the parts that are replaced."""
    return {kind.partition(": ")[0] for kind in kinds["replaced"]}


def totals() -> Counter[str]:
    """Count the types that have each part, those with a fused MLP or experts, and those with all four kinds."""
    counts: Counter[str] = Counter()
    for parts in map(parts_of, recorded_kinds().values()):
        has_mlp = bool(parts & FUSED_MLPS)
        counts.update(parts)
        counts["mlp or experts"] += has_mlp
        counts["all four"] += has_mlp and {"rms_norm", "rope", "loss"} <= parts
    return counts


if __name__ == "__main__":
    RECORD.write_text(
        json.dumps({name: kinds_of(tigon.patch(tiny_model(name))) for name in BUILT}, indent=1) + "\n", encoding="utf-8"
    )
    print(RECORD, dict(totals()))
