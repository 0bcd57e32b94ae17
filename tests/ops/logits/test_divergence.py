import math

import pytest
import torch
import torch.nn.functional as F

import tigon
from op_cases import DEVICE, INTERPRETED, assert_as_accurate_as_eager, one_in
from tigon.ops.logits.divergences import jsd_reference, kl_div_reference, tvd_reference

# One class, two classes, widths that fill no block, and one that is wider than the part of a row that a program reads.
# There are enough rows for the errors to average.
SHAPES = [(5, 1), (20, 2), (3, 5, 100), (5, 5000)]
REDUCTIONS = ["batchmean", "mean", "sum", "none"]


def _logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return (torch.randn(shape, generator=generator) * 3).to(DEVICE, dtype)


def _log_probs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return _logits(*shape, seed=seed).log_softmax(-1).to(dtype)


def _labels(*shape: int) -> torch.Tensor:
    labels = torch.randint(100, shape, generator=torch.Generator().manual_seed(1))
    labels.view(-1)[1::3] = -100
    return labels.to(DEVICE)


def _value_and_gradient(function, input, *others, **options) -> tuple[torch.Tensor, torch.Tensor]:
    input = input.detach().clone().requires_grad_()
    loss = function(input, *others, **options)
    upstream = torch.linspace(0.5, 2.0, loss.numel(), device=loss.device, dtype=loss.dtype).view(loss.shape)
    return loss.detach(), torch.autograd.grad(loss, input, upstream)[0]


# For each form: the contents of the input, the function, its reference and options.
FORMS = {
    "kl": ("log", tigon.kl_div, kl_div_reference, {"log_target": True}),
    "kl of probabilities": ("target", tigon.kl_div, kl_div_reference, {}),
    "kl from logits": ("logits", tigon.kl_div, kl_div_reference, {"from_logits": True, "temperature": 2.0}),
    "jsd": ("log", tigon.jsd, jsd_reference, {}), "jsd 0": ("log", tigon.jsd, jsd_reference, {"beta": 0.0}),
    "jsd 0.1": ("log", tigon.jsd, jsd_reference, {"beta": 0.1}),
    "jsd 1": ("log", tigon.jsd, jsd_reference, {"beta": 1.0}),
    "jsd from logits": ("logits", tigon.jsd, jsd_reference, {"from_logits": True, "temperature": 0.7}),
    "jsd 1 from logits": ("logits", tigon.jsd, jsd_reference, {"from_logits": True, "beta": 1.0}),
    "tvd": ("both", tigon.tvd, tvd_reference, {}),
    "tvd from logits": ("logits", tigon.tvd, tvd_reference, {"from_logits": True}),
}  # fmt: skip
every_form = pytest.mark.parametrize("form", FORMS)


