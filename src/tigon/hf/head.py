"""The loss of a causal language model, computed inside its head: the logits never exist as a whole.

Three places of the instance change, and no model's forward is copied:

- `model.forward` notes the labels of the call, runs the stock forward, and takes the placeholder out of its output;
- `head.forward`, reached through the head's own call (hooks that gather or shard weights fire as ever), returns a
  placeholder of shape [1, 1, 3] where logits would be, after computing the loss of the call;
- `model.loss_function` returns that loss, tied to the placeholder: the head's output stays in the graph, and what the
  middle of the placeholder holds shows that nothing but what was learnt happened to it on the way. An assertion on
  the placeholder's device fails if something did (`LOGITS_CHANGED`). Whatever else a model computes from its logits
  raises at once (`tigon.hf.logits`); the ends of the placeholder hold NaN all the same, for engines that turn it into a
  plain tensor.

Before each fused call the host compares the numbers that the model's forward reads (a soft cap, a scale) with those
that were learnt, and the loss function that the model would choose with the one that was recognised. Where one of them
differs, the call is stock.

Only in training mode with labels, or where `skip_logits=True` asks for it. Any other call, and any that this cannot
honour, runs the stock code as it was.
What the model does to its logits on the way to the loss (a soft cap, a scale) is measured by running the model's own
forward around a stand-in body and head, and the outcome is checked there against the stock loss before anything is
touched.

Shapes: B sequences of S tokens, hidden size H, vocabulary V.
"""

import copy
import functools
import inspect
import math
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.hf.logits import PLACEHOLDER_SHAPE, SKIPPED_LOGITS, as_placeholder, as_tensor, is_exact, is_placeholder
from tigon.ops.head.chunks import find_rows
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy
from tigon.recognition.function_guard import FunctionGuard
from tigon.recognition.replacement import find_replacement, foreign_forward, foreign_hook
from tigon.recognition.standin import stand_in
from tigon.runtime.device import PLAIN
from tigon.runtime.places import compile_expression
from tigon.runtime.stock import calls_are_stock, linears_are_stock
from tigon.runtime.torch_private import any_global_hook

__all__ = ["CausalLMForward", "FusedLoss", "HeadForward", "LossFunction", "Spec", "called_head", "cut_by_rows"]

# What the standard loss reads; everything else that reaches it is ignored there, so it is here.
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
IGNORE_INDEX = -100  # its default
NUMBERS = (int, float)
MODULE_STATE = vars(nn.Module()).keys()
# How far the token may be from where the learnt scale and soft cap take it. A few operations in fp32 make 1e-6, a cast
# to bf16 on the way makes 0.004.
EXACT, ROUNDED = 2e-5, 0.01
# CUDA takes messages of up to 254 characters.
LOGITS_CHANGED = (
    "tigon: the model or a hook changes the logits otherwise than when the model was patched, and the loss was "
    "computed without them; call report.restore() and tigon.patch again, or use tigon.patch(model, loss=False)"
)


