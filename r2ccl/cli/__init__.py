"""The command ``r2ccl``: one module per subcommand, imported when the command line is parsed.

A subcommand's module has ``add_parser(subparsers)``, which sets ``run``, a callable that takes the
parsed arguments and returns the exit status. Nothing imports this package.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from r2ccl.errors import R2cclError

_COMMANDS = ("doctor", "launch", "netlab", "rdmalab")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        By default ``sys.argv[1:]``.
    """
    parser = argparse.ArgumentParser(
        prog="r2ccl", description="Collectives that survive the loss of network cards."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in _COMMANDS:
        importlib.import_module(f"r2ccl.cli.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except R2cclError as exc:
        print(f"r2ccl: {exc}", file=sys.stderr)
        return 2
    return status


__all__ = ["main"]