def _pair(form: str, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    holds = FORMS[form][0]
    if holds == "logits":
        return [_logits(*shape, dtype=dtype), _logits(*shape, seed=1, dtype=dtype)]
    student, teacher = _log_probs(*shape), _log_probs(*shape, seed=1)
    student = student.exp() if holds == "both" else student
    teacher = teacher if holds == "log" else teacher.exp()
    return [student.to(dtype), teacher.to(dtype)]


REDUCED = {
    "batchmean, labels": ("batchmean", True), "sum": ("sum", False), "none, labels": ("none", True),
    "batchmean": ("batchmean", False), "mean, labels": ("mean", True),
}  # fmt: skip


@pytest.mark.kernels
@one_in(4, form=list(FORMS), shape=SHAPES, reduced=REDUCED)
@pytest.mark.sampled(in_interpreter=2)
def test_divergences_are_as_accurate_as_eager_code(form, shape, reduced):
    _, run, reference, options = FORMS[form]
    reduction, labelled = reduced
    student, teacher = _pair(form, *shape)
    options = options | {"reduction": reduction, "labels": _labels(*shape[:-1]) if labelled else None}
    term_size = 0.0
    if run is tigon.jsd and "from_logits" in options:
        # From logits the gradient is g - q sum(g), where g is that of the log-probabilities. It errs by units of g, and
        # of q times the terms of the sum.
        log_probs = [torch.log_softmax(x.double() / options.get("temperature", 1.0), -1) for x in (student, teacher)]
        reference_options = {
            name: value for name, value in options.items() if name not in ("from_logits", "temperature")
        }
        g = _value_and_gradient(reference, *log_probs, **reference_options)[1].abs()
        # With one class the largest term is 0.
        term_size = (g + log_probs[0].exp() * g.sum(-1, keepdim=True)).max().item() or 1.0
    assert_as_accurate_as_eager(
        lambda x, y: run(x, y, **options), lambda x, y: reference(x, y, **options), [student.requires_grad_(), teacher],
        loss=True, term_size=term_size,
    )  # fmt: skip


@one_in(1, reduction=list(REDUCTIONS), log_target=[False, True], shape=[(30,), (7, 30), (3, 5, 30)])
def test_kl_div_agrees_with_torch(shape, log_target, reduction):
    student, teacher = _log_probs(*shape), _log_probs(*shape, seed=1)
    teacher = teacher if log_target else teacher.exp()
    options = {"log_target": log_target, "reduction": reduction}
    for ours, theirs in zip(
        _value_and_gradient(tigon.kl_div, student, teacher, **options),
        _value_and_gradient(F.kl_div, student, teacher, **options),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def test_kl_div_has_the_default_reduction_of_torch():
    student, teacher = _log_probs(7, 30), _log_probs(7, 30, seed=1).exp()
    with pytest.warns(UserWarning, match="batchmean"):
        expected = F.kl_div(student, teacher)
    torch.testing.assert_close(tigon.kl_div(student, teacher), expected)
    torch.testing.assert_close(tigon.KLDivLoss()(student, teacher), expected)


def _jsd_of_probabilities(student, teacher, beta: float) -> torch.Tensor:
    """Return the JSD by its definition with probabilities, in fp64."""
    q, p = student.double().exp(), teacher.double().exp()
    kl = lambda a, b: (a * (a / b).log()).sum(-1).mean()
    if beta in (0.0, 1.0):
        return kl(q, p) if beta else kl(p, q)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_jsd_equals_the_definition_of_the_paper(beta):
    student, teacher = _log_probs(7, 300), _log_probs(7, 300, seed=1)
    loss, gradient = _value_and_gradient(tigon.jsd, student, teacher, beta=beta)
    expected, expected_gradient = _value_and_gradient(_jsd_of_probabilities, student, teacher, beta)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-8)


def test_equal_distributions_have_loss_and_gradient_of_exactly_zero():
    student = _log_probs(7, 300)
    for beta in (0.1, 0.3, 0.5, 0.7, 0.99, 1e-6):
        loss, gradient = _value_and_gradient(tigon.jsd, student, student.clone(), beta=beta)
        if student.is_cuda or INTERPRETED:
            assert loss == 0
            assert (gradient == 0).all()
        else:
            # The reference subtracts logarithms.
            torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-6)
    loss, gradient = _value_and_gradient(tigon.tvd, student.exp(), student.exp())
    assert loss == 0
    assert (gradient == 0).all()


def test_jsd_is_accurate_for_nearly_equal_distributions():
    """The loss is of second order in the difference, so it is far smaller than the roundings of its terms."""
    student = _log_probs(4, 300)
    teacher = student + 1e-3 * _logits(4, 300, seed=2)
    exact = _jsd_of_probabilities(student, teacher, 0.5)
    torch.testing.assert_close(tigon.jsd(student, teacher).double(), exact, rtol=1e-3, atol=3e-8)


INF = float("inf")


