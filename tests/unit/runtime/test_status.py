"""The status says what the links did, and what a call waits for is what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.datapaths import DataPath

from r2ccl.algos import ring
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument, PeerLost, TransportTimeout
from r2ccl.failover.context import RankContext
from r2ccl.failover.health.driver import Known
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.links import Links
from r2ccl.failover.migration.path import Announcement, ClosePaths, PathState
from r2ccl.failover.revocation import Leaving
from r2ccl.planning.lowering import lower
from r2ccl.planning.plan_cache import Plan, Planning
from r2ccl.runtime import status
from r2ccl.runtime.desync_check import Calling
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import HostLanes, LandingPool, LaneRun
from r2ccl.testing.simulation.network import SimNetwork, Timeline
from r2ccl.testing.simulation.transport import SimTransport
from r2ccl.transport.base import Event, Failed
from r2ccl.types import CallSignature, Collective, Nic, PathKey, ReduceOp

COUNT = 30_000
CALL = CallSignature(Collective.ALLREDUCE, 7, ReduceOp.SUM, COUNT)
SIGNATURE = CALL.pack()
NICS = (Nic("eth0", "10.0.0.1", 2, 100_000), Nic("eth1", "10.1.0.1", 3, 100_000))


class Quiet:
    """A control plane of which nothing is wanted."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


class Driven(SimTransport):
    """Lets time pass, and the other ranks do their part, while its owner waits."""

    others: Sequence[DataPath] = ()

    def poll(self, timeout_s: float) -> list[Event]:
        timeline = self._network.timeline
        passed: list[bool] = []
        timeline.after(timeout_s + 1e-6, passed.append, True)
        while not passed:
            timeline.step()
            for other in self.others:
                other.progress.step()
        return super().poll(timeout_s)

    def wake(self) -> None: ...


class Control:
    """Connects rank 0's paths, unless told not to; the ranks that have called answer."""

    def __init__(self, joined: set[int], reached: set[int]) -> None:
        self.is_busy = False
        self.neighbors = frozenset((1, 2))
        self.joined = joined
        self.reached = reached
        self.sent: list[tuple[int, object]] = []
        self.connect: Callable[[int, int], None] = lambda peer, rail: None
        self.answer: Callable[[int, object], None] = lambda peer, message: None

    def obstacles(self, peer: int) -> list[str]:
        return []

    def dial_path(self, peer: int, rail: int, epoch: int) -> None:
        if peer in self.reached and epoch == 0:
            self.connect(peer, rail)

    def send(self, peer: int, message: object) -> None:
        self.sent.append((peer, message))

    def gossip(self, message: object, source: int = -1) -> None:
        self.sent.append((-1, message))
        if isinstance(message, Calling):
            for peer in self.joined:
                self.answer(peer, Calling(message.op, ((peer, message.op, None),)))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


