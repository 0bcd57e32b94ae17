"""The loss of a causal language model, computed inside its head: the logits never exist as a whole.

Three places of the instance change, and no model's forward is copied:

- `model.forward` reads the labels of the call, runs the stock forward, and replaces the placeholder in its output.
- `head.forward` computes the loss of the call, and returns a placeholder of shape [1, 1, 3] in place of logits. The
  model still calls the head as a module, so hooks that gather or shard weights run as usual.
- `model.loss_function` (`tigon.hf.loss_function`) returns that loss, tied to the placeholder, so that the head's output
  stays in the graph. The value of its middle element, the marker, shows whether the model still does to its logits what
  it did when it was patched. If it differs, the call raises an error; on a GPU, where the host does not wait, the loss
  is NaN and a later call raises the error (`tigon.runtime.late_checks`). The outer elements are NaN, so that any other
  computation gives NaN, also if an engine has converted the placeholder to a plain tensor, whose use does not raise.

A call is fused in training mode with labels, or with `skip_logits=True`, if the numbers that the model's forward reads
(a soft cap, a scale) and its loss function are those that `tigon.hf.learn` measured. Otherwise the stock code runs.

Shapes: B sequences of S tokens, hidden size H, vocabulary V.
"""

import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.hf.adapted_head import AdaptedHeadForward, find_adapted_head
from tigon.hf.body_watch import describe_bypass
from tigon.hf.linear_heads import adopt_heads, called_head, head_size
from tigon.hf.logits import SKIPPED_LOGITS, as_placeholder, is_placeholder
from tigon.hf.loss_function import LossFunction
from tigon.hf.loss_options import LossOptions, with_predictions
from tigon.hf.spec import IGNORE_INDEX, Spec, changed_setting
from tigon.ops.head.computed_rows import find_rows
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy
from tigon.recognition.parts.router_losses import RouterLossForward
from tigon.recognition.replacement import find_changing_hook, find_replacement
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.compat.modules import any_global_hook, is_replica
from tigon.runtime.device import PLAIN
from tigon.runtime.stock import calls_are_stock, linears_are_stock, written_in


def is_sharded_by_rows(x: Any, *head: Any) -> bool:
    """Return whether tensor parallelism has sharded a head by rows over one mesh on which `x` is replicated."""
    if any(not hasattr(t, "placements") or t.device_mesh != x.device_mesh for t in (x, *head) if t is not None):
        return False
    has_row_shards = all(t is None or t.placements[0].is_shard(0) for t in head)
    return x.device_mesh.ndim == 1 and x.placements[0].is_replicate() and has_row_shards


@dataclass
class LossCall:
    """One fused forward: the arguments that its loss depends on, and the loss."""

    # Only a call of this head computes the loss. A call of a copy of the head does not.
    head: Any
    # The layer with adapters that computes the loss in place of the head, or None.
    layer: Any
    # The number of rows of the head's weight.
    vocabulary: int
    labels: Tensor  # [B, S]
    shift_labels: Tensor | None
    num_items: Tensor | float | None
    ignore_index: int
    # The number of multiplications in one product with the head.
    multiplications: int
    options: LossOptions
    loss: Tensor | None = None
    # The values that the options of the call request: `token_accuracy`, `predicted_tokens`.
    predictions: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.find_targets()

    def find_targets(self) -> None:
        """Shift the labels, and start to copy the indices of valid rows to the host while the layers run."""
        self.versions = self.read_versions()
        targets = self.shift_labels
        if targets is None:
            targets = F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:].contiguous()
        # [B, S]: each label is at the position that predicts it.
        self.targets = targets
        self.valid_rows = find_rows(self.targets, self.ignore_index, self.multiplications)

    def read_versions(self) -> list[int]:
        """Return the version of each tensor of labels. In compiled code, the compiler orders reads and writes."""
        if torch.compiler.is_compiling():
            return []
        labels = (self.labels, self.shift_labels)
        return [x._version for x in labels if x is not None and not x.is_inference()]


