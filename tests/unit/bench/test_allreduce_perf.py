"""The benches' own arithmetic, and that their verification can fail."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r2ccl.dtypes import CODES, DTYPES
from r2ccl.kernels import ON_GPU, divider, reducer
from r2ccl.types import ReduceOp

BENCH = Path(__file__).parents[3] / "bench"
PAIRS = [
    pytest.param(dtype, op, id=f"{dtype.name}-{op.name}")
    for code, ops in ON_GPU.items()
    for dtype, op in itertools.product([DTYPES[code]], sorted(ops))
]


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("common")


@pytest.fixture
def perf(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("allreduce_perf")


class OneProcess:
    """All ranks' allreduce in one process, from the inputs the bench itself made."""

    def __init__(self, inputs: list[Any], *, spoil: int = 0) -> None:
        self.rank, self.nranks = 1, len(inputs)
        self.inputs = inputs
        self.spoil = spoil

    def allreduce(self, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM) -> Any:
        target = x if out is None else out
        if x.dtype == np.int64 and x.size == 1:  # the count of wrong elements: only ours are here
            return target
        code = CODES[x.dtype]
        total = self.inputs[-1].copy()
        for contribution in self.inputs[-2::-1]:
            reducer(code, op)(total, contribution, total)
        if op is ReduceOp.AVG:
            divider(code, self.nranks)(total)
        total[: self.spoil] += total.dtype.type(1)
        target[...] = total
        return target


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("256", 256), ("64K", 65536), ("1.5m", 3 << 19), ("2GiB", 2 << 30), ("8B", 8)],
)
def test_sizes_are_powers_of_1024(common: Any, text: str, nbytes: int) -> None:
    assert common.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1T", "0.3", "1 2", "nan", "inf"])
def test_other_sizes_are_refused(common: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        common.parse_size(text)


def test_ranges_of_sizes_end(common: Any) -> None:
    assert list(common.size_range(4, 100, step=1, factor=3)) == [4, 12, 36]
    assert list(common.size_range(4, 12, step=4, factor=1)) == [4, 8, 12]
    assert list(common.size_range(0, 9, step=0, factor=2)) == [0, 1, 2, 4, 8]
    with pytest.raises(ValueError, match="never reach"):
        list(common.size_range(0, 9, step=0, factor=1))


def test_bus_bandwidth_of_a_known_case(common: Any) -> None:
    # 4 ranks, 1 GB in 1 s: every NIC carries 2 * 3/4 GB each way.
    assert common.busbw("allreduce", 4, 10**9, 1.0) == pytest.approx(1.5)
    assert common.busbw("allgather", 4, 10**9, 1.0) == pytest.approx(0.75)


def test_statistics(common: Any) -> None:
    assert common.Stats.of([1, 2, 3, 4, 5]) == (3, 2, 4)
    assert common.Stats.of([7.0]) == (7.0, 7.0, 7.0)


def test_json_names_machine_commit_and_command(common: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    common.write_json(path, [{"nbytes": 256, "time_us": 1.5}])

    saved = json.loads(path.read_text())

    assert set(saved) == {"machine", "commit", "command", "results"}
    assert saved["results"] == [{"nbytes": 256, "time_us": 1.5}]
    assert saved["machine"]["cores"] >= 1
    assert saved["command"].startswith("python ")


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
@pytest.mark.parametrize("nranks", [2, 5, 130])
def test_expected_results_have_no_rounding(
    perf: Any, dtype: np.dtype[Any], op: ReduceOp, nranks: int
) -> None:
    case = perf.Case(64 * dtype.itemsize, dtype, op)
    inputs, expected = perf.make_inputs(case, nranks, (1, 2))
    out = np.empty_like(expected)

    OneProcess(inputs).allreduce(inputs[0], out, op)

    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("in_place", [True, False])
def test_verification_counts_wrong_elements(perf: Any, in_place: bool) -> None:
    case = perf.Case(400, np.dtype(np.float32), ReduceOp.SUM)
    inputs, _ = perf.make_inputs(case, 3, (9,))

    for spoil in (0, 1, 5):
        comm = OneProcess(inputs, spoil=spoil)
        assert perf.count_wrong(comm, case, in_place=in_place, seed=(9,)) == spoil


def test_verification_notices_a_changed_input(perf: Any) -> None:
    case = perf.Case(400, np.dtype(np.float32), ReduceOp.SUM)
    inputs, _ = perf.make_inputs(case, 3, (9,))

    class Careless(OneProcess):
        def allreduce(self, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM) -> Any:
            result = super().allreduce(x, out, op)
            if x.size > 1:
                x[7] += 1
            return result

    assert perf.count_wrong(Careless(inputs), case, in_place=False, seed=(9,)) == 1
