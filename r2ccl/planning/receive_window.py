"""Admission: how much a rank lets be under way to each of its ports at once.

Who receives names the places slices land in, and so decides what is sent. Where several peers send
to one port, what they send together must fit the queue before it: a queue that runs over drops
segments, and TCP waits 200 ms for one that nothing follows (measured, 4 nodes of 4 rails of 200
Mbit/s with queues of 128 KiB, packed trees of 128 KiB slices, two named ahead: 1,000 segments sent
again and 3 to 7 such waits a call, 1.4 times the time it takes with one named ahead).

Where one peer sends to a port there is no such queue: its own port is as slow.

Pure. Invariant: every link may have one slice under way, or ranks would wait for one another.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from r2ccl.planning.lowering import Lane, Layout


def admit(layout: Layout, nhomes: int, nbytes: int) -> Layout:
    """Bound the landing places each link names ahead.

    Parameters
    ----------
    layout : Layout
        Of this rank.
    nhomes : int
        Rails that channels are at home on: those of equal remainder share one.
    nbytes : int
        What a port to which several peers send is to be sent at once.
    """
    ways = [way for lane in layout.lanes for way in lane.recvs]
    peers = {(way.channel % nhomes, way.peer) for way in ways}
    nsenders = Counter(port for port, _ in peers)
    nlinks = Counter(way.channel % nhomes for way in ways)
    depths = {
        port: max(1, nbytes // (nlinks[port] * layout.slice_nbytes))
        for port in nlinks
        if nsenders[port] > 1
    }
    return msgspec.structs.replace(
        layout, lanes=tuple(_bounded(lane, nhomes, depths) for lane in layout.lanes)
    )


def _bounded(lane: Lane, nhomes: int, depths: dict[int, int]) -> Lane:
    recvs = tuple(
        way._replace(depth=depths.get(way.channel % nhomes, way.depth)) for way in lane.recvs
    )
    return msgspec.structs.replace(lane, recvs=recvs)


__all__ = ["admit"]
