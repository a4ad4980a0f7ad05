"""Repetition of an exchange of messages over TCP, see `r2ccl.runtime.messages.direct_calls`.

The compiled loop does what `r2ccl.runtime.messages.driver` does for each message. It makes the
envelope to send, takes the data of a short message from the received envelope, and counts the bytes
of short messages that are sent and taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.kernels.compiling import copy_bytes, inlined
from r2ccl.runtime.compiled.layout import (
    ARRAYS_FORM,
    ENVELOPE_DATA,
    ENVELOPE_IDENT,
    ENVELOPE_KIND,
    ENVELOPE_SIZE,
    ENVELOPE_TAG,
    ENVELOPE_TAKEN,
    IDENT,
    INCOMING,
    INCOMING_KIND,
    INCOMING_NBYTES,
    INCOMING_TAG,
    INCOMING_TAKEN,
    IS_ANSWERED,
    IS_LONG,
    LOOP,
    NBYTES_REPORTED,
    NBYTES_SENT,
    NBYTES_TAKEN,
    NBYTES_TOOK,
    OUTGOING,
    OUTGOING_NBYTES,
    SPACES,
    UNEXPECTED,
)
from r2ccl.runtime.compiled.repeated import is_slot_free, renew
from r2ccl.shm.atomics import call_function, words_at
from r2ccl.shm.layout import CHANGED, FINISHED
from r2ccl.shm.rounds import fits
from r2ccl.types import MOST_UNREPORTED, MOST_UNTAKEN_ON_LINKS


@inlined
def is_possible(words: Any) -> Any:
    """Return whether the receiver may buffer the message, and this rank need not send a report.

    After every `MOST_UNREPORTED` bytes, this rank reports to the sender how many bytes it has
    taken. If this rank also sends a message to that sender, the message carries the report.
    """
    nbytes = words[NBYTES_SENT] - words[NBYTES_TAKEN] + words[OUTGOING_NBYTES]
    if words[OUTGOING] and nbytes > MOST_UNTAKEN_ON_LINKS:
        return False
    is_reported = words[OUTGOING] and words[IS_ANSWERED]
    return is_reported or words[NBYTES_TOOK] - words[NBYTES_REPORTED] < MOST_UNREPORTED


@inlined
def fill(words: Any, source: Any) -> None:
    """Fill in the envelope to send; the data of a short message is at address `source`."""
    envelope = words_at(words[OUTGOING])
    envelope[ENVELOPE_IDENT] = words[IDENT] + 1
    if words[IS_ANSWERED]:
        envelope[ENVELOPE_TAKEN] = words[NBYTES_REPORTED] = words[NBYTES_TOOK]
    copy_bytes(words[OUTGOING] + 8 * ENVELOPE_DATA, source, words[OUTGOING_NBYTES])


@inlined
def take(words: Any, target: Any) -> Any:
    """Copy the data of the received envelope to address `target`, count its bytes, return True.

    Return False, and do nothing, if the envelope is not the expected one.
    """
    envelope, nbytes = words_at(words[INCOMING]), words[INCOMING_NBYTES]
    is_expected = envelope[ENVELOPE_KIND] == words[INCOMING_KIND]
    is_expected = is_expected and envelope[ENVELOPE_TAG] == words[INCOMING_TAG]
    if not is_expected or envelope[ENVELOPE_SIZE] != nbytes:
        return False
    copy_bytes(target, words[INCOMING] + 8 * ENVELOPE_DATA, nbytes)
    words[NBYTES_TOOK] += nbytes
    words[INCOMING_TAKEN] = envelope[ENVELOPE_TAKEN]
    if words[IS_ANSWERED]:
        words[NBYTES_TAKEN] = envelope[ENVELOPE_TAKEN]
    return True


def make_repeated_message() -> Callable[[int, int, int, int, int], int]:
    """Return the loop of a repeated exchange, for compilation by `r2ccl.kernels.native`.

    Returns
    -------
    callable
        ``loop(address, source_at, target_at, call, is_resumed)``. The parameters and results are
        those of the loop of `r2ccl.runtime.compiled.repeated.make_repeated`, with two exceptions.
        `call` is the address of the words of the exchange. The loop returns UNEXPECTED if the
        exchange is complete but the received envelope is not the expected one; then the sent
        message is counted, and the received message is not.
    """

    def loop(address: Any, source_at: Any, target_at: Any, call: Any, is_resumed: Any) -> Any:
        state, words = words_at(address), words_at(call)
        if not fits(words[ARRAYS_FORM], source_at, target_at) or not is_slot_free(state):
            return CHANGED
        if not is_possible(words):
            return CHANGED
        if words[OUTGOING]:
            fill(words, words_at(source_at)[0])
        renew(state)
        if words[IS_LONG]:
            state[SPACES] = words_at(source_at)[0]
            state[SPACES + 1] = words_at(target_at)[0]
        result = call_function(state[LOOP], address)
        if result != FINISHED:
            return result
        if words[OUTGOING]:
            words[IDENT] += 1
            words[NBYTES_SENT] += words[OUTGOING_NBYTES]
        if words[INCOMING] and not take(words, words_at(target_at)[0]):
            return UNEXPECTED
        return FINISHED

    return loop


__all__ = ["make_repeated_message"]
