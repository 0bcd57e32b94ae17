"""Experts on a GPU in bf16.

They are as accurate as those of transformers, never wait for the GPU, and take no more memory.
"""

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import tigon
from gpu.steps import capture, no_waits, peak_bytes
from tigon.recognition.guards.guard import install_guarded
from tigon.recognition.parts.experts import recognise_experts
from tigon.testing import assert_accurate

modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")

BF16 = torch.bfloat16
T, K, E, H, INNER = 999, 4, 16, 512, 256


def _experts(flavour: str = "qwen3_moe", absent: int = 0) -> nn.Module:
    sizes = {"hidden_size": H, "intermediate_size": INNER}
    if flavour == "gpt_oss":
        config, cls = gpt_oss.GptOssConfig(**sizes, num_local_experts=E - absent), gpt_oss.GptOssExperts
    else:
        sizes = {**sizes, "moe_intermediate_size": INNER, "num_experts": E - absent}
        config, cls = modeling.Qwen3MoeConfig(**sizes), modeling.Qwen3MoeExperts
    config._experts_implementation = "grouped_mm"
    module = cls(config).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.05, generator=generator)
    return module.to(BF16).train()


def _inputs(tokens: int = T, seed: int = 0, router: torch.dtype = BF16, present: int = E) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, device="cuda", generator=generator)
    weights, index = normal(tokens, E).softmax(-1).topk(K)
    weights, index = weights.masked_fill(index >= present, 0.0), index.clamp(max=present)
    return [normal(tokens, H).to(BF16).requires_grad_(), index, weights.to(router).requires_grad_()]


def _patched(module: nn.Module) -> nn.Module:
    install_guarded(module, recognise_experts(module))
    return module


def _step(module: nn.Module, inputs: list[Tensor], dy: Tensor | None = None) -> dict[str, Tensor]:
    tensors_by_name = {"hidden": inputs[0], "weights": inputs[2], **dict(module.named_parameters())}
    y = module(*inputs)
    dy = torch.ones_like(y) if dy is None else dy
    return {
        "y": y.detach(),
        **dict(zip(tensors_by_name, torch.autograd.grad(y, tensors_by_name.values(), dy), strict=True)),
    }


@pytest.mark.parametrize("router", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("absent", [0, 4], ids=["all experts", "some on another rank"])
@pytest.mark.parametrize("flavour", ["qwen3_moe", "gpt_oss"])
def test_experts_are_as_accurate_as_stock(flavour, absent, router):
    stock, inputs = _experts(flavour, absent), _inputs(router=router, present=E - absent)
    dy = torch.randn(T, H, device="cuda", dtype=BF16)
    wide = [x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    actual, eager = _step(_patched(copy.deepcopy(stock)), inputs, dy), _step(stock, inputs, dy)
    exact = _step(copy.deepcopy(stock).float(), wide, dy.float())
    # The gradient of the weight of an absent expert has no meaning.
    present = inputs[1] < E - absent
    for results in (actual, eager, exact):
        results["weights"] = results["weights"] * present
    for name in exact:
        assert_accurate(actual[name], eager[name], exact[name], msg=name)


@pytest.mark.parametrize("flavour", ["qwen3_moe", "gpt_oss"])
def test_experts_never_wait_for_the_device(flavour):
    module, inputs = _patched(_experts(flavour)), _inputs()
    _step(module, inputs)
    with no_waits():
        _step(module, inputs)


def test_experts_run_in_a_cuda_graph_with_other_indices():
    module, static, other = _patched(_experts()), _inputs(), _inputs(seed=1)
    graph, replay_results = capture(lambda: _step(module, static))
    with torch.no_grad():
        for x, y in zip(static, other, strict=True):
            x.copy_(y)
    graph.replay()
    for name, value in _step(module, static).items():
        assert torch.equal(replay_results[name], value), name


@pytest.mark.parametrize("flavour", ["qwen3_moe", "gpt_oss"])
def test_experts_compile_without_a_graph_break(flavour):
    """The results of the graph are as accurate as those of the stock module in eager mode."""
    torch._dynamo.reset()
    stock, inputs = _experts(flavour), _inputs()
    dy = torch.randn(T, H, device="cuda", dtype=BF16)
    compiled_module = torch.compile(_patched(copy.deepcopy(stock)), fullgraph=True)
    wide = [x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    actual, eager = _step(compiled_module, inputs, dy), _step(stock, inputs, dy)
    exact = _step(copy.deepcopy(stock).float(), wide, dy.float())
    for name, value in exact.items():
        result = actual[name] if name in actual else actual[f"_orig_mod.{name}"]
        assert_accurate(result, eager[name], value, msg=name)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_experts_accept_few_tokens(tokens):
    module, inputs = _experts(), _inputs(tokens)
    actual = _step(_patched(copy.deepcopy(module)), inputs)
    assert all(value.isfinite().all() for value in actual.values())
    if tokens:
        for name, value in _step(module, inputs).items():
            torch.testing.assert_close(actual[name], value, rtol=0, atol=2**-6 * value.abs().max().item(), msg=name)


def test_experts_have_the_same_bits_in_every_run():
    """Floating-point sums have a fixed order. Stock adds the gradients of a token's choices in no fixed order."""
    module, inputs = _patched(_experts()), _inputs()
    first, second = _step(module, inputs), _step(module, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_experts_save_only_the_first_product():
    module, inputs = _patched(_experts()), _inputs(8192)
    _step(module, inputs)
    # Modules of other tests that refer to each other may wait for the collector, which would free them in the call.
    gc.collect()
    before = torch.cuda.memory_allocated()
    y = module(*inputs)
    saved_bytes = torch.cuda.memory_allocated() - before - y.nbytes
    rows = 8192 * K
    # The product, and the slot, the choice and the expert of each row.
    expected = rows * 2 * INNER * 2 + rows * (8 + 8 + 2)
    assert expected <= saved_bytes <= expected + 2**14


def test_experts_need_less_memory_than_stock():
    def peak(module: nn.Module) -> int:
        inputs = _inputs(8192)
        _step(module, inputs)
        return peak_bytes(lambda: _step(module, inputs))

    stock = _experts()
    patched_peak, y, rows = peak(_patched(copy.deepcopy(stock))), 8192 * H * 2, 8192 * K
    # The saved tensors, the gradient of the first product and one tensor [rows, H].
    limit = 2 * y + rows * 18 + rows * 2 * (4 * INNER + H)
    # At its peak, backward also holds either the gradient of the activation's output or the other gradients.
    limit += max(rows * 2 * INNER, y + sum(p.nbytes for p in stock.parameters()))
    assert patched_peak < 1.03 * limit
    assert patched_peak < 0.75 * peak(stock)


@pytest.mark.parametrize("flavour", ["qwen3_moe", "gpt_oss"])
def test_frozen_experts_compute_only_the_gradients_of_tokens_and_router(flavour):
    """These gradients have the same bits as in a step that computes all gradients."""
    module, inputs = _patched(_experts(flavour)), _inputs()
    full = _step(module, inputs)
    module.requires_grad_(False)
    y = module(*inputs)
    gradients = torch.autograd.grad(y, [inputs[0], inputs[2]], torch.ones_like(y))
    for gradient, name in zip(gradients, ("hidden", "weights"), strict=True):
        assert torch.equal(gradient, full[name])


def test_moe_mlp_accepts_other_dtypes():
    """fp32 and fp16 run a loop over experts, which waits for the device as stock does."""
    for dtype in (torch.float32, torch.float16):
        x, index, weights = _inputs()
        x = x.detach().to(dtype).requires_grad_()
        shapes = (E, 2 * INNER, H), (E, H, INNER), (E, 2 * INNER), (E, H)
        experts = [(0.05 * torch.randn(s, device="cuda")).to(dtype).requires_grad_() for s in shapes]
        results = []
        for function in (tigon.moe_mlp, tigon.ops.experts.moe_mlp.moe_mlp_reference):
            up, down, up_bias, down_bias = experts
            y = function(x, up, down, index, weights, up_bias=up_bias, down_bias=down_bias)
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, weights, *experts])])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=2**-6 * expected.abs().max().item())


