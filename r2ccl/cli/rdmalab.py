"""``r2ccl rdmalab``: run a program on Soft-RoCE devices in a virtual machine.

Turns a command line into a `MachineShape`, a `VirtualMachine` and a run; adds nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from r2ccl.errors import InvalidArgument
from r2ccl.testing.rdmalab import MachineShape, RdmaLabError, VirtualMachine, VmResult, prepare, run

#: As netlab's; from timeout(1) and sysexits.h.
_EXIT_TIMED_OUT = 124
_EXIT_USAGE = 2
_EXIT_UNAVAILABLE = 69
_EXIT_BROKEN = 70

_EPILOG = """\
The root file system in the machine is this one's, writable; what the program writes is kept.
Missing packages are installed, where this is root and there is apt-get.

example:
  r2ccl rdmalab --nodes 2 --nics 3 -- python -m pytest tests/rdma
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``rdmalab`` command to those of ``r2ccl``; its namespace goes to `main`."""
    parser = subparsers.add_parser(
        "rdmalab",
        help="run a program on real ibverbs: Soft-RoCE in a virtual machine",
        description="Run a program on Soft-RoCE devices in a virtual machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shape, machine = MachineShape(), VirtualMachine()
    parser.add_argument("--nodes", type=int, default=shape.nodes)
    parser.add_argument("--nics", type=int, default=shape.nics, help="RDMA devices on each node")
    parser.add_argument("--cpus", type=int, default=machine.cpus)
    parser.add_argument("--memory", default=machine.memory, help="default %(default)s")
    parser.add_argument("--kvm", action="store_true", help="use KVM instead of emulation")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument("--report", type=Path, metavar="DIR", help="where results go; it is made")
    parser.add_argument(
        "--prepare", action="store_true", help="install what is missing, and do nothing else"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- program and its arguments")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run the parsed command; return the exit status for the shell.

    The program's own status, 124 where the time was up, 2 for a wrong command line, 69 where this
    machine cannot run a lab, 70 where the lab broke.
    """
    try:
        command = _command(args)
        shape = MachineShape(nodes=args.nodes, nics=args.nics)
        machine = VirtualMachine(cpus=args.cpus, memory=args.memory, is_kvm=args.kvm)
    except InvalidArgument as exc:
        return _refuse(exc, _EXIT_USAGE)
    try:
        prepare(_say)
    except RdmaLabError as exc:
        return _refuse(exc, _EXIT_UNAVAILABLE)
    if args.prepare:
        _say("everything a lab needs is here")
        return 0
    try:
        result = run(
            command, shape=shape, machine=machine, timeout_s=args.timeout, report=args.report
        )
    except RdmaLabError as exc:
        return _refuse(exc, _EXIT_BROKEN)
    return _tell(result, args.timeout)


def _command(args: argparse.Namespace) -> list[str]:
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command and not args.prepare:
        raise InvalidArgument("no program given; write it after --, e.g. -- python script.py")
    return command


def _refuse(error: Exception, status: int) -> int:
    print(f"r2ccl rdmalab: {error}", file=sys.stderr)
    return status


def _tell(result: VmResult, timeout_s: float) -> int:
    if result.is_timed_out:
        _say(f"ended, the {timeout_s:.0f} s were up")
        return _EXIT_TIMED_OUT
    _say(f"exit status {result.status} after {result.total_s:.0f} s")
    return result.status


def _say(line: str) -> None:
    print(f"[rdmalab] {line}", file=sys.stderr, flush=True)


__all__ = ["add_parser", "main"]
