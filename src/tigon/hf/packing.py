"""Packed samples in recurrent layers: which layers of a model have a state, and a warning in training.

A row is packed if it holds several samples, whose positions each begin at zero. Attention separates the samples by its
mask. A recurrent layer (Mamba, Gated DeltaNet, a short convolution) must reset its state at the first token of each
sample. Without the kernels of other packages, the layers of transformers up to 5.23 do not reset it, so the end of one
sample changes the results of the next one. The layers whose rule and convolution are ops of Tigon reset it at the
boundaries `cu_seq_lens_q`. If a caller passes only positions, a hook computes the boundaries. Other layers stay as they
are.
"""

import inspect
import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tigon.hf.transformers_private import ModelFacts, model_facts
from tigon.recognition.parts.mixers import CACHES, MixerRecipe, boundaries_in, passes_boundaries, warn_of_mixed_samples
from tigon.recognition.replacement import installed_recipe
from tigon.runtime.device import is_capturing
from tigon.runtime.late_checks import LateFlag

# The values of `config.layer_types` for layers that carry a state from token to token.
RECURRENT_TYPES = {"linear_attention", "conv", "mamba", "recurrent"}
# The first parameters of the bodies of transformers, which a caller may pass without names.
FIRST_PARAMETERS = ("input_ids", "attention_mask", "position_ids", "past_key_values")


def recurrent_layers(modules: Sequence[nn.Module], facts: ModelFacts) -> dict[nn.Module, str]:
    """Return the modules that carry a state from token to token, with the names of their classes. These are the modules
    inside the model's layers that have a short convolution as a child. If there are none, they are the layers that
    `config.layer_types` names as recurrent, or all layers if transformers marks the model as stateful."""
    layers = [module for module in modules if type(module).__name__ in facts.layer_classes]
    parts = [part for layer in layers for part in layer.modules()]
    is_short = lambda m: isinstance(m, nn.Conv1d) and 1 < m.groups == m.in_channels and m.kernel_size[0] > 1
    mixers = [part for part in parts if any(map(is_short, part.children()))]
    if not mixers and len(facts.layer_types) == len(layers):
        mixers = [layer for layer, name in zip(layers, facts.layer_types, strict=True) if name in RECURRENT_TYPES]
    if not mixers and facts.is_stateful:
        mixers = layers
    return {module: type(module).__name__ for module in mixers}


def _begins(positions: Tensor) -> Tensor:
    """Return, as a tensor [B, T - 1], bool, which tokens after the first begin a sample, as transformers decides it. Of
    4 axes, the first holds the positions of the text. 3 axes are those of M-RoPE: the positions of the first axis stay
    the same within an image, and decrease only where a sample begins."""
    is_mrope = positions.dim() == 3 and positions.shape[0] == 3
    steps = (positions if positions.dim() == 2 else positions[0]).diff()
    return steps < 0 if is_mrope else steps != 1


def separated_layers(body: nn.Module, layers: dict[nn.Module, str]) -> dict[nn.Module, str]:
    """Return the recurrent layers that get the boundaries of samples from the body of a model, and restart at them."""
    separated: dict[nn.Module, str] = {}
    waiting = [body]
    while waiting:
        parent = waiting.pop()
        for name, child in parent.named_children():
            parts = [*child.children()] if isinstance(child, nn.ModuleList) else [child]
            parts = [part for part in parts if not layers.keys().isdisjoint(part.modules())]
            if not parts or not _passes_boundaries_to(parent, name):
                continue
            waiting += [part for part in parts if part not in layers]
            for part in parts:
                recipe = installed_recipe(part)
                if part in layers and isinstance(recipe, MixerRecipe) and recipe.restarts_at_boundaries(part):
                    separated[part] = layers[part]
    return separated


def _names_samples(kwargs: dict[str, Any]) -> bool:
    """Return True if arguments show samples by other means than positions."""
    return any(value is not None and ("cu_seq" in name or "seq_idx" in name) for name, value in kwargs.items())


