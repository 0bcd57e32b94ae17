"""Workloads of linear layers in FP8. Sizes: T tokens, H inputs, O outputs."""

from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import MORE, Case, Variant, Workload, small, sweep
from tigon.ops.fp8.fp8_linear import fp8_linear_reference

ROWWISE = {"recipe": "rowwise"}


def _layer(make: InputMaker) -> Inputs:
    tokens, inputs, outputs = make.sizes
    weight = make.normal(outputs, inputs).mul_(inputs**-0.5).requires_grad_()
    tensors = {"x": make.normal(tokens, inputs).requires_grad_(), "weight": weight}
    return Inputs(tensors, (make.normal(tokens, outputs),))


def _flops(problem: Case) -> int:
    tokens, inputs, outputs = problem.shape
    return 3 * 2 * tokens * inputs * outputs


WORKLOADS = (
    Workload(
        name="fp8_linear",
        reference=fp8_linear_reference,
        inputs=_layer,
        legend="T x H x O",
        # tests/ops/fp8 has the tests of the contracts: the reference has no second derivative either, and on a GPU the
        # sums of the units are less precise than those of the reference in fp32.
        compile_variants=(
            Variant("4096", (16, 4096, 1024)),
            Variant("rowwise 4096", (16, 4096, 1024), ROWWISE),
            Variant("rowwise 14336, no dW in FP8", (16, 14336, 1024), ROWWISE | {"fp8_dw": False}),
        ),
        flops=_flops,
        bench_shapes=(
            Case("llama-3-8b-q", (8192, 4096, 4096), MORE),
            Case("llama-3-8b-q", (8192, 4096, 4096), MORE, ROWWISE),
            Case("llama-3-8b-down", (8192, 14336, 4096), MORE),
            small(256, 512, 512),
            *sweep((tokens, 4096, 4096) for tokens in (1024, 2048, 4096, 8192, 16384)),
        ),
    ),
)
