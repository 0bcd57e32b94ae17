"""Inputs of checkpointed layers on the host, and MLPs in tiles, on a GPU: bits, memory, and no wait of the host."""

import gc
from unittest import mock

import pytest
import torch
from torch import nn

from gpu.steps import no_waits
from gpu.test_memory import SIZE, TOKENS, deterministic, make_batch, make_model, take_step  # noqa: F401
from memory.steps import assert_same_bits, paged
from tigon.memory import host_pages, layer_inputs
from tigon.ops.mlps import tiled_glu_mlp

pytest.importorskip("transformers")

# The bytes of the input of a layer.
ONE = TOKENS[0] * TOKENS[1] * SIZE["hidden_size"] * 2
PAGE = 2**20


@pytest.fixture
def small_inputs(monkeypatch):
    """Move the inputs of all layers, although their gradients are larger."""
    monkeypatch.setattr(layer_inputs, "_future_gradient_bytes", lambda layers, device: 0)
    with paged(PAGE, PAGE):
        yield


def pages_of(model: nn.Module) -> host_pages.HostPages:
    return model.model.layers[0]._gradient_checkpointing_func.place.inputs.pages


@pytest.mark.parametrize("how", ["idle", "busy", "another stream"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_steps_have_the_bits_of_checkpoint(model_type, how, small_inputs, deterministic):  # noqa: F811
    """Freed memory is filled with NaN at once, so a read that comes too late would see NaN."""
    results = []
    for level in ("checkpoint+offload", "checkpoint"):
        model, batch = make_model(level, model_type, num_hidden_layers=6), make_batch()
        for step in range(3):
            model.zero_grad()
            # The compute stream is far behind the host.
            if how == "busy":
                torch.cuda._sleep(10**8)
            loss = model(**batch).loss
            nan_tensors = [torch.full((ONE // 2,), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(12)]
            del nan_tensors
            stream = torch.cuda.Stream() if how == "another stream" else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss.backward(retain_graph=step == 1)
                if step == 1:
                    loss.backward()
            torch.cuda.current_stream().wait_stream(stream)
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        if level != "checkpoint":
            assert pages_of(model).capacity == 5 * ONE
            assert pages_of(model).is_pinned
            assert all(page.is_pinned() for page in pages_of(model).free_pages)
        del model, loss
    assert_same_bits(*results)


def peak_of(level: str, layers: int) -> int:
    """Return the peak of a second step without what the parameters and the gradients of the layers take."""
    model = make_model(level, attention="sdpa", num_hidden_layers=layers, vocab_size=1024)
    tokens = torch.randint(3, 1024, (1, 65536), device="cuda")
    take_step(model, {"input_ids": tokens, "labels": tokens})
    peak = take_step(model, {"input_ids": tokens, "labels": tokens})[2]
    gradients = sum(p.nbytes for p in model.model.layers.parameters())
    del model
    gc.collect()
    return peak - gradients


@pytest.mark.parametrize(("level", "least", "most"), [("checkpoint", 0.7, 1.1), ("checkpoint+offload", -1.0, 0.1)])
def test_the_peak_does_not_grow_with_the_number_of_layers(level, least, most, small_inputs):
    one = 65536 * SIZE["hidden_size"] * 2
    growth = (peak_of(level, 12) - peak_of(level, 4)) / 8
    assert least * one <= growth <= most * one


def test_a_step_never_waits_for_the_device(small_inputs):
    model, batch = make_model("checkpoint+offload", attention="sdpa", num_hidden_layers=6), make_batch()
    take_step(model, batch)
    with no_waits():
        model(**batch).loss.backward()


# --- tiles -----------------------------------------------------------------------------------------


def test_a_checkpointed_layer_holds_one_tile(small_inputs):
    """Without tiles, gate, up and da of these tokens take 1.3 GiB."""
    peaks = []
    for tile_bytes in (2**27, 2**60):
        with mock.patch.object(tiled_glu_mlp, "TILE_BYTES", tile_bytes):
            peaks.append(peak_of("checkpoint", 3))
    assert peaks[1] - peaks[0] >= 0.4 * 3 * 65536 * SIZE["intermediate_size"] * 2
