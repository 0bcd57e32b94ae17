"""A loop in plain torch, sharded by FSDP2: `torchrun --nproc-per-node 4 examples/torchrun_loop.py --memory lean`.

Without GPUs it runs on CPU ranks. Patch before `fully_shard`, or after it: both work.
"""

import os

import torch
import torch.distributed as dist
from model_and_text import Meter, build_model, leave_group, make_parser, token_rows
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tigon


def main() -> None:
    arguments = make_parser("Train with torch's FSDP2.").parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    model = build_model(arguments.model, device).to(device).train()
    report = tigon.patch(model, memory=arguments.memory)
    if rank == 0:
        print(report)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": precision} if on_gpu else {}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)

    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, fused=True)
    rows = token_rows(arguments, model.config.vocab_size, ranks)
    batches = rows.view(arguments.steps, ranks, arguments.batch, arguments.seq)[:, rank]
    meter = Meter(device)
    for ids in batches:
        ids = ids.to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(loss, ids.numel())


if __name__ == "__main__":
    main()
    leave_group()
