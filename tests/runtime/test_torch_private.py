"""The private names of torch give their known answers, and Tigon works, or refuses clearly, without each of them."""

import importlib.util
import itertools
import re
import subprocess
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.memory.lean import in_checkpoint, is_checkpoint_recomputation, is_saved_only_by_this_op
from tigon.runtime import torch_private
from tigon.runtime.state.reach import explore

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")

FILE = Path(torch_private.__file__)


def _imported_again():
    """Return the module, imported again with a torch from which the test has removed names."""
    spec = importlib.util.spec_from_file_location("torch_private_again", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- known answers ---------------------------------------------------------------------------------


def test_no_name_is_missing():
    assert torch_private._missing == {}
    assert torch_private.has_init_group()


class _Backward(torch.autograd.Function):
    """Record what a function returns in backward."""

    @staticmethod
    def forward(ctx, x, answers, question):
        ctx.answers, ctx.question = answers, question
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.answers.append(ctx.question())
        return dy, None, None


@pytest.mark.parametrize("retains", [False, True])
def test_retained_graph_is_recognised(retains):
    answers = []
    x = torch.ones(2, requires_grad=True)
    _Backward.apply(x, answers, torch_private.keeps_graph).sum().backward(retain_graph=retains)
    assert answers == [retains]


def test_each_backward_has_a_number():
    assert torch_private.backward_id() == -1
    answers = []
    y = _Backward.apply(torch.ones(2, requires_grad=True), answers, torch_private.backward_id).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert -1 not in answers
    assert answers[0] != answers[1]


def test_innermost_saved_tensor_hooks_are_returned():
    assert torch_private.saved_tensor_hooks(True) is None
    pack, unpack = (lambda x: x), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert torch_private.saved_tensor_hooks(True) == (pack, unpack)
    assert torch_private.saved_tensor_hooks(True) is None


def test_two_runs_of_a_checkpoint_are_distinguished():
    answers = []

    def region(x):
        answers.append((in_checkpoint(), is_checkpoint_recomputation(), is_saved_only_by_this_op()))
        return x.sin().sin()

    region(torch.ones(2, requires_grad=True))
    checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert answers == [(False, False, True), (True, False, True), (True, True, False)]


def test_unknown_hook_of_a_checkpoint_is_refused():
    hook = lambda x: x
    hook.__module__, hook.__qualname__ = "torch.utils.checkpoint", "_third_hook.pack"
    with pytest.raises(RuntimeError, match="_third_hook.pack"):
        torch_private.is_recompute_hook(hook)
    hook.__module__ = "accelerate"
    assert not torch_private.is_recompute_hook(hook)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_cast_has_a_known_node(dtype):
    x = torch.ones(2, requires_grad=True)
    node = x.to(dtype).grad_fn
    assert type(node) is torch_private.CastBackward
    assert type(node.next_functions[0][0]) is torch_private.AccumulateGrad
    with torch.autocast("cpu", torch.bfloat16):
        product = torch.mm(torch.ones(1, 1), nn.Parameter(torch.ones(1, 1)))
    assert type(product.grad_fn.next_functions[1][0]) is torch_private.CastBackward
    assert type((x * 2).grad_fn) is not torch_private.CastBackward


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_share_memory_share_the_storage(device):
    x, other = torch.empty(4, device=device), torch.empty(4, device=device)
    numbers = [torch_private.storage_id(t.untyped_storage()) for t in (x, x[1:], other)]
    assert numbers[0] == numbers[1] != numbers[2]
    reference = torch_private.StorageWeakRef(x.untyped_storage())
    assert not reference.expired()
    del x
    assert reference.expired()


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
def test_global_hooks_are_seen(kind):
    assert not torch_private.any_global_hook()
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *args: None)
    assert torch_private.any_global_hook()
    handle.remove()
    assert not torch_private.any_global_hook()


def test_dispatch_modes_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    assert torch_private.dispatch_modes() == 0
    with FlopCounterMode(display=False):
        assert torch_private.dispatch_modes() == 1


def test_reshaped_tensor_is_no_view():
    x = torch.ones(6)
    y = torch_private.reshape_without_view(x, (2, 3))
    assert y.shape == (2, 3)
    assert y._base is None
    assert y.data_ptr() == x.data_ptr()


def test_active_transforms_are_recognised():
    answers = []

    def function(x):
        answers.append(torch_private.has_active_transform())
        return x * 2

    function(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(2))
    function(torch.ones(2))
    assert answers == [False, True, True, False]