def test_kl_div_is_right_for_zero_probabilities():
    student = torch.tensor([[-0.5, -INF, -2.0, -INF]], device=DEVICE)
    log_target = torch.tensor([[-1.0, -INF, -INF, -3.0]], device=DEVICE)
    for target, logs in ((log_target, True), (log_target.exp(), False)):
        loss, gradient = _value_and_gradient(tigon.kl_div, student, target, log_target=logs, reduction="none")
        p = math.exp(-1.0)
        expected = torch.tensor([[p * -0.5, 0.0, 0.0, INF]], device=DEVICE)
        torch.testing.assert_close(loss, expected)
        upstream = torch.linspace(0.5, 2.0, 4, device=DEVICE)
        torch.testing.assert_close(gradient, -upstream * log_target.exp())


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_jsd_is_right_for_zero_probabilities(beta):
    """Elements of the student, of the teacher, of both and of none are zero, or far down the tail."""
    student = torch.tensor([[-0.5, -INF, -2.0, -INF, -700.0, -1.0, -103.0]], device=DEVICE)
    teacher = torch.tensor([[-1.0, -1.5, -INF, -INF, -800.0, -600.0, -0.5]], device=DEVICE)
    loss, gradient = _value_and_gradient(tigon.jsd, student, teacher, beta=beta, reduction="none")
    q, p = student.double().exp(), teacher.double().exp()
    upstream = torch.linspace(0.5, 2.0, 7, device=DEVICE, dtype=torch.float64)
    term = lambda a, log_a, log_b: torch.where(a == 0, 0.0, a * (log_a - log_b))
    if beta == 0.0:
        expected, slope = term(p, teacher.double(), student.double()), -p
    elif beta == 1.0:
        expected = term(q, student.double(), teacher.double())
        slope = expected + q
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        slope = (1 - beta) * term(q, student.double(), log_m)
        expected = slope + beta * term(p, teacher.double(), log_m)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient.double(), upstream * slope, rtol=1e-6, atol=1e-7)
    assert not gradient.isnan().any()


@pytest.mark.parametrize("name", ["kl_div", "jsd", "tvd"])
def test_logits_of_masked_classes_may_be_minus_infinity(name):
    student, teacher = _logits(3, 300), _logits(3, 300, seed=1)
    both = [torch.cat((x, torch.full((3, 50), -INF, device=DEVICE)), -1) for x in (student, teacher)]
    run = getattr(tigon, name)
    loss, gradient = _value_and_gradient(run, *both, from_logits=True)
    expected, expected_gradient = _value_and_gradient(run, student, teacher, from_logits=True)
    # The default reduction of kl_div is a mean over elements.
    factor = 300 / 350 if name == "kl_div" else 1.0
    torch.testing.assert_close(loss, expected * factor)
    torch.testing.assert_close(gradient[:, :300], expected_gradient * factor)
    assert (gradient[:, 300:] == 0).all()


@pytest.mark.parametrize("place", [0, 1], ids=["student", "teacher"])
@every_form
def test_nan_inputs_give_nan_losses(form, place):
    _, run, _, options = FORMS[form]
    pair = _pair(form, 3, 300)
    pair[place][1, 7] = torch.nan
    rows = run(*pair, reduction="none", **options).sum(-1)
    assert rows.isnan().tolist() == [False, True, False]
    assert run(*pair, **options).isnan()


