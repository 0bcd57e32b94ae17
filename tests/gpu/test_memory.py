"""The levels of memory by the kernels: the bits of the default level, less memory, no waits."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from memory.steps import assert_same_bits, block, run
from memory.test_ops import CASES
from tigon.memory import offload

transformers = pytest.importorskip("transformers")

SIZE = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "pad_token_id": 0,
}
TOKENS = (2, 1024)


def make_model(memory: str, model_type: str = "llama", attention: str = "eager", **sizes: int) -> nn.Module:
    """Eager attention, because the backward of others adds in no fixed order."""
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
    """Loss and gradients; bytes that the forward pass leaves behind, and the most that the step takes.

    Bytes are those that were requested. What the allocator gives depends on the free blocks that it happens to have.
    """
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    loss = model(**batch).loss
    kept = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    loss.backward()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return [loss.detach(), *(p.grad for p in model.parameters())], kept, peak


def made_again(layers: int = 2, product: bool = False) -> int:
    """Bytes: two norms a layer, and in a graph the product: elsewhere no level keeps it."""
    return TOKENS[0] * TOKENS[1] * layers * 2 * (2 * SIZE["hidden_size"] + product * SIZE["intermediate_size"])


@pytest.fixture
def deterministic():
    """Also of what is not Tigon's: the embedding's gradient."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("level", ["lean", "lean+mlp", "checkpoint", "offload"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_the_bits_of_the_default_level(model_type, level, deterministic, monkeypatch):
    monkeypatch.setattr(offload, "WINDOW", 2**20)
    monkeypatch.setattr(offload, "WINDOW_TENSORS", 1)
    results = []
    for memory in (level, "default"):
        model, batch = make_model(memory, model_type), make_batch()
        take_step(model, batch)
        results.append(take_step(model, batch)[0])
        del model
    assert_same_bits(*results)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_less_memory(model_type):
    results = []
    for memory in ("lean", "default"):
        model, batch = make_model(memory, model_type, attention="sdpa"), make_batch()
        take_step(model, batch)
        results.append(take_step(model, batch)[1:])
        del model
    (lean_kept, lean_peak), (kept, peak) = results
    assert kept - lean_kept >= 0.98 * made_again()
    assert peak - lean_peak >= 0.8 * made_again()
    if model_type == "llama":  # the other has more norms
        assert kept - lean_kept <= 1.02 * (made_again() + TOKENS[0] * TOKENS[1] * 2 * SIZE["hidden_size"])


def test_less_memory_without_the_projections():
    """Gate and up of each layer."""
    results = []
    for memory in ("lean+mlp", "lean"):
        model, batch = make_model(memory, attention="sdpa"), make_batch()
        take_step(model, batch)
        results.append(take_step(model, batch)[1])
        del model
    less, gates = results[1] - results[0], TOKENS[0] * TOKENS[1] * 2 * 2 * 2 * SIZE["intermediate_size"]
    assert 0.98 * gates <= less <= 1.02 * gates


# --- what is left goes to the host -----------------------------------------------------------------


@pytest.fixture
def narrow(monkeypatch):
    """A window of a tensor or two, where that of a large model would hold all of these."""
    monkeypatch.setattr(offload, "WINDOW", 2**22)
    monkeypatch.setattr(offload, "WINDOW_TENSORS", 1)


def test_what_is_left_goes_to_the_host(narrow):
    """Kept: no more than a window, and what is smaller than 1 MiB; of 8 layers, where lean+mlp keeps some 150 MiB."""
    results = []
    for memory in ("offload", "lean+mlp"):
        model = make_model(memory, attention="sdpa", num_hidden_layers=8, vocab_size=1024)
        batch = {name: tokens % 1024 for name, tokens in make_batch().items()}
        take_step(model, batch)
        results.append(take_step(model, batch)[1])
        del model
    assert results[0] < 0.35 * results[1]


