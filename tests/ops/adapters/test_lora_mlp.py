"""The gated MLP with adapters: as accurate as eager code, and the same bits at every level of memory."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tigon
from op_cases import DEVICE, assert_as_accurate_as_eager, one_in, saved_tensors
from projection_cases import flatten, rebuild
from tigon.ops.adapters import low_rank
from tigon.ops.adapters.lora import eager_output
from tigon.ops.adapters.lora_mlp import has_one_node, lora_glu_mlp
from tigon.ops.adapters.plan import plan_node
from tigon.ops.adapters.projection import Adapter, Projection

pytestmark = pytest.mark.kernels

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
# The ranks of the adapters of gate, up and down; 0 stands for no adapter.
DTYPE_PAIRS = {
    "bf16-fp32": (torch.bfloat16, torch.float32), "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16-fp32": (torch.float16, torch.float32),
}  # fmt: skip
ADAPTER_RANKS = {"all": (5, 4, 7), "up": (0, 3, 0), "down": (0, 0, 6), "gate and down": (2, 0, 3)}


def _inputs(ranks: tuple[int, ...], dtype: torch.dtype, adapter_dtype: torch.dtype) -> tuple[Tensor, list[Projection]]:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int, dtype: torch.dtype, trains: bool = True) -> Tensor:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return values.to(DEVICE, dtype).requires_grad_(trains)

    hidden, inner = 40, 104
    layers = []
    for rank, (outputs, inputs) in zip(ranks, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
        weight = leaf(outputs, inputs, dtype=dtype, trains=False)
        pair = (rank, inputs), (outputs, rank)
        adapters = (Adapter(*(leaf(*shape, dtype=adapter_dtype) for shape in pair), 0.7),) if rank else ()
        layers.append(Projection(weight, None, adapters))
    x = torch.randn(2, 37, hidden, generator=generator).to(DEVICE, dtype).requires_grad_()
    return x, layers


def _run(level: str, x: Tensor, layers: list[Projection], activation: str) -> Tensor:
    if level == "checkpoint":
        return checkpoint(lora_glu_mlp, x, *layers, activation, use_reentrant=False)
    with contextlib.nullcontext() if level == "default" else tigon.lean(mlp=level == "lean+mlp"):
        return lora_glu_mlp(x, *layers, activation)


@one_in(4, ranks=ADAPTER_RANKS, activation=list(ACTIVATIONS), dtypes=DTYPE_PAIRS)
def test_lora_glu_mlp_is_as_accurate_as_eager(ranks, activation, dtypes):
    x, layers = _inputs(ranks, *dtypes)
    assert has_one_node(plan_node(x, layers))

    def reference(x: Tensor, *values: Tensor) -> Tensor:
        gate, up, down = rebuild(values, layers)
        return eager_output(ACTIVATIONS[activation](eager_output(x, gate)) * eager_output(x, up), down)

    assert_as_accurate_as_eager(
        lambda x, *values: lora_glu_mlp(x, *rebuild(values, layers), activation), reference, [x, *flatten(layers)]
    )


@pytest.mark.parametrize(("level", "ranks"), [("lean", "all"), ("lean+mlp", "down"), ("checkpoint", "all")])
def test_every_level_of_memory_gives_the_bits_of_the_default(level, ranks):
    results = []
    for name in ("default", level):
        x, layers = _inputs(ADAPTER_RANKS[ranks], torch.bfloat16, torch.float32)
        leaves = [x, *(tensor for tensor in flatten(layers) if tensor.requires_grad)]
        y = _run(name, x, layers, "silu")
        loss = y.square().sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        # A second backward gives the same gradients.
        assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))
        results.append((y, *first))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_activation_is_not_saved():
    x, layers = _inputs(ADAPTER_RANKS["all"], torch.bfloat16, torch.float32)
    shapes = [tuple(t.shape) for t in saved_tensors(lambda: lora_glu_mlp(x, *layers))]
    # The tensors of [tokens, inner] are gate and up.
    assert shapes.count((74, 104)) == 2


def test_low_rank_products_share_launches(monkeypatch):
    x, layers = _inputs((5, 5, 3), torch.bfloat16, torch.float32)
    launches, launch = [], low_rank.launch

    def record(kernel, *args, **kwargs):
        launches.append(kernel.fn.__name__)
        launch(kernel, *args, **kwargs)

    monkeypatch.setattr(low_rank, "launch", record)
    y = lora_glu_mlp(x, *layers)
    assert launches == ["split_kernel", "project_kernel", "expand_kernel"]
    launches.clear()
    y.sum().backward()
    # The first product is that of down. The sums over tokens are the gradients of the A of gate and up, and of B of
    # down.
    assert launches == ["project_kernel", "project_kernel", "token_sum_kernel", "expand_kernel"]


@pytest.mark.parametrize("case", ["base trains", "bias", "two adapters", "large rank"])
def test_other_cases_run_as_several_nodes_and_agree(case):
    ranks = (40, 40, 40) if case == "large rank" else ADAPTER_RANKS["all"]
    x, layers = _inputs(ranks, torch.bfloat16, torch.float32)
    if case == "base trains":
        layers[0].weight.requires_grad_()
    if case == "bias":
        layers[2] = layers[2]._replace(bias=torch.ones(40, device=DEVICE, dtype=torch.bfloat16))
    if case == "two adapters":
        layers[1] = layers[1]._replace(adapters=layers[1].adapters * 2)
    call = plan_node(x, layers)
    assert call is None or not has_one_node(call)
    expected = eager_output(F.silu(eager_output(x, layers[0])) * eager_output(x, layers[1]), layers[2])
    torch.testing.assert_close(lora_glu_mlp(x, *layers), expected, rtol=0.05, atol=0.05)
