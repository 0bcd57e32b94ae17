"""Norms of queries and keys run with the rotary embedding after them, in forwards of several forms.

Where kernels run (on a GPU, or in the interpreter), one op computes both. Elsewhere, and wherever another statement
could see the difference, the stock statements run.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from op_cases import DEVICE
from tigon.hf.report import Report
from tigon.recognition.parts import rope as rope_recognition
from tigon.recognition.rewriting.fused_statements import fuse_statements
from tigon.recognition.rewriting.statements import NORM_ROPE
from tigon.runtime.device import runs_kernels
from tigon.testing import assert_accurate

HEADS, KEY_HEADS, SIZE, WIDTH = 4, 2, 16, 32
BY_KERNELS = runs_kernels(torch.empty(1, device=DEVICE))


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rope_to_one(x, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return x * cos + rotate_half(x) * sin


def rope_backwards(q, k, cos, sin, unsqueeze_dim=1):
    return apply_to_both(q, k, cos, -sin, unsqueeze_dim)


def rope_in_fp32(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x.to(q.dtype) for x in apply_to_both(q.float(), k.float(), cos, sin, unsqueeze_dim))


def rope_on_a_part(q, k, cos, sin, unsqueeze_dim=1):
    size = cos.shape[-1]
    rotated = apply_to_both(q[..., :size], k[..., :size], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((x, rest[..., size:]), -1) for x, rest in zip(rotated, (q, k), strict=True))


def rope_interleaved(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    cos, sin = (t[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    rotate = lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


apply_to_both = apply_rope


class Norm(nn.Module):
    """The norm of Qwen3, which rounds before the weight."""

    def __init__(self, width: int = SIZE, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class OffsetNorm(Norm):
    """The norm of Gemma 3, which adds 1 to the weight and rounds after it."""

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Attention(nn.Module):
    """The forward of Qwen3. The subclasses have other forwards."""

    def __init__(self, norm: type[Norm] = Norm):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, KEY_HEADS * SIZE), nn.Linear(WIDTH, KEY_HEADS * SIZE)
        self.q_norm, self.k_norm = norm(), norm()
        self.has_norms = self.has_rope = True

    def attend(self, q, k, x):
        v = self.v_proj(x).view(*x.shape[:-1], -1, SIZE).transpose(1, 2)
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class NormAfterTranspose(Attention):
    """The forward of Gemma 3."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class NormInBranch(Attention):
    """The forward of GLM-4-MoE."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_proj(x).view(shape)
        k = self.k_proj(x).view(shape)
        if self.has_norms:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class RopeInBranch(Attention):
    """The forward of AFMoE and, but for the order, of EXAONE 4."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_proj(x).view(shape)
        k = self.k_proj(x).view(shape)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        if self.has_rope:
            cos, sin = tables
            q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class OneTensorAtATime(Attention):
    """The forward of Gemma 3n."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        cos, sin = tables
        q = self.q_proj(x).view(shape)
        q = self.q_norm(q)
        q = apply_rope_to_one(q, cos, sin, unsqueeze_dim=2)
        q = q.transpose(1, 2)
        k = self.k_proj(x).view(shape)
        k = self.k_norm(k)
        k = apply_rope_to_one(k, cos, sin, unsqueeze_dim=2)
        k = k.transpose(1, 2)
        return self.attend(q, k, x)


class WholeTokenNorm(Attention):
    """The forward of OLMo 2, which normalises all heads of a token together."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = Norm(HEADS * SIZE), Norm(KEY_HEADS * SIZE)

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_norm(self.q_proj(x))
        k = self.k_norm(self.k_proj(x))
        q = q.view(shape).transpose(1, 2)
        k = k.view(shape).transpose(1, 2)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class ReadBetween(Attention):
    """A statement reads the normalised queries before they are rotated."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        scale = 1.0 + q.mean()
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q * scale, k, x)


class WrittenBetween(Attention):
    """A statement writes to the input of the norm before the queries are rotated."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        raw = self.q_proj(x).view(shape)
        q = self.q_norm(raw).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        raw.detach().zero_()
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


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
    angles = torch.randn(2, 5, SIZE // 2).repeat(1, 1, 2).to(DEVICE)
    return torch.randn(2, 5, WIDTH).to(DEVICE, dtype), (angles.cos().to(dtype), angles.sin().to(dtype))


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
def test_a_change_after_the_patch_has_its_stock_effect(cls, options, change, is_fused, calls):
    module, stock, report = make(cls, **options)
    assert any(LABEL in e.detail for e in report.replaced) == (not {"rms_norm", "rope"} & options.keys())
    change(module), change(stock)
    assert_equal_steps(module, stock, options.get("dtype", torch.float32))
    assert len(calls) == (BY_KERNELS and is_fused)


@pytest.mark.parametrize("function", [rope_backwards, rope_on_a_part, rope_interleaved, rope_in_fp32])
def test_other_rotary_embeddings(function, calls, monkeypatch):
    monkeypatch.setitem(globals(), "apply_rope", function)
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


class OnlyNorms(nn.Module):
    """An attention layer without another pattern than that of the norms."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = Norm(), Norm()

    def forward(self, q, k, tables):
        q = self.q_norm(q)
        k = self.k_norm(k)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return q, k


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
    monkeypatch.setitem(globals(), "apply_rope", function)
    module, stock, report = make(OnlyNorms, **options)
    has_parts, is_half = not {"rms_norm", "rope"} & options.keys(), "dtype" in options
    assert [e.detail for e in report.entries if e.part == "fused_statements"] == ([LABEL] if has_parts else [])
    _, tables = inputs()
    q, k = (torch.randn(2, heads, 5, SIZE).to(DEVICE, options.get("dtype", torch.float32)) for heads in (4, 2))
    for result, expected in zip(module(q, k, tables), stock(q, k, tables), strict=True):
        torch.testing.assert_close(result, expected, **({"atol": 5e-3, "rtol": 5e-3} if is_half else {}))
    assert len(calls) == (BY_KERNELS and has_parts and function is not rope_in_fp32)


def test_a_rope_that_was_replaced_in_the_file_runs(calls, monkeypatch):
    module, stock, _ = make()
    monkeypatch.setitem(globals(), "apply_rope", lambda q, k, cos, sin: (q * cos[:, None], k * sin[:, None]))
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
