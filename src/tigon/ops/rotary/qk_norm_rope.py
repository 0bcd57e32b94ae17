r"""RMS normalisation of queries and keys, then rotary position embedding, in one kernel for each direction.

`kernels.py` has the kernels and the formulas. The norm is over the features of one head (w of shape [D], Qwen3,
Gemma 3) or over all heads of a token together (w of shape [H D], OLMo 2).

Shapes: B batch, S sequence, Hq and Hk heads of queries and keys, D head size, R rotary features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.ops.norms.rms_norm import Rounding, rms_norm_reference
from tigon.ops.rotary.heads import HeadInputs, HeadOptions, NeededHeadGradients, with_equal_strides
from tigon.ops.rotary.kernels import qk_norm_rope_backward, qk_norm_rope_forward
from tigon.ops.rotary.qk_norm_rope_config import MAX_FEATURES_TOGETHER
from tigon.ops.rotary.rope import Layout, axes_of, can_run_kernels, check_rope, rope_reference
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.device import next_power_of_2, runs_kernels
from tigon.runtime.op import Node


def _normalises_together(size: int, *weights: Tensor | None) -> bool:
    """Return whether all heads of a token are normalised together. A weight wider than one head requests this."""
    return any(weight is not None and tuple(weight.shape) != (size,) for weight in weights)


def qk_norm_rope_reference(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, *,
    eps: float = 1e-6, offset: float = 0.0, rounding: Rounding = "before_weight", unsqueeze_dim: int = 1,
    layout: Layout = "split_half", sections: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    together = _normalises_together(q.shape[-1], q_weight, k_weight)

    def normalise(x: Tensor, weight: Tensor | None) -> Tensor:
        if not together:
            return rms_norm_reference(x, weight, eps, offset=offset, rounding=rounding)
        x = x.transpose(1, 2) if unsqueeze_dim == 1 else x
        y = rms_norm_reference(x.flatten(2), weight, eps, offset=offset, rounding=rounding).view(x.shape)
        return y.transpose(1, 2) if unsqueeze_dim == 1 else y

    q, k = normalise(q, q_weight), None if k is None else normalise(k, k_weight)
    return rope_reference(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, layout=layout, sections=sections)


def _result_dtype(x: Tensor, weight: Tensor | None, table: Tensor, round_first: bool) -> torch.dtype:
    """Return the dtype of the result, as in eager code. If the normalised values are rounded before the weight
    multiplies them, the dtype of the weight is promoted too."""
    dtype = torch.promote_types(x.dtype, table.dtype)
    return dtype if weight is None or not round_first else torch.promote_types(dtype, weight.dtype)


class _QKNormRope(Node):
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
        sin: Tensor, round_first: bool, options: HeadOptions,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        cos, sin = with_equal_strides(cos, sin)
        q_weight, k_weight = (w if w is None else w.contiguous() for w in (q_weight, k_weight))
        q_dtype = _result_dtype(q, q_weight, cos, round_first)
        k_dtype = None if k is None else _result_dtype(k, k_weight, cos, round_first)
        inputs = HeadInputs(q, k, q_weight, k_weight)
        ctx.options = options
        q_out, k_out, rstd = qk_norm_rope_forward(cos, sin, inputs, options, q_dtype, k_dtype)
        ctx.save_for_backward(cos, sin, rstd, *inputs)
        keep_none_gradients(ctx)
        return q_out, None if k is None else k_out

    def backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin, rstd, *saved_inputs = ctx.saved_tensors
        upstream = dq_out, dk_out, dq_out, dk_out
        needs = [needed and dy is not None for needed, dy in zip(ctx.needs_input_grad[:4], upstream, strict=True)]
        if not any(needs):
            return ()
        inputs = HeadInputs(*saved_inputs)
        dq, dk, dw = qk_norm_rope_backward(
            cos, sin, inputs, rstd, dq_out, dk_out, ctx.options, NeededHeadGradients(*needs)
        )
        weights = inputs.q_weight, inputs.k_weight
        pairs = zip(weights, needs[2:], strict=True)
        sizes = [weight.shape[0] if needed and weight is not None else 0 for weight, needed in pairs]
        gradients = (dq, dk, *dw.split(sizes))
        return tuple(x if needed else None for x, needed in zip(gradients, needs, strict=True))


def _check_weights(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, heads: int, together: bool
) -> None:
    """Check the weights for queries and keys whose heads are in dimension `heads`."""
    checks.same("qk_norm_rope", "device", q=q, q_weight=q_weight, k_weight=k_weight)
    checks.same("qk_norm_rope", "dtype", q_weight=q_weight, k_weight=k_weight)
    if k is None and k_weight is not None:
        raise ValueError("qk_norm_rope: k_weight must be None if k is None, got a Tensor")
    for name, x, weight in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        if x is None or weight is None:
            continue
        one_head, all_heads = (x.shape[3],), (x.shape[heads] * x.shape[3],)
        if tuple(weight.shape) not in (one_head, all_heads):
            raise ValueError(
                f"qk_norm_rope: {name} must have shape {one_head} or {all_heads}, got {tuple(weight.shape)}"
            )
        if together:
            checks.shape("qk_norm_rope", name, weight, all_heads)


def qk_norm_rope(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, *,
    eps: float = 1e-6, offset: float = 0.0, rounding: Rounding = "before_weight", unsqueeze_dim: int = 1,
    layout: Layout = "split_half", sections: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Normalise queries and keys by `rms_norm`, then rotate them by `rope`. Both and their weights get gradients.

    Args:
        q: [B, Hq, S, D] with `unsqueeze_dim=1`, [B, S, Hq, D] with 2; fp32 | bf16 | fp16, any strides.
        k: The same shape with Hk heads. None computes only `q`.
        q_weight: [D] normalises each head (Qwen3, Gemma 3), and [Hq D] normalises all heads of a token together
            (OLMo 2). None means no scale; each head is then normalised, unless `k_weight` is [Hk D].
        k_weight: [D] or [Hk D], like `q_weight` and with its dtype, or None.
        cos: The table of cosines, as in `rope`.
        sin: The table of sines, as in `rope`.
        eps: The number that is added to the mean square.
        offset: The number that is added to the weights. It is 1.0 for Gemma, whose weights start at zero.
        rounding: The option of `rms_norm`. The kernels round once, at the end, so it decides only the dtype of the
            result.
        unsqueeze_dim: The dimension of the heads.
        layout: The option of `rope`.
        sections: The option of `rope`.

    Returns:
        The normalised and rotated q and k, with the strides of their inputs, in the common dtype of the input and the
        tables, and with `rounding="before_weight"` also of the weight. The second result is None if `k` is None.

    Raises:
        TypeError: A tensor argument is not a floating-point tensor, `eps` or `offset` is not a number, or `sections` is
            not a sequence.
        ValueError: `rope` refuses the arguments, a weight has another shape or device, the weights have two dtypes,
            `rounding` is unknown, or `eps` is negative.

    Source: Henry et al., "Query-Key Normalization for Transformers", arXiv:2010.04245, with the RMS norm of
    arXiv:1910.07467; Su et al., arXiv:2104.09864.

    Example:
        >>> q, k, angles = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64), torch.randn(1, 5, 64)
        >>> results = tigon.qk_norm_rope(q, k, torch.ones(64), torch.ones(64), angles.cos(), angles.sin())
        >>> [tuple(x.shape) for x in results]
        [(2, 8, 5, 64), (2, 2, 5, 64)]
    """
    check_rope("qk_norm_rope", q, k, cos, sin, unsqueeze_dim, layout, sections)
    checks.choice("qk_norm_rope", "rounding", rounding, ("before_weight", "after_weight"))
    eps, offset = checks.number("qk_norm_rope", "eps", eps, 0.0), checks.number("qk_norm_rope", "offset", offset)
    checks.floating("qk_norm_rope", q_weight=q_weight, k_weight=k_weight)
    together = _normalises_together(q.shape[3], q_weight, k_weight)
    _check_weights(q, k, q_weight, k_weight, unsqueeze_dim, together)
    return qk_norm_rope_of_layer(
        q, k, q_weight, k_weight, cos, sin, eps=eps, offset=offset, rounding=rounding, unsqueeze_dim=unsqueeze_dim,
        layout=layout, sections=sections,
    )  # fmt: skip


