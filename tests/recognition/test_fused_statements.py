"""Forwards with fused sums, norms and projections have the values and gradients of the stock statements.

Where kernels run (on a GPU, or in the interpreter), the ops compute them. Elsewhere the stock statements run.
"""

import copy
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from op_cases import DEVICE
from tigon.recognition.rewriting import fused_statements
from tigon.recognition.rewriting.fused_statements import fuse_statements
from tigon.recognition.rewriting.statements import ADD_NORM, PRODUCTS
from tigon.runtime.device import runs_kernels
from tigon.testing import assert_accurate

pytestmark = pytest.mark.usefixtures("no_symbolic_runs")

WIDTH = 32
BY_KERNELS = runs_kernels(torch.empty(1, device=DEVICE))


class Norm(nn.Module):
    """An RMS norm that rounds before the weight, as Llama does."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), 1e-6

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 48, bias), nn.Linear(WIDTH, 16, bias), nn.Linear(WIDTH, 16, bias)
        self.o = nn.Linear(48, WIDTH, bias)

    def forward(self, hidden):
        shape = (*hidden.shape[:-1], -1, 16)
        q = self.q(hidden).view(shape).transpose(1, 2)
        k = self.k(hidden).view(shape).transpose(1, 2)
        v = self.v(hidden).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return self.o(out.transpose(1, 2).reshape(*hidden.shape[:-1], -1))


class Layer(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.attention, self.before, self.after = Attention(bias), Norm(), Norm()
        self.up, self.down = nn.Linear(WIDTH, 80, bias), nn.Linear(80, WIDTH, bias)

    def forward(self, hidden, scale: float = 1.0):
        residual = hidden
        hidden = self.before(hidden)
        hidden = self.attention(hidden) * scale
        hidden = residual + hidden

        residual = hidden
        hidden = self.after(hidden)
        hidden = self.down(F.silu(self.up(hidden)))
        return residual + hidden


def make(seed: int = 0, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Layer(bias), Layer(bias)).to(DEVICE)


def pair(**options) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a patched and a stock model."""
    model = make()
    tigon.patch(model, **options)
    return model, make()


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and of the parameters where they need one."""
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [t for t in (x, *model.parameters()) if t.requires_grad])]


def inputs() -> Tensor:
    return torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()


def assert_close(results: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(results, expected, strict=True):
        # The gradient of the bias of keys is zero in exact arithmetic, so only rounding errors remain.
        torch.testing.assert_close(a, b, atol=2e-5 * max(b.abs().max().item(), 0.1), rtol=0)


def nodes(y: Tensor) -> set[str]:
    """Return the names of all nodes in the autograd graph of a result."""
    names, pending = {}, [y.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in names:
            names[node] = node.name()
            pending += [n for n, _ in node.next_functions]
    return set(names.values())


def test_the_report_names_the_fused_statements():
    report = tigon.patch(make())
    entries = {e.module: (e.detail, e.count) for e in report.replaced if e.part == "fused_statements"}
    assert entries == {"Layer": ("add + norm, norm + residual", 2), "Attention": ("products of one input", 2)}


# The pattern that a forward matches, and its body. Forwards without a pattern only resemble one.
Q, K = "q = self.q(a)\n", "k = self.k(a)\nreturn q, k"
FORMS = {
    "other names": (set(), "y = self.norm(a)\nreturn a + y"),
    "no alias": ({ADD_NORM}, "c = a + b\nd = self.norm(c)\nreturn c * d"),
    "other target": ({ADD_NORM}, "a = a + b\nr = a\nd = self.norm(a)\nreturn a * d * r"),
    "in a branch": (
        {ADD_NORM}, "if flag:\n    a = b + a\n    r = a\n    a = self.norm(a)\n    return a + r\nreturn a",
    ),
    "post norm": (set(), "a = a + b\na = self.norm(a)\nreturn a"),
    "a statement between": (set(), "a = a + b\nprint(a)\nr = a\nprint(r)\na = self.norm(a)\nreturn a + r"),
    "two inputs": (set(), Q + "k = self.k(b)\nreturn q, k"),
    "rebound": (set(), "a = self.q(a)\nk = self.k(a)\nreturn a, k"),
    "nested": ({PRODUCTS}, "q = self.n(self.q(a).view(2, -1)).t()\nk = self.n(self.k(a).view(2, -1)).t()\nreturn q, k"),
    "keywords": (set(), "q = self.q(a, scale=2)\nk = self.k(a, scale=2)\nreturn q, k"),
    "one of two": (set(), Q + "k = self.k(a) if self.k is not None else q\nreturn q, k"),
    "in a lambda": (set(), Q + "k = lambda a: self.k(a)\nreturn q, k(q)"),
    "in a comprehension": (set(), Q + "k = [self.k(a) for a in (q, 2 * q)]\nreturn q, *k"),
    "a walrus": (set(), "q = self.q(a) + (a := a * 2)\n" + K),
    "written": (set(), "q = self.q(a) + a.mul_(2)\n" + K),
    "reads shape and dtype": ({PRODUCTS}, "q = self.q(a).view(a.shape[0], -1)\nk = self.k(a).to(a.dtype)\nreturn q, k"),
    "of a global": (set(), "r = WIDTH\nd = self.double(WIDTH)\nreturn r, d, a"),
    "reads locals": (set(), Q + "k = self.k(a)\nreturn sorted(locals()), q, k"),
}  # fmt: skip


@pytest.mark.parametrize(("names", "body"), FORMS.values(), ids=FORMS)
def test_only_statements_that_match_a_pattern_are_rewritten(tmp_path, names, body):
    """Every variable that a replaced statement assigned has its value afterwards."""
    file = tmp_path / "form.py"
    file.write_text(f"def forward(self, a, b, flag=True):\n{textwrap.indent(body, '    ')}\n")
    scope = {"WIDTH": WIDTH}
    exec(compile(file.read_text(), file, "exec"), scope)
    stock, rewritten = scope["forward"], fuse_statements(scope["forward"])
    calls = set(rewritten.__code__.co_freevars) if isinstance(rewritten, types.FunctionType) else set()
    assert calls == names
    if names and names != {PRODUCTS}:
        module, a, b = nn.ModuleDict({"norm": Norm()}), torch.randn(3, WIDTH), torch.randn(3, WIDTH)
        module.norm = module["norm"]
        assert torch.equal(rewritten(module, a, b), stock(module, a, b))
        assert rewritten.__defaults__ == stock.__defaults__


def test_source_that_cannot_be_read_is_reported():
    scope = {}
    exec("def forward(self, a, b):\n    c = a + b\n    d = self.norm(c)\n    return c, d", scope)
    assert fuse_statements(scope["forward"]) == "its forward has no source that can be read"


def test_a_method_that_calls_super_is_rewritten():
    class Other(Layer):
        def forward(self, hidden):
            residual = hidden
            hidden = self.before(hidden)
            return super().forward(hidden) + residual

    assert "__class__" in Other.forward.__code__.co_freevars
    rewritten, layer, x = fuse_statements(Other.forward), Other().to(DEVICE), torch.randn(3, WIDTH, device=DEVICE)
    assert torch.equal(rewritten(layer, x), Other.forward(layer, x))


def test_tracebacks_show_the_line_of_the_author():
    model = make()
    tigon.patch(model)
    with pytest.raises(RuntimeError) as raised:
        model(torch.randn(2, 7, WIDTH + 1, device=DEVICE))
    lines = {str(entry.statement) for entry in raised.traceback}
    assert any("self.before(hidden)" in line for line in lines)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("level", ["default", "lean", "lean+mlp"])
def test_a_step_has_the_stock_output_and_gradients(level, bias):
    stock, model, x = make(bias=bias), make(bias=bias), inputs()
    expected = step(stock, x)
    tigon.patch(model, memory=level)
    assert_close(step(model, x), expected)
    assert ("_LinearsBackward" in nodes(model(x))) == BY_KERNELS
    assert ("_AddRMSNormBackward" in nodes(model(x))) == BY_KERNELS


def test_gradients_of_hidden_states_are_the_stock_ones():
    """The output of a layer and the output of a norm have the gradients that they have in the stock model."""
    results = []
    for patched in (False, True):
        model, x = make(), inputs()
        if patched:
            tigon.patch(model)
        outputs = []
        model[0].register_forward_hook(lambda m, args, out, outputs=outputs: outputs.append(out))
        model[1].before.register_forward_hook(lambda m, args, out, outputs=outputs: outputs.append(out))
        loss = model(x).square().sum()
        results.append(torch.autograd.grad(loss, outputs))
        assert len(outputs) == 2
    assert_close(*results[::-1])


def test_outputs_without_use_need_no_gradient():
    x, layers = inputs(), [nn.Linear(WIDTH, 8, device=DEVICE) for _ in range(3)]
    outputs = fused_statements.products(x, *layers)
    assert (outputs is not None) == BY_KERNELS
    if outputs is None:
        return
    gradients = torch.autograd.grad(outputs[1].sum(), [x, *layers[1].parameters()])
    assert_close(list(gradients), list(torch.autograd.grad(layers[1](x).sum(), [x, *layers[1].parameters()])))
    norm = Norm().to(DEVICE)
    y, residual = fused_statements.norm_with_residual(norm, x)
    assert residual is x
    tigon.patch(norm)
    y, residual = fused_statements.norm_with_residual(norm, x)
    assert torch.equal(torch.autograd.grad(residual.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    y, residual = fused_statements.norm_with_residual(norm, x.detach())
    assert (y.requires_grad, residual.requires_grad) == (True, False)
    assert torch.autograd.grad(y.sum(), norm.weight)[0].shape == (WIDTH,)


@pytest.mark.kernels
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_products_may_be_written_in_place_and_differentiated_under_autocast(bias):
    """The gradients are as exact as those of the layers outside of autocast, because the products ran outside of it."""
    layers = nn.ModuleList(nn.Linear(WIDTH, 8, bias, device=DEVICE) for _ in range(2))

    def gradients(products, x: Tensor, layers: nn.ModuleList, autocast: bool) -> tuple[Tensor, ...]:
        q, k = products(x, *layers)
        loss = q.view(2, 7, 2, 4).mul_(2).square().sum() + k.add_(1).square().sum()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(loss, [x, *layers.parameters()])

    one_by_one = lambda x, *layers: [layer(x) for layer in layers]
    ours = gradients(fused_statements.products, inputs(), layers, autocast=True)
    eager = gradients(one_by_one, inputs(), layers, autocast=False)
    wide = inputs().detach().double().requires_grad_()
    exact = gradients(one_by_one, wide, copy.deepcopy(layers).double(), autocast=False)
    for triple in zip(ours, eager, exact, strict=True):
        assert_accurate(*triple)


def test_the_pending_result_of_a_collective_is_computed_by_torch():
    pending = pytest.importorskip("torch.distributed._functional_collectives").AsyncCollectiveTensor(inputs().detach())
    layers = [nn.Linear(WIDTH, 8, device=DEVICE) for _ in range(2)]
    assert fused_statements.products(pending, *layers) is None
    mlp = tigon.SwiGLUMLP(WIDTH, 8, device=DEVICE)
    torch.testing.assert_close(mlp(pending), mlp(pending.elem))
