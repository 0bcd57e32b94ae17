"""The private names of torch about graphs give known answers, and Tigon works, or refuses clearly, without them."""

import sys
import weakref

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from runtime.compat.layers import Layer
from tigon.runtime.compat import graphs

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


@pytest.mark.parametrize(("base", "graph_count"), [(graphs.TransparentMode, 1), (graphs.DispatchMode, 0)])
def test_functions_are_compiled_in_a_transparent_mode(base, graph_count):
    class Watch(base):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    with Watch():
        assert torch.compile(lambda x: x.sin() + 1, backend=counter)(torch.zeros(3)).tolist() == [1.0] * 3
    assert counter.frame_count == graph_count
    torch._dynamo.reset()


def test_a_mode_sees_operators_on_symbolic_sizes():
    tools, operators = graphs.symbolic_tools(), []

    class Watch(graphs.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operators.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    environment = tools.ShapeEnv(duck_shape=False)
    mode = tools.FakeTensorMode(shape_env=environment)
    context = tools.StatelessSymbolicContext(dynamic_sizes=[tools.DimDynamic.DYNAMIC, tools.DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(37, 4), symbolic_context=context)
    with tools.enable_python_dispatcher(), mode, Watch():
        y = x * 2
    assert operators == ["aten::mul"]
    assert isinstance(y.shape[0], torch.SymInt)
    before = len(environment.guards)
    assert x.shape[0] > 4
    assert len(environment.guards) == before + 1


def _decides_in_generated_code(x):
    exec("if x.shape[0] > 4: x = x + 1")
    return x


@pytest.mark.parametrize("run", [
    lambda x: x + 1 if x.shape[0] > 4096 and x.shape[1] < 100 else x, lambda x: x.view(-1, 41).reshape(37, -1),
    lambda x: sum(x.chunk(2, dim=0)[0].split(3)), lambda x: nn.functional.layer_norm(x @ x.T, (37,)),
    lambda x: nn.functional.pad(x.squeeze(1), (0, 64 - x.shape[1])).view(37, 64),
    lambda x: torch.nonzero(x) if x.numel() > 1000 else x.new_zeros(41) + x,
    lambda x: x[: x.shape[0] // 2].expand(2, -1, -1).sum() + bool(x.shape[1] % 2), _decides_in_generated_code,
])  # fmt: skip
def test_guards_and_their_places_are_those_of_the_class_of_torch(run):
    """The subclass names the same lines of code without the imports of ShapeEnv. Its base class remains as it is."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tools, records = graphs.symbolic_tools(), []
    assert issubclass(tools.ShapeEnv, ShapeEnv)
    assert tools.ShapeEnv is graphs.symbolic_tools().ShapeEnv
    for environment_class in (ShapeEnv, tools.ShapeEnv):
        environment = environment_class(duck_shape=False)
        mode = tools.FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        mode.cache_enabled = False
        context = tools.StatelessSymbolicContext(dynamic_sizes=[tools.DimDynamic.DYNAMIC] * 2)
        x = mode.from_tensor(torch.empty(37, 41), symbolic_context=context)
        with tools.enable_python_dispatcher(), mode:
            try:
                error = run(x) is None
            except Exception as exception:
                error = type(exception)
        places = [guard.sloc.framework_loc for guard in environment.guards]
        places = [(place.filename, place.lineno, place.name) for place in places]
        records.append((error, [str(guard.expr) for guard in environment.guards], places))
    assert records[0] == records[1]
    assert records[0][1]


class _Guarded:
    """While Dynamo traces `holds`, the local variables of that method are recorded."""

    def holds(self, module):
        _inspect_caller()
        return True


_records = []
_comptime = graphs.load_comptime()


def _record_locals(context):
    frame, (guard, module) = graphs.locals_of_caller(context, "self", "module")
    ids, writes_global = graphs.changed_objects(frame)
    _records.append((guard.value, module.value, id(module.value) in ids, writes_global, graphs.is_tracing()))


def _inspect_caller():
    _comptime(_record_locals)


@pytest.mark.parametrize("changes", [False, True])
def test_dynamo_shows_the_locals_of_the_caller_and_changed_objects(changes):
    torch._dynamo.reset()
    _records.clear()
    layer, guarded = Layer(), _Guarded()

    @torch.compile(backend="eager")
    def run(x):
        if changes:
            layer.scale = 3.0
        guarded.holds(layer)
        return layer(x)

    run(torch.ones(2))
    assert _records[0] == (guarded, layer, changes, False, True)
    assert not graphs.is_tracing()


_installers = []


def _install(context):
    _installers[-1]()


def test_a_guard_of_a_graph_is_called_before_each_run_and_recompiles_the_graph():
    torch._dynamo.reset()
    owner, calls, traced_graphs, versions = Layer(), [], [], [0]

    def install():
        expected = versions[0]
        is_unchanged = lambda reference: calls.append(reference()) or versions[0] == expected
        create = lambda builder, guard: graphs.add_lambda_guard(builder, guard, is_unchanged, "test")
        graphs.install_guard(graphs.global_source("__test_guard", weakref.ref(owner)), create)

    _installers.append(install)

    def backend(graph, inputs):
        traced_graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def run(x):
        _comptime(_install)
        return x * 2

    for version, count in ((0, 1), (0, 1), (1, 2), (1, 2)):
        versions[0] = version
        calls.clear()
        run(torch.ones(2))
        assert calls[-1] is owner
        assert len(traced_graphs) == count


def test_symbolic_runs_are_refused_by_name_if_a_name_is_missing(monkeypatch):
    from torch.fx.experimental import symbolic_shapes

    monkeypatch.delattr(symbolic_shapes, "StatelessSymbolicContext")
    with pytest.raises(RuntimeError, match="cannot run symbolic sizes .*StatelessSymbolicContext"):
        graphs.symbolic_tools()


def test_symbolic_runs_are_refused_if_operators_have_no_schema(monkeypatch):
    """Without schemas, a size that an operator takes as a value would not be found."""
    monkeypatch.setattr(graphs, "schema_of", lambda operator: None)
    with pytest.raises(RuntimeError, match=r"the operators of torch .* have no _schema"):
        graphs.symbolic_tools()


def test_a_graph_has_no_guard_if_dynamo_has_no_comptime(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.comptime", None)
    calls = []
    graphs.load_comptime()(calls.append)
    assert calls == []


def test_tracing_is_recognised_publicly_without_the_private_class(monkeypatch):
    monkeypatch.setattr(graphs, "_TracingContext", None)
    assert graphs.is_tracing() is False
