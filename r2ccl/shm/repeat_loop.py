"""Compiled function that runs a call again; see `r2ccl.shm.repeat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.kernels.arrays import DATA
from r2ccl.kernels.python_api import (
    are_equal,
    call_with,
    data_at,
    drop_reference,
    new_reference,
    restore_thread,
    save_thread,
    tuple_item,
    type_of,
)
from r2ccl.shm.atomics import call_loop, words_at
from r2ccl.shm.layout import CHANGED, FINISHED
from r2ccl.shm.repeat import (
    ARGUMENTS,
    ARRAY_TYPE,
    CALL,
    KIND,
    LOOP,
    MISSED,
    NONE,
    NOTHING,
    OUTPUT,
    PROCEED,
    REST,
    RESULT,
    STATE,
    USES_INPUT,
    Role,
)

_NO_OUTPUT, _IS_INPUT = int(Role.NONE), int(Role.INPUT)


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
        source, target, rest = given[0], given[1], given[2]
        if words[KIND] != words[NONE] and type_of(tuple_item(rest, 0)) != words[KIND]:
            return new_reference(missed)
        if not are_equal(rest, words[REST]):
            return new_reference(missed)
        if words[USES_INPUT] == 0:
            source = words[NOTHING]
        elif type_of(source) != words[ARRAY_TYPE]:
            return new_reference(missed)
        has_output = target != words[NONE]
        if has_output and (words[OUTPUT] == _IS_INPUT or type_of(target) != words[ARRAY_TYPE]):
            return new_reference(missed)
        if words[OUTPUT] == _NO_OUTPUT:
            target, result = words[NOTHING], words[NONE]
        elif words[OUTPUT] == _IS_INPUT:
            target = source
            result = source
        elif has_output:
            result = target
        else:
            return new_reference(missed)

        thread = save_thread()
        found = call_loop(words[LOOP], words[STATE], source + DATA, target + DATA, words[CALL])
        restore_thread(thread)
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


__all__ = ["make_repeat"]
