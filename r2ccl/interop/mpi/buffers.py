"""Buffer arguments in the forms of mpi4py, as bytes that r2ccl can send.

A *specification* is the argument that a program passes: ``array``, ``[array, datatype]``, ``[array,
count]``, ``[array, (count, displacement)]``, ``[array, count, datatype]``, ``[array, (count,
displacement), datatype]`` or ``[array, count, displacement, datatype]``. A datatype is an
``MPI.Datatype`` or its character code; the default is the datatype of the elements of the array.

Data of a predefined datatype without gaps is sent from, and received in, the memory of the array,
unless this memory is read-only and r2ccl must write to it: the data is then copied. Data of any
other datatype is packed into new memory by ``MPI_Pack`` before it is sent, and unpacked after it
was received. MPICH and Open MPI pack the elements without gaps and in the byte order of the
machine, so the ranks of a call may describe the same elements with different datatypes.

Invariant: no byte outside the caller's array is read or written.
"""

from __future__ import annotations

import operator
import sys
from typing import Any, TypeAlias

import msgspec
import numpy as np
from mpi4py import MPI

from r2ccl.interop.mpi.errors import MpiError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_NATIVE = "@=<" if sys.byteorder == "little" else "@=>"
#: DLPack device types whose memory the processor can address: kDLCPU, kDLCUDAHost, kDLROCMHost.
_HOST_DEVICES = (1, 3, 11)


class HeldDatatype(MPI.Datatype):
    """Duplicate of a derived datatype, freed when Python deletes the object.

    The duplicate stays valid if the program frees its datatype while a request still needs it, as
    MPI allows.
    """

    def __new__(cls, datatype: Any) -> HeldDatatype:
        return super().__new__(cls, datatype.Dup())

    def __del__(self) -> None:
        if not MPI.Is_finalized():
            self.Free()


class BufferSpec(msgspec.Struct, frozen=True, eq=False):
    """Buffer argument of a call: elements in the memory of the caller.

    Parameters
    ----------
    memory : ndarray of uint8, shape (nbytes,)
        Memory of the caller from the first element on; may be longer than the elements if the
        caller passed a count. Read-only unless the specification was read with
        ``writable=True``.
    count : int
        Number of elements of one block.
    nblocks : int
        Number of blocks, which lie one after another.
    datatype : MPI.Datatype
        Datatype of the elements, which stays valid if the caller frees the datatype that it passed:
        see `held`. Not used if there are no elements.
    """

    memory: Array
    count: int
    nblocks: int
    datatype: Any

    @property
    def block_nbytes(self) -> int:
        """Size of the data of one block, in bytes, without gaps."""
        return int(self.count * self.datatype.size) if self.count else 0

    @property
    def is_contiguous(self) -> bool:
        """True if there is no data, or the elements have a predefined datatype without gaps."""
        if not self.block_nbytes:
            return True
        datatype = self.datatype
        return bool(datatype.is_predefined and datatype.size == datatype.extent)

    def part(self, data: Array, rank: int) -> Array:
        """Return the block of `rank` in `data`, an array that the method `data` returned."""
        return data[rank * self.block_nbytes : (rank + 1) * self.block_nbytes]

    def data(self, *, writable: bool) -> Array:
        """Return bytes for a call of r2ccl: the caller's memory if possible, otherwise new memory.

        Parameters
        ----------
        writable : bool
            True if r2ccl needs memory that it can write to.

        Returns
        -------
        ndarray of uint8, shape (block_nbytes * nblocks,)
            Not initialized if it is new memory: see `pack`.
        """
        nbytes = self.block_nbytes * self.nblocks
        if self.is_contiguous and (self.memory.flags.writeable or not writable):
            return self.memory[:nbytes]
        return np.empty(nbytes, np.uint8)

    def elements(self, dtype: np.dtype[Any]) -> Array:
        """Return a view of the elements as `dtype`, which must match the datatype.

        The elements must be contiguous. Like the caller's memory, the view may be unaligned.
        """
        return self.memory[: self.count * self.nblocks * dtype.itemsize].view(dtype)

    def pack(self, data: Array) -> None:
        """Pack the elements into `data`, unless `data` is the caller's memory."""
        if self.is_contiguous:
            if data.size and not np.may_share_memory(data, self.memory):
                data[:] = self.memory[: data.size]
        else:
            self.datatype.Pack(self._extents(), data, 0, MPI.COMM_SELF)

    def unpack(self, data: Array) -> None:
        """Unpack `data` into the elements, unless `data` is the caller's memory; skip gaps."""
        if self.is_contiguous:
            if data.size and not np.may_share_memory(data, self.memory):
                self.memory[: data.size] = data
        else:
            self.datatype.Unpack(data, 0, self._extents(), MPI.COMM_SELF)

    def _extents(self) -> Any:
        """Return a buffer with one extent per element, from which MPI infers the element count.

        The last extent may end after the end of the array, but the data of its element does not:
        `require_room` has checked that.
        """
        nbytes = self.count * self.nblocks * self.datatype.extent
        return MPI.buffer.fromaddress(self.memory.ctypes.data, nbytes)


