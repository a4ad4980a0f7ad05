"""What README and docs say is what the code does: snippets run, tables equal the data.

`test_readme_commands.py` runs the commands of the README, and with them its snippets.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import pytest
from support.pages import DOCS, PAGES, ROOT, all_blocks, blocks, run_script, text_of
from support.slow import slow_but

import r2ccl
from r2ccl import errors
from r2ccl.algos import (
    bridged_ring,
    direct_exchange,
    dissemination,
    hierarchy,
    leaf_ring,
    nested_rings,
    one_shot,
    optcc,
    packed_trees,
    r2cc_allreduce,
    recursive_doubling,
    ring,
    scan,
    tree,
    tree_gather,
)
from r2ccl.config import AGREED, ALIASES, Config
from r2ccl.dtypes import dtype_name
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.path import TRANSITIONS, PathAction, PathEvent, PathState
from r2ccl.kernels import OPS
from r2ccl.planning.cost_model import Fabric
from r2ccl.planning.planner import Planner
from r2ccl.schedule.cost import measure, wire_nbytes
from r2ccl.schedule.ir import OpKind, Schedule
from r2ccl.testing import faults
from r2ccl.types import CallSignature, Collective, ReduceOp

by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def rows(text: str) -> Iterator[list[str]]:
    """Cells of every table row of `text`."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|-"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def body(text: str, marker: str) -> list[list[str]]:
    """Rows, less the header, of the table between a marker and its end; all as long as it."""
    found = re.search(rf"<!-- table:{marker} -->\n(.*?)<!-- /table -->", text, re.DOTALL)
    assert found, f"no table {marker}"
    header, *others = rows(found[1])
    assert others, f"table {marker} is empty"
    assert {len(cells) for cells in others} == {len(header)}, f"table {marker}"
    return others


def test_the_table_of_reductions_is_that_of_the_kernels() -> None:
    listed = {
        name: ops
        for names, ops in body(text_of("docs/reductions.md"), "ops")
        for name in names.split(", ")
    }
    assert listed == {
        dtype_name(code): ", ".join(op.name for op in sorted(ops)) for code, ops in OPS.items()
    }


# Snippets


SNIPPETS = {
    f"{page.stem}-{number}": code
    for page in DOCS
    for number, code in enumerate(blocks(page.read_text(encoding="utf-8"), "python"))
}
#: Snippets that are run quickly: those without ranks, one that loses a rank, and one with a pool.
QUICK = {name for name, code in SNIPPETS.items() if "r2ccl.init(" not in code}
QUICK |= {"fault-model-0", "notebooks-1"}


@pytest.mark.parametrize("name", slow_but(QUICK, SNIPPETS))
def test_snippets_of_the_docs_run(name: str, tmp_path: Path) -> None:
    assert run_script(tmp_path, SNIPPETS[name])


@pytest.mark.parametrize("name", SNIPPETS)
def test_names_in_snippets_exist(name: str) -> None:
    tree = ast.parse(SNIPPETS[name])
    compile(tree, name, "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("r2ccl"):
            parents = [f"{node.module}.{alias.name}" for alias in node.names]
            assert all(resolves(each.split(".")) for each in parents), parents
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "r2ccl":
            assert hasattr(r2ccl, node.attr), node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = {"comm": r2ccl.Communicator, "pool": r2ccl.LaunchPool}
            found = owner.get(ast.unparse(node.func.value))
            assert found is None or hasattr(found, node.func.attr), ast.unparse(node.func)


# What is named exists


@by_name
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^a-z0-9 _-]", "", title.lower()) for title in titles}
            assert anchor.replace("-", " ") in {each.replace("-", " ") for each in anchors}, link


@by_name
def test_files_named_exist(page: Path) -> None:
    names = re.findall(
        r"\b((?:r2ccl|tests|docs|bench|examples)/[\w./-]*\w/?)", page.read_text(encoding="utf-8")
    )
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing


