"""Layers with adapters whose base runs in FP8: the products of `fp8_projections`, and the adapters of eager code."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from fp8_passes import FIND_MAXIMA, WRITE_COPIES, record_passes
from op_cases import DEVICE
from tigon.ops.adapters.fp8_weight import Fp8Group, Fp8Operand, Fp8Weight
from tigon.ops.adapters.lora import lora_linears
from tigon.ops.adapters.lora_mlp import has_one_node, lora_glu_mlp
from tigon.ops.adapters.plan import plan_node
from tigon.ops.adapters.projection import Adapter, Projection
from tigon.ops.fp8.formats import Fp8Options
from tigon.ops.fp8.fp8_linear import fp8_projections
from tigon.ops.fp8.weights import WeightCache

pytestmark = pytest.mark.kernels

HIDDEN, INNER = 48, 112
# The interpreter computes products of bf16 wrongly.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Units in the last place, relative to the largest value. Products are rounded before the adapters are added.
TOLERANCE = 4 * torch.finfo(DTYPE).eps


class Layers:
    """Weights and adapters, and the projections that the nodes take."""

    def __init__(self, sizes: list[tuple[int, int, int]], recipe: str, cache: WeightCache | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(DEVICE, DTYPE)
        self.recipe, self.find_cache = recipe, lambda weights, merges: cache
        self.weights = [draw(outputs, inputs) for outputs, inputs, _ in sizes]
        self.adapters = [
            Adapter(draw(rank, inputs).requires_grad_(), draw(outputs, rank).requires_grad_(), 0.7) if rank else None
            for outputs, inputs, rank in sizes
        ]
        self.x = draw(1, 37, sizes[0][1]).mul_(4).requires_grad_()

    def projections(self, in_fp8: list[bool] | None = None) -> list[Projection]:
        options = Fp8Options(self.recipe)
        return [
            Projection(Fp8Weight(w, options, self.find_cache) if is_fp8 else w, None, (a,) if a else ())
            for w, a, is_fp8 in zip(self.weights, self.adapters, in_fp8 or [True] * len(self.weights), strict=True)
        ]

    def low_rank(self, x: Tensor, i: int) -> Tensor | float:
        a = self.adapters[i]
        return F.linear(F.linear(x.float(), a.a.float()), a.b.float()) * a.scaling if a else 0.0

    def gradients(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        dys = [torch.randn(y.shape, generator=generator).to(DEVICE, DTYPE) for y in outputs]
        leaves = [self.x, *(t for a in self.adapters if a for t in (a.a, a.b))]
        gradients = torch.autograd.grad(outputs, leaves, dys, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=tolerance * b.abs().max().item())


def assert_fused_passes_change_nothing(monkeypatch: pytest.MonkeyPatch, run: Callable[[bool], list[Tensor]]) -> None:
    """Assert that `run(True)` has the bits of `run(False)`, for which no kernel does a pass of the quantisation."""
    actual = run(True)
    monkeypatch.setattr(Fp8Group, "zero_maximum", lambda group, like: None)
    monkeypatch.setattr(Fp8Operand, "fused_passes", lambda operand, read_indices: {})
    assert all(map(torch.equal, actual, run(False)))


@pytest.mark.parametrize(
    ("recipe", "is_cached", "in_fp8"),
    [("tensorwise", True, [True] * 3), ("rowwise", False, [True] * 3), ("rowwise", False, [True, False, True])],
)
def test_layers_with_one_input_share_its_fp8_copy(recipe, is_cached, in_fp8):
    """The third layer has no adapter."""
    sizes = [(HIDDEN, HIDDEN, 5), (32, HIDDEN, 3), (32, HIDDEN, 0)]
    layers = Layers(sizes, recipe, WeightCache() if is_cached else None)
    outputs = lora_linears(layers.x, layers.projections(in_fp8))
    weights = [w for w, is_fp8 in zip(layers.weights, in_fp8, strict=True) if is_fp8]
    products = list(fp8_projections(layers.x, weights, [None] * len(weights), recipe=recipe))
    if not in_fp8[1]:
        products.insert(1, F.linear(layers.x.float(), layers.weights[1].float()))
    expected = [(y.float() + layers.low_rank(layers.x, i)).to(DTYPE) for i, y in enumerate(products)]
    assert_close(outputs, expected)
    assert_close(layers.gradients(outputs), layers.gradients(expected))


@pytest.mark.parametrize(("recipe", "rank"), [("tensorwise", 0), ("rowwise", 3)])
def test_an_output_that_is_not_used_has_no_gradient(recipe, rank):
    layers = Layers([(HIDDEN, HIDDEN, 5), (32, HIDDEN, rank)], recipe)
    first, _ = lora_linears(layers.x, layers.projections())
    product, _ = fp8_projections(layers.x, layers.weights, [None] * 2, recipe=recipe)
    expected = (product.float() + layers.low_rank(layers.x, 0)).to(DTYPE)
    assert_close(layers.gradients((first,)), layers.gradients((expected,)))


@pytest.mark.parametrize(("recipe", "level"), [("tensorwise", "default"), ("rowwise", "lean+mlp")])
def test_a_gated_mlp_is_one_node(recipe, level):
    layers = Layers([(INNER, HIDDEN, 5), (INNER, HIDDEN, 0), (HIDDEN, INNER, 3)], recipe)
    projections = layers.projections()
    assert has_one_node(plan_node(layers.x, projections))
    with tigon.lean(mlp=level == "lean+mlp"):
        y = lora_glu_mlp(layers.x, *projections)
    gate, up = fp8_projections(layers.x, layers.weights[:2], [None] * 2, recipe=recipe)
    gate, up = ((h.float() + layers.low_rank(layers.x, i)).to(DTYPE) for i, h in enumerate((gate, up)))
    # The node rounds a once, as `tigon.swiglu` does.
    a = (F.silu(gate.float()) * up.float()).to(DTYPE)
    product = tigon.fp8_linear(a, layers.weights[2], recipe=recipe)
    expected = (product.float() + layers.low_rank(a, 2)).to(DTYPE)
    # A last digit of a or of dgate may change a value in FP8, which has four bits.
    assert_close([y], [expected], tolerance=0.03)
    assert_close(layers.gradients((y,)), layers.gradients((expected,)), tolerance=0.05)
    # In bf16, which runs on a GPU only, rounding changes more of the FP8 values of `a`.
    limit = 1.0 if DEVICE == "cuda" else 0.3
    exact = F.linear(F.silu(gate.float()) * up.float(), layers.weights[2].float()) + layers.low_rank(a, 2)
    assert (y - expected).norm() < limit * (y - exact).norm()


@pytest.mark.parametrize(("recipe", "in_fp8", "passes", "passes_without_maximum"), [
    pytest.param("tensorwise", [True, True, True], 0, 3, id="tensorwise"),
    # The gated kernel can only find one maximum of both dgate and dup. The product with B finds that of dgate.
    pytest.param("tensorwise", [True, False, True], 0, 2, id="up is not in FP8"),
    # A pass over a row of `a` finds its maximum and quantises it.
    pytest.param("rowwise", [True, True, True], 2, 2, id="rowwise"),
])  # fmt: skip
def test_a_gated_mlp_has_no_pass_for_the_maxima_of_what_its_kernels_write(
    monkeypatch, recipe, in_fp8, passes, passes_without_maximum
):
    """The tensors [37, INNER] that are quantised are a, dgate and dup."""
    shapes = record_passes(monkeypatch, FIND_MAXIMA)

    def run(is_fused: bool) -> list[Tensor]:
        layers = Layers([(INNER, HIDDEN, 5), (INNER, HIDDEN, 4), (HIDDEN, INNER, 3)], recipe)
        shapes.clear()
        y = lora_glu_mlp(layers.x, *layers.projections(in_fp8))
        results = [y, *layers.gradients((y,))]
        assert shapes.count((37, INNER)) == (passes if is_fused else passes_without_maximum)
        return results

    assert_fused_passes_change_nothing(monkeypatch, run)


@pytest.mark.parametrize(("ranks", "in_fp8", "passes"), [
    pytest.param([5, 3], [True, True], 0, id="all layers"),
    # The kernels read no gradient of a layer without an adapter.
    pytest.param([5, 0], [True, True], 2, id="a layer without an adapter"),
    pytest.param([5, 3], [False, True], 0, id="a layer that is not in FP8"),
    pytest.param([0, 0], [True, True], 3, id="no adapters"),
])  # fmt: skip
def test_low_rank_products_find_the_maxima_of_what_they_read(monkeypatch, ranks, in_fp8, passes):
    """x and the gradients of both layers are quantised, of which the first has larger values."""
    shapes = record_passes(monkeypatch, FIND_MAXIMA)

    def run(is_fused: bool) -> list[Tensor]:
        layers = Layers([(HIDDEN, HIDDEN, ranks[0]), (32, HIDDEN, ranks[1])], "tensorwise")
        shapes.clear()
        first, second = lora_linears(layers.x, layers.projections(in_fp8))
        results = [first, second, *layers.gradients((8 * first, second))]
        # The weights have another number of rows.
        assert [rows for rows, _ in shapes].count(37) == (passes if is_fused else 1 + sum(in_fp8))
        return results

    assert_fused_passes_change_nothing(monkeypatch, run)


@pytest.mark.parametrize(("ranks", "copies"), [
    # x and dy are [37, HIDDEN]: the low-rank products find their maxima. The gradients of gate and up are
    # [37, INNER], and so is a, which no low-rank product reads.
    pytest.param([5, 4, 3], [(37, HIDDEN), (37, INNER), (37, HIDDEN)], id="all layers"),
    # The kernels read no gradient of a layer without an adapter, so neither part is copied by them.
    pytest.param(
        [5, 0, 3], [(37, HIDDEN), (37, INNER), (37, HIDDEN), (37, INNER), (37, INNER)],
        id="a layer without an adapter",
    ),
])  # fmt: skip
def test_low_rank_products_write_the_copies_of_what_they_read(monkeypatch, ranks, copies):
    """The maximum of dgate and dup is known when the low-rank products read them."""
    written = record_passes(monkeypatch, WRITE_COPIES)

    def run(is_fused: bool) -> list[Tensor]:
        layers = Layers(list(zip([INNER, INNER, HIDDEN], [HIDDEN, HIDDEN, INNER], ranks, strict=True)), "tensorwise")
        written.clear()
        y = lora_glu_mlp(layers.x, *layers.projections())
        results = [y, *layers.gradients((y,))]
        assert not is_fused or [shape for shape in written if shape[0] == 37] == copies
        return results

    assert_fused_passes_change_nothing(monkeypatch, run)


@pytest.mark.thorough_in_interpreter
def test_several_adapters_and_dropout_do_each_pass_once(monkeypatch):
    """The copy holds the values before dropout, and the results are those of separate passes."""

    def run(is_fused: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = Layers([(HIDDEN, HIDDEN, 5), (32, HIDDEN, 3)], "tensorwise")
        projections = [
            layer._replace(adapters=tuple(adapter._replace(dropout=0.5) for adapter in 2 * layer.adapters))
            for layer in layers.projections()
        ]
        outputs = lora_linears(layers.x, projections)
        first = lora_linears(layers.x, projections)[:1]
        return [*outputs, *layers.gradients(outputs), *layers.gradients(first)]

    assert_fused_passes_change_nothing(monkeypatch, run)


def test_copies_that_are_not_cached_are_freed_after_the_forward():
    layers = Layers([(HIDDEN, HIDDEN, 0)], "rowwise")
    group = Fp8Group.of([each.weight for each in layers.projections()], needs_dx=True)
    list(group.operand(layers.x.flatten(0, 1)).products())
    group.end_forward()
    assert group.copies is None
    layers = Layers([(HIDDEN, HIDDEN, 0)], "rowwise", WeightCache())
    group = Fp8Group.of([each.weight for each in layers.projections()], needs_dx=True)
    group.end_forward()
    assert group.copies.transposed is not None
