"""Compiled functions that run a call again; see `r2ccl.shm.repeat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.kernels.arrays import DATA
from r2ccl.kernels.compiling import inlined
from r2ccl.kernels.python_api import (
    are_equal,
    call_with,
    data_at,
    dict_item,
    drop_reference,
    handle_signals,
    has_value,
    list_item,
    list_size,
    new_reference,
    owner_of,
    raise_again,
    restore_thread,
    save_thread,
    set_attribute,
    stack_words,
    take_exception,
    thread_ident,
    tuple_item,
    tuple_size,
    type_of,
)
from r2ccl.shm.atomics import call_loop, words_at
from r2ccl.shm.layout import CHANGED, FINISHED
from r2ccl.shm.repeat import (
    ARGUMENTS,
    ARRAY_TYPE,
    AWAITED,
    CALL,
    CONDITIONS,
    FAILED,
    FAILURE,
    FALSE,
    FUNCTION_TYPE,
    GROUPS,
    HOLDER,
    INT_TYPE,
    LAST,
    LIST_TYPE,
    LOOP,
    MISSED,
    NCONDITIONS,
    NONE,
    NOTHING,
    OUTPUT,
    PROCEED,
    REPEATING,
    REST,
    RESULT,
    SLOW,
    STATE,
    TRUE,
    TUPLE_TYPE,
    TURN,
    USES_INPUT,
    WAKE,
    Role,
)

_NO_OUTPUT, _IS_INPUT = int(Role.NONE), int(Role.INPUT)
# Arguments of `start`: index of the function that makes the request, and of the input, which the
# output follows; number of arguments up to the output, which is included.
_MAKE, _X, _NBEFORE = 2, 3, 5
_MOST_TRIES = 3


@inlined
def is_same(words: Any, given: Any, stored: Any) -> Any:
    """Return whether `given` has the type and value of `stored`, an argument of an earlier call.

    No Python code runs: the items of `stored`, if it is a list or a tuple, are exact integers.
    """
    kind = type_of(stored)
    if type_of(given) != kind:
        return False
    is_list = kind == words[LIST_TYPE]
    if not is_list and kind != words[TUPLE_TYPE]:
        return are_equal(given, stored) != 0
    size = list_size(stored) if is_list else tuple_size(stored)
    if size != (list_size(given) if is_list else tuple_size(given)):
        return False
    for number in range(size):
        item = list_item(given, number) if is_list else tuple_item(given, number)
        wanted = list_item(stored, number) if is_list else tuple_item(stored, number)
        if type_of(item) != words[INT_TYPE] or not are_equal(item, wanted):
            return False
    return True


@inlined
def arrays_of(words: Any, source: Any, target: Any) -> Any:
    """Return the input, the output and the result of a repetition with the given arrays.

    Each of the three is the address of an object; the result is 0 if the arrays do not fit.
    """
    result = 0
    if words[USES_INPUT] == 0:
        source = words[NOTHING]
    elif type_of(source) != words[ARRAY_TYPE]:
        return source, target, result
    has_output = target != words[NONE]
    if has_output and (words[OUTPUT] == _IS_INPUT or type_of(target) != words[ARRAY_TYPE]):
        return source, target, result
    if words[OUTPUT] == _NO_OUTPUT:
        target, result = words[NOTHING], words[NONE]
    elif words[OUTPUT] == _IS_INPUT:
        target = source
        result = source
    elif has_output:
        result = target
    return source, target, result


@inlined
def run(words: Any, source: Any, target: Any) -> Any:
    """Run the loop of a repetition without the GIL, and return its result."""
    thread = save_thread()
    found = call_loop(words[LOOP], words[STATE], source + DATA, target + DATA, words[CALL])
    restore_thread(thread)
    return found


@inlined
def take_turn(words: Any) -> Any:
    """Take the turn and return True, or return False if the conditions for this are not met.

    `words` are those of `r2ccl.shm.repeat.turn_words`. This function runs no Python code and keeps
    the GIL, so no other thread of Python runs meanwhile.
    """
    is_free = list_size(words[GROUPS]) == 0
    for number in range(words[NCONDITIONS]):
        if is_free:
            each = CONDITIONS + 3 * number
            is_free = has_value(words[each], words[each + 1], words[each + 2])
    if is_free:
        words_at(words[HOLDER])[0] = thread_ident()
        set_attribute(words[TURN], words[REPEATING], words[TRUE])
    return is_free


@inlined
def has_turn(words: Any) -> Any:
    """Return whether compiled code has taken the turn in this thread and not returned it."""
    if has_value(words[TURN], words[REPEATING], words[FALSE]):
        return False
    return words_at(words[HOLDER])[0] == thread_ident()


@inlined
def return_turn(words: Any, args: Any) -> Any:
    """Return the turn, and wake threads that wait for it.

    Return False if ``turn.wake``, which this function calls without arguments, raised an exception,
    such as KeyboardInterrupt. `args` may be the address of any table of arguments.
    """
    set_attribute(words[TURN], words[REPEATING], words[FALSE])
    is_done = True
    if not has_value(words[TURN], words[AWAITED], words[FALSE]):
        woken = call_with(words[WAKE], args, 0)
        is_done = woken != 0
        drop_reference(woken)
    return is_done


@inlined
def fail(words: Any, nfailure: Any, is_always: Any) -> None:
    """Call FAILED because of the exception that is set, and keep the exception.

    If this thread has the turn, FAILED is called, and the turn is returned afterwards. Otherwise
    FAILED is only called if `is_always`. FAILED gets the first `nfailure` words of FAILURE, and the
    exception. If FAILED raises another exception, it is called again with that exception, up to
    `_MOST_TRIES` calls in total; the last exception stays set.
    """
    # Other threads may use the words while this thread runs Python code.
    arguments = stack_words()
    error = arguments + 8 * 4
    for number in range(nfailure):
        words_at(arguments)[number] = words[FAILURE + number]
    # Not even the attribute of an object may be read while an exception is set.
    take_exception(error)
    if is_always or has_turn(words):
        for _ in range(_MOST_TRIES):
            words_at(arguments)[nfailure] = words_at(error)[1]
            done = call_with(words[FAILED], arguments, nfailure + 1)
            drop_reference(done)
            if done != 0:
                break
            # Such as Ctrl-C.
            for number in range(3):
                drop_reference(words_at(error)[number])
            take_exception(error)
        if has_turn(words):
            # Threads that wait for the turn look at it from time to time.
            set_attribute(words[TURN], words[REPEATING], words[FALSE])
    raise_again(error)


def make_repeat() -> Callable[[int, int, int], int]:
    """Return the function ``repeat``, which `r2ccl.kernels.native` compiles.

    Returns
    -------
    callable
        ``repeat(owner, args, nargs)``, with the calling convention of `method_of`. The first item
        of `owner`, a tuple, is the array of words. The arguments are those of a `Repeat`.
    """

    def repeat(owner: Any, args: Any, nargs: Any) -> Any:
        at = data_at(tuple_item(owner, 0))
        words, given = words_at(at), words_at(args)
        missed = words[MISSED]
        if nargs != 3:
            return new_reference(missed)
        rest, nrest = given[2], tuple_size(words[REST])
        if tuple_size(rest) != nrest:
            return new_reference(missed)
        for number in range(nrest):
            if not is_same(words, tuple_item(rest, number), tuple_item(words[REST], number)):
                return new_reference(missed)
        source, target, result = arrays_of(words, given[0], given[1])
        if result == 0:
            return new_reference(missed)
        found = run(words, source, target)
        if found == CHANGED:
            return new_reference(missed)
        if found != FINISHED:
            words[RESULT] = found
            words[ARGUMENTS], words[ARGUMENTS + 1] = source, target
            done = call_with(words[PROCEED], at + 8 * ARGUMENTS, 2)
            if done == 0:
                return 0
            drop_reference(done)
        return new_reference(result)

    return repeat


def make_start() -> Callable[[int, int, int], int]:
    """Return the function ``start``, which `r2ccl.kernels.native` compiles.

    Returns
    -------
    callable
        ``start(owner, args, nargs)``, with the calling convention of `method_of`. The first item of
        `owner`, a tuple, is the array of words that `r2ccl.shm.repeat.start_of` makes. The
        arguments are those of `r2ccl.runtime.collectives.Collectives.start`.
    """

    def start(owner: Any, args: Any, nargs: Any) -> Any:
        words, given = words_at(data_at(tuple_item(owner, 0))), words_at(args)
        nrest = nargs - _NBEFORE
        if nrest < 1 or given[0] != words[NONE] or given[1] != words[FALSE]:
            return call_with(words[SLOW], args, nargs)
        repeat = dict_item(words[LAST], given[_MAKE])
        if repeat == 0 or type_of(repeat) != words[FUNCTION_TYPE]:
            return call_with(words[SLOW], args, nargs)
        at = data_at(tuple_item(owner_of(repeat), 0))
        call = words_at(at)
        is_fit = tuple_size(call[REST]) == nrest
        for number in range(nrest):
            if is_fit:
                stored = tuple_item(call[REST], number)
                is_fit = is_same(call, given[_NBEFORE + number], stored)
        source, target, result = arrays_of(call, given[_X], given[_X + 1])
        is_fit = is_fit and result != 0
        if not is_fit or not take_turn(words):
            return call_with(words[SLOW], args, nargs)
        new_reference(repeat)  # another thread may forget the call
        new_reference(result)
        found = run(call, source, target)
        has_failed = False
        if found != FINISHED and found != CHANGED:
            call[RESULT] = found
            call[ARGUMENTS], call[ARGUMENTS + 1] = source, target
            done = call_with(call[PROCEED], at + 8 * ARGUMENTS, 2)
            has_failed = done == 0
            drop_reference(done)
        elif found == FINISHED:
            has_failed = not handle_signals()
        if not has_failed:
            has_failed = not return_turn(words, args)
        drop_reference(repeat)
        if has_failed:
            for number in range(3):
                words[FAILURE + number] = given[_MAKE + number]
            fail(words, 3, True)
            drop_reference(result)
            return 0
        if found == CHANGED:
            drop_reference(result)
            return call_with(words[SLOW], args, nargs)
        return result

    return start


__all__ = ["fail", "make_repeat", "make_start", "return_turn", "take_turn"]
