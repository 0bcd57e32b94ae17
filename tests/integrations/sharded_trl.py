"""One rank of a test: the forward of TRL's trainers with a model that FSDP2 shards. The head is a unit of its own.

python sharded_trl.py STORE
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl.trainer import utils

import ranks
import tigon
from integrations.trainers import load_model, save_model
from tigon.integrations.trl_head import loss_is_sum


def run(path: str, mesh, tokens: torch.Tensor, kind: str | None, is_enabled: bool) -> dict[str, torch.Tensor]:
    """Return the loss and the gradient of every parameter."""
    if is_enabled:
        tigon.integrations.trl.enable(memory="lean")
    model = load_model(path).train()
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    for module in (*model.model.layers, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    with loss_is_sum(kind):
        outputs = model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    loss = -outputs.log_probs.sum() / 16
    loss.backward()
    tigon.integrations.trl.disable()
    return {"loss": loss.detach()} | {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def main(store: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=ranks.LIMIT)
    folder = Path(store).with_name("model")
    if rank == 0:
        save_model(folder)
    dist.barrier()
    mesh = init_device_mesh("cpu", (size,))
    tokens = torch.randint(4, 97, (2, 9), generator=torch.Generator().manual_seed(rank))
    expected = run(str(folder), mesh, tokens, None, is_enabled=False)
    for kind in (None, "nll"):
        actual = run(str(folder), mesh, tokens, kind, is_enabled=True)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}")


if __name__ == "__main__":
    main(sys.argv[1])
    ranks.leave()
