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
from tigon.ops.optim import muon_kernels, tensor_table
from tigon.ops.optim.muon_kernels import Matrix, apply_update, compute_momentum, table_of
from tigon.ops.optim.symmetric_product import SymmetricConfig
from tigon.runtime.tuning import tuned

TORCH = (3.4445, -4.7750, 2.0315)
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


# --- training --------------------------------------------------------------------------------------

TRAININGS = {
    "plain": {},
    "no decay": {"weight_decay": 0.0},
    "original": {"adjust_lr_fn": "original"},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "lr": 1e-3},
    "small momentum": {"momentum": 0.3},
    "no momentum": {"momentum": 0.0},
    "two steps": {"ns_steps": 2},
    "other coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7},
    "lr tensor": {"lr": torch.tensor(2e-2)},
    "fp16 is too small": {"ns_coefficients": (33.0, -4.0, 2.0), "ns_steps": 1},
}
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


@needs_torch_muon
@pytest.mark.no_interpreter("Without kernels, the operations are those of torch.")
@pytest.mark.skipif(DEVICE == "cuda", reason="A GPU runs the kernels.")
def test_the_cpu_computes_what_torch_computes():
    ours, theirs = make_parameters(), make_parameters()
    train(tigon.Muon(ours))
    train(TorchMuon(theirs))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


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
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=3e-6)


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


# --- the kernels -----------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("nesterov", [True, False])
def test_both_passes_write_what_they_should(nesterov, offset):
    """The matrices have elements of 7 around them. With an offset they are not aligned."""
    generator = torch.Generator().manual_seed(0)
    memory = [torch.full((3, 16 * 33 + 2), 7.0, device=DEVICE) for _ in range(3)]
    matrices = []
    for i in range(3):
        views = [x[i][offset : offset + 16 * 33].view(16, 33) for x in memory]
        for x in views:
            x.copy_(torch.randn(16, 33, generator=generator))
        matrices.append(Matrix(*views))
    before = [Matrix(*(x.clone() for x in matrix)) for matrix in matrices]
    with patch.object(tensor_table, "BLOCK_BYTES", 256), patch.object(muon_kernels, "SPAN", 2):
        table = table_of(matrices, None)
        assert table_of(matrices, table) is table
        u, squares = compute_momentum(matrices, 0.9, nesterov, table)
        o, scales = torch.randn_like(u), torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
        apply_update(matrices, o, scales, torch.tensor(0.5, device=DEVICE), 0.25, 0.1, table)
    for i, (matrix, old) in enumerate(zip(matrices, before, strict=True)):
        assert torch.equal(matrix.grad, old.grad)
        m = 0.9 * old.momentum.double() + 0.1 * old.grad.double()
        torch.testing.assert_close(matrix.momentum, m.float(), rtol=1e-5, atol=1e-6)
        expected = 0.9 * m + 0.1 * old.grad.double() if nesterov else m
        torch.testing.assert_close(u[i].double(), expected, rtol=2**-8, atol=1e-3)
        torch.testing.assert_close(squares[i], u[i].float().square().sum(), rtol=1e-5, atol=0.0)
        p = old.param.double() * (1 - 0.5 * 0.1) - 0.5 * 0.25 * (i + 1) * o[i].double()
        torch.testing.assert_close(matrix.param, p.float(), rtol=1e-5, atol=1e-5)
    for x in memory:
        assert bool((x[:, :offset] == 7).all())
        assert bool((x[:, offset + 16 * 33 :] == 7).all())


@pytest.mark.kernels
def test_a_rate_on_the_device_is_read_there():
    ours, theirs = (make_parameters(shapes=[(8, 12)]) for _ in range(2))
    train(tigon.Muon(ours, lr=torch.tensor([1e-2], device=DEVICE)), 1)
    train(tigon.Muon(theirs, lr=1e-2), 1)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


