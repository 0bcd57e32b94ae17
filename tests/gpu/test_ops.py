"""Tests of the ops that need a GPU: waits, graphs, addresses beyond 2^31, compilations, memory and real shapes."""

import sys
from functools import partial

import pytest
import torch

import tigon
from gpu.steps import capture, no_waits, peak_bytes
from op_cases import CASES, Case, as_list, assert_as_accurate_as_eager, outputs_and_gradients
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy_reference
from tigon.ops.logits.cross_entropy import cross_entropy_reference, log_probs_and_entropy_reference
from tigon.ops.logits.divergences import jsd_reference, kl_div_reference, tvd_reference
from tigon.ops.logits.softmax import softmax_reference
from tigon.ops.mlps.activations import relu2_reference
from tigon.ops.mlps.glu import swiglu_reference
from tigon.ops.norms.layer_norm import layer_norm_reference
from tigon.ops.norms.rms_norm import add_rms_norm_reference, rms_norm_reference
from tigon.ops.rotary.qk_norm_rope import qk_norm_rope_reference
from tigon.ops.rotary.rope import rope_reference

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BF16 = torch.bfloat16
MIB = 2**20


def _random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0, grad: bool = True) -> torch.Tensor:
    return (torch.randn(shape, device="cuda", dtype=dtype) * scale).requires_grad_(grad)


def _clear_gradients(*tensors: torch.Tensor) -> None:
    for x in tensors:
        x.grad = None


@every_case
def test_an_op_never_waits_for_the_device(case: Case):
    tensors = case.inputs(BF16)
    # The first run compiles kernels and allocates workspaces.
    outputs, _ = outputs_and_gradients(case.run, tensors)
    upstream = [torch.ones_like(y) for y in outputs]
    leaves = [x for x in tensors if x.requires_grad]
    with no_waits():
        outputs = case.run(*tensors)
        torch.autograd.grad(as_list(outputs), leaves, upstream)


def test_the_check_for_waits_can_fail():
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@every_case
def test_an_op_runs_in_a_cuda_graph(case: Case):
    static, other = case.inputs(BF16), case.inputs(BF16, seed=5)

    def step() -> list[torch.Tensor]:
        outputs = as_list(case.run(*static))
        leaves = [x for x in static if x.requires_grad]
        return [*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])]

    graph, replay_results = capture(step)
    with torch.no_grad():
        for x, y in zip(static, other, strict=True):
            x.copy_(y)
    graph.replay()
    for a, b in zip(replay_results, step(), strict=True):
        assert torch.equal(a, b)


