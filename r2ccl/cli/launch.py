"""``r2ccl launch -n 4 train.py``: run a command as n ranks on this machine, or on several hosts.

Every rank gets torchrun's environment variables plus R2CC_PORT and R2CC_SECRET. The launcher prints
the ranks' standard output and standard error line by line on its own standard output.

The exit status is that of the first rank that failed; if a signal ended this rank, the status is
128 + the signal number; if a host was lost with its ranks, it is 1. If the launcher gets SIGINT or
SIGTERM before any failure, the status is 128 + the number of that signal. Otherwise it is 0.

After a failure the other ranks have some time to exit by themselves and are then terminated; with
``--keep-going`` they run on and can continue without the failed rank (``comm.shrink()``). SIGINT
and SIGTERM are forwarded to the ranks, which then have the same time to exit. A SIGINT or SIGTERM
that arrives while ranks have this time, also after a failure, kills them.

On several hosts, an agent (`r2ccl.cli.agent`) starts the ranks of each host. With ``--by-hand`` the
command prints what the user runs on each host instead; the launchers of the hosts then know nothing
of each other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from r2ccl.bootstrap.auth import Secret
from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.launch import JobShare, LocalJob
from r2ccl.bootstrap.launchers import DEFAULT_PORT
from r2ccl.bootstrap.secretfile import read_secret_file
from r2ccl.cli import agent, remote
from r2ccl.cli.hosts import JobHost, parse_hosts, place, read_hostfile
from r2ccl.cli.lines import LinePrinter, wants_colour
from r2ccl.cli.rankprocs import HostRanks, JobCommand
from r2ccl.cli.supervisor import FAILURE_GRACE_S, Supervisor
from r2ccl.errors import InvalidArgument

_SSH = "ssh -o BatchMode=yes"
_SECRET_FILE = "~/.r2ccl-secret"

#: Settings that are passed on to other hosts: those of r2ccl and NCCL, except what differs between
#: jobs or hosts.
_PASSED_ON = ("R2CC_", "NCCL_")
_NOT_PASSED_ON = (
    "R2CC_SECRET", "R2CC_SECRET_FILE", "R2CC_PORT", "R2CC_CONTROL_ADDRESS", LISTEN_FD_VARIABLE,
)  # fmt: skip

_EPILOG = """\
examples:
  r2ccl launch -n 4 train.py --epochs 3
  r2ccl launch --hosts a:4,b:4 train.py
  r2ccl launch --hosts a:4,b:4 --by-hand train.py
