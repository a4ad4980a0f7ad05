"""Contract tests of every transport: `r2ccl.transport.base`."""

import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support import interrupted
from support.slow import sweep

from r2ccl.errors import InternalError
from r2ccl.testing.contract import CHECKS, Bench, JoinedPair, random_bytes
from r2ccl.testing.fakepyverbs import FakeFabric, installed
from r2ccl.testing.probecontract import PROBE_CHECKS
from r2ccl.testing.simulation.network import Cut, End, SimNetwork, Timeline
from r2ccl.testing.simulation.transport import SimTransport
from r2ccl.transport.base import Arrived, Cleared, Failed, Fenced, Frame, Sent
from r2ccl.transport.base import Joined as JoinedEvent
from r2ccl.transport.mixed import MixedTransport
from r2ccl.transport.tcp.transport import TcpTransport
from r2ccl.transport.verbs.registration import RegistrationCache
from r2ccl.types import Nic, PathKey, ProbeKey


class SimBench:
    """Two simulated ranks; time passes only when `run` is called."""

    patience_s = 5.0
    cross = True

    def __init__(self, *, is_loud: bool = True) -> None:
        self.timeline = Timeline(1)
        self.network = SimNetwork(self.timeline, 2, 2, is_loud=is_loud)
        self.transports = [SimTransport(self.network, rank) for rank in (0, 1)]

    def endpoints(self, rail: int) -> tuple[End, End]:
        wire = self.network.wire(0, 1, rail)
        self.network.restore(wire)
        return self.network.connect(wire)

    def run(self) -> None:
        # Stop early: the retry time, which a settled check does not wait for, is far ahead.
        deadline = self.timeline.now + 1e-3
        self.timeline.after(1e-3, lambda: None)
        while self.timeline.now < deadline and self.timeline.step():
            pass

    def break_path(self, rail: int) -> None:
        self.network.cut(self.network.wire(0, 1, rail), Cut(told=(0, 1)))

    def join_probes(self) -> None:
        """Do nothing: probes need no join."""

    def silence(self, rail: int) -> None:
        self.network.set_port(1, rail, is_up=False)

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


class TcpBench:
    """Two ranks over real sockets on loopback."""

    patience_s = 5.0
    cross: bool | None = True

    def __init__(self) -> None:
        self._newest: dict[int, socket.socket] = {}
        self._held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.targets = {
            PathKey(1, rail): sock.getsockname() for rail, sock in enumerate(self._held)
        }
        self.transports: list[Any] = [self.transport(rank, 2, (0, 1)) for rank in (0, 1)]

    def transport(self, rank: int, nrails: int, rails: tuple[int, ...]) -> TcpTransport:
        return TcpTransport(
            rank,
            nrails,
            eager_nbytes=64,
            sources={rail: Nic("lo", f"127.0.0.{rail + 1}") for rail in rails},
            targets=self.targets,
            probe_timeout_s=0.3,
        )

    def endpoints(self, rail: int) -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            low = socket.create_connection(listener.getsockname())
            high, _ = listener.accept()
        previous = self._newest.pop(rail, None)
        if previous is not None:
            previous.close()
        self._newest[rail] = low.dup()
        return low, high

    def run(self) -> None:
        """Do nothing: the kernel moves the data."""

    def break_path(self, rail: int) -> None:
        self._newest[rail].shutdown(socket.SHUT_RDWR)

    def join_probes(self) -> None:
        """Do nothing: probes need no join."""

    def silence(self, rail: int) -> None:
        full = socket.create_server(("127.0.0.1", 0), backlog=0)
        # This connection fills the queue: later ones get no answer.
        filler = socket.create_connection(full.getsockname(), self.patience_s)
        self._held += [full, filler]
        self.targets[PathKey(1, rail)] = full.getsockname()

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        for sock in (*self._newest.values(), *self._held):
            sock.close()


class MixedBench(TcpBench):
    """Two parts of one rail each; both are TCP, as no other kind works on every machine."""

    cross = None

    def __init__(self) -> None:
        super().__init__()
        for transport in self.transports:
            transport.close()
        self.transports = [
            MixedTransport([self.transport(rank, 1, (rail,)) for rail in range(2)])
            for rank in (0, 1)
        ]


class VerbsBench:
    """Two ranks over fake RDMA NICs in memory; tests/rdma uses real ones."""

    patience_s = 5.0
    cross = None

    def __init__(self) -> None:
        self._fabric = FakeFabric()
        self._held = ExitStack()
        self._loaded = self._held.enter_context(installed(self._fabric))
        self._newest: dict[int, tuple[Any, Any]] = {}
        self.transports = [self._transport(rank) for rank in (0, 1)]

    def _transport(self, rank: int) -> Any:
        devices = [
            self._loaded.device.RdmaDevice(
                f"n{rank}r{rail}", 1, lambda: (0, "fe80::1"), fastpath="0"
            )
            for rail in (0, 1)
        ]
        cache = RegistrationCache([device.registrar for device in devices], 1 << 30)
        return self._loaded.transport.VerbsTransport(
            rank, devices, cache, eager_nbytes=64, timeout=14, retry_cnt=7, probe_timeout_s=0.3
        )

    def endpoints(self, rail: int) -> tuple[Any, Any]:
        low, high = self.transports
        key = PathKey(1, rail)
        self._newest[rail] = ends = low.offer(key), high.offer(PathKey(0, rail))
        self._join(key, *ends)
        return ends

    def _join(self, key: PathKey | ProbeKey, caller: Any, answerer: Any) -> None:
        answerer.join(caller.info, is_caller=False)
        caller.join(answerer.info, is_caller=True)
        assert JoinedEvent(key, caller) in self.transports[0].poll(0.0)

    def run(self) -> None:
        """Do nothing: the fabric moves the data."""

    def break_path(self, rail: int) -> None:
        for end in self._newest[rail]:
            end.qp.flush()

    def join_probes(self) -> None:
        low, high = self.transports
        for rail in (0, 1):
            key = ProbeKey(1, rail, rail)
            self._join(key, low.offer(key), high.offer(ProbeKey(0, rail, rail)))

    def silence(self, rail: int) -> None:
        self._fabric.mute(f"n1r{rail}")

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        self._held.close()


