"""Copies of models, and changes of a model's forward, which tests make before or after the patch."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tigon.hf.logits import SKIPPED_LOGITS
from tigon.hf.parts import PARTS

# Options of `tigon.patch` that recognise the loss alone.
LOSS_ALONE = {part: part == "loss" for part in PARTS}


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


# The ways to copy a model.
COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": save_and_load,
}


def with_adapters(model: nn.Module, names: str | list[str] = "all-linear", seed: int = 0, **options: Any) -> Any:
    """Return a language model with adapters of PEFT on the layers of these names. Their weights are random."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    options = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=names, **options)).train()


def record_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple]:
    """Return the list to which each call of the function `owner.name` adds its positional arguments."""
    calls, function = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(args) or function(*args, **kwargs))
    return calls


def is_fused(outputs: Any) -> bool:
    """Return True if the loss of these outputs was computed in the head."""
    return outputs.logits is SKIPPED_LOGITS


def loss_entry(report: Any) -> Any:
    """Return the entry of a report about the loss of the patched model."""
    (entry,) = (entry for entry in report.entries if entry.part == "loss")
    return entry


def with_outputs(change: Callable[..., Any]) -> Callable[[nn.Module], None]:
    """Return a function that lets the outputs of a model's forward go through `change(model, outputs, labels)`."""

    def apply(model: nn.Module) -> None:
        class Changed(type(model)):
            def forward(self, *args, labels=None, **kwargs):
                return change(self, super().forward(*args, labels=labels, **kwargs), labels)

        model.__class__ = Changed

    return apply


def with_logits(change: Callable[[Any, Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """Return a function that lets the logits of a model go through `change(model, logits)` before its loss."""

    def apply(model: nn.Module) -> None:
        class Changed(type(model)):
            def forward(self, *args, labels=None, **kwargs):
                outputs = super().forward(*args, **kwargs)
                outputs.logits = change(self, outputs.logits)
                if labels is not None:
                    outputs.loss = self.loss_function(outputs.logits, labels, self.config.vocab_size, **kwargs)
                return outputs

        model.__class__ = Changed

    return apply


# These functions are computations of a model from its logits, outside of its loss.
COMPUTATIONS: dict[str, Callable[[Tensor, Tensor | None], Any]] = {
    "argmax": lambda logits, labels: None if labels is None else (logits.argmax(-1) == labels).float().mean(),
    "comparison": lambda logits, labels: (logits > 0).sum(),
    "entropy": lambda logits, labels: torch.distributions.Categorical(logits=logits).entropy(),
    "topk": lambda logits, labels: torch.topk(logits, 2, -1).indices,
    "mean": lambda logits, labels: torch.mean(logits),
    "logsumexp": lambda logits, labels: logits.logsumexp(-1).square().mean(),
    "softmax": lambda logits, labels: logits.softmax(-1).max(),
    "last token": lambda logits, labels: logits[:, -1],
    "bool": lambda logits, labels: bool((logits.detach() * 2).max() > 1),
    "numpy": lambda logits, labels: logits.detach().numpy(),
}


def with_extra(compute: Callable[[Tensor, Tensor | None], Any]) -> Callable[[nn.Module], None]:
    """Return a function that lets a model put `compute(logits, labels)` into the field `extra` of its output."""

    def change(model: nn.Module, outputs: Any, labels: Tensor | None) -> Any:
        outputs.extra = compute(outputs.logits, labels)
        return outputs

    return with_outputs(change)
