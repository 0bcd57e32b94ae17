"""Recognise low-rank adapters on the weights of experts, which PEFT adds for `target_parameters`.

PEFT wraps the experts in a module for each adapted weight, whose forward registers a parametrization, so that the
experts read W + s B A. The forward here reads the active adapters at every call, and calls the experts with the factors
A and B themselves (`adapted_moe_mlp`). If a call is not understood, the stock forward runs. For each kind of wrapper,
a small copy runs both ways in several states, so a version of PEFT that computes something else is left alone.
"""

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.adapters.lora_experts import ExpertAdapter
from tigon.recognition.parts.adapter_probes import ForwardCode
from tigon.recognition.parts.comparison import run_probes
from tigon.recognition.parts.experts import (
    EXPERTS,
    HIDDEN,
    INNER,
    AdaptedWeights,
    ExpertsRecipe,
    current_adapters,
    is_experts,
    parameter_names,
    recognise_experts,
    small_experts,
    with_adapters,
)
from tigon.recognition.probing.standin import gradients, normal, random_linear, same_gradients, stand_in
from tigon.recognition.probing.trials import record
from tigon.recognition.replacement import find_replacement
from tigon.runtime.device import PLAIN

# The methods of a wrapper that its forward calls. If one of them is replaced later, the stock forward runs.
METHODS = (
    "forward", "_check_forward_args", "_activate_lora", "_remove_parametrizations", "get_base_layer",
    "get_delta_factors", "get_delta_weight", "get_param",
)  # fmt: skip
SMALL_RANK = 3


def wrappers_of(module: nn.Module) -> tuple[list[Any], Any]:
    """Return the wrappers from a module inwards, and the module that the innermost one wraps."""
    wrappers: list[Any] = []
    attributes = ("parameter_name", "lora_A", "lora_B", "scaling", "active_adapters", "merged", "disable_adapters")
    while "base_layer" in module._modules and all(hasattr(module, name) for name in attributes):
        wrappers.append(module)
        module = module._modules["base_layer"]  # type: ignore[assignment]
    return wrappers, module


def _read_wrapper(wrapper: Any, experts: Any) -> list[ExpertAdapter] | None:
    """Return the adapters that a call of the wrapper adds to its weight, or None if they cannot be read."""
    if wrapper.merged:
        # A disabled wrapper subtracts merged adapters from the weight first.
        return None if wrapper.disable_adapters else []
    if wrapper.disable_adapters:
        return []
    weight = experts._parameters.get(wrapper.parameter_name)
    if weight is None or weight.dim() != 3 or len(weight) < 2 or len(weight) != wrapper.num_experts:
        return None
    count, outputs, inputs = weight.mT.shape if experts.is_transposed else weight.shape
    adapters = []
    for name in wrapper.active_adapters:
        if name not in wrapper.lora_A:
            continue
        a, b, scaling = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name]
        is_plain = type(a) in PLAIN and type(b) in PLAIN and isinstance(scaling, (int, float))
        rank = len(a) // count
        fits = is_plain and a.shape == (rank * count, inputs) and b.shape == (outputs, rank * count)
        if not fits or a.dtype != b.dtype or not a.device == b.device == weight.device or not a.is_floating_point():
            return None
        # In A the ranks of an expert are adjacent, in B the experts of a rank.
        a, b = a.view(count, rank, inputs), b.view(outputs, rank, count).permute(2, 0, 1)
        adapters.append(ExpertAdapter(a, b, float(scaling)))
    return adapters


def read_adapters(wrappers: Sequence[Any], experts: Any) -> AdaptedWeights | None:
    """Return the adapters that a call of the outermost wrapper adds to the experts, or None if they cannot be read."""
    if "parametrizations" in experts._modules:
        return None
    up, down = parameter_names(experts)[:2]
    adapters: dict[str, list[ExpertAdapter]] = {up: [], down: []}
    for wrapper in wrappers:
        if wrapper.parameter_name not in adapters or (read := _read_wrapper(wrapper, experts)) is None:
            return None
        adapters[wrapper.parameter_name] += read
    return AdaptedWeights(experts, tuple(adapters[up]), tuple(adapters[down]))


