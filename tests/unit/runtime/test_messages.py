"""Messages of one rank: what its driver does with envelopes that arrive."""

from __future__ import annotations

import struct

from support.still import make_engine

from r2ccl.failover.migration.calls import first_channel, message_context

_ENVELOPE = struct.Struct("<BBxxIqQQ")
_MESSAGE = 1


def test_many_envelopes_may_have_arrived_at_once() -> None:
    """As after a repair, or for a communicator that this rank has just made."""
    engine, _ = make_engine(eager_slots=2000)
    link = engine._links.receiver(1, first_channel(message_context(0)))
    for seq in range(2000):
        link.arrived(seq, _ENVELOPE.pack(_MESSAGE, 0, 1, seq, seq, 0))
    engine._links.deliver(link)
    assert link.consumed == 2000
    assert engine.messenger.probe(1, 1999, is_blocking=False) is not None
