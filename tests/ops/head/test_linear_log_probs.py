import pytest
import torch
from torch import Tensor

import tigon
from dispatch_modes import Products
from op_cases import DEVICE, assert_as_accurate_as_eager, one_in
from tigon.ops.head import log_prob_chunks
from tigon.ops.head.chunks import ChunkConfig
from tigon.ops.head.linear_log_probs import linear_log_probs_reference
from tigon.ops.head.log_prob_chunks import SlabConfig, SlabProblem
from tigon.runtime.device import device_of
from tigon.runtime.tuning import tuned

T, H, V, K = 23, 16, 101, 3
# The comparisons of fp32 results with eager code have more tokens where they take no time. The largest error of few
# tokens is a matter of luck: with 23, eager code fails against eager code that sums the products in another order.
MANY = T if DEVICE == "cpu" else 203
OPTIONS = {
    "plain": {}, "temperature": {"temperature": 0.7},
    "scale, cap, temperature": {"temperature": 0.7, "softcap": 3.0, "logit_scale": 1.5},
    "entropy": {"return_entropy": True}, "extra targets": {"extra_targets": True, "temperature": 1.3},
    "everything": {"temperature": 1.4, "softcap": 5.0, "return_entropy": True, "extra_targets": True},
}  # fmt: skip
# The widths of slabs of the vocabulary and the lengths of blocks of tokens in the backward pass.
DIVISIONS = {"one slab": {}, "slabs": {"columns": 40}, "slabs and blocks": {"columns": 64, "block_tokens": 8}}
NON_DIFFERENTIABLE = {"return_top1": True, "return_mean_logits": True, "return_sum_sq_probs": True}


def _inputs(dtype: torch.dtype = torch.float32, t: int = T) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return hidden, weight and bias, targets with ignored ones, and extra targets with ignored and equal ones."""
    generator = torch.Generator().manual_seed(t)
    normal = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()
    tensors = [normal(t, H), normal(V, H), normal(V)]
    targets, extra = (torch.randint(V, shape, generator=generator) for shape in ((t,), (t, K)))
    targets[2::4] = -100
    extra[1::5, 1] = -100
    # Equal extra targets add up, also if they equal the target.
    extra[3::4] = targets[3::4, None]
    return tensors, targets.to(DEVICE), extra.to(DEVICE)


def _runs(targets: Tensor, extra: Tensor, options: dict):
    options = options | ({"extra_targets": extra} if "extra_targets" in options else {})

    def of(function):
        def run(hidden, weight, bias=None):
            result = function(hidden, weight, targets, bias=bias, **options)
            return tuple(y for y in result if y is not None) if isinstance(result, tuple) else result

        return run

    return of(tigon.linear_log_probs), of(linear_log_probs_reference)


@one_in(4, options=OPTIONS, division=DIVISIONS, with_bias={"": False, "bias": True})
def test_log_probs_and_gradients_are_as_accurate_as_eager_code(options, division, with_bias):
    """The upstream gradients of all outputs differ from token to token."""
    tensors, targets, extra = _inputs(t=MANY)
    with tuned(ChunkConfig, tokens=7), tuned(SlabConfig, **division):
        run, reference = _runs(targets, extra, options)
        assert_as_accurate_as_eager(run, reference, tensors if with_bias else tensors[:2], loss=True)


@pytest.mark.no_interpreter("The interpreter truncates bf16 stores.")
@pytest.mark.parametrize("division", DIVISIONS.values(), ids=DIVISIONS)
def test_gradients_summed_over_slabs_and_blocks_have_the_error_of_one_product(division):
    """bf16 sums over 75 blocks, or over slabs, would have several times this error."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 32, generator=generator).to(DEVICE, torch.bfloat16) for n in (600, 384)]
    targets = torch.randint(384, (600,), generator=generator).to(DEVICE)
    upstream = torch.randn(600, generator=generator).to(DEVICE)

    def gradients(function, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        return torch.autograd.grad((function(*leaves, targets) * upstream).sum(), leaves)

    exact = gradients(linear_log_probs_reference, torch.float64)
    eager = gradients(linear_log_probs_reference, torch.bfloat16)
    with tuned(SlabConfig, **division):
        actual = gradients(tigon.linear_log_probs, torch.bfloat16)
    error = lambda x, e: (x.double() - e).norm() / e.norm()
    for a, b, e in zip(actual, eager, exact, strict=True):
        assert error(a, e) <= 1.1 * error(b, e)


def test_results_of_rows_of_several_blocks():
    """The largest logit comes last, so every block of a row changes the maximum of the sums before it."""
    v = 5000
    hidden = torch.tensor([[1.0], [0.3]], device=DEVICE)
    weight = torch.linspace(-8.0, 8.0, v, device=DEVICE)[:, None]
    targets = torch.tensor([v - 1, 17], device=DEVICE)
    requests = {"return_entropy": True, "extra_targets": torch.tensor([[0, 4100], [2047, 2048]], device=DEVICE)}
    actual, expected = (
        f(hidden, weight, targets, **NON_DIFFERENTIABLE, **requests)
        for f in (tigon.linear_log_probs, linear_log_probs_reference)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_temperature_divides_after_the_soft_cap():
    """The logit of 100 is capped to 2 and then divided by 0.5. In the other order it would be capped to 2."""
    hidden, weight = torch.tensor([[1.0]], device=DEVICE), torch.tensor([[100.0], [-100.0]], device=DEVICE)
    targets = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    log_prob = tigon.linear_log_probs(hidden, weight, targets, softcap=2.0, temperature=0.5, logit_scale=3.0)
    torch.testing.assert_close(log_prob, torch.log_softmax(torch.tensor([[4.0, -4.0]], device=DEVICE), -1)[:, 0])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 3.0, "logit_scale": 1.5}], ids=str)
