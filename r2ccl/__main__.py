"""Entry point of ``python -m r2ccl``: runs the command line of `r2ccl.cli`."""

import sys

from r2ccl.cli import main

if __name__ == "__main__":
    sys.exit(main())
