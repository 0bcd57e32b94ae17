"""With `tigon.patch(model, memory=LEVEL)` each level saves less, and all values have the bits of the default level."""

import copy
import functools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import tigon
from memory.steps import assert_same_bits
from tigon.hf.layer_checkpoint import LayerCall
from tigon.memory import lean as memory
from tigon.memory.block import Block
from tigon.memory.levels import MEMORY

pytest.importorskip("transformers")

import transformers

from hf.changes import with_adapters as with_lora
from hf.copies import copy_of_patched
from hf.test_ways_adapters import exchange, to_4bit
from hf.ways import batch, build
from memory.runs import count_runs
from memory.test_models import saved_bytes, step


def patched(level: str, model_type: str = "llama", change=lambda model: model, **config) -> nn.Module:
    model = copy_of_patched(build, model_type, memory=level, **config)
    torch.manual_seed(1)
    return change(model)


@pytest.fixture
def calls(monkeypatch) -> list[bool]:
    """Return a list that gets an item for each call of a projection in lean+mlp: True if backward recomputes it."""
    are_recomputed, call = [], Block.call

    def watched(self: Block, module: nn.Module, x: Tensor) -> Tensor:
        y = call(self, module, x)
        are_recomputed.append(self.find(y) is not None)
        return y

    monkeypatch.setattr(Block, "call", watched)
    return are_recomputed


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "phi3"])
@pytest.mark.sampled(4)
def test_every_level_saves_less_with_the_same_bits(model_type):
    """lean+mlp does not save gate and up of two layers for 24 tokens. On a CPU nothing is offloaded."""
    models = {level: patched(level, model_type) for level in MEMORY}
    sizes = {level: saved_bytes(model) for level, model in models.items()}
    assert sizes["checkpoint+offload"] == sizes["checkpoint"] < sizes["lean+mlp"]
    assert sizes["lean+mlp"] < sizes["lean"] < sizes["default"]
    assert sizes["lean"] - sizes["lean+mlp"] == 2 * 24 * 2 * 112 * 4
    expected = step(models["default"])
    for level in MEMORY[1:]:
        assert_same_bits(step(models[level]), expected)


@pytest.mark.filterwarnings("ignore:Failed to load CPU gemm_4bit_forward")
@pytest.mark.parametrize("change", [with_lora, lambda m: with_lora(exchange(m, to_4bit))], ids=["LoRA", "4 bit + LoRA"])
def test_projections_with_adapters_are_recomputed(change, calls):
    actual, expected = (step(patched(level, change=change)) for level in ("lean+mlp", "default"))
    assert_same_bits(actual, expected)
    assert calls == [True] * 4


