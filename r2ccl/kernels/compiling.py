"""Compilation of functions to machine code by Numba, and helpers for functions to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import binding, ir
from numba import cfunc, extending, types
from numba.core import cgutils

from r2ccl.kernels.native import MachineCode, target_machine

_F = TypeVar("_F", bound=Callable[..., Any])

#: Prefix of the symbol of Numba's C wrapper; the rest is the symbol of the function itself.
_C_PREFIX = "cfunc."
#: Functions that code generation may call without a declaration.
_IMPLIED = ("memcpy", "memmove", "memset")
#: The instruction that memcpy(3) uses from about 4 KiB on (``rep movsb``) takes eight times as long
#: on AMD's Zen 3 if the target is ahead of the source by 1 to 31 bytes, modulo the size of a page.
#: Such copies are made in pieces, for which memcpy(3) uses other instructions.
_PAGE_NBYTES, _SLOW_AHEAD, _PIECE_NBYTES = 4096, 32, 1024
_TO_C, _TO_PYTHON = "PyLong_AsLongLong", "PyLong_FromLongLong"


def compile_function(function: Callable[..., Any], name: str) -> MachineCode:
    """Compile a function of integers for this host's processor, with wrappers for C and Python.

    Parameters
    ----------
    function : callable
        Python function that Numba can compile. Its arguments and its result are 64-bit integers. It
        must not raise an exception.
    name : str
        Name that becomes part of the symbols; unique in the process.
    """
    nargs = function.__code__.co_argcount
    signature = types.int64(*[types.int64] * nargs)
    compiled = cfunc(signature, nopython=True, error_model="numpy")(function)
    # Numba's wrapper calls functions of Numba to report errors. The wrappers made here do not.
    inner = compiled.native_name.removeprefix(_C_PREFIX)
    names = (f"r2ccl.{name}", f"r2ccl.{name}.python")
    module = binding.parse_assembly(compiled.inspect_llvm())
    module.link_in(binding.parse_assembly(_wrappers(inner, *names, nargs)))
    module.verify()
    for each in module.functions:
        if not each.is_declaration and each.name not in names:
            each.linkage = "internal"
    machine = target_machine()
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, binding.create_pass_builder(machine, binding.PipelineTuningOptions()))
    declared = {each.name for each in module.functions if each.is_declaration}
    externals = {each for each in declared if not each.startswith("llvm.")}
    return MachineCode(
        machine.emit_object(module), *names, nargs, tuple(sorted({*externals, *_IMPLIED}))
    )


def _wrappers(inner: str, entry: str, wrapper: str, nargs: int) -> str:
    """Return the LLVM code of two wrappers: for C, and for Python (METH_FASTCALL).

    Numba's functions return a status, which is 0 unless they raise an exception, and take the
    addresses of the result and of a description of the error. The status is ignored, because the
    functions compiled here do not raise exceptions.
    """
    taken = ", ".join(f"i64 %a{i}" for i in range(nargs))
    converted = "".join(
        f"""
  %at{i} = getelementptr ptr, ptr %args, i64 {i}
  %object{i} = load ptr, ptr %at{i}
  %a{i} = call i64 @{_TO_C}(ptr %object{i})"""
        for i in range(nargs)
    )
    return f"""
declare i32 @"{inner}"(ptr, ptr{", i64" * nargs})
declare i64 @{_TO_C}(ptr)
declare ptr @{_TO_PYTHON}(i64)
declare ptr @PyErr_Occurred()
declare i32 @PyErr_BadArgument()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)

define i64 @"{entry}"({taken}) {{
  %result = alloca i64
  %error = alloca ptr
  %status = call i32 @"{inner}"(ptr %result, ptr %error{", " + taken if taken else ""})
  %found = load i64, ptr %result
  ret i64 %found
}}

define ptr @"{wrapper}"(ptr %self, ptr %args, i64 %count) {{
  %fits = icmp eq i64 %count, {nargs}
  br i1 %fits, label %convert, label %refuse
refuse:
  %refused = call i32 @PyErr_BadArgument()
  ret ptr null
convert:{converted}
  %error = call ptr @PyErr_Occurred()
  %bad = icmp ne ptr %error, null
  br i1 %bad, label %fail, label %run
fail:
  ret ptr null
run:
  %thread = call ptr @PyEval_SaveThread()
  %result = call i64 @"{entry}"({taken})
  call void @PyEval_RestoreThread(ptr %thread)
  %found = call ptr @{_TO_PYTHON}(i64 %result)
  ret ptr %found
}}
"""


def inlined(function: _F) -> _F:
    """Let compiled code call `function`; return `function` unchanged.

    This is ``numba.extending.register_jitable`` with a type for type checkers.
    """
    result: _F = extending.register_jitable(no_cfunc_wrapper=True)(function)
    return result


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an intrinsic, which compiled code can call, from a function that emits LLVM code.

    This is ``numba.extending.intrinsic`` with a type for type checkers.
    """
    result: Callable[..., Any] = extending.intrinsic(function)
    return result


@intrinsic
def _memcpy(typing_context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, at = (builder.inttoptr(each, ir.IntType(8).as_pointer()) for each in args[:2])
        cgutils.raw_memcpy(builder, to, at, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@inlined
def copy_bytes(target: Any, source: Any, nbytes: Any) -> None:
    """Copy `nbytes` bytes from address `source` to address `target`, like memcpy(3).

    The two pieces of memory must not overlap. Only compiled code can call the function.
    """
    if 0 < (target - source) & (_PAGE_NBYTES - 1) < _SLOW_AHEAD:
        for at in range(0, nbytes, _PIECE_NBYTES):
            _memcpy(target + at, source + at, min(nbytes - at, _PIECE_NBYTES))
    else:
        _memcpy(target, source, nbytes)


@intrinsic
def pointer(typing_context: Any, address: Any, element: Any) -> Any:
    """Return `address` as a pointer to elements of the type `element`."""
    kind = types.CPointer(element.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(types.int64, element), generate


__all__ = ["compile_function", "copy_bytes", "inlined", "intrinsic", "pointer"]
