"""Finds out whether the ranks of each node can access each other's GPU memory by CUDA IPC.

Every rank exports its area (`r2ccl.gpu.peer_memory`), maps the areas of the other ranks of its
node, and opens the memory of the node's `IpcBoard`. Then kernels of each rank write a pattern to
the area of every other rank, and the owner of the area verifies the pattern. On some machines, for
example with PCIe peer access behind an IOMMU, mapping succeeds but data is lost. If one rank fails,
no rank uses `PeerBackend`.

Invariant: unless a device fails, either all ranks get the memory of their node, or none does.
"""

from __future__ import annotations

import logging
import secrets
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.device.base import Device, Event, Stream
from r2ccl.dtypes import CODES
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.gpu.ipc_board import RANK_NBYTES, IpcBoard, SharedFile, load_fence
from r2ccl.gpu.peer import PeerKernels
from r2ccl.gpu.peer_memory import PeerMemory
from r2ccl.types import AllgatherBytes, CallSignature, Collective

_log = logging.getLogger(__name__)

_OFFER = struct.Struct("<?64s16sQ")
#: Number of 64-bit integers in a pattern.
_NWORDS = 32
_PATTERN_NBYTES = 8 * _NWORDS
#: Multiplier that spreads the bits of a counter (2**64 divided by the golden ratio).
_SPREAD = 0x9E3779B97F4A7C15
#: Signature of the kernel that copies a pattern.
_COPY = CallSignature(Collective.ALLGATHER, CODES[np.dtype(np.int64)], 0, _NWORDS)
#: Time limit for the kernels that write patterns, and for the copy of the patterns to the host, in
#: seconds.
_TIMEOUT_S = 20.0


class _Attempt(msgspec.Struct):
    """State of this rank's attempt to use CUDA IPC.

    ``members`` are the ranks of the node, ``at`` is the index of this rank in ``members``, and
    ``areas`` has the address of each member's area in this process, 0 while it is not mapped.
    ``is_stuck`` is True if work on the GPU did not end in time, so that it may still use the areas.
    """

    device: Device
    kernels: PeerKernels
    members: tuple[int, ...]
    at: int
    areas: list[int]
    allgather: AllgatherBytes
    is_stuck: bool = False


def connect_peers(
    device: Device,
    kernels: PeerKernels,
    rank: int,
    nodes: Sequence[Sequence[int]],
    allgather: AllgatherBytes,
    area_nbytes: int,
) -> PeerMemory | str:
    """Try CUDA IPC within every node, on all ranks; return the memory of this rank's node.

    Parameters
    ----------
    device : Device
    kernels : PeerKernels
    rank : int
    nodes : sequence of sequence of int
        Ranks of each node.
    allgather : callable
        See `AllgatherBytes`.
    area_nbytes : int
        Size in bytes of each half of an area.

    Returns
    -------
    PeerMemory or str
        The memory of this rank's node. If CUDA IPC cannot be used, all ranks get the reason as a
        text instead.

    Raises
    ------
    TransportError
        If the device failed or its memory is full; the communicator must end, because the other
        ranks may wait for this one.
    R2cclError
        If `allgather` raises it.

    Notes
    -----
    *Collective*: all ranks. *Cost*: up to four small allgathers, and some milliseconds.
    """
    members = next(tuple(node) for node in nodes if rank in node)
    at = members.index(rank)
    own = device.allocate(2 * max(area_nbytes, len(members) * _PATTERN_NBYTES))
    attempt = _Attempt(device, kernels, members, at, [0] * len(members), allgather)
    attempt.areas[at] = own
    why, board = _offer(attempt)
    if board is not None:
        return PeerMemory(device, rank, board, attempt.areas, area_nbytes)
    _release(attempt)
    return why


def _release(attempt: _Attempt) -> None:
    """Unmap the areas of the other ranks, and free the area of this rank.

    Areas that a GPU may still use stay mapped and allocated, because unmapping and freeing them
    would wait for the GPU without a time limit.
    """
    device, members, at = attempt.device, attempt.members, attempt.at
    for peer, address in enumerate(attempt.areas):
        if address and peer != at and not attempt.is_stuck:
            device.unmap(address)
    # Also a barrier: no rank frees its area before all ranks have unmapped it.
    answers = attempt.allgather(bytes([attempt.is_stuck]))
    stuck = [rank for rank in members if answers[rank][0]]
    if stuck:
        _log.error(
            "rank %d: GPU work of ranks %s did not end, so the memory for CUDA IPC was not freed; "
            "end the process to free it", members[at], stuck,
        )  # fmt: skip
        return
    device.free(attempt.areas[at])


def _offer(attempt: _Attempt) -> tuple[str, IpcBoard | None]:
    """Export this rank's area, then call `_agree`; the node's first rank also creates the file.

    The file is the shared memory of the board. Its name is removed before this function returns.
    Return an empty string and the board. If a rank failed, return a reason and None on all ranks.
    """
    device, members, at = attempt.device, attempt.members, attempt.at
    why, file, name, token = "", None, b"", secrets.randbits(64)
    fence = None
    offer = _OFFER.pack(False, b"", b"", token)
    try:
        fence = load_fence()
        handle, _ = device.export(attempt.areas[at])
        if at == 0:
            file, name = SharedFile.create(len(members) * RANK_NBYTES)
        offer = _OFFER.pack(True, handle, name, token)
    except TransportError as exc:
        why = str(exc)
    try:
        why, file = _agree(attempt, offer, file, why)
    finally:
        if name:
            SharedFile.forget(name)
    if file is None:
        return why, None
    assert fence is not None
    return "", IpcBoard(file.memory, at, len(members), fence)


