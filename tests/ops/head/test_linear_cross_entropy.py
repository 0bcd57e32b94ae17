import pytest
import torch
import torch.nn.functional as F

import tigon
from benchmarks.workloads import WORKLOADS
from dispatch_modes import PeakMemory, Products
from op_cases import DEVICE, INTERPRETED, assert_as_accurate_as_eager, one_in
from tigon.ops.head import gradients as weight_gradient
from tigon.ops.head.chunks import ChunkConfig
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy_reference
from tigon.runtime.device import EMULATED
from tigon.runtime.tuning import tuned
from tigon.testing import assert_accurate

OPTIONS = {
    "plain": {}, "sum": {"reduction": "sum"}, "none": {"reduction": "none"}, "items": {"num_items": 5},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.01},
    "all, none": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.01, "reduction": "none"},
}  # fmt: skip


def _inputs(t: int = 23, h: int = 16, v: int = 101, bias: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(t)
    shapes = [(t, h), (v, h), (v,)] if bias else [(t, h), (v, h)]
    tensors = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
    target = torch.randint(v, (t,), generator=generator)
    target[2::4] = -100
    return [*tensors, target.to(DEVICE)]


# 23 chunks of one token each take the interpreter too long.
CHUNKS = {f"chunks of {n}": n for n in ([7, 23, 64] if INTERPRETED else [1, 7, 23, 64])}


@one_in(2, options=OPTIONS, weighted={"": False, "class weights": True}, chunk=CHUNKS)
@pytest.mark.sampled(in_interpreter=4)
def test_linear_cross_entropy_is_as_accurate_as_eager_code(options, weighted, chunk):
    """Each chunk adds its part to an fp32 dW. The error of the sum must not exceed that of eager code."""
    # On a GPU, small products of other sizes use other kernels. With more tokens the largest error of eager code is
    # typical.
    *tensors, target = _inputs(203 if DEVICE == "cuda" else 23)
    generator = torch.Generator().manual_seed(chunk)
    weight = (torch.rand(101, generator=generator) + 0.1).to(DEVICE) if weighted else None
    with tuned(ChunkConfig, tokens=chunk):
        assert_as_accurate_as_eager(
            lambda x, w, b: tigon.linear_cross_entropy(x, w, target, linear_bias=b, weight=weight, **options),
            lambda x, w, b: linear_cross_entropy_reference(x, w, target, linear_bias=b, weight=weight, **options),
            tensors, loss=True,
        )  # fmt: skip


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch.nn.functional has it from 2.13 on")
def test_linear_cross_entropy_agrees_with_torch():
    x, w, b, target = _inputs()
    options = {"linear_bias": b, "label_smoothing": 0.1, "weight": torch.rand(101, device=DEVICE)}
    ours, theirs = tigon.linear_cross_entropy(x, w, target, **options), F.linear_cross_entropy(x, w, target, **options)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
    for a, e in zip(torch.autograd.grad(ours, (x, w, b)), torch.autograd.grad(theirs, (x, w, b)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


def test_inputs_may_have_leading_dimensions():
    x, w, target = _inputs(24, bias=False)
    flat = tigon.linear_cross_entropy(x, w, target, reduction="none")
    shaped = tigon.linear_cross_entropy(x.view(2, 3, 4, 16), w, target.view(2, 3, 4), reduction="none")
    assert torch.equal(shaped, flat.view(2, 3, 4))


@pytest.mark.parametrize(("needs", "reduction", "products"), [
    pytest.param((True, True), "mean", 3, id="both"), pytest.param((True, False), "mean", 2, id="frozen head"),
    pytest.param((False, True), "mean", 2, id="frozen trunk"),
    pytest.param((False, False), "mean", 1, id="loss only"),
    pytest.param((True, True), "none", 4, id="both, any gradient"),
])  # fmt: skip
def test_only_needed_products_are_computed(needs, reduction, products):
    x, w, target = _inputs(bias=False)
    x.requires_grad_(needs[0])
    w.requires_grad_(needs[1])
    with Products() as count:
        loss = tigon.linear_cross_entropy(x, w, target, reduction=reduction)
        if any(needs):
            loss.sum().backward()
    assert len(count.sizes) == products
    assert [p.grad is not None for p in (x, w)] == list(needs)


IGNORED = {
    "none": lambda t: torch.zeros(t, dtype=torch.bool), "one in a hundred": lambda t: torch.arange(t) % 100 == 3,
    "half": lambda t: torch.arange(t) % 2 == 1, "all but one": lambda t: torch.arange(t) != 77,
    "all": lambda t: torch.ones(t, dtype=torch.bool),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"return_entropy": True}], ids=str)
@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.no_interpreter("The interpreter takes long for 200 tokens.")
def test_ignored_tokens_are_not_multiplied(ignored, options):
    """Products have the sizes of the valid rows. If fewer than one row in 64 is ignored, copies would cost more."""
    x, w, b, target = _inputs(200)
    target = target.abs().masked_fill(IGNORED[ignored](200).to(DEVICE), -100)
    valid = target != -100
    computed = 200 if ignored == "one in a hundred" else int(valid.sum())
    with tuned(ChunkConfig, tokens=64), Products() as count:
        result = tigon.linear_cross_entropy(x, w, target, linear_bias=b, **options)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        dx, dw, db = torch.autograd.grad(loss.sum(), (x, w, b))
    assert count.multiplications == (4 if "reduction" in options else 3) * computed * 16 * 101
    assert sum(n for n, *_ in count.sizes) >= computed
    assert (dx[~valid] == 0).all()
    assert (dx[valid] != 0).any(-1).all()
    reference = {name: value for name, value in options.items() if name == "reduction"}
    expected = linear_cross_entropy_reference(x, w, target, linear_bias=b, **reference)
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close((dx, dw, db), torch.autograd.grad(expected.sum(), (x, w, b)), rtol=1e-5, atol=1e-6)


@pytest.mark.no_interpreter("The interpreter takes long for 1200 tokens, and the chunks do not depend on it.")
def test_last_two_chunks_are_about_equally_long():
    x, w, target = _inputs(1200, bias=False)
    with tuned(ChunkConfig, tokens=512), torch.no_grad(), Products() as count:
        tigon.linear_cross_entropy(x, w, target.abs() % 101)
    assert [n for n, *_ in count.sizes] == [512, 384, 304]


def test_values_of_ignored_tokens_do_not_matter():
    """Padding may hold any value: it is not multiplied, and all results for it are finite."""
    x, w, target = _inputs(bias=False)
    clean = x.detach().clone().requires_grad_()
    with torch.no_grad():
        x[target == -100] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38], device=DEVICE).repeat(4)
    requested = {"return_entropy": True, "return_log_probs": True, "return_predicted_tokens": True, "reduction": "none"}
    actual, expected = (tigon.linear_cross_entropy(i, w, target, z_loss=0.1, **requested) for i in (x, clean))
    for a, e in zip(actual, expected, strict=True):
        assert (a is None and e is None) or torch.equal(a, e)
    total = lambda result: (result.loss + result.entropy + result.log_probs).sum()
    for a, e in zip(*(torch.autograd.grad(total(r), (i, w)) for r, i in ((actual, x), (expected, clean))), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}, {"token_scaling": True}], ids=str)