def qk_norm_rope_of_layer(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `qk_norm_rope` of tensors that fit together, with all options."""
    return _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, options)


def _fits_the_kernels(q: Tensor, k: Tensor | None, heads: int, together: bool) -> bool:
    """Return whether the kernels have registers for the heads, which are in dimension `heads`."""
    count = max(x.shape[heads] for x in (q, k) if x is not None)
    features = next_power_of_2(count) * next_power_of_2(q.shape[3])
    return q.shape[heads] > 0 and not (together and features > MAX_FEATURES_TOGETHER)


@recomputed_by_call
def _qk_norm_rope(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    inputs = q, k, q_weight, k_weight, cos, sin
    heads = options["unsqueeze_dim"]
    together = _normalises_together(q.shape[3], q_weight, k_weight)
    can_run = runs_kernels(q, q_weight, k_weight) and can_run_kernels(q, k, cos, sin)
    if not (can_run and _fits_the_kernels(q, k, heads, together)):
        return qk_norm_rope_reference(*inputs, **options)
    head_options = HeadOptions(
        heads, options["layout"], axes_of(options["sections"]), "halves", float(options["eps"]), options["offset"],
        together,
    )  # fmt: skip
    return _QKNormRope.apply(*inputs, options["rounding"] == "before_weight", head_options)
