"""The delta rules in chunks against the recurrence token by token in fp64, and against transformers' code."""

import functools
import itertools
import sys

import pytest
import torch
from torch.utils._pytree import tree_map_only

import tigon
from delta_rule_cases import GATED, RULES, make_inputs, results_of, widen
from op_cases import DEVICE, DTYPES, INTERPRETED, assert_refused, one_in
from tigon.ops.mixers import delta_rule_launchers, delta_rule_steps
from tigon.ops.mixers.delta_rule_chunks import DeltaInputs, DeltaOptions, chunked_backward, chunked_forward
from tigon.testing import assert_accurate

MODULE = sys.modules["tigon.ops.mixers.gated_delta_rule"]
# In fp32, torch computes the rules on all devices. The limit of the errors of the kernels is relative.
KERNEL_DTYPES = [torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16]
KERNEL_LIMIT = 0.004 if INTERPRETED else 0.02
# The heads of q and k, and those of v.
HEADS = {"one head": (1, 1), "groups of 2": (2, 4), "groups of 4": (1, 4)}


def every_rule(test):
    """Run a test with each rule."""
    return pytest.mark.parametrize("rule", RULES.values(), ids=RULES)(test)


def assert_as_accurate_as_stock(rule, inputs, dtype: torch.dtype, **options) -> None:
    """Check all results by the oracle in the dtype of q, k and v. The states between chunks are products in it."""
    exact = results_of(rule.reference, widen(inputs), **options)
    eager, actual = (results_of(f, inputs, **options) for f in (rule.stock, rule.op))
    for name, x in actual.items():
        assert x.dtype == eager[name].dtype, name
        size = exact[name].abs().max().item() if name in ("g", "beta", "state") else 0.0
        # The gradient of beta is a sum over the features of a head, whose rounded terms are of the order of 1.
        size = max(size, inputs["v"].shape[3] ** 0.5) if name == "beta" else size
        assert_accurate(x.to(dtype), eager[name].to(dtype), exact[name], smallest=size, msg=name)


def assert_small_errors(rule, results, inputs, limit: float) -> None:
    """Check the root mean square of the errors of each result, relative to that of the exact result."""
    for name, exact in results_of(rule.reference, widen(inputs)).items():
        error, size = (x.square().mean().sqrt().item() for x in (results[name] - exact, exact))
        # Smaller numbers than 1e-7 are zeros in fp16.
        assert error <= limit * size + 1e-7, (name, error, size)


# Chunks have 64 tokens: none, part of one, exactly one, and tails of one and of two tokens.
@every_rule
@one_in(1, tokens=[1, 63, 64, 65, 130], heads=HEADS)
@pytest.mark.no_interpreter("fp64 runs no kernel.")
@pytest.mark.sampled(7)
def test_chunks_compute_the_recurrence(tokens, heads, rule):
    inputs = widen(make_inputs(rule, batch=2, tokens=tokens, heads=heads, sizes=(16, 24)))
    for normalises in (True, False):
        if not normalises:
            inputs["k"] = (inputs["k"].detach() / 4).requires_grad_()
        options = {"use_qk_l2norm": normalises, "scale": 0.3}
        actual = results_of(rule.op, inputs, **options)
        expected = results_of(rule.reference, inputs, **options)
        for name, x in actual.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


@every_rule
@pytest.mark.no_interpreter("fp64 runs no kernel.")
def test_chunks_compute_what_transformers_computes(rule):
    inputs = widen(make_inputs(rule, batch=2, tokens=130, heads=(2, 4)))
    exact, actual = (rule.reference(**inputs, output_final_state=True, use_qk_l2norm=True) for _ in "ab")
    # transformers rounds to fp32 inside.
    for expected, x in zip(rule.stock(**inputs, output_final_state=True, use_qk_l2norm=True), actual, strict=True):
        torch.testing.assert_close(x, expected.double(), rtol=1e-5, atol=1e-5)
    assert exact[0].dtype == torch.float64


