"""Every provider that runs on a CPU passes the check against the exact result."""

import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.ops import floor
from benchmarks.ops.accuracy import BoundProvider, Errors, eager_results, exact_results, judge, typical_loss_error
from benchmarks.ops.cases import OPS, make_inputs
from benchmarks.ops.eager import EAGER
from benchmarks.ops.providers import PROVIDERS, Unsupported, select, tigon_provider
from benchmarks.workloads import Case

CPU = torch.device("cpu")
SHAPES = {
    "rope": (2, 8, 4, 2, 16), "qk_norm_rope": (2, 8, 4, 2, 16), "gated_delta_rule": (2, 5, 1, 1, 2, 16),
    "kda": (2, 5, 1, 2, 2, 16), "moe_mlp": (32, 64, 4, 32, 2), "fp8_linear": (16, 32, 64), "cross_entropy": (32, 512),
    "linear_cross_entropy": (32, 64, 512),
    **dict.fromkeys(("dpo_loss", "orpo_loss", "simpo_loss", "kto_loss", "grpo_loss"), (4, 8, 64, 512)),
    "kl_div": (32, 512), "jsd": (32, 512), "tvd": (32, 512),
}  # fmt: skip


def tiny(op, **options):
    """Return a small case of an op; an op that `SHAPES` does not have takes two sizes, or those of its first test."""
    workload = OPS[op]
    if op in SHAPES:
        return Case("tiny", SHAPES[op], op=op, options=options)
    default = (16, 64) if len(workload.legend.split(" x ")) == 2 else workload.test_variants[0].sizes
    return Case("tiny", default, op=op, options=options)


GEMMA = {"offset": 1.0, "rounding": "after_weight"}
OPTIONS = {
    "geglu": {"approximate": "tanh"},
    "load_balancing_loss": {"num_experts": 24, "top_k": 3},
    "ssd": {"dt_softplus": True},
}
CASES = [tiny(op, **OPTIONS.get(op, {})) for op in OPS]
CASES += [tiny(op, **GEMMA) for op in ("rms_norm", "add_rms_norm", "qk_norm_rope")]
CASES += [
    tiny("rope", layout="interleaved"), tiny("rope", layout="deinterleaved"), tiny("rope", sections=(4, 2, 2)),
    tiny("kl_div", log_target=True), tiny("jsd", from_logits=True), tiny("jsd", beta=0.2),
    tiny("linear_cross_entropy", softcap=30.0),
    replace(tiny("linear_cross_entropy"), ignored=0.5, frozen=("linear_weight",)),
    replace(tiny("linear_cross_entropy"), frozen=("input",)), replace(tiny("linear_cross_entropy"), no_grad=True),
    tiny("linear_cross_entropy", acc_dtype=torch.float32),
    replace(tiny("linear_cross_entropy", return_log_probs=True, return_entropy=True), ignored=0.25),
]  # fmt: skip
CASES += [replace(case, dtype=torch.float32, model="tiny-fp32") for case in CASES]

# The providers that run on a CPU.
ON_A_CPU = [
    (case, provider)
    for case in CASES
    for provider in PROVIDERS[case.op]
    if not provider.needs_gpu and provider.autograd and provider.name != "compile"
]


def verdict_of(case, provider):
    inputs = make_inputs(case, CPU)
    exact, eager = exact_results(case, inputs), eager_results(case, inputs)
    results = BoundProvider(provider, provider.load(case), inputs).results()
    return judge(results, eager, exact, typical_loss_error(case, inputs))


@pytest.mark.parametrize(("case", "provider"), ON_A_CPU, ids=lambda value: value.name)
@pytest.mark.sampled(3)
def test_a_provider_agrees_with_the_exact_result(case, provider):
    try:
        verdict = verdict_of(case, provider)
    except Unsupported as reason:
        assert provider.name == "torch"
        pytest.skip(str(reason))
    # The fused ops of torch are less accurate, and only their distance is limited.
    if provider.name != "torch":
        assert verdict.wrong == ""
    assert 0 <= verdict.error < 0.03


def test_every_op_has_tigon_eager_code_and_compiled_code_first():
    for op, row in PROVIDERS.items():
        names = [provider.name for provider in row]
        assert names[:3] == ["tigon", "eager", "compile"], op
        assert len(set(names)) == len(names), op


