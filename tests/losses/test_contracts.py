"""What all losses of log-probabilities promise: any layout, any length, no waiting, finite values, exact gradients."""

import doctest

import pytest
import torch
from torch import Tensor

from losses.cases import pack, tokens
from losses.loss_calls import CALLS, POLICY_CALLS, Call
from op_cases import one_in
from tigon import losses

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")
each_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)


def _loss_and_gradient(call: Call, arguments: dict) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    name = next(iter(arguments))
    leaf = arguments[name].clone().requires_grad_()
    loss, metrics = call(arguments | {name: leaf})
    (grad,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
    return loss.detach(), metrics, grad


# Other tests compare the gradients of losses with a part that is a constant for autograd.
DIFFERENTIABLE = [call for call in CALLS if not call.stops_gradient]


@one_in(3, call={call.name: call for call in DIFFERENTIABLE}, shape=[(2, 1), (4, 3), (4, 5)])
def test_the_gradient_is_the_derivative(call, shape):
    arguments = call.arguments(tokens(*shape, dtype=torch.float64))
    name = next(iter(arguments))
    leaf = arguments[name].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: call(arguments | {name: x})[0], leaf)


WITHOUT_PAIRS = [call for call in CALLS if call in POLICY_CALLS or call.loss is losses.kto_loss]


@pytest.mark.parametrize("call", WITHOUT_PAIRS, ids=lambda call: call.name)
@pytest.mark.parametrize("rows", [1, 3])
def test_an_odd_number_of_sequences(call, rows):
    x = tokens(rows, 7, dtype=torch.float64)
    loss, metrics, grad = _loss_and_gradient(call, call.arguments(x))
    assert loss.isfinite()
    assert metrics
    assert (grad[~x.mask] == 0).all()


@each_call
def test_fp32_agrees_with_fp64(call):
    results = {}
    for dtype in (torch.float32, torch.float64):
        loss, metrics, grad = _loss_and_gradient(call, call.arguments(tokens(6, 40, dtype=dtype)))
        assert loss.dtype == dtype
        assert loss.shape == ()
        results[dtype] = loss.double(), grad.double(), {name: x.double() for name, x in metrics.items()}
    torch.testing.assert_close(results[torch.float32], results[torch.float64], rtol=2e-5, atol=2e-6)


@one_in(3, call={call.name: call for call in CALLS}, shape=[(2, 1), (6, 9), (8, 33)])
def test_packed_tokens_give_the_result_of_padded_tokens(call, shape):
    empty = (1,) if shape[0] > 2 else ()
    arguments = call.arguments(tokens(*shape, dtype=torch.float64, empty=empty))
    loss, metrics, grad = _loss_and_gradient(call, arguments)
    mask = arguments.pop("mask")
    cu_seqlens, packed_mask, grad, *values = pack(mask, grad, *arguments.values())
    # Tokens after the last sequence do not count.
    packed = dict(zip(arguments, values, strict=True))
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.shape == mask.shape:
            packed[name] = torch.cat((packed[name], packed[name][:1]))
    packed |= {"mask": torch.cat((packed_mask, packed_mask.new_ones(1))), "cu_seqlens": cu_seqlens}
    packed_loss, packed_metrics, packed_grad = _loss_and_gradient(call, packed)
    torch.testing.assert_close(packed_loss, loss)
    torch.testing.assert_close(packed_grad[:-1], grad)
    assert packed_grad[-1] == 0
    assert packed_metrics.keys() == metrics.keys()
    torch.testing.assert_close(packed_metrics, metrics, equal_nan=True)


@each_call
def test_values_outside_the_mask_change_nothing(call):
    x = tokens(6, 9)
    arguments = call.arguments(x)
    expected = _loss_and_gradient(call, arguments)
    for value in (float("nan"), float("-inf"), 7.0):
        # The entropies of tokens that do not count, too, may be anything.
        filled = {
            name: torch.where(x.mask, y, value)
            if isinstance(y, Tensor) and y.shape == x.mask.shape and y.dtype != torch.bool
            else y
            for name, y in arguments.items()
        }
        result = _loss_and_gradient(call, filled)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@one_in(2, call={call.name: call for call in CALLS}, empty=[(0,), (3,), (0, 1, 2, 3, 4, 5), (0, 3)])
def test_completions_without_tokens_are_finite(call, empty):
    x = tokens(6, 9, empty=empty)
    loss, _, grad = _loss_and_gradient(call, call.arguments(x))
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert (grad[list(empty)] == 0).all()
    if call.zero_without_tokens and len(empty) == 6:
        assert loss == 0


@each_call
def test_no_sequences_give_zero(call):
    loss, metrics, grad = _loss_and_gradient(call, call.arguments(tokens(6, 9)) | _without_rows(call))
    assert loss == 0
    assert grad.shape == (0, 9)
    assert metrics


def _without_rows(call: Call) -> dict:
    return {
        name: x[:0] for name, x in call.arguments(tokens(6, 9)).items() if isinstance(x, Tensor) and x.dim()
    }  # fmt: skip


@each_call
def test_extreme_log_probabilities_are_finite(call):
    """Log-ratios of 500 a token would overflow every exponential."""
    arguments = call.arguments(tokens(6, 9))
    name = next(iter(arguments))
    for factor in (1e-3, 500.0):
        loss, _, grad = _loss_and_gradient(call, arguments | {name: arguments[name] * factor})
        assert loss.isfinite()
        assert grad.isfinite().all()


