"""Record the parts that `tigon.patch` replaces in the tiny model of every decoder type.

`make models` writes the record, parts.json. The test of each type compares its model with the record, and the numbers
in README.md and docs/patching.md are compared with its totals, so no test builds every type to count.
"""

import json
from collections import Counter
from pathlib import Path

import tigon
from hf.tiny import TYPES, WITHOUT, tiny_model
from tigon.tools.inspect.inspection import has_mlp_statements

RECORD = Path(__file__).with_name("parts.json")
BUILT = [name for name in TYPES if name not in WITHOUT]
FUSED_MLPS = {"glu", "mlp", "experts"}


def recorded_parts() -> dict[str, list[str]]:
    """Return the parts by model type, as they were when the record was written."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def replaced_parts(model_type: str) -> list[str]:
    """Return the parts that are replaced in the tiny model of a type, in alphabetical order.

    An MLP whose statements one op computes counts as an MLP, although its layer is listed with the fused statements.
    """
    entries = tigon.patch(tiny_model(model_type)).replaced
    return sorted({entry.part for entry in entries} | {"mlp" for entry in entries if has_mlp_statements(entry)})


def totals(parts: dict[str, list[str]]) -> Counter[str]:
    """Count the types that have each part, those with a fused MLP or experts, and those with all four kinds."""
    counts: Counter[str] = Counter()
    for names in map(set, parts.values()):
        has_mlp = bool(names & FUSED_MLPS)
        counts.update(names)
        counts["mlp or experts"] += has_mlp
        counts["all four"] += has_mlp and {"rms_norm", "rope", "loss"} <= names
    return counts


if __name__ == "__main__":
    lines = [f"  {json.dumps(name)}: {json.dumps(replaced_parts(name))}" for name in BUILT]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(RECORD, dict(totals(recorded_parts())))
