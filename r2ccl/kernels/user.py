"""Operations defined by the user: a compiled loop over elements, or calls with whole slices.

A digest of the operation is part of the call signature, and is the key of the operation in this
process. The digest covers the operation's name, whether it is commutative, whether it runs on
elements or slices, and its function: code, default arguments, closure and, for a method, the
object. Ranks compare 12 bits of the digest (see `r2ccl.types.CallSignature.pack`). If they pass
different operations to a call, the call is refused, except for about one pair of operations in
4,096.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from r2ccl.dtypes import dtype_name, dtype_of
from r2ccl.errors import InvalidArgument
from r2ccl.kernels.host import Array, Reducer
from r2ccl.types import ORDERED_OP, USER_OP


class UserOp:
    """User-defined reduction, made by `user_op`.

    Attributes
    ----------
    name : str
        Name in messages; part of the digest.
    is_commutative : bool
        False if the ranks' data must be combined in rank order.
    number : int
        `r2ccl.types.USER_OP`, or `ORDERED_OP` if the ranks' data must be combined in rank order.
    digest : int
        Digest of the operation, 1 to 2**32 - 1; must be equal on all ranks of a call.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, is_commutative: bool) -> None:
        self.name = name
        self.is_commutative = is_commutative
        self.number = USER_OP if is_commutative else ORDERED_OP
        self._function = function
        is_compiled = _python_of(function) is not function
        self._is_by_element = is_compiled and _nparameters(function) == 2
        facts = repr((name, is_commutative, self._is_by_element, *_facts(function, name)))
        self.digest = zlib.crc32(facts.encode()) or 1
        self._reducers: dict[int, Reducer] = {}

    def __repr__(self) -> str:
        return f"user_op({self.name})"

    def reducer(self, dtype_code: int) -> Reducer:
        """Return the function that combines two slices, like `r2ccl.kernels.reducer`.

        Parameters
        ----------
        dtype_code : int
            Number from `r2ccl.dtypes`.

        Raises
        ------
        InvalidArgument
            If the dtype is unknown. If the function cannot be compiled for this dtype, cannot
            combine empty arrays of it, or returns a result that may not be converted to it (see
            `user_op`).

        Notes
        -----
        *Cost*: if the function was compiled by Numba, the first call for a dtype compiles code for
        it, which takes about 0.3 s.
        """
        found = self._reducers.get(dtype_code)
        if found is None:
            dtype = dtype_of(dtype_code)
            make = _by_element if self._is_by_element else _by_slice
            empty = np.empty(0, dtype)
            try:
                found = make(self._function, dtype)
                found(empty, empty, np.empty(0, dtype))
            except Exception as exc:
                reason = (str(exc).splitlines() or [""])[0]
                raise InvalidArgument(
                    f"{self} for dtype {dtype_name(dtype_code)}: {type(exc).__name__}: {reason}; "
                    "pass a function that supports this dtype; a function of arrays must also "
                    "accept empty arrays"
                ) from exc
            self._reducers[dtype_code] = found
        return found


