"""Wrong uses of the public interface, each of which a user's checker must refuse.

mypy and pyright read this file in strict mode (`make lint`), and refuse a comment that ignores no
error; it does not run.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import r2ccl

Floats = npt.NDArray[np.float32]


def no_arrays(comm: r2ccl.Communicator, x: Floats) -> None:
    """Lists and numbers are no arrays."""
    comm.allreduce([1.0, 2.0])  # type: ignore[call-overload]  # pyright: ignore
    comm.allreduce(1.0)  # type: ignore[call-overload]  # pyright: ignore
    comm.allgather("text")  # type: ignore[call-overload]  # pyright: ignore
    comm.send([1.0], 1)  # type: ignore[call-overload]  # pyright: ignore
    comm.recv(None)  # type: ignore[call-overload]  # pyright: ignore
    comm.allreduce(x, [1.0])  # type: ignore[call-overload]  # pyright: ignore


def other_arguments(comm: r2ccl.Communicator, x: Floats) -> None:
    """An operation has no text, a flag is no number, a root is no array."""
    comm.allreduce(x, op="sum")  # type: ignore[call-overload]  # pyright: ignore
    comm.allreduce(x, async_op=1)  # type: ignore[call-overload]  # pyright: ignore
    comm.broadcast(x, 0)  # type: ignore[call-overload]  # pyright: ignore
    comm.allreduce(x, sream=3)  # type: ignore[call-overload]  # pyright: ignore
    comm.allgatherv(x)  # type: ignore[call-overload]  # pyright: ignore
    comm.reduce_scatterv(x, counts=3)  # type: ignore[call-overload]  # pyright: ignore


def results(comm: r2ccl.Communicator, x: Floats) -> None:
    """A `Work` is no array, and a rank may receive nothing."""
    comm.allreduce(x, async_op=True)[0]  # type: ignore[index]  # pyright: ignore
    comm.allreduce(x).wait()  # type: ignore[attr-defined]  # pyright: ignore
    comm.reduce(x)[0]  # type: ignore[index]  # pyright: ignore


def settings() -> None:
    """Settings are known by name and type."""
    r2ccl.init(timeout=3)  # type: ignore[call-arg]  # pyright: ignore
    r2ccl.init(timeout_s="3s")  # type: ignore[arg-type]  # pyright: ignore
    r2ccl.init(rails=1.5)  # type: ignore[arg-type]  # pyright: ignore
    r2ccl.init("nccl")  # type: ignore[arg-type]  # pyright: ignore
    r2ccl.launch_pool(2, timeot_s=3)  # type: ignore[call-arg]  # pyright: ignore


def functions(pool: r2ccl.LaunchPool) -> None:
    """A function of `launch` has no arguments, and its results keep their type."""
    r2ccl.launch(functions, 2)  # type: ignore[arg-type]  # pyright: ignore
    r2ccl.launch(lambda: 3, 2)[0].upper()  # type: ignore[attr-defined]  # pyright: ignore
    pool.run(3)  # type: ignore[arg-type]  # pyright: ignore