def _positions(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the positions of the tokens; None if they show no samples."""
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    # In a padded batch, positions may also decrease at the end of the padding.
    is_padded = isinstance(mask, Tensor) and mask.dim() == 2
    has_axes = isinstance(positions, Tensor) and positions.dim() in (2, 3)
    return positions if has_axes and not is_padded else None


def add_boundaries(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Compute the boundaries of packed samples from positions, in a forward pre-hook. As in transformers, a call with a
    mask or a cache is not packed. The host waits for a GPU, so the hook raises RuntimeError while a CUDA graph is
    captured."""
    arguments = {**dict(zip(FIRST_PARAMETERS, args, strict=False)), **kwargs}
    is_given = lambda name: arguments.get(name) is not None
    if boundaries_in(arguments) is not None or is_given("attention_mask") or any(map(is_given, CACHES)):
        return None
    positions = _positions(arguments)
    tokens = arguments.get("input_ids") if is_given("input_ids") else arguments.get("inputs_embeds")
    if positions is None or not isinstance(tokens, Tensor):
        if _names_samples(arguments):
            warn_of_mixed_samples("recurrent layers read only cu_seq_lens_q or position_ids")
        return None
    if positions.shape[-1] == 1 or positions.is_meta:
        return None
    if torch.compiler.is_compiling():
        warn_of_mixed_samples("a compiled model cannot read position_ids: pass cu_seq_lens_q too if rows are packed")
        return None
    if is_capturing(positions):
        raise RuntimeError(
            "tigon: a CUDA graph cannot compute the boundaries of packed samples from position_ids, because the host "
            "waits for them: pass cu_seq_lens_q too, or no position_ids"
        )
    # Positions of one row may stand for all rows.
    begins = _begins(positions).expand(tokens.shape[0], -1)
    starts = torch.nn.functional.pad(begins, (1, 0), value=True).flatten().nonzero().flatten()
    if len(starts) == len(begins):
        return None
    boundaries = torch.cat([starts, starts.new_full((1,), len(begins) * positions.shape[-1])]).int()
    return args, kwargs | {"cu_seq_lens_q": boundaries}


class PackingWarning:
    """A forward pre-hook that warns at the first packed batch of training. It never waits for a GPU: a later call reads
    the result. It is an object and no closure, because a model is pickled together with its hooks."""

    def __init__(self, text: str) -> None:
        self.text: str | None = text
        self.earlier_result: LateFlag | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.text is None or torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if self._is_packed(kwargs):
            text, self.text, self.earlier_result = self.text, None, None
            warnings.warn(f"tigon: {text}", stacklevel=2)

    def _is_packed(self, kwargs: dict[str, Any]) -> bool:
        """Return True if the arguments show that this batch, or an earlier batch on a GPU, is packed."""
        if _names_samples(kwargs):
            return True
        if (positions := _positions(kwargs)) is None:
            return False
        if not positions.is_cuda:
            return positions.device.type == "cpu" and bool(_begins(positions).any())
        if is_capturing(positions) or (self.earlier_result is not None and not self.earlier_result.is_known()):
            return False
        earlier_result, self.earlier_result = self.earlier_result, LateFlag.copy(_begins(positions).any())
        return earlier_result is not None and bool(earlier_result)

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self.text, "earlier_result": None}


def add_notes(model: nn.Module, notes: list[str]) -> Callable[[], None]:
    """Add notes about recurrent layers and unloaded heads, and hooks for packed samples; return the undoing."""
    facts, modules = model_facts(model), [*model.modules()]
    if heads := facts.dropped_heads:
        notes.append(
            "transformers does not load heads of multi-token prediction, so they are neither trained nor saved "
            f"(weights of the checkpoint that match {', '.join(heads)})"
        )
    layers = recurrent_layers(modules, facts)
    if not layers:
        return lambda: None
    bodies = [module for module in modules if _is_body(module) and layers.keys() <= set(module.modules())][-1:]
    takes_keywords = lambda f: any(p.kind is p.VAR_KEYWORD for p in inspect.signature(f).parameters.values())
    can_separate = any(takes_keywords(type(body).forward) and _gets_boundaries(body, modules) for body in bodies)
    separated = separated_layers(bodies[0], layers) if can_separate else {}
    handles = []
    if separated:
        notes.append(
            f"packed samples are independent in {_list(separated)}: the state restarts at the boundaries that "
            "cu_seq_lens_q or position_ids give"
        )
        handles += [body.register_forward_pre_hook(add_boundaries, with_kwargs=True) for body in bodies]
    if others := {layer: name for layer, name in layers.items() if layer not in separated}:
        text = (
            f"packed samples are not independent in this model: the state of its recurrent layers ({_list(others)}) "
            'carries over from one sample to the next; docs/hybrids.md says more under "Packed samples"'
        )
        notes.append(text)
        hooks = (hook for module in modules for hook in module._forward_pre_hooks.values())
        # The hook of an earlier patch is installed once more, so that it stays when one of the two patches is undone.
        hook = next((hook for hook in hooks if isinstance(hook, PackingWarning)), PackingWarning(text))
        handles += [body.register_forward_pre_hook(hook, with_kwargs=True) for body in bodies]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _gets_boundaries(body: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Return True if the modules that have a body as a child pass boundaries on to it. That of mamba2 does not."""
    parents = [(parent, name) for parent in modules for name, child in parent.named_children() if child is body]
    return all(_passes_boundaries_to(parent, name) for parent, name in parents)


def _passes_boundaries_to(parent: nn.Module, name: str) -> bool:
    """Return True if the forward of a module passes boundaries on to its child of this name."""
    forward = inspect.getattr_static(type(parent), "forward", None)
    return isinstance(forward, types.FunctionType) and passes_boundaries(forward, {name}, parent)


def _list(layers: dict[nn.Module, str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(layers.values()).items())


def _is_body(module: nn.Module) -> bool:
    """Return True if the forward of a module takes tokens. The class of a scripted module has no forward."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return not is_scripted and "input_ids" in inspect.signature(type(module).forward).parameters