def user_op(function: Callable[..., Any], *, name: str = "", is_commutative: bool = True) -> UserOp:
    """Return a reduction that combines data with a function of the user.

    Parameters
    ----------
    function : callable
        An associative operation of two elements, in one of these forms:

        - a function compiled by Numba's ``njit`` with two parameters, which are scalars; it returns
          a scalar;
        - a Python function with two parameters, which are arrays, or a NumPy ufunc; it returns an
          array of their size;
        - a Python function, or one compiled by ``njit``, with three parameters, which are arrays;
          it writes to the last array.

        Arrays are flat slices of the data, and may be empty; inputs are read-only. Each element of
        the result may depend only on the two elements at its index. A returned result of another
        dtype is converted to the dtype of the data. NumPy's casting rule "same_kind" must permit
        this, unless both dtypes are integers, which wrap. For int32, a function may thus return
        int64, but not float64.
    name : str
        Name in messages, equal on all ranks; default: the name of the function.
    is_commutative : bool
        If False, the data of the ranks is combined in rank order, which fewer schedules support.

    Returns
    -------
    UserOp
        Value for the ``op`` of any reduction of `Communicator`. Make the operation once, not for
        each call: Numba compiles every new operation again, and an operation is kept until the
        process ends or makes an equal operation.

    Raises
    ------
    InvalidArgument
        If `function` has another form, uses a variable of an enclosing function that has no value
        yet, or is a method of an object without ``__dict__``. Also if `function` depends on a value
        that ranks cannot compare. Ranks can compare None, numbers, strings, bytes, arrays,
        functions and tuples of these. A function depends on its default arguments, the variables of
        enclosing functions that it uses, and the attributes of a method's object.

    Notes
    -----
    All ranks must pass operations with the same name, form and `is_commutative`. The functions must
    have the same code, compiled by the same Python version, and must depend on equal values.
    Otherwise the collective raises `InvalidArgument` on every rank. Ranks compare 12 bits of a
    digest, so about one pair of different operations in 4,096 is not detected. Values of global
    variables are not compared, nor later changes of an object. An exception that the function
    raises during a call ends the communicator.
    """
    name = name or str(getattr(function, "__name__", ""))
    is_ufunc = isinstance(function, np.ufunc)
    if not name or not (is_ufunc or hasattr(_python_of(function), "__code__")):
        raise InvalidArgument(
            f"user_op({function!r}): pass a Python function, one compiled by Numba's njit, or a "
            "NumPy ufunc"
        )
    if isinstance(function, np.ufunc):
        is_binary = (function.nin, function.nout) == (2, 1)
    else:
        is_binary = _nparameters(function) in (2, 3)
    if not is_binary:
        raise InvalidArgument(
            f"user_op({name}): the function must have two parameters, or three if the last one "
            "is the output; a NumPy ufunc must have two inputs and one output"
        )
    op = UserOp(function, name, is_commutative=is_commutative)
    _MADE[op.digest] = op
    return op


def user_reducer(digest: int, dtype_code: int) -> Reducer:
    """Return the reducer of the operation with digest `digest`, which this process has made.

    Raises
    ------
    InvalidArgument
        If `UserOp.reducer` raises it.
    """
    return _MADE[digest].reducer(dtype_code)


def _by_element(function: Any, dtype: np.dtype[Any]) -> Reducer:
    from numba import njit, typeof, types  # takes about 0.5 s to import
    from numba.np.numpy_support import as_dtype, from_dtype

    def reduce_elements(left: Array, right: Array, out: Array) -> None:
        for i in range(out.size):
            out[i] = function(left[i], right[i])

    element = from_dtype(dtype)
    called = typeof(function).get_call_type(function.typingctx, (element, element), {})
    _require_cast(as_dtype(types.unliteral(called.return_type)), dtype)
    operand = types.Array(element, 1, "C", readonly=True)
    signature = types.void(operand, operand, types.Array(element, 1, "C"))
    # No disk cache: its key would be different in every process, because the loop calls `function`.
    reduce: Reducer = njit(signature, nogil=True, error_model="numpy")(reduce_elements)
    return reduce


def _by_slice(function: Any, dtype: np.dtype[Any]) -> Reducer:
    has_out = not isinstance(function, np.ufunc) and _nparameters(function) == 3

    def reduce_slices(left: Array, right: Array, out: Array) -> None:
        # `out` may be an operand, which the function may read after it has written the result.
        operands = left.view(dtype), right.view(dtype)
        for each in operands:
            each.flags.writeable = False
        result = np.empty(out.size, dtype)
        if has_out:
            function(*operands, result)
        else:
            found = np.asarray(function(*operands))
            if found.shape != result.shape:  # NumPy would broadcast one element to all
                raise ValueError(
                    f"the function returned shape {found.shape} for arrays of shape {result.shape}"
                )
            _require_cast(found.dtype, dtype)
            result[...] = found
        out.view(dtype)[:] = result

    return reduce_slices


