"""``python -m r2ccl``: the command line."""

import sys

from r2ccl.cli import main

if __name__ == "__main__":
    sys.exit(main())
