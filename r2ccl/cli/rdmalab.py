"""``r2ccl rdmalab``: run a program on Soft-RoCE devices in a virtual machine.

The command makes a `MachineShape` and a `VirtualMachine` from its arguments and runs the program.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from r2ccl.cli.results import add_option, as_utf8, check_file, write_result
from r2ccl.cli.values import seconds
from r2ccl.errors import InvalidArgument
from r2ccl.testing.rdmalab import MachineShape, RdmaLabError, VirtualMachine, VmResult, prepare, run

#: Exit statuses, as in `r2ccl.cli.netlab`: from timeout(1) and sysexits.h.
_EXIT_TIMED_OUT = 124
_EXIT_USAGE = 2
_EXIT_UNAVAILABLE = 69
_EXIT_BROKEN = 70

_EPILOG = """\
The virtual machine uses the root file system of this machine, writable: files that the program
writes are kept. Missing packages are installed, if the user is root and apt-get exists.

example:
  r2ccl rdmalab --nodes 2 --nics 3 -- python -m pytest tests/rdma
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``r2ccl rdmalab`` to `parser`; `main` takes the parsed arguments."""
    parser.description = "Run a program on Soft-RoCE devices in a virtual machine."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    shape, machine = MachineShape(), VirtualMachine()
    add = parser.add_argument
    add("--nodes", type=int, default=shape.nodes, help="default: %(default)s")
    add("--nics", type=int, default=shape.nics,
        help="RDMA devices on each node; default: %(default)s")  # fmt: skip
    add("--cpus", type=int, default=machine.cpus,
        help="processors of the virtual machine; default: %(default)s")  # fmt: skip
    add("--memory", default=machine.memory,
        help="memory of the virtual machine; default: %(default)s")  # fmt: skip
    add("--kvm", action="store_true", help="use KVM instead of emulation")
    add("--timeout", type=seconds, default=900.0, metavar="SECONDS",
        help="then the virtual machine is ended; default: %(default)g")  # fmt: skip
    add("--report", type=Path, metavar="DIR", help="directory for results; created if missing")
    add_option(parser, "the exit status and the times of the run")
    add("--prepare", action="store_true", help="only install missing packages, then exit")
    add("command", nargs=argparse.REMAINDER, help="-- program and its arguments")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run the parsed command; return the exit status for the shell.

    The status is that of the program, 124 if the timeout passes while the program runs, 2 for a
    wrong command line or if the file of ``--json`` cannot be written, 69 if a requirement is
    missing and cannot be installed, and 70 if the virtual machine could not be started, was not
    ready in time, or failed. With ``--prepare`` it is 0 once all requirements are installed.

    Raises
    ------
    InvalidArgument
        If the results cannot be written to the file of ``--json`` after the run.
    """
    try:
        command = _command(args)
        shape = MachineShape(nodes=args.nodes, nics=args.nics)
        machine = VirtualMachine(cpus=args.cpus, memory=args.memory, is_kvm=args.kvm)
        if args.json is not None:
            check_file(args.json)
    except InvalidArgument as exc:
        return _refuse(exc, _EXIT_USAGE)
    try:
        prepare(_say)
    except RdmaLabError as exc:
        return _refuse(exc, _EXIT_UNAVAILABLE)
    if args.prepare:
        _say("all packages that a lab needs are installed")
        return 0
    try:
        result = run(
            command, shape=shape, machine=machine, timeout_s=args.timeout, report=args.report
        )
    except InvalidArgument as exc:
        return _refuse(exc, _EXIT_USAGE)
    except RdmaLabError as exc:
        return _refuse(exc, _EXIT_BROKEN)
    if args.json is not None:
        write_result(
            args.json, command=list(map(as_utf8, command)), nodes=shape.nodes, nics=shape.nics,
            **msgspec.structs.asdict(result),
        )  # fmt: skip
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
        _say(f"terminated after the timeout of {timeout_s:.0f} s")
        return _EXIT_TIMED_OUT
    _say(f"exit status {result.status} after {result.total_s:.0f} s")
    return result.status


def _say(line: str) -> None:
    print(f"[rdmalab] {line}", file=sys.stderr, flush=True)


__all__ = ["configure", "main"]
