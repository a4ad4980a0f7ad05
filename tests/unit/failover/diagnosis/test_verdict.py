"""The verdict: every row of the table, every degraded form, and random fabrics that are broken."""

import itertools
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import strategies as st
from support import slow

from r2ccl.failover.diagnosis.protocol import (
    MAX_AUXILIARIES,
    Ask,
    AskRank,
    Auxiliary,
    OtherRail,
    PathDiagnosis,
    ThirdRank,
    choose_auxiliaries,
)
from r2ccl.failover.diagnosis.verdict import (
    HARD,
    MIRRORED,
    TABLE,
    WORDS,
    Columns,
    Finding,
    Port,
    ProbeReply,
    ProbeRequest,
    Reading,
    VerdictKind,
    arrange,
    is_port_status,
    judge,
    place,
)
from r2ccl.types import PathKey, ProbeKey

ME, PEER, RAIL = 0, 1, 0
PATH = PathKey(PEER, RAIL)
LOCAL, REMOTE = Port(ME, RAIL), Port(PEER, RAIL)
DIRECT = ProbeKey(PEER, RAIL, RAIL)
PATIENCE_S = 0.3


def name(rank: int, rail: int) -> str:
    return f"node {rank} eth{rail}"


class World(msgspec.Struct, frozen=True):
    """Who reaches whom: one rank a host, one port a rail; whatever is listed is broken."""

    nranks: int = 4
    nrails: int = 2
    is_full: bool = False
    dead_nics: frozenset[Port] = frozenset()
    dead_switches: frozenset[int] = frozenset()
    cuts: frozenset[frozenset[Port]] = frozenset()
    dead_hosts: frozenset[int] = frozenset()
    #: Their kernels answer, their processes do not.
    stopped: frozenset[int] = frozenset()

    def works(self, port: Port) -> bool:
        return (
            port not in self.dead_nics
            and port.rail not in self.dead_switches
            and port.rank not in self.dead_hosts
        )

    def reaches(self, a: Port, b: Port) -> bool:
        has_way = a.rail == b.rail or self.is_full
        return has_way and self.works(a) and self.works(b) and frozenset((a, b)) not in self.cuts

    def replies(self, rank: int) -> bool:
        return rank not in self.dead_hosts and rank not in self.stopped

    def probe(self, asker: int, key: ProbeKey) -> bool | None:
        if key.rail != key.via and not self.is_full:
            return None
        return self.reaches(Port(asker, key.via), Port(key.peer, key.rail))

    def auxiliaries(self) -> list[Auxiliary]:
        nics = [str(rank) for rank in range(self.nranks)]
        return choose_auxiliaries(
            ME, PATH, nics=nics, rails=range(self.nrails), is_up=lambda _: True
        )


def inquire(nrails: int = 2, auxiliaries: tuple[Auxiliary, ...] = ()) -> PathDiagnosis:
    return PathDiagnosis(
        ME, PATH, auxiliaries=auxiliaries, rails=range(nrails), name=name, patience_s=PATIENCE_S
    )


class Run:
    """A diagnosis in a world; answers come in an order of its own, or not at all."""

    def __init__(
        self, world: World, *, auxiliaries: list[Auxiliary] | None = None, seed: int = 0,
        cause: str = "", is_stuck: bool = False,
    ) -> None:  # fmt: skip
        self.world = world
        self.chosen = (world.auxiliaries() if auxiliaries is None else auxiliaries)[
            :MAX_AUXILIARIES
        ]
        self.path_diagnosis = inquire(world.nrails, tuple(self.chosen))
        self.asked: list[tuple[int, ProbeKey]] = []
        self.now = 100.0
        order = random.Random(seed)
        waiting = self.path_diagnosis.begin(self.now, cause)
        while self.path_diagnosis.verdict is None:
            new = [(a.rank, a.key) if isinstance(a, AskRank) else (ME, a.key) for a in waiting]
            self.asked += new
            order.shuffle(new)
            waiting = []
            for asker, key in new:
                if asker == ME or world.replies(asker):
                    self.now += 0.001
                    waiting += self.path_diagnosis.take(
                        self.now, asker, key, world.probe(asker, key), is_stuck=is_stuck
                    )
            if self.path_diagnosis.verdict is None and not waiting:
                assert self.now < self.path_diagnosis.deadline_s < self.now + 1
                self.now = self.path_diagnosis.deadline_s
                waiting = self.path_diagnosis.tick(self.now)
        self.verdict = self.path_diagnosis.verdict
        self.kind = self.verdict.kind


