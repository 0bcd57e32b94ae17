"""A change of a model after the patch works as on a stock model, or the loss is NaN, or an error is raised."""

import copy
import functools
import threading
import types

import pytest
import torch
from torch import nn

import tigon
from tigon.hf.logits import SKIPPED_LOGITS

transformers = pytest.importorskip("transformers")
loss_utils = pytest.importorskip("transformers.loss.loss_utils")


def is_fused(outputs) -> bool:
    return outputs.logits is SKIPPED_LOGITS


def detail_of_loss(model) -> str:
    return next(entry.detail for entry in tigon.patch(model).entries if entry.part == "loss")


# --- hooks on the head ---------------------------------------------------------------------------


def mask_a_part_of_the_vocabulary(head, args, output):
    return output.masked_fill(torch.arange(output.shape[-1]) >= 100, -1e4)


def change_a_little(head, args, output):
    return 1.005 * output


def zero_most_tokens(head, args, output):
    return torch.cat((output[:, :4], 0 * output[:, 4:]), 1)


def on_output(hook):
    return lambda model: model.lm_head.register_forward_hook(hook)


HOOKS = {
    "mask": on_output(mask_a_part_of_the_vocabulary),
    "scale": on_output(change_a_little),
    "slice": on_output(zero_most_tokens),
    "partial": on_output(functools.partial(change_a_little)),
    "backward": lambda model: model.lm_head.register_full_backward_hook(
        lambda head, grad_input, grad_output: (grad_input[0] * 0.5,)
    ),
    "backward pre": lambda model: model.lm_head.register_full_backward_pre_hook(
        lambda head, gradients: (gradients[0] * 0.5,)
    ),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_that_changes_the_logits_or_their_gradient_is_not_ignored(pair, batch, assert_same_step, hook):
    model, stock = pair()
    hook(model), hook(stock)
    with pytest.warns(UserWarning, match="the head of LlamaForCausalLM was changed, so the stock code"):
        assert_same_step(model, stock, batch)


def scale_linear_outputs(call):
    """Wrap `call`, the call of a module, so that it scales the output of linear layers."""

    def scaled_call(self, *args, **kwargs):
        output = call(self, *args, **kwargs)
        return 0.9 * output if isinstance(self, torch.nn.Linear) else output

    return scaled_call


@pytest.mark.parametrize("duplicate", [lambda model: model, copy.deepcopy], ids=["same", "copy"])
def test_a_replaced_call_of_the_head_is_not_ignored(pair, batch, assert_same_step, duplicate):
    model, stock = pair()
    model = duplicate(model)
    for head in (model.lm_head, stock.lm_head):
        head._call_impl = scale_linear_outputs(torch.nn.Module._call_impl).__get__(head)
    with pytest.warns(UserWarning, match="the head of LlamaForCausalLM was changed, so the stock code"):
        assert_same_step(model, stock, batch)


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
@pytest.mark.parametrize("cls", [torch.nn.Module, torch.nn.Linear])
def test_a_replaced_call_of_all_layers_is_not_ignored(pair, batch, assert_same_step, monkeypatch, cls, name):
    model, stock = pair()
    monkeypatch.setattr(cls, name, scale_linear_outputs(getattr(cls, name)), raising=False)
    with pytest.warns(UserWarning, match="the head of LlamaForCausalLM was changed, so the stock code"):
        assert_same_step(model, stock, batch)


def test_a_hook_on_all_modules_is_not_ignored(pair, batch, assert_same_step):
    model, stock = pair()
    hook = lambda module, args, output: 0.9 * output if isinstance(module, torch.nn.Linear) else None
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        with pytest.warns(UserWarning, match="the head of LlamaForCausalLM was changed, so the stock code"):
            assert_same_step(model, stock, batch)
    finally:
        handle.remove()
    assert is_fused(model(**batch))


def test_a_call_of_the_head_replaced_before_the_patch_keeps_the_loss_stock(make_model):
    model = make_model()
    model.lm_head._call_impl = scale_linear_outputs(torch.nn.Module._call_impl).__get__(model.lm_head)
    assert detail_of_loss(model) == "the call of its head was replaced, and may change the logits"


def test_a_compiled_model_does_not_ignore_a_hook(pair, batch, step):
    torch._dynamo.reset()
    model, stock = pair(num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    assert is_fused(compiled(**batch))
    HOOKS["slice"](model), HOOKS["slice"](stock)
    # A graph contains the hooks that existed when it was compiled.
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(**batch).loss, stock(**batch).loss)


def test_the_loss_is_stock_if_the_head_had_a_hook_before_the_patch(make_model):
    model = make_model()
    HOOKS["mask"](model)
    assert detail_of_loss(model) == f"a hook on its head (by {__name__}) may change the logits"


def test_a_hook_that_changes_the_input_of_the_head_is_not_ignored(pair, batch, assert_same_step):
    model, stock = pair()
    for each in (model, stock):
        each.lm_head.register_forward_pre_hook(lambda head, args: (2 * args[0],))
    assert is_fused(model(**batch))
    assert_same_step(model, stock, batch)


# --- other uses of the logits --------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 7.0}], ids=["plain", "soft cap"])
@pytest.mark.parametrize("use", [torch.mean, lambda x: x.logsumexp(-1).square().mean(), lambda x: x.softmax(-1).max()])
def test_other_uses_of_the_logits_raise_and_never_give_a_wrong_loss(pair, batch, step, use, config):
    model, _ = pair("gemma2", **config)

    class Regularised(type(model)):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.loss = outputs.loss + 1e-3 * use(outputs.logits)
            return outputs

    model.__class__ = Regularised
    with pytest.raises(RuntimeError, match=r"tigon: .* needs the logits .* skip_logits=False"):
        step(model, batch)


def test_logits_used_before_the_loss_raise(pair, batch):
    model, _ = pair()
    forward = type(model).forward

    class Regularised(type(model)):
        def forward(self, *args, **kwargs):
            self.extra, fused = [], self._loss_function

            def loss_function(logits, *arguments, **options):
                self.extra.append(logits.square().mean())
                return fused(logits, *arguments, **options)

            stub = types.SimpleNamespace(loss_function=loss_function, lm_head=self.lm_head, model=self.model)
            stub.config = self.config
            outputs = forward(stub, *args, **kwargs)
            outputs.loss = outputs.loss + self.extra[0]
            return outputs

    model.__class__ = Regularised
    with pytest.raises(RuntimeError, match=r"tigon: .* needs the logits .* skip_logits=False"):
        model(**batch)


def test_the_loss_is_stock_if_the_model_had_a_regulariser_before_the_patch(make_model, batch):
    model = make_model()

    class Regularised(type(model)):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            if outputs.loss is not None:
                outputs.loss = outputs.loss + outputs.logits.square().mean()
            return outputs

    model.__class__ = Regularised
    assert detail_of_loss(model) == "its forward computes more than its loss from its logits (square)"


def test_anomaly_detection_finds_no_nan(pair, batch, assert_same_step):
    model, stock = pair("gemma2")
    with torch.autograd.detect_anomaly(check_nan=True):
        assert is_fused(model(**batch))
        assert_same_step(model, stock, batch)


# --- the loss ------------------------------------------------------------------------------------


def weighted(logits, labels, vocab_size, **options):
    weight = options.pop("loss_weight", 1.0)
    return weight * loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **options)