class ExpertAdapterRecipe:
    """Recipe: read the adapters at every call, and let the recipe of the experts compute them."""

    part = "adapters"

    def __init__(self, code: ForwardCode) -> None:
        # The methods of the wrapper's class when the wrapper was recognised.
        self.code = code

    def __call__(self, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        stock = functools.partial(type(wrapper).forward, wrapper, *args, **kwargs)
        if kwargs or torch.compiler.is_compiling():
            return stock()
        wrappers, experts = wrappers_of(wrapper)
        if current_adapters(experts) is not None:
            # An outer wrapper has read the adapters of this one.
            return wrapper.base_layer(*args)
        if not self._is_understood(wrappers, experts, args) or (weights := read_adapters(wrappers, experts)) is None:
            return stock()
        # The inner wrappers and the experts are called as modules, because they may have hooks.
        with with_adapters(weights):
            y = wrapper.base_layer(*args)
        # A hook may have changed the experts, so that their stock forward has run, without the adapters.
        return y if weights.was_used else stock()

    def _is_understood(self, wrappers: Sequence[Any], experts: Any, args: tuple) -> bool:
        """Return True if recipes replace the forwards of all modules, and that of the experts takes these arguments."""
        for wrapper in wrappers:
            replacement = find_replacement(wrapper)
            if replacement is None or not isinstance(replacement.recipe, ExpertAdapterRecipe):
                return False
            if not self.code.is_that_of(wrapper):
                return False
        replacement = find_replacement(experts)
        if replacement is None or not isinstance(replacement.recipe, ExpertsRecipe) or not replacement.holds():
            return False
        return replacement.recipe.takes(experts, args, {})

    def __str__(self) -> str:
        return "low-rank adapters of experts"


def _code_of(cls: type) -> ForwardCode:
    """Return the methods of the class of a wrapper that its forward calls."""
    names = [name for name in METHODS if hasattr(cls, name)]
    read = attrgetter(*names)
    return ForwardCode(frozenset(names) - {"forward"}, read, read(cls))


def recognise_expert_adapters(module: nn.Module) -> ExpertAdapterRecipe | str | None:
    """Recognise a wrapper of experts."""
    wrappers, experts = wrappers_of(module)
    if not wrappers:
        return None
    if not is_experts(experts):
        return "adds adapters to weights of a module that is not recognised as experts"
    if "parametrizations" in experts._modules:
        return "its experts have other parametrizations"
    names = parameter_names(experts)[:2]
    if (name := module.parameter_name) not in names:
        return f"adds adapters to {name}, and moe_mlp takes adapters of {' and '.join(names)} only"
    recipe = recognise_experts(experts)
    if not isinstance(recipe, ExpertsRecipe):
        return f"its experts are left alone: {recipe}"
    adapter_recipe = ExpertAdapterRecipe(_code_of(type(module)))
    compare = functools.partial(_reproduces, adapter_recipe, recipe, wrappers, experts)
    agrees = run_probes(compare, module)
    if isinstance(agrees, str):
        return agrees
    return adapter_recipe if agrees else "computes something else than experts with low-rank adapters"


def _small_copy(wrappers: Sequence[Any], experts: Any, **state: Any) -> Any:
    """Return a small copy of the wrappers around small experts in fp32, with two adapters `first` and `second`."""
    twin: Any = small_experts(experts, 10, experts.config._experts_implementation)
    for parameter in twin.parameters():
        parameter.data = parameter.data.float()
    innermost = twin
    for number, wrapper in enumerate(reversed(wrappers)):
        shape = innermost._parameters[wrapper.parameter_name].shape
        outputs, inputs = shape[:0:-1] if innermost.is_transposed else shape[1:]
        sizes = {"first": SMALL_RANK * EXPERTS, "second": (SMALL_RANK + 1) * EXPERTS}
        layer = functools.partial(random_linear, dtype=torch.float32, bias=False)
        layers = {
            "lora_A": {name: layer(20 * number + rank, inputs, rank) for name, rank in sizes.items()},
            "lora_B": {name: layer(20 * number + rank + 1, rank, outputs) for name, rank in sizes.items()},
        }
        children = dict(wrapper._modules) | {"base_layer": twin} | {n: nn.ModuleDict(x) for n, x in layers.items()}
        attributes = {
            "scaling": {"first": 0.75, "second": 1.5}, "merged_adapters": [], "_active_adapter": ["first"],
            "_disable_adapters": False, "num_experts": EXPERTS, "in_features": inputs, "out_features": outputs,
        }  # fmt: skip
        twin = stand_in(wrapper, {}, children, **attributes | state)
    return twin


STATES: dict[str, dict[str, Any]] = {
    "one adapter": {},
    "the other adapter": {"_active_adapter": ["second"]},
    "two adapters": {"_active_adapter": ["first", "second"]},
    "no adapter": {"_active_adapter": ["third"]},
    "merged": {"merged_adapters": ["first"]},
    "disabled": {"_disable_adapters": True},
}


def _reproduces(
    recipe: ExpertAdapterRecipe, experts_recipe: ExpertsRecipe, wrappers: Sequence[Any], experts: Any
) -> bool:
    """Return True if the outputs and gradients of small wrappers are those that the recipe computes from A and B."""
    x = normal(11, 17, HIDDEN)
    weights, index = normal(12, 17, EXPERTS).sigmoid().topk(3)
    assert INNER != HIDDEN
    for state, attributes in STATES.items():
        twin = _small_copy(wrappers, experts, **attributes)
        chain, small = wrappers_of(twin)
        if len(chain) != len(wrappers) or read_adapters(chain, small) is None:
            return False

        def ours(chain: list = chain, small: Any = small) -> Tensor:
            # The adapters are views of the parameters, which need a gradient only where gradients are enabled.
            adapted = read_adapters(chain, small)
            assert adapted is not None
            with with_adapters(adapted):
                return experts_recipe(small, x, index, weights)

        stock: Callable[[], Tensor] = functools.partial(type(twin).forward, twin, x, index, weights)
        factors = [p for each in chain for name in ("lora_A", "lora_B") for p in getattr(each, name).parameters()]
        results = [[f(), *gradients(f, [x, weights, *factors])] for f in (stock, ours)]
        if not record(same_gradients(results[1], results[0]), recipe, twin, [x], results[1], results[0], mode=state):
            return False
    return True
