"""The providers: each changes a stock model before the training."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from benchmarks.training.fp8_providers import FP8_RECIPES, TORCHAO, apply_torchao, read_fp8

if TYPE_CHECKING:
    from tigon.memory.levels import MemoryLevel

# This peer loads the model itself, and trains only adapters.
UNSLOTH = "unsloth"
PEERS = ("stock", "liger", "compile", UNSLOTH)
# This suffix of the name of a provider of Tigon means that `tigon.AdamW` keeps the moments in 8 bits.
ADAMW_8BIT = "-adamw8bit"
# This suffix of a peer's name means that all its layers are checkpointed.
CHECKPOINT = "-checkpoint"
# The name of the floor of training with adapters.
FROZEN = "frozen"
# The name of the stock model with the same weights in fp32. Its losses are the reference of other loss curves.
STOCK_FP32 = "stock-fp32"


class Missing(Exception):
    """The provider is not installed, or cannot run on this device."""


class UnsupportedModel(Exception):
    """The provider does not know this model, or refuses it."""


def levels() -> tuple[str, ...]:
    """Return the levels of memory of `tigon.patch`."""
    from tigon.memory.levels import MEMORY

    return MEMORY


def _is_level(name: str) -> bool:
    """Return whether `tigon.patch` has a level of memory with this name."""
    from tigon.memory.levels import parse_memory

    return parse_memory(name) is not None


@dataclass(frozen=True)
class ModelProvider:
    """A way to train a model. `level` is the level of memory of `tigon.patch`; None means a peer of Tigon.

    If `trains` is False, all weights are frozen, and a step computes only the loss and the gradients of the inputs. No
    training with adapters can be faster. If `in_fp32` is True, the weights that were drawn in the dtype of the job are
    converted to fp32, and all layers are checkpointed to save memory. `fp8` is the recipe of products in FP8, or None,
    and `fp8_dw` says whether those of dW are among them. If `adamw_8bit` is True, the optimizer is
    `tigon.AdamW(state="8bit")` instead of torch's AdamW.
    """

    name: str
    level: str | None = None
    trains: bool = True
    in_fp32: bool = False
    fp8: str | None = None
    fp8_dw: bool = True
    adamw_8bit: bool = False

    @property
    def base(self) -> str:
        """Return the name without the suffix of checkpointing."""
        return self.name.removesuffix(CHECKPOINT)

    @property
    def compiles(self) -> bool:
        return self.base == "compile" or self.is_torchao

    @property
    def is_torchao(self) -> bool:
        return self.level is None and self.fp8 is not None

    @property
    def needs_adapters(self) -> bool:
        """Return whether the provider can only train a model with adapters, or is the floor of such training."""
        return self.base == UNSLOTH or not self.trains

    @property
    def loads(self) -> bool:
        """Return whether the provider loads the model itself, by `benchmarks.training.unsloth_model`."""
        return self.base == UNSLOTH

    def checkpoints(self, checkpointing: bool) -> bool:
        """Return whether a peer checkpoints its layers; `checkpointing` requests it from every provider."""
        return checkpointing or self.base != self.name or self.in_fp32

    def make_optimizer(self, parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return the AdamW that trains the parameters: torch's fused one, or that of Tigon with moments in 8 bits."""
        if not self.adamw_8bit:
            return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        import tigon

        return tigon.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, state="8bit")

    def moment_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes of both moments of a large parameter, without the scales of those in 8 bits."""
        return 2 * (parameter.numel() if self.adamw_8bit else parameter.nbytes)

    def apply(self, model: Any, checkpointing: bool, device: str) -> str:
        """Change a model of transformers in place, before it is sharded; return a description for the report.

        A provider that `loads` the model does not come here.

        Raises:
            Missing: the provider is not installed.
            UnsupportedModel: the provider refuses this model.
        """
        if self.level is not None:
            return _apply_tigon(model, self.level, self.fp8, self.fp8_dw)
        description = _apply_liger(model, device) if self.base == "liger" else ""
        if self.fp8 is not None:
            if not device.startswith("cuda"):
                raise Missing("needs a GPU")
            try:
                description = apply_torchao(model, self.fp8, self.fp8_dw)
            except ImportError as reason:
                raise Missing(f"not installed ({reason})") from reason
        if self.checkpoints(checkpointing):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return description


def _apply_tigon(model: nn.Module, level: str, fp8: str | None, fp8_dw: bool) -> str:
    import tigon

    # An earlier Tigon has no option for FP8.
    options: dict[str, Any] = {} if fp8 is None else {"fp8": fp8, "fp8_dw": fp8_dw}
    try:
        return str(tigon.patch(model, memory=cast("MemoryLevel", level), **options))
    except ValueError as reason:
        raise UnsupportedModel(str(reason)) from reason


def _apply_liger(model: Any, device: str) -> str:
    """Apply Liger Kernel with its defaults, with the function that Hugging Face's Trainer calls."""
    if not device.startswith("cuda"):
        raise Missing("needs a GPU")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as reason:
        raise Missing(f"not installed ({reason})") from reason
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedModel(f"Liger Kernel does not know {model.config.model_type}")
    _apply_liger_kernel_to_instance(model=model)
    return "its defaults"