def cut(a: int, b: int, rail: int = RAIL) -> frozenset[frozenset[Port]]:
    return frozenset({frozenset({Port(a, rail), Port(b, rail)})})


# The tables


def test_the_table_is_the_one_documented() -> None:
    assert [(*row, kind.name) for row, kind in TABLE] == [
        (True, None, None, None, "PEER_SLOW"),
        (False, False, True, None, "REMOTE_NIC"),
        (False, True, False, None, "LOCAL_NIC"),
        (False, True, True, None, "LINK"),
        (False, False, False, True, "LOCAL_NIC"),
        (False, False, False, None, "RAIL"),
    ]


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        ((True, None, None, None), VerdictKind.PEER_SLOW),
        ((True, False, False, None), VerdictKind.PEER_SLOW),
        ((False, False, True, None), VerdictKind.REMOTE_NIC),
        ((False, True, False, True), VerdictKind.LOCAL_NIC),
        ((False, True, True, None), VerdictKind.LINK),
        ((False, False, False, None), VerdictKind.RAIL),
        ((False, False, False, True), VerdictKind.LOCAL_NIC),
        ((False, None, True, None), VerdictKind.PATH),
        ((False, None, False, None), VerdictKind.PATH),
        ((False, True, None, None), VerdictKind.PATH),
        ((False, False, None, True), VerdictKind.PATH),
        ((None, True, True, None), VerdictKind.PATH),
    ],
)
def test_rows(seen: tuple[bool | None, ...], kind: VerdictKind) -> None:
    assert judge(Columns(*seen)) is kind


def test_every_kind_has_its_words_and_its_place() -> None:
    assert set(WORDS) == set(VerdictKind)
    assert place(VerdictKind.LOCAL_NIC, ME, PATH, name) == "node 0 eth0"
    assert place(VerdictKind.REMOTE_NIC, ME, PATH, name) == "node 1 eth0"
    assert place(VerdictKind.LINK, ME, PATH, name) == "node 0 eth0 - node 1 eth0"
    assert place(VerdictKind.RAIL, ME, PATH, name) == "rail 0"
    assert place(VerdictKind.PEER, ME, PATH, name) == "rank 1"


def test_silence_counts_only_if_somebody_vouches_for_its_witness() -> None:
    third = Port(2, RAIL)
    denial = Reading(third, REMOTE, False)
    assert arrange([Reading(LOCAL, REMOTE, False), denial], LOCAL, REMOTE).to_remote is None
    vouched = [Reading(LOCAL, REMOTE, False), denial, Reading(LOCAL, third, True)]
    assert arrange(vouched, LOCAL, REMOTE) == Columns(False, False, True, True)


def test_an_answer_of_the_other_end_is_an_answer() -> None:
    back = Reading(REMOTE, LOCAL, True)
    assert arrange([Reading(LOCAL, REMOTE, None), back], LOCAL, REMOTE).direct is True
    one_way = arrange([Reading(LOCAL, REMOTE, False), back], LOCAL, REMOTE)
    assert judge(one_way) is VerdictKind.LINK


# Hard evidence


@pytest.mark.parametrize(
    ("own", "peers", "kind", "where"),
    [
        ("CARRIER_DOWN: no carrier", "", VerdictKind.LOCAL_NIC, "node 0 eth0"),
        ("PORT_ERR: the port is down", "", VerdictKind.LOCAL_NIC, "node 0 eth0"),
        ("", "CARRIER_DOWN: no carrier", VerdictKind.REMOTE_NIC, "node 1 eth0"),
        ("EOF: closed", "PORT_ERR: the port is down", VerdictKind.REMOTE_NIC, "node 1 eth0"),
        ("PORT_ERR: down", "PORT_ERR: down", VerdictKind.RAIL, "rail 0"),
    ],
)
def test_a_port_that_says_it_is_down_needs_no_probe(
    own: str, peers: str, kind: VerdictKind, where: str
) -> None:
    path_diagnosis = inquire()
    assert path_diagnosis.begin(5.0, own, peers) == []
    verdict = path_diagnosis.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.where, verdict.when_s) == (kind, where, 5.0)
    assert verdict.is_down
    assert verdict.readings == ()
    assert path_diagnosis.deadline_s == float("inf")