@dataclass(eq=False)
class FusedLoss(threading.local):
    """State that the three replacements share. It holds no module, so a copy of the head stays small."""

    spec: Spec
    # The fused call of this thread, or None outside of one.
    call: LossCall | None = None
    # True while the patched forward of the model runs in this thread.
    is_running: bool = False

    def __reduce__(self) -> tuple:
        return FusedLoss, (self.spec,)

    def __deepcopy__(self, memo: dict) -> "FusedLoss":
        # The model also calls copies of the head, which adapter libraries train. They share this state.
        return self

    def is_shared_by(self, function: Any) -> bool:
        """Return whether a recipe or a loss function is one of the replacements that share this state."""
        return isinstance(function, (HeadForward, AdaptedHeadForward, LossFunction)) and function.fused is self

    def is_head(self, module: nn.Module) -> bool:
        """Return True for the head, or a copy of it, if its class and forward are those that were recognised."""
        replacement = find_replacement(module)
        if (
            replacement is None
            or not isinstance(replacement.recipe, HeadForward)
            or replacement.recipe.fused is not self
        ):
            return False
        return linears_are_stock() and replacement.holds()

    def changed_setting(self, model: nn.Module, head: Any, vocabulary: int) -> str | None:
        # The weight may be a shard, whose logits a hook gathers. If no setting holds the size of the vocabulary, only
        # this comparison detects the shard.
        if not self.spec.vocabulary_settings and head.out_features != vocabulary:
            return "the size of the head"
        sizes = tuple((path, vocabulary) for path in self.spec.vocabulary_settings)
        return changed_setting(model, (*self.spec.settings, *sizes))

    def find_head(self, child: nn.Module) -> tuple[Any, Any]:
        """Return the linear layer that computes the logits, and the layer with adapters around it. The second value is
        None without adapters. The first one is None if no such linear layer is found."""
        head = called_head(child, self.is_head)
        if head is None and not torch.compiler.is_compiling() and adopt_heads(child, HeadForward(self)):
            head = called_head(child, self.is_head)
        return (head, None) if head is not None else (find_adapted_head(child, self), child)

    def begin(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any], loss_options: LossOptions
    ) -> LossCall | None:
        """Return the call whose loss the head computes, or None if the stock code must run."""
        spec, skip_logits = self.spec, kwargs.pop("skip_logits", None)
        by_position = dict(zip(spec.positional_arguments, args, strict=False))
        has_labels = kwargs.get("labels") is not None or "labels" in by_position
        if skip_logits and not has_labels and "shift_labels" in spec.forwarded_options:
            # Without labels the model would not call its loss.
            kwargs["labels"] = kwargs.get("shift_labels")
        arguments = {**by_position, **kwargs}
        labels, logits_to_keep = arguments.get("labels"), arguments.get("logits_to_keep", 0)
        is_fused = model.training if skip_logits is None else skip_logits
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if not is_fused or not isinstance(labels, Tensor) or not keeps_all:
            return None
        loss_function: Any = model.loss_function
        # The loss function may have been replaced since the patch. The stock code then runs. It also runs under
        # torch.func and forward-mode derivatives, which work only on torch's own operators.
        if not self.is_shared_by(loss_function) or has_active_transform():
            return None
        child = getattr(model, spec.head)
        head, layer, vocabulary, features = None, None, 0, 0
        if (change := loss_function.find_change(model)) is None:
            if not (find_changing_hook(child) or any_global_hook() or not calls_are_stock(child)):
                head, layer = self.find_head(child)
            if head is None:
                change = "the head"
            else:
                vocabulary, features = head_size(head)
                change = self.changed_setting(model, head, vocabulary)
        if change is not None:
            if not torch.compiler.is_compiling():
                name = type(model).__name__
                warnings.warn(
                    f"tigon: {change} of {name} was changed, so the stock code computes the loss", stacklevel=3
                )
            return None
        options = {name: arguments[name] for name in spec.forwarded_options if name in arguments}
        num_items = options.get("num_items_in_batch")
        is_number = num_items.dim() == 0 if isinstance(num_items, Tensor) else type(num_items) in (int, float)
        if any(name in arguments for name in spec.unknown_arguments) or not (is_number or num_items is None):
            return None
        # An engine may gather the weight of the head later, so its shape cannot be read here.
        multiplications = labels.numel() * vocabulary * features
        ignore_index, shift_labels = options.get("ignore_index", IGNORE_INDEX), options.get("shift_labels")
        return LossCall(
            head, layer, vocabulary, labels, shift_labels, num_items, ignore_index, multiplications, loss_options
        )


