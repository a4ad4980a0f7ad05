"""Edges onto rails: as even as the network allows, and only where they may be."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from r2ccl.algos import packed_trees
from r2ccl.failover.health.table import WHOLE
from r2ccl.planning.edge_colouring import even_out

Edges = list[tuple[int, int]]


def counts(edges: Edges, colours: list[int]) -> Counter[tuple[int, int]]:
    return Counter((v, c) for ends, c in zip(edges, colours, strict=True) for v in ends)


def edges_of(n: int, ntrees: int, bandwidths: list[int] | None = None) -> Edges:
    trees = packed_trees.pack(bandwidths or [1] * n, ntrees)
    return [(v, p) for parents in trees for v, p in enumerate(parents) if p >= 0]


def test_a_whole_network_is_filled_evenly() -> None:
    edges = edges_of(8, 32)
    shares = {v: [WHOLE] * 8 for v in range(8)}
    found = even_out(edges, [range(8)] * len(edges), shares, [0] * len(edges))
    assert set(counts(edges, found).values()) == {7}


def test_a_bipartite_graph_needs_no_more_than_its_degree() -> None:
    """König: rings, whose edges out of nodes and into them are no concern of each other."""
    n, nchannels, nrails = 6, 12, 4
    edges = [(2 * v, 2 * ((v + 1) % n) + 1) for v in range(n) for _ in range(nchannels)]
    shares = {v: [WHOLE] * nrails for v in range(2 * n)}
    found = even_out(edges, [range(nrails)] * len(edges), shares, [0] * len(edges))
    assert set(counts(edges, found).values()) == {nchannels // nrails}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000))
def test_edges_stay_where_they_may_be_and_nothing_gets_worse(seed: int) -> None:
    rng = random.Random(seed)
    n, nrails = rng.randrange(2, 9), rng.randrange(2, 6)
    shares = {v: [rng.choice((0, 5, WHOLE, WHOLE)) for _ in range(nrails)] for v in range(n)}
    edges, allowed, given_ = [], [], []
    for _ in range(rng.randrange(1, 60)):
        ends = tuple(rng.sample(range(n), 2))
        common = [c for c in range(nrails) if min(shares[v][c] for v in ends)]
        if common:
            edges.append((ends[0], ends[1]))
            allowed.append(common)
            given_.append(rng.choice(common))
    found = even_out(edges, allowed, shares, given_)
    assert all(colour in may for colour, may in zip(found, allowed, strict=True))

    def worst(colours: list[int]) -> float:
        loads = counts(edges, colours)
        return max((load / shares[v][c] for (v, c), load in loads.items()), default=0)

    assert worst(found) <= worst(given_) + 1 / min(
        (s for row in shares.values() for s in row if s), default=1
    )
    assert found == even_out(edges, allowed, shares, given_), "not the same on every rank"


def test_a_lost_port_is_made_up_for_by_the_others() -> None:
    rows = {v: [WHOLE] * 4 for v in range(8)}
    rows[0] = [0, WHOLE, WHOLE, WHOLE]
    edges = edges_of(8, 31, [24, *[32] * 7])
    allowed = [[c for c in range(4) if min(rows[v][c] for v in ends)] for ends in edges]
    found = even_out(edges, allowed, rows, [may[0] for may in allowed])
    # 31 trees of 7 edges through 31 ports: 14 ends each, if there is no room to spare at all.
    assert max(counts(edges, found).values()) <= 15