class Weighted:
    weight = 1.0

    def __call__(self, logits, labels, vocab_size, **options):
        return self.weight * loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **options)


@functools.wraps(loss_utils.ForCausalLMLoss)
def wrapped(*args, **options):
    return options.pop("loss_weight", 1.0) * loss_utils.ForCausalLMLoss(*args, **options)


@pytest.mark.parametrize("loss", [weighted, Weighted(), wrapped, functools.partial(weighted)])
def test_a_loss_of_another_library_stays_stock(make_model, loss):
    model = make_model()
    model.loss_function = loss
    assert detail_of_loss(model) == f"its loss function was replaced (by {__name__})"


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_a_loss_type_chosen_later_is_used(pair, batch, assert_same_step, training):
    model, stock = pair()
    for each in (model.train(training), stock.train(training)):
        each.loss_type = "ForMaskedLM"
    assert_same_step(model, stock, batch)
    logits, labels = torch.randn(2, 5, 7), torch.arange(10).view(2, 5) % 7
    assert torch.equal(model.loss_function(logits, labels, 7), stock.loss_function(logits, labels, 7))


def test_a_loss_type_is_not_read_where_a_loss_was_assigned(make_model, clone, batch, assert_same_step):
    model = make_model()
    model.loss_function = loss_utils.ForCausalLMLoss
    stock = clone(model)
    report = tigon.patch(model)
    model.loss_type = stock.loss_type = "ForMaskedLM"
    assert_same_step(model, stock, batch)
    report.restore()
    assert model.loss_function is loss_utils.ForCausalLMLoss


