"""Pictures: those in the docs are what the schedules do, and a picture shows all its ops say."""

from __future__ import annotations

import importlib.util
import re
from itertools import combinations
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from r2ccl.algos import hierarchy, leaf_ring, one_shot, packed_trees, recursive_doubling, ring, tree
from r2ccl.errors import InvalidArgument, ScheduleError
from r2ccl.schedule import shapes
from r2ccl.schedule.check import check
from r2ccl.schedule.draw import DEFAULT_PANELS, svg
from r2ccl.schedule.ir import Schedule

DOCS = Path(__file__).parents[3] / "docs"
MAX_NBYTES = 60_000
SVG = "{http://www.w3.org/2000/svg}"


def load_pictures(name: str = "draw") -> ModuleType:
    path = DOCS / f"pictures/{name}.py"
    spec = importlib.util.spec_from_file_location(f"pictures_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURES = load_pictures()
PACKAGES = load_pictures("packages")


def words(picture: str) -> list[str]:
    """Every text of a picture, and that it is XML."""
    return [each.text or "" for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def arrows(picture: str) -> int:
    """Arrow heads, less that of the legend."""
    return len(re.findall(r'Z" fill=', picture)) - 1


def pluses(picture: str) -> int:
    """Additions, less those of the legend."""
    return picture.count("<circle") - sum(
        each in words(picture) for each in ("added", "sum complete")
    )


# Those of the docs


@pytest.mark.parametrize("name", PICTURES.PICTURES)
def test_the_pictures_of_the_docs_are_what_the_schedules_do(name: str) -> None:
    path = DOCS / f"pictures/{name}.svg"
    assert path.is_file(), f"no {path}; run `make pictures`"
    is_same = path.read_text(encoding="utf-8") == PICTURES.drawn(name)
    assert is_same, f"the schedule is not what {path} shows; run `make pictures`"
    assert path.stat().st_size < MAX_NBYTES


@pytest.mark.parametrize("name", PICTURES.PICTURES)
def test_what_is_drawn_for_the_docs_is_right(name: str) -> None:
    schedule = PICTURES.PICTURES[name].schedule
    check(schedule)
    assert schedule.nranks == 4


def test_every_picture_is_shown_and_none_is_left_over() -> None:
    shown = re.findall(r"\]\(pictures/(\w+)\.svg\)", (DOCS / "algorithms.md").read_text("utf-8"))
    there = {path.stem for path in (DOCS / "pictures").glob("*.svg")} - PICTURES.OTHERS
    assert sorted(shown) == sorted(there) == sorted(PICTURES.PICTURES), "run `make pictures`"


# That of the packages


def test_the_picture_of_the_packages_is_what_the_code_imports() -> None:
    assert PACKAGES.FILE.read_text(encoding="utf-8") == PACKAGES.drawn(), "run `make pictures`"
    assert "](pictures/packages.svg)" in (DOCS / "architecture.md").read_text("utf-8")


def test_the_picture_of_the_packages_has_a_box_for_each() -> None:
    folder = DOCS.parent / "r2ccl"
    found = {path.stem for path in folder.glob("[!_]*.py")}
    found |= {path.parent.name for path in folder.glob("*/__init__.py")}
    names = [name for layer in PACKAGES.layers() for name in layer]
    assert sorted(names) == sorted(found)
    assert found <= set(words(PACKAGES.FILE.read_text(encoding="utf-8")))


def test_arrows_that_others_imply_are_left_out_and_no_other() -> None:
    edges = {"a": frozenset("bcd"), "b": frozenset("c"), "c": frozenset(), "d": frozenset()}
    assert PACKAGES.reduced(edges) == {**edges, "a": frozenset("bd")}


# What a picture shows


@pytest.mark.parametrize(
    ("schedule", "narrows", "npluses"),
    [
        (ring.allreduce(4), 24, 12),
        (ring.allgather(3), 6, 0),
        (recursive_doubling.allreduce(8), 24, 24),
        (one_shot.allreduce(3), 6, 6),
        (tree.reduce([tree.chain(range(5))]), 4, 4),
        (packed_trees.allreduce((4, 4, 4, 3), 5), 30, 15),
    ],
    ids=lambda given: given.name if isinstance(given, Schedule) else str(given),
)
def test_every_message_is_an_arrow_and_every_addition_a_plus(
    schedule: Schedule, narrows: int, npluses: int
) -> None:
    picture = svg(schedule)
    assert (arrows(picture), pluses(picture)) == (narrows, npluses)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_steps_are_those_of_the_event_graph(n: int) -> None:
    schedule = ring.allreduce(n)
    shown = words(svg(schedule))
    assert shown.count("step 1") == 1
    assert str(schedule.cost.steps) in shown
    assert str(schedule.cost.steps + 1) not in shown


def test_chunks_that_go_together_are_one_arrow() -> None:
    shown = words(svg(hierarchy.wrap(ring.allreduce(2, 2), [(0, 1), (2, 3)])))
    assert shown.count("0-1") == 4


def test_what_lands_before_it_is_added_is_seen_to_wait() -> None:
    waiting = "landed, not added yet"
    assert waiting in words(svg(leaf_ring.allreduce((2, 2, 2, 1), 1)))
    assert waiting not in words(svg(ring.allreduce(4)))


def test_loads_are_those_of_each_rank() -> None:
    assert "Every rank sends and receives 3/2 times the data" in words(svg(ring.allreduce(4)))
    assert "Ranks 0 to 3 send 8/5, 8/5, 8/5, 6/5 times the data and receive as much" in words(
        svg(packed_trees.allreduce((4, 4, 4, 3), 5))
    )
    assert "Ranks 0 to 2 send 1, 1, 0 times the data and receive 0, 1, 1" in words(
        svg(tree.broadcast([tree.chain(range(3))]))
    )
    assert "Ranks 0 to 15 send 1 to 2 times the data and receive as much" in words(
        svg(tree.allreduce(tree.double_binary(16)))
    )


def test_a_picture_says_how_many_channels_it_leaves_out() -> None:
    many = ring.allreduce(3, DEFAULT_PANELS + 2)
    assert "2 channels more, not shown" in words(svg(many))
    assert arrows(svg(many)) == 12 * DEFAULT_PANELS
    assert "1 channel more, not shown" in words(svg(ring.allreduce(3, 2), max_panels=1))
    assert not [text for text in words(svg(ring.allreduce(3, 2))) if "not shown" in text]


def test_one_rank_has_a_picture() -> None:
    assert "copied" in words(svg(ring.allreduce(1)))


def test_names_and_captions_are_text_and_not_markup() -> None:
    name = '<script>"&'
    shown = words(svg(replace(ring.allreduce(2), name=name), caption="a < b"))
    assert shown[0] == f"allreduce: {name}"
    assert "a < b" in shown


def test_no_panel_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_panels=0"):
        svg(ring.allreduce(2), max_panels=0)


def test_a_schedule_that_is_wrong_has_no_picture() -> None:
    schedule = ring.allreduce(2)
    silent = replace(schedule, generate=lambda rank: schedule.generate(rank) if rank else ((),))
    with pytest.raises(ScheduleError, match="rank 0 has no matching send"):
        svg(silent)


def test_numbers_on_arrows_do_not_cover_one_another() -> None:
    root = ElementTree.fromstring(svg(ring.allreduce(4)))
    [panel, _] = root.findall(f"{SVG}g")
    badges = [
        tuple(float(each.get(name, "")) for name in ("x", "y", "width", "height"))
        for each in panel.findall(f"{SVG}rect")
    ]
    assert len(badges) == 24
    for (x, y, width, height), (left, top, wide, high) in combinations(badges, 2):
        is_beside = x + width <= left or left + wide <= x
        assert is_beside or y + height <= top or top + high <= y


# Shapes


@pytest.mark.parametrize("number", range(-8, 8))
def test_white_text_can_be_read_on_every_colour(number: int) -> None:
    code = shapes.colour(number)
    parts = [int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert 1.05 / (luminance + 0.05) >= 4.5