def is_in_place(spec: Any) -> bool:
    """Return whether `spec` is ``MPI.IN_PLACE`` or None, which mpi4py treats alike."""
    return spec is None or spec is MPI.IN_PLACE


def message(spec: Any, *, writable: bool, nblocks: int = 1) -> BufferSpec:
    """Check a specification (see the module) and return it as a `BufferSpec`.

    Parameters
    ----------
    spec : object
    writable : bool
        True if the call writes its result to the elements.
    nblocks : int
        Number of blocks of equal size that the specification describes. A count in the
        specification is the count of one block.

    Raises
    ------
    TypeError, ValueError, KeyError, BufferError
        As in mpi4py: if `spec` has none of the forms, its count or displacement is negative or not
        an integer, its count cannot be inferred, its datatype is unknown, or its memory is not
        contiguous, or is read-only although `writable`. Unlike in mpi4py, also if the elements do
        not fit in the memory.
    MpiError
        ``ERR_BUFFER`` for ``MPI.BOTTOM`` and memory of a GPU, ``ERR_TYPE`` for a datatype that
        `require_usable` refuses.
    """
    owner, count, displacement, datatype = parts_of(spec, (list, tuple))
    memory = memory_of(owner, writable=writable)
    datatype = datatype_of(owner, datatype)
    offset = _offset(displacement, datatype, memory.size)
    memory = memory[offset:]
    if count is not None:
        count = operator.index(count)
        if count < 0:
            raise ValueError(f"message: negative count {count}")
        if count and owner is None:
            raise ValueError(f"message: buffer is None but count is {count}")
    else:
        count = inferred_count(memory.size, datatype, nblocks)
    if count:
        require_usable(datatype)
        require_room(memory.size, count * nblocks, datatype)
        datatype = held(datatype)
    return BufferSpec(memory, count, nblocks, datatype)


def parts_of(spec: Any, pairs: tuple[type, ...]) -> tuple[Any, Any, Any, Any]:
    """Split a specification into array, count, displacement and datatype; missing parts are None.

    Parameters
    ----------
    spec : object
    pairs : tuple of type
        Types that a pair ``(count, displacement)`` in `spec` may have.

    Raises
    ------
    TypeError, ValueError
        If `spec` has no form that mpi4py takes.
    """
    if not isinstance(spec, list | tuple):
        if not _is_memory(spec):
            raise TypeError("message: expecting buffer or list/tuple")
        return spec, None, None, None
    count: Any = None
    displacement = datatype = None
    if len(spec) == 2:
        owner, second = spec
        if isinstance(second, MPI.Datatype | str):
            datatype = second
        else:
            count = second
    elif len(spec) == 3:
        owner, count, datatype = spec
    elif len(spec) == 4:
        owner, count, displacement, datatype = spec
        return owner, count, displacement, datatype
    else:
        raise ValueError("message: expecting 2 to 4 items")
    if type(count) in pairs:
        if len(count) != 2:
            raise ValueError(f"message: expecting (count, displacement), not {len(count)} values")
        count, displacement = count
    return owner, count, displacement, datatype


def _is_memory(owner: Any) -> bool:
    try:
        memoryview(owner)
    except TypeError:
        return hasattr(owner, "__dlpack__") or hasattr(owner, "__cuda_array_interface__")
    except (BufferError, ValueError):  # a buffer, whose layout or dtype is refused later
        return True
    return True


def memory_of(owner: Any, *, writable: bool) -> Array:
    """Return a view of the memory of `owner` as bytes; it is empty if `owner` is None.

    Raises
    ------
    MpiError
        ``ERR_BUFFER`` for ``MPI.BOTTOM`` and memory of a GPU.
    BufferError, TypeError
        If `owner` does not export its memory, or the memory is not contiguous, or is read-only
        although `writable`.
    """
    if owner is None:
        return np.empty(0, np.uint8)
    if owner is MPI.BOTTOM:
        raise MpiError(
            "MPI.BOTTOM, which means absolute addresses, was given: pass the array itself",
            MPI.ERR_BUFFER,
        )
    _require_host(owner)
    return np.asarray(MPI.buffer.frombuffer(owner, readonly=not writable))


def _require_host(owner: Any) -> None:
    device = getattr(owner, "__dlpack_device__", None)
    is_device = (
        hasattr(owner, "__cuda_array_interface__")
        if device is None
        else device()[0] not in _HOST_DEVICES
    )
    if is_device:
        raise MpiError(
            f"{type(owner).__name__} in the memory of a GPU was given: call the methods of "
            "comm.communicator instead, which accept GPU arrays and streams",
            MPI.ERR_BUFFER,
        )