@every_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@one_in(1, tokens=[1, 63, 64, 65, 130], heads=HEADS)
@pytest.mark.sampled(7, in_interpreter=11)
def test_the_rule_is_as_accurate_as_transformers(tokens, heads, dtype, rule):
    # A block of keys with a mask, and a last block of values that is half full.
    assert_as_accurate_as_stock(rule, make_inputs(rule, tokens=tokens, heads=heads, sizes=(24, 48), dtype=dtype), dtype)


STRENGTHS = {
    "g -50": ("g", -50.0), "g -8": ("g", -8.0), "no decay": ("g", 0.0), "beta 0": ("beta", 0.0),
    "beta 1": ("beta", 1.0),
}  # fmt: skip


@every_rule
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(("name", "value"), STRENGTHS.values(), ids=STRENGTHS)
@pytest.mark.sampled(3)
def test_extreme_gates(name, value, dtype, rule):
    inputs = make_inputs(rule, dtype=dtype)
    # The logarithm of the decay of a chunk is rounded, so a state that has decayed to 1e-23 has few digits.
    inputs["g"] = (inputs["g"].detach() / 64).requires_grad_()
    inputs[name] = torch.full_like(inputs[name], value).requires_grad_()
    if dtype == torch.float32:
        assert_as_accurate_as_stock(rule, inputs, dtype)
    else:
        # The kernels round the state that each chunk reads, which transformers' code does not.
        assert_small_errors(rule, results_of(rule.op, inputs), inputs, KERNEL_LIMIT)


@every_rule
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("strong", "decay"),
    [((slice(None), slice(None), 1), -10.0), ((slice(None), [10, 40, 66]), -8.0), ((..., slice(None, None, 3)), -10.0)],
    ids=["a head", "some tokens", "each third head or feature"],
)
@pytest.mark.sampled(5)
def test_a_strong_decay_beside_weak_ones_keeps_the_digits_of_its_gradient(strong, decay, dtype, rule):
    """The heads of a group share sums, and so do the tokens of a chunk and the features of a head."""
    inputs = make_inputs(rule, dtype=dtype)
    decays = torch.full(inputs["g"].shape, -0.01)
    is_strong = torch.zeros_like(decays, dtype=torch.bool)
    is_strong[strong] = True
    inputs["g"] = decays.masked_fill(is_strong, decay).to(DEVICE).requires_grad_()
    actual, exact = results_of(rule.op, inputs)["g"], results_of(rule.reference, widen(inputs))["g"]
    error, size = (x[is_strong.to(DEVICE)].square().mean().sqrt().item() for x in (actual - exact, exact))
    assert error <= KERNEL_LIMIT * size


@every_rule
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_a_reset_keeps_the_digits_of_its_gradient_beside_its_own_write(dtype, rule):
    """The token writes 1e7 times as much to the last state as remains there of the tokens before it."""
    inputs = make_inputs(rule, tokens=64, dtype=dtype)
    decays = torch.full_like(inputs["g"], -0.01, dtype=torch.float32)
    decays[:, 40] = -16.0
    inputs["g"] = decays.requires_grad_()

    def gradient(function, tensors):
        state = function(**tensors, output_final_state=True, use_qk_l2norm=True)[1]
        weights = torch.linspace(-1, 1, state.numel(), dtype=state.dtype, device=DEVICE).view_as(state)
        return torch.autograd.grad((state * weights).sum(), tensors["g"])[0][:, 40].double()

    actual, exact = gradient(rule.op, inputs), gradient(rule.reference, widen(inputs))
    assert (actual - exact).norm() <= KERNEL_LIMIT * exact.norm()


# Samples that end in, at and after the end of a chunk, and one that is empty.
BOUNDS = (0, 5, 69, 69, 134)


