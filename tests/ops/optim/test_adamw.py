"""The step of AdamW is compared with its formula in fp64. One launch finds all tensors by their addresses."""

import itertools
from unittest.mock import patch

import pytest
import torch

from op_cases import DEVICE, DTYPES
from tigon.ops.optim import adamw_kernels as adamw
from tigon.ops.optim import tensor_table
from tigon.ops.optim.adamw_kernels import adamw_step
from tigon.ops.optim.adamw_reference import AdamWOptions, AdamWTensors, adamw_reference
from tigon.testing import assert_accurate

STEP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def take_step(p, g, m, v, steps, tables=None, **options) -> None:
    """Take a step of parameters without compact states."""
    parameters = [AdamWTensors(*x, None, None, None, 0, step) for *x, step in zip(p, g, m, v, steps, strict=True)]
    adamw_step(parameters, AdamWOptions(**(STEP | options)), tables=tables)


# --- maths ---------------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [1, 2, 7, 40, 100_000])
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_a_step_rounds_once(dtype, step, tensors):
    """Each result is the one in fp64 rounded to its dtype, up to the error of fp32."""
    n = 2 * tensor_table.block_size(dtype.itemsize) + 5
    generator = torch.Generator().manual_seed(step)
    p, g, m = (torch.randn(n, generator=generator).to(DEVICE, dtype) for _ in range(3))
    v = torch.rand(n, generator=generator).to(DEVICE, dtype)
    numbers = (step, 1e-2)
    options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": step == 7}
    exact = adamw_reference(*(x.double() for x in (p, g, m, v)), step, lr=1e-2, **options)
    step_and_lr = [torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in numbers] if tensors else numbers
    take_step([p], [g], [m], [v], [step_and_lr[0]], lr=step_and_lr[1], **options)
    for name, result, expected in zip("pmv", (p, m, v), exact, strict=True):
        assert_accurate(result, expected.to(dtype), expected, smallest=0.1, msg=name)
        # fp32 has more digits, so only ties are rounded to another value.
        if dtype != torch.float32:
            assert (result == expected.to(dtype)).float().mean() > 0.99


@pytest.mark.kernels
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99999])
def test_bias_corrections_lose_no_digits(beta):
    """With equal betas and a gradient of 1, each step moves p by lr, for every beta."""
    for step in (1, 2, 3, 10, 1000):
        p, g = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
        # This is the value of m and of v after the previous steps.
        moment = 1 - beta ** (step - 1)
        m, v = (torch.full((4,), moment, device=DEVICE) for _ in range(2))
        take_step([p], [g], [m], [v], [step], lr=1.0, betas=(beta, beta), eps=1e-12, weight_decay=0.0)
        torch.testing.assert_close(p, torch.full_like(p, -1.0), rtol=2e-6, atol=0.0)


@pytest.mark.kernels
def test_decay_is_rounded_once():
    """Without a gradient p becomes the nearest number in fp32, except for ties."""
    p = torch.linspace(1, 2, 1000, device=DEVICE)
    exact = (p.double() * (1 - 1e-4)).float()
    g, m, v = (torch.zeros_like(p) for _ in range(3))
    take_step([p], [g], [m], [v], [1], lr=1e-3)
    assert (p == exact).float().mean() > 0.99


@pytest.mark.kernels
def test_a_step_writes_nothing_outside_of_its_tensors():
    n = tensor_table.block_size(4) + 3
    base = [torch.full((n + 2,), 7.0, device=DEVICE) for _ in range(4)]
    take_step(*([x[1:-1]] for x in base), [1])
    for x in base:
        assert x[0] == x[-1] == 7.0
    # Only the gradient is unchanged.
    for i, x in enumerate(base):
        assert bool((x[1:-1] == 7.0).all()) == (i == 1)


# --- one launch for all --------------------------------------------------------------------------


def _tensors(sizes: list[int], dtype: torch.dtype = torch.float32, offset: int = 0) -> list[list[torch.Tensor]]:
    """Return p, g, m, v of each size, `offset` elements after the start of memory that holds 7 around them."""
    generator = torch.Generator().manual_seed(0)
    lists = []
    for _ in range(4):
        lists.append([torch.full((n + 2 * offset,), 7.0, device=DEVICE, dtype=dtype) for n in sizes])
        for i, n in enumerate(sizes):
            lists[-1][i] = lists[-1][i][offset : offset + n]
            lists[-1][i].copy_(torch.rand(n, generator=generator))
    return lists


def _count_launches(run) -> int:
    with patch.object(adamw, "launch", wraps=adamw.launch) as launches:
        run()
    return launches.call_count


