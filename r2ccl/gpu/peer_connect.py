"""Finds out whether the ranks of each node can access each other's GPU memory by CUDA IPC.

Every rank exports an allocation, maps those of the other ranks of its node, and opens the memory of
the node's `IpcBoard`. If one rank fails, no rank uses `PeerBackend`.

Invariant: either all ranks get the board of their node, or none does.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

from r2ccl.device.base import Device
from r2ccl.errors import TransportError
from r2ccl.gpu.ipc_board import RANK_NBYTES, IpcBoard, SharedFile
from r2ccl.types import AllgatherBytes

_log = logging.getLogger(__name__)

_OFFER = struct.Struct("<?64s16s")
_PROBE_NBYTES = 256


def connect_peers(
    device: Device, rank: int, nodes: Sequence[Sequence[int]], allgather: AllgatherBytes
) -> IpcBoard | str:
    """Try CUDA IPC within every node, on all ranks; return the board of this rank's node.

    Parameters
    ----------
    device : Device
    rank : int
    nodes : sequence of sequence of int
        Ranks of each node.
    allgather : callable
        See `AllgatherBytes`.

    Returns
    -------
    IpcBoard or str
        The board of this rank's node; or, on all ranks, the reason why CUDA IPC cannot be used.

    Raises
    ------
    TransportError
        If the device failed or its memory is full; the communicator must end, because the other
        ranks may wait for this one.

    Notes
    -----
    *Collective*: all ranks. *Cost*: three small allgathers.
    """
    members = next(tuple(node) for node in nodes if rank in node)
    probe = device.allocate(_PROBE_NBYTES)
    try:
        why, file = _offer(device, rank, members, probe, allgather)
    finally:
        device.free(probe)
    if file is None:
        return why
    return IpcBoard(file.memory, members.index(rank), len(members))


def _offer(
    device: Device, rank: int, members: Sequence[int], probe: int, allgather: AllgatherBytes
) -> tuple[str, SharedFile | None]:
    why, offer, file, name = "", _OFFER.pack(False, b"", b""), None, b""
    try:
        handle, _ = device.export(probe)
        if rank == members[0]:
            file, name = SharedFile.create(len(members) * RANK_NBYTES)
        offer = _OFFER.pack(True, handle, name)
    except TransportError as exc:
        why = str(exc)
    try:
        return _agree(device, rank, members, offer, file, why, allgather)
    finally:
        if name:
            SharedFile.forget(name)


def _agree(
    device: Device, rank: int, members: Sequence[int], offer: bytes, file: SharedFile | None,
    why: str, allgather: AllgatherBytes,
) -> tuple[str, SharedFile | None]:  # fmt: skip
    offers = [_OFFER.unpack(each) for each in allgather(offer)]
    if all(is_able for is_able, _, _ in offers):
        try:
            # A test: the mappings are not kept.
            for peer in members:
                if peer != rank:
                    device.unmap(device.map(offers[peer][1]))
            if rank != members[0]:
                file = SharedFile.open(offers[members[0]][2], len(members) * RANK_NBYTES)
        except TransportError as exc:
            why = str(exc)
    elif not why:
        why = f"rank {[is_able for is_able, _, _ in offers].index(False)} cannot; see its log"
    answers = allgather(bytes([not why]))
    # Barrier: no rank frees its allocation before all ranks have unmapped it.
    allgather(b"\0")
    if all(answer[0] for answer in answers):
        return "", file
    refusing = [peer for peer, answer in enumerate(answers) if not answer[0]]
    return why or f"rank {refusing[0]} cannot; see its log", None


__all__ = ["connect_peers"]
