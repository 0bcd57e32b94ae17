"""With `tigon.patch(model, memory="lean")` less is saved, and all values have the bits of the default level."""

import weakref

import pytest
import torch
from torch import Tensor, nn

import tigon
from memory.steps import assert_same_bits
from op_cases import one_in, saved_tensors

pytest.importorskip("transformers")

from hf.changes import with_adapters as with_lora
from hf.copies import copy_of_patched
from hf.test_ways_adapters import exchange, to_4bit, to_8bit
from hf.tiny import tiny_model
from hf.ways import batch, build

TYPES = ["llama", "qwen3", "gemma2", "phi3", "olmo2", "nemotron", "starcoder2", "qwen3_moe", "qwen3_next"]


def step(model: nn.Module, **inputs) -> list[Tensor | None]:
    model.zero_grad()
    loss = model(**(inputs or batch(0))).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def saved_bytes(model: nn.Module, **inputs) -> int:
    """Return the bytes of the storages that a forward pass saves for backward, without parameters."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    storages = [t.untyped_storage() for t in saved_tensors(lambda: model(**(inputs or batch(0))))]
    return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in weights}.values())


def pair(model_type: str = "llama", change=lambda model: model, **config) -> tuple[nn.Module, nn.Module]:
    """Return a lean model and one of the default level, both patched and with the same parameters."""
    models = (copy_of_patched(build, model_type, memory=memory, **config) for memory in ("lean", "default"))
    return tuple(map(change, models))


def assert_lean(lean: nn.Module, default: nn.Module, least: float = 0.1, **inputs) -> None:
    """Check that both models have the same bits, and that at least the fraction `least` of the bytes is not saved."""
    assert saved_bytes(lean, **inputs) <= (1 - least) * saved_bytes(default, **inputs)
    assert_same_bits(step(lean, **inputs), step(default, **inputs))


@one_in(9, model_type=TYPES, dtype={"fp32": torch.float32, "bf16": torch.bfloat16})
def test_models_save_less(model_type, dtype):
    """On a CPU the references save intermediate results: all those of squared ReLUs, and fp32 copies of bf16.

    The references of a gated norm and of a convolution (Qwen3-Next) save no bf16 input, only fp32 copies. `lean` saves
    the inputs too.
    """
    lean, default = (tiny_model(model_type, dtype) for _ in range(2))
    tigon.patch(lean, memory="lean"), tigon.patch(default)
    tokens = torch.randint(3, 131, (2, 12), generator=torch.Generator().manual_seed(0))
    least = 0.03 if dtype == torch.float32 and model_type != "nemotron" else -0.001
    least = -0.015 if (dtype, model_type) == (torch.bfloat16, "qwen3_next") else least
    assert_lean(lean, default, least, input_ids=tokens, labels=tokens)


@pytest.mark.parametrize(("weights", "dtype"), [
    pytest.param(weights, dtype, id=f"{name}-{weights}")
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    for weights in ("full", "4 bit", "8 bit")
    # bitsandbytes computes 8-bit layers only in fp16.
    if (weights, name) != ("8 bit", "bf16")
])  # fmt: skip
def test_models_with_adapters_save_less(weights, dtype):
    def change(model: nn.Module) -> nn.Module:
        model = model.to(dtype)
        convert = {"4 bit": to_4bit, "8 bit": to_8bit}.get(weights)
        return with_lora(exchange(model, convert) if convert else model)

    assert_lean(*pair(change=change), 0.05)


@one_in(1, layers=["all", "one"], reentrant={"non-reentrant": False, "reentrant": True})
def test_models_with_checkpointed_layers_save_less(reentrant, layers):
    def change(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.model.layers[0].gradient_checkpointing = layers == "all"
        return model

    assert_lean(*pair(change=change), 0.0 if layers == "all" else 0.1)


def test_lean_models_work_with_save_on_cpu():
    lean, default = pair()
    with torch.autograd.graph.save_on_cpu():
        actual = step(lean)
    assert_same_bits(actual, step(default))


def test_lean_works_without_other_parts():
    lean, default = build("llama"), build("llama")
    tigon.patch(lean, loss=False, memory="lean"), tigon.patch(default, loss=False)
    assert_lean(lean, default)
    with tigon.patched(build("llama"), rope=False, memory="lean") as report:
        assert report


def test_a_model_of_tigons_modules_becomes_lean():
    """Nothing is replaced, and backward recomputes the norm."""
    model = nn.Sequential(nn.Linear(8, 8), tigon.RMSNorm(8), nn.Linear(8, 8))
    report = tigon.patch(model, memory="lean")
    x, outputs = torch.randn(3, 8), []
    model[1].register_forward_hook(lambda *args: outputs.append(weakref.ref(args[2])))
    y = model(x)
    assert outputs[0]() is None
    report.restore()
    z = model(x)
    assert outputs[1]() is not None
    assert torch.equal(y, z)