@pytest.mark.parametrize("activation", ["gelu_tanh", "relu2"])
def test_moe_mlp_with_biases_is_accurate(activation):
    """The weights are transposed. No model of transformers has these forms together with these activations."""
    x, index, weights = _inputs(router=torch.float32)
    width = INNER if activation == "relu2" else 2 * INNER
    generator = torch.Generator("cuda").manual_seed(2)
    shapes = (E, H, width), (E, INNER, H), (E, width), (E, H)
    experts = [(0.05 * torch.randn(s, device="cuda", generator=generator)).to(BF16) for s in shapes]
    tensors, dy = [x, weights, *experts], torch.randn(T, H, device="cuda", dtype=BF16)
    options = {"transposed": True, "activation": activation}

    def run(function, dtype: torch.dtype | None = None) -> list[Tensor]:
        x, weights, up, down, *biases = leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
        y = function(x, up, down, index, weights, **options, **dict(zip(("up_bias", "down_bias"), biases, strict=True)))
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    reference = tigon.ops.experts.moe_mlp.moe_mlp_reference
    for i, triple in enumerate(zip(run(tigon.moe_mlp), run(reference), run(reference, torch.float64), strict=True)):
        assert_accurate(*triple, msg=str(i))


@pytest.mark.parametrize("flavour", ["qwen3_moe", "gpt_oss"])
def test_the_repeated_first_product_has_the_same_bits_and_is_not_saved(flavour):
    """The results of two runs are compared, and the memory that is allocated between forward and backward."""
    module, results, sizes = _patched(_experts(flavour)), [], []
    for is_lean in (False, True):
        inputs = _inputs()
        with tigon.lean(mlp=is_lean):
            _step(module, inputs)
            gc.collect()
            before = torch.cuda.memory_allocated()
            y = module(*inputs)
            sizes.append(torch.cuda.memory_allocated() - before)
            del y
            results.append(_step(module, inputs))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert sizes[0] - sizes[1] >= 0.9 * T * K * 2 * INNER * 2


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "a mask"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_the_loss_of_routers_is_that_of_transformers(dtype, masked):
    """In fp64 the function of transformers is the judge. In bf16, `topk` may choose any of several equal values."""
    generator = torch.Generator("cuda").manual_seed(0)
    mask = (torch.arange(1000, device="cuda") % 100 < 90).long().view(2, 500) if masked else None
    logits = tuple(torch.randn(1000, 60, device="cuda", generator=generator).to(dtype) for _ in range(4))
    results = []
    for function, inputs in (
        (tigon.load_balancing_loss, logits),
        (modeling.load_balancing_loss_func, logits),
        (modeling.load_balancing_loss_func, tuple(x.double() for x in logits)),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss = function(tuple(leaves), 60, 4, mask)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for actual, eager, exact in zip(*results, strict=True):
        if dtype == BF16:
            # Equal logits change the counts of the exact result by a few tokens of 4000.
            torch.testing.assert_close(actual.double(), exact.double(), rtol=2e-2, atol=2e-2 * exact.abs().max().item())
        else:
            assert_accurate(actual, eager, exact, smallest=60 / 4000)
