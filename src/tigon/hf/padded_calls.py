"""`tigon.patch(model, pad_to=64)`: pad the calls of a causal language model in training, and cut their outputs.

`tigon.graphs.padding` pads the arguments of one call. Here are the facts about a model that this depends on: its
config, the functions that build its masks, and its modules, none of which may read tokens on the right. The forward of
the model pads, and also that of its body, for trainers that call the body and compute the loss themselves.
"""

import ast
import contextlib
import dataclasses
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tigon.graphs.padding import Buckets, PaddedCall, PaddingRules, has_useless_mask, pad_call
from tigon.hf.checkpoints import transformers_models
from tigon.hf.head import CausalLMForward
from tigon.hf.loss_function import LossFunction
from tigon.hf.transformers_private import builds_mask, model_facts
from tigon.recognition.replacement import exchange, find_recipe, find_replacement, foreign_forward, install
from tigon.recognition.rewriting.source import NotReadable, definition_of, innermost
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.reach.code import code_facts
from tigon.runtime.stock import written_in

LOGGER = logging.getLogger("tigon")

# The packages whose modules compute each token by itself, or are attention with the masks of transformers.
_PACKAGES = {"tigon", "torch", "transformers", "peft", "accelerate", "trl", "bitsandbytes", "torchao", "deepspeed"}
_LIMITS = ("max_position_embeddings", "original_max_position_embeddings", "max_seq_len", "n_ctx", "context_length")
# Prefixes of settings of models whose results depend on the length: sparse attention selects tokens by scores, some of
# which may be equal, and byte models group bytes into patches.
_DEPENDENT = ("index_", "indexer_", "keep_window_size", "patching_mode")
# The largest number of notes about calls that were not padded.
MOST_NOTES = 8
_MEDIA = ("image", "audio", "video", "vision", "speech")


