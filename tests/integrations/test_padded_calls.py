"""Trainers train as without Tigon when the patch pads their calls (`tigon.patch(model, pad_to=16)`)."""

import pytest

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
import torch
import transformers

import tigon
from integrations import trainers
from integrations.test_trl import assert_same_run, run
from integrations.trainers import build, load_model, train
from op_cases import one_in
from tigon.integrations.trainer import TigonCallback

pytestmark = [
    pytest.mark.usefixtures("clean_trl"),
    pytest.mark.no_interpreter("It launches no kernel."),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory", "ignore:tigon. the forward of"),
]

PADDED = 16
ADAPTERS = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"], init_lora_weights=False)


@one_in(
    8, kind=[*trainers.TRAINERS], enables={"trl": False, "tigon": True}, peft_config={"full": None, "LoRA": ADAPTERS}
)
def test_trainers_of_trl(kind, enables, peft_config, path, tmp_path):
    """The trainers call the model, or the body alone and compute the loss by themselves."""
    stock = run(kind, path, tmp_path, peft_config)
    if enables:
        tigon.integrations.trl.enable()
    model = load_model(path)
    report = tigon.patch(model, pad_to=PADDED)
    lengths = set()
    model.model.norm.register_forward_pre_hook(
        lambda module, args: lengths.add(args[0].shape[1]) if torch.is_grad_enabled() else None
    )
    padded = train(build(kind, model, tmp_path, peft_config))
    for log in (stock.logs[0], padded.logs[0]):
        # In the first step of DPO the rewards are rounding errors, and this is the share of positive ones.
        log.pop("rewards/accuracies", None)
    assert_same_run(padded, stock)
    assert not any("was not padded" in note for note in report.notes), report
    assert lengths
    assert all(length % PADDED == 0 for length in lengths)


class Watch(transformers.TrainerCallback):
    """Records the lengths that the last norm gets in training."""

    def __init__(self) -> None:
        self.lengths: set[int] = set()

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        record = lambda module, args: self.lengths.add(args[0].shape[1]) if torch.is_grad_enabled() else None
        model.model.norm.register_forward_pre_hook(record)


@pytest.mark.parametrize(("accumulation", "side"), [(2, "left"), (1, "right")])
def test_the_trainer_with_uneven_texts(accumulation, side, path, tmp_path):
    """The loss of each step and of evaluation are those of a stock model."""
    tokenizer = trainers.make_tokenizer()
    tokenizer.padding_side = side
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 90, (length,), generator=generator) for length in (5, 9, 14, 15, 18, 21, 7, 30)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation,
        report_to=[], logging_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
        eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    losses, watch = [], Watch()
    for callbacks in ([], [TigonCallback(pad_to=PADDED), watch]):
        data = [{"input_ids": text.tolist()} for text in texts]
        model = load_model(path)
        model.set_attn_implementation("sdpa")
        trainer = transformers.Trainer(
            model, arguments, collate, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks
        )
        trainer.train()
        history = trainer.state.log_history
        losses.append([entry[name] for entry in history for name in ("loss", "eval_loss") if name in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(losses[0]) == 6
    assert watch.lengths <= {16, 32}
    assert len(watch.lengths) == 2


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (True, TypeError), ("64", TypeError)])
def test_wrong_values_of_the_callback(value, error):
    with pytest.raises(error, match="TigonCallback: pad_to must be"):
        TigonCallback(pad_to=value)
