"""The kernel of compact states is compared with its reference, and both with a step in fp64."""

import itertools
from unittest.mock import patch

import pytest
import torch

from op_cases import DEVICE
from tigon.ops.optim import adamw_kernels, formats, tensor_table
from tigon.ops.optim.adamw_kernels import adamw_step
from tigon.ops.optim.adamw_reference import AdamWOptions, AdamWTensors, adamw_reference, start_of_step, step_reference

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make(n: int, param: str, state: str, master: str | None, grad: str | None = None, seed: int = 0) -> AdamWTensors:
    """Return the tensors of a parameter after some steps."""
    generator = torch.Generator().manual_seed(seed)
    p, g, m = (torch.randn(n, generator=generator) for _ in range(3))
    g = g * torch.randn(n, generator=generator).exp()
    m, v = 0.1 * m, 0.01 * torch.rand(n, generator=generator) ** 2
    m_scale = v_scale = None
    if state == "8bit":
        (m, m_scale), (v, v_scale) = formats.encode_signed(m), formats.encode_squares(v)
    else:
        m, v = m.to(FLOATS[state]), v.to(FLOATS[state])
    weight, dtype = None, FLOATS[param]
    if master == "fp32":
        weight = p
    elif master == "bf16+8":
        p, weight = formats.split_master(p)
    tensors = (p.to(dtype), g.to(FLOATS[grad or param]), m, v, m_scale, v_scale, weight)
    return AdamWTensors(*(x if x is None else x.to(DEVICE) for x in tensors), key=3, step=7.0)


def compact_step(tensors: list[AdamWTensors], **options) -> None:
    adamw_step(tensors, AdamWOptions(**options))


def compact_reference(x: AdamWTensors, **options) -> None:
    step_reference(x, AdamWOptions(**options))


def copied(x: AdamWTensors, **changes) -> AdamWTensors:
    return AdamWTensors(*(y.clone() if isinstance(y, torch.Tensor) else y for y in x))._replace(**changes)


def in_fp64(x: AdamWTensors, factor: float = 1.0, **options) -> tuple[torch.Tensor, ...]:
    """Return p, m and v after an exact step."""
    p, m, v = start_of_step(x.param, x.master), x.exp_avg, x.exp_avg_sq
    if x.exp_avg_scale is not None:
        m, v = formats.decode_signed(m, x.exp_avg_scale), formats.decode_squares(v, x.exp_avg_sq_scale)
    g = x.grad.double() * factor
    return adamw_reference(p.double(), g, m.double(), v.double(), float(x.step), **(OPTIONS | options))


def assert_codes_are_near(x: AdamWTensors, m: torch.Tensor, v: torch.Tensor) -> None:
    """Compare codes with exact moments: half a step for m, which is rounded to nearest, and one step for v."""
    for codes, scale, exact, power, steps in (
        (x.exp_avg, x.exp_avg_scale, m, 0.5, 0.501),
        (x.exp_avg_sq + 0.5, x.exp_avg_sq_scale, v, 0.25, 1.001),
    ):
        scales = scale.repeat_interleave(formats.QUANT_BLOCK)[: codes.numel()]
        error = codes.double() * scales - exact.abs() ** power * exact.sign()
        assert (error.abs() <= steps * scales).all()


# The interpreter truncates fp32 to bf16, so there bf16 is tested where the kernel rounds by itself.
KINDS = [
    *itertools.product(["fp32", "fp16"], ["8bit", "fp32", "fp16"], [None]),
    *itertools.product(["fp16"], ["8bit", "fp32"], ["fp32"]),
    *itertools.product(["bf16"], ["8bit", "fp32"], ["bf16+8"]),
]


