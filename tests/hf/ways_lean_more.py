"""Further levels and distributed setups for `make test-thorough`; `make test` runs those of ways_lean.py."""

import functools

from hf.ways_lean import accumulated, checkpoint, checkpoint_one_layer, lean_mlp, make_setup
from hf.ways_parallel import by_layers, by_plan
from hf.ways_sharded import BF16, ddp, fsdp1, fsdp2

SETUPS = {
    "DDP with accumulation": accumulated,
    "FSDP2, norms of heads": make_setup(fsdp2, model_type="qwen3"),
    "FSDP2, norm and head one unit": make_setup(functools.partial(fsdp2, groups=("norm", "head"))),
    "FSDP2, patched after": make_setup(fsdp2, patch_after=True),
    "FSDP2, checkpointing of one layer": make_setup(checkpoint_one_layer),
    "FSDP2, bf16 parameters": make_setup(functools.partial(fsdp2, **BF16)),
    "FSDP1, original parameters": make_setup(functools.partial(fsdp1, use_orig_params=True)),
    "FSDP1, flat parameters, patched after": make_setup(
        functools.partial(fsdp1, use_orig_params=False), patch_after=True
    ),
    "tensor parallel, DTensors between layers": make_setup(
        functools.partial(by_layers, local=False), patch_after=True, one_batch=True
    ),
    "lean+mlp, DDP": lean_mlp(ddp),
    "lean+mlp, FSDP2, bf16 parameters": lean_mlp(functools.partial(fsdp2, **BF16)),
    "lean+mlp, FSDP1, original parameters": lean_mlp(functools.partial(fsdp1, use_orig_params=True)),
    "lean+mlp, FSDP1, flat parameters": lean_mlp(functools.partial(fsdp1, use_orig_params=False)),
    "lean+mlp, tensor parallel": lean_mlp(by_plan, patch_after=True, one_batch=True, model_type="llama"),
    "checkpoint, DDP": checkpoint(ddp),
    "checkpoint, FSDP2, bf16 parameters": checkpoint(functools.partial(fsdp2, **BF16)),
    "checkpoint+attention, FSDP1": make_setup(
        functools.partial(fsdp1, use_orig_params=False), level="checkpoint+attention", model_type="llama"
    ),
    "checkpoint+attention, tensor parallel": make_setup(
        by_plan, patch_after=True, one_batch=True, level="checkpoint+attention", model_type="llama"
    ),
}
