"""A restored patch leaves nothing behind, and its report says that it was undone."""

import dataclasses
import gc
import importlib.util
import logging
import sys
import types
import weakref

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
from hf.changes import with_adapters  # noqa: E402
from hf.tiny import EXCEPTIONS, tiny_config, tiny_model  # noqa: E402


def assert_restored(report, count=14):
    assert not report
    assert len(report) == 0
    assert report.entries == report.replaced == report.left_alone == []
    assert str(report).splitlines()[0].endswith(f": restored, {count} modules patched before")
    assert "restored" in repr(report)
    rich = pytest.importorskip("rich.console").Console(width=200, record=True)
    rich.print(report)
    assert "restored" in rich.export_text()


@pytest.mark.parametrize("memory", ["default", "lean", "checkpoint"])
def test_a_restored_report_is_false_and_empty(make_model, memory):
    """The end of a block of `patched` restores the report too."""
    with tigon.patched(make_model()) as report:
        assert report
    assert_restored(report)
    model = make_model()
    report = tigon.patch(model, memory=memory)
    assert len(report) == 14
    assert "restored" not in str(report)
    for _ in range(2):
        report.restore()
        assert_restored(report)
        assert report.notes == []
    assert "before restore(): replaced: " in report.why("model.norm")


def test_a_patch_after_a_restored_one_has_its_own_report(make_model):
    model = make_model()
    reports = [tigon.patch(model)]
    reports[0].restore()
    reports.append(tigon.patch(model))
    assert_restored(reports[0])
    assert len(reports[1]) == 14
    # The first patch is undone already, so this does not undo the second one.
    reports[0].restore()
    assert "forward" in vars(model)
    reports[1].restore()
    assert "forward" not in vars(model)


def test_an_interrupted_restore_is_neither_done_nor_undone(make_model):
    model = make_model()
    report = tigon.patch(model)
    causes = [RuntimeError("busy")]

    def fail():
        if causes:
            raise causes.pop()

    report.undo.insert(len(report.undo) // 2, fail)
    with pytest.raises(RuntimeError, match="busy"):
        report.restore()
    assert report
    assert "restore() stopped at an error: call it again" in str(report)
    report.restore()
    assert_restored(report)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_report_of_a_restored_type_says_which_models_stay_patched(make_model):
    with tigon.patched("llama") as report:
        model = make_model()
        assert len(report) == 14
    assert_restored(report)
    assert report.notes == ["models that were built before stay patched"]
    assert "forward" in vars(model)
    second = tigon.patch("llama")
    try:
        assert not tigon.patch("llama").undo
        make_model()
        assert len(second) == 14
        assert_restored(report)
    finally:
        second.restore()


# One model of each kind of architecture, with the options of `tigon.patch` and a change before the patch.
FAMILIES = {
    "gemma": ("gemma2", {}),
    "partial rope": ("glm", {}),
    "experts": ("mixtral", {}),
    "hybrid": ("qwen3_next", {}),
    "adapters": ("llama", {"memory": "lean+mlp"}),
    "fp8 and padding": ("llama", {"fp8": "tensorwise", "pad_to": 16}),
    "checkpoint and accuracy": ("llama", {"memory": "checkpoint+attention", "return_token_accuracy": True}),
}
# `make test` runs this one, whose model has adapters beside every kind of module of a dense one.
QUICK = "adapters"
families = pytest.mark.parametrize(
    "family", [name if name == QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES]
)


def own_model(model_type):
    """Return a tiny model whose classes and functions no other model has: the file of its classes is loaded again."""
    config = tiny_config(transformers.AutoConfig.for_model(model_type), EXCEPTIONS.get(model_type, {}))
    stock = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = f"{stock.__module__}_of_test"
    spec = importlib.util.spec_from_file_location(name, sys.modules[stock.__module__].__file__)
    file = importlib.util.module_from_spec(spec)
    sys.modules[name] = file
    try:
        spec.loader.exec_module(file)
    finally:
        del sys.modules[name]
    config._attn_implementation = "eager"
    return file, getattr(file, stock.__name__)(config)


def prepare(family, model):
    return with_adapters(model, init_lora_weights=True) if family == "adapters" else model.train()


def train(model):
    tokens = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(0))
    # Without a cache and a mask, transformers checks whether the batch is packed.
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    with torch.no_grad():
        model.eval()(input_ids=tokens)
    model.train().zero_grad()


def references(file, model):
    """Return weak references to all objects of a model, and to the classes and functions of its file, by name."""
    objects = {name: value for name, value in vars(file).items() if isinstance(value, (type, types.FunctionType))}
    objects = {name: value for name, value in objects.items() if value.__module__ == file.__name__}
    for name, cls in [*objects.items()]:
        if isinstance(cls, type):
            functions = {key: value for key, value in vars(cls).items() if isinstance(value, types.FunctionType)}
            objects |= {f"{name}.{key}": value for key, value in functions.items()}
    for name, module in model.named_modules():
        objects[f"module {name}"] = module
    for name, parameter in model.named_parameters():
        objects[f"parameter {name}"] = parameter
    return {name: weakref.ref(value) for name, value in objects.items()}


def names_of_survivors(family, patches):
    """Train a model, delete it, and return the names of its objects that are still alive."""
    # pytest keeps records of logs. A traceback in one would keep the model.
    logging.disable()
    # transformers registers classes by name.
    capturing = importlib.import_module("transformers.utils.output_capturing")
    registry = dict(capturing._CAN_RECORD_REGISTRY)
    model_type, options = FAMILIES[family]
    file, model = own_model(model_type)
    model = prepare(family, model)
    alive = references(file, model)
    report = tigon.patch(model, **options) if patches else None
    train(model)
    if report is not None:
        assert report
        report.restore()
    del file, model, report
    logging.disable(logging.NOTSET)
    capturing._CAN_RECORD_REGISTRY.clear()
    capturing._CAN_RECORD_REGISTRY.update(registry)
    gc.collect()
    assert len(alive) > 50
    return {name for name, reference in alive.items() if reference() is not None}