def test_a_head_that_is_called_twice_raises(pair, batch):
    model, _ = pair()

    class Twice(type(model)):
        def get_output_embeddings(self):
            return self.lm_head

    model.__class__ = Twice
    head = model.lm_head
    # The first call of the head computed the loss. The second one returns logits of the same shape, and the loss
    # function gets these.
    model.lm_head.register_forward_pre_hook(lambda module, args: setattr(model, "hidden", args[0]))
    forward = type(model).forward

    def forward_with_two_head_calls(self, *args, **kwargs):
        fused = self._loss_function

        class Stub:
            config, model, lm_head = self.config, self.model, staticmethod(lambda x: (head(x), head(x))[1])
            loss_function = staticmethod(fused)

        return forward(Stub, *args, **kwargs)

    Twice.forward = forward_with_two_head_calls
    with pytest.raises(RuntimeError, match="called its head twice"):
        model(**batch)


def test_other_labels_in_the_loss_than_in_the_call_raise(pair, batch):
    model, _ = pair()

    class Shifted(type(model)):
        def forward(self, *args, labels=None, **kwargs):
            return super().forward(*args, labels=labels.roll(1, 1), **kwargs)

    model.__class__ = Shifted
    with pytest.raises(RuntimeError, match="other arguments than the model itself received"):
        model(**batch)


# --- heads whose gradients are not a linear layer's ----------------------------------------------


class DetachesItsInput(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x.detach(), self.weight, self.bias)


class DetachesItsWeight(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach(), self.bias)


class InFp32(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x.float(), self.weight.float(), self.bias)


class HalfInEvaluation(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else 0.5)


@pytest.mark.parametrize("kind", [DetachesItsInput, DetachesItsWeight, InFp32, HalfInEvaluation])
def test_the_loss_is_stock_if_the_head_is_not_linear_in_training_or_evaluation(make_model, kind):
    model = make_model()
    model.lm_head.__class__ = kind
    assert detail_of_loss(model) == f"its head ({kind.__name__}) is not a plain linear layer"


def with_logits_of(head):
    """Return a function that changes a model so that its logits are `head(lm_head, hidden states)`."""

    def change(model):
        class Changed(type(model)):
            def forward(self, input_ids, labels=None, **kwargs):
                logits = head(self.lm_head, self.model(input_ids).last_hidden_state)
                loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
                return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

        model.__class__ = Changed

    return change


def test_a_model_that_detaches_its_logits_stays_stock(make_model):
    model = make_model()
    with_logits_of(lambda head, x: head(x).detach())(model)
    assert detail_of_loss(model) == "its forward computes more than its loss from its logits (detach)"


class HalfOfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


def test_a_model_that_halves_the_gradient_of_its_logits_stays_stock(make_model):
    model = make_model()
    with_logits_of(lambda head, x: HalfOfTheGradient.apply(head(x)))(model)
    assert detail_of_loss(model) == "the gradients of its loss are not those of the standard loss"


def test_a_model_that_interpolates_its_logits_stays_stock(make_model):
    model = make_model()
    with_logits_of(lambda head, x: torch.lerp(y := head(x), 2 * y, 0.5))(model)
    assert detail_of_loss(model) == "its forward computes more than its loss from its logits (lerp)"


def test_a_model_that_detaches_the_input_of_its_head_trains_like_stock(pair, batch, assert_same_step):
    model, stock = pair(change=with_logits_of(lambda head, x: head(x.detach())))
    del batch["attention_mask"]
    assert is_fused(model(**batch))
    assert_same_step(model, stock, batch)


def test_a_head_without_sizes_stays_stock(make_model):
    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight, self.bias = weight, None

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    model = make_model()
    model.lm_head = Head(model.lm_head.weight)
    assert detail_of_loss(model) == "its head (Head) is not a plain linear layer"


# --- functional calls and replicas ---------------------------------------------------------------


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
