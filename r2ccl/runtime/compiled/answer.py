"""Answer to the request of a long message, in compiled code; see `r2ccl.runtime.messages.prepared`.

The answer is the *grant*. On the receiver, the kernel of the call's local steps compares the
request with the expected one and completes the grant. On the sender, the same kernel compares the
received grant with the expected one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.runtime.compiled.layout import (
    ENVELOPE_IDENT,
    ENVELOPE_KIND,
    ENVELOPE_SIZE,
    ENVELOPE_TAG,
    EXPECTED_IS_ANY,
    EXPECTED_KIND,
    EXPECTED_NWORDS,
    EXPECTED_SIZE,
    EXPECTED_TAG,
)
from r2ccl.shm.atomics import words_at


def make_answer() -> Callable[[int, int, int, int], int]:
    """Return the kernel that answers a request, for compilation by `r2ccl.kernels.native`.

    Returns
    -------
    callable
        ``kernel(sources, count, target, nbytes)``: `sources` is the address of a table whose second
        word is the address of the received request. `target` is the address of the grant; the
        expected words of the request are directly before the grant. The kernel returns 1 if the
        request does not have these words. Otherwise it stores the number of the request in the
        grant and returns 0. `count` and `nbytes` are ignored. On the sender of the message, the
        second word is the address of the received grant, and `target` that of an unused grant.
    """

    def kernel(sources: Any, count: Any, target: Any, nbytes: Any) -> Any:
        request, grant = words_at(words_at(sources)[1]), words_at(target)
        expected = words_at(target - 8 * EXPECTED_NWORDS)
        if request[ENVELOPE_KIND] != expected[EXPECTED_KIND]:
            return 1
        if expected[EXPECTED_IS_ANY] == 0 and request[ENVELOPE_TAG] != expected[EXPECTED_TAG]:
            return 1
        if request[ENVELOPE_SIZE] != expected[EXPECTED_SIZE]:
            return 1
        grant[ENVELOPE_IDENT] = request[ENVELOPE_IDENT]
        return 0

    return kernel


__all__ = ["make_answer"]