@every_rule
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("with_states", [False, True], ids=["no states", "states"])
@pytest.mark.sampled(in_interpreter=3)
def test_packed_samples_equal_separate_ones_bit_for_bit(with_states, dtype, rule):
    bounds = torch.tensor(BOUNDS, device=DEVICE, dtype=torch.int32)
    inputs = make_inputs(rule, tokens=BOUNDS[-1], heads=(1, 2), samples=len(BOUNDS) - 1, dtype=dtype)
    if not with_states:
        del inputs["initial_state"]
    do = torch.randn_like(inputs["v"])
    options = {"use_qk_l2norm": True, "output_final_state": with_states}

    def run(tensors, upstream, dstate, **more):
        o, state = rule.op(**tensors, **options, **more)
        outputs, gradients = ([o, state], [upstream, dstate]) if with_states else ([o], [upstream])
        return [*outputs, *torch.autograd.grad(outputs, list(tensors.values()), gradients)]

    dstate = torch.randn(len(BOUNDS) - 1, 2, 16, 16, device=DEVICE)
    packed = run(inputs, do, dstate, cu_seqlens=bounds)
    for i, (start, end) in enumerate(itertools.pairwise(BOUNDS)):
        part = lambda x, i=i, start=start, end=end: x[i : i + 1] if x.shape[0] > 1 else x[:, start:end]
        sample = {name: part(x).detach().requires_grad_() for name, x in inputs.items()}
        separate = run(sample, part(do), dstate[i : i + 1])
        for a, b in zip(packed, separate, strict=True):
            assert torch.equal(part(a), b)


@pytest.mark.parametrize(
    "bounds", [(0, 5), (0, 640, 0, 640, 0, 640), (3, 70), (0, 50, 20, 70), (-9, 70), (0, 71)], ids=str
)
@every_rule
@pytest.mark.sampled(in_interpreter=5)
def test_malformed_bounds_make_all_results_nan(bounds, rule, monkeypatch):
    """Nothing reads the bounds of packed samples on a GPU before a launch, so they may be wrong there."""
    runs_kernels = INTERPRETED or DEVICE == "cuda"
    dtype = KERNEL_DTYPES[-1] if runs_kernels else torch.float32
    tensors = make_inputs(rule, tokens=70, samples=len(bounds) - 1, dtype=dtype)
    cu_seqlens = torch.tensor(bounds, device=DEVICE)
    inputs = DeltaInputs(**{name: x.detach() for name, x in tensors.items()}, cu_seqlens=cu_seqlens)
    options = DeltaOptions(0.25, True, True)
    do, dlast = torch.ones_like(inputs.v), torch.ones_like(inputs.initial_state)
    if runs_kernels:
        # The memory of results is zeros before the kernels write it.
        for name in ("empty_forward", "empty_backward"):
            function = getattr(delta_rule_steps, name)
            zeros = lambda *arguments, function=function: tree_map_only(torch.Tensor, torch.zero_, function(*arguments))
            monkeypatch.setattr(delta_rule_steps, name, zeros)
        outputs = delta_rule_launchers.delta_rule_forward(inputs.q, inputs, options)
        needs = delta_rule_launchers.NeededDeltaGradients(True, True)
        gradients = delta_rule_launchers.delta_rule_backward(do, dlast, inputs, options, needs)
    else:
        outputs, gradients = chunked_forward(inputs, options), chunked_backward(do, dlast, inputs, options)
    for x in (*outputs, *gradients):
        assert x.isnan().all()


@every_rule
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_resets_lose_no_digits_of_other_tokens(dtype, rule):
    """A g of -1e6 or of -inf at two tokens resets the state, and changes nothing else."""
    results = {}
    for value in (-1e6, -torch.inf):
        inputs = make_inputs(rule, dtype=dtype)
        inputs["g"] = inputs["g"].detach().float().index_fill(1, torch.tensor([10, 40], device=DEVICE), value)
        inputs["g"].requires_grad_()
        results[value] = results_of(rule.op, inputs)
    assert_small_errors(rule, results[-1e6], inputs, 1e-5 if dtype == torch.float32 else KERNEL_LIMIT)
    for name, x in results[-1e6].items():
        assert torch.equal(x, results[-torch.inf][name]), name
    assert not results[-1e6]["g"][:, [10, 40]].any()


