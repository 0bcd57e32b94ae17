"""`linear_distillation` against its definition in float64, for every divergence and form of the teacher."""

import inspect

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from op_cases import one_in
from tigon.ops.head.chunks import ChunkConfig
from tigon.ops.head.linear_distillation import linear_distillation_reference
from tigon.ops.logits.distillation import DistillationConfig
from tigon.runtime.device import EMULATED
from tigon.runtime.tuning import tuned
from tigon.testing import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIVERGENCES = ("jsd", "kl", "reverse_kl", "tvd", "cosine")
# The kernel reads blocks of 64 logits here, so that this vocabulary takes three, the last one in part.
TOKENS, HIDDEN, VOCABULARY, TEACHER_HIDDEN = 6, 24, 131, 40
TRANSFORMED = {
    "temperature": 1.7, "softcap": 5.0, "logit_scale": 1.5, "teacher_softcap": 7.0, "teacher_logit_scale": 0.8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks():
    with tuned(DistillationConfig, block_v=64, num_warps=1):
        yield


def make(
    dtype: torch.dtype = torch.float32, teacher_vocabulary: int = VOCABULARY, vocabulary: int = VOCABULARY
) -> dict[str, Tensor]:
    """Return hidden states and heads whose distributions differ by a fraction of a nat, and labels."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    largest = max(vocabulary, teacher_vocabulary)
    hidden, weight = normal(TOKENS, HIDDEN), normal(largest, HIDDEN) * (2.0 / HIDDEN**0.5)
    further = normal(TOKENS, TEACHER_HIDDEN - HIDDEN)
    teacher_weight = torch.cat((weight, normal(largest, TEACHER_HIDDEN - HIDDEN) * 0.2), 1)
    targets = torch.randint(min(vocabulary, teacher_vocabulary), (TOKENS,), generator=generator)
    targets[2] = -100
    tensors = {
        "hidden": hidden, "weight": weight[:vocabulary], "bias": normal(vocabulary) * 0.1,
        "teacher_hidden": torch.cat((hidden, further), 1), "teacher_weight": teacher_weight[:teacher_vocabulary],
        "teacher_bias": normal(teacher_vocabulary) * 0.1,
    }  # fmt: skip
    tensors = {name: x.to(DEVICE, dtype) for name, x in tensors.items()}
    return tensors | {"targets": targets.to(DEVICE)}


def run(function, tensors: dict[str, Tensor], options: dict, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the results of a call, and the gradients of the student's tensors."""
    cast = lambda x: x.detach().to(dtype or x.dtype) if x.is_floating_point() else x
    tensors = {name: cast(x) for name, x in tensors.items()}
    student = [name for name in ("hidden", "weight", "bias") if name in tensors]
    for name in student:
        tensors[name].requires_grad_()
    result = function(**tensors, **options)
    outputs = [x for x in result if x is not None] if isinstance(result, tuple) else [result]
    upstream = torch.linspace(0.5, 1.5, outputs[0].numel(), device=DEVICE).to(outputs[0].dtype).view(outputs[0].shape)
    outputs[0].backward(upstream)
    return [x.detach() for x in outputs] + [tensors[name].grad for name in student]


def check(tensors: dict[str, Tensor], options: dict, msg: str = "") -> None:
    actual = run(tigon.linear_distillation, tensors, options)
    eager = run(linear_distillation_reference, tensors, options)
    exact = run(linear_distillation_reference, tensors, options, torch.float64)
    assert len(actual) == len(eager) == len(exact)
    for i, results in enumerate(zip(actual, eager, exact, strict=True)):
        # Gradients are differences of terms up to one.
        assert_accurate(*results, smallest=1.0 if results[0].dtype == torch.float32 else 0.0, msg=f"{msg} result {i}")


every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


@pytest.mark.kernels
@every_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.sampled(in_interpreter=3)
def test_it_is_accurate(divergence, dtype):
    check(make(dtype), {"divergence": divergence, "beta": 0.3})


@pytest.mark.kernels
@every_divergence
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.sampled(in_interpreter=4)
def test_fp32_logits_are_not_rounded(divergence, dtype):
    tensors = make(dtype) | {"targets": torch.tensor([3, 99, -100, 0, 130, 64], device=DEVICE)}
    options = {"divergence": divergence, "beta": 0.3, "fp32_logits": True}
    with tuned(ChunkConfig, tokens=4):
        check(tensors, options)
        check(tensors, options | TRANSFORMED | {"hard_weight": 0.1, "reduction": "none", "return_parts": True})


@pytest.mark.kernels
@every_divergence
def test_every_option_together(divergence):
    options = TRANSFORMED | {
        "divergence": divergence, "soft_weight": 0.7, "hard_weight": 0.4, "reduction": "none", "return_parts": True,
        "return_entropy": True,
    }  # fmt: skip
    check(make(), options)


@pytest.mark.kernels
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_ends_of_beta_are_the_two_kls(beta):
    tensors = make()
    jsd = run(tigon.linear_distillation, tensors, {"beta": beta})
    kl = run(tigon.linear_distillation, tensors, {"divergence": "reverse_kl" if beta else "kl"})
    assert all(map(torch.equal, jsd, kl))


@pytest.mark.kernels
@one_in(2, width={"smaller": VOCABULARY - 41, "larger": VOCABULARY + 37}, divergence=["jsd", "kl", "tvd"])
def test_a_teacher_with_another_vocabulary(width, divergence):
    tensors = make(teacher_vocabulary=width)
    check(tensors, {"divergence": divergence, "hard_weight": 0.3})
    # The student's probability of a token that the teacher lacks falls.
    gradient = run(tigon.linear_distillation, tensors, {"divergence": divergence})[-1]
    assert width > VOCABULARY or (gradient[width:] > 0).all()


def as_form(tensors: dict[str, Tensor], form: str) -> dict[str, Tensor]:
    """Replace the teacher's hidden states and head by its logits, probabilities or log-probabilities."""
    tensors = dict(tensors)
    parts = [tensors.pop(name).double() for name in ("teacher_hidden", "teacher_weight", "teacher_bias")]
    logits = torch.nn.functional.linear(*parts)
    if form == "top_k":
        values, indices = logits.log_softmax(-1).topk(17)
        # An index outside of the vocabulary stands for no token.
        indices[0, 3], indices[1, 4] = -1, VOCABULARY
        return tensors | {"teacher_log_probs": values.float(), "teacher_indices": indices}
    forms = {"logits": lambda: logits, "probs": lambda: logits.softmax(-1), "log_probs": lambda: logits.log_softmax(-1)}
    return tensors | {f"teacher_{form}": forms[form]().float()}


@pytest.mark.kernels
@one_in(2, form=["logits", "probs", "log_probs", "top_k"], dtype={"fp32": torch.float32, "bf16": torch.bfloat16})
def test_other_forms_of_the_teacher(form, dtype):
    tensors = as_form(make(dtype), form)
    check(tensors, {"temperature": 2.0, "divergence": "jsd" if form == "log_probs" else "kl"})
    if form != "top_k":
        # Without rounded logits of the teacher, all forms have the same loss as its hidden states.
        from_hidden = run(tigon.linear_distillation, make(torch.float32), {"divergence": "tvd"})[0]
        from_form = run(tigon.linear_distillation, as_form(make(torch.float32), form), {"divergence": "tvd"})[0]
        torch.testing.assert_close(from_form, from_hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.kernels
def test_equal_models_have_a_loss_and_gradients_of_exactly_zero():
    tensors = make()
    tensors |= {f"teacher_{name}": tensors[name] for name in ("hidden", "weight", "bias")}
    for divergence in ("jsd", "kl", "reverse_kl", "tvd"):
        loss, *gradients = run(tigon.linear_distillation, tensors, {"divergence": divergence})
        assert loss == 0.0, divergence
        assert all((g.abs() < 1e-8).all() for g in gradients), divergence


@pytest.mark.kernels
def test_ignored_tokens_are_not_read():
    tensors = make()
    expected = run(tigon.linear_distillation, tensors, {"hard_weight": 0.5, "return_parts": True})
    ignored = tensors["targets"] == -100
    for name in ("hidden", "teacher_hidden"):
        tensors[name] = tensors[name].masked_fill(ignored[:, None], float("nan"))
    for options in ({}, {"valid_rows": False}):
        results = run(tigon.linear_distillation, tensors, {"hard_weight": 0.5, "return_parts": True} | options)
        gradient = results[3]
        assert (gradient[ignored] == 0).all()
        # A product with a row of NaN is NaN, so with `valid_rows=False` the weight's gradient is.
        assert torch.equal(results[0], expected[0])


@pytest.mark.kernels
def test_without_targets_all_tokens_count():
    tensors = make()
    tensors.pop("targets")
    result = tigon.linear_distillation(**tensors, return_parts=True)
    losses = tigon.linear_distillation(**tensors, reduction="none")
    assert result.cross_entropy is None
    torch.testing.assert_close(result.loss, losses.mean())
    torch.testing.assert_close(result.divergence, losses.mean())
    # No label is ignored, because there is none.
    assert torch.equal(tigon.linear_distillation(**tensors, ignore_index=0), tigon.linear_distillation(**tensors))


def test_the_reference_takes_the_same_arguments():
    parameters = lambda function: list(inspect.signature(function).parameters)
    assert parameters(linear_distillation_reference) == parameters(tigon.linear_distillation)


@pytest.mark.parametrize(("change", "message"), [
    ({"teacher_logits": torch.ones(TOKENS, 7)}, "exactly one of .* got teacher_hidden, teacher_logits"),
    ({"teacher_hidden": None}, "exactly one of .* got none"),
    ({"teacher_weight": None}, "teacher_hidden needs teacher_weight, got None"),
    ({"teacher_hidden": torch.ones(TOKENS, 7)}, r"teacher_hidden must have shape \(6, 40\), got \(6, 7\)"),
    ({"teacher_indices": torch.ones(TOKENS, 7)}, "teacher_indices needs teacher_log_probs, got teacher_hidden"),
    ({"targets": None, "hard_weight": 0.5}, "hard_weight must be 0 without targets, got 0.5"),
    ({"divergence": "js"}, "divergence must be one of 'jsd', 'kl', .*, got 'js'"),
    (
        {"teacher_weight": torch.ones(9, TEACHER_HIDDEN), "teacher_bias": None, "beta": 1.0},
        "'reverse_kl' is infinite for a teacher that lacks some of the student's 131 tokens, got 9 tokens",
    ),
    (
        {"teacher_weight": torch.ones(9, TEACHER_HIDDEN), "teacher_bias": None, "divergence": "cosine"},
        "'cosine' needs the logits of a teacher that has all 131 tokens of the student, got 9 tokens",
    ),
])  # fmt: skip
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=f"linear_distillation: .*{message}"):
        tigon.linear_distillation(**{name: x.cpu() for name, x in make().items()} | change)


@pytest.mark.parametrize("form", ["probs", "log_probs"])
@pytest.mark.parametrize(("options", "message"), [
    ({"teacher_softcap": 5.0}, "teacher_softcap must be None .* got 5.0 and 1"),
    ({"teacher_logit_scale": 2.0}, "teacher_logit_scale 1 .* got None and 2"),
    ({"divergence": "cosine"}, "'cosine' needs the logits of the teacher, got teacher_{form}"),
], ids=["soft cap", "scale", "cosine"])  # fmt: skip
def test_options_of_logits_are_refused_for_probabilities(form, options, message):
    tensors = {name: make()[name].cpu() for name in ("hidden", "weight")}
    teacher = {f"teacher_{form}": torch.ones(TOKENS, len(tensors["weight"]))}
    with pytest.raises(ValueError, match=message.format(form=form)):
        tigon.linear_distillation(**tensors, **teacher, **options)


def test_a_sharded_head_is_refused():
    class Sharded(torch.Tensor):
        placements = ()

    tensors = make()
    tensors["weight"] = tensors["weight"].as_subclass(Sharded)
    with pytest.raises(ValueError, match="weight must be a plain tensor, because no vocabulary may be sharded"):
        tigon.linear_distillation(**tensors)


@pytest.mark.no_interpreter("It launches no kernel.")
def test_two_models_have_fewer_chunks_than_their_budget_allows():
    """8192 tokens of two bf16 heads of 128256 x 4096, with the spare tokens that an fp32 dW would take."""
    problem = "cuda", True
    config = ChunkConfig.heuristic(problem, EMULATED)
    token_bytes = 128256 * 4
    tokens = config.chunk_tokens(8192, token_bytes, None, spare_tokens=2048)
    assert -(-8192 // tokens) == 5
    assert tokens * token_bytes < 0.8 * 2**30
    # A cap of the caller has precedence.
    assert config.chunk_tokens(8192, token_bytes, 320, spare_tokens=2048) * token_bytes <= 320 * 2**20


class _DenseOperands(TorchDispatchMode):
    """Asserts that no product has an operand with gaps between its rows: oneDNN may read numbers in the gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.out, torch.ops.aten.mm.default, torch.ops.aten.addmm.out):
            for x in args:
                assert x.dim() < 2 or x.is_contiguous() or x.t().is_contiguous(), (function, x.shape, x.stride())
            self.products += 1
        return function(*args, **(kwargs or {}))


@one_in(1, dtype=[torch.bfloat16, torch.float16], with_bias=[False, True])
@pytest.mark.no_interpreter("It checks the products on a CPU without kernels.")
def test_products_of_fp32_logits_on_a_cpu_have_no_gaps(dtype, with_bias):
    v = 50
    x, weight = torch.randn(40, 16, dtype=dtype).requires_grad_(), torch.randn(v, 16, dtype=dtype).requires_grad_()
    bias = torch.randn(v, dtype=dtype).requires_grad_() if with_bias else None
    with _DenseOperands() as mode:
        loss = tigon.linear_distillation(
            x, weight, torch.randint(v, (40,)), bias=bias, teacher_hidden=torch.randn(40, 8, dtype=dtype),
            teacher_weight=torch.randn(v, 8, dtype=dtype), fp32_logits=True,
        )  # fmt: skip
        loss.backward()
    assert mode.products >= 2


@pytest.mark.kernels
def test_fp16_gradients_survive_with_the_scale_of_the_loss():
    tensors = make(torch.float16)
    scale = 2.0**14
    scaled = lambda function: lambda **arguments: function(**arguments) * scale
    actual, eager = (run(scaled(f), tensors, {}) for f in (tigon.linear_distillation, linear_distillation_reference))
    exact = run(scaled(linear_distillation_reference), tensors, {}, torch.float64)
    for results in zip(actual[1:], eager[1:], exact[1:], strict=True):
        assert_accurate(*results)


@pytest.mark.kernels
def test_a_label_outside_of_the_vocabulary_makes_the_loss_nan():
    tensors = make()
    tensors["targets"][1] = VOCABULARY
    assert tigon.linear_distillation(**tensors, hard_weight=0.1).isnan()
    assert tigon.linear_distillation(**tensors).isfinite()
