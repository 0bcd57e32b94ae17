"""The groups of parameters of a model that Muon and AdamW train."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime import checks

# The weights of convolutions have three dimensions or more, but their matrices are not those of `x @ weight.T`.
_CONVOLUTIONS = nn.modules.conv._ConvNd


def _excluded(exclude: Any) -> Iterator[Any]:
    if not isinstance(exclude, (list, tuple, set, Iterator)):
        raise TypeError(f"muon_groups: exclude must be a list, got {type(exclude).__name__}")
    for item in exclude:
        if isinstance(item, nn.Module):
            yield from item.parameters()
        elif isinstance(item, Tensor):
            yield item
        else:
            raise TypeError(f"muon_groups: exclude must have modules and parameters, got {checks.format_value(item)}")


def _ends(model: nn.Module) -> Iterator[Any]:
    """Yield the parameters of embeddings and heads, and weights of convolutions."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag, _CONVOLUTIONS)):
            yield from module.parameters(recurse=False)
        # The heads of models of transformers, also inside of another model.
        for name in ("get_input_embeddings", "get_output_embeddings"):
            get = getattr(module, name, None)
            try:
                end = get() if callable(get) else None
            except (AttributeError, NotImplementedError):
                end = None
            if isinstance(end, nn.Module):
                yield from end.parameters()
        prefix = getattr(module, "base_model_prefix", None)
        base = getattr(module, prefix, None) if isinstance(prefix, str) and prefix else None
        if isinstance(base, nn.Module) and base is not module:
            inside = {id(p) for p in base.parameters()}
            yield from (p for p in module.parameters() if id(p) not in inside)


def muon_groups(
    model: nn.Module, *, exclude: Iterable[nn.Module | Tensor] = (), **adamw_options: Any
) -> list[dict[str, Any]]:
    """Return the groups of parameters for `tigon.Muon`: Muon for the hidden matrices, AdamW for the rest.

    Muon gets the parameters of two dimensions, and those of three dimensions, which stack the matrices of experts.
    AdamW gets embeddings, heads (the output embeddings and everything outside of the base model, for models of
    transformers), convolutions, and what `exclude` contains. It also gets norms, biases (also those of stacked experts)
    and all other parameters of one dimension, in a group without weight decay. Parameters that need no gradient are
    left out.

    The head of a model that is not from transformers cannot be recognised: pass it in `exclude`.

    Args:
        model: The model. If FSDP2 shards it, call this function afterwards.
        exclude: Modules and parameters for AdamW.
        **adamw_options: Options of the groups of AdamW, such as `lr`, `betas`, `eps` and `weight_decay`. Without them,
            `lr` and `weight_decay` are those of Muon, and the others are the defaults of AdamW.

    Raises:
        TypeError: `model` is no module, or `exclude` contains something else.

    Example:
        >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8)})
        >>> groups = tigon.muon_groups(model, exclude=[model["head"]], betas=(0.9, 0.95))
        >>> [(group["use_muon"], [tuple(p.shape) for p in group["params"]]) for group in groups]
        [(False, [(8, 4), (8, 4)]), (False, [(8,)])]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"muon_groups: model must be a Module, got {type(model).__name__}")
    others = {id(p) for p in (*_excluded(exclude), *_ends(model))}
    matrices: list[Tensor] = []
    decayed: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        # The biases of stacked experts [E, N] have two dimensions.
        is_bias = name.rpartition(".")[2] == "bias" or name.endswith("_bias")
        if p.ndim < 2 or (is_bias and p.ndim == 2):
            vectors.append(p)
        elif p.ndim > 3 or (p.ndim == 3 and 1 in p.shape) or id(p) in others or not torch.is_floating_point(p):
            decayed.append(p)
        else:
            matrices.append(p)
    groups = [
        {"params": matrices, "use_muon": True},
        {"params": decayed, "use_muon": False, **adamw_options},
        {"params": vectors, "use_muon": False, **adamw_options, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