def _require_cast(found: np.dtype[Any], dtype: np.dtype[Any]) -> None:
    """Raise TypeError unless a result of dtype `found` may be converted to `dtype`.

    Integers may be converted to any integer dtype, because Numba computes with 64-bit integers,
    which are signed if one operand is a constant.
    """
    are_integers = found.kind in "iu" and dtype.kind in "iu"
    if not are_integers and not np.can_cast(found, dtype, "same_kind"):
        raise TypeError(f"the function returned {found}, which r2ccl does not convert to {dtype}")


def _python_of(function: Any) -> Any:
    """Return the Python function of `function` if Numba compiled it, else `function` itself."""
    if isinstance(function, FunctionType | MethodType):  # `functools.wraps` may copy `py_func`
        return function
    return getattr(function, "py_func", function)


def _nparameters(function: Any) -> int:
    return len(inspect.signature(_python_of(function)).parameters)


def _facts(function: Any, name: str, users: tuple[Any, ...] = ()) -> Iterator[object]:
    """Yield the values that a function depends on, in a form that is equal on all hosts.

    The values are the function's code, default arguments, closure and, for a method, its object.
    For a NumPy ufunc, the only value is the name of the ufunc.

    `name` is the name of the operation, for messages. `users` is the chain of functions through
    which the operation uses `function`: the operation's own function first, the direct user last.

    Raises
    ------
    InvalidArgument
        If the function uses an object that cannot be compared between ranks, or a variable of an
        enclosing function that has no value yet.
    """
    function = _python_of(function)
    if not hasattr(function, "__code__"):
        yield str(function)
        return
    if function in users:  # a recursive function
        yield users.index(function)
        return
    yield from _facts_of_code(function.__code__)
    if isinstance(function, MethodType):
        yield from _facts_of_owner(function.__self__, name, (*users, function))
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    try:
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise InvalidArgument(
            f"user_op({name}): the function uses a variable of an enclosing function before this "
            "variable has a value: assign the variable first"
        ) from None
    for value in values:
        yield from _facts_of_value(value, name, (*users, function))


def _facts_of_owner(owner: Any, name: str, users: tuple[Any, ...]) -> Iterator[object]:
    """Yield the class of the object of a method, and the object's attributes."""
    kind = owner if isinstance(owner, type) else type(owner)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if owner is not kind:
        if not hasattr(owner, "__dict__"):
            raise _not_comparable(owner, name)
        for key, value in sorted(vars(owner).items()):
            yield key
            yield from _facts_of_value(value, name, users)


def _facts_of_value(value: Any, name: str, users: tuple[Any, ...]) -> Iterator[object]:
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        yield (str(value.dtype), value.shape, value.tobytes())
    elif hasattr(_python_of(value), "__code__") or isinstance(value, np.ufunc):
        yield from _facts(value, name, users)
    elif isinstance(value, tuple):
        yield tuple(fact for each in value for fact in _facts_of_value(each, name, users))
    elif isinstance(value, int | float | complex | str | bytes | None):
        yield value
    else:
        raise _not_comparable(value, name)


def _not_comparable(value: object, name: str) -> InvalidArgument:
    return InvalidArgument(
        f"user_op({name}): the function depends on {value!r}, which cannot be compared between "
        "ranks: in variables of an enclosing function, in default arguments and in attributes of a "
        "method's object, use only numbers, strings, arrays, functions and tuples of these"
    )


def _facts_of_code(code: CodeType) -> Iterator[object]:
    yield code.co_code
    yield code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _facts_of_code(value)
        else:  # the order of a set may differ between processes
            yield sorted(map(repr, value)) if isinstance(value, frozenset) else value


#: Operations made in this process, by digest; the newest one for each digest.
_MADE: dict[int, UserOp] = {}

__all__ = ["UserOp", "user_op", "user_reducer"]
