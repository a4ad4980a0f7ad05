"""``r2ccl netlab``: run a program on a cluster of network namespaces and inject faults.

The command makes a `Lab` and a `FaultPlan` from its arguments and runs the program. With
``--enter`` it only runs a command in an environment in which labs can be built.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from r2ccl.cli.results import add_option, as_utf8, check_file, write_result
from r2ccl.cli.values import seconds
from r2ccl.clock import monotonic
from r2ccl.errors import InvalidArgument
from r2ccl.testing.fault_plan import FaultPlan
from r2ccl.testing.faults import Action, Fault
from r2ccl.testing.netlab import Lab, LabError, LabShape, RankResult, clean, ensure_privileged
from r2ccl.testing.netlab.fabric import FABRICS

#: Exit statuses: timed out as in timeout(1), wrong command line, and two of sysexits.h: the input
#: (here, a fault) does not fit, and unavailable.
_EXIT_TIMED_OUT = 124
_EXIT_USAGE = 2
_EXIT_NOT_FIRED = 65
_EXIT_UNAVAILABLE = 69

_EPILOG = f"""\
faults, as ACTION:name=value,...:
  actions   {", ".join(Action)}
  target    node, rail (isolate: also peer, the other node; stop and kill: rank)
  trigger   at_s=SECONDS, or at_op=N[,at_step=M] (rank=R: the rank whose progress counts)
  others    duration_s, rate (slow), mean_s and seed (flap)

exit status:
  that of the failed rank with the lowest number, or 128 + the number of the signal that ended it;
  {_EXIT_TIMED_OUT} after a timeout; {_EXIT_NOT_FIRED} if no rank failed, but a fault did not fire;
  {_EXIT_USAGE} for a wrong command line; {_EXIT_UNAVAILABLE} if this machine cannot build a lab

example:
  r2ccl netlab --nodes 4 --rails 4 --rate 200mbit \\
      --fault nic_down:node=1,rail=2,at_op=3,at_step=5 -- python train.py
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``r2ccl netlab`` to `parser`; `main` takes the parsed arguments."""
    parser.description = "Run a program on every node of a cluster of network namespaces."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default = LabShape()
    add = parser.add_argument
    add("--nodes", type=int, default=default.nodes, help="default: %(default)s")
    add("--rails", type=int, default=default.rails, help="NICs per node; default: %(default)s")
    add("--rate", default=default.rate, help="rate of each NIC; default: %(default)s")
    add("--fabric", choices=FABRICS, default=default.fabric,
        help="NICs that reach each other: all, or those of a rail; default: %(default)s",
    )  # fmt: skip
    add("--mtu", type=int, default=default.mtu, help="bytes; default: %(default)s")
    add("--burst", default=default.burst, help="size of the tbf bucket; default: %(default)s")
    add("--latency", default=default.latency,
        help="longest delay in a NIC's queue; default: %(default)s")  # fmt: skip
    add("--buffer", default=default.buffer,
        help="longest delay in a switch port's queue; default: %(default)s")  # fmt: skip
    add("--ranks-per-node", type=int, default=default.ranks_per_node,
        help="processes per node; default: %(default)s")  # fmt: skip
    add("--fault", action="append", default=[], metavar="FAULT", help="repeatable")
    add("--plan", metavar="FILE", help="JSON list of faults")
    add("--timeout", type=seconds, default=600.0, metavar="SECONDS",
        help="then the ranks are terminated; default: %(default)g")  # fmt: skip
    add_option(parser, "the exit statuses of all ranks and the times of the faults")
    add(
        "--clean",
        action="store_true",
        help="remove the remains of labs whose processes are dead, and exit",
    )
    add(
        "--enter",
        action="store_true",
        help="do not build a lab, but run the command once, with the privileges to build labs: as "
        "root of a user namespace, unless this user can build them",
    )
    add("command", nargs=argparse.REMAINDER, help="-- program and its arguments")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run the parsed command; return the exit status for the shell.

    After a timeout, the status is 124. Otherwise, if a rank failed, it is that of the failed rank
    with the lowest number, or 128 + the signal number if a signal ended that rank. If no rank
    failed, it is 0, or 65 if a fault did not fire. The status is 2 for a wrong command line or if
    the file of ``--json`` cannot be written, and 69 if this machine cannot build or remove a lab,
    or a fault could not be applied or undone. With ``--clean`` it is 0 once the remains are
    removed. With ``--enter`` the command replaces this process.
    """
    try:
        if args.json is not None and (args.clean or args.enter):
            raise InvalidArgument("--json needs ranks: leave it out with --clean and --enter")
        if args.clean:
            removed = clean()
            print(f"removed {len(removed)} stale lab(s) {' '.join(removed)}".rstrip())
            return 0
        return _run(args)
    except InvalidArgument as exc:
        print(f"r2ccl netlab: {exc}", file=sys.stderr)
        return _EXIT_USAGE
    except LabError as exc:
        print(f"r2ccl netlab: {exc}", file=sys.stderr)
        return _EXIT_UNAVAILABLE


