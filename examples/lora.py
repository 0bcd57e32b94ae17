"""Supervised fine-tuning with LoRA on instructions, by the Trainer of transformers; with `--qlora` on nf4 weights.

    python examples/lora.py                                  # a tiny Llama with random weights, on a CPU in a minute
    python examples/lora.py --qlora --compare                # nf4 weights, and the stock model for comparison
    python examples/lora.py --model meta-llama/Llama-3.2-1B --data my.jsonl --steps 500 --batch 8

Each line of the JSON lines file has the fields "prompt" and "answer". The loss counts only the tokens of the answers.
The line that matters is `tigon.patch(model, memory="lean")`; the rest is the same without Tigon.
"""

import json
import random
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import peft
import torch
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import tigon

# `benchmarks` is a folder of the repository, and not a part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.figures import INK, Curve, draw_losses, provider_colour
from benchmarks.report import takes_options
from benchmarks.train.measurement import loss_differences

IGNORED = -100
EXAMPLES = 512
# The largest difference of the losses at the first step. It grows tenfold every 30 steps, because training amplifies
# rounding.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}
SEED = 0
# This is the format of models whose tokenizer has no chat template.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TINY = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """An instruction and its answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    model: Annotated[str | None, typer.Option(help="Name on the hub, or folder.", show_default="a tiny Llama")] = None
    data: Annotated[
        Path | None,
        typer.Option(help='JSON lines with "prompt" and "answer".', show_default="instructions that the script makes"),
    ] = None
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters. Their alpha is twice the rank.")] = 16
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100
    batch: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 8
    seq: Annotated[
        int, typer.Option(min=1, help="Largest number of tokens of an example. Longer ones are omitted.")
    ] = 256
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3
    qlora: Annotated[bool, typer.Option("--qlora", help="Quantise the frozen layers to nf4, by bitsandbytes.")] = False
    compare: Annotated[bool, typer.Option("--compare", help="Also train the stock model, from the same seed.")] = False
    out: Annotated[Path, typer.Option(help="Folder for the results. Earlier results are overwritten.")] = Path(
        "runs/lora"
    )


# --- data ----------------------------------------------------------------------------------------


def make_examples(count: int) -> list[Example]:
    """Return short instructions about numbers and words, the same at every call."""
    draw = random.Random(SEED)
    words = [
        "apple", "bird", "cloud", "door", "earth", "fish", "green", "house", "iron", "juice", "king", "lamp",
    ]  # fmt: skip
    examples = []
    for _ in range(count):
        a, b = draw.randrange(10), draw.randrange(10)
        some_words = draw.sample(words, 3)
        examples.append(
            draw.choice([
                Example(f"What is {a} + {b}?", f"{a} + {b} = {a + b}"),
                Example(f"Which number is larger, {a} or {b}?", f"The larger number is {max(a, b)}."),
                Example(f"Sort these words: {' '.join(some_words)}", " ".join(sorted(some_words))),
                Example(f"Write this word in capital letters: {some_words[0]}", some_words[0].upper()),
            ])
        )  # fmt: skip
    return examples


def read_examples(path: Path) -> list[Example]:
    """Return the examples of a JSON lines file."""
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            examples.append(Example(fields["prompt"], fields["answer"]))
        except (ValueError, KeyError, TypeError):
            message = f'line {number} of {path} must be a JSON object with "prompt" and "answer", got {line[:80]!r}'
            raise typer.BadParameter(message, param_hint="--data") from None
    return examples


