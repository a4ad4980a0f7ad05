"""Start of the messages of one communicator: checks their arguments, then sends or receives."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, SupportsIndex

from r2ccl.errors import R2cclError
from r2ccl.runtime import arguments
from r2ccl.runtime.collectives import Collectives
from r2ccl.runtime.messages.matching import ANY, Message
from r2ccl.runtime.messages.messenger import MessageRequest, Messenger


class MessageCalls:
    """`Communicator.send`, `recv`, `sendrecv` and `probe`.

    Parameters
    ----------
    collectives : Collectives
        Collectives of the same communicator, whose groups also collect messages.
    messenger : Messenger
    nranks : int
    """

    def __init__(self, collectives: Collectives, messenger: Messenger, nranks: int) -> None:
        self._collectives = collectives
        self._messenger = messenger
        self._nranks = nranks

    def send(
        self, x: Any, to: SupportsIndex, tag: int, *, is_synchronous: bool, is_async: bool
    ) -> MessageRequest | None:
        """Send `x`; see `Communicator.send`."""
        post = partial(
            self._messenger.send,
            arguments.as_buffer(x, writable=False),
            arguments.rank_of(to, self._nranks, "to"),
            arguments.tag(tag),
            is_synchronous=is_synchronous,
        )
        begun: MessageRequest | None = self._collectives.start_message(post, is_async)
        return begun

    def recv(self, out: Any, source: SupportsIndex, tag: int, *, is_async: bool) -> Any:
        """Receive into `out`; see `Communicator.recv`."""
        post = partial(
            self._messenger.receive,
            arguments.as_buffer(out, writable=True),
            self._source_of(source),
            arguments.tag(tag, is_any=True),
        )
        return self._collectives.start_message(post, is_async)

    def sendrecv(
        self,
        x: Any,
        to: SupportsIndex,
        out: Any,
        source: SupportsIndex,
        *,
        tag: int,
        recv_tag: int,
    ) -> Message | None:
        """Send and receive at the same time; see `Communicator.sendrecv`."""
        is_grouped = self._collectives.group_here() is not None
        received: MessageRequest | None = self.recv(out, source, recv_tag, is_async=not is_grouped)
        try:
            self.send(x, to, tag, is_synchronous=False, is_async=False)
        except BaseException:
            # `out` must not change any more.
            with suppress(R2cclError):
                if received is not None and not received.cancel():
                    received.wait()
            raise
        return None if received is None else received.wait()

    def probe(self, source: SupportsIndex, tag: int, *, is_blocking: bool) -> Message | None:
        """Find a message without receiving it; see `Communicator.probe`."""
        return self._messenger.probe(
            self._source_of(source), arguments.tag(tag, is_any=True), is_blocking=is_blocking
        )

    def _source_of(self, source: SupportsIndex) -> int:
        return ANY if source == ANY else arguments.rank_of(source, self._nranks, "source")


__all__ = ["MessageCalls"]
