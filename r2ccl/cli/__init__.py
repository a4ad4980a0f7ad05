"""Command ``r2ccl``, with one module per subcommand.

A module is imported only if its subcommand is given, or a completion script is printed. It has a
function ``configure(parser)`` that adds the description and the arguments to the subcommand's
parser, and sets the parser's default ``run`` to a callable that takes the parsed arguments and
returns the exit status. NumPy and `r2ccl.runtime` are imported only when this callable runs, so
that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from r2ccl.cli.lines import discard_output, has_lost_reader, is_full
from r2ccl.config import VERSION
from r2ccl.errors import InvalidArgument, R2cclError, describe_os_error, is_exhaustion

#: Names of the subcommands, and their lines in ``r2ccl --help``.
COMMANDS = {
    "launch": "run a command as several ranks on this machine, or on several hosts",
    "doctor": "show the rails and GPUs of this machine, and what r2ccl can use",
    "explain": "compare the schedules of a collective on a cluster that need not exist",
    "bench": "measure collectives, with the flags and columns of nccl-tests",
    "demo": "lose a rail during an allreduce on this machine, and get the right sum",
    "netlab": "run a program on a cluster of network namespaces, with faults",
    "rdmalab": "run a program on real ibverbs: Soft-RoCE in a virtual machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    The status is 2 after an `R2cclError`; its message is printed on standard error. As in a shell,
    the status is 130 after Ctrl-C, and 141 if the reader of standard output, such as ``head``, has
    closed it. It is 1 if the output cannot be written because the disk is full, or a resource of
    the operating system, such as open files or memory, is exhausted.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default ``sys.argv[1:]``.

    Raises
    ------
    SystemExit
        If the arguments are wrong (status 2), or ask for help, the version or a completion script
        (status 0).
    Exception
        If the subcommand raises an error other than those above.
    """
    if sys.stdout is None:  # the shell has closed it, as `>&-` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            args = make_parser(words[:1]).parse_args(words)
            status: int = args.run(args)
        finally:
            sys.stdout.flush()
    except R2cclError as exc:
        print(f"r2ccl: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("r2ccl: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not has_lost_reader(sys.stdout):
            raise  # another pipe or socket is broken, not standard output
        discard_output()
        return 128 + signal.SIGPIPE
    except OSError as exc:
        if is_full(exc):
            discard_output()
            text = f"the output cannot be written: {exc.strerror}"
        elif is_exhaustion(exc.errno):
            text = f"a resource of the operating system is exhausted: {describe_os_error(exc)}"
        else:
            raise
        print(f"r2ccl: {text}", file=sys.stderr)
        return 1
    except MemoryError as exc:
        why = str(exc) or "memory"
        print(f"r2ccl: a resource of the operating system is exhausted: {why}", file=sys.stderr)
        return 1
    return status


def make_parser(complete: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of ``r2ccl``.

    Only the parsers of the subcommands in `complete` (by default all) get their arguments. The
    modules of the other subcommands are not imported.
    """
    parser = argparse.ArgumentParser(
        prog="r2ccl", description="Collective communication that survives the loss of NICs."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh"),
        help="print the completion script of a shell; needs pip install 'r2ccl[cli]'",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name in complete:
            importlib.import_module(f"r2ccl.cli.{name}").configure(subparser)
    return parser


class _PrintCompletion(argparse.Action):
    """Action that prints the completion script of the given shell, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, *more: Any) -> None:
        try:
            import shtab
        except ImportError as exc:
            raise InvalidArgument(
                f"--print-completion {shell}: shtab is not installed: pip install 'r2ccl[cli]'"
            ) from exc
        root = make_parser()
        [commands] = [each.choices for each in root._actions if isinstance(each.choices, dict)]
        for action in chain.from_iterable(each._actions for each in commands.values()):
            is_file = action.metavar in ("FILE", "PATH") or action.dest == "command"
            if is_file or action.metavar == "DIR":
                complete = shtab.FILE if is_file else shtab.DIRECTORY
                action.complete = complete
        print(shtab.complete(root, shell))
        parser.exit()


__all__ = ["COMMANDS", "main", "make_parser"]
