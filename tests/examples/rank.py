"""Run a script as a rank of torchrun, and check that it leaves its process group.

torchrun ... rank.py SCRIPT [ARGUMENTS]
"""

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from ranks import leave


def run_script() -> None:
    """Run the script in the rest of the command, then end the process at once, without torch's exit handlers."""
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert not dist.is_initialized(), "the script has not left its process group"
    leave()


if __name__ == "__main__":
    run_script()
