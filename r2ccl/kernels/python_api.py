"""Functions of Python's C API, in code that Numba compiles.

Objects are passed as their addresses, ``id(object)``. All functions but `restore_thread` need the
GIL. A function that returns a new reference says so; all other objects returned are borrowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from r2ccl.kernels.arrays import DATA
from r2ccl.kernels.compiling import inlined, intrinsic, pointer

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_EQUAL = 2
#: Offset from the address of an object to the pointer to its type, the last word of its header.
_TYPE = object.__basicsize__ - 8


@inlined
def type_of(instance: Any) -> Any:
    """Return the type of `instance`."""
    return pointer(instance + _TYPE, types.int64)[0]


@inlined
def data_at(array: Any) -> Any:
    """Return the address of the data of `array`, an array of NumPy."""
    return pointer(array + DATA, types.int64)[0]


@intrinsic
def save_thread(typing_context: Any) -> Any:
    """Release the GIL; return the state of the thread, for `restore_thread`."""
    return types.int64(), _calling("PyEval_SaveThread")


@intrinsic
def restore_thread(typing_context: Any, thread: Any) -> Any:
    """Acquire the GIL again; `thread` is the result of `save_thread`."""
    return types.int64(types.int64), _calling("PyEval_RestoreThread", has_result=False)


@intrinsic
def tuple_item(typing_context: Any, items: Any, index: Any) -> Any:
    """Return ``items[index]`` of the tuple `items`; the index must be valid."""
    return types.int64(types.int64, types.int64), _calling("PyTuple_GetItem")


@intrinsic
def new_reference(typing_context: Any, instance: Any) -> Any:
    """Return a new reference to `instance`."""
    return types.int64(types.int64), _calling("Py_NewRef")


@intrinsic
def drop_reference(typing_context: Any, instance: Any) -> Any:
    """Drop a reference to `instance`; if it is the last one, the object is destroyed."""
    return types.int64(types.int64), _calling("Py_DecRef", has_result=False)


@intrinsic
def call_with(typing_context: Any, function: Any, arguments: Any, count: Any) -> Any:
    """Call `function` with positional arguments; return a new reference to the result.

    `arguments` is the address of a table with the addresses of the `count` arguments. Return 0 if
    the call raised an exception, which is then set.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "PyObject_Vectorcall", [*args, _I64(0)])

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def are_equal(typing_context: Any, first: Any, second: Any) -> Any:
    """Return 1 if ``first is second or first == second``, otherwise 0.

    If the comparison raises an exception, clear the exception and return 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I64, _I64, _I32])
        compare = cgutils.get_or_insert_function(builder.module, kind, "PyObject_RichCompareBool")
        found = builder.call(compare, [*args, _I32(_EQUAL)])
        with builder.if_then(builder.icmp_signed("<", found, _I32(0)), likely=False):
            _call(builder, "PyErr_Clear", [], has_result=False)
        return builder.zext(builder.icmp_signed("==", found, _I32(1)), _I64)

    return types.int64(types.int64, types.int64), generate


def _calling(name: str, *, has_result: bool = True) -> Callable[..., Any]:
    """Return a function that emits a call of the C function `name`.

    If the C function has no result, the emitted code gives 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, name, list(args), has_result=has_result)

    return generate


def _call(builder: Any, name: str, arguments: list[Any], *, has_result: bool = True) -> Any:
    # Pointers are passed as integers of the same size: the calling conventions of x86-64 and arm64
    # do not tell them apart.
    kind = ir.FunctionType(_I64 if has_result else ir.VoidType(), [_I64] * len(arguments))
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    result = builder.call(function, arguments)
    return result if has_result else _I64(0)


__all__ = [
    "are_equal",
    "call_with",
    "data_at",
    "drop_reference",
    "new_reference",
    "restore_thread",
    "save_thread",
    "tuple_item",
    "type_of",
]
