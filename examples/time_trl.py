"""Time the SFTTrainer of TRL with and without Tigon, and transformers' Trainer with the same patch, in one process.

    python examples/time_trl.py                           # Llama-3-8B, 2 x 4096 tokens, one GPU with 141 GB
    python examples/time_trl.py --model Llama-3.2-1B

The weights are random and in bf16, and AdamW is torch's fused one. A step is the time from its start to the start of
the next one. The first five steps are not timed. The last column counts how often the first layer ran at the level of
memory, and how often Tigon computed the loss.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import torch
import transformers
from datasets import Dataset
from model_and_text import build_model
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl_sft import make_tokenizer

import tigon
from tigon.hf import head
from tigon.integrations import trl_head
from tigon.memory.lean import is_lean

# For each name: whether the trainer is that of TRL, the level of Tigon, and whether TRL checkpoints the layers.
RUNS = {
    "Trainer, tigon.patch(memory='lean')": (False, "lean", False),
    "SFTTrainer, enable(memory='lean')": (True, "lean", False),
    "SFTTrainer": (True, None, True),
    "SFTTrainer, gradient_checkpointing=False": (True, None, False),
}


class Clock(TrainerCallback):
    """Notes the time at which each step starts, and the logs."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.logs: list[dict] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.starts.append(time.perf_counter())

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.logs.append(logs)


@contextmanager
def counted(counts: Counter):
    """Count the calls of Tigon's loss until the block ends."""

    def counting(function):
        def call(*args, **kwargs):
            counts["loss"] += 1
            return function(*args, **kwargs)

        return call

    with (
        patch.object(head, "linear_cross_entropy", counting(head.linear_cross_entropy)),
        patch.object(trl_head, "linear_cross_entropy", counting(trl_head.linear_cross_entropy)),
    ):
        yield


def train(arguments: argparse.Namespace, by_trl: bool, level: str | None, checkpoints: bool) -> tuple[Clock, Counter]:
    """Train a new model. Return the clock and the counts."""
    on_gpu, clock, counts = torch.cuda.is_available(), Clock(), Counter()
    model = build_model(arguments.model, torch.device("cuda") if on_gpu else None).to(torch.bfloat16)
    rows = torch.randint(10, model.config.vocab_size, (arguments.batch * arguments.steps, arguments.seq))
    settings = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": arguments.steps,
        "per_device_train_batch_size": arguments.batch,
        "learning_rate": 1e-5,
        "max_grad_norm": 0.0,
        "optim": "adamw_torch_fused",
        "use_cpu": not on_gpu,
        "bf16": False,
        "gradient_checkpointing": checkpoints,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    if by_trl:
        if level is not None:
            tigon.integrations.trl.enable(memory=level)
        trainer = SFTTrainer(
            model,
            SFTConfig(max_length=arguments.seq, **settings),
            train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
            processing_class=make_tokenizer(),
            callbacks=[clock],
        )
    else:
        tigon.patch(model, memory=level)
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, TrainingArguments(**settings), train_dataset=data, callbacks=[clock])
    trainer.remove_callback(PrinterCallback)
    model.model.layers[0].register_forward_pre_hook(lambda *_: counts.update(lean=int(is_lean())))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        with counted(counts):
            trainer.train()
    finally:
        tigon.integrations.trl.disable()
    return clock, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3-8B", help="preset of Tigon, or `tiny`")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=14)
    arguments = parser.parse_args()
    if arguments.model == "tiny":
        arguments.model = None
    transformers.logging.set_verbosity_error()
    print(f"{arguments.model or 'tiny Llama'}, {arguments.batch} x {arguments.seq} tokens")
    for name, run in RUNS.items():
        clock, counts = train(arguments, *run)
        steps = [b - a for a, b in zip(clock.starts, clock.starts[1:], strict=False)][min(5, arguments.steps // 2) :]
        seconds = statistics.median(steps)
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        metrics = "  ".join(f"{key} {clock.logs[-1][key]}" for key in ("loss", "entropy") if key in clock.logs[-1])
        print(
            f"{name:42} {seconds * 1e3:7.1f} ms  {arguments.batch * arguments.seq / seconds:7,.0f} tokens/s  "
            f"{peak:5.1f} GiB  {metrics}  lean {counts['lean']}, loss {counts['loss']}",
            flush=True,
        )
        del clock
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
