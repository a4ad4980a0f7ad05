"""Two ways to have a GPU reduce slices: a kernel launched for each, and one that stays and is told.

`Launches` is a stream, `Posts` the mailbox of a resident kernel: both are a `Reducer`. What one of
them is given it does in that order; nothing orders what two are given but a host that waits, which
is the business of `r2ccl.gpu.offload`.

*What NICs wrote* a resident kernel reads without a launch in between: as on any GPU that does not
reorder remote writes, or after `Device.flush_remote_writes`, which `r2ccl.gpu.offload` calls.

Must not import links or transports, nor wait for the device but in `wait` and `close`. Invariant:
work counts as done only once the device said so: by an event, or in the mailbox.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from r2ccl.device.base import Device, Event, Stream
from r2ccl.kernels.cuda.form import Form


class Reduction(msgspec.Struct, frozen=True):
    """What a kernel of `form` is to do; see `r2ccl.kernels.cuda.Launcher.launch`."""

    form: Form
    sources: Sequence[int]
    target: int
    count: int
    nranks: int


class Copy(msgspec.Struct, frozen=True):
    """Bytes to be copied within the device."""

    target: int
    source: int
    nbytes: int


class Mark(msgspec.Struct, frozen=True):
    """A word in pinned memory to be written."""

    word: int
    value: int


Work: TypeAlias = "Reduction | Copy | Mark"


class Resident(Protocol):
    """A kernel that stays on the device; see `r2ccl.kernels.cuda.Resident`."""

    @property
    def has_room(self) -> bool:
        """Whether a job may be posted."""
        ...

    @property
    def is_absent(self) -> bool:
        """Whether `poll` found that it begins no job any more."""
        ...

    def post(self, sources: Sequence[int], targets: Sequence[int], count: int) -> int:
        """Post a job; return its number."""
        ...

    def poll(self) -> int:
        """Return the number of the last job that is done."""
        ...

    def close(self, timeout_s: float) -> None:
        """Have it end, and free everything."""
        ...


class Kernels(Protocol):
    """What gives a device its kernels; see `r2ccl.kernels.cuda.Launcher`."""

    def prepare(self, form: Form) -> object:
        """Load a kernel; may wait for the device."""
        ...

    def launch(
        self,
        form: Form,
        sources: Sequence[int],
        targets: Sequence[int],
        count: int,
        stream: Stream,
        *,
        factor: float = 1.0,
        nranks: int = 1,
    ) -> None:
        """Run a kernel that was prepared."""
        ...

    def stay(self, form: Form, *, nranks: int = 1) -> Resident:
        """Make a kernel that stays and does what `launch` does; may wait for the device."""
        ...


class Reducer(Protocol):
    """Where work is given."""

    @property
    def is_busy(self) -> bool:
        """Whether there is work that is not known to be done."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether work may be issued."""
        ...

    def issue(self, number: int, work: Work) -> None:
        """Have work done after all that was issued before; numbers are above 0, and rise."""
        ...

    def commit(self) -> None:
        """Have `poll` tell of all that was issued until now."""
        ...

    def poll(self) -> int:
        """Return the number of the last work that is done, 0: none since the last time."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait for the device for a while: until what is committed is done, or for less."""
        ...


class _Batch(NamedTuple):
    """All work up to ``number`` is done when ``event`` is."""

    number: int
    event: Event


class Launches:
    """Work on a stream of its own: kernels, copies and words.

    Parameters
    ----------
    device : Device
    kernels : Kernels
    """

    has_room = True

    def __init__(self, device: Device, kernels: Kernels) -> None:
        self._device = device
        self._kernels = kernels
        self._stream = device.make_stream()
        #: Number of the last work that no event stands for; 0: there is none.
        self._uncommitted = 0
        self._batches: deque[_Batch] = deque()
        #: Events that stand for nothing.
        self._events: list[Event] = []

    @property
    def is_busy(self) -> bool:
        """See `Reducer`."""
        return bool(self._uncommitted or self._batches)

    def issue(self, number: int, work: Work) -> None:
        """See `Reducer`."""
        if isinstance(work, Reduction):
            self._kernels.launch(
                work.form, work.sources, (work.target,), work.count, self._stream,
                nranks=work.nranks,
            )  # fmt: skip
        elif isinstance(work, Copy):
            self._device.copy(work.target, work.source, work.nbytes, self._stream)
        else:
            self._device.write_word(self._stream, work.word, work.value)
        self._uncommitted = number

    def commit(self) -> None:
        """See `Reducer`: one event for all that was issued since the last."""
        if self._uncommitted:
            event = self._events.pop() if self._events else self._device.make_event()
            self._device.record(event, self._stream)
            self._batches.append(_Batch(self._uncommitted, event))
            self._uncommitted = 0

    def poll(self) -> int:
        """See `Reducer`."""
        done = 0
        while self._batches and self._device.is_done(self._batches[0].event):
            done, event = self._batches.popleft()
            self._events.append(event)
        return done

    def wait(self, timeout_s: float) -> None:
        """See `Reducer`."""
        if self._batches:
            self._device.synchronize(self._batches[-1].event, timeout_s)

    def close(self) -> None:
        """Free the stream and the events; all is done."""
        self._device.destroy_stream(self._stream)
        for event in self._events:
            self._device.destroy_event(event)


class _Job(NamedTuple):
    """What the resident kernel has as ``job`` is the work of this number."""

    job: int
    number: int
    work: Reduction


class Posts:
    """Reductions of one form, by a resident kernel: each is a few words in its mailbox.

    Parameters
    ----------
    resident : Resident
        Owned.
    """

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        #: What is not known to be done.
        self._jobs: deque[_Job] = deque()

    @property
    def is_busy(self) -> bool:
        """See `Reducer`."""
        return bool(self._jobs)

    @property
    def has_room(self) -> bool:
        """See `Reducer`."""
        return self._resident.has_room

    @property
    def is_absent(self) -> bool:
        """Whether the kernel does not come to run: it begins no job any more."""
        return self._resident.is_absent

    def issue(self, number: int, work: Work) -> None:
        """See `Reducer`; reductions only, of the kernel's form."""
        assert isinstance(work, Reduction)
        job = self._resident.post(work.sources, (work.target,), work.count)
        self._jobs.append(_Job(job, number, work))

    def commit(self) -> None:
        """See `Reducer`: the mailbox tells of each job."""

    def poll(self) -> int:
        """See `Reducer`."""
        if not self._jobs:
            return 0
        last = self._resident.poll()
        done = 0
        while self._jobs and self._jobs[0].job <= last:
            done = self._jobs.popleft().number
        return done

    def take_back(self) -> list[tuple[int, Work]]:
        """Return what an absent kernel has not begun, by number, in order; it has none then."""
        left: list[tuple[int, Work]] = [(each.number, each.work) for each in self._jobs]
        self._jobs.clear()
        return left

    def wait(self, timeout_s: float) -> None:
        """See `Reducer`: no event tells of a job."""
        time.sleep(min(timeout_s, _LOOK_S))

    def close(self, timeout_s: float) -> None:
        """Have the kernel end, and free what it had; all is done.

        Raises
        ------
        TransportTimeout
            It has not ended; nothing was freed.
        """
        self._resident.close(timeout_s)


#: How long a host that waits for a resident kernel sleeps between two looks.
_LOOK_S = 20e-6

__all__ = [
    "Copy",
    "Kernels",
    "Launches",
    "Mark",
    "Posts",
    "Reducer",
    "Reduction",
    "Resident",
    "Work",
]
