"""Write docs/liger.md from the tables of the alias: `python -m tigon.integrations.liger.page docs/liger.md`."""

import sys
from collections.abc import Iterable
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

INTRODUCTION = f"""# From Liger Kernel

`python -m tigon.integrations.liger.page docs/liger.md` writes this page from the tables of the alias; do not edit it.

With the alias, a script that was written for Liger Kernel {LIGER_VERSION} runs on Tigon, and `use_liger_kernel=True` of
a trainer trains with `tigon.patch`:

```python
import tigon

tigon.install_as_liger_kernel()

from liger_kernel.transformers import apply_liger_kernel_to_llama

apply_liger_kernel_to_llama()
```

For a script that must not be changed, use `python -m tigon.as_liger SCRIPT ...`, and below a launcher `torchrun ... -m
tigon.as_liger SCRIPT ...`. No environment variable turns the alias on. Liger Kernel must not be installed in the same
environment, unless `force=True`. `tigon.integrations.liger.uninstall()` undoes the alias.

New code needs no alias: `tigon.patch(model)` takes the place of every `apply_liger_kernel_to_<type>`, and the ops and
modules are public names of `tigon`.

## What differs

- Names, order and defaults of parameters are Liger's, and so are the dtypes of results: a cross entropy and its z-loss
  have the dtype of the logits, and the loss of a head is in fp32. Values differ from Liger's by rounding.
- `apply_liger_kernel_to_<type>` patches what `tigon.patch` recognises, also where Liger has no kernel. A part that an
  option switches off stays as transformers has it. `cross_entropy=True` without the fused loss keeps the loss of
  transformers, because the caller then expects logits.
- Options that choose among Liger's kernels or chunks have no effect: `impl`, `mode`, `backend`, `row_mode`, `compiled`,
  `chunk_size`, `chunk_mem_const`, `tiles_per_reduce`, `m_tiles_per_cluster`, and `eps` of divergences. `in_place` and
  `inplace` have no effect either: an op never overwrites an input of the caller.
- `LigerCrossEntropyLoss` raises an AssertionError for a target that is no class, as Liger does, and waits for the
  device to find it. Every other loss is NaN for such a target and does not wait. Liger's loss of sharded logits is
  finite there.
- Values at masked tokens have no effect on a loss. Liger's `luspo` averages over masked tokens too, and is NaN if an
  exponential of their log-probabilities is infinite.
- Average log-probabilities of a sequence without tokens are zero, where Liger's are NaN.
- A hard loss of distillation does not call `torch.nn.functional.nll_loss`.
- `skip_logits=True` without labels returns logits. Liger raises a ValueError.
- Tables of `liger_rotary_pos_emb` are [L, R], [1 | B, L, R] or [1 | B, 1, L, R], and only the first half of their
  columns is read. A last feature without a partner is copied. The sizes of `mrope_section` must add up to half of the
  head dimension.
- Smoothing with `label_smoothing_mode="partition"` on several ranks is refused, because each rank would have another
  loss.
- Rare modules, such as `LigerPolyNorm`, `LigerSparsemax`, `LigerMHC` and the tiled MLPs, are compositions of torch
  without kernels of their own.
- Classes of `liger_kernel.ops` have `apply` only. Functions of single kernels, such as `rms_norm_forward`, are not
  served. A subclass with a chunked loss of its own derives from a base; the `LigerFusedLinear<Loss>Function` classes
  refuse subclasses.
- A module below `liger_kernel.transformers` serves the names of all of them. An object that a program puts in place of
  a served name is not used by the other names, except `LigerMegatronCrossEntropy`.

## Liger's own tests

The tests of Liger Kernel {LIGER_VERSION} in the folders `chunked_loss`, `megatron` and `transformers` import
`liger_kernel` and run through the alias without a change. If the head of a test file imports a name that is not served,
a placeholder takes its place. `test_fused_linear_scaled_cross_entropy.py` and `test_fused_linear_selected_log_probs.py`
are not counted, because they execute files of Liger's source. The other folders test Liger's choice of kernels.

The run of 2026-11-27 used one H100, torch 2.11, triton 3.6 and transformers 5.17. It ended, for lack of time, after
4,760 tests. Of those that it did not reach, 37 of `test_monkey_patch.py` ran on a CPU and are counted too. About 570
are not counted, among them the 7 of `test_muse_glimmer.py`.
"""


def _liger_tests() -> list[str]:
    """Return the tables of the outcomes of Liger's tests."""
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in LIGER_TESTS.items())
    lines = [f"Of these tests, {outcomes}:", "", "| tests | number | reason |", "|---|---|---|"]
    lines += [f"| {tests} | {count} | {reason} |" for tests, count, reason in LIGER_FAILURES]
    missing = [f"| need {names} | {count} | {reason} |" for names, count, reason in LIGER_MISSING]
    return [*lines, *missing, ""]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def page() -> str:
    """Return the text of docs/liger.md."""
    types = ", ".join(PARAMETERS)
    lines = [INTRODUCTION, *_liger_tests(), "## The names that are served", ""]
    lines += [
        "The docstring of an object says which op of Tigon computes it.",
        "",
        f"- **`apply_liger_kernel_to_<type>`** for {len(PARAMETERS)} types: {types}.",
    ]
    for module in ("transformers", "chunked_loss", "transformers.functional", "functional", "ops", "megatron", "utils"):
        names = [name for name in MODULES[f"liger_kernel.{module}"] if not name.startswith("apply_liger_kernel_to_")]
        lines.append(f"- **`liger_kernel.{module}`**: {_names(names)}.")
    further = FURTHER_TRANSFORMERS | FURTHER_CHUNKED_LOSS
    for table in FURTHER_OPS.values():
        further |= table
    lines.append(f"- **In modules of these packages**: {_names(further)}.")
    missing = [*NOT_SERVED, *(f"liger_kernel.{name}" for name in NOT_SERVED_MODULES)]
    lines += ["", "Any other name raises an error. For these names, the error says what to use:", f"{_names(missing)}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")
