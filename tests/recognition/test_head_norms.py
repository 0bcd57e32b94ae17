"""Norms of queries and keys run with the rotary embedding after them, in forwards of several forms.

Where kernels run (on a GPU, or in the interpreter), one op computes both. Elsewhere, and wherever another statement
could see the difference, the stock statements run.
"""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import tigon
from op_cases import DEVICE
from recognition import head_norms
from recognition.head_norms import (
    SIZE,
    WIDTH,
    Attention,
    Norm,
    NormAfterTranspose,
    NormInBranch,
    OffsetNorm,
    OneTensorAtATime,
    OnlyNorms,
    ReadBetween,
    RopeInBranch,
    WholeTokenNorm,
    WrittenBetween,
    apply_rope,
    rope_backwards,
    rope_in_fp32,
    rope_interleaved,
    rope_on_a_part,
)
from tigon.hf.report import Report
from tigon.recognition.parts import rope as rope_recognition
from tigon.recognition.rewriting.fused_statements import fuse_statements
from tigon.recognition.rewriting.statements import NORM_ROPE
from tigon.runtime.device import runs_kernels
from tigon.testing import assert_accurate

pytestmark = pytest.mark.usefixtures("no_symbolic_runs")

BY_KERNELS = runs_kernels(torch.empty(1, device=DEVICE))
FUSED = [Attention, NormAfterTranspose, NormInBranch, RopeInBranch, OneTensorAtATime]
STOCK = [WholeTokenNorm, ReadBetween, WrittenBetween]
LABEL = "q/k norm + rope"


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """Record the options of each call of the op."""
    options: list[dict] = []
    op = rope_recognition.qk_norm_rope_of_layer
    monkeypatch.setattr(
        rope_recognition, "qk_norm_rope_of_layer", lambda *args, **kwargs: options.append(kwargs) or op(*args, **kwargs)
    )
    return options


