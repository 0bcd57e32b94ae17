"""accelerate wraps the forward of a patched model; copies, restore and a second patch still find the right one."""

import copy
import functools
import math
import pickle

import pytest
import torch

import tigon
from hf.changes import COPIES, save_and_load
from tigon.hf.logits import SKIPPED_LOGITS

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _fresh_state(fresh_accelerate):
    pass


@pytest.fixture
def accelerator(request, monkeypatch):
    """Return an accelerator for mixed precision on the CPU, in bf16 unless a test is parametrised."""
    # accelerate has no fp16 on the CPU, because it has no scaler there. Autocast of torch has.
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    monkeypatch.setattr(type(accelerator.state), "mixed_precision", getattr(request, "param", "bf16"))
    return accelerator


def unwrap(accelerator, model, keep_fp32_wrapper=False):
    return accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=keep_fp32_wrapper)


def extract(accelerator, model):
    return accelerate.utils.extract_model_from_parallel(accelerator.prepare(model), keep_fp32_wrapper=False)


WAYS = {
    "prepare": lambda accelerator, model: accelerator.prepare(model),
    "unwrap": unwrap,
    "keep the wrapper": functools.partial(unwrap, keep_fp32_wrapper=True),
    "extract": extract,
    "prepare again": lambda accelerator, model: unwrap(accelerator, unwrap(accelerator, model)),
}
in_both_precisions = pytest.mark.parametrize("accelerator", ["bf16", "fp16"], indirect=True)
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)


def is_fused(model, batch) -> bool:
    return model(**batch).logits is SKIPPED_LOGITS


def held_forwards(model) -> dict:
    """Return the attributes of a model that hold a forward."""
    names = ("forward", "_original_forward", "_replicate_for_data_parallel")
    return {name: value for name, value in vars(model).items() if name in names}


@in_both_precisions
@every_way
@pytest.mark.sampled(3)
def test_restore_gives_the_forward_back_and_a_second_patch_fuses_the_loss(make_model, batch, accelerator, way):
    expected = held_forwards(way(accelerator, make_model()))
    model = make_model()
    report = tigon.patch(model)
    model = way(accelerator, model)
    assert is_fused(model, batch)
    report.restore()
    assert not is_fused(model, batch)
    held = held_forwards(model)
    assert held.keys() <= expected.keys()
    # accelerate leaves its wrapper, or a bound forward of the class.
    assert all("tigon" not in getattr(value.__func__, "__module__", "") for value in held.values())
    assert tigon.patch(model)
    assert is_fused(model, batch)


@every_copy
@pytest.mark.parametrize("way", [*WAYS.values()][:3], ids=[*WAYS][:3])
@pytest.mark.sampled(2)
def test_a_copy_keeps_its_fused_loss_when_the_original_is_restored(make_model, batch, accelerator, way, duplicate):
    model = make_model()
    report = tigon.patch(model)
    model = way(accelerator, model)
    other = duplicate(model)
    report.restore()
    assert is_fused(other, batch)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(**batch).loss.item() == pytest.approx(math.log(other.config.vocab_size))
    assert not is_fused(model, batch)
    # accelerate takes its wrapper off the copy.
    assert is_fused(accelerator.unwrap_model(other, keep_fp32_wrapper=False), batch)


def test_patches_around_a_prepared_model_leave_what_accelerate_leaves(make_model, batch, accelerator):
    """A second patch of a prepared model survives pickle and unwrap, and its copies can be prepared and saved."""
    model, stock = make_model(), unwrap(accelerator, make_model())
    report = tigon.patch(model)
    prepared = save_and_load(accelerator.prepare(copy.deepcopy(model)))
    assert is_fused(prepared, batch)
    assert is_fused(save_and_load(unwrap(accelerator, prepared)), batch)
    accelerator.prepare(model)
    report.restore()
    other = accelerator.unwrap_model(copy.deepcopy(model), keep_fp32_wrapper=False)
    assert held_forwards(other).keys() == held_forwards(stock).keys() == {"forward"}
    assert other.forward.__func__ is stock.forward.__func__
    report = tigon.patch(model, memory="lean")
    for each in (pickle.loads(pickle.dumps(model)), model):
        assert is_fused(each, batch)
        assert is_fused(accelerator.unwrap_model(each, keep_fp32_wrapper=False), batch)
    report.restore()
    assert not held_forwards(model)


@pytest.mark.parametrize("keeps_wrapper", [True, False])
def test_a_prepared_model_can_be_patched(make_model, batch, accelerator, keeps_wrapper):
    """The loss has the values of a model that was patched before accelerate prepared it."""
    model, first = make_model(), make_model()
    unpatched = copy.deepcopy(accelerator.prepare(model))
    report = tigon.patch(model)
    assert not report.left_alone
    assert is_fused(model, batch)
    tigon.patch(first)
    assert torch.equal(model(**batch).loss, accelerator.prepare(first)(**batch).loss)
    # The copy was made before the patch, and has the same wrapper.
    assert not is_fused(unpatched, batch)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=keeps_wrapper)
    assert is_fused(model, batch)
    assert is_fused(pickle.loads(pickle.dumps(model)), batch)
    report.restore()
    assert not is_fused(model, batch)
    assert held_forwards(model).keys() == ({"forward", "_original_forward"} if keeps_wrapper else set())


def test_another_wrapper_around_the_forward_stays_foreign(make_model, batch, accelerator):
    """Tigon does not know what another wrapper computes."""
    model = accelerator.prepare(make_model())
    inner = model.forward.__func__

    def forward(self, *args, **kwargs):
        return inner(self, *args, **kwargs)

    forward.__wrapped__ = inner
    model.forward = forward.__get__(model)
    (entry,) = [entry for entry in tigon.patch(model).left_alone if entry.part == "loss"]
    assert "its forward was already replaced" in entry.detail
    assert not is_fused(model, batch)
