"""Repetition of a call by one compiled function, which Python calls.

The call is a collective, in shared memory or over TCP, or an exchange of messages over TCP. The
function compares its arguments with those of an earlier call, runs the compiled loop of the call
and returns the result. In Python, these steps would take longer than a small call itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.kernels.native import method_of

_REPEAT = "r2ccl.shm.repeat_loop:make_repeat"

Array: TypeAlias = npt.NDArray[Any]
#: ``repeat(x, out, rest)`` runs a call again with an input, an output or None, and a tuple of all
#: other arguments. It returns the result of the call, or NotImplemented if these arguments do not
#: fit or the call cannot be repeated now; then nothing was done.
Repeat: TypeAlias = Callable[[Any, Any, tuple[Any, ...]], Any]

# Indices of the words that describe a call to be repeated.

#: Address of the loop, of the state, and of the words of the prepared call.
LOOP, STATE, CALL = 0, 1, 2
#: A `Role` of the output; 1 if this rank uses the input, otherwise 0.
OUTPUT, USES_INPUT = 3, 4
#: Addresses of objects: the other arguments of the call, the type of the first of them (None: there
#: are none), the function that continues a call, an array without elements, the type of arrays,
#: NotImplemented, None.
REST, KIND, PROCEED, NOTHING, ARRAY_TYPE, MISSED, NONE = 5, 6, 7, 8, 9, 10, 11
#: Result of the loop, if it is not FINISHED; then input and output, the arguments of PROCEED.
RESULT, ARGUMENTS = 12, 13
_NWORDS = 15

_EMPTY = np.empty(0, np.uint8)


class Role(enum.IntEnum):
    """Output of a call: this rank has none, or it is the input, or another array."""

    NONE = 0
    INPUT = 1
    ARRAY = 2


def repeat_of(
    loop: int,
    state: int,
    call: int,
    rest: tuple[Any, ...],
    *,
    uses_input: bool,
    output: Role,
    proceed: Callable[[Array, Array, int], None],
    kept: object,
) -> Repeat:
    """Return a function that runs a call again, with arrays of the same form.

    Parameters
    ----------
    loop : int
        Address of the call's loop, an `r2ccl.shm.layout.Loop`, as a C function.
    state, call : int
        Address of the state, and of the words of the prepared call. The words must contain the
        address of a form (`r2ccl.shm.arrays.form_of`): for arrays of another form, the loop returns
        CHANGED.
    rest : tuple
        Arguments of the call besides the arrays: numbers, tuples or None. The arguments of a
        repetition must be equal to these, and the first one must also have the same type.
    uses_input : bool
        False: the input of a repetition is ignored, and need not be an array.
    output : Role
        NONE: the output must be an array or None, and is ignored; the call returns None. INPUT: the
        output must be None; the call returns the input. ARRAY: the output must be an array, which
        the call returns.
    proceed : callable
        ``proceed(source, target, result)`` continues a call whose loop returned `result`, neither
        FINISHED nor CHANGED, until it has finished; it raises an error if the call cannot finish.
    kept : object
        Object that the returned function keeps alive.

    Returns
    -------
    Repeat
        While this function runs, no other call that uses `state` may run.

    Raises
    ------
    ImportError, TransportError
        As `r2ccl.kernels.native.method_of`.
    """

    def proceed_with(source: Array, target: Array) -> None:
        proceed(source, target, int(words[RESULT]))

    objects = {
        REST: rest,
        KIND: type(rest[0]) if rest else None,
        PROCEED: proceed_with,
        NOTHING: _EMPTY,
        ARRAY_TYPE: np.ndarray,
        MISSED: NotImplemented,
        NONE: None,
    }
    numbers = {
        LOOP: loop,
        STATE: state,
        CALL: call,
        OUTPUT: int(output),
        USES_INPUT: int(uses_input),
    }
    at = {index: id(each) for index, each in objects.items()} | numbers
    words = np.array([at.get(index, 0) for index in range(_NWORDS)], np.int64)
    return method_of(_REPEAT, (words, kept, rest, proceed_with))


def preload_repeat() -> None:
    """Load the compiled function; compile it if this host has none yet.

    Raises
    ------
    ImportError, TransportError
        As `r2ccl.kernels.native.method_of`.
    """
    method_of(_REPEAT, ())


__all__ = [
    "ARGUMENTS",
    "ARRAY_TYPE",
    "CALL",
    "KIND",
    "LOOP",
    "MISSED",
    "NONE",
    "NOTHING",
    "OUTPUT",
    "PROCEED",
    "REST",
    "RESULT",
    "STATE",
    "USES_INPUT",
    "Repeat",
    "Role",
    "preload_repeat",
    "repeat_of",
]
