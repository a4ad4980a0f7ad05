"""Command ``r2ccl``: one module per subcommand, imported when the command line is parsed.

The module of a subcommand has a function ``add_parser(subparsers)``. It adds the subcommand's
parser, whose default ``run`` is a callable that takes the parsed arguments and returns the exit
status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from r2ccl.errors import R2cclError

_COMMANDS = ("doctor", "launch", "netlab", "rdmalab")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    The status is 2 if the subcommand raises an `R2cclError`; the message of the error is printed on
    standard error.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default ``sys.argv[1:]``.

    Raises
    ------
    SystemExit
        If the arguments are wrong (status 2), or ask for help (status 0).
    """
    args = make_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except R2cclError as exc:
        print(f"r2ccl: {exc}", file=sys.stderr)
        return 2
    return status


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``r2ccl``, with those of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="r2ccl", description="Collective communication that survives the loss of NICs."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in _COMMANDS:
        importlib.import_module(f"r2ccl.cli.{name}").add_parser(subparsers)
    return parser


__all__ = ["main", "make_parser"]
