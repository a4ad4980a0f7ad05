"""Functions for `r2ccl.kernels.native` to compile, and a process that loads them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from r2ccl.kernels.native import callable_of

MAKER = "support.native_programs:make_weighted"


def make_weighted(weight: int) -> Callable[..., int]:
    """Return a function with a loop, a branch and three arguments."""

    def weighted(first: Any, second: Any, count: Any) -> int:
        total = first
        for i in range(count):
            total += weight * second if i % 2 else second
        return total

    return weighted


def make_shuffle() -> Callable[..., int]:
    """Return a function whose time grows with its argument, whatever the compiler does."""

    def shuffle(count: Any) -> int:
        word = 88172645463325252
        for _ in range(count):
            word ^= word << 13
            word ^= word >> 7
            word ^= word << 17
        return word

    return shuffle


def make_method() -> Callable[..., int]:
    """Return a method of a pair: for equal arguments its first item, else a call of the second."""
    from r2ccl.kernels.python_api import are_equal, call_with, new_reference, tuple_item
    from r2ccl.shm.atomics import words_at

    def method(owner: Any, args: Any, nargs: Any) -> Any:
        given = words_at(args)
        if nargs == 2 and are_equal(given[0], given[1]):
            return new_reference(tuple_item(owner, 0))
        return call_with(tuple_item(owner, 1), args, nargs)

    return method


if __name__ == "__main__":
    found = callable_of(MAKER, 3)(10, 5, 4)
    print(found, "numba" in sys.modules)
