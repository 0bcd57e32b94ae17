"""Small calls of every op at the shapes that matter, for compiling its kernels without running them.

The hidden sizes, heads, MLPs and vocabularies of current decoders; rows do not matter to a compiler. The name of a
workload begins with its op. `tigon resources` and the tests compile them for every chip.
"""

import torch

import tigon
from tigon.ops.logits.token import kernels as token_loss

__all__ = ["WORKLOADS"]

BF16 = torch.bfloat16


def _leaf(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def _norm(rows: int, n: int) -> None:
    y = tigon.rms_norm(_leaf(rows, n), _leaf(n))
    y.backward(y.detach())


def _add_norm(rows: int, n: int) -> None:
    outputs = tigon.add_rms_norm(_leaf(rows, n), _leaf(rows, n), _leaf(n))
    torch.autograd.backward(outputs, [y.detach() for y in outputs])


def _layer_norm(rows: int, n: int) -> None:
    y = tigon.layer_norm(_leaf(rows, n), _leaf(n), _leaf(n))
    y.backward(y.detach())


def _rope(heads: tuple[int, int], d: int, r: int, **options) -> None:
    q, k = (_leaf(1, 4, h, d).transpose(1, 2) for h in heads)
    tables = torch.zeros(*((3,) if "sections" in options else ()), 1, 4, r, dtype=BF16)
    q, k = tigon.rope(q, k, tables, tables, **options)
    torch.autograd.backward([q, k], [q.detach(), k.detach()])


def _qk_norm_rope(heads: tuple[int, int], d: int, r: int, over: tuple[int, int] = (1, 1), **options) -> None:
    q, k = (_leaf(1, 4, h, d).transpose(1, 2) for h in heads)
    tables = torch.zeros(1, 4, r, dtype=BF16)
    q, k = tigon.qk_norm_rope(q, k, _leaf(over[0] * d), _leaf(over[1] * d), tables, tables, **options)
    torch.autograd.backward([q, k], [q.detach(), k.detach()])


def _glu(run) -> None:
    y = run(_leaf(2, 14336), _leaf(2, 14336))
    y.backward(y.detach())


def _cross_entropy(v: int, dtype: torch.dtype = BF16, **options) -> None:
    result = tigon.cross_entropy(_leaf(2, v, dtype=dtype), torch.zeros(2, dtype=torch.int64), **options)
    outputs = [y for y in result if y is not None and y.requires_grad] if isinstance(result, tuple) else [result]
    torch.autograd.backward(outputs, [y.detach() for y in outputs])


def _cross_entropy_of_a_shard(v: int, vocabulary: int, **options) -> None:
    """What a rank computes where the vocabulary is cut over several; with options, everything that can be asked for."""
    logits, target, shard = _leaf(2, v).detach(), torch.zeros(2, dtype=torch.int64), token_loss.Shard(v, vocabulary)
    weight, wants = torch.ones(vocabulary) if options else None, token_loss.Wants(*[bool(options)] * 4)
    asked = token_loss.Options(**options)
    token_loss.partial_statistics(logits, target, weight, asked, shard, wants)
    found = token_loss.empty_statistics(logits, asked, wants)
    upstream = token_loss.Upstream(None, found.log_probs, found.entropy) if options else token_loss.Upstream()
    token_loss.gradient(logits, target, weight, found.loss.new_ones(3), found, upstream, asked, logits, shard)


def _unary(run, *shape: int) -> None:
    y = run(_leaf(*shape))
    y.backward(y.detach())


def _own_gate(x: torch.Tensor) -> torch.Tensor:
    return x[:, ::2] * x[:, 1::2].sigmoid()


def _moe_mlp(h: int, i: int, k: int, dtype: torch.dtype = BF16, **options) -> None:
    weights, index = _leaf(2, k, dtype=torch.float32), torch.zeros(2, k, dtype=torch.int64)
    width = i if options.get("activation") == "relu2" else 2 * i
    up, down = _leaf(1, width, h, dtype=dtype), _leaf(1, h, i, dtype=dtype)
    y = tigon.moe_mlp(_leaf(2, h, dtype=dtype), up, down, index, weights, **options)
    y.backward(y.detach())


def _divergence(run, v: int, **options) -> None:
    loss = run(_leaf(2, v), torch.zeros(2, v, dtype=BF16), **options)
    loss.backward(loss.detach())


def _adamw(n: int, dtype: torch.dtype, **options) -> None:
    parameter = _leaf(n, dtype=dtype)
    parameter.grad = parameter.detach()
    tigon.AdamW([parameter], **options).step()


# What the kernel that reads logits once takes: the others go to the two passes.
IN_PLACE = {"inplace": True, "z_loss": 1e-4, "logit_scale": 0.5, "return_z_loss": True}
EVERY_OUTPUT = {"return_log_probs": True, "return_entropy": True}
EVERY_TERM = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4}
EVERY_OPTION = {**EVERY_TERM, "return_predicted_tokens": True}

