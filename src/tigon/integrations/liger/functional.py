"""The functions of `liger_kernel.transformers.functional`, with Liger's order of arguments, on Tigon's ops.

Liger's options `in_place`, `eps` of the divergences, `chunk_mem_const`, `size_average` and `reduce` have no effect.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.integrations.liger import divergences, layers, norms, rare
from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.logits.divergences import jsd, kl_div, tvd
from tigon.ops.logits.softmax import softmax
from tigon.ops.mlps.activations import relu2
from tigon.ops.mlps.glu import geglu, swiglu
from tigon.ops.norms.layer_norm import layer_norm
from tigon.ops.norms.rms_norm import add_rms_norm, rms_norm
from tigon.ops.rotary.rope import rope

# --- losses ----------------------------------------------------------------------------------------


def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0, lse_square_scale: float = 0.0,
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:  # fmt: skip
    """Return `tigon.cross_entropy` of logits [T, V], or a `CrossEntropyOutput` if more was requested."""
    module = layers.LigerCrossEntropyLoss(
        weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return module(input, target)


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Any:  # fmt: skip
    """Return `tigon.linear_cross_entropy` of hidden states [T, H] and a head [V, H]."""
    module = layers.LigerFusedLinearCrossEntropyLoss(
        ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype,
        use_token_scaling, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return module(weight, input, target, bias)


def token_nll(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, ignore_index: int, return_entropy: bool,
    selected_token_ids: Tensor | None = None, group: Any = None,
) -> Any:  # fmt: skip
    """Return -log p(target) [T], and on request the entropy [T] and the log-probabilities of K tokens [T, K], in fp32.

    With a group, `weight` has the rows of this rank, and every rank has equally many.
    """
    ranks = 1 if group is None else group.size()
    sharding: dict[str, Any] = {"process_group": group, "vocab_size": ranks * weight.shape[0]} if ranks > 1 else {}
    extra_targets = None
    if selected_token_ids is not None:
        extra_targets = selected_token_ids.expand(target.numel(), -1)
    result = linear_log_probs(
        hidden, weight, target, temperature=temperature, ignore_index=ignore_index, return_entropy=return_entropy,
        extra_targets=extra_targets, **sharding,
    )  # fmt: skip
    if isinstance(result, Tensor):
        return -result
    further = (result.entropy, result.extra_log_probs)
    return (-result.log_probs, *(value for value in further if value is not None))


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0, ignore_index: int = -100,
    tiles_per_reduce: int = 1, return_entropy: bool = False,
) -> Any:  # fmt: skip
    """Return -log p(target) [T], and the entropy on request, for a head whose rows are sharded over the group.

    `tigon.linear_log_probs` computes them. None as the group means all ranks. `tiles_per_reduce` has no effect.
    """
    if tp_group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        tp_group = torch.distributed.group.WORLD
    return token_nll(input, weight, target, temperature, ignore_index, return_entropy, group=tp_group)


def liger_fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return the generalised Jensen-Shannon divergence of two heads, by `tigon.linear_distillation`."""
    module = divergences.LigerFusedLinearJSD(jsd_beta, ignore_index, temperature, accum_dtype)
    return module.forward(student_input, student_weight, teacher_input, teacher_weight, shift_labels)


