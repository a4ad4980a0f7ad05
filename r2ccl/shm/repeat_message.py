"""Compiled functions, called from Python, that send or receive a message by a direct call.

A direct call is a compiled send, receive, or both at once (`r2ccl.shm.one_message`). The function
that `message_of` makes looks for an earlier direct call with the same ranks and tags. If it finds
one, it takes the turn to move messages, runs the direct call again, and returns the message that
the call received, if any. Otherwise it calls the slower Python function. In Python, these steps
would take three times as long as the direct call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from r2ccl.kernels.native import address_of, method_of
from r2ccl.shm.repeat import SPECIAL, CompiledTurn, turn_words

_MESSAGE = "r2ccl.shm.repeat_message_loop:make_message"
_DIRECT = "r2ccl.shm.one_message:make_direct"

# Indices of the words of the compiled function, in addition to those of `turn_words`. Addresses of
# objects: the list of earlier calls, the function that continues a call, an array without elements,
# the type of arrays.

CALLS, PROCEED, NOTHING, ARRAY_TYPE = SPECIAL, SPECIAL + 1, SPECIAL + 2, SPECIAL + 3
#: Addresses of the direct call as a C function, of the state, and of the table.
DIRECT, STATE, TABLE = SPECIAL + 4, SPECIAL + 5, SPECIAL + 6
#: Number of arguments; index of the array to send, and of the array to receive into, or -1.
NARGS, SENT, RECEIVED = SPECIAL + 7, SPECIAL + 8, SPECIAL + 9
#: Number of arguments at the end that must be False; number of items of the key.
NFLAGS, NKEYS = SPECIAL + 10, SPECIAL + 11
#: Indices of the arguments that are the items of the key.
KEYS = SPECIAL + 12
#: Address of the type of integers; the key has at most four items.
INT_TYPE = SPECIAL + 16

# Indices of an earlier call, a tuple: an array of its words (`r2ccl.shm.message_layout`), the tuple
# of its ranks and tags, and a list of one item, the message that it received last.

WORDS, KEY, MESSAGE = 0, 1, 2

_EMPTY = np.empty(0, np.uint8)


def message_of(
    slow: Callable[..., Any],
    proceed: Callable[[Any, Any, Any], Any],
    failed: Callable[[BaseException], None],
    turn: CompiledTurn,
    groups: list[Any],
    conditions: Sequence[tuple[object, str, object]],
    *,
    calls: list[Any],
    state: int,
    table: int,
    names: Sequence[str],
) -> Callable[..., Any]:
    """Return a compiled function that does the same as `slow`, faster if a call is repeated.

    Parameters
    ----------
    slow : callable
        Sends or receives; has the arguments `names`, which are positional.
    proceed : callable
        ``proceed(call, x, out)`` continues a direct call that has not finished, or that received a
        message of another tag or size than in the last call; CALL_RESULT in the call's words
        tells which. It returns the turn, and its result is the message or None.
    failed : callable
        ``failed(error)`` is called if a signal handler or ``turn.wake`` raised an error after the
        direct call finished, or if `proceed` raised an error and this thread still has the turn.
    turn, groups, conditions
        As for `r2ccl.shm.repeat.start_of`.
    calls : list of tuple
        Earlier direct calls, see WORDS, KEY and MESSAGE. The caller changes the list.
    state, table : int
        Addresses of the state and of the table, for the direct calls.
    names : sequence of str
        Name of each argument: "x" or "out" for an array, "is_..." for a flag, any other name for
        an integer of the key. Flags come last; if a flag is not False, `slow` is called.

    Raises
    ------
    ImportError, TransportError
        As `r2ccl.kernels.native.method_of`.
    """
    special = {
        CALLS: calls,
        PROCEED: proceed,
        NOTHING: _EMPTY,
        ARRAY_TYPE: np.ndarray,
        INT_TYPE: int,
    }
    owner = turn_words(slow, failed, turn, groups, conditions, special)
    words = owner[0]
    words[[DIRECT, STATE, TABLE]] = address_of(_DIRECT), state, table
    places = {name: index for index, name in enumerate(names)}
    nflags = sum(name.startswith("is_") for name in names)
    keys = [at for name, at in places.items() if name not in ("x", "out")]
    keys = keys[: len(keys) - nflags]
    words[[NARGS, SENT, RECEIVED]] = len(names), places.get("x", -1), places.get("out", -1)
    words[[NFLAGS, NKEYS]] = nflags, len(keys)
    words[KEYS : KEYS + len(keys)] = keys
    return method_of(_MESSAGE, owner)


def preload_message() -> None:
    """Load the compiled function; compile it if it is not cached.

    Raises
    ------
    ImportError, TransportError
        As `r2ccl.kernels.native.method_of`.
    """
    method_of(_MESSAGE, ())


__all__ = [
    "ARRAY_TYPE",
    "CALLS",
    "DIRECT",
    "INT_TYPE",
    "KEY",
    "KEYS",
    "MESSAGE",
    "NARGS",
    "NFLAGS",
    "NKEYS",
    "NOTHING",
    "PROCEED",
    "RECEIVED",
    "SENT",
    "STATE",
    "TABLE",
    "WORDS",
    "message_of",
    "preload_message",
]
