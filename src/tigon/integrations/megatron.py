"""Use Tigon's RMSNorm, SwiGLU and cross entropy in Megatron-Core.

| call | what runs on Tigon |
|---|---|
| `use_rms_norm(spec)` | the norms of the local specification of a GPT layer, computed by `TigonRMSNorm` |
| `enable_swiglu()` | the gate of the MLPs, with `bias_activation_fusion=True` in the `TransformerConfig` |
| `enable_cross_entropy()` | the loss over the shards of the vocabulary, fused or not |

Written for megatron-core 0.16.1. Importing this module imports nothing of Megatron-Core.

Shapes: S tokens of B sequences, H hidden size, I intermediate size, V vocabulary, V_p the columns of a rank.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.integrations.frameworks import is_known_version, replace_function, token_losses
from tigon.ops.mlps.glu import swiglu
from tigon.ops.norms.rms_norm import rms_norm

__all__ = ["TigonRMSNorm", "bias_swiglu_impl", "enable_cross_entropy", "enable_swiglu", "use_rms_norm"]

TESTED = "0.16.1"
# The norms of a `TransformerLayer` and of its attention, as their specifications name them.
LAYER_NORMS = ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm")
ATTENTION_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")


# --- RMSNorm ---------------------------------------------------------------------------------------


class TigonRMSNorm(nn.Module):
    """An RMSNorm for the specifications of Megatron-Core, computed by `tigon.rms_norm`.

    Args:
        config: A `TransformerConfig`. With `layernorm_zero_centered_gamma`, the norm multiplies by 1 + weight. With
            `sequence_parallel`, the weight is marked, so that Megatron-Core sums its gradient over the ranks.
        hidden_size: H.
        eps: The number that is added to the mean square.
        ignored: Arguments of Megatron-Core's norms that have no meaning here.

    Shapes: the input and the output are [..., H].

    Raises:
        ValueError: `config.normalization` is not "RMSNorm".

    Source: `megatron.core.transformer.torch_norm.WrappedTorchNorm` of megatron-core 0.16.1.

    Example:
        >>> from types import SimpleNamespace
        >>> options = {"layernorm_zero_centered_gamma": False, "sequence_parallel": False}
        >>> config = SimpleNamespace(normalization="RMSNorm", **options)
        >>> tigon.integrations.megatron.TigonRMSNorm(config, 8)(torch.randn(4, 2, 8)).shape
        torch.Size([4, 2, 8])
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(f"TigonRMSNorm: config.normalization must be 'RMSNorm', got {config.normalization!r}")
        self.eps, self.offset = eps, float(bool(config.layernorm_zero_centered_gamma))
        self.weight = nn.Parameter(torch.full((hidden_size,), 1 - self.offset))
        # Megatron-Core reads this attribute of the parameter.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., H]."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset, rounding="after_weight")


def use_rms_norm(spec: Any) -> Any:
    """Let the specification of a GPT layer build `TigonRMSNorm` for its norms, and return it.

    Norms that are fused into a linear layer, as in the specifications for Transformer Engine, stay as they are. The
    norm after the last layer is that of the block: `TransformerBlockSubmodules(layer_norm=TigonRMSNorm)`.

    Args:
        spec: What `get_gpt_layer_local_spec(normalization="RMSNorm")` returns. With another version of Megatron-Core,
            this function warns once and changes nothing.
    """
    if not is_known_version("megatron-core", TESTED, "tigon.integrations.megatron.use_rms_norm"):
        return spec
    # A layer has an identity where it has no norm. The L2 norm of queries and keys has no weight.
    other_layers = (
        importlib.import_module("megatron.core.transformer.identity_op").IdentityOp,
        importlib.import_module("megatron.core.transformer.torch_norm").L2Norm,
    )
    attention = getattr(spec.submodules.self_attention, "submodules", None)
    for submodules, names in ((spec.submodules, LAYER_NORMS), (attention, ATTENTION_NORMS)):
        for name in names:
            if getattr(submodules, name, None) not in (None, *other_layers):
                setattr(submodules, name, TigonRMSNorm)
    return spec