def to_row(example: Example, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return the tokens of an example as a chat. The labels of the prompt are IGNORED, so the loss leaves them out."""
    user = [{"role": "user", "content": example.prompt}]
    chat = [*user, {"role": "assistant", "content": example.answer}]
    prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    if ids[: len(prompt)] != prompt:
        raise ValueError("the chat template must begin a chat with the tokens of its prompt")
    return {"input_ids": ids, "labels": [IGNORED] * len(prompt) + ids[len(prompt) :]}


def make_rows(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[dict[str, list[int]]]:
    """Return the rows of the examples that have at most `longest` tokens, and print their numbers."""
    rows = [to_row(example, tokenizer) for example in examples]
    short_rows = [row for row in rows if len(row["input_ids"]) <= longest]
    if not short_rows:
        raise typer.BadParameter(f"no example has at most {longest} tokens", param_hint="--seq")
    tokens = sum(len(row["input_ids"]) for row in short_rows)
    labels = sum(label != IGNORED for row in short_rows for label in row["labels"])
    omitted = len(rows) - len(short_rows)
    print(f"{len(short_rows)} examples ({omitted} longer ones left out), {tokens} tokens, {labels} of them in answers")
    return short_rows


# --- model ---------------------------------------------------------------------------------------


def save_tiny_model(folder: Path, examples: Iterable[Example]) -> None:
    """Save a Llama with random weights, and a tokenizer that is trained on the examples."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    bpe.train_from_iterator((f"{example.prompt}\n{example.answer}" for example in examples), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=special[0], eos_token=special[1])
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(**TINY, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=1)
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, which can write chats and pad."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name: str, options: Options) -> peft.PeftModel:
    """Return a frozen model with adapters on all linear layers but the head.

    On a GPU the model is in bf16, because Tigon's op for adapters takes bf16 and fp16. PEFT creates adapters in fp32.
    """
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=dtype,
        device_map={"": 0} if on_gpu else None,
        quantization_config=quantisation if options.qlora else None,
    )
    # Do not call `peft.prepare_model_for_kbit_training` here: it would cast the norms and the embeddings to fp32. The
    # layers with adapters would then get fp32 inputs, for which no op computes the adapters.
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(SEED)
    return peft.get_peft_model(model, config)


# --- training ------------------------------------------------------------------------------------


def train(
    name: str, rows: list[dict[str, list[int]]], tokenizer: PreTrainedTokenizerBase, options: Options, patched: bool
) -> tuple[peft.PeftModel, list[float]]:
    """Train the adapters of a model, and return it with the loss of each step."""
    model = load_model(name, options)
    if patched:
        print(tigon.patch(model, memory="lean"))
    arguments = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.lr,
        warmup_steps=options.steps // 20,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=SEED,
        use_cpu=not torch.cuda.is_available(),
    )
    collator = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def write_losses(folder: Path, losses: dict[str, list[float]], options: Options, dtype: str) -> bool:
    """Write loss.json and loss.png; return False if two runs differ by more than the tolerance."""
    report = {"options": asdict(options), "dtype": dtype, "losses": losses}
    curves, differences, agree = [], [], True
    if "stock" in losses:
        differences = loss_differences(losses["tigon"], losses["stock"])
        agree = all(d <= min(0.1, TOLERANCE[dtype] * 10 ** (step / 30)) for step, d in enumerate(differences))
        report |= {"differences": differences, "agree": agree}
        curves.append(Curve("stock", provider_colour("stock"), losses["stock"], broad=True))
        verdict = "agree" if agree else "DIFFER"
        print(f"The losses {verdict}: they differ by at most {max(differences):.1e}.")
    curves.append(Curve("Tigon", provider_colour("tigon"), losses["tigon"]))
    (folder / "loss.json").write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    subtitle = f"{options.model or 'tiny Llama, random weights'}, rank {options.rank}, {options.steps} steps, {dtype}"
    draw_losses(
        folder / "loss.png",
        f"Fine-tuning with {'QLoRA (nf4)' if options.qlora else 'LoRA'}",
        subtitle,
        curves,
        [Curve("", INK, differences)] if differences else [],
    )
    return agree


@takes_options
def main(options: Options) -> None:
    """Fine-tune a model with LoRA and Tigon. With --compare, exit with 1 if the losses differ from those of stock."""
    folder = options.out
    folder.mkdir(parents=True, exist_ok=True)
    examples = read_examples(options.data) if options.data else make_examples(EXAMPLES)
    name = options.model or str(folder / "tiny-llama")
    if options.model is None:
        save_tiny_model(Path(name), examples)
    tokenizer = load_tokenizer(name)
    rows = make_rows(examples, tokenizer, options.seq)
    losses = {}
    if options.compare:
        _, losses["stock"] = train(name, rows, tokenizer, options, patched=False)
    model, losses["tigon"] = train(name, rows, tokenizer, options, patched=True)
    model.save_pretrained(folder / "adapter")
    agree = write_losses(folder, losses, options, "bfloat16" if torch.cuda.is_available() else "float32")
    print(f"Loss: {losses['tigon'][0]:.4f} at the first step, {losses['tigon'][-1]:.4f} at the last one")
    print(f"Written to {folder}: adapter/ (for peft.PeftModel.from_pretrained), loss.json and loss.png")
    raise typer.Exit(0 if agree else 1)


if __name__ == "__main__":
    typer.run(main)
