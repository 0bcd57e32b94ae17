"""The rotary embeddings of `liger_kernel`, with Liger's order of arguments, on `tigon.rope`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.ops.rotary.rope import rope


def _halve(table: Tensor, half: int, unsqueeze_dim: int) -> Tensor:
    """Return the first `half` columns of a table of cosines or sines in the shape [B | 1, L, half]. Tables are [L, R],
    [B | 1, L, R], or have a dimension of size one for the heads too."""
    if table.dim() == 4:
        table = table.squeeze(unsqueeze_dim if table.shape[unsqueeze_dim] == 1 else 1)
    return (table[None] if table.dim() == 2 else table)[..., :half]


def liger_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `tigon.rope` of q and k [B, heads, L, D], each in its dtype. `position_ids` has no effect. The first
    `rotary_dim` features are rotated: as many as `cos` has columns by default. Liger reads the first half of the
    columns, and feature i is rotated with feature i + rotary_dim // 2. A last feature without a partner is copied."""
    size, columns = q.shape[-1], cos.shape[-1]
    if rotary_dim is None:
        rotary_dim = min(columns, size)
    elif rotary_dim % 2 or not 0 < rotary_dim <= min(size, 2 * columns):
        raise ValueError(
            f"liger_rope: rotary_dim must be even, positive and at most the head size {size} and twice the {columns} "
            f"columns of cos, got {rotary_dim}"
        )
    cos, sin = (_halve(table, rotary_dim // 2, unsqueeze_dim) for table in (cos, sin))
    q_out, k_out = rope(
        q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, table="once", dtype=torch.promote_types(q.dtype, k.dtype)
    )
    assert k_out is not None
    return q_out.to(q.dtype), k_out.to(k.dtype)


liger_rotary_pos_emb = liger_rope


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k with all features rotated, for tables [B, L, D / 2] that hold each frequency once."""
    return liger_rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k [L, heads, D], rotated by tables [L, D] of a vision tower."""
    q_out, k_out = liger_rope(q[None], k[None], cos, sin, unsqueeze_dim=2)
    return q_out[0], k_out[0]


def liger_qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Return q and k [B, heads, L, D] rotated by the positions of three axes, by `tigon.rope`. `cos` and `sin` [3, B,
    L, D] belong to time, height and width. Of the D / 2 frequencies, `mrope_section` says how many each axis has.
    Source: Qwen2-VL, arXiv:2409.12191, section 2.1."""
    sections, half = [int(size) for size in mrope_section], cos.shape[-1] // 2
    if len(sections) != 3 or sum(sections) != half:
        raise ValueError(f"liger_qwen2vl_mrope: mrope_section must be three sizes with the sum {half}, got {sections}")

    def merge_axes(table: Tensor) -> Tensor:
        parts = [part[axis % 3] for axis, part in enumerate(table.split(sections * 2, dim=-1))]
        return torch.cat(parts, -1)  # [B, L, D]

    return liger_rope(q, k, merge_axes(cos), merge_axes(sin), unsqueeze_dim=unsqueeze_dim)


liger_multimodal_rotary_pos_emb = liger_qwen2vl_mrope


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k [B, L, heads, D], whose adjacent pairs are multiplied by the complex numbers [..., L, D / 2]."""
    factors = freqs_cis.reshape(-1, freqs_cis.shape[-1])[: xq.shape[1]]
    return _multiply_pairs(xq, factors), _multiply_pairs(xk, factors)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key [B, L, heads, D], multiplied like those of `liger_llama4_text_rotary_pos_emb`."""
    return liger_llama4_text_rotary_pos_emb(query, key, freqs_ci)


def _multiply_pairs(x: Tensor, factors: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors[:, None]).flatten(-2).to(x.dtype)
