import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tigon
import tigon.ops.experts.moe_launchers as launchers_module
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, one_in, outputs_and_gradients
from tigon.ops.experts.activation import NeededActivationGradients, activation_gradients, activation_gradients_reference
from tigon.ops.experts.arguments import ACTIVATIONS
from tigon.ops.experts.choice_order import route
from tigon.ops.experts.grouped_linear import group_sums, grouped_linear, rows_of_groups
from tigon.ops.experts.moe_mlp import moe_mlp_reference
from tigon.ops.experts.routing import combine, combine_reference, spread, spread_reference

T, K, E, H, INNER = 9, 3, 6, 16, 24


def _normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()


def _index(tokens: int = T, choices: int = K, experts: int = E) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens)]).to(DEVICE)


def _experts(dtype: torch.dtype = torch.float32, **options) -> list[Tensor]:
    """Return up and down, and their biases with the option `biases`."""
    width = INNER if options.get("activation") == "relu2" else 2 * INNER
    shapes = [(E, width, H), (E, H, INNER)]
    shapes = [(*s[:1], *s[:0:-1]) for s in shapes] if options.get("transposed") else shapes
    shapes += [(E, width), (E, H)] if options.get("biases") else []
    return [(_normal(*s, seed=i).detach() / 4).to(dtype).requires_grad_() for i, s in enumerate(shapes)]


