"""Linear layers with low-rank adapters: as accurate as the eager code of PEFT, with gradients only where needed."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tigon
from op_cases import DEVICE, assert_as_accurate_as_eager, one_in
from projection_cases import flatten, rebuild
from tigon.ops.adapters import low_rank
from tigon.ops.adapters.grouped_low_rank import split_experts
from tigon.ops.adapters.lora import eager_output, lora_linears, takes_adapters
from tigon.ops.adapters.lora_products import draw_seeds
from tigon.ops.adapters.low_rank import PartTiles, dropout_bits, empty_hidden, expand, project, split_terms, token_sums
from tigon.ops.adapters.plan import plan_node
from tigon.ops.adapters.projection import Adapter, Projection
from tigon.ops.fp8.formats import Factor, FusedPass
from tigon.ops.fp8.quantisation import Layout, quantise

pytestmark = pytest.mark.kernels

# The dtypes of the model and of its adapters. PEFT keeps adapters in fp32 unless it is told otherwise.
DTYPE_PAIRS = {
    "bf16-fp32": (torch.bfloat16, torch.float32), "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16-fp32": (torch.float16, torch.float32),
}  # fmt: skip
# Sizes that fill no tile, and one that takes several programs and parts. Shapes are [tokens, inputs, outputs, rank].
SHAPES = {"one": (1, 8, 8, 1), "odd": (37, 75, 59, 5), "large": (300, 520, 264, 16), "rank": (40, 96, 64, 150)}


def _leaf(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0, trains: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_(trains)


def _adapter(inputs: int, outputs: int, rank: int, dtype: torch.dtype, seed: int = 0, **fields: object) -> Adapter:
    a = _leaf(rank, inputs, dtype=dtype, seed=seed, scale=inputs**-0.5)
    b = _leaf(outputs, rank, dtype=dtype, seed=seed + 1, scale=rank**-0.5)
    return Adapter(a, b, 0.7, **fields)


def _layer(tokens: int, inputs: int, outputs: int, rank: int) -> tuple[Tensor, Tensor, Adapter]:
    """Return x, a frozen weight and an adapter in fp32."""
    x = _leaf(tokens, inputs, dtype=torch.bfloat16, seed=1)
    weight = _leaf(outputs, inputs, dtype=torch.bfloat16, seed=2, trains=False)
    return x, weight, _adapter(inputs, outputs, rank, torch.float32, 3)


def _check(x: Tensor, projections: list[Projection]) -> None:
    """Compare outputs and gradients with eager code and with exact values."""
    assert takes_adapters(x, projections)
    assert_as_accurate_as_eager(
        lambda x, *values: lora_linears(x, rebuild(values, projections)),
        lambda x, *values: tuple(eager_output(x, projection) for projection in rebuild(values, projections)),
        [x, *flatten(projections)],
    )


@one_in(2, shape=SHAPES, dtypes=DTYPE_PAIRS, bias=[False, True])
@pytest.mark.sampled(in_interpreter=2)
def test_lora_linear_is_as_accurate_as_eager(shape, dtypes, bias):
    (tokens, inputs, outputs, rank), (dtype, adapter_dtype) = shape, dtypes
    x = _leaf(1, tokens, inputs, dtype=dtype, seed=1)
    weight = _leaf(outputs, inputs, dtype=dtype, seed=2, scale=inputs**-0.5, trains=False)
    biases = [_leaf(outputs, dtype=d, seed=3 + i) if bias else None for i, d in enumerate(dtypes)]
    adapter = _adapter(inputs, outputs, rank, adapter_dtype, 5, bias=biases[1])
    _check(x, [Projection(weight, biases[0], (adapter,))])


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "base trains"])
def test_projections_of_one_input_share_a_node(trains):
    """One layer has no adapter and one has two."""
    x = _leaf(2, 19, 40, dtype=torch.bfloat16, seed=1)
    adapters = [(3,), (), (4, 2)]
    projections = [
        Projection(
            _leaf(outputs, 40, dtype=torch.bfloat16, seed=i, scale=0.2, trains=trains), None,
            tuple(_adapter(40, outputs, rank, torch.float32, 10 * i + j) for j, rank in enumerate(ranks)),
        )
        for i, (outputs, ranks) in enumerate(zip((48, 24, 16), adapters, strict=True))
    ]  # fmt: skip
    _check(x, projections)
    nodes = {y.grad_fn for y in lora_linears(x, projections)}
    assert len(nodes) == 1


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """Return the list of the names of all kernels that the low-rank products launch from now on."""
    names: list[str] = []
    launch = low_rank.launch

    def record(kernel, *args, **kwargs):
        names.append(kernel.fn.__name__)
        launch(kernel, *args, **kwargs)

    monkeypatch.setattr(low_rank, "launch", record)
    return names


def _divide_into(monkeypatch, divide) -> None:
    """Let `divide` choose the parts of a product. Parts that were chosen before count no more."""
    monkeypatch.setattr(PartTiles, "divide", divide)
    for name in ("_plan_project", "_plan_sums"):
        monkeypatch.setattr(low_rank, name, getattr(low_rank, name).__wrapped__)


@one_in(
    3, biases={"no bias": 0, "one bias": 1, "biases": 3},
    factors=[(torch.float32, 4), (torch.float32, 20), (torch.bfloat16, 4)],
)  # fmt: skip
def test_layers_of_one_rank_share_launches(biases, factors, launches, monkeypatch):
    dtype, rank = factors
    # The shortest parts, so that each product but the smallest ones has several.
    _divide_into(monkeypatch, lambda self, length, step, blocks, device: (step, -(-length // step)))
    x = _leaf(2, 45, 136, dtype=torch.bfloat16, seed=1)
    projections = [
        Projection(
            _leaf(outputs, 136, dtype=torch.bfloat16, seed=i, scale=0.1, trains=False),
            _leaf(outputs, dtype=torch.bfloat16, seed=20 + i) if i < biases else None,
            (_adapter(136, outputs, rank, dtype, 10 * i)._replace(scaling=0.5 + i),),
        )
        for i, outputs in enumerate((48, 24, 200))
    ]
    _check(x, projections)
    # The partial sums of all products of a launch fill its memory, so those of two products share none of it.
    memories: list[Tensor] = []

    def filled(x: Tensor, counters: int, floats: int) -> tuple[Tensor, Tensor]:
        memories.append(torch.full((floats,), torch.nan, device=x.device))
        return torch.zeros(counters, dtype=torch.int32, device=x.device), memories[-1]

    monkeypatch.setattr(low_rank, "scratch", filled)
    launches.clear()
    ys = lora_linears(x, projections)
    assert launches == ["split_kernel", "project_kernel", *["expand_kernel"] * (2 if biases == 1 else 1)]
    launches.clear()
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert [name for name in launches if name != "split_kernel"] == [
        "project_kernel", "token_sum_kernel", "expand_kernel"
    ]  # fmt: skip
    assert len(memories) == 3
    assert not any(memory.isnan().any() for memory in memories)


@pytest.mark.parametrize("name", ["weight", "a", "b"])
def test_a_leaf_that_changes_before_backward_is_refused(name):
    x, weight, adapter = _layer(5, 24, 8, 2)
    y = tigon.lora_linear(x, weight, adapter.a, adapter.b)
    with torch.no_grad():
        {"weight": weight, "a": adapter.a, "b": adapter.b}[name].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.* at version 1; expected version 0"):
        y.sum().backward()


def test_tensors_that_are_no_leaves_are_saved_by_autograd():
    x, weight, adapter = _layer(5, 24, 8, 2)
    saved: list[Tensor] = []
    gradients = []
    for factor in (None, 1.0):
        a, b = (each if factor is None else each * factor for each in (adapter.a, adapter.b))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            y = tigon.lora_linear(x, weight, a, b)
        assert any(t is a for t in saved) == (factor is not None)
        gradients.append(torch.autograd.grad(y.sum(), (x, adapter.a, adapter.b)))
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


def test_an_output_that_is_not_used_gets_no_gradient():
    x, weight, used = _layer(5, 24, 8, 2)
    unused = _adapter(24, 8, 2, torch.float32, 5)
    y, _ = lora_linears(x, [Projection(weight, None, (used,)), Projection(weight, None, (unused,))])
    y.sum().backward()
    assert used.a.grad is not None
    assert used.b.grad is not None
    assert unused.a.grad is None
    assert unused.b.grad is None


def test_lora_linear_accepts_strided_inputs_and_expanded_gradients():
    x, weight, adapter = _layer(6, 24, 16, 4)
    results = []
    for rows in (x.detach().t().contiguous().t(), x.detach()):
        rows = rows.requires_grad_()
        y = tigon.lora_linear(rows, weight, adapter.a, adapter.b, 0.5)
        results.append((y, *torch.autograd.grad(y.sum(), (rows, adapter.a, adapter.b))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_frozen_weights_cost_no_product():
    """A linear layer with an adapter costs two large products when only the input and the adapter need gradients."""
    x, weight, adapter = _layer(32, 64, 48, 4)
    with FlopCounterMode(display=False) as counter:
        tigon.lora_linear(x, weight, adapter.a, adapter.b).sum().backward()
    # Triton kernels compute the low-rank products, and the counter sees torch's products only.
    assert counter.get_total_flops() == 2 * 2 * 32 * 64 * 48


@pytest.mark.parametrize("name", ["a", "b", "x"])
def test_only_the_needed_gradients_are_computed(name):
    x, weight, adapter = _layer(7, 24, 16, 4)
    leaves = {"x": x, "a": adapter.a, "b": adapter.b}
    expected = torch.autograd.grad(tigon.lora_linear(x, weight, adapter.a, adapter.b).sum(), list(leaves.values()))
    for other, leaf in leaves.items():
        leaf.requires_grad_(other == name)
    y = tigon.lora_linear(x, weight, adapter.a, adapter.b)
    (actual,) = torch.autograd.grad(y.sum(), leaves[name])
    assert torch.equal(actual, expected[list(leaves).index(name)])


def test_dropout_applies_the_mask_of_its_seed():
    """The node draws a seed. With the mask of this seed, eager code gives the same values and gradients."""
    p, tokens, inputs = 0.3, 33, 52
    x, weight, adapter = _layer(tokens, inputs, 20, 4)
    adapter = adapter._replace(dropout=p)
    projection = Projection(weight, None, (adapter,))
    torch.manual_seed(5)
    call = plan_node(x, [projection])
    assert call is not None
    seeds = draw_seeds(call.plan, x)
    assert seeds is not None
    dropout_mask = dropout_bits(seeds, 0, tokens, inputs, p)
    mask = ((dropout_mask[:, :, None] >> torch.arange(8, device=DEVICE)) & 1).reshape(tokens, -1)[:, :inputs]

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        torch.manual_seed(5)
        return lora_linears(x, [Projection(weight, None, (adapter._replace(a=a, b=b),))])[0]

    def reference(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = x @ weight.to(x.dtype).t()
        hidden = (x.to(a.dtype) * mask / (1 - p)) @ a.t()
        return (y + hidden @ b.t() * adapter.scaling).to(y.dtype)

    assert_as_accurate_as_eager(run, reference, [x, adapter.a, adapter.b])


def test_dropout_keeps_the_right_share_and_differs_between_adapters():
    p = 0.05
    seeds = torch.tensor([1, 2], device=DEVICE)
    masks = [dropout_bits(seeds, i, 32, 512, p) for i in (0, 1, 0)]
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])
    for mask in masks[:2]:
        bits = (mask[:, :, None] >> torch.arange(8, device=DEVICE)) & 1
        # The standard deviation of the mean of 16384 bits is 0.0017.
        assert abs(bits.float().mean().item() - (1 - p)) < 0.008
        # Neighbours in a row and rows below each other are independent.
        flat = bits.reshape(32, 512).float() - (1 - p)
        for a, b in ((flat[:, 1:], flat[:, :-1]), (flat[1:], flat[:-1])):
            assert abs((a * b).mean().item()) < 0.008


def test_terms_add_up_to_the_fp32_value():
    a = torch.randn(3, 70, device=DEVICE) * torch.logspace(-20, 20, 70, device=DEVICE)
    for tensors in ([a], [a.t()], [a, 3 * a], [a, 3 * a[:2], a[1:]], [a, 3 * a, a, a[:1]], [a, a.t().contiguous().t()]):
        terms = split_terms(*tensors)
        assert torch.equal(terms.double().sum(0).float(), torch.cat(tensors))


def test_parts_are_added_by_the_last_program(monkeypatch):
    divide = lambda self, length, step, blocks, device: (-(-length // (3 * step)) * step, 3)
    _divide_into(monkeypatch, divide)
    x, a = torch.randn(200, 400, device=DEVICE).bfloat16(), torch.randn(70, 400, device=DEVICE)
    h = [project(x, [a], empty_hidden(x, 200, 70)) for _ in range(3)]
    sums = [token_sums(x, h[0], transposed=transposed)[0] for transposed in (False, True, False)]
    # Each launch finds the counters at zero, so every run adds all parts, in the same order.
    assert all(torch.equal(h[0], other) for other in h[1:])
    assert torch.equal(sums[0], sums[1].t())
    assert torch.equal(sums[0], sums[2])
    hidden = h[0].double().sum(0)
    torch.testing.assert_close(hidden, x.double() @ a.double().t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums[0].double(), x.double().t() @ hidden, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize(("rank", "features", "drops"), [(9, 640, False), (70, 72, True)])
def test_the_product_that_reads_x_finds_its_maximum_or_writes_its_copy(rank, features, drops):
    """The copy has the bits of the pass that only writes a copy, and the values before dropout."""
    x = torch.randn(140, 2 * features, device=DEVICE).bfloat16()[:, features:]
    a, h = torch.randn(rank, features, device=DEVICE), empty_hidden(x, 140, rank)
    mask = None
    if drops:
        mask = dropout_bits(torch.tensor([1], device=DEVICE), 0, 140, features, 0.5)
    expected = project(x, [a], h, 2.0, mask).clone()
    maximum = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert torch.equal(project(x, [a], h, 2.0, mask, FusedPass(maximum)), expected)
    assert maximum.view(torch.float32).item() == x.abs().max().item()
    copy = quantise([x], Layout(False, True, False), maximum).rows
    # The copy is a part of a wider matrix, whose other columns are not written.
    matrix = torch.full((140, 3 * features), 7.0, device=DEVICE).to(torch.float8_e4m3fn)
    values, scale = matrix[:, features : 2 * features], torch.zeros(1, device=DEVICE)
    assert torch.equal(project(x, [a], h, 2.0, mask, FusedPass(maximum, Factor(values, scale))), expected)
    assert torch.equal(scale, copy.scale)
    as_bytes = lambda z: z.contiguous().view(torch.uint8)
    assert torch.equal(as_bytes(values), as_bytes(copy.values))
    others = matrix.float().view(140, 3, features)[:, [0, 2]]
    assert (others == 7.0).all()


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"weight": torch.zeros(4, 3)}, ValueError, r"lora_linear: weight must have shape \[O, I\]"),
    ({"a": torch.zeros(2, 5)}, ValueError, r"lora_linear: a must have shape \[r, 8\], got \(2, 5\)"),
    ({"b": torch.zeros(4, 3)}, ValueError, r"lora_linear: b must have shape \(4, 2\), got \(4, 3\)"),
    ({"b": torch.zeros(4, 2).double()}, ValueError, "lora_linear: a and b must have the same dtype"),
    ({"lora_bias": torch.zeros(3)}, ValueError, r"lora_linear: lora_bias must have shape \(4,\), got \(3,\)"),
    ({"scaling": "2"}, TypeError, "lora_linear: scaling must be a number, got str"),
    ({"dropout": 1.0}, ValueError, "lora_linear: dropout must be below 1, got 1.0"),
    ({"dropout": -0.1}, ValueError, r"lora_linear: dropout must be in \[0, 1\], got -0.1"),
    ({"x": 3}, TypeError, "lora_linear: x must be a Tensor, got int"),
])  # fmt: skip
def test_bad_input_is_refused(change, error, message):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(4, 8), "a": torch.zeros(2, 8), "b": torch.zeros(4, 2)}
    with pytest.raises(error, match=message):
        tigon.lora_linear(**arguments | change)


@pytest.mark.parametrize("name", ["bias", "lora_bias"])
def test_a_bias_may_have_any_stride(name):
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)
    x, weight, a, b = random(4, 8).to(torch.bfloat16), random(16, 8).to(torch.bfloat16), random(3, 8), random(16, 3)
    for bias in (random(32)[::2], random(1).expand(16)):
        dense = tigon.lora_linear(x, weight, a, b, 0.5, **{name: bias.clone(memory_format=torch.contiguous_format)})
        assert torch.equal(tigon.lora_linear(x, weight, a, b, 0.5, **{name: bias}), dense)


def test_more_than_2_to_the_31_elements_of_h():
    """The terms of h are so far apart that the offset of the third one takes 64 bits.

    With addresses in 32 bits, the kernels would access memory of other tensors. Few bytes of the memory are used.
    """
    tokens, features, rank, stride_term = 4, 16, 4, 2**30 + 16
    x, a = torch.randn(tokens, features, device=DEVICE).bfloat16(), torch.randn(rank, features, device=DEVICE)
    z, b = torch.randn(tokens, features, device=DEVICE), torch.randn(features, rank, device=DEVICE)
    memory = _untouched(2 * stride_term + tokens * rank, torch.bfloat16)
    results = []
    for h in (empty_hidden(x, tokens, rank), memory.as_strided((3, tokens, rank), (stride_term, rank, 1))):
        project(x, [a], h)
        results.append((h.clone(), expand(h, [b], [torch.empty_like(z)], (1.0,), [None])[0], token_sums(z, h)[0]))
    for result, expected in zip(*results, strict=True):
        assert torch.equal(result, expected)


def _untouched(length: int, dtype: torch.dtype) -> Tensor:
    """Return memory that is not filled with NaN: only the pages that a test writes take time and memory."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    memory = torch.empty(length, dtype=dtype, device=DEVICE)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return memory


