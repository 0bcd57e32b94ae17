r"""Kimi Delta Attention (Kimi Team, arXiv 2510.26692): the gated delta rule with a decay of each feature.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - (Diag(exp(g_t)) S_{t-1})^T k_t)
    o_t = scale S_t^T q_t

`gated_delta_rule` describes the rest, and `kda_kernels` the kernels of this op alone.
"""

from torch import Tensor

from tigon.ops.mixers.delta_rule_chunks import DeltaInputs
from tigon.ops.mixers.gated_delta_rule import compute_by_token, compute_rule

_OP = "kda"


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `kda` token by token in eager torch, for tests. On the CPU, a g above 0 is refused."""
    inputs = DeltaInputs(q, k, v, g, beta, initial_state, cu_seqlens)
    return compute_by_token(_OP, inputs, scale, output_final_state, use_qk_l2norm)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute Kimi Delta Attention, a linear recurrence over tokens. All floating-point tensors get gradients.

    Args:
        q: [B, T, Hk, Dk], fp32 | bf16 | fp16, any strides.
        k: [B, T, Hk, Dk].
        v: [B, T, Hv, Dv], where Hk divides Hv. Head h of v reads head h // (Hv / Hk) of q and k.
        g: [B, T, Hv, Dk], the logarithm of the decay of each feature. No element may be above 0. This is checked on the
            CPU only, because reading g on a GPU would wait for it; there, a g above 0 makes the results wrong.
        beta: [B, T, Hv], how far each token overwrites what the state predicts, usually in [0, 1].
        scale: The factor of q, by default Dk ** -0.5.
        initial_state: [B, Hv, Dk, Dv], or [N, Hv, Dk, Dv] for packed samples: the states before the first tokens. None
            stands for zeros.
        output_final_state: True to return the states after the last tokens.
        use_qk_l2norm: True to divide each row of q and of k by sqrt(sum of squares + 1e-6).
        cu_seqlens: [N + 1], int64 | int32, ascending from 0 to T: the bounds of N packed samples. B must be 1. Outputs
            and gradients are those of separate calls, bit for bit. The values are checked on the CPU only; on a GPU,
            all results are NaN if they do not ascend from 0 to T.

    Returns:
        o [B, T, Hv, Dv] in `v.dtype`, and the states after the last tokens, [B or N, Hv, Dk, Dv] in fp32, or None.

    Raises:
        TypeError: A tensor is not a floating-point tensor, `cu_seqlens` is not a tensor of integers, or an option has
            another type.
        ValueError: Shapes, dtypes or devices do not agree, Hk does not divide Hv, an element of `g` on the CPU is above
            0, or `cu_seqlens` on the CPU does not ascend from 0 to T.

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv:2510.26692.

    Example:
        >>> q, k, v = torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 64)
        >>> g, beta = -torch.rand(1, 100, 2, 64), torch.rand(1, 100, 2)
        >>> o, state = tigon.kda(q, k, v, g, beta, use_qk_l2norm=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    inputs = DeltaInputs(q, k, v, g, beta, initial_state, cu_seqlens)
    return compute_rule(_OP, inputs, scale, output_final_state, use_qk_l2norm)
