"""The state space dual in chunks against the recurrence token by token in fp64, and against transformers' code."""

import functools
import itertools

import pytest
import torch
from torch import Tensor

import tigon
from op_cases import DEVICE, DTYPES, assert_refused
from tigon.ops.mixers import kernel_check, ssd_launchers
from tigon.ops.mixers.ssd import ssd_reference
from tigon.ops.mixers.ssd_chunks import SSDInputs, SSDOptions, chunked_backward, chunked_forward
from tigon.ops.mixers.ssd_config import SSDConfig, SSDProblem, split_count
from tigon.runtime.device import device_of

OPTIONS = {"dt_softplus": True, "return_final_states": True}
# The groups of B and C, and the heads of x.
HEADS = {"one head": (1, 1), "groups of 2": (2, 4), "groups of 4": (1, 4)}


def make_inputs(
    *, batch: int = 1, tokens: int = 70, heads: tuple[int, int] = (1, 2), sizes: tuple[int, int] = (8, 16),
    samples: int | None = None, has_wide_d: bool = False, dtype: torch.dtype = torch.float32, is_strided: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the tensors of a layer by name, with states before the first tokens."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator)
    (groups, count), (size, state_size) = heads, sizes
    tensors = {
        "x": normal(batch, tokens, count, size),
        "dt": normal(batch, tokens, count),
        "A": -normal(count).exp(),
        "B": normal(batch, tokens, groups, state_size),
        "C": normal(batch, tokens, groups, state_size),
        "D": normal(count, size) if has_wide_d else normal(count),
        "z": normal(batch, tokens, count, size),
        "dt_bias": normal(count) - 1,
        "initial_states": normal(samples or batch, count, size, state_size),
    }
    tensors = {name: x.to(DEVICE, dtype) for name, x in tensors.items()}
    if is_strided:
        # x, B and C are columns of one tensor, as a convolution returns them. Parameters are in fp32.
        joined = torch.cat([tensors[name].flatten(2) for name in ("x", "B", "C")], 2)
        sizes = [tensors[name][0, 0].numel() for name in ("x", "B", "C")]
        for name, part in zip(("x", "B", "C"), joined.split(sizes, 2), strict=True):
            tensors[name] = part.view(tensors[name].shape)
        tensors |= {name: tensors[name].float() for name in ("A", "D", "dt_bias", "dt")}
    return {name: x.detach().requires_grad_() for name, x in tensors.items()}


def results_of(function, inputs, **options) -> dict[str, Tensor]:
    """Return y, the last states and all gradients by name. A gradient flows into both outputs."""
    y, states = function(**inputs, **OPTIONS | options)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).to(x) for x in (y, states)]
    gradients = torch.autograd.grad([y, states], list(inputs.values()), upstream)
    return {"y": y, "states": states} | dict(zip(inputs, gradients, strict=True))


# Chunks have 64 tokens: none, part of one, exactly one, and tails of one and of two tokens.
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.no_interpreter("torch computes the op.")
def test_chunks_compute_the_recurrence(tokens, heads):
    inputs = make_inputs(batch=2, tokens=tokens, heads=heads, has_wide_d=tokens == 65, dtype=torch.float64)
    for options in ({}, {"dt_limit": (0.1, 0.5)}, {"dt_softplus": False}):
        actual, expected = (results_of(f, inputs, **options) for f in (tigon.ssd, ssd_reference))
        for name, x in actual.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


# The number of tokens, the groups of B and C and the heads of x, and their sizes.
KERNEL_CASES = {
    "a chunk": (64, (1, 1), (16, 16)),
    "a tail, groups, odd sizes": (70, (2, 6), (24, 40)),
    "many heads of a group": (65, (1, 34), (16, 16)),
    "large states": (66, (1, 1), (16, 200)),
}


