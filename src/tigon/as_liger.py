"""Run a script that imports `liger_kernel` on Tigon: `python -m tigon.as_liger SCRIPT ...`.

It also works below a launcher: `torchrun --nproc-per-node 4 -m tigon.as_liger SCRIPT ...`.
"""

import runpy
import sys

from tigon.integrations.liger import install_as_liger_kernel


def main() -> None:
    """Install the alias and run the script of `sys.argv`. Exit with code 2 if there is none."""
    if len(sys.argv) < 2:
        print("usage: python -m tigon.as_liger SCRIPT ...", file=sys.stderr)
        raise SystemExit(2)
    install_as_liger_kernel()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
