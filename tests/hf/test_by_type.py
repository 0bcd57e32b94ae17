"""`tigon.patch("llama")` patches the models of this type that are built later, and no others."""

import copy
import gc
import pickle
import sys
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import tigon
from tigon.hf.logits import SKIPPED_LOGITS
from tigon.recognition.replacement import find_replacement

transformers = pytest.importorskip("transformers")

SIZE = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "pad_token_id": 0,
}


def is_patched(model: nn.Module) -> bool:
    return any(find_replacement(module) for module in model.modules())


@pytest.fixture
def patch_type():
    """Return `tigon.patch` for types. The end of the test undoes the patches."""
    reports = []

    def patch(model_type: str, **options) -> tigon.hf.Report:
        reports.append(tigon.patch(model_type, **options))
        return reports[-1]

    yield patch
    for report in reports:
        report.restore()


@pytest.fixture
def saved_model(make_model, tmp_path):
    """Return the folder of a saved model whose head is tied to its embeddings."""
    make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    return tmp_path


CONSTRUCTORS = {
    "class": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)),
    "from_config": lambda: transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZE)),
    "body": lambda: transformers.AutoModel.from_config(transformers.LlamaConfig(**SIZE)),
    "classifier": lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZE)),
}


# --- models that are built after the patch -------------------------------------------------------


@pytest.mark.parametrize("build", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_every_constructor_returns_a_patched_model(patch_type, build):
    direct = build()
    tigon.patch(direct)
    patch_type("llama")
    patched = lambda model: {name for name, module in model.named_modules() if find_replacement(module)}
    assert patched(build()) == patched(direct) != set()


@pytest.mark.sampled(2)
def test_the_model_is_equal_to_one_that_is_patched_directly(patch_type, make_model, model_type, batch, step):
    direct = make_model(model_type)
    tigon.patch(direct)
    patch_type(model_type)
    model = make_model(model_type)
    assert is_patched(model)
    actual, expected = step(model, batch), step(direct, batch)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_training_gives_the_results_of_stock(patch_type, make_model, batch, assert_same_step):
    stock = make_model()
    patch_type("llama")
    assert_same_step(make_model(), stock, batch)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}], ids=str)
def test_from_pretrained_patches_after_the_weights_are_loaded(saved_model, patch_type, batch, step, options):
    direct = transformers.AutoModelForCausalLM.from_pretrained(saved_model, **options).train()
    tigon.patch(direct)
    patch_type("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(saved_model, **options).train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    outputs = model(**batch)
    assert outputs.logits is SKIPPED_LOGITS
    actual, expected = step(model, batch), step(direct, batch)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize("build", ["from_pretrained", "from_config"])
def test_the_patch_runs_after_the_constructor_has_restored_all_modes(saved_model, patch_type, monkeypatch, build):
    """The weights are loaded, and the default device and dtype are those of the user again."""
    states = []
    module = sys.modules["tigon.hf.patch"]

    def patch_instance(model: nn.Module, **options) -> tigon.hf.Report:
        devices = {tensor.device.type for tensor in (torch.empty(0), *model.parameters())}
        states.append((devices, torch.get_default_dtype(), model.lm_head.weight is model.model.embed_tokens.weight))
        return original(model, **options)

    original = module._patch_instance
    monkeypatch.setattr(module, "_patch_instance", patch_instance)
    patch_type("llama")
    if build == "from_pretrained":
        transformers.AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.bfloat16)
    else:
        config = transformers.LlamaConfig(**SIZE, tie_word_embeddings=True)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert states == [({"cpu"}, torch.float32, True)]


def test_from_pretrained_with_loading_info_is_patched(saved_model, patch_type):
    patch_type("llama")
    model, info = transformers.LlamaForCausalLM.from_pretrained(saved_model, output_loading_info=True)
    assert is_patched(model)
    assert not info["missing_keys"]


def test_the_options_of_patch_apply(patch_type):
    patch_type("llama", loss=False, rope=False, fused_statements=False)
    model = CONSTRUCTORS["class"]()
    assert find_replacement(model.model.norm)
    assert not find_replacement(model)
    assert not find_replacement(model.model.layers[0].self_attn)


def test_a_model_inside_another_model_is_patched(patch_type):
    patch_type("llama")
    text = transformers.LlamaConfig(**SIZE)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(text_config=text, vision_config={**vision, "model_type": "clip_vision_model"})
    model = transformers.LlavaForConditionalGeneration(config)
    assert is_patched(model.model.language_model)
    assert not is_patched(model.model.vision_tower)


