r"""Cross entropy of `input @ linear_weight.T + bias` that never holds all logits.

For chunks of C tokens, so that C * V logits fit in a budget:

    a   = x W^T + b                     one product; then `token_loss` writes da over a
    dx  = da W                          one product
    dW += da^T x,   db += sum_rows(da)  one product

The forward pass makes the gradients, because the logits are there: three products in all, and backward multiplies
them by the gradient that arrives (not at all if it is one). With `reduction="none"` that gradient differs from token
to token and dW is not known before it comes; and in fp16, da / T would vanish without the loss scale that comes with
it: then backward makes the logits again, four products in all.

Every chunk reads and writes dW once more and rounds it once more, so chunks are few: by default as large as
`DEFAULT_MIB` allows, but never more than `MOST_CHUNKS`.

Shapes: T tokens (all leading dimensions), H hidden, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops import check
from tigon.ops.cross_entropy import (
    LossOutput,
    Reduction,
    as_scalar,
    check_loss_arguments,
    cross_entropy_reference,
    loss_options,
    loss_output,
)
from tigon.ops.dispatch import first_order, launcher, runs_kernels
from tigon.ops.rescale import rescaled
from tigon.ops.token_loss import Options, gradient, gradient_scales, statistics

__all__ = ["LinearCrossEntropyLoss", "chunk_size", "linear_cross_entropy", "linear_cross_entropy_reference"]

# On a GPU a chunk must be long enough that its products hide the traffic of dW; on a CPU, short enough for its caches.
DEFAULT_MIB = {"cuda": 512, "cpu": 96}
# With more, the roundings of a bf16 dW add up to more than twice those of one product: then the sum is in fp32.
MOST_CHUNKS = 8


# --- reference -----------------------------------------------------------------------------------


def linear_cross_entropy_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **options
) -> Tensor:
    """Eager definition of `linear_cross_entropy`: all logits at once, autograd; the tests' ground truth."""
    return cross_entropy_reference(F.linear(input, linear_weight, linear_bias), target, **options)


# --- configuration -------------------------------------------------------------------------------


def bytes_per_logit(x: Tensor) -> int:
    """What a logit of a chunk takes: its own bytes, and where no kernel runs, those of two fp32 values beside it."""
    return x.element_size() + (0 if runs_kernels(x) else 8)