def _agree(
    attempt: _Attempt, offer: bytes, file: SharedFile | None, why: str
) -> tuple[str, SharedFile | None]:
    """Map the areas of the node's ranks, and verify that data arrives in them.

    Return an empty string and the file. If a rank failed, return a reason and None on all ranks.
    """
    members, at = attempt.members, attempt.at
    offers = [_OFFER.unpack(each) for each in attempt.allgather(offer)]
    if not all(is_able for is_able, *_ in offers):
        first = [each[0] for each in offers].index(False)
        return why or f"rank {first} cannot use CUDA IPC; see its error or INFO log", None
    tokens = [offers[rank][3] for rank in members]
    try:
        for peer, rank in enumerate(members):
            if peer != at:
                attempt.areas[peer] = attempt.device.map(offers[rank][1])
        if at != 0:
            file = SharedFile.open(offers[members[0]][2], len(members) * RANK_NBYTES)
        _write_patterns(attempt, tokens)
    except (TransportError, InvalidArgument) as exc:  # the GPU may be too old for the kernel
        why = str(exc)
    refusing = _refusing(attempt, why)
    if not refusing:
        why = _verify_patterns(attempt, tokens[at])
        refusing = _refusing(attempt, why)
    if refusing:
        return why or f"rank {refusing[0]} cannot use CUDA IPC; see its error or INFO log", None
    return "", file


def _refusing(attempt: _Attempt, why: str) -> list[int]:
    """Tell all ranks whether this rank can use CUDA IPC; return the ranks that cannot.

    `why` is the reason why this rank cannot, which is logged; empty if it can. All ranks must call
    this function.
    """
    if why:
        _log.info("rank %d: no CUDA IPC: %s", attempt.members[attempt.at], why)
    answers = attempt.allgather(bytes([not why]))
    return [rank for rank, answer in enumerate(answers) if not answer[0]]


def _write_patterns(attempt: _Attempt, tokens: Sequence[int]) -> None:
    """Write this rank's patterns to the areas of the other ranks, with a kernel for each.

    Raises
    ------
    TransportError
        If the device failed, or the kernels did not end in time.
    InvalidArgument
        If the GPU is too old for the kernel.
    """
    device, kernels, nranks = attempt.device, attempt.kernels, len(attempt.members)
    kernels.prepare_from_table(_COPY, 1, 1)
    stream, done = device.make_stream(), device.make_event()
    pinned = device.allocate_pinned(nranks * (_PATTERN_NBYTES + 16))
    patterns = pinned[: nranks * _PATTERN_NBYTES].view(np.uint64).reshape(nranks, _NWORDS)
    tables = pinned[nranks * _PATTERN_NBYTES :].view(np.uint64).reshape(nranks, 2)
    for peer in range(nranks):
        if peer != attempt.at:
            patterns[peer] = _pattern(tokens[peer], attempt.at)
            target = attempt.areas[peer] + attempt.at * _PATTERN_NBYTES
            tables[peer] = patterns[peer].ctypes.data, target
            table = int(tables[peer].ctypes.data)
            kernels.launch_from_table(_COPY, 1, 1, table, _NWORDS, 1, stream)
    if not _has_ended(attempt, done, stream):
        raise TransportError(
            f"a kernel did not write to the GPU memory of the other ranks of its host within "
            f"{_TIMEOUT_S:g} s; run `r2ccl doctor`",
            status="TIMEOUT",
        )
    device.destroy_event(done)
    device.destroy_stream(stream)
    device.free_pinned(pinned)


def _verify_patterns(attempt: _Attempt, token: int) -> str:
    """Return an error text if a pattern in this rank's area is wrong or unreadable; else ``""``."""
    device, nbytes = attempt.device, len(attempt.members) * _PATTERN_NBYTES
    stream, done = device.make_stream(), device.make_event()
    pinned = device.allocate_pinned(nbytes)
    device.copy(int(pinned.ctypes.data), attempt.areas[attempt.at], nbytes, stream)
    if not _has_ended(attempt, done, stream):
        return f"a copy of {nbytes} bytes did not end within {_TIMEOUT_S:g} s"
    found = pinned.view(np.uint64).reshape(-1, _NWORDS)
    wrong = [
        rank
        for peer, rank in enumerate(attempt.members)
        if peer != attempt.at and (found[peer] != _pattern(token, peer)).any()
    ]
    device.destroy_event(done)
    device.destroy_stream(stream)
    device.free_pinned(pinned)
    if not wrong:
        return ""
    return (
        f"the data that GPU kernels of rank {wrong[0]} wrote to the memory of rank "
        f"{attempt.members[attempt.at]} did not arrive; an IOMMU or PCIe access control (ACS) may "
        "corrupt access between GPUs: run `nvidia-smi topo -p2p w`"
    )


def _has_ended(attempt: _Attempt, done: Event, stream: Stream) -> bool:
    """Wait for the work on `stream`; return whether it ended in time, and set `is_stuck` if not."""
    attempt.device.record(done, stream)
    attempt.is_stuck = not attempt.device.synchronize(done, _TIMEOUT_S)
    return not attempt.is_stuck


def _pattern(token: int, writer: int) -> npt.NDArray[Any]:
    """Return the pattern that member `writer` writes to the rank that chose the random `token`."""
    spread = np.uint64(_SPREAD)
    return (np.arange(_NWORDS, dtype=np.uint64) * np.uint64(8) + np.uint64(writer)) * spread ^ (
        np.uint64(token)
    )


__all__ = ["connect_peers"]
