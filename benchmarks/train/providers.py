"""The providers: each changes a stock model before the training. A name selects one.

    stock, liger, compile, unsloth                  peers; with the suffix -checkpoint, all layers are checkpointed
    tigon, tigon-LEVEL                              `tigon.patch(model, memory=LEVEL)`
    tigon-fp8-RECIPE, tigon-LEVEL-fp8-RECIPE        `tigon.patch(model, memory=LEVEL, fp8=RECIPE)`
    tigon-graphs, tigon-LEVEL-pad64, and so on      the same with `graphs=True` or with `pad_to=64`
    compile-reduce-overhead                         `torch.compile(model, mode="reduce-overhead")`
    torchao-float8-RECIPE                           `torchao.float8`, compiled by torch
    frozen                                          `tigon-lean` with all weights frozen: the floor of adapters
    stock-fp32                                      the same weights in fp32, checkpointed: a reference for losses

The suffix -bf16-dw keeps the gradients of weights in bf16. The suffix -adamw8bit of a provider of Tigon means that
`tigon.AdamW` keeps the moments in 8 bits.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

FROZEN, STOCK_FP32, UNSLOTH = "frozen", "stock-fp32", "unsloth"
_FP8 = r"(?P<fp8>tensorwise|rowwise)(?P<bf16_dw>-bf16-dw)?"
_NAMES = re.compile(
    rf"(?P<peer>stock|liger|compile(-(?P<mode>reduce-overhead))?|unsloth|torchao-float8-{_FP8})"
    r"(?P<checkpoint>-checkpoint)?"
    rf"|tigon(-(?P<level>(?!fp8-|adamw8bit|graphs|pad\d)[^-]+))?(-fp8-{_FP8.replace('<', '<tigon_')})?"
    rf"(?P<adamw>-adamw8bit)?((?P<graphs>-graphs)|-pad(?P<pad_to>\d+))?|{FROZEN}|{STOCK_FP32}"
)
KNOWN = (
    "stock, liger, compile, compile-reduce-overhead, unsloth (each also with -checkpoint), tigon, tigon-LEVEL, "
    "tigon-fp8-RECIPE, tigon-LEVEL-fp8-RECIPE (each also with -adamw8bit, and with -graphs or -padN), "
    "torchao-float8-RECIPE, frozen, stock-fp32"
)


class Missing(Exception):
    """The provider is not installed, or cannot run on this device."""

    status = "missing"


class UnsupportedModel(Exception):
    """The provider does not know this model, or refuses it."""

    status = "unsupported"


@dataclass(frozen=True)
class ModelProvider:
    """A way to train a model. `base` is tigon, stock, liger, compile, unsloth or torchao, and `level` a level of memory
    of `tigon.patch`. If `trains` is False, all weights are frozen, and a step computes only the loss and the gradients
    of the inputs. `fp8` is the recipe of products in FP8, and `fp8_dw` says whether those of dW are among them.
    `graphs` and `pad_to` are options of `tigon.patch`, and `mode` is that of `torch.compile`."""

    name: str
    base: str
    level: str | None = None
    checkpoints: bool = False
    trains: bool = True
    in_fp32: bool = False
    fp8: str | None = None
    fp8_dw: bool = True
    adamw_8bit: bool = False
    graphs: bool = False
    pad_to: int | None = None
    mode: str | None = None

    @property
    def is_tigon(self) -> bool:
        return self.base == "tigon"

    @property
    def compiles(self) -> bool:
        return self.base in ("compile", "torchao")

    @property
    def loads(self) -> bool:
        """Return whether the provider loads the model itself, by `benchmarks.train.unsloth_model`."""
        return self.base == UNSLOTH

    def make_optimizer(self, parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return the AdamW that trains the parameters: torch's fused one, or that of Tigon with moments in 8 bits."""
        if not self.adamw_8bit:
            return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        import tigon

        return tigon.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, state="8bit")

    def moment_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes of both moments of a large parameter, without the scales of those in 8 bits."""
        return 2 * (parameter.numel() if self.adamw_8bit else parameter.nbytes)

    def apply(self, model: Any, device: str) -> Any:
        """Change a model of transformers in place, before it is sharded. A provider that `loads` it does not come here.
        Return the report of `tigon.patch`, or for another provider a description."""
        if self.is_tigon:
            return self._patch(model)
        description = ""
        if self.base in ("liger", "torchao"):
            if not device.startswith("cuda"):
                raise Missing("needs a GPU")
            try:
                description = _apply_liger(model) if self.base == "liger" else self._apply_torchao(model)
            except ImportError as reason:
                raise Missing(f"not installed ({reason})") from reason
        if self.checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return description

    def _patch(self, model: nn.Module) -> Any:
        import tigon

        options: dict[str, Any] = {} if self.fp8 is None else {"fp8": self.fp8, "fp8_dw": self.fp8_dw}
        options |= ({"graphs": True} if self.graphs else {}) | ({"pad_to": self.pad_to} if self.pad_to else {})
        try:
            return tigon.patch(model, memory=self.level, **options)  # type: ignore[arg-type]
        except ValueError as reason:
            raise UnsupportedModel(str(reason)) from reason

    def _apply_torchao(self, model: Any) -> str:
        """Let torchao compute the linear layers in FP8, except the head."""
        from torchao import __version__
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        head = model.get_output_embeddings()
        fits = lambda m: isinstance(m, nn.Linear) and m.in_features % 16 == 0 and m.out_features % 16 == 0
        config = Float8LinearConfig.from_recipe_name(self.fp8 if self.fp8_dw else f"{self.fp8}_with_gw_hp")
        convert_to_float8_training(model, module_filter_fn=lambda m, _: m is not head and fits(m), config=config)
        count = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
        return f"torchao {__version__}, {count} linear layers in FP8; torch.compile"


def _apply_liger(model: Any) -> str:
    """Apply Liger Kernel with its defaults, with the function that Hugging Face's Trainer calls."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedModel(f"Liger Kernel does not know {model.config.model_type}")
    _apply_liger_kernel_to_instance(model=model)
    return "its defaults"