def _factor_of_large_strides(*shape: int, dim: int) -> Tensor:
    """Return an fp16 factor whose elements along `dim` are more than 2^30 elements apart. Few bytes are used."""
    strides = [1 if i > dim else shape[-1] for i in range(len(shape))]
    strides[-1], strides[dim] = 1, 2**30 + 16
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = _untouched(length, torch.float16)
    return memory.as_strided(shape, strides).copy_(torch.randn(shape))


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_factors_with_strides_of_more_than_2_to_the_30(dim):
    """The offset of the third row or column takes 64 bits, in all kernels that read a factor by its strides."""
    x = torch.randn(5, 3, device=DEVICE).half()
    h = project(x, [torch.randn(3, 3, device=DEVICE)], empty_hidden(x, 5, 3))
    factor, factor_of_experts = _factor_of_large_strides(3, 3, dim=dim), _factor_of_large_strides(2, 3, 3, dim=dim + 1)
    for run, a in (
        (lambda a: project(x, [a], empty_hidden(x, 5, 3)), factor),
        (split_terms, factor),
        (lambda b: expand(h, [b], [torch.empty_like(x)], (1.0,), [None])[0], factor),
        (lambda a: split_experts(a, factors=[2.0]), factor_of_experts),
    ):
        assert torch.equal(run(a), run(a.contiguous()))
