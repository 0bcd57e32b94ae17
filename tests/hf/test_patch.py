"""`tigon.patch` gives the results of stock for every model type, can be undone exactly, and reports what it did."""

import contextlib
import copy
import importlib
import inspect
import logging
import re
import sys
import warnings
from typing import Never, get_args

import pytest
import torch
from torch import nn

import tigon
from hf.same_step import assert_same
from tigon.hf.parts import PARTS
from tigon.hf.patch import FP8Scales
from tigon.hf.search import Search
from tigon.ops.fp8.formats import RECIPES
from tigon.testing import assert_accurate

REPLACED = {"rms_norm", "glu", "rope", "fused_statements", "loss"}


def outputs_of(model: nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    """Return the output of every norm, MLP, attention and layer of one forward without labels, by name."""
    outputs, handles = {}, []
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            store_output = lambda m, args, out, name=name: outputs.update(
                {name: out[0] if isinstance(out, tuple) else out}
            )
            handles.append(module.register_forward_hook(store_output))
    with torch.no_grad():
        outputs["logits"] = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    for handle in handles:
        handle.remove()
    return {name: out for name, out in outputs.items() if isinstance(out, torch.Tensor)}


@pytest.mark.sampled(2)
def test_a_patch_gives_the_results_of_stock_and_restore_undoes_it(make_model, model_type, batch, step, monkeypatch):
    """Modules have the bits of stock. Other instances, and the file of the model's class, do not change."""
    model, other = make_model(model_type), make_model(model_type)
    scope = vars(sys.modules[type(model).__module__])
    globals_before, state = dict(scope), {m: dict(vars(m)) for m in model.modules()}
    before, stock = step(model, batch), outputs_of(model, batch)
    report = tigon.patch(model)
    assert not report.left_alone
    counts = {entry.part: entry.count for entry in report.replaced}
    norms = sum("Norm" in type(m).__name__ for m in model.modules())
    assert counts == {"rms_norm": norms, "glu": 2, "rope": 2, "fused_statements": 2, "loss": 1}
    assert_same(step(model, batch), before)
    patched = outputs_of(model, batch)
    # The ops compute the activations, so these modules are not called.
    assert all("act" in name for name in stock.keys() - patched.keys())
    assert [name for name in patched if not torch.equal(patched[name], stock[name])] == []
    # A second patch changes nothing.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = tigon.patch(model)
    assert not second
    assert "patched already" in str(second)
    second.restore()
    assert outputs_of(model, batch).keys() == patched.keys()
    assert dict(scope) == globals_before
    assert not any("forward" in vars(m) for each in (other, make_model(model_type)) for m in each.modules())
    assert all(torch.equal(value, before[name]) for name, value in step(other, batch).items())
    for _ in range(2):
        report.restore()
        assert {m: vars(m).keys() for m in model.modules()} == {m: s.keys() for m, s in state.items()}
    assert type(model).forward is model.forward.__func__
    assert all(torch.equal(value, before[name]) for name, value in step(model, batch).items())
    # Without fused statements, each module calls its op.
    calls = dict.fromkeys(("rms_norm", "glu", "rope"), 0)
    report = tigon.patch(model, fused_statements=False, loss=False)
    for op, path in (("rms_norm", "norms.rms_norm"), ("glu", "mlps.glu"), ("rope", "rotary.rope")):
        module = sys.modules[f"tigon.ops.{path}"]
        count = lambda *x, op=op, stock=module.runs_kernels: calls.update({op: calls[op] + 1}) or stock(*x)
        monkeypatch.setattr(module, "runs_kernels", count)
    model(**batch)
    assert calls == {entry.part: entry.count for entry in report.replaced}


@pytest.mark.parametrize("part", sorted(REPLACED))
@pytest.mark.sampled(4)
def test_each_part_alone_is_stock(make_model, model_type, batch, step, assert_same_step, clone, part):
    model = make_model(model_type)
    stock = clone(model)
    # Without `glu`, the activation of an MLP would be replaced alone.
    # Statements are fused with a norm that an op computes.
    parts = {part, "rms_norm"} if part == "fused_statements" else {part}
    report = tigon.patch(model, gelu=False, **{other: other in parts for other in REPLACED})
    assert {entry.part for entry in report.replaced} == parts
    if part == "loss":
        assert_same_step(model, stock, batch)
    # The references run the operations of the stock code, so the bits are equal.
    else:
        actual, expected = step(model, batch), step(stock, batch)
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.sampled(2)
def test_bf16_training_is_as_accurate_as_stock(make_model, model_type, batch, step, clone):
    """The outputs of modules have the bits of stock in bf16 too."""
    model = make_model(model_type, torch.bfloat16)
    stock = outputs_of(model, batch)
    eager, exact = step(clone(model), batch), step(clone(model).float(), batch)
    tigon.patch(model)
    assert [name for name, value in outputs_of(model, batch).items() if not torch.equal(value, stock[name])] == []
    actual = step(model, batch)
    loss, loss_exact = actual.pop("loss"), exact["loss"]
    assert loss.dtype == torch.float32
    # The mean of a few rounded terms may be accurate by chance, so the error of eager code alone is no limit.
    allowed = 2 * abs(eager["loss"] - loss_exact) + torch.finfo(torch.bfloat16).eps / 8 * loss_exact
    assert abs(loss - loss_exact) < allowed
    for name, value in actual.items():
        assert_accurate(value, eager[name], exact[name], msg=name)


@pytest.mark.parametrize(
    "left_out",
    [("rope",), ("fused_statements",), ("rope", "fused_statements"), ("glu", "fused_statements")],
    ids="+".join,
)
def test_a_second_patch_adds_the_parts_that_the_first_left_out(make_model, left_out):
    model = make_model()
    tigon.patch(model, **dict.fromkeys(left_out, False))
    assert {e.part for e in tigon.patch(model).replaced} == set(left_out)
    assert not tigon.patch(model)


@pytest.mark.parametrize("first", [0, -1])
def test_patches_are_undone_in_any_order(make_model, batch, step, first):
    model = make_model()
    before = step(model, batch)
    reports = [tigon.patch(model, rope=False, loss=False), tigon.patch(model)]
    reports.pop(first).restore()
    assert_close = torch.testing.assert_close
    assert_close(step(model, batch)["loss"], before["loss"])
    reports.pop().restore()
    assert not any("forward" in vars(m) for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in step(model, batch).items())


@pytest.mark.sampled(5)
@pytest.mark.probes
def test_recognition_needs_no_weights(make_model, model_type):
    model = make_model(model_type)
    expected = str(tigon.patch(model))
    with torch.device("meta"):
        assert str(tigon.patch(make_model(model_type))) == expected
    assert str(tigon.patch(copy.deepcopy(make_model(model_type)).to("meta"))) == expected


@contextlib.contextmanager
def default_dtype_bf16():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "meta device": lambda: torch.device("meta"),
    "default dtype": default_dtype_bf16,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.sampled(3)
@pytest.mark.probes
def test_modes_that_are_active_during_the_patch_do_not_matter(make_model, batch, assert_same_step, mode):
    """The parameters may change after the patch."""
    model, stock = make_model("gemma2"), make_model("gemma2")
    with mode():
        report = tigon.patch(model)
    assert {entry.part for entry in report.replaced} == REPLACED
    assert not report.left_alone
    model.double().float().to("cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    stock.load_state_dict(model.state_dict())
    assert_same_step(model, stock, batch)


@pytest.mark.probes
def test_the_random_state_does_not_change(make_model):
    model = make_model()
    # This module draws random numbers when it runs in recognition.
    model.model.layers[0].mlp.act_fn = nn.Dropout(0.5)
    before = torch.get_rng_state()
    tigon.patch(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.probes
def test_a_deep_model_is_probed_once_for_each_kind_of_module(make_model, monkeypatch):
    runs = []
    for name in ("norms", "mlps", "rope_forms"):
        module = importlib.import_module(f"tigon.recognition.parts.{name}")
        monkeypatch.setattr(module, "normal", lambda *a, _n=module.normal, **k: runs.append(a) or _n(*a, **k))
    with torch.device("meta"):
        tigon.patch(make_model("llama"))
        shallow = len(runs)
        assert len(tigon.patch(make_model("llama", num_hidden_layers=32))) == 32 * 6 + 2
    assert len(runs) <= 2 * shallow


def test_the_report_names_what_it_left_alone_and_why(make_model):
    model = make_model()
    model.model.norm.register_buffer("seen", torch.zeros(64))
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    report = tigon.patch(model)
    entries = {(entry.part, entry.module, *entry.names): entry.detail for entry in report.left_alone}
    assert entries.keys() == {("rms_norm", "LlamaRMSNorm", "model.norm"), ("glu", "LlamaMLP", "model.layers.1.mlp")}
    assert "more state than a norm" in entries["rms_norm", "LlamaRMSNorm", "model.norm"]
    for entry in report.entries:
        assert entry.module in str(report)
        assert entry.detail in str(report)
    assert len(report) == 4 + 1 + 2 + 4 + 1
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report)
    text = console.export_text()
    assert all(word in text for word in ("LlamaRMSNorm", "swiglu", "more state than a norm", "LlamaMLP"))


def test_a_model_without_recognised_modules_stays_stock_with_a_warning():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    before = {m: dict(vars(m)) for m in model.modules()}
    with pytest.warns(UserWarning, match="nothing was recognised"):
        report = tigon.patch(model)
    assert not report
    assert "nothing" in str(report)
    assert {m: dict(vars(m)) for m in model.modules()} == before
    # Modules outside of a language model are patched too.
    report = tigon.patch(nn.Sequential(tigon.SwiGLUMLP(16, 40), nn.LayerNorm(16)))
    assert [(e.part, e.module) for e in report.replaced] == [("layer_norm", "LayerNorm"), ("glu", "SwiGLUMLP")]


class BrokenNorm(nn.RMSNorm):
    def forward(self, x):
        raise RuntimeError("this norm is broken")


def test_errors_of_recognition_are_logged_with_their_traceback(caplog):
    model = nn.Sequential(BrokenNorm(16), nn.LayerNorm(16))
    with caplog.at_level(logging.DEBUG, logger="tigon"):
        (entry,) = tigon.patch(model).left_alone
    assert entry.detail == "cannot be run by itself (RuntimeError: this norm is broken)"
    records = [record for record in caplog.records if record.exc_info and "norm is broken" in str(record.exc_info[1])]
    assert records
    assert {(record.name, record.levelno) for record in records} == {("tigon", logging.DEBUG)}
    assert 'raise RuntimeError("this norm is broken")' in caplog.text


@pytest.mark.probes
def test_only_apply_changes_the_model(make_model):
    model = make_model("gemma2")
    search = Search(model, PARTS)
    assert not any(finding.is_listed for finding in search.findings)
    search.decide()
    assert {finding.part for finding in search.findings if finding.recipe is not None} == REPLACED
    assert set(search.installed.values()) == {None}
    assert not any("forward" in vars(m) for m in model.modules())
    undo = search.install()
    assert {m for m in model.modules() if "forward" in vars(m)} - search.new_recipes.keys() == {model.lm_head}
    for step in reversed(undo):
        step()
    assert not any("forward" in vars(m) for m in model.modules())


FP8_RECIPES = r"fp8 must be one of 'tensorwise', 'rowwise' or None, got"
BAD_OPTIONS = {
    "unknown": ({"swiglu": True}, TypeError, "unknown option 'swiglu'; choose from rms_norm, layer_norm, glu,"),
    "type": ({"rope": "yes"}, TypeError, "rope must be True or False, got 'yes'"),
    "memory": ({"memory": "least"}, ValueError, "memory must be one of 'default', 'lean', .*'checkpoint'.*, got 'leas"),
    "recipe": ({"fp8": "blockwise"}, ValueError, f"{FP8_RECIPES} 'blockwise'"),
    "bool": ({"fp8": True}, ValueError, f"{FP8_RECIPES} True"),
    "fp8_dw": ({"fp8": "rowwise", "fp8_dw": 1}, TypeError, r"fp8_dw must be True or False, got 1"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_refused_before_the_model_changes(make_model, options, error, message):
    model = make_model()
    with pytest.raises(error, match=f"patch: {message}"):
        tigon.patch(model, **options)
    with pytest.raises(error, match=f"patch: {message}"), tigon.patched(model, **options):
        pass
    assert not any("forward" in vars(m) for m in model.modules())
    with pytest.raises(TypeError, match=r"patch: model must be a torch\.nn\.Module or a model type, got dict"):
        tigon.patch({})


def test_the_signature_names_and_documents_every_option():
    parameters = inspect.signature(tigon.patch).parameters
    options = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    loss_options = {"token_scaling": False, "acc_dtype": None, "return_token_accuracy": False}
    loss_options |= {"return_predicted_tokens": False}
    other_options = {"memory": "default", "graphs": False, "pad_to": None, "fp8": None, "fp8_dw": True, **loss_options}
    assert options == dict.fromkeys(PARTS, True) | other_options
    documented = re.findall(r"^        (\w+): ", inspect.getdoc(tigon.patch).replace("\n", "\n    "), re.MULTILINE)
    assert documented[: 1 + len(options)] == ["model", *options]
    assert set(get_args(FP8Scales)) == set(RECIPES)
    # No value has the type Never, so type checkers refuse unknown options.
    assert parameters["unknown"].annotation is Never
    assert inspect.signature(tigon.patched).parameters == parameters


def test_auto_model_builds_patched_models(make_model, tmp_path, batch, assert_same_step):
    stock = make_model("qwen3")
    stock.save_pretrained(tmp_path)
    model = tigon.AutoModelForCausalLM.from_pretrained(
        tmp_path, patch_options={"rope": False, "fused_statements": False}
    ).train()
    assert "forward" in vars(model)
    assert "forward" not in vars(model.model.layers[0].self_attn)
    assert_same_step(model, stock, batch)
    assert "forward" in vars(tigon.AutoModelForCausalLM.from_config(stock.config))


def test_auto_model_builds_patched_classifiers(make_model, batch):
    """Reward models are classifiers with one label."""
    config = make_model("qwen3").config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = tigon.AutoModelForSequenceClassification.from_config(config).train()
    stock = type(model)(config).train()
    stock.load_state_dict(model.state_dict())
    assert "forward" in vars(model.model.layers[0].mlp)
    inputs = {"input_ids": batch["input_ids"], "labels": torch.linspace(-1.0, 1.0, len(batch["input_ids"]))}
    results = []
    for each in (model, stock):
        loss = each(**inputs).loss
        results.append([loss, *torch.autograd.grad(loss, list(each.parameters()))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install '.\[hf\]' in a checkout of Tigon"):
        tigon.AutoModelForCausalLM.from_pretrained("x")
