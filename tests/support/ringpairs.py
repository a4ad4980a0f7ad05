"""Ranks of one process that are joined by rings, and what they do with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from r2ccl.shm import layout
from r2ccl.shm.reading import offer_word
from r2ccl.shm.rings import Rings
from r2ccl.shm.robust_mutex import ExitWatch
from r2ccl.shm.segment import Segment


def new_state(rank: int, nranks: int, own: Segment, peers: dict[int, Segment]) -> np.ndarray:
    """Return a state for waits of a rank."""
    state = np.zeros(layout.state_size(nranks), np.int64)
    state[[layout.RANK, layout.NRANKS]] = rank, nranks
    state[[layout.SPIN, layout.SPIN_MIN, layout.SPIN_MAX]] = 20, 5, 20
    state[layout.YIELDS] = 5
    layout.set_sleep(state, 2_000_000)
    state[layout.STREAM_NBYTES] = 1 << 20
    for peer in range(nranks):
        state[layout.BASES + peer] = (own if peer == rank else peers[peer]).address
    return state


@contextmanager
def joined(nranks: int, *, can_read: bool = False) -> Iterator[list[Rings]]:
    """Give the rings of all ranks; each maps the segments of the others.

    If `can_read`, the ranks tell each other that they can read each other's memory.
    """
    own = [Segment.create_of_group(nranks) for _ in range(nranks)]
    offered = [offer_word(each) for each in own]
    for each in own:
        each.words[layout.CAN_READ // 8] = can_read
    peers = [
        {
            peer: own[peer].of_peer(os.dup(own[peer].descriptor))
            for peer in range(nranks)
            if peer != rank
        }
        for rank in range(nranks)
    ]
    made = [
        Rings(
            rank,
            own[rank],
            peers[rank],
            new_state(rank, nranks, own[rank], peers[rank]),
            ExitWatch({}, lambda index: None),
        )
        for rank in range(nranks)
    ]
    try:
        yield made
        assert len(offered) == nranks  # ranks read these words until here
    finally:
        for rings in made:
            rings.close()
        for segment in (*own, *(each for row in peers for each in row.values())):
            segment.close()
