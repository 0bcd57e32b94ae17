"""The delta rules, their inputs, and their results by name."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from op_cases import DEVICE
from tigon.ops.mixers.gated_delta_rule import gated_delta_rule_reference
from tigon.ops.mixers.kda import kda_reference


@dataclass(frozen=True)
class DeltaRule:
    """An op, its reference, and the function of transformers that computes it."""

    op: Callable
    reference: Callable
    model: str
    stock_name: str
    # True if g has a number for each feature of a head of k.
    has_feature_decay: bool = False

    def stock(self, q, k, v, g, beta, cu_seqlens=None, use_qk_l2norm=False, **options):
        """Run transformers' function, which has neither groups nor packed samples."""
        module = importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        assert cu_seqlens is None
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return getattr(module, self.stock_name)(q, k, v, g, beta, **options, use_qk_l2norm_in_kernel=use_qk_l2norm)


GATED = DeltaRule(tigon.gated_delta_rule, gated_delta_rule_reference, "qwen3_5", "torch_chunk_gated_delta_rule")
KDA = DeltaRule(tigon.kda, kda_reference, "kimi_linear", "chunk_kimi_delta_attention", has_feature_decay=True)
RULES = {"gated_delta_rule": GATED, "kda": KDA}


def make_inputs(
    rule: DeltaRule = GATED, *, batch: int = 1, tokens: int = 70, heads: tuple[int, int] = (1, 2),
    sizes: tuple[int, int] = (16, 16), samples: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the tensors of a layer by name, with states before the first tokens."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator)
    (key_heads, value_heads), (key_size, value_size) = heads, sizes
    features = (key_size,) if rule.has_feature_decay else ()
    tensors = {
        "q": normal(batch, tokens, key_heads, key_size), "k": normal(batch, tokens, key_heads, key_size),
        "v": normal(batch, tokens, value_heads, value_size),
        "g": -F.softplus(normal(batch, tokens, value_heads, *features) - 1),
        "beta": normal(batch, tokens, value_heads).sigmoid(),
    }  # fmt: skip
    tensors = {name: x.to(DEVICE, dtype) for name, x in tensors.items()}
    tensors["initial_state"] = normal(samples or batch, value_heads, key_size, value_size).to(DEVICE)
    return {name: x.requires_grad_() for name, x in tensors.items()}


def widen(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().double().requires_grad_() for name, x in inputs.items()}


def results_of(function, inputs, cu_seqlens=None, **options) -> dict[str, Tensor]:
    """Return o, the last state and all gradients by name. A gradient flows into both outputs."""
    options = {"use_qk_l2norm": True, "output_final_state": True} | options
    o, state = function(**inputs, cu_seqlens=cu_seqlens, **options)
    generator = torch.Generator().manual_seed(1)
    outputs = [x for x in (o, state) if x is not None]
    upstream = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, list(inputs.values()), upstream)
    results = {"o": o} if state is None else {"o": o, "state": state}
    return results | dict(zip(inputs, gradients, strict=True))
