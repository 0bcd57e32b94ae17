"""Experts with low-rank adapters: as accurate as PEFT's sums of weights and adapters, without tensors of their size."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
import tigon.ops.adapters.grouped_low_rank as grouped
import tigon.ops.adapters.grouped_low_rank_product as product
import tigon.ops.adapters.lora_expert_nodes as nodes
from op_cases import DEVICE, assert_as_accurate_as_eager, one_in, outputs_and_gradients, saved_tensors
from tigon.ops.adapters.grouped_low_rank import GroupedLowRankConfig, grouped_project, split_experts
from tigon.ops.adapters.lora_expert_activation import (
    ActivationAdapters,
    NeededActivationGradients,
    lora_activation_backward,
    lora_activation_forward,
)
from tigon.ops.adapters.lora_experts import ExpertAdapter, adapted_moe_mlp, lora_moe_mlp_reference
from tigon.ops.experts.arguments import ExpertParameters
from tigon.ops.experts.choice_order import Routing, route
from tigon.ops.experts.moe_mlp import moe_mlp_reference
from tigon.runtime.tuning import tuned

T, K, E, H, INNER = 40, 3, 6, 16, 24
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = "x", "up_proj", "down_proj", "top_k_index", "top_k_weights", "up_a", "up_b", "down_a", "down_b"


def _normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, scale: float = 1.0, trains: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_(trains)


def _index(tokens: int = T, choices: int = K, experts: int = E) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens)]).to(DEVICE)


def _as_peft_stores(b: Tensor) -> Tensor:
    """Return b [E, out, r] with the strides of a view of PEFT's B [out, r E], in which experts are adjacent."""
    return b.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_(b.requires_grad)


