"""Find how many positions a model has.

A table of positions has a last row. A step on the meta device reads no values, so it does not fail for positions beyond
that row, where the same step on a GPU raises an IndexError. A rotary embedding has no table: it is computed for every
position, also for positions beyond those that the model was trained for.
"""

import logging
from typing import Any, NamedTuple

import torch
from torch import nn

from tigon.cli.inspect.build import quietly
from tigon.cli.plan.ledger import Ledger

CONFIG_NAMES = ("max_position_embeddings", "max_target_positions", "n_positions", "n_ctx", "max_seq_len")
# A table may have up to this many rows more than positions. The table of OPT has two more.
MAX_EXTRA_ROWS = 16


class PositionTable(NamedTuple):
    """A table of positions: its name in the model, and the number of tokens of the longest sequence that it allows."""

    name: str
    positions: int


def configured_positions(config: Any) -> int | None:
    """Return the number of positions that the config of the text model names; None if it names none."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    values = [getattr(text, name, None) for name in CONFIG_NAMES]
    return next((x for x in values if isinstance(x, int) and x > 0), None)


def find_position_table(model: nn.Module, seq: int) -> PositionTable | None:
    """Return the table of a model on meta that is too short for `seq` tokens; None if there is none. A table has as
    many rows as the config has positions, and up to `MAX_EXTRA_ROWS` more. An embedding counts only if a forward pass
    of `seq` tokens reads it. A buffer counts only if the pass leaves it too short, because some models lengthen their
    sinusoids when they need to. If the pass fails with `seq` tokens, but not with as many tokens as the config has
    positions, the config is the limit."""
    positions = configured_positions(model.config)
    if positions is None or seq <= positions - MAX_EXTRA_ROWS:
        return None
    is_table = lambda x: x.dim() == 2 and positions <= len(x) <= positions + MAX_EXTRA_ROWS
    word_embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    embeddings = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module is not word_embeddings and is_table(module.weight)
    }
    buffers = [name for name, buffer in model.named_buffers() if is_table(buffer)]
    reads = _reads(model, embeddings, seq)
    if reads is None:
        # A mask, or a sum with all rows of a table, fails on meta too. Its error is about shapes, so it is not shown.
        works = seq > positions and _reads(model, {}, positions) is not None
        return PositionTable("the config", positions) if works else None
    tables = []
    for name in reads:
        table = embeddings[name]
        # The positions of tokens begin after the position of the padding, as in RoBERTa.
        first = 0 if table.padding_idx is None else table.padding_idx + 1
        tables.append(PositionTable(name, min(positions, table.num_embeddings - first)))
    current_buffers = dict(model.named_buffers())
    tables += [
        PositionTable(name, positions)
        for name in buffers
        if name in current_buffers and len(current_buffers[name]) < seq
    ]
    return min((table for table in tables if table.positions < seq), key=lambda table: table.positions, default=None)


def _reads(model: nn.Module, embeddings: dict[str, nn.Embedding], seq: int) -> list[str] | None:
    """Return the embeddings that a forward pass of `seq` tokens reads at `seq` positions; None if the pass fails."""
    reads: list[str] = []
    record = lambda name, output: reads.append(name) if output.dim() > 1 and output.shape[-2] == seq else None
    hooks = [
        module.register_forward_hook(lambda module, inputs, output, name=name: record(name, output))
        for name, module in embeddings.items()
    ]
    try:
        # The ledger supplies a value where the code reads one from a meta tensor, which has none.
        with quietly(), Ledger(), torch.no_grad():
            model(input_ids=torch.empty(1, seq, dtype=torch.int64, device="meta"))
    except Exception:
        logging.getLogger("tigon").debug("%s does not run on meta tensors.", type(model).__name__, exc_info=True)
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return reads
