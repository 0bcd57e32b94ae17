"""The private names of torch about autograd give known answers, and Tigon works, or refuses clearly, without them."""

import pytest
import torch
import torch.overrides
from torch import nn
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.memory.lean import in_checkpoint, is_checkpoint_recomputation, is_saved_only_by_this_op
from tigon.runtime.compat import autograd, names

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


class _Backward(torch.autograd.Function):
    """Record what a function returns in backward."""

    @staticmethod
    def forward(ctx, x, results, function):
        ctx.results, ctx.function = results, function
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.results.append(ctx.function())
        return dy, None, None


@pytest.mark.parametrize("retains", [False, True])
def test_retained_graph_is_recognised(retains):
    results = []
    x = torch.ones(2, requires_grad=True)
    _Backward.apply(x, results, autograd.keeps_graph).sum().backward(retain_graph=retains)
    assert results == [retains]


def test_each_backward_has_a_number():
    assert autograd.backward_id() == -1
    results = []
    y = _Backward.apply(torch.ones(2, requires_grad=True), results, autograd.backward_id).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert -1 not in results
    assert results[0] != results[1]


def test_autocast_is_seen(monkeypatch, import_again):
    assert not autograd.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert autograd.is_any_autocast_enabled()
    monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    assert import_again(autograd).is_any_autocast_enabled() is True


def test_innermost_saved_tensor_hooks_are_returned():
    assert autograd.saved_tensor_hooks(True) is None
    pack, unpack = (lambda x: x), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert autograd.saved_tensor_hooks(True) == (pack, unpack)
    assert autograd.saved_tensor_hooks(True) is None


def test_two_runs_of_a_checkpoint_are_distinguished():
    results = []

    def region(x):
        results.append((in_checkpoint(), is_checkpoint_recomputation(), is_saved_only_by_this_op()))
        return x.sin().sin()

    region(torch.ones(2, requires_grad=True))
    checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert results == [(False, False, True), (True, False, True), (True, True, False)]


def test_unknown_hook_of_a_checkpoint_is_refused():
    hook = lambda x: x
    hook.__module__, hook.__qualname__ = "torch.utils.checkpoint", "_third_hook.pack"
    with pytest.raises(RuntimeError, match="_third_hook.pack"):
        autograd.is_recompute_hook(hook)
    hook.__module__ = "accelerate"
    assert not autograd.is_recompute_hook(hook)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_cast_has_a_known_node(dtype):
    x = torch.ones(2, requires_grad=True)
    node = x.to(dtype).grad_fn
    assert type(node) is autograd.CastBackward
    assert type(node.next_functions[0][0]) is autograd.AccumulateGrad
    with torch.autocast("cpu", torch.bfloat16):
        product = torch.mm(torch.ones(1, 1), nn.Parameter(torch.ones(1, 1)))
    assert type(product.grad_fn.next_functions[1][0]) is autograd.CastBackward
    assert type((x * 2).grad_fn) is not autograd.CastBackward


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_share_memory_share_the_storage(device):
    x, other = torch.empty(4, device=device), torch.empty(4, device=device)
    numbers = [autograd.storage_id(t.untyped_storage()) for t in (x, x[1:], other)]
    assert numbers[0] == numbers[1] != numbers[2]


def test_active_transforms_are_recognised():
    results = []

    def function(x):
        results.append(autograd.has_active_transform())
        return x * 2

    function(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(2))
    function(torch.ones(2))
    assert results == [False, True, True, False]


def test_gradients_use_new_memory_if_retained_graphs_are_not_recognised(monkeypatch, import_again):
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert import_again(autograd).keeps_graph() is True


def test_lean_refuses_a_torch_without_saved_tensor_hooks(monkeypatch, import_again):
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    module = import_again(autograd)
    assert module.saved_tensor_hooks(True) is not None, "foreign hooks: nothing is overwritten"
    with pytest.raises(RuntimeError, match=r"lean: torch .* has no torch\._C\._autograd\._top_saved_tensors"):
        tigon.lean().__enter__()


def test_error_names_the_missing_number_of_the_backward(monkeypatch, import_again):
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    module = import_again(autograd)
    with pytest.raises(RuntimeError, match=r"has no torch\._C\._current_graph_task_id"):
        module.backward_id()
    with tigon.lean():
        pass


@pytest.mark.parametrize("path", names.NAMES_FOR_LOSS)
def test_the_loss_stays_stock_by_name_if_a_name_is_missing(monkeypatch, import_again, path):
    owner, name = (torch._C, path[3:]) if path.startswith("_C.") else (torch.autograd.forward_ad, "_current_level")
    with monkeypatch.context() as patches:
        patches.delattr(owner, name)
        import_again(autograd)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    report = tigon.patch(transformers.LlamaForCausalLM(config), rope=False)
    (entry,) = [entry for entry in report.entries if entry.part == "loss"]
    assert not entry.replaced
    assert f"the loss in the head: torch {torch.__version__} has no torch.{path}" in entry.detail


def test_unknown_checkpoint_hooks_count_as_foreign_and_are_reported(monkeypatch, import_again):
    with monkeypatch.context() as patches:
        patches.delattr(torch.utils.checkpoint, "_recomputation_hook")
        with pytest.warns(RuntimeWarning, match="names the hooks of torch.utils.checkpoint in another way"):
            module = import_again(autograd)
    monkeypatch.setattr(autograd, "_KNOWS_CHECKPOINT", module._KNOWS_CHECKPOINT)
    results = []

    def region(x):
        results.append((in_checkpoint(), is_checkpoint_recomputation(), is_saved_only_by_this_op()))
        return x.sin().sin()

    checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert results == [(False, False, False)] * 2, "what an op saves is never overwritten"


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor, None


@pytest.mark.parametrize("has_name", [True, False])
def test_a_function_is_applied_without_looking_for_transforms(has_name, monkeypatch):
    if not has_name:
        # A class that has no other `apply` than its own.
        monkeypatch.setattr(autograd, "super", lambda *classes: object(), raising=False)
    x = torch.ones(3, requires_grad=True)
    y = autograd.apply_without_transforms(_Twice)(x, 2.0)
    assert type(y.grad_fn).__name__ == "_TwiceBackward"
    y.sum().backward()
    assert (x.grad == 2).all()
