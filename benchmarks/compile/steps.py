"""The steps whose kernels are compiled: forward and backward of every op, at the sizes of current models.

The number of rows does not matter to a compiler, so a step has few. The name of a step begins with that of its op.
`benchmarks.compile` and the tests compile the kernels of every step for every chip.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tigon
from benchmarks.workloads import WORKLOADS, Variant, Workload
from benchmarks.workloads.logits import EVERY_TERM
from benchmarks.workloads.workload import tensors_of
from tigon.ops.adapters.four_bit import FourBitWeight, QuantisedScales, dequantise
from tigon.ops.adapters.fp8_weight import Fp8Weight
from tigon.ops.adapters.lora import lora_linears
from tigon.ops.adapters.lora_mlp import lora_glu_mlp
from tigon.ops.adapters.projection import Adapter, Projection
from tigon.ops.experts.arguments import ExpertParameters
from tigon.ops.experts.choice_order import order_choices
from tigon.ops.experts.moe_mlp import moe_mlp_in_fp8
from tigon.ops.fp8.formats import Fp8Options, has_units
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.head import computed_rows
from tigon.ops.logits.token import kernels as token_loss
from tigon.ops.logits.vocab_parallel import partial_statistics
from tigon.ops.mixers.delta_rule_config import has_feature_kernels
from tigon.ops.mixers.log_decay import log_decay
from tigon.ops.mixers.ssd_config import has_scan_kernels
from tigon.ops.mlps.glu import ClampedGate
from tigon.ops.mlps.mlp import MLPActivation
from tigon.ops.norms.rms_norm import add_rms_norm_of_layer, rms_norm_with_input

CPU = torch.device("cpu")


def _run(function: Callable[..., Any], *tensors: Any, **options: Any) -> None:
    result = function(*tensors, **options)
    outputs = [y for y in tensors_of(tuple(result) if isinstance(result, list) else result) if y.requires_grad]
    torch.autograd.backward(outputs, [y.detach() for y in outputs])


def _zeros(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def run_step(workload: Workload, variant: Variant) -> None:
    inputs = workload.make_inputs(
        variant.sizes, variant.dtype, CPU, seed=None, options=variant.options, form=variant.form
    )
    function = workload.function_in()
    assert function is not None, workload.name
    # If launches are only recorded, no kernel counts the ignored tokens. Which kernels `linear_cross_entropy` launches
    # would then depend on memory that nothing has written.
    with mock.patch.object(computed_rows, "find_rows", return_value=None):
        _run(function, **inputs.tensors, **variant.options)


def _cross_entropy_of_a_shard(v: int, vocabulary: int, **options: Any) -> None:
    """Run the kernels of a rank that holds `v` columns of the vocabulary; with options, also every output. Only
    `linear_cross_entropy` with a process group launches them, and its step would need several processes."""
    logits, target = torch.zeros(2, v, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    shard = token_loss.Shard(v, vocabulary)
    weight, wants = torch.ones(vocabulary) if options else None, token_loss.Wants(*[bool(options)] * 4)
    loss_options = token_loss.Options(**options)
    partial_statistics(logits, target, weight, loss_options, shard, wants)
    statistics = token_loss.empty_statistics(logits, loss_options, wants)
    upstream = token_loss.Upstream(None, statistics.log_probs, statistics.entropy) if options else token_loss.Upstream()
    divisors = statistics.loss.new_ones(3)
    token_loss.gradient(logits, target, weight, divisors, statistics, upstream, loss_options, out=logits, shard=shard)


def _optimizer(kind: type, *shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    """Run a step of an optimizer, which is not a function of tensors. cuBLAS computes the plain products of Muon. They
    are left out, because some CPUs need a minute for one in bf16."""
    (parameter,) = _zeros(shape, dtype=dtype)
    parameter.grad = parameter.detach()
    with mock.patch("torch.bmm", lambda a, b: a.new_zeros((*a.shape[:2], b.shape[2]))):
        kind([parameter], **options).step()


def _projection(outputs: int, inputs: int, fp8: Fp8Options | None = None) -> Projection:
    """Return a linear layer with an adapter of rank 16, whose weight is in FP8 if there are options."""
    weight = torch.zeros(outputs, inputs, dtype=torch.bfloat16)
    a, b = _zeros((16, inputs), (outputs, 16), dtype=torch.float32)
    return Projection(weight if fp8 is None else Fp8Weight(weight, fp8, None), adapters=(Adapter(a, b),))


def _lora_linears(*outputs: int, rows: int = 2, fp8: Fp8Options | None = None) -> None:
    """Run layers with one input and with adapters, whose low-rank products share launches."""
    _run(lora_linears, *_zeros((rows, 4096)), [_projection(size, 4096, fp8) for size in outputs])


def _lora_glu_mlp(hidden: int, inner: int, fp8: Fp8Options | None = None) -> None:
    """Run the MLP with adapters on its three projections; recognition calls it, and it has no public name yet."""
    sizes = (inner, hidden), (inner, hidden), (hidden, inner)
    _run(lora_glu_mlp, *_zeros((2, hidden)), *(_projection(*size, fp8) for size in sizes))


def _mlp(hidden: int, inner: int, activation: MLPActivation) -> None:
    """Run an MLP without a gate. Its kernels are those of `gelu`, but its backward also recomputes the activation."""
    _run(tigon.mlp, *_zeros((2, hidden), (inner, hidden), (hidden, inner)), activation=activation)


def _four_bit(block: int, is_nested: bool) -> None:
    """Dequantise a weight of 4 bits; recognition calls it for layers of bitsandbytes."""
    rows, columns = 2, 8192
    scales = rows * columns // block
    quantised_scales = None
    if is_nested:
        quantised_scales = QuantisedScales(torch.zeros(256), torch.zeros(-(-scales // 256)), torch.zeros(()), 256)
    scale_codes = torch.zeros(scales, dtype=torch.uint8 if is_nested else torch.float32)
    packed = torch.zeros(rows * columns // 2, dtype=torch.uint8)
    shape = torch.Size((rows, columns))
    dequantise(FourBitWeight(packed, torch.zeros(16), scale_codes, block, quantised_scales, shape, torch.bfloat16))


def _fp8_glu_mlp(inner: int, **options: Any) -> None:
    """Run the gated MLP in FP8; recognition calls it, and it has no public name."""
    _run(fp8_glu_mlp, *_zeros((16, 256), (inner, 256), (inner, 256), (256, inner)), **options)


def _fp8_experts(hidden: int, inner: int, choices: int, **options: Any) -> None:
    """Run experts in FP8; recognition calls them, and they have no public name."""
    width = inner if options.get("activation") == "relu2" else 2 * inner
    x, up, down = _zeros((2, hidden), (choices, width, hidden), (choices, hidden, inner))
    index, weights = torch.zeros(2, choices, dtype=torch.int64), torch.zeros(2, choices, requires_grad=True)
    _run(moe_mlp_in_fp8, x, ExpertParameters(up, down, None, None), index, weights, **options)


def _norm_maxima(features: int) -> None:
    """Run the norms of a decoder layer whose results and gradients layers in FP8 read."""
    x, weight = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((16, features), features))
    options: dict[str, Any] = {"offset": 0.0, "rounding": "before_weight", "finds_maximum": True}
    y, total = rms_norm_with_input(x, weight, 1e-6, **options)
    y, total = add_rms_norm_of_layer(y, total, weight, 1e-6, **options)
    torch.autograd.backward([y, total], [y.detach(), total.detach()])


_OTHER_STEPS: dict[str, Callable[[], Any]] = {
    "cross_entropy 128256, one of 8 shards": lambda: _cross_entropy_of_a_shard(16032, 128256),
    "cross_entropy 256000, one of 2 shards, every option": lambda: _cross_entropy_of_a_shard(
        128000, 256000, token_scaling=True, **EVERY_TERM
    ),
    "linear_cross_entropy valid rows": lambda: tigon.ValidRows(torch.zeros(8, dtype=torch.int64)),
    "fp8_linear GLU 4096": lambda: _fp8_glu_mlp(4096),
    "fp8_linear GLU 4096, rowwise": lambda: _fp8_glu_mlp(4096, recipe="rowwise"),
    "fp8_linear GLU 4096, no dW in FP8": lambda: _fp8_glu_mlp(4096, fp8_dw=False),
    "fp8_linear GLU tanh 4096": lambda: _fp8_glu_mlp(4096, activation="gelu_tanh"),
    "fp8_linear GLU gelu 14336, rowwise": lambda: _fp8_glu_mlp(14336, activation="gelu", recipe="rowwise"),
    "fp8_linear experts 2048, 8 per token": lambda: _fp8_experts(2048, 768, 8),
    "fp8_linear experts 4096, 2 per token": lambda: _fp8_experts(4096, 64, 2),
    "fp8_linear experts 7168, gelu": lambda: _fp8_experts(7168, 64, 8, activation="gelu"),
    "fp8_linear experts 2880, gelu_tanh": lambda: _fp8_experts(2880, 2880, 4, activation="gelu_tanh"),
    "fp8_linear experts 1024 without gate": lambda: _fp8_experts(1024, 1856, 6, activation="relu2"),
    "rms_norm 4096, maxima": lambda: _norm_maxima(4096),
    "rms_norm 5120, maxima": lambda: _norm_maxima(5120),
    "lora_linear q, k and v": lambda: _lora_linears(4096, 1024, 1024),
    "lora_linear MLP 14336": lambda: _lora_glu_mlp(4096, 14336),
    "lora_linear 4096, base in FP8": lambda: _lora_linears(256, rows=16, fp8=Fp8Options()),
    "lora_linear MLP 14336, base in FP8": lambda: _lora_glu_mlp(256, 14336, Fp8Options()),
    "gelu MLP 3072": lambda: _mlp(768, 3072, "gelu"),
    "gelu MLP tanh 3072": lambda: _mlp(768, 3072, "gelu_tanh"),
    "gelu MLP sigmoid 4096": lambda: _mlp(1024, 4096, "gelu_sigmoid"),
    "gelu MLP squared ReLU 16384": lambda: _mlp(4096, 16384, "relu2"),
    # The gates of GPT-OSS and DeepSeek V4.
    "moe_mlp clamped gate, interleaved 2880": lambda: _run(ClampedGate(7.0, 1.702, 1.0, True), *_zeros((2, 5760))),
    "moe_mlp clamped gate 2048": lambda: _run(ClampedGate(10.0), *_zeros((2, 4096))),
    # `route` sorts CPU tensors by torch, so its kernels are called directly.
    **{
        f"moe_mlp order of choices, {experts} experts": partial(order_choices, torch.zeros(2, 8).long(), experts)
        for experts in (8, 128, 512)
    },
    "lora_linear base of 4 bits": lambda: _four_bit(64, is_nested=False),
    "lora_linear base of 4 bits, double quantisation": lambda: _four_bit(64, is_nested=True),
    "lora_linear base of 4 bits, blocks of 4096": lambda: _four_bit(4096, is_nested=True),
    "gated_delta_rule decays of 32 heads": lambda: _run(log_decay, *_zeros((2, 32), (32,), (32,))),
    "AdamW bf16": lambda: _optimizer(tigon.AdamW, 4096),
    "AdamW 8-bit states, 24-bit masters, clipped": lambda: _optimizer(
        tigon.AdamW, 8192, state="8bit", master="bf16+8", max_grad_norm=1.0
    ),
    "AdamW 8-bit states, fp32 masters": lambda: _optimizer(tigon.AdamW, 8192, state="8bit", master="fp32"),
    "AdamW 8-bit states, stochastic rounding": lambda: _optimizer(
        tigon.AdamW, 8192, state="8bit", stochastic_rounding=True
    ),
    "AdamW 8-bit states, an odd size": lambda: _optimizer(tigon.AdamW, 8191, state="8bit", master="bf16+8"),
    "AdamW fp32 states and masters, steps on the device": lambda: _optimizer(
        tigon.AdamW, 8192, state="fp32", master="fp32", fused=True
    ),
    "Muon 4096 x 1024": lambda: _optimizer(tigon.Muon, 4096, 1024),
    "Muon 1024 x 4096, fp32": lambda: _optimizer(tigon.Muon, 1024, 4096, dtype=torch.float32, nesterov=False),
    "Muon 2048 x 2048": lambda: _optimizer(tigon.Muon, 2048, 2048),
    "Muon 1023 x 2047": lambda: _optimizer(tigon.Muon, 1023, 2047),
    "AdamW fp32, the rate in a tensor": lambda: _optimizer(
        tigon.AdamW, 4096, dtype=torch.float32, lr=torch.tensor(1e-3), maximize=True
    ),
}

STEPS: dict[str, Callable[[], Any]] = {
    f"{workload.name} {variant.name}": partial(run_step, workload, variant)
    for workload in WORKLOADS.values()
    for variant in workload.compile_variants
} | _OTHER_STEPS


def launches_kernels(step: str, arch: str) -> bool:
    """Return whether a step launches kernels on a chip. Tigon emulates FP8 on chips whose units it does not use."""
    op = step.split()[0]
    checks: dict[str, Callable[[str], bool]] = {
        "fp8_linear": has_units, "kda": has_feature_kernels, "ssd": has_scan_kernels
    }  # fmt: skip
    return op not in checks or checks[op](arch)
