"""Every message of the library is in docs/errors.md, and errors tell who, where and what next.

The first half reads the sources: each place that makes a public error or logs a warning must match
a row of the page, and each row a place. The second half raises every error for real.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.once import once

import r2ccl
from r2ccl import errors
from r2ccl.config import Config
from r2ccl.failover.context import RankContext
from r2ccl.failover.migration.link import SendLink
from r2ccl.failover.shrink.driver import EventQueue, regroup
from r2ccl.failover.shrink.protocol import Shrinking
from r2ccl.runtime.arguments import as_buffer
from r2ccl.runtime.engine import Engine
from r2ccl.schedule.check import check
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space
from r2ccl.transport.base import Failed
from r2ccl.transport.verbs.status import STATUSES
from r2ccl.types import PathKey

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
TOOLS = ("LabError", "RdmaLabError", "MpiError", "DistBackendError")
CLASSES = (*errors.__all__, *TOOLS)

#: Errors whose class writes the message.
SELF_SPOKEN = ("NoHealthyRail", "PeerLost", "NoQuorum")
#: Functions that make an error of what they are given: which, and the text's place among arguments.
MAKERS = {"error_at": ("ScheduleError", 2), "_fault": ("InvalidArgument", 0),
          "_no_direct_way": ("TransportError", 0)}  # fmt: skip
LOGGED = ("warning", "error", "exception", "critical", "log")


class Site(NamedTuple):
    """A place in the code that speaks to the user."""

    kind: str
    template: str
    where: str


class Module:
    """Templates of a module: its strings, with ``…`` for what is filled in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.nodes = list(ast.walk(tree))
        self.constants: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = node.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    self.constants[node.targets[0].id] = value.value

    def template(self, node: ast.expr) -> str:
        return re.sub("…+", "…", self._text(node))

    def _text(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return re.sub(r"%[-.\d]*[sdgfr]", "…", node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._text, node.values))
        if isinstance(node, ast.FormattedValue):
            return self._text(node.value) if isinstance(node.value, ast.Name) else "…"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left) + self._text(node.right)
        if isinstance(node, ast.Name):
            return self.constants.get(node.id, "…")
        return "…"

    def sites(self) -> Iterator[Site]:
        for node in self.nodes:
            if isinstance(node, ast.Call):
                for kind, text in self._said(node):
                    where = f"{self.path.relative_to(ROOT)}:{node.lineno}"
                    yield Site(kind, self.template(text), where)
            elif isinstance(node, ast.ClassDef) and node.name in SELF_SPOKEN:
                for call in filter(is_init_of_base, ast.walk(node)):
                    where = f"{self.path.relative_to(ROOT)}:{call.lineno}"
                    yield Site(node.name, self.template(call.args[0]), where)

    def _said(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        name, owner = name_of(call.func)
        if name in CLASSES and name not in SELF_SPOKEN and call.args:
            yield name, call.args[0]
        elif name in MAKERS:
            kind, place = MAKERS[name]
            yield kind, call.args[place]
        elif name == "append" and owner == "_faults":
            yield "InvalidArgument", call.args[0]
        elif name == "MeetingFailed" and "bootstrap" in self.path.parts:
            is_timeout = any(each.arg == "is_timeout" for each in call.keywords)
            yield "TransportTimeout" if is_timeout else "InvalidArgument", call.args[0]
        elif name == "Revoke" and isinstance(call.args[0], ast.Constant):
            yield str(call.args[0].value), call.args[1]
        elif name in LOGGED and owner in ("_log", "logger"):
            yield "log", call.args[name == "log"]


def is_init_of_base(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__"


def name_of(function: ast.expr) -> tuple[str, str]:
    """Name of what is called, and of the object whose method it is."""
    if isinstance(function, ast.Name):
        return function.id, ""
    if isinstance(function, ast.Attribute):
        owner = function.value
        last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        return function.attr, last
    return "", ""


def only_passes_on(template: str) -> bool:
    """Whether the words are another's: nothing but who says it is written here."""
    return len(re.findall(r"[A-Za-z]", re.sub(r"^rank …", "", template))) < 3


def names_in(annotation: ast.expr) -> Iterator[str]:
    """Yield the names in an annotation, also in one that is a string."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant):
            yield from re.findall(r"\w+", str(node.value))
        else:
            yield str(getattr(node, "attr", getattr(node, "id", "")))


class Facts(NamedTuple):
    """Raised errors, statuses and causes in the sources of the library."""

    sites: list[Site]
    #: Names that are raised, and functions whose annotation names a public error.
    raised: list[str]
    returning: list[str]
    #: Constants passed as ``status``, and what stands before the colon in causes of failures.
    statuses: list[str]
    causes: list[str]


def collect() -> Facts:
    facts = Facts([], [], [], [], [])
    for path in sorted((ROOT / "r2ccl").rglob("*.py")):
        module = Module(path)  # one at a time: many trees in memory slow down the parser
        facts.sites.extend(module.sites())
        for node in module.nodes:
            if isinstance(node, ast.Raise):
                facts.raised.extend(names_raised(node))
            elif isinstance(node, ast.FunctionDef):
                if node.returns and not set(CLASSES).isdisjoint(names_in(node.returns)):
                    facts.returning.append(node.name)
            elif isinstance(node, ast.Call):
                facts.statuses.extend(statuses_given(node))
                facts.causes.extend(causes_named(module, node))
    return facts


def names_raised(node: ast.Raise) -> Iterator[str]:
    if isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
        yield node.exc.func.id


def statuses_given(call: ast.Call) -> Iterator[Any]:
    for keyword in call.keywords:
        if keyword.arg == "status" and isinstance(keyword.value, ast.Constant):
            yield keyword.value.value


def causes_named(module: Module, call: ast.Call) -> Iterator[str]:
    if name_of(call.func) == ("fail", "self"):
        template = module.template(call.args[-1])
        if template[:1].isupper():
            yield template.partition(":")[0]


@pytest.fixture(scope="session")
def facts(run_folder: Path) -> Facts:
    """Return what one process of this run collects: parsing the sources takes 3 s."""
    sites, *others = once(run_folder, "facts-of-messages", collect)
    return Facts([Site(*each) for each in sites], *others)


def patterns(kind: str) -> list[str]:
    """Messages listed for a class, or for the log."""
    tables = re.findall(rf"<!-- messages:{kind} -->\n(.*?)<!-- /messages -->", PAGE, re.DOTALL)
    rows = [row.split(" | ") for table in tables for row in table.splitlines()[2:]]
    assert all(len(row) == 3 and all(cell.strip(" |") for cell in row) for row in rows), kind
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row[0])]


def matches(pattern: str, text: str) -> bool:
    return compiled(pattern).fullmatch(text) is not None


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("…"))), re.DOTALL)


@pytest.mark.parametrize("kind", [*CLASSES, "log"])
def test_every_message_is_documented_and_every_row_is_a_message(kind: str, facts: Facts) -> None:
    listed = patterns(kind)
    spoken = [
        site for site in facts.sites if site.kind == kind and not only_passes_on(site.template)
    ]
    missing = [site for site in spoken if not any(matches(row, site.template) for row in listed)]
    assert missing == [], "add them to docs/errors.md, with what they mean and what to do"
    stale = [row for row in listed if not any(matches(row, site.template) for site in spoken)]
    assert stale == [], "no such message any more"


def test_no_message_names_a_page_by_its_file(facts: Facts) -> None:
    """A wheel contains no pages, so a message gives the title of the page."""
    assert [site for site in facts.sites if "docs/" in site.template] == []


def test_the_collector_sees_the_places_that_raise(facts: Facts) -> None:
    """A name that is raised and is no class of ours is a helper that returns one, or known here."""
    assert len(facts.sites) > 150
    inner = {"_failure", "_FoundFaults", "HandshakeRejected", "HandshakeTimeout", "FrameError",
             "LinkEnded", "Violation", "_Outcome", "_RemoteTraceback",
             "FakePyverbsError"}  # fmt: skip
    builtin = {"AssertionError", "AttributeError", "BufferError", "ConnectionAbortedError",
               "ConnectionResetError", "ImportError", "KeyError", "OSError", "SystemExit",
               "TypeError", "ValueError"}  # fmt: skip
    known = {*CLASSES, *facts.returning} | inner | builtin
    assert set(facts.raised) <= known


def test_every_status_is_documented(facts: Facts) -> None:
    assert facts.causes
    listed = re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE)
    assert {*facts.statuses, *facts.causes, "EOF", "EBADMSG"} <= set(listed)


def test_completions_are_documented_in_the_words_of_the_library() -> None:
    table = PAGE.split("<!-- table:completions -->")[1].split("<!-- /table -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    known = [[f"`{s.name}`", s.meaning, s.hint] for number, s in STATUSES.items() if number]
    assert rows == known


# Raised for real


class Still:
    """A transport, or a control plane, on which nothing happens and nothing is refused."""

    nrails = 2
    rank = 0
    nranks = 3

    def joins(self, rail: int) -> bool:
        return False

    def poll(self, timeout_s: float) -> list[Any]:
        return []

    def obstacles(self, peer: int) -> list[str]:
        return []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **more: None


class Running:
    """A clock that goes on by 10 ms whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


def engine(**settings: Any) -> Engine:
    still: Any = Still()
    return Engine.of_job(RankContext(0, 3, still, still, Config(**settings), Running()), still)


def call(engine: Engine) -> None:
    engine.run(0, lambda _: [], frozenset({1}))


def launched_rank_dies() -> None:
    r2ccl.launch(functools.partial(os._exit, 3), 1, timeout_s=60.0)


def wrong_schedule() -> None:
    def sends_only(rank: int) -> tuple[tuple[Op, ...], ...]:
        return ((Op(OpKind.SEND, 1 - rank, Space.INPUT, 0, Space.OUTPUT, -1, ()),),)

    check(
        Schedule(
            name="deaf",
            collective="allreduce",
            nranks=2,
            nchunks=(1,),
            cost=Cost(0, 0, 0, 0),
            generate=sends_only,
        )
    )


def without_resilience() -> Engine:
    baseline = engine(mode="failstop")
    for rail in (0, 1):
        baseline.on_path(1, rail, 0, Still())
    return baseline


def path_breaks_without_resilience() -> None:
    broken = without_resilience()
    broken.submit(broken._migration.on_failed, Failed(PathKey(1, 1), "EPIPE", "gone"))
    call(broken)


def work_request_fails_without_resilience() -> None:
    broken = without_resilience()
    failed = Failed(PathKey(1, 1), "RETRY_EXC_ERR", "the peer's NIC does not answer")
    broken.submit(broken._migration.on_failed, failed)
    call(broken)


def carrier_is_lost_without_resilience() -> None:
    broken = without_resilience()
    broken.on_carrier(1, False)
    call(broken)


def nobody_connects() -> None:
    engine(init_timeout_s=0.5).start()


def every_rail_is_gone() -> None:
    alone = engine(no_rail_timeout_s=0.1)
    alone._failover.start()
    alone._failover.tick(5.0, frozenset({1}))
    call(alone)


def peer_dies() -> None:
    bereft = engine()
    bereft.on_peer_lost(2, "its host does not answer", 1.5)
    call(bereft)


def all_the_others_are_lost() -> None:
    alone: Any = SimpleNamespace(rank=0, nranks=3, setting=SimpleNamespace(config=Config()))
    quiet: Any = Still()
    event_queue = EventQueue(0, quiet)
    for peer in (1, 2):
        event_queue.on_peer_lost(peer, "its process died", 0.1)
    regroup(Shrinking(0, 3), event_queue, alone, quiet.make)


def call_after_the_end() -> None:
    over = engine()
    over.on_peer_lost(2, "its host does not answer", 1.5)
    with pytest.raises(errors.PeerLost):
        call(over)
    call(over)


def call_beside_another() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("MASTER_ADDR", "::1"),
            ("MASTER_PORT", "1"),
        ):
            patch.setenv(name, value)
        with r2ccl.init() as alone:
            alone._collectives.in_turn(alone.barrier)


def confirmed_what_never_was() -> None:
    SendLink(1, 0, 4).confirm(5)


def raised_by(act: Callable[[], object], kind: type[Exception]) -> Any:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    return caught.value


#: How a message ends: what the reader can do.
NEXT_STEP = r"\b(look|restore|raise|restart|pass|allowed|does not migrate|shrink)\b"

CASES = [
    (errors.R2cclError, launched_rank_dies, {"rank": 0}),
    (errors.InvalidArgument, lambda: as_buffer(np.ones((4, 4))[:, ::2], writable=True), {}),
    (errors.ScheduleError, wrong_schedule, {"rank": 0, "channel": 0, "op": 0}),
    (errors.TransportError, path_breaks_without_resilience, {"rank": 0, "peer": 1, "rail": 1}),
    (
        errors.CompletionError,
        work_request_fails_without_resilience,
        {"rank": 0, "peer": 1, "rail": 1},
    ),
    (errors.RailDown, carrier_is_lost_without_resilience, {"rank": 0, "peer": 1, "rail": 1}),
    (errors.TransportTimeout, nobody_connects, {"rank": 0}),
    (errors.NoHealthyRail, every_rail_is_gone, {"rank": 0, "peer": 1}),
    (errors.PeerLost, peer_dies, {"rank": 0, "peer": 2}),
    (errors.NoQuorum, all_the_others_are_lost, {"rank": 0}),
    (errors.CommunicatorRevoked, call_after_the_end, {"rank": 0}),
    (errors.ConcurrentCalls, call_beside_another, {"rank": 0}),
    (errors.InternalError, confirmed_what_never_was, {}),
]


@pytest.mark.parametrize(
    ("kind", "act", "known"), CASES, ids=lambda each: getattr(each, "__name__", "")
)
def test_an_error_says_who_where_and_what_to_do(
    kind: type[Exception], act: Callable[[], object], known: dict[str, int]
) -> None:
    error = raised_by(act, kind)
    message = str(error)
    for name, number in known.items():
        # An error of the launcher concerns a rank, and has no attributes.
        assert getattr(error, name, number) == number
        word = "rank" if name == "peer" else name
        assert re.search(rf"\b{word} {number}\b", message), message
    listed = [row for row in patterns(kind.__name__) if matches(row, message)]
    assert listed, message
    if kind not in (errors.ScheduleError, errors.InternalError):  # the page says it of these
        assert re.search(NEXT_STEP, message), message


def test_every_error_is_raised_here() -> None:
    named = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert {kind.__name__ for kind, _, _ in CASES} == named
