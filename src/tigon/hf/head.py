"""The loss of a causal language model, computed inside its head: the logits never exist as a whole.

Three places of the instance change, and no model's forward is copied:

- `model.forward` notes the labels of the call, runs the stock forward, and takes the placeholder out of its output;
- `head.forward`, reached through the head's own call (hooks that gather or shard weights fire as ever), returns a
  placeholder of shape [1, 1, 1] where logits would be, after computing the loss of the call;
- `model.loss_function` returns that loss, tied to the placeholder: the head's output stays in the graph.

Only in training mode with labels. Any other call, and any that this cannot honour, runs the stock code as it was.
What the model does to its logits on the way to the loss (a soft cap, a scale) is measured by running the model's own
forward around a stand-in body and head, and the outcome is checked there against the stock loss before anything is
touched.

Shapes: B sequences of S tokens, hidden size H, vocabulary V.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.linear_cross_entropy import linear_cross_entropy

__all__ = ["CausalLMForward", "FusedLoss", "HeadForward", "LossFunction", "Spec"]

# What the standard loss reads; everything else that reaches it is ignored there, so it is here.
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
IGNORE_INDEX = -100  # its default


def loss_arguments(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the standard loss, by name."""
    return {**dict(zip(("logits", "labels", "vocab_size", *LOSS_ARGUMENTS), args, strict=False)), **kwargs}


@dataclass(frozen=True)
class Spec:
    """What was learnt of a model: enough to compute its loss from the inputs of its head."""

    head: str  # name of the head among the model's children
    vocabulary: int
    softcap: float | None
    logit_scale: float
    positional: tuple[str, ...]  # arguments of the model's forward that may come by position
    forwarded: frozenset[str]  # which of LOSS_ARGUMENTS the model hands on to its loss
    unknown: frozenset[str]  # arguments of the loss that the standard one does not have: a call that gives one is stock

    def __str__(self) -> str:
        steps = [f"scale {self.logit_scale:g}"] if self.logit_scale != 1.0 else []
        steps += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        return ", ".join(["linear_cross_entropy in the head", *steps])


@dataclass
class Call:
    """One training forward: what its loss depends on, and what was made of it."""

    labels: Tensor  # [B, S]
    shift_labels: Tensor | None
    num_items: Tensor | float | None
    ignore_index: int
    loss: Tensor | None = None
    placeholders: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class FusedLoss:
    """What the three replaced places share. It names the head but not the model, so that a copied head stays small."""

    spec: Spec
    head: nn.Module
    loss_function: "LossFunction | None" = None
    call: Call | None = None

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Call | None:
        """The call to compute in the head, or None where the stock code is to run."""
        spec, given = self.spec, {**dict(zip(self.spec.positional, args, strict=False)), **kwargs}
        labels, kept = given.get("labels"), given.get("logits_to_keep", 0)
        if not model.training or not isinstance(labels, Tensor) or not (isinstance(kept, int) and kept == 0):
            return None
        # The head or the loss was exchanged since (resized embeddings, an adapter): it is theirs now.
        if getattr(model, spec.head) is not self.head or model.loss_function is not self.loss_function:
            return None
        read = {name: given[name] for name in spec.forwarded if name in given}
        num_items = read.get("num_items_in_batch")
        if any(name in given for name in spec.unknown) or (isinstance(num_items, Tensor) and num_items.dim()):
            return None
        return Call(labels, read.get("shift_labels"), num_items, read.get("ignore_index", IGNORE_INDEX))


@dataclass(eq=False)
class CausalLMForward:
    """Recipe for the model's forward. In fused training `logits` of the result is None, in tuples too."""

    fused: FusedLoss

    def __call__(self, model: nn.Module, *args, **kwargs) -> Any:
        call = self.fused.begin(model, args, kwargs)
        if call is None:
            return type(model).forward(model, *args, **kwargs)
        self.fused.call = call
        try:
            outputs = type(model).forward(model, *args, **kwargs)
        finally:
            self.fused.call = None
        if call.loss is None:
            return outputs
        if isinstance(outputs, tuple):
            return tuple(None if any(item is p for p in call.placeholders) else item for item in outputs)
        return dataclasses.replace(outputs, logits=None)


@dataclass(eq=False)
class HeadForward:
    """Recipe for the head's forward: the loss of the current call, if there is one."""

    fused: FusedLoss

    def __call__(self, head: nn.Module, hidden: Tensor) -> Tensor:
        call, spec, weight = self.fused.call, self.fused.spec, head.weight
        if (
            call is None
            or call.loss is not None
            or hidden.shape[:-1] != call.labels.shape
            or weight.shape != (spec.vocabulary, hidden.shape[-1])  # a shard: its logits are not all
            or type(weight) not in (nn.Parameter, Tensor)  # a DTensor, a quantised weight
        ):
            return type(head).forward(head, hidden)
        targets = call.shift_labels
        if targets is None:
            targets = F.pad(call.labels, (0, 1), value=call.ignore_index)[..., 1:]
        call.loss = linear_cross_entropy(
            hidden,
            weight,
            targets.to(hidden.device),
            linear_bias=head.bias,
            ignore_index=call.ignore_index,
            softcap=spec.softcap,
            logit_scale=spec.logit_scale,
            num_items=call.num_items,
        )
        call.placeholders.append(call.loss.view(1, 1, 1).clone())  # FSDP2 dislikes views as outputs
        return call.placeholders[0]


@dataclass(eq=False)
class LossFunction:
    """`model.loss_function`: the loss that the head computed in this call, or the stock function."""

    fused: FusedLoss
    stock: Callable

    def __call__(self, *args, **kwargs) -> Tensor:
        call = self.fused.call
        if call is None or call.loss is None:
            return self.stock(*args, **kwargs)
        given = loss_arguments(args, kwargs)
        logits, labels = given["logits"], given["labels"]
        if (
            logits.shape != (1, 1, 1)
            or not (labels is call.labels or labels.device != call.labels.device)
            or not _same(given.get("num_items_in_batch"), call.num_items)
            or not _same(given.get("shift_labels"), call.shift_labels)
            or given.get("ignore_index", IGNORE_INDEX) != call.ignore_index
        ):
            raise RuntimeError(
                "tigon: the model gave its loss other arguments than it was called with, and the head has computed "
                "the loss already; use tigon.patch(model, loss=False) for this model"
            )
        call.placeholders.append(logits)
        # Nothing is added: the sum keeps the head's output in the graph, whose hooks gather sharded weights.
        return call.loss + 0.0 * logits.sum()


def _same(given: Any, used: Any) -> bool:
    return given is used or (not isinstance(given, Tensor) and not isinstance(used, Tensor) and given == used)
