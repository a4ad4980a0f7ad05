"""The simulator against a slow one: exact fractions, every rate recomputed at every event.

Both are given random programs of messages on random networks, with failures, and must agree.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from fractions import Fraction
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow

from r2ccl.algos import recursive_doubling, ring, tree
from r2ccl.flowsim import Change, Network, simulate
from r2ccl.schedule.chunks import layout
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space


class Wire:
    """A directed link of one channel: its messages in order, and how far they have come."""

    def __init__(self, src, dst, channel):
        self.src, self.dst, self.channel = src, dst, channel
        self.sends, self.receives = [], []
        self.ports = None
        self.size = self.left = None  # of the slice under way
        self.nsent = self.nlanded = self.ndelivered = 0  # slices


class Reference:
    """Polls everything until nothing moves, then lets time pass to the next event."""

    def __init__(self, schedule, nbytes, network, nslices, node_ports=False):
        self.network, self.node_ports = network, node_ports
        self.ops = [schedule.generate(rank) for rank in range(schedule.nranks)]
        self.cuts = []
        chunks = layout(nbytes, schedule.nchunks, schedule.weights, 1, schedule.nparts)
        for pieces in chunks:
            lengths = [max(1, -(-(hi - lo) // nslices)) for lo, hi in pieces]
            cuts = [
                [*range(lo, hi, length), hi] if hi > lo else [lo, lo]
                for (lo, hi), length in zip(pieces, lengths, strict=True)
            ]
            self.cuts.append([[b - a for a, b in pairwise(cut)] for cut in cuts])
        self.done = defaultdict(int)
        self.now = Fraction(0)
        self.landings, self.reductions = [], []
        self.queues = defaultdict(deque)  # who reduces, and who waits to, on each lane
        self.wires = self._wires()
        self.table = {
            (way, node, rail): Fraction(value)
            for way, side in enumerate((network.egress, network.ingress))
            for node, row in enumerate(side)
            for rail, value in enumerate(row)
        }
        self.changes = deque(network.changes)

    def _wires(self):
        wires = {}
        for rank, channels in enumerate(self.ops):
            for channel, ops in enumerate(channels):
                for index, op in enumerate(ops):
                    if op.kind == OpKind.SEND:
                        key = (channel, rank, op.peer)
                        wires.setdefault(key, Wire(rank, op.peer, channel)).sends.append(index)
                    elif op.kind in (OpKind.RECV, OpKind.RECV_REDUCE):
                        key = (channel, op.peer, rank)
                        wires.setdefault(key, Wire(op.peer, rank, channel)).receives.append(index)
        return [wires[key] for key in sorted(wires)]

    def slices(self, rank, channel, index):
        return self.cuts[channel][self.ops[rank][channel][index].chunk]

    def is_ready(self, rank, channel, index, k):
        ops = self.ops[rank][channel]
        return all(
            self.done[rank, channel, before]
            >= (
                k + 1
                if ops[before].chunk == ops[index].chunk
                else len(self.slices(rank, channel, before))
            )
            for before in ops[index].after
        )

    def at(self, wire, order, number):
        """Op index and slice of the `number`-th slice on a wire; None behind the last."""
        rank = wire.src if order is wire.sends else wire.dst
        for index in order:
            count = len(self.slices(rank, wire.channel, index))
            if number < count:
                return index, number
            number -= count
        return None

    def route(self):
        turns = defaultdict(int)
        nodes = self.network.nodes
        for wire in self.wires:
            a, b = nodes[wire.src], nodes[wire.dst]
            if a == b:
                is_free = math.isinf(self.network.inside_bandwidth)
                wire.home = () if is_free else (("out", wire.src), ("in", wire.dst))
                continue
            if self.node_ports:
                sums = [
                    sum(v for (way, node, _), v in self.table.items() if (way, node) == end)
                    for end in ((0, a), (1, b))
                ]
                wire.home = ((0, a, None), (1, b, None)) if all(sums) else None
                continue
            rail = wire.channel % self.network.nrails
            if not (self.table[0, a, rail] and self.table[1, b, rail]):
                alive = [
                    r
                    for r in range(self.network.nrails)
                    if self.table[0, a, r] and self.table[1, b, r]
                ]
                rail = alive[turns[wire.src, wire.dst] % len(alive)] if alive else None
                turns[wire.src, wire.dst] += 1
            wire.home = None if rail is None else ((0, a, rail), (1, b, rail))

    def bandwidth(self, port):
        if port[0] in ("out", "in"):
            return Fraction(self.network.inside_bandwidth)
        if port[2] is None:
            return sum(v for key, v in self.table.items() if key[:2] == port[:2])
        return self.table[port]

    def reroute(self):
        self.route()
        for wire in self.wires:
            if wire.left is not None and wire.ports != wire.home:
                if not all(self.bandwidth(port) for port in wire.ports):
                    wire.left = wire.size
                if wire.home is None:
                    wire.left = None
            wire.ports = wire.home

    def poll(self):
        """Do whatever is possible now; whether anything was."""
        has_moved = False
        for wire in self.wires:
            has_moved |= self._send(wire)
            has_moved |= self._deliver(wire)
        for rank, channels in enumerate(self.ops):
            for channel, ops in enumerate(channels):
                for index, op in enumerate(ops):
                    if op.kind in (OpKind.COPY, OpKind.REDUCE):
                        has_moved |= self._work(rank, channel, index)
        for lane, queue in self.queues.items():
            if queue and not any(each[1] == lane for each in self.reductions):
                index, size = queue.popleft()
                end = self.now + size / Fraction(self.network.reduction_rate)
                self.reductions.append((end, lane, index))
        return has_moved

    def _send(self, wire):
        found = self.at(wire, wire.sends, wire.nsent)
        if found is None or wire.left is not None or wire.ports is None:
            return False
        index, k = found
        theirs, _ = self.at(wire, wire.receives, wire.nsent)
        if not self.is_ready(wire.src, wire.channel, index, k):
            return False
        is_landing = self.ops[wire.dst][wire.channel][theirs].kind == OpKind.RECV
        if is_landing and not self.is_ready(wire.dst, wire.channel, theirs, k):
            return False
        wire.size = wire.left = Fraction(self.slices(wire.src, wire.channel, index)[k])
        if not wire.ports:
            wire.left = Fraction(0)
        if not wire.left:
            self._sent(wire)
        return True

    def _sent(self, wire):
        wire.left = None
        wire.nsent += 1
        nodes = self.network.nodes
        is_inside = nodes[wire.src] == nodes[wire.dst]
        alpha = self.network.inside_alpha_s if is_inside else self.network.alpha_s
        self.landings.append((self.now + Fraction(alpha), wire))
        self._land()

    def _land(self):
        for landing in [each for each in self.landings if each[0] == self.now]:
            self.landings.remove(landing)
            wire = landing[1]
            index, _ = self.at(wire, wire.sends, wire.nlanded)
            self.done[wire.src, wire.channel, index] += 1
            wire.nlanded += 1

    def _deliver(self, wire):
        if wire.ndelivered == wire.nlanded:
            return False
        index, k = self.at(wire, wire.receives, wire.ndelivered)
        if not self.is_ready(wire.dst, wire.channel, index, k):
            return False
        wire.ndelivered += 1
        is_reduced = self.ops[wire.dst][wire.channel][index].kind == OpKind.RECV_REDUCE
        self._finish(wire.dst, wire.channel, index, k, is_reduced)
        return True

    def _work(self, rank, channel, index):
        k = self.done[rank, channel, index, "begun"]
        if k == len(self.slices(rank, channel, index)):
            return False
        if not self.is_ready(rank, channel, index, k):
            return False
        self.done[rank, channel, index, "begun"] += 1
        is_reduced = self.ops[rank][channel][index].kind == OpKind.REDUCE
        self._finish(rank, channel, index, k, is_reduced)
        return True

    def _finish(self, rank, channel, index, k, is_reduced):
        if is_reduced and self.network.reduction_rate:
            size = Fraction(self.slices(rank, channel, index)[k])
            self.queues[rank, channel].append((index, size))
        else:
            self.done[rank, channel, index] += 1

    def rates(self):
        """Max-min fair rates: raise all alike, and freeze those at a port that is full."""
        rates = {}
        active = [wire for wire in self.wires if wire.left is not None]
        ports = {port: self.bandwidth(port) for wire in active for port in wire.ports}
        while len(rates) < len(active):
            free = [wire for wire in active if wire not in rates]
            counts = {p: sum(p in wire.ports for wire in free) for p in ports}
            shares = {p: ports[p] / count for p, count in counts.items() if count}
            least = min(shares.values())
            for wire in free:
                if any(shares[port] == least for port in wire.ports):
                    rates[wire] = least
            for port in ports:
                ports[port] -= sum(least for w in free if w in rates and port in w.ports)
        return rates

    def run(self):
        self.reroute()
        while True:
            self._change()
            while self.poll():
                pass
            rates = self.rates()
            moments = [self.now + wire.left / rate for wire, rate in rates.items()]
            moments += [time for time, _ in self.landings]
            moments += [time for time, *_ in self.reductions]
            if not moments:
                if not self.changes:
                    return
                moments = [Fraction(self.changes[0].time_s)]
            if self.changes:
                moments.append(Fraction(self.changes[0].time_s))
            if self.is_over():
                return
            then = min(moments)
            for wire, rate in rates.items():
                wire.left -= rate * (then - self.now)
            self.now = then
            for wire in rates:
                if wire.left == 0:
                    self._sent(wire)
            self._land()
            for reduction in [each for each in self.reductions if each[0] == then]:
                self.reductions.remove(reduction)
                self.done[(*reduction[1], reduction[2])] += 1

    def is_over(self):
        return all(
            self.done[rank, channel, index] == len(self.slices(rank, channel, index))
            for rank, channels in enumerate(self.ops)
            for channel, ops in enumerate(channels)
            for index in range(len(ops))
        )

    def _change(self):
        if not self.changes or self.changes[0].time_s > self.now:
            return
        while self.changes and self.changes[0].time_s <= self.now:
            change = self.changes.popleft()
            for way in range(2):
                self.table[way, change.node, change.rail] = Fraction(change.bandwidth)
        self.reroute()


def schedule_of(programs, nchunks, weights):
    return Schedule(
        name="random",
        collective="allreduce",
        nranks=len(programs),
        nchunks=tuple(nchunks),
        weights=tuple(weights),
        cost=Cost(0, 0, 0, 0),
        generate=lambda rank: tuple(tuple(ops) for ops in programs[rank]),
    )


@st.composite
def schedules(draw):
    """Messages in some order, each waiting for some of what its ranks did before."""
    nranks = draw(st.integers(2, 5))
    nchannels = draw(st.integers(1, 3))
    nchunks = [draw(st.integers(1, 3)) for _ in range(nchannels)]
    programs = [[[] for _ in range(nchannels)] for _ in range(nranks)]

    def add(rank, channel, kind, peer, chunk):
        ops = programs[rank][channel]
        after = tuple(i for i in range(len(ops)) if draw(st.integers(0, 2)) == 0)
        src = -1 if kind == OpKind.RECV else chunk
        dst = -1 if kind == OpKind.SEND else chunk
        ops.append(Op(kind, peer, Space.INPUT, src, Space.OUTPUT, dst, after))

    for _ in range(draw(st.integers(1, 14))):
        channel = draw(st.integers(0, nchannels - 1))
        chunk = draw(st.integers(0, nchunks[channel] - 1))
        src = draw(st.integers(0, nranks - 1))
        dst = (src + draw(st.integers(0, nranks - 1))) % nranks
        if src == dst:
            add(src, channel, draw(st.sampled_from([OpKind.COPY, OpKind.REDUCE])), -1, chunk)
        else:
            add(src, channel, OpKind.SEND, dst, chunk)
            add(dst, channel, draw(st.sampled_from([OpKind.RECV, OpKind.RECV_REDUCE])), src, chunk)
    weights = [draw(st.integers(1, 3)) for _ in range(nchannels)]
    return schedule_of(programs, nchunks, weights)


@st.composite
def networks(draw, nranks):
    nnodes = draw(st.integers(1, nranks))
    nrails = draw(st.integers(1, 3))
    rates = st.integers(1, 6).map(float)
    table = st.tuples(*[st.tuples(*[rates] * nrails)] * nnodes)
    times = st.integers(1, 40).map(lambda number: number * 1.37)
    #: The last rail of every node lives, so that all ranks always reach each other.
    changes = st.builds(
        Change,
        times,
        st.integers(0, nnodes - 1),
        st.integers(0, nrails - 1),
        st.sampled_from([0.0, 0.5, 4.0]),
    ).filter(lambda change: change.rail < nrails - 1 or change.bandwidth > 0)
    return Network(
        egress=draw(table),
        ingress=draw(table),
        nodes=tuple(draw(st.integers(0, nnodes - 1)) for _ in range(nranks)),
        alpha_s=draw(st.sampled_from([0.0, 0.25, 3.5])),
        inside_alpha_s=draw(st.sampled_from([0.0, 0.125])),
        inside_bandwidth=draw(st.sampled_from([math.inf, 7.0])),
        changes=tuple(draw(st.lists(changes, max_size=3))),
    )


def assert_agree(schedule, nbytes, network, nslices, node_ports=False):
    reference = Reference(schedule, nbytes, network, nslices, node_ports)
    reference.run()
    assert reference.is_over()
    outcome = simulate(
        schedule, nbytes, network, nslices=nslices, node_ports=node_ports, tolerance=0.0
    )
    assert outcome.time_s == pytest.approx(float(reference.now), rel=1e-9)


@slow.given(50, 150, st.data())
def test_random_programs_take_the_time_the_reference_says(data):
    schedule = data.draw(schedules())
    network = data.draw(networks(schedule.nranks))
    nbytes, nslices = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 4))
    assert_agree(schedule, nbytes, network, nslices, data.draw(st.booleans()))


ALGORITHMS = {
    "ring": lambda n: ring.allreduce(n, 3, [range(n), list(range(n))[::-1], range(n)]),
    "tree": lambda n: tree.allreduce(tree.double_binary(n)),
    "recursive doubling": lambda n: recursive_doubling.allreduce(n, 2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_collectives_take_the_time_the_reference_says(name, data):
    schedule = ALGORITHMS[name](data.draw(st.integers(1, 6)))
    network = data.draw(networks(schedule.nranks))
    assert_agree(schedule, 120, network, data.draw(st.integers(1, 3)))


@slow.given(10, 25, st.data())
def test_reductions_of_a_channel_take_turns_as_in_the_reference(data):
    """One link into each lane: with more, who of two that come together is first is open."""
    schedule = ring.allreduce(data.draw(st.integers(2, 5)), 2)
    network = data.draw(networks(schedule.nranks))
    rate = data.draw(st.sampled_from([1.5, 5.0, 40.0]))
    network = msgspec.structs.replace(network, reduction_rate=rate)
    assert_agree(schedule, 120, network, data.draw(st.integers(1, 3)))


@slow.given(50, 150, st.data())
def test_fair_queues_carry_every_byte_within_every_ports_rate(data):
    schedule = data.draw(schedules())
    network = msgspec.structs.replace(data.draw(networks(schedule.nranks)), changes=())
    nbytes, nslices = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 4))
    fair, exact = (
        simulate(schedule, nbytes, network, nslices=nslices, sharing=sharing)
        for sharing in ("fair_queue", "max_min")
    )
    assert fair.nslices == exact.nslices
    sides = ((fair.egress, exact.egress, network.egress),
             (fair.ingress, exact.ingress, network.ingress))  # fmt: skip
    for use, other, bandwidths in sides:
        assert use.nbytes == pytest.approx(other.nbytes)
        assert (use.nbytes <= use.busy_s * bandwidths + 1e-6).all()
        assert (use.busy_s <= fair.time_s + 1e-9).all()