class World:
    """Rank 0 with its engine; ranks 1 and 2 are there, and do what they are told."""

    def __init__(self, *, joined: Sequence[int] = (), reached: Sequence[int] = (1, 2)) -> None:
        self.config = Config(timeout_s=3.0, init_timeout_s=4.0, connect_timeout_s=1.0)
        self.timeline = Timeline(0)
        self.network = SimNetwork(self.timeline, 3, 2)
        self.transport = Driven(self.network, 0)
        self.control = Control(set(joined), set(reached))
        self.others = [
            DataPath(
                rank,
                3,
                transport=SimTransport(self.network, rank),
                control=Quiet(),
                config=self.config,
                clock=self.timeline,
            )
            for rank in (1, 2)
        ]
        self.transport.others = self.others
        self.control.connect = self.connect
        control: Any = self.control
        self.engine = Engine.of_job(
            RankContext(0, 3, self.transport, control, self.config, self.timeline), control
        )
        self.control.answer = self.engine.on_message

    def connect(self, peer: int, rail: int) -> None:
        mine, theirs = self.network.connect(self.network.wire(0, peer, rail))
        self.engine.on_path(peer, rail, 0, mine)
        self.others[peer - 1].migration.on_opened(0, rail, 0, theirs)

    def connect_others(self) -> None:
        for rail in (0, 1):
            ends = self.network.connect(self.network.wire(1, 2, rail))
            for other, peer, end in zip(self.others, (2, 1), ends, strict=True):
                other.migration.on_opened(peer, rail, 0, end)

    def plan(self, rank: int) -> Plan:
        layout = lower(
            ring.allreduce(3).program(rank), COUNT, 4,
            slice_nbytes=self.config.slice_nbytes, eager_nbytes=1000,
        )  # fmt: skip
        return Plan(SIGNATURE, layout, np.add, None, True)

    def lanes(self, plan: Plan, links: Links) -> list[LaneRun]:
        x = np.ones(COUNT, np.float32)
        pool = LandingPool(lambda nbytes: np.empty(nbytes, np.uint8), 2)
        return HostLanes(pool, x, x)(plan, links)

    def join(self, rank: int) -> None:
        other = self.others[rank - 1]
        progress, calls = other.progress, other.links.calls_of(0)
        other.links.begin(calls, SIGNATURE)
        runs = self.lanes(self.plan(rank), other.links)
        calls.consumers = dict(enumerate(runs))
        progress.begin(calls)
        for run in runs:
            run.advance()
        progress.advance()

    def call(self) -> None:
        engine = self.engine
        engine.run(self.plan(0), self.lanes)

    def read(self) -> status.RankStatus:
        peers = [PeerInfo(rank, f"host{rank}/boot/7", 100 + rank, (), ()) for rank in (1, 2)]
        memory = self.engine.reports.memory(0)
        return self.engine.reports.status(peers, lambda rank: 0.5, Planning(), memory)


def ready(*joined: int) -> World:
    world = World(joined=joined)
    world.engine.start()
    world.connect_others()
    for rank in joined:
        world.join(rank)
    return world


def test_a_finished_call_is_in_the_books_to_the_byte() -> None:
    world = ready(1, 2)
    world.call()
    read = world.read()
    assert read.operations == ()
    assert read.pending == status.Pending(0, "", read.now_s, read.now_s)
    # A ring of three sends and receives 2(n - 1)/n of the data, and no slice of it twice.
    share = 4 * COUNT * 4 // 3
    for name, peer in (("sent", 1), ("received", 2)):
        counted = {path.peer: 0 for path in read.paths}
        for path in read.paths:
            counted[path.peer] += getattr(path, f"nbytes_{name}")
        assert counted == {peer: share, 3 - peer: 0}
    slices = sum(path.nslices_sent for path in read.paths)
    assert slices == sum(link.posted for link in read.links) == 4
    assert {link.confirmed - link.posted for link in read.links} == {0}
    assert {path.state for path in read.paths} == {"up"}
    assert {path.cause for path in read.paths} == {""}
    assert [(each.rank, each.host, each.last_op) for each in read.peers] == [
        (1, "host1", 1), (2, "host2", 1),
    ]  # fmt: skip


def test_the_status_survives_json() -> None:
    world = ready(1, 2)
    world.call()
    read = world.read()
    text = msgspec.json.encode(read)
    assert msgspec.json.decode(text, type=status.RankStatus) == read
    assert json.loads(text)["nranks"] == 3


def test_a_timed_out_call_names_missing_ranks_and_waiting_links() -> None:
    world = ready(2)
    read: list[status.RankStatus] = []
    world.timeline.after(1.5, lambda: read.append(world.read()))
    with pytest.raises(TransportTimeout) as caught:
        world.call()
    message = str(caught.value)
    assert message.startswith(f"rank 0: call 1, allreduce(count={COUNT}, dtype=float32, op=SUM)")
    assert "ranks [1] have not called it (rank 1 in no call yet)" in message
    assert "landing place 0 of channel 0 from rank 1" in message
    assert "of channel 0 from rank 2 over rail 0" in message
    assert "after 3 s" in message
    assert "R2CC_TIMEOUT_S" in message
    (meanwhile,) = read
    assert meanwhile.pending.absent == {1: 0}
    assert [each.op for each in meanwhile.operations] == [1]
    assert meanwhile.operations[0].nslices_left[0] > 0
    assert {(wait.peer, wait.what) for wait in meanwhile.pending.waits} == {
        (1, "landing place"), (2, "slice"),
    }  # fmt: skip


def test_all_ranks_are_asked_once() -> None:
    world = ready(2)
    with pytest.raises(TransportTimeout):
        world.call()
    asked = [message for _, message in world.control.sent if isinstance(message, Calling)]
    assert asked == [Calling(1, ((0, 1, SIGNATURE),))]


