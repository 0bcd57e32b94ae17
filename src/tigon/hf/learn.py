"""Learn how a causal language model computes its loss from its head, by running its own forward on stand-ins.

The body is a stub that returns random hidden states. The head is a stub that returns chosen logits, or a linear layer
of a few features. No weight of the model is read, so the weights may be on meta, sharded or quantised. The logits have
the size of the real vocabulary, so that code which reads single entries is noticed.
"""

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.hf.head import CausalLMForward, FusedLoss, HeadForward
from tigon.hf.linear_heads import called_head, computes_linear, head_size, leaves_of, linear_heads
from tigon.hf.logits import SKIPPED_LOGITS, LogitsSkippedError
from tigon.hf.loss_function import LossFunction
from tigon.hf.spec import LOSS_ARGUMENTS, NUMBERS, Settings, Spec, loss_arguments, read_setting
from tigon.hf.transformers_private import is_code_of_base_class, loss_slot, loss_type
from tigon.recognition.guards.guard import install_guarded
from tigon.recognition.parts.adapters import AdapterRecipe, recognise_adapters
from tigon.recognition.parts.router_losses import RouterLossForward, find_router_losses
from tigon.recognition.probing.standin import (
    describe,
    gradients,
    has_no_tensors,
    normal,
    own_tensors,
    probing,
    same_gradients,
    stand_in,
)
from tigon.recognition.replacement import (
    find_changing_hook,
    find_replacement,
    foreign_forward,
    install,
    uninstall,
    wrapped_forward,
)
from tigon.recognition.rewriting.source import innermost
from tigon.runtime.compat.names import NAMES_FOR_LOSS, require_names
from tigon.runtime.device import PLAIN
from tigon.runtime.reach.code import code_facts
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.places import Place
from tigon.runtime.stock import calls_are_stock, written_in

LOGGER = logging.getLogger("tigon")

BATCH, LENGTH, FEATURES = 2, 5, 4


class NotUnderstood(Exception):
    """The loss of a model stays stock. The message is the reason."""


