"""A model of random weights, its config as JSON, and its shards under FSDP2."""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def config_fields(config: "PretrainedConfig") -> dict[str, Any]:
    """Return the fields of a config as JSON values."""
    return json.loads(json.dumps(config.to_dict()))


def read_config(fields: dict[str, Any]) -> "PretrainedConfig":
    """Return the config that has the fields."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def random_model(config: "PretrainedConfig", dtype: str, device: str | torch.device) -> "PreTrainedModel":
    """Return a model of random weights in training mode on `device`. Set the seed before the call.

    Attention is `sdpa`, or `eager` for a model type without `sdpa`.
    """
    from transformers import AutoModelForCausalLM

    build = lambda attention: AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    # Build on the device: a CPU needs half a minute to draw 1.2 billion random numbers.
    with torch.device(device):
        try:
            model = build("sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = build("eager")
    return model.to(device).train()


def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard `model` and `optimizer` over the ranks of this process's group, by FSDP2 of accelerate.

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
