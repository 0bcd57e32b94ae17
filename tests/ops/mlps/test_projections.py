"""Linear layers with the same input run as one node of autograd. Layers that do more than a product are called."""

import pytest
import torch
from torch import Tensor, nn

from op_cases import DEVICE, DTYPES, one_in, saved_tensors
from tigon.ops.mlps.projections import linears
from tigon.testing import assert_accurate

HIDDEN, WIDTHS = 24, (40, 8, 8)
BIASES = {"no bias": (False,) * 3, "bias": (True,) * 3, "one bias": (False, True, False)}


def _layers(biases: tuple[bool, ...] = BIASES["bias"], dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = [nn.Linear(HIDDEN, width, bias) for width, bias in zip(WIDTHS, biases, strict=False)]
    return nn.ModuleList(layers).to(DEVICE, dtype)


def _x(*leading: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*leading, HIDDEN, generator=generator).to(DEVICE, dtype).requires_grad_()


def _upstream(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(y.shape, generator=generator).to(y) for y in outputs]


def _one_by_one(x: Tensor, layers: nn.ModuleList) -> tuple[Tensor, ...]:
    return tuple(layer(x) for layer in layers)


def _step(run, x: Tensor, layers: nn.ModuleList) -> list[Tensor]:
    """Return the outputs and the gradient of every leaf that needs one, for the same random upstream gradients."""
    outputs = run(x, layers)
    leaves = [t for t in (x, *layers.parameters()) if t.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, _upstream(outputs))]


def _assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


def _is_one_node(outputs: tuple[Tensor, ...]) -> bool:
    return len({y.grad_fn for y in outputs}) == 1 and outputs[0].grad_fn.name() == "_LinearsBackward"


@pytest.mark.kernels
@one_in(2, leading=[(1,), (33,), (2, 17), (2, 3, 5)], dtype=DTYPES, biases=BIASES)
def test_linears_accuracy(leading, dtype, biases):
    x, layers = _x(*leading, dtype=dtype), _layers(biases, dtype)
    actual, eager = _step(linears, x, layers), _step(_one_by_one, x, layers)
    exact = _step(_one_by_one, x.detach().double().requires_grad_(), _layers(biases, dtype).double())
    for i, triple in enumerate(zip(actual, eager, exact, strict=True)):
        assert_accurate(*triple, msg=str(i))
    assert [y.shape for y in actual[:3]] == [(*leading, width) for width in WIDTHS]
    assert _is_one_node(linears(x, layers))


@pytest.mark.kernels
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_the_input_is_saved_for_the_gradients_of_weights_alone(frozen):
    x, layers = _x(5), _layers()
    for layer in layers:
        layer.weight.requires_grad_(not frozen)
    assert any(t.data_ptr() == x.data_ptr() for t in saved_tensors(lambda: linears(x, layers))) == (not frozen)


@pytest.mark.kernels
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_weights_of_unused_outputs_get_no_gradient(used):
    """The gradients are None, as if the layers were called one by one."""
    x, layers = _x(2, 7), _layers()
    results = []
    for run in (linears, _one_by_one):
        outputs = [run(x, layers)[i] for i in used]
        upstream = _upstream(tuple(outputs))
        results.append(torch.autograd.grad(outputs, [x, *layers.parameters()], upstream, allow_unused=True))
    for gradient, expected in zip(*results, strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


VIEWS = {
    "gaps between rows": lambda x: x[:, 1:5], "one row for all": lambda x: x[:, :1].expand(-1, 6, -1),
    "gaps between features": lambda x: torch.cat((x, x), -1).view(*x.shape, 2)[..., 0],
}  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_linears_accepts_strided_input(view):
    base, layers = _x(4, 7), _layers()
    _assert_same(
        *(_step(lambda x, layers, run=run: run(view(x), layers), base, layers) for run in (linears, _one_by_one))
    )


@pytest.mark.kernels
def test_outputs_may_be_written_in_place():
    """Rotary embeddings write them in place. Autograd would refuse this for an output that is a view."""
    x, layers = _x(2, 7), _layers()
    results = []
    for run in (linears, _one_by_one):
        outputs = [y.view(2, 7, -1, 4).mul_(i + 2.0) for i, y in enumerate(run(x, layers))]
        results.append(_step(lambda *_, outputs=outputs: outputs, x, layers))
    _assert_same(*results)


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _with_forward(layer: nn.Linear) -> None:
    layer.forward = lambda x: x


CHANGES = {
    "a forward hook": lambda layers: layers[1].register_forward_hook(lambda *args: None),
    "a forward pre-hook": lambda layers: layers[1].register_forward_pre_hook(lambda *args: None),
    "a backward hook": lambda layers: layers[1].register_full_backward_hook(lambda *args: None),
    "a backward pre-hook": lambda layers: layers[1].register_full_backward_pre_hook(lambda *args: None),
    "an assigned forward": lambda layers: _with_forward(layers[1]),
    "an assigned call": lambda layers: setattr(layers[1], "_call_impl", lambda x: x),
    "a compiled call": lambda layers: setattr(layers[1], "_compiled_call_impl", lambda x: x),
    "a subclass": lambda layers: layers.__setitem__(1, _Doubled(HIDDEN, WIDTHS[1], device=DEVICE)),
    "another layer": lambda layers: layers.__setitem__(1, nn.Identity()),
    "a weight of another dtype": lambda layers: layers[1].half(),
    "a bias of another dtype": lambda layers: setattr(layers[1], "bias", nn.Parameter(layers[1].bias.double())),
    "weights in fp64": lambda layers: layers.double(),
}


@pytest.mark.kernels
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_layers_that_do_more_than_a_product_are_called(change):
    x, layers = _x(5), _layers()
    assert linears(x, layers) is not None
    change(layers)
    assert linears(x, layers) is None


@pytest.mark.kernels
def test_with_a_global_hook_or_another_call_of_the_class_the_layers_are_called(monkeypatch):
    x, layers = _x(5), _layers()
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert linears(x, layers) is None
    finally:
        handle.remove()
    for cls in (nn.Module, nn.Linear):
        for name in ("__call__", "_call_impl"):
            call = getattr(cls, name)
            with monkeypatch.context() as patch:
                patch.setattr(
                    cls, name, lambda self, *args, call=call, **kwargs: call(self, *args, **kwargs), raising=False
                )
                assert linears(x, layers) is None
            assert linears(x, layers) is not None


@pytest.mark.kernels
def test_with_unsupported_inputs_the_layers_are_called():
    x, layers = _x(5), _layers()
    for other in (x[0], x[:0], x.double(), x.half(), x.as_subclass(type("Wrapped", (Tensor,), {}))):
        assert linears(other, layers) is None
    with torch.autocast(DEVICE, torch.bfloat16):
        assert linears(x, layers) is None
    assert linears(x.detach().to("cpu").double(), _layers().cpu().double()) is None


@pytest.mark.no_interpreter("It is about CPU tensors without the interpreter.")
def test_on_a_cpu_the_layers_are_called():
    assert linears(_x(5).cpu(), _layers().cpu()) is None