# --- SwiGLU ----------------------------------------------------------------------------------------


def bias_swiglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu(gate) * up [..., I] for [gate | up] = input + bias [..., 2 I]."""
    return swiglu(input if bias is None else input + bias)


def _wrap_swiglu(original: Any) -> Any:
    @functools.wraps(original)
    def replacement(
        input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Tensor:
        if fp8_input_store or cpu_offload_input:
            return original(input, bias, fp8_input_store, cpu_offload_input)
        return bias_swiglu_impl(input, bias)

    return replacement


def enable_swiglu() -> Callable[[], None]:
    """Let the MLPs and the shared experts of Megatron-Core compute SwiGLU with Tigon.

    Calls with `fp8_input_store` or `cpu_offload_input` run Megatron-Core's code. With another version of Megatron-Core,
    this function warns once and changes nothing.

    Returns:
        A function that restores Megatron-Core's function.

    Source: `megatron.core.fusions.fused_bias_swiglu.bias_swiglu_impl` of megatron-core 0.16.1.
    """
    if not is_known_version("megatron-core", TESTED, "tigon.integrations.megatron.enable_swiglu"):
        return lambda: None
    core = "megatron.core"
    owners = (
        f"{core}.fusions.fused_bias_swiglu", f"{core}.transformer.mlp", f"{core}.transformer.moe.shared_experts",
    )  # fmt: skip
    return replace_function("bias_swiglu_impl", owners, _wrap_swiglu)


# --- cross entropy ---------------------------------------------------------------------------------


def _loss(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    """Return the losses [S, B] in fp32 of logits [S, B, V_p]."""
    # Megatron-Core masks the losses afterwards. Negative targets therefore belong to tokens that do not count.
    return token_losses(logits, target.clamp(min=-1), -1, group)


def _wrap_fused_loss(original: Any) -> Any:
    @functools.wraps(original)
    def replacement(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
        return _loss(vocab_parallel_logits, target, tp_group)

    return replacement


def _wrap_loss(original: Any) -> Any:
    parallel_state = importlib.import_module("megatron.core.parallel_state")

    @functools.wraps(original)
    def replacement(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        # Megatron-Core spreads the smoothed probability over the columns of one rank.
        if label_smoothing:
            return original(vocab_parallel_logits, target, label_smoothing)
        return _loss(vocab_parallel_logits, target, parallel_state.get_tensor_model_parallel_group())

    return replacement


def enable_cross_entropy() -> Callable[[], None]:
    """Let the language models of Megatron-Core compute their loss with `tigon.cross_entropy`.

    This replaces the loss of `cross_entropy_loss_fusion=False`, except for label smoothing, and the loss of
    `cross_entropy_loss_fusion=True` with `cross_entropy_fusion_impl="native"`. The gradient has the dtype of the
    logits. A negative target has loss and gradient zero. With another version of Megatron-Core, this function warns
    once and changes nothing.

    Returns:
        A function that restores Megatron-Core's functions.

    Source: `megatron.core.fusions.fused_cross_entropy` and `megatron.core.tensor_parallel.cross_entropy` of
    megatron-core 0.16.1; Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
    """
    if not is_known_version("megatron-core", TESTED, "tigon.integrations.megatron.enable_cross_entropy"):
        return lambda: None
    core = "megatron.core"
    fused_owners = f"{core}.fusions.fused_cross_entropy", f"{core}.models.common.language_module.language_module"
    owners = f"{core}.tensor_parallel.cross_entropy", f"{core}.tensor_parallel"
    undo_fused = replace_function("fused_vocab_parallel_cross_entropy", fused_owners, _wrap_fused_loss)
    undo = replace_function("vocab_parallel_cross_entropy", owners, _wrap_loss)

    def undo_both() -> None:
        undo_fused()
        undo()

    return undo_both
