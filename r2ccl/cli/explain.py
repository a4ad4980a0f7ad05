"""``r2ccl explain``: compare the schedules of a collective on a cluster that need not exist.

`r2ccl.cli.forecast` plans and simulates; `r2ccl.cli.forecast_output` prints and draws.
"""

from __future__ import annotations

import argparse
import sys

from r2ccl.cli.values import one_of, parse_duration, parse_rate, parse_size

#: Collectives whose schedules can be compared. Those with unequal parts are left out, because their
#: traffic depends on the sizes of the parts.
COLLECTIVES = (
    "allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter",
    "alltoall", "scan", "exscan",
)  # fmt: skip

_EPILOG = """\
example:
  r2ccl explain --nodes 64 --nics 8 --rate 400gbit --nbytes 1G --lose 3:1
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``r2ccl explain`` to `parser`; `run` takes the parsed arguments."""
    parser.description = (
        "Compare the schedules that a collective could run on a cluster, without and with lost or "
        "slow NICs: the time that the planner predicts by its cost model, the time of a flow-level "
        "simulation, and the schedule that the planner selects. No cluster is needed."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--nodes", type=int, default=4, metavar="N", help="default: %(default)s")
    add("--nics", type=int, default=8, metavar="N", help="NICs per node; default: %(default)s")
    add(
        "--rate", type=parse_rate, default="400gbit", metavar="RATE",
        help="bandwidth of a NIC per direction, as 400gbit or 50GB/s; default: %(default)s",
    )  # fmt: skip
    add(
        "--latency", type=parse_duration, default="5us", metavar="TIME",
        help="time of one step of a small collective; default: %(default)s",
    )  # fmt: skip
    add("--ranks-per-node", type=int, default=1, metavar="N", help="default: %(default)s")
    add(
        "--nbytes", type=parse_size, default="1G", metavar="SIZE",
        help="size of the whole buffer, as 64M; units are powers of 1024; default: %(default)s",
    )  # fmt: skip
    add(
        "--collective", type=one_of(COLLECTIVES), choices=COLLECTIVES, default="allreduce",
        metavar="NAME", help=f"{', '.join(COLLECTIVES)}; default: %(default)s",
    )  # fmt: skip
    add(
        "--lose", type=_ports, action="extend", default=[], metavar="NODE:NIC,...",
        help="NICs that are down; repeatable",
    )  # fmt: skip
    add(
        "--slow", type=_slow_ports, action="extend", default=[], metavar="NODE:NIC:FRACTION,...",
        help="NICs with this fraction of their bandwidth, rounded to sixteenths; repeatable",
    )  # fmt: skip
    add("--no-simulate", action="store_true", help="only predict, which needs no Numba")
    add("--png", metavar="FILE", help="draw the times; needs pip install 'r2ccl[demo]'")
    add("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the parsed command and return 0.

    Raises
    ------
    InvalidArgument
        If the options describe an impossible cluster, or a cluster that is too large
        (`r2ccl.cli.forecast.scenario_of`); if Numba (unless ``--no-simulate``) or matplotlib (for
        ``--png``) is missing; or if the picture cannot be written.
    """
    from r2ccl.cli import forecast_output  # these import NumPy and the planner
    from r2ccl.cli.forecast import compare, scenario_of

    scenario = scenario_of(args)
    if not args.no_simulate and sys.stderr.isatty():
        print("simulating; the first time, this compiles for up to 30 s ...", file=sys.stderr)
    found = compare(scenario, is_simulated=not args.no_simulate)
    if args.png is not None:
        forecast_output.draw(found, args.png)
    if args.json:
        print(forecast_output.to_json(found))
    else:
        forecast_output.show(found)
    return 0


def _ports(text: str) -> list[tuple[int, int]]:
    return [_port(part) for part in text.split(",")]


def _slow_ports(text: str) -> list[tuple[int, int, float]]:
    return [_slow_port(part) for part in text.split(",")]


def _port(text: str) -> tuple[int, int]:
    node, sign, nic = text.partition(":")
    if not (sign and node.isdecimal() and nic.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}; write NODE:NIC, both from 0, as 3:1")
    return int(node), int(nic)


def _slow_port(text: str) -> tuple[int, int, float]:
    port, _, fraction = text.rpartition(":")
    try:
        value = float(fraction)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:  # also NaN
        raise argparse.ArgumentTypeError(
            f"{text!r}; write NODE:NIC:FRACTION, with a fraction above 0 and below 1, as 3:1:0.5"
        )
    return *_port(port), value


__all__ = ["COLLECTIVES", "configure", "run"]
