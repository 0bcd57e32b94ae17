"""Functions that compute a gated delta rule or a causal convolution are found by what they compute."""

import contextlib
import functools
import itertools
import linecache
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from recognition.modules import define
from tigon.recognition.parts import mixers
from tigon.recognition.parts.mixer_functions import RuleForm, recognise_function
from tigon.recognition.parts.mixers import recognise_mixer

pytestmark = pytest.mark.no_interpreter("It compares functions on the CPU.")


def rule(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
         eps=1e-6, scale=1.0, **others):  # fmt: skip
    """Compute the rule token by token, with the arguments of flash-linear-attention."""
    q, k, v, g, beta = (x.float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (q, k))
    q = q * q.shape[-1] ** -0.5 * scale
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        update = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * state).sum(2))
        state = state + k[:, t, :, :, None] * update[:, :, None]
        outputs.append((q[:, t, :, :, None] * state).sum(2))
    return torch.stack(outputs, 1).to(query.dtype), state if output_final_state else None


def convolution(x, weight, bias=None, activation=None, **others):
    y = F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight))
    return y if activation is None else F.silu(y)


calls: list[int] = []
RULE = "query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False"
PASSED = "query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel"
CONVOLUTION = "x, weight, bias=None, activation=None"
SAME_CONVOLUTION = "return convolution(x, weight, bias, activation)"
# Functions with the arguments of a rule or a convolution that compute something else.
OTHERS = {
    "rule, another scale": (RULE, f"return rule({PASSED}, scale=1.5)"),
    "rule, another epsilon": (RULE, f"return rule({PASSED}, eps=1e-5)"),
    "rule, always normalised": (RULE, f"return rule({PASSED.rpartition(',')[0]}, True)"),
    "rule, no decay": (RULE, f"return rule({PASSED.replace('g,', '0 * g,')})"),
    "rule, half the update": (RULE, f"return rule({PASSED.replace('beta', 'beta / 2')})"),
    "rule, no initial state": (RULE, f"return rule({PASSED.replace('initial_state', 'None', 1)})"),
    "rule, no final state": (RULE, f"return rule({PASSED})[0], None"),
    "rule, fp32 results": (RULE, f"o, s = rule({PASSED})\nreturn o.float(), s"),
    "rule, no gradient of g": (RULE, f"return rule({PASSED.replace('g,', 'g.detach(),')})"),
    "rule, no tuple": (RULE, f"return rule({PASSED})[0]"),
    "rule, counting": (RULE, f"calls.append(1)\nreturn rule({PASSED})"),
    "rule, long sequences": (RULE, f"return rule({PASSED}, scale=2.0 if query.shape[1] > 100 else 1.0)"),
    "convolution, of the future": (CONVOLUTION, "return convolution(x.flip(-1), weight, bias, activation).flip(-1)"),
    "convolution, always with SiLU": (CONVOLUTION, "return convolution(x, weight, bias, 'silu')"),
    "convolution, never with SiLU": (CONVOLUTION, "return convolution(x, weight, bias)"),
    "convolution, no bias": (CONVOLUTION, "return convolution(x, weight, None, activation)"),
    "convolution, bias after SiLU": (CONVOLUTION, "y = convolution(x, weight, None, activation)\n"
                                     "return y if bias is None else y + bias[:, None]"),
    "convolution, of another order": (CONVOLUTION, "return convolution(x, weight.flip(-1), bias, activation)"),
}  # fmt: skip


def _inputs(length: int = 70, dtype: torch.dtype = torch.float32, heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, heads, 8, generator=generator).to(dtype) for _ in range(3))
    g, beta = -torch.rand(2, length, heads, generator=generator), torch.rand(2, length, heads, generator=generator)
    return [q, k, v, g, beta.to(dtype)]


def test_functions_with_the_results_of_the_ops_are_found():
    assert str(recognise_function(define(f"return rule({PASSED})", globals(), RULE))) == "gated delta rule"
    assert str(recognise_function(define(SAME_CONVOLUTION, globals(), CONVOLUTION))) == "causal convolution"