def padding_rules(model: Any) -> PaddingRules | str:
    """Return the facts about a model of transformers, or why its calls cannot be padded."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder"
    modules = [*model.modules()]
    # A model with images builds the mask in two modules, and only the smaller one has no tower of images.
    builders = sorted(filter(_builds_causal_mask, modules), key=lambda module: len([*module.modules()]))
    if not builders and not model_facts(model).is_stateful:
        return "its attention is not known to be causal"
    for module in modules:
        origin = type(module).__module__
        if origin.partition(".")[0] not in _PACKAGES and find_replacement(module) is None:
            return f"its {type(module).__name__} (of {origin}) may read tokens on the right"
    decoder = builders[0] if builders else model
    config = model.config.get_text_config()
    if settings := [name for name in vars(config) if name.startswith(_DEPENDENT)]:
        return f"the results of its tokens depend on the length of a call (by {settings[0]})"
    limits, is_dynamic = _position_limits(config)
    attention = (m for name, m in decoder.named_modules() if "cross" not in name.lower())
    code = lambda module: getattr(inspect.unwrap(type(module).forward), "__code__", None)
    variables = lambda module: getattr(code(module), "co_varnames", ())
    return PaddingRules(
        token=_text_token(model.config),
        position_limits=limits,
        keeps_positions=not is_dynamic,
        skips_logits=find_recipe(model, CausalLMForward) is not None,
        adds_mask=any("position_bias" in variables(module) for module in decoder.modules()),
        always_masks=any(getattr(module, "is_causal", True) is False for module in attention),
        config=config,
    )


def _builds_causal_mask(module: nn.Module) -> bool:
    """Return whether the forward of a module always calls a function of transformers that builds a causal mask."""
    forward: Any = type(module).forward
    try:
        function = innermost(forward)
        names = code_facts(function.__code__).global_names
        masks = {name: function.__globals__.get(name) for name in names}
        builders = {n for n, f in masks.items() if f and builds_mask(f) and "bidirectional" not in f.__name__}
        if not builders or not written_in(function).startswith("transformers."):
            return False
        nodes = [*ast.walk(definition_of(forward))]
    except (NotReadable, AttributeError):
        return False
    # If the model builds its causal mask only in such a branch, eager attention is not causal in a call without a mask.
    branches = [n for n in nodes if isinstance(n, ast.If) and ast.unparse(n.test) == "attention_mask is not None"]
    in_branches = {n.id for branch in branches for n in ast.walk(branch) if isinstance(n, ast.Name)}
    return not builders <= in_branches


def _position_limits(config: Any) -> tuple[tuple[int, ...], bool]:
    """Return the lengths at which positions change, and whether RoPE depends on the length of a call above them."""
    ropes = list(_dicts({name: getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")}))
    limits = {getattr(config, name, None) for name in _LIMITS} | {rope.get(name) for rope in ropes for name in _LIMITS}
    is_dynamic = any("dynamic" in (rope.get("rope_type"), rope.get("type")) for rope in ropes)
    return tuple(sorted(limit for limit in limits if isinstance(limit, int))), is_dynamic


def _dicts(value: Any) -> Iterator[dict]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _dicts(item)


def _text_token(config: Any) -> int:
    """Return the first token that does not stand for an image or a sound. The model compares the number of these."""
    names = [name for name in vars(config) if "token" in name and any(word in name for word in _MEDIA)]
    media_tokens = {getattr(config, name) for name in names if isinstance(getattr(config, name), int)}
    return next(token for token in range(len(media_tokens) + 1) if token not in media_tokens)


class _Running(threading.local):
    """Shows whether a padded forward runs in this thread. The body of its model then does not pad."""

    active = False

    def __reduce__(self) -> tuple:
        return _Running, ()


@dataclass(eq=False)
class PaddedForward:
    """Recipe that pads the calls in training of a model or its body, and runs the earlier forward."""

    # The earlier recipe, or None for the forward of the class.
    inner: Callable | None
    # None after the patch was undone.
    buckets: Buckets | None
    rules: PaddingRules
    names: tuple[str, ...]
    running: _Running
    # The notes of the report, which get each new reason why a call was not padded.
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        place: nn.Module, buckets: Buckets, rules: PaddingRules, running: _Running, notes: list[str]
    ) -> "PaddedForward":
        """Return the recipe for a model or its body. The recipe that it has now becomes the inner one."""
        parameters = inspect.signature(type(place).forward).parameters
        names = tuple(p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
        rules = dataclasses.replace(rules, takes_use_cache="use_cache" in parameters)
        inner = getattr(find_replacement(place), "recipe", None)
        return PaddedForward(inner, buckets, rules, names, running, notes)

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = self.inner or type(model).forward
        is_padded = not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled()
        if not is_padded or self.buckets is None or self.running.active or has_active_transform():
            return forward(model, *args, **kwargs)
        call = self.pad(model, args, kwargs, self.buckets)
        self.running.active = True
        try:
            if isinstance(call, PaddedCall):
                return call.cut(forward(model, **call.arguments))
            return forward(model, *args, **kwargs)
        finally:
            self.running.active = False

    def pad(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], buckets: Buckets) -> PaddedCall | None:
        """Return the padded call; None if the call stays as it is."""
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        length = tokens.shape[1] if isinstance(tokens, torch.Tensor) and tokens.dim() > 1 else 0
        reason = "it has unknown arguments" if len(args) > len(self.names) else _find_obstacle(model, arguments)
        call = reason or pad_call(arguments, buckets.length(length), self.rules)
        if isinstance(call, PaddedCall):
            return call
        prefix = f"a call of {type(model).__name__} was not padded: "
        note = prefix + call
        # A reason may name a shape, which differs from call to call.
        if note not in self.notes and sum(text.startswith(prefix) for text in self.notes) < MOST_NOTES:
            self.notes.append(note)
            LOGGER.info(note)
        return None


def _find_obstacle(model: Any, arguments: dict[str, Any]) -> str | None:
    """Return what in the present state of a model depends on the length of a call; None if nothing does."""
    loss_function = getattr(model, "loss_function", None) if arguments.get("labels") is not None else None
    origin = "" if isinstance(loss_function, (LossFunction, type(None))) else written_in(loss_function)
    if origin and not origin.startswith("transformers."):
        return f"its loss function (of {origin}) may count ignored labels"
    # Some classes do not say which module embeds the tokens.
    with contextlib.suppress(NotImplementedError, AttributeError):
        if hasattr(model.get_input_embeddings(), "neftune_noise_alpha"):
            return "the scale of the noise of NEFTune depends on the length"
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and any(getattr(a, "alora_invocation_tokens", None) for a in adapters.values()):
        return "an adapter (aLoRA) counts tokens from the end"
    return None


def leave_out_mask(body: nn.Module, arguments: dict[str, Any], targets: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a call of a body, without a mask that has no effect. The body of a padded model cannot
    see that a loss ignores the masked tokens. The caller therefore passes `targets` [B, S], the tokens that the
    positions predict."""
    recipe = find_recipe(body, PaddedForward)
    if recipe is None or recipe.buckets is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return arguments
    rules = dataclasses.replace(recipe.rules, skips_logits=True)
    is_useless = body.training and has_useless_mask({**arguments, "shift_labels": targets}, rules)
    return {**arguments, "attention_mask": None} if is_useless else arguments


def _pad_place(place: nn.Module, recipe: PaddedForward) -> Callable[[], None]:
    """Install the recipe on a model or its body, or give its lengths to the one that is installed."""
    installed = find_recipe(place, PaddedForward)
    if installed is not None:
        return exchange(installed, "buckets", recipe.buckets)
    if find_replacement(place) is None and foreign_forward(place):
        return lambda: None
    uninstall = install(place, recipe)

    def undo() -> None:
        # A later patch may run the recipe inside its own one.
        recipe.buckets = None
        uninstall()

    return undo


def pad_calls(model: nn.Module, buckets: Buckets, notes: list[str]) -> list[Callable[[], None]]:
    """Let the causal language models in a module pad their calls in training, and return the functions to undo this."""
    head = lambda owner: getattr(owner, "get_output_embeddings", lambda: None)()
    owners = [owner for owner in transformers_models(model) if head(owner) is not None]
    undo: list[Callable[[], None]] = []
    for owner in owners:
        rules = padding_rules(owner)
        if isinstance(rules, str):
            notes.append(f"calls of {type(owner).__name__} are not padded: {rules}")
            continue
        running, body = _Running(), owner.base_model
        undo.append(_pad_place(owner, PaddedForward.of(owner, buckets, rules, running, notes)))
        if body is not owner:
            rules = dataclasses.replace(rules, skips_logits=False)
            undo.append(_pad_place(body, PaddedForward.of(body, buckets, rules, running, notes)))
        notes.append(f"calls of {type(owner).__name__} in training are padded to {buckets}")
    if not owners:
        notes.append("calls are not padded: there is no causal language model of transformers")
    return undo
