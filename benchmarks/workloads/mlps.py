"""Workloads of the MLPs' activations. Sizes: T tokens, I intermediate features."""

from typing import Any

from benchmarks.workloads.inputs import InputMaker, Inputs, rows
from benchmarks.workloads.workload import FIRST_ROOFLINE, MORE, Case, Variant, Workload, small, sweep
from tigon.ops.mlps.activations import gelu_reference, relu2_reference
from tigon.ops.mlps.glu import geglu_reference, swiglu_reference

WIDTHS = (2048, 4096, 8192, 14336, 28672)
TANH, SIGMOID = {"approximate": "tanh"}, {"approximate": "sigmoid"}


def _gate_and_up(make: InputMaker) -> Inputs:
    gate, up, upstream = (make.normal(*make.sizes) for _ in range(3))
    return Inputs({"gate": gate.requires_grad_(), "up": up.requires_grad_()}, (upstream,))


# Properties that the workloads of gated activations share, and below those of activations without a gate.
_GATED: dict[str, Any] = {
    "inputs": _gate_and_up, "legend": "T x I", "family": "glu", "elements": lambda t, i: 8 * t * i,
}  # fmt: skip
_PLAIN: dict[str, Any] = {
    "inputs": rows, "legend": "T x I", "any_shape": ("x",), "elements": lambda t, i: 5 * t * i,
}  # fmt: skip
_SWEEP = [(4096, i) for i in WIDTHS]

WORKLOADS = (
    Workload(
        name="swiglu",
        reference=swiglu_reference,
        # Without `up`, the first argument holds gate and up side by side.
        test_variants=(Variant("", (7, 48)), Variant("packed", (7, 96), {"up": None})),
        compile_variants=(Variant("14336", (2, 14336)),),
        bench_shapes=(Case("llama-3-8b", (16384, 14336), FIRST_ROOFLINE), small(512, 2048), *sweep(_SWEEP)),
        **_GATED,
    ),
    Workload(
        name="geglu",
        reference=geglu_reference,
        test_variants=(Variant("", (7, 48)), Variant("tanh packed", (7, 66), TANH | {"up": None})),
        compile_variants=(Variant("14336", (2, 14336)), Variant("tanh 14336", (2, 14336), TANH)),
        bench_shapes=(
            Case("gemma-2-9b", (16384, 14336), FIRST_ROOFLINE, TANH),
            small(512, 2048, options=TANH),
            *sweep(_SWEEP, TANH),
        ),
        **_GATED,
    ),
    Workload(
        name="gelu",
        reference=gelu_reference,
        test_variants=(Variant("", (7, 66)), Variant("tanh", (7, 48), TANH), Variant("sigmoid", (5, 33), SIGMOID)),
        compile_variants=(
            Variant("3072", (2, 3072)),
            Variant("tanh 3072", (2, 3072), TANH),
            Variant("sigmoid 4096", (2, 4096), SIGMOID),
        ),
        bench_shapes=(Case("gpt-2", (16384, 3072), MORE, TANH), small(512, 2048, options=TANH), *sweep(_SWEEP, TANH)),
        **_PLAIN,
    ),
    Workload(
        name="relu2",
        reference=relu2_reference,
        test_variants=(Variant("", (7, 66)),),
        compile_variants=(Variant("16384", (2, 16384)),),
        bench_shapes=(Case("minitron-8b", (16384, 16384), MORE), small(512, 2048), *sweep(_SWEEP)),
        **_PLAIN,
    ),
)
