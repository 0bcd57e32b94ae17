"""The comparison of sharded logits with whole ones, for `test_sharded_head.py`."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

OPTIONS = {
    "plain": {},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.01, "token_scaling": True},
    "none": {"label_smoothing": 0.2, "z_loss": 0.01, "reduction": "none"},
    "items": {"num_items": 5, "inplace": True},
}
RESULT_FLAGS = {
    "return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True,
    "return_log_probs": True, "return_entropy": True,
}  # fmt: skip


def _tensors(v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits, the targets and the class weights of the whole vocabulary, which are the same on all ranks."""
    generator = torch.Generator().manual_seed(v)
    target = torch.randint(v, (2, 7), generator=generator)
    target[:, 2::3] = -100
    return torch.randn(2, 7, v, generator=generator), target, torch.rand(v, generator=generator) + 0.1


def _total(result: dict[str, Tensor | None]) -> Tensor:
    """Return a sum of the differentiable results in which no upstream gradient is one."""
    factors = {"loss": 1.7, "log_probs": 0.3, "entropy": -0.6}
    weigh = lambda y: torch.linspace(0.5, 1.5, y.numel()).view(y.shape) * y
    return sum(factor * weigh(result[name]).sum() for name, factor in factors.items() if result.get(name) is not None)


def compare_logits(v: int, columns: slice, **options) -> None:
    """Compare the results and the gradients of sharded logits with those of whole logits."""
    import tigon

    logits, target, _ = _tensors(v)
    as_dict = lambda result: {"loss": result} if isinstance(result, Tensor) else result._asdict()
    whole = logits.clone().requires_grad_()
    expected = as_dict(tigon.cross_entropy(whole, target, **options))
    (dlogits,) = torch.autograd.grad(_total(expected), whole)
    shard = logits[..., columns].clone().requires_grad_()
    result = as_dict(tigon.cross_entropy(shard, target, process_group=dist.group.WORLD, vocab_size=v, **options))
    for name, value in expected.items():
        if value is not None:
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-6)
    for retain_graph in (True, False):
        (dshard,) = torch.autograd.grad(_total(result), shard, retain_graph=retain_graph)
        torch.testing.assert_close(dshard, dlogits[..., columns], rtol=1e-5, atol=1e-6)


def compare_each_option(v: int, columns: slice) -> None:
    for options in OPTIONS.values():
        compare_logits(v, columns, **options)
    compare_logits(v, columns, weight=_tensors(v)[2], **OPTIONS["all"])
    for reduction in ("mean", "none"):
        compare_logits(v, columns, reduction=reduction, **RESULT_FLAGS)


def check_refusals(v: int, columns: slice) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import tigon

    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    logits, target, weight = _tensors(v)
    shard = logits[..., columns]
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
