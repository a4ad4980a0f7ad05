"""Arguments that users of other libraries pass by mistake are refused with what to write."""

from __future__ import annotations

import enum
import operator
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import r2ccl
from r2ccl import InvalidArgument
from r2ccl.runtime import advice, arguments
from r2ccl.runtime.advice import cannot_view
from r2ccl.types import ReduceOp

X = np.ones(4, np.float32)
#: Arguments of each function besides the arrays.
CALLS: dict[str, Any] = {
    "allreduce": lambda op: arguments.allreduce(X, None, op),
    "reduce": lambda op: arguments.reduce(X, None, op, 0, 0),
    "reduce_scatter": lambda op: arguments.reduce_scatter(X, None, op, 0, 2),
    "scan": lambda op: arguments.scan(X, None, op, False),
}


class NcclRedOp(enum.IntEnum):
    """Constants as NCCL4Py has them."""

    MAX = 2
    MIN = 3


class GpuArray:
    """An array in GPU memory, as far as a rank that does not use it can tell."""

    __cuda_array_interface__ = {"version": 3}  # noqa: RUF012


class OpField(np.ndarray):  # type: ignore[type-arg]
    """An array whose class is named as constants of operations are, and that can be called."""

    def __call__(self) -> None: ...


class RedOpType:
    """A constant as pybind11 makes it for torch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"RedOpType.{self.name}"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("sum", "SUM"), ("MAX", "MAX"), ("mean", "AVG"), (np.add, "SUM"), (sum, "SUM"),
        (max, "MAX"), (operator.mul, "PROD"), (np.logical_or, "LOR"), (RedOpType("MIN"), "MIN"),
        (NcclRedOp.MAX, "MAX"),
    ],
)  # fmt: skip
def test_an_op_of_another_library_is_told_by_our_name(call: str, op: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^op=.*: pass r2ccl\.{name}\b"):
        CALLS[call](op)


@pytest.mark.parametrize(
    ("is_exclusive", "divisor"),
    [(False, "rank + 1"), (True, "rank, but not on rank 0, which gets no result")],
)
def test_a_mean_of_a_scan_is_told_by_what_to_divide(is_exclusive: bool, divisor: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"op=SUM and divide by {divisor}") + "$"):
        arguments.scan(X, None, ReduceOp.AVG, is_exclusive)


@pytest.mark.parametrize("op", [None, 2.5, object(), "add all", lambda a, b: a])
def test_what_stands_for_no_op_is_told_all_of_them(op: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"pass r2ccl\.SUM, or one of SUM, PROD, MIN"):
        arguments.allreduce(X, None, op)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("op", [2, True, 99, np.int64(2)])
def test_an_op_by_number_is_refused(call: str, op: Any) -> None:
    """2 is MIN here and MAX in NCCL."""
    with pytest.raises(
        InvalidArgument, match=r"^op=.*: libraries number the operations differently; pass r2ccl"
    ):
        CALLS[call](op)


def test_an_op_of_mpi4py_is_told_of_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("mpi4py.MPI")
    kind = type("Op", (), {"__module__": "mpi4py.MPI", "__call__": lambda self, a, b: a})
    module.SUM, module.MAX = kind(), kind()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    with pytest.raises(InvalidArgument, match=r"pass r2ccl\.MAX, or use r2ccl\.interop\.mpi"):
        arguments.allreduce(X, None, module.MAX)
    with pytest.raises(InvalidArgument, match=r"second argument is out; give the operation as op="):
        arguments.allreduce(X, module.SUM, ReduceOp.SUM)


@pytest.mark.parametrize("given", [0, 1, np.int64(1)])
def test_a_root_in_place_of_out_is_told_the_keyword(given: Any) -> None:
    for call in (
        lambda: arguments.broadcast(X, given, 0, 1),
        lambda: arguments.scatter(X, given, 1, 0, 2),
        lambda: arguments.scatter(X, given, 0, 0, 2),
    ):
        with pytest.raises(InvalidArgument, match=rf"give the root as root={given}$"):
            call()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (0, "give the root as root=0$"), (np.int64(1), "give the root as root=1$"),
        ("max", "op=r2ccl.SUM$"), (ReduceOp.MAX, "op=r2ccl.SUM$"),
    ],
)  # fmt: skip
def test_ranks_that_ignore_out_refuse_what_the_root_does(rank: int, given: Any, words: str) -> None:
    """If the root alone refused it, the others would wait for it."""
    for call in (
        lambda out: arguments.reduce(X, out, ReduceOp.SUM, 0, rank),
        lambda out: arguments.gather(X, out, 0, rank, 2),
        lambda out: arguments.gatherv(X, out, 0, (4, 4), None, rank, 2),
    ):
        with pytest.raises(InvalidArgument, match=words):
            call(given)


@pytest.mark.parametrize(
    "given",
    [None, np.empty(0), bytearray(8), GpuArray(), [], b"12345678", np.empty(4).view(OpField)],
)
def test_ranks_that_ignore_out_accept_any_array(given: Any) -> None:
    assert arguments.reduce(X, given, ReduceOp.SUM, 0, 1).result is None
    assert arguments.gather(X, given, 0, 1, 2).result is None


@pytest.mark.parametrize("given", [ReduceOp.MAX, "max", np.add, r2ccl.premul_sum(2.0)])
def test_an_op_in_place_of_out_is_told_the_keyword(given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"second argument is out; give the operation as op="):
        arguments.allreduce(X, given, ReduceOp.SUM)


def test_an_out_that_is_an_array_keeps_its_own_error() -> None:
    with pytest.raises(InvalidArgument, match="is not C-contiguous"):
        arguments.allreduce(X, np.ones(8, np.float32)[::2], ReduceOp.SUM)
    with pytest.raises(InvalidArgument, match="is not C-contiguous"):
        arguments.allreduce(X, np.ones(8, np.float32)[::2].view(OpField), ReduceOp.SUM)
    with pytest.raises(InvalidArgument, match=r"builtins\.list was given.*np\.array\(x\)"):
        arguments.allreduce(X, [0.0] * 4, ReduceOp.SUM)


def of(module: str, **entries: Any) -> Any:
    """Return a host tensor that shares the memory of a NumPy array by DLPack."""
    array = entries.pop("array", X)
    device = entries.pop("device", (1, 0))
    methods = {
        "__module__": module,
        "__dlpack__": lambda self, **more: array.__dlpack__(**more),
        "__dlpack_device__": lambda self: device,
    }
    return type("Tensor", (), {**methods, **entries})()


@pytest.mark.parametrize(
    ("module", "words"),
    [("torch", r"pass x\.contiguous\(\)"), ("unknown", r"pass np\.ascontiguousarray\(x\)")],
)
def test_a_strided_tensor_is_told_in_its_librarys_words(module: str, words: str) -> None:
    strided = of(module, array=np.ones((4, 4))[:, ::2])
    with pytest.raises(InvalidArgument, match=words):
        arguments.as_buffer(strided, writable=True)


def test_memory_elsewhere_is_told_in_its_librarys_words() -> None:
    on_device = of("torch.nn.parameter", device=(10, 0))
    with pytest.raises(InvalidArgument, match=r"copy it to the host with x\.cpu\(\)"):
        arguments.as_buffer(on_device, writable=True)


def test_read_only_memory_is_told_how_to_copy_it() -> None:
    frozen = X.copy()
    frozen.flags.writeable = False
    for x, words in ((frozen, r"x\.copy\(\)"), (b"1234", r"bytearray\(x\)")):
        with pytest.raises(InvalidArgument, match=f"pass a copy, such as {words}"):
            arguments.as_buffer(x, writable=True)
    assert advice.copy(np.float64(3)) == "np.array(x)"
    assert advice.copy(of("torch")) == "x.clone()"
    assert advice.copy(of("jaxlib._jax")) == "np.array(x)"


def test_a_tensor_with_a_gradient_is_told_to_detach() -> None:
    assert str(cannot_view(of("torch", requires_grad=True), "why")).endswith("; pass x.detach()")
    assert str(cannot_view(of("torch", requires_grad=False), "why")).endswith("viewed: why")


@pytest.mark.parametrize(
    ("x", "words"),
    [(3.0, r"np\.array\(x\)"), ([1, 2], r"np\.array\(x\)"),
     (type("Series", (), {"__module__": "pandas.core.series"})(), r"x\.to_numpy\(\)")],
)  # fmt: skip
def test_what_is_no_array_is_told_how_to_become_one(x: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f" was given: pass [^;]*{words}; allowed are "):
        arguments.as_buffer(x, writable=False)
