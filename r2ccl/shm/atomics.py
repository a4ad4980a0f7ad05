"""Atomic operations, and system calls for waiting, in code that Numba compiles.

The functions are Numba intrinsics, which take addresses as int64. x86-64 and arm64 are supported
(`r2ccl.shm.machine`). Both have little-endian words, so the lower 32 bits of a 64-bit word, which a
futex compares, have the address of the word.

Memory order, in the terms of C11: loads acquire, stores release. A store that must be ordered
before a later load of another word, as in the check for sleeping peers, needs `fence` between them;
`add`, `load_ordered` and `fence` are sequentially consistent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from r2ccl.kernels.compiling import intrinsic
from r2ccl.shm.layout import CPU_SET_NBYTES
from r2ccl.shm.machine import MACHINE, SYSTEM_CALLS

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_CLOCK_MONOTONIC = 1
_EVERYONE = 2**31 - 1

_FUTEX, _SET_AFFINITY, _GET_AFFINITY, _READ_MEMORY = SYSTEM_CALLS

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_I64, 4)
_VOID = ir.VoidType()


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    """Return the 64-bit word at `address`; later loads and stores happen after this load."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def load_ordered(typing_context: Any, address: Any) -> Any:
    """Return the 64-bit word at `address`, sequentially consistent with `add` and `fence`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing_context: Any, address: Any, value: Any) -> Any:
    """Store `value` in the 64-bit word at `address`, after all earlier loads and stores."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add `value` to the 64-bit word at `address`; return the previous value of the word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fence(typing_context: Any) -> Any:
    """Order all earlier loads and stores before all later ones."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def stream_fence(typing_context: Any) -> Any:
    """Order earlier stores of `stream` before later stores."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if MACHINE == "x86_64":
            _call_void(builder, "llvm.x86.sse.sfence")
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    """Pause the core for some cycles; for use in a loop that waits for another core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if MACHINE == "x86_64":
            _call_void(builder, "llvm.x86.sse2.pause")
        else:
            # `yield` does nothing on most arm64 cores; an instruction barrier (isb; 15 is its only
            # option) lasts about as long as x86's pause.
            isb = ir.FunctionType(_VOID, [_I32])
            function = cgutils.get_or_insert_function(builder.module, isb, "llvm.aarch64.isb")
            builder.call(function, [_I32(15)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sched_yield(typing_context: Any) -> Any:
    """Let another thread use the core: sched_yield(2)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        function = cgutils.get_or_insert_function(builder.module, kind, "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def current_cpu(typing_context: Any) -> Any:
    """Return the number of the CPU that runs this thread: sched_getcpu(3)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        function = cgutils.get_or_insert_function(builder.module, kind, "sched_getcpu")
        return builder.sext(builder.call(function, []), _I64)

    return types.int64(), generate


@intrinsic
def read_affinity(typing_context: Any, address: Any, nbytes: Any) -> Any:
    """Write this thread's set of allowed CPUs to `address`: sched_getaffinity(2).

    The set has at most `nbytes` bytes. Returns the number of bytes written; -1 if the call failed.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call_system(builder, _GET_AFFINITY, [_I64(0), args[1], args[0]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def write_affinity(typing_context: Any, address: Any, nbytes: Any) -> Any:
    """Let this thread run only on the CPUs in the set at `address`: sched_setaffinity(2).

    The set has `nbytes` bytes. Returns 0; -1 if the call failed.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call_system(builder, _SET_AFFINITY, [_I64(0), args[1], args[0]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def cpu_sets(typing_context: Any) -> Any:
    """Return the address of memory for three sets of CPUs, for `r2ccl.shm.cpus`.

    It is on the stack of the compiled function that calls this one, and ends with it.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.ArrayType(_I64, 3 * CPU_SET_NBYTES // 8)
        return builder.ptrtoint(cgutils.alloca_once(builder, kind), _I64)

    return types.int64(), generate


@intrinsic
def futex_wait(typing_context: Any, address: Any, value: Any, timeout: Any) -> Any:
    """Sleep until woken, unless the lower 32 bits at `address` differ from those of `value`.

    `timeout` is the address of a ``struct timespec``, the longest duration of the sleep. The
    sleep also ends when the thread receives a signal. Return 0 if the thread was woken, otherwise
    -1. A thread may also be woken for a change that it had already seen before it slept.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low = builder.zext(builder.trunc(args[1], _I32), _I64)
        arguments = [args[0], _I64(_FUTEX_WAIT), low, args[2], _I64(0), _I64(0)]
        return _call_system(builder, _FUTEX, arguments)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def futex_wake(typing_context: Any, address: Any) -> Any:
    """Wake all threads, of all processes, that sleep on the word at `address`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arguments = [args[0], _I64(_FUTEX_WAKE), _I64(_EVERYONE), _I64(0), _I64(0), _I64(0)]
        _call_system(builder, _FUTEX, arguments)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def read_memory(typing_context: Any, pid: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy `nbytes` bytes at `source` in process `pid` to `target`: process_vm_readv(2).

    Returns the number of bytes copied, which may be less than `nbytes`; -1 if the call failed.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = ir.ArrayType(_I64, 2)
        local, remote = (cgutils.alloca_once(builder, pair) for _ in range(2))
        for at, start in ((local, args[1]), (remote, args[2])):
            for index, value in enumerate((start, args[3])):
                builder.store(value, builder.gep(at, [_I32(0), _I32(index)]))
        one = _I64(1)
        addresses = [builder.ptrtoint(each, _I64) for each in (local, remote)]
        arguments = [args[0], addresses[0], one, addresses[1], one, _I64(0)]
        return _call_system(builder, _READ_MEMORY, arguments)

    return types.int64(*[types.int64] * 4), generate


@intrinsic
def clock_ns(typing_context: Any, time: Any) -> Any:
    """Return the monotonic time in nanoseconds.

    `time` is the address of a ``struct timespec``, which is overwritten.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I32, _I64])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [_I32(_CLOCK_MONOTONIC), args[0]])
        words = _pointer(builder, args[0])
        seconds, rest = (builder.load(builder.gep(words, [_I32(at)])) for at in (0, 1))
        return builder.add(builder.mul(seconds, _I64(1_000_000_000)), rest)

    return types.int64(types.int64), generate


@intrinsic
def stream(typing_context: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes from `source` to `target` without storing them in the caches.

    `target` must be a multiple of 32. Call `stream_fence` before the word that publishes the bytes
    is stored.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = _VECTOR.as_pointer()
        hint = builder.module.add_metadata([_I32(1)])
        for offset in (0, 32):  # vectors of 32 bytes are faster than of 64 on unaligned data
            to, at = (builder.inttoptr(builder.add(each, _I64(offset)), kind) for each in args)
            store = builder.store(builder.load(at, align=1), to, align=32)
            store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def words_at(typing_context: Any, address: Any) -> Any:
    """Return the address as a pointer to 64-bit words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(types.CPointer(types.int64))
        return builder.inttoptr(args[0], kind)

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def call_kernel(
    typing_context: Any, kernel: Any, sources: Any, count: Any, target: Any, nbytes: Any
) -> Any:
    """Call the kernel at address `kernel`; return its result, an integer.

    The parameters are those of the kernels of `r2ccl.kernels.fold`, which combine `count` inputs of
    `nbytes` bytes each and write the result to address `target`. `sources` is the address of a
    table with the addresses of the inputs.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call_at(builder, *args)

    return types.int64(*[types.int64] * 5), generate


@intrinsic
def call_loop(
    typing_context: Any, loop: Any, state: Any, source_at: Any, target_at: Any, call: Any
) -> Any:
    """Call the loop at address `loop` with `is_resumed` 0; return the result of the loop.

    The loop is a `r2ccl.shm.layout.Loop`, and the other parameters are its arguments.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call_at(builder, *args, _I64(0))

    return types.int64(*[types.int64] * 5), generate


@intrinsic
def call_direct(
    typing_context: Any, direct: Any, state: Any, table: Any, call: Any, source: Any, target: Any
) -> Any:
    """Call the function at address `direct`, from `r2ccl.shm.one_message`; return its result."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call_at(builder, *args)

    return types.int64(*[types.int64] * 6), generate


@intrinsic
def call_function(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call the function at address `function` with one integer; return its result, an integer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call_at(builder, *args)

    return types.int64(types.int64, types.int64), generate


def make_fence() -> Callable[[], int]:
    """Return `fence` as a function, which `r2ccl.kernels.native` compiles for calls from Python."""

    def order() -> int:
        fence()
        return 0

    return order


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


def _call_void(builder: Any, name: str) -> None:
    kind = ir.FunctionType(_VOID, [])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])


def _call_at(builder: Any, address: Any, *arguments: Any) -> Any:
    """Generate a call of the function at `address`, which takes and returns 64-bit integers."""
    kind = ir.FunctionType(_I64, [_I64] * len(arguments))
    return builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


def _call_system(builder: Any, number: int, arguments: Any) -> Any:
    kind = ir.FunctionType(_I64, [_I64], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    return builder.call(function, [_I64(number), *arguments])


__all__ = [
    "add",
    "call_direct",
    "call_function",
    "call_kernel",
    "call_loop",
    "clock_ns",
    "cpu_sets",
    "current_cpu",
    "fence",
    "futex_wait",
    "futex_wake",
    "load_acquire",
    "load_ordered",
    "make_fence",
    "pause",
    "read_affinity",
    "read_memory",
    "sched_yield",
    "store_release",
    "stream",
    "stream_fence",
    "words_at",
    "write_affinity",
]