def test_a_convolution_that_casts_takes_mixed_dtypes():
    """Under autocast, the input is in half precision and the weight in fp32. `F.conv1d` alone refuses this."""
    casts = "return convolution(x.to(weight.dtype), weight, bias, activation).to(x.dtype)"
    forms = [recognise_function(define(body, globals(), CONVOLUTION)) for body in (SAME_CONVOLUTION, casts)]
    assert [form.is_mixed for form in forms] == [False, True]


@pytest.mark.parametrize(("arguments", "body"), OTHERS.values(), ids=OTHERS)
def test_anything_else_keeps_its_function(arguments, body):
    assert isinstance(recognise_function(define(body, globals(), arguments)), str)
    assert not calls


@pytest.mark.parametrize("function", [rule, F.relu, F.pad])
def test_functions_with_other_arguments_are_not_compared(function):
    assert recognise_function(function) is None


SOURCE = """
def chunk_rule({rule_arguments}, **kwargs):
    {rule}

def convolve({convolution_arguments}, **kwargs):
    {convolution}

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(48, 4, generator=torch.Generator().manual_seed(5)))

    def forward(self, x, g, beta, cache_params=None, **kwargs):
        qkv = convolve(x.transpose(1, 2), self.taps, activation="silu", **kwargs).transpose(1, 2)
        q, k, v = (y.unflatten(-1, (2, 8)) for y in qkv.chunk(3, -1))
        {statements}
        o, state = chunk_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True,
                              output_final_state=cache_params is not None,
                              cu_seqlens=kwargs.pop("cu_seq_lens_q", None), **kwargs)
        return o if state is None else (o, state)
"""


# A function is recognised once, so tests with the same bodies share a class.
@functools.cache
def _mixer(
    chunk_rule: str = f"return rule({PASSED})",
    convolve: str = SAME_CONVOLUTION,
    statements: str = "pass",
    rule_arguments: str = RULE,
    convolution_arguments: str = CONVOLUTION,
) -> type[nn.Module]:
    """Return a class of mixers whose forward calls functions with these bodies, from a file of its own."""
    bodies = {"rule": chunk_rule, "convolution": convolve, "statements": statements}
    source = SOURCE.format(rule_arguments=rule_arguments, convolution_arguments=convolution_arguments, **bodies)
    scope = {**globals(), "__name__": __name__}
    # Recognition reads the source of the forward, and of functions that take any keyword arguments.
    file = f"<mixer {len(linecache.cache)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), scope)
    return scope["Mixer"]


@pytest.fixture
def op_calls(monkeypatch) -> list[str]:
    """Return the list to which each call of an op adds its name."""
    recorded: list[str] = []

    def count(name):
        op = getattr(mixers, name)
        monkeypatch.setattr(mixers, name, lambda *args, **kwargs: recorded.append(name) or op(*args, **kwargs))

    count("gated_delta_rule"), count("causal_conv1d")
    return recorded


BOTH = ["causal_conv1d", "gated_delta_rule"]


def _arguments(length: int = 70) -> tuple[Tensor, ...]:
    _, _, _, g, beta = _inputs(length)
    return torch.randn(2, length, 48, generator=torch.Generator().manual_seed(3)), g, beta


def _gradients(module, run, *inputs) -> list[Tensor]:
    leaves = [*(x.clone().requires_grad_() for x in inputs), *module.parameters()]
    y = run(*leaves[: len(inputs)])
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


def test_the_ops_run_and_the_file_keeps_its_functions(op_calls):
    module = _mixer()()
    stock = _gradients(module, module, *_arguments())
    functions = {name: type(module).forward.__globals__[name] for name in ("chunk_rule", "convolve")}
    report = tigon.patch(nn.ModuleList([module]))
    assert [(entry.part, entry.detail) for entry in report.replaced] == [
        ("mixers", "causal convolution; gated delta rule")
    ]
    torch.testing.assert_close(_gradients(module, module, *_arguments()), stock, rtol=1e-4, atol=1e-4)
    assert op_calls == BOTH
    assert all(type(module).forward.__globals__[name] is function for name, function in functions.items())
    report.restore()
    assert all(map(torch.equal, _gradients(module, module, *_arguments()), stock))
    assert op_calls == BOTH