@every_form
def test_ignored_rows_contribute_nothing_for_any_values(form):
    _, run, _, options = FORMS[form]
    student, teacher = _pair(form, 5, 300)
    labels, valid = torch.tensor([3, -100, 0, -100, 9], device=DEVICE), [0, 2, 4]
    dirty = [x.clone() for x in (student, teacher)]
    dirty[0][1], dirty[0][3], dirty[1][1] = torch.nan, INF, INF
    for reduction in REDUCTIONS:
        options = options | {"reduction": reduction}
        loss, gradient = _value_and_gradient(run, *dirty, labels=labels, **options)
        if reduction == "none":
            assert (loss[[1, 3]] == 0).all()
            expected = run(student[valid], teacher[valid], **options)
            torch.testing.assert_close(loss[valid], expected)
        else:
            expected, expected_gradient = _value_and_gradient(run, student[valid], teacher[valid], **options)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(gradient[valid], expected_gradient)
        assert (gradient[[1, 3]] == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@every_form
def test_loss_is_zero_and_differentiable_if_all_rows_are_ignored(form, reduction):
    _, run, _, options = FORMS[form]
    student, teacher = _pair(form, 4, 30)
    labels = torch.full((4,), 7, device=DEVICE)
    loss, gradient = _value_and_gradient(
        run, student, teacher, labels=labels, ignore_index=7, reduction=reduction, **options
    )
    assert (loss == 0).all()
    assert (gradient == 0).all()


@pytest.mark.kernels
def test_labels_may_be_int32_and_have_any_strides():
    student, teacher = _log_probs(2, 5, 30), _log_probs(2, 5, 30, seed=1)
    labels = _labels(2, 10)[:, ::2]
    expected = tigon.jsd(student, teacher, labels=labels.contiguous())
    assert torch.equal(tigon.jsd(student, teacher, labels=labels), expected)
    assert torch.equal(tigon.jsd(student, teacher, labels=labels.int()), expected)


@pytest.mark.parametrize("name", ["kl_div", "jsd", "tvd"])
def test_without_labels_no_row_is_ignored(name):
    function, pair = getattr(tigon, name), (_logits(5, 70), _logits(5, 70, seed=1))
    expected = function(*pair, from_logits=True)
    for ignore_index in (0, -1, -100):
        assert torch.equal(function(*pair, from_logits=True, ignore_index=ignore_index), expected)


def test_ignore_index_may_exceed_int32_labels():
    pair, labels = (_logits(5, 70), _logits(5, 70, seed=1)), torch.arange(1, 6, dtype=torch.int32, device=DEVICE)
    loss = tigon.tvd(*pair, from_logits=True, reduction="mean", labels=labels, ignore_index=2**40)
    torch.testing.assert_close(loss, tigon.tvd(*pair, from_logits=True, reduction="mean"))


def test_batchmean_divides_as_torch_or_by_valid_rows_with_labels():
    student, teacher = _log_probs(2, 5, 30), _log_probs(2, 5, 30, seed=1)
    total = tigon.jsd(student, teacher, reduction="sum")
    torch.testing.assert_close(tigon.jsd(student, teacher), total / 2)
    labels = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    torch.testing.assert_close(tigon.jsd(student, teacher, labels=labels), total / 10)


@every_form
def test_fp16_gradients_use_the_loss_scale(form):
    """The gradient of a mean underflows in fp16. The loss scale of the upstream gradient prevents this."""
    _, run, reference, options = FORMS[form]
    student, teacher = _pair(form, 4, 3000, dtype=torch.float16)
    options = options | {"reduction": "mean"}
    scaled = lambda f: lambda x, y: f(x, y, **options) * 65536.0
    actual = _value_and_gradient(scaled(run), student, teacher)[1]
    expected = _value_and_gradient(scaled(reference), student.double(), teacher.double())[1]
    torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=2e-7)
    assert actual.dtype == torch.float16


@every_form
def test_teacher_that_needs_a_gradient_gets_it(form):
    _, run, reference, options = FORMS[form]
    both = [[x.clone().requires_grad_() for x in _pair(form, 5, 30)] for _ in range(2)]
    for f, pair in zip((run, reference), both, strict=True):
        f(*pair, **options).backward()
    for ours, expected in zip(*both, strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-5, atol=1e-7)
        assert ours.grad.abs().sum() > 0
    with torch.no_grad():
        assert not run(*both[0], **options).requires_grad


def test_modules_compute_the_functions():
    student, teacher, labels = _logits(6, 30), _logits(6, 30, seed=1), _labels(6)
    options = {"from_logits": True, "temperature": 2.0}
    rows = {"labels": labels, "ignore_index": 5}
    for module, expected in (
        (
            tigon.KLDivLoss(reduction="sum", ignore_index=5, **options),
            tigon.kl_div(student, teacher, reduction="sum", **options, **rows),
        ),
        (tigon.JSDLoss(0.1, 5, **options), tigon.jsd(student, teacher, beta=0.1, **options, **rows)),
        (tigon.TVDLoss("mean", 5, **options), tigon.tvd(student, teacher, reduction="mean", **options, **rows)),
    ):
        assert torch.equal(module(student, teacher, labels), expected)
    assert isinstance(tigon.KLDivLoss(), torch.nn.KLDivLoss)
    assert tigon.KLDivLoss(log_target=True).log_target
    for module in (tigon.KLDivLoss, tigon.JSDLoss, tigon.TVDLoss):
        with pytest.raises(ValueError, match=f"{module.__name__}: an option must be one of .*, got 'temp'"):
            module(temp=2.0)
