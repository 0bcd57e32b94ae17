"""The linear layers and the experts of a model that `tigon.patch(model, fp8=...)` lets run in FP8.

These are those inside the repeated decoder layers. The decoder layers are found by structure: they are the elements of
one list of modules. All other linear layers keep their dtype: the head, routers, adapters, and layers that an FP8
product cannot compute or does not speed up. Experts run in FP8 if `moe_mlp` computes them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tigon.hf.report import Report
from tigon.hf.transformers_private import is_checkpoint_layer
from tigon.memory.levels import Memory
from tigon.ops.fp8.formats import MULTIPLE, RECIPES, has_fp8_units
from tigon.recognition.parts.adapters import AdapterRecipe
from tigon.recognition.parts.expert_adapters import ExpertAdapterRecipe, wrappers_of
from tigon.recognition.parts.experts import ExpertsRecipe, is_experts, parameter_names
from tigon.recognition.parts.fp8 import FP8_DTYPES, FP8Recipe, FP8Settings, copies_of, mark_bases
from tigon.recognition.parts.fp8_experts import FEWEST_ROWS, FP8Experts, explain_experts
from tigon.recognition.parts.mixtures import MixtureRecipe
from tigon.recognition.parts.norm_recipes import RMSNormRecipe
from tigon.recognition.probing.standin import is_linear
from tigon.recognition.replacement import foreign_forward, install

# The smallest I O / (I + O) of a layer from I to O features that runs in FP8. For T rows, the three products of a
# training step save 6 T I O (1 / 700 - 1 / 1300) / 10^12 seconds on an H200, at the speeds that its products reach in
# bf16 and in FP8. To make both copies of x and of dy, it moves 6 T (I + O) bytes at 4.3 TB/s. The two are equal at 353.
# A square layer of 704 features has 352.
NARROWEST = 352


def check_fp8(op: str, fp8: Any, fp8_dw: bool, memory: Memory) -> FP8Settings | None:
    """Return the settings that the options of `patch` request; None if they request no FP8. At the level "default",
    which saves what backward reads, the quantised weights are saved for backward too."""
    if fp8 is None:
        return None
    if fp8 not in RECIPES:
        raise ValueError(f"{op}: fp8 must be one of {', '.join(map(repr, RECIPES))} or None, got {fp8!r}")
    return FP8Settings(fp8, fp8_dw, keeps_copies=memory == Memory())


def _linears(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if is_linear(m) and not m._modules]


def _size(layers: Collection[nn.Module]) -> int:
    return sum(m.in_features * m.out_features for layer in layers for m in _linears(layer))


def _decoder_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the repeated layers among modules: the elements of the list of modules with the largest linear layers. If
    the model has lists of layers that transformers can checkpoint, it is one of these. Otherwise it is a list of
    modules of one class. Each of them has several linear layers, and the lists in them, such as those of experts, are
    smaller."""
    lists = [[*m] for m in modules if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)]
    of_transformers = [layers for layers in lists if all(map(is_checkpoint_layer, layers))]
    of_one_class = [
        layers
        for layers in lists
        if len(layers) > 1 and len({type(m) for m in layers}) == 1 and all(len(_linears(m)) > 1 for m in layers)
    ]
    return max(of_transformers or of_one_class, key=_size, default=[])


def _expert_count(module: Any) -> int | None:
    """Return the number of experts in a module that holds nothing else; None for any other module."""
    if is_experts(module):
        return module.num_experts
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return None
    return len(module) if len({type(m) for m in module}) == 1 and all(_linears(m) for m in module) else None


