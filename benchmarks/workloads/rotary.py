"""Workloads of the rotary ops. Sizes: B batch, S sequence, Hq query heads, Hk key heads, D head size."""

import torch
from torch import Tensor

from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.norms import GEMMA_NORM
from benchmarks.workloads.workload import FIRST_ROOFLINE, MORE, ROOFLINE, Case, Variant, Workload, small, sweep
from tigon.ops.rotary.qk_norm_rope import qk_norm_rope_reference
from tigon.ops.rotary.rope import rope_reference

LEGEND = "B x S x Hq x Hk x D"
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)

# No two angles of a row are equal, so a kernel that reads one half of a table for the other one fails.
UNEQUAL = {"unequal_angles": True}
INTERLEAVED = {"layout": "interleaved"}
PAIRS, ONCE = INTERLEAVED | {"table": "pairs"}, INTERLEAVED | {"table": "once"}
ALTERNATING = {**INTERLEAVED, "sections": (1,) * 6 + (2,)}
TEST_SIZES = (2, 3, 6, 2, 16)


def _angles(make: InputMaker, b: int, s: int, r: int) -> Tensor:
    """Return [1, S, R] fp32 with each frequency twice, as in Hugging Face's tables, or [3, B, S, R] for three axes."""
    if make.form.get("unequal_angles"):
        return make.normal(*((3,) if "sections" in make.options else ()), b, s, r, dtype=torch.float32)
    frequency = 500_000.0 ** (-torch.arange(0, r, 2, device=make.device, dtype=torch.float32) / r)
    positions = torch.arange(s, device=make.device, dtype=torch.float32)[None]
    if "sections" in make.options:
        # The axes are time, height and width of an image that is 32 patches wide.
        positions = torch.stack((positions // 1024, positions % 1024 // 32, positions % 32)).expand(3, b, s)
    angle = positions[..., None] * frequency
    if make.options.get("table") == "pairs":
        return angle.repeat_interleave(2, -1)
    return torch.cat((angle, angle), -1)


def _rope(make: InputMaker) -> Inputs:
    """Make q, k and the tables. Form: `rotated` features of each head are rotated (all by default); `unequal_angles`
    draws every angle; `complex` takes the tables from the real and the imaginary parts of complex numbers, without a
    copy."""
    b, s, query_heads, key_heads, d = make.sizes
    # Projections store (B, S, heads, D) and attention reads (B, heads, S, D); gradients have that layout too.
    heads = lambda count: make.normal(b, s, count, d).transpose(1, 2)
    q, k, dq, dk = heads(query_heads), heads(key_heads), heads(query_heads), heads(key_heads)
    angles = _angles(make, b, s, make.form.get("rotated", d))
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    if make.form.get("complex"):
        cos, sin = torch.stack((cos[..., : d // 2], sin[..., : d // 2]), -1).unbind(-1)
    return Inputs({"q": q.requires_grad_(), "k": k.requires_grad_(), "cos": cos, "sin": sin}, (dq, dk))


def _qk_norm_rope(make: InputMaker) -> Inputs:
    """Make the inputs of rope, and weights for each head; form: with `all_heads` for all heads of a token together."""
    inputs = _rope(make)
    _, _, query_heads, key_heads, d = make.sizes
    widths = (query_heads * d, key_heads * d) if make.form.get("all_heads") else (d, d)
    q_weight, k_weight = (make.scale(width).requires_grad_() for width in widths)
    q, k, cos, sin = inputs.tensors.values()
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    return Inputs(tensors, inputs.upstream)


WORKLOADS = (
    Workload(
        name="rope",
        reference=rope_reference,
        inputs=_rope,
        legend=LEGEND,
        rows_axis=1,
        test_variants=(
            Variant("", TEST_SIZES, form=UNEQUAL),
            Variant("interleaved", TEST_SIZES, INTERLEAVED, UNEQUAL),
            Variant("deinterleaved", TEST_SIZES, {"layout": "deinterleaved"}, UNEQUAL),
            Variant("pairs", TEST_SIZES, PAIRS, UNEQUAL),
            Variant("complex", TEST_SIZES, ONCE, UNEQUAL | {"complex": True}),
            Variant("sections", TEST_SIZES, {"sections": (2, 3, 3)}, UNEQUAL),
            Variant("of one tensor", TEST_SIZES, {"k": None}, UNEQUAL),
        ),
        compile_variants=(
            Variant("32 + 8 x 128", (1, 4, 32, 8, 128)),
            Variant("16 + 8 x 256, half of the head", (1, 4, 16, 8, 256), form={"rotated": 128}),
            Variant("interleaved 32 + 2 x 128, half of the head", (1, 4, 32, 2, 128), INTERLEAVED, {"rotated": 64}),
            Variant("interleaved, tables in pairs 32 + 8 x 128", (1, 4, 32, 8, 128), PAIRS),
            Variant("complex 40 + 8 x 128", (1, 4, 40, 8, 128), ONCE, {"complex": True}),
            Variant("deinterleaved 128 + 1 x 64", (1, 4, 128, 1, 64), {"layout": "deinterleaved"}),
            Variant("sections 28 + 4 x 128", (1, 4, 28, 4, 128), {"sections": (16, 24, 24)}),
        ),
        # Backward needs cos and sin, but neither q nor k.
        elements=lambda b, s, hq, hk, d: 4 * b * s * (hq + hk) * d + 4 * s * d,
        bench_shapes=(
            Case("llama-3-8b", (4, 4096, 32, 8, 128), FIRST_ROOFLINE),
            Case("gemma-2-2b", (4, 4096, 8, 4, 256), MORE),
            Case("helium-1-preview-2b", (4, 4096, 20, 20, 128), MORE, INTERLEAVED),
            Case("deepseek-v3", (4, 4096, 128, 1, 64), MORE, {"layout": "deinterleaved"}),
            Case("qwen2.5-vl-7b", (4, 4096, 28, 4, 128), MORE, {"sections": (16, 24, 24)}),
            small(1, 256, 8, 2, 64),
            *sweep((1, s, 32, 8, 128) for s in LENGTHS),
        ),
    ),
    Workload(
        name="qk_norm_rope",
        reference=qk_norm_rope_reference,
        inputs=_qk_norm_rope,
        legend=LEGEND,
        rows_axis=1,
        test_variants=(
            Variant("", TEST_SIZES, form=UNEQUAL),
            Variant("offset after", TEST_SIZES, GEMMA_NORM, UNEQUAL),
            Variant("over all heads", TEST_SIZES, form=UNEQUAL | {"all_heads": True}),
            Variant("sections no weight", TEST_SIZES, ALTERNATING | {"q_weight": None, "k_weight": None}, UNEQUAL),
            Variant("of one tensor", TEST_SIZES, {"k": None, "k_weight": None}, UNEQUAL),
        ),
        compile_variants=(
            Variant("32 + 8 x 128", (1, 4, 32, 8, 128)),
            Variant("8 + 4 x 256", (1, 4, 8, 4, 256), GEMMA_NORM),
            Variant("16 + 2 x 256, a quarter of the head", (1, 4, 16, 2, 256), form={"rotated": 64}),
            Variant("interleaved 32 + 8 x 128", (1, 4, 32, 8, 128), INTERLEAVED),
            Variant("96 + 8 x 128, half of the head", (1, 4, 96, 8, 128), form={"rotated": 64}),
            Variant("one tensor 8 x 512", (1, 4, 8, 1, 512), {"k": None, "k_weight": None}),
            Variant("over all 16 + 16 x 128", (1, 4, 16, 16, 128), form={"all_heads": True}),
            Variant("over all 32 + 32 x 128", (1, 4, 32, 32, 128), form={"all_heads": True}),
            Variant("over all 40 + 8 x 128", (1, 4, 40, 8, 128), form={"all_heads": True}),
        ),
        # The backward of the norms needs q and k.
        elements=lambda b, s, hq, hk, d: 5 * b * s * (hq + hk) * d + 4 * s * d + 6 * d,
        bench_shapes=(
            Case("qwen3-8b", (4, 4096, 32, 8, 128), ROOFLINE),
            Case("gemma-3-4b", (4, 4096, 8, 4, 256), MORE, GEMMA_NORM),
            small(1, 256, 8, 2, 64),
            *sweep((1, s, 32, 8, 128) for s in LENGTHS),
        ),
    ),
)
