"""Run a script that imports `liger_kernel` on Tigon: `python -m tigon.as_liger SCRIPT ...`.

It also works below a launcher: `torchrun --nproc-per-node 4 -m tigon.as_liger SCRIPT ...`.
"""

import runpy
import sys
from pathlib import Path

from tigon.integrations.liger import install_as_liger_kernel


def main() -> None:
    """Install the alias and run the script of `sys.argv`. Exit with code 2 without a script or an alias."""
    if len(sys.argv) < 2:
        print("usage: python -m tigon.as_liger SCRIPT ...", file=sys.stderr)
        raise SystemExit(2)
    try:
        install_as_liger_kernel()
    except RuntimeError as error:
        print(f"tigon.as_liger: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    del sys.argv[0]
    # Python puts the folder of a script first, so that the script can import the files beside it.
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
