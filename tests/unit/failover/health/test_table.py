"""The table a planner reads: its bounds, its changes, and what many findings make of it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import slow

from r2ccl.bootstrap.session import MAX_BODY_NBYTES
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.table import WHOLE, Findings, Health, RailShare

NRANKS, NRAILS = 3, 2
NEWS = st.builds(
    RailShare,
    st.integers(0, NRANKS - 1),
    st.integers(0, NRAILS - 1),
    st.sampled_from([0, 4, 15, WHOLE]),
    st.integers(-1, NRANKS - 1),
)


def whole() -> Health:
    return Health.whole(NRANKS, NRAILS, "abc")


def broken(*news: tuple[int, int, int]) -> Health:
    return whole().changed(RailShare(*item) for item in news)


# Reading


def test_whole_is_version_0_with_nothing_degraded() -> None:
    health = whole()
    assert (health.version, health.nranks, health.config) == (0, NRANKS, "abc")
    assert health.degraded() == ()
    assert [health.capacity(rank) for rank in range(NRANKS)] == [NRAILS * WHOLE] * NRANKS
    assert health.rails(0, 2) == (0, 1)


def test_a_planner_reads_shares_capacities_and_rails_in_common() -> None:
    health = broken((0, 0, 0), (2, 1, 4))
    assert (health.share(0, 0), health.share(2, 1), health.share(1, 0)) == (0, 4, WHOLE)
    assert [health.capacity(rank) for rank in range(NRANKS)] == [16, 32, 20]
    assert health.degraded() == (0, 2)
    assert health.rails(0, 1) == health.rails(1, 0) == (1,)
    assert health.rails(1, 2) == (0, 1), "a slow rail is up"
    assert broken((0, 0, 0), (1, 1, 0)).rails(0, 1) == ()


@pytest.mark.parametrize(("rank", "rail"), [(-1, 0), (NRANKS, 0), (0, -1), (0, NRAILS)])
def test_a_rank_or_rail_that_does_not_exist_is_refused_by_name(rank: int, rail: int) -> None:
    with pytest.raises(InvalidArgument, match=f"rail {rail} of rank {rank} does not exist"):
        whole().share(rank, rail)
    with pytest.raises(InvalidArgument, match=f"rail {rail} of rank {rank}"):
        whole().changed([RailShare(rank, rail, 0)])


# Changing


def test_a_change_is_the_next_version_and_keeps_the_old_one() -> None:
    before = whole()
    after = before.changed([RailShare(1, 1, 3)])
    assert (after.version, after.share(1, 1), after.config) == (1, 3, "abc")
    assert before == whole()


def test_news_that_change_nothing_make_no_version() -> None:
    health = broken((1, 1, 3))
    assert health.changed([]) is health
    assert health.changed([RailShare(1, 1, 3)]) is health
    assert health.changed([RailShare(1, 1, 5), RailShare(1, 1, 3)]) is health


@pytest.mark.parametrize("share", [-1, WHOLE + 1, 256])
def test_a_share_out_of_range_is_refused(share: int) -> None:
    with pytest.raises(InvalidArgument, match=f"share {share}; allowed is 0"):
        whole().changed([RailShare(0, 0, share)])


def test_some_ranks_of_a_table_keep_its_version() -> None:
    health = broken((0, 0, 0), (2, 1, 4))
    child = health.of_ranks([2, 0])
    assert (child.version, child.nranks, child.config) == (health.version, 2, "abc")
    assert [child.share(0, 1), child.share(1, 0), child.share(0, 0)] == [4, 0, WHOLE]
    with pytest.raises(InvalidArgument, match="rank 3"):
        health.of_ranks([0, 3])
    with pytest.raises(InvalidArgument, match="positive multiple"):
        health.of_ranks([])


# On the wire


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((-1, 2, b"\x10\x10", ""), "version -1"),
        ((0, 0, b"\x10\x10", ""), "0 rails"),
        ((0, 2, b"", ""), "0 shares"),
        ((0, 2, b"\x10\x10\x10", ""), "3 shares"),
        ((0, 2, b"\x10\x11", ""), "share 17"),
        ((0, 2, b"\x10\x10", "", ((1, 0),)), "rail 0 of rank 1"),
        ((0, 2, b"\x10\x10", "", ((0, 1),)), "rail 1 of rank 0 is excluded, but its share is 16"),
    ],
)
def test_a_malformed_table_exists_neither_here_nor_from_the_wire(
    fields: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Health(*fields)
    body = dict(zip(Health.__struct_fields__, fields, strict=False))
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=Health)


def test_a_large_table_takes_a_byte_a_rail_and_fits_a_message() -> None:
    health = Health.whole(1024, 8, "0123456789abcdef").changed([RailShare(1023, 7, 0)])
    encoded = msgspec.msgpack.encode(health)
    assert len(encoded) < 1024 * 8 + 100 < MAX_BODY_NBYTES
    assert msgspec.msgpack.decode(encoded, type=Health) == health


# Excluded rails


def test_an_excluded_rail_has_no_share_whatever_is_reported() -> None:
    health = Health.whole(3, 2, "abc", [(2, 1), (0, 0)])
    assert (health.version, health.excluded) == (0, ((0, 0), (2, 1)))
    assert (health.share(2, 1), health.rails(0, 2)) == (0, ())
    assert health.changed([RailShare(2, 1, WHOLE)]) is health
    assert health.excluded_rails(2) == (1,)
    assert health.excluded_rails(1) == ()


def test_excluding_a_rail_that_is_down_makes_a_new_version() -> None:
    health = broken((1, 0, 0))
    excluded = health.changed((), [(1, 0)])
    assert excluded.version == health.version + 1
    assert excluded.shares == health.shares
    assert excluded.changed((), [(1, 0)]) is excluded


def test_exclusions_are_renumbered_with_the_ranks() -> None:
    health = Health.whole(3, 2, "", [(0, 0), (2, 1)])
    assert health.of_ranks([2, 1]).excluded == ((0, 1),)


def test_a_rail_that_is_included_has_the_share_that_was_reported() -> None:
    health = whole()
    findings = Findings(health)
    excluded = findings.merged(health, [(1, 0), (2, 1)])
    assert [excluded.share(1, 0), excluded.share(2, 1)] == [0, 0]
    findings.note(1, [RailShare(1, 0, 4)])
    assert findings.merged(excluded) is excluded
    included = findings.merged(excluded, ())
    assert included.excluded == ()
    assert [included.share(1, 0), included.share(2, 1)] == [4, WHOLE]


# Findings


def test_the_worst_word_counts_and_its_speaker_takes_it_back() -> None:
    findings = Findings(whole())
    findings.note(0, [RailShare(2, 1, 4)])
    findings.note(1, [RailShare(2, 1, 0)])
    assert findings.merged(whole()).share(2, 1) == 0
    findings.note(2, [RailShare(2, 1, WHOLE)])
    assert findings.merged(whole()).share(2, 1) == 0, "its own rank cannot take it back for others"
    findings.note(1, [RailShare(2, 1, WHOLE)])
    assert findings.merged(whole()).share(2, 1) == 4
    findings.note(0, [RailShare(2, 1, WHOLE)])
    assert findings.merged(whole()) == whole()


def test_what_was_inherited_is_taken_back_by_the_rails_own_rank() -> None:
    health = broken((1, 0, 0))
    findings = Findings(health)
    assert findings.merged(health) is health
    findings.note(2, [RailShare(1, 0, WHOLE)])
    assert findings.merged(health) is health
    findings.note(1, [RailShare(1, 0, WHOLE)])
    assert findings.merged(health).shares == whole().shares


def ring(edges: dict[int, int], nranks: int = 6) -> list[int]:
    """Have ranks of a ring say what their edges on rail 0 were measured at."""
    health = Health.whole(nranks, 2)
    findings = Findings(health)
    for rank, share in edges.items():
        findings.note(rank, [RailShare(rank, 0, share, toward=(rank + 1) % nranks)])
    merged = findings.merged(health)
    return [merged.share(rank, 0) for rank in range(nranks)]


@given(ports=st.lists(st.integers(1, WHOLE), min_size=3, max_size=9))
def test_a_port_beside_one_that_is_as_good_gets_its_own_share(ports: list[int]) -> None:
    edges = {at: min(port, ports[at + 1 - len(ports)]) for at, port in enumerate(ports)}
    found = ring(edges, len(ports))
    for at, port in enumerate(ports):
        if port <= max(ports[at - 1], ports[at + 1 - len(ports)]):
            assert found[at] == port
        else:
            assert edges[at] <= found[at] < port


def test_who_sends_into_a_slow_port_is_not_slow() -> None:
    assert ring({1: 4, 2: 4}) == [16, 16, 4, 16, 16, 16]
    assert ring({0: 8, 1: 4, 2: 4}) == [16, 8, 4, 16, 16, 16], "two neighbours, of which one is 8"
    assert ring({3: 4}) == [16, 16, 16, 4, 16, 16], "one direction: nothing tells whose"
    assert ring(dict.fromkeys(range(6), 8)) == [8] * 6, "all are slow"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_best_of_several_edges_to_a_port_counts(order: tuple[int, int]) -> None:
    health = Health.whole(4, 1)
    findings = Findings(health)
    edges = [RailShare(0, 0, 4, 2), RailShare(1, 0, 8, 2), RailShare(2, 0, 2, 3)]
    for rank in (*order, 2):
        findings.note(rank, [edges[rank]])
    findings.note(3, [RailShare(3, 0, 5, 0)])
    assert list(findings.merged(health).shares) == [5, WHOLE, 8, 5]


def test_what_was_not_measured_is_excused_by_nobody() -> None:
    findings = Findings(whole())
    findings.note(0, [RailShare(0, 1, 0)])
    findings.note(1, [RailShare(1, 1, 4, toward=2)])
    assert findings.merged(whole()).share(0, 1) == 0
    findings.note(1, [RailShare(0, 1, 2)])
    findings.note(0, [RailShare(0, 1, 4, toward=1)])
    assert findings.merged(whole()).share(0, 1) == 2, "a verdict of another rank stands"


@slow.given(50, 150, st.lists(st.tuples(st.integers(0, NRANKS - 1), NEWS), max_size=12), st.data())
def test_the_order_of_different_ranks_words_does_not_matter(
    said: list[tuple[int, RailShare]], data: st.DataObject
) -> None:
    by_rank = [[news for who, news in said if who == rank] for rank in range(NRANKS)]
    order = data.draw(st.permutations([rank for rank, _ in said]))
    streams = [iter(words) for words in by_rank]
    straight, shuffled = Findings(whole()), Findings(whole())
    for rank, news in said:
        straight.note(rank, [news])
    for rank in order:
        shuffled.note(rank, [next(streams[rank])])
    assert straight.merged(whole()) == shuffled.merged(whole())