@pytest.mark.kernels
@pytest.mark.parametrize("case", KERNEL_CASES.values(), ids=KERNEL_CASES)
@pytest.mark.parametrize("options", [{}, {"dt_limit": (0.3, 0.8)}], ids=["no limits", "limits"])
def test_kernels_compute_the_recurrence(case, options):
    """The error of every result is at most that of rounding a few factors."""
    tokens, heads, sizes = case
    inputs = make_inputs(
        batch=1 + (tokens == 65), tokens=tokens, heads=heads, sizes=sizes, has_wide_d=not options, dtype=DTYPES[-1],
        is_strided=bool(options),
    )  # fmt: skip
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    actual, exact = (results_of(f, x, **options) for f, x in ((tigon.ssd, inputs), (ssd_reference, wide)))
    for name, x in actual.items():
        error, size = (y.double().norm().item() for y in (x.double() - exact[name], exact[name]))
        assert error <= 4 * torch.finfo(DTYPES[-1]).eps * size, (name, error / size)


@pytest.mark.kernels
@pytest.mark.parametrize("is_broken", [False, True], ids=["right kernels", "a wrong kernel"])
@pytest.mark.parametrize("bounds_dtype", [None, torch.int32], ids=["one sample", "packed"])
def test_the_self_check_finds_a_wrong_kernel(is_broken, bounds_dtype, monkeypatch):
    if is_broken:
        launch = ssd_launchers.launch

        def launch_twice_the_products(kernel, grid, *arguments, **constants):
            launch(kernel, grid, *arguments, **constants)
            if kernel is ssd_launchers.group_products_kernel:
                arguments[kernel.arg_names.index("products_ptr")].mul_(2)

        monkeypatch.setattr(ssd_launchers, "launch", launch_twice_the_products)
    like = torch.empty(1, 1, 2, 16, dtype=DTYPES[-1], device=DEVICE)
    config = SSDConfig.choose(SSDProblem(16, 16), device_of(like))
    dtypes = like.dtype, torch.float32, torch.float32, like.dtype
    variant = ssd_launchers.SSDVariant(16, 16, 2, True, True, True, bounds_dtype, config, dtypes)
    assert ssd_launchers.check_kernels(like, variant) is not is_broken


def test_a_check_without_memory_has_no_verdict(monkeypatch):
    def lack_memory():
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kernel_check, "may_wait", lambda: True)
    monkeypatch.setattr(kernel_check, "_verdicts", {})
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    check = functools.partial(kernel_check.compare_results, torch.device("cpu"), lack_memory)
    with pytest.raises(torch.OutOfMemoryError):
        kernel_check.passes_check("ssd", torch.zeros(1), (), check)
    assert not kernel_check._verdicts
    assert not kernel_check.passes_check("ssd", torch.zeros(1), (), lambda: False)
    assert list(kernel_check._verdicts.values()) == [False]


def test_heads_of_a_group_are_split_evenly():
    assert [split_count(n) for n in (1, 16, 17, 24, 48, 128)] == [1, 1, 17, 2, 3, 8]


@pytest.mark.no_interpreter("torch computes the op.")
def test_chunks_compute_what_transformers_computes():
    module = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    if not hasattr(module, "mamba2_chunk_scan"):
        pytest.skip("this version of transformers has no function of the scan")
    inputs = {name: x.detach() for name, x in make_inputs(tokens=130, heads=(2, 4)).items() if name != "z"}
    stock = getattr(module.mamba2_chunk_scan, "__wrapped__", module.mamba2_chunk_scan)
    expected, actual = (
        f(inputs["x"], **{name: x for name, x in inputs.items() if name != "x"}, chunk_size=32, **OPTIONS)
        for f in (stock, tigon.ssd)
    )
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rate", [-200.0, -8.0, 0.0])
@pytest.mark.no_interpreter("torch computes the op.")
def test_the_gradient_of_a_strong_decay_has_its_digits(rate):
    inputs = make_inputs(tokens=130)
    inputs["A"] = torch.full_like(inputs["A"], rate).requires_grad_()
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    actual, exact = results_of(tigon.ssd, inputs), results_of(ssd_reference, wide)
    for name, x in actual.items():
        error, size = (y.square().mean().sqrt().item() for y in (x - exact[name], exact[name]))
        assert error <= 1e-5 * size, (name, error, size)