def test_an_answer_comes_before_and_after_the_call() -> None:
    world = ready()
    world.engine.on_message(1, Calling(1, ((1, 1, SIGNATURE),)))
    assert world.control.sent == [(-1, Calling(1, ((0, 0, None),)))]
    world.join(1)
    world.join(2)
    world.call()
    world.engine.on_tick(0.0)
    answer = Calling(1, ((0, 1, SIGNATURE),))
    assert world.control.sent[1:] == [(1, answer), (2, answer)]


@pytest.mark.parametrize(
    ("collective", "count", "differs"),
    [("ALLREDUCE", COUNT, False), ("ALLREDUCE", COUNT - 1, False), ("SCAN", COUNT, True)],
)
def test_a_report_of_another_call_ends_the_wait(collective: str, count: int, differs: bool) -> None:
    """The count may differ: in an allreduce of GPUs, ranks of a node sum parts of the data."""
    theirs = msgspec.structs.replace(CALL, collective=Collective[collective], count=count).pack()
    world = ready(2)
    world.control.joined = {1}
    world.control.answer = lambda peer, message: world.engine.on_message(
        peer, Calling(1, ((peer, 1, theirs),))
    )
    error = InvalidArgument if differs else TransportTimeout
    with pytest.raises(error, match=r"rank 1 called scan\(" if differs else "gave up after"):
        world.call()


def test_init_names_the_ranks_it_has_no_path_to() -> None:
    world = World(reached=[1])
    with pytest.raises(
        TransportTimeout, match=r"init\(\).*path to rank 2.*R2CC_INIT_TIMEOUT_S"
    ) as e:
        world.engine.start()
    assert e.value.peer == 2
    assert "rank 1" not in str(e.value)


def test_close_names_the_links_that_are_not_confirmed() -> None:
    world = ready()
    links = world.engine._links
    link = links.sender(1, 0)
    links.send(link, memoryview(b"abc"), True, None, 0)  # type: ignore[arg-type]
    expected = r"close\(\).*confirmation 0 of channel 0 from rank 1.*R2CC_INIT_TIMEOUT_S"
    with pytest.raises(TransportTimeout, match=expected):
        world.engine.leave()


def test_close_names_the_ranks_that_have_not_called_it() -> None:
    world = ready()
    world.engine.on_message(1, Leaving.of([1]))
    with pytest.raises(TransportTimeout, match=r"close\(\).*ranks \[2\] have not called it") as e:
        world.engine.leave()
    assert e.value.peer == 2


def test_health_shows_each_rail_with_the_evidence() -> None:
    world = ready(1, 2)
    world.timeline.now += 5.0
    key = PathKey(1, 1)
    world.engine.submit(world.engine._migration.on_failed, Failed(key, "ECONNRESET", "reset"))
    healthy, broken = world.engine.reports.rails(NICS)
    assert (healthy.name, healthy.speed_mbps, healthy.state) == ("eth0", 100_000, "up")
    assert (broken.state, broken.nrepairs) == ("degraded", 1)
    to_1, to_2 = broken.paths
    assert (to_1.peer, to_1.state, to_1.cause) == (1, "fencing", "ECONNRESET: reset")
    assert to_1.since_s == world.timeline.now
    assert (to_2.state, to_2.cause) == ("up", "")
    assert to_2.since_s < 1.0
    memory = world.engine.reports.memory(4096)
    report = str(status.HealthReport(0, world.timeline.now + 2.0, (healthy, broken), memory))
    assert "memory in bytes: landing 4096, eager 0," in report
    assert "rail 0 (eth0): up\n" in report
    assert "to rank 1: fencing for 2.0 s (ECONNRESET: reset)" in report
    again = msgspec.structs.replace(broken, paths=(msgspec.structs.replace(to_1, state="up"),))
    report = str(status.HealthReport(0, world.timeline.now + 2.0, (again,), memory))
    assert "to rank 1: up for 2.0 s (last out of use: ECONNRESET: reset)" in report


