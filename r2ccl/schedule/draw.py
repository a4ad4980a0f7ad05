"""Space-time diagrams of schedules, as SVG.

Every rank is a horizontal lane; time runs to the right in steps. The step of a message is the
number of messages on the longest chain of dependencies that ends with it. Pictures thus show
dependencies, not durations. Each panel shows one channel, because channels run concurrently. Equal
schedules give equal SVG text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from r2ccl.errors import InvalidArgument
from r2ccl.schedule import shapes
from r2ccl.schedule.arrays import ScheduleArrays, as_arrays
from r2ccl.schedule.check import check_fields
from r2ccl.schedule.events import END, LAND, build_events, match
from r2ccl.schedule.graph import Bools, topological_levels
from r2ccl.schedule.ir import OpKind, Schedule
from r2ccl.schedule.shapes import Point

#: Default maximum number of panels per picture; more panels make a picture too long to view.
DEFAULT_PANELS = 6

#: Maximum number of per-rank loads in a heading; more make it wider than the picture.
_LISTED = 8

# Pixels. Marks of one rank and step lie side by side, one pitch apart, and each further one widens
# the step. The steps of a single panel are widened to fit its heading, but only up to a limit: in
# wider steps, arrows would be nearly horizontal and overlap the marks beside their target.
_MARGIN, _LABELS, _TAIL, _PITCH, _ROW, _LINE = 20, 52, 16, 16, 58, 21
_STEP, _NUMBERED_STEP, _WIDEST_STEP, _LONE_PANEL, _WIDEST_ROW = 52, 76, 120, 520, 1000
_LEAVING, _NUMBER_AT, _NUMBER_HEIGHT, _CHARACTER = 9, 27, 15, 7.5


class _Move(NamedTuple):
    """One drawn item: messages drawn as one arrow, or local ops drawn as one mark.

    `landed` is the step in which a message lands, and `done` the step in which the op is done. The
    two steps differ if a message waits before it is reduced. `source` is -1 for a local op.
    """

    channel: int
    source: int
    sink: int
    landed: int
    done: int
    kind: OpKind
    is_final: bool
    chunks: tuple[int, ...]

    @property
    def is_sum(self) -> bool:
        return self.kind in (OpKind.RECV_REDUCE, OpKind.REDUCE)


class _Place(NamedTuple):
    """Mark on a lane for move number `move`: its completion if `is_done`, otherwise its landing."""

    move: int
    is_done: bool


class _Frame(NamedTuple):
    """Geometry that all panels share.

    `columns` has the x coordinate of the right edge of each step. Step 0 is the column with the
    names of the ranks. `head` is the y coordinate of the upper edge of the lanes.
    """

    schedule: Schedule
    columns: tuple[float, ...]
    head: int

    def lane(self, rank: int) -> float:
        """Return the y coordinate of a rank's lane."""
        return self.head + _ROW * (rank + 0.5)

    def is_numbered(self, channel: int) -> bool:
        """Return whether the channel has several chunks, so that its arrows need chunk numbers."""
        return self.schedule.nchunks[channel] > 1


