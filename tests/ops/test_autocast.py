"""Every op in every dtype, in and outside of autocast: in its forward, in its backward, and in both.

Under autocast in the forward pass an op computes what eager code computes there. Autocast in the backward pass changes
nothing, because the dtypes of its products are those of the forward pass. Only an op that consists of products of torch
rounds as these do.

Under autocast to bf16, some operators of torch refuse fp16 tensors, such as `torch.cat`. Where eager code raises an
error, the op computes what eager code computes without autocast.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tigon
from op_cases import CASES, DEVICE, INTERPRETED, Case, as_list
from tigon.ops.head.chunks import ChunkConfig
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy_reference
from tigon.ops.head.linear_log_probs import linear_log_probs_reference
from tigon.ops.head.linear_loss import eager_linear_loss
from tigon.ops.mlps.glu_mlp import glu_mlp_reference
from tigon.ops.mlps.mlp import mlp_reference
from tigon.runtime.tuning import tuned

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# The interpreter runs the kernels, which support neither fp64 nor, in the interpreter, products of bf16.
DTYPES = [FP32, FP16] if INTERPRETED else [FP64, FP32, BF16, FP16]
# The dtypes of autocast in the forward and in the backward pass; None switches it off.
MODES = [(None, None), (BF16, None), (FP16, None), (None, BF16), (None, FP16), (BF16, BF16), (FP16, FP16)]
COMBINATIONS = list(itertools.product(DTYPES, MODES))

# `make test` runs one in so many combinations of each op, and `make test-thorough` as many again. Most
# ops share the code that switches autocast off, so a combination that fails does so in many ops.
STEP = 13 if INTERPRETED else 9

RUNS_KERNELS = INTERPRETED or DEVICE == "cuda"

Function = Callable[..., Any]


class Results(NamedTuple):
    outputs: list[Tensor]
    gradients: list[Tensor]


def autocast(dtype: torch.dtype | None) -> Any:
    return contextlib.nullcontext() if dtype is None else torch.autocast(DEVICE, dtype)


def results(function: Function, tensors: list[Tensor], forward: Any, backward: Any) -> Results:
    with autocast(forward):
        outputs = as_list(function(*tensors))
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    pairs = [(y, dy) for y, dy in zip(outputs, upstream, strict=True) if y.requires_grad]
    leaves = [x for x in tensors if x.requires_grad]
    with autocast(backward):
        gradients = torch.autograd.grad([y for y, _ in pairs], leaves, [dy for _, dy in pairs])
    return Results([y.detach() for y in outputs], list(gradients))


def eager_results(reference: Function, tensors: list[Tensor], forward: Any, backward: Any) -> Results:
    try:
        return results(reference, tensors, forward, backward)
    except RuntimeError:
        return results(reference, tensors, None, None)


def assert_as_eager(
    run: Function, reference: Function, inputs: Callable[[torch.dtype], list[Tensor]], combination: Any,
    runs_eager_products: bool = False, widens: bool = False,
) -> None:  # fmt: skip
    """Check that the error of each result is at most twice that of eager code, plus four units in the last place.

    The unit is that of the least precise dtype of the calculation, and of the largest value of the result. The kernels
    compute fp64 tensors in fp32, so the error of eager code is that in fp32 there. A scalar is a loss, a sum of terms
    of order one that may cancel, so its unit is that of 1.

    Args:
        widens: True for eager code with an operator that autocast on a GPU computes in fp32. The op keeps its dtype.
    """
    dtype, (forward, backward) = combination
    actual = results(run, inputs(dtype), forward, backward)
    eager = eager_results(reference, inputs(dtype), forward, backward if runs_eager_products else None)
    in_fp32 = eager_results(reference, inputs(FP32), None, None) if dtype == FP64 else eager
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs(dtype)]
    exact = results(reference, wide, None, None)
    # Losses and log-probabilities of fp64 tensors are fp32, and autocast leaves fp64 alone.
    used = [dtype] if forward is None or dtype == FP64 else [dtype, forward]
    eps = max(max(torch.finfo(each).eps for each in used), torch.finfo(FP32).eps)
    for kind in Results._fields:
        columns = (getattr(each, kind) for each in (actual, eager, in_fp32, exact))
        for i, (a, b, b_in_fp32, c) in enumerate(zip(*columns, strict=True)):
            name = f"{kind} {i} of {dtype}, autocast to {forward} in forward and {backward} in backward"
            is_widened = widens and b.dtype == FP32 and a.dtype == dtype
            assert a.dtype == b.dtype or (a.dtype == FP32 and b.dtype == FP64) or is_widened, name
            assert a.shape == b.shape, name
            if c.numel():
                error, *eager_errors = ((x.double() - c.double()).abs().max().item() for x in (a, b, b_in_fp32))
                scale = max(c.double().abs().max().item(), 0.0 if c.dim() else 1.0)
                limit = 2 * max(eager_errors) + 4 * eps * scale
                assert error <= limit, f"{name}: the error is {error:.3g}, the limit {limit:.3g}"


def sampled(test: Callable) -> Callable:
    """Run a test on a sample of the combinations, and in `make test-thorough` on another one.

    The samples of each case differ from those of the previous one. The test takes `i`, the index of its case, and
    `combinations`, a function of `i`.
    """

    def sample(remainder: int) -> Callable[[int], list]:
        return lambda i: [each for j, each in enumerate(COMBINATIONS) if (i + j) % STEP == remainder]

    return pytest.mark.parametrize(
        "combinations",
        [pytest.param(sample(0), id="some"), pytest.param(sample(1), id="others", marks=pytest.mark.thorough)],
    )(test)


def quick_or_thorough(i: int) -> Any:
    """`make test` runs the first variant of each op, and then every second one."""
    case = CASES[i]
    is_thorough = case.workload.test_variants.index(case.variant) % 2
    return pytest.param(i, id=case.name, marks=pytest.mark.thorough if is_thorough else ())


@pytest.mark.parametrize("i", map(quick_or_thorough, range(len(CASES))))
@sampled
def test_an_op_computes_under_autocast_what_eager_code_computes(i: int, combinations: Function):
    case: Case = CASES[i]
    for combination in combinations(i):
        # lora_linear computes fp32 tensors in eager code.
        runs_kernels = INTERPRETED and combination[0] != FP32
        assert_as_eager(
            case.run, case.reference, case.inputs, combination,
            runs_eager_products=case.workload.name == "lora_linear" and not runs_kernels,
            widens=case.workload.name == "relu2" and DEVICE == "cuda",
        )  # fmt: skip


def values(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale)


def mlp_inputs(names: int) -> Callable[[torch.dtype], list[Tensor]]:
    shapes = [(5, 16), *[(24, 16)] * (names - 2), (16, 24)]
    return lambda dtype: [
        values(*shape, seed=i, scale=1.0 if i == 0 else 0.3).to(DEVICE, dtype).requires_grad_()
        for i, shape in enumerate(shapes)
    ]


MLPS = {"glu_mlp": (tigon.glu_mlp, glu_mlp_reference, mlp_inputs(4)), "mlp": (tigon.mlp, mlp_reference, mlp_inputs(3))}


@pytest.mark.parametrize("i", range(len(MLPS)), ids=list(MLPS))
@sampled
def test_an_mlp_computes_under_autocast_what_eager_code_computes(i: int, combinations: Function):
    for combination in combinations(i):
        assert_as_eager(*list(MLPS.values())[i], combination, runs_eager_products=not RUNS_KERNELS)


SEQUENCES, LENGTH, HIDDEN, VOCABULARY = 4, 5, 16, 77


def head_inputs(ignored: str) -> Callable[[torch.dtype], list[Tensor]]:
    targets = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(3))
    targets[:, : 2 if ignored == "some" else LENGTH] = -100

    def make(dtype: torch.dtype) -> list[Tensor]:
        hidden, weight = values(SEQUENCES, LENGTH, HIDDEN, seed=0), values(VOCABULARY, HIDDEN, seed=1, scale=0.3)
        return [*(x.to(DEVICE, dtype).requires_grad_() for x in (hidden, weight)), targets.to(DEVICE)]

    return make


def outputs_of(function: Function, **options: Any) -> Function:
    """Return a function that returns the loss and the further differentiable outputs of an op of the head."""

    def call(*tensors: Tensor) -> list[Tensor]:
        output = function(*tensors, **options)
        return [output] if isinstance(output, Tensor) else [x for x in output if x is not None]

    return call


def mean_loss(log_probs: Tensor, *others: Tensor) -> Tensor:
    return -log_probs.mean() - 0.1 * sum(each.mean() for each in others)


def eager_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, return_log_probs: bool = False, return_entropy: bool = False,
    **options: Any,
) -> list[Tensor]:  # fmt: skip
    loss = linear_cross_entropy_reference(hidden, weight, targets, **options)
    if not return_log_probs:
        return [loss]
    output = linear_log_probs_reference(hidden, weight, targets, return_entropy=return_entropy)
    return [loss, output.log_probs, output.entropy]


HEADS = {
    "linear_cross_entropy none, with outputs": (
        tigon.linear_cross_entropy, eager_cross_entropy,
        {"reduction": "none", "return_log_probs": True, "return_entropy": True},
    ),
    "linear_log_probs with entropy": (tigon.linear_log_probs, linear_log_probs_reference, {"return_entropy": True}),
    "linear_loss pair": (tigon.linear_loss, eager_linear_loss, {"loss_fn": mean_loss, "group": "pair"}),
    "linear_loss token with entropy": (
        tigon.linear_loss, eager_linear_loss, {"loss_fn": mean_loss, "group": "token", "with_entropy": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("i", range(len(HEADS)), ids=list(HEADS))
@pytest.mark.parametrize("ignored", ["some", "all"])
@sampled
def test_a_head_computes_under_autocast_what_eager_code_computes(i: int, ignored: str, combinations: Function):
    function, reference, options = list(HEADS.values())[i]
    run, expected = outputs_of(function, **options), outputs_of(reference, **options)
    for combination in combinations(i + (ignored == "all")):
        # Two sequences fit into a chunk.
        with tuned(ChunkConfig, tokens=2 * LENGTH):
            assert_as_eager(run, expected, head_inputs(ignored), combination)
