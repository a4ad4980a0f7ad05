"""Runs of a user's program with failures, for the fixtures of the pytest plugin ``r2ccl_pytest``.

If a fault does not happen, or a rank fails in a netlab, the run raises AssertionError, which fails
the test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from r2ccl.bootstrap.launch import launch
from r2ccl.bootstrap.pickling import ByValue
from r2ccl.clock import monotonic
from r2ccl.testing.fault_plan import FaultPlan, fail_at, reporter_from_env
from r2ccl.testing.faults import Fault
from r2ccl.testing.faults_reporter import Due, FaultReporter
from r2ccl.testing.netlab import Lab, RankResult
from r2ccl.testing.netlab.ranks import check_argv
from r2ccl.testing.reporting import ReportingTransport
from r2ccl.transport.base import Transport

_Result = TypeVar("_Result")

_WRAPPER = f"{__name__}:wrap_and_record"


class FaultInjection:
    """Failures of NICs for the next run of a `RankRunner`; calling the object adds a failure.

    Parameters
    ----------
    folder : Path
        Folder for the plan and the record of the faults that fired.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nplans = 0
        self._faults: list[Fault] = []

    def __call__(self, rank: int, rail: int, op: int, step: int = 0) -> None:
        """Add a failure: `rank` loses `rail` just before slice `step` of collective `op`.

        The parameters are those of `fail_at`. If the job has no such rank or rail, `r2ccl.init`
        raises InvalidArgument.
        """
        self._faults.extend(fail_at(rank, rail, op, step).faults)

    def take(self) -> _PlanFile | None:
        """Return the plan of the failures added since the last call; None if there are none."""
        if not self._faults:
            return None
        self._nplans += 1
        plan = _PlanFile(FaultPlan(self._faults), self._folder / f"faults-{self._nplans}.json")
        self._faults = []
        return plan

    def require_used(self) -> None:
        """Raise AssertionError if failures were added after the last run."""
        if self._faults:
            raise AssertionError(
                f"{len(self._faults)} failure(s) of r2ccl_fail_at were not injected: call "
                "r2ccl_ranks after r2ccl_fail_at"
            )


class _PlanFile:
    """Fault plan in a file that ranks read; they add a file beside it for each fault that fires."""

    def __init__(self, plan: FaultPlan, path: Path) -> None:
        self._plan = plan
        self._path = path
        path.write_bytes(plan.to_json())

    def environment(self) -> dict[str, str]:
        """Return the environment variables that make `r2ccl.init` inject the faults."""
        return {"R2CC_FAULT_PLAN": str(self._path), "R2CC_TRANSPORT_WRAPPER": _WRAPPER}

    def assert_all_fired(self) -> None:
        """Raise AssertionError if faults did not fire; the message names these faults."""
        for index in range(len(self._plan.faults)):
            if _record_of(self._path, index).exists():
                self._plan.record(index, monotonic(), monotonic())
        self._plan.assert_all_fired()


def _record_of(path: str | Path, index: int) -> Path:
    return Path(f"{path}.{index}.fired")


def wrap_and_record(inner: Transport, rank: int) -> ReportingTransport:
    """Return a wrapper like that of `wrap_by_env`; it also makes a file for each fired fault.

    `r2ccl.init` calls this function in the ranks of a `RankRunner` if there are failures to inject.
    The files are beside the file of the plan. `rank` is ignored: the rank is read from ``RANK``,
    which `r2ccl.launch` sets.

    Raises
    ------
    InvalidArgument
        If the plan or ``RANK`` is not valid; see `reporter_from_env`.
    """

    def reporter(cut: Callable[[Due], None]) -> FaultReporter | None:
        def cut_and_record(due: Due) -> None:
            cut(due)
            _record_of(os.environ["R2CC_FAULT_PLAN"], due.index).touch()

        return reporter_from_env(os.environ, apply=cut_and_record, nrails=inner.nrails)

    return ReportingTransport(inner, reporter)


class _Outcome(Exception):
    """Outcome that a rank has set: the name of a function of pytest, and the reason given to it.

    The exceptions of pytest cannot be pickled, because their ``__module__`` is ``builtins``.
    """


#: Functions of pytest that set an outcome; xfail before fail, because the exception of xfail is a
#: subclass of the exception of fail.
_OUTCOMES = ("skip", "xfail", "fail")


