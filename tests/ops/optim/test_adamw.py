"""The step of AdamW against its maths in fp64, and one launch that finds all tensors by their addresses."""

import itertools
from unittest.mock import patch

import pytest
import torch

from op_cases import DEVICE, DTYPES
from tigon.ops.optim import adamw_kernels as adamw
from tigon.ops.optim.adamw_kernels import AdamWConfig, AdamWProblem, adamw_reference, adamw_step
from tigon.runtime.device import EMULATED
from tigon.runtime.tuning import tuned
from tigon.testing import assert_accurate

# --- maths ---------------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [1, 2, 7, 40, 100_000])
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_a_step_is_as_exact_as_one_rounding(dtype, step, tensors):
    """Each result is the fp64 one rounded to its dtype: half a unit in the last place, and fp32's own error."""
    n = 2 * AdamWConfig.heuristic(AdamWProblem(dtype.itemsize), EMULATED).block + 5
    generator = torch.Generator().manual_seed(step)
    p, g, m = (torch.randn(n, generator=generator).to(DEVICE, dtype) for _ in range(3))
    v = torch.rand(n, generator=generator).to(DEVICE, dtype)
    numbers = (step, 1e-2)
    options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": step == 7}
    exact = adamw_reference(*(x.double() for x in (p, g, m, v)), *numbers, **options)
    given = [torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in numbers] if tensors else numbers
    adamw_step([p], [g], [m], [v], [given[0]], given[1], **options)
    for name, got, wanted in zip("pmv", (p, m, v), exact, strict=True):
        assert_accurate(got, wanted.to(dtype), wanted, smallest=0.1, msg=name)
        if dtype != torch.float32:  # the digits that fp32 has more leave nothing but ties to be rounded otherwise
            assert (got == wanted.to(dtype)).float().mean() > 0.99


@pytest.mark.kernels
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99999])
def test_bias_corrections_keep_their_digits(beta):
    """From m = v = 0, equal betas and gradient 1 the first steps move p by lr, whatever the betas."""
    for step in (1, 2, 3, 10, 1000):
        p, g = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
        rest = 1 - beta ** (step - 1)  # what step - 1 such steps leave in m and v
        m, v = (torch.full((4,), rest, device=DEVICE) for _ in range(2))
        adamw_step([p], [g], [m], [v], [step], 1.0, (beta, beta), 1e-12, 0.0)
        torch.testing.assert_close(p, torch.full_like(p, -1.0), rtol=2e-6, atol=0.0)


@pytest.mark.kernels
def test_decay_is_rounded_once():
    """Without a gradient p becomes the fp32 number nearest to what it should be, but for ties."""
    p = torch.linspace(1, 2, 1000, device=DEVICE)
    exact = (p.double() * (1 - 1e-4)).float()
    g, m, v = (torch.zeros_like(p) for _ in range(3))
    adamw_step([p], [g], [m], [v], [1], 1e-3, (0.9, 0.999), 1e-8, 0.1)
    assert (p == exact).float().mean() > 0.99


@pytest.mark.kernels
def test_nothing_outside_is_touched():
    n = AdamWConfig.heuristic(AdamWProblem(4), EMULATED).block + 3
    base = [torch.full((n + 2,), 7.0, device=DEVICE) for _ in range(4)]
    adamw_step(*([x[1:-1]] for x in base), [1], 1e-2, (0.9, 0.999), 1e-8, 0.1)
    for x in base:
        assert x[0] == x[-1] == 7.0
    for i, x in enumerate(base):
        assert bool((x[1:-1] == 7.0).all()) == (i == 1)  # the gradient alone is as it was


# --- one launch for all --------------------------------------------------------------------------


