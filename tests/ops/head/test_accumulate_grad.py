"""`linear_cross_entropy(accumulate_grad=True)` adds dW to the existing gradient, or refuses the call."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tigon
from op_cases import DEVICE, one_in

T, H, V = 24, 16, 101


def _batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(T, H, generator=generator), torch.randint(V, (T,), generator=generator)
    target[seed::4] = -100
    return x.to(DEVICE, dtype).requires_grad_(), target.to(DEVICE)


def _head(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(9)) * 0.3
    return nn.Parameter(weight.to(DEVICE, dtype))


def _loss(x: Tensor, w: Tensor, target: Tensor, **options) -> Tensor:
    return tigon.linear_cross_entropy(x, w, target, accumulate_grad=True, **options)


def _accumulate_by_autograd(
    batches: int = 3, dtype: torch.dtype = torch.float32, upstream: float = 1.0, **options
) -> Tensor:
    """Return the gradient that autograd accumulates without the option."""
    w = _head(dtype)
    for i in range(batches):
        x, target = _batch(i, dtype)
        (tigon.linear_cross_entropy(x, w, target, **options).sum() * upstream).backward()
    return w.grad


class _LargestAllocation(TorchDispatchMode):
    """A mode that records the number of elements of the largest tensor that is allocated in the block."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and function.overloadpacket._qualified_op_name.startswith("aten::empty"):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("options", [{}, {"num_items": 60}, {"softcap": 5.0, "z_loss": 0.1}], ids=str)