def test_paths_closed_as_idle_are_no_failure() -> None:
    world = ready(1, 2)
    world.engine.on_message(1, ClosePaths())
    rails = world.engine.reports.rails(NICS)
    assert [rail.state for rail in rails] == ["up", "up"]
    assert [(path.state, path.cause) for path in rails[0].paths] == [("closed", ""), ("up", "")]
    report = str(status.HealthReport(0, 2.0, rails, world.engine.reports.memory(0)))
    assert "to rank 1" not in report
    assert world.read().paths[0].state == "closed"


def test_health_and_status_show_what_is_excluded() -> None:
    world = ready(1, 2)
    world.engine._failover.excluded = frozenset(((0, 1), (2, 0)))
    own, other = world.engine.reports.rails(NICS)
    assert (own.state, other.state) == ("up", "excluded")
    health = Health.whole(3, 2, "", [(2, 0)])
    assert status.agreed(Known(health, 1.0)) == status.AgreedHealth(
        0, 1.0, ((16, 16), (16, 16), (0, 16)), ((2, 0),)
    )


def test_after_the_end_the_status_says_why() -> None:
    world = ready()
    world.engine.submit(world.engine._failover.on_peer_lost, 2, "its process died", 0.1)
    read = world.read()
    assert isinstance(world.engine.error, PeerLost)
    assert "lost rank 2" in read.error
    assert {path.cause for path in read.paths} == {"the communicator ended"}


def test_long_lists_are_cut_in_words_and_whole_as_values() -> None:
    waits = tuple(status.Wait(1, "slice", channel, 5, 0) for channel in range(12))
    pending = status.Pending(0, "call 2, barrier()", 2.0, 1.0, {}, waits)
    text = str(pending)
    assert text.count("slice 5") == 8
    assert "and 4 more" in text
    assert len(pending.waits) == 12


def test_a_timed_out_init_says_what_kept_paths_from_connecting() -> None:
    world = World(reached=(1,))
    why = "rail 0: 10.0.0.2:4711: EMFILE: Too many open files; raise `ulimit -n` (now 64)"
    world.control.obstacles = lambda peer: [why]  # type: ignore[method-assign]
    with pytest.raises(TransportTimeout) as caught:
        world.engine.start()
    assert f"path to rank 2 ({why})" in str(caught.value)


def test_a_slow_peer_is_told_from_a_broken_network() -> None:
    pending = status.Pending(0, "call 2, barrier()", 2.0, 1.0, {}, (status.Wait(1, "slice"),), (1,))
    assert str(pending).endswith("no data arrives from rank 1, although its ports answer probes")
    pending = status.Pending(0, "call 2, barrier()", 2.0, 1.0, slow=(1, 2))
    assert str(pending).endswith("from ranks 1, 2, although their ports answer probes")


def test_what_a_failure_set_in_motion_is_in_the_books() -> None:
    world = ready(1, 2)
    world.engine.on_carrier(1, False)
    while any(path.state is PathState.FENCING for path in world.engine._links.paths.values()):
        assert world.timeline.step()
        world.engine.on_tick(world.timeline.now)
    for peer in (1, 2):
        announcement = Announcement(1, 0, "reported", ())
        world.engine.on_message(peer, announcement)
    world.timeline.after(0.3, lambda: None)
    world.timeline.step()
    world.engine.on_tick(world.timeline.now)
    read = world.read()
    assert {(held.peer, held.rail) for held in read.held} == {(1, 1), (2, 1)}
    assert len(read.verdicts) == 2
    assert all("local NIC" in verdict for verdict in read.verdicts)
    assert read.health is not None
    assert read.health.shares[1] == (16, 16)


def test_nothing_blocked_is_said_so() -> None:
    assert str(status.Pending(3, "", 1.0, 1.0)) == "rank 3 waits for nothing"
    alone: Any = status.Pending(3, "call 1, barrier()", 1.5, 1.0)
    assert "no particular rank" in str(alone)


def test_every_field_of_a_dump_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/status.md").read_text(encoding="utf-8")
    table = page.split("<!-- table:status -->")[1].split("<!-- /table -->")[0]
    words = set(re.findall(r"`(\w+)`", table))
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    first = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert first == set(status.RankStatus.__struct_fields__)
    for kind in (status.Operation, status.LinkEntry, status.PeerEntry):
        said = {"rank", "peer", "channel"}
        assert set(kind.__struct_fields__) <= words | said, kind
