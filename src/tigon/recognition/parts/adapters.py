"""Recognise the LoRA layers of PEFT: base(x) + sum_j s_j (B_j(A_j(dropout_j(x))) + bias_j).

A layer says what it is by its attributes, which change while a model trains: which adapters are active, disabled or
merged, and their scaling. A replaced layer reads them at every call (7 us for one adapter), and an op computes the
products; PEFT's forward runs for anything else. `adapter_probes` compares the forward of each class once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.ops.adapters.fp8_weight import Fp8Weight
from tigon.ops.adapters.lora import add_adapters, lora_node, takes_adapters
from tigon.ops.adapters.plan import find_plan, takes_input
from tigon.ops.adapters.projection import Adapter, FrozenWeight, Projection, TensorLike, product_dtype
from tigon.recognition.parts.adapter_probes import CHILDREN, DIFFERENT, NAME, SETTINGS, code_of
from tigon.recognition.parts.dequantisation import read_weight
from tigon.recognition.parts.expert_adapters import ExpertAdapterRecipe, recognise_expert_adapters, wrappers_of
from tigon.recognition.parts.fp8 import FP8Recipe, mark_bases
from tigon.recognition.probing.standin import BF16, FP16, FP32, is_linear
from tigon.recognition.replacement import find_replacement, install, installed_recipe, uninstall
from tigon.runtime.compat.modules import any_global_hook
from tigon.runtime.compat.operators import any_changing_mode
from tigon.runtime.device import PLAIN
from tigon.runtime.stock import (
    are_plain,
    does_more_than_forward,
    dropouts_are_stock,
    linears_are_stock,
    runs_forward_only,
)


class AdaptedCall(NamedTuple):
    """A layer with adapters whose base is called as a module, because only its own code computes its product."""

    base: nn.Module
    adapters: tuple[Adapter, ...]


def output_dtype(layer: Projection, x: Tensor | TensorLike) -> torch.dtype:
    """Return the dtype of the output of a layer for the input x. Under autocast, the product of an `nn.Linear` has the
    dtype of autocast. A quantised layer returns the dtype of x."""
    is_linear_product = isinstance(layer.weight, Fp8Weight) or not isinstance(layer.weight, FrozenWeight)
    return product_dtype(x) if is_linear_product else x.dtype


def cast_for_products(x: Tensor) -> Tensor:
    """Return x in the dtype in which products with x are computed: under autocast, that of autocast."""
    return x.to(product_dtype(x))


def compute_layers(x: Tensor, layers: Sequence[Projection]) -> tuple[Tensor, ...] | None:
    """Return the outputs of linear layers with adapters and with the same input, or None if no op computes them. The
    caller has checked `_may_compute(x)`."""
    operand = cast_for_products(x)
    if (call := find_plan(operand, layers)) is None:
        return None
    outputs = lora_node(operand, call)
    if operand is x:
        return outputs
    return tuple(y.to(output_dtype(layer, x)) for y, layer in zip(outputs, layers, strict=True))


def _tensors(layer: nn.Module) -> tuple[Any, Any]:
    """Return the weight and the bias of an `nn.Linear`. FSDP1 stores them as plain attributes. `nn.Module.__getattr__`
    takes four times as long."""
    parameters = layer._parameters
    try:
        return parameters["weight"], parameters["bias"]
    except KeyError:
        return layer.weight, layer.bias


def _probability(dropout: Any) -> float | None:
    """Return the probability of a dropout in its mode; None for a module that is no dropout of torch."""
    if not runs_forward_only(dropout):
        return None
    if type(dropout) is nn.Identity:
        return 0.0
    if type(dropout) is not nn.Dropout or dropout.inplace:
        return None
    if not dropout.training or dropout.p == 0.0:
        return 0.0
    return float(dropout.p) if dropout.p < 1.0 else None


def _read_adapters(layer: Any, x: Tensor | TensorLike) -> tuple[Adapter, ...] | None:
    """Return the active adapters of a layer; None if there are none, or if no op computes what PEFT does with them."""
    # The properties of the same names take ten times as long, and `adapter_probes` has compared what they return.
    settings, modules = layer.__dict__, layer._modules
    if settings["_disable_adapters"] or settings["merged_adapters"]:
        return None
    active, variants, scalings = settings["_active_adapter"], settings["lora_variant"], settings["scaling"]
    table_a, table_b, dropouts = modules["lora_A"], modules["lora_B"], modules["lora_dropout"]
    if not type(table_a) is type(table_b) is type(dropouts) is nn.ModuleDict:
        return None
    adapters = []
    for name in [active] if isinstance(active, str) else active:
        if (layer_a := table_a._modules.get(name)) is None:
            continue
        layer_b, scaling = table_b._modules[name], scalings[name]
        if not type(layer_a) is type(layer_b) is nn.Linear or name in variants or type(scaling) not in (float, int):
            return None
        probability = _probability(dropouts._modules[name])
        if probability is None or not runs_forward_only(layer_a) or not runs_forward_only(layer_b):
            return None
        (a, a_bias), (b, bias), dtype = _tensors(layer_a), _tensors(layer_b), x.dtype
        # For products that torch refuses, or of rounded values, PEFT's forward runs. The op checks the other shapes.
        if a.shape[-1] != x.shape[-1] or b.dtype != a.dtype or a_bias is not None:
            return None
        if bias is not None and (bias.shape != b.shape[:1] or bias.dtype != b.dtype):
            return None
        if a.dtype != dtype and not _keeps_values(layer, x, a.dtype):
            return None
        adapters.append(Adapter(a, b, float(scaling), bias, probability))
    return tuple(adapters) or None


def _keeps_values(layer: Any, x: Tensor | TensorLike, dtype: torch.dtype) -> bool:
    """Return whether PEFT multiplies the values of x by an A of another dtype, or those that autocast casts x to."""
    if dtype == FP32 and x.dtype in (BF16, FP16) and getattr(layer, "cast_input_dtype_enabled", True):
        return True
    return dtype == product_dtype(x)


def _read_base(base: Any, x: Tensor | TensorLike, adapters: tuple[Adapter, ...]) -> Projection | AdaptedCall | None:
    """Return a layer with these adapters, and with the weight of its base if an op may multiply x by it."""
    recipe = installed_recipe(base)
    if recipe is None:
        if not runs_forward_only(base):
            return None
        weight = _tensors(base)[0] if type(base) is nn.Linear else read_weight(base, x)
    elif type(recipe) is FP8Recipe:
        if does_more_than_forward(base):
            return None
        weight = recipe.frozen_weight(base, x, has_adapters=True)
    elif getattr(recipe, "computes_logits", False) and not does_more_than_forward(base):
        return AdaptedCall(base, adapters)
    else:
        return None
    if weight is None:
        return AdaptedCall(base, adapters)
    bias = base._parameters["bias"] if "bias" in base._parameters else getattr(base, "bias", None)
    # A quantised layer casts its bias. torch adds none of another dtype or shape, or broadcasts it.
    if bias is not None and bias.dtype != weight.dtype and not isinstance(weight, FrozenWeight):
        return None
    return Projection(weight, bias, adapters) if bias is None or bias.shape == weight.shape[:1] else None


def read_layer(layer: nn.Module, x: Tensor | TensorLike) -> Projection | AdaptedCall | None:
    """Return what the forward of a layer of PEFT computes from x, as its attributes say; None if it has to run."""
    adapters = _read_adapters(layer, x) if linears_are_stock() and dropouts_are_stock() else None
    return None if adapters is None else _read_base(layer._modules["base_layer"], x, adapters)


class AdapterRecipe:
    """Recipe: read the adapters of a layer of PEFT at every call, and compute its products by an op. A copy of the
    recipe in another process compares the class `cls` of the layer again, before the first call. If the code of the
    class is another one there, each call runs it."""

    part = "adapters"

    def __init__(self, cls: type) -> None:
        self.cls, self.code = cls, code_of(cls, read_layer)

    def __reduce__(self) -> tuple:
        return type(self), (self.cls,)

    def read(self, layer: nn.Module, x: Tensor | TensorLike) -> Projection | AdaptedCall | None:
        """Return the linear layer with adapters that a layer's forward applies to x; None if the forward must run."""
        return read_layer(layer, x) if self.code.reason is None and self.code.is_that_of(layer) else None

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = None
        if len(args) == 1 and not kwargs and _may_compute(args[0]):
            output = self._compute(args[0], self.read(layer, args[0]))
        return type(layer).forward(layer, *args, **kwargs) if output is None else output

    def _compute(self, x: Tensor, layer: Projection | AdaptedCall | None) -> Tensor | None:
        """Return the output of a layer for x by an op; None if no op computes it."""
        if isinstance(layer, Projection):
            outputs = compute_layers(x, [layer])
            return None if outputs is None else outputs[0]
        if layer is None or not takes_adapters(x, [Projection(None, None, layer.adapters)]):
            return None
        # The op adds adapters to an output in the dtype of x.
        if type(layer.base) is nn.Linear and product_dtype(x) != x.dtype:
            return None
        return add_adapters(x, layer.base(x), layer.adapters)

    def __str__(self) -> str:
        return NAME


