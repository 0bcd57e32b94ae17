"""Which kernels of attention save their outputs in checkpointed layers, and what runs again; compiled models too."""

import contextlib
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import library

import tigon
from memory.steps import assert_same_bits, paged
from memory.test_attention import KERNEL, LAYERS, count_calls, make_model
from tigon.memory.attention import find_kernel

pytest.importorskip("transformers")

from transformers import AttentionInterface

from hf.ways import batch, build
from memory.test_models import step


def test_eager_attention_runs_again_and_the_report_says_so():
    model = build("llama", num_hidden_layers=LAYERS)
    report = tigon.patch(model, memory="checkpoint+attention")
    assert "no kernel computes the attention of this model, because it is eager, so backward runs" in report.notes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(step(model), step(make_model("default", attention="eager")))
    assert "eager" not in tigon.patch(make_model("default"), memory="checkpoint+attention").notes[0]


def test_attention_without_a_kernel_warns_once():
    """With dropout, torch computes attention on a CPU by single operators."""
    model = make_model("checkpoint+attention", attention_dropout=0.3)
    expected = make_model("default", attention_dropout=0.3)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="backward runs attention again, .* no attention kernel of torch") as record:
        actual = step(model)
    torch.manual_seed(3)
    assert_same_bits(actual, step(expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)
    assert len([w for w in record if "attention" in str(w.message)]) == 1


@pytest.mark.parametrize(("name", "dropout"), [
    ("_scaled_dot_product_flash_attention", 3), ("_scaled_dot_product_efficient_attention", 5),
    ("_scaled_dot_product_cudnn_attention", 5), ("_scaled_dot_product_fused_attention_overrideable", 4),
    ("_scaled_dot_product_flash_attention_for_cpu", 3), ("_flash_attention_forward", 7),
])  # fmt: skip
def test_outputs_of_kernels_with_dropout_are_not_saved(name, dropout):
    kernel = find_kernel(getattr(torch.ops.aten, name).default)
    args = [None] * dropout
    assert kernel.find_obstacle((*args, 0.0), {}) is None
    assert kernel.find_obstacle((*args, 0.1), {}) == "attention has dropout"
    assert kernel.find_obstacle(tuple(args), {"dropout_p": 0.1}) == "attention has dropout"
    assert kernel.find_obstacle(tuple(args), {}) is None


# The schemas of flash-attn 2.7, of its third version, and of its builds on the hub, whose q is declared as written.
PACKAGES = {
    "tigon_test_flash_attn": ("_flash_attn_forward", "Tensor q, Tensor k, Tensor v, float dropout_p, float scale"),
    "tigon_test_flash_attn_3": ("fwd", "Tensor q, Tensor k, Tensor v, Tensor(out_!)? out_=None"),
    "_tigon_test_flash_attn2": (
        "varlen_fwd", "Tensor! q, Tensor k, Tensor v, Tensor(out_!)? out_, Tensor? slopes, float p_dropout=0.0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_kernels_of_packages_are_recognised(package):
    registry = library.Library(package, "DEF")
    name, arguments = PACKAGES[package]
    registry.define(f"{name}({arguments}) -> Tensor[]")
    for other in ("bwd", "fwd_kvcache", "layer_norm_fwd", "_flash_attn_backward"):
        registry.define(f"{other}({arguments}) -> Tensor[]")
    operators, q = getattr(torch.ops, package), torch.ones(1)
    kernel = find_kernel(getattr(operators, name).default)
    assert kernel.find_obstacle((q, q, q), {}) is None
    if "out_!" in arguments:
        expected = "attention writes its output into a tensor of its caller"
        assert kernel.find_obstacle((q, q, q, q), {}) == kernel.find_obstacle((q, q, q), {"out_": q}) == expected
    if "dropout" in arguments:
        options = {"dropout_p": 0.1, "p_dropout": 0.1}
        assert kernel.find_obstacle((q, q, q), options) == "attention has dropout"
    for other in ("bwd", "fwd_kvcache", "layer_norm_fwd", "_flash_attn_backward"):
        assert find_kernel(getattr(operators, other).default) is None


def attend_outside_of_torch(module, query, key, value, attention_mask, **unused):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2), None


def attend_and_scale_in_place(module, query, key, value, attention_mask, **unused):
    y = attend_outside_of_torch(module, query, key, value, attention_mask)[0]
    # Autograd allows this if no node has saved y.
    return (y * 0.5 if y.requires_grad else y.mul_(0.5)), None


class ThroughHooks(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that return each tensor in another object."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: [tensor], lambda packed: packed[0])


@pytest.mark.parametrize(
    ("level", "hooks"),
    [("checkpoint+attention", ThroughHooks), ("checkpoint+attention+offload", contextlib.nullcontext)],
)
def test_outputs_of_a_kernel_that_are_written_in_place_are_computed_again(level, hooks):
    AttentionInterface.register("tigon_test", attend_and_scale_in_place)
    results = []
    for memory in ("default", level):
        model = make_model(memory, attention="tigon_test")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        with paged(256):
            with hooks() if memory == level else contextlib.nullcontext():
                loss = model(**batch(0)).loss
            loss.backward(retain_graph=True)
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert_same_bits(*results)


class AttentionWithCache:
    """A function of attention that computes a tensor in its first call only, by attention."""

    def __init__(self, has_gradients: bool) -> None:
        self.has_gradients, self.cache = has_gradients, None

    def __call__(self, module, query, key, value, attention_mask, **unused):
        if self.cache is None:
            q, k, v = (x.detach() + 1 for x in (query, key, value))
            with torch.set_grad_enabled(self.has_gradients):
                self.cache = attend_outside_of_torch(module, q, k, v, attention_mask)[0]
        y = attend_outside_of_torch(module, query, key, value, attention_mask)[0]
        return y + self.cache, None


@pytest.mark.parametrize("has_gradients", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_call_that_only_the_first_run_makes_is_not_taken_for_another(has_gradients):
    results = []
    for memory in ("checkpoint", "checkpoint+attention"):
        AttentionInterface.register("tigon_test", AttentionWithCache(has_gradients))
        model = make_model(memory, attention="tigon_test")
        loss = model(**batch(0)).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert_same_bits(*results)


def test_registered_functions_are_recognised():
    AttentionInterface.register("tigon_test", attend_outside_of_torch)
    model = make_model("checkpoint+attention", attention="tigon_test")
    assert count_calls(model) == LAYERS


def count_in_profile(call) -> tuple[list, int]:
    """Return the results of a call, and how often it called the kernel. Modes would prevent compilation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results = call()
    return results, sum(e.count for e in profile.key_averages() if e.key == KERNEL.name().partition(".")[0])


@pytest.mark.thorough
def test_the_graph_of_a_model_saves_the_outputs():
    torch._dynamo.reset()
    model = make_model("checkpoint+attention", num_hidden_layers=2)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)

    def run() -> list:
        model.zero_grad()
        loss = compiled(**batch(0)).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    run()
    results, count = count_in_profile(run)
    # Each layer calls it once. At the level "checkpoint", the first layer would call it again.
    assert count == 2
    torch.testing.assert_close(results, step(make_model("default", num_hidden_layers=2)), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.thorough
def test_compiled_layers_run_attention_again_and_warn():
    """Their graphs are compiled, although the layers run in a mode."""
    results = []
    for level in ("checkpoint+attention", "checkpoint"):
        torch._dynamo.reset()
        graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        model = make_model(level)
        for layer in model.model.layers:
            layer.compile(backend=graphs, fullgraph=True)
        if level == "checkpoint+attention":
            with pytest.warns(UserWarning, match="has saved its outputs: attention runs in a compiled graph"):
                step(model)
        results.append(step(model))
        assert graphs.frame_count >= 1
    assert_same_bits(*results)
    torch._dynamo.reset()