def liger_fused_linear_kl_div(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
    reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return KL(target || student) of a head and probabilities [N, V], by `tigon.linear_distillation`."""
    module = divergences.LigerFusedLinearKLDivLoss(reduction, ignore_index, temperature, eps, accum_dtype)
    return module.forward(student_input, student_weight, target, shift_labels)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Return `tigon.jsd` of log-probabilities [N, V], in the dtype of `input`."""
    return jsd(input, target, beta=beta, labels=shift_labels, ignore_index=ignore_index).to(input.dtype)


def liger_kl_div(
    input: Tensor, target: Tensor, size_average: Any = True, reduce: Any = True, reduction: str = "mean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """Return `tigon.kl_div` of log-probabilities [N, V]."""
    return kl_div(input, target, reduction=reduction, log_target=log_target)  # type: ignore[arg-type]


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Return `tigon.tvd` of probabilities [N, V]."""
    return tvd(input, target, reduction=reduction, labels=shift_labels, ignore_index=ignore_index)  # type: ignore[arg-type]


# --- activations -----------------------------------------------------------------------------------


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b, by `tigon.swiglu`."""
    return swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """Return gelu_tanh(a) * b, by `tigon.geglu`."""
    return geglu(a, b, approximate="tanh")


def liger_relu_squared(x: Tensor) -> Tensor:
    """Return `tigon.relu2` of x."""
    return relu2(x)


def liger_softmax(x: Tensor) -> Tensor:
    """Return `tigon.softmax` of x over the last dimension."""
    return softmax(x)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Return sparsemax over a dimension, a composition of torch."""
    return rare.LigerSparsemax(dim).forward(input)


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """Return gamma * tanh(alpha * x) + beta, a composition of torch."""
    y = gamma * torch.tanh(alpha * x)
    return y if beta is None else y + beta


# --- norms -----------------------------------------------------------------------------------------


def _norm_options(casting_mode: str, eps: float, offset: float) -> dict[str, Any]:
    if casting_mode not in layers.ROUNDING:
        raise ValueError(
            f"liger_rms_norm: casting_mode must be one of {', '.join(layers.ROUNDING)}, got {casting_mode!r}"
        )
    return {"eps": eps, "offset": offset, "rounding": layers.ROUNDING[casting_mode]}


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """Return `tigon.rms_norm` of X, in its dtype."""
    return rms_norm(X, W, **_norm_options(casting_mode, eps, offset)).to(X.dtype)


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the norm of X + R, and the sum, by `tigon.add_rms_norm`."""
    return add_rms_norm(X, R, W, **_norm_options(casting_mode, eps, offset))


def liger_modulated_rms_norm(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama", in_place: bool = True,
) -> Tensor:  # fmt: skip
    """Return (1 + scale) * norm(X) + shift."""
    return norms.modulate(liger_rms_norm(X, W, eps, offset, casting_mode), scale, shift)


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """Return W0 n(X^3) + W1 n(X^2) + W2 n(X) + B."""
    return rare.poly_norm(X, W, B, eps)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    """Return `tigon.layer_norm` of X."""
    return layer_norm(X, W, B, eps)


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor, affine_shifting_bias: Tensor, num_channels: int, num_groups: int,
    eps: float,
) -> Tensor:  # fmt: skip
    """Return the group norm of X [B, C, ...], a call of torch."""
    return F.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


# --- rotary embedding ------------------------------------------------------------------------------


def _halve(table: Tensor, half: int, unsqueeze_dim: int) -> Tensor:
    """Return the first `half` columns of a table of cosines or sines in the shape [B | 1, L, half].

    Tables are [L, R], [B | 1, L, R], or have a dimension of size one for the heads too.
    """
    if table.dim() == 4:
        table = table.squeeze(unsqueeze_dim if table.shape[unsqueeze_dim] == 1 else 1)
    return (table[None] if table.dim() == 2 else table)[..., :half]


def liger_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `tigon.rope` of q and k [B, heads, L, D], each in its dtype. `position_ids` has no effect.

    The first `rotary_dim` features are rotated: as many as `cos` has columns by default. Liger reads the first half of
    the columns, and feature i is rotated with feature i + rotary_dim // 2. A last feature without a partner is copied.
    """
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
    """Return q and k [B, heads, L, D] rotated by the positions of three axes, by `tigon.rope`.

    `cos` and `sin` [3, B, L, D] belong to time, height and width. Of the D / 2 frequencies, `mrope_section` says how
    many each axis has. Source: Qwen2-VL, arXiv:2409.12191, section 2.1.
    """
    sections, half = [int(size) for size in mrope_section], cos.shape[-1] // 2
    if len(sections) != 3 or sum(sections) != half:
        raise ValueError(f"liger_qwen2vl_mrope: mrope_section must be three sizes with the sum {half}, got {sections}")

    def merge_axes(table: Tensor) -> Tensor:
        parts = [part[axis % 3] for axis, part in enumerate(table.split(sections * 2, dim=-1))]
        return torch.cat(parts, -1)  # [B, L, D]

    return liger_rope(q, k, merge_axes(cos), merge_axes(sin), unsqueeze_dim=unsqueeze_dim)


liger_multimodal_rotary_pos_emb = liger_qwen2vl_mrope


# --- attention: compositions of torch --------------------------------------------------------------


def liger_multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Return the convolution of the causal attention weights of scores [B, C, L, L]. Source: arXiv:2504.00927."""
    return rare.multi_token_attention(scores, weight, bias, stride, padding, dilation, groups, sparse)


def liger_fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Return attention [B, heads, L, D] to the kernel_size // 2 tokens on each side at multiples of the dilation.

    The neighbourhood of a token near the ends is smaller, as in Liger. Source: arXiv:2504.16922, in one dimension.
    """
    return rare.neighborhood_attention(query, key, value, kernel_size, dilation, scale)


def liger_attn_res(V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the outputs V [N, B, T, D] of N blocks, summed with the weights of an attention over the blocks.

    The scores are `rms_norm(V, w_norm) @ w_query`, and the weights their softmax over N. Source: arXiv:2603.15031.
    """
    blocks = V if isinstance(V, Tensor) else torch.stack(list(V))
    scores = (rms_norm(blocks, w_norm, eps=eps).float() * w_query.float()).sum(-1)  # [N, B, T]
    return (scores.softmax(0)[..., None] * blocks.float()).sum(0).to(blocks.dtype)
