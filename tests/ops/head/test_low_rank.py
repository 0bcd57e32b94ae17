"""The loss of a head with an adapter: the product of its factors is added to the logits of each chunk."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tigon
from op_cases import DEVICE, assert_as_accurate_as_eager, one_in
from tigon.ops.head.chunks import ChunkConfig
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy_reference
from tigon.ops.logits.cross_entropy import log_probs_and_entropy_reference
from tigon.runtime.tuning import tuned

# Torch computes the addition itself, so the kernels of the loss are tested elsewhere.
pytestmark = pytest.mark.no_interpreter("The interpreter truncates bf16 stores.")

# With fewer tokens, the largest error of eager code would depend on chance.
T, H, V = 83, 16, 101


def _inputs(dtype: torch.dtype, rank: int, factor_dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    dtypes = [dtype] * 3 + [factor_dtype] * 2
    tensors = [
        torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()
        for shape, dtype in zip(((T, H), (V, H), (V,), (T, rank), (V, rank)), dtypes, strict=True)
    ]
    x, w, bias, h, b = (each.detach().float() for each in tensors)
    # Half of the targets are likely, so that many tokens have gradients of the largest size.
    target = (x @ w.t() + bias + h @ b.t()).argmax(-1)
    target[1::2] = torch.randint(V, (T // 2,), generator=generator).to(DEVICE)
    target[2::4] = -100
    return tensors, target


OPTIONS = {
    "plain": {}, "none": {"reduction": "none"},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 0.5, "z_loss": 0.01},
    "all, none": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 0.5, "z_loss": 0.01, "reduction": "none"},
    "token scaling, none": {"token_scaling": True, "reduction": "none"},
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# The factors of an adapter are in fp32, and split into two terms in half precision. Those of the dtype of the model are
# not split, and those of bf16 are one term in fp32.
@one_in(3, options=OPTIONS, dtype=DTYPES, rank=[1, 17], factors={"fp32": torch.float32, "half": None})
def test_every_option_is_as_accurate_as_eager_code(options, dtype, rank, factors):
    factor_dtype = factors or (torch.bfloat16 if dtype == torch.float32 else dtype)
    tensors, target = _inputs(dtype, rank, factor_dtype)
    weight = torch.rand(V, generator=torch.Generator().manual_seed(1)).to(DEVICE) + 0.1 if rank == 17 else None

    def run(function):
        def call(x, w, bias, h, b):
            loss = function(x, w, target, linear_bias=bias, low_rank=(h, b), weight=weight, **options)
            # The error of one mean is a matter of chance. Its gradients are compared, and the losses of all tokens.
            return loss if loss.dim() else loss - loss.detach()

        return call

    with tuned(ChunkConfig, tokens=48):
        assert_as_accurate_as_eager(
            run(tigon.linear_cross_entropy), run(linear_cross_entropy_reference), tensors, loss=True
        )


def test_results_of_tokens_and_their_gradients_contain_the_addition():
    tensors, target = _inputs(torch.bfloat16, 5, torch.float32)

    def op(x, w, bias, h, b):
        output = tigon.linear_cross_entropy(
            x, w, target, linear_bias=bias, low_rank=(h, b), return_log_probs=True, return_entropy=True
        )
        return (output.log_probs * 2 - output.entropy) + output.loss

    def reference(x, w, bias, h, b):
        logits = (torch.nn.functional.linear(x, w, bias) + h @ b.t()).to(x.dtype)
        log_probs, entropy = log_probs_and_entropy_reference(logits, target)
        loss = linear_cross_entropy_reference(x, w, target, linear_bias=bias, low_rank=(h, b))
        return (log_probs * 2 - entropy) + loss

    assert_as_accurate_as_eager(op, reference, tensors, loss=True)


@pytest.mark.parametrize("scales", [(1.0, 1e-7), (1e5, 1e-4), (1.0, 1e-12), (1e-6, 1e4)])
def test_factors_outside_of_the_range_of_fp16_are_as_accurate_as_eager_code(scales):
    """B is tiny in the first steps of training. Terms in fp16 would underflow, and terms of a large h would be inf."""
    (x, w, bias, h, b), target = _inputs(torch.float16, 5, torch.float32)
    with torch.no_grad():
        h *= scales[0]
        b *= scales[1]

    def run(function):
        return lambda x, w, bias, h, b: function(x, w, target, linear_bias=bias, low_rank=(h, b), reduction="sum")

    assert_as_accurate_as_eager(
        run(tigon.linear_cross_entropy), run(linear_cross_entropy_reference), [x, w, bias, h, b], loss=True
    )


@pytest.mark.parametrize("computes_ignored", [False, True], ids=["", "all tokens computed"])
def test_gradients_of_masked_tokens_are_zero_for_any_logits(computes_ignored):
    (x, w, bias, h, b), target = _inputs(torch.bfloat16, 16, torch.float32)
    is_masked = target == -100
    with torch.no_grad():
        x[is_masked] = float("inf")
        h[is_masked] = float("nan")
    valid_rows = False if computes_ignored else None
    tigon.linear_cross_entropy(x, w, target, linear_bias=bias, low_rank=(h, b), valid_rows=valid_rows).backward()
    for gradient in (x.grad, w.grad, bias.grad, h.grad, b.grad):
        assert gradient.isfinite().all()
    assert (h.grad[is_masked] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_tensor_of_the_addition_is_larger_than_the_logits_of_a_chunk(dtype):
    """The peak of the loss stays that of a head without an adapter, and its small factors."""
    x, w = (torch.randn(n, 4, dtype=dtype, device=DEVICE).requires_grad_() for n in (1024, 2048))
    h, b = (torch.randn(n, 2, device=DEVICE).requires_grad_() for n in (1024, 2048))
    target = torch.zeros(1024, dtype=torch.int64, device=DEVICE)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    with tuned(ChunkConfig, tokens=64), Sizes():
        tigon.linear_cross_entropy(x, w, target, low_rank=(h, b)).backward()
    assert max(sizes) == 64 * 2048


@pytest.mark.parametrize(("low_rank", "message"), [
    (lambda h, b: h, "low_rank must be a pair of tensors or None, got Tensor"),
    (lambda h, b: (h, b[:5]), r"low_rank must have shapes \(..., R\) and \(101, R\), got B \(5, 3\)"),
    (lambda h, b: (h[:, :2], b), r"low_rank_h must have shape \(83, 3\), got \(83, 2\)"),
    (lambda h, b: (h.double(), b), "low_rank_h and low_rank_b must have the same dtype, got"),
])  # fmt: skip
def test_wrong_factors_are_refused(low_rank, message):
    (x, w, _, h, b), target = _inputs(torch.float32, 3, torch.float32)
    with pytest.raises((TypeError, ValueError), match=message):
        tigon.linear_cross_entropy(x, w, target, low_rank=low_rank(h, b))


@pytest.mark.parametrize("name", ["x", "h", "b"])
def test_only_the_needed_gradients_of_a_low_rank_addition_are_computed(name):
    (x, w, _, h, b), target = _inputs(torch.float32, 3, torch.float32)
    leaves = {"x": x, "h": h, "b": b}
    run = lambda: tigon.linear_cross_entropy(x, w.detach(), target, low_rank=(h, b))
    expected = torch.autograd.grad(run(), list(leaves.values()))
    for other, leaf in leaves.items():
        leaf.requires_grad_(other == name)
    (actual,) = torch.autograd.grad(run(), leaves[name])
    assert torch.equal(actual, expected[list(leaves).index(name)])
