"""The cache of FP8 weights: when a copy is used again, and when it is not."""

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tigon
from fp8_cases import leaf, recipes
from op_cases import one_in
from tigon.ops.fp8 import weights as module
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_projections
from tigon.ops.fp8.weights import WeightCache

pytestmark = pytest.mark.no_interpreter("The cache launches no kernel of its own.")


@pytest.fixture
def quantisations(monkeypatch) -> list[tuple[bool, bool]]:
    """Return a list that receives (rows, transposed) for each quantisation of weights."""
    calls: list[tuple[bool, bool]] = []
    quantise = module.quantise

    def record(parts, layout):
        calls.append((layout.needs_rows, layout.needs_transposed))
        return quantise(parts, layout)

    monkeypatch.setattr(module, "quantise", record)
    return calls


def _run(x: Tensor, weights: list[Tensor], cache: WeightCache | None, recipe: str = "tensorwise") -> Tensor:
    return torch.cat(fp8_projections(x, weights, [None] * len(weights), recipe=recipe, caches=cache), -1)


@recipes
def test_results_have_the_bits_of_those_without_a_cache(recipe):
    x, weights, cache = leaf(7, 32), [leaf(16, 32), leaf(32, 32, seed=1)], WeightCache()
    results = []
    for chosen in (None, cache, cache):
        y = _run(x, weights, chosen, recipe)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *weights])])
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, results[0], strict=True))


def test_micro_batches_and_recomputed_layers_share_the_copies(quantisations):
    x, weights, cache = leaf(7, 32), [leaf(16, 32)], WeightCache()
    for _ in range(3):
        _run(x, weights, cache).sum().backward()
        checkpoint(_run, x, weights, cache, use_reentrant=False).sum().backward()
    assert quantisations == [(True, True)]
    assert cache.nbytes >= 2 * 16 * 32
    cache.clear()
    assert cache.nbytes == 0


CHANGES = {
    "a step of an optimizer": lambda w: torch.optim.SGD([w], lr=1.0).step(),
    "a step of Tigon's optimizer": lambda w: tigon.AdamW([w], lr=1.0).step(),
    "a write in place": lambda w: w.detach().mul_(2.0), "other memory": lambda w: setattr(w, "data", w.data * 2.0),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_weight_is_seen(change):
    x, weights, cache = leaf(7, 32), [leaf(16, 32)], WeightCache()
    before = _run(x, weights, cache)
    before.sum().backward()
    change(weights[0])
    after = _run(x, weights, cache)
    assert not torch.equal(before, after)
    assert torch.equal(after, _run(x, weights, None))


def _write_unseen(weight: Tensor) -> None:
    """Write a weight as FSDP writes a gathered weight."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(2.0)


@one_in(1, passes=[1, 2], calls_step=[False, True])
def test_a_write_that_keeps_the_version_is_seen_after_steps_in_backward(passes, calls_step):
    """The shards step in backward, and FSDP gathers their new values later."""
    x, weights, cache = leaf(7, 32), [leaf(16, 32)], WeightCache()
    shards = [torch.ones(3, requires_grad=True) for _ in range(2)]
    optimizer = tigon.AdamW(shards, lr=1.0)
    hooks = tigon.step_in_backward(optimizer)
    for _ in range(passes):
        (_run(x, weights, cache).sum() + sum(shard.sum() for shard in shards)).backward()
        assert all(shard.grad is None for shard in shards)
        if calls_step:
            optimizer.step()
        _write_unseen(weights[0])
        assert torch.equal(_run(x, weights, cache), _run(x, weights, None))
    hooks.remove()


def test_a_write_that_keeps_the_version_is_seen_inside_of_the_next_backward():
    """A layer that is recomputed runs its forward in backward."""
    x, weights, cache, outputs = leaf(7, 32), [leaf(16, 32)], WeightCache(), []
    shard = torch.ones(3, requires_grad=True)
    optimizer = tigon.AdamW([shard], lr=1.0)
    hooks = tigon.step_in_backward(optimizer)
    _run(x, weights, cache)
    shard.sum().backward()
    _write_unseen(weights[0])
    x.register_hook(lambda dx: outputs.append(_run(x, weights, cache)))
    x.sum().backward()
    assert torch.equal(outputs[0], _run(x, weights, None))
    hooks.remove()


def test_a_layer_that_is_recomputed_uses_its_copies_while_others_step_in_backward(quantisations):
    x, weights, cache = leaf(7, 32), [leaf(16, 32)], WeightCache()
    scale = torch.ones((), requires_grad=True)
    optimizer = tigon.AdamW([scale], lr=1.0)
    hooks = tigon.step_in_backward(optimizer)
    for steps in (1, 2):
        # The scale steps before the layer is recomputed.
        (scale * checkpoint(_run, x, weights, cache, use_reentrant=False)).sum().backward()
        assert quantisations == [(True, True)] * steps
    hooks.remove()


@pytest.mark.parametrize("keeps_frozen", [False, True])
def test_frozen_weights_are_quantised_once_a_step_or_only_once(quantisations, keeps_frozen):
    x, weights, cache = leaf(7, 32), [leaf(16, 32).detach()], WeightCache(keeps_frozen)
    optimizer = torch.optim.SGD([x], lr=0.1)
    for _ in range(3):
        for _ in range(2):
            _run(x, weights, cache).sum().backward()
        optimizer.step()
    assert quantisations == [(True, True)] * (1 if keeps_frozen else 3)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_captured_graph_quantises_all_weights(quantisations, monkeypatch, is_frozen):
    """A graph with the address of a copy would read freed memory after the copy is replaced."""
    x, weights, cache = leaf(7, 32), [leaf(16, 32).requires_grad_(not is_frozen)], WeightCache()
    _run(x, weights, cache)
    monkeypatch.setattr(module, "is_capturing", lambda weight: True)
    _run(x, weights, cache)
    assert quantisations == [(True, True)] * 2


def test_a_step_between_forward_and_backward_does_not_change_the_gradient():
    x, weights, cache = leaf(7, 32), [leaf(16, 32)], WeightCache()
    (expected,) = torch.autograd.grad(_run(x, weights, cache).sum(), x)
    y = _run(x, weights, cache)
    weights[0].detach().mul_(2.0)
    _run(x, weights, cache)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_an_mlp_has_two_groups(quantisations):
    leaves, cache = [leaf(7, 32), leaf(64, 32), leaf(64, 32, seed=1), leaf(32, 64, seed=2)], WeightCache()
    results = []
    for chosen in (None, cache, cache):
        y = fp8_glu_mlp(*leaves, caches=chosen)
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, results[0], strict=True))
    assert quantisations == [*[(True, False)] * 2, *[(False, True)] * 2, *[(True, True)] * 2]


def test_a_copied_or_unpickled_cache_is_empty():
    x, weights, cache = leaf(7, 32), [leaf(16, 32)], WeightCache()
    _run(x, weights, cache)
    assert cache.nbytes > 0
    assert copy.deepcopy(cache).nbytes == 0
    assert copy.deepcopy(WeightCache(keeps_frozen=True)).keeps_frozen
    assert pickle.loads(pickle.dumps(cache)).nbytes == 0