def datatype_of(owner: Any, given: Any) -> Any:
    """Return the datatype `given` or, if it is None, the datatype of the elements of `owner`.

    `given` may also be a character code. Raises BufferError if the elements of `owner` have no
    format, or not the byte order of this machine, and KeyError if MPI has no such datatype.
    """
    if isinstance(given, MPI.Datatype):
        return given
    code = given
    if given is None and owner is not None:
        code = _exporter(owner).format
        if code[:1] in ("<", ">", "!") and code[0] not in _NATIVE:
            raise BufferError(f"format string {code!r} with non-native byte order")
        code = code.lstrip(_NATIVE)
    try:
        return MPI.Datatype.fromcode(code)
    except (TypeError, ValueError):
        raise KeyError(f"cannot map {code!r} to MPI datatype") from None


def _exporter(owner: Any) -> memoryview:
    """Return a view of the elements of `owner`, made by the buffer protocol or, without it, DLPack.

    Raises BufferError if the elements have no format in the buffer protocol, as with datetime64.
    """
    try:
        return memoryview(owner)
    except TypeError:
        return np.from_dlpack(owner).data
    except ValueError as exc:
        raise BufferError(f"message: {exc}: pass the datatype of the elements") from exc


def _offset(displacement: Any, datatype: Any, nbytes: int) -> int:
    """Return the distance in bytes from the start of the memory to the first element."""
    if displacement is None:
        return 0
    displacement = operator.index(displacement)
    if displacement < 0:
        raise ValueError(f"message: negative displacement {displacement}")
    if displacement == 0:
        return 0
    extent = _extent_of(datatype, "handle displacement")
    if displacement * extent > nbytes:
        raise ValueError(
            f"message: displacement {displacement} out of bounds, number of datatype entries "
            f"{nbytes // extent}"
        )
    return int(displacement * extent)


def inferred_count(nbytes: int, datatype: Any, nblocks: int = 1) -> int:
    """Return the number of elements per block if `nblocks` equal blocks fill `nbytes`.

    Raise ValueError if `nbytes` is not a whole number of elements or of equal blocks, or if
    `datatype` is null or has no positive extent.
    """
    if not nbytes:
        return 0
    extent = _extent_of(datatype, "infer count")
    entries, rest = divmod(nbytes, extent)
    if rest:
        raise ValueError(
            f"message: cannot infer count, buffer length {nbytes} is not a multiple of datatype "
            f"extent {extent} (lb:{datatype.lb}, ub:{datatype.ub})"
        )
    if entries % nblocks:
        raise ValueError(
            f"message: cannot infer count, number of entries {entries} is not a multiple of "
            f"required number of blocks {nblocks}"
        )
    return int(entries // nblocks)


def _extent_of(datatype: Any, purpose: str) -> int:
    """Return the extent of `datatype` in bytes.

    Raise ValueError if the datatype is null, or its extent is not positive.
    `purpose` completes "cannot ..." in the message.
    """
    if datatype == MPI.DATATYPE_NULL:
        raise ValueError(f"message: cannot {purpose}, datatype is null")
    extent = int(datatype.extent)
    if extent <= 0:
        raise ValueError(
            f"message: cannot {purpose}, datatype extent {extent} "
            f"(lb:{datatype.lb}, ub:{datatype.ub})"
        )
    return extent


def require_usable(datatype: Any) -> None:
    """Raise `MpiError` if `datatype` is null, not committed, or has data but no positive extent."""
    if datatype == MPI.DATATYPE_NULL:
        raise MpiError(
            "the datatype is MPI.DATATYPE_NULL: pass the datatype of the elements", MPI.ERR_TYPE
        )
    if datatype.is_predefined:
        return
    try:
        datatype.Pack_size(1, MPI.COMM_SELF)
    except MPI.Exception as exc:
        raise MpiError(
            "the datatype has not been committed: call its Commit() first", MPI.ERR_TYPE
        ) from exc
    if datatype.size and datatype.extent <= 0:
        raise MpiError(
            f"the datatype has extent {datatype.extent}: allowed is 1 byte or more",
            MPI.ERR_TYPE,
        )


def held(datatype: Any) -> Any:
    """Return `datatype` if it is predefined, else a duplicate that outlives it (`HeldDatatype`)."""
    return datatype if datatype.is_predefined else HeldDatatype(datatype)


def require_room(nbytes: int, count: int, datatype: Any) -> None:
    """Raise ValueError if `count` elements of `datatype` do not lie within `nbytes` bytes."""
    first, last = datatype.true_lb, (count - 1) * datatype.extent + datatype.true_ub
    if first < 0 or last > nbytes:
        raise ValueError(
            f"message: count {count} of {datatype.name or 'the derived datatype'} needs bytes "
            f"{first} to {last} of a buffer of {nbytes} bytes: pass a smaller count or a larger "
            "buffer"
        )


__all__ = [
    "Array",
    "BufferSpec",
    "datatype_of",
    "held",
    "inferred_count",
    "is_in_place",
    "memory_of",
    "message",
    "parts_of",
    "require_room",
    "require_usable",
]
