"""The code that models run for an op: the reference of the op, except where models call something faster."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.cases import OPS
from benchmarks.workloads import Case
from benchmarks.workloads.logits import token_results
from benchmarks.workloads.workload import tensors_of

Run = Callable[..., tuple[Tensor, ...]]


def eager_code(op: str) -> Callable[[Case], Run]:
    """Return the loader of the code that models run for the op."""
    return EAGER.get(op, reference)


def reference(case: Case) -> Run:
    """Load the reference of the op with the options of the case."""
    workload = OPS[case.op]
    options = {**case.options, **workload.bench_options}
    return lambda *tensors: tensors_of(workload.reference(*tensors, **options))


def _delta_rule(case: Case) -> Run:
    """Load what transformers runs without other packages. It has no packed samples, so they are computed one by one."""
    if case.op == "kda":
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as function
    else:
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as function
    normalises = case.options.get("use_qk_l2norm", False)

    def run(q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        v, g, beta, *bounds = others
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        lengths = bounds[0].diff().tolist() if bounds else [v.shape[1]]
        samples = zip(*(x.split(lengths, 1) for x in (q, k, v, g, beta)), strict=True)
        outputs = [function(*sample, use_qk_l2norm_in_kernel=normalises)[0] for sample in samples]
        return (torch.cat(outputs, 1),)

    return run


def _ssd(case: Case) -> Run:
    """Load what transformers runs without other packages. It has no packed samples, so they are computed one by one."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan as function

    def run(x: Tensor, dt: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        rates, keys, queries, weights, bias, *bounds = others
        lengths = bounds[0].diff().tolist() if bounds else [x.shape[1]]
        samples = zip(*(tensor.split(lengths, 1) for tensor in (x, dt, keys, queries)), strict=True)
        outputs = [
            function(x, dt, rates, keys, queries, chunk_size=128, D=weights, dt_bias=bias, **case.options)
            for x, dt, keys, queries in samples
        ]
        return (torch.cat(outputs, 1).to(x.dtype),)

    return run


def _moe_mlp(case: Case) -> Run:
    """Compute one expert after the other in place. `torch.where` waits for the device once for each expert."""

    def run(x: Tensor, up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        rows = x.new_zeros(*index.shape, x.shape[1])
        for expert in range(up_proj.shape[0]):
            token, k = torch.where(index == expert)
            gate, up = F.linear(x[token], up_proj[expert]).chunk(2, -1)
            rows[token, k] = F.linear(F.silu(gate) * up, down_proj[expert]) * weights[token, k, None]
        return (rows.sum(1),)

    return run


def _load_balancing_loss(case: Case) -> Run:
    """Load the code of transformers, which waits for each layer and rounds the probabilities."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts, top_k = case.options["num_experts"], case.options["top_k"]
    return lambda router_logits: (load_balancing_loss_func(router_logits.unbind(), experts, top_k),)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _cross_entropy(case: Case) -> Run:
    def run(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, target), *token_results(wide.detach(), target, case.options)

    return run


def _linear_cross_entropy(case: Case) -> Run:
    # The option `acc_dtype` changes nothing here, because one product sums in fp32.
    loss, softcap = _cross_entropy(case), case.options.get("softcap")
    return lambda input, linear_weight, target: loss(softcapped(F.linear(input, linear_weight), softcap), target)


EAGER: dict[str, Callable[[Case], Run]] = {
    "gated_delta_rule": _delta_rule, "kda": _delta_rule, "ssd": _ssd, "moe_mlp": _moe_mlp,
    "load_balancing_loss": _load_balancing_loss, "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
}  # fmt: skip
