"""Forwards with fused sums, norms and projections have the values and gradients of the stock statements.

Where kernels run (on a GPU, or in the interpreter), the ops compute them. Elsewhere the stock statements run.
"""

import copy
import pickle
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from op_cases import DEVICE
from tigon.recognition.replacement import find_replacement
from tigon.recognition.rewriting import fused_statements
from tigon.recognition.rewriting.fused_statements import fuse_statements
from tigon.recognition.rewriting.statements import ADD_NORM, NORM_WITH_RESIDUAL, PRODUCTS
from tigon.runtime.device import runs_kernels
from tigon.testing import assert_accurate

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


# --- which statements are rewritten ---------------------------------------------------------------------------------


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


# --- the same values and gradients -----------------------------------------------------------------


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


# --- modules whose call does more run as they are ---------------------------------------------------------------


class DoubledCall(Norm):
    def __call__(self, x):
        return 2 * super().__call__(x)


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def freeze(is_trained):
    return lambda model: [p.requires_grad_(is_trained(name)) for name, p in model.named_parameters()]


def replace_the_call(where: str):
    def change(model: nn.Module) -> None:
        norm = model[0].get_submodule(where)
        norm._call_impl = lambda x: 2 * nn.Module._call_impl(norm, x)

    return change


def exchange_layers(model: nn.Module) -> None:
    layer = DoubledLinear(WIDTH, 16, bias=False).to(DEVICE)
    layer.load_state_dict(model[0].attention.k.state_dict())
    model[0].attention.k = layer
    model[1].after = nn.LayerNorm(WIDTH, device=DEVICE)


NORM_NAMES = ("before", "after")
# A change of the stock and of the patched model, before or after the patch.
CHANGES = {
    "frozen norms": freeze(lambda name: not any(norm in name for norm in NORM_NAMES)),
    "frozen layers": freeze(lambda name: any(norm in name for norm in NORM_NAMES)),
    "all frozen but one": freeze(lambda name: name == "0.attention.k.weight"),
    "a class with another call": lambda model: setattr(model[0].after, "__class__", DoubledCall),
    "a call of a norm with a sum": replace_the_call("before"),
    "a call of a norm with a residual": replace_the_call("after"),
    "exchanged layers": exchange_layers,
}


