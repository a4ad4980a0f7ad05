"""A rank of the tests of collectives on a GPU, which all ranks share; argument: which function.

Arrays have `__cuda_array_interface__` and nothing else, so that no array library is needed.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.device_cases import TIMEOUT_S, Bench

import r2ccl
from r2ccl.device.driver import CudaDevice
from r2ccl.dtypes import DTYPES
from r2ccl.errors import CommunicatorRevoked, PeerLost
from r2ccl.testing import fail_at

ORDINAL = 0
NAMES = ("float32", "bfloat16", "float16", "int64", "uint8")
COUNTS = (0, 1, 1000, 50_003)
_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}


class Array:
    """An array on the GPU."""

    def __init__(self, address: int, count: int, dtype: np.dtype[Any]) -> None:
        self.address = address
        self.dtype = dtype
        self.count = count
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": dtype.str,
            "data": (address, False),
        }


class Card(Bench):
    """The GPU of a rank."""

    def __init__(self) -> None:
        super().__init__(CudaDevice(ORDINAL, close_timeout_s=TIMEOUT_S))

    def array(self, values: Any, skip: int = 0) -> Array:
        """Put values on the GPU, `skip` elements after the start of an allocation."""
        whole = np.concatenate([np.zeros(skip, values.dtype), values, np.zeros(1, values.dtype)])
        address = self.upload(whole) + skip * values.itemsize
        return Array(address, values.size, values.dtype)

    def get(self, array: Array) -> Any:
        """Read an array in the order of the stream."""
        nbytes = array.count * array.dtype.itemsize
        return self.download(array.address, max(1, nbytes))[:nbytes].view(array.dtype)


def values_of(rank: int, count: int, name: str) -> Any:
    """Small integers: no sum of a few is rounded."""
    return np.random.default_rng((rank, count)).integers(0, 20, count).astype(_DTYPES[name])


def floats_of(rank: int, count: int) -> Any:
    """Floats whose sum depends on the order of additions."""
    return np.random.default_rng((rank, count)).standard_normal(count).astype(np.float32)


def meant_of(xs: list[Any], count: int, rank: int) -> list[tuple[str, tuple[Any, ...], Any, Any]]:
    """Of every collective its arguments, this rank's input, and its result; None: it has none."""
    wide = [x.astype(np.float64) for x in xs]
    dtype, nranks, last = xs[0].dtype, len(xs), len(xs) - 1
    total = sum(wide).astype(dtype)
    mean = sum(wide) / nranks
    mean = (np.trunc(mean) if dtype.kind in "iu" else mean).astype(dtype)
    mine, own = xs[rank], slice(rank * count, (rank + 1) * count)
    return [
        ("allreduce", (r2ccl.SUM,), mine, total),
        ("allreduce", (r2ccl.AVG,), mine, mean),
        ("allreduce", (r2ccl.MAX,), mine, np.max(wide, axis=0).astype(dtype)),
        ("reduce_scatter", (r2ccl.SUM,), mine, total[own]),
        ("allgather", (), mine[:count], np.concatenate([x[:count] for x in xs])),
        ("broadcast", (last,), mine, xs[last]),
        ("reduce", (r2ccl.SUM, last), mine, total if rank == last else None),
    ]


def every_collective() -> None:
    """Of every type, of sizes from none on, aligned and not, also asynchronously: exact."""
    card = Card()
    with r2ccl.init() as comm:
        for name in NAMES:
            for at, count in enumerate(COUNTS):
                xs = [values_of(rank, count * comm.nranks, name) for rank in range(comm.nranks)]
                for collective, arguments, mine, meant in meant_of(xs, count, comm.rank):
                    what = f"{collective}{arguments} of {count} {name}"
                    one(comm, card, collective, arguments, mine, meant, at % 2, what)
                x = card.array(xs[comm.rank])
                comm.allreduce(x, stream=card.stream)
                assert same(card.get(x), sum(x.astype(np.float64) for x in xs)), f"{name} in place"
    card.device.close()