def loss_arguments(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the standard loss, by name."""
    return {**dict(zip(("logits", "labels", "vocab_size", *LOSS_ARGUMENTS), args, strict=False)), **kwargs}


@dataclass(frozen=True)
class Spec:
    """What was learnt of a model: enough to compute its loss from the inputs of its head."""

    head: str  # name of the head, or of an adapter's wrapper around it, among the model's children
    vocabulary: int
    softcap: float | None
    logit_scale: float
    positional: tuple[str, ...]  # arguments of the model's forward that may come by position
    forwarded: frozenset[str]  # which of LOSS_ARGUMENTS the model hands on to its loss
    loss_type: str | None  # of the model: a compiled graph is made again where it changes
    settings: "Settings"  # numbers that the model's forward reads
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


class _Called:
    """What a head in a stand-in of its wrapper returns: which head it is and what it was given."""

    def __init__(self, head: nn.Module, given: object) -> None:
        self.head, self.given = head, given


def called_head(module: nn.Module, is_head: Callable[[nn.Module], bool]) -> nn.Module | None:
    """The head that a call of `module` is a call of, and nothing else: itself, or one that its wrapper passes to.

    A wrapper of an adapter library decides in every call; it is asked by running its forward on nothing.
    """
    if is_head(module):
        return module
    if not module._modules or torch.compiler.is_compiling():
        return None

    def twin(m: nn.Module) -> Any:
        if is_head(m):
            return lambda x: _Called(m, x)
        own = {k: copy.copy(v) for k, v in vars(m).items() if type(v) in (list, dict, set) and k not in MODULE_STATE}
        return stand_in(m, {}, {name: child and twin(child) for name, child in m._modules.items()}, **own)

    given = object()
    try:
        result = None if foreign_forward(module) else type(module).forward(twin(module), given)
    except Exception:  # it computes: there is more than the head
        return None
    return result.head if type(result) is _Called and result.given is given else None


Settings = tuple[tuple[tuple[str, ...], Any], ...]  # paths of attributes from the model, and their values


def read_setting(model: nn.Module, path: tuple[str, ...]) -> Any:
    """The attribute of a model that a path names: ("config", "vocab_size")."""
    return functools.reduce(getattr, path, model)


def changed_setting(model: nn.Module, settings: Settings) -> str | None:
    """The first setting of a model that has another value than was learnt, as it is written in its forward."""
    for path, value in settings:
        try:
            now = read_setting(model, path)
        except AttributeError:
            return ".".join(path)
        if now is not value and not (type(now) in NUMBERS and now == value):
            return ".".join(path)
    return None


def settings_check(settings: Settings) -> Callable[[nn.Module], bool]:
    """A function that tells in a fraction of a microsecond whether all settings are the objects that were learnt.

    It reads the dicts of objects, because a config looks its attributes up by slow code of its own. Where it says False
    or raises KeyError or AttributeError, `changed_setting` is to decide.
    """
    conditions = []
    for i, (path, _) in enumerate(settings):
        value = functools.reduce(lambda owner, name: f"look({owner}, '__dict__')[{name!r}]", path, "model")
        conditions.append(f"{value} is v{i}")
    names = ", ".join(["look", *(f"v{i}" for i in range(len(settings)))])
    source = f"lambda {names}: lambda model: {' and '.join(conditions) or 'True'}"
    return compile_expression(source)(object.__getattribute__, *(value for _, value in settings))


def cut_by_rows(x: Any, *head: Tensor | None) -> bool:
    """Whether tensor parallelism has cut a head by rows over the ranks of one mesh, which all have the same `x`."""
    if any(not hasattr(t, "placements") or t.device_mesh != x.device_mesh for t in (x, *head) if t is not None):
        return False
    rows = all(t is None or t.placements[0].is_shard(0) for t in head)
    return x.device_mesh.ndim == 1 and x.placements[0].is_replicate() and rows


@dataclass
class Call:
    """One fused forward: what its loss depends on, and what was made of it."""

    head: nn.Module  # whose call computes the loss, and of no copy of it
    labels: Tensor  # [B, S]
    shift_labels: Tensor | None
    num_items: Tensor | float | None
    ignore_index: int
    multiplications: int  # of a product with the head
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        self.find_targets()

    def find_targets(self) -> None:
        """Shift the labels, and send the rows that count on their way to the host while the layers run."""
        self.versions = self.versions_now()
        self.targets = self.shift_labels  # [B, S]: labels where they are predicted
        if self.targets is None:
            self.targets = F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:].contiguous()
        self.valid_rows = find_rows(self.targets, self.ignore_index, self.multiplications)

    def versions_now(self) -> list[int]:
        """How often each tensor of labels has been written. A compiler orders reads and writes by itself."""
        if torch.compiler.is_compiling():
            return []
        given = (self.labels, self.shift_labels)
        return [x._version for x in given if x is not None and not x.is_inference()]


@dataclass(eq=False)
class FusedLoss(threading.local):
    """What the three replaced places share. It holds no module: a copied head stays small, a deleted model goes."""

    spec: Spec
    call: Call | None = None  # of this thread

    def __post_init__(self) -> None:
        self._has_settings = settings_check(self.spec.settings)

    def __reduce__(self):
        return FusedLoss, (self.spec,)

    def __deepcopy__(self, memo: dict) -> "FusedLoss":
        return self  # its calls nest: a copied head, as adapter libraries train one, is still the model's

    def is_place(self, place: Any) -> bool:
        return isinstance(place, (HeadForward, LossFunction)) and place.fused is self

    def is_head(self, module: nn.Module) -> bool:
        """Return True for the head, or a copy of it, if its class and forward are those that were recognised."""
        found = find_replacement(module)
        return found is not None and self.is_place(found.recipe) and linears_are_stock() and found.holds()

    def changed_setting(self, model: nn.Module) -> str | None:
        """Return the first setting whose value differs from the learnt one, or None."""
        if not torch.compiler.is_compiling():
            try:
                if self._has_settings(model):
                    return None
            except (KeyError, AttributeError):
                pass
        return changed_setting(model, self.spec.settings)

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Call | None:
        """The call to compute in the head, or None where the stock code is to run."""
        spec, asked = self.spec, kwargs.pop("skip_logits", None)
        by_position = dict(zip(spec.positional, args, strict=False))
        if asked and kwargs.get("labels") is None and "labels" not in by_position and "shift_labels" in spec.forwarded:
            kwargs["labels"] = kwargs.get("shift_labels")  # without labels it would not go to its loss
        given = {**by_position, **kwargs}
        labels, kept = given.get("labels"), given.get("logits_to_keep", 0)
        wanted = model.training if asked is None else asked
        if not wanted or not isinstance(labels, Tensor) or not (isinstance(kept, int) and kept == 0):
            return None
        # The head or the loss was exchanged since (resized embeddings, an adapter): it is theirs now.
        # torch computes forward derivatives of its own operators alone.
        derives = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
        loss_function = model.loss_function
        if not self.is_place(loss_function) or derives:
            return None
        if (change := loss_function.change(model) or self.changed_setting(model)) is not None:
            if not torch.compiler.is_compiling():
                warnings.warn(f"tigon: {change} of {type(model).__name__} was changed: its loss is stock", stacklevel=3)
            return None
        called = getattr(model, spec.head)
        is_hooked = foreign_hook(called) or any_global_hook() or not calls_are_stock(called)
        if (head := called_head(called, self.is_head)) is None or is_hooked:
            if not torch.compiler.is_compiling():
                warnings.warn(f"tigon: the head of {type(model).__name__} was changed: its loss is stock", stacklevel=3)
            return None
        read = {name: given[name] for name in spec.forwarded if name in given}
        num_items = read.get("num_items_in_batch")
        one_number = num_items.dim() == 0 if isinstance(num_items, Tensor) else type(num_items) in (int, float)
        if any(name in given for name in spec.unknown) or not (one_number or num_items is None):
            return None
        multiplications = labels.numel() * spec.vocabulary * head.in_features  # its weight may not be there yet
        ignore_index, shift_labels = read.get("ignore_index", IGNORE_INDEX), read.get("shift_labels")
        return Call(head, labels, shift_labels, num_items, ignore_index, multiplications)


@dataclass(eq=False)
class CausalLMForward:
    """Recipe for the model's forward. In fused training `logits` of the result is `SKIPPED_LOGITS`, in tuples too."""

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
        # nn.DataParallel puts the outputs of its replicas together, and knows tensors and None.
        skipped = None if getattr(model, "_is_replica", False) else SKIPPED_LOGITS
        if isinstance(outputs, tuple):
            return tuple(skipped if is_placeholder(x) else x for x in outputs)
        # In place: the output keeps what a model has added to it, by key or by attribute.
        if isinstance(outputs, dict):
            outputs["logits"] = skipped
        else:
            outputs.logits = skipped
        return outputs


@dataclass(eq=False)
class HeadForward:
    """Recipe for the head's forward: the loss of the current call, if there is one."""

    fused: FusedLoss
    live = ("weight", "bias")
    choices = ()

    def __call__(self, head: nn.Module, hidden: Tensor) -> Tensor:
        call, spec, weight = self.fused.call, self.fused.spec, head.weight
        cut = cut_by_rows(hidden, weight, head.bias)
        if (
            call is None
            or call.head is not head
            or call.loss is not None
            or hidden.shape[:-1] != call.targets.shape
            or weight.shape != (spec.vocabulary, hidden.shape[-1])  # a shard: its logits are not all
            or not (cut or type(weight) in PLAIN)  # another DTensor, a quantised weight
        ):
            return type(head).forward(head, hidden)
        # The model's own forward, or a hook, may have written into the labels since the call began.
        if torch.compiler.is_compiling() or call.versions_now() != call.versions:
            call.find_targets()
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
            process_group=weight.device_mesh.get_group() if cut else None,
        )
        # In the graph of the loss, and no view: FSDP2 dislikes views as outputs.
        token = call.loss.new_full((1, 1, 1), spec.token) + 0.0 * call.loss
        # Anomaly detection would take the NaN in the gradient of a soft cap, which goes nowhere, for an error.
        watched = not torch.compiler.is_compiling() and torch.is_anomaly_enabled()
        end = torch.full_like(token, spec.token if watched else torch.nan)
        placeholder = torch.cat((end, token, end), -1)
        if not cut:
            return as_placeholder(placeholder, (*hidden.shape[:-1], spec.vocabulary))
        # As it would be gathered.
        return type(weight).from_local(placeholder, hidden.device_mesh, hidden.placements, run_check=False)


