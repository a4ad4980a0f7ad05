"""Types of the arguments and results of the collectives, for the overloads of `Communicator`.

A collective has three overloads:

1. A blocking call with `x` and `out` of one type returns an array of this type; a reduce or gather
   may also return None. If `x` is an array of JAX and there is no `out`, the result is a new array
   of JAX.
2. An asynchronous call returns a `Work` whose result has the type that a blocking call returns.
3. All other calls return Any: those with an `async_op` whose value the type checker does not know,
   and those with arrays of different types, such as a read-only input and a NumPy array as output.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, Required, TypeAlias, TypedDict, TypeVar


class HasDlpack(Protocol):
    """Array of NumPy, torch, CuPy or another library with DLPack."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Return the type and the number of the device that the array is on."""
        ...


class HasBuffer(Protocol):
    """Object with the buffer protocol, such as ``array.array``."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a view of the memory."""
        ...


class HasCuda(Protocol):
    """Array in CUDA memory, of Numba or another library without DLPack."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape and dtype of the array."""
        ...


class JaxArray(Protocol):
    """``jax.Array``: the part of its interface that no array of another library has."""

    @property
    def committed(self) -> bool:
        """True if the array is bound to its device."""
        ...

    def is_deleted(self) -> bool:
        """Return whether the memory was freed or donated."""
        ...


class WritableDlpack(HasDlpack, Protocol):
    """Array whose elements can be assigned."""

    def __setitem__(self, at: Any, value: Any, /) -> None:
        """Assign elements."""
        ...


class WritableBuffer(HasBuffer, Protocol):
    """Object with the buffer protocol whose elements can be assigned, which excludes ``bytes``."""

    def __setitem__(self, at: Any, value: Any, /) -> None:
        """Assign elements."""
        ...


#: Array that a collective can read.
Array: TypeAlias = HasDlpack | HasBuffer | HasCuda | JaxArray
#: Array that a collective can read and write, and returns; or array of JAX, for which it returns a
#: new one.
A = TypeVar("A", bound=WritableDlpack | WritableBuffer | HasCuda | JaxArray)
#: Array of a type that a collective can allocate. For other objects, it allocates a NumPy array.
N = TypeVar("N", bound=WritableDlpack | HasCuda | JaxArray)


class Now(TypedDict, total=False):
    """Keywords of a blocking collective."""

    stream: Any
    async_op: Literal[False]


class Later(TypedDict, total=False):
    """Keywords of an asynchronous collective."""

    stream: Any
    async_op: Required[Literal[True]]


class Either(TypedDict, total=False):
    """Keywords of a collective, blocking or asynchronous."""

    stream: Any
    async_op: bool


__all__ = ["A", "Array", "Either", "Later", "N", "Now"]
