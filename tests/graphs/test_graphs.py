"""Training calls run as graphs, which are emulated here, with the losses and gradients of eager calls, bit for bit.

Other promises are in `test_graph_rules.py`, and models that change in `test_graphed_changes.py`.
"""

import pytest
import torch
from torch import nn

import tigon
from graphs.emulation import emulate
from graphs.steps import batch, gradients, llama, lora, qwen3_moe, run_both, train, train_module
from tigon.graphs import capture

pytestmark = pytest.mark.no_interpreter("The emulation of graphs needs no kernel.")

FEW_USES = "signatures are captured at their third use"


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate(monkeypatch)


MODELS = {
    "full": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "experts": qwen3_moe,
    "LoRA": lora,
    "dropout": lambda: lora(0.3, llama(attention_dropout=0.2)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_have_the_bits_of_eager_calls(make):
    record = run_both(lambda model: [train(model), torch.rand(1)], make())
    assert (record.replayed, len(record.captured)) == (3, 1)
    assert record.eager == {FEW_USES: 2}


@pytest.mark.parametrize("level", ["lean", "lean+mlp", "checkpoint", "checkpoint+attention"])
def test_levels_of_memory_have_the_bits_of_eager_calls(level):
    # The last layer is not checkpointed. The base weights train in one level, and adapters in the others.
    model = llama(attention_dropout=0.2, num_hidden_layers=1 + level.startswith("checkpoint"))
    assert run_both(train, model if level == "lean+mlp" else lora(0.3, model), memory=level).replayed == 3


@pytest.mark.parametrize("count", [7, 7.0, torch.tensor(7)], ids=["int", "float", "tensor"])
def test_the_number_of_items_differs_between_replays(count):
    def script(model):
        train(model, 2, num_items_in_batch=count)
        return [model(**batch(), num_items_in_batch=count * factor).loss.detach() for factor in (1, 2, 3)]

    assert len(run_both(script, is_warm=False).captured) == 1


def test_metrics_and_tuples_are_outputs():
    def script(model):
        results = train(model, 4, return_dict=False)
        for seed in range(3):
            outputs = model(**batch(seed))
            outputs.loss.backward()
            results += [outputs.token_accuracy, outputs.predicted_tokens]
        return results

    record = run_both(script, return_token_accuracy=True, return_predicted_tokens=True)
    assert (len(record.captured), record.replayed) == (2, 5)


@pytest.mark.parametrize("memory", ["default", "checkpoint"])
def test_a_replay_casts_the_weights_again_if_autocast_has_cached_them(memory):
    def train_in_bf16(model, is_cached):
        results = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        # Eager steps in one block would not cast again.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            for seed in range(5):
                loss = model(**batch(seed)).loss
                loss.backward()
                results += [loss.detach(), *gradients(model)]
                optimizer.step()
                optimizer.zero_grad()
        return results

    eager, graphed = llama(num_hidden_layers=2), llama(num_hidden_layers=2)
    tigon.patch(eager, memory=memory)
    report = tigon.patch(graphed, memory=memory, graphs=True)
    expected = train_in_bf16(eager, is_cached=False)
    # The calls before the capture are eager.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        train(graphed, 2)
    assert all(map(torch.equal, train_in_bf16(graphed, is_cached=True), expected))
    assert report.graphs.replayed == 5


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return 2 * x @ torch.eye(2)


def test_a_backward_runs_outside_of_the_autocast_of_its_forward():
    x = torch.tensor([[1 / 3, 2 / 3]], requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (gradient,) = capture.differentiate(Squares.apply(x), [x], torch.ones(()))
    assert torch.equal(gradient, 2 * x)


def test_no_two_gradients_have_the_same_memory():
    a, b, c = (torch.zeros(3, requires_grad=True) for _ in range(3))
    gradients = capture.differentiate((a + b).sum() + c.sum(), [a, b, c], torch.ones(()))
    assert len({x.data_ptr() for x in gradients}) == 3
    assert all(torch.equal(x, torch.ones(3)) for x in gradients)


def test_the_body_and_logits_are_graphed_too():
    def script(model):
        results = []
        for seed in range(4):
            hidden = model.model(input_ids=batch(seed)["input_ids"]).last_hidden_state
            hidden.square().sum().backward()
            logits = model(input_ids=batch(seed)["input_ids"]).logits
            # The caller may overwrite them.
            logits.div_(2).square().mean().backward()
            results += [hidden.detach(), logits.detach().clone(), *gradients(model)]
        return results

    record = run_both(script, is_warm=False)
    # The signature of the call with labels has none of these uses.
    assert len(record.captured) == 2
    assert record.replayed == 4


def test_embeddings_as_input_get_gradients():
    def script(model):
        results = []
        for seed in range(5):
            embeds = model.get_input_embeddings()(batch(seed)["input_ids"])
            embeds.retain_grad()
            model(inputs_embeds=embeds, labels=batch(seed)["labels"]).loss.backward()
            results += [embeds.grad.clone(), *gradients(model)]
        return results

    assert run_both(script).replayed == 3


def accumulate(model):
    results = []
    for seed in range(4):
        loss = model(**batch(seed)).loss / 2
        loss.backward()
        results += [loss.detach().clone(), *gradients(model)]
        if seed % 2:
            model.zero_grad(set_to_none=seed > 1)
    return results


def zero_gradients_between(model):
    kept = []
    for seed in range(4):
        loss = model(**batch(seed)).loss
        model.zero_grad()
        loss.backward()
        kept.append([p.grad for p in model.parameters()])
    return kept


def keep_gradients_while_they_accumulate(model):
    model(**batch(0)).loss.backward()
    kept = [p.grad for p in model.parameters()]
    model(**batch(1)).loss.backward()
    return [kept, [x is p.grad for x, p in zip(kept, model.parameters(), strict=True)]]


def keep_losses(model):
    losses, results = [], []
    for seed in range(4):
        losses.append(model(**batch(seed)).loss)
        losses[-1].backward()
        results.append(gradients(model))
    return [results, [x.detach() for x in losses]]


def differentiate(model):
    parameters = [*model.parameters()]
    return [torch.autograd.grad(model(**batch(seed)).loss, parameters[seed:]) for seed in range(3)]


def differentiate_and_free(model):
    parameters = [*model.parameters()]
    return [[x.clone() for x in torch.autograd.grad(model(**batch(seed)).loss, parameters[seed:])] for seed in range(3)]


def clip_and_scale(model):
    results = []
    for seed in range(4):
        (model(**batch(seed)).loss * 64.0).backward()
        for p in model.parameters():
            p.grad.div_(64.0)
        results += [nn.utils.clip_grad_norm_(model.parameters(), 0.01), *gradients(model)]
    return results


def step_in_backward(model):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for seed in range(4):
        losses.append(model(**batch(seed)).loss.detach())
        model(**batch(seed)).loss.backward()
    return [losses, [p.detach() for p in model.parameters()]]


def change_gradients_in_hooks(model):
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 3)
    return train(model)


SCRIPTS = {
    accumulate: 4, zero_gradients_between: 2, keep_gradients_while_they_accumulate: 2, keep_losses: 4,
    differentiate: 1, differentiate_and_free: 3, clip_and_scale: 4, step_in_backward: 8, change_gradients_in_hooks: 3,
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_gradients_are_those_of_eager_calls(script):
    assert run_both(script).replayed >= SCRIPTS[script]


def test_two_losses_in_one_backward_are_not_replayed_both():
    def script(model):
        results = []
        for seed in range(2):
            (model(**batch(seed)).loss + model(**batch(seed + 5)).loss).backward()
            results += gradients(model)
        return results

    record = run_both(script)
    assert record.replayed == 2
    assert record.eager["the backward of an earlier call has not run"] == 2


def test_gradients_that_the_caller_keeps_make_the_next_call_eager():
    assert run_both(differentiate).eager["gradients of an earlier step are still in use outside of .grad"] == 2


def test_running_statistics_count_each_batch_once():
    model = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4))
    assert run_both(train_module, model, is_warm=False).replayed == 3
