"""Which ways round are tried, in which order, and when."""

from __future__ import annotations

from collections.abc import Sequence

from r2ccl.failover.migration.bypass import MAX_WAYS, PATIENCE_S, PAUSE_S, ROUND_S, Bypasses
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.types import BYPASS, BypassWay, PathKey


class Control:
    """A control plane that remembers what was dialed and let in."""

    def __init__(self) -> None:
        self.dialed: list[tuple[int, int, list[BypassWay]]] = []
        self.cancelled: list[tuple[int, int]] = []
        self.accepted: list[tuple[int, int, int]] = []

    def dial_bypass(self, peer: int, epoch: int, ways: Sequence[BypassWay]) -> None:
        self.dialed.append((peer, epoch, list(ways)))

    def cancel_path(self, peer: int, rail: int) -> None:
        self.cancelled.append((peer, rail))

    def accept_path(self, peer: int, rail: int, epoch: int) -> None:
        self.accepted.append((peer, rail, epoch))


class World:
    """A rank among others; paths are up unless a test takes them down."""

    def __init__(
        self,
        nranks: int = 4,
        nrails: int = 3,
        *,
        rank: int = 0,
        fabric: str = "auto",
        homes: Sequence[int] = (),
        sockets: Sequence[int] = (),
        last_resorts: Sequence[int] = (),
    ) -> None:
        self.now = 100.0
        self.rank = rank
        self.nrails = nrails
        self.dead: set[tuple[int, int]] = set()
        self.excluded: set[tuple[int, int]] = set()
        self.control = Control()
        peers = [peer for peer in range(nranks) if peer != rank]
        self.paths = {
            key: Path(key)
            for key in (PathKey(peer, rail) for peer in peers for rail in (*range(nrails), BYPASS))
        }
        for key, path in self.paths.items():
            path.state = PathState.DOWN if key.is_bypass else PathState.UP
        self.bypasses = Bypasses(
            rank,
            nranks,
            paths=self.paths,
            homes=homes or range(nrails),
            sockets=sockets or range(nrails),
            last_resorts=last_resorts,
            fabric=fabric,
            share=lambda rank, rail: 0.0 if (rank, rail) in self.dead else 16.0,
            is_excluded=lambda rank, rail: (rank, rail) in self.excluded,
            control=self.control,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )

    def lose(self, peer: int, *rails: int) -> None:
        for rail in rails or range(self.nrails):
            self.paths[PathKey(peer, rail)].state = PathState.DOWN
            self.bypasses.lost(PathKey(peer, rail))

    def sought(self, peer: int) -> list[BypassWay]:
        """Seek; return the ways that were dialed, none if it was not."""
        before = len(self.control.dialed)
        has_begun = self.bypasses.seek(peer)
        assert has_begun == (len(self.control.dialed) > before)
        return self.control.dialed[-1][2] if has_begun else []


def test_the_higher_rank_lets_in_and_never_dials() -> None:
    world = World(rank=2)
    for peer in (0, 1, 3):
        world.bypasses.admit(peer)
    assert world.control.accepted == [(0, BYPASS, 0), (1, BYPASS, 0)]
    world.lose(1)
    assert world.sought(1) == []


def test_a_peer_that_any_home_rail_leads_to_needs_none() -> None:
    world = World()
    world.lose(1, 0, 1)
    assert world.sought(1) == []


def test_rails_that_begin_to_connect_get_time() -> None:
    world = World()
    world.lose(1)
    world.bypasses.connecting(1)
    assert world.sought(1) == []
    world.now += PATIENCE_S
    assert world.sought(1)


def test_rails_that_failed_get_no_time() -> None:
    world = World()
    world.lose(1)
    world.bypasses.connecting(1)
    world.lose(1, 0)
    assert world.sought(1)
    world = World()
    world.dead = {(0, 0), (1, 1), (1, 2)}
    world.lose(1)
    world.bypasses.connecting(1)
    assert world.sought(1)


def test_both_kinds_take_turns_and_cross_ways_come_first() -> None:
    world = World()
    world.lose(1)
    ways = world.sought(1)
    assert [way.to == 1 for way in ways[:6]] == [True, False] * 3
    assert {(way.via, way.rail) for way in ways if way.to == 1} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }
    assert {way.to for way in ways} == {1, 2, 3}
    assert all(way.via == way.rail for way in ways if way.to != 1)


def test_the_fabric_may_be_known() -> None:
    full, rail = World(fabric="full"), World(fabric="rail")
    for world in (full, rail):
        world.lose(1)
    assert {way.to for way in full.sought(1)} == {1}
    assert {way.to for way in rail.sought(1)} == {2, 3}


def test_dead_ports_come_last() -> None:
    world = World(2)
    world.lose(1)
    world.dead = {(1, 1), (1, 2)}
    assert [way.rail for way in world.sought(1)][:2] == [0, 0]


