"""Trees packed by ports: they span, on rails both ends have, and come close to the bound."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import strategies as st
from support import slow

from r2ccl.algos import tree
from r2ccl.algos.port_packing import PortTree, pack
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check

Shares = tuple[tuple[int, ...], ...]

ROWS = st.integers(2, 4).flatmap(
    lambda nrails: st.lists(
        st.lists(st.sampled_from([0, 1, 4, 11, 16]), min_size=nrails, max_size=nrails),
        min_size=2, max_size=7,
    )
)  # fmt: skip


def is_joined(shares: list[list[int]]) -> bool:
    reached = {0}
    for _ in shares:
        reached |= {
            node
            for node, row in enumerate(shares)
            if any(any(map(min, row, shares[other])) for other in reached)
        }
    return len(reached) == len(shares)


def time_of(trees: list[PortTree], shares: Shares) -> Fraction:
    """Return the time of the busiest port for the data, whole ports having 16."""
    nedges = Counter(
        (node, edge.rail) for each in trees for edge in each.edges for node in edge[:2]
    )
    return max(Fraction(16 * n, shares[node][rail]) for (node, rail), n in nedges.items()) / len(
        trees
    )


@slow.given(50, 200, ROWS)
def test_every_tree_spans_over_ports_that_are_up(shares: list[list[int]]) -> None:
    if not is_joined(shares):
        with pytest.raises(InvalidArgument, match="rails do not connect node"):
            pack(shares, 4)
        return
    trees = pack(shares, 8)
    assert 1 <= len(trees) <= 8
    assert trees == pack(shares, 8), "equal arguments, equal trees"
    for each in trees:
        pairs = {tuple(sorted((node, up))) for node, up in enumerate(each.parents) if up >= 0}
        assert pairs == {edge[:2] for edge in each.edges}
        assert len(each.edges) == len(shares) - 1
        assert all(min(shares[low][rail], shares[high][rail]) for low, high, rail in each.edges)
    check(tree.allreduce([each.parents for each in trees]))


@pytest.mark.parametrize(
    ("shares", "bound", "within"),
    [
        # A chain: nodes 0 and 2 have only node 1 in common.
        (((16, 0), (16, 16), (0, 16)), Fraction(1), 1.0),
        # Five nodes of two rails, of which the second joins but two.
        (((16, 0), (16, 0), (16, 16), (10, 16), (16, 0)), Fraction(48, 37), 1.05),
        # Three nodes of seven rails; node 2 meets node 0 on one of them, node 1 on another.
        (
            (
                (16, 16, 8, 16, 0, 16, 0),
                (16, 0, 16, 0, 3, 0, 16),
                (0, 0, 0, 0, 16, 15, 0),
            ),
            Fraction(8, 9),
            1.05,
        ),
        (((16,) * 4,) * 4, Fraction(3, 8), 1.0),
    ],
)
def test_the_busiest_port_has_little_more_than_it_must(
    shares: Shares, bound: Fraction, within: float
) -> None:
    time = time_of(pack(shares, 8 * len(shares[0])), shares)
    assert bound <= time <= bound * Fraction(within)


@pytest.mark.parametrize(
    ("shares", "most", "why"),
    [
        ([], 3, "one row per node"),
        ([[]], 3, "one row per node"),
        ([[1, 2], [1]], 3, "all of the same length"),
        ([[1], [0.5]], 3, "integer shares"),
        ([[1], [float("nan")]], 3, "integer shares"),
        ([[1], [-1]], 3, "shares of 0 to 4294967295"),
        ([[1], [1 << 32]], 3, "shares of 0 to 4294967295"),
        ([[1], [1]], 0, "most=0"),
    ],
)
def test_what_cannot_be_packed_is_refused(shares: list[list[int]], most: int, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        pack(shares, most)


def test_the_root_is_in_the_middle() -> None:
    chain = ((16, 0, 0, 0), (16, 16, 0, 0), (0, 16, 16, 0), (0, 0, 16, 16), (0, 0, 0, 16))
    (only,) = {each.parents for each in pack(chain, 8)}
    assert only == (1, 2, -1, 2, 3)