# Samples that end in, at and after the end of a chunk, and one that is empty.
BOUNDS = (0, 5, 69, 69, 133, 150)
PARAMETERS = ("A", "D", "dt_bias")


@pytest.mark.parametrize("dtype", [torch.float32, DTYPES[-1]], ids=["torch", "kernels"])
def test_packed_samples_equal_separate_ones_bit_for_bit(dtype):
    count = len(BOUNDS) - 1
    inputs = make_inputs(tokens=BOUNDS[-1], samples=count, dtype=dtype)
    # The bits of torch's SiLU on a CPU depend on the place of an element in its tensor.
    del inputs["z"]
    dy, dstates = torch.randn_like(inputs["x"]), torch.randn_like(inputs["initial_states"])

    def run(tensors, dy, dstates, **more):
        outputs = tigon.ssd(**tensors, **OPTIONS, **more)
        names = [name for name in tensors if name not in PARAMETERS]
        return [*outputs, *torch.autograd.grad(outputs, [tensors[name] for name in names], [dy, dstates])]

    packed = run(inputs, dy, dstates, cu_seqlens=torch.tensor(BOUNDS, device=DEVICE, dtype=torch.int32))
    for i, (start, end) in enumerate(itertools.pairwise(BOUNDS)):
        part = lambda x, i=i, start=start, end=end: x[i : i + 1] if x.shape[0] == count else x[:, start:end]
        sample = {n: x if n in PARAMETERS else part(x).detach().requires_grad_() for n, x in inputs.items()}
        for a, b in zip(packed, run(sample, part(dy), dstates[i : i + 1]), strict=True):
            assert torch.equal(part(a), b)


@pytest.mark.kernels
def test_packed_gradients_of_parameters_are_those_of_the_recurrence():
    """They are sums over all chunks, of which some do not exist."""
    inputs = make_inputs(tokens=BOUNDS[-1], samples=len(BOUNDS) - 1, dtype=DTYPES[-1])
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    options = {"cu_seqlens": torch.tensor(BOUNDS, device=DEVICE)}
    actual, exact = (results_of(f, x, **options) for f, x in ((tigon.ssd, inputs), (ssd_reference, wide)))
    for name in PARAMETERS:
        error, size = ((y.double()).norm().item() for y in (actual[name].double() - exact[name], exact[name]))
        assert error <= 4 * torch.finfo(DTYPES[-1]).eps * size, (name, error / size)


@pytest.mark.parametrize("dtype", [torch.float32, DTYPES[-1]], ids=["torch", "kernels"])
def test_an_infinite_rate_clears_the_state_at_every_token(dtype):
    inputs = make_inputs(tokens=70, dtype=dtype)
    inputs["A"] = torch.full_like(inputs["A"], -torch.inf).requires_grad_()
    y, states = tigon.ssd(**inputs, **OPTIONS)
    expected = ssd_reference(**inputs, **OPTIONS)
    torch.testing.assert_close(states, expected[1].to(states), rtol=1e-2, atol=1e-3)
    assert y.isfinite().all()


@pytest.mark.parametrize("bounds", [(0, 5), (3, 70), (0, 50, 20, 70), (-9, 70), (0, 71)], ids=str)
@pytest.mark.no_interpreter("torch computes the op.")
def test_malformed_bounds_make_all_results_nan(bounds):
    """Nothing reads the bounds of packed samples on a GPU before a launch, so they may be wrong there."""
    tensors = {n: x.detach() for n, x in make_inputs(samples=len(bounds) - 1).items() if n != "z"}
    inputs = SSDInputs(**tensors, cu_seqlens=torch.tensor(bounds, device=DEVICE))
    options = SSDOptions(True, 0.0, torch.inf, True)
    results = (
        *chunked_forward(inputs, options),
        *chunked_backward(torch.ones_like(inputs.x), torch.ones_like(inputs.initial_states), inputs, options),
    )
    for x in results:
        assert x.isnan().all()