def test_packed_samples_are_those_of_separate_calls():
    module, boundaries = _mixer()(), torch.tensor([0, 9, 70, 80, 140], dtype=torch.int32)
    recipe, (x, g, beta) = recognise_mixer(module), _arguments()
    assert recipe.restarts_at_boundaries(module)
    rows = [each.reshape(1, 140, *each.shape[2:]) for each in (x, g, beta)]
    packed = recipe(module, x, g, beta, cu_seq_lens_q=boundaries).reshape(1, 140, 2, 8)
    samples = [[each[:, a:b] for each in rows] for a, b in itertools.pairwise(boundaries)]
    # The sums of the convolution's taps have another order if samples are packed.
    torch.testing.assert_close(packed, torch.cat([recipe(module, *sample) for sample in samples], 1))
    run, inputs = recipe.functions["chunk_rule"], [each.reshape(1, 140, *each.shape[2:]) for each in _inputs()]
    alone = [run(*(each[:, a:b] for each in inputs))[0] for a, b in itertools.pairwise(boundaries)]
    assert torch.equal(run(*_inputs(), cu_seqlens=boundaries)[0].reshape(1, 140, 2, 8), torch.cat(alone, 1))
    # With a cache, each row leaves the state of its last sample.
    cache = types.SimpleNamespace(has_previous_state=False)
    _, state = recipe(module, x, g, beta, cu_seq_lens_q=boundaries, cache_params=cache)
    expected = [recipe(module, *samples[i], cache_params=object())[1] for i in (1, 3)]
    torch.testing.assert_close(state, torch.cat(expected))


def warnings_of(call) -> list[str]:
    """Return the warnings while `call` runs, of which each text is given once in a process."""
    mixers._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(), call()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("length", "has_state"), [(70, True), (5, False)], ids=["a state", "short"])
def test_boundaries_with_a_cache_that_adds_columns_run_the_stock_forward(op_calls, length, has_state):
    module = _mixer()()
    x, g, beta = (each[:, :length] for each in _arguments())
    cache = types.SimpleNamespace(has_previous_state=lambda layer_idx: has_state)
    arguments = {"cache_params": cache, "cu_seq_lens_q": torch.tensor([0, 2, 2 * length], dtype=torch.int32)}
    recipe = recognise_mixer(module)
    (warning,) = warnings_of(lambda: recipe(module, x, g, beta, **arguments))
    assert "not independent in this call: the ops do not take boundaries together with" in warning
    assert all(map(torch.equal, recipe(module, x, g, beta, **arguments), module(x, g, beta, **arguments)))
    assert not op_calls


FALLBACKS = {
    "fp64": (lambda inputs: [x.double() for x in inputs], {}, "Tensor torch.float64"),
    "mixed dtypes": (lambda inputs: [inputs[0].bfloat16(), *inputs[1:]], {}, "torch.bfloat16"),
    "a state": (lambda inputs: inputs, {"initial_state": torch.ones(2, 2, 8, 8)}, "it has an initial state"),
    "too many arguments": (lambda inputs: [*inputs, None, False, False, None], {}, "does not take its arguments"),
}


@pytest.mark.parametrize(("change", "arguments", "reason"), FALLBACKS.values(), ids=FALLBACKS)
def test_a_function_that_ignores_boundaries_warns_once(change, arguments, reason, op_calls):
    run, boundaries = recognise_mixer(_mixer()()).functions["chunk_rule"], torch.tensor([0, 9, 140]).int()

    def call():
        with contextlib.suppress(TypeError):
            run(*change(_inputs()), **arguments, cu_seqlens=boundaries)

    (warning,) = warnings_of(call)
    assert reason in warning.partition("chunk_rule runs in place of the op")[2]
    assert not op_calls
    assert not warnings_of(lambda: run(*_inputs(), cu_seqlens=boundaries))


def test_a_replaced_function_and_a_graph_warn_of_boundaries(monkeypatch):
    module, (x, g, beta) = _mixer()(), _arguments()
    recipe, boundaries = recognise_mixer(module), torch.tensor([0, 9, 140], dtype=torch.int32)
    monkeypatch.setitem(type(module).forward.__globals__, "chunk_rule", lambda q, k, v, **kwargs: (v, None))
    call = lambda: recipe(module, x, g, beta, cu_seq_lens_q=boundaries)
    (warning,) = warnings_of(call)
    assert "the function has changed since the patch" in warning
    assert warnings_of(torch.compile(call, backend="eager", fullgraph=True)) == [warning]


