"""Experts on a GPU in bf16.

They are as accurate as those of transformers, never wait for the GPU, and take no more memory.
"""

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import tigon
from gpu.steps import peak_bytes
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


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "one graph"])
@pytest.mark.parametrize(("absent", "router"), [(0, BF16), (0, torch.float32), (4, BF16)], ids=str)
@pytest.mark.parametrize("flavour", ["qwen3_moe", "gpt_oss"])
def test_experts_are_as_accurate_as_stock(flavour, absent, router, is_compiled):
    """Some experts are on another rank. The results are compared with those of the stock module in eager mode."""
    stock, inputs = _experts(flavour, absent), _inputs(router=router, present=E - absent)
    dy = torch.randn(T, H, device="cuda", dtype=BF16)
    wide = [x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    module = _patched(copy.deepcopy(stock))
    torch._dynamo.reset()
    actual = _step(torch.compile(module, fullgraph=True) if is_compiled else module, inputs, dy)
    actual = {name.removeprefix("_orig_mod."): value for name, value in actual.items()}
    eager, exact = _step(stock, inputs, dy), _step(copy.deepcopy(stock).float(), wide, dy.float())
    # The gradient of the weight of an absent expert has no meaning.
    present = inputs[1] < E - absent
    for results in (actual, eager, exact):
        results["weights"] = results["weights"] * present
    for name in exact:
        assert_accurate(actual[name], eager[name], exact[name], msg=name)


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