def svg(schedule: Schedule, caption: str = "", max_panels: int = DEFAULT_PANELS) -> str:
    """Draw `schedule` as a space-time diagram.

    Parameters
    ----------
    schedule : Schedule
        A schedule that `check` accepts, with few ranks.
    caption : str
        Extra line in the heading, such as the network the schedule was made for.
    max_panels : int
        Maximum number of channels to show, from channel 0 on. The legend states how many are left
        out.

    Returns
    -------
    str
        An SVG document with its own background. Arrows are messages; wider arrows carry more data.
        On a channel with several chunks, arrows are numbered and colored by chunk. On a channel
        with one chunk, they have no numbers, and all have the channel's color.

    Raises
    ------
    InvalidArgument
        If `max_panels` is below 1.
    ScheduleError
        If the number of channels or a field is wrong, the sends and receives do not match, or the
        ops deadlock.
    """
    if max_panels < 1:
        raise InvalidArgument(f"max_panels={max_panels}; give 1 or more")
    arrays = as_arrays(schedule)
    check_fields(schedule, arrays)
    moves, nsteps = _moves(arrays)
    shown = [
        [move for move in moves if move.channel == channel]
        for channel in range(min(schedule.nchannels, max_panels))
    ]
    frame = _frame(schedule, shown, nsteps)
    width, height = frame.columns[-1] + _TAIL, frame.head + _ROW * schedule.nranks
    across = min(max(int(_WIDEST_ROW / width), 1), len(shown))
    heading = _heading(schedule, arrays, nsteps, caption)
    top = _MARGIN + _LINE * len(heading)
    parts = [
        shapes.text(
            (_MARGIN, _MARGIN + 13 + _LINE * at), words, size=13 if at else 17, is_bold=not at
        )
        for at, words in enumerate(heading)
    ]
    for channel, each in enumerate(shown):
        row, place = divmod(channel, across)
        corner = _MARGIN + place * width, top + row * height
        parts.append(shapes.group(corner, list(_panel(frame, channel, each))))
    bottom = top + height * math.ceil(len(shown) / across) + 10
    legend, reach = _legend(schedule, shown)
    parts.append(shapes.group((_MARGIN, bottom), legend))
    inner = max(width * across, reach, *(_CHARACTER * len(words) for words in heading))
    return shapes.document((inner + 2 * _MARGIN, bottom + _MARGIN), heading[0], parts)


def _moves(arrays: ScheduleArrays) -> tuple[list[_Move], int]:
    """Return all messages and local ops in a possible order of execution, and the number of steps.

    Messages, or local ops, that differ only in their chunk are merged into one.
    """
    events = build_events(arrays, match(arrays))
    weight = events.is_message.astype(np.int64)
    times = topological_levels(3 * arrays.ops.size, events.source, events.target, weight)
    steps, level = times.distance.reshape(-1, 3), times.level.reshape(-1, 3)[:, END]
    found: dict[tuple[int, int, int, int, int, OpKind, bool], list[int]] = {}
    for op in np.argsort(level, kind="stable").tolist():
        row = arrays.ops[op]
        kind, done = OpKind(int(row["kind"])), int(steps[op, END])
        if kind == OpKind.SEND:
            continue
        landed = done if kind in (OpKind.COPY, OpKind.REDUCE) else int(steps[op, LAND])
        key = (
            int(row["channel"]), int(row["peer"]), int(row["rank"]), landed, done, kind,
            bool(row["final"]),
        )  # fmt: skip
        found.setdefault(key, []).append(int(row["dst"]))
    return [_Move(*key, tuple(sorted(set(each)))) for key, each in found.items()], events.steps


def _lanes(moves: Sequence[_Move]) -> dict[tuple[int, int], list[_Place]]:
    """Return the marks at each (rank, step), in a possible order of execution."""
    found: dict[tuple[int, int], list[_Place]] = {}
    for at, move in enumerate(moves):
        if move.landed < move.done:
            found.setdefault((move.sink, move.landed), []).append(_Place(at, False))
        found.setdefault((move.sink, move.done), []).append(_Place(at, True))
    return found


