"""Calls that compiled code can run again, with arrays of the same form, without a new request.

A call that repeats an earlier call skips the check of arguments, planning and preparation. The
earlier call is found first by the function that makes the request, then by its *form*: the types,
sizes and dtypes of its arrays, how they overlap, and the other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import index
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.libraries import torch_of
from r2ccl.runtime.compiled.program import CompiledProgram
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import HostLanes, LandingPool
from r2ccl.runtime.staged_call import StagedCall
from r2ccl.shm.arrays import DISTANCE, IS_APART, form_of
from r2ccl.shm.repeat import Repeat, Role
from r2ccl.types import ReduceOp

Array = npt.NDArray[Any]
#: Function of `r2ccl.runtime.arguments` that makes a request.
Make = Callable[..., Request]


class RepeatOf(Protocol):
    """Function that makes a `Repeat`; see `r2ccl.shm.repeat.repeat_of` for the parameters."""

    def __call__(
        self, x: Array, out: Array, *, rest: tuple[Any, ...], uses_input: bool, role: Role
    ) -> Repeat:
        """Return a function that runs a call again on arrays of the form of `x` and `out`."""
        ...


class Repeats:
    """Calls of one communicator that can be run again.

    Callers of the methods, except `forget`, hold the turn of `HostCollectives`.

    Parameters
    ----------
    most : int
        Maximum number of calls that are remembered; one more call displaces all of them.

    Attributes
    ----------
    last : dict of callable to Repeat
        For each function that makes requests, the function that repeats the last call with such a
        request.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.last: dict[Make, Repeat] = {}
        #: By the result of `_key`: a remembered call, the function that runs it again, and the
        #: result of `_form`. Includes the functions in `last`.
        self._by_key: dict[Hashable, tuple[object, Repeat, bytes]] = {}

    def remember(
        self,
        make: Make,
        x: Any,
        out: Any,
        rest: tuple[Any, ...],
        request: Request,
        prepared: object,
        repeat_of: RepeatOf,
    ) -> None:
        """Remember the call `prepared`, so that ``last[make]`` can run it again.

        ``make(x, out, *rest)`` made `request`. The call is remembered only if it used the arrays
        themselves (C-contiguous NumPy arrays or torch tensors, no copies) and `rest` consists of
        `_SCALARS` and of lists and tuples of `int` objects. If the call allocated its output, the
        output must be a NumPy array. Lists in `rest` may be changed afterwards.
        """
        source, output, result = request.source, request.output, request.result
        uses_input, uses_output = source.owner is x, output is not None
        array = array_of(x) if uses_input else _NOTHING
        target = array_of(result) if uses_output else _NOTHING
        is_plain = type(array) is type(target) is np.ndarray and array.flags.c_contiguous
        is_new = uses_output and out is None and result is not x
        if not is_plain or not all(map(_is_plain, rest)):
            return
        if is_new and result is not target:
            return
        key = _key(make, x, array if uses_input else x, out, rest)
        found, form = self._by_key.get(key), _form(array, target)
        if found is not None and found[0] is prepared and found[2] == form:
            self.last[make] = found[1]
            return
        role = Role.NONE
        if uses_output:
            role = Role.ARRAY if is_new or out is not None else Role.INPUT
        repeat = repeat_of(array, target, rest=_copied(rest), uses_input=uses_input, role=role)
        if is_new:
            repeat = _with_new_output(repeat, array, target)
        if len(self._by_key) >= self._most:
            self._by_key.clear()
        self._by_key[key] = prepared, repeat, form
        self.last[make] = repeat

    def run_other(self, make: Make, x: Any, out: Any, rest: tuple[Any, ...]) -> Any:
        """Run again a remembered call of `make` that has the form of these arguments.

        Call this method after ``last[make]`` has returned NotImplemented. Unlike ``last[make]``,
        this method also takes torch tensors. Return the result of the call. Return NotImplemented
        if no remembered call has this form, or the call cannot be run again now. Raise the same
        errors as the call.
        """
        array, target = array_of(x), array_of(out)
        found = self._by_key.get(_key(make, x, array, out, rest))
        if found is None:
            return NotImplemented
        repeat = found[1]
        if repeat is self.last.get(make) and array is x and target is out:
            return NotImplemented  # `last[make]` has just tried this call
        result = repeat(array, target, rest)
        if result is NotImplemented:
            return NotImplemented
        self.last[make] = repeat
        if result is array:
            return x
        return out if result is target else result

    def forget(self) -> None:
        """Forget all calls; any thread may call this method at any time."""
        self.last.clear()
        self._by_key.clear()


