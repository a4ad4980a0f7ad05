"""System calls, and unaligned loads and stores, in code that Numba compiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from r2ccl.kernels.compiling import intrinsic

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)

EAGAIN, EINTR = 11, 4
_FIONREAD = 0x541B
_SOL_SOCKET = 1
#: MSG_DONTWAIT, MSG_NOSIGNAL
_RECEIVE_FLAGS, _SEND_FLAGS = 0x40, 0x4040


@intrinsic
def load32(typing_context: Any, address: Any) -> Any:
    """Return the unsigned 32-bit number at an address, which need not be aligned."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], _I32.as_pointer())
        return builder.zext(builder.load(at, align=1), _I64)

    return types.int64(types.int64), generate


@intrinsic
def load64(typing_context: Any, address: Any) -> Any:
    """Return the 64-bit number at an address, which need not be aligned."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()), align=1)

    return types.int64(types.int64), generate


@intrinsic
def store64(typing_context: Any, address: Any, value: Any) -> Any:
    """Store a 64-bit number at an address, which need not be aligned."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def move_bytes(typing_context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy `nbytes` between addresses whose memory may overlap: memmove(3)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, at = (builder.inttoptr(each, _I8.as_pointer()) for each in args[:2])
        cgutils.raw_memmove(builder, to, at, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def receive(typing_context: Any, fd: Any, address: Any, nbytes: Any) -> Any:
    """Read from a socket without waiting: recv(2).

    Return the number of bytes read, 0 if the peer closed the connection, or -1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _libc(builder, "recv", _I64, [_I32, _I64, _I64, _I32])
        fd = builder.trunc(args[0], _I32)
        return builder.call(function, [fd, args[1], args[2], _I32(_RECEIVE_FLAGS)])

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def send_message(typing_context: Any, fd: Any, message: Any) -> Any:
    """Write a ``struct msghdr`` to a socket without waiting: sendmsg(2).

    Return the number of bytes written, or -1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _libc(builder, "sendmsg", _I64, [_I32, _I64, _I32])
        fd = builder.trunc(args[0], _I32)
        return builder.call(function, [fd, args[1], _I32(_SEND_FLAGS)])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def poll_until(typing_context: Any, polls: Any, count: Any, time: Any) -> Any:
    """Wait for events of descriptors: ppoll(2) with the timeout at `time`.

    Return the number of descriptors with events, 0 after the timeout, or -1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _libc(builder, "ppoll", _I32, [_I64] * 4)
        found = builder.call(function, [*args, _I64(0)])
        return builder.sext(found, _I64)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def count_unread(typing_context: Any, fd: Any, address: Any) -> Any:
    """Store the number of unread bytes of a socket (FIONREAD), in 32 bits, at `address`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _libc(builder, "ioctl", _I32, [_I32, _I64], var_arg=True)
        builder.call(function, [builder.trunc(args[0], _I32), _I64(_FIONREAD), args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def read_option(typing_context: Any, fd: Any, option: Any, address: Any) -> Any:
    """Store a 32-bit socket option of level SOL_SOCKET at `address`: getsockopt(2).

    The size of the option, the 32-bit number 4, must be at ``address + 8``. Return 0, or -1 if the
    call failed.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _libc(builder, "getsockopt", _I32, [_I32, _I32, _I32, _I64, _I64])
        fd, option = (builder.trunc(each, _I32) for each in args[:2])
        size = builder.add(args[2], _I64(8))
        found = builder.call(function, [fd, _I32(_SOL_SOCKET), option, args[2], size])
        return builder.sext(found, _I64)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def errno(typing_context: Any) -> Any:
    """Return the errno of the last failed system call of this thread."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _libc(builder, "__errno_location", _I32.as_pointer(), [])
        return builder.sext(builder.load(builder.call(function, [])), _I64)

    return types.int64(), generate


def _libc(builder: Any, name: str, result: Any, arguments: Any, var_arg: bool = False) -> Any:
    kind = ir.FunctionType(result, arguments, var_arg=var_arg)
    return cgutils.get_or_insert_function(builder.module, kind, name)


__all__ = [
    "EAGAIN",
    "EINTR",
    "count_unread",
    "errno",
    "load32",
    "load64",
    "move_bytes",
    "poll_until",
    "read_option",
    "receive",
    "send_message",
    "store64",
]