def test_projections_with_dropout_are_not_recomputed(calls):
    """A second call would drop other values."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3, init_lora_weights=False)
    results = []
    for level in ("lean+mlp", "default"):
        model = patched(level, change=lambda model: peft.get_peft_model(model, lora))
        torch.manual_seed(2)
        results.append(step(model))
    assert_same_bits(*results)
    assert calls == [False] * 4
    step(model_in_eval := patched("lean+mlp", change=lambda model: peft.get_peft_model(model, lora)).eval())
    assert calls[4:] == [True] * 4, model_in_eval


class Counting(nn.Linear):
    """A layer that writes a buffer in each call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def counting(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp.gate_proj = Counting(model.model.layers[1].mlp.gate_proj)
    return model


def with_hook(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda module, args, y: None)
    return model


class Writing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


@pytest.mark.parametrize("change", [counting, with_hook], ids=["writes a buffer", "has a hook"])
def test_modules_with_side_effects_are_called_once(change, calls):
    lean, default = (patched(level, change=change) for level in ("lean+mlp", "default"))
    assert_same_bits(step(lean), step(default))
    assert calls == [True, True, False, True]
    if change is counting:
        assert lean.model.layers[1].mlp.gate_proj.calls == 1


def test_modules_that_write_or_return_their_input_are_not_recomputed():
    x = torch.randn(3, 8, requires_grad=True)
    with tigon.lean(mlp=True):
        for module in (Writing(8, 8), nn.Identity()):
            y = memory.call_projection(module, x * 2)
            assert memory._block().find(y) is None
        assert memory._block().find(memory.call_projection(nn.Linear(8, 8), x * 2)) is not None


class Watched(nn.Linear):
    """A linear layer that records which of its outputs are alive."""

    # Backward never calls a user's layer that writes to a list. A layer of torch is assumed to be pure.
    __module__ = "torch.nn.watched"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight, self.outputs = linear.weight, []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        return y

    def live(self) -> int:
        return sum(not storage.expired() for storage in self.outputs)


def test_gate_and_up_are_freed_after_their_last_use():
    """The last product needs gate * up, and the backward of the gate needs gate and up."""
    model, live_outputs = patched("lean+mlp", num_hidden_layers=1), []
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = children = [Watched(child) for child in (mlp.gate_proj, mlp.up_proj)]
    record_live = lambda parameter: live_outputs.append([child.live() for child in children])
    mlp.down_proj.weight.register_post_accumulate_grad_hook(record_live)
    for child in children:
        child.weight.register_post_accumulate_grad_hook(record_live)
    loss = model(**batch(0)).loss
    record_live(None)
    loss.backward()
    record_live(None)
    assert live_outputs == [[0, 0], [1, 1], [0, 0], [0, 0], [0, 0]]
    assert [len(child.outputs) for child in children] == [2, 2]


def test_ops_see_the_options_of_the_innermost_block():
    options = lambda: (memory.is_lean(), memory.recomputes_mlp())
    assert options() == (False, False)
    with tigon.lean():
        assert options() == (True, False)
        with tigon.lean(mlp=True):
            assert options() == (True, True)
            with tigon.lean():
                assert options() == (True, True)
        assert options() == (True, False)
        with torch.autograd.graph.save_on_cpu():
            assert options() == (False, False)
    with pytest.raises(KeyError), tigon.lean(mlp=True):
        raise KeyError
    assert options() == (False, False)


def test_options_are_bools():
    with pytest.raises(TypeError, match="lean: mlp must be True or False, got 'yes'"), tigon.lean(mlp="yes"):
        pass


@pytest.fixture(scope="module")
def compiled():
    """Return run(level, layers): the loss and the gradients of a compiled model, and the bytes that the model saves.

    The second step must not compile anything.
    """

    def run(level: str, layers: int) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        model = patched(level, num_hidden_layers=layers, use_cache=False)
        model = torch.compile(model, fullgraph=True, backend="aot_eager")
        step(model)
        with torch._dynamo.config.patch(error_on_recompile=True):
            results = step(model)
        size = saved_bytes(model)
        torch._dynamo.reset()
        return results, size

    return functools.cache(run)


@pytest.mark.thorough
@pytest.mark.parametrize(("level", "most"), [("lean", 0.9), ("lean+mlp", 0.8), ("checkpoint", 0.8)])
def test_compiled(compiled, level, most):
    # The last layer is not checkpointed.
    layers = 2 if level == "checkpoint" else 1
    results, size = compiled(level, layers)
    expected, default = compiled("default", layers)
    assert size < most * default
    assert_same_bits(results, expected)


def attributes(model: nn.Module) -> dict:
    return {name: dict(vars(m)) for name, m in model.named_modules()}


@pytest.mark.parametrize("level", MEMORY[1:])
@pytest.mark.sampled(2)
def test_restore_undoes_every_change(level):
    model = build("llama")
    before = attributes(model)
    report = tigon.patch(model, memory=level)
    assert any(note.startswith(f"{level}: ") for note in report.notes)
    tigon.patch(model, memory=level).restore()
    assert saved_bytes(model) == saved_bytes(patched(level))
    report.restore()
    assert attributes(model) == before
    with tigon.patched(model, memory=level):
        assert attributes(model) != before
    assert attributes(model) == before


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("level", ["lean", "lean+mlp", "checkpoint+attention"])
def test_copies_have_the_level_of_the_model(level, duplicate):
    model = patched(level)
    assert saved_bytes(duplicate(model)) == saved_bytes(model)


@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen2_moe", marks=pytest.mark.thorough)])
def test_the_last_layer_of_a_checkpointed_model_runs_once(model_type):
    """The last layer is lean. Like the other layers it writes no cache."""
    model = patched("checkpoint", model_type, num_hidden_layers=3)
    runs = [count_runs(layer) for layer in model.model.layers]
    output = model(**batch(0), use_cache=True)
    output.loss.backward()
    assert [len(run) for run in runs] == [2, 2, 1]
    assert output.past_key_values is None


def list_checkpointed(model: nn.Module) -> list[bool]:
    """Return an item for each layer that supports checkpointing: True if the layer runs twice."""
    layers = [m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func") and "Layer" in type(m).__name__]
    return [type(layer._gradient_checkpointing_func) is not LayerCall for layer in layers]


def test_the_last_layer_runs_twice_if_it_is_small_or_not_unique():
    several, large = build("llama", num_hidden_layers=3), build("llama", num_hidden_layers=3, vocab_size=8000)
    several.model.more = nn.ModuleList([copy.deepcopy(several.model.layers[0])])
    notes = [tigon.patch(model, memory="checkpoint").notes[0] for model in (several, large)]
    assert list_checkpointed(several) == [True] * 4
    # The layers are small in comparison with this vocabulary.
    assert list_checkpointed(large) == [True] * 3
    assert not any("except the last" in note for note in notes)
    assert "checkpoint: layers except the last save" in tigon.patch(build("llama"), memory="checkpoint").notes[0]


def test_the_last_layer_of_the_decoder_runs_once():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 64, "num_layers": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).train()
    tigon.patch(model, memory="checkpoint")
    blocks = [*model.encoder.block, *model.decoder.block]
    runs_once = [type(block._gradient_checkpointing_func) is LayerCall for block in blocks]
    assert runs_once == [False, False, False, True]


def test_unsupported_levels_are_refused(monkeypatch):
    plain = nn.Sequential(tigon.RMSNorm(8), nn.Linear(8, 8))
    message = "memory='checkpoint' is not possible for this Sequential: it is not a transformers model.*'lean[+]mlp'"
    with pytest.raises(ValueError, match=message):
        tigon.patch(plain, memory="checkpoint")
    model = build("llama")
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    before = attributes(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM does not support gradient checkpointing.*: 'default', "):
        tigon.patch(model, memory="checkpoint")
    assert attributes(model) == before
    # A level of `lean` is possible as long as the model or its body has the forward of its class.
    for module in (model, model.model):
        module.forward = functools.partial(type(module).forward, module)
    for level in ("lean", "lean+mlp"):
        with pytest.raises(
            ValueError, match=rf"memory='{level.replace('+', '.')}' is not possible .* possible levels: 'default'$"
        ):
            tigon.patch(model, memory=level)