def test_tensor_subclasses_are_plain_in_a_block():
    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise RuntimeError("not plain")

    x = torch.ones(2).as_subclass(Subclass)
    with torch_private.DisableTorchFunctionSubclass():
        assert type(x.clone()) is torch.Tensor


def test_function_modes_are_off_in_a_block():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise RuntimeError("the mode is on")

    with Mode(), torch_private.DisableTorchFunction():
        assert torch.ones(2).sum() == 2


def test_an_assertion_on_the_device_raises_its_message():
    torch_private.assert_on_device(torch.tensor(True), "the message")
    with pytest.raises(RuntimeError, match="the message"):
        torch_private.assert_on_device(torch.tensor(False), "the message")


def test_a_replica_of_data_parallel_is_recognised():
    module = nn.Linear(2, 2)
    assert not torch_private.is_replica(module)
    assert torch_private.is_replica(module._replicate_for_data_parallel())


def test_backward_runs_inside_the_active_modes():
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.ones(2, requires_grad=True)
    answers = []
    y = _Backward.apply(x, answers, torch_private.dispatch_modes).sum()
    with FlopCounterMode(display=False):
        torch_private.engine_run_backward(
            (y,), (torch.ones_like(y),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    assert answers == [1]
    assert x.grad.tolist() == [1.0, 1.0]


def test_operators_that_write_to_an_argument_are_recognised():
    assert torch_private.is_in_place(torch.ops.aten.add_.Tensor)
    assert not torch_private.is_in_place(torch.ops.aten.add.Tensor)


def test_a_read_of_one_value_is_an_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    operators = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operators.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1).item()
    assert torch_private.read_scalar.default in operators


def test_products_of_groups_are_an_operator():
    a, b = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(2, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([2, 4], dtype=torch.int32)
    assert torch_private.grouped_mm(a, b, ends).shape == (4, 8)


def test_many_tensors_are_incremented():
    for increment in (torch_private.increment, torch_private._increment_one_by_one):
        tensors = [torch.zeros(2), torch.ones(3)]
        increment(tensors, 1)
        assert [x.tolist() for x in tensors] == [[1.0, 1.0], [2.0, 2.0, 2.0]]


# --- recognition -----------------------------------------------------------------------------------


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return x * self.scale


def test_a_call_runs_call_impl_or_an_attribute_of_the_instance():
    assert nn.Module._call_impl is torch_private.call_impl
    layer, x = _Layer(), torch.ones(2)
    for name in torch_private.INSTANCE_CALLS:
        setattr(layer, name, lambda x: "replaced")
        assert layer(x) == "replaced"
        delattr(layer, name)
    assert torch.equal(layer(x), 2 * x)


def test_the_native_linear_is_that_of_functional():
    assert torch.nn.functional.linear is torch_private.native_linear


def test_operators_and_namespaces_have_the_known_types():
    assert isinstance(torch.ops.aten.mul, torch_private.OPERATOR_TYPES)
    assert isinstance(torch.ops.aten.mul.Tensor, torch_private.OPERATOR_TYPES)
    assert isinstance(torch.ops.prims, torch_private.NAMESPACE_TYPES)
    assert not isinstance(torch.nn, torch_private.NAMESPACE_TYPES)
    assert torch_private.operator_namespaces() >= {"aten", "prims"}


def test_a_mode_sees_operators_on_symbolic_sizes():
    tools, operators = torch_private.symbolic_tools(), []

    class Watch(torch_private.DispatchMode):
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


class _Asker:
    """Asks Dynamo, while it traces `holds`, for the variables of that method."""

    def holds(self, module):
        _ask()
        return True


_answers = []
_comptime = torch_private.load_comptime()


def _answer(context):
    frame, (guard, module) = torch_private.locals_of_caller(context, "self", "module")
    ids, writes_global = torch_private.changed_objects(frame)
    _answers.append((guard.value, module.value, id(module.value) in ids, writes_global, torch_private.is_tracing()))


def _ask():
    _comptime(_answer)


@pytest.mark.parametrize("changes", [False, True])
def test_dynamo_shows_the_locals_of_the_caller_and_changed_objects(changes):
    torch._dynamo.reset()
    _answers.clear()
    layer, asker = _Layer(), _Asker()

    @torch.compile(backend="eager")
    def run(x):
        if changes:
            layer.scale = 3.0
        asker.holds(layer)
        return layer(x)

    run(torch.ones(2))
    assert _answers[0] == (asker, layer, changes, False, True)
    assert not torch_private.is_tracing()


_installers = []


def _install(context):
    _installers[-1]()


def test_a_guard_of_a_graph_is_called_before_each_run_and_recompiles_the_graph():
    torch._dynamo.reset()
    owner, calls, graphs, versions = _Layer(), [], [], [0]

    def install():
        expected = versions[0]
        is_unchanged = lambda reference: calls.append(reference()) or versions[0] == expected
        create = lambda builder, guard: torch_private.add_lambda_guard(builder, guard, is_unchanged, "test")
        torch_private.install_guard(torch_private.global_source("__test_guard", weakref.ref(owner)), create)

    _installers.append(install)

    def backend(graph, inputs):
        graphs.append(graph)
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
        assert len(graphs) == count


# --- a torch without the names ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_cuda_getCurrentRawStream", "_cuda_getDevice", "_len_torch_dispatch_stack"])
def test_public_function_replaces_a_missing_one(monkeypatch, name):
    monkeypatch.delattr(torch._C, name, raising=False)
    module = _imported_again()
    assert module._missing == {}
    assert module.dispatch_modes() == (1 if name == "_len_torch_dispatch_stack" else 0)


def test_gradients_use_new_memory_if_retained_graphs_are_not_recognised(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert _imported_again().keeps_graph() is True


def test_lean_refuses_a_torch_without_saved_tensor_hooks(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    module = _imported_again()
    assert module.saved_tensor_hooks(True) is not None, "foreign hooks: nothing is overwritten"
    monkeypatch.setattr(torch_private, "_missing", module._missing)
    with pytest.raises(RuntimeError, match=r"lean: torch .* has no torch\._C\._autograd\._top_saved_tensors"):
        tigon.lean().__enter__()


def test_error_names_the_missing_number_of_the_backward(monkeypatch):
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    module = _imported_again()
    with pytest.raises(RuntimeError, match=r"has no torch\._C\._current_graph_task_id"):
        module.backward_id()
    monkeypatch.setattr(torch_private, "_missing", module._missing)
    with pytest.raises(RuntimeError, match="lean: offload=True"):
        tigon.lean(offload=True).__enter__()
    with tigon.lean():
        pass


@pytest.mark.parametrize("path", torch_private.NAMES_FOR_LOSS)
def test_the_loss_stays_stock_by_name_if_a_name_is_missing(monkeypatch, path):
    owner, name = (torch._C, path[3:]) if path.startswith("_C.") else (torch.autograd.forward_ad, "_current_level")
    with monkeypatch.context() as patches:
        patches.delattr(owner, name)
        module = _imported_again()
    monkeypatch.setattr(torch_private, "_missing", module._missing)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    report = tigon.patch(transformers.LlamaForCausalLM(config), rope=False)
    (entry,) = [entry for entry in report.entries if entry.part == "loss"]
    assert not entry.replaced
    assert f"the loss in the head: torch {torch.__version__} has no torch.{path}" in entry.detail


@pytest.mark.parametrize("path", torch_private.NAMES_FOR_PLAN)
def test_the_plan_is_refused_by_name_if_a_name_is_missing(monkeypatch, path):
    monkeypatch.setattr(torch_private, "_missing", {path: f"torch has no torch.{path}"})
    from tigon.tools.plan.engines import OptimizerCosts, Replicated
    from tigon.tools.plan.step import count_step

    model = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match=f"tigon plan: torch has no torch.{path}"):
        count_step(model, Replicated(model, 1), OptimizerCosts(0, 0, 0), 1, 1)


def test_no_assertion_runs_on_the_device_if_torch_has_none(monkeypatch):
    monkeypatch.delattr(torch, "_assert_async")
    assert _imported_again().assert_on_device(torch.tensor(False), "the message") is None


def test_unknown_checkpoint_hooks_count_as_foreign_and_are_reported(monkeypatch):
    with monkeypatch.context() as patches:
        patches.delattr(torch.utils.checkpoint, "_recomputation_hook")
        with pytest.warns(RuntimeWarning, match="names the hooks of torch.utils.checkpoint in another way"):
            module = _imported_again()
    monkeypatch.setattr(torch_private, "_KNOWS_CHECKPOINT", module._KNOWS_CHECKPOINT)
    answers = []

    def region(x):
        answers.append((in_checkpoint(), is_checkpoint_recomputation(), is_saved_only_by_this_op()))
        return x.sin().sin()

    checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert answers == [(False, False, False)] * 2, "what an op saves is never overwritten"


def test_missing_global_hooks_count_as_a_hook(monkeypatch):
    monkeypatch.delattr(nn.modules.module, "_global_forward_hooks")
    assert _imported_again().any_global_hook()


def test_torch_computes_the_step_if_init_group_differs():
    """`tigon.AdamW` decides at import, so another process changes torch before the import."""
    program = """
import torch
stock = torch.optim.AdamW._init_group
torch.optim.AdamW._init_group = lambda self, group, *lists: stock(self, group, *lists)
import tigon
assert "_init_group" not in vars(tigon.AdamW)
weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
for cls, w in zip((tigon.AdamW, torch.optim.AdamW), weights):
    (w * w).sum().backward()
    cls([w], lr=0.1).step()
assert torch.equal(*weights)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_call_never_counts_as_stock_without_call_impl(monkeypatch):
    monkeypatch.delattr(nn.Module, "_call_impl")
    assert _imported_again().call_impl is None


def test_torch_ops_keep_a_forward_stock_if_their_namespaces_are_unknown(monkeypatch):
    monkeypatch.delattr(torch._C, "_dispatch_get_all_op_names")
    assert torch_private.operator_namespaces() is None
    reach = explore(_uses_operators)
    assert "whose namespaces this torch does not list" in reach.reason


def _uses_operators(x):
    return torch.ops.aten.mul(x, 2)


def test_symbolic_runs_are_refused_by_name_if_a_name_is_missing(monkeypatch):
    from torch.fx.experimental import symbolic_shapes

    monkeypatch.delattr(symbolic_shapes, "StatelessSymbolicContext")
    with pytest.raises(RuntimeError, match="cannot run symbolic sizes .*StatelessSymbolicContext"):
        torch_private.symbolic_tools()


def test_a_graph_has_no_guard_if_dynamo_has_no_comptime(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.comptime", None)
    calls = []
    torch_private.load_comptime()(calls.append)
    assert calls == []


def test_tracing_is_recognised_publicly_without_the_private_class(monkeypatch):
    monkeypatch.setattr(torch_private, "_TracingContext", None)
    assert torch_private.is_tracing() is False


# --- one file --------------------------------------------------------------------------------------


def test_hooks_of_a_gradient_are_seen():
    x = torch.zeros(2, requires_grad=True)
    assert not torch_private.has_gradient_hooks(x)
    for register in (x.register_hook, x.register_post_accumulate_grad_hook):
        handle = register(lambda *_: None)
        assert torch_private.has_gradient_hooks(x)
        handle.remove()
        assert not torch_private.has_gradient_hooks(x)
    # Without the attributes, a caller must assume hooks.
    assert torch_private.has_gradient_hooks(types.SimpleNamespace())


def test_no_other_file_uses_these_names():
    """Elsewhere, a missing name would fail without its reason and its replacement."""
    names = (
        r"torch\._C\._",
        r"torch\._foreach",
        r"torch\._assert_async",
        r"forward_ad\._current_level",
        "_engine_run_backward",
        r"aten\._grouped_mm",
        r"aten\._local_scalar_dense",
        r"torch\._disable_dynamo",
        r"aten\._unsafe_view",
        r"\._cdata\b",
        r"multiprocessing\.reductions",
        "_resolve_process_group",
        "_global_forward_hooks",
        "ToCopyBackward0",
        r"torch\._(dynamo|guards|ops|subclasses|dispatch)\b",
        r"\._python_dispatch\b",
        "symbolic_shapes",
        r"nn\.Module\._call_impl",
        r"triton\.runtime",
        r"triton\.knobs",
        "_post_accumulate_grad_hooks",
    )
    pattern = re.compile("|".join(names))
    folders = ("runtime", "memory", "ops", "recognition", "hf", "tools/plan", "tools/inspect")
    files = itertools.chain.from_iterable((FILE.parents[1] / folder).rglob("*.py") for folder in folders)
    without_comments = lambda file: re.sub(r"#.*", "", file.read_text())
    users = [str(f) for f in files if not f.name.endswith("_private.py") and pattern.search(without_comments(f))]
    assert users == []
