"""Adapters in a data-parallel or sharded model, in which most parameters are frozen."""

from collections.abc import Callable

import peft
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf.ways import assert_same, batch, build, patch, step
from hf.ways_sharded import ddp


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def make_setup(distribute: Callable, trained_modules: list[str]) -> Callable[[int], None]:
    """Return a setup with adapters on every layer. The modules in `trained_modules` are trained as a whole."""

    def setup(rank: int) -> None:
        steps = []
        for patched in (True, False):
            model = build()
            if patched:
                patch(model)
            torch.manual_seed(0)
            options = {
                "r": 4,
                "target_modules": "all-linear",
                "modules_to_save": trained_modules,
                "init_lora_weights": False,
            }
            model = distribute(peft.get_peft_model(model, peft.LoraConfig(**options, task_type="CAUSAL_LM")))
            steps.append(step(model, patched, **batch(rank)))
        assert_same(*steps)

    return setup


SETUPS = {
    "DDP": make_setup(ddp, []),
    "DDP, a head that is trained": make_setup(ddp, ["lm_head"]),
    "FSDP2": make_setup(fsdp2, []),
    "FSDP2, a head that is trained": make_setup(fsdp2, ["lm_head"]),
}
