"""The levels of memory on the kernels have the bits of the default level, need less memory and never wait."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from gpu.steps import capture, no_waits
from memory.steps import assert_same_bits, block, run
from memory.test_ops import ALIVE, CASES
from tigon.memory.levels import MEMORY

transformers = pytest.importorskip("transformers")

SIZE = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048, "vocab_size": 32000, "pad_token_id": 0,
}  # fmt: skip
TOKENS = (2, 1024)


def make_model(memory: str, model_type: str = "llama", attention: str = "eager", **sizes: int) -> nn.Module:
    """Return a patched model. Only eager attention has a backward that sums in a fixed order."""
    config = transformers.AutoConfig.for_model(model_type, **SIZE | sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    model = model.cuda().train()
    tigon.patch(model, memory=memory)
    return model


def make_batch() -> dict[str, Tensor]:
    tokens = torch.randint(3, SIZE["vocab_size"], TOKENS, generator=torch.Generator().manual_seed(1)).cuda()
    return {"input_ids": tokens, "labels": tokens}


def take_step(model: nn.Module, batch: dict) -> tuple[list[Tensor], int, int]:
    """Return the loss and the gradients, the bytes that are allocated after the forward pass, and the peak of the step.

    These are the requested bytes. The sizes of the allocated blocks depend on the blocks that are free at the time.
    """
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    loss = model(**batch).loss
    saved_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    loss.backward()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return [loss.detach(), *(p.grad for p in model.parameters())], saved_bytes, peak


def second_step(memory: str, model_type: str = "llama", **options) -> tuple[list[Tensor], int, int]:
    """Return what `take_step` returns after a first step, which compiles kernels and allocates workspaces."""
    model, batch = make_model(memory, model_type, **options), make_batch()
    take_step(model, batch)
    return take_step(model, batch)


def recomputed_bytes(layers: int = 2, product: bool = False) -> int:
    """Return the bytes of two norms for each layer. In a graph act(gate) * up is recomputed too."""
    return TOKENS[0] * TOKENS[1] * layers * 2 * (2 * SIZE["hidden_size"] + product * SIZE["intermediate_size"])


@pytest.fixture
def deterministic():
    """Make torch's own kernels deterministic too, such as the gradient of the embedding."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("level", MEMORY[1:])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_every_level_has_the_bits_of_the_default_level(model_type, level, deterministic):
    assert_same_bits(*(second_step(memory, model_type)[0] for memory in (level, "default")))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_lean_needs_less_memory(model_type):
    results = [second_step(memory, model_type, attention="sdpa")[1:] for memory in ("lean", "default")]
    (lean_saved_bytes, lean_peak), (saved_bytes, peak) = results
    assert saved_bytes - lean_saved_bytes >= 0.98 * recomputed_bytes()
    assert peak - lean_peak >= 0.8 * recomputed_bytes()
    # The other model type has more norms.
    if model_type == "llama":
        assert saved_bytes - lean_saved_bytes <= 1.02 * (
            recomputed_bytes() + TOKENS[0] * TOKENS[1] * 2 * SIZE["hidden_size"]
        )


def test_lean_mlp_saves_neither_gate_nor_up():
    results = [second_step(memory, attention="sdpa")[1] for memory in ("lean+mlp", "lean")]
    difference, gates = results[1] - results[0], TOKENS[0] * TOKENS[1] * 2 * 2 * 2 * SIZE["intermediate_size"]
    assert 0.98 * gates <= difference <= 1.02 * gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_recomputed(name, dtype):
    alive, expected = run(CASES[name], False, dtype, "cuda")
    assert alive >= ALIVE.get(name, {"y"})
    alive, actual = run(CASES[name], True, dtype, "cuda")
    assert not alive
    assert_same_bits(actual, expected)


DTYPES = list(itertools.product((torch.bfloat16, torch.float32), repeat=3))


@pytest.mark.parametrize("n", [64, 1000, 1024, 4096, 5120, 8192, 16384, 32768])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
def test_the_norm_of_a_sum_is_recomputed_from_the_sum(n, dtypes):
    """The recomputation reads rstd, because another variant of the kernel may sum over features in another order."""
    random = lambda dtype, *shape: torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
    x, residual, w = random(dtypes[0], 333, n), random(dtypes[1], 333, n), random(dtypes[2], n)
    for rounding in ("before_weight", "after_weight"):
        with tigon.lean():
            y, _ = tigon.add_rms_norm(x, residual, w, rounding=rounding)
            expected, one = y.detach().clone(), torch.ones_like(y, requires_grad=True)
            z = y * one
            # The norm is saved if the weight has another dtype than the sum.
            assert len(tigon.memory.lean._block().by_storage) == (dtypes[2] == torch.promote_types(*dtypes[:2]))
            del y
        (recomputed_norm,) = torch.autograd.grad(z.sum(), one)
        assert torch.equal(recomputed_norm, expected)


