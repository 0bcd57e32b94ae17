"""FSDP2 by accelerate: each rank holds a shard of parameters, gradients and optimizer states."""

import torch
from torch import nn

__all__ = ["shard"]


def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard `model` and `optimizer` over the ranks of this process's group.

    Each layer is a unit that frees its gathered parameters after its forward pass. Parameters, gradients and messages
    between ranks have the dtype of the model.
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
    # Mixed precision would hold the weights in fp32.
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, mixed_precision="no")
    if on_cpu:
        # Accelerate accepts the plugin on accelerators alone, but FSDP2 works over gloo too.
        from accelerate.utils import DistributedType

        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator.prepare(model, optimizer)
