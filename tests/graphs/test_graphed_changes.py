"""A changed model is captured again, or runs eagerly with a reason; later patches, restored patches and copies too."""

import copy
import gc
import io
import re
import weakref

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from graphs.emulation import emulate
from graphs.steps import TwoBiases, batch, llama, lora, qwen3_moe, run_both, train, train_module
from tigon.graphs import calls, forward
from tigon.hf.graphs import find_graphed_forward

pytestmark = pytest.mark.no_interpreter("The emulation of graphs needs no kernel.")

FEW_USES = "signatures are captured at their third use"


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate(monkeypatch)


def exchange_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def assign_weights(model):
    model.load_state_dict({name: x * 1.5 for name, x in model.state_dict().items()}, assign=True)


def set_scaling(model):
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scaling["default"] = 3.0


def set_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5


def add_and_switch_adapters(model):
    torch.manual_seed(3)
    model.add_adapter("b", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("b")


def change_frozen_weight(model):
    with torch.no_grad():
        model.get_base_model().lm_head.weight.mul_(1.5)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrize_weight(model):
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def change_class(model):
    model.model.layers[0].mlp.up_proj.__class__ = DoubledLinear


def add_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.1)


def switch_checkpoints_on(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


# What is changed, the model, what the reason names, and whether the model is captured again.
CHANGES = {
    "a parameter is frozen": (lambda m: m.lm_head.requires_grad_(False), llama, "a parameter", True),
    "data": (exchange_data, llama, "a parameter", True),
    "assign=True": (assign_weights, llama, "an attribute|_parameters", True),
    "dtype": (nn.Module.double, llama, "a parameter", True),
    "vocabulary": (lambda m: m.resize_token_embeddings(40, mean_resizing=False), llama, "a parameter", True),
    "mode of one module": (
        lambda m: m.model.layers[0].eval(), lambda: llama(attention_dropout=0.3), "layers.0.training", True,
    ),
    "configuration": (lambda m: setattr(m.config, "output_hidden_states", True), llama, None, False),
    "class": (change_class, llama, "a class", True),
    "parametrization": (parametrize_weight, llama, "a class", True),
    "checkpoints": (switch_checkpoints_on, llama, "LlamaForCausalLM.*|gradient_checkpointing", True),
    "hook": (add_hook, llama, "table of hooks", False),
    "scaling of adapters": (set_scaling, lora, "scaling", True),
    "dropout of adapters": (set_dropout, lambda: lora(0.1), "lora_dropout", True),
    "adapters": (add_and_switch_adapters, lora, "a parameter", True),
    "a frozen weight": (change_frozen_weight, lora, "a parameter", True),
}  # fmt: skip


@pytest.mark.parametrize(("change", "make", "reason", "is_captured"), CHANGES.values(), ids=CHANGES)
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:tigon. the head of")
def test_a_changed_model_is_not_replayed(change, make, reason, is_captured):
    def script(model):
        results = train(model, 1)
        change(model)
        return results + train(model, 5)

    record = run_both(script, make())
    assert (len(record.captured), record.replayed) == ((2, 3) if is_captured else (1, 1)), record
    texts = [text for text in record.eager if text != FEW_USES]
    assert texts
    if reason is not None:
        assert any(re.search(f"({reason}).* has changed", text) for text in texts), texts


def test_adapters_that_are_disabled_without_gradients_change_nothing():
    def script(model):
        results = train(model, 1)
        with model.disable_adapter(), torch.no_grad():
            results.append(model(**batch()).loss)
        return results + train(model)

    record = run_both(script, lora())
    assert (len(record.captured), record.replayed) == (1, 4)


def test_a_model_that_changes_all_the_time_is_not_captured_again():
    def script(model):
        results = []
        for step in range(7):
            model.config.step = step
            results += train(model, 4)
        return results

    record = run_both(script, is_warm=False)
    assert len(record.captured) == forward.MOST_CHANGES
    assert record.eager[f"LlamaConfig.step has changed after {forward.MOST_CHANGES} captures"] > 4


def test_changes_between_many_replays_are_no_reason(monkeypatch):
    monkeypatch.setattr(forward, "WORTHWHILE_USES", 4)

    def script(model):
        results = []
        for step in range(7):
            model.config.step = step
            results += train(model, 6)
        return results

    assert len(run_both(script, is_warm=False).captured) == 7


class Counts(nn.LayerNorm):
    """A forward that changes an attribute, and an attribute in a list."""

    def __init__(self):
        super().__init__(4)
        self.count, self.counts = 0, [0]

    def forward(self, x):
        self.count += 1
        self.counts[0] += 1
        return super().forward(x) * self.count * self.counts[0]


class Leaf(nn.LayerNorm):
    """A forward that differentiates a tensor which is no parameter, and a parameter that it keeps in a list."""

    def __init__(self):
        super().__init__(4)
        self.scale, self.weights = torch.ones(4, requires_grad=True), [self.weight]

    def forward(self, x):
        return super().forward(x) * self.scale * self.weights[0]


class Arguments(nn.LayerNorm):
    def forward(self, *args):
        return super().forward(args[0])


UNSEEN = {
    Counts: "its forward changes Counts.count",
    Leaf: "neither a parameter nor an argument",
    Arguments: "its arguments do not fit",
}


@pytest.mark.parametrize("cls", UNSEEN)
@pytest.mark.filterwarnings("ignore:tigon.patch")
def test_a_forward_that_a_graph_would_not_repeat_runs_eagerly(cls):
    model = cls() if cls is not Arguments else cls(4)
    record = run_both(lambda m: [train_module(m), getattr(m, "scale", m.weight).grad], model, is_warm=False)
    assert record.replayed == 0
    assert any(UNSEEN[cls] in reason for reason in record.eager), record


def save_on_the_host(model):
    with torch.autograd.graph.save_on_cpu():
        return train(model)


def call_with_a_global_hook(model):
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 1.1 if isinstance(module, nn.Embedding) else None
    )
    try:
        return train(model)
    finally:
        hook.remove()


class Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def count_operators(model):
    with Operators() as operators:
        loss = model(**batch()).loss
    return [loss.detach(), operators.count > 100]


def differentiate_router_losses(model):
    return train(model, output_router_logits=True)


def use_cache(model):
    outputs = [model(**batch(seed), use_cache=True) for seed in range(4)]
    return [outputs[3].past_key_values.layers[0].keys.detach()]


def do_not_train(model):
    model.eval()
    results = [model(**batch()).loss.detach()]
    model.train()
    with torch.inference_mode():
        return [*results, model(**batch()).loss.clone()]


def train_in_a_group_of_two_ranks(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls.dist, "is_initialized", lambda: True)
        patch.setattr(calls.dist, "get_world_size", lambda: 2)
        return train(model)


STATES = {
    train_in_a_group_of_two_ranks: "the process group has several ranks",
    save_on_the_host: "hooks of torch.autograd.graph receive the tensors",
    call_with_a_global_hook: "global hooks on modules",
    count_operators: "a dispatch mode of torch",
    differentiate_router_losses: "output_router_logits is set",
    use_cache: "use_cache is set",
    do_not_train: "it does not train",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", STATES, ids=lambda script: script.__name__)
@pytest.mark.filterwarnings("ignore:tigon. the head of")
def test_calls_that_need_python_run_eagerly(script):
    is_warm = script is not train_in_a_group_of_two_ranks
    record = run_both(script, qwen3_moe() if script is differentiate_router_losses else None, is_warm=is_warm)
    assert any(STATES[script] in reason for reason in record.eager), record
    assert record.replayed == 0


PACKED = torch.tensor([[*range(40), *range(24)]])
MASK = torch.ones(1, 64, dtype=torch.long)


def left_padded():
    mask = MASK.clone()
    mask[:, :10] = 0
    return mask


ARGUMENTS = {
    "packed": {"position_ids": PACKED, "use_cache": False},
    "packed beside a cache": {"position_ids": PACKED},
    "packed with a mask of ones": {"position_ids": PACKED, "attention_mask": MASK, "use_cache": False},
    "shifted": {"position_ids": torch.arange(64)[None] + 3},
    "left": {"attention_mask": left_padded()},
    "four dimensions": {"attention_mask": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()},
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.sampled(2)
def test_masks_and_positions_mean_what_they_mean_in_eager_calls(arguments):
    assert run_both(lambda model: train(model, 4, **arguments), is_warm=False).replayed == 2


@pytest.mark.parametrize("memory", ["lean", "checkpoint"])
def test_a_later_patch_is_captured_again_and_its_restore_too(memory):
    def script(model):
        results = train(model)
        report = tigon.patch(model, memory=memory)
        results += train(model)
        report.restore()
        return results + train(model)

    record = run_both(script, llama(num_hidden_layers=2))
    assert (len(record.captured), record.replayed) == (3, 5)


def test_a_level_that_moves_tensors_to_the_host_is_eager():
    reason = "memory='checkpoint+offload' moves tensors to the host"
    first, later = llama(num_hidden_layers=2), llama(num_hidden_layers=2)
    report = tigon.patch(first, graphs=True, memory="checkpoint+offload")
    train(first)
    assert report.graphs.eager == {reason: 3}
    clone = copy.deepcopy(first)
    train(clone)
    assert find_graphed_forward(clone).record.eager == {reason: 3}
    report = tigon.patch(later, graphs=True)
    train(later)
    level = tigon.patch(later, memory="checkpoint+offload", graphs=True)
    train(later)
    assert level.graphs is report.graphs
    assert report.graphs.eager[reason] == 3
    level.restore()
    train(later)
    assert report.graphs.replayed == 2


def test_copies_have_graphs_of_their_own():
    model = llama()
    report = tigon.patch(model, graphs=True)
    train(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    expected = train(model, 4)
    for clone in copies:
        assert all(map(torch.equal, train(clone, 4), expected))
        assert find_graphed_forward(clone).record.replayed == 2
    assert report.graphs.replayed == 5


def test_compiled_code_contains_the_eager_forward():
    model = TwoBiases()
    report = tigon.patch(model, graphs=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.ones(2, 4)).sum().backward()
    assert not report.graphs.eager
    torch.compiler.reset()


def test_a_forward_of_other_code_is_named():
    model = llama()
    model.forward = lambda *args, **kwargs: None
    report = tigon.patch(model, graphs=True)
    assert any(note.startswith("graphs=True has no effect on LlamaForCausalLM: its forward") for note in report.notes)


def test_the_state_of_a_model_is_no_cycle():
    model = llama()
    report = tigon.patch(model, graphs=True)
    train(model)
    graphed = find_graphed_forward(model)
    # A graph of CUDA has no reference to the model.
    graphed.memory.latest = None
    for pair in graphed.pairs.values():
        pair.forward.replay = pair.backward.replay = None
    reference = weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        del model, report, graphed, pair
        assert reference() is None
    finally:
        gc.enable()
