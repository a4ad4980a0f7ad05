"""Memory of a collective over the network: arrays of its schedule, and copies before and after it.

The copies of a repeated call are made in compiled code. It needs *places*: the addresses of the
copied data, relative to the caller's arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.kernels.arrays import data_of
from r2ccl.schedule.chunks import Parts

Array = npt.NDArray[Any]

# Indices of the 64-bit words that describe a repeated call to compiled code. A *place* is two
# words: the caller's array that contains it (`IN_INPUT` or `IN_OUTPUT`) and the offset in bytes, or
# `NOWHERE` and the address.

#: Address of the form of the arrays (0: not checked); places of input and output of the schedule.
FORM, SOURCE, OUTPUT = 0, 1, 3
#: Each copy, before and after the schedule: number of bytes, place to write, and place to read.
BEFORE, AFTER = 5, 10
_NWORDS = 15
IN_INPUT, IN_OUTPUT, NOWHERE = 0, 1, 2


class BlockCopy(NamedTuple):
    """Copy of `source` to `target`, which have the same size and dtype and do not overlap."""

    target: Array
    source: Array


class StagedCall(NamedTuple):
    """Memory of one collective.

    Attributes
    ----------
    source, output : ndarray
        Input and output of the schedule.
    parts : Parts or None
        Ranges of the parts in `source` and `output`; None: they follow from the signature.
    before, after : BlockCopy or None
        Copy to be made before the schedule runs, and copy to be made after it; None: no copy.
    """

    source: Array
    output: Array
    parts: Parts | None = None
    before: BlockCopy | None = None
    after: BlockCopy | None = None

    def begin(self) -> None:
        """Make the copy before the schedule runs."""
        if self.before is not None:
            self.before.target[:] = self.before.source

    def finish(self) -> None:
        """Make the copy after the schedule has run."""
        if self.after is not None:
            self.after.target[:] = self.after.source


def words_of(
    call: StagedCall, form: int, x: Array, out: Array
) -> tuple[npt.NDArray[np.int64], list[Array]]:
    """Return the words that describe a repeated call to compiled code, and the memory they use.

    The caller must keep this memory alive while it uses the words.

    Parameters
    ----------
    call : StagedCall
        Memory of the call with the arrays `x` and `out`.
    form : int
        Address of the form of `x` and `out`, see `r2ccl.shm.arrays.form_of`.
    x, out : ndarray
        The caller's contiguous arrays; they are not kept alive.
    """
    kept: list[Array] = []

    def place(array: Array) -> tuple[int, int]:
        if array.nbytes == 0:
            return NOWHERE, 0
        address = data_of(array)
        for at, whole in ((IN_INPUT, x), (IN_OUTPUT, out)):
            offset = address - data_of(whole)
            if 0 <= offset <= whole.nbytes - array.nbytes:
                return at, offset
        kept.append(array)
        return NOWHERE, address

    words = [form, *place(call.source), *place(call.output)]
    for copy in (call.before, call.after):
        if copy is None:
            words += [0] * (AFTER - BEFORE)
        else:
            words += [copy.target.nbytes, *place(copy.target), *place(copy.source)]
    return np.array(words, np.int64), kept


def plain_words() -> npt.NDArray[np.int64]:
    """Return words of a call that uses the arrays themselves, without copies or a form to check."""
    words = np.zeros(_NWORDS, np.int64)
    words[OUTPUT] = IN_OUTPUT
    return words


__all__ = [
    "AFTER",
    "BEFORE",
    "FORM",
    "IN_OUTPUT",
    "NOWHERE",
    "OUTPUT",
    "SOURCE",
    "BlockCopy",
    "StagedCall",
    "plain_words",
    "words_of",
]
