"""Workloads of the norms. Sizes: M rows, N features."""

from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import FIRST_ROOFLINE, MORE, ROOFLINE, Case, Variant, Workload, small, sweep
from tigon.ops.norms.gated_rms_norm import gated_rms_norm_reference
from tigon.ops.norms.layer_norm import layer_norm_reference
from tigon.ops.norms.rms_norm import add_rms_norm_reference, rms_norm_reference

MAMBA_NORM = {"gate_first": True}
GEMMA_NORM = {"offset": 1.0, "rounding": "after_weight"}
WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def _rms_norm(make: InputMaker) -> Inputs:
    x, upstream = make.normal(*make.sizes), make.normal(*make.sizes)
    weight = make.scale(x.shape[-1])
    return Inputs({"x": x.requires_grad_(), "weight": weight.requires_grad_()}, (upstream,))


def _layer_norm(make: InputMaker) -> Inputs:
    inputs = _rms_norm(make)
    inputs.tensors["bias"] = make.normal(make.sizes[1]).mul_(0.1).requires_grad_()
    return inputs


def _add_rms_norm(make: InputMaker) -> Inputs:
    # The residual stream grows with depth: a layer adds only a fraction of it.
    residual = make.normal(*make.sizes).mul_(4).requires_grad_()
    inputs, dsum = _rms_norm(make), make.normal(*make.sizes)
    tensors = {"x": inputs.tensors["x"], "residual": residual, "weight": inputs.tensors["weight"]}
    return Inputs(tensors, (*inputs.upstream, dsum))


def _gated_rms_norm(make: InputMaker) -> Inputs:
    inputs, gate = _rms_norm(make), make.normal(*make.sizes).requires_grad_()
    tensors = {"x": inputs.tensors["x"], "gate": gate, "weight": inputs.tensors["weight"]}
    return Inputs(tensors, inputs.upstream)


WORKLOADS = (
    Workload(
        name="rms_norm",
        reference=rms_norm_reference,
        inputs=_rms_norm,
        legend="M x N",
        test_variants=(
            Variant("", (7, 48)),
            Variant("offset after", (7, 48), GEMMA_NORM),
            Variant("no weight", (7, 33), {"weight": None}),
        ),
        compile_variants=(
            Variant("of heads 128", (64, 128)),
            *(Variant(f"{n}", (2, n)) for n in (2048, 4096, 5120, 8192, 12288, 16384)),
        ),
        # Forward reads x and writes y; backward reads x and dy and writes dx.
        elements=lambda m, n: 5 * m * n + 3 * n,
        bench_shapes=(
            Case("llama-3-8b", (16384, 4096), FIRST_ROOFLINE),
            Case("llama-3-70b", (8192, 8192), FIRST_ROOFLINE),
            Case("llama-3.1-405b", (4096, 16384), FIRST_ROOFLINE),
            Case("llama-3.2-1b", (16384, 2048), FIRST_ROOFLINE),
            Case("gemma-2-2b", (16384, 2304), MORE, GEMMA_NORM),
            # The GPU has so little to do here that the time of the host shows.
            Case("llama-3-8b", (64, 4096), ("roofline", "more", "host")),
            small(512, 1024),
            *sweep((4096, n) for n in WIDTHS),
        ),
    ),
    Workload(
        name="add_rms_norm",
        reference=add_rms_norm_reference,
        inputs=_add_rms_norm,
        legend="M x N",
        test_variants=(Variant("", (7, 48)),),
        compile_variants=(Variant("4096", (2, 4096)), Variant("8192", (2, 8192))),
        # Forward also reads the residual and writes the sum, and backward also reads the gradient of the sum; x and
        # the residual share their gradient.
        elements=lambda m, n: 8 * m * n + 3 * n,
        bench_shapes=(Case("llama-3-8b", (16384, 4096), ROOFLINE), small(512, 1024), *sweep((4096, n) for n in WIDTHS)),
    ),
    Workload(
        name="gated_rms_norm",
        reference=gated_rms_norm_reference,
        inputs=_gated_rms_norm,
        legend="M x N",
        test_variants=(
            Variant("", (7, 48)),
            Variant("gate first, groups", (7, 48), MAMBA_NORM | {"group_size": 16}),
            Variant("sigmoid after", (7, 48), {"activation": "sigmoid", "rounding": "after_weight"}),
        ),
        compile_variants=(
            Variant("of heads 128", (64, 128)),
            Variant("gate first 4096", (2, 4096), MAMBA_NORM),
            Variant("gate first 8192", (2, 8192), MAMBA_NORM),
            Variant("gate first, groups", (2, 8192), MAMBA_NORM | {"group_size": 1024}),
        ),
        # Forward reads x and the gate and writes y; backward reads both and dy and writes dx and dgate.
        elements=lambda m, n: 8 * m * n + 3 * n,
        bench_shapes=(
            Case("qwen3-next-80b", (262144, 128), ROOFLINE),
            Case("bamba-9b", (16384, 8192), ROOFLINE, MAMBA_NORM),
            Case("nemotron-h-8b", (16384, 8192), MORE, MAMBA_NORM | {"group_size": 1024}),
            small(512, 1024),
            *sweep((4096, n) for n in WIDTHS if n <= 8192),
        ),
    ),
    Workload(
        name="layer_norm",
        reference=layer_norm_reference,
        inputs=_layer_norm,
        legend="M x N",
        test_variants=(Variant("", (7, 48)), Variant("no bias", (7, 33), {"bias": None})),
        compile_variants=(Variant("1024", (8, 1024)), Variant("4096", (2, 4096)), Variant("16384", (2, 16384))),
        elements=lambda m, n: 5 * m * n + 5 * n,
        bench_shapes=(Case("gpt-j-6b", (16384, 4096), ROOFLINE), small(512, 1024), *sweep((4096, n) for n in WIDTHS)),
    ),
)
