"""A change of a model after the patch works as on a stock model, or the loss is NaN, or an error is raised."""

import copy
import functools
import threading

import pytest
import torch
from torch import nn

import tigon
from hf.changes import is_fused, loss_entry
from op_cases import one_in

transformers = pytest.importorskip("transformers")
loss_utils = pytest.importorskip("transformers.loss.loss_utils")


def scale_linear_outputs(call):
    """Wrap `call`, the call of a module, so that it scales the output of linear layers."""

    def scaled_call(self, *args, **kwargs):
        output = call(self, *args, **kwargs)
        return 0.9 * output if isinstance(self, nn.Linear) else output

    return scaled_call


def on_output(hook):
    return lambda head, patch: head.register_forward_hook(hook)


def on_class(cls, name):
    """Return a change of the calls of all layers."""

    def change(head, patch):
        if name not in vars(cls) or "scaled_call" not in getattr(cls, name).__name__:
            patch.setattr(cls, name, scale_linear_outputs(getattr(cls, name)), raising=False)

    return change


def replace_the_call(head, patch):
    head._call_impl = scale_linear_outputs(nn.Module._call_impl).__get__(head)


# Changes of the head that change the logits, or their gradient.
CHANGES = {
    "mask": on_output(lambda head, args, y: y.masked_fill(torch.arange(y.shape[-1]) >= 100, -1e4)),
    "scale": on_output(lambda head, args, y: 1.005 * y),
    "slice": on_output(lambda head, args, y: torch.cat((y[:, :4], 0 * y[:, 4:]), 1)),
    "partial": on_output(functools.partial(lambda factor, head, args, y: factor * y, 1.005)),
    "backward": lambda head, patch: head.register_full_backward_hook(lambda head, dx, dy: (dx[0] * 0.5,)),
    "backward pre": lambda head, patch: head.register_full_backward_pre_hook(lambda head, dy: (dy[0] * 0.5,)),
    "call": replace_the_call,
    **{f"{name} of {cls.__name__}": on_class(cls, name) for cls in (nn.Module, nn.Linear)
       for name in ("__call__", "_call_impl")},
}  # fmt: skip
WARNING = "the head of LlamaForCausalLM was changed, so the stock code"


@one_in(4, change=CHANGES, duplicate={"same": lambda model: model, "copy": copy.deepcopy})
def test_a_change_of_the_logits_or_of_their_gradient_is_not_ignored(
    pair, batch, assert_same_step, monkeypatch, change, duplicate
):
    model, stock = pair()
    model = duplicate(model)
    change(model.lm_head, monkeypatch), change(stock.lm_head, monkeypatch)
    with pytest.warns(UserWarning, match=WARNING):
        assert_same_step(model, stock, batch)


def test_a_hook_on_all_modules_is_not_ignored(pair, batch, assert_same_step):
    model, stock = pair()
    hook = lambda module, args, output: 0.9 * output if isinstance(module, nn.Linear) else None
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        with pytest.warns(UserWarning, match=WARNING):
            assert_same_step(model, stock, batch)
    finally:
        handle.remove()
    assert is_fused(model(**batch))


@pytest.mark.thorough
def test_a_compiled_model_ignores_no_change(pair, batch, monkeypatch):
    """A setting, the type of the loss and a hook change in turn, and the first two return to their old values."""
    torch._dynamo.reset()
    model, stock = pair("gemma2", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")

    def check(has_changed: bool) -> None:
        outputs = compiled(**batch)
        assert is_fused(outputs) != has_changed
        torch.testing.assert_close(outputs.loss, stock(**batch).loss)

    check(False)
    for cap in (7.01, model.config.final_logit_softcapping):
        model.config.final_logit_softcapping = stock.config.final_logit_softcapping = cap
        check(cap == 7.01)
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "Doubled", lambda *x, **y: 2 * loss_utils.ForCausalLMLoss(*x, **y))
    for loss_type in ("Doubled", "ForCausalLM"):
        model.loss_type = stock.loss_type = loss_type
        check(loss_type == "Doubled")
    for each in (model, stock):
        CHANGES["slice"](each.lm_head, None)
    # A graph contains the hooks that existed when it was compiled.
    torch._dynamo.reset()
    check(True)


def test_a_hook_that_changes_the_input_of_the_head_is_not_ignored(pair, batch, assert_same_step):
    model, stock = pair()
    for each in (model, stock):
        each.lm_head.register_forward_pre_hook(lambda head, args: (2 * args[0],))
    assert is_fused(model(**batch))
    assert_same_step(model, stock, batch)


