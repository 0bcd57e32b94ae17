"""tigon.AdamW differs from torch.optim.AdamW only in its kernel. Trained parameters and states are compared."""

import importlib.util
from unittest.mock import patch

import pytest
import torch
from torch import nn

import tigon
import tigon.ops.optim.adamw
from op_cases import DEVICE, DTYPES, INTERPRETED
from optimizer_cases import make_parameters, set_gradients, train
from tigon.ops.optim.adamw_kernels import adamw_step

SHAPES = [(1,), (5, 17), (0, 8), (3, 215)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def _count_updates(run) -> int:
    """Return how many tensors the kernel updates while `run` runs."""
    with patch.object(tigon.ops.optim.adamw, "adamw_step", wraps=adamw_step) as steps:
        run()
    return sum(len(call.args[0]) for call in steps.call_args_list)


def _assert_same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    """Compare parameters. fp32 rounds differently in another order of the same operations."""
    torch.testing.assert_close(ours, theirs, rtol=4e-6, atol=4e-6)


TRAININGS = {
    "plain": {}, "no decay": {"weight_decay": 0.0}, "lr tensor": {"lr": torch.tensor(1e-2)},
    "lr tensor on the device": {"lr": torch.tensor(1e-2, device=DEVICE)}, "maximize": {"maximize": True},
    "fused": {"fused": True}, "amsgrad": {"amsgrad": True}, "foreach": {"foreach": True},
    "not foreach": {"foreach": False}, "not fused": {"fused": False}, "differentiable": {"differentiable": True},
}  # fmt: skip
BY_TORCH = {"amsgrad", "foreach", "not foreach", "not fused", "differentiable"}


@pytest.mark.parametrize("name", TRAININGS)
def test_adamw_trains_as_torch_does(name):
    """Torch takes the steps that the kernel does not support, and those whose options choose another path."""
    options = OPTIONS | TRAININGS[name]
    ours, theirs = make_parameters(SHAPES), make_parameters(SHAPES)
    if name == "differentiable":
        ours, theirs = ([p.detach() for p in x] for x in (ours, theirs))
    optimizer, expected = tigon.AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    updates = _count_updates(lambda: train(optimizer, 4))
    train(expected, 4)
    _assert_same(ours, theirs)
    by_kernel = name not in BY_TORCH and (INTERPRETED or DEVICE == "cuda")
    assert updates == (4 * len(ours) if by_kernel else 0)
    for p, q in zip(ours, theirs, strict=True):
        state, expected_state = optimizer.state[p], expected.state[q]
        assert state.keys() == expected_state.keys()
        for key, x in expected_state.items():
            assert (state[key].dtype, state[key].device) == (x.dtype, x.device)
            torch.testing.assert_close(state[key], x, rtol=4e-6, atol=4e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adamw_is_within_one_unit_of_fused_torch(dtype):
    ours, theirs = make_parameters(SHAPES, dtype), make_parameters(SHAPES, dtype)
    optimizer, expected = tigon.AdamW(ours, fused=True, **OPTIONS), torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    train(optimizer, 1)
    train(expected, 1)
    torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-6 if dtype == torch.float32 else 0.0)


@pytest.mark.gpu
def test_graphs_run_torchs_code_and_each_stream_has_its_table():
    options = OPTIONS | {"fused": True, "capturable": True}
    ours, theirs = make_parameters(SHAPES), make_parameters(SHAPES)
    optimizer, expected = tigon.AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(optimizer, 2)
    torch.cuda.current_stream().wait_stream(stream)
    side_table = optimizer._tables[0][0]
    train(optimizer, 1, first=2)
    assert optimizer._tables[0][0].key != side_table.key
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert _count_updates(optimizer.step) == 0
    gradients = [p.grad for p in ours]
    for step in (3, 4):
        set_gradients(ours, step)
        torch._foreach_copy_(gradients, [p.grad for p in ours])
        graph.replay()
    train(expected, 5)
    _assert_same(ours, theirs)


def test_a_graph_captures_no_step_whose_number_is_on_the_host():
    optimizer = tigon.AdamW(make_parameters([(8,)]), **OPTIONS)
    with (
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(RuntimeError, match="AdamW: a CUDA graph can capture a step only with capturable=True"),
    ):
        optimizer.step()


def test_adamw_accepts_groups_and_missing_gradients():
    results = []
    for kind in (tigon.AdamW, torch.optim.AdamW):
        a, b, c, d = make_parameters([(4, 4)] * 4)
        groups = [{"params": [a, b], "lr": 1e-1}, {"params": [c, d], "weight_decay": 0.0, "betas": (0.5, 0.6)}]
        optimizer = kind(groups, **OPTIONS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(3):
            set_gradients([a, c, d], step)
            d.grad = d.grad if step else None
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert b not in optimizer.state
        assert [optimizer.state[x]["step"].item() for x in (a, c, d)] == [3, 3, 2]
        results.append([a, b, c, d])
    _assert_same(*results)


@pytest.mark.parametrize("fused", [None, True])
def test_state_dicts_are_exchanged_with_torch(fused):
    kinds = (tigon.AdamW, torch.optim.AdamW)
    results = []
    for first in kinds:
        for second in kinds:
            parameters = make_parameters(SHAPES)
            before = first(parameters, **OPTIONS, fused=fused)
            train(before, 2)
            after = second(parameters, lr=9.0)
            after.load_state_dict(before.state_dict())
            train(after, 2, first=2)
            results.append(parameters)
    for other in results[1:]:
        _assert_same(results[0], other)


def test_hooks_run_once_and_closures_return_the_loss():
    # From here on the step of torch's class calls hooks too.
    torch.optim.AdamW(make_parameters(SHAPES))
    spec = importlib.util.spec_from_file_location("imported_late", tigon.ops.optim.adamw.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (p,) = parameters = make_parameters([(8,)])
    optimizer, calls = module.AdamW(parameters, **OPTIONS), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert calls == ["before", "after"]


def test_a_step_increments_the_versions_of_parameters():
    (p,) = parameters = make_parameters([(8,)])
    optimizer = tigon.AdamW(parameters)
    p.grad = torch.ones_like(p)
    y = p.square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


UNSUPPORTED = {
    "transposed": lambda: nn.Parameter(torch.randn(4, 6, device=DEVICE).T),
    "fp64": lambda: nn.Parameter(torch.randn(4, 6, device=DEVICE, dtype=torch.float64)),
    "complex": lambda: nn.Parameter(torch.randn(4, 6, device=DEVICE, dtype=torch.complex64)),
    "gradient of other strides": lambda: nn.Parameter(torch.randn(4, 6, device=DEVICE)),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_torch_updates_tensors_that_the_kernel_does_not_support(name):
    """The kernel updates the other tensors of the group."""
    torch.manual_seed(0)
    odd, plain = UNSUPPORTED[name](), nn.Parameter(torch.randn(8, device=DEVICE))
    theirs = [nn.Parameter(p.detach().clone()) for p in (odd, plain)]
    optimizer, expected = tigon.AdamW([odd, plain], **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for p, q in zip((odd, plain), theirs, strict=True):
        p.grad = torch.randn_like(p)
        if name.startswith("gradient") and p is odd:
            p.grad = torch.randn(6, 4, device=DEVICE).T
        q.grad = p.grad.clone()
    updates = _count_updates(optimizer.step)
    expected.step()
    _assert_same([odd, plain], theirs)
    assert updates == (1 if INTERPRETED or DEVICE == "cuda" else 0)


def test_adamw_supports_a_scaler_that_leaves_scaling_to_the_optimizer():
    """With fused=True torch's GradScaler passes the scale and the overflow flag, and torch's kernel uses them."""
    (p,) = parameters = make_parameters([(8,)])
    optimizer = tigon.AdamW(parameters, **OPTIONS, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    before = p.detach().clone()
    scaler.scale((p * float("inf")).sum()).backward()
    assert _count_updates(lambda: scaler.step(optimizer)) == 0
    assert torch.equal(p, before)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    (q,) = theirs = [nn.Parameter(before)]
    q.grad = torch.ones_like(q)
    torch.optim.AdamW(theirs, **OPTIONS).step()
    _assert_same(parameters, theirs)


def test_a_state_of_another_shape_is_not_read_out_of_bounds():
    (p,) = parameters = make_parameters([(8, 4)])
    optimizer = tigon.AdamW(parameters)
    train(optimizer, 1)
    optimizer.state[p]["exp_avg"] = torch.zeros(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="size"):
        train(optimizer, 1)


@pytest.mark.no_interpreter("The compiler does not see the kernel.")
def test_a_compiled_step_is_taken_once():
    parameters, theirs = (make_parameters([(8, 4)]) for _ in range(2))
    optimizer, expected = tigon.AdamW(parameters, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for i in range(3):
        set_gradients(parameters, i)
        theirs[0].grad = parameters[0].grad
        step()
        expected.step()
    _assert_same(parameters, theirs)


def _adamw(dtype: torch.dtype = torch.bfloat16, **options):
    return tigon.AdamW([nn.Parameter(torch.zeros(3, dtype=dtype))], **options)


REFUSALS = {
    "AdamW: state must be one of None, 'fp32', 'bf16', '8bit', got '4bit'": lambda: _adamw(state="4bit"),
    "AdamW: master must be one of None, 'fp32', 'bf16+8', got 'bf16'": lambda: _adamw(master="bf16"),
    "AdamW: stochastic_rounding must be a bool, got 1": lambda: _adamw(stochastic_rounding=1),
    "AdamW: max_grad_norm must be positive and finite, got 0": lambda: _adamw(max_grad_norm=0),
    "AdamW: master='fp32' and stochastic_rounding=True exclude each other": lambda: _adamw(
        master="fp32", stochastic_rounding=True
    ),
    "AdamW: state='8bit' and amsgrad=True exclude each other": lambda: _adamw(state="8bit", amsgrad=True),
    "AdamW: max_grad_norm=1.0 and foreach=True exclude each other": lambda: _adamw(max_grad_norm=1, foreach=True),
    "AdamW: master='fp32' and fused=False exclude each other": lambda: _adamw(master="fp32", fused=False),
    "AdamW: state='fp32' and differentiable=True exclude each other": lambda: _adamw(state="fp32", differentiable=True),
    "AdamW: state='8bit' needs parameters in float32, bfloat16 or float16, got torch.float64 of shape (3,)": lambda: (
        _adamw(torch.float64, state="8bit")
    ),
    "AdamW: master='bf16+8' needs parameters in bfloat16 or float32, got torch.float16": lambda: _adamw(
        torch.float16, master="bf16+8"
    ),
    "AdamW: max_grad_norm must be an option of the optimizer, got a group with it": lambda: tigon.AdamW(
        [{"params": [nn.Parameter(torch.zeros(3))], "max_grad_norm": 1.0}]
    ),
}


@pytest.mark.parametrize(("message", "call"), REFUSALS.items(), ids=range(len(REFUSALS)))
def test_a_refusal_names_the_options(message, call):
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    assert str(refusal.value) == message


def test_a_refused_group_is_not_added():
    optimizer = _adamw(state="8bit")
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "amsgrad": True})
    assert len(optimizer.param_groups) == 1


def check_shards(rank: int) -> None:
    """With FSDP2 on CPUs torch takes the step. In the interpreter the kernel updates the shards of each rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    results = []
    for kind in (tigon.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        # The last weight has one row, so rank 1 has no part of it.
        model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))
        fully_shard(model)
        optimizer = kind(model.parameters(), **OPTIONS)
        updates = 0
        for _ in range(2):
            model(torch.randn(4, 8)).square().sum().backward()
            updates += _count_updates(optimizer.step)
            optimizer.zero_grad()
        assert updates == (8 if INTERPRETED and kind is tigon.AdamW else 0)
        results.append([p.to_local().clone() for p in model.parameters()])
        assert all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())
    assert any(p.numel() == 0 for p in results[0]) == (rank == 1)
    _assert_same(*results)
