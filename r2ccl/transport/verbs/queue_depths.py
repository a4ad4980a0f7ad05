"""Depths of the queues of a queue pair, and the size of the completion queue that they require.

A completion queue that overruns loses completions and cannot be used afterwards. When a queue pair
breaks, every request in flight on it completes, including unsignaled ones, and a port that dies
breaks the queue pairs to all peers at once. So the completion queue has an entry for every request
that can be in flight on all queue pairs of its NIC.

Invariant: `completions` covers all requests that `r2ccl.transport.verbs.queuepair` and
`r2ccl.transport.verbs.probe` post.
"""

from __future__ import annotations

#: Maximum number, per path and direction, of unconsumed messages, of announced landing places, and
#: of credits in flight. The numbers are small because each message, landing place and credit needs
#: a receive request, and a fence waits until all receive requests are flushed.
NMESSAGES = 16
NLANDINGS = 16
_NCREDITS = 8
#: Receive requests of a path's queue pair (without the marker of a fence), and send requests.
NRECEIVES = NMESSAGES + NLANDINGS + _NCREDITS
NSENDS = 192
#: Probes in flight from a NIC's port to one peer: to the peer's ports on the same and the previous
#: rail, each on the connection in use and on one that is being connected to replace it.
_NPROBES = 4

NCOMPLETIONS = NSENDS + NRECEIVES + 1 + _NPROBES
"""Completion queue entries that a NIC needs per peer: one per request that can be in flight."""


def completions(npeers: int) -> int:
    """Return the number of completion queue entries that a NIC needs for max(`npeers`, 1) peers."""
    return max(1, npeers) * NCOMPLETIONS


def most_peers(ncompletions: int) -> int:
    """Return the number of peers that a completion queue of `ncompletions` entries can serve."""
    return ncompletions // NCOMPLETIONS


__all__ = [
    "NCOMPLETIONS",
    "NLANDINGS",
    "NMESSAGES",
    "NRECEIVES",
    "NSENDS",
    "completions",
    "most_peers",
]
