"""The options of tigon.AdamW: states and masters, clipping, state dicts, and steps in backward."""

import copy
import pickle

import pytest
import torch
from torch import nn

import optimizer_cases
import tigon
from op_cases import DEVICE, INTERPRETED
from optimizer_cases import train
from tigon.ops.optim.compact_states import _MOMENTS, MIN_QUANTISED, _decoded

# The first parameter is large enough for codes.
SHAPES = [(33, 128), (7,), (0, 4), (16, 20)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FORMATS = {
    "8bit, bf16+8": {"state": "8bit", "master": "bf16+8"}, "8bit, fp32": {"state": "8bit", "master": "fp32"},
    "fp32, fp32": {"state": "fp32", "master": "fp32"}, "bf16": {"state": "bf16"}, "8bit": {"state": "8bit"},
    "stochastic": {"stochastic_rounding": True}, "fp32, stochastic": {"state": "fp32", "stochastic_rounding": True},
    "clipped": {"max_grad_norm": 1.0},
    "all": {"state": "8bit", "master": "bf16+8", "max_grad_norm": 1.0, "maximize": True, "fused": True},
}  # fmt: skip
every_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)


def make_parameters(dtype: torch.dtype = torch.bfloat16, shapes=SHAPES) -> list[nn.Parameter]:
    return optimizer_cases.make_parameters(shapes, dtype)


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@every_format
def test_formats_train_as_fp32_does(options):
    """After some steps, parameters lie within a step of those of torch in fp32, whose gradients are the same."""
    if INTERPRETED and "master" not in options and not options.get("stochastic_rounding"):
        pytest.skip("The interpreter truncates bf16.")
    optimizer = tigon.AdamW(make_parameters(), **OPTIONS, **options)
    exact = [nn.Parameter(p.detach().float()) for p in make_parameters()]
    reference = torch.optim.AdamW(exact, **OPTIONS, maximize=options.get("maximize", False))
    for step in range(5):
        train(optimizer, 1, step)
        for p, q in zip(optimizer.param_groups[0]["params"], exact, strict=True):
            q.grad = p.grad.float()
        if "max_grad_norm" in options:
            norm = nn.utils.clip_grad_norm_(exact, options["max_grad_norm"])
            torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0.0)
        reference.step()
    for p, q in zip(optimizer.param_groups[0]["params"], exact, strict=True):
        weight = optimizer.master_weight(p)
        # Five roundings to bf16 of an update of 0.01 at most, or one, and an eighth of the path for moments of 8 bits.
        roundings = 1.5 if "master" in options else 5.0 * (1 + options.get("stochastic_rounding", False))
        bound = 0.005 + roundings * 2.0**-8 * (q.abs() + 0.01) * ("master" not in options) + 1e-4
        assert ((weight - q).abs() <= bound).all()
        assert ((weight - p.float()).abs() <= 2.0**-8 * weight.abs()).all()


@pytest.mark.no_interpreter("Of the kernel, a single step is tested.")
def test_a_master_keeps_small_updates():
    """50 updates of 1e-4 move a weight of 1 by 0.005, which bf16 alone would lose."""
    moved = {}
    for name, options in {
        "none": {},
        "bf16+8": {"master": "bf16+8"},
        "fp32": {"master": "fp32"},
        "stochastic": {"stochastic_rounding": True},
    }.items():
        p = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
        # fp32 moments do not depend on the dtype of the parameter.
        optimizer = tigon.AdamW([p], lr=1e-4, weight_decay=0.0, state="fp32", **options)
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[name] = 1.0 - optimizer.master_weight(p).mean().item()
    assert moved["none"] == 0.0
    assert moved["fp32"] == pytest.approx(0.005, rel=1e-3)
    # Below 1 the numbers of 24 bits have a distance of 2^-16, and 7 of them are nearest to the update.
    assert moved["bf16+8"] == pytest.approx(50 * 7 * 2.0**-16, rel=1e-3)
    assert moved["stochastic"] == pytest.approx(0.005, rel=0.2)


def test_states_have_the_documented_tensors():
    (p, q, *_) = parameters = make_parameters()
    optimizer = tigon.AdamW(parameters, **OPTIONS, state="8bit", master="bf16+8")
    train(optimizer, 1)
    assert p.numel() >= MIN_QUANTISED > q.numel()
    dtypes = {name: x.dtype for name, x in optimizer.state[p].items()}
    assert dtypes == {
        "step": torch.float32, "exp_avg_code": torch.int8, "exp_avg_scale": torch.float32,
        "exp_avg_sq_code": torch.uint8, "exp_avg_sq_scale": torch.float32, "correction": torch.int8,
    }  # fmt: skip
    assert optimizer.state[p]["exp_avg_scale"].numel() == p.numel() // 128
    assert {name: x.dtype for name, x in optimizer.state[q].items()} == {
        "step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32, "correction": torch.int8,
    }  # fmt: skip
    # A parameter in fp32 needs no master weight.
    optimizer = tigon.AdamW(make_parameters(torch.float32), **OPTIONS, master="bf16+8")
    train(optimizer, 1)
    assert set(optimizer.state[optimizer.param_groups[0]["params"][0]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_groups_have_their_own_formats_and_share_the_norm():
    parameters = make_parameters()
    groups = [{"params": parameters[:1], "state": "fp32"}, {"params": parameters[1:], "lr": 1e-3}]
    optimizer = tigon.AdamW(groups, **OPTIONS, state="8bit", master="fp32", max_grad_norm=0.5)
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(4, dtype=torch.bfloat16, device=DEVICE))})
    train(optimizer, 1)
    assert "exp_avg" in optimizer.state[parameters[0]]
    assert [group["state"] for group in optimizer.param_groups] == ["fp32", "8bit", "8bit"]
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
    torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("fused", [None, True])