def test_every_op_of_models_is_compared_with_liger():
    # Liger's losses of log-probabilities do not return them. Liger has no MLPs of two layers, no gated norms, no
    # convolution, no recurrences, and no loss of routers.
    others = {"linear_log_probs", "gelu", "gated_rms_norm", "causal_conv1d", "gated_delta_rule", "kda", "ssd"}
    others |= {"load_balancing_loss", "fp8_linear", "lora_linear", "lora_moe_mlp"}
    for op in OPS.keys() - others:
        assert "liger" in [provider.name for provider in PROVIDERS[op]], op


@pytest.mark.parametrize("op", ["rope", "moe_mlp"])
def test_compiled_code_is_that_of_models_without_a_loop_over_experts(monkeypatch, op):
    loaded = []
    monkeypatch.setattr(torch, "compile", lambda run, dynamic: loaded.append(run) or run)
    monkeypatch.setitem(EAGER, "moe_mlp", lambda case: pytest.fail("the loop over experts is compiled"))
    PROVIDERS[op][2].load(tiny(op))
    assert len(loaded) == 1


@pytest.mark.parametrize("judged_at_once", [2**20, 24])
def test_a_wrong_gradient_is_named(monkeypatch, judged_at_once):
    case = Case("tiny", (16, 64), op="rms_norm")
    inputs = make_inputs(case, CPU)
    exact = exact_results(case, inputs)
    eager = eager_results(case, inputs)
    monkeypatch.setattr("benchmarks.ops.accuracy.JUDGED_ELEMENTS", judged_at_once)
    assert judge(eager, eager, exact).wrong == ""
    for wrong_gradient in (eager["gradient of weight"] * 1.1, torch.full_like(eager["gradient of weight"], torch.nan)):
        assert "gradient of weight" in judge(eager | {"gradient of weight": wrong_gradient}, eager, exact).wrong


def test_a_loss_in_half_precision_is_judged_by_the_units_of_fp32():
    case = tiny("cross_entropy")
    inputs = make_inputs(case, CPU)
    exact = exact_results(case, inputs)
    eager = eager_results(case, inputs)
    assert eager["output 0"].dtype == torch.float32
    assert judge(eager | {"output 0": exact["output 0"].bfloat16()}, eager, exact).wrong.startswith("output 0")


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_eager_code_gets_right_by_luck_sets_no_limit(seed):
    case = tiny("linear_cross_entropy", softcap=30.0)
    inputs = make_inputs(case, CPU, seed)
    exact, typical = exact_results(case, inputs), typical_loss_error(case, inputs)
    # The error of logits near 10 in bf16 is at most 0.02, and the loss averages 32 tokens.
    assert 5e-5 < typical < 5e-3
    lucky = exact | {"output 0": exact["output 0"].float()}
    off = lambda error: exact | {"output 0": (exact["output 0"] + error).float()}
    assert judge(off(3 * typical), lucky, exact, typical).wrong == ""
    assert judge(off(6 * typical), lucky, exact, typical).wrong.startswith("output 0")
    assert judge(off(3 * typical), lucky, exact).wrong.startswith("output 0")
    assert judge(off(3 * typical), lucky, exact, typical).errors["output 0"].ratio == pytest.approx(3, rel=0.1)
    assert judge(off(3 * typical), off(6 * typical), exact, typical).errors["output 0"].ratio == pytest.approx(0.5, 0.1)


def test_the_verdict_has_the_error_ratio_of_each_tensor():
    case, name = tiny("linear_cross_entropy"), "gradient of linear_weight"
    inputs = make_inputs(case, CPU)
    exact, eager = exact_results(case, inputs), eager_results(case, inputs)
    worse = eager | {name: (exact[name] + 1.5 * (eager[name].float() - exact[name])).float()}
    errors = judge(worse, eager, exact).errors
    assert list(errors) == ["output 0", "gradient of input", name]
    assert [error.ratio for error in errors.values()] == [1.0, 1.0, pytest.approx(1.5, rel=1e-3)]
    assert Errors(1e-3, 0.0).ratio != Errors(1e-3, 0.0).ratio  # NaN
    missing = {key: value for key, value in eager.items() if key != name}
    assert judge(missing, eager, exact).wrong == f"{name}: missing"


