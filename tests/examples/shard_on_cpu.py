"""Run a script with an accelerate that accepts its FSDP plugin on CPU ranks too, not only on accelerators.

accelerate launch ... shard_on_cpu.py SCRIPT [ARGUMENTS]
"""

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from rank import run_script
from torch.distributed.fsdp import FSDPModule

initialise, prepare = AcceleratorState.__init__, Accelerator.prepare


def initialise_with_sharding(self, *args, fsdp_plugin=None, **options) -> None:
    initialise(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        assert fsdp_plugin is not None, "the launcher has turned FSDP off"
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def prepare_and_check(self, *args, **options):
    results = prepare(self, *args, **options)
    model = results[0]
    assert isinstance(model, FSDPModule)
    assert all(isinstance(layer, FSDPModule) for layer in model.model.layers)
    return results


AcceleratorState.__init__, Accelerator.prepare = initialise_with_sharding, prepare_and_check
run_script()
