"""Attention in graphs: packed samples, and what transformers reads or copies on the host for masks."""

import contextlib
import sys
import threading

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import masking_utils, modeling_flash_attention_utils

from graphs.emulation import emulate
from graphs.steps import LENGTH, llama, run_both, train
from tigon.graphs import forward
from tigon.hf.transformers_private import masks_as_in_eager_calls

pytestmark = pytest.mark.no_interpreter("The emulation of graphs needs no kernel.")

PACKED = torch.tensor([[*range(40), *range(LENGTH - 40)]])


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate(monkeypatch)


def test_packed_samples_are_not_replayed_as_one_sample():
    """The graph of one sample has no mask, and that of packed samples has one, with arguments of the same shapes."""
    one = torch.arange(LENGTH)[None]

    def script(model):
        positions = (one, PACKED, one)
        return [train(model, 4, position_ids=x, use_cache=False) for x in positions]

    assert len(run_both(script).captured) == 2


def test_a_capture_does_not_change_the_masks_of_other_threads():
    samples = []
    find = lambda: samples.append(masking_utils.find_packed_sequence_indices(PACKED))
    with masks_as_in_eager_calls():
        thread = threading.Thread(target=find)
        thread.start()
        thread.join()
        find()
    find()
    assert samples[1] is None
    assert torch.equal(samples[0], samples[2])


def attend_as_flash(module, query, key, value, attention_mask, **kwargs):
    """Compute causal attention as transformers does for flash-attn, where the host reads positions in each layer."""
    positions = kwargs["position_ids"]
    is_packed = modeling_flash_attention_utils._is_packed_sequence(positions, query.shape[0])
    if is_capturing and isinstance(is_packed, torch.Tensor):
        raise RuntimeError("operation not permitted when stream is capturing")
    samples = (positions.diff(prepend=positions[:, :1]) != 1).cumsum(1) * bool(is_packed)
    mask = (samples[:, None, :, None] == samples[:, None, None]).tril()
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return out.transpose(1, 2), None


is_capturing = False
FLASH_CALLS = {
    "no positions": ({}, True),
    "one sample": ({"position_ids": torch.arange(LENGTH)[None]}, True),
    "packed": ({"position_ids": PACKED, "use_cache": False}, False),
    "packed beside a cache": ({"position_ids": PACKED}, False),
}


@pytest.mark.parametrize(("arguments", "is_graphed"), FLASH_CALLS.values(), ids=FLASH_CALLS)
def test_flash_attention_reads_no_positions_in_a_capture(arguments, is_graphed, monkeypatch):
    emulated = forward.capturing.capture

    def capture_as_on_a_gpu(*args, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "is_capturing", True)
            return emulated(*args, **options)

    monkeypatch.setattr(forward.capturing, "capture", capture_as_on_a_gpu)
    transformers.AttentionInterface.register("test_flash", attend_as_flash)
    model = llama()
    model.config._attn_implementation = "test_flash"
    record = run_both(lambda each: train(each, 4, **arguments), model, is_warm=False)
    assert record.replayed == (2 if is_graphed else 0), record


class NoHostCopies(TorchFunctionMode):
    """Raise the error of a capture on a GPU where transformers before 5.21 copies a number of a mask from the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.where:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_refused", [False, True], ids=["the capture works", "the capture fails"])
def test_eager_attention_is_graphed_if_its_mask_can_be_captured(is_refused, monkeypatch, caplog):
    emulated = forward.capturing.capture

    def capture_as_on_a_gpu(*args, **options):
        with NoHostCopies() if is_refused else contextlib.nullcontext():
            return emulated(*args, **options)

    monkeypatch.setattr(forward.capturing, "capture", capture_as_on_a_gpu)
    record = run_both(train, llama(attn_implementation="eager"))
    assert record.replayed == (0 if is_refused else 3)
    assert any("Cannot copy between CPU" in reason for reason in record.eager) == is_refused
    assert sum(entry.levelname == "WARNING" for entry in caplog.records) == is_refused
