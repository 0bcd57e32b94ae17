"""Use Tigon's ops in torchtitan, by its overrides:

    --override.imports tigon.integrations.torchtitan.rms_norm,tigon.integrations.torchtitan.feed_forward

| override | replaces | computes |
|---|---|---|
| `rms_norm` | `RMSNorm` | `tigon.rms_norm`, rounded after the weight, as `torch.nn.RMSNorm` |
| `feed_forward` | `FeedForward` | `tigon.swiglu` between the three linear layers |
| `complex_rope` | `ComplexRoPE` (Llama 3, DeepSeek V3) | `tigon.rope`, pairs 2 i and 2 i + 1 |
| `cos_sin_rope` | `CosSinRoPE` (Qwen 3, GPT-OSS) | `tigon.rope`, pairs i and i + D / 2 |
| `cross_entropy` | `CrossEntropyLoss` | `tigon.cross_entropy`, summed |

Parameters and state dicts stay those of torchtitan. torchtitan's code computes DTensors, as tensor parallelism passes
them, and everything while `spmd_typechecking` is on. Written for torchtitan 0.3.0, `torchtitan.config.override`. With
another version, one warning names both versions, and the overrides return the configs as they are.

Shapes: B sequences of S tokens, N heads of D features, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.integrations.frameworks import is_known_version, require_framework
from tigon.ops.logits.cross_entropy import cross_entropy as tigon_cross_entropy
from tigon.ops.mlps.glu import swiglu
from tigon.ops.norms.rms_norm import rms_norm as tigon_rms_norm
from tigon.ops.rotary.rope import can_run_kernels, rope

require_framework("tigon.integrations.torchtitan", "torchtitan", "torchtitan")
import spmd_types  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE  # noqa: E402

__all__ = ["complex_rope", "cos_sin_rope", "cross_entropy", "feed_forward", "rms_norm"]


# --- modules ---------------------------------------------------------------------------------------


def _is_plain(*tensors: Tensor | None) -> bool:
    """Return whether Tigon's ops take these tensors. They take no DTensors and give no types of spmd_types."""
    is_tensor = all(x is None or type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    return is_tensor and not spmd_types.is_type_checking()


class TigonRMSNorm(RMSNorm):
    """torchtitan's `RMSNorm` on `tigon.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """The fields are those of torchtitan."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., N]."""
        if not _is_plain(x, self.weight):
            return super().forward(x)
        return tigon_rms_norm(x, self.weight, self.eps, rounding="after_weight")


class TigonFeedForward(FeedForward):
    """torchtitan's `FeedForward` with the gate in one kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """The fields are those of torchtitan."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute w2(silu(w1 x) * w3 x)."""
        gate, up = self.w1(x), self.w3(x)
        if not _is_plain(gate, up):
            return self.w2(torch.nn.functional.silu(gate) * up)
        return self.w2(swiglu(gate, up))


class TigonComplexRoPE(ComplexRoPE):
    """torchtitan's `ComplexRoPE` on `tigon.rope`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """The fields are those of torchtitan."""

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate [B, S, N, D] by the complex cache [1 | B, S, 1, D / 2]."""
        if not _is_plain(query, key, rope_cache) or query.dim() != 4:
            return ComplexRoPE.apply_rotary_emb(query, key, rope_cache)
        cos, sin = torch.view_as_real(rope_cache.squeeze(2)).unbind(-1)
        return _rotate(query, key, cos, sin, layout="interleaved", table="once")


class TigonCosSinRoPE(CosSinRoPE):
    """torchtitan's `CosSinRoPE` on `tigon.rope`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The fields are those of torchtitan."""

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate [B, S, N, D] by the cache [1 | B, S, 1, 2 D], the cosines followed by the sines."""
        if not _is_plain(query, key, rope_cache) or query.dim() != 4:
            return CosSinRoPE.apply_rotary_emb(query, key, rope_cache)
        cos, sin = rope_cache.squeeze(2).chunk(2, -1)
        return _rotate(query, key, cos, sin)


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the rotated queries and keys, each in its dtype."""
    # The reference of `tigon.rope` would round the two terms of a gradient to bf16. The kernels compute in fp32.
    inputs = (query, key) if can_run_kernels(query, key, cos, sin) else (query.float(), key.float())
    rotated = rope(*inputs, cos, sin, unsqueeze_dim=2, dtype=query.dtype, **options)
    return rotated[0], rotated[1].to(key.dtype)  # type: ignore[union-attr]


class TigonCrossEntropyLoss(CrossEntropyLoss):
    """torchtitan's `CrossEntropyLoss` on `tigon.cross_entropy`. `torch.compile` of the loss stays off."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """The fields are those of torchtitan."""

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        super().__init__(config)
        stock: Any = self.fn  # type: ignore[has-type]

        def fn(pred: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            """Return the summed loss of logits [B, S, V] and labels [B, S]."""
            vocabulary = kwargs.get("global_vocab_size")
            # With another number of columns, this rank has a shard of the vocabulary.
            if not _is_plain(pred, labels) or (vocabulary is not None and vocabulary != pred.shape[-1]):
                return stock(pred, labels, **kwargs)
            return tigon_cross_entropy(pred, labels, ignore_index=IGNORE_INDEX, reduction="sum")

        self.fn = fn


# --- overrides -------------------------------------------------------------------------------------


def _replace(config: Any, target: Any) -> Any:
    """Return the config with the fields of `config` that builds Tigon's class, or `config` for an unknown version."""
    if not is_known_version("torchtitan", "0.3.0", "tigon.integrations.torchtitan"):
        return config
    return derive(config, target)


@override(target=RMSNorm.Config, exact=True, description="Tigon: RMSNorm in one kernel.")
def rms_norm(config: Any) -> Any:
    """Return the config of `TigonRMSNorm`."""
    return _replace(config, TigonRMSNorm.Config)


@override(target=FeedForward.Config, exact=True, description="Tigon: the gate of SwiGLU in one kernel.")
def feed_forward(config: Any) -> Any:
    """Return the config of `TigonFeedForward`."""
    return _replace(config, TigonFeedForward.Config)


@override(target=ComplexRoPE.Config, exact=True, description="Tigon: rotary embeddings of q and k in one kernel.")
def complex_rope(config: Any) -> Any:
    """Return the config of `TigonComplexRoPE`."""
    return _replace(config, TigonComplexRoPE.Config)


@override(target=CosSinRoPE.Config, exact=True, description="Tigon: rotary embeddings of q and k in one kernel.")
def cos_sin_rope(config: Any) -> Any:
    """Return the config of `TigonCosSinRoPE`."""
    return _replace(config, TigonCosSinRoPE.Config)


@override(target=CrossEntropyLoss.Config, exact=True, description="Tigon: cross entropy in one kernel.")
def cross_entropy(config: Any) -> Any:
    """Return the config of `TigonCrossEntropyLoss`."""
    return _replace(config, TigonCrossEntropyLoss.Config)