@by_name
def test_files_named_without_their_folder_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w-]+\.py)`", text)) - {each.title for each in all_blocks(text)}
    folders = ("r2ccl", "tests", "docs", "bench", "examples")
    known = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    known |= {path.name for path in ROOT.glob("*.py")}
    assert sorted(names - known - {"sum.py", "lose_a_rail.py", "script.py"}) == []


@by_name
def test_modules_named_exist(page: Path) -> None:
    for name in set(re.findall(r"\br2ccl(?:\.[A-Za-z_]\w*)+\b", page.read_text(encoding="utf-8"))):
        parts = name.split(".")
        assert resolves(parts), name


def resolves(parts: list[str]) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    for cut in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as exc:
            # A module for another library, which is not installed. A folder of its name on the
            # path is an empty package: the name that is missing is then `ray.util`.
            if (exc.name or "").partition(".")[0] in {"torch", "ray", "distributed"}:
                return cut == len(parts)
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@by_name
def test_make_targets_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))
    named = re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= targets


def test_every_page_of_the_docs_is_reached_from_the_readme() -> None:
    readme = text_of("README.md")
    # The how-to pages and the reference have pages that list them.
    here = [page.name for page in DOCS if page.parent == ROOT / "docs"]
    assert [name for name in here if f"(docs/{name})" not in readme] == []


# README and docs/architecture.md against pyproject.toml


def test_the_picture_shows_the_layers_that_are_checked() -> None:
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    checked = [
        {name.strip().removeprefix("r2ccl.") for name in layer.split("|")}
        for contract in contracts
        if contract["type"] == "layers"
        for layer in contract["layers"]
    ]
    picture = blocks(text_of("docs/architecture.md").split("<!-- layers -->")[1], "")[0]
    drawn = [
        {name.strip() for name in re.split(r"\s{2,}", line)[0].split("|")}
        for line in picture.splitlines()
    ]
    assert drawn == checked


def test_each_dependency_has_its_reason() -> None:
    section = text_of("README.md").split("## Dependencies")[1].split("\n## ")[0]
    given = [name for name, why in list(rows(section))[1:] if why]
    needed = tomllib.loads(text_of("pyproject.toml"))["project"]["dependencies"]
    assert given == [re.split(r"[<>=]", each)[0] for each in needed]


def test_each_extra_is_explained() -> None:
    section = text_of("docs/tuning.md").split("## Extras")[1]
    given = {name.strip("`") for name, _ in list(rows(section))[1:]}
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    assert given == set(extras)
    [named] = re.findall(r"the extras `([^`]+)`", text_of("README.md"))
    assert set(re.findall(r"\w+", named)) == set(extras)


def test_terms_of_our_own_are_few_and_each_has_a_relative() -> None:
    terms = body(text_of("docs/concepts.md"), "terms")
    assert len(terms) < 25
    assert [cells[0] for cells in terms if not all(cells)] == []


# Settings


def documented(name: str) -> dict[str, tuple[str, bool]]:
    """Variable to (default as written, whether it is marked as agreed) in a page's tables."""
    found = {}
    for cells in rows(text_of(name)):
        match = re.fullmatch(r"`(R2CC_\w+)`( \*)?", cells[0])
        if match:
            found[match[1]] = (cells[1].strip("`"), bool(match[2]))
    return found


def test_every_setting_is_documented_with_its_default() -> None:
    found = documented("docs/tuning.md")
    fields = Config.__struct_fields__
    assert set(found) == {f"R2CC_{field.upper()}" for field in fields}
    defaults = Config()
    for variable, (default, is_agreed) in found.items():
        field = variable.removeprefix("R2CC_").lower()
        read = Config.from_env({variable: default})
        assert getattr(read, field) == getattr(defaults, field), variable
        assert is_agreed == (field in AGREED), variable


def test_other_spellings_of_settings_are_documented() -> None:
    tuning = text_of("docs/tuning.md")
    assert [name for names in ALIASES.values() for name in names if f"`{name}`" not in tuning] == []


