"""Run one rank of a job that ends in a given way at a given moment; print its findings as JSON.

Rank 1 ends, and prints when. Rank 2 does not join the call that ranks 0 and 1 wait in, so that they
are inside it at the end; it calls a collective afterwards. All times are readings of the host's
monotonic clock, which the ranks share.

The argument is JSON with ``ending`` and ``moment``, as in `cells`, and ``scale``, the factor by
which waits are longer than on a real processor.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import r2ccl
from r2ccl.types import PathKey

ENDS, ABSENT = 1, 2
#: Bytes of the buffer; a multiple of the number of ranks.
COUNT = 2_100_000
#: Seconds from init to the end, and from the end to rank 2's call.
AFTER_S, ABSENT_S = 0.4, 0.3
#: Seconds from the end to rank 2's call if the others shrink, and so wait for rank 2.
SHRINK_S = 1.5
PATTERN = 0xA5
#: Seconds that memory is watched after an error.
WATCHED_S = 0.3


class Held(NamedTuple):
    """Descriptors with their targets, names of threads, and number of children of a process."""

    files: list[str]
    threads: list[str]
    nchildren: int

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.files), len(self.threads), self.nchildren


class Rank:
    """One rank: runs until the given moment, ends or observes the end, and reports."""

    def __init__(self, rank: int, ending: str, moment: str, scale: float) -> None:
        self.rank, self.ending, self.moment, self.scale = rank, ending, moment, scale
        self.ended_s = 0.0
        self.x = np.ones(COUNT, np.uint8)
        self.found: dict[str, Any] = {"rank": rank, "error": "", "text": "", "is_untouched": True}
        self.comm: r2ccl.Communicator | None = None

    def run(self) -> dict[str, Any]:
        before = _held()
        try:
            self.live()
        except BaseException as exc:
            _stay()
            self.note(exc)
        _stay()
        self.watch()
        # Threads and descriptors are released shortly after the call that waited for them.
        until_s = time.monotonic() + 2.0 * self.scale
        while (after := _held()).counts != before.counts and time.monotonic() < until_s:
            time.sleep(0.01)
        self.found["left"] = [] if after.counts == before.counts else [before, after]
        self.found["ended_s"] = self.ended_s
        return self.found

    def note(self, exc: BaseException) -> None:
        """Keep the first error, and release the objects its frames hold."""
        if not self.found["error"]:
            self.found |= {
                "error": type(exc).__name__, "text": str(exc), "raised_s": time.monotonic(),
            }  # fmt: skip
        exc.__traceback__ = None

    def live(self) -> None:
        init = r2ccl.init  # the first use imports the library, which is not the moment to end
        if self.moment == "init":
            self.arm()
            if self.rank == ABSENT:
                return
        with init() as comm:
            self.comm = comm
            comm.allreduce(np.ones(1000))
            # Over RDMA, slices then land directly in this memory.
            registered = comm.register(self.x)
            comm.barrier()
            self.found["rails"] = rails_in_use(comm)
            self.arm()
            if self.rank == ABSENT and self.moment not in ("flow", "exchange"):
                if self.moment == "repair":
                    _stop_for((AFTER_S + ABSENT_S) * self.scale)
                else:
                    self.sleep(AFTER_S + (SHRINK_S if self.moment == "shrink" else ABSENT_S))
                self.found["calls_s"] = time.monotonic()
                comm.reduce(self.x)
            else:
                getattr(self, f"in_{self.moment}")(comm)
            registered.close()
        self.found["raised_s"] = time.monotonic()

    def sleep(self, time_s: float) -> None:
        time.sleep(time_s * self.scale)

    def in_idle(self, comm: r2ccl.Communicator) -> None:
        if self.rank == ENDS:
            self.sleep(AFTER_S + 1.2)
        comm.reduce(self.x)

    def in_call(self, comm: r2ccl.Communicator) -> None:
        if (self.ending, self.rank) == ("memory", ENDS):
            comm._participant.on_host._scratch_like = self.no_memory  # type: ignore[method-assign]
            self.sleep(AFTER_S)
        comm.reduce(self.x)

    def no_memory(self, array: Any) -> Any:
        self.ended_s = time.monotonic()
        raise MemoryError("none for partial sums")

    def in_async(self, comm: r2ccl.Communicator) -> None:
        comm.reduce(self.x, async_op=True).wait()

    def in_shrink(self, comm: r2ccl.Communicator) -> None:
        self.sleep(AFTER_S / 4)  # shrink() revokes, and other ranks may still be in the barrier
        comm.shrink().close()

    def in_flow(self, comm: r2ccl.Communicator) -> None:
        """Run many calls whose slices land in the watched memory."""
        part = COUNT // comm.nranks
        while True:
            comm.allgather(self.x[comm.rank * part : (comm.rank + 1) * part], out=self.x)

    def in_message(self, comm: r2ccl.Communicator) -> None:
        """Wait for a message of the absent rank."""
        comm.recv(self.x, ABSENT)

    def in_exchange(self, comm: r2ccl.Communicator) -> None:
        """Exchange long messages, which arrive in the watched memory."""
        sent, n = np.ones(COUNT, np.uint8), comm.nranks
        while True:
            comm.sendrecv(sent, (comm.rank + 1) % n, self.x, (comm.rank - 1) % n)

    def in_repair(self, comm: r2ccl.Communicator) -> None:
        """Run a call while a path to a stopped peer is fenced; the peer does not answer."""
        if self.rank == ENDS:
            threading.Timer(AFTER_S / 2 * self.scale, self.break_path, (comm,)).start()
        comm.reduce(self.x)

    def break_path(self, comm: r2ccl.Communicator) -> None:
        engine, path = comm._engine, PathKey(ABSENT, min(self.found["rails"]))
        engine.submit(engine._migration.fail, path, "TEST: broken on purpose")

    # The end

    def arm(self) -> None:
        if self.rank != ENDS:
            return
        kind, _, place = self.ending.partition("_")
        signal.signal(signal.SIGTERM, self.on_term)
        signal.signal(signal.SIGUSR1, lambda *_: self.end_by(kind))
        acts: dict[str, Callable[[], None]] = {
            "thread": lambda: self.end_by(kind),
            "handler": lambda: os.kill(os.getpid(), signal.SIGUSR1),
        }
        signals = {"interrupt": [signal.SIGINT], "twice": [signal.SIGINT, signal.SIGINT],
                   "term": [signal.SIGTERM], "kill": [signal.SIGKILL]}  # fmt: skip
        if place:
            act = acts[place]
        elif kind in signals:
            act = lambda: self.send(signals[kind])  # noqa: E731
        else:
            return
        timer = threading.Timer(AFTER_S * self.scale, self.act, (act,))
        timer.daemon = True
        timer.start()

    def act(self, act: Callable[[], None]) -> None:
        self.ended_s = time.monotonic()
        print(f"ends {self.ended_s}", flush=True)
        act()

    def send(self, signals: list[signal.Signals]) -> None:
        for each in signals:
            os.kill(os.getpid(), each)
            time.sleep(5e-4)

    def on_term(self, *_: object) -> None:
        """End like a program that unwinds on SIGTERM."""
        raise SystemExit(3)

    def end_by(self, kind: str) -> None:
        assert self.comm is not None
        begun_s = time.monotonic()
        getattr(self.comm, kind)()
        self.found["took_s"] = time.monotonic() - begun_s

    def watch(self) -> None:
        """Check that nothing writes into the memory of a call after its error."""
        self.x[:] = PATTERN
        self.sleep(WATCHED_S)
        self.found["is_untouched"] = bool((self.x == PATTERN).all())


def rails_in_use(comm: r2ccl.Communicator) -> dict[int, str]:
    """Return the rails that links use now, with their names."""
    senders = comm._engine._links.senders.values()
    routes = [link.route for link in senders if link.route is not None]
    names = {rail.rail: rail.name for rail in comm.health().rails}
    return {route.rail: names[route.rail] for route in routes}


def _stay() -> None:
    """Ignore further Ctrl-C, which would end the report."""
    while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stop_for(time_s: float) -> None:
    """Stop this process for `time_s` seconds."""
    script = f"sleep {time_s}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", script]):
        os.kill(os.getpid(), signal.SIGSTOP)


def _held() -> Held:
    """Return what this process holds."""
    gc.collect()
    children = 0
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = len(file.read().split())
    files = [_target(name) for name in os.listdir("/proc/self/fd")]
    return Held(files, [each.name for each in threading.enumerate()], children)


def _target(name: str) -> str:
    """Return what a descriptor refers to; the directory of descriptors itself is closed by now."""
    try:
        return f"{name} {os.readlink(f'/proc/self/fd/{name}')}"
    except FileNotFoundError:
        return ""


def main(argument: str) -> None:
    # A shell starts background jobs with SIGINT ignored, and processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(json.dumps(Rank(int(os.environ["RANK"]), **json.loads(argument)).run()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
