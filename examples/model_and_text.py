"""The parts that the scripts for the engines share: options, a model, real text as rows of tokens, and a meter."""

import argparse
import contextlib
import gc
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tigon.cli.presets import find_preset

# `benchmarks` is a folder of the repository, and not a part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.train.text import MIN_VOCAB, batches, read_text, tokenise

TINY = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--model", help="name on the hub, folder, or preset of Tigon (random weights); default: a tiny Llama"
    )
    parser.add_argument("--text", type=Path, help="file or folder; default: the sources of the Python standard library")
    parser.add_argument("--memory", default="lean", help="a level of tigon.patch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser


def build_model(name: str | None, device: torch.device | None = None) -> transformers.PreTrainedModel:
    """Return the model to train in fp32. The engines multiply in bf16 and hold the fp32 weights as master copy.

    Random weights are the same on every rank. They are created on `device` if one is given; the model must fit there.
    """
    preset = {"model_type": "llama", **TINY} if name is None else find_preset(name)
    if preset is None:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    config = transformers.AutoConfig.for_model(**preset)
    torch.manual_seed(0)
    with device or contextlib.nullcontext():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def token_rows(arguments: argparse.Namespace, vocabulary: int, ranks: int) -> Tensor:
    """Return text for all steps of all ranks in the order of training, [steps * ranks * batch, seq] int64.

    The tokens come from a small BPE that is trained on the text, whatever the model.
    """
    tokens = tokenise(read_text(arguments.text), max(MIN_VOCAB, min(vocabulary, TINY["vocab_size"])))
    rows = arguments.steps * ranks * arguments.batch
    return next(batches(tokens.path, rows, arguments.seq, seed=0))


def leave_group() -> None:
    """Leave the process group, if there is one. The model refers to the group, so delete it before this call.

    A thread of gloo that still has a tensor when Python ends aborts the process (pytorch's issue 190489). The threads
    end with the group. Where torch's caches of sharded tensors keep the group alive, the threads have freed all tensors
    by then.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


class Meter:
    """Prints a line for each step on rank 0: mean loss of the ranks, tokens/s of all ranks, peak memory of rank 0."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps = device, 0
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if device.type == "cuda":
            # Leave out the peak of the model before it was sharded.
            torch.cuda.reset_peak_memory_stats(device)
        self.start_time = time.perf_counter()

    def step(self, loss: Tensor | float, tokens: int) -> None:
        """Print the step that has just been queued; `tokens` counts those of this rank."""
        loss = torch.as_tensor(loss, device=self.device, dtype=torch.float32).detach().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        # `item` waits for the step.
        value = loss.item()
        now = time.perf_counter()
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.steps += 1
        if os.environ.get("RANK", "0") == "0":
            speed = tokens * self.ranks / (now - self.start_time)
            line = f"step {self.steps}  loss {value:.5f}  {speed:,.0f} tokens/s  peak {peak / 2**30:.2f} GiB"
            print(line, flush=True)
        self.start_time = now
