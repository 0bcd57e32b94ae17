"""One sequence on several GPUs: `torchrun --nproc-per-node 4 examples/sequence_parallel.py --memory checkpoint`.

Each rank has a part of the tokens of every sequence, and FSDP2 shards the parameters over the same ranks. Attention
alone needs all tokens. `--attention ulysses` is that of DeepSpeed: before attention, the ranks exchange tokens for
heads. `--attention ring` is torch's context parallelism, which passes keys and values around; it needs GPUs. Neither
changes the model elsewhere, so the modules, the loss and the levels of memory of Tigon are the same as on one GPU.
"""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_and_text import Meter, build_model, leave_group, make_parser, token_rows
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tigon


def use_ulysses(model: nn.Module, sequences: int) -> None:
    """Let the attention of DeepSpeed's Ulysses run around SDPA."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed(dist.get_backend())
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", dist.get_world_size(), micro_batch_size=sequences)


def attend_causally(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **unused: Any
) -> tuple[Tensor, None]:
    """Call SDPA, which torch replaces in the context of `context_parallel`. It takes no mask there."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


def use_ring(model: Any) -> None:
    """Let the attention call SDPA without a mask, although the tokens of a rank have gaps."""
    from transformers import AttentionInterface

    AttentionInterface.register("causal", attend_causally)
    model.set_attn_implementation("causal")


def divide(batch: dict[str, Tensor], attention: str) -> contextlib.AbstractContextManager:
    """Leave a part of each sequence in the batch, and return the context of the step."""
    if attention == "ulysses":
        rank, ranks = dist.get_rank(), dist.get_world_size()
        batch |= {name: x.chunk(ranks, 1)[rank].contiguous() for name, x in batch.items()}
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import context_parallel

    mesh = dist.init_device_mesh(batch["input_ids"].device.type, (dist.get_world_size(),))
    return context_parallel(
        mesh, buffers=[*batch.values()], buffer_seq_dims=[1] * len(batch), no_restore_buffers={*batch.values()}
    )


def main() -> None:
    parser = make_parser("Train with sequence parallelism.")
    parser.add_argument("--attention", choices=("ulysses", "ring"), default="ulysses")
    arguments = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    model = build_model(arguments.model, device).to(device).train()
    model.config.use_cache = False
    # All ranks compute the sequences of all ranks, and a part of the tokens each.
    sequences = ranks * arguments.batch
    if arguments.attention == "ulysses":
        use_ulysses(model, sequences)
    else:
        use_ring(model)
    report = tigon.patch(model, memory=arguments.memory)
    if rank == 0:
        print(report)
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if on_gpu else {}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)

    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, fused=True)
    rows = token_rows(arguments, model.config.vocab_size, ranks)
    positions = torch.arange(arguments.seq, device=device).repeat(sequences, 1)
    meter = Meter(device)
    for ids in rows.view(arguments.steps, sequences, arguments.seq):
        ids = ids.to(device)
        # The target of the last token of a part is on another rank, so the targets are shifted before.
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        # FSDP averages the gradients over the ranks, so each rank divides its sum by the mean number of targets.
        items = (targets != -100).sum() / ranks
        batch = {
            "input_ids": ids,
            "position_ids": positions.clone(),
            "labels": targets.clone(),
            "shift_labels": targets,
        }
        with divide(batch, arguments.attention):
            loss = model(**batch, num_items_in_batch=items).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(loss, ids.numel() // ranks)


if __name__ == "__main__":
    main()
    leave_group()
