"""Comparison of schedules as a table, as JSON and as a picture."""

from __future__ import annotations

from typing import Any

import msgspec

from r2ccl.cli.forecast import Comparison, Forecast
from r2ccl.cli.perf.forms import busbw
from r2ccl.cli.values import format_size
from r2ccl.config import VERSION
from r2ccl.errors import InvalidArgument


def to_json(found: Comparison) -> str:
    """Return the comparison as a JSON object: ``version``, and the fields of `Comparison`."""
    document = {"version": VERSION, **msgspec.structs.asdict(found)}
    return msgspec.json.format(msgspec.json.encode(document)).decode()


def to_text(found: Comparison) -> str:
    """Return the comparison as a table for people."""
    given = found.scenario
    nodes = f"{given.nnodes} nodes x {given.nnics} NICs of {8 * given.rate / 1e9:g} Gbit/s"
    if given.ranks_per_node > 1:
        nodes += f", {given.ranks_per_node} ranks per node"
    lines = [f"{given.collective} of {format_size(given.nbytes)} on {nodes}"]
    lines += _table(found, found.healthy, found.why, "all NICs healthy")
    if found.degraded:
        parts = [f"NIC {nic} of node {node} lost" for node, nic in given.lost]
        parts += [f"NIC {nic} of node {node} at {share}/16" for node, nic, share in given.slow]
        lines += _table(found, found.degraded, found.why_degraded, ", ".join(parts))
    lines += [""] if found.nchunks or found.notes else []
    if found.nchunks:
        chunks = "1 chunk" if found.nchunks == 1 else f"{found.nchunks} chunks"
        lines.append(
            f"the call runs in two levels, in {chunks}: shared memory within the "
            "nodes, the network between them; the schedules above are those of one level"
        )
    return "\n".join([*lines, *found.notes])


def _table(found: Comparison, forecasts: dict[str, Forecast], why: str, title: str) -> list[str]:
    lines = [
        "",
        title,
        f"{'':2}{'schedule':<20}{'predicted':>13}{'simulated':>13}{'busbw':>12}{'steps':>7}",
    ]
    for name, each in forecasts.items():
        time_s = each.simulated_s or each.predicted_s
        speed = "-"
        if time_s:
            given = found.scenario
            rate = busbw(given.collective, given.nranks, given.nbytes, time_s)
            speed = f"{rate:.1f} GB/s"
        lines.append(
            f"{'*' if each.is_chosen else ' ':2}{name:<20}{_milliseconds(each.predicted_s):>13}"
            f"{_milliseconds(each.simulated_s):>13}{speed:>12}{each.steps:>7}"
        )
    chosen = next(name for name, each in forecasts.items() if each.is_chosen)
    return [*lines, f"runs {chosen}: {why}"]


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


__all__ = ["draw", "to_json", "to_text"]
