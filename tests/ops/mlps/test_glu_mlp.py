"""The gated MLP computes the products of eager code. Every level of memory gives the same bits and saves less."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import tigon
from mlp_cases import HIDDEN, INNER, LEVELS, assert_equal, gradients_of, run_at
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, one_in, saved_tensors
from tigon.ops.mlps import gated_node, glu_mlp
from tigon.ops.mlps.activation_kernels import glu_backward_into, glu_forward
from tigon.ops.mlps.glu import geglu_reference, swiglu_reference
from tigon.runtime.products import multiply
from tigon.testing import assert_accurate

REFERENCES = {
    "silu": swiglu_reference, "gelu": geglu_reference,
    "gelu_tanh": lambda gate, up: geglu_reference(gate, up, approximate="tanh"),
}  # fmt: skip
every_level = pytest.mark.parametrize("level", LEVELS)


def _inputs(
    *leading: int, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN, inner: int = INNER
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (*leading, hidden), (inner, hidden), (inner, hidden), (hidden, inner)
    make = lambda shape: torch.randn(shape, generator=generator) * (1.0 if len(shape) > 2 else shape[-1] ** -0.5)
    return [make(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def _mlp(level: str, *inputs: Tensor, **options: object) -> Tensor:
    return run_at(level, tigon.glu_mlp, *inputs, **options)


@one_in(5, level=LEVELS, activation=list(REFERENCES), leading=[(1,), (3, 17), (2, 2, 5)], dtype=DTYPES)
def test_glu_mlp_accuracy(level, activation, leading, dtype):
    def reference(x, gate, up, down):
        return REFERENCES[activation](x @ gate.t(), x @ up.t()) @ down.t()

    run = partial(_mlp, level, activation=activation)
    assert_as_accurate_as_eager(run, reference, _inputs(*leading, dtype=dtype))


@one_in(2, level=LEVELS, dtype=DTYPES[:2])
def test_factors_of_the_gate_and_of_the_result_are_accurate(level, dtype):
    """Falcon H1 multiplies both by numbers, and DeepSeek V4 limits gate and up."""

    def reference(x, gate, up, down):
        gate, up = (x @ gate.t() * 0.6).clamp(max=0.5), (x @ up.t()).clamp(-0.5, 0.5)
        return swiglu_reference(gate, up) @ down.t() * -1.75

    run = partial(_mlp, level, gate_scale=0.6, output_scale=-1.75, limit=0.5)
    assert_as_accurate_as_eager(run, reference, _inputs(3, 17, dtype=dtype))


@pytest.mark.parametrize(("level", "frozen", "saved_counts"), [
    ("default", (), {"x": 1, "gates": 2}), ("lean+mlp", (), {"x": 1, "gates": 0}),
    ("default", (1, 2, 3), {"x": 0, "gates": 2}), ("lean+mlp", (1, 2, 3), {"x": 1, "gates": 0}),
], ids=str)  # fmt: skip
@pytest.mark.kernels
def test_glu_mlp_saves_only_what_backward_needs(level, frozen, saved_counts):
    inputs = _inputs(2, 9)
    for i in frozen:
        inputs[i].requires_grad_(False)
    widths = {t.data_ptr(): t.shape[-1] for t in saved_tensors(lambda: _mlp(level, *inputs))}
    widths = [width for pointer, width in widths.items() if pointer not in {p.data_ptr() for p in inputs[1:]}]
    assert (widths.count(HIDDEN), widths.count(INNER)) == (saved_counts["x"], saved_counts["gates"])


@pytest.mark.gpu
@pytest.mark.parametrize("min_multiplications", [0, 2**60], ids=["long", "short"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multiply_is_as_accurate_as_torch(dtype, min_multiplications):
    a, b, c = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((600, 520), (512, 520), (600, 512)))
    product, total = multiply(a, b.t(), min_multiplications=min_multiplications), c.clone()
    assert multiply(a, b.t(), total=total, min_multiplications=min_multiplications) is total
    exact = a.double() @ b.t().double()
    sums = total, torch.addmm(c, a, b.t()), c.double() + exact
    for result, eager, expected in ((product, a @ b.t(), exact), sums):
        assert (result - expected).abs().max() <= 2 * (eager - expected).abs().max()


@pytest.mark.kernels
def test_checkpointing_does_not_repeat_the_last_product(monkeypatch):
    """The forward has three products, the second run repeats two, and backward has six. The activation runs once."""
    activations = []
    monkeypatch.setattr(glu_mlp, "glu_forward", lambda *args: activations.append(args) or glu_forward(*args))
    inputs = _inputs(2, 9)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(_mlp("checkpoint", *inputs).sum(), inputs)
    assert counter.get_total_flops() == 11 * 2 * 2 * 9 * HIDDEN * INNER
    assert len(activations) == 1


@pytest.mark.parametrize("caches_products", [False, True], ids=["all repeated", "products cached"])
def test_a_second_backward_of_a_checkpoint_is_exact_or_refused(caches_products):
    """A cache of products serves one backward only."""
    inputs, options = _inputs(2, 9), {}
    if caches_products:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    expected = gradients_of(_mlp("default", *inputs), inputs)[1:]
    loss = checkpoint(tigon.glu_mlp, *inputs, use_reentrant=False, **options).square().sum()
    for retains_graph in (True, False):
        is_refused = caches_products and not retains_graph
        with pytest.raises(RuntimeError, match="extra time") if is_refused else contextlib.nullcontext():
            results = torch.autograd.grad(loss, inputs, retain_graph=retains_graph)
            assert_equal(results, expected)


@pytest.mark.kernels
def test_gradients_may_be_computed_inside_a_checkpoint_without_early_stop():
    """The inner backward of the second run must not overwrite tensors that the outer backward reads."""

    def region(x, *weights):
        y = tigon.glu_mlp(x, *weights)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        return tigon.glu_mlp(x * torch.sigmoid(dx), *weights)

    inputs = _inputs(2, 9)
    inputs[0] = inputs[0] * 1.0
    with set_checkpoint_early_stop(False):
        y = checkpoint(region, *inputs, use_reentrant=False)
    expected = region(*inputs)
    gradients = [torch.autograd.grad(out.square().sum(), inputs[1:]) for out in (y, expected)]
    assert torch.equal(y, expected)
    assert_equal(*gradients)


@pytest.mark.kernels
def test_backward_through_the_second_run_of_a_checkpoint_is_refused():
    """The outer backward shares the gate and up of the second run, and has overwritten them."""
    outputs = []

    def region(x, *weights):
        outputs.append(tigon.glu_mlp(x, *weights))
        return tigon.glu_mlp(outputs[-1], *weights)

    inputs = _inputs(2, 9)
    loss = checkpoint(region, *inputs, use_reentrant=False).square().sum()
    torch.autograd.grad(loss, inputs)
    assert len(outputs) == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(outputs[1].sum(), inputs)


@pytest.mark.kernels
@pytest.mark.parametrize("level", ["default", "lean", "checkpoint"])
def test_gradients_overwrite_the_saved_gate_and_up(level, monkeypatch):
    """They do not if the graph is retained, or if a hook may hold the saved tensors."""
    overwrites = []

    def watched(da, gate, up, *activation_and_results):
        dgate, dup = activation_and_results[2:4]
        overwrites.append(dgate is gate and dup is up)
        glu_backward_into(da, gate, up, *activation_and_results)

    monkeypatch.setattr(gated_node, "glu_backward_into", watched)
    inputs = _inputs(2, 9)
    loss = _mlp(level, *inputs).sum()
    torch.autograd.grad(loss, inputs, retain_graph=True)
    torch.autograd.grad(loss, inputs)
    assert overwrites == [False, True]
    if level != "checkpoint":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = _mlp(level, *inputs).sum()
        torch.autograd.grad(loss, inputs)
        assert overwrites[2:] == [False]


@pytest.mark.kernels
@pytest.mark.parametrize("level", ["default", "checkpoint"])
def test_a_second_attempt_after_an_error_in_backward_is_refused(level, monkeypatch):
    inputs = _inputs(2, 9)
    y = _mlp(level, *inputs)
    with monkeypatch.context() as broken:
        broken.setattr(glu_mlp, "multiply", lambda *args: (_ for _ in ()).throw(MemoryError("out of memory")))
        with pytest.raises(MemoryError):
            torch.autograd.grad(y, inputs, torch.ones_like(y))
    with pytest.raises(RuntimeError, match="modified by an inplace operation|a second time"):
        torch.autograd.grad(y, inputs, torch.ones_like(y))


@every_level
def test_gradients_of_inputs_may_come_before_those_of_weights(level):
    """Pipeline schedules without bubbles split the backward in this way."""
    inputs = _inputs(2, 9)
    expected = gradients_of(_mlp("default", *inputs), inputs)[1:]
    loss = _mlp(level, *inputs).square().sum()
    results = [*torch.autograd.grad(loss, inputs[:1], retain_graph=True), *torch.autograd.grad(loss, inputs[1:])]
    assert_equal(results, expected)


@one_in(2, mlp=[tigon.SwiGLUMLP, tigon.GEGLUMLP], change=["hook", "bias", "adapter", "autocast", "dtype"])
def test_layers_that_do_more_than_a_product_are_called(mlp, change):
    torch.manual_seed(0)
    model, x = mlp(HIDDEN, INNER, bias=change == "bias").to(DEVICE), torch.randn(2, 9, HIDDEN, device=DEVICE)
    context = contextlib.nullcontext()
    calls = []
    if change == "hook":
        model.up_proj.register_forward_hook(lambda *args: calls.append(1))
    elif change == "adapter":

        class Adapted(nn.Linear):
            def forward(self, x):
                calls.append(1)
                return super().forward(x) + 1.0

        layer = Adapted(HIDDEN, INNER, bias=False).to(DEVICE)
        layer.load_state_dict(model.gate_proj.state_dict())
        model.gate_proj = layer
    elif change == "autocast":
        context = torch.autocast(DEVICE, torch.bfloat16)
    elif change == "dtype":
        model.down_proj.double()
        with pytest.raises(RuntimeError, match="dtype|scalar type"):
            model(x)
        return
    activate = REFERENCES[model.activation]
    one_by_one = lambda model, x: model.down_proj(activate(model.gate_proj(x), model.up_proj(x)))
    with context:
        actual, eager = model(x), one_by_one(model, x)
    assert len(calls) == (2 if change in ("hook", "adapter") else 0)
    assert_accurate(actual, eager, one_by_one(copy.deepcopy(model).double(), x.double()))