WORKLOADS = {
    "rms_norm of heads 128": lambda: _norm(64, 128),
    "rms_norm 2048": lambda: _norm(2, 2048),
    "rms_norm 4096": lambda: _norm(2, 4096),
    "rms_norm 5120": lambda: _norm(2, 5120),
    "rms_norm 8192": lambda: _norm(2, 8192),
    "rms_norm 12288": lambda: _norm(2, 12288),
    "rms_norm 16384": lambda: _norm(2, 16384),
    "add_rms_norm 4096": lambda: _add_norm(2, 4096),
    "add_rms_norm 8192": lambda: _add_norm(2, 8192),
    "layer_norm 1024": lambda: _layer_norm(8, 1024),
    "layer_norm 4096": lambda: _layer_norm(2, 4096),
    "layer_norm 16384": lambda: _layer_norm(2, 16384),
    "rope 32 + 8 x 128": lambda: _rope((32, 8), 128, 128),
    "rope 16 + 8 x 256, half of the head": lambda: _rope((16, 8), 256, 128),
    "rope interleaved 32 + 2 x 128, half of the head": lambda: _rope((32, 2), 128, 64, layout="interleaved"),
    "rope interleaved, tables in pairs 32 + 8 x 128": lambda: _rope(
        (32, 8), 128, 128, layout="interleaved", table="pairs"
    ),
    "rope deinterleaved 128 + 1 x 64": lambda: _rope((128, 1), 64, 64, layout="deinterleaved"),
    "rope sections 28 + 4 x 128": lambda: _rope((28, 4), 128, 128, sections=(16, 24, 24)),
    "qk_norm_rope 32 + 8 x 128": lambda: _qk_norm_rope((32, 8), 128, 128),
    "qk_norm_rope 8 + 4 x 256": lambda: _qk_norm_rope((8, 4), 256, 256, offset=1.0, rounding="after_weight"),
    "qk_norm_rope 16 + 2 x 256, a quarter of the head": lambda: _qk_norm_rope((16, 2), 256, 64),
    "qk_norm_rope interleaved 32 + 8 x 128": lambda: _qk_norm_rope((32, 8), 128, 128, layout="interleaved"),
    "qk_norm_rope over all 16 + 16 x 128": lambda: _qk_norm_rope((16, 16), 128, 128, over=(16, 16)),
    "qk_norm_rope over all 32 + 32 x 128": lambda: _qk_norm_rope((32, 32), 128, 128, over=(32, 32)),
    "qk_norm_rope over all 40 + 8 x 128": lambda: _qk_norm_rope((40, 8), 128, 128, over=(40, 8)),
    "swiglu 14336": lambda: _glu(tigon.swiglu),
    "geglu 14336": lambda: _glu(tigon.geglu),
    "geglu tanh 14336": lambda: _glu(lambda gate, up: tigon.geglu(gate, up, approximate="tanh")),
    "relu2 16384": lambda: _unary(tigon.relu2, 2, 16384),
    "moe_mlp 2048, 8 of the experts": lambda: _moe_mlp(2048, 768, 8),
    "moe_mlp 4096, 2 of the experts": lambda: _moe_mlp(4096, 64, 2),
    "moe_mlp 7168, 8 of the experts": lambda: _moe_mlp(7168, 64, 8),
    "moe_mlp 1024, gelu, 2 of the experts": lambda: _moe_mlp(1024, 14336, 2, activation="gelu"),
    "moe_mlp 1024, gelu_tanh, 2 of the experts": lambda: _moe_mlp(1024, 704, 2, activation="gelu_tanh"),
    "moe_mlp 1024 without gate, 6 of the experts": lambda: _moe_mlp(1024, 1856, 6, activation="relu2"),
    "moe_mlp 4096, a gate of one's own, 2 of the experts": lambda: _moe_mlp(4096, 64, 2, activation=_own_gate),
    "moe_mlp 2880, a gate of one's own, 4 of the experts": lambda: _moe_mlp(2880, 64, 4, activation=_own_gate),
    "moe_mlp 10240 in fp32, 22 of the experts": lambda: _moe_mlp(10240, 16, 22, torch.float32),
    "softmax 128": lambda: _unary(tigon.softmax, 64, 128),
    "softmax 4096": lambda: _unary(tigon.softmax, 2, 4096),
    "softmax 16384": lambda: _unary(tigon.softmax, 2, 16384),
    "softmax 32000": lambda: _unary(tigon.softmax, 2, 32000),
    "softmax 128256": lambda: _unary(tigon.softmax, 2, 128256),
    "cross_entropy 32000 in place": lambda: _cross_entropy(32000, inplace=True),
    "cross_entropy of one class": lambda: _cross_entropy(1, inplace=True),
    "cross_entropy 32000": lambda: _cross_entropy(32000),
    "cross_entropy 128256": lambda: _cross_entropy(128256),
    "cross_entropy 128256 in place": lambda: _cross_entropy(128256, inplace=True),
    "cross_entropy 128256 in place, token scaling": lambda: _cross_entropy(128256, inplace=True, token_scaling=True),
    "cross_entropy 128256 in place, its options": lambda: _cross_entropy(128256, weight=torch.ones(128256), **IN_PLACE),
    "cross_entropy 128256 in place, fp32 and its options": lambda: _cross_entropy(
        128256, torch.float32, weight=torch.ones(128256), **IN_PLACE
    ),
    "cross_entropy 256000, every option": lambda: _cross_entropy(256000, weight=torch.ones(256000), **EVERY_OPTION),
    "cross_entropy 128256, token scaling": lambda: _cross_entropy(128256, token_scaling=True),
    "cross_entropy 128256, log-probabilities and entropy": lambda: _cross_entropy(128256, **EVERY_OUTPUT),
    "cross_entropy 256000, every option and output": lambda: _cross_entropy(
        256000, weight=torch.ones(256000), token_scaling=True, **EVERY_OPTION, **EVERY_OUTPUT
    ),
    "cross_entropy 128256, one of 8 shards": lambda: _cross_entropy_of_a_shard(16032, 128256),
    "cross_entropy 256000, one of 2 shards, every option": lambda: _cross_entropy_of_a_shard(
        128000, 256000, token_scaling=True, **EVERY_TERM
    ),
    "linear_cross_entropy rows that count": lambda: tigon.ValidRows(torch.zeros(8, dtype=torch.int64)),
    "kl_div 128256": lambda: _divergence(tigon.kl_div, 128256, log_target=True),
    "kl_div 32000 of probabilities": lambda: _divergence(tigon.kl_div, 32000),
    "kl_div 32000 from logits": lambda: _divergence(tigon.kl_div, 32000, from_logits=True),
    "jsd 128256": lambda: _divergence(tigon.jsd, 128256, beta=0.1),
    "jsd 32000 with labels": lambda: _divergence(tigon.jsd, 32000, labels=torch.zeros(2, dtype=torch.int64)),
    "jsd 128256 from logits": lambda: _divergence(tigon.jsd, 128256, from_logits=True, temperature=2.0),
    "jsd 32000 from logits, elementwise": lambda: _divergence(tigon.jsd, 32000, from_logits=True, reduction="none"),
    "jsd 128256, the reverse KL": lambda: _divergence(tigon.jsd, 128256, beta=1.0),
    "tvd 128256": lambda: _divergence(tigon.tvd, 128256),
    "tvd 32000 from logits": lambda: _divergence(tigon.tvd, 32000, from_logits=True),
    "AdamW bf16": lambda: _adamw(4096, BF16),
    "AdamW fp32, the rate in a tensor": lambda: _adamw(4096, torch.float32, lr=torch.tensor(1e-3), maximize=True),
}
