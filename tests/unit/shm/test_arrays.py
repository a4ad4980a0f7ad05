"""`fits` and `form_of`: a call is repeated only for arrays like those that were checked."""

from __future__ import annotations

import numpy as np
import pytest

from r2ccl.kernels.arrays import DATA
from r2ccl.kernels.native import callable_of
from r2ccl.shm.arrays import form_of

_MAKER = "support.array_forms:make_fits"


def _fits(form, source, output):
    at = (id(source) + DATA, id(output) + DATA)
    return bool(callable_of(_MAKER)(0 if form is None else int(form.ctypes.data), *at))


def _read_only(array):
    array.flags.writeable = False
    return array


def test_equal_arrays_fit_in_any_shape_and_place():
    form = form_of(np.ones((2, 3)), np.ones(12, np.int8))
    for x in (np.zeros((2, 3)), np.zeros(6), np.zeros((1, 6, 1))):
        assert _fits(form, x, np.zeros((3, 4), np.int8))
    assert _fits(form, np.zeros(9)[3:], np.zeros(20, np.int8)[:12])
    scalar = form_of(np.array(1.0), np.array(2.0))
    assert _fits(scalar, np.array(3.0), np.array(4.0))


def test_other_dtypes_sizes_and_flags_do_not_fit():
    out = np.empty(4)
    form = form_of(np.ones(4), out)
    x = np.ones(4)
    assert _fits(form, x, out)
    others = (
        np.ones(5), np.ones(0), np.ones(8, np.float32), np.ones(4, np.int64),
        np.ones(4, ">f8"), np.ones(8)[::2], _read_only(np.ones(4)),
    )  # fmt: skip
    for other in others:
        assert not _fits(form, other, out)
        assert not _fits(form, x, other)
        assert _fits(None, other, out)


def test_arrays_fit_only_with_the_same_overlap():
    memory = np.ones(12)
    first, second = memory[:4], memory[4:8]
    apart, same = form_of(first, second), form_of(first, first)
    inside = form_of(memory[4:8], memory)
    for form, one, other, fits in (
        (apart, second, first, True),
        (apart, first, memory[8:], True),
        (apart, first, first, False),
        (apart, first, memory[3:7], False),
        (apart, memory[3:7], first, False),
        (same, second, second, True),
        (same, first, second, False),
        (inside, memory[4:8], memory, True),
        (inside, memory[3:7], memory, False),
        (inside, np.ones(12)[4:8], memory, False),
    ):
        assert _fits(form, one, other) == fits


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")
def test_an_array_that_was_changed_in_place_does_not_fit():
    x, out = np.ones(6), np.empty(6)
    form = form_of(x, out)
    x.shape = (2, 3)
    assert _fits(form, x, out)
    x.resize((3, 3), refcheck=False)
    assert not _fits(form, x, out)
