"""Right uses of the public interface, with the types that a user's checker must see.

mypy and pyright read this file in strict mode (`make lint`); it does not run.
"""

from __future__ import annotations

from array import array
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import r2ccl
from r2ccl.runtime.call_types import HasCuda

Floats = npt.NDArray[np.float32]


class Tensor:
    """Array of another library, with DLPack."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return that the array is in host memory."""
        return 1, 0

    def __setitem__(self, at: int, value: float) -> None:
        """Assign an element."""


class Constant:
    """Array of another library whose elements cannot be assigned."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return that the array is in host memory."""
        return 1, 0


class JaxArray:
    """``jax.Array`` as its stub has it: without DLPack, and with an assignment, which raises."""

    @property
    def committed(self) -> bool:
        """Return whether the array is bound to its device."""
        return False

    def is_deleted(self) -> bool:
        """Return whether the memory was freed."""
        return False

    def __buffer__(self, flags: int) -> memoryview:
        """Return a view of the memory."""
        return memoryview(b"")

    def __setitem__(self, key: int, value: float, /) -> None:
        """Raise an error."""


def collectives(comm: r2ccl.Communicator, x: Floats, tensor: Tensor) -> None:
    """A collective returns an array of the type that it was given."""
    assert_type(comm.allreduce(x), Floats)
    assert_type(comm.allreduce(x, x, r2ccl.MAX), Floats)
    assert_type(comm.allreduce(tensor), Tensor)
    assert_type(comm.allreduce(tensor, op=r2ccl.premul_sum(0.5), stream=7), Tensor)
    assert_type(comm.allreduce(bytearray(8)), bytearray)
    assert_type(comm.allreduce(array("d", [1.0])), array[float])
    assert_type(comm.allgather(x), Floats)
    assert_type(comm.allgather(tensor), Tensor)
    assert_type(comm.allgatherv(x, counts=(1, 2)), Floats)
    assert_type(comm.reduce_scatter(tensor, op=r2ccl.AVG), Tensor)
    assert_type(comm.reduce_scatterv(x, counts=[3, 4]), Floats)
    assert_type(comm.broadcast(x, root=1), Floats)
    assert_type(comm.alltoall(tensor), Tensor)
    assert_type(comm.alltoallv(x, sendcounts=[1], recvcounts=[1]), Floats)
    assert_type(comm.scan(x), Floats)
    assert_type(comm.exscan(x, op=r2ccl.MIN), Floats)
    assert_type(comm.scatter(x), Floats)
    assert_type(comm.scatter(None, x), Floats)
    assert_type(comm.scatterv(x, counts=[1, 1]), Floats)


def of_jax(comm: r2ccl.Communicator, x: JaxArray, out: Floats) -> None:
    """Without `out`, a collective on an array of JAX returns one."""
    assert_type(comm.allreduce(x, op=r2ccl.MAX), JaxArray)
    assert_type(comm.allreduce(x, async_op=True), r2ccl.Work[JaxArray])
    assert_type(comm.broadcast(x, root=1), JaxArray)
    assert_type(comm.reduce(x), JaxArray | None)
    assert_type(comm.scan(x), JaxArray)
    assert_type(comm.exscan(x), JaxArray)
    assert_type(comm.allgather(x), JaxArray)
    assert_type(comm.allgather(x, async_op=True).wait(), JaxArray)
    assert_type(comm.allgatherv(x, counts=(1, 2)), JaxArray)
    assert_type(comm.reduce_scatter(x, op=r2ccl.AVG), JaxArray)
    assert_type(comm.reduce_scatterv(x, counts=[3, 4]), JaxArray)
    assert_type(comm.gather(x, root=1), JaxArray | None)
    assert_type(comm.gatherv(x, counts=[1, 2]), JaxArray | None)
    assert_type(comm.scatter(x), JaxArray)
    assert_type(comm.scatterv(x, counts=[1, 1]), JaxArray)
    assert_type(comm.alltoall(x), JaxArray)
    assert_type(comm.alltoallv(x, sendcounts=[1], recvcounts=[1]), JaxArray)
    comm.allreduce(x, out)
    comm.allgather(x, out)
    comm.send(x, to=1)


def to_the_root(comm: r2ccl.Communicator, x: Floats) -> None:
    """A rank that receives nothing gets None."""
    assert_type(comm.reduce(x), Floats | None)
    assert_type(comm.gather(x, root=1), Floats | None)
    assert_type(comm.gatherv(x, counts=[1, 2]), Floats | None)
    assert_type(comm.reduce(x, async_op=True).wait(), Floats | None)