def _inputs(
    dtype: torch.dtype, adapter_dtype: torch.dtype, rank: int = 4, sizes: tuple[int, ...] = (T, H, E, INNER, K),
    transposed: bool = False, gated: bool = True, trains: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the inputs of `lora_moe_mlp`. The experts are frozen unless `trains` is True."""
    t, h, e, inner, k = sizes
    width = inner * (1 + gated)
    up, down = (
        _normal(e, m, n, dtype=dtype, seed=i, scale=n**-0.5, trains=False)
        for i, (m, n) in enumerate(((width, h), (h, inner)))
    )
    if transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    factors = [
        _normal(*s, dtype=adapter_dtype, seed=5 + i, scale=s[-1] ** -0.5)
        for i, s in enumerate(((e, rank, h), (e, width, rank), (e, rank, inner), (e, h, rank)))
    ]
    factors[1], factors[3] = _as_peft_stores(factors[1]), _as_peft_stores(factors[3])
    values = _normal(t, h, dtype=dtype), up, down, _index(t, k, e), _normal(t, k, dtype=dtype), *factors
    if trains:
        up.requires_grad_(), down.requires_grad_()
    return dict(zip(NAMES, values, strict=True))


def _check(inputs: dict[str, Tensor], **options) -> None:
    """Compare outputs and gradients with PEFT's computation in the dtypes of the inputs, and with exact values."""
    call = lambda f: lambda *values: f(**dict(zip(NAMES, values, strict=True)), up_scaling=0.7, **options)
    assert_as_accurate_as_eager(call(tigon.lora_moe_mlp), call(lora_moe_mlp_reference), list(inputs.values()))


DTYPE_PAIRS = {"bf16-fp32": (BF16, FP32), "bf16": (BF16, BF16), "fp16-fp32": (FP16, FP32), "fp32": (FP32, FP32)}
LAYOUTS = {
    "plain": {}, "transposed, gelu_tanh": {"transposed": True, "activation": "gelu_tanh"},
    "no gate": {"activation": "relu2"}, "a function": {"activation": lambda h: h[:, ::2] * h[:, 1::2].sigmoid()},
}  # fmt: skip


@one_in(2, layout=LAYOUTS, dtypes=DTYPE_PAIRS, trains=[False, True])
@pytest.mark.sampled(in_interpreter=7)
def test_lora_moe_mlp_is_as_accurate_as_peft(layout, dtypes, trains):
    gated, transposed = layout.get("activation") != "relu2", layout.get("transposed", False)
    _check(_inputs(*dtypes, transposed=transposed, gated=gated, trains=trains), **layout)


# Sizes of (tokens, hidden, experts, inner, choices) and ranks that fill no tile, and some that take several of them.
SIZES = {
    "one": ((1, 8, 2, 8, 1), 1, BF16), "odd": ((37, 43, 5, 29, 2), 3, BF16),
    "a large rank": ((40, 24, 4, 16, 2), 70, BF16),
    **{
        name: pytest.param(*case, marks=pytest.mark.thorough_in_interpreter)
        for name, case in {
            "odd, fp16": ((37, 43, 5, 29, 2), 3, FP16), "rank 20": ((40, 24, 4, 16, 2), 20, FP16),
            "several tiles": ((140, 150, 2, 72, 1), 16, BF16),
        }.items()
    },
}  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize(("sizes", "rank", "dtype"), SIZES.values(), ids=SIZES)
def test_lora_moe_mlp_of_any_size(sizes, rank, dtype):
    _check(_inputs(dtype, FP32, rank=rank, sizes=sizes))


@pytest.mark.kernels
@pytest.mark.parametrize("fused_rank", [16, 0])
def test_small_tiles(fused_rank, monkeypatch):
    """Each loop of a kernel makes several steps, and the features have several parts."""
    monkeypatch.setattr(nodes, "LARGEST_FUSED_RANK", fused_rank)
    monkeypatch.setattr(grouped, "SPLIT_BLOCK_E", 1)
    monkeypatch.setattr(grouped, "SPLIT_BLOCK_N", 16)
    monkeypatch.setattr(grouped, "EXPAND_BLOCKS", 2)
    with tuned(GroupedLowRankConfig, block_t=16, block_n=16):
        _check(_inputs(FP16, FP32, rank=3, sizes=(30, 43, 2, 40, 2)))


@pytest.mark.kernels
@one_in(4, transposed=[False, True], dtype={"bf16": BF16, "fp16": FP16}, rank=[3, 16, 20])
def test_products_with_the_weights_add_the_adapters(transposed, dtype, rank, monkeypatch):
    inputs = _inputs(dtype, FP32, rank=rank, sizes=(50, 48, 3, 32, 2), transposed=transposed)
    weight = inputs["up_proj"] if transposed else inputs["up_proj"].mT
    for name, size in {"BLOCK_T": 16, "BLOCK_M": 32, "BLOCK_N": 16}.items():
        monkeypatch.setattr(product, name, size)
    if product.adds_in_product(inputs["x"], weight, inputs["up_b"].mT):
        monkeypatch.setattr(product, "grouped_expand", None)
    else:
        assert torch.cuda.get_device_capability() < (9, 0)
    _check(inputs, transposed=transposed)


@pytest.mark.kernels
@one_in(2, transposed=[False, True], gated=[False, True])
def test_the_activation_adds_the_adapters_where_the_products_cannot(transposed, gated, monkeypatch):
    monkeypatch.setattr(nodes, "adds_in_product", lambda *_: False)
    monkeypatch.setattr(product, "adds_in_product", lambda *_: False)
    inputs = _inputs(BF16, FP32, transposed=transposed, gated=gated)
    _check(inputs, transposed=transposed, activation="silu" if gated else "relu2")


INDICES = {
    "all to one expert": lambda: torch.full((T, K), 2, device=DEVICE), "int32": lambda: _index().int(),
    "absent": lambda: torch.where(torch.arange(T * K, device=DEVICE).view(T, K) % 4 == 1, E + 7, _index()),
    "all absent": lambda: torch.full((T, K), E, device=DEVICE),
}  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_every_form_of_index(index, poisoned):
    """Experts without rows get gradients of 0, and nothing reads the rows of experts of other ranks."""
    _check(_inputs(BF16, FP32) | {"top_k_index": index()})


@pytest.mark.kernels
def test_no_tokens():
    inputs = _inputs(BF16, FP32)
    for name in ("x", "top_k_index", "top_k_weights"):
        inputs[name] = inputs[name].detach()[:0].requires_grad_(name != "top_k_index")
    y, gradients = outputs_and_gradients(
        lambda *v: tigon.lora_moe_mlp(**dict(zip(NAMES, v, strict=True))), list(inputs.values())
    )
    assert y[0].shape == (0, H)
    assert all((gradient == 0).all() for gradient in gradients)


@one_in(1, adapted={"moe_mlp": False, "lora_moe_mlp": True}, trains=[False, True])
def test_a_rank_without_experts(adapted, trains):
    """All choices are experts of other ranks, and no memory stands before the empty list of ends."""
    inputs = _inputs(BF16, FP32, sizes=(5, H, 2, INNER, 2), trains=trains)
    tokens = {n: inputs[n] for n in ("x", "top_k_index", "top_k_weights")}
    experts = {
        n: t.detach()[:0].requires_grad_(t.requires_grad)
        for n, t in inputs.items()
        if n not in tokens and (adapted or n.endswith("proj"))
    }
    op, values = tigon.lora_moe_mlp if adapted else tigon.moe_mlp, {**tokens, **experts}
    y, gradients = outputs_and_gradients(lambda *v: op(**dict(zip(values, v, strict=True))), list(values.values()))
    assert y[0].shape == (5, H)
    assert all((result == 0).all() for result in (*y, *gradients))


def _adapters(inputs: int, outputs: int, ranks: tuple[int, ...], dtype: torch.dtype = FP32) -> list[ExpertAdapter]:
    return [
        ExpertAdapter(
            _normal(E, rank, inputs, seed=10 * i, dtype=dtype, scale=inputs**-0.5),
            _as_peft_stores(_normal(E, outputs, rank, seed=10 * i + 1, dtype=dtype, scale=rank**-0.5)), 0.5 + i,
        )
        for i, rank in enumerate(ranks)
    ]  # fmt: skip


@one_in(1, biases={"": False, "biases": True}, ranks=[((2, 5), (3,)), ((), (4, 1)), ((4,), ()), ((), ())])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.sampled(in_interpreter=7)
def test_any_number_of_adapters(dtype, ranks, biases):
    """The result is that of experts whose weights contain the adapters, here in fp64."""
    inputs = _inputs(dtype, FP32)
    x, up, down, index, weights = (inputs[name] for name in NAMES[:5])
    adapters = [_adapters(H, 2 * INNER, ranks[0]), _adapters(INNER, H, ranks[1])]
    bias = [_normal(E, n, dtype=dtype, seed=n) if biases else None for n in (2 * INNER, H)]
    leaves = [x, weights, *(p for group in adapters for each in group for p in each[:2])]

    def run() -> Tensor:
        return adapted_moe_mlp(x, ExpertParameters(up, down, *bias), index, weights, *adapters, "silu", False)

    def exact() -> Tensor:
        sums = [
            w.double() + sum(each.scaling * each.b.double() @ each.a.double() for each in group)
            for w, group in zip((up, down), adapters, strict=True)
        ]
        wide = {f"{name}_bias": None if b is None else b.double() for name, b in zip(("up", "down"), bias, strict=True)}
        return moe_mlp_reference(x.double(), *sums, index, weights.double(), **wide)

    results = []
    for function in (run, exact):
        y = function()
        upstream = _normal(T, H, seed=99, trains=False).to(y.dtype)
        results.append([y, *torch.autograd.grad(y, leaves, upstream)])
    for ours, expected in zip(*results, strict=True):
        error = (ours.double() - expected.double()).abs().max() / expected.abs().max()
        assert error < {BF16: 0.03, FP32: 1e-5}[dtype]


@pytest.mark.kernels
@one_in(4, needed=["x", "top_k_weights", "up_a", "up_b", "down_a", "down_b", "up_a down_b"], fused_rank=[16, 0])
@pytest.mark.sampled(in_interpreter=2)
def test_only_the_gradients_that_are_needed(monkeypatch, needed, fused_rank):
    monkeypatch.setattr(nodes, "LARGEST_FUSED_RANK", fused_rank)
    inputs = _inputs(BF16, FP32)
    run = lambda *values: tigon.lora_moe_mlp(**dict(zip(NAMES, values, strict=True)))
    leaves = [name for name, tensor in inputs.items() if tensor.requires_grad]
    full = dict(zip(leaves, outputs_and_gradients(run, list(inputs.values()))[1], strict=True))
    some = {n: x.detach().requires_grad_(True) if n in needed.split() else x.detach() for n, x in inputs.items()}
    gradients = outputs_and_gradients(run, list(some.values()))[1]
    for name, gradient in zip([name for name in leaves if name in needed.split()], gradients, strict=True):
        assert torch.equal(gradient, full[name]), name


class _Allocations(TorchDispatchMode):
    """Record the sizes of the tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in results:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self.sizes.append(x.untyped_storage().nbytes())
        return result


@pytest.mark.kernels
def test_no_tensor_has_the_size_of_the_weights(monkeypatch):
    """Many small experts have larger weights than any other tensor. Backward computes no gradient of them either."""
    monkeypatch.setattr(
        "tigon.ops.experts.grouped_linear.grouped_weight_gradient", lambda *a: pytest.fail("computes dW")
    )
    inputs = _inputs(BF16, FP32, rank=1, sizes=(4, 64, 48, 64, 2))
    with _Allocations() as allocations:
        y = tigon.lora_moe_mlp(**inputs)
        y.backward(torch.ones_like(y))
    smallest = min(inputs[name].numel() * 2 for name in ("up_proj", "down_proj"))
    assert allocations.sizes
    assert max(allocations.sizes) < smallest
    assert inputs["up_proj"].grad is None


@pytest.mark.kernels
def test_saved_tensors():
    """Backward gets x, the result of the first product, the low-rank products and the routing."""
    inputs, rank = _inputs(BF16, FP32), 4
    tensors = saved_tensors(lambda: tigon.lora_moe_mlp(**inputs))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    own = {t.untyped_storage().data_ptr() for t in inputs.values()}
    rows, order = T * K, T * K * (8 + 8 + 2) + E * 4
    saved = sum(size for start, size in storages.items() if start not in own)
    assert saved == rows * 2 * INNER * 2 + 2 * rows * rank * 4 + order


@pytest.mark.kernels
def test_gradients_of_adapters_have_their_dtype_and_strides():
    """A gradient of PEFT's B is then a view of one tensor [out, r E], and nothing copies it."""
    inputs = _inputs(BF16, FP32)
    factors = [inputs[name] for name in NAMES[5:]]
    # `backward` would copy a gradient with other strides.
    gradients = torch.autograd.grad(tigon.lora_moe_mlp(**inputs).sum(), factors)
    for factor, gradient in zip(factors, gradients, strict=True):
        assert gradient.dtype == FP32
        assert gradient.stride() == factor.stride()


@pytest.mark.kernels
def test_one_node_computes_frozen_experts_and_autograd_trained_ones():
    y = tigon.lora_moe_mlp(**_inputs(BF16, FP32))
    assert type(y.grad_fn).__name__ == "LoRAExpertsBackward"
    assert type(tigon.lora_moe_mlp(**_inputs(BF16, FP32, trains=True)).grad_fn).__name__ == "_CombineBackward"
    assert ExpertAdapter._fields == ("a", "b", "scaling")


@pytest.mark.kernels
def test_the_factors_keep_more_than_bf16():
    """Adapters that differ by less than bf16 shows give different low-rank products."""
    inputs = _inputs(BF16, FP32)
    x, a = inputs["x"], inputs["up_a"].detach()
    routing = route(inputs["top_k_index"], E)
    project = lambda z: grouped_project(x, split_experts(z), routing, True)[0].double().sum(1)
    h = [project(z.float()) for z in (a, a.bfloat16())]
    rows = x.detach().double()[routing.order // K]
    exact = torch.einsum("sn,srn->sr", rows, a.double()[routing.expert.long()])
    errors = [(each - exact).abs().max().item() for each in h]
    assert errors[0] < 2**-13 * exact.abs().max().item()
    assert errors[1] > 8 * errors[0]


@pytest.mark.no_interpreter("It reads compiled code.")
def test_the_activation_of_an_element_is_computed_once():
    """The compiler must not compute it once more, in the layout of the low-rank product that reads its result."""
    import triton

    from benchmarks.compile.targets import CHIPS, _source, compiler_tools, recorded

    chip, tools = next(chip for chip in CHIPS if chip.name == "sm_90"), compiler_tools()
    target = tools.GPUTarget(chip.backend, chip.arch, chip.device.warp_size)
    index = torch.zeros(8, 8, dtype=torch.long)
    routing = Routing(index, index.flatten(), index.flatten().short(), torch.zeros(E, dtype=torch.int32))
    h, da = torch.zeros(64, 2 * 768, dtype=BF16), torch.zeros(64, 768, dtype=BF16)
    down_a, up_b, weights = torch.zeros(E, 16, 768), torch.zeros(2, E, 16, 2 * 768, dtype=BF16), torch.zeros(8, 8)
    needs = NeededActivationGradients(True, True, True, True)
    with recorded(chip) as launches:
        lora_activation_forward(h, ActivationAdapters(None, None, down_a), weights, routing, "silu")
        lora_activation_backward(h, da, ActivationAdapters(None, up_b, None), None, weights, routing, "silu", needs)
    for launch in launches:
        compiled = triton.compile(_source(launch, tools), target=target, options=launch.options)
        assert compiled.asm["ttgir"].count("math.exp ") == 1
