"""Messages of one communicator, blocking and asynchronous, for use by any thread."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from r2ccl.errors import CommunicatorRevoked, ConcurrentCalls, R2cclError, TransportTimeout
from r2ccl.failover.context import RankContext
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.calls import message_context
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.contexts import Context
from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.messages.direct_calls import DirectCalls
from r2ccl.runtime.messages.driver import MessageDriver
from r2ccl.runtime.messages.local import LocalEngine, LocalMessages
from r2ccl.runtime.messages.local_driver import LocalDriver
from r2ccl.runtime.messages.matching import ANY, Message
from r2ccl.runtime.messages.network import NetworkMessages
from r2ccl.runtime.messages.outcome import DirectEnd, Outcome, PreparedMessage
from r2ccl.runtime.messages.protocol import MessageProtocol, ReceiveRequest, SendRequest
from r2ccl.runtime.patience import Caller, Patience
from r2ccl.runtime.status import Pending, Wait

if TYPE_CHECKING:
    from r2ccl.shm.rings import Rings


#: Replaces the memory of a finished request, which the caller may then resize or free.
_NO_VIEW = memoryview(b"")
#: Result in place of that of a function which was not called, because calls are refused.
_REFUSED = object()


class MessageRequest:
    """Handle of a message that is being sent or received.

    Keeps the array alive until `wait` returns. Until then, the array of a send must not be changed,
    and that of a receive neither read nor changed.
    """

    def __init__(
        self, messenger: Messenger, request: SendRequest | ReceiveRequest, owner: object
    ) -> None:
        self._messenger = messenger
        self._request = request
        self._owner: object | None = owner

    def is_done(self) -> bool:
        """Return, without blocking, whether `wait` would return or raise an error at once.

        If the request has not ended yet, first advance messages once.
        """
        return self._messenger.test(self._request)

    @property
    def has_succeeded(self) -> bool:
        """True once the message is received or sent, or the receive is withdrawn."""
        return self._request.is_done and self._request.error is None

    def wait(self, timeout_s: float | None = None) -> Message | None:
        """Block until the message is received or sent; its array may be used again afterwards.

        Parameters
        ----------
        timeout_s : float, optional
            Longest wait, in seconds. Default: ``R2CC_TIMEOUT_S``.

        Returns
        -------
        Message or None
            Source, tag and number of elements of a received message; None for a send, and for a
            receive that was withdrawn.

        Raises
        ------
        TransportTimeout
            If the wait takes longer than the timeout. If `timeout_s` was given, the request
            continues: call `wait` again. Otherwise, the communicator has ended.
        InvalidArgument
            If the message has more elements than the array of its receive, or another dtype. The
            send of the message raises this error too if it is to another rank and waits for its
            receive (see `Communicator.send`). Otherwise, the message stays at the receiver for
            another receive.
        ConcurrentCalls
            If the caller is a signal handler that interrupted a call of its thread.
        R2cclError
            If, before the request was done, the communicator has ended, this rank has closed it,
            or, in shared memory, the sender of the message has closed it.
        """
        request = self._request
        try:
            return self._messenger.wait(request, timeout_s)
        finally:
            if request.is_done:
                self._owner, request.view = None, _NO_VIEW

    def cancel(self) -> bool:
        """Withdraw a receive that has taken no message; return whether it was withdrawn.

        A send is never withdrawn. After a withdrawal, `wait` returns None.

        Raises
        ------
        ConcurrentCalls
            If the caller is a signal handler that interrupted a call of its thread.
        R2cclError
            If the communicator has ended, or this rank has closed it.
        """
        return self._messenger.cancel(self._request)


class MessageCaller:
    """Calls for the messages of one communicator; a `Caller` of the data loop.

    Parameters
    ----------
    engine : Caller
        The `Caller` of the collectives of the same communicator; an error that ends one ends both.
    """

    def __init__(self, engine: Caller) -> None:
        self._engine = engine
        self.waiting: Patience | None = None
        self.since_s = 0.0
        self.is_calling = False
        self.peers: frozenset[int] = frozenset()

    @property
    def has_raised(self) -> bool:
        """True if a call or message has raised the error that ended the communicator."""
        return self._engine.has_raised

    @has_raised.setter
    def has_raised(self, value: bool) -> None:
        self._engine.has_raised = value

    def tick(self, now: float) -> None:
        """Do nothing: messages have no periodic work."""

    def check(self) -> None:
        """Raise the error of the communicator if it has ended."""
        self._engine.check()


class MessageWait(MessageCaller):
    """Wait of one thread for a message; other threads may wait for other messages meanwhile.

    Parameters
    ----------
    messenger : Messenger
    engine : Caller
    """

    def __init__(self, messenger: Messenger, engine: Caller) -> None:
        super().__init__(engine)
        self.messenger = messenger
        #: Identifier of the thread that waits.
        self.thread = get_ident()


class Starter(Protocol):
    """Carrier of messages whose direct calls compiled code can start."""

    def compiled(
        self,
        slow: Callable[..., Any],
        names: Sequence[str],
        proceed: Callable[[PreparedMessage, Any, Any], Any],
        failed: Callable[[BaseException], None],
        groups: list[Any],
        conditions: Sequence[tuple[object, str, object]],
    ) -> Callable[..., Any]:
        """Return a compiled function that does the same as `slow`.

        The function repeats the direct calls that `Way.begin` has prepared. For the parameters, see
        `r2ccl.shm.repeat_message.message_of`. `proceed` and `failed` must call the methods
        `proceed` and `fail` of this object.
        """
        ...

    def proceed(self, made: PreparedMessage, x: Any, out: Any) -> Outcome:
        """Continue a direct call that compiled code has begun, and return the turn.

        Raises
        ------
        R2cclError
            If the communicator ends meanwhile.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """End the communicator after an error while compiled code had the turn; return the turn."""
        ...


