import pytest
import torch
import torch.nn.functional as F

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, outputs_and_gradients
from tigon.ops.mlps.relu2 import ReLU2Config, ReLU2Problem, relu2_reference
from tigon.runtime.device import EMULATED


def _input(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(DEVICE, dtype).requires_grad_()


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (5, 17), (2, 3, 64), (3, 1025), (2, 4096)], ids=str)
def test_is_exactly_eager_code(shape, dtype):
    """One rounding each way, as eager code has it: the same bits."""
    x = _input(*shape, dtype=dtype)
    assert_as_accurate_as_eager(tigon.relu2, relu2_reference, [x])
    got, expected = outputs_and_gradients(tigon.relu2, [x]), outputs_and_gradients(relu2_reference, [x])
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        assert torch.equal(a, b)


def test_corners_are_as_in_eager_code():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([nan, -inf, inf, -0.0, 0.0, -1.0, 2.0, 1e30, 1e-30, -1.0, -1.0, 0.0], device=DEVICE)
    dy = torch.tensor([1.0, 1.0, 1.0, inf, 1.0, inf, inf, 1.0, 1.0, nan, 1.0, nan], device=DEVICE)
    results = []
    for function in (tigon.relu2, lambda x: F.relu(x).square()):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((y, torch.autograd.grad(y, leaf, dy)[0]))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0.0, equal_nan=True)
    assert results[0][0].isnan().tolist() == x.isnan().tolist()


VIEWS = {
    "transposed": lambda x: x.mT,
    "turned": lambda x: x.permute(2, 0, 1),
    "gaps between rows": lambda x: x[..., 5:37],
    "gaps between batches": lambda x: x[::2],
    "turned, with gaps": lambda x: x[:, :3].permute(1, 2, 0),
    "gaps between elements": lambda x: x[..., ::3],
    "expanded": lambda x: x[:, :1].expand(4, 5, 48),
}


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_strides(view):
    base = _input(4, 5, 48)
    got = outputs_and_gradients(lambda x: tigon.relu2(view(x)), [base])
    expected = outputs_and_gradients(lambda x: relu2_reference(view(x)), [base])
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.kernels
@pytest.mark.parametrize("view", [lambda x: x, VIEWS["transposed"], VIEWS["turned"], VIEWS["gaps between rows"]])
def test_dense_input_is_not_copied(view, monkeypatch):
    import tigon.ops.mlps.relu2 as module

    read, launch = [], module.launch_blocks
    monkeypatch.setattr(
        module, "launch_blocks", lambda *args, **options: read.append(args[2]) or launch(*args, **options)
    )
    x = view(_input(4, 5, 48)).detach().requires_grad_()
    y = tigon.relu2(x)
    dy = torch.ones_like(y)
    y.backward(dy)
    assert [t.data_ptr() for t in read[0]] == [x.data_ptr(), y.data_ptr()]
    assert [t.data_ptr() for t in read[1][:2]] == [dy.data_ptr(), x.data_ptr()]


@pytest.mark.kernels
def test_a_dimension_of_one_does_not_make_rows_of_one(monkeypatch):
    """A program takes a block of a row: rows of one feature would be as many programs."""
    import tigon.ops.mlps.relu2 as module

    widths, launch = [], module.launch_blocks
    monkeypatch.setattr(
        module, "launch_blocks", lambda *args, **options: widths.append(args[1]) or launch(*args, **options)
    )
    x = _input(6, 48, 1).transpose(0, 1)
    assert torch.equal(tigon.relu2(x), relu2_reference(x))
    assert widths == [48]


@pytest.mark.kernels
def test_keeps_only_the_input():
    x, kept = _input(4, 64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tigon.relu2(x)
    assert {t.data_ptr() for t in kept} == {x.data_ptr()}


def test_the_result_may_be_changed_in_place():
    x = _input(4, 64)
    y = tigon.relu2(x)
    y.mul_(2)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, 4 * F.relu(x.detach()))


def test_scalars_and_no_features():
    assert tigon.relu2(torch.tensor(3.0, device=DEVICE)).item() == 9.0
    assert tigon.relu2(torch.randn(3, 0, device=DEVICE)).shape == (3, 0)


@pytest.mark.no_interpreter("It launches no kernel.")
@pytest.mark.parametrize("itemsize", [2, 4])
def test_heuristic(itemsize):
    config = ReLU2Config.heuristic(ReLU2Problem(itemsize), EMULATED)
    assert config.block * itemsize == 2 * 16 * 32 * config.num_warps  # two accesses of 16 bytes a thread


def test_module_has_the_parameters_of_hugging_face():
    nemotron = pytest.importorskip("transformers.models.nemotron.modeling_nemotron")
    config = nemotron.NemotronConfig(hidden_size=8, intermediate_size=24, mlp_bias=True)
    theirs, ours = nemotron.NemotronMLP(config).to(DEVICE), tigon.ReLU2MLP(8, 24, bias=True).to(DEVICE)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 8, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert set(tigon.ReLU2MLP(8, 24).state_dict()) == {"up_proj.weight", "down_proj.weight"}


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_bad_input():
    with pytest.raises(TypeError, match="relu2: x must be a float32, bfloat16 or float16 tensor, got torch.int64"):
        tigon.relu2(torch.ones(3, dtype=torch.int64, device=DEVICE))
    with pytest.raises(TypeError, match="relu2: x must be a Tensor, got float"):
        tigon.relu2(1.0)
    with pytest.raises(TypeError, match="relu2: x must be a Tensor, got NoneType"):
        tigon.relu2(None)