def _tensors(sizes: list[int], dtype: torch.dtype = torch.float32, offset: int = 0) -> list[list[torch.Tensor]]:
    """p, g, m, v of each size, `offset` elements into memory that is 7 all around them."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(4):
        made.append([torch.full((n + 2 * offset,), 7.0, device=DEVICE, dtype=dtype) for n in sizes])
        for i, n in enumerate(sizes):
            made[-1][i] = made[-1][i][offset : offset + n]
            made[-1][i].copy_(torch.rand(n, generator=generator))
    return made


def _kernels(run) -> int:
    with patch.object(adamw, "launch", wraps=adamw.launch) as launched:
        run()
    return launched.call_count


STEP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def small_blocks():
    """Blocks so short that small tensors take several, and spans of several blocks."""
    with tuned(AdamWConfig, block=16, num_warps=1, span=4):
        yield


@pytest.mark.kernels
@pytest.mark.usefixtures("small_blocks")
def test_one_launch_finds_all_tensors():
    """Lengths on both sides of a block and of a span of blocks, and none between them."""
    sizes = [1, 15, 16, 17, 0, 63, 64, 65, 0, 0, 200, 3]
    tensors = _tensors(sizes)
    steps = [float(1 + i) for i in range(len(sizes))]
    exact = [adamw_reference(*x, step, **STEP) for *x, step in zip(*tensors, steps, strict=True)]
    steps = [torch.tensor(x, device=DEVICE) for x in steps]
    assert _kernels(lambda: adamw_step(*tensors, steps, **STEP)) == 1
    for x, wanted in zip(zip(*tensors, strict=True), exact, strict=True):
        for got, y in zip((x[0], x[2], x[3]), wanted, strict=True):
            torch.testing.assert_close(got, y, rtol=2e-6, atol=2e-6)


@pytest.mark.kernels
@pytest.mark.usefixtures("small_blocks")
def test_a_launch_for_each_kind_of_tensors():
    """By dtypes, by alignment, by the number of the step: each in its own, and nothing beside them is touched."""
    kinds = [
        ([_tensors([40, 8]), [1, 1]]),
        ([_tensors([40, 8], torch.float16), [1, 1]]),
        ([_tensors([40, 8], torch.float32, offset=1), [1, 1]]),
        ([_tensors([40], torch.float16), [5]]),
    ]
    half = _tensors([24], torch.float16)
    kinds.append(([half[0], *_tensors([24])[1:]], [1]))  # gradient and moments in fp32
    tensors = [[y for x, _ in kinds for y in x[i]] for i in range(4)]
    steps = [number for _, numbers in kinds for number in numbers]
    exact = [adamw_reference(*x, step, **STEP) for *x, step in zip(*tensors, steps, strict=True)]
    assert _kernels(lambda: adamw_step(*tensors, steps, **STEP)) == len(kinds)
    for x, wanted in zip(zip(*tensors, strict=True), exact, strict=True):
        for got, y in zip((x[0], x[2], x[3]), wanted, strict=True):
            torch.testing.assert_close(got, y.to(got.dtype), rtol=4 * torch.finfo(got.dtype).eps, atol=2e-6)
    for x in itertools.chain(*kinds[2][0]):
        whole = torch.as_strided(x, (x.numel() + 2,), (1,), 0)
        assert whole[0] == whole[-1] == 7.0


@pytest.mark.kernels
@pytest.mark.usefixtures("small_blocks")
def test_the_table_is_copied_only_when_something_moved():
    (p, g, m, v), tables = _tensors([100, 40]), {}
    take = lambda g: adamw_step(p, g, m, v, [1, 1], **STEP, tables=tables)
    with torch.device("meta"):  # another device by default
        take(g)
    first = tables[0]
    take(g)
    assert tables[0] is first
    elsewhere = [x.clone() for x in g]
    take(elsewhere)
    assert tables[0] is not first
    assert tables[0].rows[:, 1].tolist() == [x.data_ptr() for x in elsewhere]
    assert tables[0].owners is first.owners  # the lengths are as they were
    p, elsewhere, m, v = ([x[0], x[1][:30]] for x in (p, elsewhere, m, v))
    take(elsewhere)
    assert tables[0].rows[:, 5].tolist() == [100, 30]
    assert tables[0].owners.tolist() == [0, 0, 1]


@pytest.mark.no_interpreter("It reads compiled code.")
def test_memory_is_read_16_bytes_at_a_time_where_it_is_aligned():
    import triton

    from tigon.tools.compile.targets import CHIPS, _source, recorded

    found = []
    for offset in (0, 1):
        with recorded(CHIPS[1]) as launches:
            cpu = [[torch.zeros(2048, dtype=torch.bfloat16)[offset:]] for _ in range(4)]
            adamw_step(*cpu, [1], **STEP)
        compiled = triton.compile(_source(launches[0]), target=CHIPS[1].target, options=launches[0].options)
        found.append([compiled.asm["ptx"].count(f"{way}.global.v4.b32") for way in ("ld", "st")])
    assert found == [[4, 3], [0, 0]]
