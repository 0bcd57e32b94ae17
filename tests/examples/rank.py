"""Run a script as a rank does, and see that it leaves its process group.

torchrun ... rank.py SCRIPT [ARGUMENTS]
"""

import runpy
import sys
from pathlib import Path

import torch.distributed as dist


def run_script() -> None:
    """Run what the rest of the command says."""
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert not dist.is_initialized(), "a thread of the group can abort the process when Python ends"


if __name__ == "__main__":
    run_script()
