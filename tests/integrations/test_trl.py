"""The trainers of TRL have the same losses, metrics and weights with Tigon as without, and use Tigon's ops."""

import sys
import types

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
import transformers

import tigon
from graphs.emulation import emulate
from integrations import trainers
from integrations.trainers import build, load_model, save_model, train
from tigon.graphs import forward as graphs
from tigon.hf import loss_options
from tigon.hf.graphs import find_graphed_forward
from tigon.hf.layer_checkpoint import LayerCheckpoint
from tigon.hf.transformers_private import checkpoint_function
from tigon.integrations import trl, trl_head

pytestmark = [
    pytest.mark.usefixtures("clean_trl"),
    pytest.mark.no_interpreter("It launches no kernel."),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory"),
]

KINDS = [*trainers.TRAINERS]
ADAPTERS = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"], init_lora_weights=False)


def assert_same_run(ours, stock, tolerance=1e-3, left_out=None) -> None:
    assert len(ours.logs) == len(stock.logs) == trainers.STEPS
    for logs in zip(ours.logs, stock.logs, strict=True):
        our_log, stock_log = ({name: value for name, value in log.items() if name != left_out} for log in logs)
        assert our_log == pytest.approx(stock_log, rel=tolerance, abs=1e-5, nan_ok=True)
        assert "loss" in our_log
        assert "entropy" in our_log
    assert ours.parameters.keys() == stock.parameters.keys()
    for name, p in ours.parameters.items():
        torch.testing.assert_close(p, stock.parameters[name], rtol=tolerance, atol=2e-4, msg=name)


def run(kind, path, folder, peft_config=None, prepare=lambda model: None, **options):
    model = load_model(path)
    prepare(model)
    trainer = build(kind, model, folder, peft_config, **options)
    return train(trainer)


# The runs of stock trainers by kind, model, and whether they train adapters.
_stock_runs: dict[tuple, types.SimpleNamespace] = {}


def run_stock(kind, path, folder, peft_config=None):
    """Return the run of a trainer without Tigon. Tests with the same trainer share it."""
    key = kind, path, peft_config is None
    if key not in _stock_runs:
        _stock_runs[key] = run(kind, path, folder, peft_config)
    return _stock_runs[key]


