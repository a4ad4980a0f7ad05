"""Kernels against a copy on the same GPU, and against CuPy and torch, in turns.

A round has every element type: fresh random operands, then each kernel once on poisoned outputs,
every element of which is compared with a float64 reference; then loops of each kernel, of
``cuMemcpyDtoDAsync`` and of the peers' addition in place, in an order that changes from round to
round. A time is that between two events around a loop, divided by its length. Bandwidth counts
every byte that is read and every byte that is written, of the copy too, so ratios are fair.

Must not know CUDA, nor a library by name. Invariant: all of a size use the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import msgspec
import numpy as np
from common import format_size
from gpu_card import POISON, Card, Memory
from gpu_forms import Case, cases
from gpu_inputs import Inputs, Reference, named
from gpu_outcome import Budget
from gpu_peers import Peer

from r2ccl.kernels.cuda import Launcher
from r2ccl.types import CallSignature, Collective

#: Names of what is no kernel of ours, and how those of additions in place end.
COPY, PEERS, IN_PLACE = "cuMemcpyDtoDAsync", ("cupy", "torch"), "in place"
#: Most arrays a kernel reads, and writes.
NSOURCES, NTARGETS = 4, 2
#: Share of the free memory that is taken.
_MOST_OF_MEMORY = 0.9
_LEAST_CALLS, _MOST_CALLS = 3, 500
_ADDRESS_NBYTES = 8


class Subject(NamedTuple):
    """Something that is measured.

    ``narrays`` says how often it reads or writes an array of the size.
    """

    name: str
    call: Callable[[], object]
    targets: tuple[int, ...]
    reference: Reference
    narrays: int
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class Series(msgspec.Struct):
    """What was found of a subject: the seconds of a call, one a round, and wrong elements."""

    narrays: int
    seconds: list[float] = []
    nwrong: int = 0


#: By element type, size and name of the subject.
Found = dict[tuple[str, int, str], Series]


class Kernels:
    """The kernels of a card under measurement.

    Parameters
    ----------
    card : Card
    launcher : Launcher
    peers : sequence of Peer
    sizes : sequence of int
        Bytes of an array.
    seed : int
    loop_s : float
        How long a loop is to take.

    Attributes
    ----------
    found : Found
    left_out : list of str
        Sizes there is no room for, and peers that cannot add a type.
    """

    def __init__(
        self, card: Card, launcher: Launcher, peers: Sequence[Peer], sizes: Sequence[int], *,
        seed: int, loop_s: float,
    ) -> None:  # fmt: skip
        self._card = card
        self._launcher = launcher
        self._peers = peers
        self._seed = seed
        self._loop_s = loop_s
        self.found: Found = {}
        self.left_out: list[str] = []
        self.sizes = self._fitting(sizes)
        nbytes = max(self.sizes, default=0)
        allocate = card.device.allocate
        self._sources = [allocate(nbytes) for _ in range(NSOURCES if nbytes else 0)]
        self._targets = [allocate(nbytes) for _ in range(NTARGETS if nbytes else 0)]
        self._ncalls: dict[tuple[str, int, str], int] = {}

    def compile(self) -> int:
        """Load every kernel; return how many there are."""
        forms = [case.form for group in cases().values() for case in group]
        for form in forms:
            self._launcher.prepare(form)
        return len(forms)

    def measure(self, nbytes: int, nrounds: int, budget: Budget) -> int:
        """Measure one size until it was done `nrounds` times or time is up; return how often."""
        groups = {name: self._subjects(name, nbytes) for name in cases()}
        for number in range(nrounds):
            if number and budget.is_late(number):
                return number
            for name, subjects in groups.items():
                self._round(name, subjects, nbytes, number)
        return nrounds

    def _fitting(self, sizes: Sequence[int]) -> list[int]:
        free_nbytes = _MOST_OF_MEMORY * self._card.driver.free_nbytes()
        fitting = [each for each in sizes if each * (NSOURCES + NTARGETS) <= free_nbytes]
        self.left_out += [
            f"kernels on {format_size(each)}: {NSOURCES + NTARGETS} arrays of it do not fit the "
            f"{format_size(int(free_nbytes))} that may be taken"
            for each in sizes if each not in fitting
        ]  # fmt: skip
        return fitting

    # What is measured

    def _subjects(self, dtype: str, nbytes: int) -> list[Subject]:
        count = nbytes // named(dtype).itemsize
        source, target = self._sources[0], self._targets[0]

        def copy() -> None:
            self._card.driver.copy(target, source, nbytes, self._card.stream)

        subjects = [Subject(COPY, copy, (target,), lambda operands: operands[0], 2)]
        subjects += [self._kernel(case, count) for case in cases()[dtype]]
        in_place = [each for each in subjects if each.targets[0] == source]
        for peer in self._peers if in_place else ():
            try:
                subjects.append(self._peer(peer, in_place[0], count, dtype))
            except Exception as exc:  # of any library: it may know no such type
                said = f"{peer.name} {peer.version} adds no {dtype}: {exc!r}"
                self.left_out += [] if said in self.left_out else [said]
        return subjects

    def _kernel(self, case: Case, count: int) -> Subject:
        form = case.form
        sources = self._sources[: form.ninputs]
        targets = self._sources[:1] if case.in_place else self._targets[: form.noutputs]
        call = self._from_table if form.has_table else self._launch
        return Subject(
            case.name,
            call(case, sources, targets, count),
            tuple(targets),
            case.reference,
            case.narrays,
        )

    def _launch(
        self, case: Case, sources: Sequence[int], targets: Sequence[int], count: int
    ) -> Callable[[], None]:
        launch, stream = self._launcher.launch, self._card.stream
        form, factor, nranks = case.form, case.factor, case.nranks
        return lambda: launch(form, sources, targets, count, stream, factor=factor, nranks=nranks)

    def _from_table(
        self, case: Case, sources: Sequence[int], targets: Sequence[int], count: int
    ) -> Callable[[], None]:
        form, stream = case.form, self._card.stream
        table = self._card.device.allocate_pinned(_ADDRESS_NBYTES * case.narrays).view(np.int64)
        table[:] = [*sources, *targets]
        address = int(table.ctypes.data)
        signature = CallSignature(Collective.ALLREDUCE, form.dtype_code, form.op, count)
        launch = self._launcher.launch_from_table
        operands = form.ninputs, form.noutputs
        return lambda: launch(signature, *operands, address, count, case.nranks, stream)

    def _peer(self, peer: Peer, ours: Subject, count: int, dtype: str) -> Subject:
        x, y = (Memory(address, count, named(dtype)) for address in self._sources[:2])
        with peer.on_stream():
            call = peer.adder(x, y)
            call()  # compiles, or says that there is no such type
        return ours._replace(name=peer.name, call=call, context=peer.on_stream)

    # How

    def _round(self, dtype: str, subjects: list[Subject], nbytes: int, number: int) -> None:
        kind = named(dtype)
        inputs = Inputs(
            kind, NSOURCES, nbytes // kind.itemsize, (self._seed, number, nbytes),
            self._card.block_nbytes,
        )  # fmt: skip
        for operand, address in enumerate(self._sources):
            inputs.place(self._card, operand, address)
        for subject in subjects:
            series = self.found.setdefault((dtype, nbytes, subject.name), Series(subject.narrays))
            series.nwrong += self._verify(subject, inputs)
        self._loop(subjects[0], dtype, nbytes)  # as the clocks of a GPU that has waited go up
        for subject in _in_turn(subjects, number):
            self.found[dtype, nbytes, subject.name].seconds.append(
                self._loop(subject, dtype, nbytes)
            )

    def _verify(self, subject: Subject, inputs: Inputs) -> int:
        """Run a subject once on poisoned outputs; return how many of their elements are wrong."""
        card, in_place = self._card, subject.targets[0] == self._sources[0]
        for target in () if in_place else subject.targets:
            card.driver.fill(target, POISON, inputs.nbytes, card.stream)
        with subject.context():
            subject.call()
        card.finish()
        nwrong = sum(
            inputs.count_wrong(card, target, subject.reference) for target in subject.targets
        )
        if in_place:
            inputs.place(card, 0, self._sources[0])
        return nwrong

    def _loop(self, subject: Subject, dtype: str, nbytes: int) -> float:
        """Return the seconds of a call, in a loop that takes about as long as is wanted."""
        key = dtype, nbytes, subject.name
        if key not in self._ncalls:
            once_s = self._time(subject, _LEAST_CALLS) / _LEAST_CALLS
            ncalls = round(self._loop_s / max(once_s, 1e-9))
            self._ncalls[key] = min(_MOST_CALLS, max(_LEAST_CALLS, ncalls))
        return self._time(subject, self._ncalls[key]) / self._ncalls[key]

    def _time(self, subject: Subject, ncalls: int) -> float:
        def work() -> None:
            for _ in range(ncalls):
                subject.call()

        with subject.context():
            return self._card.driver.time(self._card.stream, work)


def _in_turn(subjects: Sequence[Subject], number: int) -> Iterator[Subject]:
    """Yield all, beginning with another one in every round."""
    first = number % len(subjects)
    yield from subjects[first:]
    yield from subjects[:first]


__all__ = ["COPY", "IN_PLACE", "PEERS", "Found", "Kernels", "Series", "Subject"]
