"""What the tables of simulated allreduces share: a case, its row, and how rows are shown.

Invariant: every time is a multiple of T0, the fault-free ring's, so that paper, model and
simulation can stand side by side; each keeps a column of its own, and so does what was measured.
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

#: Of a whole node, in a unit that all of `LOSSES` divide.
WHOLE = 24
LOSSES = (Fraction(0), Fraction(1, 8), Fraction(1, 4), Fraction(1, 3), Fraction(1, 2))

#: Of the buffer: so large that rounding to whole bytes shows in no digit that is printed.
NBYTES = 1 << 30

#: Of max-min sharing. Ten times the simulator's default: 64 nodes take a fourth of the time, and
#: what was tried with both (28 trees, 96 and 192 slices) differs by 0.0001 of the bound.
TOLERANCE = 0.01

SOURCES = {
    "OptCC": "arXiv:2606.01680 (OptCC)",
    "CloudLab": "CloudLab logs published with arXiv:2512.25059 (R2CCL)",
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure and what it is compared with.

    Parameters
    ----------
    table, case, schedule : str
        Which table; what was lost; what ran.
    n : int
        Nodes.
    k, trees : int or None
        Segments or chunks of the schedule; trees. None: it has none.
    slices : int
        Of every chunk of the schedule.
    sharing : str
        How slices shared ports in the simulation.
    bound : float
        T*/T0, the lower bound.
    paper, source : str
        T/T0 as published, empty if it was not, and where: a key of `SOURCES`.
    model : float or None
        T/T0 of the closed form; for packed trees and leaf rings the bound that they tend to.
    simulated : float
        T/T0.
    over_bound : float
        Simulated T/T*.
    measured : float or None
        T/T0 on a real network, as `degraded.py` has saved it.
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
        """Simulated over closed form."""
        return self.simulated / self.model if self.model else None

    def flat(self) -> dict[str, Any]:
        """Return the object that is saved."""
        return {**msgspec.structs.asdict(self), "over_model": self.over_model}


class RowName(NamedTuple):
    """What tells a row from all others, also between files."""

    table: str
    case: str
    schedule: str
    k: int | None
    trees: int | None


def name_of(row: Row) -> RowName:
    """Return the name of a row."""
    return RowName(row.table, row.case, row.schedule, row.k, row.trees)


def read_measured(path: Path) -> dict[RowName, dict[str, Any]]:
    """Read what `degraded.py` has saved of schedules, with their rows' names."""
    return {
        RowName(*(each[field] for field in RowName._fields)): each
        for each in json.loads(path.read_text())["results"]
        if each["measure"] == "schedule"
    }


def with_measured(
    rows: Sequence[Row], measured: dict[RowName, dict[str, Any]]
) -> tuple[list[Row], list[str]]:
    """Put measured figures into their column.

    Returns
    -------
    list of Row
        In the same order; those of which nothing was measured as they were.
    list of str
        What must be known of the figures that were put in.
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
    """Return bandwidths of `n` nodes of which the first has lost that share."""
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
    """Simulate with node ports and no latency; the time of one unit of data."""
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
    """Simulate one case, whose `model` is in units of D/B and whose whole nodes have `WHOLE`."""
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
    """Print a table, with what must be known to read it."""
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
    """Print what must be known to read a table, and each source once."""
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