def _run(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise InvalidArgument("no program given; write it after --, e.g. -- python script.py")
    if args.enter:
        ensure_privileged()
        _become(command)
    shape = {name: getattr(args, name) for name in LabShape.__struct_fields__}
    plan = _plan(args)
    if args.json is not None:
        check_file(args.json)
    plan.check(nodes=args.nodes, rails=args.rails, ranks_per_node=LabShape(**shape).ranks_per_node)
    ensure_privileged()
    with Lab(**shape) as lab:
        start = monotonic()
        results = lab.run(command, plan=plan if plan.faults else None, timeout_s=args.timeout)
        ended_s = monotonic()
    for firing in plan.fired:
        print(
            f"[lab] {firing.time_s - start:8.3f} s  {firing.fault}  "
            f"(monotonic {firing.time_s:.6f}, took {1e3 * (firing.applied_s - firing.time_s):.2f}"
            " ms)",
            file=sys.stderr,
        )
    for fault in plan.pending():
        print(
            f"[lab] did not fire: {fault}: the run, or the collective of at_op, ended before its "
            "trigger; choose an earlier trigger, or let the program run longer",
            file=sys.stderr,
        )
    status = _status(results) or (_EXIT_NOT_FIRED if plan.pending() else 0)
    if args.json is not None:
        write_result(
            args.json,
            command=list(map(as_utf8, command)),
            status=status,
            seconds=ended_s - start,
            lab=shape,
            ranks=[
                {"rank": each.rank, "node": each.node, "status": each.returncode,
                 "is_timed_out": each.is_timed_out}
                for each in results
            ],
            faults=[
                {"fault": str(each.fault), "at_s": each.time_s - start,
                 "applied_s": each.applied_s - start}
                for each in plan.fired
            ],
            pending=[str(fault) for fault in plan.pending()],
        )  # fmt: skip
    return status


def _become(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        raise InvalidArgument(f"cannot run {command[0]!r}: {exc.strerror}") from exc
    except ValueError as exc:  # the name is empty
        raise InvalidArgument(f"cannot run {command[0]!r}: {exc}") from exc


def _plan(args: argparse.Namespace) -> FaultPlan:
    loaded = FaultPlan.load(args.plan).faults if args.plan else ()
    return FaultPlan([*loaded, *map(Fault.parse, args.fault)])


def _status(results: list[RankResult]) -> int:
    for result in results:
        if result.is_timed_out:
            print(f"[lab] rank {result.rank}: terminated after the timeout", file=sys.stderr)
    if any(result.is_timed_out for result in results):
        return _EXIT_TIMED_OUT
    failed = [result.returncode for result in results if result.returncode]
    if not failed:
        return 0
    return failed[0] if failed[0] > 0 else 128 - failed[0]


__all__ = ["configure", "main"]
