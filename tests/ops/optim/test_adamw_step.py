"""A step of AdamW's kernel and of its reference is compared with the formula in fp64. One launch finds all tensors."""

import itertools
from unittest.mock import patch

import pytest
import torch

from op_cases import DEVICE, INTERPRETED, one_in
from tigon.ops.optim import adamw_kernels, formats, tensor_table
from tigon.ops.optim.adamw_kernels import adamw_step
from tigon.ops.optim.adamw_reference import AdamWOptions, AdamWTensors, adamw_reference, start_of_step, step_reference

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make(
    n: int, param: str = "fp32", state: str = "fp32", master: str | None = None, grad: str | None = None, seed: int = 0
) -> AdamWTensors:
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


def kernel_step(tensors: list[AdamWTensors], tables: dict | None = None, **options) -> None:
    adamw_step(tensors, AdamWOptions(**options), tables=tables)


def reference_step(tensors: list[AdamWTensors], **options) -> None:
    for x in tensors:
        step_reference(x, AdamWOptions(**options))


on_both = pytest.mark.parametrize("step", [reference_step, pytest.param(kernel_step, marks=pytest.mark.kernels)])


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
    *([] if INTERPRETED else [("bf16", "bf16", None), ("bf16", "fp32", "fp32")]),
]


@on_both
@pytest.mark.parametrize(("param", "state", "master"), KINDS)
def test_a_step_is_exact_up_to_its_formats(param, state, master, step):
    factor = torch.tensor(0.3, device=DEVICE)
    x = make(1029, param, state, master)
    p, m, v = in_fp64(x, factor.item())
    before = start_of_step(x.param, x.master).double()
    step([x], **OPTIONS, factor=factor)
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
@one_in(1, are_tensors={"numbers": False, "tensors": True}, state=["8bit", "fp32"])
def test_options_reach_the_kernel(options, are_tensors, state):
    x = make(400, "fp32", state)
    p, _, _ = in_fp64(x, **options)
    arguments = OPTIONS | options
    if are_tensors:
        arguments["lr"] = torch.tensor(arguments["lr"], device=DEVICE)
        x = x._replace(step=torch.tensor(x.step, device=DEVICE))
    kernel_step([x], **arguments)
    torch.testing.assert_close(x.param.double(), p, rtol=4e-6, atol=4e-7)


@pytest.mark.kernels
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999, 0.99999])
def test_bias_corrections_lose_no_digits(beta):
    """With equal betas and a gradient of 1, each step moves p by lr, for every beta."""
    for step in (1, 2, 10, 1000):
        # This is the value of m and of v after the previous steps.
        moments = [torch.full((4,), 1 - beta ** (step - 1), device=DEVICE) for _ in range(2)]
        p, g = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
        x = AdamWTensors(p, g, *moments, None, None, None, 0, float(step))
        kernel_step([x], lr=1.0, betas=(beta, beta), eps=1e-12, weight_decay=0.0)
        torch.testing.assert_close(p, torch.full_like(p, -1.0), rtol=2e-6, atol=0.0)


@on_both
def test_second_moments_lose_no_slow_change_on_average(step):
    """After the gradient has become smaller, v falls by 1 % a step, which is less than half a step of most codes."""
    n, steps = 1024, 60
    generator = torch.Generator().manual_seed(0)
    v = (1 + torch.rand(n, generator=generator)).to(DEVICE)
    (m_codes, m_scale), (v_codes, v_scale) = formats.encode_signed(0 * v), formats.encode_squares(v)
    # The largest value of each block does not fall, and so the scales do not.
    g = torch.zeros(n, device=DEVICE)
    v_codes[::128], g[::128] = 255, (v_scale * 255.5) ** 2
    x = AdamWTensors(torch.zeros(n, device=DEVICE), g, m_codes, v_codes, m_scale, v_scale, None, 0, 1.0)
    start = formats.decode_squares(v_codes, v_scale)
    for count in range(1, steps + 1):
        step([x._replace(step=float(count))], **OPTIONS)
    ratios = (formats.decode_squares(x.exp_avg_sq, x.exp_avg_sq_scale) / start).view(-1, 128)[:, 1:]
    assert ratios.mean().item() == pytest.approx(0.99**steps, rel=0.01)
    # Each value has an error of a step or two, which is 1.6 % of v at the largest code.
    assert ratios.std() < 0.05 * 0.99**steps


