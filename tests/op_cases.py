"""One table of small cases for every op, which reach its corners. The tests of the contracts share the table.

A case creates its tensors from a generator. `run` is the op, and `reference` is its definition in torch.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

import tigon
from tigon.ops.experts.moe_mlp import moe_mlp_reference
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy_reference
from tigon.ops.logits.cross_entropy import cross_entropy_reference, log_probs_and_entropy_reference
from tigon.ops.logits.jsd import jsd_reference
from tigon.ops.logits.kl_div import kl_div_reference
from tigon.ops.logits.softmax import softmax_reference
from tigon.ops.logits.tvd import tvd_reference
from tigon.ops.mlps.glu import geglu_reference, swiglu_reference
from tigon.ops.mlps.relu2 import relu2_reference
from tigon.ops.norms.layer_norm import layer_norm_reference
from tigon.ops.norms.rms_norm import add_rms_norm_reference, rms_norm_reference
from tigon.ops.rotary.qk_norm_rope import qk_norm_rope_reference
from tigon.ops.rotary.rope import rope_reference
from tigon.testing import assert_accurate

# The interpreter truncates bf16 stores, and its dot of bf16 is wrong: bf16 is for a GPU, or for the references.
INTERPRETED = tigon.runtime.device.INTERPRETED
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]

# These ops have code of their own on a CPU: losses in blocks of fp32, logits in chunks, rows grouped by expert.
WITH_CPU_CODE = ("cross_entropy", "linear_cross_entropy", "moe_mlp")


@dataclass(frozen=True)
class Case:
    name: str
    # A function of the tensors that returns a tensor or a tuple of tensors.
    run: Callable
    reference: Callable
    # The shapes of the differentiable inputs.
    shapes: tuple[tuple[int, ...], ...]
    # The size of the vocabulary, if the last input of the op holds class indices.
    targets: int | None = None
    # The number of axes of cos and sin, if they are the last inputs of the op.
    tables: int = 0
    # The gradient is a difference of terms of this size, and the loss a difference of a few of them.
    terms: float = 0.0

    @property
    def is_reference_on_cpu(self) -> bool:
        """True if the op runs its reference on a CPU, so that the two cannot differ there."""
        return not self.name.startswith(WITH_CPU_CODE)

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = DEVICE) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        normal = lambda shape: torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        tensors = [normal(shape) for shape in self.shapes]
        if self.targets:
            target = torch.randint(self.targets, self.shapes[0][:-1], generator=generator)
            target.view(-1)[1::5] = -100
            tensors.append(target.to(device))
        if self.tables:
            b, _, s, d = self.shapes[0]
            axes = (self.tables,) if self.tables > 1 else ()
            angles = torch.randn((*axes, b, s, d), generator=generator).to(device)
            tensors += [angles.cos().to(dtype), angles.sin().to(dtype)]
        return tensors


def as_list(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs of an op that has one or several."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def outputs_and_gradients(
    function: Callable, tensors: list[Tensor], seed: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of the inputs that need one, for the same random gradients of the outputs."""
    outputs = as_list(function(*tensors))
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    wanted = [x for x in tensors if x.requires_grad]
    pairs = [(y, dy) for y, dy in zip(outputs, upstream, strict=True) if y.requires_grad]
    return outputs, list(torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs]))


def assert_as_accurate_as_eager(
    run: Callable, reference: Callable, tensors: list[Tensor], loss: bool = False, terms: float = 0.0
) -> None:
    """Check every output and gradient by the oracle. Eager is the reference in the inputs' dtype, exact that in fp64.

    A gradient that is a difference of `terms` may err by units of their size, and such a loss by units of 4.
    """
    widened = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in tensors]
    results = [outputs_and_gradients(f, x) for f, x in ((run, tensors), (reference, tensors), (reference, widened))]
    for kind, (got, eager, exact) in zip(("output", "gradient"), zip(*results, strict=True), strict=True):
        for i, triple in enumerate(zip(got, eager, exact, strict=True)):
            smallest = 1.0 if loss and kind == "output" else 0.0
            if terms:
                smallest = 4.0 if kind == "output" else terms
            assert_accurate(*triple, smallest=smallest, msg=f"{kind} {i}")


HEADS = ((2, 6, 3, 16), (2, 2, 3, 16))


GEMMA = {"offset": 1.0, "rounding": "after_weight"}
INTERLEAVED = {"layout": "interleaved", "sections": (1,) * 6 + (2,)}


def _rotary(
    name: str, run: Callable, reference: Callable, *weights: tuple[int], tables: int = 1, **options
) -> Case:  # fmt: skip
    return Case(name, partial(run, **options), partial(reference, **options), (*HEADS, *weights), tables=tables)


