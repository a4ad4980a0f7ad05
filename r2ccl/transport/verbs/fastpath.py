"""Polling and posting in compiled code, which holds no GIL and makes no object per request.

What ``ibv_poll_cq``, ``ibv_post_send`` and ``ibv_post_recv`` are in C, calls through the context's
table, Numba compiles here; records that the provider reads are filled in place. Addresses come from
`r2ccl.transport.verbs.layout`, which verified them. Nothing is opened, changed or closed here: that
stays with pyverbs.

Importing this module imports Numba and loads three functions from its cache on disk (0.7 s; the
first time it compiles them, 0.5 s more); so `r2ccl.transport.verbs.device` does it only when they
are to be used. Must not import pyverbs.

CPU time on an EPYC, over a provider that does nothing (`r2ccl.testing.fakeverbs.rates`) and, in
brackets, of pyverbs over the same: a completion 0.14 µs (1.6), an empty poll 0.24 (0.23), a receive
request of a chain of 32 0.02 (0.05), a write 0.5 (0.26). A write has nine arguments to unpack, and
gains only that the provider runs without the GIL.

Invariant: addresses are used while the pyverbs objects they were found behind are open, by one
thread at a time; a compiled function never keeps one.
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

# What a compiled function needs is in one record, of which it gets the address: every argument
# costs 30 ns, an array 150. Numba's cache does not notice a change of `layout`, only one of this
# file; but those structs are an interface that does not change.
_QUEUE = np.dtype([(name, "u8") for name in ("function", "cq", "wcs", "capacity")])
#: A request, its one piece of memory, ``bad_wr``, and whom to call with what.
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
        except RuntimeError as exc:  # Numba found no directory it may write its cache to
            _log.info("compiled %s without a disk cache: %s", function.__name__, exc)
            return njit(signature, nogil=True)(function)

    return compile_now


# Calls by address are intrinsics because a ctypes function is a constant to Numba: what refers to
# one would be compiled again in every process.
def _emit_call(builder: Any, result: Any, address: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _call_poll(_context: Any, function: Any, cq: Any, count: Any, wcs: Any) -> Any:
    """``int poll_cq(struct ibv_cq *, int, struct ibv_wc *)``."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        address, cq, count, wcs = arguments
        return _emit_call(builder, ir.IntType(32), address, [cq, count, wcs])

    # A pointer travels as an integer of its width: the calling conventions treat them alike.
    return types.int32(_U64, _U64, types.int32, _U64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _call_post(_context: Any, function: Any, qp: Any, wr: Any, bad_wr: Any) -> Any:
    """``int post_send(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **)``, or recv."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return _emit_call(builder, ir.IntType(32), arguments[0], list(arguments[1:]))

    return types.int32(_U64, _U64, _U64, _U64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _pointer(_context: Any, address: Any) -> Any:
    """Return what `carray` makes an array of."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(_U64), emit


@register_jitable  # type: ignore[untyped-decorator, unused-ignore]
def _repeats(wcs: Any, count: int, at: int) -> bool:
    """Whether the flush at `at` is of a number and a queue pair of which one is told already."""
    for i in range(count):
        is_same = wcs[i].wr_id == wcs[at].wr_id and wcs[i].qp_num == wcs[at].qp_num
        if is_same and wcs[i].status == _FLUSHED:
            return True
    return False


@_compiled(types.int64(_U64))
def _poll(queue_at: int) -> int:
    """Fill the queue's records; returns how many, or what poll_cq did if that is below 0."""
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
        if taken < room:  # the queue is empty, or failed: the next call learns it
            break
    return kept


@_compiled(types.int32(_U64, _U64, _U64, _U64, _U64, _U64, _U64, _U64, _U64))
def _write(
    send_at: int, wr_id: int, flags: int, imm_data: int, address: int, nbytes: int, lkey: int,
    remote_address: int, rkey: int,
) -> int:  # fmt: skip
    """Refill the request and post it; returns an errno, 0 if the provider took it."""
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
    """Post a chain as it is; returns an errno, 0 if the provider took all of it."""
    return _call_post(function, qp, wr, bad_wr)  # type: ignore[no-any-return]


class Poller:
    """Takes completions of one completion queue.

    Parameters
    ----------
    nic : ProviderNic
    capacity : int
        Completions returned by one call at most.
    """

    def __init__(self, nic: ProviderNic, capacity: int) -> None:
        self._wcs = np.zeros(capacity, WC)
        self._queue = np.array([(nic.poll_cq, nic.cq, self._wcs.ctypes.data, capacity)], _QUEUE)
        self._at = self._queue.ctypes.data

    def poll(self) -> list[tuple[int, int, int, int, int, int]]:
        """Take what has completed, as tuples in the order of `layout.WC`.

        Of flushed requests that have one number and one queue pair only the first is told: the
        receive requests of a queue pair that failed are dozens of those, and say nothing else.

        Raises
        ------
        OSError
            The provider could not.
        """
        count = _poll(self._at)
        if count < 0:  # which number it is means nothing
            raise OSError(errno.EIO, f"poll_cq returned {count}")
        return self._wcs[:count].tolist() if count else []


class Poster:
    """Posts to one queue pair.

    Parameters
    ----------
    nic : ProviderNic
    qp : int
        Address of its ``ibv_qp``.
    nothing : (int, int, int)
        Address, size and key of the memory that receive requests name.
    nreceives : int
        Most receive requests posted at once.
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
        #: A chain that is never changed: its last `n` requests are the chain of `n`.
        self._receives = np.zeros(nreceives, RECV_WR)
        self._receives["sg_list"] = self._nothing.ctypes.data
        self._receives["num_sge"] = 1
        self._end = self._receives.ctypes.data + self._receives.nbytes
        following = self._receives.ctypes.data + RECV_WR.itemsize * np.arange(1, nreceives)
        self._receives["next"][:-1] = following

    def number_receives(self, wr_id: int) -> None:
        """Give the receive requests posted from now on this number; it is 0 at first."""
        self._receives["wr_id"] = wr_id

    def write(
        self, wr_id: int, flags: int, imm_data: int, source: tuple[int, int, int],
        target: tuple[int, int],
    ) -> None:  # fmt: skip
        """Write (address, size, lkey) to (address, rkey), with immediate data in network order.

        Raises
        ------
        OSError
            The provider refused.
        """
        code = _write(self._at, wr_id, flags, imm_data, *source, *target)
        if code:
            raise _failure(code)

    def receive(self, count: int) -> None:
        """Post `count` receive requests.

        Raises
        ------
        OSError
            The provider refused.
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
