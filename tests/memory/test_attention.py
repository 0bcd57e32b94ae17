"""Checkpointed layers that save the outputs of attention: the kernel runs once, and all values keep their bits.

On a CPU, `scaled_dot_product_attention` calls a kernel of its own, so these tests run what a GPU runs.
"""

import functools
import gc
import types
import warnings

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from memory.steps import assert_same_bits
from op_cases import one_in
from tigon.hf import checkpoints
from tigon.memory import host_pages, layer_inputs
from tigon.memory.attention import run_attention
from tigon.runtime.compat.autograd import engine_run_backward

pytest.importorskip("transformers")


from hf.changes import with_adapters as with_lora
from hf.copies import copy_of_patched
from hf.ways import batch, build
from memory.test_models import saved_bytes, step

LAYERS, TOKENS, HEADS, WIDTH = 4, 24, 4, 64
# The bytes of the output of attention and of its log-sum-exp, in fp32.
OUTPUT, LSE = TOKENS * WIDTH * 4, TOKENS * HEADS * 4
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class CallWatch(TorchDispatchMode):
    """A block that counts the calls of the attention kernel, in backward too, and watches their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.outputs: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func is KERNEL:
            self.calls += 1
            self.outputs += [StorageWeakRef(x.untyped_storage()) for x in results]
        return results

    def alive(self) -> list[bool]:
        """Return whether the memory of each output is still allocated."""
        return [not storage.expired() for storage in self.outputs]


def backward(loss: Tensor, keep_graph: bool = False) -> None:
    """Run backward inside the active modes, which `loss.backward()` would exit."""
    engine_run_backward(
        (loss,), (torch.ones_like(loss),), keep_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def build_with(attention: str, model_type: str, **config) -> nn.Module:
    model = build(model_type, **{"num_hidden_layers": LAYERS, "use_cache": False} | config)
    model.set_attn_implementation(attention)
    return model


def make_model(level: str, model_type: str = "llama", attention: str = "sdpa", change=lambda m: m, **config):
    model = copy_of_patched(build_with, attention, model_type, memory=level, **config)
    torch.manual_seed(1)
    return change(model)


def count_calls(model: nn.Module, seed: int = 0) -> int:
    """Return how often a step calls the attention kernel."""
    with CallWatch() as watch:
        backward(model(**batch(seed)).loss)
    model.zero_grad()
    return watch.calls


@pytest.mark.parametrize(("level", "repeated"), [
    ("default", 0), ("checkpoint", 3), ("checkpoint+attention", 0), ("checkpoint+attention:2", 1),
    ("checkpoint+attention:1+offload:2", 2),
])  # fmt: skip
def test_backward_calls_attention_again_only_in_layers_without_saved_outputs(level, repeated):
    """The last of four layers runs once at every level."""
    assert count_calls(make_model(level)) == LAYERS + repeated


@one_in(
    6, model_type=["llama", "qwen3", "olmo2", "phi3", "gpt2", "mixtral"],
    level=["checkpoint+attention", "checkpoint+attention+offload"],
)  # fmt: skip
def test_steps_have_the_bits_of_other_levels(model_type, level, copies):
    """GPT-2 has dropout outside of attention, and the second run of a layer draws the same random numbers."""
    options = {"attn_pdrop": 0.0} if model_type == "gpt2" else {}
    expected = [step(make_model(other, model_type, **options)) for other in ("default", "checkpoint")]
    assert_same_bits(*expected)
    model = make_model(level, model_type, **options)
    assert_same_bits(step(model), expected[0])
    assert count_calls(model) == len(checkpoints.decoder_layers(model))


@pytest.mark.thorough
def test_layers_without_attention_run_again_as_before():
    """Three of four layers of Qwen3-Next have linear attention. The second layer has a kernel's attention here."""
    options = {
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "num_experts": 0, "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    }  # fmt: skip
    model = make_model("checkpoint+attention", "qwen3_next", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = step(model)
    assert_same_bits(actual, step(make_model("default", "qwen3_next", **options)))
    assert [
        count_calls(make_model(level, "qwen3_next", **options)) for level in ("checkpoint", "checkpoint+attention")
    ] == [3, 2]


def test_outputs_of_attention_are_the_only_further_bytes():
    sizes = {level: saved_bytes(make_model(level)) for level in ("checkpoint", "checkpoint+attention")}
    assert sizes["checkpoint+attention"] - sizes["checkpoint"] == (LAYERS - 1) * (OUTPUT + LSE)
    one = saved_bytes(make_model("checkpoint+attention:1"))
    assert one - sizes["checkpoint"] == OUTPUT + LSE


def test_the_backward_of_attention_frees_its_outputs():
    """The gradient of a projection before attention is computed after the backward of attention."""
    model, alive = make_model("checkpoint+attention"), []
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.register_hook(lambda _: alive.append(sum(watch.alive())))
    with CallWatch() as watch:
        loss = model(**batch(0)).loss
        assert watch.alive() == [True] * 2 * LAYERS
        backward(loss)
    assert alive == [6, 4, 2, 0]


@pytest.mark.parametrize("level", ["checkpoint+attention", "checkpoint+attention+offload"])
def test_a_forward_pass_without_backward_frees_its_outputs(level, copies):
    model = make_model(level)
    gc.disable()
    try:
        with CallWatch() as watch:
            loss = model(**batch(0)).loss
        del loss
        assert watch.alive() == [False] * 2 * LAYERS
        with CallWatch() as watch, torch.no_grad():
            output = model(**batch(0))
        assert watch.alive() == [False] * 2 * LAYERS, output.loss
    finally:
        gc.enable()


def test_outputs_move_to_the_host_with_the_inputs(copies):
    model = make_model("checkpoint+attention+offload")
    with CallWatch() as watch:
        loss = model(**batch(0)).loss
        # The last layer runs once.
        assert watch.alive() == [False] * 2 * (LAYERS - 1) + [True] * 2
        sizes = [OUTPUT, OUTPUT, LSE] * (LAYERS - 1)
        assert copies == [("out", size) for size in sizes]
        backward(loss)
    assert sorted(copies[len(sizes) :]) == sorted(("back", size) for size in sizes)
    assert watch.calls == LAYERS
    inputs = model.model.layers[0]._gradient_checkpointing_func.place.inputs
    assert inputs.pages.capacity == (LAYERS - 1) * (6 + 6 + 1) * 1024
    assert len(inputs.pages.free_pages) * 1024 == inputs.pages.capacity
    # The next step takes the same pages.
    step(model)
    assert inputs.pages.capacity == (LAYERS - 1) * (6 + 6 + 1) * 1024


@pytest.mark.parametrize(("level", "moved"), [
    ("checkpoint+attention+offload:1", [OUTPUT, OUTPUT, LSE]),
    ("checkpoint+attention:1+offload", [OUTPUT, OUTPUT, OUTPUT, OUTPUT, LSE]),
    ("checkpoint+attention:1+offload:2", [OUTPUT, OUTPUT]),
])  # fmt: skip
def test_numbers_of_layers_move(level, moved, copies):
    model = make_model(level)
    assert_same_bits(step(model), step(make_model("default")))
    assert copies[: len(moved)] == [("out", size) for size in moved]
    assert sorted(copies[len(moved) :]) == sorted(("back", size) for size in moved)


@pytest.mark.parametrize(("pages", "message"), [
    # The inputs of three layers take 18 pages, and the outputs of each layer take 7.
    (17, r"memory='checkpoint\+offload' needs .* for the inputs of 3 layers"),
    (26, r"outputs of attention of 2 layers, .*'checkpoint\+attention:1\+offload' saves the outputs of 1 layers"),
])  # fmt: skip
def test_too_little_host_memory_is_an_error(pages, message, copies, monkeypatch):
    model = make_model("checkpoint+attention+offload")
    inputs = model.model.layers[0]._gradient_checkpointing_func.place.inputs
    capacity = lambda: 0 if inputs.pages is None else inputs.pages.capacity
    monkeypatch.setattr(layer_inputs, "available_host_bytes", lambda: pages * 1024 - capacity())
    with pytest.raises(RuntimeError, match=message):
        model(**batch(0))
    monkeypatch.setattr(layer_inputs, "available_host_bytes", host_pages.available_host_bytes)
    assert_same_bits(step(model), step(make_model("default")))
    if pages > 18:
        fitting = make_model(f"checkpoint+attention:{(pages - 18) // 7}+offload")
        step(fitting)
        assert fitting.model.layers[0]._gradient_checkpointing_func.place.inputs.pages.capacity <= pages * 1024


def run_backward_twice(model: nn.Module) -> None:
    loss = model(**batch(0)).loss
    backward(loss, keep_graph=True)
    backward(loss)


def run_forward_twice(model: nn.Module) -> None:
    backward(model(**batch(0)).loss + model(**batch(1)).loss)


def accumulate(model: nn.Module) -> None:
    for seed in range(3):
        backward(model(**batch(seed)).loss)


def run_under_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch(0)).loss
        backward(loss)


def train_adapters(model: nn.Module) -> None:
    """The base is frozen, and adapters have dropout after attention: the second run draws the same random numbers."""
    model = with_lora(model, lora_dropout=0.3)
    torch.manual_seed(2)
    backward(model(**batch(0)).loss)


def compute_a_gradient_first(model: nn.Module) -> None:
    """The first backward frees the outputs, and the second one computes them again."""
    loss = model(**batch(0)).loss
    torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)
    loss.backward()


