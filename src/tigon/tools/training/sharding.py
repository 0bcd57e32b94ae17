"""FSDP2 by accelerate: a share of parameters, gradients and optimizer states on each rank."""

import torch
from torch import nn

__all__ = ["shard"]


def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard `model` and `optimizer` over the ranks of the group that launched this process.

    Each layer is a unit that lets go of its parameters after its forward pass; parameters, their gradients and what is
    sent keep the model's own dtype.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    on_cpu = next(model.parameters()).device.type == "cpu"
    # Mixed precision would keep the weights in fp32.
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, mixed_precision="no")
    if on_cpu:
        # Accelerate takes the plugin for accelerators alone; FSDP2 itself works over gloo all the same.
        from accelerate.utils import DistributedType

        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator.prepare(model, optimizer)
