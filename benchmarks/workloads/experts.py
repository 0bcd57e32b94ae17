"""Workloads of mixtures of experts.

Sizes: L layers, T tokens, H hidden, E experts, I intermediate, K experts of a token, r rank of the adapters.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import MORE, Case, Variant, Workload, small, sweep
from tigon.ops.adapters.lora_experts import lora_moe_mlp_reference
from tigon.ops.experts.load_balancing import load_balancing_loss_reference
from tigon.ops.experts.moe_mlp import moe_mlp_reference

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
TEST_SIZES = (5, 16, 16, 24, 3)
TRANSPOSED = {"transposed": True, "activation": "gelu_tanh"}
# Routers compute their weights in fp32.
FP32_ROUTER = {"router_dtype": torch.float32}


def _moe_mlp(make: InputMaker) -> Inputs:
    """Make the inputs of the experts. Form: the weights of the router have the dtype `router_dtype` (that of x by
    default); with `biases` both projections have one. With `skewed` the experts are drawn without replacement, expert e
    with the weight (e + 1)^-skewed."""
    t, h, experts, i, k = make.sizes
    x, upstream = make.normal(t, h), make.normal(t, h)
    width = i if make.options.get("activation") == "relu2" else 2 * i
    up, down = (make.normal(experts, m, n).mul_(n**-0.5) for m, n in ((width, h), (h, i)))
    if make.options.get("transposed"):
        up, down = up.mT, down.mT
    scores = make.normal(t, experts, dtype=torch.float32)
    if skewed := make.form.get("skewed", 0.0):
        # The largest of log(p) + noise, with the noise of Gumbel, are draws without replacement.
        scores = -scores.uniform_(1e-6, 1 - 1e-6, generator=make.generator).log().neg().log()
        scores -= skewed * torch.arange(1, experts + 1, device=make.device).log()
    weights, index = scores.softmax(-1).topk(k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(make.form.get("router_dtype", x.dtype))
    tensors = {"x": x, "up_proj": up, "down_proj": down, "top_k_index": index, "top_k_weights": weights}
    if make.form.get("biases"):
        tensors |= {"up_bias": make.normal(experts, width), "down_bias": make.normal(experts, h)}
    return Inputs({n: y.requires_grad_() if y.is_floating_point() else y for n, y in tensors.items()}, (upstream,))


def _lora_moe_mlp(make: InputMaker) -> Inputs:
    """Make the inputs of frozen experts with adapters in fp32, as PEFT keeps them: in B the experts are adjacent. In
    fp64 the adapters have the dtype of x: there the tests compute exact results."""
    t, h, experts, i, k, rank = make.sizes
    sizes = t, h, experts, i, k
    base = _moe_mlp(InputMaker(sizes, make.dtype, make.device, make.generator, make.options, make.form))
    tensors = dict(base.tensors)
    for name in ("up_proj", "down_proj"):
        tensors[name] = tensors[name].detach()
    wide = torch.promote_types(make.dtype, torch.float32)
    width = i if make.options.get("activation") == "relu2" else 2 * i
    for name, inputs, outputs in (("up", h, width), ("down", i, h)):
        a = make.normal(experts, rank, inputs, dtype=wide).mul_(inputs**-0.5)
        b = make.normal(outputs, rank, experts, dtype=wide).mul_(0.25 * rank**-0.5).permute(2, 0, 1)
        tensors |= {f"{name}_a": a.requires_grad_(), f"{name}_b": b.requires_grad_()}
    return Inputs(tensors, base.upstream)


def _call_lora_moe_mlp(function: Callable[..., Any], *tensors: Tensor, **arguments: Any) -> Any:
    """Call the op or its reference with the tensors of `_lora_moe_mlp`, in their order or by name."""
    names = "up_a", "up_b", "down_a", "down_b"
    return function(*tensors[:5], **dict(zip(names, tensors[5:], strict=False)), **arguments)


def _load_balancing_loss(make: InputMaker) -> Inputs:
    """Make the logits of the routers of all layers; form: with `mask`, the last fifth of the tokens is padding."""
    layers, t, experts = make.sizes
    logits = make.normal(layers, t, experts).mul_(2.0)
    tensors = {"router_logits": logits.requires_grad_()}
    if make.form.get("mask"):
        mask = torch.ones(t, dtype=torch.int64, device=make.device)
        mask[t - t // 5 :] = 0
        tensors["attention_mask"] = mask
    return Inputs(tensors)


def _routers(experts: int, top_k: int) -> dict[str, int]:
    return {"num_experts": experts, "top_k": top_k}


def _flops(case: Case) -> int:
    """Count the operations of the products with the weights; low-rank products are far fewer."""
    t, h, _, i, k, *rank = case.shape
    # There are two products in the forward pass, two for dx in the backward pass, and two for dW unless W is frozen.
    passes = 2 if rank or {"up_proj", "down_proj"} <= {*case.frozen} else 3
    return passes * 2 * t * k * h * (2 * i + i)


def _sigmoid_gate(h: Tensor) -> Tensor:
    """Compute an activation that Tigon has no name for: gate and up alternate, as in gpt-oss."""
    return h[:, ::2] * h[:, 1::2].sigmoid()


def _variant(name: str, *sizes: int, dtype: torch.dtype = torch.bfloat16, **options: object) -> Variant:
    """Return a variant of two tokens and a router in fp32. Sizes: H, E, I, K, and the rank of adapters."""
    return Variant(name, (2, *sizes), options, FP32_ROUTER, dtype)


WORKLOADS = (
    Workload(
        name="moe_mlp",
        reference=moe_mlp_reference,
        inputs=_moe_mlp,
        legend="T x H x E x I x K",
        has_cpu_code=True,
        test_variants=(
            Variant("", TEST_SIZES),
            Variant("transposed with biases", TEST_SIZES, TRANSPOSED, {"biases": True}),
            Variant("without gate", TEST_SIZES, {"activation": "relu2"}),
            Variant("weighted inputs", TEST_SIZES, {"weight_inputs": True}),
        ),
        compile_variants=(
            _variant("2048, 8 experts per token", 2048, 8, 768, 8),
            _variant("4096, 2 experts per token", 4096, 2, 64, 2),
            _variant("7168, 8 experts per token", 7168, 8, 64, 8),
            _variant("1024, gelu, 2 experts per token", 1024, 2, 14336, 2, activation="gelu"),
            _variant("1024, gelu_tanh, 2 experts per token", 1024, 2, 704, 2, activation="gelu_tanh"),
            _variant("1024 without gate, 6 experts per token", 1024, 6, 1856, 6, activation="relu2"),
            _variant("4096, a custom activation, 2 experts per token", 4096, 2, 64, 2, activation=_sigmoid_gate),
            _variant("2880, a custom activation, 4 experts per token", 2880, 4, 64, 4, activation=_sigmoid_gate),
            _variant("5120, weighted inputs, 1 expert per token", 5120, 1, 64, 1, weight_inputs=True),
            _variant("10240 in fp32, 22 experts per token", 10240, 22, 16, 22, dtype=torch.float32),
        ),
        flops=_flops,
        bench_shapes=(
            Case("qwen3-30b-a3b", (8192, 2048, 128, 768, 8), MORE),
            Case("qwen3-30b-a3b", (8192, 2048, 128, 768, 8), MORE, skewed=1.0),
            Case("mixtral-8x7b", (8192, 4096, 8, 14336, 2), MORE),
            Case("gpt-oss-20b", (8192, 2880, 32, 2880, 4), MORE),
            # The experts of one of eight ranks.
            Case("deepseek-v3", (8192, 7168, 32, 2048, 8), MORE),
            Case("qwen3-30b-a3b-frozen", (8192, 2048, 128, 768, 8), MORE, frozen=("up_proj", "down_proj")),
            small(256, 128, 8, 64, 2),
            *sweep((t, 2048, 128, 768, 8) for t in LENGTHS),
        ),
    ),
    Workload(
        name="lora_moe_mlp",
        call=_call_lora_moe_mlp,
        reference=functools.partial(_call_lora_moe_mlp, lora_moe_mlp_reference),
        inputs=_lora_moe_mlp,
        legend="T x H x E x I x K x r",
        has_cpu_code=True,
        test_variants=(
            Variant("", (*TEST_SIZES, 4)),
            Variant("transposed", (*TEST_SIZES, 4), {**TRANSPOSED, "up_scaling": 0.5, "down_scaling": 2.0}),
            Variant("without gate", (*TEST_SIZES, 4), {"activation": "relu2"}),
        ),
        compile_variants=(
            _variant("2048, 8 experts per token", 2048, 128, 768, 8, 16),
            _variant("2048, 8 experts per token, rank 32", 2048, 128, 64, 8, 32),
            _variant("4096, 2 experts per token, rank 64", 4096, 8, 64, 2, 64),
            _variant("2048, rank 150", 2048, 4, 64, 2, 150),
            _variant("2048 in fp16, 8 experts per token", 2048, 128, 64, 8, 16, dtype=torch.float16),
            _variant("1024, gelu, 2 experts per token", 1024, 4, 704, 2, 8, activation="gelu"),
            _variant("2880, a custom activation, 4 experts per token", 2880, 32, 64, 4, 16, activation=_sigmoid_gate),
        ),
        flops=_flops,
        bench_shapes=(
            Case("qwen3-30b-a3b", (8192, 2048, 128, 768, 8, 16), MORE),
            Case("mixtral-8x7b", (8192, 4096, 8, 14336, 2, 16), MORE),
            small(256, 128, 8, 64, 2, 16),
            *sweep((8192, 2048, 128, 768, 8, rank) for rank in (8, 16, 32, 64)),
        ),
    ),
    Workload(
        name="load_balancing_loss",
        reference=load_balancing_loss_reference,
        inputs=_load_balancing_loss,
        legend="L x T x E",
        rows_axis=1,
        is_loss=True,
        test_variants=(
            # Gradients are differences of terms of at most E / (L T).
            Variant("", (2, 11, 24), _routers(24, 3), term_size=1.0),
            Variant("with a mask", (3, 10, 16), _routers(16, 1), {"mask": True}, term_size=0.5),
        ),
        # The forward reads the logits, and the backward reads them and writes their gradients.
        elements=lambda layers, t, e: 3 * layers * t * e,
        bench_shapes=(
            Case("qwen3-30b-a3b", (48, 8192, 128), MORE, _routers(128, 8)),
            small(2, 256, 16, options=_routers(16, 2)),
            *sweep(((48, t, 128) for t in LENGTHS), _routers(128, 8)),
        ),
    ),
)
