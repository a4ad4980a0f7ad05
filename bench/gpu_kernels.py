"""Measures kernels and compares them with a copy on the same GPU, with CuPy and with torch.

A round covers every element type. It starts with fresh random operands. Each kernel runs once on
poisoned outputs, and every element is compared with a float64 reference. Then follow loops of each
kernel, of ``cuMemcpyDtoDAsync``, and of the in-place addition of the other libraries (peers), in an
order that changes from round to round. A time is measured between two events around a loop and
divided by the number of calls. Bandwidth counts bytes read plus bytes written, also of the copy, so
that ratios are fair.

Invariant: all kernels, copies and peers use the same memory at a given size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import msgspec
import numpy as np
from gpu_card import POISON, Card, Memory
from gpu_forms import Case, cases
from gpu_inputs import Inputs, Reference, named
from gpu_outcome import Budget
from gpu_peers import Peer

from r2ccl.cli.values import format_size
from r2ccl.kernels.cuda import Launcher
from r2ccl.types import CallSignature, Collective

#: Names of the copy and of the peers, and suffix of the names of kernels that add in place.
COPY, PEERS, IN_PLACE = "cuMemcpyDtoDAsync", ("cupy", "torch"), "in place"
#: Largest number of arrays that a kernel reads, and that it writes.
NSOURCES, NTARGETS = 4, 2
#: Share of the free GPU memory that the arrays may use.
_MOST_OF_MEMORY = 0.9
_LEAST_CALLS, _MOST_CALLS = 3, 500
_ADDRESS_NBYTES = 8


class Subject(NamedTuple):
    """A kernel, a copy or a peer's addition to measure.

    ``call`` enqueues it once, ``targets`` are the addresses of its outputs, and ``narrays`` is the
    number of arrays that it reads plus the number that it writes.
    """

    name: str
    call: Callable[[], object]
    targets: tuple[int, ...]
    reference: Reference
    narrays: int
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class Series(msgspec.Struct):
    """Results of a subject: the seconds of a call, one value per round, and the wrong elements."""

    narrays: int
    seconds: list[float] = []
    nwrong: int = 0


#: Results by element type, size in bytes, and name of the subject.
Found = dict[tuple[str, int, str], Series]


class Kernels:
    """Measurement of kernels, copies and peers on a card.

    Parameters
    ----------
    card : Card
    launcher : Launcher
    peers : sequence of Peer
    sizes : sequence of int
        Sizes of an array in bytes.
    seed : int
        Seed of the operands.
    loop_s : float
        Desired duration of a loop, in seconds.

    Attributes
    ----------
    found : Found
    left_out : list of str
        Sizes that do not fit in memory, and element types that a peer cannot add.
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
        """Compile and load all kernels; return their number."""
        forms = [case.form for group in cases().values() for case in group]
        for form in forms:
            self._launcher.prepare(form)
        return len(forms)

    def measure(self, nbytes: int, nrounds: int, budget: Budget) -> int:
        """Measure one size, at most `nrounds` times, while time is left; return the rounds run."""
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
            f"kernels on {format_size(each)}: {NSOURCES + NTARGETS} arrays of it do not fit in the "
            f"{format_size(int(free_nbytes))} of GPU memory that the bench may use"
            for each in sizes if each not in fitting
        ]  # fmt: skip
        return fitting

    # Subjects

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
            except Exception as exc:  # of any library, which may not support the type
                said = f"{peer.name} {peer.version} cannot add {dtype}: {exc!r}"
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
            call()  # compiles the kernel, or fails if the library does not support the type
        return ours._replace(name=peer.name, call=call, context=peer.on_stream)

    # Measuring

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
        self._loop(subjects[0], dtype, nbytes)  # warm-up: the clocks of an idle GPU are low
        for subject in _in_turn(subjects, number):
            self.found[dtype, nbytes, subject.name].seconds.append(
                self._loop(subject, dtype, nbytes)
            )

    def _verify(self, subject: Subject, inputs: Inputs) -> int:
        """Run a subject once on poisoned outputs; return the number of wrong elements."""
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
        """Return the seconds of a call, from a loop that takes about `loop_s` seconds."""
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
    """Yield all subjects, starting with a different one in every round."""
    first = number % len(subjects)
    yield from subjects[first:]
    yield from subjects[:first]


__all__ = ["COPY", "IN_PLACE", "PEERS", "Found", "Kernels", "Series", "Subject"]
