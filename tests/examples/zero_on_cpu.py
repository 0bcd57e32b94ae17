"""Run a script where DeepSpeed does not compile its communication of CPU ranks.

torchrun ... zero_on_cpu.py SCRIPT [ARGUMENTS]
"""

import runpy
import sys
from pathlib import Path

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
