import functools
import importlib

import pytest
import torch

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, assert_refused, one_in, outputs_and_gradients
from rotary_cases import LAYOUTS, SIZES, assert_close, make_inputs, make_packed_heads
from tigon.ops.rotary.qk_norm_rope import qk_norm_rope_reference

SMALL = (2, 4, 2, 3, 16, 16)


def _inputs(sizes, dtype=torch.float32, weights="each", weight_dtype=None, memory_order="BSHD", axes=()):
    """Return q, k, q_weight, k_weight, cos and sin. The weights are those of "each" head or of all heads "together"."""
    q, k, cos, sin = make_inputs(sizes, dtype, axes=axes, memory_order=memory_order)
    generator, (_, hq, hk, _, d, _) = torch.Generator().manual_seed(2), sizes
    scales = [
        (1 + torch.randn(n, generator=generator) / 3).to(DEVICE, weight_dtype or dtype).requires_grad_()
        for n in ((d, d) if weights == "each" else (hq * d, hk * d))
    ]
    return [q, k, *scales, cos, sin]


def _both(**options):
    """Return the op and its reference, with the same options."""
    return [functools.partial(f, **options) for f in (tigon.qk_norm_rope, qk_norm_rope_reference)]


@pytest.mark.kernels
@one_in(3, sizes=SIZES, dtype=DTYPES, layout=LAYOUTS, weights=["each", "together"])
@pytest.mark.sampled(in_interpreter=3)
def test_qk_norm_rope_accuracy(sizes, dtype, layout, weights):
    inputs = _inputs(sizes, dtype, weights)
    # dx = rstd (g - x_hat mean(g x_hat)) is a difference of terms of the size of rstd g. A head of two features has no
    # other elements whose errors in eager code show this size.
    term_size = 0.25 if sizes == SIZES["one of each"] else 0.0
    assert_as_accurate_as_eager(*_both(layout=layout), inputs, term_size=term_size)


@pytest.mark.kernels
@one_in(2, weights=["each", "together"], dtype=DTYPES, offset=[0.0, 1.0], rounding=["before_weight", "after_weight"])
def test_qk_norm_rope_accuracy_with_options(weights, dtype, offset, rounding):
    inputs = _inputs(SMALL, dtype=dtype, weights=weights, memory_order="BHSD")
    assert_as_accurate_as_eager(*_both(eps=1e-5, offset=offset, rounding=rounding), inputs)


@pytest.mark.kernels
@pytest.mark.parametrize("rotary", [128, 64], ids=["the whole head", "half of the head"])
def test_programs_of_the_backward_sum_over_several_tiles(rotary):
    """Each program of the backward loops over several tiles, and sums the gradients of the weights over them."""
    assert_as_accurate_as_eager(*_both(), _inputs((3, 20, 4, 3, 128, rotary)))


@pytest.mark.kernels
@one_in(2, layout=LAYOUTS, weights=["each", "together"])
def test_qk_norm_rope_accepts_sections(layout, weights):
    inputs = _inputs((2, 4, 2, 3, 24, 16), weights=weights, axes=(3,))
    assert_as_accurate_as_eager(*_both(layout=layout, sections=(2, 3, 3)), inputs)


def _stock(model: str, norm: str, together: bool, q_weight, k_weight):
    """Return the queries and keys that an attention computes from its projections [B, S, H D] for its scores."""
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    norms = [getattr(module, norm)(weight.shape[0], eps=1e-5).to(DEVICE) for weight in (q_weight, k_weight)]

    def call(q, k, q_weight, k_weight, cos, sin):
        normalised = []
        for x, norm, weight in zip((q, k), norms, (q_weight, k_weight), strict=True):
            normalise = lambda x, norm=norm, weight=weight: torch.func.functional_call(norm, {"weight": weight}, x)
            b, h, s, d = x.shape
            if together:
                x = normalise(x.transpose(1, 2).reshape(b, s, h * d)).view(b, s, h, d)
            else:
                x = normalise(x.transpose(1, 2))
            normalised.append(x.transpose(1, 2))
        return module.apply_rotary_pos_emb(*normalised, cos, sin)

    return call


