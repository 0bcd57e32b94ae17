import pytest
import torch
from torch import Tensor

import tigon
import tigon.ops.routing as routing_module
from op_cases import DEVICE, DTYPES, INTERPRETED, assert_as_accurate_as_eager, outputs_and_gradients
from tigon.ops.grouped_linear import grouped_linear
from tigon.ops.moe_mlp import moe_mlp_reference
from tigon.ops.routing import Config, combine, combine_reference, route, spread, spread_reference

kernels = pytest.mark.skipif(not (INTERPRETED or DEVICE == "cuda"), reason="of the kernels, not of the reference")
T, K, E, H, INNER = 9, 3, 6, 16, 24


def _normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()


def _index(tokens: int = T, choices: int = K, experts: int = E) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens)]).to(DEVICE)


def _experts(dtype: torch.dtype = torch.float32, **options) -> list[Tensor]:
    """Up and down, and biases if asked for."""
    shapes = [(E, 2 * INNER, H), (E, H, INNER)]
    shapes = [(*s[:1], *s[:0:-1]) for s in shapes] if options.get("transposed") else shapes
    shapes += [(E, 2 * INNER), (E, H)] if options.get("biases") else []
    return [(_normal(*s, seed=i).detach() / 4).to(dtype).requires_grad_() for i, s in enumerate(shapes)]


