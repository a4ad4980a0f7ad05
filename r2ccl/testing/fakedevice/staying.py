"""A resident kernel on the fake GPU: the mailbox of `r2ccl.kernels.cuda`, and who stands behind it.

The host's side is the library's own `Resident`. The device's is a generator that looks at the
mailbox whenever the fake's scheduler has it go on, so jobs are done late and at random moments;
that ends at random, with jobs left or without; and that can be told not to come to run. What a job
reads and writes is ordered by the word that posted it, and what the host knows of it by the word
that says how far the kernel is. Must not know forms.

Invariant: jobs are done one after the other, in one step each, and none by a kernel that is absent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
import numpy as np

from r2ccl.kernels.cuda import Form, Launcher, Patience, Resident, resident
from r2ccl.testing.fakedevice.device import FakeDevice
from r2ccl.testing.fakedevice.kernels import FakeKernel, Grid, Until

_WORD_NBYTES = 8
#: Starts are counted from 1.
_NEVER = 1 << 30

#: ``do(grid, addresses, nbytes, factor, divisor)``: what a launched kernel would.
Do = Callable[[Grid, Sequence[int], int, float, int], None]
Steps = Generator[Until, None, None]


class Whims(msgspec.Struct, frozen=True):
    """How resident kernels behave.

    Parameters
    ----------
    seed : int
        Of when they end.
    most_jobs, most_looks : int
        After at most so many jobs they are old; after so many looks without one, idle.
    absent_from : int
        The start of a kernel from which on its blocks do not all come to run; the first is 1.
    """

    seed: int = 0
    most_jobs: int = 8
    most_looks: int = 8
    absent_from: int = _NEVER


def resident_kernel(do: Do, nwords: int, whims: Whims) -> FakeKernel:
    """Return what stands for a resident kernel.

    Parameters
    ----------
    do : callable
        Does a job.
    nwords : int
        Addresses that a job has.
    whims : Whims
    """
    stay = _Stay(do, nwords, whims)
    return FakeKernel(stay.run)


class _Stay:
    """The device's side, over all its starts."""

    def __init__(self, do: Do, nwords: int, whims: Whims) -> None:
        self._do = do
        self._nwords = nwords
        self._whims = whims
        self._random = random.Random(whims.seed)
        self._nstarts = 0

    def run(self, grid: Grid, mailbox: int, board: int, first: int, *rest: Any) -> Steps:
        """Do jobs until there is a reason to end; see `resident.PARAMETERS`."""
        *_, factor, divisor = rest
        self._nstarts += 1
        is_absent = self._nstarts >= self._whims.absent_from
        for _ in range(self._some(self._whims.most_looks)):
            yield Until(mailbox + resident.POSTED, first)  # the roll takes a while
        state = resident.ABSENT if is_absent else resident.WAITING
        last = first + self._some(self._whims.most_jobs)
        job = first
        while state == resident.WAITING:
            job += 1
            state = resident.OLD if job > last else (yield from self._await(grid, mailbox, job))
            if state == resident.WORKING:
                yield Until(mailbox + resident.POSTED, job)  # and know what the host did before
                *addresses, nbytes = self._read(grid, mailbox, job)
                self._do(grid, addresses, nbytes, factor, int(divisor))
                grid.set_word(mailbox + resident.DONE, job)
                state = resident.WAITING
        grid.set_word(mailbox + resident.ENDED, state)

    def _await(self, grid: Grid, mailbox: int, job: int) -> Generator[Until, None, int]:
        """Look for a job, or for a reason to end; return what is to be done."""
        _, stop = grid.word(mailbox + resident.STOP)
        _, posted = grid.word(mailbox + resident.POSTED)
        for _ in range(self._some(self._whims.most_looks)):
            is_stopped = stop.value != 0  # before the jobs, as the kernel does
            if posted.has_reached(job):
                return resident.WORKING
            if is_stopped:
                return resident.STOPPED
            yield Until(mailbox + resident.POSTED, job - 1)
        return resident.IDLE

    def _read(self, grid: Grid, mailbox: int, job: int) -> list[int]:
        """Read a job: its addresses, and the bytes of each operand."""
        slot = mailbox + resident.RING + job % resident.NSLOTS * resident.SLOT_NBYTES
        words = grid.read(slot, _WORD_NBYTES * (self._nwords + 1)).view(np.int64)
        return [int(each) for each in words]

    def _some(self, most: int) -> int:
        return self._random.randint(1, most)


class FakeResident(Resident):
    """`Resident` on a `FakeDevice`, which is told what the host goes by.

    Parameters
    ----------
    device : FakeDevice
    launcher : Launcher
    form : Form
    nblocks, nranks, patience
        See `Resident`.
    """

    def __init__(
        self,
        device: FakeDevice,
        launcher: Launcher,
        form: Form,
        *,
        nblocks: int,
        nranks: int = 1,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(
            device, launcher, form, nblocks=nblocks, nranks=nranks, patience=patience
        )  # fmt: skip
        self._fake = device
        device.host_sees(self._word(resident.POSTED))  # from now on its writes are noted

    def poll(self) -> int:
        """See `Resident`; work goes on while it is asked."""
        with self._fake._board.entered():  # nothing is done between what is known and what is told
            self._fake.host_sees(self._word(resident.DONE))
            return super().poll()

    def _word(self, at: int) -> Any:
        return self._pinned[at : at + 4]


__all__ = ["Do", "FakeResident", "Whims", "resident_kernel"]