class Way(Protocol):
    """Carrier of the messages of one communicator: links, or shared memory.

    Attributes
    ----------
    is_direct : bool
        True if the carrier runs direct calls (`r2ccl.runtime.messages.outcome`).
    starter : Starter or None
        This object, if compiled code can start its direct calls; otherwise None.
    """

    is_direct: bool

    @property
    def starter(self) -> Starter | None:
        """Starter of direct calls in compiled code: this object, or None if it cannot start any."""
        ...

    @property
    def driver(self) -> MessageProtocol:
        """Exchange of the messages; call its methods only within `own` or `wait`."""
        ...

    @property
    def is_below(self) -> bool:
        """True in a signal handler that interrupted its thread while this object moved messages.

        Always False over links, where the data loop detects such a handler.
        """
        ...

    def connect_to(self, peer: int) -> None:
        """Connect paths to `peer`, a rank of the job, if messages need them; wait for the paths.

        Raises
        ------
        TransportTimeout
            If no path to `peer` came up in time; the communicator has ended.
        ConcurrentCalls
            If the caller is a signal handler that interrupted a call of its thread.
        R2cclError
            If the communicator has ended, or ends meanwhile.
        """
        ...

    def own(self, fn: Callable[[], Any], *, is_step: bool) -> Any:
        """Call ``fn()`` while no other thread uses the driver; return its result.

        If `is_step`, advance messages first. An exception of ``fn()`` ends the communicator.

        Raises
        ------
        ConcurrentCalls
            If the caller is a signal handler that interrupted a call of its thread.
        R2cclError
            If the communicator has ended, or ends meanwhile.
        """
        ...

    def wait(self, caller: Caller, is_done: Callable[[], bool], patience: Patience) -> None:
        """Advance messages until ``is_done()``; `caller` represents this wait in the data loop.

        Raises
        ------
        TransportTimeout
            If ``is_done()`` is not true within ``patience.timeout_s``; the communicator has ended.
        ConcurrentCalls
            If the caller is a signal handler that interrupted a call of its thread.
        R2cclError
            If the communicator has ended, or ends meanwhile.
        """
        ...

    def repeat(self, key: tuple[int, ...], x: Any, out: Any) -> Outcome:
        """Run the direct call that `begin` prepared for `key`, with arrays of the same form.

        The form is that of `r2ccl.shm.arrays.form_of`. Return NOT_RUN if there is no such call, the
        form differs or the communicator has ended. Also return NOT_RUN if `begin` would do so.

        Raises
        ------
        R2cclError
            If the communicator ends meanwhile.
        """
        ...

    def begin(
        self, key: tuple[int, ...], sent: DirectEnd | None, received: DirectEnd | None
    ) -> Outcome:
        """Run a direct call; a carrier may keep it for `repeat`.

        Parameters
        ----------
        key : tuple of int
            ``(to, tag)`` of a send, ``(source, tag, 0)`` of a receive, and ``(to, tag, source,
            recv_tag)`` of both. The 0 only makes the key of a receive differ from that of a send.
        sent, received : DirectEnd or None
            The send and the receive; None if the call has none.

        Returns
        -------
        Message or Delayed or NotRun or None
            NOT_RUN if the carrier cannot run this call directly now; else see `Outcome`.

        Raises
        ------
        ConcurrentCalls
            If the caller is a signal handler that interrupted a call of its thread.
        R2cclError
            If the communicator has ended, or ends meanwhile.
        """
        ...


