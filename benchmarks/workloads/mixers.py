"""Workloads of token mixers."""

import torch

from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import MORE, Case, Variant, Workload, small, sweep
from tigon.ops.mixers.causal_conv1d import causal_conv1d_reference

CHANNELS_FIRST = {"channels_last": False}


def _causal_conv1d(make: InputMaker) -> Inputs:
    """Make x, the taps and a bias.

    Form: `bounds`, the first tokens of packed samples, of which those below T are used; `positions`, the same samples
    by the position of each token; `dense_time`, x of shape [B, C, T] with dense rows.
    """
    b, t, c, w = make.sizes
    draw = lambda: make.normal(b, c, t) if make.form.get("dense_time") else make.normal(b, t, c)
    x, upstream = draw(), draw()
    if not make.options.get("channels_last", True) and not make.form.get("dense_time"):
        x, upstream = x.transpose(1, 2), upstream.transpose(1, 2)
    tensors = {"x": x.requires_grad_(), "weight": make.normal(c, w).mul_(w**-0.5).requires_grad_()}
    tensors["bias"] = make.normal(c).mul_(0.1).requires_grad_()
    bounds = [bound for bound in make.form.get("bounds", ()) if bound < max(t, 1)]
    if make.form.get("positions"):
        ranges = [torch.arange(end - start) for start, end in zip(bounds, [*bounds[1:], t], strict=True)]
        tensors["position_ids"] = torch.cat(ranges)[None].to(make.device)
    elif bounds:
        tensors["cu_seqlens"] = torch.tensor([*bounds, t], dtype=torch.int32, device=make.device)
    return Inputs(tensors, (upstream,))


WORKLOADS = (
    Workload(
        name="causal_conv1d",
        reference=causal_conv1d_reference,
        inputs=_causal_conv1d,
        legend="B x T x C x W",
        rows_axis=1,
        test_variants=(
            Variant("", (2, 7, 20, 4)),
            Variant("no bias, linear", (2, 5, 33, 3), {"bias": None, "activation": None}),
            Variant("channels first", (2, 7, 20, 4), CHANNELS_FIRST),
            Variant("dense time", (2, 7, 20, 2), CHANNELS_FIRST, {"dense_time": True}),
            Variant("packed", (1, 19, 20, 4), form={"bounds": (0, 2, 3, 12)}),
            Variant("positions", (1, 19, 20, 4), {"bias": None}, {"bounds": (0, 2, 3, 12), "positions": True}),
        ),
        compile_variants=(
            Variant("8192", (1, 64, 8192, 4), {"bias": None}),
            Variant("of 8 taps", (1, 64, 8192, 8)),
            Variant("dense time 8192", (1, 64, 8192, 4), CHANNELS_FIRST, {"dense_time": True}),
            Variant("packed 8192", (1, 64, 8192, 4), {"bias": None}, {"bounds": (0, 20)}),
            Variant("positions 8192", (1, 64, 8192, 4), {"bias": None}, {"bounds": (0, 20), "positions": True}),
        ),
        # Forward reads x and writes y; backward reads x and dy and writes dx.
        elements=lambda b, t, c, w: 5 * b * t * c + 3 * c * w,
        bench_shapes=(
            Case("qwen3.5-9b", (1, 8192, 8192, 4), MORE, {"bias": None}),
            Case("mamba-2.8b", (4, 2048, 5120, 4), MORE, CHANNELS_FIRST),
            small(1, 256, 512, 4),
            *sweep(((1, t, 8192, 4) for t in (1024, 2048, 4096, 8192, 16384, 32768)), {"bias": None}),
        ),
    ),
)