def chunk_size(tokens: int, vocabulary: int, itemsize: int, max_logits_mib: float | None, device_type: str) -> int:
    """Tokens a chunk: equal chunks, in multiples of 128 (a tile of the products) where the budget allows."""
    budget = max_logits_mib or DEFAULT_MIB.get(device_type, DEFAULT_MIB["cpu"])
    most = max(1, int(budget * 2**20) // (vocabulary * itemsize))
    if max_logits_mib is None and device_type == "cuda":
        most = max(most, -(-tokens // MOST_CHUNKS))
    chunks = max(1, -(-tokens // most))
    even = -(-tokens // chunks)
    rounded = -(-even // 128) * 128
    return max(1, rounded if rounded <= most else min(even, most))


# --- launchers (2-D in, no autograd) -------------------------------------------------------------


class _Results(NamedTuple):
    """Gradients are empty where not needed, z-loss and predictions where not wanted."""

    loss: Tensor  # [T] fp32
    z_loss: Tensor  # [T] fp32
    predicted: Tensor  # [T] int64
    dx: Tensor  # [T, H]
    dw: Tensor  # [V, H]
    db: Tensor  # [V]


def _allocate(x, weight, needs_dx, needs_dw, needs_db, wants_z_loss, wants_predicted) -> _Results:
    (t, h), v = x.shape, weight.shape[0]
    return _Results(
        x.new_empty(t, dtype=torch.float32),
        x.new_empty(t if wants_z_loss else 0, dtype=torch.float32),
        x.new_empty(t if wants_predicted else 0, dtype=torch.int64),
        x.new_empty((t, h) if needs_dx else 0),
        x.new_empty((v, h) if needs_dw else 0),
        x.new_empty(v if needs_db else 0),
    )


def _fake(x, weight, target, bias, class_weight, scales, dloss, chunk, *arguments):
    return tuple(_allocate(x, weight, *arguments[:5]))


@launcher(fake=_fake)
def linear_cross_entropy_chunks(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, scales: Tensor,
    dloss: Tensor | None, chunk: int,
    needs_dx: bool, needs_dw: bool, needs_db: bool, wants_z_loss: bool, wants_predicted: bool,
    ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x [T, H], weight [V, H] -> `_Results`; the gradients are those of sum_i dloss_i * loss_i (None: of ones)."""
    options = Options(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    results = _allocate(x, weight, needs_dx, needs_dw, needs_db, wants_z_loss, wants_predicted)
    needed = needs_dx or needs_dw or needs_db
    at_once = needed and dloss is None
    if x.shape[0] == 0:
        for gradient_of_none in results[3:]:
            gradient_of_none.zero_()
        return tuple(results)
    buffer = x.new_empty(min(chunk, x.shape[0]), weight.shape[0])
    # The sum of many chunks' dW is kept in fp32: in half precision each would round it once more.
    many = needs_dw and x.shape[0] > MOST_CHUNKS * chunk and x.element_size() == 2
    dw = x.new_zeros(weight.shape, dtype=torch.float32) if many else results.dw
    db = x.new_zeros(weight.shape[0] if needs_db else 0, dtype=torch.float32)
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        rows, targets = x[part], target[part]
        logits = buffer[: len(rows)]
        if bias is None:
            torch.mm(rows, weight.t(), out=logits)
        else:
            torch.addmm(bias, rows, weight.t(), out=logits)

        found = statistics(
            logits, targets, class_weight, scales, options, wants_z_loss, wants_predicted, gradient_=at_once
        )  # fmt: skip
        if needed and not at_once:
            gradient(logits, targets, class_weight, scales, found.lse, dloss[part], options, out=logits)
        results.loss[part] = found.loss
        if wants_z_loss:
            results.z_loss[part] = found.z_loss
        if wants_predicted:
            results.predicted[part] = found.predicted

        if needs_dx:
            torch.mm(logits, weight, out=results.dx[part])
        if many:
            dw += torch.mm(logits.t(), rows)
        elif needs_dw and start == 0:
            torch.mm(logits.t(), rows, out=dw)
        elif needs_dw:
            dw.addmm_(logits.t(), rows)
        if needs_db:
            db += logits.sum(0, dtype=torch.float32)
    if many:
        results.dw.copy_(dw)
    if needs_db:
        results.db.copy_(db)
    return tuple(results)


# --- autograd ------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, target, class_weight, scales, reduce, chunk, needs, wants, options):
        at_once = reduce and x.dtype != torch.float16
        now = needs if at_once else [False] * 3  # if not at once, backward makes the gradients
        results = _Results(
            *linear_cross_entropy_chunks(
                x, weight, target, bias, class_weight, scales, None, chunk, *now, *wants, *options
            )
        )
        if at_once:
            ctx.save_for_backward(results.dx, results.dw, results.db)
        else:
            ctx.save_for_backward(x, weight, target, bias, class_weight, scales)
        ctx.at_once, ctx.chunk, ctx.needs, ctx.options = at_once, chunk, needs, options
        loss = results.loss.sum() if reduce else results.loss
        ctx.mark_non_differentiable(results.z_loss, results.predicted)
        return loss, results.z_loss, results.predicted

    @staticmethod
    @first_order
    def backward(ctx, dloss, *_):
        if ctx.at_once:
            gradients = [
                rescaled(g.view(-1, g.shape[-1]), dloss).view(g.shape) if need else None
                for g, need in zip(ctx.saved_tensors, ctx.needs, strict=True)
            ]
        else:
            x, weight, target, bias, class_weight, scales = ctx.saved_tensors
            dloss = dloss.expand(x.shape[0])
            made = linear_cross_entropy_chunks(
                x, weight, target, bias, class_weight, scales, dloss, ctx.chunk, *ctx.needs, False, False, *ctx.options
            )
            gradients = [g if need else None for g, need in zip(made[3:], ctx.needs, strict=True)]
        return *gradients, *[None] * 8


# --- public --------------------------------------------------------------------------------------


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: Tensor | float | None = None,
    max_logits_mib: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | LossOutput:
    """Cross entropy of a linear layer's outputs, `cross_entropy(linear(input, linear_weight, linear_bias), target)`.

    The logits exist for one chunk of tokens at a time, on every device, and each gradient is made only if it is needed.

    Args:
        input: [..., H] hidden states, fp32 | bf16 | fp16.
        linear_weight: [V, H], of the same dtype; under autocast both are cast as `linear` casts them.
        target: [...] class indices, int64 | int32.
        linear_bias: [V].
        weight: [V] class weights.
        reduction: "none" for [...] (differentiable with any gradient), "sum" or "mean".
        ignore_index: Targets of this value have no loss and gradients of exactly zero.
        label_smoothing, softcap, logit_scale, z_loss, num_items: As in `cross_entropy`.
        max_logits_mib: Cap in MiB on the logits held at once, at least one token's, with what else the loss of a chunk
            needs of their size (nothing on a GPU). None: 512 on a GPU (more for long inputs, so that there are at most
            8 chunks), 96 on a CPU. A half-precision dW of more than 8 chunks is summed in a buffer in fp32.
        return_z_loss, return_token_accuracy, return_predicted_tokens: As in `cross_entropy`.

    Returns:
        The loss, fp32; or a `LossOutput` if anything is asked for beside it. A mean over no valid target is 0.
        A target that is neither in [0, V) nor `ignore_index` makes the loss NaN, as in `cross_entropy`.

    Raises:
        TypeError: `input`, `linear_weight` or a bias is no floating-point tensor, or `target` no integer tensor.
        ValueError: Shapes, dtypes or devices do not fit, or an option is out of range.

    Source: the gradient in the forward pass and chunks, Hsu et al., "Liger Kernel", arXiv:2410.10989; argument names,
    `torch.nn.functional.linear_cross_entropy`.

    Example:
        >>> hidden, head = torch.randn(6, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss = tigon.linear_cross_entropy(hidden, head, torch.randint(100, (6,)), softcap=30.0)
        >>> loss.backward(); hidden.grad.shape
        torch.Size([6, 16])
    """
    op = "linear_cross_entropy"
    check.floating(op, input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    check.tensor(op, target=target)
    if linear_weight.dim() != 2 or 0 in linear_weight.shape:
        raise ValueError(f"{op}: linear_weight must have shape (V, H), got {tuple(linear_weight.shape)}")
    v, h = linear_weight.shape
    if input.dim() == 0 or input.shape[-1] != h:
        raise ValueError(f"{op}: input must have shape (..., {h}), as linear_weight has, got {tuple(input.shape)}")
    check.shape(op, "target", target, input.shape[:-1])
    if linear_bias is not None:
        check.shape(op, "linear_bias", linear_bias, (v,))
    check.same(op, "device", input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    check_loss_arguments(
        op, v, target, weight, reduction, num_items, input.device
    )  # fmt: skip
    ignore_index = -100 if ignore_index is None else ignore_index
    options = loss_options(op, ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    if max_logits_mib is not None and check.number(op, "max_logits_mib", max_logits_mib) < 1:
        raise ValueError(f"{op}: max_logits_mib must be at least 1 or None, got {max_logits_mib}")
    if input.device.type != "meta" and torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        cast = lambda x: x if x is None or x.dtype == torch.float64 else x.to(dtype)
        input, linear_weight, linear_bias = cast(input), cast(linear_weight), cast(linear_bias)
    check.same(op, "dtype", input=input, linear_weight=linear_weight, linear_bias=linear_bias)

    x, targets = input.reshape(-1, h), target.reshape(-1).contiguous()
    weight = None if weight is None else weight.detach().contiguous()
    needs = [torch.is_grad_enabled() and p is not None and p.requires_grad for p in (input, linear_weight, linear_bias)]
    wants = [return_z_loss, return_token_accuracy or return_predicted_tokens]
    scales = gradient_scales(targets, weight, as_scalar(num_items, input.device), v, ignore_index, reduction == "mean")
    losses, z_losses, predicted = _LinearCrossEntropy.apply(
        x, linear_weight, linear_bias, targets, weight, scales, reduction != "none",
        chunk_size(x.shape[0], v, bytes_per_logit(x), max_logits_mib, input.device.type), needs, wants, options,
    )  # fmt: skip
    return loss_output(
        losses, z_losses, predicted, target, ignore_index, reduction,
        return_z_loss, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` as a module: the layer's weight comes with each call, as the hidden states do.

    Args:
        **options: What `linear_cross_entropy` takes by keyword, but for the bias and `num_items`.

    Example:
        >>> loss = tigon.LinearCrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.randn(6, 16), torch.randn(100, 16), torch.randint(100, (6,))).shape
        torch.Size([])
    """

    def __init__(self, weight: Tensor | None = None, **options) -> None:
        super().__init__()
        known = ("reduction", "ignore_index", "label_smoothing", "softcap", "logit_scale", "z_loss", "max_logits_mib")
        known += ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
        for name in options:
            check.choice("LinearCrossEntropyLoss", "an option", name, known)
        self.register_buffer("weight", weight)
        self.options = options

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        num_items: Tensor | float | None = None,
    ) -> Tensor | LossOutput:
        """input [..., H], linear_weight [V, H], target [...] -> as `linear_cross_entropy`."""
        return linear_cross_entropy(
            input, linear_weight, target,
            linear_bias=linear_bias, weight=self.weight, num_items=num_items, **self.options,
        )  # fmt: skip