def test_nan_and_inf_logits_give_a_nan_loss(options, value):
    """A logit of +inf or NaN has no finite loss. A logit of -inf is a class of probability zero."""
    x, w, b, target = _inputs()
    with torch.no_grad():
        b[7] = value
    loss = tigon.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none", **options)
    expected = linear_cross_entropy_reference(x, w, target, linear_bias=b, reduction="none", **options)
    finite = expected.isfinite()
    assert torch.equal(loss.isnan(), expected.isnan())
    torch.testing.assert_close(loss[finite], expected[finite], rtol=1e-5, atol=1e-6)
    if value != -torch.inf:
        assert loss[target != -100].isnan().all()
        assert tigon.linear_cross_entropy(x, w, target, linear_bias=b, **options).isnan()


@pytest.mark.no_interpreter("The interpreter copies the tensors of each launch.")
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"reduction": "none"}], ids=str)
def test_memory_of_logits_stays_below_the_cap(options):
    x, w, target = _inputs(1024, 4, 8192, bias=False)
    with PeakMemory() as memory:
        tigon.linear_cross_entropy(x, w, target, max_logits_mib=2, **options).sum().backward()
    gradients = 4 * (x.numel() + w.numel())
    # In addition to the gradients there are the logits up to the cap, small tensors, and for softcap on a CPU one more
    # fp32 block.
    assert memory.peak <= gradients + 2.8 * 2**20 + 4 * 1024 * 32
    with PeakMemory() as memory:
        tigon.linear_cross_entropy(x, w, target, max_logits_mib=64, **options).sum().backward()
    assert memory.peak > 10 * 2**20, "the check can fail"


def _peaked(t: int, h: int, v: int, ignored: float = 0.0) -> tuple[torch.Tensor, ...]:
    workload = WORKLOADS["linear_cross_entropy"]
    inputs = workload.make_inputs((t, h, v), torch.bfloat16, torch.device(DEVICE), form={"ignored": ignored})
    return tuple(inputs.tensors.values())


def _gradients(function, x, w, target) -> list[torch.Tensor]:
    return list(torch.autograd.grad(function(x, w, target), (x, w)))