BENCHES: dict[str, Callable[[], Any]] = {
    "tcp": TcpBench,
    "mixed": MixedBench,
    "sim": SimBench,
    "verbs, in memory": VerbsBench,
    "sim, silent": lambda: SimBench(is_loud=False),
}


@pytest.fixture(params=BENCHES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = BENCHES[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS + PROBE_CHECKS, ids=lambda check: check.__name__)
def test_contract(bench: Bench, check: Callable[[Bench], None]) -> None:
    check(bench)


@sweep(4, 1)
@pytest.mark.parametrize("name", ["tcp", "mixed", "verbs, in memory"])
def test_a_close_that_is_interrupted_can_be_repeated(name: str, step: int) -> None:
    """Interrupt `close` before every `step`-th line; the next one frees every descriptor."""
    before = descriptors()
    for line in itertools.count(1, step):
        bench = BENCHES[name]()
        pair = JoinedPair(bench)

        came = interrupted.at_line(line, bench.transports[0].close)
        bench.close()
        assert descriptors() <= before, f"line {line}"
        assert pair.a.transport.descriptors() == []
        if not came:
            break
    assert line > 10


def descriptors() -> set[str]:
    """Return what the open descriptors of this process refer to, with their numbers."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    # The directory itself is closed by now.
    return {f"{path} {os.readlink(path)}" for path in paths if os.path.lexists(path)}


def test_the_contract_notices_a_fence_that_is_none() -> None:
    class Unfenced(SimNetwork):
        def refuse(self, end: End, piece: Any) -> None:
            self.write(piece.message, piece.is_last)

    bench = SimBench(is_loud=False)
    bench.network.__class__ = Unfenced
    check = next(check for check in CHECKS if check.__name__ == "check_fence_keeps_writes_out")
    with pytest.raises(AssertionError):
        check(bench)


def test_the_contract_notices_a_second_copy_that_is_late() -> None:
    """Report the last of three slices again, one call of `settle` later."""
    bench = SimBench()
    receiver, arrived = bench.transports[1], list[Any]()
    poll, npolls = receiver.poll, 0

    def late(timeout_s: float) -> list[Any]:
        nonlocal npolls
        events = poll(timeout_s)
        arrived.extend(event for event in events if isinstance(event, Arrived))
        if len(arrived) == 3:
            npolls += 1
        return [*events, arrived[-1]] if npolls == 6 else events

    receiver.poll = late  # type: ignore[method-assign]
    check = next(check for check in CHECKS if check.__name__ == "check_replay")
    with pytest.raises(AssertionError):
        check(bench)
    assert npolls >= 6


def test_a_slice_confirmed_early_survives_a_reset() -> None:
    """Reset a connection whose bytes the kernel has acknowledged: `Arrived` precedes `Failed`."""
    bench = TcpBench()
    pair = JoinedPair(bench)
    region = bytearray(300_000)
    pair.b.want(0, region, ack=1)
    token = pair.until_count(pair.a, Cleared)[0].token
    pair.a.send(0, random_bytes(300_000), token)
    pair.until_count(pair.a, Sent)
    sock = bench.transports[0]._by_path[pair.a.path].sock  # type: ignore[attr-defined]
    linger = struct.pack("ii", 1, 0)
    for each in (sock, bench._newest[0]):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    bench._newest[0].close()
    pair.a.fence()
    pair.until_count(pair.b, Failed)
    assert region == random_bytes(300_000)
    assert [type(event) for event in pair.b.events] == [Arrived, Failed]
    bench.close()


def test_the_simulator_refuses_the_use_of_a_fenced_path() -> None:
    bench = SimBench()
    pair = JoinedPair(bench)
    pair.a.fence()
    pair.until_count(pair.a, Fenced)
    pair.settle()
    with pytest.raises(InternalError, match="after it was fenced"):
        pair.a.send(0, random_bytes(10))


def test_the_simulator_overwrites_a_payload_kept_too_long() -> None:
    bench = SimBench()
    pair = JoinedPair(bench)
    pair.a.transport.isend(pair.a.path, Frame(0, 0, 0, 0, 0), memoryview(random_bytes(8)), None)
    pair.a.transport.flush()
    bench.run()
    (event,) = pair.b.transport.poll(0.0)
    kept = event.payload
    assert bytes(kept) == random_bytes(8)
    pair.b.transport.poll(0.0)
    assert bytes(kept) == b"\xee" * 8
