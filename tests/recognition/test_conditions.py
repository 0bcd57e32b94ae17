"""A forward that decides by its input, reads a mode, a child or an unusual value, or writes a message stays stock."""

import contextlib
import dataclasses
import logging
import operator
import re
import types
import warnings

import pytest
import torch
import torch.distributed as dist  # noqa: F401
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

import tigon
from recognition.modules import MLP, Norm, define, patch, reason

LOGGER = logging.getLogger(__name__)


def make_variant(**members) -> MLP:
    """Return an MLP of a class of this file, because a forward of another file counts as replaced by a library."""
    return type("Variant", (MLP,), members)()


def is_long(x: Tensor) -> bool:
    return x.shape[-2] > 4096


def catches_any_error(self, x: Tensor) -> bool:
    try:
        return {500: True}[x.shape[-2]]
    except Exception:
        return False


class HalvesLongGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy if dy.shape[1] < 100 else dy / 2


CUDA = torch.device("cuda", 0)
CONDITIONS = {
    "length": lambda self, x: x.shape[-2] > 4096,
    "length in a variable": lambda self, x: [n for n in (x.shape[-2],) if n > 4096],
    "length in a function": lambda self, x: is_long(x),
    "number of elements": lambda self, x: x.numel() > 10**6,
    "batch": lambda self, x: len(x) == 7,
    "device": lambda self, x: x.device.type == "cuda",
    "a device": lambda self, x: x.device == CUDA,
    "type of a size": lambda self, x: isinstance(x.shape[0], int) and x.numel() > 10**4,
    "a handler": catches_any_error,
    "length and gradients": lambda self, x: x.requires_grad and x.numel() > 10**6,
    "two conditions": lambda self, x: self.training and x.dim() == 3 and x.size(0) > 64,
    "three conditions": lambda self, x: not self.training and x.dim() == 4 and x.dtype == torch.half and len(x) > 64,
}


def hides_errors(x: Tensor) -> bool:
    with contextlib.suppress(RuntimeError):
        return bool((x == 3.0).all())
    return False


READS = {
    "stride": lambda x: x.stride(-1) != 1,
    "contiguity": lambda x: not x.is_contiguous(),
    "offset": lambda x: x.storage_offset() > 0,
    "view": lambda x: x._base is not None,
    "many rows": lambda x: isinstance(x, Tensor) and tuple(x)[64:],
    "a late row": lambda x: tuple(x.__getitem__(slice(64, 65))),
    "symbol": lambda x: not isinstance(x.shape[1], torch.SymInt) and x.shape[1] > 400,
    "symbolic function": lambda x: statically_known_true(x.numel() > 10**4),
    "hidden error": hides_errors,
    "backward": lambda x: HalvesLongGradients.apply(x) is None,
    "computed name": lambda x: getattr(x, f"is_{CUDA.type}"),
}


MODES = {
    "gradients": lambda x: torch.is_grad_enabled(),
    "autocast": lambda x: torch.is_autocast_enabled("cpu"),
    "inference": lambda x: torch.is_inference_mode_enabled(),
    "an imported name": lambda x: is_grad_enabled(),
    "default dtype": lambda x: torch.get_default_dtype() == torch.float16,
    "number of GPUs": lambda x: torch.cuda.is_available() * 1,
    "a flag of a tensor": lambda x: x.is_cuda * 1,
    "a graph": lambda x: x.grad_fn is None,
    "compilation": lambda x: torch.compiler.is_compiling(),
    "compilation, by its other name": lambda x: torch._dynamo.is_compiling(),
    "export": lambda x: torch.compiler.is_exporting(),
    "tracing": lambda x: torch.jit.is_tracing(),
    "scripting": lambda x: torch.jit.is_scripting(),
    "state of tracing": lambda x: torch._C._get_tracing_state() is not None,
    "warnings of determinism": lambda x: torch.is_deterministic_algorithms_warn_only_enabled(),
}


ADDRESSES = {"id": lambda self, x: F.silu(x) * (1 + 0 * id(x)), "hash": lambda self, x: F.silu(x) * (1 + 0 * hash(x))}


def tries_an_attribute(self, x):
    try:
        return F.silu(x) * x.temperature
    except AttributeError:
        return F.silu(x)


def catches_in_a_stored_context(self, x):
    with SUPPRESSES:
        x = x * x.temperature
    return F.silu(x)


def catches_in_a_context(self, x):
    with Suppresses(AttributeError):
        x = x * x.temperature
    return F.silu(x)


class Suppresses(contextlib.suppress):
    pass