@pytest.mark.parametrize("when", ["before the patch", "after the patch"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_has_the_stock_output_and_gradients(change, when):
    (model, stock), x = (pair() if when == "after the patch" else (make(), make())), inputs()
    change(model), change(stock)
    if when == "before the patch":
        tigon.patch(model)
    assert_close(step(model, x), step(stock, x))
    assert_close(step(model, x.detach()), step(stock, x.detach()))


@pytest.mark.parametrize("where", ["before", "after", "attention.q"])
@pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_are_called(where, hook):
    (model, stock), x, calls = pair(), inputs(), []
    getattr(model[0].get_submodule(where), f"register_{hook}")(lambda *args: calls.append(1) or None)
    assert_close(step(model, x), step(stock, x))
    assert calls


class Calls(nn.Module):
    """A module that calls a method, a function and perhaps None, where other modules call a norm and linear layers."""

    def __init__(self, k: bool):
        super().__init__()
        self.norm, self.q, self.k = Norm(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH) if k else None
        self.squash = torch.tanh

    def twice(self, hidden):
        return 2 * hidden

    def forward(self, hidden):
        residual = hidden
        hidden = self.twice(hidden)
        hidden = residual + hidden
        hidden = self.norm(hidden)
        q = self.squash(hidden)
        p = self.q(hidden)
        k = self.k(hidden) if self.k is not None else p
        return q + p + k


@pytest.mark.parametrize("k", [False, True])
def test_a_forward_may_call_any_attribute(k):
    model, x = Calls(k).to(DEVICE), inputs()
    expected = step(model, x)
    assert any(e.part == "fused_statements" for e in tigon.patch(model).replaced)
    assert_close(step(model, x), expected)


def test_hooks_of_accelerate_on_a_norm_run():
    """These hooks wrap the forward, and the wrapper has all attributes of the replacement."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Counter(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    (model, stock), x, hook = pair(), inputs(), Counter()
    for norm in (model[0].before, model[0].after):
        hooks.add_hook_to_module(norm, hook)
    assert_close(step(model, x), step(stock, x))
    assert hook.calls == 2


def test_a_model_that_is_unpickled_without_the_source_of_its_class_runs_the_stock_forward(monkeypatch):
    (model, stock), x = pair(), inputs()
    data = pickle.dumps(model)
    monkeypatch.setattr(fused_statements, "fuse_statements", lambda function: None)
    assert_close(step(pickle.loads(data), x), step(stock, x))


class TakesAMixer(Layer):
    """A layer whose first argument is another layer, which it calls."""

    def forward(self, mixer, hidden):
        residual = hidden
        hidden = residual + mixer(hidden)
        residual = hidden
        hidden = self.after(hidden)
        return residual + self.down(F.silu(self.up(hidden)))


def test_a_layer_may_take_another_layer_first():
    stock, x = TakesAMixer().to(DEVICE), inputs()
    model = copy.deepcopy(stock)
    assert any(e.part == "fused_statements" for e in tigon.patch(model).replaced)
    for mixer in (Layer().to(DEVICE), nn.Identity()):
        torch.testing.assert_close(model(mixer, x), stock(mixer, x))


def test_a_residual_of_another_shape_or_dtype_is_added_by_torch():
    norm = Norm().to(DEVICE)
    tigon.patch(norm)
    for a, b in [
        (torch.randn(2, 3, WIDTH), torch.randn(WIDTH)),
        (torch.randn(2, WIDTH), torch.randn(2, WIDTH).half()),
        (torch.randn(2, WIDTH), 1.0),
    ]:
        a, b = a.to(DEVICE), b.to(DEVICE) if isinstance(b, Tensor) else b
        y, total = fused_statements.add_norm(norm, a, b)
        assert torch.equal(total, a + b)
        torch.testing.assert_close(y, norm(a + b))


def test_a_forward_that_the_class_gets_after_the_patch_runs(monkeypatch):
    (model, _), x = pair(), inputs()
    monkeypatch.setattr(Layer, "forward", lambda self, hidden: hidden * 3)
    assert torch.equal(model(x), x * 3 * 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_stock_output_and_gradients(reentrant):
    (model, stock), x = pair(), inputs()
    leaves = [x, *model.parameters()]
    y = model[1](torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=reentrant))
    y.square().sum().backward()
    results = [y, *(t.grad for t in leaves)]
    assert_close(results, step(stock, x))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_read_their_own_weights(duplicate):
    (model, stock), x = pair(), inputs()
    other = duplicate(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_close(step(other, x), step(stock, x))
    assert all(find_replacement(m) is not None for m in (other[0], other[0].attention))


def test_a_step_under_autocast_is_as_accurate_as_the_stock_one():
    (model, stock), x = pair(), inputs()
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, eager = step(model, x), step(stock, x)
    exact = step(make().double(), x.detach().double().requires_grad_())
    for i, triple in enumerate(zip(ours, eager, exact, strict=True)):
        assert_accurate(*triple, msg=str(i))


def test_a_restored_model_is_the_stock_model():
    model, x = make(), inputs()
    expected = step(make(), x)
    with tigon.patched(model):
        pass
    assert not any("forward" in vars(m) for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(step(model, x), expected, strict=True))


def test_rewriting_twice_gives_the_same_code_and_changes_no_class():
    before = Layer.forward
    first = fuse_statements(Layer.forward)
    fused_statements._rewrite.cache_clear()
    second = fuse_statements(Layer.forward)
    assert Layer.forward is before
    assert first.__code__.co_code == second.__code__.co_code
    assert first.__globals__ is before.__globals__
    assert not {ADD_NORM, NORM_WITH_RESIDUAL, PRODUCTS} & before.__globals__.keys()
