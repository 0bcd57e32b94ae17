"""Workloads of linear layers with adapters. Sizes: T tokens, I inputs, O outputs, r rank."""

import torch

from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import MORE, Case, Variant, Workload, small, sweep
from tigon.ops.adapters.lora import lora_linear_reference


def _layer(make: InputMaker) -> Inputs:
    """Make x, a frozen weight, and an adapter in fp32, the dtype of PEFT's adapters of a model in half precision. In
    fp64 the adapter has the dtype of x: there the tests compute exact results."""
    tokens, inputs, outputs, rank = make.sizes
    adapter_dtype = torch.float64 if make.dtype == torch.float64 else torch.float32
    x, weight = make.normal(tokens, inputs), make.normal(outputs, inputs).mul_(inputs**-0.5)
    a = make.normal(rank, inputs, dtype=adapter_dtype).mul_(inputs**-0.5)
    b = make.normal(outputs, rank, dtype=adapter_dtype).mul_(rank**-0.5)
    tensors = {"x": x.requires_grad_(), "weight": weight, "a": a.requires_grad_(), "b": b.requires_grad_()}
    return Inputs(tensors, (make.normal(tokens, outputs),))


def _flops(problem: Case) -> int:
    """Count the operations of the base products, forward and for dx; the low-rank products are far fewer."""
    tokens, inputs, outputs, _ = problem.shape
    return 2 * 2 * tokens * inputs * outputs


WORKLOADS = (
    Workload(
        name="lora_linear",
        reference=lora_linear_reference,
        inputs=_layer,
        legend="T x I x O x r",
        test_variants=(Variant("", (7, 8, 24, 4)),),
        compile_variants=(
            Variant("4096", (2, 4096, 4096, 16)),
            Variant("4096 r 64", (2, 4096, 14336, 64)),
            Variant("4096 dropout", (2, 4096, 4096, 16), {"dropout": 0.1}),
        ),
        flops=_flops,
        bench_shapes=(
            Case("llama-3-8b-q", (8192, 4096, 4096, 16), MORE),
            Case("llama-3-8b-down", (8192, 14336, 4096, 16), MORE),
            small(256, 512, 512, 16),
            *sweep((8192, 4096, 4096, rank) for rank in (8, 16, 32, 64, 128)),
        ),
    ),
)
