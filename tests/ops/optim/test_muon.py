"""tigon.Muon is compared with torch.optim.Muon: trained parameters, states, state dicts, shards of two ranks."""

import copy
import itertools
import math
import pickle
from unittest.mock import patch

import pytest
import torch
from torch import nn

import optimizer_cases
import tigon
from op_cases import DEVICE, INTERPRETED
from optimizer_cases import set_gradients, train
from tigon.ops.optim import muon as muon_module
from tigon.ops.optim import tensor_table
from tigon.ops.optim.symmetric_product import SymmetricConfig
from tigon.runtime.tuning import tuned

RUNS_KERNELS = INTERPRETED or DEVICE == "cuda"
# Wide, tall, no multiples of 16, one row, one column; three of them have one shape.
SHAPES = [(16, 40), (40, 16), (17, 9), (16, 40), (1, 6), (6, 1), (16, 40)]
# The older torch of the lowest versions has no Muon.
TorchMuon = getattr(torch.optim, "Muon", None)
needs_torch_muon = pytest.mark.skipif(TorchMuon is None, reason="torch.optim.Muon exists since torch 2.9")

if DEVICE == "cpu":

    @pytest.fixture(autouse=True)
    def small_blocks():
        """Use small blocks, because the interpreter computes one after the other."""
        with (
            tuned(SymmetricConfig, block_m=32, block_n=32, block_k=32),
            patch.object(tensor_table, "BLOCK_BYTES", 1024),
        ):
            yield


def make_parameters(dtype: torch.dtype = torch.float32, shapes=SHAPES) -> list[nn.Parameter]:
    return optimizer_cases.make_parameters(shapes, dtype)


def assert_near(ours: list[nn.Parameter], theirs: list[nn.Parameter], lr: float) -> None:
    """Compare parameters. Both sides have errors of the orthogonalisation, of a few percent of an update."""
    for p, q in zip(ours, theirs, strict=True):
        difference = (p - q).detach().double().norm() / math.sqrt(p.numel())
        # The root mean square of the elements of an orthogonal matrix is 1 / sqrt(its longer side).
        update = lr * math.sqrt(max(1, p.shape[-2] / p.shape[-1])) / math.sqrt(max(p.shape[-2:]))
        rounding = torch.finfo(p.dtype).eps * p.detach().double().square().mean().sqrt()
        assert difference < 0.1 * update + rounding, (p.shape, difference / update)


TRAININGS = {
    "plain": {}, "no decay": {"weight_decay": 0.0}, "original": {"adjust_lr_fn": "original"},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "lr": 1e-3}, "small momentum": {"momentum": 0.3},
    "no momentum": {"momentum": 0.0}, "two steps": {"ns_steps": 2},
    "other coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7}, "lr tensor": {"lr": torch.tensor(2e-2)},
    "lr tensor on the device": {"lr": torch.tensor([2e-2], device=DEVICE)},
    "fp16 is too small": {"ns_coefficients": (33.0, -4.0, 2.0), "ns_steps": 1},
}  # fmt: skip
CASES = [*itertools.product(TRAININGS, [torch.float32]), ("plain", torch.bfloat16), ("no momentum", torch.bfloat16)]


# The interpreter needs seconds for each training.
@needs_torch_muon
@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(*case, marks=pytest.mark.thorough if INTERPRETED and case != CASES[0] else ()) for case in CASES],
)
def test_muon_trains_as_torch_does(name, dtype):
    options = {"lr": 2e-2} | TRAININGS[name]
    ours, theirs = make_parameters(dtype), make_parameters(dtype)
    optimizer, expected = tigon.Muon(ours, **options), TorchMuon(theirs, **options)
    train(optimizer, 2)
    train(expected, 2)
    scale = 0.2 * math.sqrt(40) if "match" in name else 33.0 / 5 if "fp16" in name else 1.0
    if "other" in name or "two" in name:
        scale = 1.3
    assert_near(ours, theirs, float(options["lr"]) * scale * 2)
    for p, q in zip(ours, theirs, strict=True):
        momentum, other = optimizer.state[p]["momentum_buffer"], expected.state[q]["momentum_buffer"]
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(momentum, other, rtol=4 * eps, atol=4 * eps)
        assert optimizer.state[p].keys() == expected.state[q].keys()


