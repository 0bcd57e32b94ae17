r"""RMS normalisation of queries and keys, then rotary position embedding: one kernel each way.

    x_hat = x * rstd,  rstd = (mean(x^2) + eps)^-1/2                                                       (fp32)
    y     = turn((offset + w) * x_hat)
    g     = (offset + w) * h,  h = turn_back(dy)
    dx    = rstd * (g - x_hat * mean(g * x_hat))
    dw    = sum(h * x_hat)

The mean is over the features of one head (w of shape [D], Qwen3, Gemma 3) or over all heads of a token together (w of
shape [H D], OLMo 2). `turn` is the rotation of `tigon.ops.rotary.rope`, in all its layouts. The kernels are in
`norm_rope.py`.

Shapes: B batch, S sequence, Hq and Hk heads of queries and keys, D head size, R rotary features.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from tigon.memory.lean import remade
from tigon.ops.norms.rms_norm import Rounding, rms_norm_reference
from tigon.ops.rotary.heads import alike
from tigon.ops.rotary.qk_norm_rope_kernels import WIDEST, qk_norm_rope_backward, qk_norm_rope_forward
from tigon.ops.rotary.rope import Layout, axes_of, check_rope, rope_reference, takes_kernels
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, keep_none_gradients
from tigon.runtime.device import runs_kernels

__all__ = ["qk_norm_rope", "qk_norm_rope_reference"]


# --- reference -----------------------------------------------------------------------------------


def _over_heads(size: int, *weights: Tensor | None) -> bool:
    """Whether the weights say that all heads of a token are normalised together."""
    return any(weight is not None and tuple(weight.shape) != (size,) for weight in weights)


def qk_norm_rope_reference(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, *,
    eps: float = 1e-6, offset: float = 0.0, rounding: Rounding = "before_weight", unsqueeze_dim: int = 1,
    layout: Layout = "split_half", sections: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Eager definition of `qk_norm_rope`; the tests' ground truth and the CPU path."""
    together = _over_heads(q.shape[-1], q_weight, k_weight)

    def normalise(x: Tensor | None, weight: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if not together:
            return rms_norm_reference(x, weight, eps, offset=offset, rounding=rounding)
        stored = x.transpose(1, 2) if unsqueeze_dim == 1 else x
        y = rms_norm_reference(stored.flatten(2), weight, eps, offset=offset, rounding=rounding).view(stored.shape)
        return y.transpose(1, 2) if unsqueeze_dim == 1 else y

    q, k = normalise(q, q_weight), normalise(k, k_weight)
    return rope_reference(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, layout=layout, sections=sections)


# --- autograd ------------------------------------------------------------------------------------


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, eps, offset, round_first, *options):
        cos, sin = alike(cos, sin)
        q_weight, k_weight = (w if w is None else w.contiguous() for w in (q_weight, k_weight))
        dtypes = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            dtype = cos.dtype if weight is None or not round_first else torch.promote_types(weight.dtype, cos.dtype)
            dtypes.append(None if x is None else torch.promote_types(x.dtype, dtype))
        q_out, k_out, rstd = qk_norm_rope_forward(cos, sin, q, k, q_weight, k_weight, eps, offset, *options, *dtypes)
        ctx.save_for_backward(cos, sin, q, k, q_weight, k_weight, rstd)
        keep_none_gradients(ctx)
        ctx.options = offset, *options
        return q_out, None if k is None else k_out

    @staticmethod
    @first_order
    def backward(ctx, dq_out, dk_out):
        cos, sin, *saved = ctx.saved_tensors
        upstream = (dq_out, dk_out, dq_out, dk_out)
        needs = [needed and dy is not None for needed, dy in zip(ctx.needs_input_grad, upstream, strict=False)]
        if not any(needs):
            return (None,) * 13
        dq, dk, dw = qk_norm_rope_backward(cos, sin, dq_out, dk_out, *saved, *ctx.options, *needs)
        dws = dw.split([w.shape[0] if needed else 0 for w, needed in zip(saved[2:4], needs[2:], strict=True)])
        gradients = [x if needed else None for x, needed in zip((dq, dk, *dws), needs, strict=True)]
        return *gradients, *(None,) * 9


# --- public --------------------------------------------------------------------------------------


