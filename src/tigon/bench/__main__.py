"""`python -m tigon.bench`: the same as `tigon bench`."""

import sys

try:
    import typer
except ModuleNotFoundError:
    sys.exit("tigon bench needs typer: pip install 'tigon[bench]'")

from tigon.bench.command import bench

if __name__ == "__main__":
    typer.run(bench)