def make(
    cls: type[nn.Module] = Attention, *args, dtype: torch.dtype = torch.float32, **options
) -> tuple[nn.Module, nn.Module, Report]:
    """Return a patched module, a stock one with the same weights, and the report."""
    torch.manual_seed(0)
    stock = cls(*args).to(DEVICE, dtype)
    module = copy.deepcopy(stock)
    return module, stock, tigon.patch(module, **options)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    angles = torch.randn(2, 3, SIZE // 2).repeat(1, 1, 2).to(DEVICE)
    return torch.randn(2, 3, WIDTH).to(DEVICE, dtype), (angles.cos().to(dtype), angles.sin().to(dtype))


def step(module: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the output and all gradients. A parameter without a gradient has none in the result."""
    x, tables = inputs(dtype)
    x.requires_grad_()
    y = module(x, tables)
    module.zero_grad()
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_equal_steps(module: nn.Module, stock: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    exact = step(copy.deepcopy(stock).double(), torch.float64)
    results, references = step(module, dtype), step(stock, dtype)
    assert len(results) == len(references) == len(exact)
    for result, reference, truth in zip(results, references, exact, strict=True):
        assert_accurate(result, reference, truth)


def is_rewritten(cls: type[nn.Module]) -> bool:
    function = fuse_statements(cls.forward)
    return callable(function) and NORM_ROPE in function.__code__.co_freevars


@pytest.mark.parametrize("norm", [Norm, OffsetNorm], ids=["plain", "offset"])
@pytest.mark.parametrize("cls", FUSED, ids=lambda cls: cls.__name__)
@pytest.mark.sampled(in_interpreter=3)
def test_one_op_computes_norm_and_rope(cls, norm, calls):
    module, stock, report = make(cls, norm)
    assert any(e.part == "fused_statements" and LABEL in e.detail for e in report.replaced)
    assert_equal_steps(module, stock)
    assert len(calls) == BY_KERNELS * (2 if cls is OneTensorAtATime else 1)
    assert all(options["offset"] == (norm is OffsetNorm) for options in calls)
    report.restore()
    calls.clear()
    assert all(map(torch.equal, step(module), step(stock)))
    assert not calls


@pytest.mark.parametrize("cls", STOCK, ids=lambda cls: cls.__name__)
def test_other_statements_stay(cls, calls):
    """A norm does not move behind a write to its input, for example."""
    module, stock, report = make(cls)
    assert not is_rewritten(cls)
    if cls is WrittenBetween:
        # Backward through a tensor that is written in place is an error in the stock module too.
        with torch.no_grad():
            torch.testing.assert_close(module(*inputs()), stock(*inputs()))
    else:
        assert not any(LABEL in e.detail for e in report.entries)
        assert "computed by themselves: q_norm, k_norm (no rotary embedding follows" in str(report.why(""))
        assert_equal_steps(module, stock)
    assert not calls


def double_the_output(module: Attention) -> None:
    module.k_norm.register_forward_hook(lambda module, args, output: 2 * output)


def exchange_the_weight(module: Attention) -> None:
    module.q_norm.weight = nn.Parameter(torch.ones_like(module.q_norm.weight).double())
    module.q_norm.weight.data = module.q_norm.weight.data.float()


def freeze(is_frozen):
    return lambda module: [p.requires_grad_(not is_frozen("norm" in name)) for name, p in module.named_parameters()]


def assign(path: str, value):
    """Return a function that assigns an attribute of a child, or of the module."""
    child, _, name = path.rpartition(".")
    return lambda module: setattr(module.get_submodule(child), name, value)


# The class, the options of the patch, a change of both modules afterwards, and whether the op still runs.
CHANGES = {
    "a skipped norm": (NormInBranch, {}, assign("has_norms", False), False),
    "a skipped rope": (RopeInBranch, {}, assign("has_rope", False), False),
    "a hook": (Attention, {}, double_the_output, False),
    "eps": (Attention, {}, assign("k_norm.eps", 0.5), False),
    "a forward": (Attention, {}, assign("q_norm.forward", lambda x: 3 * x), False),
    "a weight": (Attention, {}, exchange_the_weight, True),
    "no norm": (Attention, {"rms_norm": False}, lambda module: None, False),
    "no rope": (Attention, {"rope": False}, lambda module: None, False),
    "half precision": (Attention, {"dtype": torch.float16}, lambda module: None, True),
    "frozen norms": (Attention, {}, freeze(lambda is_norm: is_norm), True),
    "frozen projections": (Attention, {}, freeze(lambda is_norm: not is_norm), True),
    "all frozen": (Attention, {}, freeze(lambda is_norm: True), True),
}


@pytest.mark.parametrize(("cls", "options", "change", "is_fused"), CHANGES.values(), ids=CHANGES)
@pytest.mark.sampled(in_interpreter=3)
def test_a_change_after_the_patch_has_its_stock_effect(cls, options, change, is_fused, calls):
    module, stock, report = make(cls, **options)
    assert any(LABEL in e.detail for e in report.replaced) == (not {"rms_norm", "rope"} & options.keys())
    change(module), change(stock)
    assert_equal_steps(module, stock, options.get("dtype", torch.float32))
    assert len(calls) == (BY_KERNELS and is_fused)


@pytest.mark.parametrize("function", [rope_backwards, rope_on_a_part, rope_interleaved, rope_in_fp32])
@pytest.mark.sampled(2)
def test_other_rotary_embeddings(function, calls, monkeypatch):
    monkeypatch.setattr(head_norms, "apply_rope", function)
    module, stock, _ = make()
    x, tables = inputs()
    if function is rope_on_a_part:
        tables = tuple(t[..., [0, 1, 2, 3] * 2] for t in tables)
    results = []
    for each in (stock, module):
        y = each(x, tables)
        results.append([y, *torch.autograd.grad(y.square().mean(), each.parameters())])
    for reference, result in zip(*results, strict=True):
        torch.testing.assert_close(result, reference, atol=1e-5, rtol=1e-4)
    assert len(calls) == BY_KERNELS


# The options of the patch and the function of the rotary embedding. The op returns fp32 for fp32 tables, so it does not
# run where the stock statements return fp16.
ONLY_NORMS = {
    "fp32": ({}, apply_rope), "no norm": ({"rms_norm": False}, apply_rope), "no rope": ({"rope": False}, apply_rope),
    "fp16": ({"dtype": torch.float16}, apply_rope), "fp16, rope in fp32": ({"dtype": torch.float16}, rope_in_fp32),
}  # fmt: skip


@pytest.mark.parametrize(("options", "function"), ONLY_NORMS.values(), ids=ONLY_NORMS)
def test_the_dtype_is_that_of_the_stock_statements_and_the_report_lists_fused_norms(
    options, function, calls, monkeypatch
):
    monkeypatch.setattr(head_norms, "apply_rope", function)
    module, stock, report = make(OnlyNorms, **options)
    has_parts, is_half = not {"rms_norm", "rope"} & options.keys(), "dtype" in options
    assert [e.detail for e in report.entries if e.part == "fused_statements"] == ([LABEL] if has_parts else [])
    _, tables = inputs()
    q, k = (torch.randn(2, heads, 3, SIZE).to(DEVICE, options.get("dtype", torch.float32)) for heads in (4, 2))
    for result, expected in zip(module(q, k, tables), stock(q, k, tables), strict=True):
        torch.testing.assert_close(result, expected, **({"atol": 5e-3, "rtol": 5e-3} if is_half else {}))
    assert len(calls) == (BY_KERNELS and has_parts and function is not rope_in_fp32)


def test_a_rope_that_was_replaced_in_the_file_runs(calls, monkeypatch):
    module, stock, _ = make()
    monkeypatch.setattr(head_norms, "apply_rope", lambda q, k, cos, sin: (q * cos[:, None], k * sin[:, None]))
    assert_equal_steps(module, stock)
    assert not calls


@pytest.mark.kernels
def test_tables_with_a_gradient_get_it(calls):
    gradients = []
    for each in make()[:2]:
        x, (cos, sin) = inputs()
        each(x, (cos.requires_grad_(), sin)).square().sum().backward()
        gradients.append(cos.grad)
    torch.testing.assert_close(*gradients)
    assert not calls


def test_autocast(calls):
    modules = make()[:2]
    with torch.autocast(DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        outputs = [each(*inputs()) for each in modules]
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    assert outputs[0].dtype == outputs[1].dtype


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_fused_too(copied, calls):
    module, stock, _ = make(NormAfterTranspose)
    assert_equal_steps(copied(module), stock)
    assert len(calls) == BY_KERNELS


def test_recomputation_gives_the_same_gradients(calls):
    module, *_ = make()
    x, tables = inputs()
    torch.utils.checkpoint.checkpoint(module, x, tables, use_reentrant=False).square().mean().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    with tigon.lean():
        y = module(x, tables)
    y.square().mean().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)
    assert len(calls) >= 3 * BY_KERNELS


def test_a_graph_has_the_ops_of_each_part(calls):
    module, stock, _ = make()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs()), stock(*inputs()))
    assert not calls
