"""Draw an allreduce during which a NIC fails, as shown on docs/index.md.

The picture shows a run of `r2ccl.testing.simulation`, whose ranks execute the library's own links,
migration and executor, and which compares the result with NumPy's bit for bit. A bar is a slice
that leaves a NIC, from the start of its transfer to its end. `make pictures` runs this.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from r2ccl.schedule import shapes
from r2ccl.testing.simulation import CallSpec, FailurePlan, NicDown, Workload
from r2ccl.testing.simulation.network import SimNetwork
from r2ccl.testing.simulation.rank import SimRank
from r2ccl.testing.simulation.run import MAX_EVENTS, World

FILE = Path(__file__).with_suffix(".svg")
TITLE = "A NIC fails during an allreduce"

NRANKS, NRAILS, NCHANNELS = 4, 2, 2
#: The NIC that fails, and the number of the event before which it fails.
RANK, RAIL, EVENT = 1, 0, 450
_SLICE_NBYTES, _NSLICES = 1024, 4
#: 100 MB/s: a slice takes 10 µs, and its latency is as long.
_NETWORK = {"bandwidth": 100e6, "latency_s": 10e-6, "overhead_s": 0.2e-6, "fence_s": 20e-6}
_DURATION_S = _SLICE_NBYTES / _NETWORK["bandwidth"]

# Sizes in pixels.
_MARGIN, _LABELS, _LANE, _BAR, _GAP, _LINE, _WIDTH = 20, 100, 22, 14, 10, 21, 800
_FAILED = "#c0182b"


class Slice(NamedTuple):
    """A slice that a NIC sends, at `at` seconds; `is_again` if it was sent before."""

    at: float
    rank: int
    rail: int
    channel: int
    is_lost: bool
    is_again: bool


class Run(NamedTuple):
    """Slices of a run, the time of the failure (None without one) and of the last return."""

    slices: list[Slice]
    failed_s: float | None
    begun_s: float
    done_s: float


def run(event: int | None = EVENT) -> Run:
    """Simulate the allreduce; the NIC fails before event number `event`, or not at all."""
    count = NRANKS * NCHANNELS * _NSLICES * _SLICE_NBYTES // 4
    workload = Workload(
        NRANKS, NRAILS, (CallSpec(count, channels=NCHANNELS),),
        slice_nbytes=_SLICE_NBYTES, eager_nbytes=0, landing_depth=4,
    )  # fmt: skip
    plan = FailurePlan() if event is None else FailurePlan((NicDown(event, RANK, RAIL),))
    world = World(workload, plan, 0, partial(SimNetwork, **_NETWORK), SimRank)  # type: ignore[arg-type]
    outcome = world.run(MAX_EVENTS)
    assert outcome.is_clean, outcome.errors
    trace = outcome.trace
    failed_s = next((entry[0] for entry in trace if entry[1] == "cut"), None)
    landed = {_route(entry) for entry in trace if entry[1:3] == ("land", "write")}
    slices = list(_slices(trace, landed))
    done_s = max(entry[0] for entry in trace if entry[1] == "returned")
    return Run(slices, failed_s, slices[0].at, done_s)


def _slices(trace: list[tuple[Any, ...]], landed: set[tuple[int, ...]]) -> Iterator[Slice]:
    seen = set()
    for entry in trace:
        if entry[1:3] == ("send", "write"):
            at, _, _, rank, path, channel, seq, *_ = entry
            is_lost = (path.peer, rank, path.rail, channel, seq) not in landed
            name = rank, path.peer, channel, seq
            yield Slice(at, rank, path.rail, channel, is_lost, name in seen)
            seen.add(name)


def _route(entry: tuple[Any, ...]) -> tuple[int, ...]:
    """Return receiver, sender, rail, channel and number of a slice that landed."""
    _, _, _, rank, path, channel, seq = entry
    return rank, path.peer, path.rail, channel, seq


def drawn() -> str:
    """Return the text of the picture."""
    whole, struck = run(None), run()
    assert struck.failed_s is not None
    again = sum(each.is_again for each in struck.slices)
    whole_us, took_us = (1e6 * (each.done_s - each.begun_s) for each in (whole, struck))
    heading = (
        TITLE,
        f"{NRANKS} simulated ranks with {NRAILS} NICs each. A bar is a slice that leaves a NIC.",
        f"NIC {RAIL} of rank {RANK} fails. The {again} slices on their way are sent again "
        "over the other NICs.",
        f"The call takes {took_us:.0f} µs instead of {whole_us:.0f} µs, because NIC {1 - RAIL} of "
        f"rank {RANK} now carries both channels. The result has the same bits.",
    )
    parts = [
        shapes.text(
            (_MARGIN, _MARGIN + 13 + _LINE * at), words, size=13 if at else 17, is_bold=not at
        )
        for at, words in enumerate(heading)
    ]
    top = _MARGIN + _LINE * len(heading) + 14
    parts.append(shapes.group((_MARGIN, top), list(_lanes(struck))))
    bottom = top + NRANKS * (NRAILS * _LANE + _GAP) + 22
    parts.append(shapes.group((_MARGIN, bottom), list(_legend())))
    size = _LABELS + _WIDTH + 2 * _MARGIN, bottom + _MARGIN
    return shapes.document(size, TITLE, parts)


def _lanes(struck: Run) -> Iterator[str]:
    """Draw a lane per NIC, the bars on it, and the failure."""
    assert struck.failed_s is not None
    scale = (_WIDTH - 30) / (struck.done_s - struck.begun_s)

    def x_of(time_s: float) -> float:
        return _LABELS + (time_s - struck.begun_s) * scale

    end, height = x_of(struck.done_s), NRANKS * (NRAILS * _LANE + _GAP)
    for rank in range(NRANKS):
        for rail in range(NRAILS):
            y = _y(rank, rail)
            yield shapes.text((0, y + 4), f"rank {rank}  NIC {rail}")
            yield shapes.line((_LABELS - 8, y), (end, y), shapes.LANE)
    for each in struck.slices:
        at = x_of(each.at), _y(each.rank, each.rail)
        yield _bar(at, _DURATION_S * scale - 1, each)
    x, y = x_of(struck.failed_s), _y(RANK, RAIL)
    yield shapes.line((x, y), (end, y), _FAILED, 2)
    yield _cross((x, y))
    yield shapes.text((x + 24, y - 4), "failed", ink=_FAILED, is_bold=True)
    yield shapes.line((end, -4), (end, height), shapes.INK, 1.5)
    yield shapes.text((end, height + 12), "all ranks return", is_centred=True)


def _y(rank: int, rail: int) -> float:
    return rank * (NRAILS * _LANE + _GAP) + rail * _LANE + _LANE / 2


def _bar(at: shapes.Point, width: float, what: Slice) -> str:
    ink = shapes.colour(what.channel)
    fill = "#fff" if what.is_lost else ink
    edge = _FAILED if what.is_lost else shapes.INK if what.is_again else ink
    dash = ' stroke-dasharray="3 2"' if what.is_lost else ""
    return (
        f'<rect x="{at[0]:.1f}" y="{at[1] - _BAR / 2:.1f}" width="{width:.1f}" height="{_BAR}" '
        f'fill="{fill}" stroke="{edge}" stroke-width="{2 if what.is_again else 1}"{dash}/>'
    )


def _cross(at: shapes.Point) -> str:
    x, y = at
    return "".join(
        shapes.line((x - 6, y - 6 * way), (x + 6, y + 6 * way), _FAILED, 3) for way in (1, -1)
    )


def _legend() -> Iterator[str]:
    entries = [
        (Slice(0, 0, 0, channel, False, False), f"slice of channel {channel}")
        for channel in range(NCHANNELS)
    ]
    entries += [
        (Slice(0, 0, 0, 0, True, False), "lost"),
        (Slice(0, 0, 0, 0, False, True), "sent again"),
    ]
    x = 0.0
    for example, words in entries:
        yield _bar((x, 0), 24, example)
        yield shapes.text((x + 32, 4), words, ink=shapes.FAINT)
        x += 60 + 7.5 * len(words)


def main() -> None:
    """Write the SVG file."""
    logging.disable()  # the simulated ranks log the failure
    FILE.write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
