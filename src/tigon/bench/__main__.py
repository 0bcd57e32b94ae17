"""`python -m tigon.bench`: the same as `tigon bench`."""

import sys

from tigon.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
