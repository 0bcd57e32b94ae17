"""The Trainer of transformers: `python examples/trainer.py`, or `torchrun --nproc-per-node 4 examples/trainer.py`.

With `--deepspeed examples/zero3.json` it trains with ZeRO-3. The Trainer gets the patched model; nothing else changes.
`TrainingArguments(use_liger_kernel=True)` would apply another library, so it stays off.
"""

import tempfile

import torch
from model_and_text import Meter, build_model, leave_group, make_parser, token_rows
from transformers import Trainer, TrainerCallback, TrainingArguments

import tigon


class PrintSteps(TrainerCallback):
    """Prints loss, speed and memory of every step."""

    def __init__(self, meter: Meter, tokens: int) -> None:
        self.meter, self.tokens = meter, tokens

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.meter.step(logs["loss"], self.tokens)


def main() -> None:
    parser = make_parser("Train with the Trainer of transformers.")
    parser.add_argument("--deepspeed", help="a configuration of DeepSpeed, such as examples/zero3.json")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    # Create the arguments before the model, so that ZeRO-3 can build it in shards.
    training = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        deepspeed=arguments.deepspeed,
        ddp_find_unused_parameters=False,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = build_model(arguments.model)
    report = tigon.patch(model, memory=arguments.memory)
    if training.process_index == 0:
        print(report)
    rows = token_rows(arguments, model.config.vocab_size, training.world_size)
    trainer = Trainer(
        model,
        training,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[PrintSteps(Meter(training.device), arguments.batch * arguments.seq)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
    leave_group()
