"""Polling and posting by compiled code, which releases the GIL and makes no pyverbs objects.

In C, ``ibv_poll_cq``, ``ibv_post_send`` and ``ibv_post_recv`` are inline functions that call
through the function table of the context. Numba compiles the same calls here, together with code
that fills in the records that the provider reads. `r2ccl.transport.verbs.layout` found and verified
the addresses. pyverbs still opens, modifies and closes all objects.

Importing this module imports Numba and loads three functions from its cache on disk (0.7 s; 0.5 s
more when they are compiled for the first time), so `r2ccl.transport.verbs.device` imports it only
when it uses them.

CPU time in µs on an EPYC, with a provider that does nothing (`r2ccl.testing.fakeverbs.rates`);
pyverbs in parentheses: a completion 0.14 (1.6), an empty poll 0.24 (0.23), a receive request 0.02
(0.05) in a chain of 32, a write 0.5 (0.26). A write is slower, because Numba unpacks nine
arguments, but the provider then runs without the GIL.

Invariant: addresses are used only while the pyverbs objects that hold the structs are open, and by
one thread at a time; compiled functions do not keep addresses between calls.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import carray, njit, types
from numba.extending import intrinsic, register_jitable

from r2ccl.transport.verbs.layout import RECV_WR, SEND_WR, SGE, WC, ProviderNic

_log = logging.getLogger(__name__)

#: ``IBV_WC_WR_FLUSH_ERR`` and ``IBV_WR_RDMA_WRITE_WITH_IMM`` of verbs.h.
_FLUSHED = 5
_WRITE_WITH_IMM = 1

# Values that stay the same are in one record, whose address a compiled function gets: each integer
# argument of a call costs 30 ns, an array 150 ns. Numba's cache notices changes of this file only,
# not of `layout`; that is safe because the structs in `layout` are libibverbs' stable ABI.
_QUEUE = np.dtype([(name, "u8") for name in ("function", "cq", "wcs", "capacity")])
#: A send request, its scatter-gather entry, ``bad_wr``, the function that posts the request, and
#: the queue pair to post it to.
_SEND = np.dtype(
    [("wr", SEND_WR), ("sge", SGE), ("bad_wr", "u8"), ("function", "u8"), ("qp", "u8")]
)
_SGE_OFFSET, _BAD_OFFSET = SEND_WR.itemsize, SEND_WR.itemsize + SGE.itemsize
_WC_NBYTES = WC.itemsize

_U64 = types.uint64


def _compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except RuntimeError as exc:  # Numba found no writable directory for its cache
            _log.info("compiled %s without a disk cache: %s", function.__name__, exc)
            return njit(signature, nogil=True)(function)

    return compile_now


# Calls by address are intrinsics. A ctypes function would be a constant to Numba, and code that
# refers to one cannot be cached: it would be compiled again in every process.
def _emit_call(builder: Any, result: Any, address: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _call_poll(_context: Any, function: Any, cq: Any, count: Any, wcs: Any) -> Any:
    """Call ``int poll_cq(struct ibv_cq *, int, struct ibv_wc *)`` at address `function`."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        address, cq, count, wcs = arguments
        return _emit_call(builder, ir.IntType(32), address, [cq, count, wcs])

    # Pointers are passed as integers of their width: the calling conventions treat both alike.
    return types.int32(_U64, _U64, types.int32, _U64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _call_post(_context: Any, function: Any, qp: Any, wr: Any, bad_wr: Any) -> Any:
    """Call the function at address `function`: ``post_send`` or ``post_recv``.

    Its type is ``int (struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **)``, or the same
    with ``struct ibv_recv_wr``.
    """

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return _emit_call(builder, ir.IntType(32), arguments[0], list(arguments[1:]))

    return types.int32(_U64, _U64, _U64, _U64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _pointer(_context: Any, address: Any) -> Any:
    """Return an address as a pointer, for `carray`."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(_U64), emit


@register_jitable  # type: ignore[untyped-decorator, unused-ignore]
def _repeats(wcs: Any, count: int, at: int) -> bool:
    """Return True if entry `at` repeats a flushed request among the first `count` entries.

    A repetition has the same wr_id and queue pair number.
    """
    for i in range(count):
        is_same = wcs[i].wr_id == wcs[at].wr_id and wcs[i].qp_num == wcs[at].qp_num
        if is_same and wcs[i].status == _FLUSHED:
            return True
    return False


@_compiled(types.int64(_U64))
def _poll(queue_at: int) -> int:
    """Poll completions into the records of the `_QUEUE` at address `queue_at`; return their number.

    If the first call of poll_cq returns an error, which is a negative number, return the error.
    """
    queue = carray(_pointer(queue_at), (1,), _QUEUE)[0]
    wcs = carray(_pointer(queue.wcs), (queue.capacity,), WC)
    kept = 0
    while kept < wcs.size:
        room = wcs.size - kept
        taken = _call_poll(queue.function, queue.cq, room, queue.wcs + kept * _WC_NBYTES)
        if taken < 0 and kept == 0:
            return taken  # type: ignore[no-any-return]
        for i in range(kept, kept + taken):
            if wcs[i].status != _FLUSHED or not _repeats(wcs, kept, i):
                wcs[kept] = wcs[i]
                kept += 1
        if taken < room:  # the queue is empty, or failed: the next call finds out
            break
    return kept


@_compiled(types.int32(_U64, _U64, _U64, _U64, _U64, _U64, _U64, _U64, _U64))
def _write(
    send_at: int, wr_id: int, flags: int, imm_data: int, address: int, nbytes: int, lkey: int,
    remote_address: int, rkey: int,
) -> int:  # fmt: skip
    """Fill in and post the `_SEND` record at `send_at`; return an errno, 0 if it was accepted."""
    send = carray(_pointer(send_at), (1,), _SEND)[0]
    send.wr.wr_id = wr_id
    send.wr.send_flags = flags
    send.wr.imm_data = imm_data
    send.wr.remote_addr = remote_address
    send.wr.rkey = rkey
    send.sge.addr = address
    send.sge.length = nbytes
    send.sge.lkey = lkey
    return _call_post(  # type: ignore[no-any-return]
        send.function, send.qp, send_at, send_at + _BAD_OFFSET
    )


@_compiled(types.int32(_U64, _U64, _U64, _U64))
def _post(function: int, qp: int, wr: int, bad_wr: int) -> int:
    """Post the chain of receive requests at `wr`; return an errno, 0 if all were accepted."""
    return _call_post(function, qp, wr, bad_wr)  # type: ignore[no-any-return]


class Poller:
    """Poller of one completion queue, in compiled code.

    Parameters
    ----------
    nic : ProviderNic
    capacity : int
        Maximum number of completions that one call of `poll` returns.
    """

    def __init__(self, nic: ProviderNic, capacity: int) -> None:
        self._wcs = np.zeros(capacity, WC)
        self._queue = np.array([(nic.poll_cq, nic.cq, self._wcs.ctypes.data, capacity)], _QUEUE)
        self._at = self._queue.ctypes.data

    def poll(self) -> list[tuple[int, int, int, int, int, int]]:
        """Take completions from the queue, as tuples with the fields of `layout.WC` in order.

        If several flushed requests have the same wr_id and queue pair, a call returns only the
        first: a queue pair that failed flushes dozens of receive requests, which are all alike.

        Raises
        ------
        OSError
            If the provider cannot poll the queue.
        """
        count = _poll(self._at)
        if count < 0:  # verbs defines no meaning of the value
            raise OSError(errno.EIO, f"poll_cq returned {count}")
        return self._wcs[:count].tolist() if count else []


class Poster:
    """Poster of requests to one queue pair, in compiled code.

    Parameters
    ----------
    nic : ProviderNic
    qp : int
        Address of the queue pair's ``ibv_qp``.
    nothing : (int, int, int)
        Address, size in bytes and lkey of the scatter-gather entry of all receive requests. They
        receive no data, so the size is 0.
    nreceives : int
        Maximum number of receive requests that one call of post_recv posts as a chain.
    """

    def __init__(
        self, nic: ProviderNic, qp: int, nothing: tuple[int, int, int], nreceives: int
    ) -> None:
        self._nic = nic
        self._qp = qp
        self._send = np.zeros(1, _SEND)
        self._at = self._send.ctypes.data
        self._bad_wr = self._at + _BAD_OFFSET
        send = self._send[0]
        send["wr"]["sg_list"] = self._at + _SGE_OFFSET
        send["wr"]["num_sge"] = 1
        send["wr"]["opcode"] = _WRITE_WITH_IMM
        send["function"], send["qp"] = nic.post_send, qp
        self._nothing = np.array([nothing], SGE)
        #: The `next` pointers never change: the last `n` requests are always a chain of `n`.
        self._receives = np.zeros(nreceives, RECV_WR)
        self._receives["sg_list"] = self._nothing.ctypes.data
        self._receives["num_sge"] = 1
        self._end = self._receives.ctypes.data + self._receives.nbytes
        following = self._receives.ctypes.data + RECV_WR.itemsize * np.arange(1, nreceives)
        self._receives["next"][:-1] = following

    def number_receives(self, wr_id: int) -> None:
        """Set the wr_id of all receive requests posted from now on; the initial value is 0."""
        self._receives["wr_id"] = wr_id

    def write(
        self, wr_id: int, flags: int, imm_data: int, source: tuple[int, int, int],
        target: tuple[int, int],
    ) -> None:  # fmt: skip
        """Post an RDMA write with immediate data.

        Parameters
        ----------
        wr_id : int
        flags : int
            ``ibv_send_flags``.
        imm_data : int
            In network byte order.
        source : (int, int, int)
            Address, size in bytes and lkey of the local memory.
        target : (int, int)
            Address and rkey of the remote memory.

        Raises
        ------
        OSError
            If the provider refuses.
        """
        code = _write(self._at, wr_id, flags, imm_data, *source, *target)
        if code:
            raise _failure(code)

    def receive(self, count: int) -> None:
        """Post `count` receive requests.

        Raises
        ------
        OSError
            If the provider refuses.
        """
        while count > 0:
            chained = min(count, len(self._receives))
            first = self._end - chained * RECV_WR.itemsize
            code = _post(self._nic.post_recv, self._qp, first, self._bad_wr)
            if code:
                raise _failure(code)
            count -= chained


def _failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


__all__ = ["Poller", "Poster"]