class _BodyOutputs(tuple):
    """The outputs of a body: a tuple of hidden states. Every other field is None."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


class _Stub:
    """A stand-in for a child of the model with its attributes. It returns its first floating-point argument, or
    `outputs`. Its tensors are on meta, so a loss that depends on their values raises an error and stays stock."""

    def __init__(self, child: nn.Module, outputs: _BodyOutputs) -> None:
        self._child, self._outputs = child, outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        features = (x for x in args if isinstance(x, Tensor) and x.is_floating_point())
        return next(features, self._outputs)

    def __getattr__(self, name: str) -> Any:
        if inspect.isfunction(method := getattr(type(self._child), name, None)):
            return method.__get__(self)
        value = getattr(self._child, name)
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return _Stub(value, self._outputs) if isinstance(value, nn.Module) else value


def _twin(model: nn.Module, head: str, new_head: Callable, seed: int, hidden: Tensor | None = None) -> nn.Module:
    """Return a stand-in of the model. Its head is `new_head`. Stubs replace all other children that have parameters.
    Tensors of the model itself, not of a child, are random."""
    outputs = _BodyOutputs((normal(seed, BATCH, LENGTH, FEATURES) if hidden is None else hidden,))
    stub = lambda child: child if child is None or has_no_tensors(child) else _Stub(child, outputs)
    children = {name: stub(child) for name, child in model._modules.items()}
    tensors = own_tensors(model).items()
    random = {name: normal(seed, *t.shape) for name, t in tensors if t is not None and t.is_floating_point()}
    twin = stand_in(model, random, children | {head: new_head}, training=True)
    # A forward may count its calls in a buffer, and the stand-in must not change the buffers of the model.
    counters = {name: t for name, t in model._buffers.items() if t is not None and name not in random}
    vars(twin)["_buffers"] = vars(twin)["_buffers"] | {name: t.detach().clone() for name, t in counters.items()}
    return twin


def _run(twin: nn.Module, **kwargs: Any) -> Any:
    """Run a stand-in of the model on a batch of tokens. If the forward takes a mask, the last two tokens of the first
    sequence are padding."""
    parameters = inspect.signature(type(twin).forward).parameters
    # The model's own code computes auxiliary outputs (a router's loss) from values that only the real body has.
    inputs: dict[str, Any] = {name: False for name in parameters if name.startswith("output_")}
    inputs["input_ids"] = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    # Some forwards exclude masked tokens from the loss.
    if "attention_mask" in parameters:
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[0, -2:] = 0
        inputs["attention_mask"] = mask
    return twin.forward(**inputs, **kwargs)


def _labels(vocabulary: int, seed: int) -> Tensor:
    """Return random labels. Two of them are ignored."""
    generator = torch.Generator("cpu").manual_seed(seed)
    labels = torch.randint(vocabulary, (BATCH, LENGTH), generator=generator, device="cpu")
    labels[1, :2] = -100
    return labels


def _observe(model: nn.Module, head: str, logits: Tensor, seed: int) -> tuple[Tensor, frozenset[str]]:
    """Return the logits and the names of the options that the loss gets when the head returns `logits`."""
    loss_calls: list[dict[str, Any]] = []

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        loss_calls.append(loss_arguments(args, kwargs))
        return torch.zeros(())

    head_calls = []

    def stub(hidden: Tensor) -> Tensor:
        head_calls.append(hidden)
        return logits.clone()

    # Some forwards read the dtype of the head's weight.
    vars(stub)["weight"] = logits
    twin: Any = _twin(model, head, stub, seed)
    twin.loss_function = loss_function
    labels = _labels(logits.shape[-1], seed)
    options = {"num_items_in_batch": torch.tensor(7), "ignore_index": -3, "shift_labels": labels.roll(1, -1)}
    forward = inspect.signature(type(model).forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in forward.values()):
        options = {name: value for name, value in options.items() if name in forward}
    outputs = _run(twin, labels=labels, **options)
    if len(head_calls) != 1 or len(loss_calls) > 1:
        raise NotUnderstood(
            f"its forward calls the head {len(head_calls)} times, model.loss_function {len(loss_calls)} times"
        )
    if not loss_calls:
        raise NotUnderstood("its forward computes its loss without model.loss_function")
    if loss_calls[0]["labels"] is not labels:
        raise NotUnderstood("its forward changes the labels before the loss")
    if getattr(outputs, "logits", None) is None:
        raise NotUnderstood("its output has no logits")
    forwarded_options = frozenset(name for name, value in options.items() if loss_calls[0].get(name) is value)
    return loss_calls[0]["logits"], forwarded_options


def _measure(model: nn.Module, head: str, vocabulary: int) -> tuple[float | None, float, frozenset[str]]:
    """Return the soft cap or None, the scale of the logits, and the names of the options that reach the loss."""
    results = []
    for seed in (0, 1):
        logits = (normal(seed, BATCH, LENGTH, vocabulary) * torch.logspace(-3, 3, LENGTH)[:, None]).double()
        # The results for these logits show the scale, the slope at zero, and the soft cap, which bounds a huge logit.
        logits[0, 0, :3] = torch.tensor([1.0, 2.0**-30, (seed + 1) * 1e30])
        logits_at_loss, forwarded_options = _observe(model, head, logits, seed)
        if logits_at_loss.shape != logits.shape:
            raise NotUnderstood("its forward changes the shape of the logits")
        one, slope, limit = logits_at_loss[0, 0, :3].double().tolist()
        softcap = limit if abs(limit) < 1e15 else None
        scale = one if softcap is None else slope * 2.0**30
        scale = 1.0 if abs(scale - 1.0) < 1e-6 else scale
        expected = logits * scale if softcap is None else softcap * torch.tanh(logits * scale / softcap)
        # Most models do nothing to the logits, and the comparison of equal tensors takes a thirtieth of the time.
        is_equal = torch.equal(logits_at_loss, expected)
        if scale <= 0 or not (is_equal or torch.allclose(logits_at_loss.double(), expected, rtol=1e-6, atol=0)):
            raise NotUnderstood("its forward does more to the logits than a scale and a soft cap")
        results.append((softcap, scale, forwarded_options))
    if results[0] != results[1]:
        raise NotUnderstood("its forward changes the logits in a different way each time")
    return results[0]


def attach(model: Any, spec: Spec) -> Callable[[], None]:
    """Install the replacements, and return the function that undoes this."""
    fused = FusedLoss(spec)
    router_losses = RouterLossForward(type(model), spec.router_losses) if spec.router_losses else None
    undo = install(model, CausalLMForward(fused, router_losses=router_losses))
    for head in linear_heads(getattr(model, spec.head)):
        install_guarded(head, HeadForward(fused))
    loss_function = LossFunction.for_model(fused, model)
    model.loss_function = loss_function

    def restore() -> None:
        undo()
        # Calls after this patch may have installed the recipe on more layers: on a new head, on copies of the head and
        # on layers around it.
        for module in model.modules():
            replacement = find_replacement(module)
            if replacement is not None and fused.is_shared_by(replacement.recipe):
                uninstall(module, replacement)
        loss_function.remove(model)

    return restore


def _verify(model: nn.Module, head: nn.Module, spec: Spec) -> None:
    """Raise NotUnderstood if the fused loss of a stand-in of the model differs from its stock loss in one case."""
    vocabulary, _ = head_size(head)
    labels, shifted_labels = _labels(vocabulary, 5), _labels(vocabulary, 6)
    cases: list[dict[str, Any]] = [{}, {"num_items_in_batch": 3}, {"num_items_in_batch": torch.tensor(3)}]
    cases += [{"shift_labels": shifted_labels}, {"ignore_index": int(labels[0, 1])}]
    # Nearly all logits at the loss are within 87 of the largest one. The exponentials of others are subnormal numbers,
    # which take ten times as long to compute.
    weight = normal(7, vocabulary, FEATURES) * (4.0 / spec.logit_scale)
    tensors = {"weight": weight} | ({} if head.bias is None else {"bias": normal(8, vocabulary)})
    for case in cases:
        if not case.keys() <= spec.forwarded_options:
            continue
        targets = torch.where(labels == -100, case["ignore_index"], labels) if "ignore_index" in case else labels
        outcomes = []
        for is_fused in (False, True):
            hidden, layer = normal(9, BATCH, LENGTH, FEATURES), stand_in(head, tensors)
            twin = _twin(model, spec.head, layer, 9, hidden)
            if is_fused:
                attach(twin, spec)
            results: list[Any] = []

            def run(twin: nn.Module = twin, case: dict[str, Any] = case, results: list = results) -> Tensor:
                results.append(_run(twin, labels=targets, **case))  # noqa: B023
                return results[0].loss

            outcomes.append((gradients(run, leaves_of(layer, hidden)), results[0].loss.detach()))
        if results[0].logits is not SKIPPED_LOGITS:
            raise NotUnderstood("its output has logits that cannot be replaced")
        (stock_gradients, expected), (our_gradients, loss) = outcomes
        if expected.dtype != loss.dtype or not torch.allclose(loss, expected, rtol=1e-5, atol=1e-6):
            options = ", ".join(case) or "labels"
            raise NotUnderstood(
                f"its loss is not the standard loss: {float(expected):.6g} instead of {float(loss):.6g}, with {options}"
            )
        if not same_gradients(our_gradients, stock_gradients):
            raise NotUnderstood("the gradients of its loss are not those of the standard loss")


def _argument_names(function: Callable) -> list[str]:
    """Return the names of the parameters of a function, without those of `*args` and `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _names_loaded_by_forward(cls: type[nn.Module]) -> set[str]:
    """Return the names of the attributes that a model's forward loads, and that methods of its class load for it."""
    names: set[str] = set()
    pending, visited_names = ["forward"], set()
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"]
    bases = [base for base in bases if not is_code_of_base_class(base)]
    while pending:
        name = pending.pop()
        visited_names.add(name)
        for value in (vars(base)[name] for base in bases if name in vars(base)):
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(function):
                attributes = code_facts(innermost(function).__code__).attributes
                names |= attributes
                pending += sorted(attributes - visited_names)
    return names


def _settings(model: nn.Module, places: list[Place]) -> Settings:
    """Return the numbers that a model's own forward reads from the model and its config. None counts as a number.
    Before each fused call, the host compares these numbers exactly, so it notices a changed scale or soft cap."""
    names = _names_loaded_by_forward(type(model))
    settings: dict[tuple[str, ...], Any] = {}
    for place in places:
        first, *path = place.path.split(".")
        is_number = type(place.value) in NUMBERS or place.value is None
        if first == "self" and is_number and place.how in ("item", "class", "attribute") and path[-1] in names:
            with contextlib.suppress(AttributeError):
                if read_setting(model, tuple(path)) is place.value:
                    settings[tuple(path)] = place.value
    return tuple(settings.items())


def learn_loss(model: Any) -> Spec | str | None:
    """Return how to compute the loss of a model in its head; a reason if the loss stays stock; None without a head."""
    if not callable(getattr(model, "get_output_embeddings", None)) or not hasattr(type(model), "loss_function"):
        return None
    head: Any = model.get_output_embeddings()
    if head is None:
        return None
    try:
        require_names("the loss in the head", *NAMES_FOR_LOSS)
    except RuntimeError as error:
        return str(error)
    if (name := next((name for name, child in model._modules.items() if child is head), None)) is None:
        return "its head is not a direct child of the model"
    heads = linear_heads(head)
    linear_head = called_head(head, lambda m: m in heads)
    if linear_head is None and len(heads) == 1 and isinstance(recognise_adapters(head), AdapterRecipe):
        linear_head = heads[0]
    if linear_head is None:
        return f"its head ({type(head).__name__}) does more than call one linear layer"
    for layer in (head, *heads):
        is_sharded = hasattr(getattr(layer, "weight", None), "placements")
        if (foreign := foreign_forward(layer)) and not (is_sharded and wrapped_forward(layer)):
            return f"{type(layer).__name__}: {foreign}"
    if (origin := find_changing_hook(head)) is not None:
        return f"a hook on its head (by {origin}) may change the logits"
    if not calls_are_stock(head):
        return "the call of its head was replaced, and may change the logits"
    if loss_slot(model) is None:
        return "its class chooses a loss function in a way that Tigon does not know"
    loss_function = model.loss_function
    # Any other function may have state or keyword options that no probe finds.
    if not inspect.isfunction(loss_function) or not written_in(loss_function).startswith("transformers."):
        return f"its loss function was replaced (by {written_in(loss_function)})"
    # From here on, the head is the linear layer that a wrapper of an adapter library calls now.
    head = linear_head
    try:
        reach = explore(model)
        with reach.preserved(), probing():
            if others := [layer for layer in heads if not computes_linear(layer)]:
                return f"its head ({type(others[0]).__name__}) is not a plain linear layer"
            if not (type(head.weight) in PLAIN or hasattr(head.weight, "placements")):
                return f"the weight of its head is a {type(head.weight).__name__}"
            vocabulary, _ = head_size(head)
            softcap, scale, forwarded_options = _measure(model, name, vocabulary)
            settings = _settings(model, reach.places)
            is_vocabulary = lambda path, value: path[-1] == "vocab_size" and value == vocabulary
            spec = Spec(
                head=name,
                softcap=softcap,
                logit_scale=scale,
                positional_arguments=tuple(_argument_names(type(model).forward)[1:]),
                forwarded_options=forwarded_options,
                loss_type=loss_type(model),
                settings=tuple(setting for setting in settings if not is_vocabulary(*setting)),
                vocabulary_settings=tuple(setting[0] for setting in settings if is_vocabulary(*setting)),
                unknown_arguments=frozenset(_argument_names(loss_function))
                - {"logits", "labels", "vocab_size", *LOSS_ARGUMENTS},
                router_losses=find_router_losses(type(model)),
            )
            _verify(model, head, spec)
    except NotUnderstood as reason:
        return str(reason)
    except LogitsSkippedError as error:
        return f"its forward computes more than its loss from its logits ({str(error).split('`')[1]})"
    except Exception as error:
        LOGGER.debug("the forward of %s cannot be run on stand-ins", type(model).__name__, exc_info=True)
        return f"its forward cannot be run on stand-ins ({describe(error)})"
    return spec
