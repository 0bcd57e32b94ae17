"""`tigon.patch("llama")`: what is built from then on is patched, and nothing else is."""

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
    """tigon.patch, undone at the end of the test."""
    reports = []

    def patch(model_type: str, **options) -> tigon.hf.Report:
        reports.append(tigon.patch(model_type, **options))
        return reports[-1]

    yield patch
    for report in reports:
        report.restore()


@pytest.fixture
def saved(make_model, tmp_path):
    """Folder of a saved model whose head is tied to its embeddings."""
    make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    return tmp_path


WAYS = {
    "class": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)),
    "from_config": lambda: transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZE)),
    "body": lambda: transformers.AutoModel.from_config(transformers.LlamaConfig(**SIZE)),
    "classifier": lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZE)),
}


# --- what is built from then on ------------------------------------------------------------------


@pytest.mark.parametrize("build", WAYS.values(), ids=WAYS)
def test_whatever_way_it_is_built(patch_type, build):
    by_hand = build()
    tigon.patch(by_hand)
    patch_type("llama")
    patched = lambda model: {name for name, module in model.named_modules() if find_replacement(module)}
    assert patched(build()) == patched(by_hand) != set()


def test_as_if_patched_by_hand(patch_type, make_model, model_type, batch, step):
    by_hand = make_model(model_type)
    tigon.patch(by_hand)
    patch_type(model_type)
    model = make_model(model_type)
    assert is_patched(model)
    given, expected = step(model, batch), step(by_hand, batch)
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], value) for name, value in expected.items())


def test_training_is_stock(patch_type, make_model, batch, assert_same_step):
    stock = make_model()
    patch_type("llama")
    assert_same_step(make_model(), stock, batch)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}], ids=str)
