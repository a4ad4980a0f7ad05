"""Job of ``r2ccl launch``: starts ranks on this machine or on several hosts, and waits for them.

`r2ccl.cli.launch` defines the arguments and describes the exit status.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r2ccl.bootstrap.auth import Secret
from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.launch import JobShare, LocalJob
from r2ccl.bootstrap.launchers import DEFAULT_PORT
from r2ccl.bootstrap.logs import TERMINAL_VARIABLE
from r2ccl.bootstrap.master_port import master_port, reserve_port
from r2ccl.bootstrap.secretfile import read_secret_file
from r2ccl.cli import agent, remote
from r2ccl.cli.hosts import JobHost, parse_hosts, place, read_hostfile
from r2ccl.cli.lines import LinePrinter, wants_colour
from r2ccl.cli.rankprocs import HostRanks, JobCommand
from r2ccl.cli.results import RankEnd, as_utf8, check_file, write_result
from r2ccl.cli.supervisor import RankGroup, Supervisor
from r2ccl.clock import monotonic
from r2ccl.errors import InvalidArgument

_SECRET_FILE = "~/.r2ccl-secret"

#: Settings that are passed on to other hosts: those of r2ccl and NCCL, except those that differ
#: between jobs or hosts.
_PASSED_ON = ("R2CC_", "NCCL_")
_NOT_PASSED_ON = (
    "R2CC_SECRET", "R2CC_SECRET_FILE", "R2CC_PORT", "R2CC_CONTROL_ADDRESS", LISTEN_FD_VARIABLE,
)  # fmt: skip

_HINT = "r2ccl launch -n 4 -- python script.py"


def start(args: argparse.Namespace) -> int:
    """Run the parsed command; for the result and the errors see `r2ccl.cli.launch.run`."""
    if args.agent:
        return agent.serve()
    program = _program(args)
    hosts = _hosts(args)
    if args.json is not None:
        check_file(args.json)
    if hosts is None:
        return asyncio.run(_run_here(args, program))
    placed = place(hosts, args.nranks)
    if args.by_hand:
        # Bytes, because the words of a command need not be text that standard output can encode.
        sys.stdout.buffer.write(os.fsencode(_by_hand(args, placed, program)) + b"\n")
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
    if not args.by_hand:
        # Set even if empty, because this launcher may itself run under another one.
        env = {TERMINAL_VARIABLE: "1" if sys.stdout.isatty() else "", **env}
    try:
        folder = os.path.abspath(os.path.expanduser(args.chdir or ""))
    except FileNotFoundError as exc:  # of os.getcwd
        raise InvalidArgument(
            "the working directory was removed: change to another one, or name one with --chdir"
        ) from exc
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
        raise InvalidArgument(f"no number of ranks given; options go before the command: {_HINT}")
    return None


def _supervisor(args: argparse.Namespace, *, has_stdin: bool) -> Supervisor:
    out = sys.stdout.buffer
    printer = LinePrinter(args.tag, out, is_coloured=wants_colour(out, os.environ))
    return Supervisor(printer, keeps_going=args.keep_going, has_stdin=has_stdin)


async def _supervise(
    args: argparse.Namespace,
    supervisor: Supervisor,
    groups: Sequence[RankGroup],
    start: Callable[[], Coroutine[Any, Any, None]],
    hosts: Mapping[int, str],
) -> int:
    """Run the job and write the file of ``--json``; return the exit status.

    `hosts` has the name of each rank's host. For the other arguments see `Supervisor.run`.
    """
    begun_s = monotonic()
    status = await supervisor.run(groups, start)
    if args.json is not None:
        ended = supervisor.statuses
        write_result(
            args.json,
            command=list(map(as_utf8, sys.argv[1:])),
            status=status,
            seconds=monotonic() - begun_s,
            failure=supervisor.failure,
            ranks=[
                RankEnd(rank=rank, host=host, status=ended.get(rank))
                for rank, host in hosts.items()
            ],
        )
    return status


def _here(share: JobShare) -> dict[int, str]:
    """Return the name of this host for each rank of `share`."""
    return dict.fromkeys(range(share.first, share.first + share.count), socket.gethostname())


def _with_master_port(program: JobCommand, port: int) -> JobCommand:
    """Return `program` with the MASTER_PORT of `master_port`, unless ``--env`` sets another."""
    return msgspec.structs.replace(program, env={**master_port(port, os.environ), **program.env})


async def _run_here(args: argparse.Namespace, program: JobCommand) -> int:
    supervisor = _supervisor(args, has_stdin=args.stdin)
    with LocalJob(args.nranks) as job, reserve_port() as held:
        program = _with_master_port(program, held.getsockname()[1])
        ranks = HostRanks(job.share, program, supervisor)

        async def start() -> None:
            await ranks.start(job.listener)
            job.close()

        return await _supervise(args, supervisor, [ranks], start, _here(job.share))


async def _run_on_hosts(
    args: argparse.Namespace, placed: Sequence[tuple[JobHost, int, int]], program: JobCommand
) -> int:
    address = _master_address(args, placed)
    program = _with_master_port(program, (args.port or DEFAULT_PORT) - 1)
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

    hosts = {first + k: host.name for host, first, count in placed for k in range(count)}
    return await _supervise(args, supervisor, groups, start, hosts)


def _words_of(ssh: str) -> list[str]:
    """Split `ssh`, the command of the option ``--ssh``, into words."""
    with contextlib.suppress(ValueError):  # a quote that is not closed
        if words := shlex.split(ssh):
            return words
    raise InvalidArgument(f"--ssh {ssh!r}: a command is needed, as in --ssh 'ssh -p 2222'")


def _master_address(args: argparse.Namespace, placed: Sequence[tuple[JobHost, int, int]]) -> str:
    """Return the name or address by which the other hosts reach rank 0's host."""
    if args.master_addr:
        if as_utf8(args.master_addr) != args.master_addr:
            raise InvalidArgument(f"--master-addr {args.master_addr!r}: allowed is text in UTF-8")
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
        if name != "R2CC_SECRET":  # would be on command lines; ranks get that of the file
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
        json = _json_option(args.json, place_, len(names))
        words = ["r2ccl", "launch", *options, *json, "--node-rank", str(place_), *stdin, *command]
        lines += [
            f"# on {name}:",
            f"cd {shlex.quote(program.folder)} && R2CC_SECRET_FILE={file} {shlex.join(words)}",
        ]
    return "\n".join(lines)