def one(
    comm: Any, card: Card, collective: str, arguments: Any, mine: Any, meant: Any, skip: int,
    what: str,
) -> None:  # fmt: skip
    """One call, which the stream waits for, and one that somebody else waits for."""
    x = card.array(mine, skip)
    size = mine.size if meant is None else meant.size
    for is_async in (False, True):
        out = card.array(np.full(size, 77, mine.dtype), skip)
        result = getattr(comm, collective)(
            x, out, *arguments, stream=card.stream, async_op=is_async
        )
        if is_async:
            result.order(card.stream)
            result = result.wait(TIMEOUT_S)
        assert result is (None if meant is None else out), what
        if meant is not None:
            assert same(card.get(out), meant), what
        assert same(card.get(x), mine), f"{what} changed its input"


def same(found: Any, meant: Any) -> bool:
    return found.tobytes() == meant.astype(found.dtype).tobytes()


def in_order_with_a_stream() -> None:
    """The call comes after what its stream was given before; the host does not wait for that."""
    card, count = Card(), 1 << 20
    with r2ccl.init() as comm:
        xs = [floats_of(rank, count).round(1) for rank in range(comm.nranks)]
        x, out = card.array(np.zeros(count, np.float32)), card.array(np.zeros(count, np.float32))
        comm.allreduce(x, stream=card.stream)  # the first call loads kernels, which may wait
        card.finish()
        source = card.array(xs[comm.rank])
        words = card.device.allocate_pinned(4096).view(np.uint32)
        comm.barrier()
        card.device.wait_word(card.stream, int(words.ctypes.data), 1)
        card.device.copy(x.address, source.address, 4 * count, card.stream)
        assert comm.allreduce(x, stream=card.stream) is x
        card.device.copy(out.address, x.address, 4 * count, card.stream)
        card.device.record(card.event, card.stream)
        assert not card.device.synchronize(card.event, 0.2)
        words[0] = 1
        card.finish()
        meant = sum(each.astype(np.float64) for each in xs)
        assert np.abs(card.get(out) - meant).max() < 1e-5
    card.device.close()


def with_a_rail_cut() -> None:
    """A rail is lost in the middle of a call through the host: not a bit is another."""
    card, count = Card(), 4 << 20
    plan = fail_at(rank=1, rail=0, op=1, step=4)
    with r2ccl.init(faults=plan, ipc="0", algo="ring") as comm:
        results = []
        for _ in range(2):
            x = card.array(floats_of(comm.rank, count))
            comm.allreduce(x, stream=card.stream)
            results.append(card.get(x).tobytes())
        assert results[0] == results[1]
        assert comm.rank != 1 or comm.repairs()
    if comm.rank == 1:
        plan.assert_all_fired()
    card.device.close()


def one_dies(room: str) -> None:
    """Rank 1 dies while the others' calls are under way: they are told, their streams go on."""
    card = Card()
    comm = r2ccl.init(peer_timeout_s=3.0)
    x = card.array(floats_of(comm.rank, 1 << 20))
    comm.allreduce(x, stream=card.stream)
    card.finish()
    if comm.rank == 1:
        while len(os.listdir(room)) < comm.nranks - 1:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [comm.allreduce(x, stream=card.stream, async_op=True) for _ in range(3)]
    for work in works:
        work.order(card.stream)
    Path(room, str(comm.rank)).touch()
    try:
        works[0].wait(TIMEOUT_S)
    except (PeerLost, CommunicatorRevoked) as exc:
        said = str(exc)
    else:
        raise AssertionError("the call was done without rank 1")
    card.finish()
    comm.abort()
    card.device.close()
    print(f"told: {said}")


def of_a_library(name: str) -> None:
    """Arrays of CuPy or torch, on a stream of theirs that is current and not the default one."""
    library, count = importlib.import_module(name), 100_003
    with r2ccl.init() as comm:
        xs = [values_of(rank, count, "float32") for rank in range(comm.nranks)]
        total = sum(xs)
        if name == "cupy":
            with library.cuda.Stream(non_blocking=True):
                x = library.asarray(xs[comm.rank])
                result = library.asnumpy(comm.allreduce(x) * 2)
        else:
            with library.cuda.stream(library.cuda.Stream()):
                x = library.from_numpy(xs[comm.rank]).cuda()
                result = (comm.allreduce(x) * 2).cpu().numpy()
        assert (result == 2 * total).all()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