GET, METHOD, SUPPRESSES = getattr, operator.methodcaller, contextlib.suppress(AttributeError)
ATTRIBUTES = {
    "a stored context": catches_in_a_stored_context,
    "a context": catches_in_a_context,
    "another name of getattr": lambda self, x: F.silu(x) * GET(x, "temperature", 1.0),
    "a default": lambda self, x, get=getattr: F.silu(x) * get(x, "temperature", 1.0),
    "the names": lambda self, x: F.silu(x) * (2.0 if "temperature" in x.__dir__() else 1.0),
    "the state": lambda self, x: F.silu(x) * (2.0 if x.__reduce_ex__(2)[2:] else 1.0),
    "a method by its name": lambda self, x: F.silu(x) * METHOD("dim")(x) / 3,
    "a table of the module": lambda self, x: F.silu(x) * (2.0 if "temperature" in self._buffers else 1.0),
    "shared memory": lambda self, x: F.silu(x) * (2.0 if x.is_shared() else 1.0),
    "hooks": lambda self, x: F.silu(x) * (2.0 if x._backward_hooks else 1.0),
    "getattr": lambda self, x: F.silu(x) * getattr(x, "temperature", 1.0),
    "a handler": tries_an_attribute,
    "in evaluation": lambda self, x: F.silu(x) if self.training else F.silu(x) * getattr(x, "temperature", 1.0),
    "the dict": lambda self, x: F.silu(x) * x.__dict__.get("temperature", 1.0),
    "a computed name": lambda self, x: F.silu(x) * getattr(x, "temp" + "erature", 1.0),
}


@dataclasses.dataclass
class Shape:
    ndim: int

    def is_long(self):
        return self.ndim > 10**9 if self.ndim > 10**9 else False


# The bodies of methods `finish(self, y)`.
DECISIONS = {
    "a nested function": "rows = y.shape[0]\ndef scale(): return 2.0 if rows > 100 else 1.0\nreturn y * scale()",
    "a chain of names": "a = b = c = y.numel(); return y * 2 if b > 10**9 and a == c else y",
    "a walrus": "return y * (2.0 if (n := len(y)) and n > 10**6 else 1.0)",
    "a lookup": "entry = {10**9: 2.0}.get(y.numel()); return y if entry is None else y * entry",
    "an exception": "try: return y * {10**9: 2.0}[y.numel()]\nexcept LookupError: return y",
    "is False": "return y if (y.numel() > 10**9) is False else 2 * y",
    "isinstance and more": "return 2 * y if isinstance(y, Tensor) * (y.numel() > 10**9) else y",
    "a method of an object": "return y * (2 if Shape(y.numel()).is_long() is True else 1)",
    "a field like that of a tensor": "return y if Shape(y.numel()).ndim < 10**9 else 2 * y",
}


def scaled(condition) -> dict:
    """Return an activation that decides by a condition of the module and its input."""
    return {"act": lambda self, x: F.silu(x) * (2.0 if condition(self, x) else 1.0)}


# The members of a variant of the MLP, and what the reason says, by the table and the name of the attack.
KINDS = {
    "decision": (CONDITIONS, scaled, r"its forward decides by its input \(.*test_conditions\.py:"),
    "value": ({"of all elements": lambda self, x: bool((x == 0.125).all())}, scaled, "computes something else"),
    "hard to see": (DECISIONS, lambda body: {"finish": define(body, globals(), "self, y")}, "its forward "),
    "not probed": (READS, lambda condition: scaled(lambda self, x: condition(x)), "its forward "),
    "mode": (
        MODES, lambda read: {"act": lambda self, x: F.silu(x) * (1.0 + 0.0 * read(x))}, "its forward reads ",
    ),
    "address": (ADDRESSES, lambda act: {"act": act}, r"its forward calls (id|hash) \("),
    "attribute of the input": (ATTRIBUTES, lambda act: {"act": act}, "its forward "),
}  # fmt: skip
ATTACKS = {f"{kind}: {name}": (make(attack), text) for kind, (table, make, text) in KINDS.items()
           for name, attack in table.items()}  # fmt: skip


@pytest.mark.parametrize(("members", "text"), ATTACKS.values(), ids=ATTACKS)
def test_a_forward_that_decides_by_its_input_or_reads_a_mode_stays_stock(members, text):
    assert re.search(text, reason(make_variant(**members)))


def test_an_exception_that_the_forward_catches_is_a_decision():
    def check(self, x):
        if x.size(-1) != self.gate.in_features:
            raise ValueError

    def forward(self, x):
        try:
            self.check(x)
        except ValueError:
            return x
        return MLP.forward(self, x)

    assert "decides by its input" in reason(make_variant(forward=forward, check=check))


