"""Comparison of arrays with a form, compiled by itself, for `unit/shm/test_arrays`."""

from __future__ import annotations

from collections.abc import Callable


def make_fits() -> Callable[[int, int, int], int]:
    """Return `fits` as a function that `r2ccl.kernels.native` can compile."""
    from r2ccl.shm.rounds import fits

    def compare(form: int, source_at: int, target_at: int) -> int:
        return 1 if fits(form, source_at, target_at) else 0

    return compare
