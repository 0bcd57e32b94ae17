"""accelerate wraps the forward of a patched model; restore and a second patch still find the right one."""

import functools

import pytest

import tigon
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
