"""One training run in a process of its own: `python -m tigon.tools.demo.train JOB.json`.

For each line on standard input it trains one step, and answers with one line of JSON on standard output; the end of
standard input ends it. The first line it writes, unasked, says that the model stands.

    {"event": "ready", "parameters": .., "state_bytes": .., "attention": .., "patch": ..}
    {"event": "step", "step": .., "loss": .., "seconds": .., "peak_bytes": ..}
    {"event": "failed", "out_of_memory": .., "reason": ..}

Memory is counted above what any training of this model holds throughout: parameters, gradients, optimizer states.
Gradients are therefore zeroed in place and not freed.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from tigon.tools.demo.presets import Preset, build_model
from tigon.tools.training.resident import ResidentMemory
from tigon.tools.training.text import batches

__all__ = ["Job", "main"]

_LR_WARMUP = 4  # steps


@dataclass(frozen=True)
class Job:
    """One run: everything that decides its numbers."""

    model_type: str
    preset: Preset
    device: str
    seed: int
    tokens: str
    patch: dict[str, Any] | None = None  # options of tigon.patch; None: stock
    reverse: bool = False  # sequences of a batch in reverse: the same loss, its sums in another order

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        fields = json.loads(text)
        return Job(**{**fields, "preset": Preset(**fields["preset"])})


# --- memory --------------------------------------------------------------------------------------


class AllocatorMemory:
    """Peak of the CUDA allocator above `state_bytes`."""

    def __init__(self, device: torch.device, state_bytes: int) -> None:
        self._device, self._state_bytes = device, state_bytes
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._state_bytes


# --- training ------------------------------------------------------------------------------------


def prime(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> int:
    """Bring gradients and optimizer states into being without training; return the bytes of all state.

    A few tokens go forward and backward (which also loads the libraries' code), the gradients are zeroed, and one step
    with a learning rate of 0 makes the states; their step counters go back to 0.
    """
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    for state in optimizer.state.values():
        state["step"].zero_()
    held = [tensor for p in model.parameters() for tensor in (p, p.grad)] + states
    return sum(tensor.untyped_storage().nbytes() for tensor in held)


def train(job: Job, wait_for_turn: Callable[[], bool], say: Callable[..., None]) -> None:
    """Train `job`, a step for each turn that `wait_for_turn` grants, and `say` what comes out."""
    device, preset = torch.device(job.device), job.preset
    torch.manual_seed(job.seed)
    model = build_model(job.model_type, preset, job.device)
    patch_report = None
    if job.patch is not None:
        import tigon

        patch_report = str(tigon.patch(model, **job.patch))

    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=preset.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = batches(Path(job.tokens), preset.batch, preset.seq, job.seed)
    state_bytes = prime(model, optimizer, torch.arange(8, device=device)[None])
    memory = AllocatorMemory(device, state_bytes) if device.type == "cuda" else ResidentMemory()
    say(
        "ready",
        parameters=sum(p.numel() for p in parameters),
        state_bytes=state_bytes,
        attention=model.config._attn_implementation,
        threads=torch.get_num_threads(),
        patch=patch_report,
    )
    torch.manual_seed(job.seed)

    for step in range(preset.steps):
        if not wait_for_turn():
            return
        ids = next(data)  # [batch, seq]
        ids = (ids.flip(0) if job.reverse else ids).to(device)
        for group in optimizer.param_groups:
            group["lr"] = preset.lr * min(1.0, (step + 1) / _LR_WARMUP)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        say("step", step=step, loss=loss.detach().float().item(), seconds=seconds, peak_bytes=memory.peak_bytes())


def _answers() -> TextIO:
    """Standard output as it was; from here on whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def main(path: str) -> int:
    answers = _answers()

    def say(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=answers, flush=True)

    try:
        train(Job.from_json(Path(path).read_text(encoding="utf-8")), lambda: bool(sys.stdin.readline()), say)
    except (torch.OutOfMemoryError, MemoryError) as error:
        say("failed", out_of_memory=True, reason=f"out of memory: {error}")
        return 1
    except BrokenPipeError:  # the parent is gone
        return 1
    except Exception as error:
        say("failed", out_of_memory=False, reason=f"{type(error).__name__}: {error}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
