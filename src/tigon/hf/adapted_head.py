"""The loss in a head that has low-rank adapters, such as the LoRA adapters of PEFT on `lm_head`.

The layer with the adapters calls the head, and adds the products of the adapters to its logits. In a fused call, the
layer computes the loss instead, by `linear_cross_entropy`: the adapters become the low-rank addition to the logits, and
the weight of the head may be trained or frozen. Every call reads which adapters are active
(`tigon.recognition.parts.adapters`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.adapters.projection import Adapter, TensorLike
from tigon.recognition.parts.adapters import AdaptedCall, AdapterRecipe, recognise_adapters
from tigon.recognition.replacement import find_replacement, foreign_forward, install


class AdaptedHeadForward(AdapterRecipe):
    """Recipe for a layer with adapters around the head: it computes the loss if the current call is fused."""

    def __init__(self, cls: type, fused: Any) -> None:
        super().__init__(cls)
        self.fused = fused

    def __reduce__(self) -> tuple:
        return AdaptedHeadForward, (self.cls, self.fused)

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self.fused.call
        if call is not None and call.layer is layer and call.loss is None and len(args) == 1 and not kwargs:
            adapted = self.read(layer, args[0])
            if isinstance(adapted, AdaptedCall) and adapted.base is call.head:
                forward: Any = find_replacement(call.head)
                output = forward.recipe.compute_loss(call.head, args[0], low_rank_factors(args[0], adapted.adapters))
                if output is not None:
                    return output
        return super().__call__(layer, *args, **kwargs)


def low_rank_factors(x: Tensor, adapters: Sequence[Adapter]) -> tuple[Tensor, Tensor]:
    """Return the factors h [..., R] and B [V, R] of sum_j s_j (dropout(x) A_j^T B_j^T + bias_j), for x [..., H]. A bias
    is one more column of B. The value of h in this column is the scaling s_j."""
    dtype = torch.float32 if x.dtype != torch.float64 else x.dtype
    h, columns = [], []
    for adapter in adapters:
        hidden = F.linear(F.dropout(x.to(adapter.a.dtype), adapter.dropout), adapter.a)
        h.append(hidden.to(dtype) * adapter.scaling)
        columns.append(adapter.b.to(dtype))
        if adapter.bias is not None:
            h.append(h[-1].new_full((*x.shape[:-1], 1), adapter.scaling))
            columns.append(adapter.bias.to(dtype)[:, None])
    return torch.cat(h, -1), torch.cat(columns, -1)


def find_adapted_head(layer: nn.Module, fused: Any) -> nn.Module | None:
    """Return the head inside a layer with adapters, and let the layer compute the loss; None for any other module."""
    head = next((module for module in layer.modules() if fused.is_head(module)), None)
    if head is None or torch.compiler.is_compiling():
        return None
    replacement = find_replacement(layer)
    recipe: Any = None if replacement is None else replacement.recipe
    if not (isinstance(recipe, AdaptedHeadForward) and recipe.fused is fused):
        if replacement is None and not foreign_forward(layer):
            recipe = recognise_adapters(layer)
        if type(recipe) is not AdapterRecipe:
            return None
        recipe = AdaptedHeadForward(recipe.cls, fused)
        install(layer, recipe)
    weight: Any = head.weight
    adapted = recipe.read(layer, TensorLike(torch.Size((1, 1, weight.shape[-1])), weight.dtype, weight.device))
    return head if isinstance(adapted, AdaptedCall) and adapted.base is head else None
