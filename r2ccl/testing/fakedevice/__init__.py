"""A GPU in host memory: the interface `Device` for tests, which fails on work that is not ordered.

A `FakeGpu` is the card, a `FakeDevice` one process on it: several, as threads or in turn, are
several ranks on one GPU, with handles of memory between them. A card made `FakeGpu.beside` another
is a second GPU of the same machine. Work is run late and in an order drawn from a seed, and every
access is looked at::

    gpu = FakeGpu(seed)
    device = FakeDevice(gpu)
    event, stream = device.make_event(), device.make_stream()
    device.copy(target, source, nbytes, stream)
    device.record(event, stream)
    while not device.is_done(event):
        ...

**What is found, in every run.** Two accesses to the same bytes, one of them a write, that no
stream, event or word orders, whichever ran first: by copies, kernels, words, `FakeDevice.read` and
`write`, and by the host where it says so (`host_reads`, `host_writes`). Work on what a NIC wrote
(`nic_write`) to a card that reorders such writes, given before a flush. Memory freed, unmapped or
unpinned, streams and events destroyed, while their work is not known to be over. Addresses that
are unknown, freed, another process's, of a GPU that was not let reach, or run over the end; the
host's address of memory that was pinned; handles of another process.

**What is found of a host that says nothing**, in the runs in which it is early enough: that it
writes to a pinned source or target of work that may be under way; that it reads a pinned target
(it computes with poison, so the result is wrong). What it writes to a word that a stream waits for
is seen, with all the host did before the last call that preceded it.

**What is not found.** A host that reads a target after the work was run, but before it knew.
Accesses of the host between its write to a word and its next call. That a flush came before the
host knew of a NIC's write, if the write was there. Orders that only the legacy default stream
makes: it is a stream as any other here. That processes rely on knowing what they were not told,
unless ``are_hosts_one=False``. Work that another stream holds up because both share a queue of the
hardware. How long anything takes.

Public. Sits beside the executor and imports down.
"""

from r2ccl.testing.fakedevice.device import FakeDevice
from r2ccl.testing.fakedevice.gpu import FakeGpu
from r2ccl.testing.fakedevice.guard import POISON
from r2ccl.testing.fakedevice.kernels import FakeKernel, Grid
from r2ccl.testing.fakedevice.memory import MemoryKind
from r2ccl.testing.fakedevice.order import Misuse, Race, StillInUse, WrongOrder

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
    "WrongOrder",
]