@pytest.mark.kernels
@pytest.mark.parametrize("n", [1, 8, 1000])
def test_stochastic_rounding_is_that_of_the_reference(n):
    x = make(n, "bf16")
    expected, other, again = copied(x), copied(x, key=4), copied(x)
    kernel_step([x, other], **OPTIONS, is_stochastic=True)
    kernel_step([again], **OPTIONS, is_stochastic=True)
    assert torch.equal(x.param, again.param)
    reference_step([expected], **OPTIONS, is_stochastic=True)
    # The sum of bits and random number is next to a carry for few elements, where the order of sums in fp32 matters.
    assert (x.param == expected.param).float().mean() >= (0.99 if n > 100 else 1.0)
    assert n < 100 or (x.param == other.param).float().mean() < 0.9


@pytest.mark.kernels
def test_a_parameter_that_something_else_changed_restarts_its_master():
    x = make(256, "fp16", "fp32", "fp32")
    x.param[:100] = 2.0
    expected = copied(x)
    kernel_step([x], **OPTIONS)
    reference_step([expected], **OPTIONS)
    torch.testing.assert_close(x.master, expected.master, rtol=1e-6, atol=1e-7)
    assert (x.master[:100] - 2.0).abs().max() < 0.5


@pytest.mark.kernels
@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_nan_and_infinity_reach_the_parameter(state):
    x = make(384, "bf16", state, "bf16+8", grad="fp32")
    # The NaN of GPUs has the bits 0x7fffffff, to which no rounding may carry.
    x.grad[3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    x.grad[200] = float("inf")
    kernel_step([x], **OPTIONS)
    assert x.param[3].isnan()
    assert not x.param[200].isfinite()
    assert x.param[256:].isfinite().all()


@pytest.mark.kernels
def test_the_largest_second_moment_of_a_block_has_the_largest_code():
    """With the largest dither, the root of the maximum may exceed the last code by one digit. It must not wrap to 0."""
    n, step = 4096, 11
    dithers = formats.dither(n, step, torch.device("cpu"))
    position = int(dithers.argmax())
    assert dithers[position] > 1 - 2.0**-15
    start = position // 128 * 128
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        g = torch.zeros(n)
        g[start : start + 128] = 1e-2 * torch.randn(128, generator=generator)
        g[position] = 0.1 + 0.9 * torch.rand((), generator=generator)
        zeros = [torch.zeros(n), g, torch.zeros(n, dtype=torch.int8), torch.zeros(n, dtype=torch.uint8)]
        zeros += [torch.zeros(n // 128), torch.zeros(n // 128)]
        x = AdamWTensors(*(y.to(DEVICE) for y in zeros), None, key=0, step=float(step))
        kernel_step([x], **OPTIONS)
        assert x.exp_avg_sq[position] == 255


@on_both
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_parameter_that_was_set_to_zero_stays_finite(step, zero):
    """A negative correction of 24-bit masters would carry into the sign."""
    x = make(512, "bf16", "fp32", "bf16+8")
    assert (x.master < 0).any()
    x.param.fill_(zero)
    step([x], **OPTIONS)
    assert x.param.isfinite().all()


@pytest.fixture
def launches():
    """Use blocks of 128 elements in fp32 and 256 in bf16, so that small tensors have several, and count launches."""
    with (
        patch.object(tensor_table, "BLOCK_BYTES", 512),
        patch.object(adamw_kernels, "SPAN", 2),
        patch.object(adamw_kernels, "launch", wraps=adamw_kernels.launch) as calls,
    ):
        yield calls


SIZES = {"fp32": [1, 127, 128, 129, 0, 255, 256, 257, 0, 0, 800, 3], "bf16": [1, 255, 256, 257, 0, 1024, 1025, 16]}


@pytest.mark.kernels
@one_in(1, kind=[("fp32", "fp32", None), ("bf16", "8bit", "bf16+8")], offset=[0, 1])
def test_one_launch_updates_all_tensors_of_a_kind_and_nothing_else(kind, offset, launches):
    """The lengths are just below, at and above those of a block and of a span. Memory around them keeps its values."""
    tensors, bases = [], []
    for i, n in enumerate(SIZES[kind[0]]):
        x = make(n, *kind, seed=i)
        base = [None if y is None else torch.full((y.numel() + 2,), 7, dtype=y.dtype, device=DEVICE) for y in x[:7]]
        views = [None if y is None else y[offset : offset + z.numel()].copy_(z) for y, z in zip(base, x, strict=False)]
        step = torch.tensor(1.0 + i, device=DEVICE) if kind[1] == "fp32" else 7.0
        tensors.append(AdamWTensors(*views, key=i, step=step))
        bases.append(base)
    expected = [copied(x) for x in tensors]
    kernel_step(tensors, **OPTIONS)
    # With compact states, tensors of lengths that are no multiple of 16 have a launch of their own.
    assert launches.call_count == (2 if kind[1] == "8bit" and not offset else 1)
    reference_step(expected, **OPTIONS)
    for x, y, base in zip(tensors, expected, bases, strict=True):
        assert torch.equal(x.grad, y.grad)
        for actual, other, whole in zip(x[:7], y[:7], base, strict=True):
            if actual is None:
                continue
            # Codes and corrections may differ by one or two, where fp32 rounds differently.
            rtol, atol = (1e-2, 1e-6 if actual.dtype == torch.float32 else 2.0) if kind[1] == "8bit" else (2e-6, 2e-6)
            torch.testing.assert_close(actual.double(), other.double(), rtol=rtol, atol=atol)
            if actual.dtype != torch.float32 and actual.numel() > 100:
                assert (actual == other).float().mean() > 0.98
            outside = [*whole[:offset].tolist(), *whole[offset + actual.numel() :].tolist()]
            assert outside == [7] * 2


@pytest.mark.kernels
def test_tensors_of_different_kinds_take_different_launches(launches):
    """The kinds differ in dtypes, alignment or the number of the step."""
    odd = AdamWTensors(*(y if y is None else y[1:] for y in make(41)[:7]), 0, 7.0)
    kinds = [make(40), make(40, "fp16", "fp16"), odd, make(40, "fp16", "fp16")._replace(step=5.0), make(24, "fp16")]
    expected = [copied(x) for x in kinds]
    kernel_step([*kinds, make(8)], **OPTIONS)
    assert launches.call_count == len(kinds)
    reference_step(expected, **OPTIONS)
    for x, y in zip(kinds, expected, strict=True):
        for actual, other in zip((x.param, x.exp_avg, x.exp_avg_sq), (y.param, y.exp_avg, y.exp_avg_sq), strict=True):
            torch.testing.assert_close(actual, other, rtol=4 * torch.finfo(actual.dtype).eps, atol=2e-6)


@pytest.mark.kernels
@pytest.mark.usefixtures("launches")
def test_the_table_is_copied_only_if_an_address_changed():
    tensors, tables = [make(300), make(40)], {}
    # The default device must not matter.
    with torch.device("meta"):
        kernel_step(tensors, tables, **OPTIONS)
    first = tables[0]
    kernel_step(tensors, tables, **OPTIONS)
    assert tables[0] is first
    tensors = [x._replace(grad=x.grad.clone()) for x in tensors]
    kernel_step(tensors, tables, **OPTIONS)
    assert tables[0].rows[:, 1].tolist() == [x.grad.data_ptr() for x in tensors]
    # The lengths have not changed.
    assert tables[0].tensor_of_span is first.tensor_of_span
    kernel_step([tensors[0], make(30)], tables, **OPTIONS)
    assert tables[0].rows[:, 9].tolist() == [300, 30]
    assert tables[0].tensor_of_span.tolist() == [0, 0, 1]


@pytest.mark.no_interpreter("It reads compiled code.")
def test_aligned_memory_is_accessed_in_wide_words():
    """A thread accesses 8 elements at once: 16 bytes of bf16, or 8 bytes of codes. Without alignment it cannot."""
    import triton

    from benchmarks.compile.targets import CHIPS, _source, compiler_tools, recorded

    tools, chip, counts = compiler_tools(), CHIPS[1], []
    target = tools.GPUTarget(chip.backend, chip.arch, chip.device.warp_size)
    for kind, offset in ((("bf16", "bf16", None), 0), (("bf16", "bf16", None), 1), (("bf16", "8bit", "bf16+8"), 0)):
        tensors = [None if y is None else y.cpu()[offset:] for y in make(2048, *kind)[:7]]
        with recorded(chip) as launches:
            kernel_step([AdamWTensors(*tensors, 0, 1.0)], **OPTIONS)
        ptx = triton.compile(_source(launches[0], tools), target=target, options=launches[0].options).asm["ptx"]
        counts.append([ptx.count(f"{access}.global.v{words}.b32") for access in ("ld", "st") for words in (4, 2)])
    assert counts == [[4, 0, 3, 0], [0, 0, 0, 0], [2, 3, 1, 3]]