@pytest.mark.parametrize("runs_kernel", [False, pytest.param(True, marks=pytest.mark.kernels)], ids=["torch", "kernel"])
@pytest.mark.parametrize(("param", "state", "master"), KINDS)
def test_a_step_is_exact_up_to_its_formats(param, state, master, runs_kernel):
    n = 1029 if runs_kernel else 1500
    factor = torch.tensor(0.3, device=DEVICE)
    x = make(n, param, state, master)
    p, m, v = in_fp64(x, factor.item())
    before = start_of_step(x.param, x.master).double()
    if runs_kernel:
        compact_step([x], **OPTIONS, factor=factor)
    else:
        compact_reference(x, **OPTIONS, factor=factor)
    weight = start_of_step(x.param, x.master).double()
    # A number of 24 bits has 15 bits after the first, so rounding adds at most 2^-16.
    rtol = {"bf16+8": 2.0**-16, "fp32": 2.0**-24}.get(master, torch.finfo(x.param.dtype).eps / 2)
    # The update has an error of a few units of fp32, and 8-bit moments take approximate roots.
    update = (p - before).abs()
    assert ((weight - p).abs() <= 1.01 * rtol * p.abs() + 2e-6 * update + 2e-7 * before.abs()).all()
    if master is not None:
        torch.testing.assert_close(x.param.double(), weight, rtol=torch.finfo(x.param.dtype).eps / 2, atol=0.0)
    if state == "8bit":
        assert_codes_are_near(x, m, v)
    else:
        for moment, exact in ((x.exp_avg, m), (x.exp_avg_sq, v)):
            torch.testing.assert_close(moment, exact.to(moment.dtype), rtol=torch.finfo(moment.dtype).eps, atol=1e-7)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "options", [{"maximize": True}, {"weight_decay": 0.0}, {"betas": (0.0, 0.5)}, {"eps": 1e-3}], ids=str
)
@pytest.mark.parametrize("are_tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_options_reach_the_kernel(options, are_tensors, state):
    x = make(400, "fp32", state, None)
    p, _, _ = in_fp64(x, **options)
    arguments = OPTIONS | options
    if are_tensors:
        arguments["lr"] = torch.tensor(arguments["lr"], device=DEVICE)
        x = x._replace(step=torch.tensor(x.step, device=DEVICE))
    compact_step([x], **arguments)
    torch.testing.assert_close(x.param.double(), p, rtol=4e-6, atol=4e-7)


@pytest.mark.parametrize("runs_kernel", [False, pytest.param(True, marks=pytest.mark.kernels)], ids=["torch", "kernel"])
def test_second_moments_lose_no_slow_change_on_average(runs_kernel):
    """After the gradient has become smaller, v falls by 1 % a step, which is less than half a step of most codes."""
    n, steps = 1024, 60
    generator = torch.Generator().manual_seed(0)
    v = (1 + torch.rand(n, generator=generator)).to(DEVICE)
    (m_codes, m_scale), (v_codes, v_scale) = formats.encode_signed(0 * v), formats.encode_squares(v)
    # The largest value of each block does not fall, and so the scales do not.
    g = torch.zeros(n, device=DEVICE)
    v_codes[::128], g[::128] = 255, v_scale * 255.5**1
    g[::128] = (v_scale * 255.5) ** 2
    x = AdamWTensors(torch.zeros(n, device=DEVICE), g, m_codes, v_codes, m_scale, v_scale, None, 0, 1.0)
    start = formats.decode_squares(v_codes, v_scale)
    for step in range(1, steps + 1):
        options = OPTIONS | {"betas": (0.9, 0.99)}
        (lambda y: compact_step([y], **options) if runs_kernel else compact_reference(y, **options))(
            x._replace(step=float(step))
        )
    ratios = (formats.decode_squares(x.exp_avg_sq, x.exp_avg_sq_scale) / start).view(-1, 128)[:, 1:]
    assert ratios.mean().item() == pytest.approx(0.99**steps, rel=0.01)
    # Each value has an error of a step or two, which is 1.6 % of v at the largest code.
    assert ratios.std() < 0.05 * 0.99**steps


@pytest.mark.kernels
@pytest.mark.parametrize("n", [1, 8, 1000, 2048])
def test_stochastic_rounding_is_that_of_the_reference(n):
    x = make(n, "bf16", "fp32", None)
    expected, other = copied(x), copied(x, key=4)
    compact_step([x, other], **OPTIONS, is_stochastic=True)
    compact_reference(expected, **OPTIONS, is_stochastic=True)
    # The sum of bits and random number is next to a carry for few elements, where the order of sums in fp32 matters.
    assert (x.param == expected.param).float().mean() >= (0.99 if n > 100 else 1.0)
    assert n < 100 or (x.param == other.param).float().mean() < 0.9


@pytest.mark.kernels
def test_a_parameter_that_something_else_changed_restarts_its_master():
    x = make(256, "fp16", "fp32", "fp32")
    x.param[:100] = 2.0
    expected = copied(x)
    compact_step([x], **OPTIONS)
    compact_reference(expected, **OPTIONS)
    torch.testing.assert_close(x.master, expected.master, rtol=1e-6, atol=1e-7)
    assert (x.master[:100] - 2.0).abs().max() < 0.5


@pytest.mark.kernels
@pytest.mark.parametrize("offset", [0, 1])
def test_one_launch_updates_all_tensors_of_a_kind_and_nothing_else(offset):
    """The lengths are just below, at and above those of a block and of a span. Memory around them keeps its values."""
    sizes = [1, 255, 256, 257, 0, 1024, 1025, 16]
    with (
        patch.object(tensor_table, "BLOCK_BYTES", 512),
        patch.object(adamw_kernels, "SPAN", 2),
        patch.object(adamw_kernels, "launch", wraps=adamw_kernels.launch) as launches,
    ):
        tensors, bases = [], []
        for i, n in enumerate(sizes):
            x = make(n, "bf16", "8bit", "bf16+8", seed=i)
            base = [None if y is None else torch.full((y.numel() + 2,), 7, dtype=y.dtype, device=DEVICE) for y in x[:7]]
            for whole, y in zip(base, x[:7], strict=True):
                whole[offset : offset + y.numel()] = y
            views = [whole[offset : offset + y.numel()] for whole, y in zip(base, x[:7], strict=True)]
            tensors.append(AdamWTensors(*views, key=i, step=7.0))
            bases.append(base)
        expected = [copied(x) for x in tensors]
        compact_step(tensors, **OPTIONS)
    # Tensors of lengths that are no multiple of 16 have a launch of their own.
    assert launches.call_count == (1 if offset else 2)
    for x in expected:
        compact_reference(x, **OPTIONS)
    for x, y, base in zip(tensors, expected, bases, strict=True):
        for actual, other in zip(x[:7], y[:7], strict=True):
            # Codes and corrections may differ by one or two, where fp32 rounds differently.
            atol = 1e-6 if actual.dtype == torch.float32 else 2.0
            torch.testing.assert_close(actual.double(), other.double(), rtol=1e-2, atol=atol)
            if actual.dtype != torch.float32 and actual.numel() > 100:
                assert (actual == other).float().mean() > 0.98
        for whole, view in zip(base, x[:7], strict=True):
            outside = [*whole[:offset].tolist(), *whole[offset + view.numel() :].tolist()]
            assert outside == [7] * 2


@pytest.mark.kernels
@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_nan_and_infinity_reach_the_parameter(state):
    x = make(384, "bf16", state, "bf16+8", grad="fp32")
    # The NaN of GPUs has the bits 0x7fffffff, to which no rounding may carry.
    x.grad[3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    x.grad[200] = float("inf")
    compact_step([x], **OPTIONS)
    assert x.param[3].isnan()
    assert not x.param[200].isfinite()
    assert x.param[256:].isfinite().all()


@pytest.mark.kernels
def test_moments_of_zero_stay_zero():
    x = make(300, "bf16", "8bit", "bf16+8")
    x = copied(
        x, grad=torch.zeros_like(x.grad), exp_avg_scale=0 * x.exp_avg_scale, exp_avg_sq_scale=0 * x.exp_avg_scale
    )
    before = formats.join_master(x.param, x.master)
    compact_step([x], **OPTIONS | {"weight_decay": 0.0})
    assert torch.equal(formats.join_master(x.param, x.master), before)
    assert (x.exp_avg_scale == 0).all()
    assert (x.exp_avg_sq_scale == 0).all()


@pytest.mark.kernels
def test_the_largest_second_moment_of_a_block_has_the_largest_code():
    """With the largest dither, the root of the maximum may exceed the last code by one digit. It must not wrap to 0."""
    n, step = 4096, 11
    dithers = formats.dither(n, step, torch.device("cpu"))
    position = int(dithers.argmax())
    assert dithers[position] > 1 - 2.0**-15
    start = position // 128 * 128
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        g = torch.zeros(n)
        g[start : start + 128] = 1e-2 * torch.randn(128, generator=generator)
        g[position] = 0.1 + 0.9 * torch.rand((), generator=generator)
        zeros = [torch.zeros(n), g, torch.zeros(n, dtype=torch.int8), torch.zeros(n, dtype=torch.uint8)]
        zeros += [torch.zeros(n // 128), torch.zeros(n // 128)]
        x = AdamWTensors(*(y.to(DEVICE) for y in zeros), None, key=0, step=float(step))
        compact_step([x], **OPTIONS)
        assert x.exp_avg_sq[position] == 255


@pytest.mark.kernels
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("step", [compact_step, lambda xs, **options: compact_reference(xs[0], **options)])
def test_a_parameter_that_was_set_to_zero_stays_finite(step, zero):
    """A negative correction of 24-bit masters would carry into the sign."""
    x = make(512, "bf16", "fp32", "bf16+8")
    assert (x.master < 0).any()
    x.param.fill_(zero)
    step([x], **OPTIONS)
    assert x.param.isfinite().all()


@pytest.mark.kernels
def test_steps_are_deterministic():
    results = []
    for _ in range(2):
        x = make(700, "bf16", "8bit", None)
        compact_step([x], **OPTIONS, is_stochastic=True)
        results.append(x)
    for a, b in zip(*results, strict=True):
        assert a is None or not isinstance(a, torch.Tensor) or torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("master", [None, "fp32"])
def test_fp32_states_are_within_units_of_fused_torch(master):
    """Masters in fp32 are the parameters of torch's optimizer in fp32.

    On a GPU, a root errs by one unit in the last place and a quotient by two. With the roundings of the moments and
    of the products, the updates of both sides differ by at most eight. The first moment is a sum of two terms, whose
    rounding errors are relative to the terms, also where these cancel.
    """
    n = 10_000
    x = make(n, "bf16" if master else "fp32", "fp32", master, grad="fp32")
    before = (x.master if master else x.param).clone()
    q = torch.nn.Parameter(before.clone())
    optimizer = torch.optim.AdamW([q], fused=True, **OPTIONS)
    optimizer.state[q] = {"step": torch.tensor(6.0, device=DEVICE), "exp_avg": x.exp_avg.clone()}
    optimizer.state[q]["exp_avg_sq"] = x.exp_avg_sq.clone()
    q.grad = x.grad.clone()
    beta1, beta2 = OPTIONS["betas"]
    terms = beta1 * x.exp_avg.abs() + (1 - beta1) * x.grad.abs()
    optimizer.step()
    compact_step([x], **OPTIONS)
    root = (optimizer.state[q]["exp_avg_sq"] / (1 - beta2**7)).sqrt() + OPTIONS["eps"]
    update = OPTIONS["lr"] * terms / (1 - beta1**7) / root
    error = ((x.master if master else x.param) - q.detach()).abs()
    units = error / (2.0**-23 * (before.abs() + update))
    assert units.max().item() <= 8


@pytest.mark.no_interpreter("It reads compiled code.")
def test_aligned_memory_is_accessed_in_wide_words():
    """Each thread accesses 8 elements at once: 16 bytes of bf16 and 8 bytes of codes."""
    import triton

    from benchmarks.compile.targets import CHIPS, _source, recorded
    from tigon.runtime.compat.triton import compiler_tools

    tools, chip = compiler_tools(), CHIPS[1]
    target = tools.GPUTarget(chip.backend, chip.arch, chip.device.warp_size)
    x = AdamWTensors(*(None if y is None else y.cpu() for y in make(2048, "bf16", "8bit", "bf16+8")[:7]), 0, 1.0)
    with recorded(chip) as launches:
        compact_step([x], **OPTIONS)
    ptx = triton.compile(_source(launches[0], tools), target=target, options=launches[0].options).asm["ptx"]
    counts = [ptx.count(f"{access}.global.v{words}.b32") for access in ("ld", "st") for words in (4, 2)]
    assert counts == [2, 3, 1, 3]
