"""Driver thread of a lab: applies faults at their time, or when a rank reports that a fault is due.

Timed faults of a plan, ends of faults and flaps are scheduled with `Driver.call_later`. Ranks
report over a Unix socket. Each report gets an answer, with an error if the fault could not be
applied.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import msgspec

from r2ccl.clock import monotonic
from r2ccl.testing.fault_plan import FaultPlan
from r2ccl.testing.faults import Fault, Firing
from r2ccl.testing.faults_reporter import MESSAGE_NBYTES, Applied, Due
from r2ccl.testing.netlab.namespaces import LabError

_JOIN_TIMEOUT_S = 10.0

#: Seconds to wait for the report of a rank that has connected. A rank sends it at once; the limit
#: keeps a rank that hangs from blocking the thread.
_REPORT_TIMEOUT_S = 1.0

#: Longest error in an answer, in characters of up to 4 bytes, so that the answer fits into
#: `MESSAGE_NBYTES`.
_ERROR_LENGTH = 1000

#: Number of ranks that may report at the same time.
_BACKLOG = 1024

_due_decoder = msgspec.msgpack.Decoder(Due)


class _Entry(NamedTuple):
    due: float
    order: int
    action: Callable[[], None]


class PlanRun:
    """One run of a fault plan, with the socket to which its ranks report.

    Parameters
    ----------
    plan : FaultPlan
    directory : Path
        Private directory for the socket and the plan's file.
    ranks_per_node : int
        Number of ranks on each node of the lab.
    apply : callable
        Applies a `Fault` and returns its `Firing`; the run calls it in the driver's thread.

    Raises
    ------
    LabError
        If the socket cannot be bound.
    """

    def __init__(
        self,
        plan: FaultPlan,
        directory: Path,
        ranks_per_node: int,
        apply: Callable[[Fault], Firing],
    ) -> None:
        self.plan = plan
        self._apply = apply
        self._is_over = False
        self._file = directory / "plan.json"
        self._file.write_bytes(plan.resolved(ranks_per_node).to_json())
        self._path = directory / "faults.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.settimeout(_REPORT_TIMEOUT_S)
        try:
            self.listener.bind(str(self._path))
        except OSError as exc:
            self.listener.close()
            raise LabError(f"cannot bind {self._path}: {exc}; set TMPDIR to a short path") from exc
        self.listener.listen(_BACKLOG)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make the ranks read the plan and report to the socket."""
        return {
            "R2CC_TRANSPORT_WRAPPER": "r2ccl.testing.fault_plan:wrap_by_env",
            "R2CC_FAULT_PLAN": str(self._file),
            "R2CC_FAULT_SOCKET": str(self._path),
        }

    def fire(self, index: int) -> None:
        """Apply fault `index` of the plan and record it; do nothing after the end of the run."""
        if not self._is_over:
            firing = self._apply(self.plan.faults[index])
            self.plan.record(index, firing.time_s, firing.applied_s)

    def answer(self) -> None:
        """Accept one rank's report, apply the fault that it names, and send the answer.

        If the fault cannot be applied, the answer contains the start of the error, and the error is
        raised. A report that is malformed or does not arrive in time raises an error without an
        answer.
        """
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(_REPORT_TIMEOUT_S)
            data = connection.recv(MESSAGE_NBYTES)
            if not data:
                return  # the rank died between its connect and its report
            due = _due_decoder.decode(data)
            error = ""
            try:
                self.fire(due.index)
            except Exception as exc:
                error = (str(exc) or repr(exc))[:_ERROR_LENGTH]
                raise
            finally:
                # A rank that the fault killed does not read its answer.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.send(msgspec.msgpack.encode(Applied(error)))

    def close(self) -> None:
        """End the run; faults that are still pending do not fire."""
        self._is_over = True
        self.listener.close()
        self._path.unlink(missing_ok=True)


class Driver:
    """Thread that runs scheduled callables and answers the reports of ranks.

    Exceptions of scheduled callables and of `PlanRun.answer` are appended to `errors`;
    `Lab.raise_errors` raises a `LabError` that quotes the first one.
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self._entries: list[_Entry] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._loop, name="netlab-driver", daemon=True)
        self._thread.start()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedule `action` to run in the driver's thread after `delay_s` seconds.

        Any thread may call this, until `close`.
        """
        with self._lock:
            heapq.heappush(self._entries, _Entry(monotonic() + delay_s, next(self._order), action))
        self._wake_write.send(b"\0")

    def begin(self, run: PlanRun) -> None:
        """Schedule a plan's timed faults, counted from now, and listen to its ranks.

        Raises
        ------
        LabError
            If the driver's thread does not answer in time.
        """
        self._in_thread(lambda: self._selector.register(run.listener, selectors.EVENT_READ, run))
        for index, fault in enumerate(run.plan.faults):
            if fault.at_s is not None:
                self.call_later(fault.at_s, functools.partial(run.fire, index))

    def end(self, run: PlanRun) -> None:
        """End `run`: stop listening to its ranks; faults that are still pending do not fire.

        Raises
        ------
        LabError
            If the driver's thread does not answer in time.
        """

        def stop() -> None:
            if run.listener in self._selector.get_map():
                self._selector.unregister(run.listener)
            run.close()

        self._in_thread(stop)

    def _in_thread(self, action: Callable[[], object]) -> None:
        """Run `action` in the driver's thread, which owns the selector; raise its exception."""
        done: Future[None] = Future()

        def call() -> None:
            try:
                action()
            except Exception as exc:
                done.set_exception(exc)
            else:
                done.set_result(None)

        self.call_later(0.0, call)
        try:
            error = done.exception(_JOIN_TIMEOUT_S)
        except TimeoutError:
            raise LabError(
                f"the lab's driver thread did not answer within {_JOIN_TIMEOUT_S} s: the machine "
                "is overloaded, or a fault hangs; start the lab again"
            ) from None
        if error is not None:
            raise error

    def close(self) -> None:
        """Stop the thread and drop all scheduled callables."""
        if not self._is_stopping:
            self._is_stopping = True
            self._wake_write.send(b"\0")
            self._thread.join(_JOIN_TIMEOUT_S)
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()

    def _loop(self) -> None:
        while not self._is_stopping:
            for key, _ in self._selector.select(self._time_left()):
                if key.data is None:
                    self._wake_read.recv(4096)
                else:
                    self._call(key.data.answer)
            for entry in self._take_due():
                self._call(entry.action)

    def _call(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as exc:  # `Lab.raise_errors` raises it; the thread must go on
            self.errors.append(exc)

    def _time_left(self) -> float | None:
        with self._lock:
            return max(0.0, self._entries[0].due - monotonic()) if self._entries else None

    def _take_due(self) -> list[_Entry]:
        due = []
        with self._lock:
            while self._entries and self._entries[0].due <= monotonic():
                due.append(heapq.heappop(self._entries))
        return due


__all__ = ["Driver", "PlanRun"]