def _frame(schedule: Schedule, shown: Sequence[Sequence[_Move]], nsteps: int) -> _Frame:
    """Return the geometry of the panels; each step is wide enough for its marks in every panel."""
    room = [0] * (nsteps + 1)
    for moves in shown:
        for (_, step), places in _lanes(moves).items():
            room[step] = max(room[step], len(places) - 1)
    width = _NUMBERED_STEP if max(schedule.nchunks) > 1 else _STEP
    if len(shown) == 1:
        width = max(width, min(_LONE_PANEL // max(nsteps, 1), _WIDEST_STEP))
    widths = [_LABELS + _PITCH * room[0], *(width + _PITCH * each for each in room[1:])]
    return _Frame(schedule, tuple(accumulate(widths)), 46 if schedule.nchannels > 1 else 34)


def _panel(frame: _Frame, channel: int, moves: Sequence[_Move]) -> Iterator[str]:
    """Draw one channel, with its upper left corner as the origin."""
    yield from _ground(frame, channel)
    spots: dict[_Place, Point] = {
        place: (frame.columns[step] - _PITCH * at, frame.lane(rank))
        for (rank, step), places in _lanes(moves).items()
        for at, place in enumerate(reversed(places))
    }
    above: list[str] = []
    taken: list[tuple[Point, float]] = []
    for at, move in enumerate(moves):
        ink = shapes.colour(move.chunks[0] if frame.is_numbered(channel) else channel)
        end = landed = spots[_Place(at, True)]
        if move.landed < move.done:
            landed = spots[_Place(at, False)]
            yield shapes.dots(landed, end, ink)
        if move.source >= 0:
            begin = frame.columns[move.landed - 1] + _LEAVING, frame.lane(move.source)
            gap = shapes.RADIUS if move.is_sum and landed == end else 0
            share = _share(frame.schedule, channel) * len(move.chunks)
            yield shapes.arrow(begin, landed, ink, gap=gap, weight=float(share))
            if frame.is_numbered(channel):
                label = _spans(move.chunks)
                taken.append((_free(begin, landed, label, taken), shapes.badge_width(label)))
                above.append(shapes.badge(taken[-1][0], label, ink))
        above.append(_mark(move.kind, end, ink, is_final=move.is_final))
    yield from above


def _ground(frame: _Frame, channel: int) -> Iterator[str]:
    """Draw the background of a panel: title, steps, lanes."""
    schedule, columns = frame.schedule, frame.columns
    if schedule.nchannels > 1:
        nchunks = schedule.nchunks[channel]
        of = f"{_share(schedule, channel) * nchunks} of the data, {_count(nchunks, 'chunk')}"
        yield shapes.text((0, 16), f"channel {channel}: {of}", is_bold=True)
    bottom = frame.head + _ROW * schedule.nranks - 8
    for x in columns:
        yield shapes.line((x, frame.head), (x, bottom), shapes.GRID)
    for step, (left, right) in enumerate(pairwise(columns), 1):
        label = f"step {step}" if step == 1 else str(step)
        middle = (left + right) / 2, frame.head - 4
        yield shapes.text(middle, label, ink=shapes.FAINT, is_centred=True)
    for rank in range(schedule.nranks):
        y = frame.lane(rank)
        yield shapes.text((0, y + 4), f"rank {rank}")
        yield shapes.line((_LABELS - 8, y), (columns[-1] + 8, y), shapes.LANE, 1.5)


def _free(begin: Point, end: Point, label: str, taken: Sequence[tuple[Point, float]]) -> Point:
    """Return a point on an arrow at which the arrow's label covers no other label.

    The point is as near to the tail as possible, because there the label cannot be mistaken for the
    label of a crossing arrow. If the label covers another label at every point, the point nearest
    to the tail is returned.
    """
    ways = range(_NUMBER_AT, max(int(shapes.distance(begin, end)) - 24, _NUMBER_AT + 1), 3)
    places = [shapes.along(begin, end, by) for by in ways]
    width = shapes.badge_width(label)
    for x, y in places:
        if all(
            abs(x - at[0]) > (width + other) / 2 + 1 or abs(y - at[1]) > _NUMBER_HEIGHT
            for at, other in taken
        ):
            return x, y
    return places[0]


def _mark(kind: OpKind, at: Point, ink: str, *, is_final: bool) -> str:
    """Draw the mark of a reduction or copy; a RECV has no mark, because its arrow is enough."""
    if kind == OpKind.COPY:
        return shapes.square(at, ink)
    return "" if kind == OpKind.RECV else shapes.plus(at, ink, is_filled=is_final)


def _heading(
    schedule: Schedule, arrays: ScheduleArrays, nsteps: int, caption: str
) -> tuple[str, ...]:
    """Return the lines of the heading: name, sizes, load per rank, caption."""
    nchunks = dict.fromkeys(schedule.nchunks)
    each = " or ".join(map(str, nchunks)) + (" chunk" if list(nchunks) == [1] else " chunks")
    facts = (
        f"{_count(schedule.nranks, 'rank')}, {_count(schedule.nchannels, 'channel')} of {each}, "
        f"{_count(nsteps, 'step')}"
    )
    is_send = arrays.ops["kind"] == OpKind.SEND
    is_receive = np.isin(arrays.ops["kind"], (OpKind.RECV, OpKind.RECV_REDUCE))
    sent, received = (_loads(schedule, arrays, chosen) for chosen in (is_send, is_receive))
    load = f"Every rank sends and receives {sent[0]} times the data"
    if len({*sent, *received}) > 1:
        taken = "as much" if sent == received else _listed(received)
        load = f"Ranks 0 to {schedule.nranks - 1} send {_listed(sent)} times the data"
        load += f" and receive {taken}"
    return tuple(filter(None, (f"{schedule.collective}: {schedule.name}", facts, load, caption)))


def _loads(schedule: Schedule, arrays: ScheduleArrays, chosen: Bools) -> list[Fraction]:
    """Return the data that the ops in mask `chosen` move, per rank, as a multiple of the buffer."""
    loads = [Fraction(0)] * schedule.nranks
    for rank, channel in arrays.ops[["rank", "channel"]][chosen].tolist():
        loads[rank] += _share(schedule, channel)
    return loads


def _listed(loads: Sequence[Fraction]) -> str:
    """Format the load of every rank, or the smallest and largest if there are many ranks."""
    if len(loads) > _LISTED:
        return f"{min(loads)} to {max(loads)}"
    return ", ".join(map(str, loads))


def _legend(schedule: Schedule, shown: Sequence[Sequence[_Move]]) -> tuple[list[str], float]:
    """Return the legend of the marks that occur, and its width in pixels."""
    grey, at = shapes.colour(-1), (7.0, 0.0)
    moves = [move for each in shown for move in each]
    sums = {move.is_final for move in moves if move.is_sum}
    entries = []
    if any(move.source >= 0 for move in moves):
        entries.append((shapes.arrow((0, 0), (26, 0), grey), 34, "message, wider with more data"))
    if max(schedule.nchunks[: len(shown)]) > 1:
        entries.append((shapes.badge(at, "0", grey), 20, "chunk"))
    if False in sums:
        entries.append((_mark(OpKind.REDUCE, at, grey, is_final=False), 20, "added"))
    if True in sums:
        entries.append((_mark(OpKind.REDUCE, at, grey, is_final=True), 20, "sum complete"))
    if any(move.landed < move.done for move in moves):
        entries.append((shapes.dots((0, 0), (24, 0), grey), 30, "landed, not added yet"))
    if any(move.kind == OpKind.COPY for move in moves):
        entries.append((_mark(OpKind.COPY, at, grey, is_final=False), 18, "copied"))
    if schedule.nchannels > len(shown):
        left_out = _count(schedule.nchannels - len(shown), "channel")
        entries.append(("", 0, f"{left_out} more, not shown"))
    parts, x = [], 0.0
    for symbol, room, words in entries:
        label = shapes.text((room, 4), words, ink=shapes.FAINT)
        parts.append(shapes.group((x, 0), [symbol, label]))
        x += room + _CHARACTER * len(words) + 10
    return parts, x


def _share(schedule: Schedule, channel: int) -> Fraction:
    """Return the fraction of the buffer that one chunk of `channel` has."""
    total = sum(schedule.weights) * schedule.nchunks[channel]
    return Fraction(schedule.weights[channel], total)


def _spans(chunks: Sequence[int]) -> str:
    """Format ascending numbers as ranges: 0, 1, 2, 5 as 0-2,5."""
    spans = [[chunks[0], chunks[0]]]
    for before, chunk in pairwise(chunks):
        if chunk == before + 1:
            spans[-1][1] = chunk
        else:
            spans.append([chunk, chunk])
    return ",".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in spans)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


__all__ = ["DEFAULT_PANELS", "svg"]
