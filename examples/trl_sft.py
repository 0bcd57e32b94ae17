"""Supervised fine-tuning by the SFTTrainer of TRL: `python examples/trl_sft.py`, or with `torchrun --nproc-per-node 4`.

The line that matters is `tigon.integrations.trl.enable(memory=...)`, before the trainer is built. It patches the model,
runs the trainer's loss on Tigon's ops, and chooses the level of memory in place of TRL's gradient checkpointing. The
other trainers of TRL (DPO, KTO, GRPO, RLOO) need the same line. `--stock` trains without Tigon.
"""

import tempfile

import torch
from datasets import Dataset
from model_and_text import Meter, build_model, leave_group, make_parser, token_rows
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import tigon


class PrintSteps(TrainerCallback):
    """Prints loss, speed and memory of every step."""

    def __init__(self, meter: Meter, tokens: int) -> None:
        self.meter, self.tokens = meter, tokens

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.meter.step(float(logs["loss"]), self.tokens)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that only pads, because the rows are tokens already. Use the tokenizer of your model."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    parser = make_parser("Train with the SFTTrainer of TRL.")
    parser.add_argument("--stock", action="store_true", help="train without Tigon")
    parser.add_argument("--bf16-weights", action="store_true", help="hold the weights in bf16, without a master copy")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    training = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_length=arguments.seq,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        # TRL's default is True. `enable(memory=...)` switches it off, because the level decides what is saved.
        gradient_checkpointing=True,
        ddp_find_unused_parameters=False,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    if not arguments.stock:
        tigon.integrations.trl.enable(memory=arguments.memory)
    model = build_model(arguments.model)
    if arguments.bf16_weights:
        model = model.to(torch.bfloat16)
    rows = token_rows(arguments, model.config.vocab_size, training.world_size)
    trainer = SFTTrainer(
        model,
        training,
        train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
        processing_class=make_tokenizer(),
        callbacks=[PrintSteps(Meter(training.device), arguments.batch * arguments.seq)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
    leave_group()