@pytest.fixture
def small_blocks():
    """Use blocks of 128 elements in fp32, so that small tensors have several, and spans of two blocks."""
    with patch.object(tensor_table, "BLOCK_BYTES", 512), patch.object(adamw, "SPAN", 2):
        yield


@pytest.mark.kernels
@pytest.mark.usefixtures("small_blocks")
def test_one_launch_finds_all_tensors():
    """The lengths are just below, at and above those of a block and of a span. Some are zero."""
    sizes = [1, 127, 128, 129, 0, 255, 256, 257, 0, 0, 800, 3]
    tensors = _tensors(sizes)
    steps = [float(1 + i) for i in range(len(sizes))]
    exact = [adamw_reference(*x, step, **STEP) for *x, step in zip(*tensors, steps, strict=True)]
    steps = [torch.tensor(x, device=DEVICE) for x in steps]
    assert _count_launches(lambda: take_step(*tensors, steps)) == 1
    for x, expected in zip(zip(*tensors, strict=True), exact, strict=True):
        for result, y in zip((x[0], x[2], x[3]), expected, strict=True):
            torch.testing.assert_close(result, y, rtol=2e-6, atol=2e-6)


@pytest.mark.kernels
@pytest.mark.usefixtures("small_blocks")
def test_tensors_of_different_kinds_take_different_launches():
    """The kinds differ in dtypes, alignment or the number of the step. No launch writes outside of its tensors."""
    kinds = [
        ([_tensors([40, 8]), [1, 1]]),
        ([_tensors([40, 8], torch.float16), [1, 1]]),
        ([_tensors([40, 8], torch.float32, offset=1), [1, 1]]),
        ([_tensors([40], torch.float16), [5]]),
    ]
    half = _tensors([24], torch.float16)
    # The gradient and the moments of this parameter are in fp32.
    kinds.append(([half[0], *_tensors([24])[1:]], [1]))
    tensors = [[y for x, _ in kinds for y in x[i]] for i in range(4)]
    steps = [number for _, numbers in kinds for number in numbers]
    exact = [adamw_reference(*x, step, **STEP) for *x, step in zip(*tensors, steps, strict=True)]
    assert _count_launches(lambda: take_step(*tensors, steps)) == len(kinds)
    for x, expected in zip(zip(*tensors, strict=True), exact, strict=True):
        for result, y in zip((x[0], x[2], x[3]), expected, strict=True):
            torch.testing.assert_close(result, y.to(result.dtype), rtol=4 * torch.finfo(result.dtype).eps, atol=2e-6)
    for x in itertools.chain(*kinds[2][0]):
        whole = torch.as_strided(x, (x.numel() + 2,), (1,), 0)
        assert whole[0] == whole[-1] == 7.0


@pytest.mark.kernels
@pytest.mark.usefixtures("small_blocks")
def test_the_table_is_copied_only_if_an_address_changed():
    (p, g, m, v), tables = _tensors([300, 40]), {}
    run_step = lambda g: take_step(p, g, m, v, [1, 1], tables)
    # The default device must not matter.
    with torch.device("meta"):
        run_step(g)
    first = tables[0]
    run_step(g)
    assert tables[0] is first
    copies = [x.clone() for x in g]
    run_step(copies)
    assert tables[0] is not first
    assert tables[0].rows[:, 1].tolist() == [x.data_ptr() for x in copies]
    # The lengths have not changed.
    assert tables[0].tensor_of_span is first.tensor_of_span
    p, copies, m, v = ([x[0], x[1][:30]] for x in (p, copies, m, v))
    run_step(copies)
    assert tables[0].rows[:, 9].tolist() == [300, 30]
    assert tables[0].tensor_of_span.tolist() == [0, 0, 1]


@pytest.mark.no_interpreter("It reads compiled code.")
def test_aligned_memory_is_accessed_16_bytes_at_a_time():
    import triton

    from benchmarks.compile.targets import CHIPS, _source, recorded
    from tigon.runtime.compat.triton import compiler_tools

    tools, chip, counts = compiler_tools(), CHIPS[1], []
    target = tools.GPUTarget(chip.backend, chip.arch, chip.device.warp_size)
    for offset in (0, 1):
        with recorded(chip) as launches:
            cpu = [[torch.zeros(2048, dtype=torch.bfloat16)[offset:]] for _ in range(4)]
            take_step(*cpu, [1])
        compiled = triton.compile(_source(launches[0], tools), target=target, options=launches[0].options)
        counts.append([compiled.asm["ptx"].count(f"{access}.global.v4.b32") for access in ("ld", "st")])
    assert counts == [[4, 3], [0, 0]]