def logs(self, x):
    LOGGER.info("called")
    return F.silu(x)


def logs_to_the_root(self, x):
    if x.dtype == torch.float64:
        logging.warning("called")
    return F.silu(x)


def warns(self, x):
    if x.dtype == torch.float64:
        warnings.warn("called", stacklevel=2)
    return F.silu(x)


@pytest.mark.parametrize("act", [logs, logs_to_the_root, warns])
def test_a_forward_that_writes_a_message_stays_stock(act, caplog):
    caplog.set_level(logging.INFO)
    assert "its forward uses " in reason(make_variant(act=act))
    assert not caplog.records, "a probe has written to the log"


PROBED_CONDITIONS = {
    "dtype": lambda self, x: F.silu(x) if x.dtype == torch.bfloat16 else F.silu(x) * 1.0,
    "dimensions": lambda self, x: F.silu(x) if x.dim() == 4 else F.silu(x) * 1.0,
    "type": lambda self, x: F.silu(x) if isinstance(x, Tensor) else x[0],
    "a setting": lambda self, x: F.silu(x) * (2.0 if self.scale_of_class > 3 else 1.0),
    "training": lambda self, x: F.silu(x) * (2.0 if self.training and self.scale_of_class == 7 else 1.0),
    "nothing": lambda self, x: F.silu(x) if x is not None else x,
}


PRODUCT = "self.down(F.silu(self.gate(x)) * self.up(x))"
# Torch has a special Python module `config`, a logger `log` and a namespace `classes` too.
NAMES_OF_TORCH = "self.config.scale * len(self.classes) * (0.5 if self.log == dist.ReduceOp else 1.0)"
MATCH = """
match self.kind:
    case "tanh": gate = torch.tanh(self.gate(x))
    case "silu": gate = F.silu(self.gate(x))
    case _: raise ValueError
return self.down(gate * self.up(x))
"""
# The parameters and the body of a forward.
ORDINARY = {
    "raises by a variable": (
        "self, x",
        f"width = x.size(-1)\nif self.training and width != self.width: raise ValueError(width)\nreturn {PRODUCT}",
    ),
    "asserts": ("self, x", f"assert x.size(-1) == self.width; return {PRODUCT}"),
    "a default": ("self, x, factor: float = 1.0", f"return {PRODUCT} * (factor if factor != 1.0 else 1.0)"),
    "a flag": ("self, x, *, aux: bool = False", f"y = {PRODUCT}; return (y, None) if aux else y"),
    "keywords": ("self, x, **options", f"y = {PRODUCT}; return y * options['factor'] if options else y"),
    "match": ("self, x", MATCH),
    "names of torch": ("self, x", f"return {PRODUCT} * {NAMES_OF_TORCH}"),
    "a with block": (
        "self, x",
        "y = self.gate(x)\nwith torch.autocast('cpu', enabled=False): y = F.silu(y)\nreturn self.down(y * self.up(x))",
    ),
}  # fmt: skip
SETTLED = {name: {"act": act} for name, act in PROBED_CONDITIONS.items()}
SETTLED |= {name: {"forward": define(body, globals(), given)} for name, (given, body) in ORDINARY.items()}


@pytest.mark.parametrize("members", SETTLED.values(), ids=SETTLED)
@pytest.mark.sampled(7)
def test_ordinary_checks_options_settings_and_probed_properties_are_no_decisions(members):
    mlp = make_variant(**members)
    mlp.width, mlp.kind = 16, "silu"
    mlp.config, mlp.classes = types.SimpleNamespace(scale=0.5), [1, 2]
    assert patch(mlp)


ACTIVATION_CONDITIONS = {
    "truth of a mean in evaluation": lambda self, x: not self.training and x.mean(),
    "length in evaluation": lambda self, x: not self.training and x.numel() > 10**6,
    "a large width": lambda self, x: x.shape[-1] > 10**5,
    "a width and a fraction": lambda self, x: x.shape[-1] > 1e3,
    "one token in bf16": lambda self, x: x.dtype == torch.bfloat16 and x.dim() == 3 and x.shape[1] == 1,
    "values of one dimension": lambda self, x: x.dim() == 1 and bool(x.sum() == 0.125),
}


@pytest.mark.parametrize("condition", ACTIVATION_CONDITIONS.values(), ids=ACTIVATION_CONDITIONS)
def test_an_activation_that_decides_by_its_input_stays_stock(condition):
    forward = lambda self, x: F.gelu(x) * (2.0 if condition(self, x) else 1.0)
    reason(type("Decides", (nn.Module,), {"forward": forward})())


class Scaled(nn.Linear):
    scale = 1.0


