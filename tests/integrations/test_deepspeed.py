"""DeepSpeed computes its loss over shards of the vocabulary with Tigon's cross entropy.

The stand-in has exactly the names that the integration uses, as they are in DeepSpeed 0.19.8. As a script, this file
runs one rank with DeepSpeed itself: python test_deepspeed.py deepspeed STORE
"""

import os
import sys
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import LIMIT, leave, run_ranks
from tigon.integrations import deepspeed

pytestmark = pytest.mark.no_interpreter("The tests show which code runs.")


@pytest.fixture
def install(monkeypatch):
    """Return a function that installs a stand-in: a version and modules with their attributes."""
    real_version = metadata.version

    def install(distribution: str, version: str, **modules: dict[str, Any]) -> None:
        monkeypatch.setattr(metadata, "version", lambda name: version if name == distribution else real_version(name))
        for name, attributes in modules.items():
            module: Any = types.ModuleType(name.replace("__", "."))
            vars(module).update(attributes)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def test_the_loss_of_deepspeed(install):
    def loss(
        vocab_parallel_logits, target, tp_group=None, sp_group=None, vocab_start_index=None, vocab_end_index=None,
        global_vocab_size=None, ignore_index=-100, reduction="mean", gather_sequence_loss=False, backend="torch",
    ):  # fmt: skip
        owner = sys.modules["deepspeed.sequence.cross_entropy"]
        size = vocab_parallel_logits.shape[-1]
        if backend != "liger" or not owner._liger_can_run(vocab_parallel_logits, target, size, 10, tp_group):
            return "stock"
        return owner._liger_vocab_cross_entropy(vocab_parallel_logits, target, tp_group, ignore_index).sum()

    names = {"_liger_can_run": lambda *a: False, "_liger_vocab_cross_entropy": lambda *a: "Liger"}
    install("deepspeed", "0.19.8", deepspeed={}, deepspeed__sequence={"vocab_parallel_cross_entropy": loss},
            deepspeed__sequence__cross_entropy={"vocab_parallel_cross_entropy": loss, **names})  # fmt: skip
    undo = deepspeed.enable_cross_entropy()
    sequence = sys.modules["deepspeed.sequence"]
    logits, target = torch.randn(3, 2, 10), torch.tensor([[1, 2], [-100, 9], [0, 7]])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    torch.testing.assert_close(sequence.vocab_parallel_cross_entropy(logits, target), expected)
    torch.testing.assert_close(sequence.vocab_parallel_cross_entropy(logits, target, backend="torch"), expected)
    # The ranks have different numbers of columns.
    assert sequence.vocab_parallel_cross_entropy(logits[..., :9], target) == "stock"
    undo()
    assert sequence.vocab_parallel_cross_entropy is loss


def test_another_version_of_deepspeed_keeps_its_loss(install):
    install("deepspeed", "7.1.0")
    with pytest.warns(UserWarning, match=r"is off: it was written for deepspeed 0\.19\.8, but deepspeed 7\.1\.0"):
        deepspeed.enable_cross_entropy()()


@pytest.mark.deepspeed
def test_two_ranks_of_deepspeed():
    pytest.importorskip("deepspeed")
    if not metadata.version("deepspeed").startswith("0.19."):
        pytest.skip("the integration was written for DeepSpeed 0.19.8")
    for output in run_ranks(__file__, "deepspeed", ranks=2):
        assert "equal" in output.splitlines()[-1], output


def _run_deepspeed(count: Callable[[str], Any]) -> None:
    """Compute the vocabulary-parallel losses of DeepSpeed, with and without Tigon."""
    import deepspeed.comm
    from deepspeed import sequence

    deepspeed.comm.init_distributed("gloo", dist_init_required=False)
    group, width = dist.group.WORLD, 16 // dist.get_world_size()
    torch.manual_seed(0)
    logits, target = torch.randn(3, 5, 16), torch.randint(16, (3, 5))
    target[0, 1] = -100
    shard = logits[..., dist.get_rank() * width :][..., :width]

    def train(x: Tensor, group: Any, **options: Any) -> list[Any]:
        x = x.clone().requires_grad_()
        loss = sequence.vocab_parallel_cross_entropy(x, target, tp_group=group, **options)
        (loss * torch.linspace(1, 2, loss.numel()).view_as(loss)).sum().backward()
        return [loss, x.grad]

    cases: list[tuple] = [(shard, group, {}), (shard, group, {"reduction": "none"}), (logits, None, {})]
    expected = [train(x, group, **options) for x, group, options in cases]
    from tigon.integrations import deepspeed as plugin

    plugin.enable_cross_entropy()
    owner = sequence.cross_entropy
    owner._liger_vocab_cross_entropy = count(owner._liger_vocab_cross_entropy)
    torch.testing.assert_close([train(x, group, **options) for x, group, options in cases], expected)
    module = sequence.cross_entropy.VocabParallelCausalLMLoss(tp_group=group)
    expected_loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())
    torch.testing.assert_close(module(shard, labels=target), expected_loss)


def main() -> None:
    _, store = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT)
    counts: dict[str, int] = {}

    def count(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[function.__name__] = counts.get(function.__name__, 0) + 1
            return function(*args, **kwargs)

        return counted

    _run_deepspeed(count)
    assert counts == {"token_losses": 4}
    print("equal")
    leave()


if __name__ == "__main__":
    main()