def test_the_hard_table_is_complete_but_for_no_evidence() -> None:
    pairs = set(itertools.product((True, False), repeat=2))
    assert set(HARD) == pairs - {(False, False)}
    assert not is_port_status("PROBE_UNANSWERED: CARRIER_DOWN")
    assert is_port_status("CARRIER_DOWN")


def test_a_ports_word_ends_an_inquiry_and_the_second_revises_it() -> None:
    path_diagnosis = inquire()
    path_diagnosis.begin(0.0, "EOF: closed")
    path_diagnosis.on_cause(0.1, "CARRIER_DOWN: no carrier", is_own=False)
    assert path_diagnosis.verdict is not None
    assert path_diagnosis.verdict.kind is VerdictKind.REMOTE_NIC
    assert path_diagnosis.take(0.2, ME, DIRECT, True) == []
    path_diagnosis.on_cause(0.3, "EOF: nothing new", is_own=True)
    assert path_diagnosis.verdict.kind is VerdictKind.REMOTE_NIC
    path_diagnosis.on_cause(0.4, "CARRIER_DOWN: no carrier", is_own=True)
    assert (path_diagnosis.verdict.kind, path_diagnosis.verdict.when_s) == (VerdictKind.RAIL, 0.4)


def test_a_ports_word_corrects_what_probes_made_of_it() -> None:
    run = Run(World(cuts=cut(ME, PEER)))
    assert run.kind is VerdictKind.LINK
    run.path_diagnosis.on_cause(run.now, "EOF: closed", is_own=True)
    assert run.path_diagnosis.verdict is run.verdict
    run.path_diagnosis.on_cause(run.now, "CARRIER_DOWN: no carrier", is_own=True)
    assert run.path_diagnosis.verdict is not None
    assert run.path_diagnosis.verdict.kind is VerdictKind.LOCAL_NIC


def test_a_suspicion_that_becomes_a_failure_is_no_slow_peer() -> None:
    path_diagnosis = inquire()
    path_diagnosis.begin(0.0)
    path_diagnosis.on_cause(0.1, "ECONNRESET: reset", is_own=True)
    assert path_diagnosis.verdict is None
    path_diagnosis.take(0.2, ME, DIRECT, True)
    assert path_diagnosis.verdict is not None
    assert path_diagnosis.verdict.kind is VerdictKind.FLOW


@pytest.mark.parametrize("kind", VerdictKind)
def test_the_other_ends_finding_is_taken_over_mirrored(kind: VerdictKind) -> None:
    path_diagnosis = inquire()
    path_diagnosis.begin(0.0, "EOF: closed")
    path_diagnosis.on_finding(0.1, Finding(RAIL, 3, kind, "as it says"))
    if kind in MIRRORED:
        assert path_diagnosis.verdict is not None
        assert path_diagnosis.verdict.kind is MIRRORED[kind]
        assert path_diagnosis.verdict.evidence == ("EOF: closed", "found by rank 1: as it says")
    else:
        assert path_diagnosis.verdict is None
    assert all(MIRRORED[MIRRORED[each]] is each for each in MIRRORED)


# One fault, named exactly

SHAPES = [
    pytest.param(3, 2, False, id="three-ranks"),
    pytest.param(4, 1, False, id="one-rail"),
    pytest.param(6, 3, False, id="six-ranks"),
    pytest.param(2, 2, True, id="two-ranks-full"),
    pytest.param(4, 4, True, id="four-full"),
]


