"""In the Trainer of transformers, losses, norms of gradients and trained weights are those of stock."""

import pytest
import torch

import tigon
from hf.changes import with_adapters
from tigon.hf.logits import SKIPPED_LOGITS

pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _fresh_state(fresh_accelerate):
    pass


@pytest.fixture
def rows(batch) -> list[dict[str, torch.Tensor]]:
    """Return eight sequences with different numbers of labels."""
    rows = [{name: value[i % 3].roll(i // 3, 0) for name, value in batch.items()} for i in range(8)]
    for i, row in enumerate(rows):
        row["labels"] = row["labels"].clone()
        row["labels"][: i % 5] = -100
    return rows


SETTINGS = {
    "accumulation": {"gradient_accumulation_steps": 4},
    "one batch per step": {"per_device_train_batch_size": 4},
    "checkpointing": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "adapters": {"gradient_accumulation_steps": 4},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.sampled(5)
def test_the_trainer_gives_the_results_of_stock(make_model, rows, tmp_path, setting):
    """Train two steps, and evaluate with logits."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    fused = set()

    class RecordingTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            if model.training:
                fused.add(outputs.logits is SKIPPED_LOGITS)
            return (loss, outputs) if return_outputs else loss

    arguments = {"per_device_train_batch_size": 1, "max_steps": 2, "learning_rate": 1e-2, "optim": "sgd"}
    results = []
    for patched in (True, False):
        fused.clear()
        model = make_model("gemma2")
        if patched:
            tigon.patch(model)
        if setting == "adapters":
            model = with_adapters(model, init_lora_weights=True)
        options = TrainingArguments(
            output_dir=str(tmp_path), logging_steps=1, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, **arguments | SETTINGS[setting],
        )  # fmt: skip
        trainer = RecordingTrainer(
            model, options, train_dataset=rows, eval_dataset=rows, data_collator=default_data_collator,
            compute_metrics=lambda p: {"logits": p.predictions.shape[-1]},
        )  # fmt: skip
        trainer.train()
        # The Trainer computes label smoothing from the logits.
        assert fused == {patched and setting != "label smoothing"}
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        numbers = [entry[name] for entry in log for name in ("loss", "grad_norm")]
        assert len(numbers) == 4
        metrics = trainer.evaluate()
        assert metrics["eval_logits"] == 131
        results.append(([*numbers, metrics["eval_loss"]], {name: p.detach() for name, p in model.named_parameters()}))
    (actual, weights), (expected, stock) = results
    assert actual == pytest.approx(expected, rel=1e-4)
    for name, value in stock.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-4 * float(value.abs().max()), msg=name)