READ, TYPE = "an attribute of a child with weights", "reads the type of self."
CHILD_READS = {
    "an attribute": (READ, "return y * self.up.factor"),
    "through a variable": (READ, "layer = self.up; return y * layer.factor"),
    "by an exception": (READ, "try: return y * self.gate.factor\nexcept AttributeError: return y"),
    "issubclass": (TYPE, "return 2 * y if issubclass(type(self.gate), Scaled) else y"),
    "an alias": (TYPE, "layer = self.up; return 2 * y if layer.__class__.__name__ == 'Scaled' else y"),
    "getattr": (TYPE, "return 2 * y if isinstance(getattr(self, 'down'), Scaled) else y"),
}


@pytest.mark.parametrize(("message", "body"), CHILD_READS.values(), ids=CHILD_READS)
def test_a_forward_that_reads_a_child_with_weights_stays_stock(message, body):
    mlp = make_variant(finish=define(body, globals(), "self, y"))
    mlp.gate.factor = mlp.up.factor = 2.0
    assert message in reason(mlp)


def is_token(x: torch.Tensor) -> bool:
    return x.dim() == 3 and x.shape[1] == 1


UNUSUAL = {
    "NaN of the output": lambda self, x, w: torch.nan_to_num(Norm.compute(self, x, w)),
    "NaN of the input": lambda self, x, w: Norm.compute(self, torch.nan_to_num(x, posinf=torch.inf), w),
    "zeros": lambda self, x, w: Norm.compute(self, x, w) + (x == 0).all(-1, keepdim=True).to(x.dtype),
    "large weights": lambda self, x, w: Norm.compute(self, x, w.clamp(-100, 100)),
    "tiny inputs": lambda self, x, w: Norm.compute(self, torch.where(x.abs() < 1e-20, 0.0, x).to(x.dtype) * 2 - x, w),
    "one dimension": lambda self, x, w: Norm.compute(self, x, w) * (2 if x.dim() == 1 else 1),
    "one token in evaluation": lambda self, x, w: Norm.compute(self, x, w) * (2 - self.training if is_token(x) else 1),
    "inputs that need a gradient": lambda self, x, w: Norm.compute(self, x, w) * (2 if x.requires_grad else 1),
    "inputs that need none": lambda self, x, w: Norm.compute(self, x, w) * (1 if x.requires_grad else 2),
}


UNUSUAL_MLPS = {
    "NaN": lambda self, y: torch.nan_to_num(y),
    "one dimension": lambda self, y: y * (2 if y.dim() == 1 else 1),
    "four dimensions": lambda self, y: y * (2 if y.dim() == 4 else 1),
    "one token in bf16": lambda self, y: y * (2 if y.dtype == torch.bfloat16 and is_token(y) else 1),
    "evaluation": lambda self, y: y * (1 if self.training else 2),
}


NO_NORM = "computes something else than rms_norm or layer_norm"
NO_MLP = "computes something else than silu, gelu or gelu-tanh gates"
CASES = {f"norm: {name}": (Norm, {"compute": compute}, NO_NORM) for name, compute in UNUSUAL.items()}
CASES |= {f"MLP: {name}": (MLP, {"finish": finish}, NO_MLP) for name, finish in UNUSUAL_MLPS.items()}


@pytest.mark.parametrize(("base", "members", "detail"), CASES.values(), ids=CASES)
def test_modules_that_differ_at_unusual_values_stay_stock(base, members, detail):
    assert reason(type("Unusual", (base,), members)()) == detail


def test_an_mlp_that_accepts_only_three_dimensions_is_replaced_for_these():
    def finish(self, y):
        batch, length, width = y.shape
        return y.view(batch, length, width)

    model = nn.ModuleList([make_variant(finish=finish)])
    assert tigon.patch(model)
    assert model[0](torch.randn(2, 3, 16)).shape == (2, 3, 16)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        model[0](torch.randn(3, 16))


def test_other_dtypes_and_values_of_a_patched_norm_run_the_stock_forward():
    """The norm rounds fp64 to fp32, and the op would not."""
    norm, x = Norm(), torch.randn(4, 48, dtype=torch.float64)
    assert tigon.patch(norm)
    torch.testing.assert_close(norm(x), Norm.forward(norm, x), rtol=0, atol=0)
    for norm.eps in (torch.tensor(0.5), 2, 0.5):
        torch.testing.assert_close(norm(x.float()), Norm.forward(norm, x.float()), rtol=1e-6, atol=1e-6)
    norm.weight = None
    with pytest.raises(TypeError, match="NoneType"):
        norm(torch.randn(4, 48))
