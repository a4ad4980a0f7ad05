"""Hand-over of the newest state of links from one held program to another, in compiled code.

Held programs share some of their words, see `r2ccl.runtime.compiled.hold`. The shared words of a
program are described by an array of 64-bit words: `WORDS`, `NSHARED`, then for each shared word its
index in the program's words, its index in the table of all shared words, and its `ahead`: the value
in the table minus the value in the program, once the program's call has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.shm.atomics import words_at

#: Address of the program's words; number of its shared words; index of the first of their entries.
WORDS, NSHARED, FIRST = 0, 1, 2
#: Number of words of an entry.
NENTRY = 3


def make_hand_over() -> Callable[[int, int, int, int], int]:
    """Return the function that hands the state over, for compilation by `r2ccl.kernels.native`.

    Returns
    -------
    callable
        ``hand_over(source, is_ended, target, table)`` copies the shared words of one program to the
        table, and then from the table to another program. `source` and `target` are the addresses
        of the arrays that describe the shared words of these programs; 0: there is no such program.
        `table` is the address of the table. `is_ended` is 1 if the call of the first program has
        ended, 0 if it is running; the call of the second program must have ended. Returns 0.
    """

    def hand_over(source: Any, is_ended: Any, target: Any, table: Any) -> Any:
        rows = words_at(table)
        if source:
            shared = words_at(source)
            words = words_at(shared[WORDS])
            for entry in range(FIRST, FIRST + NENTRY * shared[NSHARED], NENTRY):
                rows[shared[entry + 1]] = words[shared[entry]] + shared[entry + 2] * is_ended
        if target:
            shared = words_at(target)
            words = words_at(shared[WORDS])
            for entry in range(FIRST, FIRST + NENTRY * shared[NSHARED], NENTRY):
                words[shared[entry]] = rows[shared[entry + 1]] - shared[entry + 2]
        return 0

    return hand_over


__all__ = ["FIRST", "NENTRY", "NSHARED", "WORDS", "make_hand_over"]
