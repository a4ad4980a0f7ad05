"""Draw the packages of r2ccl and their imports, as shown in docs/architecture.md.

Rows are the layers of `pyproject.toml`. Arrows are the imports found in the source with `ast`,
including imports for type checking and imports inside functions. Implied arrows are omitted: if
`a` imports `b` and `b` imports `c`, there is no arrow from `a` to `c`. `make pictures` runs this.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from r2ccl.schedule import shapes
from r2ccl.schedule.shapes import Point

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".svg")
TITLE = "Packages of r2ccl and what they import"

# Sizes in pixels.
_MARGIN, _NUMBERS, _ROW, _BOX, _LINE = 20, 24, 66, 28, 21
_CHARACTER, _PADDING, _GAP, _LANE_GAP = 7.6, 12, 26, 11
#: Number of iterations of both layout steps: ordering the rows, and moving boxes towards their
#: neighbours.
_ROUNDS = 24

Edges = Mapping[str, frozenset[str]]


class Node(NamedTuple):
    """A box, or the position at which arrows to `name` cross a row between their ends."""

    row: int
    name: str
    is_box: bool

    @property
    def half_width(self) -> float:
        """Half of the width of the node in pixels, without the gap beside it."""
        return len(self.name) * _CHARACTER / 2 + _PADDING if self.is_box else 0


_Segment = tuple[Node, Node]


def layers() -> list[list[str]]:
    """Return the packages of each layer that import-linter checks, highest layer first."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    [contract] = [each for each in contracts if each["type"] == "layers"]
    return [
        [name.strip().removeprefix("r2ccl.") for name in layer.split("|")]
        for layer in contract["layers"]
    ]


def imports(names: Sequence[str]) -> Edges:
    """Return, for each package or module in `names`, the others that it imports directly."""
    known = frozenset(names)
    return {
        name: frozenset(other for path in _files(name) for other in _named(path)) & (known - {name})
        for name in names
    }


def reduced(edges: Edges) -> Edges:
    """Return `edges` without those that a longer path implies (transitive reduction)."""
    return {
        name: frozenset(
            other
            for other in others
            if not any(other in _reached(edges, third) for third in others - {other})
        )
        for name, others in edges.items()
    }


def drawn() -> str:
    """Return the SVG text of the picture."""
    rows = layers()
    names = [name for row in rows for name in row]
    edges = reduced(imports(names))
    return _svg(rows, edges)


