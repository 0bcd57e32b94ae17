"""Small models with adapters of PEFT."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from op_cases import DEVICE

peft = pytest.importorskip("peft")

# The CPU code of bitsandbytes dequantises bf16 weights correctly only if the inputs are a multiple of a block of 64.
HIDDEN, INNER = 64, 128
TOKENS = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(0))
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Layer(nn.Module):
    """An attention with one key, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        for name, inputs, outputs in (
            ("q_proj", HIDDEN, HIDDEN), ("k_proj", HIDDEN, HIDDEN), ("v_proj", HIDDEN, HIDDEN),
            ("o_proj", HIDDEN, HIDDEN),
        ):  # fmt: skip
            setattr(self, name, nn.Linear(inputs, outputs, bias=name == "q_proj"))
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        x = x + self.o_proj(torch.sigmoid(q * k) * v)
        return x + self.mlp(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(20, HIDDEN), Layer(), nn.Linear(HIDDEN, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)))


def build(dtype: torch.dtype = torch.bfloat16, convert: Callable | None = None, **options: Any) -> nn.Module:
    """Return a model with adapters on all layers but the head, with random weights."""
    torch.manual_seed(0)
    model: nn.Module = Model().to(dtype)
    if convert is not None:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name in NAMES:
                    setattr(module, name, convert(child))
    config = {"r": 4, "lora_alpha": 6, "target_modules": NAMES, "init_lora_weights": False} | options
    cast = config.pop("autocast_adapter_dtype", True)
    model = peft.get_peft_model(model, peft.LoraConfig(**config), autocast_adapter_dtype=cast)
    return model.to(DEVICE)


def make_llama() -> nn.Module:
    """Return a language model of one layer without adapters."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)


def with_lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=NAMES, init_lora_weights=False))


def to_4bit(linear: nn.Linear, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a layer whose products have this dtype, and whose weight has 4 bits."""
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=dtype)
    layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer)
    layer.bias = linear.bias
    # This call quantises the weight.
    layer = layer.to(DEVICE)
    assert layer.weight.numel() < linear.weight.numel()
    return layer


def to_8bit(linear: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False
    )
    layer.load_state_dict(linear.state_dict())
    layer = layer.to(DEVICE)
    assert layer.weight.dtype == torch.int8
    return layer
