"""Run one node of the verbs bench: a process that executes commands on a `VerbsTransport`.

Started by `verbs_perf.py`, with the number of an inherited socket. Every command (`Offer`, `Join`,
`Run`) gets one answer. Between commands the node sleeps in a read of that socket.

A run uses the same loop as the library: poll, react, flush; yield the processor for
`Config.spin_s` if nothing happened, then sleep. `verbs_roles.py` defines the reactions.

The process ends when its socket closes, and no run takes longer than its time limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from verbs_pair import (
    MESSAGE_NBYTES,
    Answer,
    Broken,
    Done,
    EndpointInfos,
    Join,
    Measured,
    Offer,
    Run,
)
from verbs_roles import Role, Side, role_of

from r2ccl.config import Config
from r2ccl.topology.hcas import GidFinder
from r2ccl.transport.base import Arrived, Cleared, Confirmed, Joined, Sent
from r2ccl.transport.verbs.device import RdmaDevice
from r2ccl.transport.verbs.registration import RegistrationCache
from r2ccl.transport.verbs.transport import VerbsTransport
from r2ccl.types import PathKey

_CONFIG = Config()
#: Seconds that an idle loop sleeps at most; the same as the engine's.
_TICK_S = 0.02
_JOIN_TIMEOUT_S = 20.0
#: Imported only if the fast path is used.
_FASTPATH_MODULE = "r2ccl.transport.verbs.fastpath"


class Node:
    """Transport of this process and its paths.

    Parameters
    ----------
    offer : Offer

    Raises
    ------
    R2cclError
        If a device cannot be used.
    RuntimeError
        If the fast path is asked for and not available.
    """

    def __init__(self, offer: Offer) -> None:
        self._node = offer.node
        devices = [
            RdmaDevice(name, port, GidFinder(name, port, gid_index), fastpath=offer.fastpath)
            for name, port, gid_index in offer.ports
        ]
        # If the fast path is not available, the device logs the reason and works without it.
        if offer.fastpath == "1" and _FASTPATH_MODULE not in sys.modules:
            raise RuntimeError("the fast path is not available; see the log for the reason")
        cache = RegistrationCache(
            [each.registrar for each in devices], _CONFIG.registration_limit_nbytes
        )
        self._transport = VerbsTransport(
            offer.node,
            devices,
            cache,
            eager_nbytes=_CONFIG.eager_nbytes,
            timeout=_CONFIG.ib_timeout,
            retry_cnt=_CONFIG.ib_retry_cnt,
            probe_timeout_s=_CONFIG.probe_timeout_s,
        )
        paths = [PathKey(1 - offer.node, rail) for rail in range(len(devices))]
        self._ends = {path: self._transport.offer(path) for path in paths}
        self.infos = EndpointInfos(tuple(end.info for end in self._ends.values()))

    def join(self, command: Join) -> Done:
        """Join the peer's ends; node 0 also waits for proof that the paths work."""
        is_caller = self._node == 0
        for end, info in zip(self._ends.values(), command.infos, strict=True):
            end.join(info, is_caller)
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        unproved = len(self._ends) if is_caller else 0
        while unproved:
            for event in self._transport.poll(_TICK_S):
                if not isinstance(event, Joined) or event.error:
                    raise RuntimeError(f"while joining: {event}")
                unproved -= 1
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{unproved} of {len(self._ends)} paths were not joined "
                    f"within {_JOIN_TIMEOUT_S:g} s"
                )
        for path, end in self._ends.items():
            self._transport.open(path, end)
        return Done()

    def run(self, run: Run, on_started: Callable[[], None]) -> Measured:
        """Execute a run; call `on_started` when everything that needs no peer is done."""
        roles = {path: role_of(self._node, Side(self._transport, path, run)) for path in self._ends}
        posted = self._posted()
        cpu_s, begun_s = time.process_time(), time.monotonic()
        for role in roles.values():
            role.start()
        self._transport.flush()
        on_started()
        self._loop(roles, begun_s + run.time_limit_s)
        ended_s = time.monotonic()
        return Measured(
            seconds=ended_s - begun_s,
            cpu_s=time.process_time() - cpu_s,
            posted=self._posted() - posted,
            rss_nbytes=_rss_nbytes(),
            trips_s=[trip_s for role in roles.values() for trip_s in role.trips_s],
        )

    def close(self) -> None:
        """Close the transport and its devices."""
        self._transport.close()

    def _loop(self, roles: dict[PathKey, Role], deadline: float) -> None:
        transport = self._transport
        idle_since = timeout_s = 0.0
        while not self._is_over(roles):
            events = transport.poll(timeout_s)
            timeout_s = 0.0
            for event in events:
                if not isinstance(event, Arrived | Cleared | Confirmed | Sent):
                    raise RuntimeError(f"while measuring: {event}")
                roles[event.path].on(event)
            transport.flush()
            if events:
                idle_since = 0.0
                continue
            now = time.monotonic()
            if now > deadline:
                raise RuntimeError("the run exceeded its time limit")
            idle_since = idle_since or now
            if now - idle_since < _CONFIG.spin_s:
                os.sched_yield()
            else:
                timeout_s = _TICK_S

    def _is_over(self, roles: dict[PathKey, Role]) -> bool:
        """Return whether all roles are done and no request waits for space in a queue."""
        return all(role.is_done for role in roles.values()) and not any(
            end.has_waiting for end in self._ends.values()
        )

    def _posted(self) -> int:
        return sum(end.qp.posted for end in self._ends.values())


def serve(pipe: socket.socket) -> None:
    """Execute commands until the socket closes."""
    decoder: msgspec.msgpack.Decoder[Join | Run] = msgspec.msgpack.Decoder(Join | Run)

    def answer(what: Answer) -> None:
        pipe.send(msgspec.msgpack.encode(what))

    offer = msgspec.msgpack.decode(pipe.recv(MESSAGE_NBYTES), type=Offer)
    with contextlib.closing(Node(offer)) as node:
        answer(node.infos)
        while said := pipe.recv(MESSAGE_NBYTES):
            command = decoder.decode(said)
            if isinstance(command, Join):
                answer(node.join(command))
            else:
                # Only the receiver answers early: the sender is told to start after that.
                on_started = partial(answer, Done()) if offer.node == 1 else lambda: None
                answer(node.run(command, on_started))


def _rss_nbytes() -> int:
    """Return the resident set size of this process in bytes: proc(5), statm."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    """Serve the inherited socket."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as pipe:
        try:
            serve(pipe)
        except Exception as exc:
            with contextlib.suppress(OSError):  # the bench may have ended first
                pipe.send(msgspec.msgpack.encode(Broken(f"{type(exc).__name__}: {exc}")))
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
