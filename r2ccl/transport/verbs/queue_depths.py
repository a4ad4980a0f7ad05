"""How many requests the queues of a queue pair hold, and so what a completion queue must hold.

A completion queue that overruns loses completions and is of no use afterwards, and every request
under way becomes one when its queue pair breaks, also those that asked for none. So one that serves
the queue pairs to n peers has an entry for every request that can be under way on all of them: a
port that dies breaks them all at once.

Invariant: `completions` counts what `r2ccl.transport.verbs.queuepair` and
`r2ccl.transport.verbs.probe` post.
"""

from __future__ import annotations

#: Messages under way one way; landing places named at once; credits that may cross. Few, because
#: every one stands for a receive request, and a fence waits until all of them are flushed.
NMESSAGES = 16
NLANDINGS = 16
_NCREDITS = 8
#: Receive requests of a path's queue pair, and the marker behind them; and its send requests.
NRECEIVES = NMESSAGES + NLANDINGS + _NCREDITS
NSENDS = 192
#: Writes of probes under way to one peer: from a port to its own rail and the one before it, each
#: on the connection in use and on one that is being joined in its place.
_NPROBES = 4

NCOMPLETIONS = NSENDS + NRECEIVES + 1 + _NPROBES
"""Completions that can wait for one peer on one NIC."""


def completions(npeers: int) -> int:
    """Return how many completions can wait in the queue of a NIC that serves `npeers` peers."""
    return max(1, npeers) * NCOMPLETIONS


def most_peers(ncompletions: int) -> int:
    """Return how many peers a completion queue of so many entries can serve."""
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
