"""What only a GPU shows of the ops: no waits, graphs, addresses beyond 2^31, compilations, memory, real shapes."""

import pytest
import torch

import tigon
from op_cases import CASES, Case, as_list, assert_as_accurate_as_eager, outputs_and_gradients
from tigon.ops.cross_entropy import cross_entropy_reference
from tigon.ops.glu import swiglu_reference
from tigon.ops.linear_cross_entropy import linear_cross_entropy_reference
from tigon.ops.rms_norm import rms_norm_reference
from tigon.ops.rope import rope_reference

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BF16 = torch.bfloat16
MIB = 2**20


def _random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0, grad: bool = True) -> torch.Tensor:
    return (torch.randn(shape, device="cuda", dtype=dtype) * scale).requires_grad_(grad)


def _forget(*tensors: torch.Tensor) -> None:
    for x in tensors:
        x.grad = None


@every_case
def test_never_waits_for_the_device(case: Case):
    tensors = case.inputs(BF16)
    outputs, _ = outputs_and_gradients(case.run, tensors)  # compiles, and allocates workspaces
    upstream = [torch.ones_like(y) for y in outputs]
    wanted = [x for x in tensors if x.requires_grad]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = case.run(*tensors)
        torch.autograd.grad(as_list(outputs), wanted, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_check_for_waits_can_fail():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_case
def test_runs_in_a_cuda_graph(case: Case):
    static, other = case.inputs(BF16), case.inputs(BF16, seed=5)

    def step() -> list[torch.Tensor]:
        outputs = as_list(case.run(*static))
        wanted = [x for x in static if x.requires_grad]
        return [*outputs, *torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    with torch.no_grad():
        for x, y in zip(static, other, strict=True):
            x.copy_(y)
    graph.replay()
    for a, b in zip(replayed, step(), strict=True):
        assert torch.equal(a, b)


def _compilations() -> int:
    """Compiled variants of all of Tigon's kernels."""
    import gc

    from triton.runtime.jit import JITFunction

    kernels = [x for x in gc.get_objects() if type(x) is JITFunction and x.fn.__module__.startswith("tigon")]
    assert len(kernels) > 5
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda n: tigon.rms_norm(_random(n, 96), _random(96)).sum().backward(), id="rms_norm"),
        pytest.param(lambda n: tigon.swiglu(_random(n, 96), _random(n, 96)).sum().backward(), id="swiglu"),
        pytest.param(lambda n: tigon.swiglu(_random(n, 66)).sum().backward(), id="swiglu packed odd"),
        pytest.param(
            lambda n: tigon.rope(
                _random(2, n, 4, 32).transpose(1, 2), _random(2, n, 2, 32).transpose(1, 2),
                _random(1, n, 32, grad=False), _random(1, n, 32, grad=False),
            )[0].sum().backward(),
            id="rope",
        ),
        pytest.param(
            lambda n: tigon.cross_entropy(_random(n, 500), torch.zeros(n, dtype=torch.long, device="cuda")).backward(),
            id="cross_entropy",
        ),
        pytest.param(
            lambda n: tigon.linear_cross_entropy(
                _random(n, 64), _random(40000, 64), torch.zeros(n, dtype=torch.long, device="cuda")
            ).backward(),
            id="linear_cross_entropy",
        ),
    ],
)  # fmt: skip
def test_another_number_of_tokens_compiles_nothing(step):
    step(48)
    before = _compilations()
    for n in (47, 16, 1, 33, 400):
        step(n)
    assert _compilations() == before


# --- real shapes in bf16 -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 8192), (512, 16384), (4096, 2048), (30000, 128)], ids=str)
@pytest.mark.parametrize("rounding", ["before_weight", "after_weight"])
def test_rms_norm(shape, rounding):
    assert_as_accurate_as_eager(
        lambda x, w: tigon.rms_norm(x, w, rounding=rounding),
        lambda x, w: rms_norm_reference(x, w, rounding=rounding),
        [_random(*shape), _random(shape[-1])],
    )


def test_rope():
    angles = torch.rand(2, 512, 128, device="cuda") * 6
    tables = [angles.cos().to(BF16), angles.sin().to(BF16)]
    q, k = (_random(2, 512, h, 128).transpose(1, 2) for h in (32, 8))
    assert_as_accurate_as_eager(tigon.rope, rope_reference, [q, k, *tables])


def test_swiglu():
    assert_as_accurate_as_eager(tigon.swiglu, swiglu_reference, [_random(1024, 14336), _random(1024, 14336)])


def _labels(rows: int, vocabulary: int) -> torch.Tensor:
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    labels[::7] = -100
    return labels


def _peaked(rows: int, vocabulary: int, labels: torch.Tensor) -> torch.Tensor:
    """Logits of a trained model: a few tokens hold most of the mass, the target often among them."""
    logits = torch.randn(rows, vocabulary, device="cuda")
    rows = torch.arange(rows, device="cuda")
    logits[rows, labels.clamp(min=0)] += 8.0 * torch.rand(len(rows), device="cuda") + 4.0
    return logits.to(BF16).requires_grad_()


