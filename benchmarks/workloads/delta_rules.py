"""Workloads of the delta rules: linear recurrences whose state is overwritten.

Sizes: B batch, T tokens, N packed samples of each sequence (1: not packed), Hk heads of q and k, Hv heads of v, D
features of a head.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import MORE, Case, Variant, Workload, small, sweep
from tigon.ops.mixers.gated_delta_rule import gated_delta_rule_reference
from tigon.ops.mixers.kda import kda_reference

NORMALISED = {"use_qk_l2norm": True}
# Autograd saves the states of all tokens of a sequential run, which would take 100 GB for 8192 tokens of a model.
MAX_SEQUENTIAL_TOKENS = 1024


def _inputs(make: InputMaker, has_feature_decay: bool) -> Inputs:
    """Make the inputs of a layer. Form: `value_size` is the number of features of a head of v, by default D."""
    b, t, n, key_heads, heads, size = make.sizes
    value_size = make.form.get("value_size", size)
    q, k = make.normal(b, t, key_heads, size), make.normal(b, t, key_heads, size)
    if not make.options.get("use_qk_l2norm"):
        # The keys of a model have a norm of about 1. Longer ones would let the state grow.
        k.mul_(size**-0.5)
    v, upstream = make.normal(b, t, heads, value_size), make.normal(b, t, heads, value_size)
    features = (size,) if has_feature_decay else ()
    g, beta = -F.softplus(make.normal(b, t, heads, *features) - 2), make.normal(b, t, heads).sigmoid()
    tensors = {name: x.requires_grad_() for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
    if n > 1:
        bounds = torch.arange(n + 1, device=make.device) * t // n
        tensors["cu_seqlens"] = bounds.to(torch.int32)
    return Inputs(tensors, (upstream,))


def _reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    op, reference = (tigon.kda, kda_reference) if g.dim() == 4 else (tigon.gated_delta_rule, gated_delta_rule_reference)
    if q.shape[1] <= MAX_SEQUENTIAL_TOKENS:
        return reference(q, k, v, g, beta, cu_seqlens=cu_seqlens, **options)
    wide = (x.double() for x in (q, k, v, g, beta))
    o, state = op(*wide, cu_seqlens=cu_seqlens, **options)
    return o.to(v.dtype), state


def _call(function: Any, *tensors: Tensor, **options: Any) -> Any:
    return function(*tensors[:5], cu_seqlens=tensors[5] if len(tensors) > 5 else None, **options)


WORKLOADS = (
    Workload(
        name="gated_delta_rule",
        call=_call,
        reference=_reference,
        inputs=partial(_inputs, has_feature_decay=False),
        legend="B x T x N x Hk x Hv x D",
        rows_axis=1,
        has_cpu_code=True,
        test_variants=(
            Variant("", (2, 70, 1, 1, 2, 16), NORMALISED, term_size=1.0),
            Variant("packed", (1, 70, 3, 2, 2, 32), NORMALISED | {"scale": 0.5}, {"value_size": 16}, term_size=1.0),
        ),
        compile_variants=(
            Variant("packed 2 + 4 x 128", (1, 200, 2, 2, 4, 128), NORMALISED),
            Variant("32 + 64 x 128", (1, 200, 1, 32, 64, 128), NORMALISED),
        ),
        # Forward reads q, k and v and writes o; backward reads these and do and writes dq, dk and dv.
        elements=lambda b, t, n, hk, hv, d: b * t * (d * (6 * hk + 5 * hv) + 6 * hv),
        bench_shapes=(
            Case("qwen3.5-9b", (2, 4096, 1, 16, 32, 128), MORE, NORMALISED),
            Case("qwen3.5-9b", (1, 32768, 1, 16, 32, 128), MORE, NORMALISED),
            Case("qwen3.5-9b", (1, 8192, 16, 16, 32, 128), MORE, NORMALISED),
            small(1, 256, 1, 2, 4, 64, options=NORMALISED),
            *sweep(((1, t, 1, 16, 32, 128) for t in (1024, 2048, 4096, 8192, 16384, 32768)), NORMALISED),
        ),
    ),
    Workload(
        name="kda",
        call=_call,
        reference=_reference,
        inputs=partial(_inputs, has_feature_decay=True),
        legend="B x T x N x Hk x Hv x D",
        rows_axis=1,
        has_cpu_code=True,
        test_variants=(
            Variant("", (2, 70, 1, 2, 2, 16), NORMALISED, term_size=1.0),
            Variant("packed", (1, 70, 3, 1, 2, 32), NORMALISED | {"scale": 0.5}, {"value_size": 16}, term_size=1.0),
        ),
        compile_variants=(
            Variant("packed 2 + 2 x 128", (1, 200, 2, 2, 2, 128), NORMALISED),
            Variant("32 + 64 x 128", (1, 200, 1, 32, 64, 128), NORMALISED),
        ),
        # The tensors are those of the workload above. Forward and backward also read g, and backward writes dg.
        elements=lambda b, t, n, hk, hv, d: b * t * (d * (6 * hk + 8 * hv) + 3 * hv),
        bench_shapes=(
            Case("kimi-linear-48b", (2, 4096, 1, 32, 32, 128), MORE, NORMALISED),
            Case("kimi-linear-48b", (1, 8192, 16, 32, 32, 128), MORE, NORMALISED),
            small(1, 256, 1, 4, 4, 64, options=NORMALISED),
            *sweep(((1, t, 1, 32, 32, 128) for t in (1024, 4096, 16384)), NORMALISED),
        ),
    ),
)
