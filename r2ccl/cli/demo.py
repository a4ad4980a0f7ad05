"""``r2ccl demo``: lose a rail during an allreduce on this machine, and get the right sum.

`r2ccl.cli.demo_rank` is the program of each rank. The rails are TCP connections over loopback
addresses, so that the demo needs no privileges and no other host.
"""

from __future__ import annotations

import argparse
from functools import partial

import msgspec

from r2ccl.cli.lines import launch_printing
from r2ccl.cli.results import add_option, check_file, write_result
from r2ccl.cli.values import parse_size
from r2ccl.errors import InvalidArgument

#: Longest time of the demo in seconds; with the default options it takes 2 to 10 s on 2 cores.
_TIMEOUT_S = 300.0
#: Settings that replace the user's. Ranks that share memory would not use the rails. `run` also
#: sets the numbers of rails and channels: for rails that share a wire, as on loopback, the default
#: is one channel.
_SETTINGS = {
    "R2CC_ALGO": "ring",
    "R2CC_HCA": "none",
    "R2CC_MODE": "auto",
    "R2CC_SHM": "0",
    "R2CC_SOCKET_IFNAME": "=lo",
}
#: Below this size, a call may be too short for a failure in mid-call.
_LEAST_NBYTES = 1 << 20
#: Number, from 0, of the slice before which rank 0 loses the rail; less in calls with few slices.
_STEP = 5


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``r2ccl demo`` to `parser`; `run` takes the parsed arguments."""
    parser.description = (
        "Run allreduces on ranks of this machine, connected by several rails over loopback, and "
        "cut a rail in the middle of one call. Every result is verified. The exit status is 1 if a "
        "result is wrong. The demo needs no privileges and no other machine."
    )
    add = parser.add_argument
    add("-n", "--nranks", type=int, default=4, help="default: %(default)s")
    add("--rails", type=int, default=4, help="rails per rank; default: %(default)s")
    add("--calls", type=int, default=8, help="number of allreduces; default: %(default)s")
    add(
        "--nbytes", type=parse_size, default="16M", metavar="SIZE",
        help="size of each; default: %(default)s",
    )  # fmt: skip
    add_option(parser, "the times of the calls and the repairs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; return 0 if every result is right, else 1.

    Raises
    ------
    InvalidArgument
        If there are fewer than 2 ranks, rails or calls, a call has less than 1 MiB, or the file of
        ``--json`` cannot be written.
    Exception
        If a rank fails, or the ranks do not end within `_TIMEOUT_S`; see
        `r2ccl.cli.lines.launch_printing`.
    """
    for option, value, least in (
        ("-n", args.nranks, 2),
        ("--rails", args.rails, 2),
        ("--calls", args.calls, 2),
        ("--nbytes", args.nbytes, _LEAST_NBYTES),
    ):
        if value < least:
            raise InvalidArgument(f"r2ccl demo {option} {value}: allowed is {least} or more")
    if args.json is not None:
        check_file(args.json)
    from r2ccl.cli.demo_rank import run_rank  # imports NumPy and r2ccl.runtime

    rails = str(args.rails)
    env = {**_SETTINGS, "R2CC_RAILS": rails, "R2CC_CHANNELS": rails}
    # A ring allreduce sends 2 * (nranks - 1) chunks on each channel, each in at least one slice.
    step = min(_STEP, (args.nranks - 1) * args.rails)
    program = partial(run_rank, args.calls, args.nbytes, step)
    found = launch_printing(program, args.nranks, timeout_s=_TIMEOUT_S, env=env)
    if args.json is not None:
        write_result(
            args.json,
            nranks=args.nranks,
            nrails=args.rails,
            nbytes=args.nbytes,
            **msgspec.structs.asdict(found[0]),
        )
    return 1 if found[0].nwrong else 0


__all__ = ["configure", "run"]