class DerivedModel(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(2, 2)


def test_a_derived_class_is_patched(patch_type, saved_model):
    patch_type("llama")
    assert is_patched(DerivedModel(transformers.LlamaConfig(**SIZE)))
    assert is_patched(DerivedModel.from_pretrained(saved_model))


def test_a_model_that_is_built_in_a_thread_is_patched(patch_type):
    patch_type("llama")
    models = []
    thread = threading.Thread(target=lambda: models.append(CONSTRUCTORS["class"]()))
    thread.start()
    thread.join()
    assert is_patched(models[0])


def test_the_next_model_is_patched_after_a_constructor_failed(patch_type):
    patch_type("llama")
    with pytest.raises(TypeError):
        transformers.LlamaForCausalLM("no config")
    assert is_patched(CONSTRUCTORS["class"]())


@pytest.mark.parametrize("end", ["active", "restored"])
def test_copies_and_pickles_are_patched(patch_type, end, batch, step):
    report = patch_type("llama")
    model = CONSTRUCTORS["class"]().train()
    if end == "restored":
        report.restore()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        actual, expected = step(other, batch), step(model, batch)
        assert is_patched(other)
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


# --- models that stay stock ----------------------------------------------------------------------


def test_a_model_that_was_built_before_stays_stock(patch_type):
    before = CONSTRUCTORS["class"]()
    patch_type("llama")
    CONSTRUCTORS["class"]()
    assert not is_patched(before)


def test_other_types_stay_stock(patch_type, make_model):
    patch_type("llama")
    assert not any(is_patched(make_model(model_type)) for model_type in ("mistral", "qwen3", "gemma2"))


def test_a_type_derived_from_a_patched_type_stays_stock(patch_type):
    class OtherConfig(transformers.LlamaConfig):
        model_type = "other_llama"

    class Other(transformers.LlamaForCausalLM):
        config_class = OtherConfig

    patch_type("llama")
    assert not is_patched(Other(OtherConfig(**SIZE)))


def classes() -> dict[type, dict]:
    """Return the attributes of every model class of transformers."""
    models = [transformers.PreTrainedModel]
    for cls in models:
        models += [subclass for subclass in cls.__subclasses__() if subclass not in models]
    return {cls: dict(vars(cls)) for cls in models}


def test_restore_returns_the_classes_to_their_state_before(patch_type):
    # transformers stores results on a class when its first model is built.
    CONSTRUCTORS["class"]()
    before = classes()
    report = patch_type("llama")
    assert classes()[transformers.LlamaForCausalLM] != before[transformers.LlamaForCausalLM]
    model = CONSTRUCTORS["class"]()
    report.restore()
    after = classes()
    # The cache of subclasses in module abc may have changed.
    assert all(
        after[cls] == {**before[cls], "_abc_impl": after[cls].get("_abc_impl")} or after[cls] == before[cls]
        for cls in before
    )
    assert not is_patched(CONSTRUCTORS["class"]())
    # The model stays patched, as after tigon.patch(model).
    assert is_patched(model)
    # A second call does nothing.
    report.restore()
    assert not is_patched(CONSTRUCTORS["class"]())


def test_restore_inside_a_wrapper_of_other_code(patch_type, monkeypatch):
    """The wrapper stays, and Tigon's constructor inside of it no longer patches."""
    report = patch_type("llama")
    patching_init = transformers.LlamaForCausalLM.__init__
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", lambda self, *args: patching_init(self, *args))
    wrapper = transformers.LlamaForCausalLM.__init__
    report.restore()
    assert transformers.LlamaForCausalLM.__init__ is wrapper
    assert not is_patched(CONSTRUCTORS["class"]())


def test_a_context_patches_the_models_of_its_block():
    with tigon.patched("llama") as report:
        model = CONSTRUCTORS["class"]()
        assert report
    assert is_patched(model)
    assert not is_patched(CONSTRUCTORS["class"]())


def test_a_context_ends_after_an_error():
    with pytest.raises(KeyError), tigon.patched("llama"):
        raise KeyError
    assert not is_patched(CONSTRUCTORS["class"]())


def test_two_types_can_be_patched_at_once(patch_type, make_model):
    first = patch_type("llama")
    patch_type("qwen3")
    assert is_patched(make_model("llama"))
    assert is_patched(make_model("qwen3"))
    first.restore()
    assert not is_patched(make_model("llama"))
    assert is_patched(make_model("qwen3"))


# --- the report ----------------------------------------------------------------------------------


def test_the_report_describes_the_last_model(patch_type):
    report = patch_type("llama")
    assert not report
    assert "every new llama: none built yet" in str(report)
    assert "until restore()" in str(report)
    CONSTRUCTORS["class"]()
    assert {entry.part for entry in report.replaced} == {"rms_norm", "glu", "rope", "fused_statements", "loss"}
    assert "every new llama, the last a LlamaForCausalLM" in str(report)
    assert len(report) == 5 + 2 + 2 + 4 + 1
    CONSTRUCTORS["body"]()
    assert {entry.part for entry in report.replaced} == {"rms_norm", "glu", "rope", "fused_statements"}


def test_the_report_holds_no_reference_to_a_model(patch_type):
    report = patch_type("llama")
    model = weakref.ref(CONSTRUCTORS["class"]())
    gc.collect()
    assert model() is None
    assert report


def test_a_second_patch_of_a_type_changes_nothing_and_adds_a_note(patch_type):
    first = patch_type("llama")
    second = patch_type("llama", loss=False)
    assert "already" in second.notes[0]
    assert "every new llama: nothing patched" in str(second)
    second.restore()
    model = CONSTRUCTORS["class"]()
    # The first patch applies, with its options.
    assert find_replacement(model)
    first.restore()
    assert not is_patched(CONSTRUCTORS["class"]())


def test_a_model_that_was_patched_by_its_type_is_not_patched_again(patch_type):
    patch_type("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = tigon.patch(CONSTRUCTORS["class"]())
    assert not report
    assert "already" in report.notes[0]


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "nearest"), [("lama", "llama"), ("Llama", "llama"), ("qwen-3", "qwen3"), ("", "")]
)
def test_a_string_that_is_no_model_type_is_refused(model_type, nearest):
    with pytest.raises(
        ValueError, match=f"patch: model must be a model type, got {model_type!r}; nearest types of .*: .*{nearest}"
    ):
        tigon.patch(model_type)


def test_a_type_that_is_only_a_part_of_others_is_refused(patch_type):
    if "csm_depth_decoder_model" not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers has no such type")
    with pytest.raises(ValueError, match="part of other models only"):
        patch_type("csm_depth_decoder_model")


def test_unknown_options_are_refused_before_a_class_changes():
    before = classes()[transformers.LlamaForCausalLM]
    with pytest.raises(TypeError, match="unknown option 'nonsense'"):
        tigon.patch("llama", nonsense=True)
    assert classes()[transformers.LlamaForCausalLM] == before
