"""``r2ccl launch -n 4 train.py``: run a command as n ranks on this machine, or on several hosts.

Every rank gets torchrun's variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, and also R2CC_PORT and R2CC_SECRET. A MASTER_PORT that is set here is kept, unless this
launcher is itself a rank of a job. PYTHONUNBUFFERED is 1, unless it is set. The launcher prints the
ranks' standard output and standard error line by line on its own standard output.

The exit status is that of the first rank that failed; if a signal ended this rank, the status is
128 + the signal number; if a host was lost with its ranks, it is 1. If the launcher gets SIGINT or
SIGTERM before any failure, the status is 128 + the number of that signal. If the output cannot be
written, the launcher ends the ranks; unless a failure or a signal came first, the status is 141 if
the reader of the output has closed it, and 1 for any other reason. If none of this happens, the
status is 0.

After a failure the other ranks have some time to exit by themselves and are then terminated; with
``--keep-going`` they run on and can continue without the failed rank (``comm.shrink()``). SIGINT
and SIGTERM are forwarded to the ranks, which then have the same time to exit. A SIGINT or SIGTERM
during this time, also after a failure, kills the ranks.

`r2ccl.cli.launch_job` starts the ranks. On several hosts, an agent (`r2ccl.cli.agent`) on each host
starts the host's ranks. With ``--by-hand`` the launcher only prints the command that the user must
run on each host; the launchers of the hosts then do not communicate.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from r2ccl.bootstrap.launchers import DEFAULT_PORT
from r2ccl.cli.results import add_option
from r2ccl.cli.values import FAILURE_GRACE_S

_SSH = "ssh -o BatchMode=yes"
_EPILOG = """\
examples:
  r2ccl launch -n 4 train.py --epochs 3
  r2ccl launch --hosts a:4,b:4 train.py
  r2ccl launch --hosts a:4,b:4 --by-hand train.py
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``r2ccl launch`` to `parser`; `run` takes the parsed arguments."""
    parser.description = "Run a command as several ranks on this machine, or on several hosts."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "-n", "-np", "--nranks", type=int, help="number of ranks; with hosts, default: all slots"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="K[=V]",
        help="set a variable for every rank, by default to its value here",
    )  # fmt: skip
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="let the other ranks run on after a rank failed, for a job that shrinks; each failed "
        "rank is reported, and the exit status is that of the first. Default: the other ranks are "
        f"terminated after {FAILURE_GRACE_S:g} s",
    )
    parser.add_argument(
        "--tag",
        choices=("auto", "always", "never"),
        default="auto",
        help="prefix output lines with [rank]; auto: once a second rank has written; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--prefix", action="store_const", const="always", dest="tag", help="same as --tag always"
    )
    parser.add_argument(
        "--stdin", action="store_true", help="pass standard input to rank 0; default: /dev/null"
    )
    parser.add_argument("--chdir", metavar="DIR", help="working directory of the ranks")
    add_option(parser, "the exit statuses of all ranks")
    _add_hosts(parser.add_argument_group("several hosts"))
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...",
        help="run a Python module, as python -m does",
    )  # fmt: skip
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="[--] COMMAND ...",
        help="command; the file of a script ending in .py runs in this Python",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_hosts(group: Any) -> None:
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument("--hosts", metavar="A:4,B:4", help="hosts and their numbers of ranks")
    hosts.add_argument("--hostfile", metavar="FILE", help="file with lines like: a slots=4")
    group.add_argument(
        "--ssh", default=_SSH, metavar="COMMAND", help="command that logs in (default: %(default)s)"
    )
    group.add_argument(
        "--python", default=sys.executable, metavar="PATH",
        help="Python of the other hosts; default: the path of this one",
    )  # fmt: skip
    group.add_argument(
        "--master-addr", metavar="ADDR",
        help="name or address of rank 0's host; default: the first host as listed",
    )  # fmt: skip
    group.add_argument(
        "--port", type=int, metavar="N",
        help="TCP port of rank 0's rendezvous; default: a free one, or, with --by-hand or "
        f"--node-rank, {DEFAULT_PORT}",
    )  # fmt: skip
    ways = group.add_mutually_exclusive_group()
    ways.add_argument(
        "--by-hand", action="store_true", help="print a command to run on each host, and exit"
    )
    ways.add_argument(
        "--node-rank", type=int, metavar="K",
        help="start only the ranks of host K of the list, counted from 0; it must be this host",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the parsed command; return the exit status that the module docstring describes.

    Raises
    ------
    InvalidArgument
        If an argument is wrong, the command cannot be run, or the file of ``--json`` cannot be
        written.
    R2cclError
        If the agent of a host cannot be started, or ends during the start.
    """
    from r2ccl.cli import launch_job  # imports asyncio

    return launch_job.start(args)


__all__ = ["configure", "run"]