def test_from_pretrained_is_patched_when_its_weights_are_there(saved, patch_type, batch, step, options):
    by_hand = transformers.AutoModelForCausalLM.from_pretrained(saved, **options).train()
    tigon.patch(by_hand)
    patch_type("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, **options).train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    outputs = model(**batch)
    assert outputs.logits is SKIPPED_LOGITS  # fused
    given, expected = step(model, batch), step(by_hand, batch)
    assert all(torch.equal(given[name], value) for name, value in expected.items())


@pytest.mark.parametrize("build", ["from_pretrained", "from_config"])
def test_patched_outside_of_what_building_changes(saved, patch_type, monkeypatch, build):
    """Weights on their way, meta as the default device and another default dtype are over when it is patched."""
    seen = []
    module = sys.modules["tigon.hf.patch"]

    def patch(model: nn.Module, **options) -> tigon.hf.Report:
        devices = {tensor.device.type for tensor in (torch.empty(0), *model.parameters())}
        seen.append((devices, torch.get_default_dtype(), model.lm_head.weight is model.model.embed_tokens.weight))
        return original(model, **options)

    original = module.patch
    monkeypatch.setattr(module, "patch", patch)
    patch_type("llama")
    if build == "from_pretrained":
        transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    else:
        config = transformers.LlamaConfig(**SIZE, tie_word_embeddings=True)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert seen == [({"cpu"}, torch.float32, True)]


def test_from_pretrained_with_loading_info(saved, patch_type):
    patch_type("llama")
    model, info = transformers.LlamaForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert is_patched(model)
    assert not info["missing_keys"]


def test_options_are_those_of_patch(patch_type):
    patch_type("llama", loss=False, rope=False, fused_statements=False)
    model = WAYS["class"]()
    assert find_replacement(model.model.norm)
    assert not find_replacement(model)
    assert not find_replacement(model.model.layers[0].self_attn)


def test_a_model_within_a_model(patch_type):
    patch_type("llama")
    text = transformers.LlamaConfig(**SIZE)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(text_config=text, vision_config={**vision, "model_type": "clip_vision_model"})
    model = transformers.LlavaForConditionalGeneration(config)
    assert is_patched(model.model.language_model)
    assert not is_patched(model.model.vision_tower)


class Mine(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(2, 2)


def test_a_class_derived_from_one_of_the_type(patch_type, saved):
    patch_type("llama")
    assert is_patched(Mine(transformers.LlamaConfig(**SIZE)))
    assert is_patched(Mine.from_pretrained(saved))


def test_in_a_thread(patch_type):
    patch_type("llama")
    built = []
    thread = threading.Thread(target=lambda: built.append(WAYS["class"]()))
    thread.start()
    thread.join()
    assert is_patched(built[0])


def test_a_constructor_that_fails_leaves_the_next_as_it_should_be(patch_type):
    patch_type("llama")
    with pytest.raises(TypeError):
        transformers.LlamaForCausalLM("no config")
    assert is_patched(WAYS["class"]())


@pytest.mark.parametrize("end", ["active", "restored"])
def test_copies_and_pickles_are_patched(patch_type, end, batch, step):
    report = patch_type("llama")
    model = WAYS["class"]().train()
    if end == "restored":
        report.restore()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        given, expected = step(other, batch), step(model, batch)
        assert is_patched(other)
        assert all(torch.equal(given[name], value) for name, value in expected.items())


# --- and nothing else ----------------------------------------------------------------------------


def test_what_was_built_before_stays_stock(patch_type):
    before = WAYS["class"]()
    patch_type("llama")
    WAYS["class"]()
    assert not is_patched(before)


def test_other_types_stay_stock(patch_type, make_model, model_type):
    patch_type("llama" if model_type != "llama" else "qwen3")
    assert not is_patched(make_model(model_type))


def test_a_type_derived_from_it_stays_stock(patch_type):
    class OtherConfig(transformers.LlamaConfig):
        model_type = "other_llama"

    class Other(transformers.LlamaForCausalLM):
        config_class = OtherConfig

    patch_type("llama")
    assert not is_patched(Other(OtherConfig(**SIZE)))


def classes() -> dict[type, dict]:
    found = [transformers.PreTrainedModel]
    for cls in found:
        found += [sub for sub in cls.__subclasses__() if sub not in found]
    return {cls: dict(vars(cls)) for cls in found}


def test_restore_leaves_the_classes_as_they_were(patch_type):
    # transformers stores results on a class when its first model is built.
    WAYS["class"]()
    before = classes()
    report = patch_type("llama")
    assert classes()[transformers.LlamaForCausalLM] != before[transformers.LlamaForCausalLM]
    model = WAYS["class"]()
    report.restore()
    after = classes()
    # abc's cache of what is a subclass of what may have grown
    assert all(
        after[cls] == {**before[cls], "_abc_impl": after[cls].get("_abc_impl")} or after[cls] == before[cls]
        for cls in before
    )
    assert not is_patched(WAYS["class"]())
    assert is_patched(model)  # the model's own, as after tigon.patch(model)
    report.restore()  # a second time does nothing
    assert not is_patched(WAYS["class"]())


def test_restore_under_somebody_elses_wrapper(patch_type, monkeypatch):
    """Their wrapper stays; ours in it does nothing any more."""
    report = patch_type("llama")
    ours = transformers.LlamaForCausalLM.__init__
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", lambda self, *args: ours(self, *args))
    theirs = transformers.LlamaForCausalLM.__init__
    report.restore()
    assert transformers.LlamaForCausalLM.__init__ is theirs
    assert not is_patched(WAYS["class"]())


def test_as_a_context():
    with tigon.patched("llama") as report:
        model = WAYS["class"]()
        assert report
    assert is_patched(model)
    assert not is_patched(WAYS["class"]())


def test_a_context_that_raises_ends_too():
    with pytest.raises(KeyError), tigon.patched("llama"):
        raise KeyError
    assert not is_patched(WAYS["class"]())


def test_two_types_at_once(patch_type, make_model):
    first = patch_type("llama")
    patch_type("qwen3")
    assert is_patched(make_model("llama"))
    assert is_patched(make_model("qwen3"))
    first.restore()
    assert not is_patched(make_model("llama"))
    assert is_patched(make_model("qwen3"))


# --- the report ----------------------------------------------------------------------------------


def test_the_report_is_filled_by_what_is_built(patch_type):
    report = patch_type("llama")
    assert not report
    assert "every new llama: none built yet" in str(report)
    assert "until restore()" in str(report)
    WAYS["class"]()
    assert {entry.part for entry in report.replaced} == {"rms_norm", "glu", "rope", "fused_statements", "loss"}
    assert "every new llama, the last a LlamaForCausalLM" in str(report)
    assert len(report) == 5 + 2 + 2 + 4 + 1
    WAYS["body"]()
    assert {entry.part for entry in report.replaced} == {"rms_norm", "glu", "rope", "fused_statements"}


def test_the_report_keeps_no_model(patch_type):
    report = patch_type("llama")
    model = weakref.ref(WAYS["class"]())
    gc.collect()
    assert model() is None
    assert report


def test_twice_is_a_no_op_with_a_note(patch_type):
    first = patch_type("llama")
    second = patch_type("llama", loss=False)
    assert "already" in second.notes[0]
    assert "every new llama: nothing patched" in str(second)
    second.restore()
    model = WAYS["class"]()
    assert find_replacement(model)  # by the first, with its options
    first.restore()
    assert not is_patched(WAYS["class"]())


def test_patch_of_a_model_that_was_patched_by_its_type(patch_type):
    patch_type("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = tigon.patch(WAYS["class"]())
    assert not report
    assert "already" in report.notes[0]


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "nearest"), [("lama", "llama"), ("Llama", "llama"), ("qwen-3", "qwen3"), ("", "")])
def test_a_string_that_is_no_model_type(given, nearest):
    with pytest.raises(
        ValueError, match=f"patch: model must be a model type, got {given!r}; nearest types of .*: .*{nearest}"
    ):
        tigon.patch(given)


def test_a_type_that_is_only_a_part(patch_type):
    if "csm_depth_decoder_model" not in transformers.CONFIG_MAPPING:
        pytest.skip("no type of its own in this version")
    with pytest.raises(ValueError, match="part of other models only"):
        patch_type("csm_depth_decoder_model")


def test_unknown_options_are_refused_before_anything_is_touched():
    before = classes()[transformers.LlamaForCausalLM]
    with pytest.raises(TypeError, match="unknown option 'nonsense'"):
        tigon.patch("llama", nonsense=True)
    assert classes()[transformers.LlamaForCausalLM] == before