def _may_compute(x: Any) -> bool:
    """Return True if an op may compute the products of x. Autocast converts an fp32 input to its own dtype."""
    if type(x) not in PLAIN or torch.compiler.is_compiling():
        return False
    if x.layout is not torch.strided or x.is_nested or any_global_hook():
        return False
    # A function mode may change the values of a product. A meta tensor has none.
    if not x.is_meta and any_changing_mode():
        return False
    dtype = product_dtype(x)
    return x.dtype in (dtype, FP32) and takes_input(x, dtype)


def read_projection(layer: nn.Module, x: Tensor | TensorLike) -> Projection | None:
    """Return the linear layer, with its adapters, that `layer(x)` computes; None if the layer has to be called."""
    if type(layer) is nn.Linear and are_plain((layer,)):
        return Projection(layer.weight, layer.bias)
    recipe = installed_recipe(layer)
    if type(recipe) is FP8Recipe and not does_more_than_forward(layer):
        weight: Any = recipe.frozen_weight(layer, x, has_adapters=False)
        return None if weight is None else Projection(weight, getattr(layer, "bias", None))
    if type(recipe) is not AdapterRecipe or does_more_than_forward(layer):
        return None
    result = recipe.read(layer, x)
    return result if isinstance(result, Projection) else None


def may_have_adapters(x: Any, layers: Sequence[nn.Module]) -> bool:
    """Return whether a layer may have adapters that an op adds. Most models have none, so this is a fast check."""
    return any(type(layer) is not nn.Linear for layer in layers) and _may_compute(x)