def test_timeouts_of_the_fault_model_have_their_defaults() -> None:
    found = documented("docs/fault-model.md")
    timeouts = [field for field in Config.__struct_fields__ if field.endswith("timeout_s")]
    assert set(found) == {f"R2CC_{field.upper()}" for field in timeouts}
    for variable, (default, _) in found.items():
        field = variable.removeprefix("R2CC_").lower()
        assert float(default) == getattr(Config(), field), variable


def test_every_variable_in_the_code_is_documented() -> None:
    sources = [*(ROOT / "r2ccl").rglob("*.py"), ROOT / "Makefile"]
    used = {
        name
        for path in sources
        for name in re.findall(r"R2CC_[A-Z]+(?:_[A-Z]+)*\b", path.read_text(encoding="utf-8"))
    }
    # Those of the labs are with the labs.
    tuning = text_of("docs/tuning.md") + text_of("docs/testing.md")
    assert sorted(name for name in used if f"`{name}`" not in tuning) == []


# Fault model


def test_the_path_table_is_the_one_that_runs() -> None:
    states = {state.value for state in PathState}
    shown = {}
    for cells in rows(text_of("docs/fault-model.md")):
        if len(cells) == 4 and cells[0] in states:
            state, event, following, actions = cells
            shown[PathState(state), PathEvent(event)] = (
                PathState(following),
                tuple(PathAction(name.strip()) for name in actions.split(",")),
            )
    assert shown == TRANSITIONS


def test_every_fault_is_explained() -> None:
    section = text_of("docs/fault-model.md").split("## The faults of a fault plan")[1]
    shown = [cells[0].strip("`") for cells in rows(section.split("\n## ")[0])][1:]
    assert shown == list(faults.Action)


# Errors


def test_every_error_has_a_section_and_a_place_in_the_tree() -> None:
    page = text_of("docs/errors.md")
    members = {name: getattr(errors, name) for name in errors.__all__}
    classes = {name: kind for name, kind in members.items() if isinstance(kind, type)}
    assert set(re.findall(r"^## `(\w+)`$", page, re.MULTILINE)) == set(classes)
    depths = {
        match[2]: len(match[1]) // 3
        for match in re.finditer(r"^([ │├└─]*)(\w+)", blocks(page, "")[0], re.MULTILINE)
    }
    tree = {
        name: len([base for base in inspect.getmro(kind) if base.__name__ in classes]) - 1
        for name, kind in classes.items()
    }
    assert depths == tree


# Algorithms


def one_slow(nranks: int) -> tuple[int, ...]:
    """Bandwidths: the last rank has 3/4 of each other's."""
    return (*[4] * (nranks - 1), 3)


SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "ring": ring.allreduce,
    "recursive doubling": recursive_doubling.allreduce,
    "dissemination": dissemination.allreduce,
    "one-shot": one_shot.allreduce,
    "two binary trees": lambda n: tree.allreduce(tree.double_binary(n)),
    "packed trees, 30": lambda n: packed_trees.allreduce(one_slow(n), 30),
    "leaf ring, 16 segments": lambda n: leaf_ring.allreduce(one_slow(n), 16),
    "R2CC-AllReduce, K = 16, best Y": lambda n: r2cc_allreduce.allreduce(one_slow(n), 16),
    "OptCC, k = 16": lambda n: optcc.allreduce(one_slow(n), 16),
    "nested rings, 16 segments": lambda n: nested_rings.allreduce(one_slow(n), 16),
    "bridged ring": lambda n: bridged_ring.allreduce(n, 1, lambda a, b: {a, b} != {0, 1}),
    "hierarchy": lambda n: hierarchy.wrap(
        ring.allreduce(n // 2, 2), [(low, low + 1) for low in range(0, n, 2)]
    ),
    "reduce-scatter, ring": ring.reduce_scatter,
    "reduce-scatter, dissemination": dissemination.reduce_scatter,
    "allgather, ring": ring.allgather,
    "allgather, dissemination": dissemination.allgather,
    "broadcast, binary tree": lambda n: tree.broadcast(tree.double_binary(n)[:1]),
    "broadcast, chain": lambda n: tree.broadcast([tree.chain(range(n))]),
    "reduce, binary tree": lambda n: tree.reduce(tree.double_binary(n)[:1]),
    "reduce, chain": lambda n: tree.reduce([tree.chain(range(n))]),
    "gather, direct": direct_exchange.gather,
    "gather, binomial tree": lambda n: tree_gather.gather(tree_gather.binomial(n)),
    "scatter, direct": direct_exchange.scatter,
    "scatter, binomial tree": lambda n: tree_gather.scatter(tree_gather.binomial(n)),
    "alltoall, direct": direct_exchange.alltoall,
    "scan, doubling": scan.doubling,
    "scan, chain": scan.chain,
    "exscan, doubling": lambda n: scan.doubling(n, is_exclusive=True),
    "exscan, chain": lambda n: scan.chain(n, is_exclusive=True),
}


