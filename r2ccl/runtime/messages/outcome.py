"""Direct calls: blocking sends and receives that compiled code runs without a request.

A carrier of messages (`r2ccl.runtime.messages.messenger.Way`) runs a send, a receive, or both as a
direct call if no other message is under way that the call could disturb. If the call cannot end in
compiled code, for example because the peer is late, requests continue it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.messages.matching import Message
from r2ccl.runtime.messages.protocol import ReceiveRequest, SendRequest


class NotRun:
    """Type of `NOT_RUN`: no direct call ran, so the caller must use another kind of call."""


NOT_RUN = NotRun()
#: Array of a direction that a direct call does not have.
NOTHING = np.empty(0, np.uint8)


class Delayed(NamedTuple):
    """Requests that continue a direct call that compiled code could not complete.

    ``sent`` is None if no send is left to finish; ``received`` is None if no receive is left.
    """

    sent: SendRequest | None
    received: ReceiveRequest | None


class PreparedMessage(NamedTuple):
    """Direct call that can be run again, see `r2ccl.shm.repeat_message`.

    ``call`` is an `r2ccl.shm.rings.DirectCall`, ``words`` are its words, and ``key`` is the
    argument of `Way.begin`. The only item of ``last`` is the message that the call received last;
    only the thread that has the turn changes this item.
    """

    words: npt.NDArray[np.int64]
    key: tuple[int, ...]
    last: list[Message | None]
    call: Any


class DirectEnd(NamedTuple):
    """Buffer, peer (its rank in the communicator) and tag of a send or receive of a direct call."""

    buffer: Buffer
    peer: int
    tag: int


#: Result of a direct call: the message that it received, or None if it only sent; `Delayed` if
#: requests continue it; `NOT_RUN`.
Outcome = Message | Delayed | NotRun | None

__all__ = ["NOTHING", "NOT_RUN", "Delayed", "DirectEnd", "NotRun", "Outcome", "PreparedMessage"]
