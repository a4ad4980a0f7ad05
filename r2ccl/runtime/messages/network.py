"""Messages of one communicator over links, through the data loop of its job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.messages.direct_calls import DirectCalls
from r2ccl.runtime.messages.driver import MessageDriver
from r2ccl.runtime.messages.outcome import NOT_RUN, DirectEnd, Outcome
from r2ccl.runtime.patience import Caller, Patience


class NetworkMessages:
    """Carrier (`Way`) of the messages of one communicator over links.

    Only the thread that owns the data loop may call `driver`.

    Parameters
    ----------
    caller : Caller
        The communicator's `Messenger`.
    loop : DataLoop
        Data loop of the job.
    driver : MessageDriver
        Exchange of the messages.
    connect : callable
        ``connect(peers)`` connects paths to ranks of the job, and waits for them.
    calls : DirectCalls or None
        Runs direct calls; None if there are none.
    """

    #: Always False: the data loop itself detects a signal handler that interrupted its call.
    is_below = False

    def __init__(
        self,
        caller: Caller,
        loop: DataLoop,
        driver: MessageDriver,
        connect: Callable[[frozenset[int]], None],
        calls: DirectCalls | None,
    ) -> None:
        self.driver = driver
        #: True if direct calls are possible.
        self.is_direct = calls is not None
        #: Compiled code cannot start direct calls.
        self.starter = None
        self._calls = calls
        self._caller = caller
        self._loop = loop
        self._connect = connect

    def connect_to(self, peer: int) -> None:
        """Connect paths to `peer`, a rank of the job, if there are none; wait for them."""
        loop = self._loop

        def connect() -> None:
            self._caller.check()
            if peer not in loop.links.connected:
                self._connect(frozenset((peer,)))

        if peer != loop.rank and peer not in loop.links.connected:
            loop.owned(connect)

    def own(self, fn: Callable[[], Any], *, is_step: bool) -> Any:
        """Call ``fn()`` as the owner of the data loop, send what it posted, and return its result.

        If `is_step`, run the data loop once before the call, and let blocking calls in other
        threads own the loop after the call. An exception of ``fn()`` ends the communicator. Once
        the loop is closed, only call ``fn()``.
        """
        loop = self._loop

        def run() -> Any:
            self._caller.check()
            if loop.is_closed:
                return fn()
            if is_step:
                loop.progress.step()
            found = fn()
            loop.progress.advance()
            return found

        found = self._call(self._caller, run)
        if is_step:
            self._loop.give_way()
        return found

    def wait(self, caller: Caller, is_done: Callable[[], bool], patience: Patience) -> None:
        """Run the data loop until ``is_done()``; see `DataLoop.wait`."""
        self._call(caller, lambda: self._loop.wait(caller, is_done, patience))

    # Direct calls

    def repeat(self, key: tuple[int, ...], x: Any, out: Any) -> Outcome:
        """Implement `Way.repeat`, for a direct call that was repeated twice in succession."""
        calls = self._calls
        return NOT_RUN if calls is None else calls.repeat_exchange(key, x, out)

    def begin(
        self, key: tuple[int, ...], sent: DirectEnd | None, received: DirectEnd | None
    ) -> Outcome:
        """Run a direct call; see `Way.begin`."""
        calls = self._calls
        if calls is None or not calls.is_likely(key, sent, received):
            return NOT_RUN
        found = calls.repeat(key, sent, received)
        if found is not NOT_RUN:
            self._loop.send_rest()
            return found

        def run() -> Outcome:
            self._caller.check()
            return NOT_RUN if self._loop.is_closed else calls.run(key, sent, received)

        outcome: Outcome = self._call(self._caller, run)
        return outcome

    def _call(self, caller: Caller, fn: Callable[[], Any]) -> Any:
        """Call ``fn()`` as the owner of the data loop, send what it posted, and return its result.

        While ``fn()`` runs, ``caller.is_calling`` is True. An exception of ``fn()`` ends the
        communicator.
        """
        loop = self._loop

        def run() -> Any:
            caller.is_calling = is_calling = True
            try:
                found = fn()
                is_calling = False
            except BaseException as exc:
                loop.give_up(caller, exc)
                raise
            finally:
                caller.is_calling = is_calling and not loop.is_settled
            return found

        found = loop.owned(run)
        loop.send_rest()
        return found


__all__ = ["NetworkMessages"]