@pytest.mark.parametrize("n", [64, 1000, 4096, 8192])
@pytest.mark.parametrize("op", [tigon.rms_norm, lambda x, w: tigon.layer_norm(x, w, w)], ids=["rms", "layer"])
def test_a_copy_of_the_weight_gives_the_same_bits(n, op):
    """The weight itself is not aligned, like a part of a flat parameter."""
    x, flat = torch.randn(333, n, device="cuda", dtype=torch.bfloat16), torch.randn(n + 1, device="cuda").bfloat16()
    assert torch.equal(op(x, flat[1:]), op(x, flat[1:].clone()))


# The level, the model, and its sizes beyond those of the other tests.
STEPS = {
    "default": ("default", "llama", {}), "lean": ("lean", "llama", {}),
    "experts": ("default", "qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 256}),
    "experts with biases": ("default", "gpt_oss", {"num_local_experts": 8, "attention": "eager"}),
}  # fmt: skip


@pytest.mark.parametrize(("level", "model_type", "sizes"), STEPS.values(), ids=STEPS)
def test_a_step_never_waits_for_the_device(level, model_type, sizes):
    model, batch = make_model(level, model_type, **{"attention": "sdpa"} | sizes), make_batch()
    if model_type == "gpt_oss":
        # Eager attention of transformers copies a number to the device when it builds a mask.
        tokens = batch["input_ids"].shape[1]
        mask = torch.full((tokens, tokens), -torch.inf, device="cuda", dtype=model.dtype).triu(1)[None, None]
        batch["attention_mask"] = {"full_attention": mask, "sliding_attention": mask}
    take_step(model, batch)
    with no_waits():
        model(**batch).loss.backward()


def test_a_patched_model_never_holds_all_logits():
    """A stock model holds them more than three times."""
    model = make_model("default", attention="sdpa", vocab_size=128256, tie_word_embeddings=True)
    batch = {name: tokens.repeat(2, 1) for name, tokens in make_batch().items()}
    take_step(model, batch)
    assert take_step(model, batch)[2] < 1.2 * batch["labels"].numel() * 128256 * 2


def test_a_captured_lean_step_is_replayed_on_other_values():
    w, v = (torch.randn(*s, device="cuda", requires_grad=True) for s in ((512,), (64, 512)))
    x = torch.randn(1000, 512, device="cuda")

    def gradients(lean: bool) -> tuple[Tensor, ...]:
        with block(lean):
            h = x * w
            y = tigon.rms_norm(h, w)
            loss = (F.linear(y, v).square() + F.linear(tigon.swiglu(y, y), v)).sum()
            del y
        return torch.autograd.grad(loss, (w, v))

    graph, replay_results = capture(lambda: gradients(True), warm_ups=3)
    x.normal_()
    graph.replay()
    assert_same_bits(list(replay_results), list(gradients(False)))


def test_a_product_on_another_stream_recomputes_its_own_input():
    """The memory of that input must not be reused too early."""
    side = torch.cuda.Stream()
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)

    def gradients(lean: bool) -> list[Tensor]:
        with block(lean):
            h = x * w
            y = tigon.rms_norm(h, w)
            product = F.linear(y, v)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                side_product = F.linear(y, v).float()
            y.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
            side_product.record_stream(torch.cuda.current_stream())
            loss = product.float().square().mean() + side_product.sin().mean()
            del y, h
        results = torch.autograd.grad(loss, (w, v))
        # These tensors reuse the freed memory.
        nan_tensors = [torch.full_like(x, torch.nan) for _ in range(3)]
        del nan_tensors
        return list(results)

    expected = gradients(False)
    for _ in range(5):
        assert_same_bits(gradients(True), expected)


def test_a_captured_backward_may_be_replayed_alone():
    """The second replay reads the same tensors as the first one, so backward must not overwrite them."""
    torch.manual_seed(0)
    mlp = tigon.SwiGLUMLP(256, 512, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.requires_grad_(), *mlp.parameters()]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    # Backward runs on the stream of the forward pass.
    with torch.cuda.stream(stream):
        y = mlp(x)
        expected = [g.clone() for g in torch.autograd.grad(y, leaves, dy, retain_graph=True)]
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            replay_results = torch.autograd.grad(y, leaves, dy)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(list(replay_results), expected)


def test_a_compiled_lean_model_saves_less():
    """The two graphs fuse different operations, so their results differ by roundings."""
    results = []
    for memory in ("lean", "default"):
        torch._dynamo.reset()
        model, batch = make_model(memory, attention="sdpa"), make_batch()
        compiled_model = torch.compile(model, fullgraph=True)
        take_step(compiled_model, batch)
        results.append(take_step(compiled_model, batch))
        del model, compiled_model
    torch._dynamo.reset()
    (actual, lean_saved_bytes, _), (expected, saved_bytes, _) = results
    assert saved_bytes - lean_saved_bytes >= 0.9 * recomputed_bytes(product=True)
    for a, b in zip(actual, expected, strict=True):
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