def _are_equal(a: ModelProvider, b: ModelProvider, checkpointing: bool) -> bool:
    """Return whether two providers train in the same way. With `checkpointing` the suffix of a peer has no effect."""
    if a.level is not None or b.level is not None:
        options_of = lambda p: (p.level, p.trains, p.fp8, p.fp8_dw, p.adamw_8bit)
        return options_of(a) == options_of(b)
    return a.base == b.base if checkpointing else a.name == b.name


# --- names ---------------------------------------------------------------------------------------


def _provider_in_fp8(name: str, checkpointing: bool) -> ModelProvider | None:
    """Return the provider in FP8 with this name, or None if there is none."""
    parts = read_fp8(name.removesuffix(CHECKPOINT) if name.startswith(TORCHAO) else name)
    if parts is None or parts.base == TORCHAO:
        return None if parts is None else ModelProvider(name, fp8=parts.recipe, fp8_dw=parts.fp8_dw)
    level = parts.base.removeprefix("tigon-")
    if parts.base == "tigon":
        level = "checkpoint" if checkpointing else "default"
    elif level == parts.base or not _is_level(level):
        return None
    return ModelProvider(name, level, fp8=parts.recipe, fp8_dw=parts.fp8_dw)


def select(names: str | Iterable[str], checkpointing: bool = False) -> list[ModelProvider]:
    """Return the providers of `names`: stock, liger, compile, tigon, and tigon-LEVEL for any level of tigon.patch.

    unsloth trains only adapters. frozen is the model without adapters, patched at the level lean, whose weights are all
    frozen. stock-fp32 is the stock model with the same weights in fp32, whose losses are a reference. tigon-fp8-RECIPE,
    tigon-LEVEL-fp8-RECIPE and torchao-float8-RECIPE compute in FP8 (`fp8_providers`). With the suffix -adamw8bit, a
    provider of Tigon trains with `tigon.AdamW`, whose moments take 8 bits. stock-checkpoint, liger-checkpoint,
    compile-checkpoint and unsloth-checkpoint use gradient checkpointing in every layer. With `checkpointing` all
    providers do; "tigon" then means its level "checkpoint".

    Raises:
        ValueError: a name is unknown, is named twice, or means another level than `checkpointing` requires.

    >>> [provider.level for provider in select("stock,tigon,tigon-lean")]
    [None, 'default', 'lean']
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    known_providers = {name + end: ModelProvider(name + end) for end in ("", CHECKPOINT) for name in PEERS}
    known_providers["tigon"] = ModelProvider("tigon", "checkpoint" if checkpointing else "default")
    known_providers |= {
        f"tigon-{level}": ModelProvider(f"tigon-{level}", level) for level in levels() if level != "default"
    }
    known_providers[FROZEN] = ModelProvider(FROZEN, "lean", trains=False)
    known_providers[STOCK_FP32] = ModelProvider(STOCK_FP32, in_fp32=True)
    names_in_fp8 = [f"{base}-{recipe}" for base in ("tigon-fp8", TORCHAO) for recipe in FP8_RECIPES]
    for name in names_in_fp8:
        if (provider_in_fp8 := _provider_in_fp8(name, checkpointing)) is not None:
            known_providers[name] = provider_in_fp8
    chosen_providers: list[ModelProvider] = []
    for name in names:
        if (base := name.removesuffix(ADAMW_8BIT)) != name and name.startswith("tigon"):
            (provider,) = select([base], checkpointing)
            known_providers[name] = replace(provider, name=name, adamw_8bit=True)
        # A level may hold a number of layers, such as that of tigon-lean+mlp:4.
        if name not in known_providers and _is_level(level := name.removeprefix("tigon-")) and level != name:
            known_providers[name] = ModelProvider(name, level)
        if name not in known_providers and (provider_in_fp8 := _provider_in_fp8(name, checkpointing)) is not None:
            known_providers[name] = provider_in_fp8
        if name not in known_providers:
            near = difflib.get_close_matches(name, known_providers, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"bench train: providers must be among {', '.join(known_providers)}, got {name!r}{hint}")
        provider = known_providers[name]
        if checkpointing and provider.level not in (None, "checkpoint"):
            raise ValueError(
                f"bench train: with --checkpointing every provider checkpoints its layers, and {name} does not: name "
                "tigon or tigon-checkpoint"
            )
        if any(_are_equal(provider, other, checkpointing) for other in chosen_providers):
            raise ValueError(f"bench train: each provider must be named once, got {name!r} again")
        chosen_providers.append(provider)
    if not chosen_providers:
        raise ValueError(f"bench train: providers must name at least one of {', '.join(known_providers)}")
    if checkpointing and "checkpoint" not in levels() and any(p.level for p in chosen_providers):
        raise ValueError(
            "bench train: --checkpointing needs the level 'checkpoint', which this tigon.patch does not have"
        )
    return chosen_providers