@pytest.mark.parametrize("peft_config", [None, ADAPTERS], ids=["full", "LoRA"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(5)
def test_every_trainer_trains_as_without_tigon(kind, peft_config, path, tmp_path, counts):
    stock = run_stock(kind, path, tmp_path, peft_config)
    trl.enable(memory="lean")
    trainer = build(kind, load_model(path), tmp_path, peft_config)
    counts.watch(trainer.model)
    ours = train(trainer)
    assert_same_run(ours, stock)
    assert counts.levels == [True] * len(counts.levels)
    assert len(counts.levels) >= trainers.STEPS
    if kind == "sft":
        assert (counts.losses, counts.log_probs) == (trainers.STEPS, 0)
    elif kind == "distillation":
        assert (counts.losses, counts.log_probs, counts.divergences) == (0, 0, trainers.STEPS)
    else:
        assert counts.losses == 0
        assert counts.log_probs >= trainers.STEPS


# Half of the trainers train adapters.
KINDS_IN_TURN = [(kind, ADAPTERS if i % 2 else None) for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "peft_config"), KINDS_IN_TURN, ids=KINDS)
@pytest.mark.sampled(6)
def test_every_trainer_trains_with_graphs(kind, peft_config, path, tmp_path, monkeypatch):
    stock = run_stock(kind, path, tmp_path, peft_config)
    emulate(monkeypatch)
    monkeypatch.setattr(graphs, "EAGER_USES", 0)
    trl.enable(memory="lean", graphs=True)
    trainer = build(kind, load_model(path), tmp_path, peft_config)
    ours = train(trainer)
    # In the first step the policy is the reference, and rounding decides which reward is larger.
    assert_same_run(ours, stock, left_out="rewards/accuracies")
    forwards = [forward for module in trainer.model.modules() if (forward := find_graphed_forward(module)) is not None]
    record = forwards[0].record
    if kind == "distillation":
        assert record.eager["logits_to_keep is a slice"] == trainers.STEPS
    else:
        assert record.captured
        assert record.replayed >= trainers.STEPS


OPTIONS = {
    "dft": ("sft", {"loss_type": "dft"}),
    "padding-free": ("sft", {"padding_free": True, "max_length": None, "per_device_train_batch_size": 2}),
    "accumulation": ("sft", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "label smoothing": ("sft", {"label_smoothing_factor": 0.1}),
    "wpo": ("dpo", {"use_weighting": True}),
    "fp32 head": ("grpo", {"cast_lm_head_to_fp32": True, "temperature": 0.7}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sampled(6)
def test_options_of_trainers_have_their_meaning(name, path, tmp_path, counts):
    kind, options = OPTIONS[name]
    stock = run(kind, path, tmp_path, **options)
    trl.enable()
    assert_same_run(run(kind, path, tmp_path, **options), stock)
    if name in ("dft", "padding-free", "accumulation"):
        assert counts.losses >= trainers.STEPS
        assert counts.log_probs == 0


@pytest.mark.parametrize("kind", ["sft", "kto"])
@pytest.mark.thorough
def test_autocast_computes_products_in_bf16(kind, path, tmp_path):
    """The weights stay fp32. Losses differ by the rounding of bf16, which is the same for both up to its order."""
    stock = run(kind, path, tmp_path, bf16=True, learning_rate=1e-4)
    trl.enable()
    ours = run(kind, path, tmp_path, bf16=True, learning_rate=1e-4)
    for our_log, stock_log in zip(ours.logs, stock.logs, strict=True):
        assert our_log["loss"] == pytest.approx(stock_log["loss"], rel=1e-2)
        assert our_log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=3e-2)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("model_type", ["gemma2", "cohere"])
@pytest.mark.sampled(4)
def test_soft_caps_and_scales_are_those_of_the_model(kind, model_type, tmp_path):
    path = save_model(tmp_path / "model", model_type)
    stock = run_stock(kind, path, tmp_path)
    trl.enable(memory="default")
    assert_same_run(run(kind, path, tmp_path), stock)


@pytest.mark.parametrize("patch_first", [False, True], ids=["trainer, patch", "patch, trainer"])
@pytest.mark.sampled(2)
def test_the_patch_may_come_before_or_after_the_trainer(patch_first, path, tmp_path, counts, recwarn):
    stock = run_stock("sft", path, tmp_path)
    trl.enable()
    model = load_model(path)
    if patch_first:
        tigon.patch(model, memory="lean")
    trainer = build("sft", model, tmp_path)
    if not patch_first:
        report = tigon.patch(trainer.model, memory="lean")
        assert {entry.part for entry in report.replaced} >= {"rms_norm", "glu", "rope"}
        assert report.why("").splitlines()[-1] == (
            "loss              left alone: the trainer of TRL computes the loss by tigon.integrations.trl"
        )
    counts.watch(trainer.model)
    assert_same_run(train(trainer), stock)
    assert counts.levels == [True] * trainers.STEPS
    assert counts.losses == trainers.STEPS
    assert not [w for w in recwarn if str(w.message).startswith("tigon")]


@pytest.mark.parametrize("when", ["before enable patches", "after enable patches", "without a level"])
@pytest.mark.sampled(3)
def test_acc_dtype_of_the_patch_reaches_the_loss_of_sft(when, path, tmp_path, monkeypatch):
    dtypes = []
    cross_entropy = trl_head.linear_cross_entropy

    def spy(*args, acc_dtype, **kwargs):
        dtypes.append(acc_dtype)
        return cross_entropy(*args, acc_dtype=acc_dtype, **kwargs)

    monkeypatch.setattr(trl_head, "linear_cross_entropy", spy)
    trl.enable(memory=None if when == "without a level" else "lean")
    model = load_model(path)
    if when != "after enable patches":
        report = tigon.patch(model, acc_dtype=torch.float32)
    trainer = build("sft", model, tmp_path)
    if when == "after enable patches":
        report = tigon.patch(trainer.model, acc_dtype=torch.float32)
    train(trainer)
    assert dtypes == [torch.float32] * trainers.STEPS
    report.restore()
    assert loss_options.recorded_options(model).acc_dtype is None


def test_without_enable_the_level_is_at_work_and_one_warning_names_enable(path, tmp_path, counts):
    model = load_model(path)
    report = tigon.patch(model, memory="lean")
    trainer = build("sft", model, tmp_path)
    counts.watch(model)
    with pytest.warns(UserWarning, match=r"call tigon\.integrations\.trl\.enable\(\)") as caught:
        train(trainer)
    assert len([w for w in caught if str(w.message).startswith("tigon")]) == 1
    assert counts.levels == [True] * trainers.STEPS
    assert "tigon.integrations.trl.enable()" in str(report)


@pytest.mark.parametrize(
    ("kind", "peft_config", "memory"),
    [("sft", None, None), ("dpo", ADAPTERS, "lean"), ("sft", ADAPTERS, "lean"), ("dpo", None, None)],
    ids=["sft", "dpo, LoRA, lean", "sft, LoRA, lean", "dpo"],
)
@pytest.mark.sampled(4)
def test_trainers_that_were_built_before_use_tigon(kind, peft_config, memory, path, tmp_path, counts):
    stock = run_stock(kind, path, tmp_path, peft_config)
    trainer = build(kind, load_model(path), tmp_path, peft_config)
    counts.watch(trainer.model)
    trl.enable(memory=memory)
    assert_same_run(train(trainer), stock)
    # With adapters, the reference of DPO is the same model without them.
    calls = trainers.STEPS * (1 + (kind == "dpo" and peft_config is not None))
    assert counts.levels == [memory is not None] * calls
    assert counts.losses == (trainers.STEPS if kind == "sft" else 0)
    assert counts.log_probs == (0 if kind == "sft" else 2 * trainers.STEPS)


def test_a_level_switches_off_the_checkpointing_of_the_trainer(path, tmp_path, counts):
    trl.enable(memory="lean+mlp")
    trainer = build("sft", load_model(path), tmp_path, gradient_checkpointing=True)
    counts.watch(trainer.model)
    train(trainer)
    assert not trainer.model.is_gradient_checkpointing
    # A checkpointed layer would run twice.
    assert counts.levels == [True] * trainers.STEPS
    # The user may build another trainer with the same arguments, after `disable`.
    assert trainer.args.gradient_checkpointing


def test_a_trainer_of_rewards_has_the_level(path, tmp_path, counts):
    """It has no head for tokens, so TRL gives its model no other forward."""
    from trl import RewardConfig, RewardTrainer

    trl.enable(memory="lean")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    data = trainers.make_data("dpo").remove_columns("prompt")
    config = RewardConfig(
        str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True
    )
    trainer = RewardTrainer(model, config, train_dataset=data, processing_class=trainers.make_tokenizer())
    counts.watch(trainer.model)
    trainer.train()
    assert not trainer.model.is_gradient_checkpointing
    assert counts.levels == [True] * len(counts.levels)
    assert counts.levels


@pytest.mark.parametrize("level", ["checkpoint", "checkpoint+offload"])
@pytest.mark.sampled(2)
def test_the_level_checkpoint_checkpoints_the_layers(level, path, tmp_path):
    stock = run_stock("sft", path, tmp_path)
    trl.enable(memory=level)
    trainer = build("sft", load_model(path), tmp_path, gradient_checkpointing=True)
    assert_same_run(train(trainer), stock)
    assert isinstance(checkpoint_function(trainer.model.model.layers[0]), LayerCheckpoint)


@pytest.mark.parametrize("kind", ["grpo", "dpo", "distillation"])
@pytest.mark.sampled(3)
def test_the_level_checkpoint_outlives_generation_and_the_reference(kind, path, tmp_path):
    """TRL switches checkpointing off for both, and then switches on that of transformers."""
    trl.enable(memory="checkpoint")
    trainer = build(kind, load_model(path), tmp_path, ADAPTERS)
    train(trainer)
    assert isinstance(checkpoint_function(trainer.model.get_base_model().model.layers[0]), LayerCheckpoint)


def test_a_warning_says_that_a_checkpointed_model_makes_the_level_useless(path, tmp_path):
    """The trainer's argument is off, but the model was checkpointed before."""
    trl.enable(memory="lean")
    model = load_model(path)
    model.gradient_checkpointing_enable()
    with pytest.warns(
        UserWarning, match=r"layers of LlamaForCausalLM are checkpointed .*so memory='lean' has no effect"
    ):
        train(build("sft", model, tmp_path))


def test_a_warning_says_that_the_checkpoints_of_fsdp_make_the_level_useless(path, tmp_path, monkeypatch):
    trl.enable(memory="lean")
    trainer = build("sft", load_model(path), tmp_path)
    plugin = types.SimpleNamespace(activation_checkpointing=True)
    monkeypatch.setattr(trainer, "accelerator", types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin)))
    with pytest.warns(UserWarning, match=r"^tigon: FSDP checkpoints all layers.*memory='lean' has no effect"):
        trl._reconcile_checkpointing(trainer)


@pytest.mark.parametrize("loss_type", ["nll", pytest.param("dft", marks=pytest.mark.thorough)])
def test_a_warning_says_that_token_scaling_of_the_patch_is_not_read(loss_type, path, tmp_path, recwarn):
    trl.enable()
    model = load_model(path)
    tigon.patch(model, token_scaling=True)
    train(build("sft", model, tmp_path, loss_type=loss_type))
    messages = [str(w.message) for w in recwarn if str(w.message).startswith("tigon")]
    assert len(messages) == (loss_type == "nll")
    assert all("token_scaling=True) has no effect in SFTTrainer" in message for message in messages)


def test_a_warning_says_that_liger_replaces_modules_of_tigon(path, tmp_path, monkeypatch):
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    trl.enable(memory="lean")
    trainer = build("sft", load_model(path), tmp_path, use_liger_kernel=True)
    # transformers refuses this empty package, which has no version, afterwards.
    refuses = pytest.raises((ImportError, ValueError))
    try:
        with refuses, pytest.warns(UserWarning, match=r"^tigon: use_liger_kernel=True lets Liger"):
            train(trainer)
    finally:
        sys.modules.pop("liger_kernel", None)


def test_the_alias_of_liger_is_no_conflict(path, tmp_path, recwarn):
    trl.enable(memory="lean")
    tigon.install_as_liger_kernel()
    try:
        train(build("sft", load_model(path), tmp_path, use_liger_kernel=True))
    finally:
        tigon.integrations.liger.uninstall()
    assert not [w for w in recwarn if str(w.message).startswith("tigon")]


def test_evaluation_has_the_metrics_of_trl(path, tmp_path, counts):
    results = []
    for is_enabled in (False, True):
        if is_enabled:
            trl.enable()
        trainer = build("sft", load_model(path), tmp_path)
        trainer.eval_dataset = trainer.train_dataset
        results.append(trainer.evaluate())
    keys = ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")
    assert {key: results[1][key] for key in keys} == pytest.approx({key: results[0][key] for key in keys}, rel=1e-4)
    # Evaluation needs no gradients: one product for each batch.
    assert counts.losses == 0
    assert counts.log_probs > 0


def _weighted(outputs):
    return -(outputs.log_probs * torch.arange(outputs.log_probs.numel()).view_as(outputs.log_probs)).sum()


def _with_entropy(outputs):
    # The gradient of the entropy is not computed in the loss of SFT, so a bonus would silently have no effect.
    return -outputs.log_probs.sum() - 0.1 * outputs.entropy.sum()


@pytest.mark.parametrize(
    ("loss", "message"),
    [(_weighted, "did not sum the log-probabilities"), (_with_entropy, "differentiates the entropy")],
)
def test_a_loss_that_is_no_sum_raises(loss, message, path, tmp_path, monkeypatch):
    """SFTTrainer with another `compute_loss` of the same class. A subclass with its own one declares no sum."""
    compute_loss = lambda self, model, inputs, **_: loss(model(**inputs, fused_lm_head=True))
    monkeypatch.setattr(trainers.TRAINERS["sft"][0], "compute_loss", compute_loss)
    trl.enable()
    with pytest.raises(RuntimeError, match=rf"SFTTrainer\.compute_loss {message}"):
        train(build("sft", load_model(path), tmp_path))


def test_a_subclass_with_its_own_loss_has_exact_gradients(path, tmp_path):
    sft = trainers.TRAINERS["sft"][0]

    class Weighted(sft):
        def compute_loss(self, model, inputs, **_):
            return _weighted(model(**inputs, fused_lm_head=True)) / 9

    results = []
    for is_enabled in (False, True):
        if is_enabled:
            trl.enable()
        trainer = build("sft", load_model(path), tmp_path)
        trainer.__class__ = Weighted
        results.append(train(trainer))
    for name, p in results[1].parameters.items():
        torch.testing.assert_close(p, results[0].parameters[name], rtol=1e-3, atol=2e-4, msg=name)
