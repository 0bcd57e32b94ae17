"""FSDP2 by accelerate: `accelerate launch --config_file examples/fsdp2.yaml --num_processes 4 examples/fsdp2.py`.

Accelerate shards on accelerators only. On CPU ranks (`--cpu`) this is a data-parallel run of whole models.
"""

import torch
from accelerate import Accelerator
from model_and_text import Meter, build_model, leave_group, make_parser, token_rows
from torch.utils.data import DataLoader

import tigon


def main() -> None:
    arguments = make_parser("Train with accelerate's FSDP2.").parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = build_model(arguments.model, accelerator.device).train()
    # Patch before `prepare`, which replaces the model's forward.
    report = tigon.patch(model, memory=arguments.memory)
    accelerator.print(report)

    rows = token_rows(arguments, model.config.vocab_size, accelerator.num_processes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    # Rank r of R trains on the batches r, r + R, r + 2 R, ...
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=arguments.batch))
    meter = Meter(accelerator.device)
    for ids in loader:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(loss, ids.numel())


if __name__ == "__main__":
    main()
    leave_group()
