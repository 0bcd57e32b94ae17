"""Run a script where DeepSpeed does not compile its communication of CPU ranks.

torchrun ... zero_on_cpu.py SCRIPT [ARGUMENTS]
"""

import deepspeed
from rank import run_script

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
run_script()
