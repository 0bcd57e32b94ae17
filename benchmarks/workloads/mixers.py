"""Workloads of token mixers."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import MORE, Case, Variant, Workload, small, sweep
from tigon.ops.mixers.causal_conv1d import causal_conv1d_reference

CHANNELS_FIRST = {"channels_last": False}


def _causal_conv1d(make: InputMaker) -> Inputs:
    """Make x, the taps and a bias.

    Form: `bounds`, the first tokens of packed samples, of which those below T are used; `positions`, the same samples
    by the position of each token; `dense_time`, x of shape [B, C, T] with dense rows.
    """
    b, t, c, w = make.sizes
    draw = lambda: make.normal(b, c, t) if make.form.get("dense_time") else make.normal(b, t, c)
    x, upstream = draw(), draw()
    if not make.options.get("channels_last", True) and not make.form.get("dense_time"):
        x, upstream = x.transpose(1, 2), upstream.transpose(1, 2)
    tensors = {"x": x.requires_grad_(), "weight": make.normal(c, w).mul_(w**-0.5).requires_grad_()}
    tensors["bias"] = make.normal(c).mul_(0.1).requires_grad_()
    bounds = [bound for bound in make.form.get("bounds", ()) if bound < max(t, 1)]
    if make.form.get("positions"):
        ranges = [torch.arange(end - start) for start, end in zip(bounds, [*bounds[1:], t], strict=True)]
        tensors["position_ids"] = torch.cat(ranges)[None].to(make.device)
    elif bounds:
        tensors["cu_seqlens"] = torch.tensor([*bounds, t], dtype=torch.int32, device=make.device)
    return Inputs(tensors, (upstream,))


# --- the mixer of Qwen3.5 as a whole -----------------------------------------------------------------

MIXER_WEIGHTS = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "conv1d.weight",
                 "A_log", "dt_bias", "norm.weight", "out_proj.weight")  # fmt: skip


def _mixer_inputs(make: InputMaker) -> Inputs:
    """Make the hidden states and the weights, which are those of a new model."""
    b, t, h, key_heads, heads, size = make.sizes
    channels = (2 * key_heads + heads) * size
    rows = {"qkv": (channels, h), "z": (heads * size, h), "b": (heads, h), "a": (heads, h), "conv1d": (channels, 1, 4)}
    tensors = {"x": make.normal(b, t, h)}
    tensors |= {name: make.normal(*shape).mul_(shape[-1] ** -0.5) for name, shape in rows.items()}
    tensors |= {"A_log": make.normal(heads), "dt_bias": torch.ones_like(make.normal(heads))}
    tensors |= {
        "norm": make.normal(size).mul_(0.1) + 1,
        "out": make.normal(h, heads * size).mul_((heads * size) ** -0.5),
    }
    return Inputs({name: x.requires_grad_() for name, x in tensors.items()}, (make.normal(b, t, h),))


@functools.cache
def build_mixer(change: Callable[[nn.Module], Any], width: int, key_heads: int, heads: int, size: int) -> nn.Module:
    """Return `Qwen3_5GatedDeltaNet` without memory, after `change` has changed it."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    heads_of = {"linear_num_key_heads": key_heads, "linear_num_value_heads": heads}
    sizes_of = {"linear_key_head_dim": size, "linear_value_head_dim": size}
    with torch.device("meta"):
        mixer = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=width, **heads_of, **sizes_of), 0)
    change(mixer)
    return mixer


def call_mixer(mixer: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
    return torch.func.functional_call(mixer, dict(zip(MIXER_WEIGHTS, weights, strict=True)), (x,))


def _run_mixer(change: Callable[[nn.Module], Any], x: Tensor, *weights: Tensor) -> Tensor:
    """Call the mixer for these weights, which `change` changes first."""
    qkv, *_, a_log, _, norm, _ = weights
    heads, size = a_log.shape[0], norm.shape[0]
    mixer = build_mixer(change, x.shape[-1], (qkv.shape[0] // size - heads) // 2, heads, size)
    return call_mixer(mixer, x, *weights)


def without_packages(mixer: nn.Module) -> None:
    """Let the forward call the functions of transformers in torch, where it would call those of other packages."""
    stock = inspect.unwrap(type(mixer).forward)
    functions = {name: inspect.unwrap(f) for name, f in stock.__globals__.items() if isinstance(f, types.FunctionType)}
    forward = types.FunctionType(stock.__code__, stock.__globals__ | functions, "forward", stock.__defaults__)
    mixer.forward = types.MethodType(forward, mixer)


def _mixer_flops(b: int, t: int, h: int, key_heads: int, heads: int, size: int) -> int:
    return 6 * b * t * h * (size * (2 * key_heads + 3 * heads) + 2 * heads)


WORKLOADS = (
    Workload(
        name="causal_conv1d",
        reference=causal_conv1d_reference,
        inputs=_causal_conv1d,
        legend="B x T x C x W",
        rows_axis=1,
        test_variants=(
            Variant("", (2, 7, 20, 4)),
            Variant("no bias, linear", (2, 5, 33, 3), {"bias": None, "activation": None}),
            Variant("channels first", (2, 7, 20, 4), CHANNELS_FIRST),
            Variant("dense time", (2, 7, 20, 2), CHANNELS_FIRST, {"dense_time": True}),
            Variant("packed", (1, 19, 20, 4), form={"bounds": (0, 2, 3, 12)}),
            Variant("positions", (1, 19, 20, 4), {"bias": None}, {"bounds": (0, 2, 3, 12), "positions": True}),
        ),
        compile_variants=(
            Variant("8192", (1, 64, 8192, 4), {"bias": None}),
            Variant("of 8 taps", (1, 64, 8192, 8)),
            Variant("dense time 8192", (1, 64, 8192, 4), CHANNELS_FIRST, {"dense_time": True}),
            Variant("packed 8192", (1, 64, 8192, 4), {"bias": None}, {"bounds": (0, 20)}),
            Variant("positions 8192", (1, 64, 8192, 4), {"bias": None}, {"bounds": (0, 20), "positions": True}),
        ),
        # Forward reads x and writes y; backward reads x and dy and writes dx.
        elements=lambda b, t, c, w: 5 * b * t * c + 3 * c * w,
        bench_shapes=(
            Case("qwen3.5-9b", (1, 8192, 8192, 4), MORE, {"bias": None}),
            Case("mamba-2.8b", (4, 2048, 5120, 4), MORE, CHANNELS_FIRST),
            small(1, 256, 512, 4),
            *sweep(((1, t, 8192, 4) for t in (1024, 2048, 4096, 8192, 16384, 32768)), {"bias": None}),
        ),
    ),
    Workload(
        name="gated_delta_net",
        function="patch",
        call=_run_mixer,
        reference=functools.partial(_run_mixer, without_packages),
        inputs=_mixer_inputs,
        legend="B x T x H x Hk x Hv x D",
        rows_axis=1,
        # The products alone.
        flops=lambda case: _mixer_flops(*case.shape),
        bench_shapes=(
            Case("qwen3.5-9b", (2, 4096, 4096, 16, 32, 128), MORE),
            small(1, 128, 64, 2, 4, 16),
            *sweep((1, t, 4096, 16, 32, 128) for t in (1024, 4096, 16384)),
        ),
    ),
)