def test_the_host_waits_for_nothing(narrow):
    model, batch = make_model("offload", attention="sdpa"), make_batch()
    take_step(model, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_pinned_memory_is_used_again(narrow):
    model, batch = make_model("offload", attention="sdpa"), make_batch()
    for _ in range(3):
        take_step(model, batch)
    torch.cuda.synchronize()
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    assert before > 0
    for _ in range(3):
        take_step(model, batch)
        torch.cuda.synchronize()
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before


def squares(x: Tensor, w: Tensor, layers: int) -> Tensor:
    for _ in range(layers):
        x = (F.linear(x, w).sin() + x).cos()
    return x.sum()


@pytest.mark.parametrize("how", ["once", "twice", "one gradient", "dropped", "another stream", "busy"])
def test_copies_and_what_computes_keep_to_their_order(narrow, how):
    """Memory that was let go is written by others at once: who read it too late would see that."""
    w = torch.randn(2048, 2048, device="cuda").div_(50).requires_grad_()
    x = torch.randn(4096, 2048, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()

    def gradients(offloaded: bool) -> list[Tensor]:
        w.grad = x.grad = None
        with block(True, offload=offloaded):
            loss = squares(x * 1.0, w, 12)
        noise = [torch.full_like(x, torch.nan) for _ in range(8)]
        del noise
        if how == "dropped":
            del loss
            noise = [torch.full_like(x, torch.nan) for _ in range(16)]
            del noise
            with block(True, offload=offloaded):
                loss = squares(x * 1.0, w, 12)
        if how == "one gradient":
            return [loss.detach(), *torch.autograd.grad(loss, [w])]
        if how == "busy":  # the stream that computes is far behind the host
            torch.cuda._sleep(10**8)
        if how == "twice":
            loss.backward(retain_graph=True)
        if how == "another stream":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss.backward()
            torch.cuda.current_stream().wait_stream(side)
        else:
            loss.backward()
        return [loss.detach(), w.grad, x.grad]

    expected = gradients(False)
    for _ in range(3):
        assert_same_bits(gradients(True), expected)


def test_offload_in_a_graph_stays(narrow):
    """While a graph is captured nothing moves."""
    w = torch.randn(512, 512, device="cuda", requires_grad=True)
    x = torch.randn(1024, 512, device="cuda")

    def gradient() -> Tensor:
        with tigon.lean(offload=True):
            loss = squares(x, w, 2)
        return torch.autograd.grad(loss, w)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradient()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = gradient()
    x.normal_()
    graph.replay()
    assert torch.equal(given, gradient())


# --- every op --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_every_op(name, dtype):
    kept, expected = run(CASES[name], False, dtype, "cuda")
    assert kept >= KEPT.get(name, {"y"})
    kept, given = run(CASES[name], True, dtype, "cuda")
    assert not kept
    assert_same_bits(given, expected)


DTYPES = list(itertools.product((torch.bfloat16, torch.float32), repeat=3))


@pytest.mark.parametrize("n", [64, 1000, 1024, 4096, 5120, 8192, 16384, 32768])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
def test_the_norm_of_a_sum(n, dtypes):
    """Made of the sum: a variant of the kernel that sums over features would do so in another order."""
    make = lambda dtype, *shape: torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
    x, residual, w = make(dtypes[0], 333, n), make(dtypes[1], 333, n), make(dtypes[2], n)
    for rounding in ("before_weight", "after_weight"):
        with tigon.lean():
            y, _ = tigon.add_rms_norm(x, residual, w, rounding=rounding)
            expected, one = y.detach().clone(), torch.ones_like(y, requires_grad=True)
            z = y * one
            # Of two dtypes it is kept.
            assert len(tigon.memory.lean._block().by_storage) == (dtypes[2] == torch.promote_types(*dtypes[:2]))
            del y
        (given,) = torch.autograd.grad(z.sum(), one)
        assert torch.equal(given, expected)


@pytest.mark.parametrize("n", [64, 1000, 4096, 8192])
@pytest.mark.parametrize("op", [tigon.rms_norm, lambda x, w: tigon.layer_norm(x, w, w)], ids=["rms", "layer"])
def test_a_copy_of_the_weight_gives_the_same_bits(n, op):
    """Also where the weight itself is not aligned, as a part of a flat one."""
    x, flat = torch.randn(333, n, device="cuda", dtype=torch.bfloat16), torch.randn(n + 1, device="cuda").bfloat16()
    assert torch.equal(op(x, flat[1:]), op(x, flat[1:].clone()))


def test_no_wait():
    model, batch = make_model("lean", attention="sdpa"), make_batch()
    take_step(model, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_in_a_graph():
    """Forward and backward, captured; replayed on other values."""
    w, v = (torch.randn(*s, device="cuda", requires_grad=True) for s in ((512,), (64, 512)))
    x = torch.randn(1000, 512, device="cuda")

    def gradients(lean: bool) -> tuple[Tensor, ...]:
        with block(lean):
            h = x * w
            y = tigon.rms_norm(h, w)
            loss = (F.linear(y, v).square() + F.linear(tigon.swiglu(y, y), v)).sum()
            del y
        return torch.autograd.grad(loss, (w, v))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = gradients(True)
    x.normal_()
    graph.replay()
    assert_same_bits(list(given), list(gradients(False)))


def test_streams():
    """A product on another stream makes its input for itself, of memory that no one takes meanwhile."""
    side = torch.cuda.Stream()
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)

    def gradients(lean: bool) -> list[Tensor]:
        with block(lean):
            h = x * w
            y = tigon.rms_norm(h, w)
            here = F.linear(y, v)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                there = F.linear(y, v).float()
            y.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
            there.record_stream(torch.cuda.current_stream())
            loss = here.float().square().mean() + there.sin().mean()
            del y, h
        made = torch.autograd.grad(loss, (w, v))
        noise = [torch.full_like(x, torch.nan) for _ in range(3)]  # takes what was freed
        del noise
        return list(made)

    expected = gradients(False)
    for _ in range(5):
        assert_same_bits(gradients(True), expected)


def test_offloading_what_is_left(deterministic):
    results = []
    for memory in ("lean", "default"):
        model, batch = make_model(memory), make_batch()
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=True)
        with hooks if memory == "lean" else contextlib.nullcontext():
            results.append(take_step(model, batch))
        del model
    (given, lean_kept, _), (expected, kept, _) = results
    assert_same_bits(given, expected)
    assert lean_kept < 0.3 * kept


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_of_one_layer(reentrant, deterministic):
    results = []
    for memory in ("lean", "default"):
        model, batch = make_model(memory), make_batch()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.model.layers[0].gradient_checkpointing = False
        take_step(model, batch)
        results.append(take_step(model, batch))
        del model
    (given, lean_kept, _), (expected, kept, _) = results
    assert_same_bits(given, expected)
    assert kept - lean_kept >= 0.98 * made_again(layers=1)


def test_a_captured_backward_is_replayed_alone():
    """Its second replay reads what the first one did: nothing of that is overwritten."""
    torch.manual_seed(0)
    mlp = tigon.SwiGLUMLP(256, 512, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.requires_grad_(), *mlp.parameters()]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # where forward ran, backward runs
        y = mlp(x)
        expected = [g.clone() for g in torch.autograd.grad(y, leaves, dy, retain_graph=True)]
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            given = torch.autograd.grad(y, leaves, dy)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(list(given), expected)


def test_compiled():
    """Another graph fuses otherwise: as near to the default as roundings are."""
    results = []
    for memory in ("lean", "default"):
        torch._dynamo.reset()
        model, batch = make_model(memory, attention="sdpa"), make_batch()
        compiled = torch.compile(model, fullgraph=True)
        take_step(compiled, batch)
        results.append(take_step(compiled, batch))
        del model, compiled
    torch._dynamo.reset()
    (given, lean_kept, _), (expected, kept, _) = results
    assert kept - lean_kept >= 0.9 * made_again(product=True)
    for a, b in zip(given, expected, strict=True):
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
