"""A model keeps its memory level when other code switches checkpointing, and its tokens are those of stock."""

import gc
import warnings
import weakref

import pytest
import torch

import tigon
from hf.changes import COPIES, with_adapters
from memory.runs import count_runs
from tigon.hf.transformers_private import SWITCH_SETTER, checkpoint_function, has_checkpoint_switch
from tigon.memory.lean import is_lean, recomputes_mlp
from tigon.recognition.replacement import find_replacement

transformers = pytest.importorskip("transformers")

LAYERS = 3


def runs_of_layers(model, batch) -> list[int]:
    """Return how often each layer runs in a training step."""
    counts = [count_runs(layer) for layer in layers_of(model)]
    model(**batch).loss.backward()
    return [len(count) for count in counts]


def layers_of(model):
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))


def level_line(report) -> str:
    """Return the line of the printed report that is about the memory level; "" without one."""
    notes = [line.removeprefix("note: ") for line in str(report).splitlines() if line.startswith("note: ")]
    return next((note for note in notes if "checkpoint" in note or "lean" in note), "")


def prepare_for_kbit_training(model):
    peft = pytest.importorskip("peft")
    model.is_loaded_in_4bit = True
    peft.prepare_model_for_kbit_training(model)
    for p in model.parameters():
        p.requires_grad_()


def train_one_step(model, batch, folder, **options):
    options = transformers.TrainingArguments(
        str(folder), max_steps=1, learning_rate=0.0, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        gradient_checkpointing=True, **options,
    )  # fmt: skip
    rows = [{name: value[0] for name, value in batch.items()}] * 2
    transformers.Trainer(model, options, train_dataset=rows).train()
    model.zero_grad()


# Each function switches checkpointing on, after the patch.
WAYS = {
    "enable": lambda model, *_: model.gradient_checkpointing_enable(),
    "enable of the body": lambda model, *_: model.model.gradient_checkpointing_enable(),
    "enable with adapters": lambda model, *_: with_adapters(model, r=2).gradient_checkpointing_enable(
        {"use_reentrant": False}
    ),
    "a Trainer": train_one_step,
    "prepare_model_for_kbit_training": lambda model, *_: prepare_for_kbit_training(model),
}


@pytest.mark.parametrize(
    ("memory", "way"), [("checkpoint+attention:1+offload:1", "enable"), *(("checkpoint", way) for way in WAYS)]
)
def test_a_level_stays_when_checkpointing_is_switched_on(make_model, batch, tmp_path, memory, way):
    pytest.importorskip("accelerate")
    model = make_model(num_hidden_layers=LAYERS)
    report = tigon.patch(model, memory=memory)
    expected, line = runs_of_layers(model, batch), level_line(report)
    assert expected == [2] * (LAYERS - 1) + [1]
    assert line.startswith(f"{memory}: layers except the last save only their input")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="tigon")
        model.gradient_checkpointing_disable()
        WAYS[way](model, batch, tmp_path)
    assert runs_of_layers(model, batch) == expected
    assert level_line(report) == line
    places = {str(checkpoint_function(layer).place.memory) for layer in model.model.layers}
    assert places == {memory}


def test_disable_switches_a_level_off_and_the_report_says_so(make_model, batch, assert_same_step):
    """The notes of a report may be removed, and gradients stay those of stock."""
    model = make_model(num_hidden_layers=LAYERS)
    report = tigon.patch(model, memory="checkpoint")
    line = level_line(report)
    assert_same_step(model, make_model(num_hidden_layers=LAYERS), batch)
    report.notes.clear()
    assert str(report).count("note: checkpoint: ") == 1
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    assert runs_of_layers(model, batch) == [1] * LAYERS
    assert level_line(report) == (
        "memory='checkpoint' of this patch is off; gradient_checkpointing_enable() switches it on"
    )
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert level_line(report) == line
    assert_same_step(model, make_model(num_hidden_layers=LAYERS), batch)
    # Other code sets the switches without the methods of transformers.
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    assert level_line(report).startswith(f"transformers checkpoints {LAYERS} layers")
    assert "memory='checkpoint' of this patch is off" in level_line(report)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant=True"),
        ({"gradient_checkpointing_kwargs": {"preserve_rng_state": False}}, "preserve_rng_state=False"),
        ({"every_n_layers": 2}, "every_n_layers=2"),
        ({"offload": True}, "offload=True"),
    ],
    ids=str,
)
def test_a_warning_names_the_settings_that_a_level_ignores(make_model, batch, arguments, setting):
    model = make_model(num_hidden_layers=LAYERS)
    tigon.patch(model, memory="checkpoint")
    with pytest.warns(UserWarning, match=f"'checkpoint' .* ignores these settings: {setting}") as caught:
        model.gradient_checkpointing_enable(**arguments)
    assert [warning.filename for warning in caught if "ignores these settings" in str(warning.message)] != []
    assert runs_of_layers(model, batch) == [2] * (LAYERS - 1) + [1]


