r"""The auxiliary loss that balances the experts of a mixture (Fedus et al., arXiv:2101.03961), over all layers at once.

    p[l, t] = softmax(z[l, t]),  c[l, t, e] = 1 if e is one of the K largest z[l, t], else 0
    N = sum_l sum_t m[t],  f[e] = sum_l sum_t m[t] c[l, t, e] / N,  P[e] = sum_l sum_t m[t] p[l, t, e] / N
    loss = E sum_e f[e] P[e]

It is plain torch on every device: kernels of its own would save less than 1 % of a step. No operation waits for the
device, and the sums have a fixed order, so the loss is the same from run to run.

Experts are ranked by their logits: those with the K largest are the chosen ones. Of equal logits, that of the smaller
index counts as larger. The softmax keeps the order, but in bf16 its rounding makes some different logits equal.

Shapes: L layers, T tokens, E experts, K experts of a token; z is [T, E] for each layer, and the mask m is [T].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.runtime import checks


def load_balancing_loss_reference(
    router_logits: Tensor | Sequence[Tensor], num_experts: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Compute `load_balancing_loss` layer by layer."""
    layers, attention_mask = _as_layers(router_logits, attention_mask)
    wide = torch.promote_types(layers[0].dtype, torch.float32)
    mask = None if attention_mask is None else attention_mask.detach().reshape(-1, 1).to(wide)
    counts, sums, total = (layers[0].new_zeros(n, dtype=wide) for n in (num_experts, num_experts, 1))
    for layer in layers:
        z = layer.to(wide)
        if mask is not None:
            z = z.masked_fill(mask == 0, 0.0)
        # A stable sort keeps the order of equal logits. `topk` has no such order.
        indices = z.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        chosen, p = torch.zeros_like(z).scatter(1, indices, 1.0), z.softmax(-1)
        if mask is not None:
            chosen, p = chosen * mask, p * mask
        counts, sums = counts + chosen.sum(0), sums + p.sum(0)
        total = total + (len(layer) if mask is None else mask.sum())
    scale = torch.where(total > 0, num_experts / total.square(), 0.0)
    return (counts * sums * scale).sum()


def _as_layers(
    router_logits: Tensor | Sequence[Tensor], attention_mask: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the logits of each layer, and the mask. One tensor is one layer with the tokens of all layers."""
    if not isinstance(router_logits, Tensor):
        return tuple(router_logits), attention_mask
    if attention_mask is not None and router_logits.dim() == 3:
        attention_mask = attention_mask.reshape(-1).repeat(len(router_logits))
    return (router_logits.flatten(0, -2),), attention_mask


def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor], num_experts: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Return the loss that balances the experts of a mixture, over all of its layers. The logits get gradients.

    The loss is E sum_e f[e] P[e], where f[e] is the share of tokens that choose expert e, and P[e] is the mean of its
    probability. It is K if all experts are chosen equally often. A token chooses the experts with the K largest logits.
    Of equal logits, the one with the smaller index comes first. The arguments are those of
    `load_balancing_loss_func` of transformers. The host does not wait for the device.

    Args:
        router_logits: The logits of each layer, [T, E], fp32 | bf16 | fp16, in a tuple or a list. One tensor [T, E] is
            one layer, and one tensor [L, T, E] is L layers.
        num_experts: E.
        top_k: K, the number of experts that each token chooses.
        attention_mask: T numbers of any shape, such as [B, S], or None. Each token counts as often as its number says.
            Tokens with 0 are not read, and their gradients are 0.

    Returns:
        An fp32 scalar. It is 0 if there are no tokens, or all are masked.

    Raises:
        TypeError: An argument has another type.
        ValueError: Shapes or devices do not fit, or `top_k` is not in [1, E].

    Source: Fedus et al., "Switch Transformers", arXiv:2101.03961.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.5, 1.0]])
        >>> tigon.load_balancing_loss((logits, logits), num_experts=3, top_k=1)
        tensor(1.0861)
    """
    _check(router_logits, num_experts, top_k, attention_mask)
    return load_balancing_loss_reference(router_logits, num_experts, top_k, attention_mask)


def _check(router_logits: Any, num_experts: Any, top_k: Any, attention_mask: Any) -> None:
    op = "load_balancing_loss"
    checks.size(op, "num_experts", num_experts)
    checks.size(op, "top_k", top_k)
    if not isinstance(router_logits, (Tensor, tuple, list)):
        raise TypeError(f"{op}: router_logits must be a Tensor or a tuple of them, got {type(router_logits).__name__}")
    if isinstance(router_logits, Tensor) and router_logits.dim() not in (2, 3):
        raise ValueError(f"{op}: router_logits must be [T, E] or [L, T, E], got shape {tuple(router_logits.shape)}")
    layers = router_logits
    if isinstance(router_logits, Tensor):
        layers = (router_logits,) if router_logits.dim() == 2 else router_logits.detach().unbind()
    if not layers:
        raise ValueError(f"{op}: router_logits must have at least one layer, got none")
    if top_k > num_experts:
        raise ValueError(f"{op}: top_k must be at most num_experts, which is {num_experts}, got {top_k}")
    if attention_mask is not None:
        checks.tensor(op, attention_mask=attention_mask)
        if attention_mask.is_complex():
            raise TypeError(f"{op}: attention_mask must hold real numbers, got {attention_mask.dtype}")
    for i, layer in enumerate(layers):
        name = f"router_logits[{i}]"
        checks.floating(op, **{name: layer})
        rows = layer.shape[0] if attention_mask is None and layer.dim() else None
        rows = attention_mask.numel() if attention_mask is not None else rows
        if layer.dim() != 2 or tuple(layer.shape) != (rows, num_experts):
            expected = "T" if rows is None else rows
            raise ValueError(f"{op}: {name} must have shape ({expected}, {num_experts}), got {tuple(layer.shape)}")
    names = {f"router_logits[{i}]": layer for i, layer in enumerate(layers)}
    checks.same(op, "device", **names, attention_mask=attention_mask)