@every_rule
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.sampled(in_interpreter=2)
def test_the_states_of_two_calls_join_them(dtype, rule):
    """A sequence in two calls has the results of one call, because the state and its gradient flow through."""
    inputs = make_inputs(rule, tokens=128, dtype=dtype)
    whole = results_of(rule.op, inputs, output_final_state=False)
    first, second = ({n: x if n == "initial_state" else x[:, s] for n, x in inputs.items()} for s in
                     (slice(0, 64), slice(64, 128)))  # fmt: skip
    o, state = rule.op(**first, use_qk_l2norm=True, output_final_state=True)
    rest, _ = rule.op(**second | {"initial_state": state}, use_qk_l2norm=True)
    joined = torch.cat((o, rest), 1)
    upstream = torch.randn(joined.shape, generator=torch.Generator().manual_seed(1)).to(joined)
    gradients = torch.autograd.grad(joined, list(inputs.values()), upstream)
    # The gradients of both calls are rounded before they are joined.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": KERNEL_LIMIT, "atol": KERNEL_LIMIT}
    torch.testing.assert_close(joined, whole["o"], **tolerance)
    for name, gradient in zip(inputs, gradients, strict=True):
        torch.testing.assert_close(gradient, whole[name], **tolerance)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast_changes_no_result(dtype, rule):
    """Under autocast, the products of forward and of backward compute in the dtypes of the inputs."""
    inputs = make_inputs(rule, tokens=70, dtype=dtype)
    expected = results_of(rule.op, inputs)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = results_of(rule.op, inputs)
    for name, x in actual.items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("output", ["o", "state"])
def test_an_output_without_a_gradient_costs_no_zeros(output, monkeypatch):
    """The gradient of a state that no loss reads is None, not zeros [B, H, Dk, Dv]."""
    upstream = []
    for name in ("chunked_backward", "delta_rule_backward"):
        function = getattr(MODULE, name)
        spy = lambda *arguments, function=function: upstream.append(arguments[1]) or function(*arguments)
        monkeypatch.setattr(MODULE, name, spy)
    inputs = make_inputs(tokens=70)
    gradients = []
    for function, tensors in ((GATED.reference, widen(inputs)), (tigon.gated_delta_rule, inputs)):
        o, state = function(**tensors, output_final_state=True, use_qk_l2norm=True)
        loss = (o if output == "o" else state).square().sum()
        gradients.append(torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True))
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-4)
    assert [x is None for x in upstream] == [output == "o"]


