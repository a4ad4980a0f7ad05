"""The host's side of a resident kernel: its mailbox, and who starts it and sees that it runs.

Sees a `Device` and addresses; the device's side is `r2ccl.kernels.cuda.resident`. Must not import
Numba.

Invariant: a job is written before its number is posted. Processors that keep the order of a
program's stores do the rest: x86-64; on others a `Resident` is refused.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.device.base import Argument, Device
from r2ccl.errors import InvalidArgument, TransportError, TransportTimeout
from r2ccl.kernels.cuda import resident
from r2ccl.kernels.cuda.form import Form
from r2ccl.kernels.cuda.operands import check_addresses, numbers
from r2ccl.kernels.cuda.ptx import NBLOCKS_OF_RESIDENT, NTHREADS

if TYPE_CHECKING:
    from r2ccl.kernels.cuda.launch import Launcher

Bytes = npt.NDArray[np.uint8]

#: Where stores are seen in the order of the program (Intel SDM 3A, 9.2.2; AMD APM 2, 7.2).
_ORDERED = ("x86_64", "AMD64")
#: Blocks that a resident kernel takes at most, unless it is told: few, for the rest of the GPU is
#: the caller's. With 32 KiB of reads under way in each and 1 us for a read, 16 blocks read 512 GB/s
#: and reduce half as much: five NICs of 400 Gbit/s. They fit on 8 multiprocessors.
_NBLOCKS = 16


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a resident kernel goes on.

    Parameters
    ----------
    idle_s : float
        Without a job.
    life_s : float
        With jobs: allocating, freeing and loading wait for every kernel, so it must end now and
        then; it is started again at once, for the price of a launch.
    stall_s : float
        Until all of its blocks run, and then until all have ended their part of a job.
    """

    idle_s: float = 0.001
    life_s: float = 0.05
    stall_s: float = 5.0


def nblocks_to_stay(nsms: int) -> int:
    """Say how many blocks a resident kernel takes unless it is told.

    Parameters
    ----------
    nsms : int
        Multiprocessors of the device.
    """
    return min(NBLOCKS_OF_RESIDENT * nsms, _NBLOCKS)


