"""A replaced forward survives what other code does to modules: binding, copies, replicas, export."""

import copy
import functools
import gc
import importlib.metadata
import inspect
import pickle
import types

import pytest
import torch
from torch import nn

from tigon.recognition.replacement import find_changing_hook, find_replacement, foreign_forward, install


def twice(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute twice the layer, from the weight of the module that the call passes."""
    return 2 * nn.functional.linear(x, module.weight)


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=False)


X = torch.eye(3)


def assert_reads_own_weight(module: nn.Module, factor: int = 2) -> None:
    """Assert that the call runs the recipe, or with factor 1 the stock forward, on the module's current weight."""
    assert torch.equal(module(X), factor * module.weight.t())


def zero_parameters(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def test_a_method_made_of_the_forward_runs_the_module_that_it_is_bound_to(layer):
    """accelerate binds the forward as a method for mixed precision. A copied closure would run the original module."""
    undo = install(layer, twice)
    function = layer.forward.__func__
    layer.forward = types.MethodType(lambda module, *args: function(module, *args), layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.mul_(3)
    assert_reads_own_weight(other)
    assert_reads_own_weight(layer)
    undo()
    assert_reads_own_weight(layer, 1)
    # The copy has a replacement of its own.
    assert_reads_own_weight(other)


def test_compiled_regions_call_the_compiled_copy():
    other = pytest.importorskip("accelerate.utils.other")
    if tuple(map(int, importlib.metadata.version("accelerate").split(".")[:2])) < (1, 15):
        pytest.skip("accelerate before 1.15 leaves every forward of an instance with the module that it copies")
    model = nn.Sequential(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), nn.Linear(3, 3))
    install(model, lambda module, x: module)
    copied = other.compile_regions(model, backend="eager")
    assert copied is not model
    assert copied.forward(X) is copied


class Sum(nn.Module):
    """A module whose forward takes another module first."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(number))

    def forward(self, other: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.number * x + other.number


def ten_sums(module: nn.Module, *args: object) -> torch.Tensor:
    return 10 * type(module).forward(module, *args)


DUPLICATES = {"itself": lambda m: m, "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}
WAYS_TO_CALL = {
    "call": lambda m: m,
    "forward": lambda m: m.forward,
    "partial": lambda m: functools.partial(m.forward),
    "function": lambda m: functools.partial(m.forward.__func__, m),
    "bound again": lambda m: types.MethodType(m.forward.__func__, m),
    "compiled": lambda m: torch.compile(m, backend="eager", fullgraph=True),
}


@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
@pytest.mark.parametrize("way", WAYS_TO_CALL.values(), ids=WAYS_TO_CALL)
@pytest.mark.parametrize("other", ["stock", "patched", "itself"])
def test_a_module_as_the_first_argument_is_an_argument(duplicate, way, other):
    torch._dynamo.reset()
    module = Sum(2.0)
    install(module, ten_sums)
    module, argument = duplicate(module), Sum(3.0)
    if other == "patched":
        install(argument, ten_sums)
    argument = module if other == "itself" else argument
    assert torch.equal(way(module)(argument, X), 10 * (2 * X + argument.number))


def test_the_forward_of_a_class_runs_the_code_of_the_class_for_any_module():
    module = Sum(2.0)
    install(module, ten_sums)
    assert torch.equal(type(module).forward(module, Sum(3.0), X), 2 * X + 3)


def test_the_function_of_a_forward_runs_the_recipe_for_the_module_that_it_gets(layer):
    other = zero_parameters(copy.deepcopy(layer))
    install(layer, twice)
    other.forward = types.MethodType(layer.forward.__func__, other)
    assert not other(X).any()
    assert_reads_own_weight(layer)


def test_a_module_that_a_forward_does_not_take_raises_the_error_of_stock(layer):
    other = nn.Linear(3, 2)
    with pytest.raises(TypeError) as stock:
        layer(other)
    install(layer, lambda module, x: type(module).forward(module, x))
    with pytest.raises(TypeError) as ours:
        layer(other)
    assert str(ours.value) == str(stock.value)


def make_replica(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    """Return a replica as `nn.DataParallel` builds it: its parameters are plain tensors that were copied."""
    replica = module._replicate_for_data_parallel()
    replica.weight, replica._parameters["bias"] = weight, None
    return replica


@pytest.mark.parametrize("duplicate", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_replica_reads_its_own_weight(layer, duplicate):
    install(layer, twice)
    module = duplicate(layer)
    replica = make_replica(module, torch.full((2, 3), 5.0))
    assert_reads_own_weight(replica)
    assert_reads_own_weight(module)
    assert find_replacement(replica) is not find_replacement(module)


def test_a_replica_of_a_restored_module_is_stock(layer):
    before = set(vars(layer))
    undo = install(layer, twice)
    replica = make_replica(layer, torch.ones(2, 3))
    undo()
    assert set(vars(layer)) == before
    assert_reads_own_weight(make_replica(layer, torch.full((2, 3), 5.0)), 1)
    # A replica lives only during the call for which it was made.
    assert_reads_own_weight(replica)


class Decorated(nn.Module):
    @functools.wraps(Sum.forward)
    def forward(self, *args, **kwargs):
        return Sum.forward(self, *args, **kwargs)


@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
@pytest.mark.parametrize("cls", [lambda: nn.Linear(3, 2), lambda: Sum(2.0), Decorated], ids=["torch", "own", "wrapped"])
def test_the_signature_and_the_source_of_a_forward_are_those_of_stock(duplicate, cls):
    stock, module = cls(), cls()
    install(module, ten_sums)
    module = duplicate(module)
    for ask in (inspect.signature, inspect.getsource, inspect.getsourcelines):
        assert ask(module.forward) == ask(stock.forward), ask.__name__
    assert module.forward.__name__ == stock.forward.__name__


def test_torch_export_gives_the_output_of_the_replaced_forward(layer):
    install(layer, twice)
    program = torch.export.export(layer, (X,))
    assert torch.equal(program.module()(X), layer(X))


def test_a_forward_whose_module_was_deleted_raises_a_clear_error():
    module = nn.Linear(3, 2)
    install(module, twice)
    forward = module.forward
    del module
    gc.collect()
    with pytest.raises(ReferenceError, match="the module of this forward was deleted"):
        forward(X)


def function_of_library(name: str, source: str, **scope):
    """Return the function `forward` of some source, as if the Python module `name` defined it."""
    scope = {"__name__": name, "functools": functools, **scope}
    exec(source, scope)
    return scope["forward"]


WRAPPER = "@functools.wraps(stock)\ndef forward(self, x):\n    return stock(self, x)"


@pytest.mark.parametrize(
    ("library", "foreign"),
    [("another.package", True), (f"{__name__.partition('.')[0]}.other", False), ("torch.utils", False)],
    ids=["another", "its own", "torch"],
)
def test_a_wrapper_of_another_library_around_the_forward_of_a_class_is_foreign(library, foreign):
    class Layer(nn.Module):
        def forward(self, x):
            return x

    Layer.forward = function_of_library(library, WRAPPER, stock=Layer.forward)
    reason = f"the forward of its class was already replaced (by {library})"
    assert foreign_forward(Layer()) == (reason if foreign else None)


def test_a_wrapper_around_the_forward_of_an_instance_is_foreign(layer):
    layer.forward = function_of_library("another.package", WRAPPER.replace("self, x", "x"), stock=layer.forward)
    assert foreign_forward(layer) == "its forward was already replaced (by another.package)"


def test_a_sharding_wrapper_of_transformers_calls_the_recipe_until_it_is_uninstalled(layer):
    """Such a wrapper exchanges the parameters of a module for those of this rank while the forward runs."""
    factory = "def make(stock):\n    def forward(x):\n        return stock(x) + 1\n    return forward\nforward = make"
    for library, is_foreign in (("transformers.distributed", False), ("another.package", True)):
        layer.forward = function_of_library(library, factory)(type(layer).forward.__get__(layer))
        reason = f"its forward was already replaced (by {library})"
        assert foreign_forward(layer) == reason
        assert foreign_forward(layer, may_be_wrapped=True) == (reason if is_foreign else None)
    x = torch.ones(2, 3)
    before = layer(x)
    undo = install(layer, lambda module, x: 10 * x)
    assert torch.equal(layer(x), 10 * x + 1)
    undo()
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("register", ["forward_hook", "full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("partial", [False, True])
def test_hooks_are_foreign_except_those_of_engines_that_shard(layer, register, partial):
    for library, foreign in (("torch.distributed.fsdp", None), ("another.package", "another.package")):
        hook = function_of_library(library, "forward = lambda *args: None")
        getattr(layer, f"register_{register}")(functools.partial(hook) if partial else hook)
        assert find_changing_hook(nn.Sequential(layer)) == foreign


def test_hooks_before_the_forward_are_not_foreign(layer):
    layer.register_forward_pre_hook(lambda module, args: None)
    assert find_changing_hook(layer) is None