@pytest.mark.probes
@families
def test_nothing_lives_longer_than_the_model(family):
    """transformers itself keeps a function or two of some files."""
    assert names_of_survivors(family, patches=True) == names_of_survivors(family, patches=False)


def own_projection(make_model):
    """A projection whose settings refer back to it: the state that its forward reads holds its weight."""

    class Made(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.settings.scale

    model = make_model()
    model.model.layers[0].mlp.gate_proj = made = Made(64, 112, bias=False)
    made.settings = types.SimpleNamespace(scale=1.0, layer=made)
    return model, [Made, made, made.weight, Made.forward]


def own_output(make_model):
    """An output class, which gets a subclass with the field `token_accuracy`. transformers keeps it in any case."""

    @dataclasses.dataclass
    class Made(transformers.modeling_outputs.CausalLMOutputWithPast):
        pass

    class Model(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return Made(**super().forward(*args, **kwargs))

    model = make_model()
    model.__class__ = Model
    return model, [Model, Model.forward]


def own_transposed_layer(make_model):
    """A layer that multiplies by a transposed weight, which is recognised once for each class."""

    class Made(transformers.pytorch_utils.Conv1D):
        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)

    model = make_model("gpt2", resid_pdrop=0.0)
    for module in model.modules():
        if type(module) is transformers.pytorch_utils.Conv1D:
            module.__class__ = Made
    return model, [Made, Made.forward]


@pytest.mark.probes
@pytest.mark.parametrize("build", [own_projection, own_output, own_transposed_layer])
def test_classes_of_the_user_are_freed(make_model, build):
    model, objects = build(make_model)
    alive = [weakref.ref(each) for each in (*objects, model)]
    report = tigon.patch(model, memory="lean+mlp", return_token_accuracy=True)
    train(model)
    assert report
    report.restore()
    del model, objects, report
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


def test_all_models_share_the_output_classes_with_an_accuracy(make_model):
    model, _ = own_output(make_model)
    tokens, classes = torch.ones(1, 4, dtype=torch.int64), []
    for _ in range(2):
        with tigon.patched(model, return_token_accuracy=True):
            outputs = model(input_ids=tokens, labels=tokens)
        assert outputs.token_accuracy is not None
        classes.append(type(outputs))
    assert classes[0] is classes[1]
    assert classes[0].__base__.__subclasses__() == classes[:1]


def state_of_model(model):
    """Return all attributes of all modules, also the contents of their tables of hooks and children."""
    state = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            state[name, key] = [*value.items()] if isinstance(value, dict) else value
    return state


def state_of_process(model):
    """Return the attributes of the classes of a model, and the globals of all packages that a patch could change."""
    owners = [cls for module in model.modules() for cls in type(module).__mro__ if cls is not object]
    packages = {"transformers", "torch", "peft", "accelerate"}
    owners += [module for name, module in [*sys.modules.items()] if name.partition(".")[0] in packages]
    return {owner: dict(vars(owner)) for owner in owners if hasattr(owner, "__dict__")}


def belongs_to_tigon(value):
    module = getattr(value, "__module__", None) if isinstance(value, types.FunctionType) else type(value).__module__
    return isinstance(module, str) and module.partition(".")[0] == "tigon"


def sizes_of_caches():
    """Return the number of entries of every container that is a global of Tigon or belongs to a decorated function."""
    sizes = {}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] != "tigon" or module is None:
            continue
        for key, value in vars(module).items():
            values = [value]
            if isinstance(value, types.FunctionType):
                values = [cell.cell_contents for cell in value.__closure__ or ()]
            for each in values:
                if isinstance(each, (dict, list, set, weakref.WeakKeyDictionary, weakref.WeakSet)):
                    inner = [len(v) for v in each.values() if isinstance(v, dict)] if hasattr(each, "values") else []
                    sizes[name, key] = len(each), sum(inner)
                elif callable(getattr(each, "cache_info", None)) and not isinstance(each, type):
                    sizes[name, key] = each.cache_info().currsize
    return sizes


@pytest.mark.probes
@families
def test_restore_leaves_every_attribute_and_global_as_before(family):
    model_type, options = FAMILIES[family]
    model = prepare(family, tiny_model(model_type))
    train(model)
    model_before, process_before = state_of_model(model), state_of_process(model)
    sizes = []
    for _ in range(2):
        report = tigon.patch(model, **options)
        train(model)
        report.restore()
        gc.collect()
        sizes.append(sizes_of_caches())
    assert state_of_model(model) == model_before
    for owner, before in process_before.items():
        now = vars(owner)
        # torch fills some globals, which are None, when they are first used.
        changed = [key for key, value in before.items() if value is not None and now.get(key, owner) is not value]
        # torch counts with this global how often it begins to describe tensors for fake tensors.
        assert [key for key in changed if key != "DESCRIBER_NEXT_ID"] == [], owner
        # A module of Python may have been imported by the patch.
        assert [key for key in now.keys() - before.keys() if not isinstance(now[key], types.ModuleType)] == [], owner
        # An earlier test may have left an object there.
        assert [key for key, value in now.items() if belongs_to_tigon(value)] == [], owner
    # A second patch of the same model adds no entry to any cache.
    assert sizes[0] == sizes[1]