@each_call
@pytest.mark.sampled(2)
def test_nothing_depends_on_values_on_the_host(call):
    """A tensor on the meta device has no values: reading one, or a shape that depends on one, raises."""
    arguments = call.arguments(tokens(6, 9))
    for packed in (False, True):
        if packed:
            cu_seqlens, mask, *values = pack(arguments["mask"], *arguments.values())
            arguments = dict(zip(arguments, values, strict=True)) | {"mask": mask, "cu_seqlens": cu_seqlens}
        on_meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in arguments.items()}
        loss, metrics, grad = _loss_and_gradient(call, on_meta)
        assert loss.is_meta
        assert grad.is_meta
        assert all(x.is_meta for x in metrics.values())


# The test above shows for every call that no shape and no branch depends on a value, which is why each loss compiles
# with its other options too. `make test` compiles one loss.
FIRST_CALLS = {call.loss: call for call in reversed(CALLS)}
COMPILED = [
    pytest.param(call, id=call.name, marks=() if loss is losses.grpo_loss else pytest.mark.thorough)
    for loss, call in FIRST_CALLS.items()
]


@pytest.mark.parametrize("call", COMPILED)
def test_compiled_without_a_graph_break(call):
    arguments = call.arguments(tokens(6, 9))
    torch._dynamo.reset()
    compiled = torch.compile(lambda arguments: call(arguments), backend="aot_eager", fullgraph=True)
    name = next(iter(arguments))
    leaf = arguments[name].clone().requires_grad_()
    loss, metrics = compiled(arguments | {name: leaf})
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close((loss.detach(), metrics, grad), _loss_and_gradient(call, arguments))


def _is_coupled(arguments: dict) -> bool:
    """Return whether the loss of a batch is not a sum over its sequences or pairs."""
    types = arguments.get("loss_type", "")
    return "aot" in types or "aot_unpaired" in types or arguments.get("top_entropy_quantile", 1.0) < 1


WITH_PARTS = [call for call in CALLS if call.loss is not losses.ppo_value_loss]


@one_in(2, call={call.name: call for call in WITH_PARTS}, packed={"padded": False, "packed": True})
def test_the_losses_of_parts_add_up_to_that_of_the_batch(call, packed):
    """The parts have different numbers of sequences, and the chosen sequences another number of tokens."""
    arguments = call.arguments(tokens(8, 9, dtype=torch.float64, empty=(3,)))
    counts_mask = arguments["mask"]
    if "nll_mask" in arguments:
        counts_mask = torch.cat((arguments["nll_mask"][:4], arguments["mask"][4:]))
    counts = losses.batch_counts(counts_mask)
    if _is_coupled(arguments):
        with pytest.raises(ValueError, match="part_of must be None"):
            call(arguments | {"part_of": counts})
        return
    loss, _, grad = _loss_and_gradient(call, arguments)
    part_losses, part_grad = [], torch.zeros_like(grad)
    for rows in ([0, 4], [1, 2, 3, 5, 6, 7]):
        cut = lambda x, rows=rows: x[rows] if isinstance(x, Tensor) and x.dim() and len(x) == 8 else x
        part = {name: cut(x) for name, x in arguments.items()}
        if packed:
            mask = part.pop("mask")
            cu_seqlens, packed_mask, *values = pack(mask, *part.values())
            part = dict(zip(part, values, strict=True)) | {"mask": packed_mask, "cu_seqlens": cu_seqlens}
        name = next(iter(arguments))
        leaf = part[name].clone().requires_grad_()
        part_loss, metrics = call(part | {name: leaf, "part_of": counts})
        assert metrics == {}
        part_losses.append(part_loss)
        (dleaf,) = torch.autograd.grad(part_loss, leaf, materialize_grads=True)
        if packed:
            ends = torch.where(mask, torch.arange(1, 10), 0).amax(-1)
            whole = torch.zeros_like(part_grad[rows])
            whole[torch.arange(9) < ends[:, None]] = dleaf
            dleaf = whole
        part_grad[rows] = dleaf
    torch.testing.assert_close(torch.stack(part_losses).sum().detach(), loss)
    torch.testing.assert_close(part_grad, grad)


CONSTANTS = ("ref_log_probs", "old_log_probs", "old_values", "returns", "advantages", "log_sum_sq_probs", "kl")


@each_call
def test_only_the_policy_gets_a_gradient_and_arguments_stay_unchanged(call):
    arguments = call.arguments(tokens(6, 9))
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    name, *others = arguments
    leaves = {key: arguments[key].requires_grad_() for key in (name, *(x for x in others if x in CONSTANTS))}
    loss, metrics = call(arguments)
    (first,) = torch.autograd.grad(loss, leaves[name], retain_graph=True)
    loss.backward()
    assert torch.equal(leaves.pop(name).grad, first)
    assert all(leaf.grad is None for leaf in leaves.values())
    assert all(torch.equal(arguments[name].detach(), x) for name, x in before.items())
    assert metrics
    assert all(metric.shape == () and not metric.requires_grad for metric in metrics.values())


@pytest.mark.parametrize("name", losses.__all__)
def test_example_prints_its_result(name):
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(getattr(losses, name), name, globs={"torch": torch})
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
