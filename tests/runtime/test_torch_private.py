"""The private names of torch give their known answers, and Tigon works, or refuses clearly, without each of them."""

import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.memory.lean import in_checkpoint, is_seen_by_nobody, runs_again
from tigon.runtime import torch_private

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")

FILE = Path(torch_private.__file__)


def _imported_again():
    """Return the module as it is in a torch that lacks what the test has removed."""
    spec = importlib.util.spec_from_file_location("torch_private_again", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- known answers ---------------------------------------------------------------------------------


def test_nothing_is_missing():
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
def test_a_retained_graph_is_recognised(retains):
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


def test_the_innermost_saved_tensor_hooks():
    assert torch_private.saved_tensor_hooks(True) is None
    pack, unpack = (lambda x: x), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert torch_private.saved_tensor_hooks(True) == (pack, unpack)
    assert torch_private.saved_tensor_hooks(True) is None


def test_the_two_runs_of_a_checkpoint_are_told_apart():
    answers = []

    def region(x):
        answers.append((in_checkpoint(), runs_again(), is_seen_by_nobody()))
        return x.sin().sin()

    region(torch.ones(2, requires_grad=True))
    checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert answers == [(False, False, True), (True, False, True), (True, True, False)]


def test_an_unknown_hook_of_a_checkpoint_is_refused():
    hook = lambda x: x
    hook.__module__, hook.__qualname__ = "torch.utils.checkpoint", "_third_hook.pack"
    with pytest.raises(RuntimeError, match="_third_hook.pack"):
        torch_private.is_recompute_hook(hook)
    hook.__module__ = "accelerate"
    assert not torch_private.is_recompute_hook(hook)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_node_of_a_cast(dtype):
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


def test_a_reshaped_tensor_is_no_view():
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


# --- a torch without the names ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_cuda_getCurrentRawStream", "_cuda_getDevice", "_len_torch_dispatch_stack"])
def test_the_public_way_takes_the_place_of_a_missing_function(monkeypatch, name):
    monkeypatch.delattr(torch._C, name, raising=False)
    module = _imported_again()
    assert module._missing == {}
    assert module.dispatch_modes() == (1 if name == "_len_torch_dispatch_stack" else 0)


def test_gradients_take_new_memory_if_retained_graphs_are_not_recognised(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert _imported_again().keeps_graph() is True


def test_lean_refuses_a_torch_that_does_not_tell_its_hooks(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    module = _imported_again()
    assert module.saved_tensor_hooks(True) is not None, "foreign hooks: nothing is overwritten"
    monkeypatch.setattr(torch_private, "_missing", module._missing)
    with pytest.raises(RuntimeError, match=r"lean: torch .* has no torch\._C\._autograd\._top_saved_tensors"):
        tigon.lean().__enter__()


def test_a_missing_number_of_the_backward_is_refused_by_name(monkeypatch):
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
        with pytest.warns(RuntimeWarning, match="names the hooks of torch.utils.checkpoint otherwise"):
            module = _imported_again()
    monkeypatch.setattr(torch_private, "_KNOWS_CHECKPOINT", module._KNOWS_CHECKPOINT)
    answers = []

    def region(x):
        answers.append((in_checkpoint(), runs_again(), is_seen_by_nobody()))
        return x.sin().sin()

    checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert answers == [(False, False, False)] * 2, "what an op saves is never overwritten"


def test_missing_global_hooks_count_as_a_hook(monkeypatch):
    monkeypatch.delattr(nn.modules.module, "_global_forward_hooks")
    assert _imported_again().any_global_hook()


def test_another_init_group_leaves_the_step_to_torch():
    """`tigon.AdamW` decides at import, so a process of its own changes torch before."""
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


# --- one file --------------------------------------------------------------------------------------


def test_no_other_file_uses_these_names():
    """The same name elsewhere would fail there, without its reason and its other way."""
    names = (
        r"torch\._C\._(?!nn\b|dispatch_get_all_op_names)",
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
        r"triton\.runtime",
        r"triton\.knobs",
    )
    pattern = re.compile("|".join(names))
    folders = ("runtime", "memory", "ops", "recognition", "hf", "tools/plan", "tools/inspect")
    files = itertools.chain.from_iterable((FILE.parents[1] / folder).rglob("*.py") for folder in folders)
    without_comments = lambda file: re.sub(r"#.*", "", file.read_text())
    users = [str(f) for f in files if not f.name.endswith("_private.py") and pattern.search(without_comments(f))]
    assert users == []
