"""Providers: eager code is what Hugging Face models run, bit for bit, and all that run on a CPU pass the check."""

from dataclasses import replace

import pytest
import torch

from tigon.bench.accuracy import Bound, eager_results, exact_results, judge
from tigon.bench.cases import OPS, Case
from tigon.bench.providers import EAGER, PROVIDERS, Provider, select

CPU = torch.device("cpu")
SHAPES = {
    "rms_norm": (16, 64),
    "rope": (2, 8, 4, 2, 16),
    "swiglu": (16, 64),
    "geglu": (16, 64),
    "cross_entropy": (32, 512),
    "cross_entropy_inplace": (32, 512),
    "linear_cross_entropy": (32, 64, 512),
}
GEMMA = {"offset": 1.0, "rounding": "after_weight"}
CASES = [Case(op, "tiny", SHAPES[op], options={"approximate": "tanh"} if op == "geglu" else {}) for op in OPS]
CASES += [
    Case("rms_norm", "tiny", (16, 64), options=GEMMA),
    Case("linear_cross_entropy", "tiny", (32, 64, 512), options={"softcap": 30.0}),
    Case("linear_cross_entropy", "tiny", (32, 64, 512), ignored=0.5, frozen=("linear_weight",)),
]
CASES += [replace(case, dtype=torch.float32, model="tiny-fp32") for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tigon_passes_the_check(case):
    provider = PROVIDERS[case.op][0]
    assert provider.name == "tigon"
    inputs = case.make(CPU)
    exact = exact_results(case, inputs)
    verdict = judge(Bound(provider, provider.load(case), inputs).results(), eager_results(case, inputs, exact), exact)
    assert verdict.wrong == ""
    assert 0 <= verdict.error < 0.02


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


def test_exact_losses_agree_with_fp64_autograd(monkeypatch):
    monkeypatch.setattr("tigon.bench.accuracy.REFERENCE_ELEMENTS", 512 * 10)  # chunks of 10 rows, the last of 2
    for op in ("cross_entropy", "linear_cross_entropy"):
        case = Case(op, "tiny", SHAPES[op], ignored=0.25)
        inputs = case.make(CPU)
        wide = inputs.map(lambda _, x: x.double() if x.is_floating_point() else x)
        eager = Provider("eager", EAGER[op])
        exact, right = exact_results(case, inputs), Bound(eager, eager.load(case), wide).results()  # its loss is fp32
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
    case = Case("rope", "tiny", SHAPES["rope"])
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


@pytest.mark.parametrize("op", ["rms_norm", "gemma", "rope"])
def test_eager_is_hugging_faces_code_bit_for_bit(op):
    pytest.importorskip("transformers")
    case = Case("rope" if op == "rope" else "rms_norm", "tiny", SHAPES["rope" if op == "rope" else "rms_norm"])
    if op == "gemma":
        from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm as Norm

        case = Case("rms_norm", "tiny", SHAPES["rms_norm"], options=GEMMA)
    else:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm as Norm
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    inputs = case.make(CPU)

    def hugging_face(x, weight):
        norm = Norm(x.shape[-1], eps=1e-6)
        return (torch.func.functional_call(norm, {"weight": weight}, x),)

    eager = Provider("eager", EAGER[case.op])
    theirs = Bound(eager, apply_rotary_pos_emb if op == "rope" else hugging_face, inputs).results()
    for name, value in Bound(eager, eager.load(case), inputs).results().items():
        assert torch.equal(value, theirs[name]), name


def test_select():
    names = lambda words: [provider.name for provider in select("linear_cross_entropy", words)]
    assert names(None) == ["tigon", "eager", "compile", "torch", "liger", "cce", "products"]
    assert names("tigon,liger-fp32") == ["tigon", "liger-fp32"]
    assert names("-compile,-cce") == ["tigon", "eager", "torch", "liger", "products"]
    with pytest.raises(ValueError, match=r"bench: providers must be among .*got 'liga'"):
        names("liga")
