"""Offload: slices in device memory, reduced, divided and copied by a GPU beside the data loop.

`Offload` is where that work is given (by `r2ccl.gpu.operands`); it is numbered in the order it is
given.

*Two ways.* Work is launched on a stream. Reductions of a form for which `Offload.settle_on` found
that to be faster are posted to a kernel that stays on the device (`r2ccl.gpu.reducers`).

*Order.* Either does what it is given one after another, so a kernel needs no host to wait for those
before it, in whatever lane. Between the two the host waits: work goes to another reducer than what
was given before it once all of that is known to be done, and is held back here until then.

Everything else is ordered by the host too. A NIC reads what a kernel wrote after the host has seen
the kernel's event, or its job's number; a kernel reads what a NIC wrote because it is launched
after the host has polled the completion: "only CUDA synchronization and work submission APIs
provide memory ordering of GPUDirect RDMA operations". A device that reorders remote writes is told
to flush them, once, before the first work that is issued after a `commit`: what the work of a slice
reads had arrived when it was given, and each look at the transport is followed by a `commit`. Where
it does not reorder them, a kernel that runs sees them too.

*A resident kernel that does not come to run*, because other work fills the device, has begun
nothing of what is not done (`r2ccl.kernels.cuda.resident`): that is launched instead, as is all
that follows.

Must not import links or transports; makes no call that waits for the device but `Offload.drain`,
`Offload.settle_on` and `Offload.close`. Invariants: work counts as done only once the device said
so; at most one reducer has work under way.

References
----------
NVIDIA, "Developing a Linux kernel module using GPUDirect RDMA", section "Synchronization and
memory ordering"; CUDA driver API, ``CUGPUDirectRDMAWritesOrdering``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence

from r2ccl.clock import Clock, monotonic
from r2ccl.device.base import Device
from r2ccl.errors import InvalidArgument, TransportError, TransportTimeout
from r2ccl.gpu.reducers import Copy, Kernels, Launches, Mark, Posts, Reducer, Reduction, Work
from r2ccl.gpu.settling import is_second_faster
from r2ccl.kernels.cuda.form import Form

_log = logging.getLogger(__name__)


class Offload:
    """Work on a device; `r2ccl.progress.Computer`.

    Parameters
    ----------
    device : Device
    kernels : Kernels
    clock : Clock, optional
        Measures how long slices take, and how long the device is waited for.

    Notes
    -----
    Belongs to whoever owns the data loop; between collectives, to whoever carries them out.

    *After failure*: a call that raises has dropped what could not be issued, and all that was held
    behind it; what was issued before may be under way until `drain` says that it is not.
    """

    def __init__(self, device: Device, kernels: Kernels, clock: Clock = monotonic) -> None:
        self._device = device
        self._kernels = kernels
        self._clock = clock
        self._launches = Launches(device, kernels)
        #: By form and number of ranks: the resident kernels that are used.
        self._posts: dict[tuple[Form, int], Posts] = {}
        #: Those that were made and not closed.
        self._made: list[Posts] = []
        #: Whether one did not come to run.
        self._is_absent = False
        #: The one reducer that may be busy.
        self._current: Reducer = self._launches
        self._begun = 0
        self._computed = 0
        #: What was given and not issued.
        self._held: deque[tuple[int, Work]] = deque()
        self._is_flushed = False

    @property
    def is_busy(self) -> bool:
        """See `Computer`."""
        return self._computed < self._begun

    def run(self, form: Form, sources: Sequence[int], target: int, count: int, nranks: int) -> int:
        """Run a kernel over `count` elements; return its number."""
        return self._give(Reduction(form, sources, target, count, nranks))

    def copy(self, target: int, source: int, nbytes: int) -> int:
        """Copy within the device; return the work's number."""
        return self._give(Copy(target, source, nbytes))

    def mark(self, word: int, value: int) -> int:
        """Write a word in pinned memory after all that was given before; return its number."""
        return self._give(Mark(word, value))

    def commit(self) -> None:
        """See `Computer`."""
        self._issue()
        self._launches.commit()
        self._is_flushed = False

    def poll(self) -> int:
        """See `Computer`."""
        current = self._current
        if current.is_busy:
            self._computed = current.poll() or self._computed
            if isinstance(current, Posts) and current.is_absent:
                self._dismiss(current)
        self._issue()
        return self._computed

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was given is done, at most `timeout_s`; whether it is."""
        until_s = self._clock() + timeout_s
        self.commit()
        while self.is_busy:
            left_s = until_s - self._clock()
            self._current.wait(max(0.0, left_s))
            self.poll()
            self.commit()
            if self.is_busy and left_s <= 0:
                return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Free everything; `drain` has said that all is done.

        Raises
        ------
        TransportTimeout
            A resident kernel has not ended: it is kept, and the stream.
        """
        while self._made:
            self._made[-1].close(timeout_s)
            self._made.pop()
        self._launches.close()

    def settle_on(
        self,
        form: Form,
        nranks: int,
        places: Sequence[int],
        nbytes: int,
        *,
        setting: str = "auto",
        timeout_s: float = 30.0,
    ) -> bool:
        """Find out which way is faster for reductions of a form, and take it from now on.

        Parameters
        ----------
        form : Form
            Of one input or two, and one output.
        nranks : int
            What a divided form divides by.
        places : sequence of int
            Addresses of two inputs and the output, `nbytes` each, none in another; what is in the
            output is lost.
        nbytes : int
            Of a slice.
        setting : str
            "auto": what is faster here (`r2ccl.gpu.settling`); launches if neither is, or if there
            can be no resident kernel. "1": a resident kernel, unmeasured. "0": launches.
        timeout_s : float
            How long the device is waited for, each time.

        Returns
        -------
        bool
            Whether it is a resident kernel.

        Raises
        ------
        InvalidArgument
            `setting` is none of these.
        TransportTimeout
            The device does not end what it was given.
        InvalidArgument, TransportError
            As `r2ccl.kernels.cuda.Launcher.stay`, with "1"; or the device failed.

        Notes
        -----
        *Cost*: with "auto" 400 slices, one after the other. It waits for the device: to be called
        before any stream is given what waits for the host. Once a resident kernel did not come to
        run, there is none here any more.

        A call whose reductions have several forms, as with AVG, waits whenever it goes from one to
        another, which is not measured.
        """
        if setting not in ("auto", "0", "1"):
            raise InvalidArgument(f"resident kernels {setting!r}: allowed is 'auto', '0' or '1'")
        key = form, nranks
        if setting == "0" or self._is_absent or key in self._posts:
            return key in self._posts
        try:
            posts = Posts(self._kernels.stay(form, nranks=nranks))
        except (InvalidArgument, TransportError) as exc:
            if setting == "1":
                raise
            _log.info("reductions are launched, there is no resident kernel: %s", exc)
            return False
        self._made.append(posts)
        if setting == "1" or self._is_faster(
            posts, _slice_of(form, nranks, places, nbytes), timeout_s
        ):
            self._posts[key] = posts
        elif not self._is_absent:
            posts.close(timeout_s)
            self._made.remove(posts)
        return key in self._posts

    def _is_faster(self, posts: Posts, work: Reduction, timeout_s: float) -> bool:
        """Whether `posts` take less time for a slice than launches do."""
        try:
            is_faster = is_second_faster(
                self, lambda: self._give(work), lambda: self._posting(posts, work),
                clock=self._clock, timeout_s=timeout_s,
            )  # fmt: skip
        except TransportTimeout:
            raise
        except TransportError as exc:
            if self.is_busy:  # not refused at its start: it has begun something
                raise
            _log.info("reductions are launched, a resident kernel is refused: %s", exc)
            return False
        return is_faster and not self._is_absent

    @contextlib.contextmanager
    def _posting(self, posts: Posts, work: Reduction) -> Iterator[None]:
        """Have such work go to `posts`, for a while."""
        key = work.form, work.nranks
        if not self._is_absent:
            self._posts[key] = posts
        try:
            yield
        finally:
            self._posts.pop(key, None)

    # What has become possible

    def _give(self, work: Work) -> int:
        self._begun += 1
        number = self._begun
        self._held.append((number, work))
        self._issue()
        return number

    def _issue(self) -> None:
        """Issue what is held, as far as nothing of another reducer is under way."""
        while self._held:
            number, work = self._held[0]
            reducer = self._reducer_of(work)
            is_other = reducer is not self._current
            if (is_other and self._current.is_busy) or not reducer.has_room:
                return
            self._current = reducer
            try:
                self._flush()
                reducer.issue(number, work)
            except BaseException:
                self._held.clear()
                self._begun = number - 1
                raise
            self._held.popleft()

    def _reducer_of(self, work: Work) -> Reducer:
        if self._posts and isinstance(work, Reduction):
            return self._posts.get((work.form, work.nranks), self._launches)
        return self._launches

    def _flush(self) -> None:
        """Have what NICs wrote be there for what is issued next."""
        if not self._is_flushed:
            if self._device.reorders_remote_writes:
                self._device.flush_remote_writes()
            self._is_flushed = True

    def _dismiss(self, posts: Posts) -> None:
        """Do without resident kernels; what this one has not begun is issued next."""
        left = posts.take_back()
        self._held.extendleft(reversed(left))
        self._posts.clear()
        self._is_absent = True
        _log.info(
            "a resident kernel does not come to run, because other work fills the GPU: from now "
            "on kernels are launched, first for %d slices that it had not begun",
            len(left),
        )


def _slice_of(form: Form, nranks: int, places: Sequence[int], nbytes: int) -> Reduction:
    *sources, target = places
    return Reduction(form, sources[: form.ninputs], target, nbytes // form.itemsize, nranks)


__all__ = ["Kernels", "Offload"]
