"""The loss of logits whose columns are sharded over processes equals the loss of all columns on one process.

As a script, this file runs one rank: python test_cross_entropy_parallel.py STORE
"""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from interpreter import speed_up_the_interpreter
from ranks import LIMIT, leave, run_ranks

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)], ids=lambda n: f"{n} ranks")
def test_ranks(ranks):
    for output in run_ranks(__file__, ranks=ranks):
        assert output.splitlines()[-1] == f"{len(CHECKS)} checks passed", output


OPTIONS = {
    "plain": {},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.01, "token_scaling": True},
    "none": {"label_smoothing": 0.2, "z_loss": 0.01, "reduction": "none"},
    "items": {"num_items": 5, "inplace": True},
}
if INTERPRETED:
    OPTIONS = {name: OPTIONS[name] for name in ("plain", "all")}
RESULT_FLAGS = {
    "return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True,
    "return_log_probs": True, "return_entropy": True,
}  # fmt: skip
SHAPE = (2, 7)


def _tensors(v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits, the targets and the class weights of the whole vocabulary, which are the same on all ranks."""
    generator = torch.Generator().manual_seed(v)
    target = torch.randint(v, SHAPE, generator=generator)
    target[:, 2::3] = -100
    return torch.randn(*SHAPE, v, generator=generator), target, torch.rand(v, generator=generator) + 0.1


def _columns(v: int) -> slice:
    """Return the columns of this rank."""
    length = -(-v // dist.get_world_size())
    return slice(min(dist.get_rank() * length, v), min((dist.get_rank() + 1) * length, v))


def _total(result: dict[str, Tensor | None]) -> Tensor:
    """Return a sum of the differentiable results in which no upstream gradient is one."""
    factors = {"loss": 1.7, "log_probs": 0.3, "entropy": -0.6}
    weigh = lambda y: torch.linspace(0.5, 1.5, y.numel()).view(y.shape) * y
    return sum(factor * weigh(result[name]).sum() for name, factor in factors.items() if result.get(name) is not None)


def compare(v: int, **options) -> None:
    """Compare the results and the gradients of sharded logits with those of whole logits."""
    import tigon

    logits, target, _ = _tensors(v)
    as_dict = lambda result: {"loss": result} if isinstance(result, Tensor) else result._asdict()
    whole = logits.clone().requires_grad_()
    expected = as_dict(tigon.cross_entropy(whole, target, **options))
    (dlogits,) = torch.autograd.grad(_total(expected), whole)
    shard = logits.detach()[..., _columns(v)].clone().requires_grad_()
    result = as_dict(tigon.cross_entropy(shard, target, process_group=dist.group.WORLD, vocab_size=v, **options))
    for name, value in expected.items():
        if value is not None:
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-6)
    for retain_graph in (True, False):
        (dshard,) = torch.autograd.grad(_total(result), shard, retain_graph=retain_graph)
        torch.testing.assert_close(dshard, dlogits[..., _columns(v)], rtol=1e-5, atol=1e-6)


def _sizes() -> tuple[int, ...]:
    """Return vocabularies with equal shards, with a shorter last one, and with an empty one."""
    ranks = dist.get_world_size()
    return (12 * ranks, 5 * ranks - 1, 2 * (ranks - 1))


def each_option() -> None:
    for v in _sizes():
        for options in OPTIONS.values():
            compare(v, **options)
    v = _sizes()[1]
    compare(v, weight=_tensors(v)[2], **OPTIONS["all"])


def everything_returned() -> None:
    for v in _sizes():
        compare(v, **RESULT_FLAGS)
        compare(v, reduction="none", **RESULT_FLAGS)


def refusals() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import tigon

    rank, ranks = dist.get_rank(), dist.get_world_size()
    v, world = 7 * ranks, dist.group.WORLD
    logits, target, weight = _tensors(v)
    shard = logits[..., _columns(v)]
    message = rf"input must have 8 columns on rank {rank} of {ranks} .* of {8 * ranks}, got 7"
    with pytest.raises(ValueError, match=message):
        tigon.cross_entropy(shard, target, process_group=world, vocab_size=8 * ranks)
    with pytest.raises(ValueError, match="vocab_size must be the number of columns on all ranks of process_group"):
        tigon.cross_entropy(shard, target, process_group=world)
    with pytest.raises(ValueError, match=rf"cross_entropy: weight must have shape \({v},\), got \(7,\)"):
        tigon.cross_entropy(shard, target, weight[:7], process_group=world, vocab_size=v)
    mesh = init_device_mesh("cpu", (ranks,))
    with pytest.raises(ValueError, match=r"cross_entropy: input must not be a DTensor, got .*input.to_local\(\)"):
        tigon.cross_entropy(distribute_tensor(logits, mesh, [Shard(2)]), target, process_group=world, vocab_size=v)


CHECKS = [each_option, everything_returned, refusals]

if __name__ == "__main__":
    if INTERPRETED:
        speed_up_the_interpreter()
    dist.init_process_group(
        "gloo", store=dist.FileStore(sys.argv[1], int(os.environ["WORLD_SIZE"])), rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]), timeout=LIMIT,
    )  # fmt: skip
    torch.manual_seed(0)
    for check in CHECKS:
        check()
    print(f"{len(CHECKS)} checks passed")
    leave()
