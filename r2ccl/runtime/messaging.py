"""Entry point of the messages of one communicator: checks arguments, sends and receives.

A direct call (`r2ccl.runtime.messages.outcome`) may return before its message has arrived; its
outcome is then `Delayed`, and this module waits for the message. Ctrl-C before that wait ends the
communicator, because the message may still be written to the array of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from r2ccl.errors import R2cclError
from r2ccl.runtime import arguments
from r2ccl.runtime.collectives import Collectives
from r2ccl.runtime.messages.matching import Message
from r2ccl.runtime.messages.messenger import MessageRequest, Messenger, Starter, Way
from r2ccl.runtime.messages.outcome import (
    NOT_RUN,
    Delayed,
    DirectEnd,
    NotRun,
    Outcome,
    PreparedMessage,
)
from r2ccl.runtime.turn import HAS_GIL


class MessageCalls:
    """Implementation of `Communicator.send`, `recv`, `sendrecv` and `probe`.

    Parameters
    ----------
    collectives : Collectives
        Collectives of the same communicator; a group of their calls may also contain messages.
    messenger : Messenger
    nranks : int
    """

    def __init__(self, collectives: Collectives, messenger: Messenger, nranks: int) -> None:
        self._collectives = collectives
        self._messenger = messenger
        self._nranks = nranks
        #: ``send(x, to, tag, is_synchronous, is_async)``, see `Communicator.send`. This function
        #: and the next two are compiled once a direct call in shared memory has been prepared.
        self.send: Callable[..., Any] = self._send
        #: ``recv(out, source, tag, is_async)``, see `Communicator.recv`.
        self.recv: Callable[..., Any] = self._recv
        #: ``sendrecv(x, to, tag, out, source, recv_tag)``, see `Communicator.sendrecv`.
        self.sendrecv: Callable[..., Any] = self._sendrecv
        self._is_compiled = not HAS_GIL

    def _send(
        self, x: Any, to: SupportsIndex, tag: int, is_synchronous: bool, is_async: bool
    ) -> MessageRequest | None:
        is_direct = not is_async and not is_synchronous
        if is_direct and self._collectives.is_plain and (way := self._messenger.way).is_direct:
            try:
                key = (to, tag) if type(to) is type(tag) is int else None
                found = NOT_RUN if key is None else way.repeat(key, x, _NOTHING)
                if found is NOT_RUN:
                    end = self._to(x, to, tag)
                    found = self._begin(way, (end.peer, end.tag), end, None)
                if found is not NOT_RUN:
                    self._finish(found, x, None)
                    return None
            except Exception:
                raise
            except BaseException as exc:
                self._collectives.fail_call(exc)
                raise
        post = partial(self._messenger.send, *self._to(x, to, tag), is_synchronous=is_synchronous)
        begun: MessageRequest | None = self._collectives.start_message(post, is_async)
        return begun

    def _recv(self, out: Any, source: SupportsIndex, tag: int, is_async: bool) -> Any:
        if not is_async and self._collectives.is_plain and (way := self._messenger.way).is_direct:
            try:
                key = (source, tag, 0) if type(source) is type(tag) is int else None
                found = NOT_RUN if key is None else way.repeat(key, _NOTHING, out)
                if found is NOT_RUN:
                    end = self._from(out, source, tag, "tag")
                    found = self._begin(way, (end.peer, end.tag, 0), None, end)
                if found is not NOT_RUN:
                    return self._finish(found, None, out)
            except Exception:
                raise
            except BaseException as exc:
                self._collectives.fail_call(exc)
                raise
        post = partial(self._messenger.receive, *self._from(out, source, tag, "tag"))
        return self._collectives.start_message(post, is_async)

    def _sendrecv(
        self,
        x: Any,
        to: SupportsIndex,
        tag: int,
        out: Any,
        source: SupportsIndex,
        recv_tag: int,
    ) -> Message | None:
        sending: MessageRequest | None = None
        try:
            if self._collectives.is_plain and (way := self._messenger.way).is_direct:
                found: Outcome = NOT_RUN
                if type(to) is type(source) is type(tag) is type(recv_tag) is int:
                    found = way.repeat((to, tag, source, recv_tag), x, out)
                if found is NOT_RUN:
                    sent, end = self._to(x, to, tag), self._from(out, source, recv_tag, "recv_tag")
                    key = (sent.peer, sent.tag, end.peer, end.tag)
                    found = self._begin(way, key, sent, end)
                if found is not NOT_RUN:
                    return self._finish(found, x, out)
            to_end, from_end = self._to(x, to, tag), self._from(out, source, recv_tag, "recv_tag")
            send = partial(self._messenger.send, *to_end, is_synchronous=False)
            receive = partial(self._messenger.receive, *from_end)
            start = self._collectives.start_message
            if self._collectives.group_here() is not None:
                start(receive, False)
                start(send, False)
                return None
            # The compiled code of the peer expects the REQUEST of a long message before the GRANT.
            sending = start(send, True)
            await_send = partial(self._collectives.await_message, sending)
            return self._exchange(start(receive, True), await_send)
        except BaseException as exc:
            if not isinstance(exc, Exception):
                self._collectives.fail_call(exc)
            if sending is not None:  # a peer may use `x` until the send has ended
                with suppress(R2cclError):
                    sending.wait()
            raise

    def _begin(
        self,
        way: Way,
        key: tuple[int, ...],
        sent: DirectEnd | None,
        received: DirectEnd | None,
    ) -> Outcome:
        """Return the result of ``way.begin``; let compiled code begin such calls from now on."""
        if not self._is_compiled and way.starter is not None:
            self._is_compiled = True
            self._compile(way, way.starter)
        return way.begin(key, sent, received)

    def _compile(self, way: Way, starter: Starter) -> None:
        groups, conditions = self._collectives.conditions_of_plain()
        conditions = [*conditions, (self._messenger, "way", way)]

        def proceed(made: PreparedMessage, x: Any, out: Any) -> Message | None:
            try:
                return self._finish(starter.proceed(made, x, out), x, out)
            except Exception:
                raise
            except BaseException as exc:
                self._collectives.fail_call(exc)
                raise

        def fail(error: BaseException) -> None:
            try:
                starter.fail(error)
            finally:
                self._collectives.fail_call(error)

        def compiled(slow: Callable[..., Any], *names: str) -> Callable[..., Any]:
            return starter.compiled(slow, names, proceed, fail, groups, conditions)

        made = (
            compiled(self._send, "x", "to", "tag", "is_synchronous", "is_async"),
            compiled(self._recv, "out", "source", "tag", "is_async"),
            compiled(self._sendrecv, "x", "to", "tag", "out", "source", "recv_tag"),
        )
        self.send, self.recv, self.sendrecv = made

    def _exchange(
        self, received: MessageRequest | None, send: Callable[[], object]
    ) -> Message | None:
        """Call ``send()``, then wait for the receive `received`; return its message.

        If ``send()`` raises, withdraw the receive or wait for it before the error is passed on.
        """
        try:
            send()
        except BaseException:
            # `out` must not change any more.
            with suppress(R2cclError):
                if received is not None and not received.cancel():
                    received.wait()
            raise
        return None if received is None else received.wait()

    def _finish(self, found: Outcome, x: Any, out: Any) -> Message | None:
        """Return the message that a call received; None for a send.

        `found` is the outcome of a direct call (`r2ccl.runtime.messages.outcome`); if it is
        `Delayed`, wait for its requests. `x` and `out` are the arrays of the caller.
        """
        if not isinstance(found, Delayed):
            assert not isinstance(found, NotRun)
            return found
        received = sent = None
        if found.received is not None:
            received = MessageRequest(self._messenger, found.received, out)
        if found.sent is not None:
            sent = MessageRequest(self._messenger, found.sent, x)

        if sent is not None:
            return self._exchange(received, partial(self._collectives.await_message, sent))
        return None if received is None else self._collectives.await_message(received)

    def _to(self, x: Any, to: SupportsIndex, tag: int) -> DirectEnd:
        buffer = arguments.as_buffer(x, writable=False)
        return DirectEnd(buffer, arguments.rank_of(to, self._nranks, "to"), arguments.tag(tag))

    def _from(self, out: Any, source: SupportsIndex, tag: int, tag_name: str) -> DirectEnd:
        buffer = arguments.as_buffer(out, writable=True)
        return DirectEnd(buffer, self._source_of(source), arguments.tag(tag, tag_name, is_any=True))

    def probe(self, source: SupportsIndex, tag: int, *, is_blocking: bool) -> Message | None:
        """Find a message without receiving it; see `Communicator.probe`."""
        return self._messenger.probe(
            self._source_of(source), arguments.tag(tag, is_any=True), is_blocking=is_blocking
        )

    def _source_of(self, source: SupportsIndex) -> int:
        return arguments.rank_of(source, self._nranks, "source", is_any=True)


_NOTHING = np.empty(0, np.uint8)

__all__ = ["MessageCalls"]
