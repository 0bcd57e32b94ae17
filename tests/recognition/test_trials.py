"""`report.why` shows what recognition tried on a module, the nearest candidate and the first case that differs."""

import math
import re

import pytest
import torch
from torch import Tensor, nn

import tigon
from recognition import modules
from tigon.hf.parts import PARTS
from tigon.recognition.probing.trials import record, recording

pytestmark = pytest.mark.filterwarnings("ignore:tigon.patch")


class Norm(modules.Norm):
    def __init__(self, change=lambda y: y) -> None:
        super().__init__()
        self.change = change

    def compute(self, x: Tensor, w: Tensor) -> Tensor:
        return self.change(super().compute(x, w))


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, nn.Identity()

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = x + residual
        residual = x
        x = self.norm(x)
        return self.inner(x) + residual


def why(module: nn.Module, part: str, name: str = "0") -> str:
    """Return what `why` says about one part of a module in a Sequential."""
    text = tigon.patch(nn.Sequential(module), memory="default").why(name)
    (lines,) = re.findall(rf"^{part} .*(?:\n  .*)*", text, re.MULTILINE)
    return lines


def test_why_names_every_part_that_was_tried():
    report = tigon.patch(nn.Sequential(Norm(), nn.ReLU()), rope=False)
    header, *lines = report.why("0").splitlines()
    assert header == "0 (Norm)"
    assert [line.split()[0] for line in lines] == [part for part in PARTS if part != "rope"]
    assert lines[0].split(maxsplit=1)[1].startswith("replaced: rms_norm, offset 0")
    assert lines[1].split(maxsplit=1)[1] == "see rms_norm"
    assert "not tried: a gated MLP has two or three linear children" in report.why("0")
    assert "the model (Sequential)" in report.why("")


@pytest.mark.parametrize(
    ("compute", "case"),
    [
        (lambda y: y * 1.01, r"input float32 \(\d+, 48\), weights float32, training: the largest difference"),
        (
            lambda y: y.float(),
            r"input bfloat16 .*weights bfloat16, training: the candidate returns bfloat16, the module",
        ),
        (lambda y: y.detach() if y.dtype == torch.float32 else y, r"input .*, weights float32, training, gradients: "),
    ],
    ids=["values", "dtype", "gradients"],
)
def test_why_names_the_dtype_shape_and_mode_in_which_a_norm_differs(compute, case):
    text = why(Norm(compute), "rms_norm")
    assert "left alone: computes something else than rms_norm or layer_norm" in text
    assert re.search(r"nearest candidate: (rms_norm, offset 0|layer_norm)", text)
    assert re.search(f"first case that differs: {case}", text)


@pytest.mark.parametrize(
    ("ours", "stock", "sentence"),
    [
        ([1.0, 2.0], [1.0, 4.0], "the largest difference is 2, which is 0.5 times the largest value that the module"),
        ([1.0, 2.0], [0.0, 0.0], "the largest difference is 2, where the module computes only zeros"),
        ([1.0, math.nan], [1.0, 2.0], "computes NaN or infinity where the other computes another value"),
        ([math.inf, 1.0], [-math.inf, 1.0], "computes NaN or infinity where the other computes another value"),
    ],
    ids=["ratio", "zeros", "nan", "infinities"],
)
def test_a_difference_is_a_sentence_for_all_values(ours, stock, sentence):
    with recording() as trials:
        record(False, "candidate", None, (), torch.tensor(ours), torch.tensor(stock))
    assert sentence in trials.lines()[1]


def test_why_says_why_an_activation_is_no_squared_relu():
    report = tigon.patch(nn.Sequential(nn.LayerNorm(16), nn.SiLU()))
    # The report does not list every activation.
    assert not report.left_alone
    text = report.why("1")
    assert "relu2             not replaced: computes something else than a squared ReLU" in text
    assert "nearest candidate: relu2 (0 comparisons agreed" in text
    assert "input float32 (16, 24), training: the largest difference is" in text


def test_why_says_why_statements_are_not_replaced():
    assert "no RMS norm" in why(Block(nn.LayerNorm(48)), "fused_statements")
    assert "has no sum or residual before a norm" in why(nn.Sequential(Norm(), nn.ReLU()), "fused_statements")
    assert "replaced: add + norm" in why(Block(Norm()), "fused_statements")


def test_why_says_which_modules_were_patched_before_and_refuses_unknown_names():
    model = nn.Sequential(Norm())
    tigon.patch(model)
    report = tigon.patch(model)
    assert "the module was patched before" in report.why("0")
    with pytest.raises(ValueError, match=r"report\.why: Sequential has no module '9'; nearest names: "):
        report.why("9")


def test_the_report_of_a_model_type_explains_the_last_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    with tigon.patched("llama") as report:
        transformers.AutoModelForCausalLM.from_config(config)
        assert "glu               replaced: swiglu" in report.why("model.layers.0.mlp")