@pytest.mark.no_interpreter("The reference decides; the kernels are compared with it.")
@pytest.mark.parametrize(("model", "norm", "weights", "options"), [
    ("qwen3", "Qwen3RMSNorm", "each", {}),
    ("gemma3", "Gemma3RMSNorm", "each", {"offset": 1.0, "rounding": "after_weight"}),
    ("olmo2", "Olmo2RMSNorm", "together", {"rounding": "after_weight"}),
    ("olmo3", "Olmo3RMSNorm", "together", {"rounding": "after_weight"}),
])  # fmt: skip
def test_qk_norm_rope_agrees_with_modules_of_transformers(model, norm, weights, options):
    op, reference = _both(eps=1e-5, **options)
    inputs = _inputs(SMALL, weights=weights)
    stock = _stock(model, norm, weights == "together", *inputs[2:4])
    expected = outputs_and_gradients(stock, inputs)
    results = outputs_and_gradients(reference, inputs)
    assert all(torch.equal(a, b) for a, b in zip(results[0], expected[0], strict=True))
    assert_close(results, expected)
    assert_close(outputs_and_gradients(op, inputs), expected)


@pytest.mark.kernels
@one_in(1, present={"no weight": (), "q's weight": ("q",), "k's weight": ("k",)}, weights=["each", "together"])
def test_qk_norm_rope_accepts_missing_weights(present, weights):
    q, k, q_weight, k_weight, cos, sin = _inputs(SMALL, weights=weights)
    q_weight, k_weight = q_weight if "q" in present else None, k_weight if "k" in present else None
    inputs = [x for x in (q, k, q_weight, k_weight) if x is not None]

    def call(function):
        def run(q, k, *weight):
            scales = (*weight, None) if "q" in present else (None, *weight) if "k" in present else (None, None)
            return function(q, k, *scales, cos.to(q.dtype), sin.to(q.dtype))

        return run

    assert_as_accurate_as_eager(*map(call, (tigon.qk_norm_rope, qk_norm_rope_reference)), inputs)


@pytest.mark.parametrize("weights", ["each", "together"])
def test_qk_norm_rope_without_keys_returns_none_for_them(weights):
    q, k, q_weight, _, cos, sin = _inputs(SMALL, weights=weights)
    both = outputs_and_gradients(lambda q, w: tigon.qk_norm_rope(q, k.detach(), w, None, cos, sin)[0], [q, q_weight])
    alone = outputs_and_gradients(lambda q, w: tigon.qk_norm_rope(q, None, w, None, cos, sin)[0], [q, q_weight])
    assert_close(alone, both)
    assert tigon.qk_norm_rope(q, None, q_weight, None, cos, sin)[1] is None
    assert qk_norm_rope_reference(q, None, q_weight, None, cos, sin)[1] is None


@pytest.mark.kernels
def test_qk_norm_rope_accepts_heads_in_dimension_2():
    for weights in ("each", "together"):
        q, k, *others = _inputs(SMALL, weights=weights)
        first = tigon.qk_norm_rope(q, k, *others)
        second = tigon.qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), *others, unsqueeze_dim=2)
        assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(first, second, strict=True))


def test_results_have_the_strides_of_their_inputs():
    q, k, *others = _inputs(SMALL, memory_order="BSHD")
    outputs = tigon.qk_norm_rope(q, k, *others)
    assert [y.transpose(1, 2).is_contiguous() for y in outputs] == [True, True]
    gradients = torch.autograd.grad(outputs, (q, k), outputs)
    assert [dx.transpose(1, 2).is_contiguous() for dx in gradients] == [True, True]


