"""The fixtures of ``r2ccl_pytest`` run programs, inject failures, and cost nothing if not used."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.testing.harness import FaultInjection, run_in_netlab
from r2ccl.testing.netlab import Lab

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]
PLUGIN = "r2ccl_pytest"

PROGRAM = """
import numpy as np
import r2ccl

def program():
    with r2ccl.init() as comm:
        x = np.ones(100_000, np.float32)
        comm.allreduce(x)
        assert (x == comm.nranks).all()
        return len(comm.repairs())
"""


def run_tests(pytester: pytest.Pytester, tests: str, *args: str) -> pytest.RunResult:
    """Run tests with the plugin, whether or not it is installed."""
    pytester.makepyfile(PROGRAM + tests)
    pytester.syspathinsert(ROOT)
    return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", *args)


def test_a_failure_is_injected_into_a_program(pytester: pytest.Pytester) -> None:
    tests = """
def test_survives(r2ccl_ranks, r2ccl_fail_at):
    r2ccl_fail_at(rank=1, rail=0, op=0, step=1)
    assert sum(r2ccl_ranks(program, 2)) > 0
"""
    run_tests(pytester, tests).assert_outcomes(passed=1)


def test_a_failure_that_does_not_happen_fails_the_test(pytester: pytest.Pytester) -> None:
    tests = """
def test_never_reached(r2ccl_ranks, r2ccl_fail_at):
    r2ccl_fail_at(rank=1, rail=0, op=7)
    r2ccl_ranks(program, 2)

def test_never_run(r2ccl_fail_at):
    r2ccl_fail_at(rank=1, rail=0, op=0)

def test_no_such_rail(r2ccl_ranks, r2ccl_fail_at):
    r2ccl_fail_at(rank=1, rail=5, op=0)
    r2ccl_ranks(program, 2)
"""
    result = run_tests(pytester, tests)
    result.assert_outcomes(failed=2, passed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*call r2ccl_ranks after*",
            "*1 of 1 expected fault(s)*did not fire*",
            "*rail 5 does not exist; allowed is 0 to 1*",
        ]
    )


def test_a_rank_may_set_the_outcome_of_the_test(pytester: pytest.Pytester) -> None:
    tests = """
import pytest

def test_skip(r2ccl_ranks):
    r2ccl_ranks(lambda: pytest.importorskip("no_such_module"), 2)

def test_xfail(r2ccl_ranks):
    r2ccl_ranks(lambda: pytest.xfail("known"), 2)

def test_fail(r2ccl_ranks):
    with pytest.raises(pytest.fail.Exception, match="as told"):
        r2ccl_ranks(lambda: pytest.fail("as told"), 2)
"""
    run_tests(pytester, tests).assert_outcomes(skipped=1, xfailed=1, passed=1)


def test_an_assertion_in_a_rank_shows_what_it_compares(pytester: pytest.Pytester) -> None:
    tests = """
def test_wrong(r2ccl_ranks):
    def compare():
        print("compares")
        assert [1, 2] == [1, 3]
    r2ccl_ranks(compare, 1)
"""
    result = run_tests(pytester, tests, "--import-mode=importlib")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert [[]1, 2[]] == [[]1, 3[]]*", "compares"])


def test_a_netlab_is_skipped_where_there_can_be_none(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r2ccl.testing.netlab.unavailable_reason", lambda: "no veth here")
    result = run_tests(pytester, "def test_lab(r2ccl_netlab): raise AssertionError", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*no veth here"])


def test_a_program_given_as_text_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="pass a list"):
        run_in_netlab("train.py")


def test_a_lab_runs_no_program_given_as_text() -> None:
    lab = Lab.__new__(Lab)
    lab._job = None
    with pytest.raises(InvalidArgument, match="pass a list"):
        lab.start("train.py")


def test_each_run_has_the_failures_added_since_the_last(tmp_path: Path) -> None:
    injection = FaultInjection(tmp_path)
    injection(rank=0, rail=0, op=0)
    first = injection.take()
    assert first is not None
    assert injection.take() is None
    injection.require_used()
    injection(rank=1, rail=0, op=0)
    second = injection.take()
    assert second is not None
    assert second.environment() != first.environment()


def test_the_plugin_imports_nothing_of_the_library() -> None:
    code = f"import sys, {PLUGIN}; print([n for n in sys.modules if n in ('r2ccl', 'numpy')])"
    written = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert written == "[]\n"


def test_the_plugin_is_installed_under_its_own_name() -> None:
    # So that pytest loads it once, even if it is also named on the command line.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}
    assert f"{PLUGIN}.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