def asynchronous(comm: r2ccl.Communicator, x: Floats, tensor: Tensor) -> None:
    """With ``async_op=True``, a collective returns a `Work` of its result."""
    assert_type(comm.allreduce(x, async_op=True), r2ccl.Work[Floats])
    assert_type(comm.allreduce(x, async_op=True).wait(1.5), Floats)
    assert_type(comm.allreduce(x, async_op=False), Floats)
    assert_type(comm.broadcast(tensor, async_op=True).order(), Tensor)
    works: list[r2ccl.Work[Floats]] = [comm.allgather(x, async_op=True)]
    assert_type([each.wait() for each in works], list[Floats])


def not_known(comm: r2ccl.Communicator, x: Floats, is_async: bool, device: HasCuda) -> None:
    """Calls whose result no type describes are accepted, too."""
    comm.allreduce(x, async_op=is_async)
    comm.allreduce(Constant(), x)
    comm.allreduce(b"12345678", out=bytearray(8))
    comm.allreduce(device, stream=3)
    gathered: Floats = comm.allgather(Constant())
    assert_type(gathered, Floats)


def messages(comm: r2ccl.Communicator, x: Floats, tensor: Tensor) -> None:
    """Messages have types of their own."""
    comm.send(x, to=1)
    assert_type(comm.send(tensor, 1, async_op=True), r2ccl.MessageRequest)
    assert_type(comm.recv(x, async_op=True), r2ccl.MessageRequest)
    assert_type(comm.recv(x).source, int | Any)
    assert_type(comm.sendrecv(x, 1, tensor, 2).count, int | Any)
    assert_type(comm.probe(), r2ccl.Message)
    assert_type(comm.probe(is_blocking=False), r2ccl.Message | None)


def life_cycle() -> list[float]:
    """Settings are checked by name and type, and all results have public types."""
    with r2ccl.init(mode=1, shm="0", timeout_s=30, rails=2) as comm:
        memory: r2ccl.RegisteredMemory = comm.register(np.zeros(8))
        with memory, comm.group() as group:
            comm.allreduce(np.zeros(3))
        found: list[r2ccl.Message] = group.messages
        report: r2ccl.HealthReport = comm.health()
        paths: list[r2ccl.PathEntry] = [path for rail in report.rails for path in rail.paths]
        waits: tuple[r2ccl.Wait, ...] = comm.pending().waits
        verdicts: tuple[r2ccl.Verdict, ...] = comm.verdicts()
        ports: list[r2ccl.Port] = [each.target for one in verdicts for each in one.readings]
        explanation: r2ccl.Explanation = comm.explain(1 << 20)
        chosen: r2ccl.Choice = explanation.chosen
        known: r2ccl.Known = comm.known_health()
        health: r2ccl.Health = known.health
        part: r2ccl.Communicator | None = comm.split(color=0)
        print(found, paths, waits, ports, chosen, health.version, part)
    settings: r2ccl.Settings = {"mode": "balance", "rails": 2}
    with r2ccl.init(**settings):
        pass
    assert_type(r2ccl.Config().digest(), str)
    return [float(len(each)) for each in r2ccl.launch(life_cycle, 2)]


class Ranks:
    """Ranks of other software, with the methods of an mpi4py communicator."""

    def Get_rank(self) -> int:
        """Return the rank."""
        return 0

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return 1

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks."""
        return [sendobj]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of a rank."""
        return obj


def ranks_of_functions(mpi_comm: Ranks) -> None:
    """Functions on ranks keep the types of their results, and pools take the settings of `init`."""
    assert_type(r2ccl.launch(lambda: 3, 2, timeout_s=5), list[int])

    def scaled(comm: r2ccl.Communicator, scale: float) -> Floats:
        return comm.allreduce(np.full(3, scale, np.float32))

    with r2ccl.launch_pool(2, faults=None):
        pass
    for each in ("ring", "tree"):
        r2ccl.init(algo=each, mode="AUTO").close()
    with r2ccl.launch_pool(2, timeout_s=3, env={"A": "B"}, mode="migrate", algo="ring") as pool:
        assert_type(pool.run(scaled, 2.0, timeout_s=1), list[Floats])
    with r2ccl.init(mpi_comm, mode=3):
        pass