def _files(name: str) -> list[Path]:
    folder = ROOT / "r2ccl" / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def _named(path: Path) -> Iterator[str]:
    """Yield the name after `r2ccl.` of every import in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for parts in (each.split(".") for each in dotted):
            if parts[0] == "r2ccl" and len(parts) > 1:
                yield parts[1]


def _reached(edges: Edges, name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for other in edges[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found


# Layout: an arrow that crosses a row has a node there; arrows to the same target share the node.


def _graph(rows: Sequence[Sequence[str]], edges: Edges) -> tuple[list[list[Node]], set[_Segment]]:
    """Return the nodes of each row, and the segments between nodes of neighbouring rows."""
    row_of = {name: at for at, row in enumerate(rows) for name in row}
    nodes = [[Node(at, name, True) for name in row] for at, row in enumerate(rows)]
    segments: set[_Segment] = set()
    for name in row_of:
        for target in sorted(edges[name]):
            way = [Node(row_of[name], name, True)]
            for at in range(row_of[name] + 1, row_of[target]):
                way.append(Node(at, target, False))
                if way[-1] not in nodes[at]:
                    nodes[at].append(way[-1])
            way.append(Node(row_of[target], target, True))
            segments.update(pairwise(way))
    return nodes, segments


def _order(nodes: list[list[Node]], segments: set[_Segment]) -> list[list[Node]]:
    """Return the rows, ordered to reduce the number of crossing segments."""
    neighbours = _neighbours(segments)
    best, fewest = [list(row) for row in nodes], _crossings(nodes, segments)
    for turn in range(_ROUNDS):
        step = 1 if turn % 2 else -1
        for at in range(len(nodes))[::step]:
            place = {
                node: (index + 0.5) / len(row) for row in nodes for index, node in enumerate(row)
            }
            wanted = {node: _wanted(node, neighbours, place) for node in nodes[at]}
            nodes[at].sort(key=wanted.__getitem__)
            _swap(nodes, at, segments)
        ncrossings = _crossings(nodes, segments)
        if ncrossings < fewest:
            best, fewest = [list(row) for row in nodes], ncrossings
    return best


def _swap(nodes: list[list[Node]], at: int, segments: set[_Segment]) -> None:
    """Exchange adjacent nodes in a row if this reduces the number of crossings."""
    row = nodes[at]
    for index in range(len(row) - 1):
        before = _crossings(nodes, segments)
        row[index], row[index + 1] = row[index + 1], row[index]
        if _crossings(nodes, segments) >= before:
            row[index], row[index + 1] = row[index + 1], row[index]


def _crossings(nodes: Sequence[Sequence[Node]], segments: set[_Segment]) -> int:
    place = {node: index for row in nodes for index, node in enumerate(row)}
    ends: dict[int, list[tuple[int, int]]] = {}
    for upper, lower in segments:
        ends.setdefault(upper.row, []).append((place[upper], place[lower]))
    return sum(
        (one[0] - other[0]) * (one[1] - other[1]) < 0
        for each in ends.values()
        for index, one in enumerate(each)
        for other in each[:index]
    )


def _columns(nodes: Sequence[Sequence[Node]], segments: set[_Segment]) -> dict[Node, float]:
    """Return the horizontal centre of each node in pixels, close to the nodes joined to it."""
    neighbours = _neighbours(segments)
    place: dict[Node, float] = {}
    for row in nodes:
        place.update(zip(row, _spread(row, [0.0] * len(row)), strict=True))
    for turn in range(_ROUNDS):
        for row in nodes if turn % 2 else nodes[::-1]:
            wanted = [_wanted(node, neighbours, place) for node in row]
            place.update(zip(row, _spread(row, wanted), strict=True))
    left = min(x - node.half_width for node, x in place.items())
    return {node: x - left for node, x in place.items()}


def _spread(row: Sequence[Node], wanted: Sequence[float]) -> list[float]:
    """Return the centres closest to `wanted` at which the nodes of a row keep their gaps."""
    offsets = [0.0]
    for one, other in pairwise(row):
        gap = _GAP if one.is_box and other.is_box else _LANE_GAP
        offsets.append(offsets[-1] + one.half_width + gap + other.half_width)
    blocks: list[tuple[float, int]] = []
    for place, offset in zip(wanted, offsets, strict=True):
        mean, size = place - offset, 1
        while blocks and blocks[-1][0] > mean:
            last, nlast = blocks.pop()
            mean, size = (mean * size + last * nlast) / (size + nlast), size + nlast
        blocks.append((mean, size))
    shifts = [mean for mean, size in blocks for _ in range(size)]
    return [shift + offset for shift, offset in zip(shifts, offsets, strict=True)]


def _neighbours(segments: set[_Segment]) -> dict[Node, list[Node]]:
    found: dict[Node, list[Node]] = {}
    for upper, lower in sorted(segments):
        found.setdefault(upper, []).append(lower)
        found.setdefault(lower, []).append(upper)
    return found


def _wanted(
    node: Node, neighbours: Mapping[Node, Sequence[Node]], place: Mapping[Node, float]
) -> float:
    """Return the mean position of the nodes joined to `node`; its own if there are none."""
    joined = neighbours.get(node, [node])
    return sum(place[each] for each in joined) / len(joined)


# Drawing


def _svg(rows: Sequence[Sequence[str]], edges: Edges) -> str:
    nodes, segments = _graph(rows, edges)
    ordered = _order(nodes, segments)
    column = _columns(ordered, segments)
    top = _MARGIN + 2 * _LINE + 8
    width = max(x + node.half_width for node, x in column.items())
    inks = {name: shapes.colour(at) for at, name in enumerate(_targets(ordered, segments))}
    parts = [
        shapes.text((_MARGIN, _MARGIN + 13), TITLE, size=17, is_bold=True),
        shapes.text(
            (_MARGIN, _MARGIN + 13 + _LINE),
            "Each row is a layer; arrows are imports. Implied arrows are omitted.",
            size=13,
        ),
    ]

    def at(node: Node) -> Point:
        return _MARGIN + _NUMBERS + column[node], top + _ROW * node.row + _BOX / 2

    for row in range(len(rows)):
        low = top + _ROW * row + _BOX / 2
        parts.append(shapes.text((_MARGIN, low + 4), str(row + 1), ink=shapes.FAINT))
    for upper, lower in sorted(segments):
        parts.append(_segment(at(upper), at(lower), upper, lower, inks[lower.name]))
    parts += [_box(at(node), node) for row in ordered for node in row if node.is_box]
    height = top + _ROW * (len(rows) - 1) + _BOX + _MARGIN
    return shapes.document((width + 2 * _MARGIN + _NUMBERS, height), TITLE, parts)


def _targets(nodes: Sequence[Sequence[Node]], segments: set[_Segment]) -> list[str]:
    """Return the names of all imported packages, in drawing order."""
    named = {lower.name for _, lower in segments}
    return [node.name for row in nodes for node in row if node.is_box and node.name in named]


def _segment(begin: Point, end: Point, upper: Node, lower: Node, ink: str) -> str:
    """Draw a segment of an arrow between two rows; at a box it ends at the edge of the box."""
    start = begin[0], begin[1] + _BOX / 2
    stop = end[0], end[1] - _BOX / 2
    pieces = [] if upper.is_box else [shapes.line(begin, start, ink, 1.5)]
    if lower.is_box:
        pieces.append(shapes.arrow(start, stop, ink, gap=1, weight=0.12))
    else:
        pieces += [shapes.line(start, stop, ink, 1.5), shapes.line(stop, end, ink, 1.5)]
    return "".join(pieces)


def _box(at: Point, node: Node) -> str:
    half = node.half_width
    return (
        f'<rect x="{at[0] - half:.1f}" y="{at[1] - _BOX / 2:.1f}" width="{2 * half:.1f}" '
        f'height="{_BOX}" rx="5" fill="{shapes.GRID}" stroke="{shapes.FAINT}"/>'
    ) + shapes.text((at[0], at[1] + 4.5), node.name, size=13, is_centred=True)


def main() -> None:
    """Write the SVG file."""
    FILE.write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