def test_momentum_without_nesterov_stays_in_the_state():
    """torch divides the momentum in bf16 by its norm here, because both are one tensor."""
    (p,) = parameters = make_parameters(torch.bfloat16, [(8, 12)])
    optimizer = tigon.Muon(parameters, nesterov=False, momentum=0.5, lr=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert bool((optimizer.state[p]["momentum_buffer"] == 0.5).all())


@needs_torch_muon
def test_stacked_matrices_are_trained_like_separate_ones():
    stacked = make_parameters(shapes=[(3, 6, 10)])
    separate = [nn.Parameter(x.clone()) for x in stacked[0].detach()]
    optimizer, expected = tigon.Muon(stacked), TorchMuon(separate)
    for step in range(2):
        set_gradients(stacked, step)
        for p, g in zip(separate, stacked[0].grad, strict=True):
            p.grad = g.clone()
        optimizer.step()
        expected.step()
    assert_near(list(stacked[0].detach()), separate, 2e-3)
    assert not torch.equal(stacked[0][0], make_parameters(shapes=[(3, 6, 10)])[0][0])


def test_batches_have_a_limit(monkeypatch):
    """The parameters do not depend on how matrices are divided into batches."""
    ours, theirs = (make_parameters(shapes=[(8, 12), (6, 1), (8, 12), (8, 12)]) for _ in range(2))
    optimizer = tigon.Muon(ours)
    train(optimizer, 1)
    assert len(optimizer._tables[0]) == 2
    monkeypatch.setattr(muon_module, "BATCH_BYTES", 2 * 8 * 12 * 2)
    other = tigon.Muon(theirs)
    train(other, 1)
    assert len(other._tables[0]) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=3e-6)


def test_gradients_of_zero_only_decay():
    parameters = make_parameters(torch.bfloat16, [(17, 9), (1, 6)])
    before = [p.detach().clone() for p in parameters]
    optimizer = tigon.Muon(parameters, lr=0.5, weight_decay=0.5)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, x in zip(parameters, before, strict=True):
        torch.testing.assert_close(p.detach(), x * 0.75)


def test_gradients_that_are_missing_or_empty_are_left_out():
    a, b, empty = make_parameters(shapes=[(4, 6), (4, 6), (0, 5)])
    before = b.detach().clone()
    optimizer = tigon.Muon([a, b, empty])
    a.grad, empty.grad = torch.ones_like(a), torch.zeros_like(empty)
    optimizer.step()
    assert torch.equal(b, before)
    assert b not in optimizer.state


UNSUPPORTED = {
    "transposed": lambda: nn.Parameter(torch.randn(12, 8, device=DEVICE).T),
    "fp64": lambda: nn.Parameter(torch.randn(8, 12, device=DEVICE, dtype=torch.float64)),
}


@needs_torch_muon
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_tensors_are_updated_by_the_reference(name):
    torch.manual_seed(0)
    odd, plain = UNSUPPORTED[name](), nn.Parameter(torch.randn(8, 12, device=DEVICE))
    theirs = [nn.Parameter(p.detach().clone()) for p in (odd, plain)]
    optimizer, expected = tigon.Muon([odd, plain]), TorchMuon(theirs)
    for p, q in zip((odd, plain), theirs, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    optimizer.step()
    expected.step()
    assert_near([odd, plain], theirs, 1e-3)
    assert sum(x is not None for x in optimizer._tables[0].values()) == (1 if RUNS_KERNELS else 0)


def test_gradients_and_versions():
    (p,) = parameters = make_parameters(shapes=[(8, 12)])
    optimizer = tigon.Muon(parameters)
    p.grad = torch.randn_like(p)
    gradient = p.grad.clone()
    y = p.square().sum()
    optimizer.step()
    assert torch.equal(p.grad, gradient)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@needs_torch_muon
@pytest.mark.no_interpreter("States do not depend on kernels.")
def test_state_dicts_are_exchanged_with_torch():
    kinds, results = (tigon.Muon, TorchMuon), []
    for first in kinds:
        for second in kinds:
            parameters = make_parameters(shapes=[(16, 24), (24, 16)])
            group = {"params": parameters} | ({"use_muon": True} if first is tigon.Muon else {})
            before = first([group], lr=1e-2, momentum=0.9)
            train(before, 2)
            after = second(parameters, lr=9.0)
            after.load_state_dict(before.state_dict())
            assert (
                after.state_dict()["param_groups"]
                == TorchMuon(parameters, 1e-2, momentum=0.9).state_dict()["param_groups"]
            )
            train(after, 2, first=2)
            results.append(parameters)
    for other in results[1:]:
        assert_near(results[0], other, 4e-2)


@pytest.mark.no_interpreter("States do not depend on kernels.")
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies_continue_the_training(duplicate):
    parameters = make_parameters(shapes=[(8, 12), (5,)])
    optimizer = tigon.Muon([{"params": parameters[:1]}, {"params": parameters[1:], "use_muon": False}])
    train(optimizer, 2)
    copied = duplicate(optimizer)
    assert not {"_tables", "_adamw"} & vars(copied).keys()
    others = [p for group in copied.param_groups for p in group["params"]]
    train(copied, 2, first=2)
    train(optimizer, 2, first=2)
    torch.testing.assert_close(parameters, others, rtol=1e-6, atol=1e-6)


def test_the_state_of_another_kind_of_group_is_refused():
    (p,) = make_parameters(shapes=[(12,)])
    optimizer = tigon.Muon([{"params": [p], "use_muon": False}])
    with pytest.raises(ValueError, match="Muon: a group with use_muon=False cannot load one with use_muon=True"):
        optimizer.load_state_dict(torch.optim.AdamW([p]).state_dict())


def test_one_optimizer_trains_both_kinds_of_groups():
    """The groups of AdamW are trained as by tigon.AdamW. Rates of a scheduler reach both, and so do state dicts."""
    shapes = [(8, 12), (10, 8), (12,)]
    ours, theirs = make_parameters(shapes=shapes), make_parameters(shapes=shapes)
    matrix, *rest = ours

    def make_ours() -> tigon.Muon:
        group = {"params": rest, "use_muon": False, "betas": (0.8, 0.9), "weight_decay": 0.2}
        return tigon.Muon([{"params": [matrix]}, group], lr=1e-2)

    expected = [
        tigon.Muon(theirs[:1], lr=1e-2), tigon.AdamW(theirs[1:], lr=1e-2, betas=(0.8, 0.9), weight_decay=0.2)
    ]  # fmt: skip
    optimizer = make_ours()
    assert optimizer.param_groups[1]["eps"] == 1e-8
    assert "momentum" not in optimizer.param_groups[1]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(x, lambda step: 1 / (1 + step)) for x in (optimizer, *expected)]
    for step in range(3):
        if step == 1:
            state = optimizer.state_dict()
            optimizer = make_ours()
            optimizer.load_state_dict(state)
            schedulers[0] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step), last_epoch=1)
            schedulers[0].base_lrs = [1e-2, 1e-2]
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for x in (optimizer, *expected):
            for group in x.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            x.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert optimizer.state[rest[0]]["step"] == 3
    assert optimizer.state[matrix].keys() == {"momentum_buffer"}


