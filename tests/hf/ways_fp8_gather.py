"""Models that FSDP2 shards and whose weights it gathers in FP8: the same bits as with weights gathered in bf16.

Each setup trains the same model twice, without and with `tigon.gather_in_fp8`, and compares the losses, the norms of
all gradients and the gradients. It also counts the bytes that a rank gives to the all-gathers of the layers.
"""

import contextlib
import copy
import functools
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import tigon
from hf.ways import DEVICE, batch, build
from hf.ways_sharded import BF16, fsdp2
from tigon.hf import fp8
from tigon.ops.fp8.gathered_weights import GatheredWeight

# The layers of the test are narrower than those that FP8 pays for.
fp8.NARROWEST = 1
STEPS = 2
# The units of FSDP2 of these ranks.
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def is_in_fp8(name: str) -> bool:
    """Return whether a parameter of a layer is the weight of a linear layer in FP8."""
    return name.endswith("_proj.weight")


@contextlib.contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """Yield a list to which every all-gather of FSDP2 in the block adds the bytes that this rank gives to it."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    gather, sizes = DefaultAllGather.__call__, []

    def count(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(input_tensor.nbytes)
        return gather(self, output_tensor, input_tensor, *args, **kwargs)

    DefaultAllGather.__call__ = count
    try:
        yield sizes
    finally:
        DefaultAllGather.__call__ = gather


def expected_bytes(module: nn.Module, in_fp8: bool) -> int:
    """Return the bytes that a rank gives to an all-gather of the parameters of a module, which are in bf16."""
    size = lambda name, p: -(-p.shape[0] // WORLD) * p[0].numel() * (1 if in_fp8 and is_in_fp8(name) else 2)
    return sum(size(name, p.detach()) for name, p in module.named_parameters())


def make_model(
    gathers: bool, *, dtype: torch.dtype = torch.bfloat16, patch_after: bool = False, memory: str = "default",
    frozen: bool = False, reentrant: bool | None = None, shard: Callable = fsdp2, **options: Any,
) -> nn.Module:  # fmt: skip
    model = build("qwen3").to(dtype)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if frozen:
        model.model.layers[0].requires_grad_(False)
    if not patch_after:
        tigon.patch(model, fp8="tensorwise", memory=memory)
    model = shard(model, **options)
    if patch_after:
        tigon.patch(model, fp8="tensorwise", memory=memory)
    if gathers:
        report = tigon.gather_in_fp8(model)
        assert [entry.count for entry in report.entries] == [14], report
        assert report.left_alone == []
    return model


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def train(model: nn.Module, rank: int, *, steps: int = STEPS, micro_batches: int = 1, seed: int = 0) -> list[Tensor]:
    """Return the losses, and the norm of the gradients and the gradients of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for _ in range(steps):
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i == micro_batches - 1)
            loss = model(**batch(rank, seed=seed + i)).loss
            loss.backward()
            results.append(full(loss))
        results.append(full(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        results += [full(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return results


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 4
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), (actual[0], expected[0])


def same_bits(rank: int, micro_batches: int = 1, **options: Any) -> None:
    expected = train(make_model(False, **options), rank, micro_batches=micro_batches)
    assert_same_bits(train(make_model(True, **options), rank, micro_batches=micro_batches), expected)


def one_byte(rank: int, **options: Any) -> None:
    """Assert that a weight takes one byte a value in each all-gather, which forward and backward repeat."""
    for gathers in (False, True):
        model = make_model(gathers, **options)
        with gathered_bytes() as sizes:
            train(model, rank, steps=1)
        for layer in model.model.layers:
            assert sizes.count(expected_bytes(layer, gathers)) == 2 * len(model.model.layers), sizes
    same_bits(rank, **options)


def one_unit(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def every_linear(model: nn.Module) -> nn.Module:
    """Make each linear layer a unit, whose hooks prevent that layers are computed together."""
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module)
    return fully_shard(model)


def levels(rank: int) -> None:
    for memory in ("lean+mlp", "checkpoint"):
        same_bits(rank, memory=memory)


def restored(rank: int) -> None:
    """Assert that the gather can be ended and begun again, also while gradients accumulate."""
    model = make_model(False)
    expected = train(model, rank) + train(model, rank, seed=4)
    model = make_model(True)
    actual = train(model, rank)
    tigon.gather_in_fp8(model).restore()
    with gathered_bytes() as sizes:
        actual += train(model, rank, seed=4)
    assert expected_bytes(model.model.layers[0], in_fp8=False) in sizes
    assert_same_bits(actual, expected)
    gradients = []
    for gathers in (False, True):
        model = make_model(False)
        report = tigon.gather_in_fp8(model) if gathers else None
        model.set_requires_gradient_sync(False)
        model(**batch(rank)).loss.backward()
        if report is not None:
            report.restore()
        model.set_requires_gradient_sync(True)
        model(**batch(rank, seed=1)).loss.backward()
        gradients.append([full(p.grad) for p in model.parameters()])
    assert_same_bits(*gradients)
    # The report of `patch` ends the gather too, and so does a patch with another recipe.
    for end in ("restore", "patch"):
        model = build("qwen3").bfloat16()
        report = tigon.patch(model, fp8="tensorwise")
        tigon.gather_in_fp8(fsdp2(model))
        report.restore() if end == "restore" else tigon.patch(model, fp8="rowwise")
        with gathered_bytes() as sizes:
            train(model, rank, steps=1)
        assert expected_bytes(model.model.layers[0], in_fp8=False) in sizes


def states(rank: int) -> None:
    """Assert that states hold plain tensors in bf16, and that the gather continues after tensors were exchanged."""
    expected = train(make_model(False), rank)
    model = make_model(True)
    assert_same_bits(train(model, rank), expected)
    state = model.state_dict()
    assert {(type(x.to_local()), x.dtype) for x in state.values()} == {(Tensor, torch.bfloat16)}
    assert torch.load(io.BytesIO(saved(state)), weights_only=True).keys() == state.keys()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(type(x) is Tensor and x.dtype == torch.bfloat16 for x in whole.values())
    optimizer = torch.optim.AdamW(model.parameters())
    train_step = lambda: (model(**batch(rank)).loss.backward(), optimizer.step())
    train_step()
    moments = get_optimizer_state_dict(model, optimizer)["state"]
    assert {x.dtype for each in moments.values() for x in each.values() if x.dim()} == {torch.bfloat16}
    # The first units are gathered before the hooks of their layers run.
    layers = model.model.layers
    model.set_modules_to_forward_prefetch([layers[0]])
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    loss = model(**batch(rank)).loss
    loss.backward()
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    with gathered_bytes() as sizes:
        assert torch.equal(model(**batch(rank)).loss, loss)
    assert sizes.count(expected_bytes(layers[0], in_fp8=True)) == 2
    model.float()
    model.bfloat16()
    assert torch.equal(model(**batch(rank)).loss, loss)


def assign_clones(model: nn.Module) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


def convert_twice(model: nn.Module) -> None:
    model.float().bfloat16()


def exchange_shards(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter._local_tensor = parameter._local_tensor.clone()


def exchanged(rank: int) -> None:
    """Assert that `unshard` gathers in FP8 what the parameters hold, also if their tensors were exchanged before."""

    def assert_gathered(layer: nn.Module, exact: Tensor) -> None:
        weight = layer.mlp.up_proj.weight
        assert type(weight) is GatheredWeight
        assert 0 < (weight.dequantise() - exact).abs().max() < 0.05 * exact.abs().max()

    for exchange in (assign_clones, convert_twice, exchange_shards):
        model = make_model(True)
        layer = model.model.layers[0]
        exact, size = full(layer.mlp.up_proj.weight), expected_bytes(layer, in_fp8=True)
        losses = []
        # FSDP2 makes its buffers in the first turn.
        for _ in range(2):
            exchange(model)
            with gathered_bytes() as sizes:
                layer.unshard()
            assert sizes == [size]
            assert_gathered(layer, exact)
            losses.append(model(**batch(rank)).loss)
            model.reshard()
            layer.reshard()
        assert torch.equal(*losses)
    # An all-gather that has begun is completed, whatever happens to the tensors meanwhile.
    handle = layer.unshard(async_op=True)
    assign_clones(model)
    handle.wait()
    assert_gathered(layer, exact)
    assert torch.equal(model(**batch(rank)).loss, losses[0])


def ended_too_early(rank: int) -> None:
    """Assert that `restore` during an all-gather raises an error and changes nothing, and that it works later."""
    model = make_model(False)
    report = tigon.gather_in_fp8(model)
    expected = model(**batch(rank)).loss
    model.reshard()
    handles = [layer.unshard(async_op=True) for layer in model.model.layers]
    with pytest.raises(RuntimeError, match="weights are gathered at this moment"):
        report.restore()
    for handle in handles:
        handle.wait()
    assert torch.equal(model(**batch(rank)).loss, expected)
    report.restore()
    with gathered_bytes() as sizes:
        assert torch.equal(model(**batch(rank)).loss, expected)
    assert sizes.count(expected_bytes(model.model.layers[0], in_fp8=False)) == len(model.model.layers)


def copies(rank: int) -> None:
    """Assert that parameters are copied and saved as without the gather, and that FSDP2 gathers what was loaded."""
    model = make_model(True)
    expected = model(**batch(rank)).loss
    model.reshard()
    optimizer = torch.optim.AdamW(model.parameters())
    copied = copy.deepcopy(optimizer).param_groups[0]["params"]
    state = model.state_dict(keep_vars=True)
    names = [name for name, _ in model.named_parameters()]
    kinds = {
        "copied": {name: copy.deepcopy(x) for name, x in state.items()},
        "copied by the optimizer": dict(zip(names, copied, strict=True)),
        "saved": loaded(state),
        "saved in a list": dict(zip(names, loaded([*model.parameters()]), strict=True)),
    }
    for kind, parameters in kinds.items():
        for name in names:
            local = parameters[name].to_local()
            attributes = vars(parameters[name]._local_tensor)
            assert (type(local), local.dtype, attributes) == (Tensor, torch.bfloat16, {}), kind
    for gathers in (False, True):
        other = make_model(gathers)
        # FSDP2 has made no buffers when the first tensors are loaded.
        for kind, parameters in kinds.items():
            # The values have to come from the tensors that are loaded.
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            clones = {name: copy.deepcopy(parameters[name]) for name in names}
            other.load_state_dict({**state, **clones}, assign=True)
            with gathered_bytes() as sizes:
                assert torch.equal(other(**batch(rank)).loss, expected), kind
            layers = other.model.layers
            assert sizes.count(expected_bytes(layers[0], gathers)) == len(layers)
            other.reshard()


def loaded(value: Any) -> Any:
    """Return what `torch.load` makes of a value that was saved."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def saved(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save({name: x.to_local() for name, x in state.items()}, buffer)
    return buffer.getvalue()


def evaluated(rank: int) -> None:
    """Assert that a short call without gradients computes what one with gradients does, and that NaN is not lost."""
    tokens = {"input_ids": batch(rank)["input_ids"]}
    expected = make_model(False)(**tokens).logits
    model = make_model(True)
    with torch.no_grad():
        assert torch.equal(model(**tokens).logits, expected)
        if rank == WORLD - 1:
            model.model.layers[0].mlp.up_proj.weight.to_local()[0, 0] = float("nan")
    assert model(**tokens).logits.isnan().all()


def other_reads(rank: int) -> None:
    """Assert that other code reads the rounded values of a gathered weight, and cannot write to it."""
    model = make_model(True)
    weight = {}

    def read(module: nn.Module, args: tuple) -> None:
        weight["gathered"] = module.weight
        weight["plain"] = module.weight * 1

    handle = model.model.layers[0].mlp.up_proj.register_forward_pre_hook(read)
    train(model, rank, steps=1)
    handle.remove()
    assert type(weight["gathered"]) is GatheredWeight
    assert type(weight["plain"]) is Tensor
    exact = full(make_model(False).model.layers[0].mlp.up_proj.weight)
    error = (weight["plain"] - exact).abs()
    assert error.max() > 0
    assert bool((error <= 2**-4 * exact.abs() + 2**-10 * exact.abs().max()).all())
    with torch.no_grad(), pytest.raises(RuntimeError, match="would write to a weight that is gathered in FP8"):
        weight["gathered"].mul_(2)


def refused(rank: int) -> None:
    def refusal(model: nn.Module) -> str:
        with pytest.raises(ValueError, match="gather_in_fp8: ") as error:
            tigon.gather_in_fp8(model)
        return str(error.value)

    def patched(dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
        model = build("qwen3").to(dtype)
        tigon.patch(model, **options)
        return model

    in_fp8 = {"fp8": "tensorwise"}
    assert "must be patched with fp8=\"tensorwise\", got 'rowwise'" in refusal(fsdp2(patched(fp8="rowwise")))
    assert "no layer of the model runs in FP8" in refusal(fsdp2(patched()))
    assert "no module of the model is sharded by" in refusal(patched(**in_fp8))
    assert "it is gathered in float32: use a model in bf16" in refusal(fsdp2(patched(torch.float32, **in_fp8)))
    if DEVICE == "cpu":
        offloaded = fsdp2(patched(**in_fp8), offload_policy=CPUOffloadPolicy(pin_memory=False))
        assert "its shard is in the memory of the host (CPUOffloadPolicy) (14 weights)" in refusal(offloaded)
    model = make_model(True)
    model.float()
    with pytest.raises(ValueError, match="a weight cannot be gathered in FP8: it is gathered in float32"):
        model(**batch(rank))


def replicated(rank: int) -> None:
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    same_bits(rank, mesh=mesh)


SETUPS = {
    "one byte a value": one_byte,
    "fp32 shards and bf16 parameters": functools.partial(same_bits, dtype=torch.float32, **BF16),
    "accumulation, not resharded": functools.partial(same_bits, micro_batches=2, reshard_after_forward=False),
    "patched after, a frozen layer, checkpointing": functools.partial(
        same_bits, patch_after=True, frozen=True, reentrant=False
    ),
    "levels of memory": levels,
    "one unit": functools.partial(same_bits, shard=one_unit),
    "each linear layer a unit": functools.partial(same_bits, shard=every_linear),
    "replicas": replicated,
    "restored": restored,
    "states": states,
    "exchanged tensors": exchanged,
    "ended too early": ended_too_early,
    "copies": copies,
    "evaluation and NaN": evaluated,
    "other code": other_reads,
    "refusals": refused,
}
