"""Use Tigon in the trainers of TRL.

    tigon.integrations.trl.enable(memory="lean")     # before the trainer is built
    SFTTrainer(model, ...).train()

TRL's trainers replace the forward of the model and compute their losses from log-probabilities or from the logits of a
teacher. After `enable()`, the forward that they install runs on `linear_cross_entropy` (SFT with the losses "nll" and
"dft": three products with the head), `linear_distillation` (distillation: four) or `linear_log_probs` (all others:
four). `docs/trainers.md` describes the levels of memory and gradient checkpointing.
"""

import functools
import importlib.util
import logging
import sys
import warnings
import weakref
from collections.abc import Callable
from importlib import metadata
from typing import Any

from torch import nn

from tigon.hf.levels import find_lean_level
from tigon.hf.loss_options import recorded_options
from tigon.hf.patch import patch
from tigon.integrations.trl_divergence import chunked_divergence_loss
from tigon.integrations.trl_head import (
    ChunkedLogProbs,
    SummedLoss,
    has_tigon_forward,
    has_trl_forward,
    install_forward,
    loss_is_sum,
)
from tigon.memory.levels import LEVEL_NAMES, Memory, MemoryLevel, parse_memory
from tigon.runtime import checks
from tigon.runtime.requirements import install_command

LOGGER = logging.getLogger("tigon")

# The versions of TRL whose code was read. Each release may change the forward and the losses of the trainers.
KNOWN_VERSIONS = ("1.16.0",)


class State:
    """What `enable` has changed."""

    def __init__(self) -> None:
        # The functions that restore TRL. The list is empty while Tigon is not enabled.
        self.undo: list[Callable[[], None]] = []
        # The level of the models of trainers that are built, or None if the user chooses it for each model.
        self.memory: Memory | MemoryLevel | str | None = None
        # The options of `tigon.patch` for calls that the host is too slow for.
        self.graphs: bool = False
        self.pad_to: int | None = None
        self.patched_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_state = State()


def is_enabled() -> bool:
    """Return whether TRL's trainers use Tigon."""
    return bool(_state.undo)


def _check_version() -> None:
    """Refuse a missing TRL, and a version whose code was not read."""
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"tigon.integrations.trl.enable needs trl {KNOWN_VERSIONS[-1]}, but trl is not installed: "
            f"{install_command('trl')}"
        ) from None
    if version not in KNOWN_VERSIONS:
        raise ImportError(
            f"tigon.integrations.trl.enable knows trl {', '.join(KNOWN_VERSIONS)}, but trl {version} is installed: "
            f"pip install 'trl=={KNOWN_VERSIONS[-1]}'"
        )


def enable(
    memory: Memory | MemoryLevel | str | None = None, *, graphs: bool = False, pad_to: int | None = None
) -> None:
    """Let the trainers of TRL compute their log-probabilities and losses with Tigon.

    Losses, gradients and metrics stay those of TRL up to the rounding of sums. Call it before the trainer is built. A
    trainer that exists already uses Tigon when `train` is called. A second call only changes the options.

    Args:
        memory: The level for the models of all trainers, one of those of `tigon.patch`. Each model is patched when its
            trainer is built, or when it trains, and gradient checkpointing of the trainer is switched off while it
            trains, because the level decides what is saved ("checkpoint" checkpoints the layers). All parts are
            patched, also those that an earlier `tigon.patch(model, rope=False)` has left alone. With None,
            models are patched only by your calls of `tigon.patch`, and TRL's `gradient_checkpointing` argument decides.
            It is True by default. A checkpointed layer saves only its input, so "lean" and "lean+mlp" then have no
            effect in it; a warning says so.
        graphs: Run training calls as CUDA graphs, as `tigon.patch(graphs=True)` does. The trainer calls the body of the
            model, which runs as graphs, and computes the loss outside. If `memory` is None, the level is "default".
        pad_to: Pad training calls to a multiple of this number, as `tigon.patch` does. If `memory` is None, the level
            is "default".

    Raises:
        ImportError: TRL is not installed, or this version of TRL is not known; the message names both versions.
        TypeError: `graphs` is no bool, or `pad_to` no int.
        ValueError: `memory` is no level, or `pad_to` is below 1.

    Source: `trl.trainer.utils.add_fused_lm_head`, `trl.kernels.ChunkedLogProbFunction`, and
    `trl.trainer.distillation_trainer._chunked_divergence_loss` of TRL 1.16.

    Example:
        >>> tigon.integrations.trl.enable(memory="lean")
        >>> tigon.integrations.trl.is_enabled()
        True
        >>> tigon.integrations.trl.disable()
    """
    if memory is not None and parse_memory(memory) is None:
        raise ValueError(f"tigon.integrations.trl.enable: memory must be None or one of {LEVEL_NAMES}, got {memory!r}")
    checks.flag("tigon.integrations.trl.enable", graphs=graphs)
    if pad_to is not None:
        checks.size("tigon.integrations.trl.enable", "pad_to", pad_to)
    _check_version()
    has_options = graphs or pad_to is not None
    _state.memory = "default" if memory is None and has_options else memory
    _state.graphs, _state.pad_to = graphs, pad_to
    if is_enabled():
        return
    utils, base, sft, distillation = (
        importlib.import_module(f"trl.trainer.{name}")
        for name in ("utils", "base_trainer", "sft_trainer", "distillation_trainer")
    )
    sft_class, base_class = sft.SFTTrainer, base._BaseTrainer
    _state.undo = [
        _replace_everywhere(utils, "add_fused_lm_head", _wrap_add_fused_lm_head),
        _replace(utils, "_ChunkedLogProbFunction", ChunkedLogProbs),
        _replace(sft_class, "compute_loss", _wrap_compute_loss(sft_class.compute_loss)),
        _replace(base_class, "train", _wrap_train(base_class)),
        _replace(distillation, "_chunked_divergence_loss", chunked_divergence_loss),
    ]


