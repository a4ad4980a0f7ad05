"""Comparison of schedules as tables, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from r2ccl.cli import tables
from r2ccl.cli.forecast import Comparison, Forecast
from r2ccl.cli.perf.forms import busbw
from r2ccl.cli.values import format_size
from r2ccl.config import VERSION
from r2ccl.errors import InvalidArgument

_COLUMNS = ("", "schedule", "predicted", "simulated", "busbw", "steps")
#: Widths of the columns with numbers, the last four, in lines of text.
_WIDTHS = (13, 13, 12, 7)


def to_json(found: Comparison) -> str:
    """Return the comparison as a JSON object: ``version``, and the fields of `Comparison`."""
    document = {"version": VERSION, **msgspec.structs.asdict(found)}
    return msgspec.json.format(msgspec.json.encode(document)).decode()


def show(found: Comparison) -> None:
    """Print the comparison as tables, or as lines if `tables.terminal` returns None."""
    console = tables.terminal()
    if console is None:
        print(to_text(found))
        return
    print(_question(found))
    for title, forecasts, why in _states(found):
        styles = ["bold green" if each.is_chosen else "" for each in forecasts.values()]
        tables.draw(console, title, _COLUMNS, _rows(found, forecasts), numbers=4, styles=styles)
        print(_choice(forecasts, why), end="\n\n")
    print(*_notes(found), sep="\n")


def to_text(found: Comparison) -> str:
    """Return the comparison as lines of text."""
    lines = [_question(found)]
    for title, forecasts, why in _states(found):
        lines += ["", title]
        for mark, name, *numbers in (_COLUMNS, *_rows(found, forecasts)):
            cells = (f"{text:>{width}}" for text, width in zip(numbers, _WIDTHS, strict=True))
            lines.append(f"{mark:2}{name:<20}{''.join(cells)}")
        lines.append(_choice(forecasts, why))
    notes = _notes(found)
    return "\n".join([*lines, "", *notes] if notes else lines)


def _question(found: Comparison) -> str:
    given = found.scenario
    nodes = f"{given.nnodes} nodes x {given.nnics} NICs of {8 * given.rate / 1e9:g} Gbit/s"
    if given.ranks_per_node > 1:
        nodes += f", {given.ranks_per_node} ranks per node"
    return f"{given.collective} of {format_size(given.nbytes)} on {nodes}"


def _states(found: Comparison) -> Iterator[tuple[str, dict[str, Forecast], str]]:
    """Yield each state of the network: its name, the schedules, and why one of them is chosen."""
    yield "all NICs healthy", found.healthy, found.why
    if found.degraded:
        given = found.scenario
        parts = [f"NIC {nic} of node {node} lost" for node, nic in given.lost]
        parts += [f"NIC {nic} of node {node} at {share}/16" for node, nic, share in given.slow]
        yield ", ".join(parts), found.degraded, found.why_degraded


def _rows(found: Comparison, forecasts: dict[str, Forecast]) -> Iterator[tuple[str, ...]]:
    for name, each in forecasts.items():
        time_s = each.simulated_s or each.predicted_s
        speed = "-"
        if time_s:
            given = found.scenario
            rate = busbw(given.collective, given.nranks, given.nbytes, time_s)
            speed = f"{rate:.1f} GB/s"
        times = (_milliseconds(each.predicted_s), _milliseconds(each.simulated_s))
        yield ("*" if each.is_chosen else "", name, *times, speed, str(each.steps))


def _choice(forecasts: dict[str, Forecast], why: str) -> str:
    chosen = next(name for name, each in forecasts.items() if each.is_chosen)
    return f"runs {chosen}: {why}"


def _notes(found: Comparison) -> list[str]:
    if not found.nchunks:
        return list(found.notes)
    chunks = "1 chunk" if found.nchunks == 1 else f"{found.nchunks} chunks"
    levels = (
        f"the call runs in two levels, in {chunks}: shared memory within the "
        "nodes, the network between them; the schedules above are those of one level"
    )
    return [levels, *found.notes]


def _milliseconds(time_s: float | None) -> str:
    return "-" if time_s is None else f"{1e3 * time_s:.3f} ms"


def draw(found: Comparison, path: str) -> None:
    """Write a picture of the times of all schedules to the PNG file `path`.

    Raises
    ------
    InvalidArgument
        If matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise InvalidArgument(
            f"--png {path}: matplotlib is not installed: pip install 'r2ccl[demo]'"
        ) from exc
    names = list(found.healthy | found.degraded)
    figure = Figure(figsize=(8, 1.5 + 0.5 * len(names)), layout="constrained")
    axes: Any = figure.subplots()
    states = {"healthy": found.healthy, "degraded": found.degraded}
    for number, (state, forecasts) in enumerate(states.items()):
        for place, name in enumerate(names):
            if name not in forecasts:
                continue
            each = forecasts[name]
            time_s = each.simulated_s or each.predicted_s or 0.0
            at = place + 0.4 * number
            label = state if name == next(iter(forecasts)) else None
            axes.barh(at, 1e3 * time_s, 0.38, color=f"C{number}", label=label)
            if each.is_chosen:
                axes.text(1e3 * time_s, at, " selected", va="center")
    axes.set_yticks([place + 0.2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel("time in ms")
    axes.set_title(f"{found.scenario.collective} of {format_size(found.scenario.nbytes)}")
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as exc:
        raise InvalidArgument(f"--png {path} cannot be written: {exc.strerror or exc}") from exc


__all__ = ["draw", "show", "to_json", "to_text"]
