"""Write docs/liger.md from the tables of the alias: `python -m tigon.integrations.liger.page docs/liger.md`."""

import importlib
import sys
from pathlib import Path

from tigon.integrations.liger.apply import PARAMETERS
from tigon.integrations.liger.names import (
    FURTHER_CHUNKED_LOSS,
    FURTHER_OPS,
    FURTHER_TRANSFORMERS,
    LIGER_VERSION,
    MODULES,
    NOT_SERVED,
    NOT_SERVED_MODULES,
)

__all__ = ["page"]

# --- Liger's own tests: every number of the section is here ------------------------------------------

# The number of tests with each outcome.
LIGER_TESTS = {
    "pass": 3710,
    "are skipped by their own conditions": 996,
    "fail": 40,
    "need a name that is not served": 51,
}
# The tests that fail: what they are, their number, and the reason.
LIGER_FAILURES = (
    (
        "`luspo` in `test_grpo_loss.py`",
        9,
        "The KL divergence at masked tokens is part of Liger's mean. Here values at masked tokens change nothing.",
    ),
    (
        "`hard_loss_computed_only_when_used` in `test_cosine_loss.py` and `test_jsd_loss.py`",
        4,
        "They count calls of `torch.nn.functional.nll_loss`. The hard loss is part of the fused kernel.",
    ),
    (
        "`test_monkey_patch.py`: the source of a patched forward, the class of a patched module",
        17,
        "A patched module keeps its class, and `inspect.getsource` shows the forward of transformers, which Tigon's "
        "forward computes. No function of a module of transformers is replaced by `liger_rope`.",
    ),
    (
        "`out_of_bounds_target` in `megatron/test_cross_entropy.py`",
        2,
        "The loss of a target outside of the vocabulary is NaN. Liger's is finite.",
    ),
    (
        "`test_in_place` in `megatron/test_swiglu.py`",
        2,
        "They require that backward overwrites the input of the caller, and that a second backward raises. Here "
        "`in_place` has no effect.",
    ),
    (
        "`test_geglu.py` in bf16",
        2,
        "`tigon.geglu` rounds once. The eager reference also rounds gelu(a) to bf16, and the test allows 1 % of values "
        "whose terms cancel.",
    ),
    (
        "`test_modulated_rms_norm.py` in bf16 without casts",
        2,
        "One value of the weight's gradient is compared with an eager reference in bf16, whose largest error is twice "
        "that of Tigon (0.37 and 0.19, from fp64).",
    ),
    (
        "`skip_logits_true_without_labels` in `test_llama4.py`",
        1,
        "A call without labels returns logits. transformers' Trainer makes such calls for a loss function of its own, "
        "and needs the logits.",
    ),
    (
        "`misaligned_intermediate_size` in `test_mlp.py`",
        1,
        "The test expects an error for a size that Liger's kernel does not support. Tigon computes it.",
    ),
)
# The names that tests need: what they are, the number of tests, and the reason.
LIGER_MISSING = (
    (
        "`lce_forward` and the other forwards of `liger_kernel.transformers.model`",
        48,
        "Tigon has no forward for each type. The tests compare the source of a patched forward with that of these.",
    ),
    (
        "`liger_cross_entropy_kernel`, `liger_kernel.ops.utils`, `_patch_rms_norm_module`",
        3,
        "Tigon has no kernels with these arguments, and changes no module in place.",
    ),
)

INTRODUCTION = f"""# From Liger Kernel to Tigon, name by name

`python -m tigon.integrations.liger.page docs/liger.md` writes this page from the tables of the alias; do not edit it.
It lists the names of Liger Kernel {LIGER_VERSION} that Tigon serves under `import liger_kernel`, and their code.
[Other trainers](trainers.md#scripts-written-for-liger-kernel) says how to install the alias.

```python
import tigon

tigon.install_as_liger_kernel()

from liger_kernel.transformers import apply_liger_kernel_to_llama

apply_liger_kernel_to_llama()
```

New code needs no alias. `tigon.patch(model)` takes the place of every `apply_liger_kernel_to_<type>`, and the ops and
modules are public names of `tigon`.

## What differs

- Names, order and defaults of parameters are Liger's. Results are Tigon's, whose accuracy the tests compare with eager
  torch, so they differ from Liger's by rounding.
- Results have Liger's dtypes. A cross entropy and its z-loss have the dtype of the logits, `LigerModulatedRMSNorm` and
  rotated queries and keys that of their input, and the loss of a head is in fp32. `tigon.cross_entropy` returns fp32.
- `LigerCrossEntropyLoss` raises an AssertionError for a target that is no class, as Liger does, and waits for the
  device to find it. Every other loss is NaN for such a target and does not wait. Liger's loss of sharded logits is
  finite there.
- `impl`, `mode`, `backend`, `row_mode`, `compiled`, `chunk_size`, `chunk_mem_const`, `tiles_per_reduce`,
  `m_tiles_per_cluster` and `eps` of divergences have no effect, because they choose among Liger's kernels or chunks.
- `in_place` has no effect. An op never overwrites an input of the caller.
- `apply_liger_kernel_to_<type>` patches what `tigon.patch` recognises, also where Liger has no kernel. A part that an
  option switches off stays as transformers has it.
- `cross_entropy=True` without the fused loss keeps the loss of transformers, because the caller then expects logits.
- Average log-probabilities of a sequence without tokens are zero, where Liger's are NaN.
- Tables of `liger_rotary_pos_emb` are [L, R], [1 | B, L, R] or [1 | B, 1, L, R], and only the first half of their
  columns is read. A last feature without a partner is copied.
- The sizes of `mrope_section` must add up to half of the head dimension.
- Values at masked tokens have no effect on a loss. Liger's `luspo` averages over masked tokens too, and multiplies an
  exponential of their log-probabilities by zero, which is NaN if it is infinite.
- `liger_kernel.chunked_loss.functional` and the modules of `liger_kernel.chunked_loss` also serve the
  `LigerFusedLinear<Loss>Function` classes and their bases. A subclass with a loss of its own derives from a base; the
  functions themselves refuse subclasses. `triton_grpo_loss`, `fused_selective_log_softmax` and `get_gamma_weights` are
  in the modules named `grpo_loss`. `inplace` has no effect.
- A hard loss of distillation is part of the fused kernel: it does not call `torch.nn.functional.nll_loss`.
- `skip_logits=True` without labels returns logits. Liger raises a ValueError.
- Smoothing with `label_smoothing_mode="partition"` on several ranks is refused, because each rank would have another
  loss.
- Classes of `liger_kernel.ops` have `apply` only. Functions of single kernels, such as `rms_norm_forward`, are not
  served.
- A module below `liger_kernel.transformers` serves the names of all of them. An object that a program puts in place of
  a served name is not used by the other names, except `LigerMegatronCrossEntropy`.
- `apply_liger_kernel_to_megatron` is undone by `tigon.integrations.liger.uninstall()`.

## Liger's own tests

The tests of Liger Kernel {LIGER_VERSION} import `liger_kernel` and run through the alias without a change. Counted are
the folders `chunked_loss`, `megatron` and `transformers`. A test file whose head imports a name that is not served runs
with a placeholder of the name, so that only the tests that use it need it. Two files are not counted, because they
execute files of Liger's source: `test_fused_linear_scaled_cross_entropy.py` and
`test_fused_linear_selected_log_probs.py`. The other folders test Liger's choice of back ends and its kernels for each
of them, its cache for Triton and the training of whole models.

The run of 2026-11-27 used one H100, torch 2.11, triton 3.6 and transformers 5.17. It ended, for lack of time, after
4,760 tests. Of those that it did not reach, 37 of `test_monkey_patch.py` ran on a CPU and are counted too. About 570
are not counted, among them the 7 of `test_muse_glimmer.py`.
"""


