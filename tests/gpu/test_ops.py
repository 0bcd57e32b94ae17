"""Tests of the ops that need a GPU: waits, graphs, addresses beyond 2^31, compilations, memory and real shapes."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

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


def _random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0, grad: bool = True) -> Tensor:
    return (torch.randn(shape, device="cuda", dtype=dtype) * scale).requires_grad_(grad)


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

    def step() -> list[Tensor]:
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


def _rotate(n: int, batch: int) -> None:
    q, k = (_random(batch, n, heads, 32).transpose(1, 2) for heads in (4, 2))
    tables = [_random(1, n, 32, grad=False) for _ in range(2)]
    torch.autograd.backward([y.sum() for y in tigon.qk_norm_rope(q, k, _random(32), _random(32), *tables)])


STEPS = {
    "add_rms_norm": lambda n: tigon.add_rms_norm(_random(n, 96), _random(n, 96), _random(96))[0].sum().backward(),
    "layer_norm in two launches": lambda n: (
        tigon.layer_norm(_random(n, 16384), _random(16384), _random(16384)).sum().backward()
    ),
    "swiglu packed odd": lambda n: tigon.swiglu(_random(n, 66)).sum().backward(),
    "softmax": lambda n: tigon.softmax(_random(n, 96)).sum().backward(),
    "fp8_linear": lambda n: tigon.fp8_linear(_random(n, 96), _random(64, 96)).sum().backward(),
    "fp8_linear rowwise": lambda n: (
        tigon.fp8_linear(_random(n, 96), _random(64, 96), recipe="rowwise").sum().backward()
    ),
    "qk_norm_rope of another batch": lambda n: _rotate(n, n % 7 + 1),
    "linear_cross_entropy": lambda n: tigon.linear_cross_entropy(
        _random(n, 64), _random(40000, 64), torch.arange(n, device="cuda")
    ).backward(),
    "jsd from logits": lambda n: tigon.jsd(_random(n, 4999), _random(n, 4999, grad=False), from_logits=True).backward(),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_another_number_of_tokens_compiles_nothing(step):
    """`tests/runtime/test_launch.py` has the same test of what Triton would compile, for every op."""
    step(48)
    before = _count_variants()
    for n in (47, 16, 1, 33, 400):
        step(n)
    assert _count_variants() == before


class Real(NamedTuple):
    """An op at a shape of a model."""

    name: str
    run: Callable
    reference: Callable
    make_tensors: Callable[[], list[Tensor]]
    loss: bool = False


def _of_shapes(*shapes: tuple[int, ...], scale: float = 1.0) -> Callable[[], list[Tensor]]:
    return lambda: [_random(*shape, scale=scale) for shape in shapes]


WIDE = [(30000, 128), (4096, 1024), (4096, 4096), (1000, 5120), (1024, 8192), (300, 12288), (512, 16384)]
SCORES = [(30000, 128), (3, 16, 512, 1000), (4096, 4096), (1024, 16384), (512, 32000), (256, 50257), (64, 256000)]


def _rows() -> Iterator[Real]:
    for rounding in ("before_weight", "after_weight"):
        norm, reference = (partial(f, rounding=rounding) for f in (tigon.rms_norm, rms_norm_reference))
        for s in [*WIDE, (4096, 2048)]:
            yield Real(f"rms_norm {rounding} {s}", norm, reference, _of_shapes(s, s[-1:]))
        norm, reference = (partial(f, rounding=rounding) for f in (tigon.add_rms_norm, add_rms_norm_reference))
        for s in [*WIDE, (64, 24576), (1, 4096)]:
            yield Real(f"add_rms_norm {rounding} {s}", norm, reference, _of_shapes(s, s, s[-1:]))
    for s in [*WIDE, (64, 32768), (1, 4096)]:
        yield Real(f"layer_norm {s}", tigon.layer_norm, layer_norm_reference, _of_shapes(s, s[-1:], s[-1:]))
    for s in SCORES:
        for scale in (1.0, 8.0):
            yield Real(f"softmax {s} * {scale}", tigon.softmax, softmax_reference, _of_shapes(s, scale=scale))
    yield Real("swiglu", tigon.swiglu, swiglu_reference, _of_shapes((1024, 14336), (1024, 14336)))
    yield Real("relu2", tigon.relu2, relu2_reference, _of_shapes((1024, 16384)))


def _heads_and_tables(heads: tuple[int, int], d: int, r: int, weights: tuple[int, ...], axes: tuple[int, ...]) -> list:
    """Return q and k, weights of so many heads, cos and sin."""
    q, k = (_random(2, 512, h, d).transpose(1, 2) for h in heads)
    angles = torch.rand(*axes, 2, 512, r, device="cuda") * 6
    return [q, k, *(_random(n * d) for n in weights), angles.cos().to(BF16), angles.sin().to(BF16)]


# Heads, their size, the rotated features, options, and the heads of the weights of a norm.
ROTATIONS = [
    ((32, 8), 128, 128, {}, ()), ((32, 2), 128, 64, {"layout": "interleaved"}, ()),
    ((128, 1), 64, 64, {"layout": "deinterleaved"}, ()), ((28, 4), 128, 128, {"sections": (16, 24, 24)}, ()),
    ((32, 8), 128, 128, {"sections": (1,) * 60 + (4,)}, ()), ((32, 8), 128, 128, {}, (1, 1)),
    ((8, 4), 256, 256, {"offset": 1.0, "rounding": "after_weight"}, (1, 1)),
    ((16, 2), 256, 64, {"offset": 1.0}, (1, 1)), ((32, 8), 128, 128, {"layout": "interleaved"}, (1, 1)),
    ((32, 32), 128, 128, {"rounding": "after_weight"}, (32, 32)),
    ((40, 8), 128, 128, {"rounding": "after_weight"}, (40, 8)), ((128, 8), 128, 128, {}, (128, 8)),
]  # fmt: skip


def _rotations() -> Iterator[Real]:
    for heads, d, r, options, weights in ROTATIONS:
        functions = (tigon.qk_norm_rope, qk_norm_rope_reference) if weights else (tigon.rope, rope_reference)
        axes = (3,) if "sections" in options else ()
        make = partial(_heads_and_tables, heads, d, r, weights, axes)
        name = f"{'qk_norm_rope' if weights else 'rope'} {heads} {d} {r} {weights} {options}"
        yield Real(name, *(partial(f, **options) for f in functions), make)


def _labels(rows: int, vocabulary: int) -> Tensor:
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    labels[::7] = -100
    return labels


def _peaked(rows: int, vocabulary: int) -> list[Tensor]:
    """Return logits like those of a trained model, and labels: a few tokens have most of the mass, often the target."""
    labels, logits = _labels(rows, vocabulary), torch.randn(rows, vocabulary, device="cuda")
    logits[torch.arange(rows), labels.clamp(min=0)] += 8.0 * torch.rand(rows, device="cuda") + 4.0
    return [logits.to(BF16).requires_grad_(), labels]


def _with_outputs(x: Tensor, labels: Tensor, **options: object) -> tuple[Tensor, ...]:
    result = tigon.cross_entropy(x, labels, return_log_probs=True, return_entropy=True, **options)
    return result.loss, result.log_probs, result.entropy


def _outputs_reference(x: Tensor, labels: Tensor, **options: object) -> tuple[Tensor, ...]:
    outputs = log_probs_and_entropy_reference(x, labels, softcap=options.get("softcap"))
    return cross_entropy_reference(x, labels, **options), *outputs


CAPPED = {"softcap": 30.0, "z_loss": 1e-4}


def _losses() -> Iterator[Real]:
    for v in (50257, 256000):
        make = partial(_peaked, 256, v)
        for options in ({}, CAPPED | {"label_smoothing": 0.1}):
            reference = partial(cross_entropy_reference, **options)
            for inplace in (False, True):
                # The op gets a copy, because the gradient overwrites the logits.
                run = lambda x, labels, o=options, i=inplace: tigon.cross_entropy(x.clone(), labels, inplace=i, **o)
                yield Real(f"cross_entropy {v} {options} {inplace}", run, reference, make, True)
    for v in (50257, 128256):
        for options in ({}, CAPPED | {"token_scaling": True}):
            functions = (partial(f, **options) for f in (_with_outputs, _outputs_reference))
            yield Real(f"cross_entropy with outputs {v} {options}", *functions, partial(_peaked, 256, v), True)
    for t, h, v in ((1024, 1024, 32000), (4096, 2048, 128256), (1000, 768, 50257)):
        make = lambda t=t, h=h, v=v: [_random(t, h), _random(v, h, scale=h**-0.5), _labels(t, v)]
        functions = tigon.linear_cross_entropy, linear_cross_entropy_reference
        yield Real(f"linear_cross_entropy {t} {h} {v}", *functions, make, True)


DIVERGENCES = {
    "kl_div": (tigon.kl_div, kl_div_reference, {"log_target": True}),
    "kl_div of probabilities": (tigon.kl_div, kl_div_reference, {}),
    "jsd 0.1": (tigon.jsd, jsd_reference, {"beta": 0.1}), "jsd 0.5": (tigon.jsd, jsd_reference, {}),
    "reverse KL": (tigon.jsd, jsd_reference, {"beta": 1.0}), "tvd": (tigon.tvd, tvd_reference, {}),
}  # fmt: skip


def _distributions(form: str, vocabulary: int, dtype: torch.dtype, from_logits: bool) -> list[Tensor]:
    """Return a peaked student, a teacher that mostly agrees with it, and labels. The loss is small, not its terms."""
    logits, labels = _peaked(256, vocabulary)
    logits = logits.detach()
    if from_logits:
        return [logits.requires_grad_(), (logits + 0.3 * torch.randn_like(logits)).detach(), labels]
    logits = logits.float()
    student, teacher = logits.log_softmax(-1), (logits + 0.3 * torch.randn_like(logits)).log_softmax(-1)
    student = student.exp() if form == "tvd" else student
    teacher = teacher.exp() if form in ("tvd", "kl_div of probabilities") else teacher
    return [student.to(dtype).requires_grad_(), teacher.to(dtype), labels]


def _divergences() -> Iterator[Real]:
    for form, (run, reference, options) in DIVERGENCES.items():
        for v in (50257, 128256):
            for dtype, from_logits in ((BF16, False), (torch.float32, False), (BF16, True)):
                if from_logits and (v == 50257 or form in ("tvd", "kl_div of probabilities")):
                    continue
                more = options | {"reduction": "batchmean"}
                more |= {"from_logits": True, "temperature": 2.0} if from_logits else {}
                functions = (lambda x, y, labels, f=f, o=more: f(x, y, labels=labels, **o) for f in (run, reference))
                make = partial(_distributions, form, v, dtype, from_logits)
                yield Real(f"{form} {v} {dtype} {'from logits' * from_logits}", *functions, make, True)


REAL = [case for cases in (_rows, _rotations, _losses, _divergences) for case in cases()]


@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
def test_an_op_is_accurate_at_real_shapes(case: Real):
    assert_as_accurate_as_eager(case.run, case.reference, case.make_tensors(), loss=case.loss)


def test_cross_entropy_in_place_allocates_less_than_2_mib():
    logits, labels = _random(1024, 128256), _labels(1024, 128256)
    hidden = logits * 1.0
    assert peak_bytes(lambda: tigon.cross_entropy(hidden, labels, inplace=True)) < 2 * MIB


HUGE = 2**31 + 2**16


def _convolve(x: Tensor) -> Tensor:
    """Convolve rows, of which the last two are a sample of their own."""
    bounds = torch.tensor([0, len(x) - 2, len(x)], device="cuda")
    weight = torch.tensor([0.25, -0.5, 1.0], device="cuda").expand(x.shape[1], 3)
    return tigon.causal_conv1d(x[None], weight, cu_seqlens=bounds)[0]


# For each op of rows: the width, and how many of its inputs have rows.
ROWS = {
    "causal_conv1d": (_convolve, 8192, 1), "rms_norm": (lambda x: tigon.rms_norm(x, None), 4096, 1),
    "swiglu": (tigon.swiglu, 8192, 2), "relu2": (tigon.relu2, 8192, 1), "softmax": (tigon.softmax, 8192, 1),
    "softmax of wide rows": (tigon.softmax, 40960, 1),
}  # fmt: skip


@pytest.mark.parametrize(("run", "width", "count"), ROWS.values(), ids=ROWS)
def test_rows_beyond_32_bits(run, width, count):
    tensors = [torch.ones(HUGE // width + 1, width, device="cuda", dtype=BF16) for _ in range(count)]
    for x in tensors:
        x[-2:] = _random(2, width, grad=False)
    tails = [x[-2:].clone().requires_grad_() for x in tensors]
    y, expected = run(*(x.requires_grad_() for x in tensors)), run(*tails)
    dy = torch.ones_like(y)
    dy[-2:] = _random(2, width, grad=False)
    assert torch.equal(y[-2:], expected)
    gradients = torch.autograd.grad(y, tensors, dy)
    for dx, end in zip(gradients, torch.autograd.grad(expected, tails, dy[-2:]), strict=True):
        assert torch.equal(dx[-2:], end)


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
    torch.testing.assert_close(actual[1:], exact[1:], rtol=2**-7, atol=1e-6)


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
