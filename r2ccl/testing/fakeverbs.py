"""Fake of an open RDMA device: fake pyverbs objects and the C structs that they point to.

The structs and the function table are in NumPy memory with libibverbs' layout; the caller supplies
the addresses of the functions. `r2ccl.transport.verbs.layout` reads these structs, and
`r2ccl.transport.verbs.fastpath` (the compiled path) calls the functions of the table directly. With
the fake, both can be tested without a device and without pyverbs; `rates` measures the cost of the
compiled path.

Keep a `FakeNic` for as long as the addresses of its structs are used.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.transport.verbs.layout import COMP_CHANNEL, CONTEXT, CQ, PD, QP, ProviderNic

Record = npt.NDArray[Any]

CMD_FD, ASYNC_FD, CHANNEL_FD = 40, 41, 42
_NUM_COMP_VECTORS, _PD_HANDLE, _CQE = 4, 7, 16383
_IN_INIT, _RC = 1, 2


class FakeNic:
    """Fake of an open device context with a protection domain and a completion queue.

    Parameters
    ----------
    poll_cq, post_send, post_recv : int
        Addresses of functions with the signatures of ``struct ibv_context_ops``.
    """

    def __init__(self, poll_cq: int, post_send: int, post_recv: int) -> None:
        #: The C structs by name; tests may overwrite fields to make them invalid.
        self.records = {
            "context": _record(
                CONTEXT, poll_cq=poll_cq, post_send=post_send, post_recv=post_recv,
                cmd_fd=CMD_FD, async_fd=ASYNC_FD, num_comp_vectors=_NUM_COMP_VECTORS,
            )
        }  # fmt: skip
        at = self.address("context")
        self.records["pd"] = _record(PD, context=at, handle=_PD_HANDLE)
        self.records["channel"] = _record(COMP_CHANNEL, context=at, fd=CHANNEL_FD)
        channel = self.address("channel")
        self.records["cq"] = _record(CQ, context=at, channel=channel, cqe=_CQE)
        self.context = _holder(
            self.records["context"], cmd_fd=CMD_FD, num_comp_vectors=_NUM_COMP_VECTORS
        )
        self.pd = _holder(self.records["pd"], handle=_PD_HANDLE)
        self.cq = _holder(self.records["cq"], cqe=_CQE)

    def address(self, name: str) -> int:
        """Return the address of the struct ``records[name]``."""
        return self.records[name].ctypes.data

    def make_qp(self, number: int) -> Any:
        """Return a fake pyverbs queue pair with this number, of type RC and in state INIT.

        Its struct is ``records["qp"]``, which replaces the struct of the previous queue pair.
        """
        cq = self.address("cq")
        self.records["qp"] = _record(
            QP, context=self.address("context"), pd=self.address("pd"), send_cq=cq, recv_cq=cq,
            qp_num=number, state=_IN_INIT, qp_type=_RC,
        )  # fmt: skip
        return _holder(self.records["qp"], qp_num=number, qp_state=_IN_INIT, qp_type=_RC)

    def located(self) -> ProviderNic:
        """Return the `ProviderNic` that ``layout.locate_nic`` must find; ``provider`` is empty."""
        table = self.records["context"][0]
        return ProviderNic(
            context=self.address("context"), pd=self.address("pd"), cq=self.address("cq"),
            poll_cq=int(table["poll_cq"]), post_send=int(table["post_send"]),
            post_recv=int(table["post_recv"]), provider="",
        )  # fmt: skip


class ProviderRates(msgspec.Struct, frozen=True):
    """CPU seconds of the operations of the compiled path, without the provider's own time.

    Attributes
    ----------
    empty_poll_s : float
        CPU seconds of a poll that finds no completion.
    completion_s : float
        CPU seconds per completion in a poll that fills its batch, including the construction of the
        completion's tuple.
    write_s : float
        CPU seconds to post an RDMA write.
    receive_s : float
        CPU seconds per receive request, if one call posts several.
    """

    empty_poll_s: float
    completion_s: float
    write_s: float
    receive_s: float


def rates(batch: int = 256, chain: int = 32, seconds: float = 0.2) -> ProviderRates:
    """Measure the CPU time of the compiled path with provider functions that do almost nothing.

    Parameters
    ----------
    batch : int
        Number of completions that a non-empty poll returns.
    chain : int
        Number of receive requests posted by one call.
    seconds : float
        Shortest CPU time of each of the four measurements.

    Raises
    ------
    ImportError
        If numba is not installed.
    """
    from numba import cfunc, types

    from r2ccl.transport.verbs.fastpath import Poller, Poster

    word = types.uint64
    compiled = cfunc(types.int32(word, types.int32, word))
    idle, busy = compiled(lambda cq, count, wcs: 0), compiled(lambda cq, count, wcs: count)
    accept = cfunc(types.int32(word, word, word))(lambda qp, wr, bad_wr: 0)
    quiet, full = (FakeNic(each.address, accept.address, accept.address) for each in (idle, busy))
    quiet.make_qp(1)
    poster = Poster(quiet.located(), quiet.address("qp"), (0, 0, 0), chain)
    source, target = (1 << 46, 1 << 20, 7), (1 << 45, 8)
    return ProviderRates(
        empty_poll_s=_time_of(Poller(quiet.located(), batch).poll, seconds),
        completion_s=_time_of(Poller(full.located(), batch).poll, seconds) / batch,
        write_s=_time_of(lambda: poster.write(1 << 54, 2, 3, source, target), seconds),
        receive_s=_time_of(lambda: poster.receive(chain), seconds) / chain,
    )


def _time_of(call: Callable[[], Any], seconds: float) -> float:
    """Return the mean CPU seconds of one call, measured for at least `seconds`."""
    call()
    ncalls, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        for _ in range(1000):
            call()
        ncalls += 1000
    return spent / ncalls


def _record(layout: np.dtype[Any], **values: int) -> Record:
    made = np.zeros(1, layout)
    for name, value in values.items():
        made[name] = value
    return made


def _holder(record: Record, **shown: int) -> Any:
    """Return a ctypes object over the memory of `record` with the pyverbs attributes `shown`."""
    kind = type("Holder", (ctypes.c_char * record.nbytes,), shown)
    return kind.from_buffer(record.view(np.uint8).data)  # type: ignore[attr-defined]


__all__ = ["ASYNC_FD", "CHANNEL_FD", "CMD_FD", "FakeNic", "ProviderRates", "rates"]
