"""The kernel that holds a row of logits on the chip, with sizes at which its slots wrap, overflow or stay empty."""

import pytest
import torch

import tigon
from op_cases import assert_as_accurate_as_eager
from tigon.ops.logits.cross_entropy import cross_entropy_reference
from tigon.ops.logits.token import kernels
from tigon.ops.logits.token.kernels import Options, Wants, statistics
from tigon.ops.logits.token.row import RowConfig
from tigon.runtime.tuning import tuned

OPTIONS = [{}, {"z_loss": 1e-3, "logit_scale": 0.7}, {"reduction": "sum"}, {"token_scaling": True, "z_loss": 1e-3}]


@pytest.fixture
def launches(monkeypatch):
    """Return a list that receives the configs of all launches of the kernel."""
    configs, row_losses = [], kernels.row_losses

    def record_launch(*arguments):
        configs.append(arguments[-2])
        row_losses(*arguments)

    monkeypatch.setattr(kernels, "row_losses", record_launch)
    return configs


def _check(m: int, v: int, dtype: torch.dtype, weighted: bool, options: dict) -> None:
    generator = torch.Generator("cuda").manual_seed(m + v)
    logits = (torch.randn(m, v, device="cuda", generator=generator) * 3).to(dtype).requires_grad_()
    labels = torch.randint(v, (m,), device="cuda", generator=generator)
    weight = torch.rand(v, device="cuda", generator=generator) if weighted else None
    if m > 4:
        labels[1::4] = -100
    run = lambda x: tigon.cross_entropy(x.clone(), labels, weight, inplace=True, **options)
    reference = lambda x: cross_entropy_reference(x, labels, weight, **options)
    assert_as_accurate_as_eager(run, reference, [logits], loss=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("v", "slots"), [(4096, 4), (4000, 4), (4000, 2), (4000, 1), (16, 1), (16, 3), (10000, 2)], ids=str
)
@pytest.mark.parametrize("m", [1, 7, 700])
def test_the_row_kernel_accepts_any_number_of_slots(m, v, slots, dtype, options, launches):
    if m == 1 and "token_scaling" in options:
        pytest.skip(
            "The error of p_t scales the whole row, so with one row chance decides which code is more accurate."
        )
    lane = 16 // dtype.itemsize
    # A slot holds two elements of 16 bytes for each of 128 threads.
    block = 2 * 128 * lane
    with tuned(RowConfig, slots=slots, block=block, lane=lane, num_warps=4, programs_per_multiprocessor=2):
        _check(m, v, dtype, weighted=v == 4000, options=options)
    assert launches


@pytest.mark.parametrize("v", [8192, 32000, 50304, 65536, 128256, 151936, 256000])
def test_the_row_kernel_is_accurate_for_real_vocabularies(v, launches):
    _check(300, v, torch.bfloat16, weighted=False, options={})
    assert launches


@pytest.mark.parametrize("v", [32000, 128256, 256000])
def test_the_row_kernel_computes_log_probabilities(v, launches):
    logits = torch.randn(300, v, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(v, (300,), device="cuda")
    labels[::3], labels[1] = -100, v
    expected = torch.log_softmax(logits.double(), -1).gather(1, labels.clamp(0, v - 1)[:, None])[:, 0]
    expected[1] = torch.nan
    scales = torch.ones(3, device="cuda")
    result = statistics(logits, labels, None, scales, Options(), Wants(log_probs=True), with_gradient=True)
    assert launches
    expected = expected.masked_fill(labels == -100, 0.0).float()
    torch.testing.assert_close(result.log_probs, expected, rtol=1e-6, atol=2e-6, equal_nan=True)
    assert (result.loss[::3] == 0).all()


def test_ignored_rows_may_hold_nan(launches):
    logits = torch.randn(300, 32000, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(32000, (300,), device="cuda")
    labels[::3] = -100
    logits[::3] = torch.tensor([float("inf"), float("nan")], device="cuda").repeat(16000)
    logits.requires_grad_()
    hidden = logits.clone()
    loss = tigon.cross_entropy(hidden, labels, inplace=True)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert launches
    assert loss.isfinite()
    assert (gradient[::3] == 0).all()
    assert gradient.isfinite().all()


def test_the_row_kernel_has_the_same_bits_in_every_run():
    logits = torch.randn(2000, 128256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(128256, (2000,), device="cuda")
    runs = []
    for _ in range(3):
        hidden = logits.clone()
        loss = tigon.cross_entropy(hidden, labels, reduction="none", inplace=True)
        runs.append((loss, torch.autograd.grad(loss.sum(), hidden)[0]))
    for loss, gradient in runs[1:]:
        assert torch.equal(loss, runs[0][0])
        assert torch.equal(gradient, runs[0][1])


@pytest.mark.parametrize(("v", "slots"), [(4000, 4), (4000, 1), (32000, 4)], ids=str)
def test_an_ignored_row_is_independent_of_the_row_before_it(v, slots, launches):
    # Each program computes many rows, and half of them are ignored.
    m = 4000
    # The logits are so large that exponentials overflow if a row uses the maximum of another row.
    logits = torch.randn(m, v, device="cuda", dtype=torch.bfloat16) * 1000
    labels = torch.randint(v, (m,), device="cuda")
    ignored = torch.rand(m, device="cuda") < 0.5
    labels[ignored] = -100
    gradients = []
    for function, options in ((tigon.cross_entropy, {"inplace": True}), (cross_entropy_reference, {})):
        x = logits.clone().requires_grad_()
        hidden = x * 1.0
        with tuned(RowConfig, slots=slots, block=2048, lane=8, num_warps=4, programs_per_multiprocessor=1):
            loss = function(hidden, labels, reduction="sum", **options)
        gradients += torch.autograd.grad(loss, x)
    assert launches
    assert (gradients[0][ignored] == 0).all()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-2, atol=1e-3)
