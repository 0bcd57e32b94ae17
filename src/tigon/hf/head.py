"""The loss of a causal language model, computed inside its head: the logits never exist as a whole.

Three places of the instance change, and no model's forward is copied:

- `model.forward` notes the labels of the call, runs the stock forward, and takes the placeholder out of its output;
- `head.forward`, reached through the head's own call (hooks that gather or shard weights fire as ever), returns a
  placeholder of shape [1, 1, 1] where logits would be, after computing the loss of the call;
- `model.loss_function` returns that loss, tied to the placeholder: the head's output stays in the graph, and what the
  placeholder holds shows that nothing but what was learnt happened to it on the way; the loss is NaN if something did
  (a hook that changes the head's output, another soft cap since the patch), for a check would wait for the GPU.

Only in training mode with labels. Any other call, and any that this cannot honour, runs the stock code as it was.
What the model does to its logits on the way to the loss (a soft cap, a scale) is measured by running the model's own
forward around a stand-in body and head, and the outcome is checked there against the stock loss before anything is
touched.

Shapes: B sequences of S tokens, hidden size H, vocabulary V.
"""

import dataclasses
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.hf.replacement import find_replacement
from tigon.ops.linear_chunks import find_rows
from tigon.ops.linear_cross_entropy import linear_cross_entropy
from tigon.ops.valid_rows import ValidRows

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

    @property
    def token(self) -> float:
        """What a placeholder holds where the head returns it: a value at which a scale and a soft cap show."""
        return (self.softcap or 100.0) / self.logit_scale

    @property
    def token_at_loss(self) -> float:
        """What it holds where it reaches the loss."""
        return 100.0 if self.softcap is None else self.softcap * math.tanh(1.0)

    def __str__(self) -> str:
        steps = [f"scale {self.logit_scale:g}"] if self.logit_scale != 1.0 else []
        steps += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        return ", ".join(["linear_cross_entropy in the head", *steps])


@dataclass
class Call:
    """One training forward: what its loss depends on, and what was made of it."""

    labels: Tensor  # [B, S]
    shift_labels: Tensor | None
    targets: Tensor  # [B, S]: labels where they are predicted
    valid_rows: ValidRows | None  # on their way to the host while the layers run
    num_items: Tensor | float | None
    ignore_index: int
    loss: Tensor | None = None
    placeholders: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class FusedLoss(threading.local):
    """What the three replaced places share. It holds no module: a copied head stays small, a deleted model goes."""

    spec: Spec
    call: Call | None = None  # of this thread

    def __reduce__(self):
        return FusedLoss, (self.spec,)

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Call | None:
        """The call to compute in the head, or None where the stock code is to run."""
        spec, given = self.spec, {**dict(zip(self.spec.positional, args, strict=False)), **kwargs}
        labels, kept = given.get("labels"), given.get("logits_to_keep", 0)
        if not model.training or not isinstance(labels, Tensor) or not (isinstance(kept, int) and kept == 0):
            return None
        # The head or the loss was exchanged since (resized embeddings, an adapter): it is theirs now.
        head = find_replacement(getattr(model, spec.head))
        places = None if head is None else head.recipe, model.loss_function
        if any(not isinstance(place, (HeadForward, LossFunction)) or place.fused is not self for place in places):
            return None
        read = {name: given[name] for name in spec.forwarded if name in given}
        num_items = read.get("num_items_in_batch")
        one_number = num_items.dim() == 0 if isinstance(num_items, Tensor) else type(num_items) in (int, float)
        if any(name in given for name in spec.unknown) or not (one_number or num_items is None):
            return None
        ignore_index, shift_labels = read.get("ignore_index", IGNORE_INDEX), read.get("shift_labels")
        targets = shift_labels
        if targets is None:
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        multiplications = targets.numel() * getattr(model, spec.head).weight.numel()
        valid_rows = find_rows(targets, ignore_index, multiplications)
        return Call(labels, shift_labels, targets, valid_rows, num_items, ignore_index)


@dataclass(eq=False)
class CausalLMForward:
    """Recipe for the model's forward. In fused training `logits` of the result is None, in tuples too."""

    fused: FusedLoss

    def __call__(self, model: nn.Module, *args, **kwargs) -> Any:
        # A hook may call the model within a call of it.
        around, self.fused.call = self.fused.call, self.fused.begin(model, args, kwargs)
        call = self.fused.call
        try:
            outputs = type(model).forward(model, *args, **kwargs)
        finally:
            self.fused.call = around
        if call is None or call.loss is None:
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
            or hidden.shape[:-1] != call.targets.shape
            or weight.shape != (spec.vocabulary, hidden.shape[-1])  # a shard: its logits are not all
            or type(weight) not in (nn.Parameter, Tensor)  # a DTensor, a quantised weight
        ):
            return type(head).forward(head, hidden)
        targets = call.targets.to(hidden.device)
        call.loss = linear_cross_entropy(
            hidden,
            weight,
            targets,
            linear_bias=head.bias,
            ignore_index=call.ignore_index,
            softcap=spec.softcap,
            logit_scale=spec.logit_scale,
            num_items=call.num_items,
            valid_rows=call.valid_rows if targets is call.targets else None,
        )
        # In the graph of the loss, and no view: FSDP2 dislikes views as outputs.
        call.placeholders.append(call.loss.new_full((1, 1, 1), spec.token) + 0.0 * call.loss)
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
                "tigon: the model gave its loss other arguments than it was called with, or its head was called twice, "
                "and the head has computed the loss already; use tigon.patch(model, loss=False) for this model"
            )
        call.placeholders.append(logits)
        change = logits.detach().float() / self.fused.spec.token_at_loss - 1.0  # a cast to bf16 makes 0.004
        factor = torch.ones_like(change).masked_fill(change.abs() > 0.01, torch.nan).sum()
        # Nothing is added: the sum keeps the head's output in the graph, whose hooks gather sharded weights.
        return call.loss * factor + 0.0 * logits.sum()


def _same(given: Any, used: Any) -> bool:
    return given is used or (not isinstance(given, Tensor) and not isinstance(used, Tensor) and given == used)
