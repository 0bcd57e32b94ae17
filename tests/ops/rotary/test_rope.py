import functools
import importlib
from types import SimpleNamespace

import pytest
import torch

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, assert_refused, one_in, outputs_and_gradients
from rotary_cases import LAYOUTS, SIZES, assert_close, make_inputs, make_packed_heads
from tigon.ops.rotary.rope import axes_of, rope_reference

SMALL = (2, 4, 2, 3, 16, 16)


def _both(**options):
    """Return the op and its reference, with the same options."""
    return [functools.partial(f, **options) for f in (tigon.rope, rope_reference)]


def _assert_agreement(inputs, rtol=1e-5, atol=1e-6, **options):
    """Check that the op and its reference return equal values and gradients, in equal dtypes."""
    assert_close(*(outputs_and_gradients(f, inputs) for f in _both(**options)), rtol=rtol, atol=atol)


@pytest.mark.kernels
@one_in(2, sizes=SIZES, dtype=DTYPES, memory_order=["BHSD", "BSHD"], layout=LAYOUTS)
@pytest.mark.sampled(in_interpreter=2)
def test_rope_accuracy(sizes, dtype, memory_order, layout):
    assert_as_accurate_as_eager(*_both(layout=layout), make_inputs(sizes, dtype, memory_order=memory_order))


@pytest.mark.kernels
@one_in(3, sizes=[(2, 3, 1, 4, 80, 32), (1, 2, 1, 3, 10, 6)], dtype=DTYPES, table=["once", "pairs"], layout=LAYOUTS)
def test_rope_accuracy_with_other_tables(sizes, dtype, table, layout):
    """All entries of a table differ, so a kernel that reads the wrong entry fails the test."""
    inputs = make_inputs(sizes, dtype, table=table)
    assert_as_accurate_as_eager(*_both(layout=layout, table=table), inputs)


SECTIONS = {
    "three": (2, 3, 3), "alternating, then one": (1,) * 6 + (2,),
    "two alternating, then the third": (0, 1, 1, 0, 1, 1, 4), "one axis": (8,),
    "the last axis, wider than a word of bits": (0, 0, 40), "odd": (1, 1, 1),
}  # fmt: skip


@pytest.mark.kernels
@one_in(3, sections=SECTIONS, layout=LAYOUTS, shared={"one table for each row": False, "one table": True})
def test_rope_accuracy_with_sections(sections, layout, shared):
    inputs = make_inputs((2, 4, 2, 3, 80, 2 * sum(sections)), is_shared=shared, axes=(3,))
    assert_as_accurate_as_eager(*_both(layout=layout, sections=sections), inputs)


