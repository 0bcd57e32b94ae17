"""Add low-rank adapters (LoRA) of PEFT to a model on meta. The frozen base keeps its dtype, or takes 4 bits (QLoRA)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.runtime.device import simulation_of
from tigon.runtime.requirements import require

# nf4 with double quantisation has one 8-bit scale for this many weights, and one fp32 scale for this many 8-bit scales.
WEIGHTS_PER_SCALE, SCALES_PER_SCALE = 64, 256


def add_adapters(model: nn.Module, rank: int, dtype: torch.dtype, is_quantised: bool) -> None:
    """Add adapters to all linear layers but the head, in place, and freeze all other parameters. With `is_quantised`,
    the base weights take 4 bits. A model to which PEFT adds no adapters raises PEFT's ValueError."""
    require("A plan with adapters", "peft")
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    # PEFT changes `model` itself. The wrapper that it returns only passes calls on.
    with torch.random.fork_rng(devices=[]):
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        get_peft_model(model, config, low_cpu_mem_usage=True)
    for p in model.parameters():
        if p.requires_grad:
            p.data = torch.empty_like(p, dtype=dtype, device="meta")
    if is_quantised:
        for layer in [module for module in model.modules() if isinstance(module, LoraLayer)]:
            base = layer.base_layer
            layer.base_layer = FourBitLinear(layer.in_features, layer.out_features, base.bias, base.weight.dtype)


class FourBitLinear(nn.Module):
    """A linear layer on meta that takes the memory of `bitsandbytes.nn.Linear4bit`: nf4 with double quantisation.
    `dtype` is that of the dense weight. FSDP shards the weight, but not the scales, which are buffers."""

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias, self.dtype = in_features, out_features, bias, dtype
        weights = in_features * out_features
        scales = -(-weights // WEIGHTS_PER_SCALE)
        packed_weights = torch.empty(-(-weights // 2), 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed_weights, requires_grad=False)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device="meta"))
        self.register_buffer("scales_of_scales", torch.empty(-(-scales // SCALES_PER_SCALE), device="meta"))

    def dequantize(self) -> Tensor:
        """Return a new tensor that stands for the dense weight [out_features, in_features]."""
        weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")
        if (simulation := simulation_of(weight.device)) is not None:
            simulation.count_launch((self.weight, self.scales, self.scales_of_scales, weight))
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + bias."""
        return _FourBitProduct.apply(x, self)


class _FourBitProduct(torch.autograd.Function):
    """Multiply by the weight of a `FourBitLinear`, which forward and backward each dequantise and free. As in
    bitsandbytes, the node holds only the packed weight for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantize().to(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (dy,) = grad_outputs
        return dy @ ctx.layer.dequantize().to(dy.dtype), None
