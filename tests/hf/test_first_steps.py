"""Everything is decided after `patch` and one step: later steps call as many functions of Tigon as each other.

A step that still learns (a new variant, a guard that reads the state again) calls more functions. The count does not
depend on the machine, as a time would.
"""

import itertools
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import tigon
from hf.changes import with_adapters
from tigon.hf import fp8

pytest.importorskip("transformers")

SOURCE = str(Path(tigon.__file__).parent)
OPTIONS = {
    "dense": {},
    "lean": {"memory": "lean"},
    "checkpoint": {"memory": "checkpoint"},
    "lora": {"memory": "lean"},
    "fp8": {"fp8": "tensorwise"},
}


def count_calls(model: nn.Module, tokens: torch.Tensor, optimizer: torch.optim.Optimizer) -> Counter:
    """Return how often a training step calls each function of Tigon."""
    calls: Counter = Counter()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            calls[f"{frame.f_code.co_filename.removeprefix(SOURCE)}: {frame.f_code.co_qualname}"] += 1

    # With one thread, the functions of backward are recorded too.
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(record)
        try:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
    return calls


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.sampled(3)
def test_the_second_step_calls_what_the_sixth_calls(make_model, monkeypatch, kind):
    monkeypatch.setattr(fp8, "NARROWEST", 1)
    model = make_model("llama").to(torch.bfloat16 if kind == "fp8" else torch.float32).train()
    if kind == "lora":
        model = with_adapters(model, init_lora_weights=True)
    report = tigon.patch(model, **OPTIONS[kind])
    assert {"lora": "adapters", "fp8": "fp8"}.get(kind, "glu") in {entry.part for entry in report.replaced}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    tokens = torch.randint(0, 100, (2, 16), device=next(model.parameters()).device)
    _, *later = (count_calls(model, tokens, optimizer) for _ in range(6))
    # Steps of other lengths learn nothing new either.
    later += (count_calls(model, tokens[:, :length], optimizer) for length in (12, 8))
    assert later[0].total() > 100
    for before, after in itertools.pairwise(later):
        assert after == before, (after - before, before - after)