def test_defaults_of_the_functions_are_read(op_calls):
    arguments = RULE.replace("False", "True"), CONVOLUTION.replace("activation=None", "activation='silu'")
    module = _mixer(rule_arguments=arguments[0], convolution_arguments=arguments[1])()
    convolve, run = recognise_mixer(module).functions.values()
    scope, inputs, x = type(module).forward.__globals__, _inputs(), torch.randn(2, 48, 7)
    torch.testing.assert_close(run(*inputs), scope["chunk_rule"](*inputs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(convolve(x, module.taps), scope["convolve"](x, module.taps), rtol=1e-4, atol=1e-5)
    assert op_calls == [*reversed(BOTH)]


def test_boundaries_may_be_passed_by_position(op_calls):
    module = _mixer(rule_arguments=f"{RULE}, cu_seqlens=None")()
    run, boundaries = recognise_mixer(module).functions["chunk_rule"], torch.tensor([0, 9, 140], dtype=torch.int32)
    expected = run(*_inputs(), cu_seqlens=boundaries)[0]
    assert torch.equal(run(*_inputs(), None, False, False, boundaries)[0], expected)
    assert op_calls == ["gated_delta_rule"] * 2
    assert not torch.equal(run(*_inputs())[0], expected)


@pytest.mark.parametrize("has_grad", [False, True])
def test_a_cache_without_gradients_runs_the_stock_forward(op_calls, has_grad):
    module = _mixer()()
    recipe, inputs = recognise_mixer(module), _arguments()
    with torch.set_grad_enabled(has_grad):
        ours, stock = recipe(module, *inputs, cache_params=object()), module(*inputs, cache_params=object())
    assert op_calls == BOTH * has_grad
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


def test_calls_that_the_ops_do_not_take_run_the_stock_functions(op_calls):
    module = _mixer()()
    recipe = recognise_mixer(module)
    run, convolve = recipe.functions["chunk_rule"], recipe.functions["convolve"]
    q, k, v, g, beta = _inputs(3)
    stock = rule(q, k, v, -g, beta)[0]
    assert torch.equal(run(q, k, v, -g, beta)[0], stock)
    assert torch.equal(run(q.double(), k.double(), v.double(), g, beta)[0], rule(q.double(), k, v, g, beta)[0])
    for arguments in ((q, k, v, g), (q, k, v, g, beta, None, False, False, None)):
        with pytest.raises((TypeError, RuntimeError)):
            run(*arguments)
    x, weight = torch.randn(2, 48, 7), torch.randn(48, 9)
    assert torch.equal(convolve(x, weight), convolution(x, weight))
    assert torch.equal(convolve(x, weight[:, :4], activation="gelu"), convolution(x, weight[:, :4], activation="gelu"))
    assert not op_calls


# One head of q and k for two heads of v.
ONE_HEAD = "q, k = q[:, :, :1], k[:, :, :1]\n        n = 2\n        "
REPEATS = ONE_HEAD + "q = q.repeat_interleave(n, dim=2)\n        k = k.repeat_interleave(n, dim=2)"
# Statements after which the heads are copied as in the stock forward.
OTHER_USES = {
    "a later statement": REPEATS + "\n        q = q * 1.0",
    "another variable": REPEATS + "\n        p = q\n        q = p",
    "keys with more heads": ONE_HEAD + "q = q.repeat_interleave(n, dim=2)\n        k = k.expand(-1, -1, 2, -1)",
    "a loop": REPEATS + "\n        for i in range(1):\n            pass",
    "another dimension": "q = q.repeat_interleave(1, dim=1)",
}


@pytest.fixture
def head_counts(monkeypatch) -> list[int]:
    """Return the list to which each call of the rule adds the number of heads of q."""
    recorded, op = [], mixers.gated_delta_rule
    monkeypatch.setattr(
        mixers, "gated_delta_rule", lambda q, *args, **kwargs: recorded.append(q.shape[2]) or op(q, *args, **kwargs)
    )
    return recorded


def test_heads_that_the_op_groups_are_not_copied(head_counts):
    module = _mixer(statements=REPEATS)()
    recipe, inputs = recognise_mixer(module), _arguments()
    stock, ours = (_gradients(module, run, *inputs) for run in (module, lambda *x: recipe(module, *x)))
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert head_counts == [1]
    # The stock function gets all heads.
    growing = inputs[0], -inputs[1], inputs[2]
    torch.testing.assert_close(recipe(module, *growing), module(*growing), rtol=1e-4, atol=1e-4)
    assert head_counts == [1]


@pytest.mark.parametrize("statements", OTHER_USES.values(), ids=OTHER_USES)
def test_heads_with_other_uses_are_copied(statements, head_counts):
    module = _mixer(statements=statements)()
    recipe, inputs = recognise_mixer(module), _arguments()
    torch.testing.assert_close(recipe(module, *inputs), module(*inputs), rtol=1e-4, atol=1e-4)
    assert head_counts == [2]


def test_a_function_that_reads_its_other_arguments_gets_them(op_calls):
    cls = _mixer(chunk_rule=f"return rule({PASSED}, scale=kwargs.get('factor', 1.0))")
    module, recipe = cls(), recognise_mixer(cls())
    inputs = _arguments()
    torch.testing.assert_close(recipe(module, *inputs, factor=2.0), module(*inputs, factor=2.0))
    assert "gated_delta_rule" not in op_calls


def test_a_function_that_was_replaced_after_the_patch_is_used(op_calls, monkeypatch):
    module = _mixer()()
    recipe, inputs = recognise_mixer(module), _arguments()
    scope = type(module).forward.__globals__
    with monkeypatch.context() as context:
        context.setitem(scope, "chunk_rule", lambda q, k, v, **kwargs: (v, None))
        torch.testing.assert_close(recipe(module, *inputs), module(*inputs))
    assert op_calls == ["causal_conv1d"]
    with monkeypatch.context() as context:
        # These are helpers of both functions.
        context.setitem(scope, "rule", lambda *args, **kwargs: (args[2], None))
        context.setitem(scope, "convolution", lambda x, *args: x)
        assert torch.equal(recipe(module, *inputs), module(*inputs))
    assert op_calls == ["causal_conv1d"]
    recipe(module, *inputs)
    assert op_calls == ["causal_conv1d", *BOTH]


def test_a_forward_with_another_rule_keeps_its_convolution():
    module = _mixer(chunk_rule=f"return rule({PASSED}, scale=2.0)")()
    assert recognise_mixer(module) == "chunk_rule: computes something else than the op"
    assert recognise_mixer(nn.Linear(2, 2)) is None


def test_a_mixer_with_another_convolution_does_not_restart(op_calls):
    module = _mixer(convolve="return convolution(x, weight.flip(-1), bias, activation)")()
    recipe, inputs = recognise_mixer(module), _arguments()
    assert not recipe.restarts_at_boundaries(module)
    torch.testing.assert_close(recipe(module, *inputs), module(*inputs), rtol=1e-4, atol=1e-5)
    assert op_calls == ["gated_delta_rule"]


def test_a_rule_that_torch_would_compute_on_a_gpu_stays_stock(monkeypatch, op_calls):
    """On a GPU without kernels of Kimi Delta Attention, the stock function or that of another package is faster."""
    function = types.SimpleNamespace(form=RuleForm(("q", "k", "v", "g", "beta"), has_feature_decay=True))
    q, k, v, g, beta = _inputs(3)
    arguments = {"q": q, "k": k, "v": v, "g": g[..., None].expand(*g.shape, q.shape[3]), "beta": beta}
    arguments |= {"cu_seqlens": None, "use_qk_l2norm_in_kernel": True}
    assert mixers.FusedRule.compute(function, arguments) is not None
    monkeypatch.setattr(mixers, "_lacks_kernels", lambda inputs: True)
    assert mixers.FusedRule.compute(function, arguments) is None
    packed = {name: x[:1] if isinstance(x, Tensor) else x for name, x in arguments.items()}
    assert mixers.FusedRule.compute(function, packed | {"cu_seqlens": torch.tensor([0, 1, 3])}) is not None
