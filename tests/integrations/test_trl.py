"""The trainers of TRL have the same losses, metrics and weights with Tigon as without, and use Tigon's ops."""

import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import accelerate
import peft
import transformers
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils

import tigon
from integrations import trainers
from integrations.trainers import build, load_model, save_model, train
from ranks import run_ranks
from tigon.hf import loss_options
from tigon.hf.layer_checkpoint import LayerCheckpoint
from tigon.hf.transformers_private import checkpoint_function
from tigon.integrations import trl, trl_divergence, trl_head
from tigon.memory.lean import is_lean

pytestmark = [
    pytest.mark.no_interpreter("It launches no kernel."),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory"),
]

KINDS = [*trainers.TRAINERS]
ADAPTERS = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"], init_lora_weights=False)


@pytest.fixture(autouse=True)
def _clean(one_thread):
    yield
    trl.disable()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"))


class Counts:
    """How often the ops of the head ran, and in which forwards of the first layer a level was at work."""

    def __init__(self, monkeypatch) -> None:
        self.losses = self.log_probs = self.divergences = 0
        self.levels: list[bool] = []
        monkeypatch.setattr(trl_head, "linear_cross_entropy", self._count("losses", trl_head.linear_cross_entropy))
        monkeypatch.setattr(trl_head, "linear_log_probs", self._count("log_probs", trl_head.linear_log_probs))
        function = trl_divergence.linear_distillation
        monkeypatch.setattr(trl_divergence, "linear_distillation", self._count("divergences", function))

    def _count(self, name, function):
        def call(*args, **kwargs):
            setattr(self, name, getattr(self, name) + 1)
            return function(*args, **kwargs)

        return call

    def watch(self, model) -> None:
        """Record at each training call of the first layer whether it runs in a block of `lean`."""
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        layers[0].register_forward_pre_hook(lambda m, _: self.levels.append(is_lean()) if m.training else None)


@pytest.fixture
def counts(monkeypatch) -> Counts:
    return Counts(monkeypatch)


def assert_same_run(ours, stock, tolerance=1e-3) -> None:
    assert len(ours.logs) == len(stock.logs) == trainers.STEPS
    for our_log, stock_log in zip(ours.logs, stock.logs, strict=True):
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


