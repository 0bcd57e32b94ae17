"""The bytes that one layer of a Llama saves for backward, in units of the bytes of its hidden state.

References save their intermediate results, so these tests need kernels and run in Triton's interpreter (`make test`).
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import tigon
from memory.steps import block
from tigon.runtime.launch import Plan

# Llama-3-8B, divided by 32: heads of 4 features.
HIDDEN, INNER, HEADS, GROUPS = 128, 448, 32, 8


class Layer(nn.Module):
    """A decoder layer of torch modules, except for the norms, the gate and the rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = tigon.RMSNorm(HIDDEN), tigon.RMSNorm(HIDDEN)
        linear = lambda rows, columns: nn.Linear(columns, rows, bias=False)
        size = HIDDEN // HEADS
        self.q, self.o = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.k, self.v = linear(GROUPS * size, HIDDEN), linear(GROUPS * size, HIDDEN)
        self.mlp = tigon.SwiGLUMLP(HIDDEN, INNER)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = tigon.rope(q, k, cos, sin)
        a = _Attention.apply(q, k, v)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class RecurrentLayer(nn.Module):
    """The mixer of a hybrid: a convolution and a gated delta rule with 2 heads of keys and 4 of values, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.z, self.o = (nn.Linear(HIDDEN, n, bias=False) for n in (HIDDEN * 3 // 2, HIDDEN, HIDDEN))
        self.taps, self.weight = nn.Parameter(torch.randn(HIDDEN * 3 // 2, 4)), nn.Parameter(torch.ones(32))
        self.g, self.beta = nn.Parameter(torch.full((4,), -0.1)), nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = tigon.causal_conv1d(self.qkv(x), self.taps).split([HIDDEN // 4, HIDDEN // 4, HIDDEN], -1)
        q, k, v = (y.unflatten(-1, (heads, -1)) for y, heads in zip(qkv, (2, 2, 4), strict=True))
        g, beta = (value.expand(v.shape[:3]) for value in (self.g, self.beta))
        y, _ = tigon.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True)
        return self.o(tigon.gated_rms_norm(y, self.z(x).view_as(y), self.weight).flatten(2))


class _Attention(torch.autograd.Function):
    """An attention that saves what fused attention saves, its inputs and its output, except for one number per row."""

    @staticmethod
    def forward(ctx, q, k, v):
        repeated = [x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v)]
        y = F.scaled_dot_product_attention(q, *repeated).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, y)
        return y


def units(lean: bool, make: Callable[[], nn.Module] = Layer, **options: bool) -> float:
    """Return the bytes that a layer saves, divided by the bytes of its hidden state."""
    layer, batch, length = make(), 2, 24
    weights = {p.untyped_storage()._cdata for p in layer.parameters()}
    angles = torch.randn(1, length, HIDDEN // HEADS)
    x, storages = torch.randn(batch, length, HIDDEN, requires_grad=True), {}
    tables = angles.cos(), angles.sin()
    # All layers share the tables.
    weights |= {t.untyped_storage()._cdata for t in tables}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in weights:
            storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t.detach()

    with saved_tensors_hooks(pack, lambda t: t), block(lean, **options):
        layer(x * 1, *tables)
    # A norm of each head saves four numbers in fp32 for a token.
    sizes = [storage.nbytes() for storage in storages.values() if storage.nbytes() > batch * length * 4 * 4]
    return sum(sizes) / (x.numel() * 4)


def bytes_saved_by_graph(lean: bool, **options: bool) -> int:
    """Return the bytes that a compiled MLP saves for backward, with kernels that write nothing."""
    norm, mlp, x = tigon.RMSNorm(HIDDEN), tigon.SwiGLUMLP(HIDDEN, INNER), torch.randn(48, HIDDEN)
    weights, storages = {p.untyped_storage()._cdata for p in (*norm.parameters(), *mlp.parameters())}, {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in weights:
            storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t.detach()

    def forward(x: Tensor) -> Tensor:
        with block(lean, **options):
            return x + mlp(norm(x))

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    with saved_tensors_hooks(pack, lambda t: t):
        compiled(x)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.no_interpreter("It calls no kernel.")
def test_graphs_recompute_the_results_of_kernels(monkeypatch):
    """Operators inside autograd functions are recomputed too: the norm, its statistics and the gated product."""
    for op in (tigon.ops.norms.rms_norm, tigon.ops.mlps.glu):
        monkeypatch.setattr(op, "runs_kernels", lambda *tensors: True)
    monkeypatch.setattr(Plan, "launch", lambda *tensors: None)
    default = bytes_saved_by_graph(False)
    assert default - bytes_saved_by_graph(True) == 48 * 4 * (HIDDEN + 1 + INNER)
    # Some versions of torch save the norm's output, because one recomputed region reads it from another.
    assert bytes_saved_by_graph(True, mlp=True) <= 48 * 4 * (2 * HIDDEN + 1)
    torch._dynamo.reset()


@pytest.mark.interpreter
def test_bytes_that_a_layer_saves():
    """By default, the layer saves 13.5 units: x 1, norm 1, q/k/v 1.5, attention 1, residual 1, norm 1, gate and up 7.

    Stock code saves another 3.5 units. `lean` does not save the norms, and `lean(mlp=True)` saves neither gate nor up.
    """
    assert units(lean=False) == 13.5
    assert units(lean=True) == 11.5
    assert units(lean=True, mlp=True) == 4.5


@pytest.mark.interpreter
def test_bytes_that_a_recurrent_layer_saves():
    """By default, the layer saves 7 units: x 1, q/k/v 1.5, their convolution 1.5, the rule 1, the gate 1, the norm 1.

    `lean` saves neither the convolution nor the norm.
    """
    assert units(lean=False, make=RecurrentLayer) == 7.0
    assert units(lean=True, make=RecurrentLayer) == 4.5
