"""Repetition of a call by compiled functions, which Python calls.

The call is a collective, in shared memory or over TCP, or an exchange of messages over TCP. The
function that `repeat_of` makes compares its arguments with those of one earlier call, runs the
compiled loop of the call and returns the result. The function that `start_of` makes finds the
earlier call among the remembered calls in shared memory, and takes the turn to run it again. In
Python, these steps would take longer than a small call itself.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.native import method_of

_REPEAT = "r2ccl.shm.repeat_loop:make_repeat"
_START = "r2ccl.shm.repeat_loop:make_start"

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
#: Addresses of objects: the other arguments of the call, the function that continues a call, an
#: array without elements, the type of arrays, NotImplemented, None.
REST, PROCEED, NOTHING, ARRAY_TYPE, MISSED, NONE = 5, 6, 7, 8, 9, 10
#: Addresses of the types of integers, lists and tuples.
INT_TYPE, LIST_TYPE, TUPLE_TYPE = 11, 12, 13
#: Result of the loop, if it is not FINISHED; then input and output, the arguments of PROCEED.
RESULT, ARGUMENTS = 14, 15
_NWORDS = 17

# Indices of the words of `turn_words`, besides NONE: addresses of objects.

SLOW, FAILED, TURN, REPEATING, AWAITED, WAKE, GROUPS = 0, 1, 2, 3, 4, 5, 6
FALSE, TRUE = 9, 11
#: Address of the word for the thread that has the turn.
HOLDER = 12
#: Arguments of FAILED before the error, at most three.
FAILURE = 13
# Indices of the words of `start_of`: addresses of objects.
LAST, FUNCTION_TYPE = 7, 8
#: First of the words for other compiled functions that take a turn.
SPECIAL = 20
#: Number of conditions; then three words for each: object, name of its attribute, its value.
NCONDITIONS, CONDITIONS = 38, 39

_EMPTY = np.empty(0, np.uint8)


class Role(enum.IntEnum):
    """Output of a call on this rank: none, the input itself, or another array."""

    NONE = 0
    INPUT = 1
    ARRAY = 2


class CompiledTurn(Protocol):
    """Part of `r2ccl.runtime.turn.Turn`, the right to run calls, that compiled code uses."""

    #: True while compiled code has the turn.
    is_repeating: bool
    #: If True, compiled code calls `wake` once it has returned the turn.
    is_awaited: bool
    #: One word, in which compiled code stores the thread that takes the turn.
    holder: npt.NDArray[np.int64]

    def wake(self) -> None:
        """Wake the threads that wait for the turn."""
        ...


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
        Arguments of the call besides the arrays: integers, None, or lists or tuples of exact
        integers. The arguments of a repetition, and their items, must be equal to these and have
        the same types.
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
        PROCEED: proceed_with,
        NOTHING: _EMPTY,
        ARRAY_TYPE: np.ndarray,
        MISSED: NotImplemented,
        NONE: None,
        INT_TYPE: int,
        LIST_TYPE: list,
        TUPLE_TYPE: tuple,
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


def start_of(
    start: Callable[..., Any],
    failed: Callable[..., None],
    last: dict[Any, Repeat],
    turn: CompiledTurn,
    groups: list[Any],
    conditions: Sequence[tuple[object, str, object]],
) -> Callable[..., Any]:
    """Return a compiled function that does the same as `start`, faster if a call is repeated.

    Parameters
    ----------
    start : callable
        ``start(stream, is_async, make, x, out, *rest)`` runs a call.
    failed : callable
        ``failed(make, x, out, error)`` is called before a repeated call raises `error`.
    last : dict of callable to Repeat
        Function from `repeat_of` for the last call of each ``make``; it runs instead of `start` if
        the arguments fit.
    turn : CompiledTurn
        If `is_repeating` is True, `start` is called.
    groups : list
        If it has items, `start` is called.
    conditions : sequence of (object, str, object)
        Each item is an object, the name of one of its attributes, and a value. If the attribute is
        not this value (compared by identity), `start` is called.

    Raises
    ------
    ImportError, TransportError
        As `r2ccl.kernels.native.method_of`.
    """
    special = {LAST: last, FUNCTION_TYPE: type(len)}
    words = turn_words(start, failed, turn, groups, conditions, special)
    return method_of(_START, words)


def turn_words(
    slow: Callable[..., Any],
    failed: Callable[..., None],
    turn: CompiledTurn,
    groups: list[Any],
    conditions: Sequence[tuple[object, str, object]],
    special: dict[int, object],
) -> tuple[Any, ...]:
    """Return the owner, for `method_of`, of a compiled function that takes `turn` or calls `slow`.

    The owner is a tuple: the array of words, then objects that it keeps alive. For `failed`,
    `turn`, `groups` and `conditions`, see `start_of`; the error is the last argument of `failed`.
    `special` maps the indices of further words to the objects whose addresses they contain.
    """
    objects = {
        SLOW: slow,
        FAILED: failed,
        TURN: turn,
        REPEATING: sys.intern("is_repeating"),
        AWAITED: sys.intern("is_awaited"),
        WAKE: turn.wake,
        GROUPS: groups,
        FALSE: False,
        TRUE: True,
        NONE: None,
    } | special
    conditions = [*conditions, (turn, "is_repeating", False)]
    listed = [part for each, name, value in conditions for part in (each, sys.intern(name), value)]
    words = np.zeros(CONDITIONS + len(listed), np.int64)
    words[list(objects)] = [id(each) for each in objects.values()]
    words[HOLDER], words[NCONDITIONS] = data_of(turn.holder), len(conditions)
    words[CONDITIONS:] = [id(part) for part in listed]
    return words, tuple(objects.values()), tuple(listed)


def preload_repeat() -> None:
    """Load the compiled functions; compile them if they are not cached.

    Raises
    ------
    ImportError, TransportError
        As `r2ccl.kernels.native.method_of`.
    """
    method_of(_REPEAT, ())
    method_of(_START, ())


__all__ = [
    "ARGUMENTS",
    "ARRAY_TYPE",
    "AWAITED",
    "CALL",
    "CONDITIONS",
    "FAILED",
    "FAILURE",
    "FALSE",
    "FUNCTION_TYPE",
    "GROUPS",
    "HOLDER",
    "INT_TYPE",
    "LAST",
    "LIST_TYPE",
    "LOOP",
    "MISSED",
    "NCONDITIONS",
    "NONE",
    "NOTHING",
    "OUTPUT",
    "PROCEED",
    "REPEATING",
    "REST",
    "RESULT",
    "SLOW",
    "SPECIAL",
    "STATE",
    "TRUE",
    "TUPLE_TYPE",
    "TURN",
    "USES_INPUT",
    "WAKE",
    "CompiledTurn",
    "Repeat",
    "Role",
    "preload_repeat",
    "repeat_of",
    "start_of",
    "turn_words",
]