def read_projections(x: Tensor, layers: Sequence[nn.Module]) -> list[Projection] | None:
    """Return the linear layers with adapters that the calls `layer(x)` compute. The result is None if one of the layers
    has to be called, or if none has an adapter."""
    if not may_have_adapters(x, layers):
        return None
    projections = []
    for layer in layers:
        if (projection := read_projection(layer, x)) is None:
            return None
        projections.append(projection)
    return projections if any(projection.adapters for projection in projections) else None


def recognise_adapters(module: nn.Module) -> AdapterRecipe | ExpertAdapterRecipe | str | None:
    """Recognise a linear layer with low-rank adapters of PEFT, or a wrapper of experts (`parts.expert_adapters`)."""
    if (expert_result := recognise_expert_adapters(module)) is not None:
        return expert_result
    children: Any = [module._modules.get(name) for name in CHILDREN]
    is_wrapper = is_linear(children[0]) and all(type(child) is nn.ModuleDict for child in children[1:])
    if not is_wrapper or not all(name in vars(module) for name in SETTINGS):
        return None
    variants = vars(module)["lora_variant"]
    # Each call reads which adapters are active. PEFT's forward computes those with a variant.
    if variants and children[1]._modules.keys() <= variants.keys():
        return f"{DIFFERENT}: {', '.join(sorted({type(each).__name__ for each in variants.values()}))}"
    base, *others = (each for child in children for each in ([child] if is_linear(child) else child.children()))
    runs_forwards = all(map(runs_forward_only, others))
    if not runs_forwards or not (installed_recipe(base) is not None or runs_forward_only(base)):
        return "has hooks on its children, or their call or forward was replaced"
    recipe = AdapterRecipe(type(module))
    if recipe.code.reason is None and not recipe.code.is_that_of(module):
        return f"{DIFFERENT}: a method of its class was replaced on the layer"
    return recipe.code.reason or recipe


def replaced_modules(layer: nn.Module, recipe: AdapterRecipe | ExpertAdapterRecipe) -> list[nn.Module]:
    """Return the modules that get the recipe of a layer: for experts, the wrapper of each weight with adapters."""
    return wrappers_of(layer)[0] if isinstance(recipe, ExpertAdapterRecipe) else [layer]


def install_adapters(layer: nn.Module, recipe: AdapterRecipe | ExpertAdapterRecipe) -> Callable[[], None]:
    """Install the recipe of a layer. Return a function that uninstalls it."""
    undo = [install(module, recipe) for module in replaced_modules(layer, recipe)]
    mark_bases(layer)

    def restore() -> None:
        for step in undo:
            step()

    return restore


def uninstall_adapters(module: nn.Module) -> None:
    """Give a layer with adapters the forward of its class back."""
    replacement = find_replacement(module)
    if replacement is not None and isinstance(replacement.recipe, (AdapterRecipe, ExpertAdapterRecipe)):
        uninstall(module, replacement)
