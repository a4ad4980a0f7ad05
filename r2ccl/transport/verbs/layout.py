"""Layout of libibverbs' structs, and how to find their addresses in the objects of pyverbs.

The compiled code (`r2ccl.transport.verbs.fastpath`) calls the functions of a context's table
directly, as the inline functions of ``<infiniband/verbs.h>`` do. It needs pointers to libibverbs'
structs, which pyverbs does not expose. So this module reads the machine words of a pyverbs object,
takes each as a pointer, and looks for the one struct whose fields have the values known from
elsewhere (descriptors, handles, numbers). If a value differs, the compiled code is not used.

Invariant: memory is read through ``/proc/self/mem``, which returns an error for an unmapped
address, whereas following a pointer to such an address would crash the process.

References
----------
rdma-core, libibverbs/verbs.h: part of the ABI since 1.1, so offsets do not change. Fields after the
first ``pthread_mutex_t`` of a struct are not used, because its size depends on the platform.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r2ccl.errors import TransportError

Fields = dict[str, int]


def _layout(nbytes: int, **fields: tuple[int, str]) -> np.dtype[Any]:
    """Return the dtype of a record of `nbytes` bytes with fields given as name=(offset, format)."""
    return np.dtype(
        {
            "names": list(fields),
            "offsets": [offset for offset, _ in fields.values()],
            "formats": [form for _, form in fields.values()],
            "itemsize": nbytes,
        }
    )


#: ``struct ibv_context``; the functions are fields of its member ``ops``, which begins at offset 8.
CONTEXT = _layout(
    280, poll_cq=(96, "u8"), post_send=(208, "u8"), post_recv=(216, "u8"),
    cmd_fd=(264, "i4"), async_fd=(268, "i4"), num_comp_vectors=(272, "i4"),
)  # fmt: skip
PD = _layout(16, context=(0, "u8"), handle=(8, "u4"))
COMP_CHANNEL = _layout(16, context=(0, "u8"), fd=(8, "i4"))
CQ = _layout(32, context=(0, "u8"), channel=(8, "u8"), cqe=(28, "i4"))
QP = _layout(
    64, context=(0, "u8"), pd=(16, "u8"), send_cq=(24, "u8"), recv_cq=(32, "u8"),
    qp_num=(52, "u4"), state=(56, "u4"), qp_type=(60, "u4"),
)  # fmt: skip
#: ``struct ibv_wc``: the fields of `r2ccl.transport.verbs.device.Completion`, in that order.
WC = _layout(
    48, wr_id=(0, "u8"), status=(8, "u4"), opcode=(12, "u4"), vendor_err=(16, "u4"),
    imm_data=(24, "u4"), qp_num=(28, "u4"),
)  # fmt: skip
SGE = _layout(16, addr=(0, "u8"), length=(8, "u4"), lkey=(12, "u4"))
#: ``struct ibv_send_wr``, with the member of its union that RDMA writes use.
SEND_WR = _layout(
    128, wr_id=(0, "u8"), next=(8, "u8"), sg_list=(16, "u8"), num_sge=(24, "i4"),
    opcode=(28, "u4"), send_flags=(32, "u4"), imm_data=(36, "u4"), remote_addr=(40, "u8"),
    rkey=(48, "u4"),
)  # fmt: skip
RECV_WR = _layout(32, wr_id=(0, "u8"), next=(8, "u8"), sg_list=(16, "u8"), num_sge=(24, "i4"))

_WORD = struct.Struct("N")


class ProviderNic(msgspec.Struct, frozen=True):
    """Addresses of the libibverbs structs and provider functions of an open device.

    ``provider`` is the path of the shared library that contains the functions; empty if their code
    is not mapped from a file.
    """

    context: int
    pd: int
    cq: int
    poll_cq: int
    post_send: int
    post_recv: int
    provider: str

    @property
    def is_software(self) -> bool:
        """True if the kernel emulates the NIC: Soft-RoCE or Soft-iWARP.

        Posting a send to such a NIC is usually a system call.
        """
        return Path(self.provider).name.startswith(("librxe", "libsiw"))


def locate_nic(context: Any, pd: Any, cq: Any, *, async_fd: int, channel_fd: int) -> ProviderNic:
    """Return the addresses of the libibverbs structs of three pyverbs objects.

    Parameters
    ----------
    context, pd, cq : pyverbs Context, PD, CQ
        Open; `pd` and `cq` belong to `context`.
    async_fd, channel_fd : int
        Descriptors of the context's async events and of the completion queue's channel.

    Raises
    ------
    TransportError
        If a struct is not as expected (status ``LAYOUT``); the message names the difference.
    """
    with _own_memory() as memory:
        context_at, table = memory.behind(
            context, "ibv_context", CONTEXT, cmd_fd=context.cmd_fd, async_fd=async_fd
        )
        _check("ibv_context", table, num_comp_vectors=context.num_comp_vectors)
        pd_at, found = memory.behind(pd, "ibv_pd", PD, context=context_at)
        _check("ibv_pd", found, handle=pd.handle)
        cq_at, found = memory.behind(cq, "ibv_cq", CQ, context=context_at)
        _check("ibv_cq", found, cqe=cq.cqe)
        channel = memory.read(found["channel"], COMP_CHANNEL)
        if channel is None:
            raise _mismatch(f"ibv_cq's channel is at {found['channel']:#x}, which is not mapped")
        _check("ibv_comp_channel", channel, context=context_at, fd=channel_fd)
        functions = {name: table[name] for name in ("poll_cq", "post_send", "post_recv")}
        files = {_file_of_code(name, address) for name, address in functions.items()}
    if len(files) != 1:
        raise _mismatch(f"the functions of one table are in several files: {sorted(files)}")
    return ProviderNic(context=context_at, pd=pd_at, cq=cq_at, provider=files.pop(), **functions)


def locate_qp(nic: ProviderNic, qp: Any) -> int:
    """Return the address of the ``ibv_qp`` of a new pyverbs queue pair.

    Raises
    ------
    TransportError
        If the struct is not as expected (status ``LAYOUT``); the message names the difference.
    """
    with _own_memory() as memory:
        address, found = memory.behind(qp, "ibv_qp", QP, context=nic.context)
        _check(
            "ibv_qp", found, pd=nic.pd, send_cq=nic.cq, recv_cq=nic.cq,
            qp_num=qp.qp_num, state=int(qp.qp_state), qp_type=int(qp.qp_type),
        )  # fmt: skip
    return address


class _OwnMemory:
    """Memory of this process, read through ``/proc/self/mem``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, address: int, layout: np.dtype[Any]) -> Fields | None:
        """Return the fields of the record at `address`.

        Return None if `address` is not aligned to 8 bytes, or the record cannot be read completely.
        """
        data = self._bytes(address, layout.itemsize)
        if data is None:
            return None
        record = np.frombuffer(data, layout)[0]
        return {name: int(record[name]) for name in layout.names or ()}

    def behind(
        self, holder: Any, what: str, layout: np.dtype[Any], **known: int
    ) -> tuple[int, Fields]:
        """Return the address and the fields of the struct that `holder` points to.

        Parameters
        ----------
        holder : object
            Object of pyverbs.
        what : str
            Name of the struct, for the message.
        layout : numpy.dtype
            Layout of the struct.
        **known : int
            Expected values of some fields, which distinguish the struct from others.

        Raises
        ------
        TransportError
            If no pointer, or more than one, leads to a struct with these values.
        """
        data = self._bytes(id(holder), type(holder).__basicsize__) or b""
        words = {word for (word,) in _WORD.iter_unpack(data[: len(data) // 8 * 8])}
        read = {word: self.read(word, layout) for word in words}
        matching = [
            (word, found)
            for word, found in read.items()
            if found is not None and found.items() >= known.items()
        ]
        if len(matching) != 1:
            raise _mismatch(
                f"a pyverbs {type(holder).__name__} has {len(matching)} pointers, not 1, to a "
                f"{what} with {known}"
            )
        return matching[0]

    def _bytes(self, address: int, nbytes: int) -> bytes | None:
        if not 0 < address < 1 << 63 or address % 8:  # file offsets are signed
            return None
        try:
            data = os.pread(self._fd, nbytes, address)
        except OSError:
            return None  # not mapped
        return data if len(data) == nbytes else None


@contextmanager
def _own_memory() -> Iterator[_OwnMemory]:
    """Open ``/proc/self/mem``; raise TransportError instead of an OSError or AttributeError."""
    if _WORD.size != 8:
        raise _mismatch(f"pointers have {_WORD.size} bytes, not 8")
    try:
        fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _OwnMemory(fd)
        finally:
            os.close(fd)
    except (OSError, AttributeError) as exc:  # no /proc, or pyverbs lacks an attribute
        raise _mismatch(str(exc)) from exc


def _check(what: str, found: Fields, **expected: int) -> None:
    for name, value in expected.items():
        if found[name] != value:
            raise _mismatch(f"{what} has {name} {found[name]}, not {value}")


def _file_of_code(name: str, address: int) -> str:
    """Return the path of the file that the code at `address` is mapped from; empty if none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, _, *path = line.split(maxsplit=5)
        start, end = (int(each, 16) for each in span.split("-"))
        if start <= address < end and "x" in permissions:
            return path[0] if path else ""
    raise _mismatch(f"{name} at {address:#x} is not code")


def _mismatch(reason: str) -> TransportError:
    return TransportError(f"libibverbs is not as expected: {reason}", status="LAYOUT")


__all__ = [
    "COMP_CHANNEL",
    "CONTEXT",
    "CQ",
    "PD",
    "QP",
    "RECV_WR",
    "SEND_WR",
    "SGE",
    "WC",
    "ProviderNic",
    "locate_nic",
    "locate_qp",
]
