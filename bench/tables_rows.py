"""Rows of the tables of simulated allreduces, and their printing.

Every time is a multiple of T0, the fault-free ring's time, so that published, modelled, simulated
and measured times are comparable. Each has its own column.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from r2ccl.algos import packed_trees
from r2ccl.flowsim import Network, Program, Sharing, simulate
from r2ccl.schedule import Schedule

#: Bandwidth of a whole node, in a unit that makes it divisible by the denominators of `LOSSES`.
WHOLE = 24
LOSSES = (Fraction(0), Fraction(1, 8), Fraction(1, 4), Fraction(1, 3), Fraction(1, 2))

#: Bytes of the buffer: large enough that rounding to whole bytes changes no printed digit.
NBYTES = 1 << 30

#: Tolerance of max-min sharing, ten times the simulator's default: 64 nodes take a quarter of the
#: time, and results with 28 trees and 96 or 192 slices differ by 0.0001 of the bound.
TOLERANCE = 0.01

SOURCES = {
    "OptCC": "arXiv:2606.01680 (OptCC)",
    "CloudLab": "CloudLab logs published with arXiv:2512.25059 (R2CCL)",
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated time of one case, and the values it is compared with.

    Parameters
    ----------
    table, case, schedule : str
        Name of the table; lost bandwidth; name of the schedule.
    n : int
        Number of nodes.
    k, trees : int or None
        Segments or chunks of the schedule; trees. None if the schedule has none.
    slices : int
        Slices per chunk.
    sharing : str
        Model by which slices share ports in the simulation.
    bound : float
        T*/T0, the lower bound.
    paper, source : str
        Published T/T0, empty if none was published, and its source: a key of `SOURCES`.
    model : float or None
        T/T0 of the closed form; for packed trees and leaf rings, the bound they approach.
    simulated : float
        T/T0.
    over_bound : float
        Simulated T/T*.
    measured : float or None
        T/T0 on a real network, as saved by `degraded.py`.
    """

    table: str
    case: str
    schedule: str
    n: int
    slices: int
    bound: float
    simulated: float
    over_bound: float
    model: float | None = None
    k: int | None = None
    trees: int | None = None
    sharing: Sharing = "max_min"
    paper: str = ""
    source: str = ""
    measured: float | None = None

    @property
    def over_model(self) -> float | None:
        """Simulated time divided by that of the closed form."""
        return self.simulated / self.model if self.model else None

    def flat(self) -> dict[str, Any]:
        """Return the JSON object of this row."""
        return {**msgspec.structs.asdict(self), "over_model": self.over_model}


class RowName(NamedTuple):
    """Identity of a row, the same in all files."""

    table: str
    case: str
    schedule: str
    k: int | None
    trees: int | None


def name_of(row: Row) -> RowName:
    """Return the name of a row."""
    return RowName(row.table, row.case, row.schedule, row.k, row.trees)


def read_measured(path: Path) -> dict[RowName, dict[str, Any]]:
    """Read the schedules that `degraded.py` saved, by the names of their rows."""
    return {
        RowName(*(each[field] for field in RowName._fields)): each
        for each in json.loads(path.read_text())["results"]
        if each["measure"] == "schedule"
    }


def with_measured(
    rows: Sequence[Row], measured: dict[RowName, dict[str, Any]]
) -> tuple[list[Row], list[str]]:
    """Fill in measured values.

    Returns
    -------
    list of Row
        All rows, in the same order; rows without a measurement are unchanged.
    list of str
        Conditions of the measurements, for the notes of the table.
    """
    done, notes = [], dict[str, None]()
    for row in rows:
        found = measured.get(name_of(row))
        if found is not None:
            row = msgspec.structs.replace(row, measured=found["measured"])
            notes[
                f"measured: in a netlab, {found['nbytes'] >> 20} MiB, NICs of "
                f"{found['rate_mbps']} Mbit/s, median of {found['rounds']}"
            ] = None
        done.append(row)
    return done, list(notes)


def straggler(n: int, lost: Fraction) -> list[int]:
    """Return the bandwidths of `n` nodes; the first has lost the share `lost`."""
    return [int(WHOLE * (1 - lost)), *[WHOLE] * (n - 1)]


def fault_free(n: int) -> Fraction:
    """Return T0 in units of D/B."""
    return Fraction(2 * (n - 1), n)


def time_of(
    program: Schedule | Program,
    bandwidths: Sequence[int],
    nslices: int,
    sharing: Sharing = "max_min",
) -> float:
    """Simulate with node ports and no latency; return the time per unit of data."""
    network = Network(egress=tuple((float(bandwidth),) for bandwidth in bandwidths))
    outcome = simulate(
        program,
        NBYTES,
        network,
        nslices=nslices,
        node_ports=True,
        sharing=sharing,
        tolerance=TOLERANCE,
    )
    return outcome.time_s / NBYTES


def row_of(
    program: Schedule | Program,
    bandwidths: Sequence[int],
    *,
    slices: int,
    model: Fraction | None = None,
    sharing: Sharing = "max_min",
    **fields: Any,
) -> Row:
    """Simulate one case; `model` is in units of D/B, and whole nodes have the bandwidth `WHOLE`."""
    n = len(bandwidths)
    unit = fault_free(n) / WHOLE
    bound = packed_trees.lower_bound(bandwidths)
    seconds = time_of(program, bandwidths, slices, sharing)
    return Row(
        n=n,
        slices=slices,
        bound=float(bound / unit),
        simulated=seconds / float(unit),
        over_bound=seconds / float(bound),
        model=None if model is None else float(model / fault_free(n)),
        sharing=sharing,
        **fields,
    )


def print_rows(console: Console, title: str, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Print a table with its notes and sources."""
    table = Table(title=title)
    for heading in ("n", "lost", "schedule"):
        table.add_column(heading)
    headings = ("k", "trees", "slices", "sharing", "bound", "paper", "model", "simulated")
    for heading in (*headings, "measured", "sim/bound", "sim/model"):
        table.add_column(heading, justify="right")
    before = None
    for row in rows:
        if before and before.case != row.case and before.schedule != row.schedule:
            table.add_section()
        table.add_row(*_cells(row))
        before = row
    console.print(table)
    print_notes(console, notes, [SOURCES[row.source] for row in rows if row.source])


def print_notes(console: Console, notes: Iterable[str], sources: Iterable[str]) -> None:
    """Print notes, and each source once."""
    for note in (*notes, *(f"paper: {source}" for source in dict.fromkeys(sources))):
        console.print(f"- {note}", soft_wrap=True, highlight=False)


def _cells(row: Row) -> list[str]:
    return [
        str(row.n),
        row.case,
        row.schedule,
        *("-" if number is None else str(number) for number in (row.k, row.trees, row.slices)),
        row.sharing.replace("_", "-"),
        f"{row.bound:.3f}",
        row.paper or "-",
        "-" if row.model is None else f"{row.model:.3f}",
        f"{row.simulated:.3f}",
        "not measured" if row.measured is None else f"{row.measured:.3f}",
        f"{row.over_bound:.3f}",
        "-" if row.over_model is None else f"{row.over_model:.3f}",
    ]


__all__ = [
    "LOSSES",
    "NBYTES",
    "SOURCES",
    "TOLERANCE",
    "WHOLE",
    "Row",
    "RowName",
    "fault_free",
    "name_of",
    "print_notes",
    "print_rows",
    "read_measured",
    "row_of",
    "straggler",
    "time_of",
    "with_measured",
]