def find_provider(name: str) -> ModelProvider | None:
    if (match := _NAMES.fullmatch(name)) is None:
        return None
    if name == FROZEN:
        return ModelProvider(name, "tigon", "lean", trains=False)
    if name == STOCK_FP32:
        return ModelProvider(name, "stock", checkpoints=True, in_fp32=True)
    if match["peer"]:
        base = "torchao" if match["fp8"] else match["peer"].partition("-")[0]
        return ModelProvider(
            name, base, checkpoints=bool(match["checkpoint"]), fp8=match["fp8"], fp8_dw=not match["bf16_dw"],
            mode=match["mode"],
        )  # fmt: skip
    return ModelProvider(
        name, "tigon", match["level"] or "default", fp8=match["tigon_fp8"], fp8_dw=not match["tigon_bf16_dw"],
        adamw_8bit=bool(match["adamw"]), graphs=bool(match["graphs"]),
        pad_to=int(match["pad_to"]) if match["pad_to"] else None,
    )  # fmt: skip


def select(names: str) -> list[ModelProvider]:
    """Return the providers of `names`, which are separated by commas. An unknown or repeated name is refused.

    >>> [provider.level for provider in select("stock,tigon,tigon-lean")]
    [None, 'default', 'lean']
    """
    from tigon.memory.levels import parse_memory

    providers: list[ModelProvider] = []
    for name in filter(None, map(str.strip, names.split(","))):
        provider = find_provider(name)
        if provider is None or (provider.level not in (None, "default") and parse_memory(provider.level) is None):
            raise ValueError(f"train: providers must be among {KNOWN}, got {name!r}")
        if any(replace(provider, name=other.name) == other for other in providers):
            raise ValueError(f"train: each provider must be named once, got {name!r} again")
        providers.append(provider)
    if not providers:
        raise ValueError(f"train: providers must name at least one of {KNOWN}")
    return providers
