"""Checkpointed layers on a GPU: inputs and outputs of attention on the host, MLPs in tiles: bits, memory, no wait."""

import contextlib
import functools
import gc
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.steps import no_waits
from gpu.test_memory import SIZE, TOKENS, make_batch, make_model, second_step, take_step
from memory.steps import assert_same_bits, paged
from tigon.memory import host_pages, layer_inputs
from tigon.memory.attention import find_kernel
from tigon.ops.mlps import tiled_glu_mlp
from tigon.runtime.compat.autograd import engine_run_backward

pytest.importorskip("transformers")

# The bytes of the input of a layer.
ONE, PAGE = TOKENS[0] * TOKENS[1] * SIZE["hidden_size"] * 2, 2**20
LAYERS = 4
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
LEVELS = ["checkpoint+attention", "checkpoint+attention+offload"]
flash_attention = functools.partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)


@contextlib.contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    """Make all kernels deterministic. With `warn_only`, the backward of Flash Attention adds in any order."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_inputs(monkeypatch):
    """Move the inputs of all layers, although their gradients are larger."""
    monkeypatch.setattr(layer_inputs, "_future_gradient_bytes", lambda layers, device: 0)
    with paged(PAGE, PAGE):
        yield


def pages_of(model: nn.Module) -> host_pages.HostPages:
    return model.model.layers[0]._gradient_checkpointing_func.place.inputs.pages


class CallCounter(TorchDispatchMode):
    """A block that counts the calls of attention kernels."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += find_kernel(func) is not None
        return func(*args, **(kwargs or {}))


def count_calls(level: str) -> int:
    """Return how often a step calls attention kernels."""
    # The memory-efficient kernel needs as many heads of keys as of queries.
    model = make_model(level, attention="sdpa", num_hidden_layers=LAYERS, num_key_value_heads=16)
    with CallCounter() as counter:
        loss = model(**make_batch()).loss
        engine_run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    return counter.calls


@every_backend
def test_every_kernel_runs_once(backend, small_inputs):
    with sdpa_kernel(backend):
        assert count_calls("checkpoint") == 2 * LAYERS - 1
        for level in LEVELS:
            assert count_calls(level) == LAYERS


@pytest.mark.parametrize("how", ["idle", "busy", "another stream"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("level", [*LEVELS, "checkpoint+offload"])
def test_steps_have_the_bits_of_checkpoint(level, model_type, how, small_inputs):
    """Freed memory is filled with NaN at once, so a read that comes too late would see NaN."""
    saves_attention, results = level in LEVELS, []
    if saves_attention and model_type == "gemma2":
        pytest.skip("its capped scores need eager attention")
    for memory in (level, "checkpoint", *(["default"] if saves_attention else [])):
        attention = "sdpa" if saves_attention else "eager"
        model, batch = make_model(memory, model_type, attention, num_hidden_layers=6), make_batch()
        with flash_attention(), deterministic(warn_only=not saves_attention):
            for step in range(3):
                model.zero_grad()
                # The compute stream is far behind the host.
                if how == "busy":
                    torch.cuda._sleep(10**8)
                loss = model(**batch).loss
                nan_tensors = [
                    torch.full((ONE // 2,), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(12)
                ]
                del nan_tensors
                stream = torch.cuda.Stream() if how == "another stream" else torch.cuda.current_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    loss.backward(retain_graph=step == 1)
                    if step == 1:
                        loss.backward()
                torch.cuda.current_stream().wait_stream(stream)
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        if memory == "checkpoint+offload":
            assert pages_of(model).capacity == 5 * ONE
            assert pages_of(model).is_pinned
            assert all(page.is_pinned() for page in pages_of(model).free_pages)
        del model, loss
    for others in results[1:]:
        assert_same_bits(results[0], others)


@every_backend
def test_a_kernel_without_dropout_draws_no_random_numbers(backend):
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    state = torch.cuda.get_rng_state()
    with sdpa_kernel(backend):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(torch.cuda.get_rng_state(), state)


DROPOUTS = {
    # Without dropout in attention, its kernels draw no random numbers. GPT-2 has dropout after it.
    "after attention": ("gpt2", {"attn_pdrop": 0.0, "n_positions": 1024, "hidden_size": 256, "num_attention_heads": 4}),
    "in attention": ("llama", {"attention_dropout": 0.2}),
}


@pytest.mark.parametrize(("model_type", "options"), DROPOUTS.values(), ids=DROPOUTS)
def test_random_numbers_are_the_same_in_both_runs(model_type, options):
    results = []
    for memory in ("checkpoint+attention", "checkpoint", "default"):
        model, batch = make_model(memory, model_type, "sdpa", num_hidden_layers=LAYERS, **options), make_batch()
        warns = model_type == "llama" and "attention" in memory
        expects = pytest.warns(UserWarning, match="has saved its outputs: attention has dropout")
        with flash_attention(), deterministic(), expects if warns else contextlib.nullcontext():
            torch.manual_seed(5)
            results.append(take_step(model, batch)[0])
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[1], results[2])


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=lambda backend: backend.name)
def test_a_layer_saves_the_output_and_the_log_sum_exp(backend):
    levels, options = ("checkpoint", "checkpoint+attention"), {"attention": "sdpa", "num_hidden_layers": LAYERS}
    with sdpa_kernel(backend):
        before, after = (second_step(level, **options)[1] for level in levels)
    output = TOKENS[0] * TOKENS[1] * SIZE["num_attention_heads"] * (SIZE["head_dim"] * 2 + 4)
    assert (LAYERS - 1) * output <= after - before <= 1.01 * (LAYERS - 1) * output


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


@pytest.mark.parametrize(
    ("level", "least", "most"),
    [("checkpoint", 0.7, 1.1), ("checkpoint+offload", -1.0, 0.1), ("checkpoint+attention+offload", -1.0, 0.1)],
)
def test_the_peak_does_not_grow_with_the_number_of_layers(level, least, most, small_inputs):
    one = 65536 * SIZE["hidden_size"] * 2
    growth = (peak_of(level, 12) - peak_of(level, 4)) / 8
    assert least * one <= growth <= most * one


@pytest.mark.parametrize("level", ["checkpoint+offload", *LEVELS])
def test_a_step_never_waits_for_the_device(level, small_inputs):
    model, batch = make_model(level, attention="sdpa", num_hidden_layers=6), make_batch()
    take_step(model, batch)
    with no_waits():
        model(**batch).loss.backward()


def test_a_checkpointed_layer_holds_one_tile(small_inputs):
    """Without tiles, gate, up and da of these tokens take 1.3 GiB."""
    peaks = []
    for tile_bytes in (2**27, 2**60):
        with mock.patch.object(tiled_glu_mlp, "TILE_BYTES", tile_bytes):
            peaks.append(peak_of("checkpoint", 3))
    assert peaks[1] - peaks[0] >= 0.4 * 3 * 65536 * SIZE["intermediate_size"] * 2
