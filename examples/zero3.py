"""DeepSpeed ZeRO-3: `torchrun --nproc-per-node 4 examples/zero3.py --config examples/zero3.json` (or `deepspeed`).

A parameter has values only in the forward and the backward pass of its own module. The patched model respects that.
Without GPUs it runs on CPU ranks: set DS_ACCELERATOR=cpu.
"""

import json
import os
from pathlib import Path

import deepspeed
import torch
from model_and_text import Meter, build_model, leave_group, make_parser, token_rows
from transformers.integrations import HfDeepSpeedConfig

import tigon


def main() -> None:
    parser = make_parser("Train with DeepSpeed's ZeRO-3.")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("zero3.json"))
    parser.add_argument("--local_rank", type=int, help="the launcher of DeepSpeed sets this; it is not used")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        # DeepSpeed would compile this operator.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")

    config = json.loads(arguments.config.read_text(encoding="utf-8"))
    config["train_micro_batch_size_per_gpu"] = arguments.batch
    config["bf16"]["enabled"] = on_gpu
    # While this object exists, transformers builds models in shards.
    sharding = HfDeepSpeedConfig(config)
    model = build_model(arguments.model).train()
    report = tigon.patch(model, memory=arguments.memory)
    if rank == 0:
        print(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    del sharding

    rows = token_rows(arguments, model.config.vocab_size, ranks)
    batches = rows.view(arguments.steps, ranks, arguments.batch, arguments.seq)[:, rank]
    meter = Meter(device)
    for ids in batches:
        ids = ids.to(device)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        # The engine clips, steps, and zeroes the gradients.
        engine.step()
        meter.step(loss, ids.numel())
    engine.destroy()


if __name__ == "__main__":
    main()
    leave_group()