@every_rule
def test_bad_arguments_are_refused(rule):
    inputs = {name: x.detach() for name, x in make_inputs(rule, batch=2, tokens=6, heads=(2, 4)).items()}
    q, v, g, state = (inputs[name] for name in ("q", "v", "g", "initial_state"))
    bounds = lambda *values, **options: torch.tensor(values, device=DEVICE, **options)
    packed = {name: x[:1] for name, x in inputs.items() if name != "initial_state"}
    changes = {
        "the 2 heads of q and k must divide the heads of v, got 3": {"v": v[:, :, :3]},
        r"k must have shape \(2, 6, 2, 16\)": {"k": q[:, :5]}, r"g must have shape \(2, 6, 4": {"g": g[:, :5]},
        r"beta must have shape \(2, 6, 4\)": {"beta": g[:, :, :2]},
        "q and k and v must have the same dtype": {"q": q.half()}, "g must be a float32": {"g": g.long()},
        r"initial_state must have shape \(2, 4, 16, 16\)": {"initial_state": state[:1]},
        r"q must have shape \(B, T, H, D\)": {"q": q[..., 0]},
        "packed samples must be one sequence, B = 1, got B = 2": {"cu_seqlens": bounds(0, 6)},
        "scale must be finite": {"scale": float("inf")}, "use_qk_l2norm must be a bool": {"use_qk_l2norm": 1},
    }  # fmt: skip
    on_cpu = {"g must not be above 0, because a state must not grow, got 0.5": {"g": g.abs() + 0.5 - g.abs()}}
    assert_refused(rule.op, inputs, changes | (on_cpu if DEVICE == "cpu" else {}))
    changes = {
        "cu_seqlens must be an int64 or int32 tensor": {"cu_seqlens": bounds(0.0, 6.0)},
        r"cu_seqlens must have shape \(N \+ 1,\)": {"cu_seqlens": bounds(0)},
        r"initial_state must have shape \(2, 4, 16, 16\)": {
            "cu_seqlens": bounds(0, 2, 6), "initial_state": state[:1]
        },
    }  # fmt: skip
    on_cpu = {
        rf"cu_seqlens must ascend from 0 to T = 6, got \[{values[0]}": {"cu_seqlens": bounds(*values)}
        for values in ((0, 4, 3, 6), (1, 6))
    }
    on_cpu |= {r"cu_seqlens must ascend from 0 to T = 6, got \[0, 5\]": {"cu_seqlens": bounds(0, 5)}}
    assert_refused(rule.op, packed, changes | (on_cpu if DEVICE == "cpu" else {}))
    on_cpu = {name: tensor.detach().cpu() for name, tensor in inputs.items()}
    with pytest.raises(ValueError, match=f"{rule.op.__name__}: g must not be above 0"):
        rule.reference(**on_cpu | {"g": g.abs().cpu()})


@every_rule
@pytest.mark.kernels
@pytest.mark.parametrize("beta", [0.0, 1e-7, -0.5, 1.9])
@pytest.mark.sampled(3)
def test_every_beta_has_its_gradient(rule, beta):
    """A kernel divides by beta. A token whose beta is 0 writes nothing, but its beta has a gradient."""
    inputs = make_inputs(rule, heads=(1, 2), sizes=(16, 24), dtype=KERNEL_DTYPES[-1])
    with torch.no_grad():
        inputs["beta"][:, ::3] = beta
    assert_small_errors(rule, results_of(rule.op, inputs), inputs, KERNEL_LIMIT)


@every_rule
@pytest.mark.kernels
def test_keys_of_tokens_that_write_nothing_may_be_large(rule):
    """Their products do not fit into fp16. Without a write, no other token sees them."""
    inputs = make_inputs(rule, heads=(1, 2), dtype=torch.float16)
    with torch.no_grad():
        inputs["k"].div_(8)[:, ::3] *= 800
        inputs["beta"][:, ::3] = 0
    exact, results = (results_of(f, x, use_qk_l2norm=False) for f, x in (
        (rule.reference, widen(inputs)), (rule.op, inputs)))  # fmt: skip
    for name in ("o", "state", "q", "v", "initial_state"):
        error = (results[name] - exact[name]).square().mean().sqrt()
        assert error <= 0.01 * exact[name].square().mean().sqrt(), name


@pytest.mark.kernels
def test_an_initial_state_without_a_gradient_counts_in_that_of_g():
    inputs = make_inputs(dtype=KERNEL_DTYPES[-1])
    state = inputs.pop("initial_state").detach()
    ours, exact = (
        results_of(functools.partial(f, initial_state=state), y)
        for f, y in ((tigon.gated_delta_rule, inputs), (GATED.reference, widen(inputs)))
    )
    error = (ours["g"] - exact["g"]).square().mean().sqrt()
    assert error <= KERNEL_LIMIT * exact["g"].square().mean().sqrt()
