"""Compiled function that runs a direct call of messages again; see `r2ccl.shm.repeat_message`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.kernels.arrays import DATA
from r2ccl.kernels.compiling import inlined
from r2ccl.kernels.python_api import (
    are_equal,
    call_with,
    data_at,
    drop_reference,
    handle_signals,
    list_item,
    list_size,
    new_reference,
    restore_thread,
    save_thread,
    tuple_item,
    type_of,
)
from r2ccl.shm.atomics import call_direct, words_at
from r2ccl.shm.layout import CHANGED, FINISHED
from r2ccl.shm.message_layout import CALL_RESULT
from r2ccl.shm.repeat import FAILURE, FALSE, SLOW
from r2ccl.shm.repeat_loop import fail, return_turn, take_turn
from r2ccl.shm.repeat_message import (
    ARRAY_TYPE,
    CALLS,
    DIRECT,
    INT_TYPE,
    KEY,
    KEYS,
    MESSAGE,
    NARGS,
    NFLAGS,
    NKEYS,
    NOTHING,
    PROCEED,
    RECEIVED,
    SENT,
    STATE,
    TABLE,
    WORDS,
)


@inlined
def _array_at(words: Any, given: Any, index: Any) -> Any:
    """Return argument `index`, if it is an array; NOTHING if the index is -1; otherwise 0."""
    if index < 0:
        return words[NOTHING]
    return given[index] if type_of(given[index]) == words[ARRAY_TYPE] else 0


@inlined
def _find_call(words: Any, given: Any) -> Any:
    """Return the earlier call with the ranks and tags of the arguments; 0 if there is none."""
    calls, found = words[CALLS], 0
    for number in range(list_size(calls)):
        call = list_item(calls, number)
        key, nequal = tuple_item(call, KEY), 0
        for index in range(words[NKEYS]):
            value = given[words[KEYS + index]]
            if type_of(value) == words[INT_TYPE]:
                nequal += are_equal(value, tuple_item(key, index))
        if nequal == words[NKEYS]:
            found = call
            break
    return found


def make_message() -> Callable[[int, int, int], int]:
    """Return the function ``message``, which `r2ccl.kernels.native` compiles.

    Returns
    -------
    callable
        ``message(owner, args, nargs)``, with the calling convention of `method_of`. The first item
        of `owner`, a tuple, is the array of words that `r2ccl.shm.repeat_message.message_of` makes.
    """

    def message(owner: Any, args: Any, nargs: Any) -> Any:
        own = data_at(tuple_item(owner, 0))
        words, given = words_at(own), words_at(args)
        is_fit = nargs == words[NARGS]
        for number in range(words[NFLAGS]):
            is_fit = is_fit and given[nargs - 1 - number] == words[FALSE]
        if not is_fit:
            return call_with(words[SLOW], args, nargs)
        source = _array_at(words, given, words[SENT])
        target = _array_at(words, given, words[RECEIVED])
        call = _find_call(words, given) if source != 0 and target != 0 else 0
        if call == 0 or not take_turn(words):
            return call_with(words[SLOW], args, nargs)
        new_reference(call)  # another thread may forget the call
        at = data_at(tuple_item(call, WORDS))
        thread = save_thread()
        found = call_direct(
            words[DIRECT], words[STATE], words[TABLE], at, source + DATA, target + DATA
        )
        restore_thread(thread)
        result, is_returned = 0, False
        if found == FINISHED:
            # Later, the message may be that of another thread, which has repeated the call.
            result = new_reference(list_item(tuple_item(call, MESSAGE), 0))
            is_returned = handle_signals() and return_turn(words, args)
        elif found == CHANGED:
            is_returned = return_turn(words, args)
        else:
            words_at(at)[CALL_RESULT] = found
            words[FAILURE], words[FAILURE + 1], words[FAILURE + 2] = call, source, target
            result = call_with(words[PROCEED], own + 8 * FAILURE, 3)
            is_returned = result != 0
        drop_reference(call)
        if not is_returned:
            fail(words, 0, found == FINISHED)
            drop_reference(result)
            return 0
        if found == CHANGED:
            return call_with(words[SLOW], args, nargs)
        return result

    return message


__all__ = ["make_message"]