@pytest.mark.parametrize("cause", ["", "EOF: closed"])
@pytest.mark.parametrize(("nranks", "nrails", "is_full"), SHAPES)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"dead_nics": frozenset({LOCAL})}, VerdictKind.LOCAL_NIC),
        ({"dead_nics": frozenset({REMOTE})}, VerdictKind.REMOTE_NIC),
        ({"cuts": cut(ME, PEER)}, VerdictKind.LINK),
        ({"dead_switches": frozenset({RAIL})}, VerdictKind.RAIL),
        ({"dead_hosts": frozenset({PEER})}, VerdictKind.PEER),
    ],
)
def test_one_fault_is_named(
    nranks: int, nrails: int, is_full: bool, fault: dict[str, object], kind: VerdictKind, cause: str
) -> None:
    world = World(nranks, nrails, is_full, **fault)  # type: ignore[arg-type]
    run = Run(world, cause=cause)
    assert run.kind is kind
    assert run.verdict.is_down


@pytest.mark.parametrize(("nranks", "nrails", "is_full"), SHAPES)
def test_a_stopped_peer_is_slow_and_costs_one_probe(
    nranks: int, nrails: int, is_full: bool
) -> None:
    run = Run(World(nranks, nrails, is_full, stopped=frozenset({PEER})))
    assert run.kind is VerdictKind.PEER_SLOW
    assert not run.verdict.is_down
    assert run.asked == [(ME, DIRECT)]


def test_a_flow_that_is_stuck_though_the_rail_answers_moves() -> None:
    run = Run(World(), is_stuck=True)
    assert (run.kind, run.verdict.is_down) == (VerdictKind.FLOW, True)


def test_a_broken_connection_on_an_answering_rail_is_one_flow() -> None:
    assert Run(World(), cause="ECONNRESET: reset").kind is VerdictKind.FLOW


def test_a_stopped_peer_behind_a_dead_nic_is_not_taken_for_dead() -> None:
    world = World(dead_nics=frozenset({REMOTE}), stopped=frozenset({PEER}))
    run = Run(world)
    assert run.kind is VerdictKind.REMOTE_NIC
    # Another rail of it answers: nobody waits until the process does.
    assert run.now < 100.0 + PATIENCE_S


# Degraded


@pytest.mark.parametrize(
    "fault",
    [
        {"dead_nics": frozenset({LOCAL})},
        {"dead_nics": frozenset({REMOTE})},
        {"cuts": cut(ME, PEER)},
        {"dead_switches": frozenset({RAIL})},
    ],
)
def test_without_an_auxiliary_the_path_is_all_that_can_be_named(fault: dict[str, object]) -> None:
    assert Run(World(2, 2, False, **fault)).kind is VerdictKind.PATH  # type: ignore[arg-type]


def test_two_ranks_and_one_rail_a_silent_peer_is_dead_or_cut_off() -> None:
    dead = World(2, 1, dead_hosts=frozenset({PEER}))
    assert Run(dead).kind is VerdictKind.PEER
    unplugged = World(2, 1, dead_nics=frozenset({REMOTE}))
    assert Run(unplugged).kind is VerdictKind.PATH


@pytest.mark.parametrize("is_stopped", [False, True])
def test_another_auxiliary_takes_the_place_of_dead_ones(is_stopped: bool) -> None:
    # Ranks 2 and 3 are of no use; 4 and 5 are asked in the second round.
    useless = frozenset({2, 3})
    world = World(
        6, 1, dead_nics=frozenset({REMOTE}) | {Port(rank, RAIL) for rank in useless},
        stopped=useless if is_stopped else frozenset(),
    )  # fmt: skip
    run = Run(world)
    assert run.kind is VerdictKind.REMOTE_NIC
    assert {asker for asker, _ in run.asked} == {ME, PEER, 2, 3, 4, 5}


def test_a_silent_auxiliary_alone_does_not_accuse_the_remote_nic() -> None:
    # Rank 2's NIC is dead and rank 3 is stopped: the local NIC works, no more can be told.
    world = World(
        4, 2, dead_nics=frozenset({Port(2, RAIL)}), cuts=cut(ME, PEER), stopped=frozenset({3})
    )
    assert Run(world).kind is VerdictKind.PATH


def test_a_dead_other_rail_does_not_accuse_the_local_nic() -> None:
    # The other rail reaches the remote port; that the peer's end of it is silent proves nothing.
    world = World(2, 2, True, dead_nics=frozenset({Port(PEER, 1)}), cuts=cut(ME, PEER))
    assert Run(world).kind is VerdictKind.PATH


