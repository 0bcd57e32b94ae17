"""Further levels and distributed setups for `make test-thorough`; `make test` runs those of ways_lean.py."""

import functools

from hf.ways_lean import accumulated, checkpoint, lean_mlp, same, some_checkpointed
from hf.ways_parallel import by_layers, by_plan
from hf.ways_sharded import BF16, ddp, fsdp1, fsdp2

SETUPS = {
    "DDP with accumulation": accumulated,
    "FSDP2, norms of heads": same(fsdp2, model_type="qwen3"),
    "FSDP2, norm and head one unit": same(functools.partial(fsdp2, groups=("norm", "head"))),
    "FSDP2, patched after": same(fsdp2, patch_after=True),
    "FSDP2, checkpointing of one layer": same(some_checkpointed),
    "FSDP2, bf16 parameters": same(functools.partial(fsdp2, **BF16)),
    "FSDP1, original parameters": same(functools.partial(fsdp1, use_orig_params=True)),
    "FSDP1, flat parameters, patched after": same(functools.partial(fsdp1, use_orig_params=False), patch_after=True),
    "tensor parallel, DTensors between layers": same(
        functools.partial(by_layers, local=False), patch_after=True, one_batch=True
    ),
    "lean+mlp, DDP": lean_mlp(ddp),
    "lean+mlp, FSDP2, bf16 parameters": lean_mlp(functools.partial(fsdp2, **BF16)),
    "lean+mlp, FSDP1, original parameters": lean_mlp(functools.partial(fsdp1, use_orig_params=True)),
    "lean+mlp, FSDP1, flat parameters": lean_mlp(functools.partial(fsdp1, use_orig_params=False)),
    "lean+mlp, tensor parallel": lean_mlp(by_plan, patch_after=True, one_batch=True, model_type="llama"),
    "checkpoint, DDP": checkpoint(ddp),
    "checkpoint, FSDP2, bf16 parameters": checkpoint(functools.partial(fsdp2, **BF16)),
}