# --- state dicts -----------------------------------------------------------------------------------


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
    for p, q in zip(parameters, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


# --- groups of AdamW -------------------------------------------------------------------------------


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.convolution = nn.Conv1d(8, 8, 2)
        self.mlp = nn.Linear(8, 12)
        self.experts = nn.Parameter(torch.randn(2, 12, 8))
        self.experts_bias = nn.Parameter(torch.randn(2, 12))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.positions = nn.Parameter(torch.randn(1, 4, 8))
        self.head = nn.Linear(8, 10)


def names_of(model: nn.Module, group: dict) -> set[str]:
    return {name for name, p in model.named_parameters() if any(p is x for x in group["params"])}


def test_groups_of_a_model():
    model = TinyModel()
    muon, decayed, vectors = tigon.muon_groups(model, exclude=[model.head], betas=(0.8, 0.9))
    assert names_of(model, muon) == {"mlp.weight", "experts"}
    assert names_of(model, decayed) == {"embed.weight", "convolution.weight", "positions", "head.weight"}
    assert names_of(model, vectors) == {"convolution.bias", "mlp.bias", "head.bias", "experts_bias"}
    assert (muon["use_muon"], decayed["betas"], vectors["weight_decay"]) == (True, (0.8, 0.9), 0.0)
    assert "weight_decay" not in decayed
    # Parameters may be excluded by themselves.
    assert "mlp.weight" in names_of(model, tigon.muon_groups(model, exclude=[model.mlp.weight])[1])


@pytest.mark.no_interpreter("The groups do not depend on kernels.")
def test_groups_of_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_labels=3)
    for kind, head in (
        (transformers.LlamaForCausalLM, "lm_head.weight"),
        (transformers.LlamaForSequenceClassification, "score.weight"),
    ):
        model = kind(config)
        muon, decayed, vectors = tigon.muon_groups(model)
        assert names_of(model, decayed) == {"model.embed_tokens.weight", head}
        assert len(muon["params"]) == 7
        assert all(".norm" in name or "norm." in name for name in names_of(model, vectors))


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
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert optimizer.state[rest[0]]["step"] == 3
    assert optimizer.state[matrix].keys() == {"momentum_buffer"}


def test_closures_return_the_loss():
    (p,) = parameters = make_parameters(shapes=[(8, 12)])

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert tigon.Muon(parameters).step(closure) > 0


# --- refusals --------------------------------------------------------------------------------------

VECTOR = nn.Parameter(torch.zeros(3))
REFUSALS = {
    "a vector": (
        lambda: tigon.Muon([VECTOR]),
        "Muon: a parameter must have 2 dimensions, or 3 if it stacks matrices, got shape (3,); a group with "
        "use_muon=False takes it (tigon.muon_groups makes the groups of a model)",
    ),
    "a step too many": (
        lambda: tigon.Muon(make_parameters(), ns_steps=100),
        "Muon: ns_steps must be in [0, 99], got 100",
    ),
    "coefficients of other steps": (
        lambda: tigon.Muon(make_parameters(), ns_coefficients=[TORCH, TORCH]),
        f"Muon: ns_coefficients must be three numbers, or three numbers for each step, got {[TORCH, TORCH]}",
    ),
    "a negative rate": (lambda: tigon.Muon(make_parameters(), lr=-1.0), "Muon: lr must not be negative, got -1.0"),
    "momentum above one": (
        lambda: tigon.Muon(make_parameters(), momentum=1.5),
        "Muon: momentum must be in [0, 1], got 1.5",
    ),
    "an option of a group": (
        lambda: tigon.Muon([{"params": make_parameters(), "momentum": "high"}]),
        "Muon: momentum must be a number, got 'high'",
    ),
    "a string for use_muon": (
        lambda: tigon.Muon([{"params": [VECTOR], "use_muon": "no"}]),
        "Muon: use_muon must be a bool, got 'no'",
    ),
    "betas of a group of AdamW": (
        lambda: tigon.Muon([{"params": [VECTOR], "use_muon": False, "betas": 3}]),
        "Muon: betas must be two numbers, got 3 in a group with use_muon=False",
    ),
    "compact states": (
        lambda: tigon.Muon([{"params": [VECTOR], "use_muon": False, "state": "8bit"}]),
        "Muon: a group with use_muon=False cannot have state, got '8bit'",
    ),
    "no parameters": (lambda: tigon.Muon([]), "Muon: optimizer got an empty parameter list"),
    "exclude a name": (
        lambda: tigon.muon_groups(TinyModel(), exclude=["head"]),
        "muon_groups: exclude must have modules and parameters, got 'head'",
    ),
    "no model": (lambda: tigon.muon_groups([VECTOR]), "muon_groups: model must be a Module, got list"),
}


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(call, message):
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    assert str(refusal.value) == message


def test_a_captured_step_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="Muon: a CUDA graph cannot capture a step"):
        tigon.Muon(make_parameters()).step()


# --- two ranks -------------------------------------------------------------------------------------


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