class _Program:
    """Wrapper of a test's function that turns pytest's outcome exceptions into an `_Outcome`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __repr__(self) -> str:
        return repr(self._function)

    def __call__(self) -> Any:
        try:
            return self._function()
        except BaseException as exc:
            pytest: Any = sys.modules.get("pytest")
            if pytest is not None:
                for name in _OUTCOMES:
                    if isinstance(exc, getattr(pytest, name).Exception):
                        raise _Outcome(name, str(exc)) from exc
            raise


class RankRunner:
    """Callable that runs a function of a test on several ranks of this machine.

    Parameters
    ----------
    module : module
        Module of the test. Its functions are sent to the ranks by value, so the ranks do not import
        the module, and a failed assertion in a rank shows the values that it compares.
    injection : FaultInjection, optional
        Failures to inject; a run takes the failures added since the last run. Default: none.
    """

    def __init__(self, module: ModuleType, injection: FaultInjection | None = None) -> None:
        self._module = module
        self._injection = injection

    def __call__(
        self,
        fn: Callable[[], _Result],
        nranks: int,
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> list[_Result]:
        """Run `fn` on `nranks` ranks with `r2ccl.launch`, and return its results, by rank.

        `timeout_s` and `env` are the parameters of `r2ccl.launch`.

        Raises
        ------
        Exception
            The first exception of a rank, or another error of `r2ccl.launch`, such as
            `TransportTimeout`.
        AssertionError
            If a failure that `r2ccl_fail_at` requested did not happen.

        Notes
        -----
        ``pytest.skip``, ``pytest.importorskip``, ``pytest.xfail`` and ``pytest.fail`` in a rank set
        the outcome of the test; if several ranks call one of them, the first call decides.
        """
        plan = self._injection.take() if self._injection else None
        variables = {**(env or {}), **(plan.environment() if plan else {})}
        program = ByValue(_Program(fn), self._module)
        try:
            found = launch(program, nranks, timeout_s=timeout_s, env=variables)
        except _Outcome as exc:
            import pytest  # installed: the rank imported it

            name, text = exc.args
            raise getattr(pytest, name).Exception(text) from exc.__cause__
        if plan:
            plan.assert_all_fired()
        return found


class NetlabRunner(Protocol):
    """Signature of `run_in_netlab`."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        faults: Sequence[str | Fault] = (),
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        **shape: Any,
    ) -> list[RankResult]:
        """Run a program in a lab; see `run_in_netlab`."""
        ...


def run_in_netlab(
    argv: Sequence[str],
    *,
    faults: Sequence[str | Fault] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    **shape: Any,
) -> list[RankResult]:
    """Build a lab, run a program on its ranks under `faults`, and require that every rank succeeds.

    Parameters
    ----------
    argv : sequence of str
        The program and its arguments, such as ``[sys.executable, "train.py"]``.
    faults : sequence of str or Fault
        Faults to inject. `Fault.parse` parses strings such as ``"nic_down:node=1,rail=0,at_op=3"``.
    env : mapping, optional
        Environment variables of the ranks; they override those of this process and of the lab.
    timeout_s : float
        Seconds after which ranks that still run are ended, and the run fails.
    **shape
        Fields of `LabShape`: ``nodes``, ``rails``, ``rate``, ``ranks_per_node`` ...

    Returns
    -------
    list of RankResult
        Exit status and output of each rank.

    Raises
    ------
    AssertionError
        If a rank failed or ran longer than `timeout_s`, or a fault did not fire.
    InvalidArgument
        If `argv` is a string, or a fault or the shape is invalid.
    LabError
        If the lab cannot be built or removed, or the run fails in it, for example because a fault
        cannot be applied or a rank cannot be ended; see `Lab` and `Lab.run`.
    """
    check_argv(argv)
    plan = FaultPlan(Fault.parse(each) if isinstance(each, str) else each for each in faults)
    with Lab(**shape) as lab:
        results = lab.run(argv, env=env, plan=plan if plan.faults else None, timeout_s=timeout_s)
    failed = [
        f"rank {each.rank}: "
        + (f"ran longer than {timeout_s:g} s" if each.is_timed_out else f"status {each.returncode}")
        for each in results
        if each.is_timed_out or each.returncode
    ]
    if failed:
        raise AssertionError(f"{len(failed)} of {len(results)} ranks failed: {'; '.join(failed)}")
    plan.assert_all_fired()
    return results


__all__ = ["FaultInjection", "NetlabRunner", "RankRunner", "run_in_netlab", "wrap_and_record"]
