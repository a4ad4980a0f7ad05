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
    """Return the address of the data of `array`, a NumPy array."""
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
def tuple_size(typing_context: Any, items: Any) -> Any:
    """Return the number of items of the tuple `items`."""
    return types.int64(types.int64), _calling("PyTuple_Size")


@intrinsic
def list_size(typing_context: Any, items: Any) -> Any:
    """Return the number of items of the list `items`."""
    return types.int64(types.int64), _calling("PyList_Size")


@intrinsic
def list_item(typing_context: Any, items: Any, index: Any) -> Any:
    """Return ``items[index]`` of the list `items`; the index must be valid."""
    return types.int64(types.int64, types.int64), _calling("PyList_GetItem")


@intrinsic
def dict_item(typing_context: Any, items: Any, key: Any) -> Any:
    """Return ``items[key]`` of the dict `items`, or 0 if there is no such item."""
    return types.int64(types.int64, types.int64), _calling("PyDict_GetItem")


@intrinsic
def owner_of(typing_context: Any, function: Any) -> Any:
    """Return the ``owner`` of a function that `r2ccl.kernels.native.method_of` returned."""
    return types.int64(types.int64), _calling("PyCFunction_GetSelf")


@intrinsic
def _attribute(typing_context: Any, instance: Any, name: Any) -> Any:
    """Return a new reference to an attribute; if there is none, set an exception and return 0."""
    return types.int64(types.int64, types.int64), _calling("PyObject_GetAttr")


@inlined
def has_value(instance: Any, name: Any, value: Any) -> Any:
    """Return whether the attribute `name` of `instance` is the object `value`.

    The attribute must exist. Its value must have another reference, because this function drops its
    own reference before the comparison.
    """
    found = _attribute(instance, name)
    drop_reference(found)
    return found == value


@intrinsic
def set_attribute(typing_context: Any, instance: Any, name: Any, value: Any) -> Any:
    """Set attribute `name` of `instance` to `value`; return 0, or -1 with an exception set.

    The class of `instance` must set the attribute without Python code, so it must not have a
    ``__setattr__`` written in Python, and the attribute must not be a property.
    """
    kind = types.int64(types.int64, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(_I32, [_I64] * 3)
        setter = cgutils.get_or_insert_function(builder.module, function, "PyObject_SetAttr")
        return builder.sext(builder.call(setter, args), _I64)

    return kind, generate


@intrinsic
def thread_ident(typing_context: Any) -> Any:
    """Return ``threading.get_ident()``."""
    return types.int64(), _calling("PyThread_get_thread_ident")


@inlined
def handle_signals() -> Any:
    """Run the handlers of signals that have arrived; return False if one raised an exception.

    In a thread other than the main thread, run no handler and return True.
    """
    return _check_signals() & 0xFFFFFFFF == 0


@intrinsic
def _check_signals(typing_context: Any) -> Any:
    return types.int64(), _calling("PyErr_CheckSignals")


@intrinsic
def stack_words(typing_context: Any) -> Any:
    """Return the address of eight words on the stack, valid until the compiled function returns.

    Each call site of this function has its own words.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_I64, 8)), _I64)

    return types.int64(), generate


@inlined
def take_exception(at: Any) -> None:
    """Clear the exception that is set; store its type, value and traceback in three words at `at`.

    Each word owns its reference. The word of the traceback may be 0.
    """
    _fetch(at, at + 8, at + 16)
    _normalize(at, at + 8, at + 16)


@inlined
def raise_again(at: Any) -> None:
    """Set the exception that `take_exception` stored at `at`; the words then own no references."""
    words = pointer(at, types.int64)
    _restore(words[0], words[1], words[2])


@intrinsic
def _fetch(typing_context: Any, kind: Any, value: Any, trace: Any) -> Any:
    return types.int64(*[types.int64] * 3), _calling("PyErr_Fetch", has_result=False)


@intrinsic
def _normalize(typing_context: Any, kind: Any, value: Any, trace: Any) -> Any:
    return types.int64(*[types.int64] * 3), _calling("PyErr_NormalizeException", has_result=False)


@intrinsic
def _restore(typing_context: Any, kind: Any, value: Any, trace: Any) -> Any:
    return types.int64(*[types.int64] * 3), _calling("PyErr_Restore", has_result=False)


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
    "dict_item",
    "drop_reference",
    "handle_signals",
    "has_value",
    "list_item",
    "list_size",
    "new_reference",
    "owner_of",
    "raise_again",
    "restore_thread",
    "save_thread",
    "set_attribute",
    "stack_words",
    "take_exception",
    "thread_ident",
    "tuple_item",
    "tuple_size",
    "type_of",
]
