"""Conversion of tensors to the arrays that a `Communicator` takes, without a copy if possible.

A tensor is *in order* if its elements are one block of memory, in the order of its indices, and it
is not a conjugate or negative view. Other tensors are copied before a call, and the result is
copied back after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch

from r2ccl import InvalidArgument

Tensor: TypeAlias = Any

#: torch's dtypes that NumPy lacks: the dtype to view the tensor as, and the dtype of the array.
_EXTENSIONS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
#: Names of torch's other dtypes in NumPy's array interface.
_NAMES = {
    getattr(torch, name): np.dtype(name).str
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip
#: Types of tensors whose memory is at `data_ptr`; other subclasses may wrap another tensor.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Memory:
    """Memory of a tensor in the array interface of NumPy; keeps the tensor alive."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tensor.shape,
            "typestr": name,
            "data": (tensor.data_ptr(), False),
        }


def one(tensors: Any) -> Tensor:
    """Return the only tensor of a list, or `tensors` itself if it is a tensor.

    Raises
    ------
    InvalidArgument
        If the list has no tensor, or several.
    """
    found = tensors_of(tensors)
    if len(found) != 1:
        raise InvalidArgument(f"{len(found)} tensors were given: pass a list of one tensor")
    return found[0]


def tensors_of(tensors: Any) -> list[Tensor]:
    """Return `tensors` as a list; a single tensor becomes a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def current_stream(given: Any) -> Any:
    """Return this thread's current stream on the GPU of the first tensor in `given`.

    `given` is a list or tuple that contains tensors, other lists and numbers. Return None if there
    is no tensor, or the first tensor is not on a GPU.
    """
    first = _first(given)
    if first is None or not first.is_cuda:
        return None
    return torch.cuda.current_stream(first.device)


def array_of(tensor: Tensor) -> Any:
    """Return a view of a tensor in order (see the module): a NumPy array or, on a GPU, a tensor.

    Raises
    ------
    InvalidArgument
        If the tensor is sparse, or if NumPy does not support its dtype or device. Never for a
        tensor on a GPU.
    """
    if tensor.is_cuda:
        return tensor.detach()
    extension = _EXTENSIONS.get(tensor.dtype)
    try:
        if extension is not None:
            return _array(tensor.detach().view(extension[0])).view(extension[1])
        return _array(tensor)
    except (TypeError, RuntimeError) as exc:
        raise cannot_view(tensor, exc) from exc


def _array(tensor: Tensor) -> Any:
    """Return a NumPy view of a tensor; raise the error of `Tensor.numpy` if that is impossible."""
    name = _NAMES.get(tensor.dtype)
    is_memory = tensor.is_cpu and type(tensor) in _PLAIN and not tensor._is_zerotensor()
    if name is not None and is_memory:
        # After `Tensor.numpy`, torch refuses to resize the tensor, as FSDP and hooks of DDP do.
        return np.asarray(_Memory(tensor, name))
    return tensor.detach().numpy()


def cannot_view(tensor: Tensor, why: object) -> InvalidArgument:
    """Return the error for a tensor that no array can view; the message contains `why`."""
    return InvalidArgument(
        f"r2ccl cannot view a tensor of {tensor.dtype} on {tensor.device} with layout "
        f"{tensor.layout} as an array ({why}): convert it to a dense tensor on the CPU, of a dtype "
        "on the page Reductions of the documentation"
    )


def is_in_order(tensor: Tensor) -> bool:
    """Return whether a tensor is in order; see the module.

    A conjugate or negative view is not in order: the values in memory differ from the elements.

    Raises
    ------
    InvalidArgument
        If the tensor is sparse.
    """
    _require_dense(tensor)
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def in_order(tensor: Tensor) -> Tensor:
    """Return `tensor` if it is in order, otherwise a copy that is in order.

    Raises
    ------
    InvalidArgument
        If the tensor is sparse.
    """
    if is_in_order(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def apart(source: Tensor, target: Tensor, first: int | None) -> Tensor:
    """Return `source`; if `source` overlaps `target` and the call is not in place, return a copy.

    Both tensors must be in order. The call is in place if `source` begins at element `first` of
    `target` or, for a negative `first`, if `target` begins at element ``-first`` of `source`.
    Elements are counted from 0. If `first` is None, the call is not in place.
    """
    distance = source.data_ptr() - target.data_ptr()
    is_in_place = first is not None and distance == first * source.element_size()
    if is_in_place or distance >= target.nbytes or -distance >= source.nbytes:
        return source
    return source.detach().clone()


def copy_back(tensor: Tensor, copy: Tensor) -> None:
    """Copy the result of a call from `copy` to `tensor`; do nothing if both are the same object."""
    if copy is not tensor:
        tensor.detach().copy_(copy)


def joined(tensors: Sequence[Tensor], *, is_read: bool) -> Tensor:
    """Return one flat tensor with the elements of all `tensors`.

    The result is a view if the tensors are in order and follow one another in one storage,
    otherwise a new tensor: a copy if `is_read`, else uninitialized. `divide` copies the result back
    to the tensors.

    Raises
    ------
    InvalidArgument
        If the tensors differ in dtype or device, or one is sparse.
    """
    first = tensors[0]
    for each in tensors:
        _require_dense(each)
        if each.dtype != first.dtype or each.device != first.device:
            raise InvalidArgument(
                f"a list has tensors of {first.dtype} on {first.device} and of {each.dtype} on "
                f"{each.device}: pass tensors of one dtype on one device"
            )
    total = sum(each.numel() for each in tensors)
    if _are_adjacent(tensors):
        return first.detach().as_strided((total,), (1,))
    if is_read:
        return torch.cat([in_order(each.detach()).view(-1) for each in tensors])
    return torch.empty(total, dtype=first.dtype, device=first.device)


def divide(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy `flat`, the result of `joined` for `tensors`, to the tensors; do nothing for a view."""
    if flat.data_ptr() == tensors[0].data_ptr():
        return
    at = 0
    for each in tensors:
        each.detach().copy_(flat[at : at + each.numel()].view(each.shape))
        at += each.numel()


def _first(values: Any) -> Tensor | None:
    for each in values:
        if isinstance(each, (list, tuple)):
            each = _first(each)
        if isinstance(each, torch.Tensor):
            return each
    return None


def _require_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise cannot_view(tensor, "it has no dense memory")


def _are_adjacent(tensors: Sequence[Tensor]) -> bool:
    at = tensors[0].data_ptr()
    storage = tensors[0].untyped_storage().data_ptr()
    for each in tensors:
        if (
            each.data_ptr() != at
            or not is_in_order(each)
            or each.untyped_storage().data_ptr() != storage
        ):
            return False
        at += each.numel() * each.element_size()
    return True


__all__ = [
    "Tensor",
    "apart",
    "array_of",
    "copy_back",
    "current_stream",
    "divide",
    "in_order",
    "is_in_order",
    "joined",
    "one",
    "tensors_of",
]