def _json_option(path: Path | None, place_: int, nhosts: int) -> list[str]:
    """Return the option ``--json`` for the host at index `place_` of the list.

    Each host gets its own file name, because the hosts may share the folder.
    """
    if path is None:
        return []
    return ["--json", str(path if nhosts == 1 else path.with_stem(f"{path.stem}-{place_}"))]


async def _run_share(
    args: argparse.Namespace, placed: Sequence[tuple[JobHost, int, int]], program: JobCommand
) -> int:
    """Run the ranks of the host at index ``--node-rank``, as one of several launchers of a job."""
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
    ranks = HostRanks(share, _with_master_port(program, port - 1), supervisor)
    with contextlib.ExitStack() as stack:
        listener: socket.socket | None = None
        if first == 0:
            host = _own_address(address, is_alone=len(placed) == 1)
            listener = stack.enter_context(agent.listen_everywhere(host, port))

        async def start() -> None:
            await ranks.start(listener)
            stack.close()

        return await _supervise(args, supervisor, [ranks], start, _here(share))


def _shared_secret(nhosts: int) -> str:
    """Return the job's secret in hex: from R2CC_SECRET, else from the file R2CC_SECRET_FILE.

    If neither is set, return a new secret if the job has only one host.

    Raises
    ------
    InvalidArgument
        If no secret is set and the job has several hosts, or a given secret cannot be used.
    """
    if text := os.environ.get("R2CC_SECRET"):
        return Secret.from_hex(text, "R2CC_SECRET").hex()
    if path := os.environ.get("R2CC_SECRET_FILE"):
        return read_secret_file(path).hex()
    if nhosts == 1:
        return secrets.token_hex()
    raise InvalidArgument(
        "--node-rank: no secret is set: set R2CC_SECRET_FILE to the path of a file with the same "
        "secret on every host; --by-hand prints how to make it"
    )


def _own_address(name: str, *, is_alone: bool) -> str:
    """Return the numeric address of `name`, a name or address of this host, where rank 0 runs.

    Raises
    ------
    InvalidArgument
        If `name` cannot be resolved; or if it is a name with a loopback address, and the job has
        other hosts (`is_alone` is False). A loopback address given as `name` is accepted.
    """
    try:
        found = str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as exc:
        raise InvalidArgument(
            f"{name!r}, the host of rank 0, cannot be resolved here ({exc}): give its "
            "address with --master-addr on every host"
        ) from exc
    if ipaddress.ip_address(found).is_loopback and found != name and not is_alone:
        raise InvalidArgument(
            f"{name!r}, the host of rank 0, is {found} here, which the other hosts cannot reach: "
            "give its address with --master-addr on every host"
        )
    return found


__all__ = ["start"]
