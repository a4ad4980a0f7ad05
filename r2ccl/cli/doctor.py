"""``r2ccl doctor``: report on a machine's rails, GPUs, topology and verbs, with fixes for problems.

`r2ccl.cli.doctor_report` examines the machine.
"""

from __future__ import annotations

import argparse

#: Names that ``--require`` accepts.
REQUIREMENTS = ("rdma", "gpu", "shm")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``r2ccl doctor`` to `parser`; `run` takes the parsed arguments."""
    parser.description = (
        "Show the rails that r2ccl would use on this machine with the current settings, the "
        "capabilities of its GPUs, which NIC each GPU uses, whether verbs can be used and, on the "
        "last line, what r2ccl will use. The exit status is 0 if ranks can exchange data here, at "
        "least among themselves, and nothing that --require names is missing; otherwise it is 1."
    )
    parser.add_argument(
        "--require",
        type=_requirements,
        action="extend",
        default=[],
        metavar="LIST",
        help="exit with 1 if something in LIST cannot be used here; allowed are "
        f"{', '.join(REQUIREMENTS)}, separated by commas; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.add_argument(
        "--topology-xml",
        metavar="FILE",
        help="only write the topology as a file for NCCL_TOPO_FILE; - for standard output",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the parsed command; return the exit status.

    With ``--topology-xml`` the status is 0, otherwise that of `r2ccl.cli.doctor_report.report`.

    Raises
    ------
    InvalidArgument
        If `r2ccl.config.Config.from_env` refuses a setting, or the file of ``--topology-xml``
        cannot be written.
    """
    from r2ccl.cli import doctor_report  # imports NumPy

    if args.topology_xml is not None:
        doctor_report.write_topology(args.topology_xml)
        return 0
    return doctor_report.report(args.require, is_json=args.json)


def _requirements(text: str) -> list[str]:
    names = text.split(",")
    wrong = [name for name in names if name not in REQUIREMENTS]
    if wrong:
        raise argparse.ArgumentTypeError(
            f"{wrong[0]!r}; allowed are {', '.join(REQUIREMENTS)}, separated by commas"
        )
    return names


__all__ = ["REQUIREMENTS", "configure", "run"]
