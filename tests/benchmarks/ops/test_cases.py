"""The table of cases: the least work of each op follows its formula, and the inputs are like those of training."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.ops.cases import CASES, OPS, halve_rows, make_inputs, select
from benchmarks.ops.eager import eager_code
from benchmarks.workloads import Case

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "ops_h200.md"
by_name = {case.name: case for case in CASES}


def test_every_op_has_a_small_case_a_case_of_a_model_and_a_sweep():
    ops_with = lambda *tags: {case.op for case in CASES if set(tags) & set(case.tags)}
    assert ops_with("small") == ops_with("sweep") == ops_with("first-light", "roofline", "more") == set(OPS)


def test_the_cases_of_the_results_exist_and_those_of_two_tags_are_among_them():
    """The commands in the results select by these tags."""
    text = RESULTS.read_text("utf-8")
    assert set(re.findall(r"^### (\S+) \(", text, re.MULTILINE)) <= by_name.keys()
    for tag, count in {"roofline": 17, "linear": 12, "host": 1}.items():
        names = [case.name for case in CASES if tag in case.tags]
        assert len(names) == count
        assert all(name in text for name in names), tag


@pytest.mark.parametrize(("name", "floor"), [
    ("rms_norm/llama-3-8b/16384x4096", 0.157), ("rope/llama-3-8b/4x4096x32x8x128", 0.157),
    ("swiglu/llama-3-8b/16384x14336", 0.874), ("cross_entropy/llama-3-8b/8192x128256", 0.978),
    ("add_rms_norm/llama-3-8b/16384x4096", 0.250), ("qk_norm_rope/qwen3-8b/4x4096x32x8x128", 0.196),
    ("relu2/minitron-8b/16384x16384", 0.624), ("kl_div/llama-3-8b/4096x128256", 0.733),
])  # fmt: skip
def test_the_floor_by_memory_counts_each_tensor_once(name, floor):
    """The floors are milliseconds for reading and writing each tensor once at 4.3 TB/s."""
    case = by_name[name]
    assert OPS[case.op].bytes_of(case) / 4.3e12 * 1e3 == pytest.approx(floor, abs=1.5e-3)
    assert OPS[case.op].flops_of(case) is None


def flops(name):
    case = by_name[name]
    assert OPS[case.op].bytes_of(case) is None
    return OPS[case.op].flops_of(case)


def test_the_floor_by_products_counts_only_needed_products():
    whole = "linear_cross_entropy/llama-3-8b/8192x4096x128256"
    assert flops(whole) == flops(f"{whole}/acc_dtype=float32") == 6 * 8192 * 4096 * 128256
    assert flops(f"{whole}/frozen=linear_weight") == 4 * 8192 * 4096 * 128256
    assert flops(f"{whole}/no_grad") == 2 * 8192 * 4096 * 128256
    assert flops("linear_cross_entropy/llama-3-8b/16384x4096x128256/ignored=0.75") == 6 * 4096 * 4096 * 128256
    # The experts have six products of each size.
    assert flops("moe_mlp/qwen3-30b-a3b/8192x2048x128x768x8") == 3 * 6 * 8192 * 8 * 2048 * 768


def test_inputs_leave_the_global_generator_alone_and_repeat():
    case = Case("tiny", (4, 8), op="rms_norm")
    state = torch.random.get_rng_state()
    first, again, other = make_inputs(case, CPU), make_inputs(case, CPU), make_inputs(case, CPU, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.tensors["x"], again.tensors["x"])
    assert not torch.equal(first.tensors["x"], other.tensors["x"])


def test_the_heads_of_rope_and_their_gradients_are_transposed_views():
    inputs = make_inputs(Case("tiny", (2, 8, 4, 2, 16), op="rope"), CPU)
    assert inputs.tensors["q"].shape == (2, 4, 8, 16)
    assert inputs.tensors["k"].shape == (2, 2, 8, 16)
    assert inputs.tensors["cos"].shape == (1, 8, 16)
    for tensor in (inputs.tensors["q"], inputs.tensors["k"], *inputs.upstream):
        assert tensor.transpose(1, 2).is_contiguous()
    copy = inputs.map(lambda name, x: x.clone())
    assert copy.tensors["q"].stride() == inputs.tensors["q"].stride()


@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
def test_logits_are_as_peaked_as_those_of_a_trained_model(op):
    shape = (512, 8192) if op == "cross_entropy" else (512, 64, 8192)
    tensors = make_inputs(Case("tiny", shape, op=op), CPU).tensors
    logits = tensors["input"] if op == "cross_entropy" else F.linear(tensors["input"], tensors["linear_weight"])
    losses = F.cross_entropy(logits.detach().float(), tensors["target"], reduction="none")
    assert 1.0 < losses.mean() < 0.5 * math.log(8192)
    # Some tokens are certain.
    assert (losses < 0.2).float().mean() > 0.05


@pytest.mark.parametrize("case", [case for case in CASES if "small" in case.tags], ids=lambda case: case.name)
@pytest.mark.sampled(4)
def test_inputs_need_gradients_and_each_output_has_an_upstream_gradient(case):
    while (half := halve_rows(case)).shape != case.shape and math.prod(case.shape) > 2**22:
        case = half
    inputs = make_inputs(case, CPU)
    assert bool(inputs.grad_names) is not case.no_grad
    assert next(iter(inputs.tensors.values())).dtype == case.dtype
    for tensor in (*inputs.tensors.values(), *inputs.upstream):
        assert not tensor.is_floating_point() or tensor.isfinite().all()
    outputs = eager_code(case.op)(case)(*inputs.tensors.values())
    shapes = [gradient.shape for gradient in inputs.upstream]
    if not shapes:
        # Without upstream gradients the first output is a scalar loss, which results for each token follow.
        shapes = [torch.Size([])] + [(case.shape[0],)] * sum(name.startswith("return_") for name in case.options)
    assert [output.shape for output in outputs] == shapes


def test_a_case_may_ignore_targets_and_freeze_inputs():
    case = Case("tiny", (64, 8, 32), op="linear_cross_entropy", ignored=0.75, frozen=("linear_weight",))
    inputs = make_inputs(case, CPU)
    assert (inputs.tensors["target"] == -100).sum() == 48
    assert inputs.grad_names == ("input",)
    assert inputs.gradient_bytes == 64 * 8 * 2


def test_select_matches_tags_and_parts_of_names():
    assert all("small" in case.tags for case in select(None, "small"))
    assert [case.model for case in select("rms_norm", "405b")] == ["llama-3.1-405b"]
    assert len(select(None, "all")) == len(CASES)
