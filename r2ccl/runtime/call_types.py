"""Types of the arguments and results of the collectives, for the overloads of `Communicator`.

A collective has three overloads:

1. A blocking call with `x` and `out` of one type returns an array of this type; a reduce or gather
   may also return None. If `x` is a JAX array and `out` is not given, the result is a new JAX
   array.
2. An asynchronous call returns a `Work` whose result has the type that a blocking call returns.
3. All other calls return Any: calls with an `async_op` whose value the type checker does not know,
   and calls with arrays of different types, such as a read-only input and a NumPy output.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, Required, TypeAlias, TypedDict, TypeVar


class HasDlpack(Protocol):
    """Array with the DLPack protocol, such as a NumPy, torch or CuPy array."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Return the type and the number of the device that the array is on."""
        ...


class HasBuffer(Protocol):
    """Object with the buffer protocol, such as ``array.array``."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a view of the memory."""
        ...


class HasCuda(Protocol):
    """Array with the CUDA array interface, for libraries without DLPack such as Numba."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape and dtype of the array."""
        ...


class JaxArray(Protocol):
    """JAX array: the part of ``jax.Array`` that arrays of other libraries do not have."""

    @property
    def committed(self) -> bool:
        """True if the array is bound to its device."""
        ...

    def is_deleted(self) -> bool:
        """Return whether the memory was freed or donated."""
        ...


class WritableDlpack(HasDlpack, Protocol):
    """Array with the DLPack protocol whose elements can be assigned."""

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
#: Array that a collective can read, write and return; or a JAX array, which is immutable, so the
#: collective returns a new one.
A = TypeVar("A", bound=WritableDlpack | WritableBuffer | HasCuda | JaxArray)
#: Array of a type that a collective can allocate. For other types, it allocates a NumPy array.
N = TypeVar("N", bound=WritableDlpack | HasCuda | JaxArray)


class Now(TypedDict, total=False):
    """Keyword arguments of a blocking collective."""

    stream: Any
    async_op: Literal[False]


class Later(TypedDict, total=False):
    """Keyword arguments of an asynchronous collective."""

    stream: Any
    async_op: Required[Literal[True]]


class Either(TypedDict, total=False):
    """Keyword arguments of a collective, blocking or asynchronous."""

    stream: Any
    async_op: bool


__all__ = ["A", "Array", "Either", "Later", "N", "Now"]