@pytest.mark.kernels
def test_malformed_bounds_make_all_results_of_kernels_nan():
    tensors = {n: x.detach() for n, x in make_inputs(samples=3, dtype=DTYPES[-1]).items() if n != "z"}
    inputs = SSDInputs(**tensors, cu_seqlens=torch.tensor((0, 50, 20, 70), device=DEVICE))
    options = SSDOptions(True, 0.0, torch.inf, True)
    results = (
        *ssd_launchers.ssd_forward(inputs.x, inputs, options),
        *ssd_launchers.ssd_backward(
            torch.ones_like(inputs.x), torch.ones_like(inputs.initial_states, dtype=torch.float32), inputs, options
        ),
    )
    for x in results:
        assert x.isnan().all()


@pytest.mark.no_interpreter("torch computes the op.")
def test_the_states_of_two_calls_join_them():
    inputs = {name: x.detach() for name, x in make_inputs(tokens=128).items()}
    y, states = tigon.ssd(**inputs, **OPTIONS)
    with_tokens = ("x", "dt", "B", "C", "z")
    halves = [{n: x[:, s] if n in with_tokens else x for n, x in inputs.items()} for s in
              (slice(0, 64), slice(64, 128))]  # fmt: skip
    first, middle = tigon.ssd(**halves[0], **OPTIONS)
    second, last = tigon.ssd(**halves[1] | {"initial_states": middle}, **OPTIONS)
    torch.testing.assert_close(torch.cat((first, second), 1), y)
    torch.testing.assert_close(last, states)


def test_bad_arguments_are_refused():
    inputs = {name: x.detach() for name, x in make_inputs(batch=2, tokens=6, heads=(2, 4)).items()}
    x, dt, A, B = (inputs[name] for name in ("x", "dt", "A", "B"))
    bounds = functools.partial(torch.tensor, device=DEVICE)
    changes = {
        "the 3 groups of B and C must divide the heads of x, got 4": dict.fromkeys("BC", B[:, :, [0, 0, 1]]),
        r"x must have shape \(B, T, H, P\)": {"x": x[0]},
        r"dt must have shape \(2, 6, 4\)": {"dt": dt[:, :5]},
        r"A must have shape \(4,\)": {"A": A[:3]},
        r"C must have shape \(2, 6, 2, 16\)": {"C": B[:, :5]},
        r"D must have shape \(4,\)": {"D": A[:3]},
        r"dt_bias must have shape \(4,\)": {"dt_bias": A[:3]},
        r"initial_states must have shape \(2, 4, 8, 16\)": {"initial_states": inputs["initial_states"][:1]},
        "x and B and C and z must have the same dtype": {"x": x.half()},
        "dt must be a float32": {"dt": dt.long()},
        "dt_softplus must be a bool": {"dt_softplus": 1},
        "dt_limit must be two numbers": {"dt_limit": 1.0},
        r"dt_limit\[0\] must be finite and not negative": {"dt_limit": (-1.0, 1.0)},
        "dt_limit must ascend": {"dt_limit": (2.0, 1.0)},
        "chunk_size must be positive": {"chunk_size": 0},
        "packed samples must be one sequence, B = 1, got B = 2": {"cu_seqlens": bounds([0, 6])},
    }
    on_cpu = {"A must not be above 0, because a state must not grow": {"A": A.abs()}}
    assert_refused(tigon.ssd, inputs, changes | (on_cpu if DEVICE == "cpu" else {}))