def disable() -> None:
    """Give TRL its own functions back. Models whose trainers were built meanwhile run TRL's forward from now on.

    Models that `enable(memory=...)` patched stay patched.
    """
    while _state.undo:
        _state.undo.pop()()
    _state.memory = None


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module or class; return the function that restores it, unless other code has set it."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is not value:
            return
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return undo


def _modules_with(name: str, value: Any) -> list[Any]:
    """Return the imported modules of TRL in which a name stands for an object."""
    modules = [module for key, module in sys.modules.items() if key.partition(".")[0] == "trl" and module is not None]
    return [module for module in modules if vars(module).get(name) is value]


def _replace_everywhere(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> Callable[[], None]:
    """Replace a function of TRL in all modules that have imported it, and return the function that undoes this. A
    module that imports the name in the meantime gets the original back too."""
    original = vars(owner)[name]
    value = wrap(original)
    for module in _modules_with(name, original):
        setattr(module, name, value)

    def undo() -> None:
        for module in _modules_with(name, value):
            setattr(module, name, original)

    return undo


def _wrap_add_fused_lm_head(original: Callable) -> Callable:
    """Return a function that gives a model TRL's forward, and Tigon's around it."""

    @functools.wraps(original)
    def add_fused_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
        _patch(model)
        original(model, *args, **kwargs)
        install_forward(model, is_enabled)

    return add_fused_lm_head


def _patch(model: nn.Module) -> None:
    """Patch a model at the level of `enable`, if there is one."""
    if _state.memory is not None:
        report = patch(model, memory=_state.memory, graphs=_state.graphs, pad_to=_state.pad_to)
        _state.patched_models.add(model)
        LOGGER.info("%s", report)


def _prepare_models(trainer: Any) -> None:
    """Prepare the models of a trainer that calls no `add_fused_lm_head`, or has called it before `enable`."""
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    for module in [module for model in models for module in model.modules() if has_trl_forward(module)]:
        _patch(module)
        install_forward(module, is_enabled)
    if _state.patched_models.isdisjoint(trainer.model.modules()):
        _patch(trainer.model)


def _summed_loss(trainer: Any) -> SummedLoss | None:
    """Return the weights of the sum over tokens that `SFTTrainer.compute_loss` differentiates; None if it is no sum."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    has_sequence_parallelism = parallelism is not None and getattr(parallelism, "sp_enabled", False)
    if trainer.args.loss_type == "nll":
        return "nll"
    # With sequence parallelism the trainer uses `outputs.loss`, which has no weights.
    return "dft" if trainer.args.loss_type == "dft" and not has_sequence_parallelism else None


def _wrap_compute_loss(original: Callable) -> Callable:
    """Return `SFTTrainer.compute_loss` in a block that declares its loss as a sum of log-probabilities."""

    @functools.wraps(original)
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        with loss_is_sum(_summed_loss(self)):
            return original(self, *args, **kwargs)

    return compute_loss


def _wrap_train(base_trainer: Any) -> Callable:
    """Return `train`, which first prepares the models, and makes gradient checkpointing and the memory level agree."""
    original = base_trainer.train

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The arguments belong to the user, who may build another trainer with them.
        is_checkpointed = self.args.gradient_checkpointing
        try:
            _prepare_models(self)
            _reconcile_checkpointing(self)
            _check_token_scaling(self)
            _check_liger(self)
            return original(self, *args, **kwargs)
        finally:
            self.args.gradient_checkpointing = is_checkpointed

    return train


def _reconcile_checkpointing(trainer: Any) -> None:
    """Switch off the checkpointing of a trainer if `enable` has a level. Warn if a level has no effect under FSDP."""
    if trainer.args.gradient_checkpointing and _state.memory is not None:
        trainer.args.gradient_checkpointing = False
        LOGGER.info("gradient_checkpointing is off, because the memory level is '%s'", _state.memory)
    level = find_lean_level(trainer.model)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if level is not None and getattr(plugin, "activation_checkpointing", False):
        warnings.warn(
            f"tigon: FSDP checkpoints all layers (activation_checkpointing of fsdp_config), so memory='{level}' "
            "has no effect in them; set activation_checkpointing to false",
            stacklevel=3,
        )


def _check_token_scaling(trainer: Any) -> None:
    """Warn if the model was patched with `token_scaling=True`, which the loss of the trainer does not read."""
    has_weights = any(recorded_options(m).token_scaling for m in trainer.model.modules() if has_tigon_forward(m))
    if has_weights and getattr(trainer.args, "loss_type", None) != "dft":
        warnings.warn(
            f"tigon: tigon.patch(token_scaling=True) has no effect in {type(trainer).__name__}, because the trainer "
            "computes the loss from log-probabilities; SFTConfig(loss_type='dft') is the same loss",
            stacklevel=3,
        )


def _check_liger(trainer: Any) -> None:
    """Warn if the trainer lets the real Liger Kernel replace modules. Under its name, `tigon` may be served instead."""
    spec = importlib.util.find_spec("liger_kernel") if trainer.args.use_liger_kernel else None
    if spec is not None and spec.origin != "tigon":
        warnings.warn(
            "tigon: use_liger_kernel=True lets Liger Kernel replace norms, gated MLPs and rotary embeddings, also "
            "those that tigon.patch has replaced, so Tigon's kernels and memory level are off in them; pass "
            "use_liger_kernel=False, or call tigon.install_as_liger_kernel(force=True)",
            stacklevel=3,
        )
