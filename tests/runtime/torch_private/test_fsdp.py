"""The names of FSDP2 exist, and a torch that lacks one refuses by name."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch import nn

from tigon.runtime.torch_private import fsdp

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")

# FSDP2 changes what other tests of a process see, so the model is sharded in a process of its own.
SHARDED = """
import contextlib, tempfile
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tigon.runtime.torch_private import fsdp

dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
model[1].weight = model[0].weight
fully_shard([model[0], model[1]], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model[2], offload_policy=CPUOffloadPolicy(pin_memory=False))
shared, offloaded = fsdp.find_units(model)
parameters = [*fsdp.find_parameters(shared)]
assert [(module, name) for module, name, _ in parameters] == [(model[0], "weight"), (model[1], "weight")]
parameter = parameters[0][2]
assert fsdp.local_shard(parameter) is model[0].weight._local_tensor
assert fsdp.gathered_dtype(parameter) == torch.bfloat16
assert fsdp.why_not_extensible(shared, parameter) == "several modules share it"
(_, _, other), = fsdp.find_parameters(offloaded)
assert fsdp.gathered_dtype(other) == torch.float32
assert "CPUOffloadPolicy" in fsdp.why_not_extensible(offloaded, other)
fully_shard(model)
assert fsdp.find_units(model) == [shared, offloaded]

model = fully_shard(nn.Linear(4, 4, bias=False))
(unit,) = fsdp.find_units(model)
((_, _, parameter),) = fsdp.find_parameters(unit)
assert fsdp.why_not_extensible(unit, parameter) is None
x = torch.ones(2, 4)
y = model(x)
try:
    fsdp.renew(unit, parameter)
    raise AssertionError("a gathered parameter was renewed")
except RuntimeError as error:
    assert "weights are gathered at this moment" in str(error)
model.reshard()
shard = fsdp.local_shard(parameter)
shard.fsdp_pre_all_gather = lambda mesh, size, stride, module, policy: ((shard.double(),), None)
shard.fsdp_post_all_gather = lambda outputs, data, dtype, *, out=None: (2 * outputs[0].float(), ())
fsdp.renew(unit, parameter)
assert torch.equal(model(x), 2 * y)

# The functions are needed only inside of the context, whoever begins the all-gather.
model.reshard()
fsdp.renew(unit, parameter)
functions, log = dict(vars(shard)), []
vars(shard).clear()

@contextlib.contextmanager
def attached():
    vars(shard).update(functions)
    log.append("attached")
    yield
    vars(shard).clear()

earlier = unit.unshard
unit.unshard = lambda *args, **options: (log.append("earlier"), earlier(*args, **options))[1]
replacement = unit.unshard
end = fsdp.surround_gathers(unit, attached)
shard.fill_(1)
model.unshard(async_op=True).wait()
assert log == ["attached", "earlier", "attached"]
assert torch.equal(model.weight, torch.full((4, 4), 2.0)) and not vars(shard)
model.reshard()
end()
assert unit.unshard is replacement and "wait_for_unshard" not in vars(unit)

# A wrapper that is put around later stays, and has no effect of ours.
end, log[:] = fsdp.surround_gathers(unit, attached), []
ours = unit.unshard
unit.unshard = lambda *args, **options: (log.append("later"), ours(*args, **options))[1]
later = unit.unshard
end()
assert unit.unshard is later
fsdp.renew(unit, parameter)
assert torch.equal(model(x), torch.full((2, 4), 4.0))
assert log == ["later", "earlier"]
dist.destroy_process_group()
print("passed")
"""


def test_the_names_of_fsdp2_do_what_they_are_used_for():
    result = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True)
    assert result.stdout.strip() == "passed", result.stderr


def test_a_missing_name_is_refused_by_name(monkeypatch):
    class Sharded(nn.Linear):
        def _get_fsdp_state(self):
            return SimpleNamespace(_fsdp_param_group=SimpleNamespace(fsdp_params=[]))

    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=Sharded))
    with pytest.raises(RuntimeError, match=r"has no SimpleNamespace\.modules, which tigon\.gather_in_fp8 needs"):
        fsdp.find_units(nn.Sequential(Sharded(2, 2)))
    assert fsdp.find_units(nn.Linear(2, 2)) == []
