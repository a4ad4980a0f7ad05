"""Prepared call of a collective in shared memory: the class `LocalCall`."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.native import address_of, callable_of
from r2ccl.shm.arrays import form_of
from r2ccl.shm.layout import LOOP_FORM, LOOP_NWORDS, LOOP_SIGNATURE, Loop
from r2ccl.types import signed_word

Array: TypeAlias = npt.NDArray[Any]


class LocalCall(NamedTuple):
    """Prepared call of a collective, made by `r2ccl.shm.group.LocalGroup.prepare`."""

    #: Compiled loop of the collective, and its address as a C function.
    run: Loop
    loop: int
    #: Words of the call, see `r2ccl.shm.layout`, and their address.
    words: npt.NDArray[np.int64]
    at: int
    #: First byte and number of bytes of each part of the input, and of the output, if the parts
    #: differ in size; otherwise None.
    tables: npt.NDArray[np.int64] | None = None
    #: Form that the arrays must have (None: any), and the dtypes of these arrays.
    form: npt.NDArray[np.int64] | None = None
    dtypes: tuple[np.dtype[Any], ...] = ()

    @classmethod
    def make(
        cls, maker: str, words: dict[int, int], tables: npt.NDArray[np.int64] | None = None
    ) -> LocalCall:
        """Return a call whose loop is made by `maker`, see `r2ccl.kernels.native`.

        `words` has the values of words of the call by index; all other words are 0. Raises the
        errors of `r2ccl.kernels.native.callable_of`.
        """
        made = np.zeros(LOOP_NWORDS, np.int64)
        made[list(words)] = list(words.values())
        return cls(callable_of(maker), address_of(maker), made, data_of(made), tables)

    def of_form(self, source: Array, output: Array) -> LocalCall:
        """Return a copy of the call for arrays of the same form as `source` and `output`.

        The form is the result of `r2ccl.shm.arrays.form_of`. For arrays of another form,
        `r2ccl.shm.group.LocalGroup.run` does nothing and returns False.
        """
        form = form_of(source, output)
        made = self._with(LOOP_FORM, data_of(form))
        return made._replace(form=form, dtypes=(source.dtype, output.dtype))

    def signed(self, signature: int) -> LocalCall:
        """Return a copy of the call with another packed signature, which all ranks compare."""
        return self._with(LOOP_SIGNATURE, signed_word(signature))

    def _with(self, index: int, value: int) -> LocalCall:
        words = self.words.copy()
        words[index] = value
        return self._replace(words=words, at=data_of(words))


__all__ = ["LocalCall"]
