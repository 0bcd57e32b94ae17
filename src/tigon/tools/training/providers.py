"""What each provider does to a stock model before it is trained."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

__all__ = ["Missing", "Provider", "Unsupported", "levels", "select"]

PEERS = ("stock", "liger", "compile")
CHECKPOINT = "-checkpoint"  # after a peer's name: its layers are checkpointed, whatever the others do


class Missing(Exception):
    """A provider is not installed, or cannot run on this device."""


class Unsupported(Exception):
    """A provider has nothing for this model, or refuses it."""


def levels() -> tuple[str, ...]:
    """The levels of memory that `tigon.patch` knows."""
    from tigon.hf.levels import LEVELS

    return tuple(LEVELS)


@dataclass(frozen=True)
class Provider:
    """`level` is that of `tigon.patch`; None: not Tigon."""

    name: str
    level: str | None = None

    @property
    def base(self) -> str:
        return self.name.removesuffix(CHECKPOINT)

    @property
    def compiles(self) -> bool:
        return self.base == "compile"

    def apply(self, model: nn.Module, checkpointing: bool, device: str) -> str:
        """Change `model` in place, before it is sharded; -> what was done, for the report.

        Raises:
            Missing: the provider is not there.
            Unsupported: it cannot do this model.
        """
        if self.level is not None:
            return _apply_tigon(model, self.level)
        done = _apply_liger(model, device) if self.base == "liger" else ""
        if checkpointing or self.base != self.name:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return done


def _apply_tigon(model: nn.Module, level: str) -> str:
    import tigon

    try:
        return str(tigon.patch(model, memory=level))
    except ValueError as reason:
        raise Unsupported(str(reason)) from reason


def _apply_liger(model: nn.Module, device: str) -> str:
    """Liger Kernel with its defaults, by the function that Hugging Face's Trainer calls."""
    if not device.startswith("cuda"):
        raise Missing("needs a GPU")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as reason:
        raise Missing(f"not installed ({reason})") from reason
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise Unsupported(f"Liger Kernel does not know {model.config.model_type}")
    _apply_liger_kernel_to_instance(model=model)
    return "its defaults"


# --- names ---------------------------------------------------------------------------------------


def select(names: str | Iterable[str], checkpointing: bool = False) -> list[Provider]:
    """Providers by name, in that order: stock, liger, compile, tigon, and tigon-LEVEL for each level of tigon.patch.

    stock-checkpoint, liger-checkpoint and compile-checkpoint are those with gradient checkpointing of every layer.

    With `checkpointing` every side checkpoints its layers: Tigon by its level of that name, which "tigon" then means.

    Raises:
        ValueError: a name is unknown, comes twice, or names a level where `checkpointing` asks for another.

    >>> [provider.level for provider in select("stock,tigon,tigon-lean")]
    [None, 'default', 'lean']
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    known = {name + end: Provider(name + end) for end in ("", CHECKPOINT) for name in PEERS}
    known["tigon"] = Provider("tigon", "checkpoint" if checkpointing else "default")
    known |= {f"tigon-{level}": Provider(f"tigon-{level}", level) for level in levels() if level != "default"}
    chosen: list[Provider] = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"bench train: providers must be among {', '.join(known)}, got {name!r}{hint}")
        provider = known[name]
        if checkpointing and provider.level not in (None, "checkpoint"):
            raise ValueError(
                f"bench train: with --checkpointing every provider checkpoints its layers, and {name} does not: name "
                "tigon or tigon-checkpoint"
            )
        same = (lambda p: p.base) if checkpointing else (lambda p: p.name)
        if any((same(provider) if p.level is None else provider.level) in (same(p), p.level) for p in chosen):
            raise ValueError(f"bench train: each provider must be named once, got {name!r} again")
        chosen.append(provider)
    if not chosen:
        raise ValueError(f"bench train: providers must name at least one of {', '.join(known)}")
    if checkpointing and "checkpoint" not in levels() and any(p.level for p in chosen):
        raise ValueError("bench train: --checkpointing needs a level 'checkpoint' of tigon.patch, which has none")
    return chosen