@pytest.mark.parametrize("peft_config", [None, ADAPTERS], ids=["full", "LoRA"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(5)
def test_every_trainer_trains_as_without_tigon(kind, peft_config, path, tmp_path, counts):
    stock = run(kind, path, tmp_path, peft_config)
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


OPTIONS = {
    "dft": ("sft", {"loss_type": "dft"}),
    "padding-free": ("sft", {"padding_free": True, "max_length": None, "per_device_train_batch_size": 2}),
    "accumulation": ("sft", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "label smoothing": ("sft", {"label_smoothing_factor": 0.1}),
    "wpo": ("dpo", {"use_weighting": True}),
    "fp32 head": ("grpo", {"cast_lm_head_to_fp32": True, "temperature": 0.7}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sampled(2)
def test_options_of_trainers_have_their_meaning(name, path, tmp_path, counts):
    kind, options = OPTIONS[name]
    stock = run(kind, path, tmp_path, **options)
    trl.enable()
    assert_same_run(run(kind, path, tmp_path, **options), stock)
    if name in ("dft", "padding-free", "accumulation"):
        assert counts.losses >= trainers.STEPS
        assert counts.log_probs == 0


@pytest.mark.parametrize("kind", ["sft", "kto"])
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
@pytest.mark.sampled(3)
def test_soft_caps_and_scales_are_those_of_the_model(kind, model_type, tmp_path):
    path = save_model(tmp_path / "model", model_type)
    stock = run(kind, path, tmp_path)
    trl.enable(memory="default")
    assert_same_run(run(kind, path, tmp_path), stock)


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch, trainer", "trainer, patch"])
def test_the_patch_may_come_before_or_after_the_trainer(patch_first, path, tmp_path, counts, recwarn):
    stock = run("sft", path, tmp_path)
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


@pytest.mark.parametrize("memory", [None, "lean"])
@pytest.mark.parametrize("peft_config", [None, ADAPTERS], ids=["full", "LoRA"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.sampled(5)
def test_trainers_that_were_built_before_use_tigon(kind, peft_config, memory, path, tmp_path, counts):
    stock = run(kind, path, tmp_path, peft_config)
    trainer = build(kind, load_model(path), tmp_path, peft_config)
    counts.watch(trainer.model)
    trl.enable(memory=memory)
    assert_same_run(train(trainer), stock)
    # With adapters, the reference of DPO is the same model without them.
    calls = trainers.STEPS * (1 + (kind == "dpo" and peft_config is not None))
    assert counts.levels == [memory is not None] * calls
    assert counts.losses == (trainers.STEPS if kind == "sft" else 0)
    assert counts.log_probs == (0 if kind == "sft" else 2 * trainers.STEPS)


def test_the_forward_of_trl_calls_the_log_probabilities_after_enable(path, counts):
    model = load_model(path)
    utils.add_fused_lm_head(model)
    trl.enable()
    tokens = torch.arange(4, 16).view(2, 6)
    model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    assert counts.log_probs == 1


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


def test_a_warning_says_that_checkpointing_makes_the_level_useless(path, tmp_path):
    trl.enable()
    model = load_model(path)
    tigon.patch(model, memory="lean")
    with pytest.warns(UserWarning, match=r"so memory='lean' has no effect.*enable\(memory='lean'\)"):
        train(build("sft", model, tmp_path, gradient_checkpointing=True))


@pytest.mark.parametrize("level", ["checkpoint", "checkpoint+offload"])
@pytest.mark.sampled(2)
def test_the_level_checkpoint_checkpoints_the_layers(level, path, tmp_path):
    stock = run("sft", path, tmp_path)
    trl.enable(memory=level)
    trainer = build("sft", load_model(path), tmp_path, gradient_checkpointing=True)
    assert_same_run(train(trainer), stock)
    assert isinstance(checkpoint_function(trainer.model.model.layers[0]), LayerCheckpoint)


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo", "distillation"])
@pytest.mark.sampled(2)
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


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
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


def test_a_loss_that_is_no_sum_raises(path, tmp_path, monkeypatch):
    """SFTTrainer with another `compute_loss` of the same class. A subclass with its own one declares no sum."""
    sft = trainers.TRAINERS["sft"][0]
    monkeypatch.setattr(
        sft,
        "compute_loss",
        lambda self, model, inputs, **_: (
            -(lp := model(**inputs, fused_lm_head=True).log_probs) * torch.arange(lp.numel()).view_as(lp)
        ).sum(),
    )
    trl.enable()
    with pytest.raises(RuntimeError, match=r"SFTTrainer\.compute_loss did not sum the log-probabilities"):
        train(build("sft", load_model(path), tmp_path))


def test_a_loss_that_differentiates_the_entropy_raises(path, tmp_path, monkeypatch):
    """The gradient of the entropy is not computed in the loss of SFT, so a bonus would silently have no effect."""

    def compute_loss(self, model, inputs, **_):
        outputs = model(**inputs, fused_lm_head=True)
        return -outputs.log_probs.sum() - 0.1 * outputs.entropy.sum()

    monkeypatch.setattr(trainers.TRAINERS["sft"][0], "compute_loss", compute_loss)
    trl.enable()
    with pytest.raises(RuntimeError, match=r"SFTTrainer\.compute_loss differentiates the entropy"):
        train(build("sft", load_model(path), tmp_path))


def test_a_subclass_with_its_own_loss_has_exact_gradients(path, tmp_path):
    sft = trainers.TRAINERS["sft"][0]

    class Weighted(sft):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            log_probs = model(**inputs, fused_lm_head=True).log_probs
            return -(log_probs * torch.arange(log_probs.numel()).view_as(log_probs)).mean()

    results = []
    for is_enabled in (False, True):
        if is_enabled:
            trl.enable()
        trainer = build("sft", load_model(path), tmp_path)
        trainer.__class__ = Weighted
        results.append(train(trainer))
    for name, p in results[1].parameters.items():
        torch.testing.assert_close(p, results[0].parameters[name], rtol=1e-3, atol=2e-4, msg=name)


def test_the_forward_has_the_outputs_and_gradients_of_trl(path):
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 97, (3, 9), generator=generator)
    labels = tokens.masked_fill(torch.rand(3, 9, generator=generator) < 0.3, -100)
    cases = [
        {"input_ids": tokens, "labels": labels},
        {"input_ids": tokens, "labels": labels, "num_items_in_batch": torch.tensor(11)},
        {"input_ids": tokens, "shift_labels": labels.roll(-1, 1)},
        {"input_ids": tokens, "labels": torch.full_like(labels, -100)},
    ]
    stock = load_model(path)
    # Every second label is the most probable token, so that `is_top1` has both values.
    labels[:, 1::2] = stock(input_ids=tokens).logits.argmax(-1)[:, :-1:2]

    def results() -> list:
        """Return the outputs of each case, the gradients of all parameters, and the logits of a plain call."""
        model = load_model(path)
        utils.add_fused_lm_head(model, temperature=0.7, outputs=outputs)
        outcomes = [model(input_ids=tokens).logits]
        for case in cases:
            model.zero_grad()
            result = model(**case, fused_lm_head=True)
            (result.loss + (result.entropy * 0.1).sum()).backward()
            outcomes.append(({**result}, {name: p.grad for name, p in model.named_parameters()}))
        return outcomes

    # TRL's own function must not run after `enable`, which replaces it for all models.
    expected = results()
    trl.enable()
    assert utils._ChunkedLogProbFunction is trl_head.ChunkedLogProbs
    actual = results()
    assert torch.equal(actual[0], expected[0])
    for (ours, our_grads), (theirs, their_grads) in zip(actual[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        for name, grad in their_grads.items():
            torch.testing.assert_close(our_grads[name], grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_the_function_takes_other_dtypes_as_trl_does(dtypes):
    """Without autocast, TRL computes the products in the dtype of the hidden states."""
    results = []
    for function in (trl_head.ChunkedLogProbs, ChunkedLogProbFunction):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(7, 16, generator=generator).to(dtypes[0]).requires_grad_()
        weight = torch.randn(50, 16, generator=generator).to(dtypes[1]).requires_grad_()
        targets = torch.randint(50, (7,), generator=generator)
        log_probs, entropy, *rest = function.apply(hidden, weight, None, targets, 1.0, 32, None, 1.0, ("log_probs",))
        assert [entropy, *rest] == [None] * 4
        log_probs.sum().backward()
        assert weight.grad.dtype == dtypes[1]
        results.append((log_probs, hidden.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2, check_dtype=False)


@pytest.mark.parametrize(("kind", "gathers"), [(None, 2), ("nll", 1)], ids=["four products", "three products"])
def test_a_head_of_zero3_is_gathered_where_it_is_read(kind, gathers, path, monkeypatch):
    """ZeRO-3 is simulated: outside of TRL's context the weight of the head is empty."""
    trl.enable()
    model = load_model(path)
    utils.add_fused_lm_head(model)
    stock = load_model(path)
    weight = model.lm_head.weight
    full, contexts = weight.data.clone(), []
    weight.ds_status = "NOT_AVAILABLE"

    class Gathered:
        def __enter__(self):
            contexts.append(self)
            weight.data = full.clone()

        def __exit__(self, *_):
            weight.data = torch.empty(0)

    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", lambda *parameters: Gathered())
    weight.data = torch.empty(0)
    batch = {"input_ids": torch.arange(4, 16).view(2, 6)}
    with trl_head.loss_is_sum(kind):
        log_probs = model(**batch, labels=batch["input_ids"], fused_lm_head=True).log_probs
    assert len(contexts) == 1
    assert weight.numel() == 0
    grads = torch.autograd.grad(log_probs.sum(), [weight, model.model.norm.weight])
    assert len(contexts) == gathers
    logits = stock(**batch).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, batch["input_ids"][:, 1:, None]).sum()
    expected_grads = torch.autograd.grad(expected, [stock.lm_head.weight, stock.model.norm.weight])
    torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_the_head_stays_on_the_device(path):
    """`activation_offloading=True` of TRL copies each saved tensor that is no parameter to the host."""
    trl.enable()
    model = load_model(path)
    utils.add_fused_lm_head(model)
    weight, tokens, saved = model.lm_head.weight, torch.arange(4, 16).view(2, 6), []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), trl_head.loss_is_sum("nll"):
        log_probs = model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs
    assert saved
    parameters = {p.data_ptr() for p in model.parameters()}
    assert not [t for t in saved if t.shape == weight.shape and t.data_ptr() not in parameters]
    log_probs.sum().backward()
    assert weight.grad is not None


@pytest.mark.thorough
def test_a_head_that_fsdp2_shards_is_gathered():
    run_ranks(Path(__file__).with_name("sharded_trl.py"))


def test_a_mixture_with_a_router_loss_runs_trls_forward_on_tigon(counts):
    config = transformers.MixtralConfig(**trainers.SIZES, num_local_experts=2, num_experts_per_tok=1)
    torch.manual_seed(0)
    stock, batch = transformers.MixtralForCausalLM(config), {"input_ids": torch.arange(4, 16).view(2, 6)}
    ours = transformers.MixtralForCausalLM(config)
    ours.load_state_dict(stock.state_dict())
    utils.add_fused_lm_head(stock)
    batch |= {"labels": batch["input_ids"], "output_router_logits": True, "fused_lm_head": True}
    expected = stock(**batch)
    trl.enable()
    utils.add_fused_lm_head(ours)
    outputs = ours(**batch)
    assert counts.log_probs == 1
    assert outputs.aux_loss.item() == pytest.approx(expected.aux_loss.item())
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-4)


# --- enable and disable ----------------------------------------------------------------------------


def snapshot() -> dict:
    """Return all objects of TRL's modules, and the attributes of its trainer classes."""
    names = [name for name in sys.modules if name.partition(".")[0] == "trl"]
    objects = {(name, key): value for name in names for key, value in vars(sys.modules[name]).items()}
    for cls in (trainers.TRAINERS["sft"][0], *trainers.TRAINERS["sft"][0].__mro__):
        objects |= {(cls, key): value for key, value in vars(cls).items()}
    return objects


def test_disable_restores_exactly():
    before = snapshot()
    trl.enable()
    trl.enable(memory="lean")
    changes = {key for key, value in snapshot().items() if before.get(key) is not value}
    names = {f"trl.trainer.{name}_trainer" for name in KINDS if name != "distillation"}
    assert {module for module, name in changes if name == "add_fused_lm_head"} >= {"trl.trainer.utils", *names}
    assert trl.is_enabled()
    trl.disable()
    trl.disable()
    assert not trl.is_enabled()
    assert all(before[key] is value for key, value in snapshot().items() if key in before)
    assert before.keys() == snapshot().keys()


def test_a_module_that_imports_the_name_while_enabled_gets_the_original_back(monkeypatch):
    trl.enable()
    later = types.ModuleType("trl.later_trainer")
    later.add_fused_lm_head = utils.add_fused_lm_head
    monkeypatch.setitem(sys.modules, "trl.later_trainer", later)
    trl.disable()
    assert later.add_fused_lm_head is utils.add_fused_lm_head
    assert later.add_fused_lm_head.__module__ == "trl.trainer.utils"


def test_a_model_of_a_disabled_trainer_runs_trls_forward(path, counts):
    trl.enable()
    model = load_model(path)
    utils.add_fused_lm_head(model)
    trl.disable()
    tokens = torch.arange(4, 16).view(2, 6)
    model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    assert counts.log_probs == counts.losses == 0


def test_another_version_of_trl_is_refused(monkeypatch):
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.17.2" if name == "trl" else version(name))
    with pytest.raises(ImportError, match=r"enable knows trl 1\.16\.0, but trl 1\.17\.2 is installed"):
        trl.enable()
    assert not trl.is_enabled()


def test_a_missing_trl_is_named(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ImportError, match=r"enable needs trl 1\.16\.0, but trl is not installed"):
        trl.enable()


@pytest.mark.parametrize("memory", ["leaner", 1])
def test_an_unknown_level_is_refused(memory):
    with pytest.raises(ValueError, match=r"enable: memory must be None or one of 'default', 'lean', .* got "):
        trl.enable(memory=memory)
    assert not trl.is_enabled()