def test_a_scaler_unscales_the_gradients(fused):
    """An overflow skips the step, and a scaled loss trains as one that is not scaled."""
    results = []
    for scale in (None, 1024.0):
        (p,) = make_parameters(torch.float32, SHAPES[:1])
        optimizer = tigon.AdamW([p], **OPTIONS, state="8bit", max_grad_norm=1.0, fused=fused)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=scale or 1.0, enabled=scale is not None)
        for value in (1.0, float("inf"), 2.0):
            if scale is not None or value != float("inf"):
                scaler.scale((value * p).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        results.append(p.detach())
    assert_equal(results[:1], results[1:])


@pytest.mark.parametrize("odd", ["parameter", "gradient"])
def test_other_strides_take_the_reference(odd):
    options = OPTIONS | {"state": "8bit", "master": "bf16+8", "max_grad_norm": 1.0}
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(64, 128, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    results = []
    for is_odd in (False, True):
        p = nn.Parameter(x.T.contiguous().T if is_odd and odd == "parameter" else x.clone())
        optimizer = tigon.AdamW([p], **options)
        for _ in range(2):
            p.grad = g.T.contiguous().T if is_odd else g.clone()
            optimizer.step()
        results.append(optimizer.master_weight(p))
    # Another code of a moment changes the update of 0.01 by a few percent.
    torch.testing.assert_close(*results, rtol=2.0**-15, atol=5e-4)


WAYS = [("state dict", name) for name in FORMATS] + [
    (way, name) for way in ("deepcopy", "pickle") for name in ("plain", "all")
]


@pytest.mark.parametrize(("way", "name"), WAYS)
@pytest.mark.sampled(in_interpreter=4)
def test_copies_continue_the_training(way, name):
    """So steps are deterministic too."""
    options = FORMATS.get(name, {})
    optimizer = tigon.AdamW(make_parameters(), **OPTIONS, **options)
    parameters = train(optimizer, 2)
    if way == "state dict":
        other = tigon.AdamW([nn.Parameter(p.detach().clone()) for p in parameters], lr=9.0, **options)
        other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    else:
        other = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        # The tables hold the addresses of the first optimizer's tensors.
        assert "_tables" not in vars(other)
    assert_equal(train(optimizer, 2, 2), train(other, 2, 2))


@pytest.mark.parametrize("source", [None, "8bit, bf16+8", "fp32, fp32", "bf16", "stochastic"], ids=str)
@pytest.mark.parametrize("target", [None, "8bit, bf16+8", "8bit, fp32", "fp32, fp32"], ids=str)
@pytest.mark.sampled(in_interpreter=3)
def test_state_dicts_of_all_formats_are_converted(source, target):
    """Moments keep their values up to the formats of both optimizers. None stands for torch's optimizer."""
    parameters = make_parameters(shapes=SHAPES[:2])
    options = FORMATS.get(source, {})
    first = tigon.AdamW(parameters, **OPTIONS, **options) if source else torch.optim.AdamW(parameters, **OPTIONS)
    train(first, 2)
    second = tigon.AdamW(parameters, **FORMATS[target]) if target else torch.optim.AdamW(parameters)
    second.load_state_dict(first.torch_state_dict() if source and not target else first.state_dict())
    assert second.param_groups[0]["lr"] == 1e-2
    for p in parameters:
        before, after = first.state[p], second.state[p]
        assert before["step"] == after["step"] == 2
        if target:
            assert ("exp_avg_code" in after) == ("8bit" in target and p.numel() >= MIN_QUANTISED)
            assert ("master" in after) == ("fp32" in target.split(", ")[-1])
        moments = [[_decoded(p, x, name, decode) for name, *_, decode in _MOMENTS] for x in (before, after)]
        for x, y in zip(*moments, strict=True):
            # A code of 8 bits is near in the root: 1/127 of the largest value twice, or eps of bf16.
            torch.testing.assert_close(
                x.sqrt() if (x >= 0).all() else x, y.sqrt() if (y >= 0).all() else y, rtol=0.02,
                atol=x.abs().max().item() / 100,
            )  # fmt: skip
    train(second, 1, 2)


def test_a_loaded_master_replaces_lost_digits():
    """A master moves between both formats. A parameter that was loaded from elsewhere starts a master of its own."""
    for source, target in (("fp32", "bf16+8"), ("bf16+8", "fp32"), ("fp32", "fp32")):
        optimizer = tigon.AdamW(make_parameters(), **OPTIONS, state="fp32", master=source)
        parameters = train(optimizer)
        other = tigon.AdamW(parameters, state="fp32", master=target)
        other.load_state_dict(optimizer.state_dict())
        for p in parameters:
            # A step reads the master only if its parameter is the rounded master.
            weights = [x.master_weight(p) for x in (optimizer, other)]
            torch.testing.assert_close(*weights, rtol=2.0**-15, atol=0.0)
            assert p.numel() < 100 or not torch.equal(weights[1], p.float())


def test_torch_refuses_codes():
    """Codes that were loaded as moments would be wrong without a message."""
    optimizer = tigon.AdamW(make_parameters(shapes=SHAPES[:1]), state="8bit")
    parameters = train(optimizer)
    other = torch.optim.AdamW(parameters)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        train(other)
    # This package's optimizer decodes them.
    other = tigon.AdamW(parameters)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[parameters[0]]["exp_avg"].dtype == torch.bfloat16
    train(other)


def test_hooks_of_state_dicts_run():
    optimizer, other = (tigon.AdamW(make_parameters(), state="8bit") for _ in range(2))
    train(optimizer)
    calls = []

    def change(_, state_dict):
        state_dict["param_groups"][0]["lr"] = 7.0
        return state_dict

    other.register_load_state_dict_pre_hook(change)
    other.register_load_state_dict_post_hook(lambda x: calls.append(len(x.state)))
    other.load_state_dict(optimizer.state_dict())
    assert calls == [len(SHAPES)]
    assert other.param_groups[0]["lr"] == 7.0


def test_an_infinite_limit_only_computes_the_norm():
    """One infinite gradient must not change the others."""
    first, *others = parameters = make_parameters()
    optimizer = tigon.AdamW(parameters, **OPTIONS, max_grad_norm=float("inf"))
    for p in parameters:
        p.grad = torch.ones_like(p)
    first.grad.view(-1)[0] = float("inf")
    optimizer.step()
    assert optimizer.grad_norm.isinf()
    assert all(p.isfinite().all() for p in others)


def check_compact_shards(rank: int) -> None:
    """Compare a sharded model with a whole one: their states, formats, norms and state dicts."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,))

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        # The last weight has one row, so rank 1 has no part of it.
        return nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 65), nn.Linear(65, 1)).bfloat16()

    for options in (
        {"state": "8bit", "master": "bf16+8", "max_grad_norm": 0.5},
        {"state": "fp32", "master": "fp32", "max_grad_norm": 0.5},
    ):
        whole, sharded = make_model(), make_model()
        # One parameter is on all ranks, and counts once in the norm.
        fully_shard(sharded, mesh=mesh, ignored_params={sharded[0].bias})
        models = (whole, sharded)
        optimizers = [tigon.AdamW(model.parameters(), **OPTIONS, **options) for model in models]
        for step in range(2):
            x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step)).bfloat16()
            for model, optimizer in zip(models, optimizers, strict=True):
                model(x).float().square().sum().backward()
                optimizer.step()
            torch.testing.assert_close(optimizers[0].grad_norm, optimizers[1].grad_norm, rtol=2e-3, atol=0.0)
            for optimizer in optimizers:
                optimizer.zero_grad()
        for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
            full = q.full_tensor() if isinstance(q, DTensor) else q
            torch.testing.assert_close(p, full, rtol=2.0**-6, atol=1e-3)
        weight = sharded[0].weight
        state = optimizers[1].state[weight]
        expected = {"exp_avg_code", "exp_avg_scale"} if options["state"] == "8bit" else {"exp_avg", "master"}
        assert all(isinstance(state[name], DTensor) for name in expected), state
        # A checkpoint of torch.distributed has all states of a sharded model, whole and as shards.
        for full_state_dict in (False, True):
            from torch.distributed.checkpoint.state_dict import StateDictOptions

            dict_options = StateDictOptions(full_state_dict=full_state_dict)
            saved = get_optimizer_state_dict(sharded, optimizers[1], options=dict_options)
            other = tigon.AdamW(sharded.parameters(), **OPTIONS, **options)
            set_optimizer_state_dict(sharded, other, saved, options=dict_options)
            for p in sharded.parameters():
                for name, x in optimizers[1].state[p].items():
                    y = other.state[p][name]
                    pair = [z.to_local() if isinstance(z, DTensor) else z for z in (x, y)]
                    assert torch.equal(*pair), (full_state_dict, name)
    # A rank may lack gradients that another rank has. Both take part in the same sums.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    fully_shard(model[0], mesh=mesh)
    optimizer = tigon.AdamW(model.parameters(), max_grad_norm=1.0)
    layer = model if rank == 0 else model[0]
    layer(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    assert optimizer.grad_norm.isfinite()
    # DDP reduces gradients after the hooks of the parameters.
    with pytest.raises(ValueError, match="with 2 ranks all parameters must be DTensors"):
        tigon.step_in_backward(tigon.AdamW(nn.Linear(4, 4).parameters()))
    tigon.step_in_backward(tigon.AdamW(nn.Linear(4, 4).parameters()), allow_local_gradients=True)
