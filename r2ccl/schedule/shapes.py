"""SVG elements for pictures: arrows, marks, text.

The functions return SVG text. Equal arguments give equal text on every machine.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TypeAlias

#: Pixels from the upper left corner: to the right, down.
Point: TypeAlias = tuple[float, float]

#: Colours of text, of secondary text, of lanes and of grid lines.
INK, FAINT, LANE, GRID = "#1f2630", "#5d6673", "#b9c0ca", "#e9ecf0"
#: Radius in pixels of a mark on a lane.
RADIUS = 6.5

#: Colours whose contrast with white is at least 4.5, which WCAG 2 requires for small text.
_COLOURS = (
    "#1f6fb4", "#bf4a1a", "#2a7d4f", "#8a4b9e", "#8a6608", "#0d7480", "#b5346a", "#5b6472",
)  # fmt: skip


def colour(number: int) -> str:
    """Return the colour with index `number` modulo 8; index -1 is gray."""
    return _COLOURS[number % len(_COLOURS)]


def arrow(begin: Point, end: Point, ink: str, *, gap: float = 0, weight: float = 0.25) -> str:
    """Draw an arrow that ends `gap` pixels before `end`; `weight` (0 to 1) sets its width."""
    length = distance(begin, end)
    wide = 1.3 + 1.7 * weight
    head = 6 + 1.5 * wide
    tip, neck = along(begin, end, length - gap), along(begin, end, length - gap - head)
    across = (neck[1] - tip[1]) * 0.45, (tip[0] - neck[0]) * 0.45
    one = neck[0] + across[0], neck[1] + across[1]
    other = neck[0] - across[0], neck[1] - across[1]
    return (
        f'<path d="M{_xy(begin)}L{_xy(neck)}" stroke="{ink}" stroke-width="{_n(wide)}" '
        f'stroke-linecap="round"/><path d="M{_xy(tip)}L{_xy(one)}L{_xy(other)}Z" fill="{ink}"/>'
    )


def dots(begin: Point, end: Point, ink: str) -> str:
    """Draw a dotted line from `begin` to `end`."""
    return (
        f'<path d="M{_xy(begin)}L{_xy(end)}" stroke="{ink}" stroke-width="2.5" '
        'stroke-dasharray="2 3"/>'
    )


def line(begin: Point, end: Point, ink: str, width: float = 1) -> str:
    """Draw a line from `begin` to `end`, `width` pixels wide."""
    return f'<path d="M{_xy(begin)}L{_xy(end)}" stroke="{ink}" stroke-width="{_n(width)}"/>'


def plus(at: Point, ink: str, *, is_filled: bool) -> str:
    """Draw a plus sign in a circle centered at `at`; the circle is white unless `is_filled`."""
    ground, sign = (ink, "#fff") if is_filled else ("#fff", ink)
    return (
        f'<circle cx="{_n(at[0])}" cy="{_n(at[1])}" r="{RADIUS - 0.5}" fill="{ground}" '
        f'stroke="{ink}" stroke-width="1.5"/><path d="M{_n(at[0] - 3.5)} {_n(at[1])}h7'
        f'M{_n(at[0])} {_n(at[1] - 3.5)}v7" stroke="{sign}" stroke-width="1.5"/>'
    )


def square(at: Point, ink: str) -> str:
    """Draw an empty square centered at `at`."""
    return (
        f'<rect x="{_n(at[0] - 4)}" y="{_n(at[1] - 4)}" width="8" height="8" fill="#fff" '
        f'stroke="{ink}" stroke-width="1.5"/>'
    )


def badge(at: Point, label: str, ink: str) -> str:
    """Draw a short white text on a colored field centered at `at`."""
    half = badge_width(label) / 2
    return (
        f'<rect x="{_n(at[0] - half)}" y="{_n(at[1] - 7.5)}" width="{_n(2 * half)}" height="15" '
        f'rx="7.5" fill="{ink}" stroke="#fff"/>'
    ) + text((at[0], at[1] + 4), label, size=11, ink="#fff", is_centred=True)


def badge_width(label: str) -> float:
    """Return the width in pixels of the `badge` with `label`."""
    return 8 + 6.6 * len(label)


def text(
    at: Point,
    words: str,
    *,
    size: int = 12,
    ink: str = INK,
    is_centred: bool = False,
    is_bold: bool = False,
) -> str:
    """Draw one line of text that starts at `at` or, with `is_centred`, is centered at `at`."""
    more = ' text-anchor="middle"' if is_centred else ""
    more += ' font-weight="bold"' if is_bold else ""
    return (
        f'<text x="{_n(at[0])}" y="{_n(at[1])}" font-size="{size}" fill="{ink}"{more}>'
        f"{html.escape(words)}</text>"
    )


def group(at: Point, shapes: Sequence[str]) -> str:
    """Combine shapes into a group whose origin is at `at`."""
    return f'<g transform="translate({_xy(at)})">{"".join(shapes)}</g>'


def document(size: Point, title: str, shapes: Sequence[str]) -> str:
    """Return an SVG document of the shapes on a white background, for pages of any colour."""
    width, height = size
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}" font-family="Helvetica, Arial, sans-serif" '
        f'fill="none">\n<title>{html.escape(title)}</title>\n'
        f'<rect x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="8" '
        f'fill="#fff" stroke="{LANE}"/>\n{body}\n</svg>\n'
    )


def along(begin: Point, end: Point, by: float) -> Point:
    """Return the point `by` pixels from `begin` towards `end`; the two points must differ."""
    part = by / distance(begin, end)
    return begin[0] + (end[0] - begin[0]) * part, begin[1] + (end[1] - begin[1]) * part


def distance(begin: Point, end: Point) -> float:
    """Return the distance between two points in pixels."""
    # IEEE 754 defines sqrt to the last bit, but not hypot: text must be equal on every machine.
    return math.sqrt((end[0] - begin[0]) ** 2 + (end[1] - begin[1]) ** 2)


def _xy(point: Point) -> str:
    return f"{_n(point[0])} {_n(point[1])}"


def _n(number: float) -> str:
    """Format a coordinate, rounded to a tenth of a pixel."""
    return f"{number:.1f}".removesuffix(".0")


__all__ = [
    "FAINT",
    "GRID",
    "INK",
    "LANE",
    "RADIUS",
    "Point",
    "along",
    "arrow",
    "badge",
    "badge_width",
    "colour",
    "distance",
    "document",
    "dots",
    "group",
    "line",
    "plus",
    "square",
    "text",
]