def _model(name: str):
    pytest.importorskip("transformers")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _frequencies(*axes: int, r: int = 16) -> torch.Tensor:
    return torch.rand((*axes, 2, 3, r // 2), generator=torch.Generator().manual_seed(7)).to(DEVICE) * 100


def _tables(frequencies: torch.Tensor) -> list[torch.Tensor]:
    """Return the tables of the op."""
    angles = torch.cat((frequencies, frequencies), -1)
    return [angles.cos(), angles.sin()]


def _assert_equals(theirs, tables, frequencies, ours=None, **options):
    """In fp32 the reference returns the same bits as the function of transformers, and the op returns its values."""
    ours = ours or _tables(frequencies)
    for heads_axis in (1, 2):
        q, k, *_ = make_inputs((2, 4, 2, 3, 24, 16))
        q, k = (x.transpose(1, heads_axis).detach().requires_grad_() for x in (q, k))
        stock = functools.partial(theirs, cos=tables[0], sin=tables[1], unsqueeze_dim=heads_axis)
        expected = outputs_and_gradients(stock, [q, k])
        op, reference = (functools.partial(f, unsqueeze_dim=heads_axis) for f in _both(**options))
        results = outputs_and_gradients(reference, [q, k, *ours])
        assert all(torch.equal(a, b) for a, b in zip(results[0], expected[0], strict=True))
        assert_close(results, expected)
        assert_close(outputs_and_gradients(op, [q, k, *ours]), expected)


def _on_a_part(function):
    """Apply a function of the whole head to the first 16 features."""

    def call(q, k, cos, sin, unsqueeze_dim):
        rotated = function(q[..., :16], k[..., :16], cos, sin, unsqueeze_dim=unsqueeze_dim)
        return tuple(torch.cat((y, x[..., 16:]), -1) for x, y in zip((q, k), rotated, strict=True))

    return call


@pytest.mark.no_interpreter("The reference decides; the kernels are compared with it.")
@pytest.mark.parametrize(("model", "layout", "partial"), [
    ("llama", "split_half", False), ("glm4_moe", "split_half", True), ("glm", "interleaved", True),
    ("glm4", "interleaved", True), ("ernie4_5", "interleaved", False), ("helium", "interleaved", False),
    ("deepseek_v3", "deinterleaved", False),
])  # fmt: skip
def test_rope_agrees_with_functions_of_transformers(model, layout, partial):
    module = _model(model)
    function = module.apply_rotary_pos_emb_interleave if layout == "deinterleaved" else module.apply_rotary_pos_emb
    _assert_equals(
        function if partial else _on_a_part(function), _tables(_frequencies()), _frequencies(), layout=layout
    )


@pytest.mark.no_interpreter("The reference decides; the kernels are compared with it.")
@pytest.mark.parametrize(
    ("model", "layout", "table"), [("cohere", "interleaved", "pairs"), ("gpt_oss", "split_half", "once")]
)
def test_rope_agrees_with_functions_of_transformers_on_other_tables(model, layout, table):
    angles = _frequencies() if table == "once" else torch.randn(2, 3, 16, device=DEVICE)
    theirs, tables = _on_a_part(_model(model).apply_rotary_pos_emb), [angles.cos(), angles.sin()]
    _assert_equals(theirs, tables, None, tables, layout=layout, table=table)


@pytest.mark.no_interpreter("The reference decides; the kernels are compared with it.")
@pytest.mark.parametrize(("model", "rotary", "mrope_section", "sections", "layout"), [
    ("qwen2_vl", "Qwen2VLRotaryEmbedding", (2, 3, 3), (2, 3, 3), "split_half"),
    ("qwen2_5_vl", "Qwen2_5_VLRotaryEmbedding", (2, 3, 3), (2, 3, 3), "split_half"),
    ("glm4v", "Glm4vTextRotaryEmbedding", (2, 3, 3), (2, 3, 3), "interleaved"),
    # Frequencies 0 to 5 have the axes 0, 1, 2, 0, 1, 2, and the last two have axis 0.
    ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", (4, 2, 2), (1,) * 6 + (2,), "split_half"),
    # Height and width alternate, and time comes last. The tables of this model hold height, width and time in turn.
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextRotaryEmbedding", (2, 2, 4), (0, 1, 1, 0, 1, 1, 4), "interleaved"),
])  # fmt: skip
def test_rope_agrees_with_sections_of_transformers(model, rotary, mrope_section, sections, layout):
    """The rotary module picks the axes. In other versions `apply_multimodal_rotary_pos_emb` picks them."""
    module, frequencies = _model(model), _frequencies(3)
    if hasattr(module, "apply_multimodal_rotary_pos_emb"):
        function, tables = module.apply_multimodal_rotary_pos_emb, _tables(frequencies)
        theirs = _on_a_part(lambda *args, **options: function(*args, mrope_section=list(mrope_section), **options))
    else:
        pick = getattr(module, rotary).recomposition_frequencies
        order = [0, 2, 1, 3, 4, 5, 6, 7] if model == "ernie4_5_vl_moe" else list(range(8))
        sections_of = SimpleNamespace(mrope_section=list(mrope_section))
        tables = [pick(sections_of, table[..., order]) for table in (frequencies.cos(), frequencies.sin())]
        theirs = _on_a_part(module.apply_rotary_pos_emb)
    _assert_equals(theirs, tables, frequencies, layout=layout, sections=sections)


def test_rope_agrees_with_a_function_of_transformers_for_one_tensor():
    q, _, _, _ = make_inputs(SMALL)
    tables = _tables(_frequencies())
    expected = outputs_and_gradients(lambda q: _model("gemma3n").apply_rotary_pos_emb(q, *tables), [q])
    assert_close(outputs_and_gradients(lambda q: tigon.rope(q, None, *tables)[0], [q]), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_without_keys_returns_none_for_them(layout):
    q, k, cos, sin = make_inputs(SMALL)
    alone, nothing = tigon.rope(q, None, cos, sin, layout=layout)
    assert nothing is None
    assert torch.equal(alone, tigon.rope(q, k, cos, sin, layout=layout)[0])
    assert rope_reference(q, None, cos, sin, layout=layout)[1] is None


@pytest.mark.no_interpreter("It launches no kernel.")
def test_axes_of_sections_has_a_digit_for_each_frequency():
    assert axes_of((2, 1, 3)) == "001222"
    assert axes_of((1,) * 6 + (2,)) == "01201200"
    assert axes_of((0, 1, 1, 0, 1, 1, 4)) == "12120000"
    assert axes_of(None) == ""


@pytest.mark.kernels
@pytest.mark.parametrize("copy", [lambda x: x.expand(3, -1, -1), lambda x: x.repeat(3, 1, 1)], ids=["expand", "repeat"])
def test_rope_accepts_one_table_for_the_whole_batch(copy):
    q, k, cos, sin = make_inputs((3, 2, 1, 4, 16, 16), is_shared=True)
    shared, copied = (outputs_and_gradients(tigon.rope, [q, k, *x]) for x in ((cos, sin), (copy(cos), copy(sin))))
    assert_close(shared, copied, rtol=0.0, atol=0.0)


@pytest.mark.kernels
def test_rope_accepts_odd_tables_and_strides():
    """The halves of a row of a table may differ. Heads may overlap in memory, and may be slices of a projection."""
    q, k, _, _ = make_inputs((2, 2, 2, 3, 8, 8))
    _assert_agreement([q, k, *torch.randn(2, 2, 3, 8, device=DEVICE)])
    q = torch.randn(2, 40, device=DEVICE).as_strided((2, 2, 3, 8), (40, 1, 8, 1)).requires_grad_()
    _, k, cos, sin = make_inputs((2, 2, 1, 3, 8, 8))
    _assert_agreement([q, k, cos, sin])
    packed = torch.randn(2, 3, 96, device=DEVICE, requires_grad=True)
    _, _, cos, sin = make_inputs(SMALL)
    assert_close(*(outputs_and_gradients(lambda x, f=f: f(*make_packed_heads(x), cos, sin), [packed]) for f in _both()))


@pytest.mark.kernels
def test_rope_accepts_heads_in_dimension_2():
    q, k, cos, sin = make_inputs(SMALL)
    first = tigon.rope(q, k, cos, sin)
    second = tigon.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(first, second, strict=True))


@pytest.mark.kernels
def test_rope_computes_only_the_gradients_that_are_needed(monkeypatch):
    """Frozen inputs need no gradient, and unused outputs get no gradient of zeros."""
    import tigon.ops.rotary.rope as module

    calls, rotate = [], module.rope_rotate
    monkeypatch.setattr(module, "rope_rotate", lambda *args: calls.append(rotate(*args)) or calls[-1])
    q, k, cos, sin = make_inputs(SMALL)
    outputs = tigon.rope(q, k.detach(), cos, sin)
    (outputs[0].sum() + outputs[1].sum()).backward()
    assert [x.numel() for x in calls[-1]] == [q.numel(), 0]
    for used, x in enumerate((q, k)):
        tigon.rope(q, k, cos, sin)[used].sum().backward()
        assert [y.numel() for y in calls[-1]] == [x.numel(), 0]


def test_dtypes_and_strides_of_the_results():
    """Wider tables promote, and `dtype` rounds once to another dtype."""
    q, k, cos, sin = make_inputs((2, 4, 2, 3, 8, 8), torch.float16, memory_order="BSHD")
    inputs = [q, k, cos.float(), sin.float()]
    _assert_agreement(inputs, rtol=1e-2, atol=1e-3)
    wide, half = (outputs_and_gradients(functools.partial(tigon.rope, dtype=d), inputs) for d in (None, torch.float16))
    assert [y.dtype for y in [*wide[0], *wide[1]]] == [torch.float32] * 2 + [torch.float16] * 2
    assert [y.dtype for y in [*half[0], *half[1]]] == [torch.float16] * 4
    assert all(torch.equal(a, b.half()) for a, b in zip(half[0], wide[0], strict=True))
    assert [y.transpose(1, 2).is_contiguous() for y in wide[0]] == [True, True]


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_rope_refuses_bad_input():
    q, k, cos, sin = make_inputs(SMALL)
    axes = {"cos": cos.expand(3, -1, -1, -1), "sin": sin.expand(3, -1, -1, -1)}
    wide = {"cos": cos.repeat(1, 2, 1)[:, :4], "sin": sin.repeat(1, 2, 1)[:, :4]}
    changes = {
        "table must be one of 'halves', 'once', 'pairs', got 'twice'": {"table": "twice"},
        "R must be even and at most the head size 16, got R=32": {"table": "once"},
        "sections need table 'halves', got 'pairs'": axes | {"sections": (2, 3, 3), "table": "pairs"},
        r"dtype must be a floating-point dtype \(.*\), got torch.int64": {"dtype": torch.long},
        r"q must have 4 dimensions, got shape \(4, 3, 16\)": {"q": q[0]},
        r"k must have shape \(2, 2, 3, 16\), got \(2, 2, 2, 16\)": {"k": k[:, :, 1:]},
        r"cos must have shape \(1 or 2, 3, R\), got \(2, 4, 16\)": wide,
        "R must be even and at most the head size 16, got R=15": {"cos": cos[..., :15], "sin": sin[..., :15]},
        "unsqueeze_dim must be one of 1, 2, got 3": {"unsqueeze_dim": 3},
        "layout must be one of 'split_half', 'interleaved', 'deinterleaved', got": {"layout": "halves"},
        r"cos must have shape \(3, 1 or 2, 3, R\), got \(2, 3, 16\)": {"sections": (2, 3, 3)},
        r"cos must have shape \(1 or 2, 3, R\), got \(3, 2, 3, 16\)": axes,
        "sections must be a sequence of ints, got int": axes | {"sections": 8},
        "q must be a Tensor, got NoneType": {"q": None}, "cos and sin must have the same dtype": {"sin": sin.half()},
        "sin must be a float32": {"sin": sin.long()},
    }  # fmt: skip
    for sections in ((2, 3, 4), (9, -1), (4.0, 4.0)):
        shown = str(sections).replace("(", r"\(").replace(")", r"\)")
        changes[f"sections must be lengths that sum up to R / 2 = 8, got {shown}"] = axes | {"sections": sections}
    assert_refused(tigon.rope, {"q": q, "k": k, "cos": cos, "sin": sin}, changes)
