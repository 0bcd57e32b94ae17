"""The names of `liger_kernel.megatron`, on Tigon's ops.

Importing this module imports nothing of Megatron-Core.

Shapes: S tokens of B sequences, H hidden size, I intermediate size, V_p columns of the vocabulary on a rank.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.integrations.liger.autograd_functions import LigerVocabParallelCrossEntropy
from tigon.ops.mlps.glu import swiglu
from tigon.ops.norms.rms_norm import rms_norm

# Programs configure the loggers of these names for Liger's messages.
logger = logging.getLogger("liger_kernel.megatron.monkey_patch")
swiglu_logger = logging.getLogger("liger_kernel.megatron.swiglu")
# Liger's attribute of a replacement, by which a second call recognises it.
MARK = "__liger_patched__"
FUSED_LOSS = ("megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy")
LOSS = ("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy")
SWIGLU = ("megatron.core.fusions.fused_bias_swiglu", "SwiGLUFunction")
# Modules of Megatron-Core that have their own reference to the fused loss, in its releases and on its main branch.
FUSED_LOSS_USERS = (
    ("megatron.core.models.common.language_module.language_module", FUSED_LOSS[1]),
    ("megatron.core.models.backends", "_fused_ce"),
)

# Functions that put the objects of Megatron-Core back.
_undo: list[Callable[[], None]] = []


# --- modules ---------------------------------------------------------------------------------------


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """The losses [S, B] of logits [S, B, V_p], smoothed as Megatron-Core does."""

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "megatron", label_smoothing_mode: str = "partition",
    ) -> None:  # fmt: skip
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)


class LigerMegatronRMSNorm(nn.Module):
    """`tigon.rms_norm` with the constructor of Megatron-Core's norms. `persist_layer_norm` has no effect."""

    def __init__(
        self, config: Any, hidden_size: Any, eps: float = 1e-5, persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False, normalization: str = "RMSNorm",
    ) -> None:  # fmt: skip
        super().__init__()
        kind = getattr(config, "normalization", "RMSNorm")
        if kind != "RMSNorm":
            raise ValueError(f"LigerMegatronRMSNorm: config.normalization must be 'RMSNorm', got {kind!r}")
        self.config, self.eps = config, eps
        self.hidden_size = torch.Size([hidden_size] if isinstance(hidden_size, int) else hidden_size)
        self.zero_centered_gamma = zero_centered_gamma or bool(getattr(config, "layernorm_zero_centered_gamma", False))
        self._offset = float(self.zero_centered_gamma)
        self.weight = nn.Parameter(torch.empty(self.hidden_size))
        self.reset_parameters()
        # Megatron-Core sums the gradient of a parameter with this mark over the ranks.
        is_sharded = bool(getattr(config, "sequence_parallel", False))
        self.weight.sequence_parallel = is_sharded  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Set the factor of each feature to one."""
        nn.init.constant_(self.weight, 1.0 - self._offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., H] in its dtype."""
        return rms_norm(x, self.weight, self.eps, offset=self._offset, rounding="before_weight").to(x.dtype)

    def extra_repr(self) -> str:
        """Return the sizes that `print` shows."""
        return f"hidden_size={tuple(self.hidden_size)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LigerMegatronSwiGLU(nn.Module):
    """silu(gate) * up of [gate | up], by `tigon.swiglu`. `in_place` has no effect.

    Args:
        fallback_impl: Computes the calls with a bias, with an FP8 copy of the input or with its offload to the CPU.
            Without it, such a call is refused.
        in_place: Ignored. Backward never writes to the input.
    """

    def __init__(self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place
        self._logged: set[str] = set()

    def forward(
        self, input: Tensor, bias: Tensor | None = None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Tensor:
        """Return [T, I] for an input [T, 2 I], or [S, B, I] for [S, B, 2 I]."""
        options = {"bias": bias is not None, "fp8_input_store": fp8_input_store, "cpu_offload_input": cpu_offload_input}
        if any(options.values()):
            given = ", ".join(name for name, is_on in options.items() if is_on)
            if self.fallback_impl is None:
                raise RuntimeError(
                    f"LigerMegatronSwiGLU: a call with {given} needs fallback_impl, Megatron-Core's bias_swiglu_impl; "
                    "apply_liger_kernel_to_megatron(swiglu=True) leaves such calls to Megatron-Core"
                )
            if given not in self._logged:
                self._logged.add(given)
                swiglu_logger.info("LigerMegatronSwiGLU is falling back to fallback_impl for calls with %s.", given)
            return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
        if input.dim() not in (2, 3):
            raise ValueError(f"LigerMegatronSwiGLU: input must be 2D or 3D, got shape {tuple(input.shape)}")
        if input.shape[-1] % 2:
            raise ValueError(f"LigerMegatronSwiGLU: the last dimension must be even, got {input.shape[-1]}")
        return swiglu(input)


# --- replacements ----------------------------------------------------------------------------------


def apply_liger_kernel_to_megatron(rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False) -> None:
    """Let models of Megatron-Core that are built from now on compute these parts with Tigon. A second call is free.

    Args:
        rms_norm: The norms of the local specification, and the norm after the last layer if it is torch's.
        cross_entropy: Both losses over the shards of the vocabulary, also where a model has a reference to them.
        swiglu: The gate of dense MLPs and of shared experts without a bias.

    Raises:
        ImportError: Megatron-Core is not installed, or has no object of the expected name.
    """
    if rms_norm:
        _replace_norms()
    if cross_entropy:
        _replace_losses()
    if swiglu:
        _replace_swiglu()


def restore_megatron() -> None:
    """Put the objects of Megatron-Core back that `apply_liger_kernel_to_megatron` replaced."""
    while _undo:
        _undo.pop()()


def _original(path: tuple[str, str], option: str) -> tuple[Any, Any]:
    """Return a module of Megatron-Core and its object, or None as the object if it is a replacement already."""
    module_name, name = path
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(
            f"apply_liger_kernel_to_megatron: {option}=True requires megatron-core with {module_name}.{name}"
        ) from error
    original = getattr(module, name, None)
    if original is None:
        raise ImportError(
            f"apply_liger_kernel_to_megatron: {option}=True found no {module_name}.{name}; the symbol path may have "
            "changed in this version of Megatron-Core"
        )
    return module, None if getattr(original, MARK, False) else original


def _replace(owner: Any, name: str, original: Any, replacement: Any) -> None:
    setattr(replacement, MARK, True)
    replacement.__wrapped__ = original
    setattr(owner, name, replacement)
    _undo.append(lambda: setattr(owner, name, original))


def _replace_norms() -> None:
    _, provider = _original(("megatron.core.models.backends", "LocalSpecProvider"), "rms_norm")
    layer_norm = provider.layer_norm
    if not getattr(layer_norm, MARK, False):

        def patched_layer_norm(
            self: Any, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False, **options: Any
        ) -> Any:
            if rms_norm:
                return LigerMegatronRMSNorm
            return layer_norm(self, rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual, **options)

        _replace(provider, "layer_norm", layer_norm, patched_layer_norm)

    block, norm = _original(("megatron.core.transformer.transformer_block", "LayerNormImpl"), "rms_norm")
    torch_norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    # Transformer Engine and Apex have norms of their own, which whoever installed them has chosen.
    if norm is torch_norm:

        class _LigerOrTorchNorm:
            def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
                is_rms = getattr(config, "normalization", None) == "RMSNorm"
                kind = LigerMegatronRMSNorm if is_rms else norm
                return kind(config=config, hidden_size=hidden_size, eps=eps, **options)

        _replace(block, "LayerNormImpl", norm, _LigerOrTorchNorm)


def _loss_class() -> Any:
    """Return the class of the losses. A program may have put its own class into Liger's module."""
    module = sys.modules.get("liger_kernel.megatron.cross_entropy")
    return getattr(module, "LigerMegatronCrossEntropy", LigerMegatronCrossEntropy)


def _replace_losses() -> None:
    loss_class, not_given = _loss_class(), object()
    fused_module, fused = _original(FUSED_LOSS, "cross_entropy")
    module, loss = _original(LOSS, "cross_entropy")
    if fused is not None:
        compute_fused = loss_class()

        def liger_fused_vocab_parallel_cross_entropy(
            vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None
        ) -> Tensor:
            losses: Tensor = compute_fused(vocab_parallel_logits, target, tp_group=tp_group)
            return losses

        _replace(fused_module, FUSED_LOSS[1], fused, liger_fused_vocab_parallel_cross_entropy)
        reached = [_replace_use(user, fused, liger_fused_vocab_parallel_cross_entropy) for user in FUSED_LOSS_USERS]
        if not any(reached):
            logger.warning(
                "Could not find where this Megatron version calls fused_vocab_parallel_cross_entropy. Models with "
                "cross_entropy_loss_fusion=True may keep Megatron-Core's loss."
            )
    if loss is not None:
        compute = loss_class()

        def liger_vocab_parallel_cross_entropy(
            vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: Any = not_given, tp_group: Any = None
        ) -> Tensor:
            function = compute if label_smoothing is not_given else loss_class(label_smoothing=label_smoothing)
            losses: Tensor = function(vocab_parallel_logits, target, tp_group=tp_group)
            return losses

        _replace(module, LOSS[1], loss, liger_vocab_parallel_cross_entropy)
        _replace_use(("megatron.core.tensor_parallel", LOSS[1]), loss, liger_vocab_parallel_cross_entropy)


def _replace_use(user: tuple[str, str], original: Any, replacement: Any) -> bool:
    """Replace the reference of a module to the original, and return whether the module has the replacement now."""
    module_name, name = user
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return False
    if getattr(module, name, None) is original:
        _replace(module, name, original, replacement)
    return getattr(module, name, None) is replacement


def _replace_swiglu() -> None:
    module, original = _original(SWIGLU, "swiglu")
    if original is None:
        return

    class _LigerSwiGLUFunction:
        @staticmethod
        def apply(input: Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> Any:
            # Megatron-Core stores the input of these calls in its own way.
            if fp8_input_store or cpu_offload_input:
                return original.apply(input, fp8_input_store, cpu_offload_input)
            return swiglu(input)

    _replace(module, SWIGLU[1], original, _LigerSwiGLUFunction)