class Mailbox:
    """Words in memory that a resident kernel and the host share.

    Parameters
    ----------
    memory : ndarray of uint8
        `resident.MAILBOX_NBYTES` or more, zeroed, at a multiple of 8; borrowed.
    """

    def __init__(self, memory: Bytes) -> None:
        self._words = memory[: resident.MAILBOX_NBYTES].view(np.int64)
        self._posted = 0

    @property
    def address(self) -> int:
        """Where it is."""
        return int(self._words.ctypes.data)

    @property
    def posted(self) -> int:
        """Number of the last job that was posted; the first is 1."""
        return self._posted

    @property
    def done(self) -> int:
        """Number of the last job that is done; all before it are."""
        return int(self._words[resident.DONE // 8])

    @property
    def ended(self) -> int:
        """Why the kernel ended, one of `resident`'s states, or 0: it has not."""
        return int(self._words[resident.ENDED // 8])

    @property
    def has_room(self) -> bool:
        """Whether a job may be posted."""
        return self._posted - self.done < resident.NSLOTS

    def post(self, words: Sequence[int]) -> int:
        """Post a job: the addresses of its inputs and outputs, and the bytes of each.

        Returns
        -------
        int
            The job's number.

        Raises
        ------
        InvalidArgument
            There is no room.
        """
        if not self.has_room:
            raise InvalidArgument(
                f"{resident.NSLOTS} jobs are posted and not done: wait for one before the next"
            )
        number = self._posted + 1
        slot = (resident.RING + number % resident.NSLOTS * resident.SLOT_NBYTES) // 8
        self._words[slot : slot + len(words)] = words
        self._words[resident.POSTED // 8] = number
        self._posted = number
        return number

    def stop(self) -> None:
        """Have the kernel end when it has done what is posted."""
        self._words[resident.STOP // 8] = 1

    def reopen(self) -> None:
        """Prepare for a new kernel after one has ended."""
        self._words[resident.STOP // 8] = 0
        self._words[resident.ENDED // 8] = 0


class Resident:
    """A kernel that stays on a device, and does jobs one after the other.

    Parameters
    ----------
    device : Device
    launcher : Launcher
        Of that device.
    form : Form
        With `is_resident`.
    nblocks : int
        Blocks of 256 threads it occupies; at most 2 for each multiprocessor of the device.
    factor, nranks : float, int
        As in `Launcher.launch`, for all jobs.
    patience : Patience, optional

    Raises
    ------
    InvalidArgument
        `nblocks` is out of range, the form is not a resident one, or this processor may reorder
        what it writes.
    InvalidArgument, TransportError
        As `Launcher.prepare`, and what the device raises.

    Notes
    -----
    What a job reads must be in memory, or its writer must have been waited for, when it is posted:
    it has no place in the order of any stream. Not for two threads at once.

    Where other work keeps some of the blocks off the GPU, no job is begun (`is_absent`). Where it
    keeps off all of them nothing is told: no other kernel would run there either.
    """

    def __init__(
        self, device: Device, launcher: Launcher, form: Form, *, nblocks: int, factor: float = 1.0,
        nranks: int = 1, patience: Patience | None = None,
    ) -> None:  # fmt: skip
        if platform.machine() not in _ORDERED:
            raise InvalidArgument(
                f"a resident kernel on {platform.machine()}: needs a processor that keeps the "
                f"order of stores ({', '.join(_ORDERED)}); launch kernels instead"
            )
        most = NBLOCKS_OF_RESIDENT * device.nsms
        if not form.is_resident or not 1 <= nblocks <= most:
            raise InvalidArgument(
                f"{nblocks} blocks of {form.name}: give a form with is_resident, and 1 to {most}"
            )
        self._device = device
        self._form = form
        self._nblocks = nblocks
        given = patience or Patience()
        self._limits = [round(1e9 * each) for each in (given.life_s, given.idle_s, given.stall_s)]
        self._numbers = numbers(form, factor, nranks)
        self._kernel = launcher.prepare(form)
        self._pinned = device.allocate_pinned(resident.MAILBOX_NBYTES + resident.BOARD_NBYTES)
        self._mailbox = Mailbox(self._pinned)
        self._board = device.allocate(resident.BOARD_NBYTES)
        self._stream = device.make_stream()
        self._ended = device.make_event()
        self._is_running = False
        self._is_absent = False

    @property
    def has_room(self) -> bool:
        """Whether a job may be posted."""
        return self._mailbox.has_room and not self._is_absent

    @property
    def is_absent(self) -> bool:
        """Whether `poll` found that its blocks did not all come to run; it is not started again.

        Jobs after the one that `poll` returns were not begun, and never will be.
        """
        return self._is_absent

    def post(self, sources: Sequence[int], targets: Sequence[int], count: int) -> int:
        """Post a job, and start the kernel if it does not run.

        Parameters
        ----------
        sources, targets, count
            As in `Launcher.launch`.

        Returns
        -------
        int
            Its number: it is done when `poll` returns it or more.

        Raises
        ------
        InvalidArgument
            There is no room, it is absent, or as `check_addresses`.
        TransportError
            As `poll`.
        """
        if self._is_absent:
            raise InvalidArgument(
                f"{self._form.name}: its blocks did not all come to run: launch kernels instead"
            )
        check_addresses(self._form, sources, targets)
        number = self._mailbox.post((*sources, *targets, count * self._form.itemsize))
        if not self._is_running:
            self._start()
        elif self._mailbox.ended:
            self.poll()
        return number

    def poll(self) -> int:
        """Return the number of the last job that is done; start the kernel again if it must be.

        Raises
        ------
        TransportError
            The kernel gave up: part of it did not end a job; status ``STALLED``.
        """
        ended = self._mailbox.ended  # before `done`: what it did until then is counted
        done = self._mailbox.done
        if not ended or not self._is_running:
            return done
        self._is_running = False
        if ended == resident.STALLED:
            raise TransportError(
                f"{self._form.name}: job {done + 1} was not ended by all of {self._nblocks} "
                "blocks: the GPU was taken from them; use fewer, or launch kernels instead",
                status="STALLED",
            )
        if ended == resident.ABSENT:
            self._is_absent = True
        elif done < self._mailbox.posted:
            self._start()
        return done

    def close(self, timeout_s: float) -> None:
        """Have the kernel end, wait until it has, and free everything.

        Wait for all jobs before, with `poll`: one that the kernel had no time for is not done.
        Blocks of one that is absent must have come to run, to find nothing to do.

        Raises
        ------
        TransportTimeout
            It has not ended; nothing was freed.
        """
        self._mailbox.stop()
        if not self._device.synchronize(self._ended, timeout_s):
            raise TransportTimeout(
                f"{self._form.name} has not ended after {timeout_s:g} s: its memory is kept; end "
                "the process",
                status="TIMEOUT",
            )
        self._device.destroy_event(self._ended)
        self._device.destroy_stream(self._stream)
        self._device.free(self._board)
        self._device.free_pinned(self._pinned)

    def _start(self) -> None:
        """Run the kernel from the first job that is not done, when the one before has ended."""
        self._mailbox.reopen()
        zeros = self._mailbox.address + resident.MAILBOX_NBYTES
        self._device.copy(self._board, zeros, resident.BOARD_NBYTES, self._stream)
        words = (self._mailbox.address, self._board, self._mailbox.done, *self._limits)
        given: list[Argument] = [(word, ctypes.c_int64) for word in words]
        given += self._numbers
        self._device.launch(self._kernel, self._nblocks, NTHREADS, self._stream, given)
        self._device.record(self._ended, self._stream)
        self._is_running = True


__all__ = ["Mailbox", "Patience", "Resident", "nblocks_to_stay"]
