r"""Log-probabilities of the tokens of a sequence under a language model's head, without holding all logits.

For hidden state x, head W, b, target t, logit scale s, soft cap c and temperature tau:

    a     = x W^T + b
    z_j   = c tanh(s a_j / c) / tau              without a soft cap z_j = s a_j / tau
    log p = z_t - log sum_j exp(z_j)             da_j = ([j = t] - p_j) dz_j / da_j    per unit of upstream gradient

The temperature divides after the soft cap, as it does when a model samples. With c' = c / tau and s' = s / tau this is
z_j = c' tanh(s' a_j / c'), so the kernels of the cross entropy compute it without a further option.

`log_prob_chunks` has the products: one forward, three backward, because the upstream gradient differs from token to
token and dW depends on it.

Shapes: T tokens (all leading dimensions), H hidden, V vocabulary, K extra targets of each token.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.head.arguments import (
    cast_for_products,
    check_head,
    check_sums,
    check_valid_rows,
    log_prob_options,
    needed_gradients,
)
from tigon.ops.head.chunks import Head, HeadSettings, head_of
from tigon.ops.head.gradients import Needs
from tigon.ops.head.log_prob_chunks import LogProbSettings, log_prob_gradients, log_prob_statistics
from tigon.ops.logits.cross_entropy import entropy_of, gather_log_probs
from tigon.ops.logits.divergence_reference import apply_to_logits
from tigon.ops.logits.token.kernels import SavedStatistics, Upstream, Wants, gradient_scales
from tigon.ops.logits.valid_rows import ValidRows, as_targets
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.op import Node


class LogProbOutput(NamedTuple):
    """The log-probabilities and the further results that were requested. The fields of other results are None.

    `log_probs`, `entropy` and `extra_log_probs` are differentiable. All results are 0 (False) for ignored targets.
    """

    log_probs: Tensor  # [...] fp32
    entropy: Tensor | None = None  # [...] fp32, in nats
    is_top1: Tensor | None = None  # [...] bool: whether the target is the first of the largest logits
    # [...] fp32: the mean over the vocabulary of the logits after scale, soft cap and temperature
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None  # [...] fp32: log sum_j p_j^2
    extra_log_probs: Tensor | None = None  # [..., K] fp32: the log-probabilities of the extra targets


def linear_log_probs_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100, return_entropy: bool = False,
    return_top1: bool = False, return_mean_logits: bool = False, return_sum_sq_probs: bool = False,
    extra_targets: Tensor | None = None, fp32_products: bool = False,
) -> Tensor | LogProbOutput:  # fmt: skip
    """Compute `linear_log_probs` by its eager definition with all logits, the ground truth of the tests."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if fp32_products:
        hidden, weight, bias = hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    z = apply_to_logits(F.linear(hidden, weight, bias).to(wide), logit_scale, softcap) / temperature
    log_p, valid = torch.log_softmax(z, -1), targets != ignore_index
    log_probs = gather_log_probs(log_p, targets[..., None], targets, ignore_index)[..., 0]
    if not (return_entropy or return_top1 or return_mean_logits or return_sum_sq_probs or extra_targets is not None):
        return log_probs
    return LogProbOutput(
        log_probs,
        entropy_of(log_p, targets, ignore_index) if return_entropy else None,
        valid & (z.argmax(-1) == targets) if return_top1 else None,
        z.detach().mean(-1).where(valid, 0.0) if return_mean_logits else None,
        torch.logsumexp(2.0 * log_p.detach(), -1).where(valid, 0.0) if return_sum_sq_probs else None,
        None if extra_targets is None else gather_log_probs(log_p, extra_targets, targets, ignore_index),
    )