def test_a_revision_without_an_option_does_not_support_its_case():
    def linear_cross_entropy(input, linear_weight, target, *, softcap=None):
        return F.cross_entropy(F.linear(input, linear_weight).float(), target)

    older = tigon_provider(
        "linear_cross_entropy", SimpleNamespace(linear_cross_entropy=linear_cross_entropy), "tigon@x"
    )
    older.load(tiny("linear_cross_entropy", softcap=30.0))
    with pytest.raises(Unsupported, match="no acc_dtype in this revision"):
        older.load(tiny("linear_cross_entropy", acc_dtype=torch.float32))


LINEAR = [case for case in CASES if case.op == "linear_cross_entropy"]


@pytest.mark.parametrize("chunk", [8192, 10])
@pytest.mark.parametrize("elements", [2**27, 512 * 7])
@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.name)
@pytest.mark.sampled(5)
def test_products_multiply_what_the_loss_multiplies(monkeypatch, case, elements, chunk):
    """The products return the gradients of the loss for the valid rows."""
    monkeypatch.setattr(floor, "PREPARED_ELEMENTS", elements)
    products, inputs = PROVIDERS[case.op][-1], make_inputs(case, CPU)
    assert products.name == "products"
    run = partial(products.load(case), chunk=chunk)
    bound = BoundProvider(products, run, products.prepare(case, inputs))
    _, gradients = bound()
    assert bound.gradient_bytes == sum(gradient.nbytes for gradient in gradients)
    assert len(gradients) == len(inputs.grad_names)
    exact, eager = exact_results(case, inputs), eager_results(case, inputs)
    valid = inputs.tensors["target"] >= 0
    for name, gradient in zip(inputs.grad_names, gradients, strict=True):
        assert gradient.dtype == case.dtype
        exact_gradient, eager_gradient = exact[f"gradient of {name}"], eager[f"gradient of {name}"]
        if name == "input":
            exact_gradient, eager_gradient = exact_gradient[valid], eager_gradient[valid]
        errors = judge({name: gradient}, {name: eager_gradient}, {name: exact_gradient}).errors[name]
        # In bf16 each further chunk rounds dW once more. In fp32 only the order of the sums differs.
        assert errors.error <= (3 if chunk < len(valid) else 1.1) * errors.eager_error + 1e-6


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.name)
def test_products_compute_only_the_products_of_the_floor(case):
    products = PROVIDERS[case.op][-1]
    operands = products.prepare(case, make_inputs(case, CPU))
    bound = BoundProvider(products, products.load(case), operands)
    with FlopCounterMode(display=False) as counter:
        bound()
    assert counter.get_total_flops() == OPS[case.op].flops_of(case)
    assert ("dlogits" in operands.tensors) is not case.no_grad
    assert case.ignored == 0 or len(operands.tensors["input"]) == round(case.shape[0] * (1 - case.ignored))


def test_products_refuse_an_option_that_would_change_their_operands():
    with pytest.raises(Unsupported, match=r"no label_smoothing=0\.1"):
        PROVIDERS["linear_cross_entropy"][-1].load(tiny("linear_cross_entropy", label_smoothing=0.1))


def install(monkeypatch, name, **contents):
    """Let `import name` return a module with `contents`."""
    path = name.split(".")
    for i in range(len(path)):
        module = ModuleType(".".join(path[: i + 1]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(contents)


def test_liger_sums_in_the_dtype_of_the_case_and_refuses_other_options(monkeypatch):
    calls = []
    install(monkeypatch, "liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss=lambda **o: calls.append(o))
    providers_by_name = {provider.name: provider for provider in PROVIDERS["linear_cross_entropy"]}
    providers_by_name["liger"].load(tiny("linear_cross_entropy"))
    providers_by_name["liger"].load(tiny("linear_cross_entropy", acc_dtype=torch.float32))
    providers_by_name["liger"].load(tiny("linear_cross_entropy", softcap=30.0))
    dtypes = [None, torch.float32, None]
    assert calls == [{"softcap": s, "accum_dtype": d} for s, d in zip((None, None, 30.0), dtypes, strict=True)]
    with pytest.raises(Unsupported, match="no return_entropy=True"):
        providers_by_name["liger"].load(tiny("linear_cross_entropy", return_entropy=True))


def test_select_includes_and_excludes_providers():
    names = lambda words: [provider.name for provider in select("linear_cross_entropy", words)]
    assert names(None) == ["tigon", "eager", "compile", "torch", "liger", "cce", "quack", "trl", "products"]
    assert names("tigon,liger") == ["tigon", "liger"]
    assert names("-compile,-cce,-quack") == ["tigon", "eager", "torch", "liger", "trl", "products"]