@pytest.mark.parametrize("inplace", [False, True], ids=["new buffer", "in place"])
@pytest.mark.parametrize("vocabulary", [32000, 50257, 128256, 256000])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "z_loss": 1e-4, "label_smoothing": 0.1}], ids=str)
def test_cross_entropy(vocabulary, inplace, options):
    labels = _labels(256, vocabulary)
    logits = _peaked(256, vocabulary, labels)
    assert_as_accurate_as_eager(
        # A copy, because the gradient is written over the logits in place.
        lambda x: tigon.cross_entropy(x.clone(), labels, inplace=inplace, **options),
        lambda x: cross_entropy_reference(x, labels, **options),
        [logits],
        loss=True,
    )


@pytest.mark.parametrize("sizes", [(1024, 1024, 32000), (4096, 2048, 128256), (1000, 768, 50257)], ids=str)
def test_linear_cross_entropy(sizes):
    t, h, v = sizes
    labels = _labels(t, v)
    assert_as_accurate_as_eager(
        lambda x, w: tigon.linear_cross_entropy(x, w, labels),
        lambda x, w: linear_cross_entropy_reference(x, w, labels),
        [_random(t, h), _random(v, h, scale=h**-0.5)],
        loss=True,
    )


# --- memory --------------------------------------------------------------------------------------


def _peak(run) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def test_linear_cross_entropy_holds_no_more_logits_than_allowed():
    x, weight, labels = _random(4096, 512), _random(128256, 512), _labels(4096, 128256)
    run = lambda: tigon.linear_cross_entropy(x, weight, labels, max_logits_mib=128).backward()
    run()
    _forget(x, weight)
    gradients = (x.numel() + weight.numel()) * 2
    assert _peak(run) < gradients + 128 * MIB + 16 * MIB


def test_cross_entropy_in_place_allocates_next_to_nothing():
    logits, labels = _random(1024, 128256), _labels(1024, 128256)
    hidden = logits * 1.0
    assert _peak(lambda: tigon.cross_entropy(hidden, labels, inplace=True)) < 2 * MIB


# --- more elements than 32 bits count ------------------------------------------------------------

HUGE = 2**31 + 2**16


def test_rms_norm_beyond_32_bits():
    rows = HUGE // 4096 + 1
    x = torch.empty(rows, 4096, device="cuda", dtype=BF16)
    x[0], x[-1] = 1.0, 2.0
    x[-2:] = _random(2, 4096, grad=False)
    x.requires_grad_()
    y = tigon.rms_norm(x, None)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    tail = x.detach()[-2:].clone().requires_grad_()
    expected = tigon.rms_norm(tail, None)
    assert torch.equal(y[-2:], expected)
    assert torch.equal(dx[-2:], torch.autograd.grad(expected.sum(), tail)[0])


def test_swiglu_beyond_32_bits():
    rows = HUGE // 8192 + 1
    gate, up = (torch.ones(rows, 8192, device="cuda", dtype=BF16, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        gate[-1], up[-1] = _random(8192, grad=False), _random(8192, grad=False)
    y = tigon.swiglu(gate, up)
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.ones_like(y))
    ends = [x.detach()[-1:].clone().requires_grad_() for x in (gate, up)]
    expected = tigon.swiglu(*ends)
    assert torch.equal(y[-1:], expected)
    for a, b in zip((dgate, dup), torch.autograd.grad(expected.sum(), ends), strict=True):
        assert torch.equal(a[-1:], b)


def test_rope_beyond_32_bits():
    length = HUGE // 4096 + 1
    q, k = (torch.ones(1, length, heads, 128, device="cuda", dtype=BF16).transpose(1, 2) for heads in (32, 1))
    q[:, :, -1] = _random(1, 32, 128, grad=False)
    angles = torch.rand(1, length, 128, device="cuda")
    tables = angles.cos().to(BF16), angles.sin().to(BF16)
    turned, _ = tigon.rope(q, k, *tables)
    expected, _ = tigon.rope(q[:, :, -1:], k[:, :, -1:], *(t[:, -1:] for t in tables))
    assert torch.equal(turned[:, :, -1:], expected)


def test_cross_entropy_beyond_32_bits():
    rows = HUGE // 128256 + 1
    logits = torch.zeros(rows, 128256, device="cuda", dtype=BF16)
    logits[-1] = _random(128256, grad=False)
    labels = torch.arange(rows, device="cuda") % 128256
    last = logits[-1:].clone().requires_grad_()
    logits.requires_grad_()
    for inplace in (False, True):
        loss = tigon.cross_entropy(logits, labels, reduction="none", inplace=inplace)
        (dlogits,) = torch.autograd.grad(loss.sum(), logits)
        expected = tigon.cross_entropy(last, labels[-1:], reduction="none")
        torch.testing.assert_close(loss[-1:], expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(dlogits[-1:], torch.autograd.grad(expected.sum(), last)[0])


def test_a_target_out_of_range_is_nan_and_no_memory_fault():
    logits = _random(4, 128256)
    labels = torch.tensor([5, 128256, 2**40, -1], device="cuda")
    loss = tigon.cross_entropy(logits, labels, reduction="none")
    loss.sum().backward()
    torch.cuda.synchronize()
    assert loss.isnan().tolist() == [False, True, True, True]
    assert logits.grad.isnan().any(-1).tolist() == [False, True, True, True]