def _call(function, index: Tensor, transposed: bool = False, **options):
    """Return a function of x, the weights of the router and the parameters of the experts."""

    def call(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        named = dict(zip(("up_bias", "down_bias"), biases, strict=False))
        return function(x, up, down, index, weights, transposed=transposed, **named, **options)

    return call


def _gpt_oss_gate(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


LAYOUTS = {
    "plain": {}, "transposed": {"transposed": True}, "biases": {"biases": True},
    "biases, transposed, gelu": {"biases": True, "transposed": True, "activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"}, "biases, no gate": {"biases": True, "activation": "relu2"},
    "biases, transposed, a function": {"biases": True, "transposed": True, "activation": _gpt_oss_gate},
    "weighted inputs, transposed": {"weight_inputs": True, "transposed": True},
    "weighted inputs, biases": {"weight_inputs": True, "biases": True, "activation": "gelu"},
    "weighted inputs, a function": {"weight_inputs": True, "activation": _gpt_oss_gate},
}  # fmt: skip


@one_in(4, layout=LAYOUTS, dtype=DTYPES, router_dtype=["same", torch.float32])
def test_moe_mlp_accuracy(layout, dtype, router_dtype):
    weights = _normal(T, K, dtype=dtype if router_dtype == "same" else router_dtype)
    tensors = [_normal(T, H, dtype=dtype), weights, *_experts(dtype, **layout)]
    options = {name: value for name, value in layout.items() if name != "biases"}
    run, reference = (_call(f, _index(), **options) for f in (tigon.moe_mlp, moe_mlp_reference))
    assert_as_accurate_as_eager(run, reference, tensors)


INDICES = {
    "one choice": lambda: _index(choices=1), "all to one expert": lambda: torch.full((T, K), 2, device=DEVICE),
    "one token": lambda: _index(1), "no tokens": lambda: torch.empty(0, K, dtype=torch.int64, device=DEVICE),
    "int32": lambda: _index().int(),
}  # fmt: skip


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_moe_mlp_accepts_every_form_of_index(index):
    index = index()
    tensors = [_normal(index.shape[0], H), _normal(*index.shape), *_experts(biases=True)]
    results, expected = (outputs_and_gradients(_call(f, index), tensors) for f in (tigon.moe_mlp, moe_mlp_reference))
    torch.testing.assert_close([*results[0], *results[1]], [*expected[0], *expected[1]], rtol=1e-5, atol=1e-5)


@one_in(
    5, layout=LAYOUTS, absent={"E": E, "more": E + 7, "many": 2**15, "most": 2**40, "negative": -1, "least": -(2**63)}
)
def test_experts_of_other_ranks_add_nothing(layout, absent):
    """Nothing writes their rows. The values in that memory must not change results or gradients."""
    index = _index()
    index[1::2, 1], index[4] = absent, absent
    tensors = [_normal(T, H), _normal(T, K), *_experts(**layout)]
    options = {name: value for name, value in layout.items() if name != "biases"}
    results, expected = (
        outputs_and_gradients(_call(f, index, **options), tensors) for f in (tigon.moe_mlp, moe_mlp_reference)
    )
    torch.testing.assert_close([*results[0], *results[1]], [*expected[0], *expected[1]], rtol=1e-5, atol=1e-5)
    assert (results[0][0][4] == 0).all()


def test_moe_mlp_accepts_experts_in_a_lower_precision_than_the_tokens():
    """Products have the dtype of the weights. The sum over experts is rounded once, to the dtype of the tokens."""
    dtype = torch.float16
    tensors = [_normal(T, H), _normal(T, K), *_experts(dtype)]
    assert tigon.moe_mlp(tensors[0], *tensors[2:], _index(), tensors[1]).dtype == torch.float32
    assert_as_accurate_as_eager(_call(tigon.moe_mlp, _index()), _call(moe_mlp_reference, _index()), tensors)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["plain", "biases, no gate", "weighted inputs, a function"])
def test_backward_overwrites_what_it_has_saved_only_if_no_one_needs_it_again(name, monkeypatch):
    """The gradient of h takes the memory of h, unless the graph is retained or hooks hold what was saved."""
    layout = LAYOUTS[name]
    tensors = [_normal(T, H), _normal(T, K), *_experts(**layout)]
    options = {name: value for name, value in layout.items() if name != "biases"}
    run = _call(tigon.moe_mlp, _index(), **options)
    overwrites, gradients = [], launchers_module.activation_gradients
    monkeypatch.setattr(
        launchers_module, "activation_gradients", lambda *args: overwrites.append(args[-1]) or gradients(*args)
    )
    loss = run(*tensors).square().sum()
    results = [torch.autograd.grad(loss, tensors, retain_graph=retained) for retained in (True, True, False)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = run(*tensors).square().sum()
    results.append(torch.autograd.grad(loss, tensors))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert overwrites == ([] if callable(layout.get("activation")) else [False, False, True, False])


@pytest.mark.kernels
def test_backward_through_the_second_run_of_a_checkpoint_of_experts_is_refused():
    """The outer backward shares h of the second run, and has overwritten it."""
    outputs = []

    def region(x, weights, up, down):
        outputs.append(tigon.moe_mlp(x, up, down, index, weights))
        return tigon.moe_mlp(outputs[-1], up, down, index, weights)

    index, tensors = _index(), [_normal(T, H), _normal(T, K), *_experts()]
    loss = checkpoint(region, *tensors, use_reentrant=False).square().sum()
    torch.autograd.grad(loss, tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(outputs[1].sum(), tensors)


NEEDS = {
    "all": ("x weights up down up_bias down_bias", {"products": 2, "weights": 4, "spreads": 2}),
    "frozen experts": ("x weights", {"products": 2, "weights": 0, "spreads": 1}),
    "x": ("x", {"products": 2, "weights": 0, "spreads": 1}),
    "the router": ("weights", {"products": 1, "weights": 0, "spreads": 1}),
    "up": ("up", {"products": 1, "weights": 1, "spreads": 2}),
    "down": ("down", {"products": 0, "weights": 1, "spreads": 1}),
    "biases": ("up_bias down_bias", {"products": 1, "weights": 2, "spreads": 1}),
    "the last bias": ("down_bias", {"products": 0, "weights": 1, "spreads": 1}),
}


@pytest.mark.parametrize(("needed", "expected"), NEEDS.values(), ids=NEEDS)
@pytest.mark.sampled(in_interpreter=3)
def test_moe_mlp_computes_only_the_gradients_that_are_needed(needed, expected, monkeypatch):
    """Backward has products of rows with experts, products of rows with rows or ones, and tokens spread to rows."""
    counts = dict.fromkeys(expected, 0)

    def counted(name: str, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    names = "x", "weights", "up", "down", "up_bias", "down_bias"
    tensors = dict(zip(names, [_normal(T, H), _normal(T, K), *_experts(biases=True)], strict=True))
    run = _call(tigon.moe_mlp, _index())
    full = dict(zip(names, outputs_and_gradients(run, list(tensors.values()))[1], strict=True))
    some = [x.detach().requires_grad_(name in needed.split()) for name, x in tensors.items()]
    y = run(*some)
    for name, part in (
        ("products", "grouped_product"), ("weights", "grouped_weight_gradient"), ("weights", "group_sums"),
        ("spreads", "spread"),
    ):  # fmt: skip
        monkeypatch.setattr(launchers_module, part, counted(name, getattr(launchers_module, part)))
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    gradients = torch.autograd.grad(y, [x for x in some if x.requires_grad], upstream)
    assert counts == expected
    for name, gradient in zip([n for n in names if n in needed.split()], gradients, strict=True):
        torch.testing.assert_close(gradient, full[name], rtol=1e-5, atol=1e-6)


@pytest.mark.kernels
@one_in(1, inner=[1, 17, 1030], kind=list(ACTIVATIONS))
def test_activation_gradients_agree_with_their_reference(kind, inner):
    """The sizes take one block or several. Rows of no expert hold NaN, which must not change a result."""
    index = _index(3)
    index[1, 0] = E
    routing, rows = route(index, E), 3 * K
    h, da = _normal(rows, inner * ACTIVATIONS[kind][2]).detach(), _normal(rows, inner, seed=1).detach()
    h[-1], da[-1], weights = torch.nan, torch.nan, _normal(3, K).detach()
    expected = activation_gradients_reference(
        h, da, weights, routing, kind, NeededActivationGradients(True, True, True)
    )
    assert expected[2][1, 0] == 0
    for needs in ((True, True, True), (True, False, True), (False, True, False), (False, False, True)):
        upstream = da.clone() if needs[0] or needs[2] else None
        results = activation_gradients(h, upstream, weights, routing, kind, NeededActivationGradients(*needs))
        for a, b, is_needed in zip(results, expected, needs, strict=True):
            assert (a is None) == (not is_needed)
            if is_needed:
                a, b = (a[:-1], b[:-1]) if a.shape[0] == rows else (a, b)
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("h", [1, 17, 1030, 8200])
def test_spread_and_combine_accept_any_width(h):
    """The widths take one block or several. The last one does not fit in registers."""
    index = _index(3)
    index[1, 0] = E
    routing = route(index, E)
    for run, reference, tensors in (
        (lambda x: spread(x, routing), lambda x: spread_reference(x, routing), [_normal(3, h)]),
        (
            lambda rows, w: combine(rows, w, routing),
            lambda rows, w: combine_reference(rows, w, routing),
            [_normal(3 * K, h), _normal(3, K)],
        ),
    ):
        assert_as_accurate_as_eager(run, reference, tensors)


@pytest.mark.no_interpreter("It launches no kernel.")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_sums_are_rounded_once(dtype):
    """The gradient of a bias is such a sum. Its terms are ones and a quarter, and half precision would lose them."""
    rows, ends = torch.full((4100, 8), 1.0, device=DEVICE, dtype=dtype), [0, 2049, 4098, 4098]
    ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    # The last two rows belong to no group.
    rows[4098:] = torch.nan
    rows[2049] = 0.25
    expected = torch.tensor([0.0, 2049.0, 2048.25, 0.0], device=DEVICE).to(dtype)[:, None].expand(4, 8)
    assert torch.equal(group_sums(rows, ends), expected)
    factors = torch.full((4100,), 0.5, device=DEVICE)
    assert torch.equal(group_sums(rows, ends, factors), expected / 2)
    bias = _normal(4, 8, dtype=dtype)
    group = torch.zeros(4100, dtype=torch.int64, device=DEVICE)
    group[:2049], group[2049:4098] = 1, 2
    spread_bias = rows_of_groups(bias, group, ends)
    assert torch.equal(spread_bias, bias[group])
    assert torch.equal(torch.autograd.grad(spread_bias, bias, rows)[0], expected)


# Functions of a user from [S, 2 I] to [S, I]. Their backward gives the first product an upstream gradient whose
# strides, dtype or address differ from those of the product.
FUNCTIONS = {
    "interleaved": lambda h: torch.tanh(h[..., ::2]) * h[..., 1::2],
    "halves": lambda h: F.silu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :],
    "in place": lambda h: (h * 1.5)[:, : h.shape[1] // 2].sigmoid_(),
    "transposed inside": lambda h: h.T.contiguous().sin()[: h.shape[1] // 2].T,
    "an expanded sum": lambda h: h.sum(-1, keepdim=True).expand(-1, h.shape[1] // 2),
    "a view from the second column on": lambda h: torch.cat((h[:, :1].detach(), h), 1)[:, 1 : 1 + h.shape[1] // 2],
    "in fp32": lambda h: F.gelu(h.float()[:, ::2]),
}


@one_in(5, function=FUNCTIONS, sizes=[(16, 1), (16, 3), (16, 4), (5, 7), (1, 8), (8, 2)])
def test_moe_mlp_accepts_odd_sizes_with_a_function_as_activation(function, sizes):
    """Products of any width, stride and address are computed. Some of them need another kernel."""
    h, inner = sizes
    tensors = [_normal(T, h), _normal(T, K), _normal(E, 2 * inner, h), _normal(E, h, inner)]
    results, expected = (
        outputs_and_gradients(_call(f, _index(), activation=function), tensors)
        for f in (tigon.moe_mlp, moe_mlp_reference)
    )
    torch.testing.assert_close([*results[0], *results[1]], [*expected[0], *expected[1]], rtol=1e-4, atol=1e-4)


def test_moe_mlp_accepts_odd_sizes_without_rows_and_on_meta():
    empty = torch.empty(0, K, dtype=torch.int64, device=DEVICE)
    tensors = [_normal(0, 5), _normal(0, K), _normal(E, 6, 5), _normal(E, 5, 3)]
    outputs, gradients = outputs_and_gradients(_call(tigon.moe_mlp, empty, activation=FUNCTIONS["halves"]), tensors)
    assert outputs[0].shape == (0, 5)
    assert all((g == 0).all() for g in gradients)
    tensors = [_normal(T, 8), _normal(T, K), _normal(E, 0, 8), _normal(E, 8, 0)]
    outputs, gradients = outputs_and_gradients(_call(tigon.moe_mlp, _index(), activation=FUNCTIONS["halves"]), tensors)
    assert all((g == 0).all() for g in [*outputs, *gradients])
    if DEVICE == "cpu" and not tigon.runtime.device.INTERPRETED:
        on_meta = [_normal(*s).to("meta") for s in ((T, 5), (T, K), (E, 6, 5), (E, 5, 3))]
        y = _call(tigon.moe_mlp, _index().to("meta"), activation=FUNCTIONS["halves"])(*on_meta)
        assert (y.shape, y.device.type) == ((T, 5), "meta")


STRIDES = {
    "rows that share memory": lambda y: y[:1].expand(9, -1),
    "columns that share memory": lambda y: y[:, :1].expand(-1, 8),
    "every second column": lambda y: torch.stack((y, y), -1).flatten(1)[:, ::2],
    "by columns": lambda y: y.T.contiguous().T, "an odd address": lambda y: torch.cat((y[:, :1], y), 1)[:, 1:],
}  # fmt: skip


@one_in(1, strides=STRIDES, dtype=[torch.float32, torch.float64])
def test_grouped_linear_accepts_any_strides(dtype, strides):
    ends = torch.tensor([0, 5, 9, 9], dtype=torch.int32, device=DEVICE)
    x, weight = _normal(9, 8, dtype=dtype), _normal(4, 8, 8, dtype=dtype)
    dy = strides(_normal(9, 8, dtype=dtype, seed=3).detach())
    expected = torch.autograd.grad(torch.cat((x[:5] @ weight[1], x[5:] @ weight[2])), (x, weight), dy)
    for a, b in zip(torch.autograd.grad(grouped_linear(x, weight, ends), (x, weight), dy), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    y = grouped_linear(strides(x.detach()), weight, ends)
    torch.testing.assert_close(
        y, torch.cat((strides(x)[:5] @ weight[1], strides(x)[5:] @ weight[2])), rtol=1e-5, atol=1e-5
    )