def test_both_nics_dead_are_not_taken_for_the_rail() -> None:
    run = Run(World(4, 2, dead_nics=frozenset({LOCAL, REMOTE})))
    assert run.kind is VerdictKind.LOCAL_NIC


def test_a_path_that_could_not_be_probed_stays_unless_it_broke() -> None:
    suspect = inquire(auxiliaries=(ThirdRank(2),))
    suspect.begin(0.0)
    assert suspect.take(0.1, ME, DIRECT, None, "no such rail") == []
    assert suspect.verdict is not None
    assert (suspect.verdict.kind, suspect.verdict.is_down) == (VerdictKind.PATH, False)

    broken = inquire(auxiliaries=(ThirdRank(2),))
    broken.begin(0.0, "RETRY_EXC_ERR: no acknowledgement")
    questions = broken.take(0.1, ME, DIRECT, None)
    assert broken.verdict is None
    broken.take(0.2, 2, DIRECT, False)
    broken.take(0.2, ME, ProbeKey(2, RAIL, RAIL), True)
    broken.take(0.2, ME, ProbeKey(PEER, 1, 1), True)
    assert AskRank(PEER, ProbeKey(ME, RAIL, RAIL)) in questions  # and not waited for
    assert broken.verdict is not None
    assert (broken.verdict.kind, broken.verdict.is_down) == (VerdictKind.REMOTE_NIC, True)


def test_answers_missing_at_the_deadline_count_as_not_asked() -> None:
    path_diagnosis = inquire(auxiliaries=(ThirdRank(2),))
    path_diagnosis.begin(0.0, "EOF: closed")
    assert path_diagnosis.tick(PATIENCE_S - 0.01) == []
    assert path_diagnosis.verdict is None
    assert path_diagnosis.tick(PATIENCE_S)
    assert path_diagnosis.tick(2 * PATIENCE_S) == []
    assert path_diagnosis.verdict is not None
    # Not even the own probes ended: the peer did not answer on any rail, nor did its session.
    assert path_diagnosis.verdict.kind is VerdictKind.PEER
    assert {reading.is_answered for reading in path_diagnosis.verdict.readings} == {None}


def test_an_answer_nobody_waits_for_changes_nothing() -> None:
    path_diagnosis = inquire(auxiliaries=(ThirdRank(2),))
    path_diagnosis.begin(0.0)
    assert path_diagnosis.take(0.1, 2, DIRECT, False) == []
    assert path_diagnosis.take(0.1, ME, ProbeKey(5, RAIL, RAIL), False) == []
    assert path_diagnosis.verdict is None
    questions = path_diagnosis.take(0.2, ME, DIRECT, False)
    assert path_diagnosis.take(0.3, ME, DIRECT, True) == []
    assert path_diagnosis.verdict is None
    assert AskRank(2, DIRECT) in questions
    assert Ask(ProbeKey(2, RAIL, RAIL)) in questions


def test_contradictory_answers_end_with_what_was_reached() -> None:
    # Rank 3 gets through to the remote port where rank 2 did not: an answer is a fact.
    path_diagnosis = inquire(1, (ThirdRank(2), ThirdRank(3)))
    path_diagnosis.begin(0.0)
    path_diagnosis.take(0.1, ME, DIRECT, False)
    path_diagnosis.take(0.2, 2, DIRECT, False)
    path_diagnosis.take(0.2, ME, ProbeKey(2, RAIL, RAIL), True)
    assert path_diagnosis.verdict is None
    path_diagnosis.take(0.3, 3, DIRECT, True)
    assert path_diagnosis.verdict is not None
    assert path_diagnosis.verdict.kind is VerdictKind.LINK


# What the user reads, and what travels


def test_the_verdict_reads_with_its_evidence_and_its_sequel() -> None:
    verdict = Run(World(3, 2, dead_nics=frozenset({REMOTE})), cause="ETIMEDOUT: gone").verdict
    text = str(msgspec.structs.replace(verdict, sequel="moved 6 links to eth1 in 3.1 ms"))
    failed = "the remote NIC, its cable or its switch port failed"
    assert text.startswith(f"node 1 eth0: {failed}; ETIMEDOUT: gone; ")
    assert "node 0 eth0 -> node 1 eth0: no answer" in text
    assert "node 0 eth0 -> node 2 eth0: answered" in text
    assert text.endswith("; moved 6 links to eth1 in 3.1 ms")
    assert not str(verdict).endswith("; ")