@pytest.mark.sampled(in_interpreter=3)
def test_three_micro_batches_accumulate_in_one_buffer(options):
    w, addresses = _head(), []
    for i in range(3):
        x, target = _batch(i)
        loss = _loss(x, w, target, **options)
        assert (w.grad is None) == (i == 0), "autograd creates the first gradient"
        loss.backward()
        addresses.append(w.grad.data_ptr())
        other = x.detach().clone().requires_grad_()
        tigon.linear_cross_entropy(other, w.detach(), target, **options).backward()
        assert torch.equal(x.grad, other.grad)
    assert len(set(addresses)) == 1
    torch.testing.assert_close(w.grad, _accumulate_by_autograd(**options), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dw_needs_no_second_buffer(reduction):
    """The vocabulary is much larger than the batch, so that no other tensor has the size of dW."""
    w = nn.Parameter(torch.randn(5000, 64, device=DEVICE))
    x, target = torch.randn(8, 64, device=DEVICE, requires_grad=True), torch.arange(8, device=DEVICE)
    largest_sizes = []
    for accumulate in (True, True, False):
        with _LargestAllocation() as largest:
            tigon.linear_cross_entropy(x, w, target, accumulate_grad=accumulate, reduction=reduction).sum().backward()
        largest_sizes.append(largest.elements)
    assert largest_sizes[1] <= 8 * 5000
    assert min(largest_sizes[0], largest_sizes[2]) >= w.numel(), "the check can fail"


@pytest.mark.parametrize("upstream", [2.0, 0.0, -1.0, float("nan")])
@pytest.mark.sampled(in_interpreter=4)
def test_upstream_gradient_that_is_not_one_makes_the_buffer_nan(upstream):
    w, (x, target) = _head(), _batch(0)
    w.grad = torch.ones_like(w)
    (_loss(x, w, target) * upstream).backward()
    assert w.grad.isnan().all()
    other = x.detach().clone().requires_grad_()
    (tigon.linear_cross_entropy(other, w.detach(), target) * upstream).backward()
    torch.testing.assert_close(x.grad, other.grad, equal_nan=True)


def test_second_backward_is_refused():
    w, (x, target) = _head(), _batch(0)
    w.grad = torch.zeros_like(w)
    loss = _loss(x, w, target)
    loss.backward(retain_graph=True)
    once = w.grad.clone()
    with pytest.raises(RuntimeError, match="a loss with accumulate_grad has one backward"):
        loss.backward()
    assert torch.equal(w.grad, once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dw_computed_in_backward_allows_any_upstream_gradient(dtype):
    """Without a reduction, and in fp16 with its loss scale, each backward computes dW and adds it."""
    options = {"reduction": "none"} if dtype == torch.float32 else {}
    w = _head(dtype)
    for i in range(3):
        x, target = _batch(i, dtype)
        loss = _loss(x, w, target, **options).sum() * 8.0
        before = None if w.grad is None else w.grad.clone()
        loss.backward(retain_graph=True)
    tolerance = {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    torch.testing.assert_close(w.grad, _accumulate_by_autograd(dtype=dtype, upstream=8.0, **options), **tolerance)
    once = w.grad - before
    loss.backward()
    torch.testing.assert_close(w.grad, before + 2 * once, rtol=tolerance["rtol"], atol=8 * tolerance["atol"])


@pytest.mark.no_interpreter("The interpreter truncates bf16 stores.")
@one_in(1, has_flag={"": False, "grad_added_to_main_grad": True}, reduction=["mean", "none"])
def test_dw_is_added_to_main_grad(reduction, has_flag):
    """Megatron accumulates the gradient of a bf16 weight in an fp32 buffer. Its hooks read the flag, and need a
    gradient, whose values they ignore if the flag is set. The values are zeros, because for embeddings that are tied to
    the head autograd adds them.
    """
    w = _head(torch.bfloat16)
    w.main_grad = torch.zeros(V, H, device=DEVICE)
    address = w.main_grad.data_ptr()
    if has_flag:
        w.grad_added_to_main_grad = False
    expected = torch.zeros(V, H, device=DEVICE)
    for i in range(3):
        x, target = _batch(i, torch.bfloat16)
        _loss(x, w, target, reduction=reduction, acc_dtype=torch.float32).sum().backward()
        wide = _head(torch.bfloat16).detach().float().requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            tigon.linear_cross_entropy(x.detach(), wide, target, reduction=reduction).sum().backward()
        expected += wide.grad
    assert w.main_grad.data_ptr() == address
    # The tolerance excludes a rounding to bf16.
    torch.testing.assert_close(w.main_grad, expected, rtol=1e-6, atol=1e-6)
    if has_flag:
        assert w.grad_added_to_main_grad is True
        assert (w.grad == 0).all()
    else:
        assert w.grad is None
        assert not hasattr(w, "grad_added_to_main_grad")


def test_gradients_of_further_results_are_added():
    """Backward adds them. If only a log-probability has an upstream gradient, the buffer becomes NaN."""
    requested = {"return_log_probs": True, "return_entropy": True}
    w, (x, target) = _head(), _batch(0)
    w.grad = torch.ones_like(w)
    total = lambda out: out.loss + (out.log_probs * 0.3 + out.entropy.square()).sum()
    total(_loss(x, w, target, **requested)).backward()
    other, y = _head(), x.detach().clone().requires_grad_()
    total(tigon.linear_cross_entropy(y, other, target, **requested)).backward()
    torch.testing.assert_close(w.grad, other.grad + 1, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, y.grad)
    w.grad = torch.ones_like(w)
    _loss(x, w, target, **requested).log_probs.sum().backward()
    assert w.grad.isnan().all()


def test_nothing_is_added_without_gradients_or_valid_tokens():
    w, (x, target) = _head(), _batch(0)
    w.grad = torch.ones_like(w)
    with torch.no_grad():
        _loss(x, w, target)
    _loss(x, w, torch.full_like(target, -100)).backward()
    assert (x.grad == 0).all()
    # This loss would compute dW in backward, which does not run.
    _loss(x, w, target, reduction="none")
    w.requires_grad_(False)
    _loss(x, w, target).backward()
    assert (w.grad == 1).all()


@pytest.mark.thorough_in_interpreter
def test_option_has_no_effect_under_compile():
    torch._dynamo.reset()
    compiled, w = torch.compile(_loss, fullgraph=True, backend="aot_eager"), _head()
    for i in range(2):
        x, target = _batch(i)
        (compiled(x, w, target) * 2).backward()
    torch.testing.assert_close(w.grad, _accumulate_by_autograd(2, upstream=2.0), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_buffer_replaced_between_forward_and_backward_is_refused(reduction):
    """zero_grad between forward and backward would lose dW without an error."""
    w, (x, target) = _head(), _batch(0)
    optimizer = torch.optim.SGD([w])
    w.grad = torch.zeros_like(w)
    loss = _loss(x, w, target, reduction=reduction).sum()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="linear_weight.grad, .*was replaced .*call zero_grad before the forward"):
        loss.backward()


@one_in(1, reentrant={"": False, "reentrant": True}, first={"": False, "first micro-batch": True})
@pytest.mark.thorough_in_interpreter
def test_activation_checkpointing_is_refused(first, reentrant):
    """A checkpointed forward pass runs twice, and would add dW twice."""
    w, (x, target) = _head(), _batch(0)
    w.grad = None if first else torch.zeros_like(w)
    loss = checkpoint(_loss, x, w, target, use_reentrant=reentrant)
    with pytest.raises(ValueError, match="accumulate_grad adds dW in the forward pass, which runs again"):
        loss.backward()


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_bad_weights_are_refused():
    x, target = _batch(0)

    def check_refusal(message: str, w: Tensor, **options) -> None:
        copies = [(buffer, buffer.clone()) for buffer in (w.grad if w.is_leaf else None, getattr(w, "main_grad", None))
                if buffer is not None]  # fmt: skip
        with pytest.raises(ValueError, match=f"linear_cross_entropy: .*{message}"):
            _loss(x.to(w.dtype), w, target, **options)
        assert all(torch.equal(*pair) for pair in copies)

    check_refusal(r"needs a linear_weight that has a .grad \(a leaf\), got the result of an op", _head() * 1.0)

    w = _head()
    w.grad = torch.zeros(H, V, device=DEVICE).t()
    check_refusal(r"a dense linear_weight.grad in torch.float32 or float32, got .* strides \(1, 101\)", w)

    w.grad = torch.zeros(V, H, device=DEVICE).to_sparse()
    with pytest.raises(ValueError, match=r"a dense linear_weight.grad .* got torch.sparse_coo"):
        _loss(x, w, target)

    w = _head()
    w.main_grad = torch.zeros(V, H + 1, device=DEVICE)
    check_refusal(r"linear_weight.main_grad must have shape \(101, 16\), got \(101, 17\)", w)
    w.main_grad = torch.zeros(V, H, device=DEVICE, dtype=torch.float16)
    check_refusal("a dense linear_weight.main_grad in torch.float32 or float32, got .*float16", w)
    w.main_grad = torch.zeros(V, H, device="meta")
    with pytest.raises(ValueError, match="linear_weight and linear_weight.main_grad must have the same device"):
        _loss(x, w, target)

    w = _head(torch.float16)
    w.grad = torch.zeros_like(w)
    rule = "acc_dtype=float32 with accumulate_grad needs gradients in float32, got a linear_weight in torch.float16"
    check_refusal(rule, w, acc_dtype=torch.float32)

    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        w = _head()
        w.grad = torch.zeros_like(w)
        handle = getattr(w, register)(lambda _: None)
        check_refusal("needs a linear_weight without hooks on its gradient", w)
        handle.remove()
        _loss(x, w, target).backward()


def test_buffer_set_to_zero_between_forward_and_backward_becomes_nan():
    """Otherwise the dW in the buffer would be lost without an error."""
    (x, target), w = _batch(0), _head()
    for zero in (lambda: w.grad.zero_(), lambda: torch.optim.SGD([w]).zero_grad(set_to_none=False)):
        w.grad = torch.ones_like(w)
        loss = tigon.linear_cross_entropy(x, w, target, accumulate_grad=True)
        zero()
        loss.backward()
        assert w.grad.isnan().all()
    # Setting the buffer to zero before the forward pass is correct.
    w.grad = torch.zeros_like(w)
    tigon.linear_cross_entropy(x, w, target, accumulate_grad=True).backward()
    assert w.grad.isfinite().all()


def test_loss_without_backward_warns():
    (x, target), w = _batch(0), _head()
    w.grad = torch.zeros_like(w)
    with pytest.warns(RuntimeWarning, match="dropped before its backward; linear_weight.grad keeps its dW"):
        tigon.linear_cross_entropy(x, w, target, accumulate_grad=True)


def test_flag_is_set_for_main_grad_only():
    w, (x, target) = _head(), _batch(0)
    w.grad, w.main_grad, w.grad_added_to_main_grad = torch.zeros_like(w), None, False
    _loss(x, w, target).backward()
    assert w.grad_added_to_main_grad is False
    assert (w.grad != 0).any()
