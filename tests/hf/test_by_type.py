"""`tigon.patch("llama")` patches the models of this type that are built later, and no others."""

import gc
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

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 131}


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


@pytest.mark.parametrize("build", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_every_constructor_returns_a_patched_model(patch_type, build):
    direct = build()
    tigon.patch(direct)
    patch_type("llama")
    patched = lambda model: {name for name, module in model.named_modules() if find_replacement(module)}
    assert patched(build()) == patched(direct) != set()


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"output_loading_info": True}], ids=str
)
def test_from_pretrained_patches_after_the_weights_are_loaded(saved_model, patch_type, batch, step, options):
    models = []
    for is_direct in (True, False):
        if not is_direct:
            patch_type("llama")
        result = transformers.AutoModelForCausalLM.from_pretrained(saved_model, **options)
        models.append((result[0] if "output_loading_info" in options else result).train())
        if is_direct:
            tigon.patch(models[0])
    direct, model = models
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(**batch).logits is SKIPPED_LOGITS
    actual, expected = step(model, batch), step(direct, batch)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


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


def test_derived_classes_and_models_that_are_built_in_threads_are_patched(patch_type, saved_model):
    patch_type("llama")
    models = [DerivedModel(transformers.LlamaConfig(**SIZE)), DerivedModel.from_pretrained(saved_model)]
    thread = threading.Thread(target=lambda: models.append(CONSTRUCTORS["class"]()))
    thread.start()
    thread.join()
    with pytest.raises(TypeError):
        transformers.LlamaForCausalLM("no config")
    # A constructor that failed does not stop the next one.
    models.append(CONSTRUCTORS["class"]())
    assert len(models) == 4
    assert all(map(is_patched, models))


def test_earlier_models_and_other_types_stay_stock(patch_type, make_model):
    class OtherConfig(transformers.LlamaConfig):
        model_type = "other_llama"

    class Other(transformers.LlamaForCausalLM):
        config_class = OtherConfig

    before = CONSTRUCTORS["class"]()
    first = patch_type("llama")
    assert is_patched(CONSTRUCTORS["class"]())
    assert not any(map(is_patched, (before, make_model("mistral"), make_model("qwen3"), Other(OtherConfig(**SIZE)))))
    patch_type("qwen3")
    first.restore()
    assert is_patched(make_model("qwen3"))
    assert not is_patched(make_model("llama"))


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


def test_a_context_patches_the_models_of_its_block_and_ends_after_an_error():
    models = []

    def fail_in_a_block():
        with tigon.patched("llama") as report:
            models.append(CONSTRUCTORS["class"]())
            assert report
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_a_block()
    assert [is_patched(model) for model in (*models, CONSTRUCTORS["class"]())] == [True, False]


def test_the_report_describes_the_last_model_and_keeps_none(patch_type):
    report = patch_type("llama")
    assert not report
    assert "every new llama: none built yet" in str(report)
    assert "until restore()" in str(report)
    model = weakref.ref(CONSTRUCTORS["class"]())
    assert {entry.part for entry in report.replaced} == {"rms_norm", "glu", "rope", "fused_statements", "loss"}
    assert "every new llama, the last a LlamaForCausalLM" in str(report)
    assert len(report) == 5 + 2 + 2 + 4 + 1
    CONSTRUCTORS["body"]()
    assert {entry.part for entry in report.replaced} == {"rms_norm", "glu", "rope", "fused_statements"}
    gc.collect()
    assert model() is None


def test_second_patches_change_nothing_and_add_a_note(patch_type):
    first = patch_type("llama")
    second = patch_type("llama", loss=False)
    assert "already" in second.notes[0]
    assert "every new llama: nothing patched" in str(second)
    second.restore()
    # The first patch applies, with its options.
    model = CONSTRUCTORS["class"]()
    assert find_replacement(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = tigon.patch(model)
    assert not third
    assert "already" in third.notes[0]
    first.restore()
    assert not is_patched(CONSTRUCTORS["class"]())


@pytest.mark.parametrize(
    ("model_type", "options", "error", "message"),
    [
        *((name, {}, ValueError, f"model must be a model type, got {name!r}; nearest types of .*: .*{nearest}")
          for name, nearest in (("lama", "llama"), ("Llama", "llama"), ("qwen-3", "qwen3"), ("", ""))),
        ("csm_depth_decoder_model", {}, ValueError, "part of other models only"),
        ("llama", {"nonsense": True}, TypeError, "unknown option 'nonsense'"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_a_class_changes(model_type, options, error, message):
    if model_type.startswith("csm") and model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers has no such type")
    before = classes()[transformers.LlamaForCausalLM]
    with pytest.raises(error, match=f"patch: .*{message}"):
        tigon.patch(model_type, **options)
    assert classes()[transformers.LlamaForCausalLM] == before