@dataclass(eq=False)
class CausalLMForward:
    """Recipe for the model's forward. After a fused call, `SKIPPED_LOGITS` take the place of the logits in the output.
    The output is an object with the attribute `logits`, a dict or a tuple."""

    fused: FusedLoss
    options: LossOptions = field(default_factory=LossOptions)
    notes: list[str] = field(default_factory=list)
    warns_of_replaced_loss: bool = True
    # The forward of the class with the op for the auxiliary loss of routers; None without such a loss.
    router_losses: RouterLossForward | None = None

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        options = self.options.for_call(kwargs)
        call = self.fused.begin(model, args, kwargs, options)
        if call is None:
            self.options.check_unfused(options)
            self.check_loss_function(model, kwargs)
        # A hook may call the model inside a call of the model.
        outer_call, was_running = self.fused.call, self.fused.is_running
        self.fused.call, self.fused.is_running = call, True
        try:
            outputs = (self.router_losses or type(model).forward)(model, *args, **kwargs)
        finally:
            self.fused.call, self.fused.is_running = outer_call, was_running
        if call is None or call.loss is None:
            return outputs
        outputs = with_predictions(outputs, call.predictions)
        # nn.DataParallel gathers the outputs of its replicas, and accepts only tensors and None.
        no_logits = None if is_replica(model) else SKIPPED_LOGITS
        if isinstance(outputs, tuple):
            return tuple(no_logits if is_placeholder(x) else x for x in outputs)
        # The output is changed in place, because a model may have added keys or attributes to it.
        if isinstance(outputs, dict):
            outputs["logits"] = no_logits
        else:
            outputs.logits = no_logits
        return outputs

    def check_loss_function(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        """Warn once if another function was assigned as the model's loss function after the patch."""
        if torch.compiler.is_compiling() or not self.warns_of_replaced_loss or not model.training:
            return
        loss_function: Any = model.loss_function
        if kwargs.get("labels") is None or self.fused.is_shared_by(loss_function):
            return
        self.warns_of_replaced_loss = False
        message = describe_bypass("the loss function", model, written_in(loss_function))
        self.notes.append(message)
        warnings.warn(f"tigon: {message}", stacklevel=4)


def find_resized_heads(recipes: Mapping[nn.Module, Any]) -> None:
    """Replace the forward of each head that was resized since its model was patched. A compiled call of the model
    cannot do this."""
    for module, recipe in recipes.items():
        if isinstance(recipe, CausalLMForward):
            recipe.fused.find_head(getattr(module, recipe.fused.spec.head))


@dataclass(eq=False)
class HeadForward:
    """Recipe for the head's forward: it computes the loss if the current call is fused."""

    fused: FusedLoss
    live = ("weight", "bias")
    # A layer with adapters may call the head and add them to the logits.
    computes_logits = True

    def __call__(self, head: Any, hidden: Tensor) -> Tensor:
        """Return the placeholder of a fused call, or logits. The head is a module that computes a linear layer."""
        call = self.fused.call
        output = self.compute_loss(head, hidden) if call is not None and call.layer is None else None
        return type(head).forward(head, hidden) if output is None else output

    def compute_loss(self, head: Any, hidden: Tensor, low_rank: tuple[Tensor, Tensor] | None = None) -> Tensor | None:
        """Compute the loss of the current call, and return its placeholder; None if the call needs logits. `low_rank`
        holds the factors [B, S, R] and [V, R] of a product that is added to the logits."""
        call, spec, weight = self.fused.call, self.fused.spec, head.weight
        is_sharded = is_sharded_by_rows(hidden, weight, head.bias)
        if (
            call is None
            or call.head is not head
            or call.loss is not None
            or hidden.shape[:-1] != call.targets.shape
            # A shard of the weight gives only a part of the logits.
            or weight.shape != (call.vocabulary, hidden.shape[-1])
            # The weight may be a DTensor with other placements, or quantised.
            or not (is_sharded or type(weight) in PLAIN)
            or (is_sharded and low_rank is not None)
        ):
            return None
        # The model's forward or a hook may have written to the labels since the call began.
        if torch.compiler.is_compiling() or call.read_versions() != call.versions:
            call.find_targets()
        targets = call.targets.to(hidden.device)
        result = linear_cross_entropy(
            hidden,
            weight,
            targets,
            linear_bias=head.bias,
            low_rank=low_rank,
            ignore_index=call.ignore_index,
            softcap=spec.softcap,
            logit_scale=spec.logit_scale,
            num_items=call.num_items,
            valid_rows=call.valid_rows if targets is call.targets else None,
            process_group=weight.device_mesh.get_group() if is_sharded else None,
            token_scaling=call.options.token_scaling,
            acc_dtype=call.options.acc_dtype,
            return_token_accuracy=call.options.return_token_accuracy,
            return_predicted_tokens=call.options.return_predicted_tokens,
        )
        loss = result if isinstance(result, Tensor) else result.loss
        if not isinstance(result, Tensor):
            predictions = {"token_accuracy": result.token_accuracy, "predicted_tokens": result.predicted_tokens}
            call.predictions = {name: value for name, value in predictions.items() if value is not None}
        call.loss = loss
        # The marker is in the graph of the loss. FSDP2 does not work well with outputs that are views.
        marker = torch.add(loss.new_full((1, 1, 1), spec.marker), loss, alpha=0.0)
        # Anomaly detection would report the NaN in the gradient of a soft cap, although nothing uses that gradient.
        detects_anomalies = not torch.compiler.is_compiling() and torch.is_anomaly_enabled()
        outer = torch.full_like(marker, spec.marker if detects_anomalies else torch.nan)
        placeholder = torch.cat((outer, marker, outer), -1)
        if not is_sharded:
            return as_placeholder(placeholder, (*hidden.shape[:-1], call.vocabulary))
        # The output has the placements that logits would have.
        dtensor: Any = hidden
        return type(weight).from_local(placeholder, dtensor.device_mesh, dtensor.placements, run_check=False)
