"""Saved outputs of attention on a GPU: the kernels of each backend, bits, memory on both sides, and no wait."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.steps import no_waits
from gpu.test_layer_inputs import ONE, PAGE, pages_of, peak_of, small_inputs  # noqa: F401
from gpu.test_memory import SIZE, TOKENS, make_batch, make_model, take_step
from memory.steps import assert_same_bits
from tigon.memory.attention import find_kernel
from tigon.runtime.compat.autograd import engine_run_backward

pytest.importorskip("transformers")

LAYERS = 4
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
LEVELS = ["checkpoint+attention", "checkpoint+attention+offload"]


@pytest.fixture
def deterministic():
    """Make all kernels deterministic. With `warn_only`, the backward of Flash Attention adds in any order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


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


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_kernel_runs_once(backend, small_inputs):  # noqa: F811
    with sdpa_kernel(backend):
        assert count_calls("checkpoint") == 2 * LAYERS - 1
        for level in LEVELS:
            assert count_calls(level) == LAYERS


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("level", LEVELS)
def test_steps_have_the_bits_of_checkpoint(level, busy, small_inputs, deterministic):  # noqa: F811
    """Freed memory is filled with NaN at once, so a read that comes too late would see NaN."""
    results = []
    for memory in (level, "checkpoint", "default"):
        model, batch = make_model(memory, attention="sdpa", num_hidden_layers=LAYERS), make_batch()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for step in range(3):
                model.zero_grad()
                # The compute stream is far behind the host.
                if busy:
                    torch.cuda._sleep(10**8)
                loss = model(**batch).loss
                nan_tensors = [
                    torch.full((ONE // 2,), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(12)
                ]
                del nan_tensors
                loss.backward(retain_graph=step == 1)
                if step == 1:
                    loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        del model, loss
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[1], results[2])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_kernel_without_dropout_draws_no_random_numbers(backend):
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    state = torch.cuda.get_rng_state()
    with sdpa_kernel(backend):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_random_numbers_after_attention_are_the_same_in_both_runs(deterministic):
    """Without dropout in attention, its kernels draw no random numbers. GPT-2 has dropout after it."""
    options = {"attn_pdrop": 0.0, "n_positions": 1024, "hidden_size": 256, "num_attention_heads": 4}
    results = []
    for memory in ("checkpoint+attention", "checkpoint", "default"):
        model, batch = make_model(memory, "gpt2", "sdpa", num_hidden_layers=LAYERS, **options), make_batch()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.manual_seed(5)
            results.append(take_step(model, batch)[0])
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[1], results[2])


def test_attention_with_dropout_runs_again(deterministic):
    results = []
    for memory in ("checkpoint+attention", "default"):
        model, batch = (
            make_model(memory, attention="sdpa", num_hidden_layers=LAYERS, attention_dropout=0.2),
            make_batch(),
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.manual_seed(5)
            if memory == "default":
                results.append(take_step(model, batch)[0])
            else:
                with pytest.warns(UserWarning, match="has saved its outputs: attention has dropout"):
                    results.append(take_step(model, batch)[0])
    assert_same_bits(*results)


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=lambda backend: backend.name)
def test_a_layer_saves_the_output_and_the_log_sum_exp(backend):
    saved = {}
    for level in ("checkpoint", "checkpoint+attention"):
        model, batch = make_model(level, attention="sdpa", num_hidden_layers=LAYERS), make_batch()
        with sdpa_kernel(backend):
            take_step(model, batch)
            saved[level] = take_step(model, batch)[1]
        del model
    output = TOKENS[0] * TOKENS[1] * SIZE["num_attention_heads"] * (SIZE["head_dim"] * 2 + 4)
    difference = saved["checkpoint+attention"] - saved["checkpoint"]
    assert (LAYERS - 1) * output <= difference <= 1.01 * (LAYERS - 1) * output


def test_the_peak_does_not_grow_with_the_number_of_layers(small_inputs):  # noqa: F811
    one = 65536 * SIZE["hidden_size"] * 2
    growth = (peak_of("checkpoint+attention+offload", 12) - peak_of("checkpoint+attention+offload", 4)) / 8
    assert -one <= growth <= 0.1 * one


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_never_waits_for_the_device(level, small_inputs):  # noqa: F811
    model, batch = make_model(level, attention="sdpa", num_hidden_layers=LAYERS), make_batch()
    take_step(model, batch)
    with no_waits():
        model(**batch).loss.backward()