def enable(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})


def disable(model):
    model.gradient_checkpointing_disable()


def patch(model, memory="checkpoint"):
    return tigon.patch(model, memory=memory)


def switches_of(model) -> list:
    """Return the state of every switch in a model: whether it is on, and the function that it calls."""
    modules = [(name, m) for name, m in model.named_modules() if has_checkpoint_switch(m)]
    functions = [getattr(checkpoint_function(m), "func", checkpoint_function(m)) for _, m in modules]
    states = [(name, m.gradient_checkpointing, f) for (name, m), f in zip(modules, functions, strict=True)]
    return [*states, *(name for name, m in model.named_modules() if vars(m).get(SWITCH_SETTER) or find_replacement(m))]


@pytest.mark.filterwarnings("ignore:tigon")
@pytest.mark.parametrize("memory", ["checkpoint+attention+offload", "lean+mlp:1"])
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "calls",
    [
        [patch],
        [patch, enable],
        [patch, disable],
        [enable, patch],
        [enable, patch, disable],
        [enable, patch, disable, enable],
        [enable, disable, patch],
        [patch, disable, enable],
    ],
    ids=lambda calls: ", ".join(call.__name__ for call in calls),
)
def test_restore_brings_the_switches_of_stock_back(make_model, calls, memory):
    """Compare with a stock model after the same calls of transformers."""
    model, stock = make_model(), make_model()
    for call in calls:
        if call is patch:
            report = tigon.patch(model, memory=memory)
        else:
            call(model), call(stock)
    report.restore()
    assert switches_of(model) == switches_of(stock)
    for call in (enable, disable, enable):
        call(model), call(stock)
        assert switches_of(model) == switches_of(stock)


@pytest.mark.parametrize("memory", ["lean", "lean+mlp:1"])
def test_checkpointing_with_a_level_of_lean_warns(make_model, batch, memory):
    model = make_model()
    report = tigon.patch(model, memory=memory)
    message = f"so memory='{memory}' has no effect in them".replace("+", "[+]")
    with pytest.warns(UserWarning, match=message):
        enable(model)
    assert level_line(report).startswith(f"{memory}: ")
    assert "transformers checkpoints 2 layers (gradient_checkpointing_enable), so memory=" in level_line(report)
    assert runs_of_layers(model, batch) == [2, 2]
    disable(model)
    assert "transformers checkpoints" not in level_line(report)
    report.restore()
    enable(model)
    with pytest.warns(UserWarning, match=message):
        report = tigon.patch(model, memory=memory)
    assert "transformers checkpoints 2 layers" in level_line(report)


def blocks_of(model, batch) -> tuple[list[int], list[bool], bool]:
    """Return how often each layer runs, and whether the first one runs in `lean` and recomputes its MLP."""
    blocks = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: blocks.append((is_lean(), recomputes_mlp())))
    model(**batch)
    hook.remove()
    counts = runs_of_layers(model, batch)
    return counts, *blocks[0]


@pytest.mark.filterwarnings("ignore:tigon")
@pytest.mark.parametrize(
    "names", [["checkpoint", "lean+mlp"], ["lean+mlp", "checkpoint"], ["lean+mlp:1", "checkpoint"]]
)
def test_a_second_patch_changes_the_level(make_model, batch, names):
    models = {name: make_model() for name in names}
    reports = {name: tigon.patch(model, memory=name) for name, model in models.items()}
    alone = {name: blocks_of(model, batch) for name, model in models.items()}
    first, second = names
    model, report = models[first], reports[first]
    later = tigon.patch(model, memory=second)
    assert blocks_of(model, batch) == alone[second]
    assert level_line(later) == level_line(reports[second])
    assert level_line(report) == (
        f"{level_line(later)}; memory={first!r} of this patch is off, because the level has changed"
    )
    later.restore()
    assert blocks_of(model, batch) == alone[first]
    assert level_line(report).startswith(f"{first}: ")
    report.restore()
    assert switches_of(model) == switches_of(make_model())


@pytest.mark.parametrize("duplicate", [COPIES["deepcopy"], COPIES["pickle"]])
def test_a_copy_keeps_its_own_level(make_model, batch, duplicate):
    """No reference cycle keeps a model with a level."""
    model = make_model(num_hidden_layers=LAYERS)
    tigon.patch(model, memory="checkpoint")
    copied = duplicate(model)
    disable(model)
    copied.gradient_checkpointing_enable()
    assert runs_of_layers(copied, batch) == [2] * (LAYERS - 1) + [1]
    assert runs_of_layers(model, batch) == [1] * LAYERS
    disable(copied)
    assert runs_of_layers(copied, batch) == [1] * LAYERS
    reference = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()