# How a model is used, and how many times attention runs in each layer at a level that saves its outputs.
USES = {
    run_backward_twice: 1, run_forward_twice: 2, accumulate: 3, run_under_autocast: 1, train_adapters: 1,
    compute_a_gradient_first: None,
}  # fmt: skip


@functools.cache
def gradients_of(use, level: str) -> tuple[list[Tensor | None], int]:
    """Return the gradients of a model after this use, and the calls of attention."""
    model = make_model(level)
    with CallWatch() as watch:
        use(model)
    return [p.grad for p in model.parameters()], watch.calls


@one_in(
    5, use={use.__name__: use for use in USES},
    level=["lean", "lean+mlp", "checkpoint", "checkpoint+attention", "checkpoint+attention+offload"],
)  # fmt: skip
def test_every_use_has_the_bits_of_the_default_level(use, level, copies):
    gradients, calls = gradients_of.__wrapped__(use, level)
    assert_same_bits(gradients, gradients_of(use, "default")[0])
    if "attention" in level and USES[use] is not None:
        assert calls == USES[use] * LAYERS


def test_an_error_in_the_second_run_of_a_layer_ends_its_block():
    model = make_model("checkpoint+attention")
    loss = model(**batch(0)).loss
    original = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = types.MethodType(lambda self, x: 1 / 0, model.model.layers[1].mlp)
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        loss.backward()
    model.model.layers[1].mlp.forward = original
    assert torch._C._len_torch_dispatch_stack() == 0
    assert run_attention("name", lambda: 3) == 3


def test_more_layers_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match="it has 2 layers"):
        tigon.patch(build("llama"), memory="checkpoint+attention:3")
