"""MLPs of two linear layers that are no module of their own become one op, with the values of the stock statements.

Where kernels run (on a GPU, or in the interpreter), the op computes them. Elsewhere the stock statements run.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from op_cases import DEVICE
from recognition.test_fused_statements import BY_KERNELS, inputs, nodes
from tigon.hf.report import Report
from tigon.testing import assert_accurate

WIDTH, INNER = 32, 80


class InOneBlock(nn.Module):
    """A layer that holds both linear layers, as decoders of the BART family do."""

    def __init__(self, p: float = 0.0, act: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.act, self.p = nn.LayerNorm(WIDTH), act or nn.GELU(), p
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        residual = h
        h = self.norm(h)
        h = self.act(self.up(h))
        h = nn.functional.dropout(h, p=self.p, training=self.training)
        h = self.down(h)
        return residual + h


class InSeparateStatements(InOneBlock):
    def forward(self, h: Tensor) -> Tensor:
        residual = h
        h = self.norm(h)
        h = self.up(h)
        h = self.act(h)
        h = F.dropout(h, p=self.p, training=self.training)
        h = self.down(h)
        return residual + h


class First(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(WIDTH, INNER), act or nn.GELU("tanh")

    def forward(self, h: Tensor) -> Tensor:
        h = self.dense(h)
        h = self.act(h)
        return h


class NormedFirst(First):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__(act)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h = self.norm(h)
        h = self.dense(h)
        return self.act(h)


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor, residual: Tensor) -> Tensor:
        h = self.dense(h)
        return self.norm(h + residual)


def apply_chunking_to_forward(function, chunk_size: int, x: Tensor) -> Tensor:
    """Run a function on chunks of the tokens, as the function of transformers with this name does."""
    return torch.cat([function(each) for each in x.split(chunk_size or x.shape[1], dim=1)], dim=1)


class InTwoChildren(nn.Module):
    """A layer whose two children compute the MLP, as in the BERT family."""

    def __init__(self, first: nn.Module | None = None, chunk_size: int = 0) -> None:
        super().__init__()
        self.first, self.second, self.chunk_size = first or First(), Second(), chunk_size

    def forward(self, x: Tensor) -> Tensor:
        return apply_chunking_to_forward(self.chunk, self.chunk_size, x)

    def chunk(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.second(h, x)
        return y


LAYERS = {
    "in_one_block": InOneBlock,
    "in_separate_statements": InSeparateStatements,
    "relu2": lambda: InOneBlock(act=SquaredReLU()),
    "in_two_children": InTwoChildren,
    "with_a_norm": lambda: InTwoChildren(NormedFirst()),
    "in_chunks": lambda: InTwoChildren(chunk_size=3),
}


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(x))


def make(layer) -> nn.Module:
    torch.manual_seed(0)
    return layer().to(DEVICE)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and of the parameters that the model uses."""
    y = model(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    gradients = torch.autograd.grad(y, [x, *model.parameters()], upstream, allow_unused=True)
    return [y, *(g for g in gradients if g is not None)]


def exact_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return what `step` returns, computed in fp64 from the same values by a stock copy of the model."""
    return step(copy.deepcopy(model).double(), x.detach().double().requires_grad_())


def assert_all_accurate(results: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> None:
    for result, baseline, value in zip(results, eager, exact, strict=True):
        # An element far below the largest one is a sum of large terms. Its error follows the size of these.
        assert_accurate(result, baseline, value, smallest=value.abs().max().item() / 4)


def is_one_op(model: nn.Module) -> bool:
    return any("MLP" in name for name in nodes(model(inputs())))


def has_mlp(report: Report) -> bool:
    return any(e.part == "fused_statements" and "MLP" in e.detail for e in report.replaced)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_layer_computes_the_stock_values_with_one_op(layer, dtype):
    model = make(layer).to(dtype)
    x = inputs().detach().to(dtype).requires_grad_()
    eager, exact = step(model, x), exact_step(model, x)
    report = tigon.patch(model)
    assert has_mlp(report), report
    results = step(model, x)
    assert any("MLP" in name for name in nodes(results[0])) == BY_KERNELS
    assert_all_accurate(results, eager, exact)
    report.restore()
    assert all(torch.equal(result, value) for result, value in zip(step(model, x), eager, strict=True))


@pytest.mark.parametrize("layer", [InOneBlock, InTwoChildren])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stay_patched(layer, duplicate):
    model = make(layer)
    tigon.patch(model)
    twin = duplicate(model)
    assert is_one_op(twin) == BY_KERNELS
    assert all(torch.equal(a, b) for a, b in zip(step(twin, inputs()), step(model, inputs()), strict=True))


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


CHANGES = {
    "another_activation": lambda m: setattr(m, "act", nn.SiLU()),
    "another_layer": lambda m: setattr(m, "down", Shifted(INNER, WIDTH).to(DEVICE)),
    "hook_on_the_activation": lambda m: m.act.register_forward_hook(lambda mod, args, y: y * 2.0),
    "hook_on_a_layer": lambda m: m.up.register_forward_hook(lambda mod, args, y: y * 2.0),
    "forward_of_a_layer": lambda m: setattr(m.down, "forward", lambda h: h[..., :WIDTH] * 3.0),
    "forward_of_the_activation": lambda m: setattr(m.act, "forward", torch.tanh),
}
CHANGES_OF_CHILDREN = {
    "another_activation": lambda m: setattr(m.first, "act", nn.SiLU()),
    "hook_on_the_first_child": lambda m: m.first.register_forward_hook(lambda mod, args, y: y * 2.0),
    "hook_on_the_second_child": lambda m: m.second.register_forward_pre_hook(
        lambda mod, args: (args[0] * 2.0, args[1])
    ),
    "forward_of_the_second_child": lambda m: setattr(m.second, "forward", lambda h, x: h[..., :WIDTH] + x),
    "hook_on_a_layer": lambda m: m.second.dense.register_forward_hook(lambda mod, args, y: y * 2.0),
    "method": lambda m: setattr(m, "chunk", lambda x: x * 2.0),
}


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        *(pytest.param(InOneBlock, change, id=f"block-{name}") for name, change in CHANGES.items()),
        *(pytest.param(InTwoChildren, change, id=f"children-{name}") for name, change in CHANGES_OF_CHILDREN.items()),
    ],
)
def test_a_later_change_is_honoured(layer, change):
    torch.manual_seed(1)
    patched = make(layer)
    tigon.patch(patched)
    torch.manual_seed(2)
    change(patched)
    stock = make(layer)
    torch.manual_seed(2)
    change(stock)
    stock.load_state_dict(patched.state_dict())
    torch.testing.assert_close(patched(inputs()), stock(inputs()), atol=1e-5, rtol=0)
    assert not is_one_op(patched)


@pytest.mark.filterwarnings("ignore:tigon.patch")
def test_a_layer_with_dropout_in_between_is_not_replaced():
    assert not has_mlp(tigon.patch(make(lambda: InOneBlock(p=0.5))))


def test_dropout_that_is_set_later_is_honoured():
    stock, patched = make(InOneBlock), make(InOneBlock)
    tigon.patch(patched)
    outputs = []
    for model in (stock, patched):
        model.p = 0.5
        torch.manual_seed(3)
        outputs.append(model(inputs()))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    assert not is_one_op(patched)
    patched.eval()
    assert is_one_op(patched) == BY_KERNELS


class ReadsTheProduct(InOneBlock):
    """The intermediate result has its own variable, which another statement reads."""

    def forward(self, h: Tensor) -> Tensor:
        a = self.act(self.up(h))
        h = F.dropout(a, p=self.p, training=self.training)
        return self.down(h) + a.mean()


class ReadsTheHiddenState(InTwoChildren):
    def chunk(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.second(h, x)
        return y + h.mean()


class ScalesInBetween(InOneBlock):
    def forward(self, h: Tensor) -> Tensor:
        h = self.act(self.up(h)) * 0.5
        h = F.dropout(h, p=self.p, training=self.training)
        h = self.down(h)
        return h


class ScalesTheFirst(First):
    def forward(self, h: Tensor) -> Tensor:
        h = self.dense(h)
        h = self.act(h) * 0.5
        return h


class Functional:
    """A namespace whose dropout is not that of torch."""

    @staticmethod
    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        return x * 0.5


class OtherDropout(InOneBlock):
    def forward(self, h: Tensor) -> Tensor:
        h = self.act(self.up(h))
        h = Functional.dropout(h, p=self.p, training=self.training)
        h = self.down(h)
        return h


IMPOSTORS = {
    "product_is_read": ReadsTheProduct,
    "hidden_state_is_read": ReadsTheHiddenState,
    "scaled_in_between": ScalesInBetween,
    "scaled_first": lambda: InTwoChildren(ScalesTheFirst()),
    "another_dropout": OtherDropout,
    "another_activation": lambda: InOneBlock(act=nn.SiLU()),
    "another_activation_of_a_child": lambda: InTwoChildren(First(nn.SiLU())),
}


@pytest.mark.filterwarnings("ignore:tigon.patch")
@pytest.mark.parametrize("layer", IMPOSTORS.values(), ids=IMPOSTORS)
def test_other_statements_stay(layer):
    model = make(layer)
    eager, exact = step(model, inputs()), exact_step(model, inputs())
    report = tigon.patch(model)
    assert not has_mlp(report), report
    assert not is_one_op(model)
    assert_all_accurate(step(model, inputs()), eager, exact)
