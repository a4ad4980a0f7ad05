"""All kinds of calls at once, on several communicators, while rails fail."""

from __future__ import annotations

import functools

import pytest
from support import mixed_programs as programs
from support.jobs import launch
from support.slow import slow_but

#: Most growth of the ranks in the second half of their calls, in MiB; landing places are kept. All
#: come to hold as much (74 to 76 MiB after 80,000 calls), some only in the second half.
MOST_GROWTH_MIB = 12


@pytest.mark.rails
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ncalls", "nfaults", "dtypes"),
    slow_but([(60, 3, programs.QUICK)], [(60, 3, programs.QUICK), (3400, 60, programs.DTYPES)]),
    ids=lambda given: str(given) if isinstance(given, int) else f"{len(given)} types",
)
def test_any_mixture_of_calls_is_exact_and_holds_nothing(
    ncalls: int, nfaults: int, dtypes: tuple[str, ...]
) -> None:
    programs.compile_kernels(dtypes)
    run = functools.partial(programs.mixed, dtypes, ncalls, nfaults, 7)
    reports = launch(run, 4, timeout_s=540.0)
    for rank, report in enumerate(reports):
        held = "; ".join(
            f"{early} -> {late}" for early, late in zip(report.early, report.late, strict=True)
        )
        print(
            f"rank {rank}: {3 * ncalls} calls, {report.nfired} faults, {report.nrepairs} paths "
            f"moved; descriptors, threads, MiB: {held}"
        )
    assert [report.wrong for report in reports] == [[]] * 4
    assert sum(report.nfired for report in reports) >= nfaults / 2
    largest_mib = max(report.early[2] for report in reports)
    for report in reports:
        assert report.nrepairs > 0
        assert report.late[1] == report.early[1]
        assert abs(report.late[0] - report.early[0]) <= 4, "paths that are being connected again"
        assert report.late[2] <= largest_mib + MOST_GROWTH_MIB