def test_a_captured_step_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="Muon: a CUDA graph cannot capture a step"):
        tigon.Muon(make_parameters()).step()


def check_muon_shards(rank: int) -> None:
    """FSDP2 shards matrices whose rows are no multiple of 2; one has a single row. The ranks share their work."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from tigon.ops.optim import muon_shards

    counts, orthogonalise = [], muon_shards.orthogonalise

    def count(x, *arguments):
        counts.append(len(x))
        return orthogonalise(x, *arguments)

    muon_shards.orthogonalise = count

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 13), nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 1)]
        return nn.Sequential(*layers)

    sharded, whole = make_model(), make_model()
    fully_shard(sharded)
    optimizers = [tigon.Muon(tigon.muon_groups(x), lr=1e-2) for x in (sharded, whole)]
    for _ in range(2):
        # Gradients of backward would have a low rank here, and the orthogonalisation would amplify rounding errors.
        for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
            q.grad = torch.randn(q.shape)
            p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        for optimizer in optimizers:
            optimizer.step()
    # Of the five matrices of a step, one rank computes three and the other one two.
    assert sum(counts) in (4, 6), counts
    for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
        # An update has elements of about 4e-3. The kernels round products in fp16, so other norms change some digits.
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=5e-4 if INTERPRETED else 1e-5)
    momentum = optimizers[0].state[sharded[0].weight]["momentum_buffer"]
    assert isinstance(momentum, DTensor)
    mesh = init_device_mesh("cpu", (2,))
    # Experts are sharded as whole matrices, and replicated matrices are whole. The ranks have different numbers of
    # experts, on which the owner of the sharded matrix after them must not depend.
    parameters = make_parameters(shapes=[(3, 8, 12), (8, 12), (6, 4)])
    sharded_parameters = []
    for placement, p in zip((Shard(0), Replicate(), Shard(0)), parameters, strict=True):
        distributed = nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [placement]))
        distributed.grad = distribute_tensor(torch.ones_like(p), mesh, [placement])
        p.grad = torch.ones_like(p)
        sharded_parameters.append(distributed)
    for group in (parameters, sharded_parameters):
        tigon.Muon(group).step()
    for distributed, p in zip(sharded_parameters, parameters, strict=True):
        torch.testing.assert_close(distributed.full_tensor(), p, rtol=1e-5, atol=1e-5)
    columns = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match="Muon: a DTensor must be sharded along dimension 0 .* got placements"):
        tigon.Muon([columns])
