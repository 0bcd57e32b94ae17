"""Which inputs of checkpointed layers move to the host, and when. On a CPU, pageable memory replaces the host."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import tigon
from memory.steps import assert_same_bits, paged
from tigon.memory import host_pages, layer_inputs
from tigon.memory.host_pages import HostPages, available_host_bytes
from tigon.memory.layer_inputs import LayerInputs
from tigon.runtime.compat.names import NAMES_FOR_OFFLOAD, missing

pytest.importorskip("transformers")

import transformers

from hf.copies import copy_of_patched
from hf.test_vision import VISION
from hf.tiny import tiny_config
from hf.ways import batch, build
from memory.test_models import step

# The bytes of the input of a layer: 24 tokens of 64 features in fp32.
SIZE = 24 * 64 * 4
LAYERS = 5


def make_model(level: str = "checkpoint+offload", model_type: str = "llama", layers: int = LAYERS) -> nn.Module:
    return copy_of_patched(build, model_type, memory=level, num_hidden_layers=layers)


def inputs_of(model: nn.Module) -> LayerInputs:
    return model.model.layers[0]._gradient_checkpointing_func.place.inputs


def watch_inputs(model: nn.Module) -> list[StorageWeakRef]:
    """Return a list that gets a weak reference to the input of each layer in each call, also in backward."""
    storages = []
    hook = lambda module, args: storages.append(StorageWeakRef(args[0].untyped_storage()))
    # A layer with a hook that no engine wrote is not checkpointed.
    hook.__module__ = "accelerate.hooks"
    for layer in model.model.layers:
        layer.register_forward_pre_hook(hook)
    return storages


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "olmo2"])
@pytest.mark.sampled(3)
def test_steps_have_the_bits_of_checkpoint(model_type, copies):
    model, expected = make_model(model_type=model_type), make_model("checkpoint", model_type)
    for seed in range(2):
        assert_same_bits(step(model, **batch(seed)), step(expected, **batch(seed)))
    # The last layer runs once.
    assert [way for way, _ in copies] == 2 * (["out"] * (LAYERS - 1) + ["back"] * (LAYERS - 1))


def test_the_device_holds_no_input_after_the_forward_pass(copies):
    model = make_model()
    storages = watch_inputs(model)
    alive = []
    model.model.layers[3].register_forward_hook(hook := lambda *_: alive.append([not s.expired() for s in storages]))
    hook.__module__ = "accelerate.hooks"
    loss = model(**batch(0)).loss
    # In a layer, its own input is on the device. The forward of the body holds the input of the first layer.
    assert alive == [[True, False, False, True]]
    assert [not s.expired() for s in storages] == [False] * (LAYERS - 1) + [True]
    loss.backward()
    assert all(s.expired() for s in storages)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_number_of_layers_moves(layers, copies):
    model = make_model(f"checkpoint+offload:{layers}")
    storages = watch_inputs(model)
    loss = model(**batch(0)).loss
    assert [not s.expired() for s in storages] == [i >= layers for i in range(LAYERS)]
    loss.backward()
    assert copies == [("out", SIZE)] * layers + [("back", SIZE)] * layers
    assert_same_bits(step(model), step(make_model("checkpoint")))


def test_inputs_stay_where_gradients_need_as_much_memory_later(copies, monkeypatch):
    """Backward frees these inputs before the gradients exist. If the gradients exist already, all inputs move."""
    monkeypatch.undo()
    monkeypatch.setattr(layer_inputs, "can_offload", lambda device: True)
    with paged(512):
        model = make_model()
        gradient_bytes = sum(p.nbytes for p in model.model.layers[0].parameters())
        # The gradients of all layers but the first one take as much as two and a half inputs.
        tokens = int((LAYERS - 1) * gradient_bytes / 2.5) // (64 * 4)
        inputs = {"input_ids": torch.ones(1, tokens, dtype=torch.int64), "labels": torch.ones(1, tokens).long()}
        storages = watch_inputs(model)
        loss = model(**inputs).loss
        assert [not s.expired() for s in storages] == [False, False, True, True, True]
        loss.backward()
        del storages[:]
        loss = model(**inputs).loss
        assert [not s.expired() for s in storages] == [False] * (LAYERS - 1) + [True]


def model_with_vision() -> nn.Module:
    """Return a model whose vision tower has more layers than its decoder."""
    options = VISION["qwen2_5_vl"]
    options = options | {"vision_config": options["vision_config"] | {"depth": 4}}
    config = tiny_config(transformers.AutoConfig.for_model("qwen2_5_vl"), options)
    return transformers.AutoModelForImageTextToText.from_config(config).train()


def calls_with_inputs(model: nn.Module) -> dict[str, int]:
    """Return the numbers of the layers whose inputs move to the host, by the names of the layers."""
    functions = {name: getattr(m, "_gradient_checkpointing_func", None) for name, m in model.named_modules()}
    places = {name: function.place for name, function in functions.items() if hasattr(function, "place")}
    return {name: place.number for name, place in places.items() if place.inputs is not None}


def test_inputs_of_the_decoder_move_although_the_vision_tower_has_more_layers():
    model = model_with_vision()
    tigon.patch(model, memory="checkpoint+offload")
    layers = model.model.language_model.layers
    assert calls_with_inputs(model) == {f"model.language_model.layers.{i}": i for i in range(len(layers))}
    inputs = layers[0]._gradient_checkpointing_func.place.inputs
    assert inputs.checkpointed == len(layers) - 1
    with pytest.raises(ValueError, match=f"it has {len(layers)} layers"):
        tigon.patch(model_with_vision(), memory=f"checkpoint+offload:{len(layers) + 1}")


def test_small_inputs_stay(copies):
    with paged(SIZE + 1):
        step(make_model())
    assert not copies


def test_the_pool_is_bounded_by_the_largest_step(copies):
    model = make_model()
    largest = 4 * 7 * 1024
    for tokens in (3, 28, 5, 24, 28):
        ids = torch.ones(1, tokens, dtype=torch.int64)
        step(model, input_ids=ids, labels=ids)
        pages = inputs_of(model).pages
        # All pages are free between steps.
        assert len(pages.free_pages) * pages.page == pages.capacity <= largest
    assert pages.capacity == largest


@pytest.mark.parametrize("how", ["in order", "last first"])
def test_two_forward_passes_before_a_backward(how, copies):
    results = []
    for level in ("checkpoint+offload", "checkpoint"):
        model = make_model(level)
        losses = [model(**batch(seed)).loss for seed in range(2)]
        for loss in losses if how == "in order" else losses[::-1]:
            loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert_same_bits(*results)


def test_dropped_and_failed_passes_free_their_pages(copies):
    model = make_model()
    model(**batch(0))
    with torch.no_grad():
        model(**batch(0))
    pages = inputs_of(model).pages
    assert len(pages.free_pages) * 1024 == pages.capacity
    handle = model.model.layers[3].mlp.down_proj.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch(0)).loss.backward()
    handle.remove()
    assert_same_bits(step(model), step(make_model("checkpoint")))
    assert len(pages.free_pages) * 1024 == pages.capacity


def test_an_input_that_is_written_during_its_copy_is_refused(copies):
    model = make_model()
    layer = model.model.layers[1]
    forward = layer.mlp.forward
    hidden = []
    layer.register_forward_pre_hook(hook := lambda module, args: hidden.append(args[0].detach()))
    hook.__module__ = "accelerate.hooks"
    layer.mlp.forward = lambda x: (hidden[-1].add_(1), forward(x))[1]
    layer.mlp.forward.__module__ = "accelerate.hooks"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)


def test_too_little_host_memory_is_refused(copies, monkeypatch):
    monkeypatch.setattr(layer_inputs, "available_host_bytes", lambda: 3 * 6 * 1024)
    message = r"needs 0.0 GiB of host memory for the inputs of 4 layers, .*'checkpoint\+offload:3' moves 3 of them"
    with pytest.raises(RuntimeError, match=message):
        step(make_model())
    monkeypatch.setattr(layer_inputs, "available_host_bytes", lambda: 4 * 6 * 1024)
    step(make_model())


def test_pageable_memory_replaces_pinned_memory_with_one_warning(monkeypatch):
    def allocate(nbytes: int, is_pinned: bool) -> torch.Tensor:
        if is_pinned:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_pages, "_allocate", allocate)
    pages = HostPages(1024)
    with pytest.warns(RuntimeWarning, match="cannot be allocated .CUDA error: out of memory.*each GiB .* about 0.2 s"):
        pages.reserve(1024, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pages.reserve(1024, 3)
    assert pages.capacity == 3 * 1024


def test_the_available_memory_of_the_host_is_that_of_the_smallest_group(tmp_path):
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert available_host_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 200 kB\nMemAvailable:   100 kB\n")
    assert available_host_bytes(tmp_path) == 100 * 1024
    write("proc/self/cgroup", "0::/jobs/7\n")
    write("sys/fs/cgroup/jobs/7/memory.max", "max\n")
    write("sys/fs/cgroup/jobs/memory.max", "50000\n")
    write("sys/fs/cgroup/jobs/memory.current", "40000\n")
    write("sys/fs/cgroup/jobs/memory.stat", "anon 10000\ninactive_file 20000\nactive_file 10000\n")
    assert available_host_bytes(tmp_path) == 40000
    write("proc/self/cgroup", "4:memory:/elsewhere\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "30000\n")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "10000\n")
    assert available_host_bytes(tmp_path) == 20000


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_have_a_pool_of_their_own(make_copy, copies):
    model = make_model()
    expected = step(model)
    other = make_copy(model)
    functions = [layer._gradient_checkpointing_func for layer in other.model.layers]
    assert len({id(function.place.inputs) for function in functions}) == 1
    assert functions[0].place.inputs is not inputs_of(model)
    assert dict(functions[0].place.inputs.layers) == dict(enumerate(other.model.layers))
    del copies[:]
    assert_same_bits(step(other), expected)
    assert copies.count(("out", SIZE)) == LAYERS - 1


def test_missing_names_are_refused_before_the_model_changes(monkeypatch):
    monkeypatch.setitem(missing, NAMES_FOR_OFFLOAD[0], "torch has no such name")
    model = build("llama")
    for level in ("checkpoint+offload", "checkpoint+offload:1"):
        with pytest.raises(
            ValueError, match="torch has no such name; possible levels: 'default', 'lean', .*'checkpoint[+]attention'$"
        ):
            tigon.patch(model, memory=level)
        assert not model.is_gradient_checkpointing
        assert not any("forward" in vars(module) for module in model.modules())


def test_one_graph_of_the_whole_model_is_refused():
    model = build("llama", use_cache=False)
    tigon.patch(model, memory="checkpoint+offload")
    with pytest.raises(RuntimeError, match=r"memory='checkpoint\+offload' does not work in a compiled model"):
        torch.compile(model, backend="eager", fullgraph=True)(**batch(0))
    torch._dynamo.reset()


def test_hooks_around_the_model_receive_the_inputs(copies):
    model = make_model()
    with torch.autograd.graph.save_on_cpu():
        loss = model(**batch(0)).loss
    loss.backward()
    assert not copies
    results = [loss.detach(), *(p.grad for p in model.parameters())]
    assert_same_bits(results, step(make_model("checkpoint")))