"""
_HINT = "r2ccl launch -n 4 -- python script.py"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``r2ccl launch`` to its parser; the parsed ones go to `run`."""
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
        help="prefix output lines with [rank]; auto: once a second rank has written",
    )
    parser.add_argument(
        "--prefix", action="store_const", const="always", dest="tag", help="same as --tag always"
    )
    parser.add_argument(
        "--stdin", action="store_true", help="pass standard input to rank 0; default: /dev/null"
    )
    parser.add_argument("--chdir", metavar="DIR", help="working directory of the ranks")
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
        help="TCP port of rank 0's rendezvous; default: a free one, or, with --by-hand, "
        f"{DEFAULT_PORT}",
    )  # fmt: skip
    ways = group.add_mutually_exclusive_group()
    ways.add_argument(
        "--by-hand", action="store_true", help="print a command to run on each host, and exit"
    )
    ways.add_argument(
        "--node-rank", type=int, metavar="K",
        help="start only the ranks of the host at place K of the list, which must be this one",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the parsed command; return the exit status, as the module's docstring describes it.

    Raises
    ------
    InvalidArgument
        If an argument is wrong, or the command cannot be run.
    R2cclError
        If the agent of a host cannot be started.
    """
    if args.agent:
        return agent.serve()
    program = _program(args)
    hosts = _hosts(args)
    if hosts is None:
        return asyncio.run(_run_here(args, program))
    placed = place(hosts, args.nranks)
    if args.by_hand:
        print(_by_hand(args, placed, program))
        return 0
    if args.node_rank is not None:
        return asyncio.run(_run_share(args, placed, program))
    return asyncio.run(_run_on_hosts(args, placed, program))


def _program(args: argparse.Namespace) -> JobCommand:
    is_module = args.module is not None
    words = [*(args.module or []), *args.command]
    if not is_module and words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise InvalidArgument(f"no command given: {_HINT}")
    env = dict(_parse_assignment(text) for text in args.env)
    folder = os.path.abspath(os.path.expanduser(args.chdir)) if args.chdir else os.getcwd()
    return JobCommand(tuple(words), is_module, env, folder, args.stdin)


def _parse_assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not name or (not sign and name not in os.environ):
        raise InvalidArgument(
            f"--env {text!r}: allowed is NAME=VALUE, or the NAME of a variable that is set here"
        )
    return name, value if sign else os.environ[name]


def _hosts(args: argparse.Namespace) -> list[JobHost] | None:
    """Return the hosts that the arguments name; None if they name none."""
    if args.port is not None and not 0 < args.port < 65536:
        raise InvalidArgument(f"--port {args.port}: allowed is 1 to 65535")
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is not None:
        return read_hostfile(args.hostfile)
    for name in ("master_addr", "port", "node_rank"):
        if getattr(args, name) is not None:
            raise InvalidArgument(f"--{name.replace('_', '-')} needs --hosts or --hostfile")
    if args.by_hand:
        raise InvalidArgument("--by-hand needs --hosts or --hostfile")
    if args.nranks is None:
        raise InvalidArgument(f"no number of ranks given: {_HINT}")
    return None


def _supervisor(args: argparse.Namespace, *, has_stdin: bool) -> Supervisor:
    out = sys.stdout.buffer
    printer = LinePrinter(args.tag, out, is_coloured=wants_colour(out, os.environ))
    return Supervisor(printer, keeps_going=args.keep_going, has_stdin=has_stdin)


async def _run_here(args: argparse.Namespace, program: JobCommand) -> int:
    supervisor = _supervisor(args, has_stdin=args.stdin)
    with LocalJob(args.nranks) as job:
        ranks = HostRanks(job.share, program, supervisor)

        async def start() -> None:
            await ranks.start(job.listener)
            job.close()

        return await supervisor.run([ranks], start)


async def _run_on_hosts(
    args: argparse.Namespace, placed: Sequence[tuple[JobHost, int, int]], program: JobCommand
) -> int:
    address = _master_address(args, placed)
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and name not in _NOT_PASSED_ON
    }
    ssh = _words_of(args.ssh)
    supervisor = _supervisor(args, has_stdin=args.stdin)
    groups = [remote.RemoteRanks(*each, supervisor) for each in placed]

    async def start() -> None:
        await remote.start(
            groups,
            msgspec.structs.replace(program, env={**settings, **program.env}),
            ssh=ssh,
            python=args.python,
            address=address,
            port=args.port or 0,
        )

    return await supervisor.run(groups, start)


def _words_of(ssh: str) -> list[str]:
    """Return the words of the command that logs in."""
    with contextlib.suppress(ValueError):  # a quote that is not closed
        if words := shlex.split(ssh):
            return words
    raise InvalidArgument(f"--ssh {ssh!r}: a command is needed, as in --ssh 'ssh -p 2222'")


def _master_address(args: argparse.Namespace, placed: Sequence[tuple[JobHost, int, int]]) -> str:
    """Return the name or address of rank 0's host for the other hosts."""
    if args.master_addr:
        return str(args.master_addr)
    address = placed[0][0].address
    if len(placed) > 1 and address in ("localhost", "127.0.0.1", "::1"):
        raise InvalidArgument(
            f"the first host is {address}, which the other hosts cannot reach: list it by its "
            "name, or give its address with --master-addr"
        )
    return address


# -- by hand --------------------------------------------------------------------------------


def _by_hand(
    args: argparse.Namespace, placed: Sequence[tuple[JobHost, int, int]], program: JobCommand
) -> str:
    """Return the commands that the user runs on each host, with comments."""
    address = _master_address(args, placed)
    given = os.environ.get("R2CC_SECRET_FILE")
    file = _SECRET_FILE if given is None else shlex.quote(os.path.abspath(given))
    names = [host.name for host, _, _ in placed]
    listed = ",".join(host.listed(count) for host, _, count in placed)
    port = str(args.port or DEFAULT_PORT)
    options = ["--hosts", listed, "--master-addr", address, "--port", port]
    for name, value in program.env.items():
        options += ["--env", f"{name}={value}"]
    options += ["--keep-going"] * args.keep_going
    options += ["--tag", args.tag] if args.tag != "auto" else []
    command = ["-m", *program.words] if program.is_module else ["--", *program.words]
    lines = [
        f"# {file} must hold the same secret on every host. To make it, and to copy it:",
        f"#   (umask 077; openssl rand -hex 32 > {file})",
        *(f"#   scp -p {file} {name}:{file}" for name in names[1:]),
    ]
    for place_, name in enumerate(names):
        stdin = ["--stdin"] * (args.stdin and place_ == 0)
        words = ["r2ccl", "launch", *options, "--node-rank", str(place_), *stdin, *command]
        lines += [
            f"# on {name}:",
            f"cd {shlex.quote(program.folder)} && R2CC_SECRET_FILE={file} {shlex.join(words)}",
        ]
    return "\n".join(lines)


async def _run_share(
    args: argparse.Namespace, placed: Sequence[tuple[JobHost, int, int]], program: JobCommand
) -> int:
    """Run the ranks of the host at place ``--node-rank``, as one of several launchers of a job."""
    if not 0 <= args.node_rank < len(placed):
        raise InvalidArgument(
            f"--node-rank {args.node_rank} of {len(placed)} hosts with ranks; allowed is 0 to "
            f"{len(placed) - 1}"
        )
    _, first, count = placed[args.node_rank]
    nranks = sum(n for _, _, n in placed)
    address, port = _master_address(args, placed), args.port or DEFAULT_PORT
    share = JobShare(nranks, first, count, address, port, _shared_secret(len(placed)))
    supervisor = _supervisor(args, has_stdin=args.stdin and first == 0)
    ranks = HostRanks(share, program, supervisor)
    with contextlib.ExitStack() as stack:
        listener: socket.socket | None = None
        if first == 0:
            listener = stack.enter_context(agent.listen_everywhere(_own_address(address), port))

        async def start() -> None:
            await ranks.start(listener)
            stack.close()

        return await supervisor.run([ranks], start)


def _shared_secret(nhosts: int) -> str:
    """Return the secret in R2CC_SECRET or R2CC_SECRET_FILE; a new one for a single host."""
    if text := os.environ.get("R2CC_SECRET"):
        return Secret.from_hex(text).hex()
    if path := os.environ.get("R2CC_SECRET_FILE"):
        return read_secret_file(path).hex()
    if nhosts == 1:
        return secrets.token_hex()
    raise InvalidArgument(
        "--node-rank: no secret is set: set R2CC_SECRET_FILE to the path of a file with the same "
        "secret on every host; --by-hand prints how to make it"
    )


def _own_address(name: str) -> str:
    """Return the numeric address of this host, rank 0's, by its name; it must not be loopback."""
    try:
        found = str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as exc:
        raise InvalidArgument(
            f"{name!r}, the host of rank 0, cannot be resolved here ({exc}): give its "
            "address with --master-addr on every host"
        ) from exc
    if found.startswith("127.") and found != name:
        raise InvalidArgument(
            f"{name!r}, the host of rank 0, is {found} here, which the other hosts cannot reach: "
            "give its address with --master-addr on every host"
        )
    return found


__all__ = ["configure", "run"]