def test_own_ports_that_reach_nobody_come_last() -> None:
    world = World(3, fabric="full")
    world.lose(1)
    world.lose(2, 0, 1)
    assert [way.via for way in world.sought(1)][:2] == [2, 2]


def test_ranks_that_the_peer_does_not_reach_are_asked_last() -> None:
    world = World(fabric="rail")
    world.lose(1)
    world.dead = {(1, 1), (1, 2), (2, 0)}  # rank 2 and the peer have no rail in common
    ways = world.sought(1)
    assert [way.to for way in ways] == [3, 3, 3, 2, 2, 2]


def test_ranks_are_asked_over_different_rails() -> None:
    """One rail may have died in silence."""
    world = World(40, 2, fabric="rail")
    world.lose(1)
    assert {way.via for way in world.sought(1)[:4]} == {0, 1}


def test_every_round_begins_with_other_cross_ways_and_tries_all() -> None:
    world = World(2, 3)
    world.lose(1)
    firsts = []
    for _ in range(6):
        firsts.append(world.sought(1)[0])
        world.now += ROUND_S
    assert len(set(firsts)) == 6
    many = World(2, 8)
    many.lose(1)
    seen: set[BypassWay] = set()
    for _ in range(2):
        seen |= set(many.sought(1))
        many.now += ROUND_S
    assert len(seen) == 56


def test_a_bypass_that_broke_is_not_dialed_again_at_once() -> None:
    world = World()
    world.lose(1)
    assert world.sought(1)
    world.now += 1.0
    world.bypasses.lost(PathKey(1, BYPASS))
    assert not world.sought(1)
    world.now += PAUSE_S
    assert world.sought(1)


def test_a_rail_that_is_back_ends_the_search() -> None:
    world = World()
    world.lose(1)
    assert world.sought(1)
    world.bypasses.found(PathKey(1, BYPASS))
    assert world.control.cancelled == []
    world.paths[PathKey(1, 2)].state = PathState.UP
    world.bypasses.found(PathKey(1, 2))
    assert world.control.cancelled == [(1, BYPASS)]
    assert not world.sought(1)


def test_a_port_that_died_in_silence_does_not_hide_the_others() -> None:
    world = World(3, fabric="rail")
    world.lose(1)
    world.dead = {(0, 0)}  # the path to rank 2 over it is up: nothing was missed on it yet
    assert world.sought(1)[-1] == BypassWay(0, 2, 0)


def test_pairs_ask_different_ranks_and_rounds_go_on_with_others() -> None:
    world = World(200, 1, fabric="rail")
    firsts = []
    for peer in (1, 2, 3):
        world.lose(peer)
        firsts.append(world.sought(peer)[0].to)
    assert len(set(firsts)) == 3
    seen = {way.to for way in world.control.dialed[0][2]}
    assert len(seen) == MAX_WAYS
    world.now += ROUND_S
    assert not seen & {way.to for way in world.sought(1)}


def test_rounds_are_apart_unless_something_is_lost() -> None:
    world = World()
    world.lose(1)
    assert world.sought(1)
    assert not world.sought(1)
    world.now += ROUND_S - 0.1
    assert not world.sought(1)
    world.bypasses.lost(PathKey(1, 0))
    assert world.sought(1)
    world.now += ROUND_S
    assert world.sought(1)


def test_none_is_sought_while_there_is_one() -> None:
    world = World()
    world.lose(1)
    bypass = world.paths[PathKey(1, BYPASS)]
    for state in (PathState.UP, PathState.FENCING, PathState.FENCED):
        bypass.state = state
        assert not world.sought(1)
    bypass.state, bypass.epoch = PathState.DOWN, 3
    assert world.sought(1)
    assert world.control.dialed[-1][:2] == (1, 3)


def test_beside_the_last_resort_only_cross_ways_are_tried_once() -> None:
    world = World(homes=(0, 1), last_resorts=(2,))
    world.lose(1, 0, 1)
    assert set(world.sought(1)) == {BypassWay(0, 1, 1), BypassWay(1, 1, 0)}
    world.now += ROUND_S
    assert not world.sought(1)
    world.paths[PathKey(1, 0)].state = PathState.UP
    world.bypasses.found(PathKey(1, 0))
    world.lose(1, 0)
    assert world.sought(1)


def test_beside_rdma_any_path_of_sockets_will_do() -> None:
    world = World(3, 4, homes=(2, 3), sockets=(0, 1))
    world.lose(1, 0, 2, 3)
    assert world.sought(1) == []
    world.lose(1)
    assert {way.to for way in world.sought(1)} == {1, 2}


def test_no_way_uses_an_excluded_port() -> None:
    world = World()
    world.excluded = {(0, 1), (1, 2), (3, 0)}
    world.lose(1)
    ways = world.sought(1)
    assert BypassWay(0, 1, 1) in ways
    assert BypassWay(0, 2, 0) in ways
    assert not any(way.via == 1 for way in ways)
    assert not any((way.to, way.rail) in world.excluded for way in ways)