class NetworkRepeats(Repeats):
    """Calls of one communicator over the network that can be run again.

    A call can be run again only while compiled code holds at least one call, which may be of any
    communicator (`r2ccl.runtime.compiled.hold`).

    Parameters
    ----------
    engine : Engine
    pool : LandingPool
    run : callable
        ``run(fn, *args)`` calls ``fn(*args)``, the part of a repeated call that is in Python.
    memory_of : callable
        ``memory_of(request)`` returns the memory of a call.
    """

    def __init__(
        self,
        engine: Engine,
        pool: LandingPool,
        run: Callable[..., None],
        memory_of: Callable[[Request], StagedCall],
    ) -> None:
        super().__init__(_NPROGRAMS)
        self._engine = engine
        self._pool = pool
        self._run = run
        self._memory_of = memory_of
        #: Programs of held calls that `remember_last` has seen.
        self._met: set[CompiledProgram] = set()

    def remember_last(
        self, make: Make, x: Any, out: Any, rest: tuple[Any, ...], request: Request
    ) -> None:
        """Remember the last call, if it is held and an earlier call had the same program.

        ``make(x, out, *rest)`` made `request`.
        """
        program = self._engine.held_program
        if program is None:
            return
        if program not in self._met:
            if len(self._met) >= _NPROGRAMS:
                self._met.clear()
            self._met.add(program)
            return

        engine = self._engine

        def repeat_of(
            x: Array, out: Array, *, rest: tuple[Any, ...], uses_input: bool, role: Role
        ) -> Repeat:
            def proceed(source: Array, target: Array, result: int) -> None:
                output = target if role is Role.ARRAY else None
                call = self._memory_of(make(source, output, *rest))
                lanes = HostLanes(self._pool, call.source, call.output)
                self._run(engine.proceed, program, lanes, result)
                call.finish()

            return engine.repeat_of(
                program,
                x,
                out,
                rest=rest,
                uses_input=uses_input,
                role=role,
                call=self._memory_of(request),
                proceed=proceed,
            )

        self.remember(make, x, out, rest, request, program, repeat_of)

    def forget(self) -> None:
        """Implement `Repeats.forget`."""
        super().forget()
        self._met.clear()


def _key(make: Make, x: Any, array: Any, out: Any, rest: tuple[Any, ...]) -> Hashable:
    """Return the key of a call: equal for calls of the same form, rarely equal for others.

    `array` is a view of the input `x`, and `rest` has the arguments after the output.
    """
    form = (array.shape, array.dtype.num) if type(array) is np.ndarray else None
    # Ranks that receive only, as in a scatter, have no input.
    shape = out.shape if type(out) is np.ndarray else out is None
    if not _SCALARS.issuperset(map(type, rest)):
        rest = tuple(map(_hashable, rest))
    return make, type(x), form, shape, rest


def _hashable(value: Any) -> Hashable:
    if not _is_plain(value):
        return None
    return (list, *value) if type(value) is list else value


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _SCALARS or (kind in _SEQUENCES and _INTEGERS.issuperset(map(type, value)))


def plain_of(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments `rest` of a call, with iterables of integers converted to tuples.

    Lists and tuples of `int` objects, and values that are not iterables of integers, are not
    converted.
    """
    return rest if all(map(_is_plain, rest)) else tuple(map(_as_plain, rest))


def _as_plain(value: Any) -> Any:
    if _is_plain(value):
        return value
    try:
        return tuple(map(index, value))
    except TypeError:
        return value


def _copied(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `rest` with copies of the lists in it."""
    return tuple(each.copy() if type(each) is list else each for each in rest)


def _form(array: Array, target: Array) -> bytes:
    """Return bytes that are equal for two pairs of arrays only if the pairs have the same form."""
    words = form_of(array, target)
    if words[IS_APART]:
        words[DISTANCE] = 0
    return words.tobytes()


def array_of(x: Any) -> Any:
    """Return a view of `x` as a NumPy array if its type is ``torch.Tensor``; otherwise `x`.

    A tensor that NumPy cannot view, such as one on a GPU, is returned unchanged.
    """
    torch = torch_of(x)
    if torch is None or type(x) is not torch.Tensor:
        return x
    try:
        return x.numpy()
    except (TypeError, RuntimeError):
        return x


def _with_new_output(repeat: Repeat, x: Array, out: Array) -> Repeat:
    """Return `repeat` for calls without ``out``, whose output is a new array like `out`.

    The input must have the shape of `x`.
    """
    shape, new_shape = x.shape, out.shape

    def repeat_with_new_output(x: Any, out: Any, rest: tuple[Any, ...]) -> Any:
        if out is not None or type(x) is not np.ndarray or x.shape != shape:
            return NotImplemented
        return repeat(x, np.empty(new_shape, x.dtype), rest)

    return repeat_with_new_output


#: Maximum number of calls over the network that are remembered: each keeps the tables of its plan.
_NPROGRAMS = 64
_NOTHING = np.empty(0, np.uint8)
#: Types of the arguments after the arrays, besides lists and tuples, of calls that can be repeated.
_SCALARS = frozenset((bool, int, type(None), ReduceOp))
_SEQUENCES, _INTEGERS = (list, tuple), frozenset((int,))

__all__ = ["Make", "NetworkRepeats", "Repeats", "array_of", "plain_of"]
