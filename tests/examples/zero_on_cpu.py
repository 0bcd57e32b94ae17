"""Run a script with a DeepSpeed that does not compile its communication operator for CPU ranks.

torchrun ... zero_on_cpu.py SCRIPT [ARGUMENTS]
"""

import deepspeed
from rank import run_script

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
run_script()