def _parts_of_mixtures(layer: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers of routers and experts in a decoder layer, with the reasons why they are left alone."""
    reasons: dict[nn.Module, str] = {}
    for parent in layer.modules():
        counts = {child: _expert_count(child) for child in parent._modules.values() if child is not None}
        for experts in (child for child, count in counts.items() if count is not None):
            for linear in _linears(experts):
                reasons[linear] = "an expert: the router decides how many rows it has"
            for sibling in counts.keys() - {experts}:
                linears = _linears(sibling)
                if len(linears) == 1 and linears[0].out_features == counts[experts]:
                    reasons[linears[0]] = "a router: its output selects experts"
    return reasons


def _explain(layer: Any, recipe: Any) -> str | None:
    """Return why a linear layer in a decoder layer does not run in FP8, or None."""
    if type(layer).forward is not nn.Linear.forward:
        return "no plain nn.Linear"
    if recipe is None and (reason := foreign_forward(layer)):
        return reason
    if layer.weight.dtype not in (*FP8_DTYPES, torch.float32):
        return f"its weight is in {_name(layer.weight.dtype)}"
    inputs, outputs = layer.in_features, layer.out_features
    if inputs % MULTIPLE or outputs % MULTIPLE:
        return f"its sizes are not multiples of {MULTIPLE} ({inputs} -> {outputs})"
    if inputs * outputs < NARROWEST * (inputs + outputs):
        return f"too narrow for FP8 to pay ({inputs} -> {outputs})"
    return None


def _explain_experts(experts: Any, recipe: Any) -> str | None:
    """Return why a module of experts in a decoder layer does not run in FP8, or None."""
    if not isinstance(recipe, ExpertsRecipe):
        return "experts that moe_mlp does not compute"
    reason = explain_experts(_expert_weights(experts))
    return None if reason is None else f"experts: {reason}"


def _expert_weights(experts: Any) -> list[Any]:
    return [getattr(experts, name) for name in parameter_names(experts)[:2]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_of(layer: Any) -> torch.device:
    return layer.weight.device


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return f"{name} of compute capability {major}.{minor} (NVIDIA GPUs have them from 8.9 on)"


class FP8Plan:
    """The linear layers that will run in FP8, and those that will not, with the reasons."""

    def __init__(self, settings: FP8Settings | None = None) -> None:
        self.settings = settings
        self.changed: dict[nn.Module, Any] = {}
        # The name and the module of each line of the report, and the reason why the module is left alone, or "".
        self.lines: list[tuple[str, Any, str]] = []
        self.adapted: list[Any] = []
        # True if an earlier patch lets a layer or experts run in FP8 with the same settings.
        self.has_fp8 = False

    def apply(self, report: Report) -> list[Callable[[], None]]:
        """Install the recipes and add all lines to the report; return the functions that undo this."""
        settings = self.settings
        if settings is None:
            return []
        undo = [install(module, recipe) for module, recipe in self.changed.items()]
        for module in self.adapted:
            mark_bases(module)
        for name, module, reason in self.lines:
            detail = reason or _describe_module(settings, module)
            report.record("fp8", module, not reason, detail, name)
        if all(reason for _, _, reason in self.lines) and not self.has_fp8:
            report.notes.append(f"fp8={settings.recipe!r} has no effect, because no linear layer can run in FP8")
        return undo


def _describe_module(settings: FP8Settings, module: Any) -> str:
    """Return what the report says about a layer or experts in FP8."""
    if is_experts(module):
        dtype, now = _expert_weights(module)[0].dtype, "once their weights are in bf16 or fp16"
        text = f"rowwise FP8 products in forward and dX, but not dW, from {FEWEST_ROWS} rows for each expert on"
    else:
        dtype, now = module.weight.dtype, "under autocast or once its weight is in bf16 or fp16"
        text = f"{settings.recipe} FP8 products in forward, {'dX and dW' if settings.fp8_dw else 'dX, but not dW'}"
    return text if dtype in FP8_DTYPES else f"{text}, {now} (now {_name(dtype)})"


def plan_fp8(names: Mapping[nn.Module, str], settings: FP8Settings | None, recipes: Mapping[nn.Module, Any]) -> FP8Plan:
    """Choose the linear layers and the experts that run in FP8."""
    plan = FP8Plan(settings)
    if settings is None:
        return plan
    plan.adapted = [module for module, recipe in recipes.items() if isinstance(recipe, AdapterRecipe)]
    layers = _decoder_layers(names)
    inside = {m for layer in layers for m in layer.modules()}
    reasons = {m: reason for layer in layers for m, reason in _parts_of_mixtures(layer).items()}
    for module in plan.adapted:
        base_size = module.in_features, module.out_features
        linears_of_adapters = [m for m in _linears(module) if (m.in_features, m.out_features) != base_size]
        reasons |= dict.fromkeys(linears_of_adapters, "a low-rank adapter")
    for module, recipe in recipes.items():
        if isinstance(recipe, ExpertAdapterRecipe):
            reasons[wrappers_of(module)[1]] = "experts with adapters"
    linears: list[Any] = []
    for module, name in names.items():
        earlier, is_mixture = recipes.get(module), isinstance(recipes.get(module), MixtureRecipe)
        if not (is_mixture or is_experts(module) or (is_linear(module) and not module._modules)):
            continue
        if module not in inside:
            reason: str | None = "not in a repeated decoder layer"
        elif is_mixture:
            reason = "experts whose inputs are multiplied by the weights of the router"
        else:
            explain = _explain_experts if is_experts(module) else _explain
            reason = reasons.get(module) or explain(module, earlier)
        earlier_copies = copies_of(earlier)
        if reason is None and earlier_copies is not None and earlier_copies.settings == settings:
            plan.has_fp8 = True
            continue
        plan.lines.append((name, module, reason or ""))
        if reason is None and isinstance(earlier, ExpertsRecipe):
            plan.changed[module] = replace(earlier, fp8=FP8Experts(settings))
        elif reason is None:
            plan.changed[module] = FP8Recipe(settings)
            linears.append(module)
    for layer in linears:
        # A CPU emulates FP8 products, and the device of a model on meta is not known yet.
        if (device := _device_of(layer)).type not in ("cpu", "meta") and not has_fp8_units(layer.weight):
            raise ValueError(f"patch: fp8={settings.recipe!r} needs a GPU with FP8 units, got {_describe(device)}")
    if settings.recipe == "tensorwise":
        widths = {layer.out_features for layer in linears}
        plan.changed |= _norms_behind(widths, {m: recipe for m, recipe in recipes.items() if m in inside})
    return plan


def _norms_behind(widths: Collection[int], recipes: Mapping[nn.Module, Any]) -> dict[nn.Module, RMSNormRecipe]:
    """Return recipes for those norms whose gradients FP8 layers of these widths may read. Their backward finds the
    maxima of the gradients. The widths exclude the norms of each head."""
    return {
        norm: replace(recipe, finds_maximum=True)
        for norm, recipe in recipes.items()
        if isinstance(recipe, RMSNormRecipe)
        and recipe.weight is not None
        and not recipe.finds_maximum
        and getattr(norm, recipe.weight).numel() in widths
    }