@pytest.mark.parametrize(
    "message",
    [
        ProbeRequest(7, ProbeKey(1, 2, 3)),
        ProbeReply(7, ProbeKey(1, 2, 3), None, "no such rail"),
        Finding(2, 5, VerdictKind.RAIL, "text"),
    ],
)
def test_messages_survive_the_wire(message: ProbeRequest | ProbeReply | Finding) -> None:
    packed = msgspec.msgpack.encode(message)
    decoded = msgspec.msgpack.decode(packed, type=ProbeRequest | ProbeReply | Finding)
    assert decoded == message


# Choosing auxiliaries


def choose(nics: str, is_up: Callable[[PathKey], bool], *bad: Port) -> list[Auxiliary]:
    return choose_auxiliaries(ME, PATH, nics=nics, rails=range(3), is_up=is_up, bad=bad)


def test_third_nics_come_first_one_a_rank_and_no_suspect() -> None:
    # Ranks 2 and 3 share the suspects' NICs, 5 shares that of 4.
    assert choose("ABABCCD", lambda _: True) == [
        ThirdRank(4), ThirdRank(6), OtherRail(1), OtherRail(2),
    ]  # fmt: skip


def test_ports_in_use_come_before_others_and_bad_ones_not_at_all() -> None:
    down = {PathKey(2, RAIL), PathKey(PEER, 1)}
    assert choose("ABCD", lambda path: path not in down) == [
        ThirdRank(3), OtherRail(2), ThirdRank(2), OtherRail(1),
    ]  # fmt: skip
    bad = Port(2, RAIL), Port(ME, 1), Port(PEER, 2)
    assert choose("ABCD", lambda _: True, *bad) == [ThirdRank(3)]


def test_of_other_rails_the_neighbours_come_first() -> None:
    path = PathKey(PEER, 6)
    chosen = choose_auxiliaries(ME, path, nics="AB", rails=range(8), is_up=lambda _: True)
    assert chosen[:4] == [OtherRail(7), OtherRail(5), OtherRail(0), OtherRail(4)]
    assert len(chosen) == 7


def test_two_rails_with_a_one_way_passage_each_are_enough() -> None:
    # As with joined probes: from rail 1 to rail 0, and from rail 0 to rail 3, and no other way.
    path_diagnosis = inquire(4, (OtherRail(1), OtherRail(3)))
    path_diagnosis.begin(0.0)
    for action in path_diagnosis.take(0.1, ME, DIRECT, False):
        if isinstance(action, Ask):
            peer, rail, via = action.key
            has_way = rail == via or (rail, via) in ((0, 1), (3, 0))
            is_reached = Port(peer, rail) != REMOTE
            path_diagnosis.take(0.2, ME, action.key, is_reached if has_way else None)
    assert path_diagnosis.verdict is not None
    assert path_diagnosis.verdict.kind is VerdictKind.REMOTE_NIC


def test_ranks_do_not_all_ask_the_same_one() -> None:
    first = [
        choose_auxiliaries(
            me, PathKey((me + 1) % 6, 0), nics="ABCDEF", rails=[0], is_up=lambda _: True
        )[0]
        for me in range(6)
    ]
    assert len(set(first)) == 6


# Random fabrics

