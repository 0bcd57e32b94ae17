"""Training by the SFTTrainer of TRL on texts of uneven lengths, in place of the loop of the worker.

Texts are padded on the right to the longest one of a batch, as TRL does it. Times are those of whole steps, with the
work of the trainer between them and with captures of CUDA graphs.
"""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import tigon
from benchmarks.train.text import SEED, draw_documents

if TYPE_CHECKING:
    from benchmarks.train.worker import Trainer


class StepClock(TrainerCallback):
    """Marks the end of each step, and collects the losses that the trainer logs."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer, self.meter = trainer, trainer.make_meter()
        self.losses: list[float] = []
        self.host_seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter = self.trainer.make_meter()
        self.meter.mark()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.start_time = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter.mark()
        self.host_seconds.append(time.perf_counter() - self.start_time)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def train_by_trl(trainer: "Trainer") -> dict[str, Any]:
    """Train all steps of the job of `trainer`, with its model and its optimizer; return the fields of the result."""
    job, on_gpu = trainer.job, trainer.device.type == "cuda"
    rows = draw_documents(Path(job.tokens), (job.warmup + job.steps) * job.batch, job.seq, SEED)
    if job.reverse:
        rows = [row for i in range(0, len(rows), job.batch) for row in reversed(rows[i : i + job.batch])]
    if trainer.provider.is_tigon:
        tigon.integrations.trl.enable()
    # The rows are tokens already, so the tokenizer only pads.
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    clock = StepClock(trainer)
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder, max_steps=job.warmup + job.steps, per_device_train_batch_size=job.batch,
            max_length=job.seq, gradient_checkpointing=trainer.provider.checkpoints, lr_scheduler_type="constant",
            bf16=on_gpu, use_cpu=not on_gpu, train_sampling_strategy="sequential", logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, seed=SEED,
        )  # fmt: skip
        SFTTrainer(
            trainer.model,
            settings,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"),
            optimizers=(trainer.optimizer, None),
            callbacks=[clock],
        ).train()
    allocated_peak, reserved_peak = clock.meter.peaks()
    return {
        "seconds": clock.meter.seconds(job.warmup), "host_seconds": clock.host_seconds[job.warmup :],
        "losses": clock.losses, "allocated": allocated_peak, "reserved": reserved_peak,
        "trained_tokens": sum(map(len, rows[job.warmup * job.batch :])), **trainer.facts(),
    }  # fmt: skip