def busiest_port(schedule: Schedule, bandwidths: tuple[int, ...]) -> Fraction:
    """Time of the port that takes longest, with bandwidths in multiples of B/4."""
    total = sum(schedule.weights)
    times = []
    for rank, bandwidth in enumerate(bandwidths):
        for kinds in ({OpKind.SEND}, {OpKind.RECV, OpKind.RECV_REDUCE}):
            moved = sum(
                Fraction(weight * sum(op.kind in kinds for op in ops), total * nchunks)
                for weight, nchunks, ops in zip(
                    schedule.weights,
                    schedule.nchunks,
                    schedule.program(rank).channels,
                    strict=True,
                )
            )
            times.append(moved * 4 / bandwidth)
    return max(times)


def test_the_cost_of_every_schedule_is_counted() -> None:
    shown = body(text_of("docs/algorithms.md"), "schedules")
    assert [name for name, *_ in shown] == list(SCHEDULES)
    for name, *cells in shown:
        counted = []
        for nranks in (4, 8):
            schedule = SCHEDULES[name](nranks)
            cost = measure(schedule)
            port = f"{float(busiest_port(schedule, one_slow(nranks))):.3f}"
            is_alike = name != "hierarchy"  # ports within a node are not those between nodes
            counted += [str(cost.steps), str(cost.sent), port if is_alike else "-"]
        assert cells == counted, f"{name}: write | {' | '.join([name, *counted])} |"


def test_the_bound_beside_them_is_the_bound() -> None:
    four, eight = (float(4 * packed_trees.lower_bound(one_slow(n))) for n in (4, 8))
    assert f"is {four:.3f} for 4 ranks and {eight:.3f} for 8." in text_of("docs/algorithms.md")


def test_costs_are_counted_from_the_schedules() -> None:
    for cells in body(text_of("docs/algorithms.md"), "cost"):
        nranks = int(cells[0])
        counted = [measure(each.allreduce(nranks)) for each in (ring, recursive_doubling)]
        assert cells[1:] == [str(part) for cost in counted for part in (cost.steps, cost.sent)]
        assert all(cost.received == cost.sent for cost in counted)


def test_bytes_are_counted_from_the_schedules() -> None:
    for cells in body(text_of("docs/algorithms.md"), "bytes"):
        nranks, *shown = map(int, cells)
        for nbytes, algorithm in zip(shown, (ring, recursive_doubling), strict=True):
            sent, received = wire_nbytes(algorithm.allreduce(nranks), 4 << 20, 4)
            assert nbytes == sent.max() == received.max()


def test_choices_are_the_planners() -> None:
    for cells in body(text_of("docs/algorithms.md"), "choice"):
        nranks, nrails, nbytes = map(int, cells[:3])
        call = CallSignature(Collective.ALLREDUCE, 0, ReduceOp.SUM, nbytes)
        whole = Health.whole(nranks, nrails)
        fabric = Fabric(range(nrails), nrails)
        chosen = Planner(fabric, Config()).plan(call, nbytes, whole).schedule
        assert cells[3:] == [chosen.name, str(chosen.nchannels)]


# README's table


def test_the_measured_table_names_its_command() -> None:
    readme = text_of("README.md")
    assert body(readme, "peers")
    below = readme.split("<!-- table:peers -->")[1].split("<!-- /table -->")[1]
    assert below.lstrip().startswith("`make bench`")
