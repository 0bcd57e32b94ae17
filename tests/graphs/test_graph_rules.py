"""Errors of graphs, calls that stay eager and their reasons, and what holds the memory of graphs."""

import gc
import random
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import tigon
from graphs.emulation import emulate
from graphs.steps import LENGTH, TwoBiases, batch, gradients, llama, lora, run_both, train, train_module
from tigon.graphs import forward
from tigon.graphs.state import ModelState
from tigon.hf.graphs import find_graphed_forward

pytestmark = pytest.mark.no_interpreter("The emulation of graphs needs no kernel.")

FEW_USES = "signatures are captured at their third use"


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate(monkeypatch)


@pytest.fixture(scope="module")
def patched():
    """A model whose next call is a replay. Tests leave it as it is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulate(monkeypatch)
        model = llama()
        report = tigon.patch(model, graphs=True)
        train(model)
    return model, report


def test_a_second_backward_and_a_second_derivative_are_refused(patched):
    loss = patched[0](**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward .*graphs=False"):
        loss.backward()
    loss = patched[0](**batch()).loss
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, [*patched[0].parameters()], create_graph=True)


def test_a_weight_that_changes_before_its_backward_is_an_error(patched):
    weight = patched[0].lm_head.weight
    loss = patched[0](**batch()).loss
    with torch.no_grad():
        weight.add_(0)
    with pytest.raises(RuntimeError, match="changed in place between"):
        loss.backward()


def test_wrong_arguments_raise_the_error_of_the_forward():
    model = TwoBiases()
    tigon.patch(model, graphs=True)
    with pytest.raises(TypeError, match="multiple values"):
        model(torch.ones(2, 4), x=torch.ones(2, 4))
    with pytest.raises(TypeError, match="positional arguments"):
        model(torch.ones(2, 4), None)


def test_the_report_says_what_ran_and_why(patched):
    text = str(patched[1])
    assert "graphs: 1 captured" in text
    assert f"captured: input_ids 1x{LENGTH}, labels 1x{LENGTH}" in text
    assert f"eager: 2 calls: {FEW_USES}" in text


def test_a_loss_that_is_kept_does_not_keep_the_graphs():
    model = llama()
    report = tigon.patch(model, graphs=True)
    train(model)
    loss = model(**batch()).loss
    pair = weakref.ref(loss.grad_fn.pair)
    loss.backward()
    report.restore()
    gc.collect()
    assert pair() is None
    expected = gradients(model)
    model.zero_grad()
    model(**batch()).loss.backward()
    torch.testing.assert_close(gradients(model), expected)


def test_a_backward_after_restore_has_its_graph():
    model = llama()
    report = tigon.patch(model, graphs=True)
    expected = train(model, 4)[-len([*model.parameters()]) :]
    loss = model(**batch(3)).loss
    report.restore()
    loss.backward()
    assert all(map(torch.equal, gradients(model), expected))


def test_only_a_signature_that_is_used_more_often_replaces_another(monkeypatch):
    monkeypatch.setattr(forward, "MOST_PAIRS", 2)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    report = tigon.patch(model, graphs=True)
    for _ in range(6):
        for size in (1, 2, 3):
            model(torch.ones(size, 4)).sum().backward()
    assert [x.signature for x in report.graphs.captured] == ["input 1x4", "input 2x4"]
    for _ in range(7):
        model(torch.ones(3, 4)).sum().backward()
    assert [x.signature for x in report.graphs.captured][2:] == ["input 3x4"]


def test_memory_that_does_not_suffice_drops_the_pair_that_was_used_least(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    report = tigon.patch(model, graphs=True)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
    capture, calls = forward.capturing.capture, []

    def fail_once(*args, **options):
        calls.append(len(calls))
        if len(calls) == 1:
            raise torch.cuda.OutOfMemoryError
        return capture(*args, **options)

    monkeypatch.setattr(forward.capturing, "capture", fail_once)
    for size in (2, 2, 2, 2, 1):
        model(torch.ones(size, 4)).sum().backward()
    assert calls == [0, 1, 2]
    assert [x.signature for x in report.graphs.captured] == ["input 1x4", "input 2x4", "input 1x4"]


def test_random_numbers_of_the_host_make_a_call_eager():
    class Random(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) * random.random()

    def script(model):
        random.seed(0)
        return [*train_module(model), random.random()]

    assert any("random numbers on the host" in reason for reason in run_both(script, Random(4), is_warm=False).eager)


def test_a_capture_waits_for_the_eager_step_of_another_thread():
    """A capture gives the model other parameters, of which an eager step would compute the gradients."""
    model = llama()
    record = tigon.patch(model, graphs=True).graphs
    train(model, 2)
    graphed = find_graphed_forward(model)
    inner, threads = graphed.inner, []

    def run_slowly(*args, **options):
        graphed.inner = inner
        threads.append(threading.Thread(target=lambda: model(**batch()).loss.backward()))
        threads[0].start()
        threads[0].join(0.1)
        assert not record.captured
        return inner(*args, **options)

    graphed.inner = run_slowly
    # The first call of another signature is eager.
    model(**batch(length=65)).loss.backward()
    threads[0].join()
    assert len(record.captured) == 1
    assert all(p.grad is not None for p in model.parameters())


class Box:
    def __init__(self, value):
        self.value = value


class Boxes(nn.LayerNorm):
    def forward(self, x):
        y = super().forward(x)
        return y, Box(y.detach())


def test_an_output_that_cannot_be_copied_makes_a_call_eager():
    def script(model):
        results = []
        for seed in range(5):
            y, box = model(torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)))
            y.sum().backward()
            results.append(box.value)
        return results

    record = run_both(script, Boxes(4), is_warm=False)
    assert any("its output has a Box" in reason for reason in record.eager), record


def test_embeddings_whose_output_needs_a_gradient_are_replayed():
    """Checkpoints and quantised models need such a hook. Nobody can read the gradient of the output."""
    model = lora()
    model.enable_input_require_grads()
    assert run_both(train, model).replayed == 3


def test_a_call_whose_loss_and_logits_are_differentiated_runs_eagerly():
    def script(model):
        results = []
        for seed in range(4):
            outputs = model(**batch(seed))
            (outputs.loss + outputs.logits.square().mean()).backward()
            results += [outputs.loss.detach(), outputs.logits.detach(), *gradients(model)]
        return results

    record = run_both(script, loss=False)
    assert record.replayed == 0
    assert any("its output has 2 tensors with a gradient" in reason for reason in record.eager), record


@pytest.mark.parametrize("kept", [3, LENGTH, -3, torch.tensor([7, 2])], ids=["3", "all", "all but 3", "two tokens"])
@pytest.mark.parametrize("length", [LENGTH, LENGTH - 5], ids=["of a graph", "padded"])
def test_logits_to_keep_count_from_the_true_end(length, kept):
    eager, graphed = llama(), llama()
    tigon.patch(eager)
    record = tigon.patch(graphed, graphs=True).graphs
    for seed in range(3):
        tokens = batch(seed, length)["input_ids"]
        expected, logits = (model(input_ids=tokens, logits_to_keep=kept).logits for model in (eager, graphed))
        expected.square().mean().backward()
        logits.square().mean().backward()
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(gradients(graphed), gradients(eager))
    is_eager = length < LENGTH and isinstance(kept, int)
    assert (record.replayed, record.eager["logits_to_keep is a slice"]) == ((0, 3) if is_eager else (1, 0)), record


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.options = types.SimpleNamespace(scale=1.0)

    def forward(self, x):
        return self.norm(x) * self.options.scale


def test_a_setting_in_an_object_of_a_module_is_noticed():
    def script(model):
        results = train_module(model)
        model.options.scale = 2.0
        return results + train_module(model)

    record = run_both(script, Scaled(), is_warm=False)
    assert (len(record.captured), record.replayed) == (2, 5)


def test_failed_captures_leave_the_captured_calls_graphed(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    report = tigon.patch(model, graphs=True)
    train = lambda size: model(torch.ones(size, 4)).sum().backward()
    for _ in range(3):
        train(1)

    def fail(*args, **options):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(forward.capturing, "capture", fail)
    monkeypatch.setattr(forward.GraphedForward, "drop_least_used", lambda self: None)
    for size in range(2, 2 + forward.MOST_FAILURES + 1):
        for _ in range(3):
            train(size)
    assert report.graphs.replayed == 1
    train(1)
    assert report.graphs.replayed == 2


@pytest.mark.parametrize(("file", "name"), [(modeling_llama, "rotate_half"), (nn.functional, "silu")])
def test_a_replaced_function_is_noticed(file, name, monkeypatch):
    model, function = llama(), getattr(file, name)
    record = tigon.patch(model, graphs=True).graphs
    train(model)
    monkeypatch.setattr(file, name, lambda *args, **options: function(*args, **options))
    train(model, 1)
    assert record.eager["a function that a forward may call has changed"] == 1


def test_an_equal_parameter_of_one_element_is_another_parameter():
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(1))
    state = ModelState(model)
    assert state.change() is None
    model.scale = nn.Parameter(torch.ones(1))
    assert state.change() == "a parameter or a buffer"