def _check_weights(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, heads: int, together: bool
) -> None:
    checks.same("qk_norm_rope", "device", q=q, q_weight=q_weight, k_weight=k_weight)
    checks.same("qk_norm_rope", "dtype", q_weight=q_weight, k_weight=k_weight)
    if k is None and k_weight is not None:
        raise ValueError("qk_norm_rope: k_weight must be None where k is")
    for name, x, weight in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        if weight is None:
            continue
        each, of_all = (q.shape[3],), (x.shape[heads] * x.shape[3],)
        if tuple(weight.shape) not in (each, of_all):
            raise ValueError(f"qk_norm_rope: {name} must have shape {each} or {of_all}, got {tuple(weight.shape)}")
        if together:
            checks.shape("qk_norm_rope", name, weight, of_all)


def qk_norm_rope(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, *,
    eps: float = 1e-6, offset: float = 0.0, rounding: Rounding = "before_weight", unsqueeze_dim: int = 1,
    layout: Layout = "split_half", sections: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """RMS normalisation of queries and keys, then `rope`, with gradients for both and for their weights.

    Args:
        q: [B, Hq, S, D] with `unsqueeze_dim=1`, [B, S, Hq, D] with 2; fp32 | bf16 | fp16, any strides.
        k: The same with Hk heads; None takes `q` alone.
        q_weight: [D] normalises each head (Qwen3, Gemma 3), [Hq D] all heads of a token together (OLMo 2). Without a
            weight, None, each head, unless the other weight is one of all heads.
        k_weight: [D] or [Hk D], as `q_weight`, and of its dtype; or None.
        cos: As in `rope`.
        sin: As in `rope`.
        eps: Added to the mean square.
        offset: Added to the weights; 1.0 for Gemma, whose weights start at zero.
        rounding: As in `rms_norm`. The kernels round once, at the end, so that it decides the dtype of the result only.
        unsqueeze_dim: The dimension of the heads.
        layout: As in `rope`.
        sections: As in `rope`.

    Returns:
        q and k with the strides of their inputs, in the common dtype of each and the tables; with
        `rounding="before_weight"` of these and the weight. A `k` of None comes back as None.

    Raises:
        TypeError: An argument is no floating-point tensor.
        ValueError: What `rope` refuses; a weight of another shape or device, weights of two dtypes, an unknown
            `rounding`, or a negative `eps`.

    Source: Henry et al., "Query-Key Normalization for Transformers", arXiv:2010.04245, with the RMS norm of
    arXiv:1910.07467; Su et al., arXiv:2104.09864.

    Example:
        >>> q, k, angles = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64), torch.randn(1, 5, 64)
        >>> turned = tigon.qk_norm_rope(q, k, torch.ones(64), torch.ones(64), angles.cos(), angles.sin())
        >>> [tuple(x.shape) for x in turned]
        [(2, 8, 5, 64), (2, 2, 5, 64)]
    """
    check_rope("qk_norm_rope", q, k, cos, sin, unsqueeze_dim, layout, sections)
    checks.choice("qk_norm_rope", "rounding", rounding, ("before_weight", "after_weight"))
    eps, offset = checks.number("qk_norm_rope", "eps", eps, 0.0), checks.number("qk_norm_rope", "offset", offset)
    checks.floating("qk_norm_rope", q_weight=q_weight, k_weight=k_weight)
    together = _over_heads(q.shape[3], q_weight, k_weight)
    _check_weights(q, k, q_weight, k_weight, unsqueeze_dim, together)
    heads = max(x.shape[unsqueeze_dim] for x in (q, k) if x is not None)
    features = triton.next_power_of_2(heads) * triton.next_power_of_2(q.shape[3])
    fits = runs_kernels(q, q_weight, k_weight) and q.shape[unsqueeze_dim] and not (together and features > WIDEST)
    if not (fits and takes_kernels(q, k, cos, sin)):
        return _by_reference(
            q, k, q_weight, k_weight, cos, sin, eps, offset, rounding, unsqueeze_dim, layout, sections
        )  # fmt: skip
    return _by_kernels(
        q, k, q_weight, k_weight, cos, sin, eps, offset, rounding == "before_weight",
        unsqueeze_dim, layout, axes_of(sections), together,
    )  # fmt: skip


@remade
def _by_kernels(*args: object) -> tuple[Tensor, Tensor | None]:
    return _QKNormRope.apply(*args)


@remade
def _by_reference(
    q, k, q_weight, k_weight, cos, sin, eps, offset, rounding, unsqueeze_dim, layout, sections
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return qk_norm_rope_reference(
        q, k, q_weight, k_weight, cos, sin, eps=eps, offset=offset, rounding=rounding,
        unsqueeze_dim=unsqueeze_dim, layout=layout, sections=sections,
    )  # fmt: skip
