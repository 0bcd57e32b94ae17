"""The convolution against F.conv1d, its layouts, and packed samples, which equal separate ones."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from op_cases import DEVICE, assert_as_accurate_as_eager, assert_refused, one_in, outputs_and_gradients
from tigon.ops.mixers.causal_conv1d import causal_conv1d_reference
from tigon.ops.mixers.causal_conv1d_config import ConvConfig, ConvProblem, WalkConfig, split_time
from tigon.ops.mixers.reach import INVALID, reach_reference
from tigon.runtime.device import Device
from tigon.runtime.tuning import tuned

# One token, fewer tokens than taps, and sizes that fill no tile.
SHAPES = [(1, 1, 12), (2, 3, 40), (3, 33, 17), (1, 70, 264)]
# The kernels hold bf16 in pairs, so the interpreter runs it too.
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# The samples have fewer tokens than taps, none, one, and more than a program computes at a time.
BOUNDS = [0, 2, 3, 3, 12, 40, 70]


def stock(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu") -> Tensor:
    """Compute what transformers computes without other packages, for x of shape [B, C, T]."""
    taps = weight.shape[-1]
    y = F.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=len(weight))[..., : x.shape[-1]]
    return y if activation is None else F.silu(y)


def _inputs(
    shape: tuple[int, ...], taps: int, dtype: torch.dtype = torch.float32, layout: str = "last"
) -> list[Tensor]:
    """Return x, weight and bias. The layouts "last" and "wide" are [B, T, C], "first" and "dense time" are [B, C, T].

    "wide" is a view of a wider tensor, and "first" a view of a tensor [B, T, C].
    """
    generator = torch.Generator().manual_seed(sum(shape) + taps)
    draw = lambda *sizes: torch.randn(sizes, generator=generator).to(DEVICE, dtype)
    b, t, c = shape
    views = {
        "last": lambda: draw(b, t, c), "wide": lambda: draw(b, t, c + 8)[..., 3 : c + 3],
        "first": lambda: draw(b, t, c).transpose(1, 2), "dense time": lambda: draw(b, c, t),
    }  # fmt: skip
    return [y.requires_grad_() for y in (views[layout](), draw(c, taps) * taps**-0.5, draw(c))]


def _samples(device: str = DEVICE) -> dict[str, dict[str, Tensor]]:
    """Return the samples of `BOUNDS` in each form that the op takes."""
    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(BOUNDS)])[None].to(device)
    forms = {
        f"cu_seqlens {dtype}": {"cu_seqlens": torch.tensor(BOUNDS, dtype=dtype, device=device)}
        for dtype in (torch.int32, torch.int64)
    }
    return {**forms, "position_ids": {"position_ids": positions}, "int32": {"position_ids": positions.int()}}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@one_in(
    12, shape=SHAPES, dtype=FLOATS, taps=[2, 4, 8, 3], layout=["last", "wide", "first", "dense time"],
    activation=["silu", None],
)  # fmt: skip
def test_accuracy(shape, dtype, taps, layout, activation, bias):
    is_last = layout in ("last", "wide")
    tensors = _inputs(shape, taps, dtype, layout)[: 2 + bias]

    def eager(x: Tensor, *others: Tensor) -> Tensor:
        y = stock(x.transpose(1, 2) if is_last else x, *others, activation=activation)
        return y.transpose(1, 2) if is_last else y

    assert_as_accurate_as_eager(
        lambda *t: tigon.causal_conv1d(*t, activation=activation, channels_last=is_last), eager, tensors
    )


@pytest.mark.no_interpreter("It is about the reference.")
def test_the_reference_is_stock_bit_for_bit_in_fp32():
    x, weight, bias = _inputs((2, 33, 64), 4, layout="first")
    assert torch.equal(causal_conv1d_reference(x, weight, bias, channels_last=False), stock(x, weight, bias))


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["last", "wide", "first", "dense time"])
def test_the_result_and_its_gradient_have_the_memory_order_of_the_input(layout):
    x, weight, _ = _inputs((2, 5, 16), 4, layout=layout)
    y = tigon.causal_conv1d(x, weight, channels_last=layout in ("last", "wide"))
    (dx,) = torch.autograd.grad(y.sum(), x)
    order = lambda t: sorted(range(3), key=t.stride)
    assert order(y) == order(dx) == order(x)
    assert y.untyped_storage().nbytes() == y.nbytes


@pytest.mark.kernels
def test_the_kernels_copy_no_input(monkeypatch):
    """`causal_conv1d` reads views of a wider tensor and transposed ones where they are."""
    import tigon.ops.mixers.causal_conv1d as module

    addresses, forward = [], module.conv_forward
    monkeypatch.setattr(module, "conv_forward", lambda x, *rest: addresses.append(x.data_ptr()) or forward(x, *rest))
    for layout in ("wide", "first", "dense time"):
        x, weight, _ = _inputs((2, 5, 16), 4, layout=layout)
        tigon.causal_conv1d(x, weight, channels_last=layout == "wide")
        assert addresses[-1] == x.data_ptr()


def test_weights_of_a_module_and_the_other_name_of_the_activation():
    x, weight, bias = _inputs((1, 9, 16), 4)
    expected = tigon.causal_conv1d(x, weight, bias)
    assert torch.equal(tigon.causal_conv1d(x, weight[:, None], bias, "swish"), expected)
    (gradient,) = torch.autograd.grad(tigon.causal_conv1d(x, weight[:, None]).sum(), weight)
    assert gradient.shape == weight.shape


@pytest.mark.kernels
@pytest.mark.parametrize("trained", range(3), ids=["x", "weight", "bias"])
def test_only_the_gradients_that_are_needed_are_computed(trained, monkeypatch):
    import tigon.ops.mixers.causal_conv1d as module

    results, backward = [], module.conv_backward
    monkeypatch.setattr(module, "conv_backward", lambda *args: results.append(backward(*args)) or results[-1])
    tensors = _inputs((2, 9, 16), 4)
    inputs = [t if i == trained else t.detach() for i, t in enumerate(tensors)]
    outputs_and_gradients(tigon.causal_conv1d, inputs)
    assert [t is not None for t in results[0]] == [i == trained for i in range(3)]


@one_in(4, form=list(_samples("cpu")), taps=[2, 4, 8], layout=["last", "dense time"])
def test_packed_samples_equal_separate_ones(form, taps, layout):
    """The results and dx are equal bit for bit in the kernels. dw is a sum over other parts of the tokens."""
    tensors, is_last = _inputs((1, BOUNDS[-1], 40), taps, layout=layout), layout == "last"
    axis = 1 if is_last else 2

    def separate(x: Tensor, *others: Tensor) -> Tensor:
        parts = x.split([end - start for start, end in itertools.pairwise(BOUNDS)], axis)
        return torch.cat([tigon.causal_conv1d(part, *others, channels_last=is_last) for part in parts], axis)

    run = lambda *t: tigon.causal_conv1d(*t, channels_last=is_last, **_samples()[form])
    (y, (dx, *sums)), (expected, (expected_dx, *expected_sums)) = (
        outputs_and_gradients(f, tensors) for f in (run, separate)
    )
    runs_kernels = tigon.runtime.device.runs_kernels(tensors[0])
    for a, b in ((y[0], expected[0]), (dx, expected_dx)):
        assert torch.equal(a, b) if runs_kernels else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", _samples("cpu"))
def test_nan_in_a_sample_reaches_no_other_sample(form):
    x, weight, bias = _inputs((1, BOUNDS[-1], 40), 4)
    x.data[:, 3:12] = torch.nan
    y = tigon.causal_conv1d(x, weight, bias, **_samples()[form])
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    is_nan = torch.zeros(BOUNDS[-1], dtype=torch.bool, device=DEVICE)
    is_nan[3:12] = True
    for result in (y, dx):
        assert torch.equal(result[0].isnan(), is_nan[:, None].expand(-1, 40))


@pytest.mark.parametrize(
    "positions", [[[0, 1, 2, 5, 6, 0, 0, 1]], [[7, 8, 9, 10, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 4, 5]]]
)
def test_a_position_that_does_not_continue_its_predecessor_begins_a_sample(positions):
    batch = len(positions)
    x, weight, bias = _inputs((2, 8, 16), 3)
    x = x[:batch]
    y = tigon.causal_conv1d(x, weight, bias, position_ids=torch.tensor(positions, device=DEVICE))
    starts = [[t for t in range(8) if t == 0 or row[t] == 0 or row[t] != row[t - 1] + 1] + [8] for row in positions]
    for i, bounds in enumerate(starts):
        cu_seqlens = torch.tensor(bounds, device=DEVICE)
        assert torch.equal(y[i : i + 1], tigon.causal_conv1d(x[i : i + 1], weight, bias, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bounds", [[1, 8], [0, 7], [0, 5, 3, 8], [0, 3, 9, 8], [0, -3, 8], [0, 2**31 - 1, 8]], ids=str)
def test_results_of_malformed_bounds_are_nan(bounds, activation):
    tensors = _inputs((1, 8, 16), 4)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    run = lambda *t: tigon.causal_conv1d(*t, activation, cu_seqlens)
    outputs, gradients = outputs_and_gradients(run, tensors)
    assert all(result.isnan().all() for result in (outputs[0], *gradients))


@pytest.mark.kernels
@pytest.mark.parametrize("length", [1, 5, 1100])
def test_the_kernel_of_the_reach_finds_each_sample(length):
    from tigon.ops.mixers.reach import sample_reach

    generator = torch.Generator().manual_seed(length)
    inner = torch.randint(0, length + 1, (length // 3,), generator=generator).sort().values
    bounds = torch.cat([torch.tensor([0]), inner, torch.tensor([length])])
    for taps in (2, 8):
        expected = reach_reference(taps, length, bounds, None)
        assert expected.max() < INVALID
        assert torch.equal(sample_reach(bounds.to(DEVICE), True, length, taps).cpu().long(), expected)


@pytest.mark.kernels
@pytest.mark.parametrize("walk", [WalkConfig(16, 1, 2, 1), WalkConfig(64, 2, 8, 10**6)], ids=["long", "short"])
def test_launch_parameters_do_not_change_the_results(walk):
    """With few programs a run has all tokens, and with many programs it is as short as possible."""
    tensors = _inputs((2, 70, 40), 4)
    expected = outputs_and_gradients(tigon.causal_conv1d, tensors)
    with tuned(ConvConfig, forward=walk, backward=walk):
        actual = outputs_and_gradients(tigon.causal_conv1d, tensors)
    torch.testing.assert_close([*actual[0], *actual[1]], [*expected[0], *expected[1]], rtol=1e-5, atol=1e-5)


@pytest.mark.no_interpreter("It launches no kernel.")
@pytest.mark.parametrize("device", [Device(132, 32, 232448), Device(304, 64, 65536)], ids=["nvidia", "amd"])
def test_runs_cover_the_tokens_and_fill_the_device(device):
    for channels, taps, length in itertools.product((1, 100, 8192), (2, 4, 8), (0, 1, 4095, 8192, 10**6)):
        for walk in vars(ConvConfig.heuristic(ConvProblem(channels, taps, False), device)).values():
            blocks = -(-channels // walk.block_c)
            runs, run = split_time(length, walk.rows, blocks, walk.programs)
            assert run % walk.rows == 0
            assert runs * run >= length > (runs - 1) * run or length == runs == 0
            if channels == 8192 and length == 8192:
                assert 0.8 * walk.programs <= runs * blocks <= walk.programs


def test_refusals():
    x, weight, bias = (t.detach() for t in _inputs((1, 5, 8), 4))
    bounds, positions = torch.tensor([0, 5], device=DEVICE), torch.arange(5, device=DEVICE)[None]
    changes = {
        r"x must have shape \[B, T, C\], got \(5, 8\)": {"x": x[0]},
        r"x must have at least one channel, got \[B, T, C\] = \(1, 5, 0\)": {"x": x[..., :0]},
        r"weight must have shape \(8, W\) or \(8, 1, W\), got \(7, 4\)": {"weight": weight[:7]},
        "weight must have 2 to 8 taps W, got 1": {"weight": weight[:, :1]},
        r"bias must have shape \(8,\), got \(7,\)": {"bias": bias[:7]},
        "activation must be one of 'silu', 'swish', None, got 'gelu'": {"activation": "gelu"},
        "channels_last must be a bool": {"channels_last": 1},
        "cu_seqlens must be an int64 or int32 tensor": {"cu_seqlens": bounds.float()},
        r"cu_seqlens must have shape \(N \+ 1,\), got \(1,\)": {"cu_seqlens": bounds[:1]},
        r"cu_seqlens need a batch of 1, got x \(2, 5, 8\)": {"x": x.expand(2, 5, 8), "cu_seqlens": bounds},
        r"position_ids must have shape \(1 or 1, 5\), got \(1, 4\)": {"position_ids": positions[:, :4]},
        "cu_seqlens and position_ids must not be given together": {"cu_seqlens": bounds, "position_ids": positions},
    }
    assert_refused(tigon.causal_conv1d, {"x": x, "weight": weight, "bias": bias}, changes)
