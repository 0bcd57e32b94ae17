"""`python -m tigon.tools.bench`: the same as `tigon bench`."""

import sys

from tigon.tools.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
