"""The rules of the tree: few packages, imports that point down, one name for one thing."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "r2ccl"

#: With `r2ccl.torch`, the name that programs of torch import.
MAX_MODULES = 10
#: With `r2ccl.shm`: memory of one host is no transport, as it has neither paths nor slices.
MAX_PACKAGES = 16
MAX_LAYERS = 14
#: Modules of fewer lines belong in the one that imports them, if only one does.
MIN_NLINES = 60

#: Small modules of one importer that stay apart: those may not import Numba, the last one pyverbs.
APART = {"r2ccl.kernels.cuda.compiling", "r2ccl.kernels.fold", "r2ccl.transport.verbs.mappings"}
#: Commands of the public test tools and of the demo, and what these know of installing pyverbs.
TESTING_COMMANDS = {f"r2ccl.cli.{name}" for name in (
    "netlab", "rdmalab", "doctor_report", "diagnosis", "demo_rank",
)}  # fmt: skip

#: Words of the first version that the field has terms for; torch's own ``Work`` stays.
REPLACED = (
    "admission", "bounce", "candidates", "collective_candidates", "council", "detector", "detours",
    "dialed", "direct", "directjoin", "dumping", "entry", "gate", "gathering", "hostcalls",
    "inquiry", "joining", "knock", "ledger", "nearness", "nodecalls", "nodejoin", "noticeboard",
    "offload", "plans", "prediction", "prober", "probing", "recovery", "regroup", "relayed",
    "rollcall", "settling", "spread", "standins", "tidings", "tiers", "ways", "wired",
)  # fmt: skip
#: Those that are still there; the list may only become shorter.
STILL_THERE: set[str] = set()

#: Names that other modules import and ``__all__`` lacks; the list may only become shorter.
NOT_LISTED = {
    ("r2ccl.config", "AGREED"),
    ("r2ccl.config", "DEBUG_LEVELS"),
    ("r2ccl.testing.simulation.data", "Array"),
    ("r2ccl.topology.interfaces", "VIRTUAL_PREFIXES"),
    ("r2ccl.transport.verbs.staging", "Array"),
}


def modules() -> dict[str, Path]:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        found[name.removesuffix(".__init__")] = file
    return found


MODULES = modules()


class Source(NamedTuple):
    """Facts about a module, kept in place of its tree, whose memory slows down the parser."""

    #: Also those below functions and for types alone.
    imports: list[ast.Import | ast.ImportFrom]
    classes: list[str]
    #: The names in ``__all__``; None if there is none.
    listed: set[str] | None


def read(file: Path) -> Source:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    return Source(
        [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))],
        [node.name for node in nodes if isinstance(node, ast.ClassDef)],
        listed(tree),
    )


def listed(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


@functools.cache
def sources() -> dict[str, Source]:
    return {name: read(file) for name, file in MODULES.items()}


def imports_of(source: Source) -> set[str]:
    """All modules of the library that one imports."""
    found = set()
    for node in source.imports:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else node.module for name in names)
        else:
            found.update(alias.name for alias in node.names)
    return found & MODULES.keys()


@functools.cache
def imports() -> dict[str, set[str]]:
    return {name: imports_of(source) - {name} for name, source in sources().items()}


def test_a_listing_shows_few_modules_and_packages() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_MODULES
    assert len([each for each in PACKAGE.iterdir() if (each / "__init__.py").exists()]) <= (
        MAX_PACKAGES
    )


def test_layers_are_few_and_count_imports_for_types() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in settings["contracts"] if each["type"] == "layers")
    assert len(layers) <= MAX_LAYERS
    assert not settings["exclude_type_checking_imports"]


def test_every_decoder_of_msgspec_is_made_once() -> None:
    """msgspec prepares a type at its first use, and crashes if two threads do so at once."""
    given = re.compile(r"msgspec\.(json|msgpack)\.decode\(")
    assert [name for name, file in MODULES.items() if given.search(file.read_text())] == []


def test_no_module_imports_itself_by_a_detour() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as exc:
        pytest.fail(f"a cycle: {' <- '.join(exc.args[1])}")


def test_production_imports_nothing_of_testing() -> None:
    for name, imported in imports().items():
        if not name.startswith("r2ccl.testing") and name not in TESTING_COMMANDS:
            assert not [each for each in imported if each.startswith("r2ccl.testing")], name


def test_small_modules_have_more_than_one_importer() -> None:
    importers = defaultdict(set)
    for name, imported in imports().items():
        for each in imported:
            importers[each].add(name)
    small = {
        name
        for name, file in MODULES.items()
        if file.name not in ("__init__.py", "__main__.py")
        and len(file.read_text(encoding="utf-8").splitlines()) < MIN_NLINES
        and len(importers[name]) == 1
    }
    assert small <= APART


def test_a_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for name, source in sources().items():
        for each in source.classes:
            if not each.startswith("_"):
                places[each].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_words_that_were_replaced_do_not_come_back() -> None:
    words = {name.rpartition(".")[2] for name in MODULES}
    classes = {each.lower() for source in sources().values() for each in source.classes}
    assert set(REPLACED) & (words | classes) <= STILL_THERE


def test_the_communicator_is_an_index_without_logic() -> None:
    logic = (ast.For, ast.While, ast.Try, ast.With, ast.Raise, ast.Assert, ast.comprehension)
    for node in ast.walk(ast.parse((PACKAGE / "communicator.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            found = list(ast.walk(node))
            assert not [each for each in found if isinstance(each, logic)], node.name
            assert len([each for each in found if isinstance(each, ast.stmt)]) <= 5, node.name


def test_names_that_others_import_are_in_all() -> None:
    names = {name: source.listed for name, source in sources().items()}
    missing = {
        (node.module, alias.name)
        for source in sources().values()
        for node in source.imports
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if f"{node.module}.{alias.name}" not in MODULES
        if alias.name not in (names.get(node.module) or {alias.name})
    }
    assert missing <= NOT_LISTED
