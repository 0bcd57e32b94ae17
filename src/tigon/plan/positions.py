"""How many positions a model has: a table of positions ends, and indices beyond it have no meaning on meta.

A step on the meta device reads no values, so it does not fail where the same step on a GPU raises an IndexError. A
rotary embedding has no table: it is computed for every position, also for those beyond the ones it was trained for.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from tigon.inspect.build import quietly
from tigon.plan.ledger import Ledger

__all__ = ["PositionTable", "configured_positions", "find_position_table"]

NAMES = ("max_position_embeddings", "max_target_positions", "n_positions", "n_ctx", "max_seq_len")
OFFSETS = 16  # rows that a table may have beside those of the positions, as OPT's has two


class PositionTable(NamedTuple):
    """A table of positions: its name in the model, and how many tokens it is good for."""

    name: str
    positions: int


def configured_positions(config: Any) -> int | None:
    """The number of positions that the config of the text model names; None if it names none."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    values = [getattr(text, name, None) for name in NAMES]
    return next((x for x in values if isinstance(x, int) and x > 0), None)


def find_position_table(model: nn.Module, seq: int) -> PositionTable | None:
    """The table that ends before `seq` tokens do, in a model on meta; None if there is none.

    A table has as many rows as the config has positions. It counts only if a forward pass of `seq` tokens reads it as
    an embedding, or leaves it, a buffer, as short as it was: some models make sinusoids longer as they need them. If
    the pass fails with more tokens than the config has positions, and not with as many, the config is the limit.
    """
    positions = configured_positions(model.config)
    if positions is None or seq <= positions - OFFSETS:
        return None
    is_table = lambda x: x.dim() == 2 and positions <= len(x) <= positions + OFFSETS
    words = getattr(model, "get_input_embeddings", lambda: None)()
    embeddings = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module is not words and is_table(module.weight)
    }
    buffers = [name for name, buffer in model.named_buffers() if is_table(buffer)]
    reads = _reads(model, embeddings, seq)
    if reads is None:
        # A mask, or a sum with all rows of a table, fails on meta too, but its error speaks of shapes.
        works = seq > positions and _reads(model, {}, positions) is not None
        return PositionTable("the config", positions) if works else None
    tables = []
    for name in reads:
        table = embeddings[name]
        # Positions of tokens begin behind the padding's, as in RoBERTa.
        first = 0 if table.padding_idx is None else table.padding_idx + 1
        tables.append(PositionTable(name, min(positions, table.num_embeddings - first)))
    now = dict(model.named_buffers())
    tables += [PositionTable(name, positions) for name in buffers if name in now and len(now[name]) < seq]
    return min((table for table in tables if table.positions < seq), key=lambda table: table.positions, default=None)


def _reads(model: nn.Module, embeddings: dict[str, nn.Embedding], seq: int) -> list[str] | None:
    """The embeddings that a forward pass of `seq` tokens reads at as many places; None if the pass fails."""
    reads, hooks = [], []
    for name, module in embeddings.items():

        def note(_module: nn.Module, inputs: tuple, output: torch.Tensor, name: str = name) -> None:
            if output.dim() > 1 and output.shape[-2] == seq:
                reads.append(name)

        hooks.append(module.register_forward_hook(note))
    try:
        # The ledger answers the questions for values that meta tensors do not have.
        with quietly(), Ledger(), torch.no_grad():
            model(input_ids=torch.empty(1, seq, dtype=torch.int64, device="meta"))
    except Exception:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return reads
