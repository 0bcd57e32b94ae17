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
def test_relu2_has_the_same_bits_as_eager_code(shape, dtype):
    """Both round once in the forward and once in the backward."""
    x = _input(*shape, dtype=dtype)
    assert_as_accurate_as_eager(tigon.relu2, relu2_reference, [x])
    results, expected = outputs_and_gradients(tigon.relu2, [x]), outputs_and_gradients(relu2_reference, [x])
    for a, b in zip([*results[0], *results[1]], [*expected[0], *expected[1]], strict=True):
        assert torch.equal(a, b)


def test_relu2_agrees_with_eager_code_for_nan_infinity_and_zero():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([nan, -inf, inf, -0.0, 0.0, -1.0, 2.0, 1e30, 1e-30, -1.0, -1.0, 0.0], device=DEVICE)
    dy = torch.tensor([1.0, 1.0, 1.0, inf, 1.0, inf, inf, 1.0, 1.0, nan, 1.0, nan], device=DEVICE)
    results = []
    for function in (tigon.relu2, lambda x: F.relu(x).square()):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((y, torch.autograd.grad(y, leaf, dy)[0]))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=0.0, equal_nan=True)
    assert results[0][0].isnan().tolist() == x.isnan().tolist()


VIEWS = {
    "transposed": lambda x: x.mT,
    "permuted": lambda x: x.permute(2, 0, 1),
    "gaps between rows": lambda x: x[..., 5:37],
    "gaps between batches": lambda x: x[::2],
    "permuted, with gaps": lambda x: x[:, :3].permute(1, 2, 0),
    "gaps between elements": lambda x: x[..., ::3],
    "expanded": lambda x: x[:, :1].expand(4, 5, 48),
}


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_relu2_accepts_strided_input(view):
    base = _input(4, 5, 48)
    results = outputs_and_gradients(lambda x: tigon.relu2(view(x)), [base])
    expected = outputs_and_gradients(lambda x: relu2_reference(view(x)), [base])
    for a, b in zip([*results[0], *results[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.kernels
@pytest.mark.parametrize("view", [lambda x: x, VIEWS["transposed"], VIEWS["permuted"], VIEWS["gaps between rows"]])
def test_relu2_does_not_copy_dense_input(view, monkeypatch):
    import tigon.ops.mlps.relu2 as module

    launches, launch = [], module.launch_blocks
    monkeypatch.setattr(
        module, "launch_blocks", lambda *args, **options: launches.append(args[2]) or launch(*args, **options)
    )
    x = view(_input(4, 5, 48)).detach().requires_grad_()
    y = tigon.relu2(x)
    dy = torch.ones_like(y)
    y.backward(dy)
    assert [t.data_ptr() for t in launches[0]] == [x.data_ptr(), y.data_ptr()]
    assert [t.data_ptr() for t in launches[1][:2]] == [dy.data_ptr(), x.data_ptr()]


@pytest.mark.kernels
def test_relu2_ignores_dimensions_of_size_one_when_it_forms_rows(monkeypatch):
    """A program computes a block of a row, so each row of one feature would need its own program."""
    import tigon.ops.mlps.relu2 as module

    widths, launch = [], module.launch_blocks
    monkeypatch.setattr(
        module, "launch_blocks", lambda *args, **options: widths.append(args[1]) or launch(*args, **options)
    )
    x = _input(6, 48, 1).transpose(0, 1)
    assert torch.equal(tigon.relu2(x), relu2_reference(x))
    assert widths == [48]


@pytest.mark.kernels
def test_relu2_saves_only_its_input():
    x, saved_tensors = _input(4, 64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_tensors.append(t) or t, lambda t: t):
        tigon.relu2(x)
    assert {t.data_ptr() for t in saved_tensors} == {x.data_ptr()}


def test_the_result_of_relu2_may_be_written_in_place():
    x = _input(4, 64)
    y = tigon.relu2(x)
    y.mul_(2)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, 4 * F.relu(x.detach()))


def test_relu2_accepts_scalars_and_rows_without_features():
    assert tigon.relu2(torch.tensor(3.0, device=DEVICE)).item() == 9.0
    assert tigon.relu2(torch.randn(3, 0, device=DEVICE)).shape == (3, 0)


@pytest.mark.no_interpreter("It launches no kernel.")
@pytest.mark.parametrize("itemsize", [2, 4])
def test_relu2_heuristic_gives_each_thread_two_accesses_of_16_bytes(itemsize):
    config = ReLU2Config.heuristic(ReLU2Problem(itemsize), EMULATED)
    assert config.block * itemsize == 2 * 16 * 32 * config.num_warps


def test_relu2_module_has_the_parameters_of_transformers():
    nemotron = pytest.importorskip("transformers.models.nemotron.modeling_nemotron")
    config = nemotron.NemotronConfig(hidden_size=8, intermediate_size=24, mlp_bias=True)
    theirs, ours = nemotron.NemotronMLP(config).to(DEVICE), tigon.ReLU2MLP(8, 24, bias=True).to(DEVICE)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 8, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert set(tigon.ReLU2MLP(8, 24).state_dict()) == {"up_proj.weight", "down_proj.weight"}


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_relu2_refuses_bad_input():
    with pytest.raises(TypeError, match="relu2: x must be a float32, bfloat16 or float16 tensor, got torch.int64"):
        tigon.relu2(torch.ones(3, dtype=torch.int64, device=DEVICE))
    with pytest.raises(TypeError, match="relu2: x must be a Tensor, got float"):
        tigon.relu2(1.0)
    with pytest.raises(TypeError, match="relu2: x must be a Tensor, got NoneType"):
        tigon.relu2(None)
