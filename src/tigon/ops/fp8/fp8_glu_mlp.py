r"""A gated MLP whose products run in FP8, as one node: y = Q(a) Q(D)^T,  a = act(gate) * up.

    gate = Q(x) Q(G)^T,  up = Q(x) Q(U)^T
    da = Q(dy) Q(D),  (dgate, dup) from da, gate, up
    dx = Q([dgate | dup]) Q([G; U])       one product: its sum is accumulated in fp32 and rounded once
    dD = Q(dy)^T Q(a),  dG = Q(dgate)^T Q(x),  dU = Q(dup)^T Q(x)       or in the dtype of x, without Q

Q rounds a matrix to FP8 (`tigon.ops.fp8.quantisation`). x, dy, and [dgate | dup] are quantised once each, by rows and
transposed. a, dgate and dup are computed where they are quantised, so they exist in bf16 only if dW is a product in
bf16. gate and up share the scales of their weights and of their gradients, as one layer with both outputs would.

The node saves gate and up in the dtype of x and, for dG and dU, the transposed FP8 copy of x, which takes one byte for
each value. It saves x itself in `tigon.lean`, where x is often recomputed for nothing, and if dW is not a product in
FP8. `tigon.lean(mlp=True)` and checkpoints have the meaning that they have for `tigon.glu_mlp`.

Shapes: T tokens, H hidden, I intermediate.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import in_checkpoint, is_lean, recomputes_mlp
from tigon.ops.fp8.formats import Factor, Fp8Options, check_options, check_sizes
from tigon.ops.fp8.fp8_linear import in_autocast_dtype, quantise_again, quantise_input, weight_gradient
from tigon.ops.fp8.gated_gradients import GatedNeeds, gated_gradients, gated_gradients_reference
from tigon.ops.fp8.products import multiply_fp8
from tigon.ops.fp8.quantisation import Layout, Quantised, activate, quantise, quantise_gated, quantise_tensor
from tigon.ops.fp8.weights import WeightCache, quantise_weights, weight_rows, weight_transposed
from tigon.ops.mlps.activation_kernels import PLAIN_GATE, glu_backward_into
from tigon.ops.mlps.gated_node import check_version, gradient_buffers, save_gated, unpack_gated
from tigon.runtime import checks
from tigon.runtime.compat.operators import reshape_without_view
from tigon.runtime.device import runs_kernels
from tigon.runtime.op import Node

KINDS = ("silu", "gelu", "gelu_tanh")


def _multiply_gates(x: Factor, weights: Quantised, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return gate and up [T, I] for x and the weights [2 I, H], I being `inner`."""
    halves = weights.rows_of(0, inner), weights.rows_of(inner, 2 * inner)
    gate, up = (multiply_fp8(x, half, dtype, is_fast=True) for half in halves)
    return gate, up


def _write_gradients(da: Tensor, gate: Tensor, up: Tensor, kind: str, dgate: Tensor, dup: Tensor) -> None:
    """Write dgate and dup in the dtype of gate, and write a into da."""
    # The kernel is no custom operator, so the compiler of a graph fuses the code of the reference.
    if runs_kernels(gate) and not torch.compiler.is_compiling():
        glu_backward_into(da, gate, up, kind, PLAIN_GATE, dgate, dup, da)
    else:
        results = gated_gradients_reference(da, gate, up, kind)
        for out, result in zip((dgate, dup, da), results, strict=True):
            out.copy_(result)


class _Call(NamedTuple):
    kind: str
    options: Fp8Options
    cache: WeightCache | None
    records: bool
    saves_gates: bool
    is_checkpointed: bool


