"""`linear_cross_entropy` with torch.compile, checkpointing, autocast, tied weights and frozen weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tigon
from op_cases import DEVICE, DTYPES
from tigon.ops.head.chunks import ChunkConfig
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy_reference
from tigon.ops.logits.cross_entropy import log_probs_and_entropy_reference
from tigon.runtime.tuning import tuned

ALL_RESULTS = {
    "return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True,
    "return_log_probs": True, "return_entropy": True,
}  # fmt: skip


def _inputs(t: int = 23, h: int = 16, v: int = 101, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(t)
    normal = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()
    target = torch.randint(v, (t,), generator=generator)
    target[2::4] = -100
    return [normal(t, h), normal(v, h), normal(v), target.to(DEVICE)]


def _total(result) -> Tensor:
    """Return a scalar to which all differentiable results contribute, by different amounts."""
    if isinstance(result, Tensor):
        return result.sum()
    return result.loss.sum() + (result.log_probs * 0.3).sum() + result.entropy.square().sum() * 0.1


def _same(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        if e is None:
            assert a is None
        else:
            size = e.abs().max().item() if e.is_floating_point() else 0.0
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6 * max(1.0, size))


def _compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.thorough
def test_compiled_loss_supports_missing_upstream_gradients():
    """torch.compile passes zeros for them. Each output alone must have the right gradients."""
    *tensors, target = _inputs()
    run = lambda x, w, b: tigon.linear_cross_entropy(x, w, target, linear_bias=b, **ALL_RESULTS)
    compiled = _compiled(run)
    _same(compiled(*tensors), run(*tensors))
    for pick in (lambda r: r.loss, lambda r: r.log_probs.sum(), lambda r: r.entropy.sum()):
        _same(*(torch.autograd.grad(pick(f(*tensors)), tensors) for f in (compiled, run)))


@pytest.mark.no_interpreter("The number of graphs does not depend on the kernels.")
def test_another_number_of_tokens_compiles_nothing():
    torch._dynamo.reset()
    options = {"acc_dtype": torch.float32, "return_entropy": True}
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tigon.linear_cross_entropy, fullgraph=True, backend=counter)
    frame_counts = []
    for t in (8, 23, 129):
        x, w, _, target = _inputs(t)
        loss = compiled(x, w, target, **options).loss
        torch.testing.assert_close(loss, linear_cross_entropy_reference(x, w, target), rtol=1e-5, atol=1e-6)
        torch.autograd.grad(loss, (x, w))
        frame_counts.append(counter.frame_count)
    assert frame_counts == [1, 2, 2], "one graph for the first number of tokens, one for all others"


@pytest.mark.thorough_in_interpreter
def test_compiled_loss_accepts_valid_rows():
    """The number of valid rows is unknown when the graph is compiled, so the compiled code finds the rows itself."""
    x, w, _, target = _inputs()
    early = tigon.ValidRows(target)
    compiled = _compiled(lambda x, w, target: tigon.linear_cross_entropy(x, w, target, valid_rows=early))
    torch.testing.assert_close(compiled(x, w, target), tigon.linear_cross_entropy(x, w, target))


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, ALL_RESULTS], ids=["mean", "none", "returned"])
@pytest.mark.sampled(in_interpreter=5)
def test_activation_checkpointing_is_supported(options, reentrant):
    *tensors, target = _inputs()
    run = lambda x, w, b: tigon.linear_cross_entropy(x.tanh(), w, target, linear_bias=b, **options)
    checkpointed = lambda *args: checkpoint(lambda *a: _total(run(*a)), *args, use_reentrant=reentrant)
    results = []
    for f in (checkpointed, lambda *a: _total(run(*a))):
        for x in tensors:
            x.grad = None
        (f(*tensors) * 3.0).backward()
        results.append([x.grad for x in tensors])
    _same(*results)


@pytest.mark.no_interpreter("The interpreter truncates bf16 stores.")
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"acc_dtype": torch.float32}], ids=str)
@tuned(ChunkConfig, tokens=64)
def test_autocast_does_not_round_the_gradient_of_an_fp32_weight(options, hidden):
    """The products are in bf16, like those of a linear layer. dW is fp32 like the weight, and never rounded to bf16."""
    x, w, b, target = _inputs(200)
    x = x.detach().to(hidden).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = tigon.linear_cross_entropy(x, w, target, linear_bias=b, **options)
    dx, dw, db = torch.autograd.grad(loss.sum(), (x, w, b))
    assert loss.dtype == torch.float32
    assert (dx.dtype, dw.dtype, db.dtype) == (hidden, torch.float32, torch.float32)

    # With bf16 weights and an fp32 sum, dW is the same, but rounded.
    narrow = [p.detach().bfloat16().requires_grad_() for p in (x, w, b)]
    expected = tigon.linear_cross_entropy(
        *narrow[:2], target, linear_bias=narrow[2], **options | {"acc_dtype": torch.float32}
    )
    assert torch.equal(loss, expected)
    dx_narrow, dw_narrow, _ = torch.autograd.grad(expected.sum(), narrow)
    assert torch.equal(dx.bfloat16(), dx_narrow)
    assert torch.equal(dw.bfloat16(), dw_narrow)
    error = (dw_narrow.float() - dw).norm() / dw.norm()
    assert error > 1e-3, "the check can fail"

    # d(logits) in bf16 are the same for both, so the unrounded sum has only the rounding errors of fp32.
    logits = F.linear(narrow[0], narrow[1], narrow[2]).detach().requires_grad_()
    (dlogits,) = torch.autograd.grad(
        tigon.cross_entropy(logits, target, reduction=options.get("reduction", "mean")).sum(), logits
    )
    exact = dlogits.double().t() @ narrow[0].detach().double()
    assert (dw - exact).norm() / exact.norm() < 2e-6


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, ALL_RESULTS, {"num_items": 0}, {"acc_dtype": torch.float32}],
    ids=["mean", "none", "returned", "items", "fp32 sum"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_tokens_may_be_ignored(dtype, options):
    """The results are zero and differentiable, and none comes from memory that was not written."""
    *tensors, target = _inputs(dtype=dtype)
    x, w, b = tensors
    result = tigon.linear_cross_entropy(x, w, torch.full_like(target, -100), linear_bias=b, **options)
    total = _total(result)
    assert total == 0
    assert all((g == 0).all() for g in torch.autograd.grad(total, tensors))
    if not isinstance(result, Tensor):
        assert result.token_accuracy == 0
        assert (result.predicted_tokens == -1).all()
        assert (result.log_probs == 0).all()
        assert (result.entropy == 0).all()
        assert result.z_loss == 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_further_results_equal_their_definition(reduction):
    *tensors, target = _inputs()
    x, w, b = tensors
    actual = tigon.linear_cross_entropy(x, w, target, linear_bias=b, softcap=5.0, reduction=reduction, **ALL_RESULTS)
    log_probs, entropy = log_probs_and_entropy_reference(F.linear(x, w, b), target, softcap=5.0)
    _same((actual.log_probs, actual.entropy), (log_probs, entropy))
    of_logits = tigon.cross_entropy(F.linear(x, w, b), target, softcap=5.0, reduction=reduction, **ALL_RESULTS)
    _same(actual, of_logits)
    loss = linear_cross_entropy_reference(x, w, target, linear_bias=b, softcap=5.0, reduction=reduction)
    expected = loss.sum() + (log_probs * 0.3).sum() + entropy.square().sum() * 0.1
    _same(torch.autograd.grad(_total(actual), tensors), torch.autograd.grad(expected, tensors))