# Sentences about objects whose docstring is that of a builtin class.
DESCRIPTIONS = {"MODEL_TYPE_TO_APPLY_LIGER_FN": "The function of each model type, which a program may replace."}


def _summary(source: str) -> str:
    """Return the first sentence of the docstring of "module:name"."""
    module, _, name = source.partition(":")
    if name in DESCRIPTIONS:
        return DESCRIPTIONS[name]
    text = " ".join((getattr(importlib.import_module(module), name).__doc__ or "").split("\n\n")[0].split())
    sentence = text.split(". ")[0].rstrip(".")
    return sentence.replace("|", "\\|") + "."


def _apply_table() -> list[str]:
    rows: dict[str, list[str]] = {}
    for model_type, row in PARAMETERS.items():
        rows.setdefault(row, []).append(model_type)
    lines = ["| parameters besides `model` | types |", "|---|---|"]
    for row, types in rows.items():
        words = [word for word in row.split() if word not in ("model", "**")]
        parameters = ", ".join(f"`{word[1:]}=False`" if word[0] == "-" else f"`{word}`" for word in words)
        if row.endswith("**"):
            parameters += ", further ones"
        lines.append(f"| {parameters} | {', '.join(types)} |")
    return lines


def _table(names: dict[str, str]) -> list[str]:
    rows = [f"| `{name}` | {_summary(source)} |" for name, source in sorted(names.items())]
    return ["| name | what serves it |", "|---|---|", *rows]


def _liger_tests() -> list[str]:
    """Return the tables of the outcomes of Liger's tests."""
    lines = ["| tests that | number |", "|---|---|"]
    lines += [f"| {outcome} | {count:,} |" for outcome, count in LIGER_TESTS.items()]
    for title, rows in {"tests that fail": LIGER_FAILURES, "names that tests need": LIGER_MISSING}.items():
        lines += ["", f"| {title} | number of tests | reason |", "|---|---|---|"]
        lines += [f"| {tests} | {count} | {reason} |" for tests, count, reason in rows]
    return [*lines, ""]


def page() -> str:
    """Return the text of docs/liger.md."""
    lines = [INTRODUCTION, *_liger_tests(), f"## apply_liger_kernel_to_&lt;type&gt;: {len(PARAMETERS)} functions", ""]
    lines += ["A parameter is True by default unless the table says False.", "", *_apply_table(), ""]
    for module in ("transformers", "chunked_loss", "transformers.functional", "functional", "ops", "megatron", "utils"):
        table = MODULES[f"liger_kernel.{module}"]
        names = {name: source for name, source in table.items() if not name.startswith("apply_liger_kernel_to_")}
        lines += [f"## liger_kernel.{module}: {len(names)} names", "", *_table(names), ""]
    for module, table in {"transformers": FURTHER_TRANSFORMERS, "chunked_loss": FURTHER_CHUNKED_LOSS}.items():
        lines += [f"## Modules of liger_kernel.{module}: {len(table)} further names", "", *_table(table), ""]
    further_ops = {name: source for table in FURTHER_OPS.values() for name, source in table.items()}
    lines += [f"## Modules of liger_kernel.ops: {len(further_ops)} further names", "", *_table(further_ops), ""]
    lines += ["## Names that are not served", "", "The error of each name says what to use.", ""]
    lines += ["| name | what to use |", "|---|---|"]
    modules = {f"liger_kernel.{name}": advice for name, advice in NOT_SERVED_MODULES.items()}
    lines += [
        f"| `{name}` | {advice[0].upper()}{advice[1:]}. |" for name, advice in sorted((NOT_SERVED | modules).items())
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")