def test_anomaly_detection_finds_no_nan(pair, batch, assert_same_step):
    model, stock = pair("gemma2")
    with torch.autograd.detect_anomaly(check_nan=True):
        assert is_fused(model(**batch))
        assert_same_step(model, stock, batch)


def test_a_model_that_detaches_the_input_of_its_head_trains_like_stock(pair, batch, assert_same_step):
    def detach_the_input(model):
        class Detaching(type(model)):
            def forward(self, input_ids, labels=None, **kwargs):
                logits = self.lm_head(self.model(input_ids).last_hidden_state.detach())
                loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
                return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

        model.__class__ = Detaching

    model, stock = pair(change=detach_the_input)
    del batch["attention_mask"]
    assert is_fused(model(**batch))
    assert_same_step(model, stock, batch)


def test_torch_func_gives_the_gradients_of_stock(pair, batch):
    from torch.func import functional_call, grad

    model, stock = pair()
    gradients = []
    for each in (model, stock):
        parameters = {name: p.detach() for name, p in each.named_parameters()}
        gradients.append(grad(lambda p, m=each: functional_call(m, p, (), batch).loss)(parameters))
    torch.testing.assert_close(*gradients)


def test_each_replica_of_data_parallelism_computes_its_own_loss(pair, batch):
    """Replicas on the CPU are like those of `nn.DataParallel`: parameters are plain tensors, and each has a thread."""

    def replicate(model, factor):
        weights = {name: (factor * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        modules = dict(model.named_modules())
        copies = {name: module._replicate_for_data_parallel() for name, module in modules.items()}
        for name, copied in copies.items():
            prefix = f"{name}." if name else ""
            for key in modules[name]._modules:
                setattr(copied, key, copies[prefix + key])
            for key, parameter in modules[name]._parameters.items():
                if parameter is None:
                    copied._parameters[key] = None
                else:
                    setattr(copied, key, weights[prefix + key])
        return copies[""], weights

    def losses(model):
        results, barrier = [None, None], threading.Barrier(2)

        def run(i):
            replica, weights = replicate(model, 1 - i / 2)
            part = {name: value[i : i + 2] for name, value in batch.items()}
            barrier.wait()
            outputs = replica(**part)
            outputs.loss.backward()
            # A replica's output holds None, which `nn.DataParallel` can gather.
            fused = outputs.logits is None
            results[i] = outputs.loss.detach(), {name: w.grad for name, w in weights.items()}, fused

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    model, stock = pair()
    for (loss, gradients, fused), (expected, stock_gradients, _) in zip(losses(model), losses(stock), strict=True):
        assert fused
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients, stock_gradients)


# The function reads and sets a global, as that of ZeRO-3 of DeepSpeed does.
LINEAR = """
import torch
accelerator = None

def zero3_linear_wrap(input, weight, bias=None):
    global accelerator
    accelerator = accelerator or "cpu"
    output = input.matmul(weight.t())
    return output if bias is None else output + bias
"""


@pytest.mark.parametrize("owner", ["deepspeed.runtime.zero.linear", "another.package"])
def test_only_the_linear_of_zero_counts_as_stock(make_model, batch, monkeypatch, owner):
    """`make test-deepspeed` runs ZeRO-3 itself. This test needs no DeepSpeed."""
    stock, model = make_model(), make_model()
    expected = stock(**batch).loss
    scope = {"__name__": owner}
    exec(LINEAR, scope)
    monkeypatch.setattr(torch.nn.functional, "linear", scope["zero3_linear_wrap"])
    is_known = owner.startswith("deepspeed")
    assert loss_entry(tigon.patch(model)).replaced == is_known
    outputs = model(**batch)
    assert is_fused(outputs) == is_known
    torch.testing.assert_close(outputs.loss, expected)


class BeforeBackward(torch.autograd.Function):
    """ZeRO-3 gathers the weights of a module in the backward of such a function, whose forward detaches."""

    @staticmethod
    def forward(ctx, outputs):
        return outputs.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_the_output_of_the_head_may_pass_through_a_function_of_deepspeed(pair, batch, assert_same_step):
    """Tigon trusts the hooks of DeepSpeed to keep the values of outputs."""
    model, stock = pair()
    hook = lambda module, args, output: BeforeBackward.apply(output)
    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model.lm_head.register_forward_hook(hook)
    assert is_fused(model(**batch))
    assert_same_step(model, stock, batch)
