"""Control thread: a thread that runs an asyncio event loop.

Invariant: `ControlLoop.close` returns within its deadline, even if code in the loop blocks.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import signal
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from r2ccl.errors import InternalError

logger = logging.getLogger("r2ccl.bootstrap")

_T = TypeVar("_T")


class ControlLoop:
    """Thread with its own event loop, started by the constructor.

    It is a daemon thread, so that the interpreter can exit if the user does not call `close`.

    Parameters
    ----------
    name : str
        Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.EpollSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self.loop.set_exception_handler(_log_exception)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # this process has too many threads
            self.loop.close()
            raise

    def is_current(self) -> bool:
        """Return True if the caller runs in the control thread."""
        return threading.get_ident() == self._thread.ident

    def descriptors(self) -> list[int]:
        """Return the descriptors of the loop and of all sockets that it watches."""
        if self.loop.is_closed():
            return []
        watched = self._selector.get_map().values()
        return [self._selector.fileno(), *(key.fd for key in watched)]

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` in the loop, wait for it, and return its result or raise its exception.

        If the wait is interrupted, for example by Ctrl-C, `work` is cancelled.

        Raises
        ------
        InternalError
            If the caller runs in the control thread.
        """
        if self.is_current():
            work.close()
            raise InternalError("a blocking call was made in the control thread")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, deadline_s: float) -> None:
        """Cancel all tasks and stop the thread; wait up to `deadline_s` seconds for its end.

        Idempotent.
        """
        with suppress(RuntimeError):  # the loop is closed: the thread has ended
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            logger.warning(
                "the thread %s did not end within %.1f s: please report it",
                self._thread.name, deadline_s,
            )  # fmt: skip

    def _run(self) -> None:
        # asyncio sends without MSG_NOSIGNAL; if the user's program has set SIGPIPE to its default
        # action, a broken connection would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self.loop.close()


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error("in the control thread: %s", context["message"], exc_info=context.get("exception"))


__all__ = ["ControlLoop"]
