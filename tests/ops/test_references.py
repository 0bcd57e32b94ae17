"""On a CPU an op runs its reference bit for bit, and passes every option on.

The other tests of these ops compare the op with its reference too, but only where kernels run: on a CPU they would
compare the reference with itself.
"""

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tigon
from op_cases import CASES, Case, as_list, outputs_and_gradients
from tigon.ops.logits.divergences import jsd_reference, kl_div_reference, tvd_reference
from tigon.ops.logits.softmax import softmax_reference
from tigon.ops.mixers.causal_conv1d import causal_conv1d_reference
from tigon.ops.mlps.glu import geglu_reference
from tigon.ops.norms.gated_rms_norm import gated_rms_norm_reference
from tigon.ops.norms.layer_norm import layer_norm_reference
from tigon.ops.norms.rms_norm import add_rms_norm_reference, rms_norm_reference
from tigon.ops.rotary.qk_norm_rope import qk_norm_rope_reference
from tigon.ops.rotary.rope import rope_reference

pytestmark = pytest.mark.no_interpreter("The tests are about CPU tensors without the interpreter.")

REFERENCES = [case for case in CASES if case.is_reference_on_cpu]


@pytest.mark.parametrize("case", REFERENCES, ids=lambda case: case.name)
def test_a_cpu_runs_the_reference_bit_for_bit(case: Case):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        results, expected = (
            outputs_and_gradients(f, case.inputs(dtype, device="cpu")) for f in (case.run, case.reference)
        )
        for a, b in zip([*results[0], *results[1]], [*expected[0], *expected[1]], strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_every_op_with_a_reference_has_a_case():
    """`glu_mlp`, `mlp` and `fp8_linear` consist of products and other ops, and have tests of their own."""
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(tigon.ops.__path__, "tigon.ops.")]
    ops = {op for op in tigon.__all__ if any(hasattr(module, f"{op}_reference") for module in modules)}
    assert ops - {case.workload.name for case in CASES} == {"glu_mlp", "mlp", "fp8_linear"}


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


# Half precision shows where a result is rounded.
X, W, Q, K, COS, SIN, Q_WEIGHT, K_WEIGHT = (
    x.half() for x in _random((3, 8), (8,), (2, 3, 3, 8), (2, 3, 3, 8), (2, 3, 8), (2, 3, 8), (8,), (8,))
)
AXES = torch.arange(1, 4).view(3, 1, 1, 1)
ROTARY = {"unsqueeze_dim": 2, "layout": "interleaved"}
LABELS = torch.tensor([5, 1, 5])
ROWS = {"labels": LABELS, "ignore_index": 5}
LOG_PROBS = [x.log_softmax(-1) for x in _random((3, 8), (3, 8))]

# Every option differs from its default, so the test fails if an option is not passed on.
OPTIONS = {
    "rms_norm": (tigon.rms_norm, rms_norm_reference, [X, W], {"eps": 0.5, "offset": 2.0, "rounding": "after_weight"}),
    "add_rms_norm": (
        tigon.add_rms_norm, add_rms_norm_reference, [X, X.flip(0), W],
        {"eps": 0.5, "offset": 2.0, "rounding": "after_weight"},
    ),
    "gated_rms_norm": (
        tigon.gated_rms_norm, gated_rms_norm_reference, [X, X.flip(0), W],
        {"eps": 0.5, "activation": "sigmoid", "gate_first": True, "group_size": 2, "offset": 2.0,
         "rounding": "after_weight"},
    ),
    "layer_norm": (tigon.layer_norm, layer_norm_reference, [X, W, W.flip(0)], {"eps": 0.5}),
    "softmax": (tigon.softmax, softmax_reference, [X], {"dim": 0}),
    "causal_conv1d": (
        tigon.causal_conv1d, causal_conv1d_reference, [(W[:, None] * W)[None], X.T],
        {"bias": X[0], "activation": None, "cu_seqlens": torch.tensor([0, 2, 8]), "channels_last": False},
    ),
    "causal_conv1d of positions": (
        tigon.causal_conv1d, causal_conv1d_reference, [Q[0], X.T], {"position_ids": torch.tensor([[5, 6, 0]])},
    ),
    "geglu": (tigon.geglu, geglu_reference, [X, X.flip(0)], {"approximate": "tanh"}),
    "rope": (
        tigon.rope, rope_reference, [Q, K, COS, SIN], {**ROTARY, "table": "pairs", "dtype": torch.bfloat16},
    ),
    "rope sections": (
        tigon.rope, rope_reference, [Q, K, COS * AXES, SIN * AXES], {**ROTARY, "sections": (2, 1, 1)},
    ),
    "qk_norm_rope": (
        tigon.qk_norm_rope, qk_norm_rope_reference, [Q, K, Q_WEIGHT, K_WEIGHT, COS, SIN],
        {**ROTARY, "eps": 0.5, "offset": 2.0, "rounding": "after_weight"},
    ),
    "kl_div": (
        tigon.kl_div, kl_div_reference, _random((3, 8), (3, 8)),
        {"from_logits": True, "temperature": 2.0, "reduction": "sum", **ROWS},
    ),
    "kl_div of log-probabilities": (tigon.kl_div, kl_div_reference, LOG_PROBS, {"log_target": True}),
    "jsd": (
        tigon.jsd, jsd_reference, _random((3, 8), (3, 8)),
        {"from_logits": True, "temperature": 2.0, "beta": 0.1, "reduction": "none", **ROWS},
    ),
    "tvd": (
        tigon.tvd, tvd_reference, _random((3, 8), (3, 8)),
        {"from_logits": True, "temperature": 2.0, "reduction": "mean", **ROWS},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run", "reference", "tensors", "options"), OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_passed_on(run: Callable, reference: Callable, tensors: list[Tensor], options: dict):
    results, expected = as_list(run(*tensors, **options)), as_list(reference(*tensors, **options))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    for name in options:
        others = {key: value for key, value in options.items() if key != name}
        if name == "from_logits":
            others.pop("temperature")
        # With sections the tables have one more axis.
        if name == "sections":
            others["sections"] = (1, 1, 2)
        plain = as_list(run(*tensors, **others))
        pairs = zip(plain, results, strict=True)
        assert any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in pairs), f"{name} changes nothing"