class _Fp8GLUMLP(Node):
    def forward(
        ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, call: _Call
    ) -> Tensor:
        kind, options, cache, records, saves_gates, is_checkpointed = call
        needs = [records and need for need in ctx.needs_input_grad[:4]]
        needs_dgates, needs_gate_weights = any(needs[:3]), any(needs[1:3])
        saves_x = not saves_gates or (needs_gate_weights and (not options.fp8_dw or is_lean()))
        x_rows, x_transposed = quantise_input(x, options, needs_gate_weights and not saves_x)
        gates = gate_weight, up_weight
        gate_copies = weight_rows(cache, "gate and up", gates, options.is_rowwise, needs[0])
        down_copies = weight_rows(cache, "down", [down_weight], options.is_rowwise, needs_dgates)
        gate, up = _multiply_gates(x_rows, gate_copies, len(gate_weight), x.dtype)
        ctx.kind, ctx.options, ctx.shape, ctx.dtype, ctx.inner = kind, options, x.shape, x.dtype, len(gate_weight)
        ctx.dtypes = [weight.dtype for weight in (gate_weight, up_weight, down_weight)]
        ctx.gate_copies = gate_copies if cache is not None else None
        ctx.down_copies = down_copies if cache is not None else None
        saves_gate_weights = (needs[0] and gate_copies.transposed is None) or (not saves_gates and cache is None)
        saves_down_weight = needs_dgates and down_copies.transposed is None
        if records:
            tensors = [x if saves_x else None, *(x_transposed or (None, None))]
            tensors += [*(gates if saves_gate_weights else (None, None)), down_weight if saves_down_weight else None]
            tensors += [gate, up] if saves_gates else [None, None]
            save_gated(ctx, gate, saves_gates, is_checkpointed, *tensors)
        a = quantise_gated(gate, up, kind, Layout(options.is_rowwise, True, False)).copy()
        y = multiply_fp8(a, down_copies.rows_of(0, len(down_weight)), x.dtype, is_fast=True)
        return reshape_without_view(y, (*x.shape[:-1], len(down_weight)))

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        options, kind, is_rowwise = ctx.options, ctx.kind, ctx.options.is_rowwise
        x, values, scale, gate_weight, up_weight, down_weight, gate, up = unpack_gated(ctx)
        needs_dx, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        needs_gate_weights = needs_gate or needs_up
        needs_dgates = needs_dx or needs_gate_weights
        check_version("fp8_glu_mlp", ctx, gate)
        x = None if x is None else x.reshape(-1, ctx.shape[-1])
        is_recomputed = gate is None
        if is_recomputed:
            x_rows = quantise_again(x, options, by_rows=True)
            copies = ctx.gate_copies or quantise_weights((gate_weight, up_weight), is_rowwise, True, False)
            gate, up = _multiply_gates(x_rows, copies, ctx.inner, ctx.dtype)
        fp8_dw = options.fp8_dw
        dy_rows, dy_transposed = quantise_tensor(dy, Layout(is_rowwise, needs_dgates, needs_down and fp8_dw))
        dy = dy.reshape(-1, dy.shape[-1])
        dgates, dgates_transposed, a_transposed, a, dgate, dup = None, None, None, None, None, None
        if dy_rows is None:
            if fp8_dw:
                a_transposed = quantise_gated(gate, up, kind, Layout(is_rowwise, False, True)).transposed
            else:
                a = activate(gate, up, kind).to(ctx.dtype)
        else:
            down_transposed = weight_transposed(ctx.down_copies, [down_weight], is_rowwise)
            da = multiply_fp8(dy_rows, down_transposed, ctx.dtype)
            if fp8_dw or not (needs_down or needs_gate_weights):
                needs = GatedNeeds(is_rowwise, needs_dx, needs_gate_weights, needs_down)
                dgates, dgates_transposed, a_transposed = gated_gradients(da, gate, up, kind, needs)
            else:
                dgate, dup = gradient_buffers(ctx, gate, up, is_recomputed)
                _write_gradients(da, gate, up, kind, dgate, dup)
                a = da
                if needs_dx:
                    dgates = quantise([dgate, dup], Layout(is_rowwise, True, False, True)).rows
            del da
        del gate, up
        ddown, dgate_weight, dup_weight, dx = None, None, None, None
        if needs_down:
            ddown = weight_gradient(dy, a, dy_transposed, a_transposed, ctx.dtypes[2])
        del a, a_transposed, dy_rows, dy_transposed
        x_transposed = None if values is None else Factor(values, scale)
        if dgates_transposed is not None and x_transposed is None:
            x_transposed = quantise_again(x, options, by_rows=False)
        half = ctx.inner
        if needs_gate:
            part = dgates_transposed and dgates_transposed.rows(0, half)
            dgate_weight = weight_gradient(dgate, x, part, x_transposed, ctx.dtypes[0])
        if needs_up:
            part = dgates_transposed and dgates_transposed.rows(half, 2 * half)
            dup_weight = weight_gradient(dup, x, part, x_transposed, ctx.dtypes[1])
        if dgates is not None:
            transposed = weight_transposed(ctx.gate_copies, (gate_weight, up_weight), is_rowwise)
            dx = multiply_fp8(dgates, transposed, ctx.dtype).view(ctx.shape)
        return dx, dgate_weight, dup_weight, ddown


def fp8_glu_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, activation: str = "silu", recipe: str = "tensorwise",
    fp8_dw: bool = True, caches: WeightCache | None = None,
) -> Tensor:  # fmt: skip
    """Return (act(x G^T) * (x U^T)) D^T, a gated MLP whose nine products run in FP8, for x [..., H] (fp32 | bf16 |
    fp16, any strides), gate and up [I, H] and down [O, I], whose sizes are multiples of 16. The result [..., O] has the
    dtype of x. `activation` is "silu", "gelu" or "gelu_tanh"; `recipe`, `fp8_dw` and the errors are those of
    `fp8_linear`. `caches` holds the FP8 copies of these weights only; None makes them at each call."""
    op, weights = "fp8_glu_mlp", {"gate": gate, "up": up, "down": down}
    checks.tensor(op, x=x, **weights)
    checks.floating(op, x=x, **weights)
    checks.choice(op, "activation", activation, KINDS)
    check_options(op, recipe, fp8_dw)
    if x.dim() == 0 or gate.dim() != 2 or gate.shape[1] != x.shape[-1]:
        raise ValueError(f"{op}: gate must have shape [I, H] with H of x {tuple(x.shape)}, got {tuple(gate.shape)}")
    checks.shape(op, "up", up, gate.shape)
    if down.dim() != 2 or down.shape[1] != len(gate):
        raise ValueError(f"{op}: down must have shape [O, {len(gate)}], got {tuple(down.shape)}")
    checks.products(op, x, **weights)
    check_sizes(op, **weights)
    return _glu_mlp(x, gate, up, down, activation, Fp8Options(recipe, fp8_dw), caches)


@in_autocast_dtype
def _glu_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, kind: str, options: Fp8Options, cache: WeightCache | None
) -> Tensor:
    if x.numel() == 0:
        # Without rows there is nothing to quantise. The gradients of the weights are zero.
        a = activate(F.linear(x, gate.to(x.dtype)), F.linear(x, up.to(x.dtype)), kind)
        return F.linear(a.to(x.dtype), down.to(x.dtype))
    records, cache = torch.is_grad_enabled(), None if torch.compiler.is_compiling() else cache
    call = _Call(kind, options, cache, records, not recomputes_mlp(), records and in_checkpoint())
    return _Fp8GLUMLP.apply(x, gate, up, down, call)