def _count_variants() -> int:
    """Return the number of compiled variants of all kernels of Tigon."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("tigon.")]
    kernels = {id(x): x for module in modules for x in vars(module).values() if type(x) is JITFunction}.values()
    assert len(kernels) > 5
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def _rotate(n: int, batch: int = 2, axes: int = 0, norm: tuple[int, ...] = (), **options) -> None:
    """Run a step of rope for n tokens, or of qk_norm_rope if `norm` has the sizes of its weights."""
    q, k = (_random(batch, n, heads, 32).transpose(1, 2) for heads in (4, 2))
    tables = [_random(*([axes] if axes else []), 1, n, 32, grad=False) for _ in range(2)]
    op = tigon.qk_norm_rope if norm else tigon.rope
    torch.autograd.backward([y.sum() for y in op(q, k, *map(_random, norm), *tables, **options)])


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda n: tigon.rms_norm(_random(n, 96), _random(96)).sum().backward(), id="rms_norm"),
        pytest.param(
            lambda n: tigon.add_rms_norm(_random(n, 96), _random(n, 96), _random(96))[0].sum().backward(),
            id="add_rms_norm",
        ),
        pytest.param(
            lambda n: tigon.layer_norm(_random(2, n, 96), _random(96), _random(96)).sum().backward(), id="layer_norm"
        ),
        pytest.param(
            lambda n: tigon.layer_norm(_random(n, 16384), _random(16384), _random(16384)).sum().backward(),
            id="layer_norm in two launches",
        ),
        pytest.param(lambda n: tigon.swiglu(_random(n, 96), _random(n, 96)).sum().backward(), id="swiglu"),
        pytest.param(lambda n: tigon.swiglu(_random(n, 66)).sum().backward(), id="swiglu packed odd"),
        pytest.param(lambda n: tigon.relu2(_random(2, n, 96)).sum().backward(), id="relu2"),
        pytest.param(lambda n: tigon.relu2(_random(n, 65)).sum().backward(), id="relu2 odd"),
        pytest.param(lambda n: tigon.softmax(_random(2, n, 96)).sum().backward(), id="softmax"),
        pytest.param(lambda n: tigon.softmax(_random(n, 4096)).sum().backward(), id="softmax with one row per tile"),
        pytest.param(lambda n: tigon.softmax(_random(n, 50257)).sum().backward(), id="softmax in blocks"),
        pytest.param(
            lambda n: tigon.rope(
                _random(2, n, 4, 32).transpose(1, 2), _random(2, n, 2, 32).transpose(1, 2),
                _random(1, n, 32, grad=False), _random(1, n, 32, grad=False),
            )[0].sum().backward(),
            id="rope",
        ),
        pytest.param(lambda n: _rotate(n, layout="interleaved"), id="rope interleaved"),
        pytest.param(lambda n: _rotate(n, axes=3, sections=(4, 6, 6)), id="rope sections"),
        pytest.param(lambda n: tigon.fp8_linear(_random(n, 96), _random(64, 96)).sum().backward(), id="fp8_linear"),
        pytest.param(
            lambda n: tigon.fp8_linear(_random(n, 96), _random(64, 96), recipe="rowwise").sum().backward(),
            id="fp8_linear rowwise",
        ),
        pytest.param(lambda n: _rotate(n, norm=(32, 32)), id="qk_norm_rope"),
        pytest.param(lambda n: _rotate(n, norm=(4 * 32, 2 * 32)), id="qk_norm_rope over all heads"),
        pytest.param(lambda n: _rotate(n, norm=(32, 32), batch=n % 7 + 1), id="qk_norm_rope of another batch"),
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
        pytest.param(
            lambda n: tigon.kl_div(_random(n, 500), _random(n, 500, grad=False), log_target=True).backward(),
            id="kl_div",
        ),
        pytest.param(
            lambda n: tigon.jsd(
                _random(n, 500), _random(n, 500, grad=False), labels=torch.zeros(n, dtype=torch.long, device="cuda")
            ).backward(),
            id="jsd with labels",
        ),
        pytest.param(
            lambda n: tigon.jsd(_random(n, 4999), _random(n, 4999, grad=False), from_logits=True).backward(),
            id="jsd from logits",
        ),
        pytest.param(
            lambda n: (
                tigon.tvd(_random(n, 512), _random(n, 512, grad=False), reduction="none").sum(-1)
                * torch.rand(n, device="cuda")
            ).sum().backward(),
            id="tvd, elementwise",
        ),
    ],
)  # fmt: skip
def test_another_number_of_tokens_compiles_nothing(step):
    step(48)
    before = _count_variants()
    for n in (47, 16, 1, 33, 400):
        step(n)
    assert _count_variants() == before


# --- real shapes in bf16 -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 8192), (512, 16384), (4096, 2048), (30000, 128)], ids=str)
@pytest.mark.parametrize("rounding", ["before_weight", "after_weight"])
def test_rms_norm_is_accurate(shape, rounding):
    assert_as_accurate_as_eager(
        lambda x, w: tigon.rms_norm(x, w, rounding=rounding),
        lambda x, w: rms_norm_reference(x, w, rounding=rounding),
        [_random(*shape), _random(shape[-1])],
    )


NORM_SHAPES = [(30000, 128), (4096, 1024), (4096, 4096), (1000, 5120), (1024, 8192), (300, 12288), (512, 16384)]


@pytest.mark.parametrize("shape", [*NORM_SHAPES, (64, 24576), (1, 4096)], ids=str)
@pytest.mark.parametrize("rounding", ["before_weight", "after_weight"])
def test_add_rms_norm_is_accurate(shape, rounding):
    assert_as_accurate_as_eager(
        lambda x, r, w: tigon.add_rms_norm(x, r, w, rounding=rounding),
        lambda x, r, w: add_rms_norm_reference(x, r, w, rounding=rounding),
        [_random(*shape), _random(*shape), _random(shape[-1])],
    )


@pytest.mark.parametrize("shape", [*NORM_SHAPES, (64, 32768), (1, 4096)], ids=str)
def test_layer_norm_is_accurate(shape):
    assert_as_accurate_as_eager(
        tigon.layer_norm, layer_norm_reference, [_random(*shape), _random(shape[-1]), _random(shape[-1])]
    )


def _tables(*axes: int, length: int = 512, r: int = 128) -> list[torch.Tensor]:
    angles = torch.rand(*axes, 2, length, r, device="cuda") * 6
    return [angles.cos().to(BF16), angles.sin().to(BF16)]


ROTATIONS = [
    pytest.param((32, 8), 128, 128, {}, id="split_half"),
    pytest.param((32, 2), 128, 64, {"layout": "interleaved"}, id="interleaved, half of the head"),
    pytest.param((128, 1), 64, 64, {"layout": "deinterleaved"}, id="deinterleaved"),
    pytest.param((28, 4), 128, 128, {"sections": (16, 24, 24)}, id="sections"),
    pytest.param((32, 8), 128, 128, {"sections": (1,) * 60 + (4,)}, id="alternating sections"),
]


@pytest.mark.parametrize(("heads", "d", "r", "options"), ROTATIONS)
def test_rope_is_accurate(heads, d, r, options):
    q, k = (_random(2, 512, h, d).transpose(1, 2) for h in heads)
    tables = _tables(*([3] if "sections" in options else []), r=r)
    assert_as_accurate_as_eager(partial(tigon.rope, **options), partial(rope_reference, **options), [q, k, *tables])


@pytest.mark.parametrize(
    ("heads", "d", "r", "heads_of_weights", "options"),
    [
        pytest.param((32, 8), 128, 128, (1, 1), {}, id="each head"),
        pytest.param((8, 4), 256, 256, (1, 1), {"offset": 1.0, "rounding": "after_weight"}, id="offset, after"),
        pytest.param((16, 2), 256, 64, (1, 1), {"offset": 1.0}, id="a quarter of the head"),
        pytest.param((32, 8), 128, 128, (1, 1), {"layout": "interleaved"}, id="interleaved"),
        pytest.param((32, 32), 128, 128, (32, 32), {"rounding": "after_weight"}, id="over all heads"),
        pytest.param(
            (40, 8), 128, 128, (40, 8), {"rounding": "after_weight"}, id="over all heads, of different numbers"
        ),
        pytest.param((128, 8), 128, 128, (128, 8), {}, id="over 16384 features"),
    ],
)
def test_qk_norm_rope_is_accurate(heads, d, r, heads_of_weights, options):
    q, k = (_random(2, 512, h, d).transpose(1, 2) for h in heads)
    weights = [_random(n * d) for n in heads_of_weights]
    op, reference = (partial(f, **options) for f in (tigon.qk_norm_rope, qk_norm_rope_reference))
    assert_as_accurate_as_eager(op, reference, [q, k, *weights, *_tables(r=r)])


def test_swiglu_is_accurate():
    assert_as_accurate_as_eager(tigon.swiglu, swiglu_reference, [_random(1024, 14336), _random(1024, 14336)])


def test_relu2_is_accurate():
    assert_as_accurate_as_eager(tigon.relu2, relu2_reference, [_random(1024, 16384)])


SCORES = [(30000, 128), (3, 16, 512, 1000), (4096, 4096), (1024, 16384), (512, 32000), (256, 50257), (256, 128256)]


@pytest.mark.parametrize("scale", [1.0, 8.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("shape", [*SCORES, (64, 256000)], ids=str)
def test_softmax_is_accurate(shape, scale):
    assert_as_accurate_as_eager(tigon.softmax, softmax_reference, [_random(*shape, scale=scale)])


def test_softmax_accepts_masked_scores():
    """Transformers masks with the lowest finite number. A row of only this number is uniform, a row of -inf is NaN."""
    for width in (1000, 40000):
        scores = _random(8, width, grad=False)
        scores[:6, 10:] = torch.finfo(BF16).min
        scores[2] = torch.finfo(BF16).min
        scores[3], scores[4, :20] = -torch.inf, -torch.inf
        torch.testing.assert_close(tigon.softmax(scores), torch.softmax(scores, -1), equal_nan=True)


def _labels(rows: int, vocabulary: int) -> torch.Tensor:
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    labels[::7] = -100
    return labels


def _peaked(rows: int, vocabulary: int, labels: torch.Tensor) -> torch.Tensor:
    """Return logits like those of a trained model: a few tokens have most of the mass, often with the target."""
    logits = torch.randn(rows, vocabulary, device="cuda")
    rows = torch.arange(rows, device="cuda")
    logits[rows, labels.clamp(min=0)] += 8.0 * torch.rand(len(rows), device="cuda") + 4.0
    return logits.to(BF16).requires_grad_()


@pytest.mark.parametrize("inplace", [False, True], ids=["new buffer", "in place"])
@pytest.mark.parametrize("vocabulary", [32000, 50257, 128256, 256000])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "z_loss": 1e-4, "label_smoothing": 0.1}], ids=str)
def test_cross_entropy_is_accurate(vocabulary, inplace, options):
    labels = _labels(256, vocabulary)
    logits = _peaked(256, vocabulary, labels)
    assert_as_accurate_as_eager(
        # The op gets a copy, because the gradient overwrites the logits.
        lambda x: tigon.cross_entropy(x.clone(), labels, inplace=inplace, **options),
        lambda x: cross_entropy_reference(x, labels, **options),
        [logits],
        loss=True,
    )


@pytest.mark.parametrize("vocabulary", [50257, 128256])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "z_loss": 1e-4, "token_scaling": True}], ids=str)
def test_cross_entropy_with_log_probs_and_entropy_is_accurate(vocabulary, options):
    labels = _labels(256, vocabulary)

    def run(x):
        result = tigon.cross_entropy(x, labels, return_log_probs=True, return_entropy=True, **options)
        return result.loss, result.log_probs, result.entropy

    def reference(x):
        extras = log_probs_and_entropy_reference(x, labels, softcap=options.get("softcap"))
        return cross_entropy_reference(x, labels, **options), *extras

    assert_as_accurate_as_eager(run, reference, [_peaked(256, vocabulary, labels)], loss=True)


@pytest.mark.parametrize("sizes", [(1024, 1024, 32000), (4096, 2048, 128256), (1000, 768, 50257)], ids=str)
def test_linear_cross_entropy_is_accurate(sizes):
    t, h, v = sizes
    labels = _labels(t, v)
    assert_as_accurate_as_eager(
        lambda x, w: tigon.linear_cross_entropy(x, w, labels),
        lambda x, w: linear_cross_entropy_reference(x, w, labels),
        [_random(t, h), _random(v, h, scale=h**-0.5)],
        loss=True,
    )


DIVERGENCES = {
    "kl_div": (tigon.kl_div, kl_div_reference, {"log_target": True}),
    "kl_div of probabilities": (tigon.kl_div, kl_div_reference, {}),
    "jsd 0.1": (tigon.jsd, jsd_reference, {"beta": 0.1}),
    "jsd 0.5": (tigon.jsd, jsd_reference, {}),
    "reverse KL": (tigon.jsd, jsd_reference, {"beta": 1.0}),
    "tvd": (tigon.tvd, tvd_reference, {}),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [32000, 50257, 128256])
@pytest.mark.parametrize("form", DIVERGENCES)
def test_divergences_are_accurate(form, vocabulary, dtype):
    """Students are peaked, and teachers mostly agree with them. The losses are small, but their terms are not."""
    run, reference, options = DIVERGENCES[form]
    labels = _labels(256, vocabulary)
    logits = _peaked(256, vocabulary, labels).float().detach()
    student = logits.log_softmax(-1)
    teacher = (logits + 0.3 * torch.randn_like(logits)).log_softmax(-1)
    student = student.exp() if form == "tvd" else student
    teacher = teacher.exp() if form in ("tvd", "kl_div of probabilities") else teacher
    assert_as_accurate_as_eager(
        lambda x, y: run(x, y, labels=labels, reduction="batchmean", **options),
        lambda x, y: reference(x, y, labels=labels, reduction="batchmean", **options),
        [student.to(dtype).requires_grad_(), teacher.to(dtype)],
        loss=True,
    )


@pytest.mark.parametrize("vocabulary", [32000, 128256])
@pytest.mark.parametrize("form", ["kl_div", "jsd 0.1", "jsd 0.5", "reverse KL"])
def test_divergences_from_logits_are_accurate(form, vocabulary):
    run, reference, options = DIVERGENCES[form]
    labels = _labels(256, vocabulary)
    student = _peaked(256, vocabulary, labels)
    teacher = (student.detach() + 0.3 * torch.randn_like(student)).to(BF16)
    options = options | {"from_logits": True, "temperature": 2.0, "reduction": "batchmean"}
    assert_as_accurate_as_eager(
        lambda x, y: run(x, y, labels=labels, **options),
        lambda x, y: reference(x, y, labels=labels, **options),
        [student, teacher],
        loss=True,
    )


def test_equal_distributions_have_a_jsd_and_a_gradient_of_exactly_zero():
    student = _random(64, 32000).detach().float().log_softmax(-1)
    for dtype in (BF16, torch.float16, torch.float32):
        x = student.to(dtype).requires_grad_()
        for beta in (0.1, 0.3, 0.5, 0.99):
            loss = tigon.jsd(x, x.detach(), beta=beta)
            assert loss == 0
            assert (torch.autograd.grad(loss, x)[0] == 0).all()


# --- memory --------------------------------------------------------------------------------------


def test_linear_cross_entropy_respects_max_logits_mib():
    x, weight, labels = _random(4096, 512), _random(128256, 512), _labels(4096, 128256)
    run = lambda: tigon.linear_cross_entropy(x, weight, labels, max_logits_mib=128).backward()
    run()
    _clear_gradients(x, weight)
    gradients = (x.numel() + weight.numel()) * 2
    assert peak_bytes(run) < gradients + 128 * MIB + 16 * MIB


def test_cross_entropy_in_place_allocates_less_than_2_mib():
    logits, labels = _random(1024, 128256), _labels(1024, 128256)
    hidden = logits * 1.0
    assert peak_bytes(lambda: tigon.cross_entropy(hidden, labels, inplace=True)) < 2 * MIB


# --- more than 2^31 elements ---------------------------------------------------------------------

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


def test_layer_norm_beyond_32_bits():
    x = torch.ones(HUGE // 4096 + 1, 4096, device="cuda", dtype=BF16)
    x[-2:] = _random(2, 4096, grad=False)
    weight, bias = _random(4096), _random(4096)
    tail = x[-2:].clone().requires_grad_()
    y, expected = (tigon.layer_norm(t, weight, bias) for t in (x.requires_grad_(), tail))
    dy = torch.zeros_like(y)
    dy[-2:] = _random(2, 4096, grad=False)
    assert torch.equal(y[-2:], expected)
    actual, exact = (
        torch.autograd.grad(*pair) for pair in ((y, (x, weight, bias), dy), (expected, (tail, weight, bias), dy[-2:]))
    )
    assert torch.equal(actual[0][-2:], exact[0])
    # Only the last two rows contribute to the gradients of the parameters.
    for a, b in zip(actual[1:], exact[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


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


@pytest.mark.parametrize(("op", "width"), [("relu2", 8192), ("softmax", 8192), ("softmax", 40960)])
def test_relu2_and_softmax_beyond_32_bits(op, width):
    run = getattr(tigon, op)
    x = torch.ones(HUGE // width + 1, width, device="cuda", dtype=BF16)
    x[-2:] = _random(2, width, grad=False)
    tail = x[-2:].clone().requires_grad_()
    y, expected = run(x.requires_grad_()), run(tail)
    dy = torch.ones_like(y)
    dy[-2:] = _random(2, width, grad=False)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(y[-2:], expected)
    assert torch.equal(dx[-2:], torch.autograd.grad(expected, tail, dy[-2:])[0])


@pytest.mark.parametrize("norm", [False, True], ids=["rope", "qk_norm_rope"])
def test_rope_beyond_32_bits(norm):
    length = HUGE // 4096 + 1
    op = partial(tigon.qk_norm_rope, q_weight=None, k_weight=None) if norm else tigon.rope
    q, k = (torch.ones(1, length, heads, 128, device="cuda", dtype=BF16).transpose(1, 2) for heads in (32, 1))
    q[:, :, -1] = _random(1, 32, 128, grad=False)
    angles = torch.rand(1, length, 128, device="cuda")
    tables = {"cos": angles.cos().to(BF16), "sin": angles.sin().to(BF16)}
    last = [x[:, :, -1:].clone().requires_grad_() for x in (q, k)]
    y, _ = op(q.requires_grad_(), k, **tables)
    expected, _ = op(*last, **{name: table[:, -1:] for name, table in tables.items()})
    assert torch.equal(y[:, :, -1:], expected)
    (dq,) = torch.autograd.grad(y, q, y.detach())
    assert torch.equal(dq[:, :, -1:], torch.autograd.grad(expected, last[0], expected.detach())[0])


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


def test_a_target_out_of_range_gives_nan_without_a_memory_fault():
    logits = _random(4, 128256)
    labels = torch.tensor([5, 128256, 2**40, -1], device="cuda")
    loss = tigon.cross_entropy(logits, labels, reduction="none")
    loss.sum().backward()
    torch.cuda.synchronize()
    assert loss.isnan().tolist() == [False, True, True, True]
    assert logits.grad.isnan().any(-1).tolist() == [False, True, True, True]


def test_jsd_beyond_32_bits():
    rows = HUGE // 128256 + 1
    student = torch.full((rows, 128256), -11.75, device="cuda", dtype=BF16)
    teacher = student.clone()
    student[-1] = _random(128256, grad=False) - 12.0
    last = student[-1:].clone().requires_grad_()
    student.requires_grad_()
    loss = tigon.jsd(student, teacher, reduction="sum")
    (dx,) = torch.autograd.grad(loss, student)
    expected = tigon.jsd(last, teacher[-1:], reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert torch.equal(dx[-1:], torch.autograd.grad(expected, last)[0])
    assert (dx[:2] == 0).all()