@pytest.mark.kernels
def test_qk_norm_rope_accepts_slices_of_a_packed_projection():
    packed = torch.randn(2, 3, 96, device=DEVICE, requires_grad=True)
    _, _, *others = _inputs(SMALL)
    assert_close(*(outputs_and_gradients(lambda x, f=f: f(*make_packed_heads(x), *others), [packed]) for f in _both()))


@pytest.mark.kernels
@pytest.mark.parametrize("rounding", ["before_weight", "after_weight"])
def test_qk_norm_rope_promotes_to_the_dtype_of_wider_weights(rounding):
    inputs = _inputs((1, 2, 1, 3, 8, 8), dtype=torch.float16, weight_dtype=torch.float32)
    results, expected = (outputs_and_gradients(f, inputs) for f in _both(rounding=rounding))
    assert [g.dtype for g in results[1]] == [torch.float16] * 2 + [torch.float32] * 2
    assert_close(results, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.kernels
def test_qk_norm_rope_computes_only_the_gradients_that_are_needed(monkeypatch):
    """Frozen inputs and unused outputs need no gradient."""
    import tigon.ops.rotary.qk_norm_rope as module

    calls, backward = [], module.qk_norm_rope_backward
    monkeypatch.setattr(module, "qk_norm_rope_backward", lambda *args: calls.append(backward(*args)) or calls[-1])
    q, k, q_weight, k_weight, cos, sin = _inputs(SMALL)
    q_out, k_out = tigon.qk_norm_rope(q, k.detach(), q_weight.detach(), k_weight, cos, sin)
    (q_out.sum() + k_out.sum()).backward()
    tigon.qk_norm_rope(q, k, q_weight, k_weight, cos, sin)[1].sum().backward()
    # The list is empty if no kernels run.
    if calls:
        assert [[x.numel() for x in results] for results in calls] == [[q.numel(), 0, 16], [0, k.numel(), 16]]


@pytest.mark.kernels
def test_more_features_than_a_workgroup_holds_are_computed_by_the_reference(monkeypatch):
    """65 heads of 512 features count as 128, a power of two."""
    import tigon.ops.rotary.qk_norm_rope as module

    monkeypatch.setattr(module, "qk_norm_rope_forward", None)
    inputs = _inputs((1, 65, 2, 3, 512, 16), weights="together")
    assert_close(*(outputs_and_gradients(f, inputs) for f in _both()))


def test_qk_norm_rope_without_rotary_features_is_rms_norm():
    inputs = _inputs((2, 4, 2, 3, 16, 0))
    (q, k), _ = outputs_and_gradients(tigon.qk_norm_rope, inputs)
    for y, x, weight in ((q, *inputs[:3:2]), (k, *inputs[1:4:2])):
        torch.testing.assert_close(y, tigon.rms_norm(x, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_qk_norm_rope_refuses_bad_input():
    names = "q", "k", "q_weight", "k_weight", "cos", "sin"
    arguments = dict(zip(names, _inputs(SMALL), strict=True))
    _, k, q_weight, k_weight, *_ = arguments.values()
    changes = {
        r"q_weight must have shape \(16,\) or \(64,\), got \(7,\)": {"q_weight": q_weight[:7]},
        r"k_weight must have shape \(32,\), got \(16,\)": {"q_weight": q_weight.repeat(4)},
        "k_weight must be None if k is None, got a Tensor": {"k": None},
        "q_weight and k_weight must have the same dtype": {"k_weight": k_weight.half()},
        "q_weight must be a float32": {"q_weight": q_weight.long()},
        "rounding must be one of 'before_weight', 'after_weight'": {"rounding": "never"},
        "eps must be finite and not negative, got -1": {"eps": -1},
        r"k must have shape \(2, 2, 3, 16\), got \(2, 2, 2, 16\)": {"k": k[:, :, 1:]},
        "layout must be one of": {"layout": "halves"},
    }
    assert_refused(tigon.qk_norm_rope, arguments, changes)