class _WithoutSlot:
    """A model as its class's own property sees it where nothing was assigned to `slot`."""

    __slots__ = ("_model", "_slot")

    def __init__(self, model: nn.Module, slot: str) -> None:
        self._model = model
        self._slot = slot

    @property
    def __class__(self) -> type:  # `super()` accepts an object by it
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        if name == self._slot:
            raise AttributeError(name)
        return getattr(self._model, name)


class LossFunction:
    """`model.loss_function`: the loss that the head computed in this call, or the stock function.

    The stock function is the one that was assigned to the model before the patch. Where none was, it is the one that
    the model's class chooses at the moment: by its property, its `loss_type` and transformers' table of losses.
    """

    def __init__(
        self,
        fused: FusedLoss,
        model: nn.Module,
        slot: str,
        assigned: Callable | None,
        guard: FunctionGuard | None = None,
    ) -> None:
        self.fused, self.model, self.slot, self.assigned = fused, weakref.ref(model), slot, assigned
        self.guard = guard or FunctionGuard(self.choose(model))

    @staticmethod
    def of(fused: FusedLoss, model: nn.Module) -> "LossFunction":
        """The function to assign to a model. Its property, if it has one, reads it from the instance."""
        slot = (
            "_loss_function" if isinstance(getattr(type(model), "loss_function", None), property) else "loss_function"
        )
        return LossFunction(fused, model, slot, vars(model).get(slot))

    def __reduce__(self):
        return LossFunction, (self.fused, self.model(), self.slot, self.assigned, self.guard)

    def choose(self, model: nn.Module) -> Callable:
        """The loss function that the model would use without this one."""
        if self.assigned is not None:
            return self.assigned
        chosen = type(model).loss_function
        if isinstance(chosen, property):
            return chosen.fget(_WithoutSlot(model, self.slot))
        static = inspect.getattr_static(type(model), "loss_function")
        return static.__get__(model, type(model)) if hasattr(static, "__get__") else static

    def stock(self) -> Callable:
        """The loss function that the model would use without this one, or the last one if the model is gone."""
        model = self.model()
        if model is not None and not torch.compiler.is_compiling():
            return self.choose(model)
        if model is not None:
            # A compiler cannot follow the choice: the guard looks at it, and remembers it.
            self.change(model)
        return self.guard.function

    def change(self, model: nn.Module) -> str | None:
        """Return the reason why the model's own loss is not the one that was recognised, or None."""
        if torch.compiler.is_compiling():
            # The comparison is for the compiler, which makes another graph where the type changes.
            is_same_type = getattr(model, "loss_type", None) == self.fused.spec.loss_type
            is_same = self._is_same_for_graph() and (is_same_type or self.assigned is not None)
        else:
            is_same = self.guard.holds(self.choose(model))
        return None if is_same else "the loss function"

    @torch._dynamo.assume_constant_result
    def _is_same_for_graph(self) -> bool:
        """The whole check, once for each graph."""
        model = self.model()
        return model is not None and self.guard.holds(self.choose(model))

    def leave(self, model: nn.Module) -> None:
        """Give the model its own loss back, if this is still in its place."""
        if vars(model).get(self.slot) is self:
            del vars(model)[self.slot]
            vars(model).update({} if self.assigned is None else {self.slot: self.assigned})

    def __call__(self, *args, **kwargs) -> Tensor:
        call = self.fused.call
        if call is None or call.loss is None:
            return self.stock()(*args, **kwargs)
        given = loss_arguments(args, kwargs)
        logits, labels = given["logits"], given["labels"]
        tolerance = EXACT if is_exact(logits) else ROUNDED
        logits = logits.full_tensor() if hasattr(logits, "placements") else as_tensor(logits)
        if (
            logits.shape != PLACEHOLDER_SHAPE
            or not (labels is call.labels or labels.device != call.labels.device)
            or not _same(given.get("num_items_in_batch"), call.num_items)
            or not _same(given.get("shift_labels"), call.shift_labels)
            or given.get("ignore_index", IGNORE_INDEX) != call.ignore_index
            or call.versions_now() != call.versions
        ):
            raise RuntimeError(
                "tigon: the model gave its loss other arguments than it was called with, or wrote into its labels "
                "between its head and its loss, or called its head twice, and the head has computed the loss already; "
                "use tigon.patch(model, loss=False) for this model"
            )
        token = logits[..., 1]
        change = token.detach().float() / self.fused.spec.token_at_loss - 1.0
        is_changed = change.abs() > tolerance
        if is_changed.device.type in ("cpu", "cuda"):
            # On a GPU the kernel of this assertion fails, because a comparison on the host would wait for the GPU.
            torch._assert_async(~is_changed.any(), LOGITS_CHANGED)
        # Other devices, and builds of torch without assertions in kernels, have no better sign than NaN.
        factor = torch.ones_like(change).masked_fill(is_changed, torch.nan).sum()
        # Nothing is added: the sum keeps the head's output in the graph, whose hooks gather sharded weights.
        return call.loss * factor + 0.0 * token.sum()


def _same(given: Any, used: Any) -> bool:
    return given is used or (not isinstance(given, Tensor) and not isinstance(used, Tensor) and given == used)
