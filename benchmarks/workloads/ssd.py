"""The workload of the state space dual of Mamba-2.

Sizes: B batch, T tokens, M packed samples of each sequence (1: not packed), H heads, P features of a head, K groups of
B and C, N features of the state.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import MORE, Case, Variant, Workload, small, sweep
from tigon.ops.mixers.ssd import ssd, ssd_reference

SOFTPLUS = {"dt_softplus": True}
# Autograd saves the states of all tokens of a sequential run, which would take 100 GB for 8192 tokens of a model.
MAX_SEQUENTIAL_TOKENS = 1024


def _inputs(make: InputMaker) -> Inputs:
    """Make the inputs of a layer. Its decay rates are -1, -2, ..., and its steps are small, as in a trained model."""
    b, t, samples, heads, size, groups, state_size = make.sizes
    x, upstream = make.normal(b, t, heads, size), make.normal(b, t, heads, size)
    keys, queries = (make.normal(b, t, groups, state_size).mul_(state_size**-0.25) for _ in range(2))
    rates = -1.0 - torch.arange(heads, dtype=torch.float32, device=make.device) % 16
    weights, bias = 1 + 0.1 * make.normal(heads), make.normal(heads) - 3
    tensors = {
        "x": x, "dt": make.normal(b, t, heads), "A": rates, "B": keys, "C": queries, "D": weights, "dt_bias": bias
    }  # fmt: skip
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    if samples > 1:
        bounds = torch.arange(samples + 1, device=make.device) * t // samples
        tensors["cu_seqlens"] = bounds.to(torch.int32)
    return Inputs(tensors, (upstream,))


def _call(function: Any, *tensors: Tensor, **options: Any) -> Any:
    x, dt, rates, keys, queries, weights, bias, *bounds = tensors
    options |= {"cu_seqlens": bounds[0]} if bounds else {}
    return function(x, dt, rates, keys, queries, D=weights, dt_bias=bias, **options)


def _reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    cu_seqlens: Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    if x.shape[1] <= MAX_SEQUENTIAL_TOKENS:
        return ssd_reference(x, dt, A, B, C, D=D, dt_bias=dt_bias, cu_seqlens=cu_seqlens, **options)
    *wide, D, dt_bias = (tensor.double() for tensor in (x, dt, A, B, C, D, dt_bias))
    y: Any = ssd(*wide, D=D, dt_bias=dt_bias, cu_seqlens=cu_seqlens, **options)
    return y.to(x.dtype)


WORKLOADS = (
    Workload(
        name="ssd",
        call=_call,
        reference=_reference,
        inputs=_inputs,
        legend="B x T x M x H x P x K x N",
        rows_axis=1,
        has_cpu_code=True,
        test_variants=(
            Variant("", (2, 70, 1, 4, 16, 2, 16), SOFTPLUS, term_size=1.0),
            Variant("packed", (1, 70, 3, 2, 16, 1, 32), SOFTPLUS, term_size=1.0),
        ),
        compile_variants=(
            Variant("packed 8 x 64, states of 128", (1, 200, 2, 8, 64, 2, 128), SOFTPLUS),
            Variant("128 x 64, states of 128", (1, 200, 1, 128, 64, 8, 128), SOFTPLUS),
            Variant("24 x 128, states of 256", (1, 200, 1, 24, 128, 1, 256), SOFTPLUS),
        ),
        # Forward reads x, B and C and writes y; backward reads these and dy and writes dx, dB and dC.
        elements=lambda b, t, m, h, p, k, n: b * t * (5 * h * p + 6 * k * n + 3 * h),
        bench_shapes=(
            Case("nemotron-h-8b", (2, 4096, 1, 128, 64, 8, 128), MORE, SOFTPLUS),
            Case("granite-4-h-small", (2, 4096, 1, 128, 64, 1, 128), MORE, SOFTPLUS),
            Case("falcon-h1-7b", (2, 4096, 1, 24, 128, 1, 256), MORE, SOFTPLUS),
            Case("nemotron-h-8b", (1, 8192, 16, 128, 64, 8, 128), MORE, SOFTPLUS),
            small(1, 256, 1, 4, 64, 1, 128, options=SOFTPLUS),
            *sweep(((1, t, 1, 128, 64, 8, 128) for t in (1024, 4096, 16384, 32768)), SOFTPLUS),
        ),
    ),
)
