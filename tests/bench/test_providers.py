"""Providers: eager code is what Hugging Face models run, bit for bit, and all that run on a CPU pass the check."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tigon.bench.accuracy import Bound, eager_results, exact_results, judge
from tigon.bench.cases import OPS, Case
from tigon.bench.eager import EAGER, SUMMED
from tigon.bench.providers import PROVIDERS, Provider, Unsupported, select

CPU = torch.device("cpu")
SHAPES = {
    "rope": (2, 8, 4, 2, 16),
    "qk_norm_rope": (2, 8, 4, 2, 16),
    "cross_entropy": (32, 512),
    "cross_entropy_inplace": (32, 512),
    "linear_cross_entropy": (32, 64, 512),
    "kl_div": (32, 512),
    "jsd": (32, 512),
    "tvd": (32, 512),
}


def tiny(op, **options):
    return Case(op, "tiny", SHAPES.get(op, (16, 64)), options=options)


GEMMA = {"offset": 1.0, "rounding": "after_weight"}
CASES = [tiny(op, **({"approximate": "tanh"} if op == "geglu" else {})) for op in OPS]
CASES += [tiny(op, **GEMMA) for op in ("rms_norm", "add_rms_norm", "qk_norm_rope")]
CASES += [
    tiny("rope", layout="interleaved"),
    tiny("rope", layout="deinterleaved"),
    tiny("rope", sections=(4, 2, 2)),
    tiny("kl_div", log_target=True),
    tiny("jsd", from_logits=True),
    tiny("jsd", beta=0.2),
    tiny("linear_cross_entropy", softcap=30.0),
    replace(tiny("linear_cross_entropy"), ignored=0.5, frozen=("linear_weight",)),
]
CASES += [replace(case, dtype=torch.float32, model="tiny-fp32") for case in CASES]

# Providers that run here; those of torch are as exact as they are.
ON_A_CPU = [
    (case, provider)
    for case in CASES
    for provider in PROVIDERS[case.op]
    if not provider.needs_gpu and provider.autograd and provider.name != "compile"
]


def verdict_of(case, provider):
    inputs = case.make(CPU)
    exact = exact_results(case, inputs)
    return judge(Bound(provider, provider.load(case), inputs).results(), eager_results(case, inputs, exact), exact)


@pytest.mark.parametrize(("case", "provider"), ON_A_CPU, ids=lambda value: value.name)
def test_providers_agree(case, provider):
    try:
        verdict = verdict_of(case, provider)
    except Unsupported as reason:
        assert provider.name == "torch"
        pytest.skip(str(reason))
    if provider.name != "torch":
        assert verdict.wrong == ""
    assert 0 <= verdict.error < 0.03


def test_every_op_has_tigon_first_and_peers():
    for op, row in PROVIDERS.items():
        names = [provider.name for provider in row]
        assert names[:3] == ["tigon", "eager", "compile"], op
        assert "liger" in names, op
        assert len(set(names)) == len(names), op


@pytest.mark.parametrize("case", [tiny("jsd"), tiny("rope")], ids=lambda case: case.op)
def test_compiled_code_agrees(case):
    compiled = next(provider for provider in PROVIDERS[case.op] if provider.name == "compile")
    assert verdict_of(case, compiled).error < 0.03


@pytest.mark.parametrize("judged_at_once", [2**20, 24])
def test_a_wrong_gradient_is_named(monkeypatch, judged_at_once):
    case = Case("rms_norm", "tiny", (16, 64))
    inputs = case.make(CPU)
    exact = exact_results(case, inputs)
    eager = eager_results(case, inputs, exact)
    monkeypatch.setattr("tigon.bench.accuracy.JUDGED_ELEMENTS", judged_at_once)
    assert judge(eager, eager, exact).wrong == ""
    for spoilt in (eager["gradient of weight"] * 1.1, torch.full_like(eager["gradient of weight"], torch.nan)):
        assert "gradient of weight" in judge(eager | {"gradient of weight": spoilt}, eager, exact).wrong


def test_a_loss_in_half_precision_is_judged_by_the_units_of_fp32():
    case = tiny("cross_entropy")
    inputs = case.make(CPU)
    exact = exact_results(case, inputs)
    eager = eager_results(case, inputs, exact)
    assert eager["output 0"].dtype == torch.float32
    assert judge(eager | {"output 0": exact["output 0"].bfloat16()}, eager, exact).wrong.startswith("output 0")


def test_exact_losses_agree_with_fp64_autograd(monkeypatch):
    monkeypatch.setattr("tigon.bench.accuracy.REFERENCE_ELEMENTS", 512 * 10)  # chunks of 10 rows, the last of 2
    for op in (*SUMMED, "linear_cross_entropy"):
        case = replace(tiny(op), ignored=0.25)
        inputs = case.make(CPU)
        wide = inputs.map(lambda _, x: x.double() if x.is_floating_point() else x)
        eager = Provider("eager", EAGER[op])
        exact, right = exact_results(case, inputs), Bound(eager, eager.load(case), wide).results()
        assert exact.keys() == right.keys()
        for name, value in exact.items():
            torch.testing.assert_close(value.double(), right[name].double(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_that_eager_code_gets_right_by_luck_is_no_measure(seed):
    case = Case("linear_cross_entropy", "tiny", (32, 64, 512), options={"softcap": 30.0})
    inputs = case.make(CPU, seed)
    exact = exact_results(case, inputs)
    allowed = eager_results(case, inputs, exact)["output 0"] - exact["output 0"]
    assert 1e-4 < allowed < 1e-2  # logits near 10 in bf16 are off by 0.02 at most, and 32 tokens are averaged


def test_copies_are_made_of_what_is_destroyed_only():
    case = tiny("rope")
    inputs = case.make(CPU)
    liger = next(provider for provider in PROVIDERS["rope"] if provider.name == "liger")

    def overwrite(q, k, cos, sin):
        with torch.no_grad():
            q.zero_()
        return 2.0 * q, 2.0 * k

    bound = Bound(liger, overwrite, inputs)
    before = inputs.tensors["q"].detach().clone()
    (first, _), _ = bound()
    assert torch.equal(inputs.tensors["q"], before)
    assert first.eq(0).all()
    bound.restore()
    assert torch.equal(bound._inputs.tensors["q"], before)
    assert bound._inputs.tensors["cos"].data_ptr() == inputs.tensors["cos"].data_ptr()


def _hugging_face(name):
    """A case, and what its model's own code computes."""
    import transformers.models as models
    from transformers.activations import ACT2FN

    def norm(cls, x, weight):
        return torch.func.functional_call(cls(x.shape[-1], eps=1e-6), {"weight": weight}, x)

    def qk_norm_rope(cls, rope, q, k, q_weight, k_weight, cos, sin):
        return rope(norm(cls, q, q_weight), norm(cls, k, k_weight), cos, sin)

    def add_norm(x, residual, weight):
        hidden = residual + x
        return norm(models.llama.modeling_llama.LlamaRMSNorm, hidden, weight), hidden

    llama, gemma2, gemma3 = (getattr(models, m) for m in ("llama", "gemma2", "gemma3"))
    turn = llama.modeling_llama.apply_rotary_pos_emb
    return {
        "llama norm": (tiny("rms_norm"), partial(norm, llama.modeling_llama.LlamaRMSNorm)),
        "gemma norm": (tiny("rms_norm", **GEMMA), partial(norm, gemma2.modeling_gemma2.Gemma2RMSNorm)),
        "llama residual and norm": (tiny("add_rms_norm"), add_norm),
        "llama rope": (tiny("rope"), turn),
        "helium rope": (tiny("rope", layout="interleaved"), models.helium.modeling_helium.apply_rotary_pos_emb),
        "deepseek rope": (
            tiny("rope", layout="deinterleaved"),
            models.deepseek_v3.modeling_deepseek_v3.apply_rotary_pos_emb_interleave,
        ),
        "qwen3 q and k": (
            tiny("qk_norm_rope"), partial(qk_norm_rope, models.qwen3.modeling_qwen3.Qwen3RMSNorm, turn)
        ),
        "gemma3 q and k": (
            tiny("qk_norm_rope", **GEMMA), partial(qk_norm_rope, gemma3.modeling_gemma3.Gemma3RMSNorm, turn)
        ),
        "nemotron activation": (tiny("relu2"), ACT2FN["relu2"]),
    }[name]  # fmt: skip


HUGGING_FACE = [
    "llama norm", "gemma norm", "llama residual and norm", "llama rope", "helium rope", "deepseek rope",
    "qwen3 q and k", "gemma3 q and k", "nemotron activation",
]  # fmt: skip


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_eager_is_hugging_faces_code_bit_for_bit(name):
    pytest.importorskip("transformers")
    case, function = _hugging_face(name)
    inputs = case.make(CPU)

    def theirs(*tensors):
        outputs = function(*tensors)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    eager = Provider("eager", EAGER[case.op])
    right = Bound(eager, theirs, inputs).results()
    for key, value in Bound(eager, eager.load(case), inputs).results().items():
        assert torch.equal(value, right[key]), key


def test_select():
    names = lambda words: [provider.name for provider in select("linear_cross_entropy", words)]
    assert names(None) == ["tigon", "eager", "compile", "torch", "liger", "cce", "quack", "trl", "products"]
    assert names("tigon,liger-fp32") == ["tigon", "liger-fp32"]
    assert names("-compile,-cce,-quack") == ["tigon", "eager", "torch", "liger", "trl", "products"]
    with pytest.raises(ValueError, match=r"bench: providers must be among .*got 'liga'"):
        names("liga")
