"""In `lean(mlp=True)`, experts save their input and the routing, and every gradient has the same bits."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import tigon
from memory.steps import assert_same_bits, block, normal
from op_cases import one_in

T, K, E, H, INNER, RANK = 9, 3, 6, 16, 24, 4
NAMES = "x", "up_proj", "down_proj", "top_k_weights", "up_bias", "down_bias"


def _interleaved(h: Tensor) -> Tensor:
    return tigon.swiglu(h[:, ::2], h[:, 1::2])


LAYOUTS = {
    "plain": {}, "transposed, biases, gelu": {"transposed": True, "biases": True, "activation": "gelu"},
    "no gate": {"activation": "relu2"}, "weighted inputs": {"weight_inputs": True},
    "a function": {"activation": _interleaved},
    "a function, transposed, biases": {"activation": _interleaved, "transposed": True, "biases": True},
}  # fmt: skip
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def _index() -> Tensor:
    """Return the choices of experts. The first token has chosen an expert of another rank."""
    generator = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    index[0, 1] = E
    return index


def _tensors(layout: dict, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    width = INNER if layout.get("activation") == "relu2" else 2 * INNER
    up, down = (E, width, H), (E, H, INNER)
    if layout.get("transposed"):
        up, down = (E, H, width), (E, INNER, H)
    shapes = [(T, H), up, down, (T, K), *([(E, width), (E, H)] if layout.get("biases") else [])]
    values = [normal(i, *shape, dtype=dtype) / 2 for i, shape in enumerate(shapes)]
    return {name: value.requires_grad_() for name, value in zip(NAMES, values, strict=False)}


def _call(layout: dict, tensors: dict[str, Tensor], index: Tensor) -> Tensor:
    options = {name: value for name, value in layout.items() if name != "biases"}
    # As in a model, the input is no leaf.
    return tigon.moe_mlp(**tensors | {"x": tensors["x"] * 1.5}, top_k_index=index, **options)


def _saved_bytes(run: Callable[[], Tensor], inputs: list[Tensor], **options: bool) -> int:
    """Return the bytes of the storages that a call saves, without the inputs, in a block of `lean` with options."""
    storages, known = {}, {x.untyped_storage()._cdata for x in inputs}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in known:
            storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with saved_tensors_hooks(pack, lambda t: t), block(bool(options), **options):
        y = run()
    assert y.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


# The slot, the choice and the expert of each row, and the end of each expert.
ROUTING = T * K * (8 + 8 + 2) + E * 4


NAMED = {name: layout for name, layout in LAYOUTS.items() if not callable(layout.get("activation"))}


@pytest.mark.parametrize("layout", NAMED.values(), ids=NAMED)
def test_experts_save_only_their_input(layout):
    """`moe_mlp` saves x. The multiplication before it saves nothing."""
    tensors, index = _tensors(layout), _index()
    run = lambda: _call(layout, tensors, index)
    size = _saved_bytes(run, [*tensors.values(), index], mlp=True)
    assert size <= T * H * 4 + ROUTING
    saved_by_default = _saved_bytes(run, [*tensors.values(), index])
    assert saved_by_default - size >= T * K * (INNER if layout.get("activation") == "relu2" else 2 * INNER) * 4


FROZEN = {
    "nothing": (), "x": ("x",), "the experts": ("up_proj", "down_proj", "up_bias", "down_bias"),
    "all but the router": ("x", "up_proj", "down_proj", "up_bias", "down_bias"),
    "all but up": ("x", "down_proj", "top_k_weights", "up_bias", "down_bias"),
    "all but down": ("x", "up_proj", "top_k_weights", "up_bias", "down_bias"),
    "all but the last bias": ("x", "up_proj", "down_proj", "top_k_weights", "up_bias"),
}  # fmt: skip


def _gradients(run: Callable[[], Tensor], leaves: list[Tensor], calls: int = 1, **options: bool) -> list[Tensor | None]:
    """Return the result, and the gradients of each of `calls` backward passes through one graph."""
    with block(bool(options), **options):
        y = run()
    upstream = normal(50, *y.shape, dtype=y.dtype).to(y.device)
    results = [y.detach()]
    for i in range(calls):
        results += torch.autograd.grad(y, leaves, upstream, retain_graph=i + 1 < calls)
    return results


@one_in(5, layout=LAYOUTS, frozen=FROZEN)
def test_gradients_have_the_bits_of_those_from_saved_tensors(layout, frozen):
    tensors, index = _tensors(layout), _index()
    leaves = [x for name, x in tensors.items() if name not in frozen]
    for name in frozen:
        if name in tensors:
            tensors[name].requires_grad_(False)
    if not leaves:
        pytest.skip("This layout has no biases.")
    run = lambda: _call(layout, tensors, index)
    expected = _gradients(run, leaves)
    for options in ({"mlp": True}, {"mlp": False}):
        assert_same_bits(_gradients(run, leaves, **options), expected)
    # A retained graph recomputes the product again, although the first backward pass has overwritten it.
    twice = _gradients(run, leaves, 2, mlp=True)
    assert_same_bits(twice[1 : 1 + len(leaves)], expected[1:])
    assert_same_bits(twice[1 + len(leaves) :], expected[1:])


def test_a_weight_that_was_written_before_backward_is_refused():
    tensors, index = _tensors({}), _index()
    with tigon.lean(mlp=True):
        y = _call({}, tensors, index)
    with torch.no_grad():
        tensors["up_proj"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("layout", [LAYOUTS["plain"], LAYOUTS["a function"]], ids=["plain", "a function"])
def test_experts_in_a_checkpoint_save_their_input_at_every_level(layout):
    tensors, index = _tensors(layout), _index()

    def run() -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda: _call(layout, tensors, index), use_reentrant=False)

    leaves = list(tensors.values())
    assert_same_bits(_gradients(run, leaves, mlp=True), _gradients(run, leaves))


def _adapted(dtype: torch.dtype, trains: bool, activation: object) -> tuple[Callable[[], Tensor], list[Tensor]]:
    tensors = _tensors({}, dtype)
    for name in ("up_proj", "down_proj"):
        tensors[name].requires_grad_(trains)
    shapes = {"up_a": (E, RANK, H), "up_b": (E, 2 * INNER, RANK), "down_a": (E, RANK, INNER), "down_b": (E, H, RANK)}
    adapters = {name: normal(20 + i, *s).requires_grad_() for i, (name, s) in enumerate(shapes.items())}
    index = _index()
    run = lambda: tigon.lora_moe_mlp(
        **tensors | {"x": tensors["x"] * 1.5}, top_k_index=index, **adapters, up_scaling=0.5, activation=activation
    )
    return run, [*tensors.values(), *adapters.values(), index]


ADAPTED = {
    "frozen, bf16": (torch.bfloat16, False, "silu"), "trained, bf16": (torch.bfloat16, True, "silu"),
    "a function, bf16": (torch.bfloat16, False, _interleaved), "frozen, fp32": (torch.float32, False, "silu"),
}  # fmt: skip


@pytest.mark.parametrize("case", ADAPTED.values(), ids=ADAPTED)
def test_experts_with_adapters_recompute_the_first_product(case):
    run, tensors = _adapted(*case)
    leaves = [x for x in tensors if x.requires_grad]
    expected = _gradients(run, leaves)
    assert_same_bits(_gradients(run, leaves, mlp=True), expected)
    twice = _gradients(run, leaves, 2, mlp=True)
    assert_same_bits(twice[1 + len(leaves) :], expected[1:])
    saved_by_default, size = (_saved_bytes(run, tensors, **options) for options in ({}, {"mlp": True}))
    assert saved_by_default - size >= T * K * 2 * INNER * case[0].itemsize - 2 * E * 4


@pytest.mark.no_interpreter("It launches no kernel.")
@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch.compile before 2.11 cannot trace every call of experts")
@pytest.mark.parametrize(
    "backend", ["aot_eager_decomp_partition", pytest.param("aot_eager", marks=pytest.mark.thorough)]
)
def test_a_graph_recomputes_the_first_product(backend):
    tensors, index, sizes, results = _tensors({}), _index(), [], []
    leaves = list(tensors.values())
    for is_lean in (False, True):

        def forward(is_lean: bool = is_lean) -> Tensor:
            with block(is_lean, mlp=True):
                return _call({}, tensors, index)

        torch._dynamo.reset()
        compiled = torch.compile(forward, fullgraph=True, backend=backend)
        sizes.append(_saved_bytes(compiled, [*leaves, index]))
        results.append(_gradients(compiled, leaves))
    torch._dynamo.reset()
    assert_same_bits(results[1], results[0])
    assert sizes[0] - sizes[1] == T * K * 2 * INNER * 4


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "llama4_text"])
@pytest.mark.sampled(3)
def test_models_recompute_the_first_product_of_their_experts(model_type):
    """GPT-OSS has an activation of its own, and the router of Llama 4 weighs the inputs of experts."""
    pytest.importorskip("transformers")
    from hf.ways import build
    from memory.test_models import saved_bytes, step

    sizes, steps = {}, {}
    levels = ("lean", "lean+mlp:1")
    for level in levels:
        model = build(model_type, num_hidden_layers=2)
        report = tigon.patch(model, memory=level)
        assert "experts" in {entry.part for entry in report.replaced}
        sizes[level], steps[level] = saved_bytes(model), step(model)
    for a, b in itertools.pairwise(levels):
        assert sizes[a] > sizes[b]
        assert_same_bits(steps[a], steps[b])
