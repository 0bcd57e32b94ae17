"""The functions of `transformers_private` return known results, and without a private name Tigon raises an error."""

import itertools
import re
import types
from pathlib import Path

import pytest

import tigon
from hf.changes import loss_entry
from tigon.hf import transformers_private

transformers = pytest.importorskip("transformers")


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def model():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()


@pytest.mark.parametrize("missing", ["slot", "loss_type"])
def test_the_loss_is_stock_if_the_choice_of_the_loss_is_unknown(model, monkeypatch, missing):
    if missing == "slot":
        chosen = model.loss_function
        monkeypatch.setattr(transformers.PreTrainedModel, "loss_function", property(lambda self: chosen))
    else:
        del model.loss_type
    assert transformers_private.loss_slot(model) is None
    entry = loss_entry(tigon.patch(model))
    assert not entry.replaced
    assert "in a way that Tigon does not know" in entry.detail


def cut_name(monkeypatch, path: str) -> None:
    """Delete an attribute of a module or of a class of transformers."""
    module, _, name = path.rpartition(".")
    if module == "PreTrainedModel":
        monkeypatch.delattr(transformers.PreTrainedModel, name)
    else:
        monkeypatch.delattr(f"transformers.{path}")


AUTO = "models.auto.modeling_auto"
# The missing name, what needs it, and the name in the message.
REFUSALS = {
    "constructor": ("PreTrainedModel._from_config", lambda: tigon.patch("llama"), "PreTrainedModel._from_config"),
    "mappings": (f"{AUTO}.MODEL_MAPPING", lambda: tigon.patch("llama"), f"{AUTO}.MODEL_MAPPING"),
    "auto class": (
        None, lambda: transformers_private.auto_class_has("AutoModelForCausalLM", transformers.LlamaConfig),
        "AutoModelForCausalLM._model_mapping",
    ),
    "layers": (
        None, lambda: transformers_private.layer_classes(types.SimpleNamespace()), "PreTrainedModel._no_split_modules",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("missing", "use", "name"), REFUSALS.values(), ids=REFUSALS)
def test_missing_names_are_refused_by_name(monkeypatch, missing, use, name):
    if missing is not None:
        cut_name(monkeypatch, missing)
    if "AutoModel" in name:
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "_model_mapping", None)
    with pytest.raises(RuntimeError, match=f"transformers .* has no {re.escape(name)}, which Tigon needs"):
        use()


def test_checkpointing_is_refused_by_name_if_the_model_has_another_switch(model, monkeypatch):
    method, name = "_set_gradient_checkpointing", "_gradient_checkpointing_func"
    monkeypatch.setattr(transformers.PreTrainedModel, method, lambda self, *args, **kwargs: None)
    with pytest.raises(ValueError, match=f"memory='checkpoint' .*transformers .* has no {name} in PreTrainedModel"):
        tigon.patch(model, memory="checkpoint")


def test_the_last_layer_is_checkpointed_too_if_layers_are_not_recognised(model):
    base = next(cls for cls in type(model.model.layers[0]).__mro__ if cls.__name__ == "GradientCheckpointingLayer")
    base.__name__ = "AnotherLayer"
    try:
        assert not transformers_private.is_checkpoint_layer(model.model.layers[0])
        assert "except the last" not in " ".join(tigon.patch(model, memory="checkpoint").notes)
    finally:
        base.__name__ = "GradientCheckpointingLayer"


def test_no_other_file_uses_these_names():
    """A private name in another file would raise an error there that does not say which name is missing, and why."""
    names = (
        "_gradient_checkpointing_func",
        "_set_gradient_checkpointing",
        "GradientCheckpointingLayer",
        r"\b_loss_function\b",
        "_model_mapping",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "modeling_auto",
        "modeling_utils",
        "_no_split_modules",
        r"\b_from_config\b",
        "_attn_implementation",
        "grouped_mm_experts_forward",
    )
    pattern = re.compile("|".join(names))
    source = Path(transformers_private.__file__).parents[1]
    files = itertools.chain.from_iterable((source / folder).rglob("*.py") for folder in ("hf", "cli"))
    without_comments = lambda file: re.sub(r"#.*", "", file.read_text())
    users = [file.name for file in files if pattern.search(without_comments(file))]
    assert users == ["transformers_private.py"]