class Messenger(MessageCaller):
    """Messages of one communicator, over links or in shared memory.

    To the data loop, this object is the `Caller` of direct calls and of calls that do not wait.
    Each wait for a message is a `Caller` of its own, a `MessageWait`.

    Parameters
    ----------
    job : RankContext
        This rank in the job.
    loop : DataLoop
        Data loop of the job.
    context : Context
        Identity of the communicator.
    engine : Caller
        The `Caller` of the collectives of the same communicator; an error that ends one ends both.
    connect : callable
        ``connect(peers)`` connects paths to ranks of the job, and waits for them.
    health : callable
        ``health()`` returns the newest known health of the communicator.
    """

    def __init__(
        self,
        job: RankContext,
        loop: DataLoop,
        context: Context,
        engine: Caller,
        *,
        connect: Callable[[frozenset[int]], None],
        health: Callable[[], Health],
    ) -> None:
        super().__init__(engine)
        self._job = job
        self._loop = loop
        self._clock = job.clock
        self._timeout_s = job.config.timeout_s
        self._members = context.members
        self._told = context.told()
        self._rank = context.members.index(job.rank)
        context_id = message_context(context.context_id)
        driver = MessageDriver(
            loop.links,
            loop.links.calls_of(context_id),
            rank=self._rank,
            members=context.members,
            first_op=context.first_op,
            homes=job.homes,
            nwires=job.nwires,
            eager_nbytes=job.config.eager_nbytes,
            slice_nbytes=job.config.slice_nbytes,
            depth=job.config.landing_depth,
            health=health,
        )
        calls = None
        if loop.compiled is not None:
            calls = DirectCalls(loop, driver, self, self._pending_direct, self._timeout_s)
        self._network = NetworkMessages(self, loop, driver, connect, calls)
        #: Carrier of the messages.
        self.way: Way = self._network
        self._refusal: Callable[[], R2cclError] | None = None
        self._local: LocalMessages | None = None
        #: True after `let_go`.
        self._has_let_go = False
        loop.callers.append(self)

    def refuse(self, refusal: Callable[[], R2cclError]) -> None:
        """End the waits for messages and refuse all later calls, each with an error ``refusal()``.

        While a peer may use the array of a message, the wait for this message continues. This
        applies to every send, and to every receive that has taken a message. Such a wait ends when
        the message is done, the communicator ends or `let_go` is called. Any thread may call this
        method.
        """
        self._refusal = refusal

    def let_go(self) -> None:
        """End the remaining waits if calls are refused (see `refuse`).

        The caller knows that no peer uses the arrays of messages. Any thread may call this method.
        """
        self._has_let_go = True

    @property
    def _is_over(self) -> bool:
        """True if calls are refused, and no peer uses the arrays of messages (see `let_go`).

        Also True if calls are refused while the Python interpreter ends, because the memory of
        messages is not freed then.
        """
        is_free = self._has_let_go or self._loop.is_closed or sys.is_finalizing()
        return self._refusal is not None and is_free

    @property
    def is_below(self) -> bool:
        """True in a signal handler that interrupted its thread in a wait for a message.

        Also True if `Way.is_below` is True.
        """
        return any(each.thread == get_ident() for each in self.waits) or self.way.is_below

    @property
    def waits(self) -> list[MessageWait]:
        """Waits for messages of this communicator that are in progress, in any thread."""
        waits = [each for each in self._loop.callers.copy() if isinstance(each, MessageWait)]
        return [each for each in waits if each.messenger is self]

    # Shared memory

    def share_memory(self, rings: Rings, engine: LocalEngine) -> None:
        """Exchange all later messages through `rings`, in memory that the ranks share."""
        driver = LocalDriver(
            rings,
            rank=self._rank,
            members=self._members,
            eager_nbytes=self._job.config.eager_nbytes,
        )
        self._local = self.way = LocalMessages(self, self._loop, driver, engine)

    def free_memory(self, timeout_s: float) -> bool:
        """Drop the messages in shared memory, use the network again, and return True.

        Afterwards, no peer uses the arrays of these messages. Return False if a call still uses the
        shared memory after `timeout_s` seconds; then call again. If messages do not use shared
        memory, do nothing and return True.
        """
        if self._local is None:
            return True
        if not self._local.close(timeout_s):
            return False
        self.let_go()
        self._local, self.way = None, self._network
        return True

    def disown_memory(self) -> None:
        """Stop using the shared memory, in a forked process, whose parent still uses it."""
        if self._local is not None:
            self._local.disown()
        self._local, self.way = None, self._network
        self.let_go()

    def finish(self) -> None:
        """Withdraw the receives that have taken no message, and wait until no data is moving.

        The data is that of messages that receives have taken: see `MessageProtocol.nmoving`. Then
        stop using the arrays of announced messages, see `MessageProtocol.release_announced`.

        Raises
        ------
        TransportTimeout
            If data still moves after ``R2CC_TIMEOUT_S``; the communicator has ended.
        R2cclError
            If the communicator has ended.
        """
        driver = self.way.driver

        def is_done() -> bool:
            # A peer puts its answer to a message that it reads before it ceases to count as moving:
            # if it does not count here, `withdraw` handles the answer.
            nbefore = driver.nmoving
            driver.withdraw()
            if nbefore or driver.nmoving:
                return False
            driver.release_announced()
            return True

        doing = "close(), before the data of all messages has arrived"
        self._wait(is_done, ANY, doing, "message", self._timeout_s)
        if self._local is None:
            self.let_go()

    def close(self) -> None:
        """Stop handling messages; called by the owner of the data loop."""
        self._loop.callers.remove(self)
        self._network.driver.close()

    # Requests; any thread

    def send(self, x: Buffer, to: int, tag: int, *, is_synchronous: bool = False) -> MessageRequest:
        """Begin to send `x` to rank `to`; first connect paths to that rank if there are none.

        `x` must not change until the request is done. If `is_synchronous`, the request is done only
        after a receive has taken the message, or the peer has refused it.
        """
        driver = self.way.driver

        def post() -> SendRequest:
            return driver.send(x.data, x.dtype_code, to, tag, is_synchronous=is_synchronous)

        self.way.connect_to(self._members[to])
        return MessageRequest(self, self._own(post), x.owner)

    def receive(self, out: Buffer, source: int, tag: int) -> MessageRequest:
        """Begin to receive a message into `out`; `source` and `tag` may be `ANY`."""
        driver = self.way.driver

        def post() -> ReceiveRequest:
            return driver.receive(out.data, out.dtype_code, source, tag)

        return MessageRequest(self, self._own(post), out.owner)

    def probe(self, source: int, tag: int, *, is_blocking: bool) -> Message | None:
        """Return the message that a receive from `source` with `tag` would take, or None.

        If `is_blocking`, wait for a message. After ``R2CC_TIMEOUT_S``, raise TransportTimeout; the
        communicator has then ended.
        """
        find = partial(self.way.driver.probe, source, tag)
        found: Message | None = self._own(find, is_step=True)
        peer = ANY if source == ANY else self._members[source]
        wanted = f"a message of {_named('rank', peer)} with {_named('tag', tag)}"

        def is_over() -> bool:
            return find() is not None or self._refusal is not None

        while found is None and is_blocking:  # another thread may receive the message first
            self._wait(is_over, peer, f"probe() for {wanted}", "message", self._timeout_s)
            found = self._own(find)
        return found

    def test(self, request: SendRequest | ReceiveRequest) -> bool:
        """Return whether a wait for `request` would end at once.

        That is so if the request is done, calls are refused (see `refuse`) or the communicator has
        ended. If not, first advance messages once. This method does not raise the error that ended
        the communicator; `wait` does.
        """
        if request.is_done or self._is_over or self._loop.error is not None:
            return True
        had_raised, was_known = self.has_raised, self._loop.is_end_known
        try:
            return bool(self.way.own(lambda: request.is_done, is_step=True))
        except ConcurrentCalls:  # in a signal handler
            return request.is_done
        except R2cclError:
            self.has_raised, self._loop.is_end_known = had_raised, was_known
            return True

    def cancel(self, request: SendRequest | ReceiveRequest) -> bool:
        """Withdraw a receive that has taken no message; return whether it was withdrawn.

        A send is never withdrawn.
        """
        if isinstance(request, SendRequest):
            return False
        own = self._own if self._local is None else self.way.own
        return bool(own(partial(self.way.driver.cancel, request), is_step=False))

    def wait(
        self, request: SendRequest | ReceiveRequest, timeout_s: float | None = None
    ) -> Message | None:
        """Wait until `request` is done; see `MessageRequest.wait`."""
        until_s = None if timeout_s is None else self._clock() + timeout_s

        def is_late() -> bool:
            # Once the communicator has ended, `_wait` raises its error instead.
            has_passed = until_s is not None and self._clock() >= until_s
            return has_passed and self._loop.error is None

        is_withdrawn = False

        def has_ended() -> bool:
            return request.is_done or is_withdrawn or self._is_over or is_late()

        def is_over() -> bool:
            nonlocal is_withdrawn
            # No message uses the array of a receive that has taken none.
            if self._refusal is not None and isinstance(request, ReceiveRequest):
                is_withdrawn |= self.way.driver.matching.cancel(request)
            return has_ended()

        if not has_ended():
            # The timeout of a caller does not end the communicator.
            limit_s = self._timeout_s if timeout_s is None else math.inf
            given = *self._describe(request), limit_s
            try:
                self._wait(lambda: is_over() or self._refusal is not None, *given)
                if not has_ended():  # the timeout starts again: close() has its own timeouts
                    self._wait(is_over, *given)
            except CommunicatorRevoked:
                self._require_open()
                raise
        if request.error is not None:
            raise request.error
        if not request.is_done:
            if is_withdrawn or self._is_over:
                self._require_open()
            _, doing, _ = self._describe(request)
            raise TransportTimeout(
                f"rank {self._job.rank}: {doing} has not finished after {timeout_s:g} s and "
                "continues: wait again, or look at pending() on both ranks",
                rank=self._job.rank,
                status="TIMEOUT",
            )
        return request.result

    def _describe(self, request: SendRequest | ReceiveRequest) -> tuple[int, str, str]:
        """Return a description of `request` for errors and status.

        It consists of the peer (a rank of the job, or `ANY`), the call, and the object that the
        peer must provide.
        """
        if isinstance(request, SendRequest):
            return request.peer, f"send() to rank {request.peer}", "matching receive"
        peer = ANY if request.source == ANY else self._members[request.source]
        doing = f"recv() from {_named('rank', peer)} with {_named('tag', request.tag)}"
        return peer, doing, "message"

    def _require_open(self) -> None:
        if self._refusal is not None:
            raise self._refusal()

    def _own(self, fn: Callable[[], Any], *, is_step: bool = False) -> Any:
        """Return the result of `Way.own`; raise the refusal if calls are refused."""
        self._require_open()

        def run() -> Any:
            # A close in another thread may have dropped all messages since.
            return _REFUSED if self._refusal is not None else fn()

        found = self.way.own(run, is_step=is_step)
        if found is _REFUSED:
            self._require_open()
        return found

    def _wait(
        self, is_done: Callable[[], bool], peer: int, doing: str, what: str, timeout_s: float
    ) -> None:
        """Advance messages until ``is_done()``, at most `timeout_s` seconds.

        Three arguments describe the wait: `peer` (a rank of the job, or `ANY`), `doing` (the call)
        and `what` (the object that `peer` must provide).
        """
        wait = MessageWait(self, self._engine)
        if peer not in (ANY, self._job.rank):
            wait.peers = frozenset((peer,))
        pending = partial(self._pending, wait, peer, doing, what)
        callers = self._loop.callers
        try:
            callers.append(wait)
            self.way.wait(wait, is_done, Patience(timeout_s, "timeout_s", pending))
        finally:
            if not wait.is_calling and wait in callers:  # Ctrl-C may come before it is added
                callers.remove(wait)

    def _pending_direct(self, sent: DirectEnd | None, received: DirectEnd | None) -> Pending:
        """Describe a direct call over links."""
        if received is None:
            assert sent is not None
            peer = self._members[sent.peer]
            return self._pending(self, peer, f"send() to rank {peer}", "matching receive")
        peer = self._members[received.peer]
        doing = f"recv() from rank {peer} with {_named('tag', received.tag)}"
        return self._pending(self, peer, doing, "message")

    def _pending(self, caller: Caller, peer: int, doing: str, what: str) -> Pending:
        waits = () if peer == ANY else (Wait(peer, what),)
        doing = f"{doing}, {self._told}" if self._told else doing
        return Pending(self._job.rank, doing, self._clock(), caller.since_s, {}, waits, ())


def _named(what: str, number: int) -> str:
    return f"any {what}" if number == ANY else f"{what} {number}"


__all__ = ["MessageRequest", "Messenger", "Starter", "Way"]
