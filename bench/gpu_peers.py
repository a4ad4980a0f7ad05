"""In-place addition of CuPy and torch, in the memory and on the stream of a `Card`.

A library is imported on demand. Invariant: if a library cannot be used, its error message is
reported and the bench continues without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from gpu_card import Card, Memory
from jobs import Unavailable

#: Function that returns a callable which enqueues ``x += y``.
Adder = Callable[[Memory, Memory], Callable[[], object]]


class Peer(NamedTuple):
    """A library to compare with.

    ``on_stream()`` returns a context manager in which the library uses the card's stream.
    """

    name: str
    version: str
    on_stream: Callable[[], AbstractContextManager[Any]]
    adder: Adder


def cupy_peer(card: Card) -> Peer:
    """Return CuPy as a `Peer`.

    Raises
    ------
    Unavailable
        If CuPy is not installed, or finds no GPU.
    """
    cupy = _imported("cupy")
    ordinal = card.device.ordinal
    try:
        cupy.cuda.runtime.getDeviceCount()
        stream = cupy.cuda.ExternalStream(card.stream, ordinal)
    except Exception as exc:
        raise Unavailable(f"cupy: {exc}") from exc

    def view(memory: Memory) -> Any:
        nbytes = memory.count * memory.dtype.itemsize
        unowned = cupy.cuda.UnownedMemory(memory.address, nbytes, memory, ordinal)
        pointer = cupy.cuda.MemoryPointer(unowned, 0)
        return cupy.ndarray((memory.count,), memory.dtype, pointer)

    def add(x: Memory, y: Memory) -> Callable[[], object]:
        left, right = view(x), view(y)
        return lambda: cupy.add(left, right, out=left)

    return Peer("cupy", cupy.__version__, lambda: stream, add)


def torch_peer(card: Card) -> Peer:
    """Return torch as a `Peer`.

    Raises
    ------
    Unavailable
        If torch is not installed, or cannot use CUDA.
    """
    torch = _imported("torch")
    if not torch.cuda.is_available():
        raise Unavailable(f"torch {torch.__version__} cannot use CUDA here")
    device = torch.device("cuda", card.device.ordinal)
    stream = torch.cuda.ExternalStream(card.stream, device=device)

    def add(x: Memory, y: Memory) -> Callable[[], object]:
        left, right = torch_view(torch, x, device), torch_view(torch, y, device)
        return lambda: left.add_(right)

    return Peer("torch", torch.__version__, lambda: torch.cuda.stream(stream), add)


def torch_view(torch: Any, memory: Memory, device: Any) -> Any:
    """Return a torch tensor that shares the memory of a card.

    bfloat16 is passed as int16, because torch does not accept it through the CUDA Array Interface.
    """
    if memory.dtype.name == "bfloat16":
        bits = Memory(memory.address, memory.count, np.dtype(np.int16))
        return torch.as_tensor(bits, device=device).view(torch.bfloat16)
    return torch.as_tensor(memory, device=device)


def find_peers(card: Card) -> tuple[list[Peer], list[str]]:
    """Return the available libraries, and the reasons why the others are not available."""
    peers, lacking = [], []
    for find in (cupy_peer, torch_peer):
        try:
            peers.append(find(card))
        except Unavailable as exc:
            lacking.append(str(exc))
    return peers, lacking


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise Unavailable(f"{name} cannot be imported ({exc})") from exc


__all__ = ["Peer", "cupy_peer", "find_peers", "torch_peer", "torch_view"]