def _call(function, index: Tensor, transposed: bool = False, **options):
    """Of x, the weights of the router and the parameters of the experts."""

    def call(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        named = dict(zip(("up_bias", "down_bias"), biases, strict=False))
        return function(x, up, down, index, weights, transposed=transposed, **named, **options)

    return call


def _gpt_oss_gate(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


LAYOUTS = {
    "plain": {},
    "transposed": {"transposed": True},
    "biases": {"biases": True},
    "biases, transposed, a gate of one's own": {"biases": True, "transposed": True, "activation": _gpt_oss_gate},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.mark.parametrize("router_dtype", ["same", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_layout
def test_accuracy(layout, dtype, router_dtype):
    weights = _normal(T, K, dtype=dtype if router_dtype == "same" else router_dtype)
    tensors = [_normal(T, H, dtype=dtype), weights, *_experts(dtype, **layout)]
    options = {name: value for name, value in layout.items() if name != "biases"}
    run, reference = (_call(f, _index(), **options) for f in (tigon.moe_mlp, moe_mlp_reference))
    assert_as_accurate_as_eager(run, reference, tensors)


INDICES = {
    "one choice": lambda: _index(choices=1),
    "all to one expert": lambda: torch.full((T, K), 2, device=DEVICE),
    "one token": lambda: _index(1),
    "no tokens": lambda: torch.empty(0, K, dtype=torch.int64, device=DEVICE),
    "int32": lambda: _index().int(),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_any_choice(index):
    index = index()
    tensors = [_normal(index.shape[0], H), _normal(*index.shape), *_experts(biases=True)]
    got, expected = (outputs_and_gradients(_call(f, index), tensors) for f in (tigon.moe_mlp, moe_mlp_reference))
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("absent", [E, E + 7], ids=["E", "more"])
@every_layout
def test_experts_of_other_ranks_add_nothing(layout, absent):
    """Their rows are written by nobody: what is in that memory must not show, in results and in gradients."""
    index = _index()
    index[1::2, 1], index[4] = absent, absent
    tensors = [_normal(T, H), _normal(T, K), *_experts(**layout)]
    options = {name: value for name, value in layout.items() if name != "biases"}
    got, expected = (
        outputs_and_gradients(_call(f, index, **options), tensors) for f in (tigon.moe_mlp, moe_mlp_reference)
    )
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert (got[0][0][4] == 0).all()


def test_experts_in_a_lower_precision_than_the_tokens():
    """Products in the dtype of the weights, and the sum over experts rounded to that of the tokens, not before."""
    dtype = torch.float16
    tensors = [_normal(T, H), _normal(T, K), *_experts(dtype)]
    assert tigon.moe_mlp(tensors[0], *tensors[2:], _index(), tensors[1]).dtype == torch.float32
    assert_as_accurate_as_eager(_call(tigon.moe_mlp, _index()), _call(moe_mlp_reference, _index()), tensors)


# --- spreading and combining ---------------------------------------------------------------------


def test_a_route_sorts_rows_by_expert_and_keeps_the_order_of_the_tokens():
    index = torch.tensor([[2, 0], [3, 2], [0, 5]], device=DEVICE)
    found = route(index, 4)
    assert found.slot.tolist() == [[2, 0], [4, 3], [1, 5]]
    assert found.order.tolist() == [1, 4, 0, 3, 2, 5]
    assert found.ends.tolist() == [2, 2, 4, 5]
    assert found.absent.flatten().tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("h", [1, 17, 1030, 8200])
def test_any_width(h):
    """One block, several, and a row that does not fit in registers."""
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


@kernels
def test_a_gradient_that_nobody_needs_costs_nothing(monkeypatch):
    made, launcher = [], routing_module.spread_tokens
    monkeypatch.setattr(routing_module, "spread_tokens", lambda *args: made.append(args[-2:]) or launcher(*args))
    routing, kept = route(_index(), E), []
    for needs in ((True, False), (False, True)):
        rows, weights = (x.requires_grad_(n) for x, n in zip((_normal(T * K, H), _normal(T, K)), needs, strict=True))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = combine(rows, weights, routing)
        y.sum().backward()
        assert made.pop() == needs
        # The rows are kept for the gradient of the weights alone.
        assert (rows.data_ptr() in [t.data_ptr() for t in kept]) == needs[1]
        kept.clear()


@pytest.mark.parametrize("h", [1, 64, 1000, 2048, 7168, 8192, 8193, 16384])
def test_heuristic(h):
    config = Config.heuristic(h)
    assert config.sum_block <= config.block
    assert config.block >= h or h > 8192
    assert all(1 <= warps <= 16 for warps in (config.sum_warps, config.num_warps))


# --- grouped products ----------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(16, 24), (5, 7)], ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_grouped_products(dtype, sizes, transposed):
    """By torch's kernel or group by group, with groups of no rows, the first and the last among them."""
    n, m = sizes
    x, weight = _normal(9, n, dtype=dtype), _normal(4, n, m, dtype=dtype)
    ends = torch.tensor([0, 5, 9, 9], dtype=torch.int32, device=DEVICE)
    stored = weight.detach().mT.contiguous().mT.requires_grad_() if transposed else weight
    got = outputs_and_gradients(lambda x, w: grouped_linear(x, w, ends), [x, stored])
    expected = outputs_and_gradients(lambda x, w: torch.cat((x[:5] @ w[1], x[5:] @ w[2])), [x, weight])
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b)


def test_odd_sizes():
    """Rows that begin at no multiple of 16 bytes, which grouped_mm refuses."""
    x, up, down = _normal(T, 5), _normal(E, 14, 5), _normal(E, 5, 7)
    weights = _normal(T, K)
    got, expected = (f(x, up, down, _index(), weights) for f in (tigon.moe_mlp, moe_mlp_reference))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_bad_input():
    x, up, down, index, weights = _normal(T, H), *_experts(), _index(), _normal(T, K)
    bad = {
        r"down_proj must have shape \(6, 16, 24\), got \(6, 24, 16\)": (x, up, down.mT, index, weights),
        r"x must have shape \(9, 16\), got \(9, 8\)": (x[:, :8], up, down, index, weights),
        r"top_k_index must have shape \(8, 3\), got \(9, 3\)": (x[1:], up, down, index, weights),
        r"top_k_weights must have shape \(9, 3\), got \(9, 2\)": (x, up, down, index, weights[:, :2]),
        r"must be \[T, H\], 3-D, 3-D and \[T, K\], got \(1, 9, 16\)": (x[None], up, down, index, weights),
        r"up_proj and down_proj must have the same dtype": (x, up, down.double(), index, weights),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"moe_mlp: .*{message}"):
            tigon.moe_mlp(*arguments)
    with pytest.raises(ValueError, match="moe_mlp: activation must be one of 'silu', 'gelu', .* got 'tanh'"):
        tigon.moe_mlp(x, up, down, index, weights, activation="tanh")
    with pytest.raises(TypeError, match="moe_mlp: top_k_index must be an int64 or int32 tensor, got torch.float32"):
        tigon.moe_mlp(x, up, down, weights, weights)
    with pytest.raises(TypeError, match="moe_mlp: x must be a Tensor, got NoneType"):
        tigon.moe_mlp(None, up, down, index, weights)