def _loss_log_probs_entropy(result: tigon.LossOutput) -> tuple[Tensor, Tensor, Tensor]:
    return result.loss, result.log_probs, result.entropy


def _divergence(name: str, run: Callable, reference: Callable, **options) -> Case:
    """Logits, or numbers of the size of (log-)probabilities; the teacher is the student backwards, not too like it."""
    logits, logs = "from_logits" in options, run is tigon.jsd or "log_target" in options

    def with_teacher(function: Callable) -> Callable:
        def call(x: Tensor, labels: Tensor) -> Tensor:
            student = x if logits else x.abs() * (-32.0 if logs else 1 / 64)  # both exact in fp16
            teacher = student.detach().flip(-1)
            return function(student, teacher / 2 if logits else teacher, labels=labels, **options)

        return call

    terms = 1.0 if logits and run is tigon.jsd else 0.0  # a difference of entropies
    return Case(name, with_teacher(run), with_teacher(reference), ((7, 100),), targets=100, terms=terms)


def _moe(name: str, *biases: tuple[int, int], transposed: bool = False, activation: str = "silu") -> Case:
    """Three of 16 experts a token, as many as there are features: x and the logits of the router have one shape."""

    def routed(function: Callable) -> Callable:
        def call(x: Tensor, logits: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
            chosen, index = logits.topk(3)
            up, down = (up.mT, down.mT) if transposed else (up, down)
            options = {"transposed": transposed, "activation": activation}
            options |= dict(zip(("up_bias", "down_bias"), biases, strict=False))
            return function(x, up / 4, down / 4, index, chosen.softmax(-1), **options)

        return call

    width = 24 if activation == "relu2" else 48
    shapes = (5, 16), (5, 16), (16, width, 16), (16, 16, 24), *biases
    return Case(name, routed(tigon.moe_mlp), routed(moe_mlp_reference), shapes)


CASES = [
    Case("rms_norm", tigon.rms_norm, rms_norm_reference, ((7, 48), (48,))),
    Case(
        "rms_norm offset after",
        lambda x, w: tigon.rms_norm(x, w, offset=1.0, rounding="after_weight"),
        lambda x, w: rms_norm_reference(x, w, offset=1.0, rounding="after_weight"),
        ((7, 48), (48,)),
    ),
    Case("rms_norm no weight", lambda x: tigon.rms_norm(x, None), lambda x: rms_norm_reference(x, None), ((7, 33),)),
    Case("add_rms_norm", tigon.add_rms_norm, add_rms_norm_reference, ((7, 48), (7, 48), (48,))),
    Case("layer_norm", tigon.layer_norm, layer_norm_reference, ((7, 48), (48,), (48,))),
    Case("layer_norm no bias", tigon.layer_norm, layer_norm_reference, ((7, 33), (33,))),
    Case("rope", tigon.rope, rope_reference, HEADS, tables=1),
    _rotary("rope interleaved", tigon.rope, rope_reference, layout="interleaved"),
    _rotary("rope deinterleaved", tigon.rope, rope_reference, layout="deinterleaved"),
    _rotary("rope pairs", tigon.rope, rope_reference, layout="interleaved", table="pairs"),
    _rotary("rope sections", tigon.rope, rope_reference, tables=3, sections=(2, 3, 3)),
    Case(
        "rope of one tensor",
        lambda q, cos, sin: tigon.rope(q, None, cos, sin)[0],
        lambda q, cos, sin: rope_reference(q, None, cos, sin)[0],
        HEADS[:1],
        tables=1,
    ),
    _rotary("qk_norm_rope", tigon.qk_norm_rope, qk_norm_rope_reference, (16,), (16,)),
    _rotary("qk_norm_rope offset after", tigon.qk_norm_rope, qk_norm_rope_reference, (16,), (16,), **GEMMA),
    _rotary("qk_norm_rope over all heads", tigon.qk_norm_rope, qk_norm_rope_reference, (96,), (32,)),
    Case(
        "qk_norm_rope sections no weight",
        lambda q, k, cos, sin: tigon.qk_norm_rope(q, k, None, None, cos, sin, **INTERLEAVED),
        lambda q, k, cos, sin: qk_norm_rope_reference(q, k, None, None, cos, sin, **INTERLEAVED),
        HEADS,
        tables=3,
    ),
    Case("swiglu", tigon.swiglu, swiglu_reference, ((7, 48), (7, 48))),
    Case("swiglu packed", tigon.swiglu, swiglu_reference, ((7, 96),)),
    Case("geglu", tigon.geglu, geglu_reference, ((7, 48), (7, 48))),
    Case(
        "geglu tanh packed",
        lambda x: tigon.geglu(x, approximate="tanh"),
        lambda x: geglu_reference(x, approximate="tanh"),
        ((7, 66),),
    ),
    Case("relu2", tigon.relu2, relu2_reference, ((7, 66),)),
    _moe("moe_mlp"),
    _moe("moe_mlp transposed with biases", (16, 48), (16, 16), transposed=True, activation="gelu_tanh"),
    _moe("moe_mlp without gate", activation="relu2"),
    Case("softmax", tigon.softmax, softmax_reference, ((7, 48),)),
    Case("softmax of wide rows", tigon.softmax, softmax_reference, ((3, 33000),)),
    Case(
        "softmax of another dimension",
        lambda x: tigon.softmax(x, 1),
        lambda x: softmax_reference(x, 1),
        ((3, 5, 16),),
    ),
    Case("cross_entropy", tigon.cross_entropy, cross_entropy_reference, ((7, 100),), targets=100),
    Case(
        "cross_entropy none",
        lambda x, t: tigon.cross_entropy(x, t, reduction="none", softcap=5.0, z_loss=0.01, label_smoothing=0.1),
        lambda x, t: cross_entropy_reference(x, t, reduction="none", softcap=5.0, z_loss=0.01, label_smoothing=0.1),
        ((7, 100),),
        targets=100,
    ),
    Case(
        "cross_entropy token scaling",
        lambda x, t: tigon.cross_entropy(x, t, token_scaling=True, z_loss=0.01, label_smoothing=0.1),
        lambda x, t: cross_entropy_reference(x, t, token_scaling=True, z_loss=0.01, label_smoothing=0.1),
        ((7, 100),),
        targets=100,
    ),
    Case(
        "cross_entropy with log-probabilities and entropy",
        lambda x, t: _loss_log_probs_entropy(tigon.cross_entropy(x, t, return_log_probs=True, return_entropy=True)),
        lambda x, t: (cross_entropy_reference(x, t), *log_probs_and_entropy_reference(x, t)),
        ((7, 100),),
        targets=100,
    ),
    Case(
        "linear_cross_entropy",
        lambda x, w, b, t: tigon.linear_cross_entropy(x, w, t, linear_bias=b),
        lambda x, w, b, t: linear_cross_entropy_reference(x, w, t, linear_bias=b),
        ((7, 24), (100, 24), (100,)),
        targets=100,
    ),
    Case(
        "linear_cross_entropy none",
        lambda x, w, t: tigon.linear_cross_entropy(x, w, t, reduction="none"),
        lambda x, w, t: linear_cross_entropy_reference(x, w, t, reduction="none"),
        ((7, 24), (100, 24)),
        targets=100,
    ),
    _divergence("kl_div", tigon.kl_div, kl_div_reference, log_target=True),
    _divergence("kl_div none", tigon.kl_div, kl_div_reference, log_target=True, reduction="none"),
    _divergence("kl_div logits", tigon.kl_div, kl_div_reference, from_logits=True, temperature=2.0),
    _divergence("jsd", tigon.jsd, jsd_reference, beta=0.1),
    _divergence("jsd logits", tigon.jsd, jsd_reference, from_logits=True, reduction="sum"),
    _divergence("jsd logits none", tigon.jsd, jsd_reference, from_logits=True, temperature=0.7, reduction="none"),
    _divergence("jsd reverse", tigon.jsd, jsd_reference, beta=1.0, reduction="mean"),
    _divergence("tvd", tigon.tvd, tvd_reference),
    _divergence("tvd logits", tigon.tvd, tvd_reference, from_logits=True),
]


def every_case(test: Callable) -> Callable:
    """Run a test on every case. On a CPU without kernels, cases that run the reference there are left out."""
    marks = {True: pytest.mark.kernels, False: ()}
    params = [pytest.param(case, marks=marks[case.is_reference_on_cpu], id=case.name) for case in CASES]
    return pytest.mark.parametrize("case", params)(test)


def one_in(parts: int, **axes: dict | list) -> Callable:
    """Parametrise a test with the product of the axes, of which `make test` runs one case in so many.

    The cases whose indices add up to a multiple of `parts` run there: every value of every axis is among them, and so
    is every pair of values if another axis has at least `parts` values. `make test-thorough` runs the others.

    Args:
        parts: One case in so many runs in `make test`.
        axes: The values of each argument of the test: a list, or a dict from the id of a value to the value.
    """
    named = [list(x.items()) if isinstance(x, dict) else [(str(value), value) for value in x] for x in axes.values()]
    params = []
    for case in itertools.product(*(list(enumerate(values)) for values in named)):
        is_quick = sum(i for i, _ in case) % parts == 0
        values = [value for _, (_, value) in case]
        name = "-".join(id for _, (id, _) in case)
        params.append(pytest.param(*values, id=name, marks=() if is_quick else pytest.mark.thorough))
    return pytest.mark.parametrize(tuple(axes), params)
