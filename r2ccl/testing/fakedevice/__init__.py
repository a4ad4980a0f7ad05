"""Fake GPU in host memory, for tests: it implements `Device` and detects unordered accesses.

A `FakeGpu` is the GPU, also called the card; a `FakeDevice` is one process on it. Several devices,
in several threads or used alternately by one thread, act as several ranks on one GPU, which
exchange memory handles. A card made by `FakeGpu.beside` is a second GPU of the same machine. Work
runs late and in an order drawn from a seed, and accesses to memory are checked::

    gpu = FakeGpu(seed)
    device = FakeDevice(gpu)
    event, stream = device.make_event(), device.make_stream()
    device.copy(target, source, nbytes, stream)
    device.record(event, stream)
    while not device.is_done(event):
        ...

**Always detected**, in every run:

- Races: two accesses to the same bytes that no stream, event or word orders, if at least one of
  them is a write. The order in which they ran does not matter. This covers copies, kernels, words,
  `FakeDevice.read` and `write`, and accesses of the host that it declares by `host_reads` and
  `host_writes`. As an exception, streams may set a word and wait for it in any order.
- Work that uses memory written by a NIC (`nic_write`) and was enqueued before the host flushed the
  write, on a card that reorders such writes.
- Freeing, unmapping or unpinning memory, and destroying streams or events, before the host knows
  that all work that uses them has finished (on a device with ``is_strict``, the default).
- Calls that would never return (`WouldHang`), because they wait for work that needs a later action
  of the waiting thread. Such calls enqueue work to a full launch queue or on a GPU with
  ``is_blocking``, or manage memory or load kernels on a GPU with ``is_serial``.
- Work enqueued on a stream that captures a graph.
- Addresses that are unknown, freed, of another process or of a GPU not made reachable; accesses
  beyond the end of an allocation; streams, events and kernels of another process.
- The host's address of memory that `FakeDevice.pin` pinned, if it is passed to the GPU.

**Detected in some runs**, if the host does not declare the access, but makes it before the work
runs:

- The host writes to a pinned source or target of work that may be in progress.
- The host reads a pinned target of such work: it finds poison there, so its result is wrong.

If the host writes to a word for which a stream waits, the fake detects the write at the next call
of any process. It then assumes that the write came after everything the host did before that call.

**Not detected:**

- An undeclared read of a target by the host after the work ran, but before the host could know that
  the work had run.
- A race of an access that the host makes between its write to a word and its next call: the fake
  orders this access before the write.
- A flush that comes after `nic_write`, but before the code under test polls the completion of that
  write.
- Code that relies on the ordering of the legacy default stream, which is like any other stream
  here.
- Processes that rely on steps of other processes without a notification, unless
  ``are_hosts_one=False``.
- Delays of work whose stream shares a hardware queue with another stream.
- Delays by driver calls that block driver calls of other threads, as a call that waits for the
  device might do.
- The duration of work, which the fake does not model.
"""

from r2ccl.testing.fakedevice.device import FakeDevice
from r2ccl.testing.fakedevice.gpu import FakeGpu
from r2ccl.testing.fakedevice.guard import POISON
from r2ccl.testing.fakedevice.kernels import FakeKernel, Grid
from r2ccl.testing.fakedevice.memory import MemoryKind
from r2ccl.testing.fakedevice.order import Misuse, Race, StillInUse, WouldHang, WrongOrder

__all__ = [
    "POISON",
    "FakeDevice",
    "FakeGpu",
    "FakeKernel",
    "Grid",
    "MemoryKind",
    "Misuse",
    "Race",
    "StillInUse",
    "WouldHang",
    "WrongOrder",
]
