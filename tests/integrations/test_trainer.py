"""The callback for the Trainer patches the model, and a config requests Tigon's experts by name."""

import doctest
import types
from typing import Any

import pytest
import torch
import transformers

import tigon
from tigon.hf.patch import make_request
from tigon.integrations import experts
from tigon.integrations.trainer import TigonCallback, _patch_model
from tigon.runtime import requirements

pytestmark = pytest.mark.no_interpreter("The tests show which modules are patched.")

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def tiny_llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def tiny_mixtral(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2)
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def parts_of(report: Any) -> set[str]:
    return {entry.part for entry in report.replaced}


def _losses(tmp_path, callbacks: list[Any], late: bool = False) -> list[float]:
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1, use_cpu=True,
        save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    tokens = torch.arange(12).remainder(7).add(3)
    data = [{"input_ids": tokens + i, "labels": tokens + i} for i in range(6)]
    trainer = transformers.Trainer(tiny_llama(), arguments, train_dataset=data, callbacks=[] if late else callbacks)
    for callback in callbacks if late else []:
        trainer.add_callback(callback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "late", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["argument", "added later"]
)
def test_the_trainer_trains_a_patched_model(tmp_path, late):
    callback = TigonCallback(memory="lean", rope=False)
    assert _losses(tmp_path, [callback], late) == pytest.approx(_losses(tmp_path, []), rel=1e-4)
    assert {"rms_norm", "glu", "loss"} <= parts_of(callback.report)
    assert "rope" not in parts_of(callback.report)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"memory": "small"}, "TigonCallback: memory must be one of .*'lean'.*, got 'small'"),
        (TypeError, {"ropes": False}, "TigonCallback: unknown option 'ropes'"),
        (TypeError, {"rope": 1}, "TigonCallback: rope must be True or False, got 1"),
        (ValueError, {"fp8": True}, "TigonCallback: fp8 must be one of .*'tensorwise'.* or None, got True"),
        (TypeError, {"token_scaling": 1}, "TigonCallback: token_scaling must be a bool, got 1"),
    ],
)
def test_a_callback_refuses_unknown_options(error, options, message):
    with pytest.raises(error, match=message):
        TigonCallback(**options)


def test_a_callback_takes_every_option_of_patch():
    assert TigonCallback(memory="lean+mlp:4").request.memory == tigon.Memory("lean", mlp=4)
    options = {"fp8": "tensorwise", "fp8_dw": False, "acc_dtype": torch.float32, "token_scaling": True}
    callback, model = TigonCallback(**options), tiny_llama()
    assert callback.request == make_request("patch", options)
    callback.on_init_end(None, None, None, model=model)
    # The layers of this model are too narrow.
    assert "fp8='tensorwise' has no effect" in str(callback.report)


def test_a_config_requests_the_experts_by_name(monkeypatch):
    experts.register()
    calls = []
    real = experts.moe_mlp
    monkeypatch.setattr(experts, "moe_mlp", lambda *a, **k: calls.append(k["activation"]) or real(*a, **k))
    tokens = torch.arange(10)[None]
    results = []
    for implementation in ("eager", "tigon"):
        model = tiny_mixtral(experts_implementation=implementation)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert calls == ["silu"]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_a_norm_after_each_expert_is_refused():
    module = types.SimpleNamespace(has_post_expert_norm=True)
    with pytest.raises(ValueError, match="'tigon' does not compute SimpleNamespace, .* use 'grouped_mm'"):
        experts.compute_experts(module, *(torch.ones(1, 1),) * 3)


def test_forwards_of_another_library_are_named():
    model = tiny_llama()
    code = "def forward(self, x):\n    return type(self).forward(self, x)\n"
    names: dict[str, Any] = {"__name__": "liger_kernel.transformers.rms_norm"}
    exec(code, names)
    norm = model.model.norm
    norm.forward = types.MethodType(names["forward"], norm)
    with pytest.warns(UserWarning, match="Liger Kernel has replaced the forward of LlamaRMSNorm before tigon.patch"):
        _patch_model(model, make_request("TigonCallback", {}))


@pytest.mark.parametrize("documented", [TigonCallback, experts.register])
def test_the_examples_run(documented):
    tests = doctest.DocTestFinder(recurse=False).find(documented, globs={"tigon": tigon, "torch": torch})
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(result.attempted for result in results) >= 2
    assert not any(result.failed for result in results)


def test_an_old_transformers_gives_one_warning(monkeypatch):
    monkeypatch.setitem(requirements.FLOORS, "transformers", "99")
    model = tiny_llama()
    with pytest.warns(UserWarning, match=r"trained without Tigon: .* needs transformers 99 or later \("):
        assert _patch_model(model, make_request("TigonCallback", {})) is None
    assert "forward" not in vars(model.model.norm)


def test_a_wrapped_model_is_not_patched_again():
    callback, model = TigonCallback(), tiny_llama()
    callback.on_init_end(None, None, None, model=model)
    report = callback.report
    callback.on_train_begin(None, None, None, model=torch.nn.Sequential(model))
    assert callback.report is report
    callback.on_train_begin(None, None, None, model=tiny_llama())
    assert callback.report is not report