class _LinearLogProbs(Node):
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, extra_targets: Tensor | None,
        valid_rows: ValidRows | Literal[False] | None, settings: LogProbSettings,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        keep_none_gradients(ctx)
        head, ignore_index = head_of(x, weight, bias, target, valid_rows, settings.head), settings.head.ignore_index
        # Log-probabilities have no class weights and are not divided by a number of items.
        scales = gradient_scales(target, None, None, settings.head.shard.vocabulary, ignore_index, False)
        result = log_prob_statistics(head, extra_targets, scales, settings)
        ctx.save_for_backward(
            *head[:5], extra_targets, scales, result.lse, result.log_probs, result.entropy, result.predicted
        )
        ctx.computed, ctx.settings = head.computed, settings
        constants = result.predicted, result.mean_logits, result.log_sum_sq_probs
        ctx.mark_non_differentiable(*(values for values in constants if values is not None))
        return result.log_probs, result.entropy, result.extra_log_probs, *constants

    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None, dextra: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        *inputs, extra_targets, scales, lse, log_probs, entropy, argmax = ctx.saved_tensors
        wants = ctx.settings.wants
        dentropy, dextra = dentropy if wants.entropy else None, dextra if wants.extra_targets else None
        if dlog_probs is None and dentropy is None and dextra is None:
            return ()
        upstream = Upstream(lse.new_zeros(()), dlog_probs, dentropy, dextra)
        gradients = log_prob_gradients(
            Head._make((*inputs, ctx.computed)), extra_targets, scales,
            SavedStatistics(lse, log_probs, entropy if wants.entropy else None, argmax), upstream, ctx.settings,
        )  # fmt: skip
        return gradients[:3]


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100, return_entropy: bool = False,
    return_top1: bool = False, return_mean_logits: bool = False, return_sum_sq_probs: bool = False,
    extra_targets: Tensor | None = None, fp32_products: bool = False, acc_dtype: torch.dtype | None = torch.float32,
    valid_rows: ValidRows | Literal[False] | None = None, process_group: "torch.distributed.ProcessGroup | None" = None,
    vocab_size: int | None = None,
) -> Tensor | LogProbOutput:  # fmt: skip
    """Return the log-probabilities of tokens, `log_softmax(linear(hidden, weight))` at the targets, in fp32.

    The result is differentiable with any upstream gradient, so a loss of preference or policy optimization is a few
    lines of torch on it. Only the logits of one chunk exist at a time, on every device. Ignored tokens are not
    computed, and each gradient is computed only if it is needed. Forward and backward take four products, and a call
    without gradients takes one.

    Args:
        hidden: [..., H] hidden states, fp32 | bf16 | fp16.
        weight: [V, H] of the head, of the same dtype. Under autocast both are cast as `linear` casts them, and the dW
            of an fp32 weight is fp32 and not rounded. A half-precision dW is summed in fp32 and rounded once.
        targets: [...] token indices, int64 | int32.
        bias: [V].
        temperature: Divides the logits after `logit_scale` and `softcap`. It must be positive.
        softcap: Logits become `softcap * tanh(logits / softcap)` (Gemma 2), after `logit_scale`.
        logit_scale: Multiplies the logits (Cohere, Granite).
        ignore_index: Tokens with this target have results and gradients of exactly zero.
        return_entropy: Also return the entropy of the probabilities in nats. It is differentiable.
        return_top1: Also return whether the target is the first of the largest logits.
        return_mean_logits: Also return the mean over the vocabulary of the logits after scale, soft cap and
            temperature. It has no gradient.
        return_sum_sq_probs: Also return the logarithm of the sum of the squared probabilities (WPO). It has no
            gradient.
        extra_targets: [..., K] further token indices, int64 | int32, whose log-probabilities are returned too. They are
            differentiable. Entries of `ignore_index` have a log-probability and gradients of zero.
        fp32_products: Compute the products in fp32, so that neither logits nor their gradients are rounded to half
            precision. `hidden`, `weight` and `bias` may then have different dtypes, and autocast does not cast them.
            For half-precision tensors on a GPU, the forward product takes as long as without this option, because
            tensor cores sum in fp32. The backward products of fp32 numbers take much longer.
        acc_dtype: torch.float32 rounds a half-precision dW once. None rounds it up to 8 times for many tokens (more
            than 20000 of H = 4096), which saves an fp32 sum of the size of dW. It has no effect on other dtypes.
        valid_rows: The `ValidRows` of `targets`, or False, as in `linear_cross_entropy`.
        process_group, vocab_size: The ranks of a tensor-parallel head, and V, as in `linear_cross_entropy`. Targets are
            indices of the whole vocabulary. Every rank gets all results, and dx summed over the ranks. All ranks must
            call backward.

    Returns:
        The log-probabilities [...] in fp32, or a `LogProbOutput` if a further result is requested. A target that is
        neither in [0, V) nor `ignore_index` makes its log-probability, and its row of the gradient, NaN.

    Raises:
        TypeError: `hidden`, `weight` or `bias` is not a floating-point tensor, `targets` or `extra_targets` is not an
            integer tensor, or an option has a wrong type.
        ValueError: Shapes, dtypes, devices or shards do not match, or an option is out of range.

    Source: the order of scale, soft cap and temperature, and the further results, TRL 1.16; the sum of squared
    probabilities, Zhou et al., "WPO", arXiv:2406.11827; entropy in policy gradients, Mnih et al., arXiv:1602.01783.

    Example:
        >>> hidden, head = torch.randn(6, 16, requires_grad=True), torch.randn(100, 16)
        >>> log_probs = tigon.linear_log_probs(hidden, head, torch.randint(100, (6,)), temperature=0.7)
        >>> advantages = torch.randn(6)
        >>> (-advantages * log_probs).mean().backward(); hidden.grad.shape
        torch.Size([6, 16])
    """
    op = "linear_log_probs"
    checks.tensor(op, hidden=hidden, weight=weight, targets=targets)
    checks.flag(
        op, return_entropy=return_entropy, return_top1=return_top1, return_mean_logits=return_mean_logits,
        return_sum_sq_probs=return_sum_sq_probs, fp32_products=fp32_products,
    )  # fmt: skip
    check_sums(op, None, acc_dtype)
    hidden, weight, bias, targets, shard = check_head(op, hidden, weight, bias, targets, process_group, vocab_size)
    if extra_targets is not None:
        checks.integer(op, extra_targets=extra_targets)
        if extra_targets.dim() == 0 or extra_targets.shape[:-1] != targets.shape or extra_targets.shape[-1] == 0:
            expected = ", ".join([*map(str, targets.shape), "K"])
            raise ValueError(
                f"{op}: extra_targets must have shape ({expected}) with K > 0, got {tuple(extra_targets.shape)}"
            )
        checks.same(op, "device", hidden=hidden, extra_targets=extra_targets)
    ignore_index = checks.ignore_index(op, ignore_index)
    options = log_prob_options(op, ignore_index, temperature, softcap, logit_scale)
    valid_rows = check_valid_rows(op, valid_rows, targets, ignore_index)
    if not fp32_products:
        hidden, bias = cast_for_products(op, hidden, weight, bias)

    x, target = hidden.reshape(-1, hidden.shape[-1]), as_targets(targets, ignore_index)
    extra, extra_count = None, 0
    if extra_targets is not None:
        extra_count = extra_targets.shape[-1]
        extra = as_targets(extra_targets, ignore_index).view(-1, extra_count)
    needs = Needs(*needed_gradients(hidden, weight, bias))
    # The backward pass needs the argmax (`log_prob_chunks`).
    wants = Wants(
        False, return_top1 or any(needs), True, return_entropy, return_mean_logits, return_sum_sq_probs, extra_count
    )
    head = HeadSettings(needs, acc_dtype is not None, None, ignore_index, shard)
    settings = LogProbSettings(head, wants, options, fp32_products)
    log_probs, entropy, extra_log_probs, predicted, mean_logits, log_sum_sq_probs = _LinearLogProbs.apply(
        x, weight, bias, target, extra, valid_rows, settings
    )
    shape = targets.shape
    is_plain = not (return_entropy or return_top1 or return_mean_logits or return_sum_sq_probs or extra_count)
    if is_plain:
        return log_probs.view(shape)
    return LogProbOutput(
        log_probs.view(shape),
        entropy.view(shape) if return_entropy else None,
        # Ignored tokens have a prediction of -1, which may be the ignore_index.
        ((predicted == target) & (target != ignore_index)).view(shape) if return_top1 else None,
        mean_logits.view(shape) if return_mean_logits else None,
        log_sum_sq_probs.view(shape) if return_sum_sq_probs else None,
        extra_log_probs.view(*shape, extra_count) if extra_count else None,
    )