def test_further_results_equal_their_definitions(options):
    tensors, targets, extra = _inputs()
    requests = NON_DIFFERENTIABLE | {"return_entropy": True, "extra_targets": extra}
    with tuned(ChunkConfig, tokens=7):
        actual = tigon.linear_log_probs(*tensors[:2], targets, bias=tensors[2], **requests, **options)
    expected = linear_log_probs_reference(*tensors[:2], targets, bias=tensors[2], **requests, **options)
    for name, value in expected._asdict().items():
        result = getattr(actual, name)
        torch.testing.assert_close(result, value, rtol=2e-6, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
        assert (result[targets == -100] == 0).all()
        assert result.requires_grad == (name in ("log_probs", "entropy", "extra_log_probs"))
    assert (actual.mean_logits[targets != -100] != 0).all()


def test_ignore_index_may_be_minus_one_or_a_token():
    tensors, targets, _ = _inputs()
    for ignore_index in (-1, 5):
        labels = targets.where(targets != -100, ignore_index)
        result = tigon.linear_log_probs(
            *tensors[:2], labels, ignore_index=ignore_index, return_top1=True, extra_targets=labels[:, None]
        )
        assert not result.is_top1[labels == ignore_index].any()
        assert torch.equal(result.extra_log_probs[:, 0], result.log_probs)
        actual = torch.autograd.grad(result.extra_log_probs.square().sum(), tensors[:2], retain_graph=True)
        expected = torch.autograd.grad(result.log_probs.square().sum(), tensors[:2])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.no_interpreter("The interpreter truncates bf16 stores.")
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_fp32_products_round_no_logits(dtypes):
    (hidden, weight, _), targets, extra = _inputs(t=MANY)
    tensors = [x.detach().to(dtype).requires_grad_() for x, dtype in zip((hidden, weight), dtypes, strict=True)]
    options = {"fp32_products": True, "return_entropy": True, "extra_targets": True}
    with tuned(ChunkConfig, tokens=7), tuned(SlabConfig, columns=40, block_tokens=8):
        assert_as_accurate_as_eager(*_runs(targets, extra, options), tensors, loss=True)
    rounded = tigon.linear_log_probs(hidden.bfloat16(), weight.bfloat16(), targets)
    unrounded = tigon.linear_log_probs(hidden.bfloat16(), weight.bfloat16(), targets, fp32_products=True)
    assert (rounded - unrounded).abs().max() > 1e-3, "the check can fail"


@pytest.mark.parametrize("options", [{}, {"return_entropy": True, "softcap": 50.0}], ids=str)
def test_gradients_of_certain_tokens_do_not_depend_on_the_rounding_of_the_second_product(options, monkeypatch):
    """cuBLAS may round the logits of the backward pass differently, in bf16 by a unit of their last place.

    Here all logits are a unit larger. The largest one is 13 and has a probability of 0.999, so its own gradient would
    change by 5 %, which is 50 times as much as there is.
    """
    weight = torch.eye(V, H).to(DEVICE)
    hidden = torch.full((3, H), 2.0, device=DEVICE)
    hidden[0, 0] = hidden[1, 7] = hidden[2, H - 1] = 13.0
    hidden.requires_grad_()
    targets = torch.tensor([0, 7, 3], device=DEVICE)

    def dx(function, x: Tensor) -> Tensor:
        result = function(x, weight.to(x.dtype), targets, **options)
        log_probs, entropy = (result.log_probs, result.entropy) if options else (result, torch.zeros(()).to(x))
        return torch.autograd.grad(log_probs.sum() + entropy.sum(), x)[0]

    gradient = log_prob_chunks.gradient

    def round_up(logits: Tensor, *arguments, **options):
        return gradient(logits.mul_(1 + 2**-8), *arguments, **options)

    exact = dx(linear_log_probs_reference, hidden.detach().double().requires_grad_())
    monkeypatch.setattr(log_prob_chunks, "gradient", round_up)
    with tuned(SlabConfig, columns=4):
        actual = dx(tigon.linear_log_probs, hidden)
    assert (actual - exact).abs().max() < 1e-3


@pytest.mark.parametrize("value", [V, -1], ids=str)
def test_targets_out_of_range_are_nan(value):
    tensors, targets, extra = _inputs()
    targets[0], extra[1, 0] = value, value
    result = tigon.linear_log_probs(*tensors[:2], targets, extra_targets=extra)
    assert result.log_probs.isnan().nonzero().tolist() == [[0]]
    assert result.extra_log_probs.isnan().nonzero().tolist() == [[1, 0]]
    (dx,) = torch.autograd.grad((result.log_probs, result.extra_log_probs), tensors[0], [torch.ones_like(y) for y in (
        result.log_probs, result.extra_log_probs)])  # fmt: skip
    assert dx.isnan().any(-1).nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize(("needs", "products"), [
    pytest.param((True, True), 4, id="both"), pytest.param((True, False), 3, id="frozen head"),
    pytest.param((False, True), 3, id="frozen trunk"), pytest.param((False, False), 1, id="no gradient"),
])  # fmt: skip
@pytest.mark.parametrize("division", DIVISIONS.values(), ids=DIVISIONS)
@pytest.mark.sampled(in_interpreter=5)
def test_only_needed_products_of_valid_tokens_are_computed(needs, products, division):
    (hidden, weight, _), targets, _ = _inputs()
    for x, need in zip((hidden, weight), needs, strict=True):
        x.requires_grad_(need)
    with tuned(SlabConfig, **division), Products() as count:
        log_probs = tigon.linear_log_probs(hidden, weight, targets)
        if any(needs):
            log_probs.square().sum().backward()
    assert count.multiplications == products * int((targets != -100).sum()) * H * V
    assert [x.grad is not None for x in (hidden, weight)] == list(needs)


@pytest.mark.parametrize("t", [0, 5], ids=["no tokens", "all ignored"])
def test_no_valid_token_gives_zeros(t):
    (hidden, weight, bias), _, _ = _inputs(t=max(t, 1))
    hidden = hidden.detach()[:t].requires_grad_()
    targets = torch.full((t,), -100, device=DEVICE)
    result = tigon.linear_log_probs(
        hidden, weight, targets, bias=bias, return_entropy=True, extra_targets=targets[:, None], **NON_DIFFERENTIABLE
    )
    assert [y.shape for y in result] == [(t,)] * 5 + [(t, 1)]
    assert all((y == 0).all() for y in result)
    gradients = torch.autograd.grad(result.log_probs.sum() + result.entropy.sum(), (hidden, weight, bias))
    assert all((g == 0).all() for g in gradients)


@pytest.mark.no_interpreter("It computes nothing.")
def test_long_batches_need_less_than_one_gib_without_an_fp32_sum():
    """65536 tokens, H 4096, V 128256: four blocks of tokens, with 256 MiB for dx and 384 MiB for logits."""
    problem = SlabProblem(4096, 128256, 2, 0, 640)
    config = SlabConfig.choose(problem, device_of(torch.empty(0)))
    tokens = config.shorter_block(problem, 65536, 8)
    assert tokens == 16384
    logits = tokens * config.slab_columns(problem, tokens) * 2
    assert logits + tokens * 4096 * 4 < 2**30
    # One block of fewer tokens is as long as before.
    assert config.shorter_block(problem, 8192, 8) == 8192


@pytest.mark.no_interpreter("The interpreter truncates bf16 stores.")
def test_a_half_precision_sum_over_few_blocks_is_as_accurate_as_eager_code():
    tensors, targets, extra = _inputs(torch.bfloat16, 203)
    with tuned(ChunkConfig, tokens=64), tuned(SlabConfig, block_tokens=70, columns=64):
        run, reference = _runs(targets, extra, {})
        call = lambda *x: tigon.linear_log_probs(*x[:2], targets, bias=x[2], acc_dtype=None)
        assert_as_accurate_as_eager(call, reference, tensors, loss=True)
        grads = [torch.autograd.grad(f(*tensors).sum(), tensors[1])[0] for f in (call, run)]
    assert not torch.equal(*grads)