@pytest.mark.no_interpreter("The interpreter truncates bf16 stores.")
@pytest.mark.parametrize("shape", [(600, 48, 384), (701, 33, 1001)], ids=str)
def test_error_of_chunked_dw_against_one_product(shape):
    """The logits are as peaked as those of a trained model. dW is as accurate as eager's one product if it is summed in
    fp32, and has at most twice its error by default.
    """
    x, w, target = _peaked(*shape)
    exact = _gradients(linear_cross_entropy_reference, *(p.detach().double().requires_grad_() for p in (x, w)), target)
    error = lambda actual: [((g.double() - e).norm() / e.norm()).item() for g, e in zip(actual, exact, strict=True)]
    eager = error(_gradients(linear_cross_entropy_reference, x, w, target))
    for chunks, acc_dtype, limit in (
        (1, None, 1.01), (8, None, 2.0), (30, None, 1.05),
        (1, torch.float32, 1.05), (2, torch.float32, 1.05), (8, torch.float32, 1.05), (30, torch.float32, 1.05),
    ):  # fmt: skip
        run = lambda *inputs: tigon.linear_cross_entropy(*inputs, acc_dtype=acc_dtype)  # noqa: B023
        with tuned(ChunkConfig, tokens=-(-shape[0] // chunks)):
            dx, dw = error(_gradients(run, x, w, target))
        assert dw <= limit * eager[1], (chunks, acc_dtype)
        assert dx <= 1.01 * eager[0], (chunks, acc_dtype)
    # The check can fail: many chunks that are summed in bf16 exceed the limit.
    with tuned(ChunkConfig, tokens=shape[0] // 150, max_chunks=10**6):
        assert error(_gradients(tigon.linear_cross_entropy, x, w, target))[1] > 2 * eager[1]


@pytest.mark.no_interpreter("The interpreter copies the tensors of each launch.")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fp32_sum_of_dw_takes_one_more_buffer(reduction, monkeypatch):
    """In addition to the gradients there are one more buffer of the size of dW, the logits, and slabs on a CPU."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 256, generator=generator).bfloat16().requires_grad_() for n in (32, 4096))
    target = torch.randint(4096, (32,), generator=generator)
    monkeypatch.setattr(weight_gradient, "SLAB_BYTES", 2**14)
    peaks = []
    for acc_dtype in (None, torch.float32):
        with PeakMemory() as memory:
            tigon.linear_cross_entropy(
                x, w, target, max_logits_mib=1, acc_dtype=acc_dtype, reduction=reduction
            ).sum().backward()
        peaks.append(memory.peak - (x.nbytes + w.nbytes))
        x.grad = w.grad = None
    small = 3 * x.nbytes + 2**19
    assert peaks[0] <= 2**20 + small
    assert peaks[1] <= 2**20 + w.nbytes + small
    assert peaks[1] >= w.nbytes, "the check can fail"


def test_fp16_gradients_use_the_loss_scale():
    """1 / items underflows in fp16. The loss scale of the upstream gradient prevents this."""
    x, w, target = _inputs(24, 16, 5000, bias=False)
    x, w = (p.detach().half().requires_grad_() for p in (x, w * 0.1))
    scale = torch.tensor(65536.0, device=DEVICE)
    actual = torch.autograd.grad(tigon.linear_cross_entropy(x, w, target, num_items=8192), (x, w), scale)
    eager = torch.autograd.grad(linear_cross_entropy_reference(x, w, target, num_items=8192), (x, w), scale)
    wide = [p.detach().double().requires_grad_() for p in (x, w)]
    exact = torch.autograd.grad(linear_cross_entropy_reference(*wide, target, num_items=8192), wide, scale.double())
    for triple in zip(actual, eager, exact, strict=True):
        assert_accurate(*triple)


@pytest.mark.no_interpreter("It launches no kernel.")
def test_chunk_heuristic():
    on = lambda device: ChunkConfig.heuristic((device, False), EMULATED)
    gpu, cpu = on("cuda"), on("cpu")
    assert gpu == ChunkConfig(budget_mib=640, may_exceed_budget=True, unit_budget_mib=1024, max_chunks=8, tile=128)
    assert cpu == ChunkConfig(budget_mib=96, may_exceed_budget=False, unit_budget_mib=96, max_chunks=8, tile=128)
    assert on("mps") == cpu
    # 2616 tokens of 128256 bf16 logits fit in 640 MiB. 24000 tokens fit in 10 chunks, or in 8 that exceed the budget.
    assert gpu.chunk_tokens(8192, 128256 * 2, None, spare_tokens=0) == 2048
    assert gpu.chunk_tokens(24000, 128256 * 2, None, spare_tokens=0) == 2432
    assert gpu.chunk_tokens(24000, 128256 * 2, None, spare_tokens=4096) == 3000
    assert gpu.chunk_tokens(24000, 128256 * 2, 640, spare_tokens=4096) == 2432


def test_the_module_passes_its_options_on():
    x, w, b, target = (t.detach() for t in _inputs())
    with pytest.raises(ValueError, match="LinearCrossEntropyLoss: an option must be one of .*got 'inplace'"):
        tigon.LinearCrossEntropyLoss(inplace=True)
    module = tigon.LinearCrossEntropyLoss(label_smoothing=0.1, softcap=5.0, max_logits_mib=1)
    expected = linear_cross_entropy_reference(x, w, target, linear_bias=b, label_smoothing=0.1, softcap=5.0)
    torch.testing.assert_close(module(x, w, target, b), expected)