RANKS, RAILS = 6, 3
ports = st.builds(Port, st.integers(0, RANKS - 1), st.integers(0, RAILS - 1))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any number of dead NICs, switches, hosts and stopped processes; one pair that is cut."""
    nranks, nrails = draw(st.integers(2, RANKS)), draw(st.integers(1, RAILS))
    others = st.frozensets(st.integers(1, nranks - 1), max_size=2)
    pair = draw(st.none() | st.tuples(st.integers(0, 1), st.integers(1, nranks - 1)))
    return World(
        nranks,
        nrails,
        draw(st.booleans()),
        dead_nics=draw(st.frozensets(ports, max_size=5)),
        dead_switches=draw(st.frozensets(st.integers(0, nrails - 1), max_size=1)),
        cuts=cut(*pair) if pair and pair[0] != pair[1] else frozenset(),
        dead_hosts=draw(others),
        stopped=draw(others),
    )


def is_true(run: Run) -> bool:
    """Whether the verdict is what the world, which the diagnosis cannot see, is like."""
    world, kind = run.world, run.kind
    if kind is VerdictKind.PEER_SLOW:
        return world.reaches(LOCAL, REMOTE)
    if kind is VerdictKind.LINK:
        return world.works(LOCAL) and world.works(REMOTE) and bool(world.cuts)
    if kind is VerdictKind.LOCAL_NIC:
        return LOCAL in world.dead_nics and RAIL not in world.dead_switches
    if kind is VerdictKind.REMOTE_NIC:
        return RAIL not in world.dead_switches and not world.works(REMOTE)
    if kind is VerdictKind.PEER:
        rails = range(world.nrails)
        is_silent = not any(world.reaches(Port(ME, v), Port(PEER, v)) for v in rails)
        return not world.replies(PEER) and is_silent
    asked = {(Port(asker, key.via), Port(key.peer, key.rail)) for asker, key in run.asked}
    on_rail = [(a, b) for a, b in asked if a.rail == b.rail == RAIL]
    reached = [pair for pair in on_rail if world.reaches(*pair) and world.replies(pair[0].rank)]
    return not reached if kind is VerdictKind.RAIL else kind is VerdictKind.PATH


@slow.given(200, 800, worlds(), st.integers(0, 3), st.sampled_from(["", "EOF: closed"]))
def test_whatever_is_broken_the_verdict_is_never_wrong(world: World, seed: int, cause: str) -> None:
    run = Run(world, seed=seed, cause=cause)
    assert len(run.asked) == len(set(run.asked)) <= 2 + world.nrails + 5 * MAX_AUXILIARIES // 2
    if run.kind is VerdictKind.FLOW:
        assert cause
        assert world.reaches(LOCAL, REMOTE)
        return
    assert is_true(run), run.verdict
    assert (run.kind is VerdictKind.PEER_SLOW) == (world.reaches(LOCAL, REMOTE) and not cause)
    assert run.verdict.is_down == (run.kind is not VerdictKind.PEER_SLOW)
    assert run.kind is Run(world, seed=seed + 1, cause=cause).kind


HEALTHY, DEAD, STOPPED = range(3)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("is_peer_stopped", [False, True])
@pytest.mark.parametrize("is_remote_dead", [False, True])
@pytest.mark.parametrize("is_local_dead", [False, True])
def test_with_one_sound_third_rank_the_true_cause_is_named(
    is_local_dead: bool, is_remote_dead: bool, is_peer_stopped: bool, is_full: bool
) -> None:
    expected = {
        (True, False): {VerdictKind.LOCAL_NIC},
        (False, True): {VerdictKind.REMOTE_NIC},
        (False, False): {VerdictKind.LINK},
        # One third rank alone cannot show that the switch works.
        (True, True): {VerdictKind.LOCAL_NIC, VerdictKind.RAIL},
    }[is_local_dead, is_remote_dead]
    suspects = {LOCAL: is_local_dead, REMOTE: is_remote_dead}
    for states in itertools.product((HEALTHY, DEAD, STOPPED), repeat=3):
        if HEALTHY not in states:
            continue
        dead = {port for port, is_dead in suspects.items() if is_dead}
        dead |= {Port(2 + i, RAIL) for i, state in enumerate(states) if state == DEAD}
        stopped = {2 + i for i, state in enumerate(states) if state == STOPPED}
        run = Run(
            World(
                5, 2, is_full, frozenset(dead), cuts=cut(ME, PEER),
                stopped=frozenset(stopped | ({PEER} if is_peer_stopped else set())),
            )
        )  # fmt: skip
        assert run.kind in expected, run.verdict
        if states[:2] == (HEALTHY, HEALTHY):  # asked in the same round, they vouch for each other
            assert run.kind is min(expected, key=lambda kind: kind is VerdictKind.RAIL)
